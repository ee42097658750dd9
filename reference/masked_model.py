"""A masked-diffusion transformer in its plainest form: one sequence, published tensor names, any dtype up to fp64.

Sources: LLaDA 8B and Dream 7B (Qwen2's layers), with the names of their tensors. It serves as an oracle for the models, caches
and decoders, so it shares no code with them. Its layers are split into parts, so that a sampler can keep what a cache would keep:

    x = embed(tokens)
    per layer:  q, k, v = qkv(i, x, positions);  x = x + attend(i, q, k, v);  x = x + feed_forward(i, x)
    logits(x)

Both families have RMS norms before attention and feed-forward, rotations of half-split pairs, grouped K and V heads, and a
SwiGLU. A linear layer is ``(out, in)``; E hidden, H heads of D, K of them for keys and values, V ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LLADA = {
    "embedding": "model.transformer.wte",
    "norm": "model.transformer.ln_f",
    "head": "model.transformer.ff_out",
    "layer": "model.transformer.blocks.",
    "attention_norm": "attn_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "out": "attn_out",
    "feed_forward_norm": "ff_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}
QWEN2 = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NAMES = {"llada": LLADA, "qwen2": QWEN2}

KeyValues = list[tuple[Tensor, Tensor]]  # k and v (S, K, D) of the rows 0 .. S - 1, for each layer


class MaskedTransformerReference:
    """The model with the weights of a flat state dict; sizes are read from their shapes.

    Args:
        weights: tensors by their published names, all of one floating dtype. A bias of q, k or v is used if it is there;
            without a head the embedding is the head too.
        heads: of the queries.
        names: "llada" or "qwen2" (Dream).
        rope_theta: base of the rotation's frequencies.
        norm_eps: added to the mean square.
        predicts: what row i predicts: "own" (token i, as LLaDA) or "next" (token i + 1, as Dream).

    >>> model = MaskedTransformerReference(random_weights("llada"), heads=4, names="llada")
    >>> tokens = torch.tensor([[4, 2, 7]])
    >>> model(tokens, torch.arange(3)[None], torch.ones(3, 3, dtype=torch.bool)).shape
    torch.Size([1, 3, 13])
    >>> model.head_dim, model.kv_heads, model.layers, model.predicts
    (4, 2, 2, 'own')
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        heads: int,
        names: str,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-6,
        predicts: str | None = None,
    ) -> None:
        self.weights, self.names, self.heads = dict(weights), NAMES[names], heads
        self.rope_theta, self.norm_eps = rope_theta, norm_eps
        self.predicts = predicts or {"llada": "own", "qwen2": "next"}[names]
        prefix = self.names["layer"]
        self.layers = 1 + max(int(name[len(prefix) :].split(".")[0]) for name in weights if name.startswith(prefix))
        embedding = self._weight("embedding")
        self.vocab_size, self.dtype = embedding.shape[0], embedding.dtype
        self.head_dim = self._weight("q", 0).shape[0] // heads
        self.kv_heads = self._weight("k", 0).shape[0] // self.head_dim
        # Norms, rotations and the softmax are computed in fp32, or in fp64 if the model is.
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Logits ``(1, T, V)`` of `tokens` ``(1, T)`` at `positions` ``(1, T)``; row i sees column j where ``mask[i, j]``."""
        x = self.embed(tokens[0])
        for layer in range(self.layers):
            q, k, v = self.qkv(layer, x, positions[0])
            x = x + self.attend(layer, q, k, v, mask)
            x = x + self.feed_forward(layer, x)
        return self.logits(x)[None]

    def recompute(self, tokens: Sequence[int], start: int, past: KeyValues) -> Tensor:
        """Logits ``(T, V)`` of `tokens` from position `start` on. In every layer their k and v replace rows
        ``start .. start + T - 1`` of `past`, or are appended to it, and then they see all of it.

        >>> model = MaskedTransformerReference(random_weights("llada"), heads=4, names="llada")
        >>> first, again = model.recompute([4, 2, 7], 0, past := model.new_past()), model.recompute([2, 7], 1, past)
        >>> torch.allclose(first[1:], again), past[0][0].shape
        (True, torch.Size([3, 2, 4]))
        """
        x, stop = self.embed(torch.tensor(list(tokens), dtype=torch.int64)), start + len(tokens)
        for layer, (keys, values) in enumerate(past):
            q, k, v = self.qkv(layer, x, torch.arange(start, stop))
            k, v = torch.cat([keys[:start], k, keys[stop:]]), torch.cat([values[:start], v, values[stop:]])
            past[layer] = k, v
            x = x + self.attend(layer, q, k, v)
            x = x + self.feed_forward(layer, x)
        return self.logits(x)

    def new_past(self) -> KeyValues:
        """Empty K and V for every layer."""
        nothing = torch.empty(0, self.kv_heads, self.head_dim, dtype=self.dtype)
        return [(nothing, nothing)] * self.layers

    def embed(self, tokens: Tensor) -> Tensor:
        """``(T, E)`` of `tokens` ``(T,)``."""
        return self._weight("embedding")[tokens]

    def qkv(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``(T, H, D)``, k and v ``(T, K, D)`` of rows of the residual stream at `positions` ``(T,)``; q and k are rotated.

        Norm, projection and rotation of a row do not depend on other rows: what a cache keeps before the rotation and
        rotates when it reads it (dLLM-Cache, Fast-dLLM), it could equally keep rotated.
        """
        x = self._norm(x, "attention_norm", layer)
        q, k, v = (self._linear(x, name, layer).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        return self._rotate(q, positions), self._rotate(k, positions), v

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """What attention adds to the residual stream of the rows q ``(T, H, D)`` over k and v ``(S, K, D)``, after the output
        projection: ``(T, E)``. The rows see everything, or what `mask` ``(T, S)`` shows."""
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        distribution = scores.to(self.wide).softmax(-1).to(v.dtype)
        return self._linear(torch.einsum("hqk,khd->qhd", distribution, v).flatten(1), "out", layer)

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream `x` ``(T, E)``."""
        x = self._norm(x, "feed_forward_norm", layer)
        gate, up = (self._linear(x, name, layer) for name in ("gate", "up"))
        return self._linear(torch.nn.functional.silu(gate) * up, "down", layer)

    def logits(self, x: Tensor) -> Tensor:
        """``(T, V)`` of the residual stream after the last layer, rows as in the model: see `predicts`."""
        head = self.weights.get(self.names["head"] + ".weight", self._weight("embedding"))
        return self._norm(x, "norm") @ head.T

    def _name(self, part: str, layer: int | None) -> str:
        return self.names[part] if layer is None else f"{self.names['layer']}{layer}.{self.names[part]}"

    def _weight(self, part: str, layer: int | None = None) -> Tensor:
        return self.weights[self._name(part, layer) + ".weight"]

    def _linear(self, x: Tensor, part: str, layer: int) -> Tensor:
        bias = self.weights.get(self._name(part, layer) + ".bias")
        y = x @ self._weight(part, layer).T
        return y if bias is None else y + bias

    def _norm(self, x: Tensor, part: str, layer: int | None = None) -> Tensor:
        """Rounded to the model's dtype before the weight, as in the published models."""
        wide = x.to(self.wide)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm_eps)
        return wide.to(x.dtype) * self._weight(part, layer)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Component i and component i + D / 2 turn by ``position * theta ** (-2 i / D)``."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64)
        angle = positions[:, None, None].double() * self.rope_theta ** (-pairs / self.head_dim)
        cos, sin = angle.cos().to(self.wide), angle.sin().to(self.wide)
        a, b = x.to(self.wide).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def random_weights(
    names: str,
    *,
    vocab_size: int = 13,
    hidden_size: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate_size: int = 24,
    layers: int = 2,
    bias: bool | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """An fp64 state dict with the published names: an untrained model in which every part affects the result.

    Args:
        names: "llada" or "qwen2".
        bias: of q, k and v; None: as in the published models, only for Qwen2.
    """
    generator = torch.Generator().manual_seed(seed)
    part, width = NAMES[names], hidden_size
    kv_size = width // heads * kv_heads

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * std

    weights = {
        part["embedding"]: normal(vocab_size, width),
        part["norm"]: 1 + normal(width, std=0.2),
        part["head"]: normal(vocab_size, width, std=1.5 * width**-0.5),
    }
    biases = {}
    for layer in range(layers):
        name = {key: f"{part['layer']}{layer}.{value}" for key, value in part.items()}
        weights |= {name[key]: 1 + normal(width, std=0.2) for key in ("attention_norm", "feed_forward_norm")}
        for key, rows, columns in (
            ("q", width, width),
            ("k", kv_size, width),
            ("v", kv_size, width),
            ("out", width, width),
            ("gate", intermediate_size, width),
            ("up", intermediate_size, width),
            ("down", width, intermediate_size),
        ):
            gain = {"q": 2.0, "k": 2.0, "out": 2.0, "down": 2.0}.get(key, 1.0)
            weights[name[key]] = normal(rows, columns, std=gain * columns**-0.5)
            if key in "qkv" and (names == "qwen2" if bias is None else bias):
                biases[name[key] + ".bias"] = normal(rows, std=0.5)
    return {f"{key}.weight": value for key, value in weights.items()} | biases
