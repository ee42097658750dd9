"""A small model with the interface of LLaDA2's remote code: a mixture of experts whose layers pass on the mask and no other arguments.

Written from the published configuration and the interface: q, k and v in one matrix, norms of the heads of q and k, rotations of half
of each head, a router with sigmoid scores in groups, experts with a shared one, and attention looked up by name in each forward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MASK, END = 60, 59


class Llada2Config(PretrainedConfig):
    model_type = "llada2_moe"

    def __init__(self, fixed_attention: bool = False, **more: Any) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = 61, 32, 3
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = 4, 2, 16
        self.intermediate_size, self.moe_intermediate_size = 48, 16
        self.num_experts, self.num_experts_per_tok, self.n_group, self.topk_group = 8, 3, 4, 2
        self.num_shared_experts, self.first_k_dense_replace, self.routed_scaling_factor = 1, 1, 2.5
        self.rope_theta, self.partial_rotary_factor, self.rms_norm_eps = 6e5, 0.5, 1e-6
        self.max_position_embeddings, self.fixed_attention = 256, fixed_attention
        self.expert_capacity, self.block_size = 0, 32
        super().__init__(eos_token_id=END, pad_token_id=END, tie_word_embeddings=False, **more)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Dense(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.weight = config, nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.linspace(-0.05, 0.05, config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """The weight of every expert for rows x ``(T, hidden_size)``, 0 for those that are not chosen."""
        c, scores = self.config, torch.sigmoid(x @ self.weight.T)
        if c.expert_capacity:
            return self.of_blocks(scores)
        groups = (scores + self.expert_bias).unflatten(-1, (c.n_group, -1))
        best = groups.topk(2).values.sum(-1).topk(c.topk_group).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        chosen = groups.masked_fill(outside[..., None], -torch.inf).flatten(-2).topk(c.num_experts_per_tok).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * c.routed_scaling_factor
        return torch.zeros_like(scores).scatter(-1, chosen, weights)

    def of_blocks(self, scores: Tensor) -> Tensor:
        """The same for LLaDA2.2, whose blocks of rows share experts, by the words of FluxServe's guide: a block's score of an
        expert is the largest of ``sigmoid(logits) + bias`` over its rows; the best `expert_capacity` are allowed; a row takes
        its best ones among those, with weights of the scores without the bias."""
        c, found = self.config, torch.zeros_like(scores)
        for rows, own in zip(scores.split(c.block_size, -2), found.split(c.block_size, -2), strict=True):
            for text, weights in zip(rows, own, strict=True):
                ranked = [[float(a + b) for a, b in zip(row, self.expert_bias, strict=True)] for row in text]
                best = [max(row[i] for row in ranked) for i in range(c.num_experts)]
                allowed = sorted(range(c.num_experts), key=lambda i: -best[i])[: c.expert_capacity]
                for row, order, weight in zip(text, ranked, weights, strict=True):
                    chosen = sorted(allowed, key=lambda i: -order[i])[: c.num_experts_per_tok]
                    weight[chosen] = row[chosen] / row[chosen].sum() * c.routed_scaling_factor
        return found


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        sizes = config.hidden_size, config.moe_intermediate_size
        self.gate, self.shared_experts = Gate(config), Dense(*sizes)
        self.experts = nn.ModuleList(Dense(*sizes) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.gate(x)
        y = sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        return y + self.shared_experts(x), weights


def plain_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    return ((scores if mask is None else scores + mask).softmax(-1) @ v).transpose(1, 2), None


class Llada2Attention(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, False
        self.sizes = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        self.query_key_value = nn.Linear(config.hidden_size, sum(self.sizes) * config.head_dim, bias=False)
        self.query_layernorm = Norm(config.head_dim, config.rms_norm_eps)
        self.key_layernorm = Norm(config.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, attention_mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor]) -> Any:
        rows = self.query_key_value(x).unflatten(-1, (-1, self.config.head_dim))
        q, k, v = (part.transpose(1, 2) for part in rows.split(self.sizes, 2))
        q, k = (turned(y, *position_embeddings) for y in (self.query_layernorm(q), self.key_layernorm(k)))
        named = self.config._attn_implementation
        ours = plain_attention if named == "eager" or self.config.fixed_attention else ALL_ATTENTION_FUNCTIONS[named]
        y, weights = ours(self, q, k, v, attention_mask, dropout=0.0, scaling=self.config.head_dim**-0.5)
        return self.dense(y.flatten(2)), weights, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    a, b = part.chunk(2, -1)
    return torch.cat([part * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None], rest], -1)


class Llada2Layer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.attention = Llada2Attention(config, layer_idx)
        dense = layer_idx < config.first_k_dense_replace
        self.mlp = Dense(width, config.intermediate_size) if dense else Experts(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)

    def forward(self, x: Tensor, attention_mask: Tensor | None, position_embeddings: Any, **dropped: Any) -> Any:
        x = x + self.attention(self.input_layernorm(x), attention_mask, position_embeddings)[0]
        y = self.mlp(self.post_attention_layernorm(x))
        return (x + (y[0] if isinstance(y, tuple) else y),)


class Llada2PreTrained(PreTrainedModel):
    config_class = Llada2Config
    base_model_prefix = "model"
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        pass


class Llada2Model(Llada2PreTrained):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Llada2Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        x, config = self.word_embeddings(input_ids), self.config
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        mask = create_bidirectional_mask(config=config, inputs_embeds=x, attention_mask=attention_mask)
        turned = int(config.head_dim * config.partial_rotary_factor)
        frequencies = config.rope_theta ** (-torch.arange(0, turned, 2, device=x.device) / turned)
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        for layer in self.layers:
            (x,) = layer(x, attention_mask=mask, position_embeddings=(angles.cos(), angles.sin()), use_cache=use_cache)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(x))


class Llada2ForDiffusion(Llada2PreTrained, GenerationMixin):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Llada2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **arguments: Any) -> MoeCausalLMOutputWithPast:
        hidden = self.model(input_ids, **arguments)[0]
        return MoeCausalLMOutputWithPast(logits=self.lm_head(hidden).float())


def random_llada2(seed: int = 0, **fields: Any) -> Llada2ForDiffusion:
    torch.manual_seed(seed)
    model = Llada2ForDiffusion(Llada2Config(attn_implementation="eager", **fields)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=1.5 / math.sqrt(parameter.shape[1]))
        else:
            parameter.normal_(mean=1.0, std=0.2)
    return model
