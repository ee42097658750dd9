"""LLaDA2 from a folder: the logits and the sampler's tokens of the published interface."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import pdkernels as pd
from pdkernels import models
from pdkernels.decoding import available, generate, supports
from pdkernels.models.architectures.config import ExpertsConfig
from pdkernels.models.architectures.experts import Pools, chosen_by_sigmoid
from pdkernels.models.architectures.rope import PartialRotation
from pdkernels.ops.quantized_weight import QuantizedWeight

pytest.importorskip("transformers", reason="needs create_bidirectional_mask", minversion="5")
from tests.support.block_sampler import block_sampler
from tests.support.llada2 import END, MASK, random_llada2

BLOCK = 32
FIELDS = {
    "model_type": "llada2_moe",
    "architectures": ["LLaDA2MoeModelLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rope_theta": 600000.0,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "norm_head": False,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "use_sliding_window": False,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "eos_token_id": END,
}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


POOLS = {"expert_capacity": 4, "block_size": BLOCK}  # LLaDA2.2's


@cache
def published(**fields: Any) -> Any:
    return random_llada2(**fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("llada2"))


def write(folder: Path, **fields: Any) -> Path:
    state = {name: tensor.contiguous() for name, tensor in published().state_dict().items()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**FIELDS, **fields}))
    return folder


def plain(tokens: list[int], visible: Tensor, **fields: Any) -> Tensor:
    mask, positions = torch.where(visible, 0.0, -torch.inf)[None, None], torch.arange(len(tokens))[None]
    with torch.no_grad():
        logits: Tensor = published(**fields)(
            torch.tensor([tokens]), attention_mask=mask, position_ids=positions
        ).logits[0]
    return logits


def test_logits_under_its_mask(folder: Path) -> None:
    tokens = (torch.arange(70)[None] * 7 + 3) % 59
    mask = pd.masks.block_causal(70, BLOCK)
    expected = plain(tokens[0].tolist(), mask.dense())
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            model = models.load(folder, dtype=dtype)
            torch.testing.assert_close(model(tokens, mask=mask.dense())[0].float(), expected, rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(
            models.load(folder, dtype=torch.float32)(tokens, mask=mask.plan())[0], expected, rtol=1e-4, atol=2e-4
        )


@pytest.mark.parametrize(("threshold", "steps"), [(0.95, 32), (0.2, 32), (0.95, 6)])
def test_tokens_of_the_published_sampler(threshold: float, steps: int, folder: Path) -> None:
    prompts = [list(range(1, 1 + n)) for n in (5, 32, 45)]
    model, options = models.load(folder, dtype=torch.float32), {"threshold": threshold, "steps": steps}
    sizes = {"block_size": BLOCK, "small_block_size": BLOCK}
    result = generate(model, prompts, "fast_dllm_v2", max_new_tokens=59, end_tokens=(), **sizes, **options)
    for prompt, tokens in zip(prompts, result.tokens, strict=True):
        whole = (len(prompt) + 59) // BLOCK * BLOCK - len(prompt)
        expected = block_sampler(plain, prompt, whole, MASK, BLOCK, steps, threshold)
        assert tokens[:whole].tolist() == expected.tokens


def test_blocks_that_share_experts(tmp_path: Path) -> None:
    """LLaDA2.2: logits of whole blocks, and the sampler's tokens on a cache, alone and in a batch."""
    model = models.load(write(tmp_path, **POOLS), dtype=torch.float32)
    config = model.config.experts
    assert (config.pool, config.pool_rows, config.groups) == (4, BLOCK, 1)
    tokens, mask = (torch.arange(128).view(2, 64) * 7 + 3) % 59, pd.masks.block_causal(64, BLOCK)
    expected = torch.stack([plain(text, mask.dense(), **POOLS) for text in tokens.tolist()])
    assert not torch.allclose(expected[0], plain(tokens[0].tolist(), mask.dense()), atol=0.1)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, mask=mask.plan()), expected, rtol=1e-4, atol=2e-4)
        cache = model.new_cache(batch=2, capacity=64)
        both = [model(tokens[:, :32], cache=cache, mask=pd.masks.full(32).plan())]
        cache.commit_(torch.tensor([32, 32]))
        both.append(
            model.logits(model.recompute(tokens[:, 32:], cache, torch.tensor([32, 32]), visible=torch.tensor([64, 64])))
        )
        torch.testing.assert_close(torch.cat(both, 1), expected, rtol=1e-4, atol=2e-4)
    prompts = [list(range(1, 1 + n)) for n in (5, 32, 45)]
    for sizes in ({"small_block_size": BLOCK}, {"small_block_size": 16, "block_cache": False}):
        options: dict[str, Any] = {"block_size": BLOCK, "threshold": 0.2, "end_tokens": (), **sizes}
        for prompt in prompts:
            whole = 96 - len(prompt)
            alone = generate(model, prompt, "fast_dllm_v2", max_new_tokens=whole, **options)
            if sizes["small_block_size"] == BLOCK:
                forward = partial(plain, **POOLS)
                assert alone.tokens.tolist() == block_sampler(forward, prompt, whole, MASK, BLOCK, BLOCK, 0.2).tokens
        together = generate(model, prompts, "fast_dllm_v2", max_new_tokens=51, **options)
        for prompt, tokens in zip(prompts, together.tokens, strict=True):
            assert tokens.equal(generate(model, prompt, "fast_dllm_v2", max_new_tokens=51, **options).tokens)
    for sizes, words in (
        ({"block_size": 16, "small_block_size": 16}, "block_size must be a multiple of 32, whose rows share experts"),
        ({"block_size": 32, "small_block_size": 8}, "small_block_size must be block_size for a model whose blocks"),
    ):
        with pytest.raises(ValueError, match=words):
            generate(model, [1], "fast_dllm_v2", max_new_tokens=9, **sizes)
    with pytest.raises(NotImplementedError, match="no key for experts that a block of rows shares"):
        models.save_gguf(model, tmp_path / "model.gguf")


def test_pools_of_experts() -> None:
    """By the words of the public guide, row by row; padding has a pool of its own."""
    draw = torch.Generator().manual_seed(0)
    for per_token, size, rows in ((3, 4, 4), (1, 1, 8), (8, 8, 2), (2, 16, 8)):
        experts = ExpertsConfig(16, per_token, 8, scores="sigmoid", biased=True, pool=size, pool_rows=rows, scale=2.5)
        logits, bias = torch.randn(24, 16, generator=draw), 0.2 * torch.randn(16, generator=draw)
        positions, valid = torch.arange(12).repeat(2, 1) + torch.tensor([[0], [5]]), torch.ones(2, 12, dtype=torch.bool)
        valid[1, 9:] = False
        weights, ids = chosen_by_sigmoid(logits, bias, experts, Pools.of(positions, valid, rows))
        for row in range(21):
            ranked = logits.sigmoid() + bias
            block = (row // 12, int(positions.flatten()[row]) // rows)
            others = [n for n in range(21) if (n // 12, int(positions.flatten()[n]) // rows) == block]
            allowed = ranked[others].amax(0).argsort(descending=True)[:size].tolist()
            expected = sorted(allowed, key=lambda i: -float(ranked[row, i]))[:per_token]
            assert ids[row].tolist() == expected
            shares = logits[row].sigmoid()[expected]
            torch.testing.assert_close(weights[row], (shares / shares.sum() if per_token > 1 else shares) * 2.5)


def test_what_a_folder_says_of_it(folder: Path, tmp_path: Path) -> None:
    model = models.load(folder)
    config = model.config
    assert (config.attention, config.predicts, model.mask_token, model.end_tokens) == ("causal", "own", MASK, (END,))
    assert config.rope_scaling == PartialRotation(8)
    assert [config.has_experts(layer) for layer in range(3)] == [False, True, True]
    assert [name for name in available() if supports(name, model)] == ["fast_dllm_v2"]
    with pytest.raises(ValueError, match=r"mask_token_id must be an id below vocab_size \(61\), got 156895"):
        models.load(write(tmp_path, mask_token_id=None))


def on_cache(model: Any, tokens: Tensor, rows: int) -> Tensor:
    """Logits of `tokens`, so many rows a forward."""
    cache, found = model.new_cache(batch=len(tokens), capacity=64), []
    for chunk in tokens.split(rows, 1):
        found.append(model(chunk, cache=cache))
        cache.commit_(torch.full((len(tokens),), chunk.shape[1]))
    return torch.cat(found, 1)


def test_rows_keep_their_bits_and_matrices_may_be_packed(folder: Path) -> None:
    tokens = (torch.arange(66).view(2, 33) * 5 + 1) % 59
    numbers = models.load(folder, dtype=torch.bfloat16)
    packed = pd.quantize(numbers, "int8")
    layer = packed.layers[1]
    assert all(isinstance(getattr(layer, name), QuantizedWeight) for name in ("experts_down", "shared_gate_up"))
    for model in (numbers, packed):
        with torch.inference_mode():
            assert torch.equal(on_cache(model, tokens[1:], 5), on_cache(model, tokens, 33)[1:])


@pytest.mark.parametrize(
    "fields, error, text",
    [
        ({"use_bias": None}, NotImplementedError, "use_bias must be False, got True"),
        ({"use_qkv_bias": True}, NotImplementedError, "use_qkv_bias must be False, got True"),
        ({"use_qk_norm": None}, NotImplementedError, "use_qk_norm must be True, got False"),
        ({"norm_head": True}, NotImplementedError, "norm_head must be False, got True"),
        ({"score_function": "softmax"}, NotImplementedError, "score_function must be 'sigmoid', got 'softmax'"),
        ({"norm_topk_prob": False}, NotImplementedError, "norm_topk_prob must be True, got False"),
        ({"num_nextn_predict_layers": 1}, NotImplementedError, "num_nextn_predict_layers must be 0, got 1"),
        ({"rope_scaling": {"type": "yarn"}}, NotImplementedError, "rope_scaling must be None"),
        (
            {"rope_parameters": {"rope_theta": 5.0}},
            NotImplementedError,
            "'rope_theta' must be 600000.0, as outside, got 5.0",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}}, NotImplementedError, "must be 0.5, as outside, got 1.0"),
        ({"rotary_dim": 12}, NotImplementedError, "partial_rotary_factor must rotate an even part of 16 components"),
        ({"quantization_config": AWQ}, NotImplementedError, "quantization_config must be absent"),
        ({"expert_capacity": 9, "block_size": 32}, ValueError, "pool must be 0, or hold 3 of 8 experts"),
        ({"expert_capacity": 4}, ValueError, "must hold 'block_size'"),
        ({"n_group": 3}, ValueError, "config.json: groups must divide count (8) into groups of at least 2 experts"),
        ({"topk_group": 1}, ValueError, "chosen_groups must hold 3 experts, 2 each"),
        (
            {"first_k_dense_replace": 4},
            ValueError,
            "first_k_dense_replace must be at most num_hidden_layers (3), got 4",
        ),
        ({"first_k_dense_replace": 0}, ValueError, "got none called model.layers.0.mlp.gate.weight"),
        ({"num_shared_experts": 0}, ValueError, "also model.layers.1.mlp.shared_experts.down_proj.weight"),
        ({"num_experts": 2**30}, ValueError, f"for {2**30} experts"),
    ],
    ids=str,
)
def test_what_is_not_followed_is_refused(fields: Any, error: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        models.load(write(tmp_path, **fields))
    assert text in str(caught.value) and type(caught.value) is error


def test_a_null_is_no_pool(tmp_path: Path) -> None:
    assert models.load(write(tmp_path, expert_capacity=None)).config.experts.pool == 0


def test_experts_of_blocks_are_not_wrapped() -> None:
    transformers = pytest.importorskip("transformers")
    from pdkernels.integrations.transformers import wrap

    sizes = {
        "vocab_size": 20,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, expert_capacity=4))
    with pytest.raises(NotImplementedError, match="choose the experts of each row by itself"):
        wrap(model, mask_token=19, predicts="own")


def test_the_choice_of_experts() -> None:
    """By the words of the published gate, row by row."""
    draw = torch.Generator().manual_seed(0)
    for groups, chosen, per_token in ((4, 2, 3), (2, 1, 4), (1, 1, 5), (8, 8, 8)):
        experts = ExpertsConfig(
            16, per_token, 8, scores="sigmoid", biased=True, groups=groups, chosen_groups=chosen, scale=2.5
        )
        logits, bias = torch.randn(40, 16, generator=draw), 0.2 * torch.randn(16, generator=draw)
        weights, ids = chosen_by_sigmoid(logits, bias, experts)
        for row in range(40):
            scores = logits[row].sigmoid()
            ranked, size = (scores + bias).tolist(), 16 // groups
            best = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
            kept = sorted(range(groups), key=lambda g: -best[g])[:chosen] if groups > 1 else range(groups)
            among = [i for g in kept for i in range(g * size, (g + 1) * size)]
            expected = sorted(among, key=lambda i: -ranked[i])[:per_token]
            assert ids[row].tolist() == expected
            shares = scores[expected] / scores[expected].sum() * 2.5
            torch.testing.assert_close(weights[row], shares)


def test_an_adapter_of_queries_is_refused(folder: Path, tmp_path: Path) -> None:
    """Their components have another order; those of other matrices are merged."""
    plain = models.load(folder, dtype=torch.float32)
    for module, rows in (("query_key_value", 128), ("dense", 32)):
        halves = {"A": torch.randn(2, 64 if module == "dense" else 32), "B": torch.randn(rows, 2)}
        name = f"base_model.model.model.layers.1.attention.{module}.lora_"
        save_file({f"{name}{half}.weight": x for half, x in halves.items()}, tmp_path / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [module]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        if module == "dense":
            own = models.load(folder, dtype=torch.float32, adapter=tmp_path)
            expected = plain.layers[1].output + halves["B"] @ halves["A"]
            torch.testing.assert_close(own.layers[1].output.data, expected.data)
        else:
            with pytest.raises(
                NotImplementedError, match="the same order here, got one that changes .*query_key_value"
            ):
                models.load(folder, adapter=tmp_path)


def test_other_names_have_another_order(folder: Path) -> None:
    """Tensors with the names of Hugging Face would lose experts for every row, and rotate other components."""
    model = models.load(folder, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="be one whose tensors are parts of ours, got LLaDA2"):
        models.to_hf_state_dict(model.state_dict(), model.config)
    config = models.TransformerConfig(vocab_size=9, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=8, rope_style="interleaved")  # fmt: skip
    with pytest.raises(NotImplementedError, match="got a rotation of adjacent components"):
        models.to_hf_state_dict(models.Transformer(config).state_dict(), config)
