from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import pdkernels as pd
from pdkernels.models import (
    Llama3Scaling,
    Transformer,
    TransformerConfig,
    Window,
    YarnScaling,
    from_hf_config,
    from_hf_state_dict,
)
from pdkernels.models.architectures import transformer
from pdkernels.models.architectures.attention import cached_visibility
from pdkernels.models.architectures.fused import rms_norm
from pdkernels.models.architectures.rope import apply_rope, rope_tables
from tests.support.checkpoints import CHECKPOINTS, QWEN2, plain_logits, random_checkpoint, rotate_pairs
from tests.support.errors import kind_of

CONFIG = TransformerConfig(
    vocab_size=13,
    hidden_size=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=20,
    qkv_bias=True,
    max_positions=16,
)
VARIANTS = {
    "gqa": CONFIG,
    "mha interleaved untied": replace(CONFIG, kv_heads=4, rope_style="interleaved", tied_head=False),
    "mqa": replace(CONFIG, kv_heads=1, qkv_bias=False),
    "yarn": replace(CONFIG, rope_scaling=YarnScaling(4.0, 4, 1.0, 0.1, 1.1, query_beta=0.3)),
    "llama 3": replace(CONFIG, rope_theta=100.0, rope_scaling=Llama3Scaling(8.0, 16, 1.0, 2.0)),
    "qk norm": replace(CONFIG, qk_norm=True, qkv_bias=False),
}


def build(config: TransformerConfig = CONFIG, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    """A model whose weights are large enough for every part of it to matter."""
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.3 * noise)
    return model.to(dtype).requires_grad_(False)


def load_plain(fields: dict[str, Any], **changes: Any) -> tuple[Transformer, dict[str, torch.Tensor]]:
    state = random_checkpoint(fields)
    config = replace(from_hf_config(fields), **changes)
    model = Transformer(config).double().requires_grad_(False)
    model.load_state_dict(from_hf_state_dict(state, config))
    return model, state


def random_tokens(batch: int, length: int, vocab: int = CONFIG.vocab_size, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ---- the mathematics


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_equals_the_plain_transcription(name: str, style: str) -> None:
    fields = CHECKPOINTS[name]
    model, state = load_plain(fields, rope_style=style)
    tokens = random_tokens(1, 19, fields["vocab_size"])
    expected = plain_logits(state, fields, tokens[0].tolist(), interleaved=style == "interleaved")
    close(model(tokens)[0], expected)
    close(model(tokens.int())[0], expected)


def test_explicit_mask_and_positions_equal_the_plain_transcription() -> None:
    model, state = load_plain(QWEN2)
    tokens = random_tokens(2, 6, 23)
    positions = torch.tensor([[0, 1, 2, 3, 2, 3], [5, 9, 9, 0, 300, 1]])
    masks = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    masks |= torch.eye(6, dtype=torch.bool)
    logits = model(tokens, positions=positions, mask=masks)
    for row in range(2):
        close(
            logits[row],
            plain_logits(
                state, QWEN2, tokens[row].tolist(), positions=positions[row].tolist(), visible=masks[row].tolist()
            ),
        )
    close(model(tokens, mask=masks[0]), model(tokens, mask=masks[:1].expand(2, -1, -1)))
    close(model(tokens, positions=positions[0]), model(tokens, positions=positions[:1].expand(2, -1)))
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    close(model(tokens, mask=causal), model(tokens))


def test_a_row_that_sees_nothing_attends_to_zeros() -> None:
    model, mask = build(), torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    logits = model(random_tokens(1, 4), mask=mask)
    assert logits.isfinite().all()
    close(logits[:, :2], model(random_tokens(1, 4))[:, :2])


def test_only_distances_matter_to_rope() -> None:
    model, tokens = build(), random_tokens(2, 7)
    close(model(tokens, positions=torch.arange(7) + 40), model(tokens), 1e-9)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rotation_is_rounded_once(style: str, dtype: torch.dtype) -> None:
    x = torch.randn(1, 9, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    table = rope_tables(12, 16, theta=1e4, style=style, dtype=wide)
    actual = apply_rope(x, table.span(3, 9), style)
    assert actual.dtype == dtype
    expected = torch.stack(
        [rotate_pairs(x[0, :, head].double(), list(range(3, 12)), {}, style == "interleaved") for head in range(2)], 1
    )
    rounding = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(wide).eps
    assert ((actual[0].double() - expected).abs() <= rounding * 2 * x.abs().max()).all()
    if dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(actual, apply_rope(x.float(), table.span(3, 9), style).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_norm_statistics_are_wide_and_the_weight_comes_after_the_cast(dtype: torch.dtype) -> None:
    weight = (torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)
    x = (torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 300).to(dtype)
    wide = x.to(torch.float64 if dtype == torch.float64 else torch.float32)
    expected = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    model, tokens = build(dtype=dtype), random_tokens(2, 9)
    logits = model(tokens)
    assert logits.dtype == dtype and model.dtype == dtype
    expected = build(dtype=dtype).double()(tokens)
    error = (logits.double() - expected).abs().max() / expected.abs().max()
    assert error < 40 * torch.finfo(dtype).eps
    cache = model.new_cache(2, 9)
    assert cache.k.dtype == dtype
    torch.testing.assert_close(model(tokens, cache=cache), logits, rtol=0, atol=float(8 * torch.finfo(dtype).eps * 8))


# ---- on a cache


def drive(
    model: Transformer,
    tokens: torch.Tensor,
    lengths: list[int],
    steps: list[list[int]],
    kind: str,
    page_size: int,
    slack: int,
) -> None:
    """Feed row b of `tokens` in pieces of `steps[s][b]`, and compare every valid row with the full forward."""
    batch = len(lengths)
    cache = model.new_cache(batch, max(lengths) + slack, kind=kind, page_size=page_size)
    if kind == "paged":
        cache.reserve_(lengths)
    expected = model(tokens)
    done = [0] * batch
    for step in steps:
        counts = [min(n, length - at) for n, length, at in zip(step, lengths, done, strict=True)]
        width = max(1, *counts)
        piece = torch.zeros(batch, width, dtype=torch.int64)
        for b, n in enumerate(counts):
            piece[b, :n] = tokens[b, done[b] : done[b] + n]
        before = cache.lengths.clone()
        full = all(n == width for n in counts)
        logits = model(piece, cache=cache, counts=None if full else torch.tensor(counts))
        assert torch.equal(cache.lengths, before)
        for b, n in enumerate(counts):
            close(logits[b, :n], expected[b, done[b] : done[b] + n])
        if not full:
            piece = torch.where(torch.arange(width) < torch.tensor(counts)[:, None], piece, 7)
            again = model(piece, cache=cache, counts=torch.tensor(counts))
            for b, n in enumerate(counts):
                assert torch.equal(again[b, :n], logits[b, :n])
        cache.commit_(torch.tensor(counts))
        done = [at + n for at, n in zip(done, counts, strict=True)]


MODELS = {name: build(config) for name, config in VARIANTS.items()}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_chunking_on_any_cache_equals_the_full_forward(data: st.DataObject) -> None:
    model = MODELS[data.draw(st.sampled_from(sorted(VARIANTS)))]
    batch = data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 11), min_size=batch, max_size=batch))
    sizes = st.lists(st.integers(0, 5), min_size=batch, max_size=batch)
    steps = [*data.draw(st.lists(sizes, max_size=5)), lengths]
    drive(
        model,
        random_tokens(batch, max(lengths), seed=data.draw(st.integers(0, 99))),
        lengths,
        steps,
        data.draw(st.sampled_from(["contiguous", "paged"])),
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(0, 3)),
    )


def test_the_mask_of_a_device_that_the_host_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, counts = build(), random_tokens(2, 9), torch.tensor([2, 4])
    logits = []
    for host_reads in (True, False):
        if not host_reads:
            monkeypatch.setattr(
                transformer, "cached_visibility", lambda cache, lengths, *rest: cached_visibility(cache, None, *rest)
            )
        cache = model.new_cache(2, 11)
        logits.append(model(tokens[:, :5], cache=cache))
        cache.commit_(torch.tensor([5, 3]))
        logits.append(model(tokens[:, 5:], cache=cache, counts=counts)[:, :2])
    close(logits[2], logits[0])
    close(logits[3], logits[1])


def test_rows_past_the_lengths_do_not_matter() -> None:
    model, tokens = build(), random_tokens(2, 8)
    logits = []
    for junk in (0.0, 1e4):
        cache = model.new_cache(2, 12)
        cache.k.fill_(junk)
        cache.v.fill_(junk)
        model(tokens[:, :5], cache=cache)
        cache.commit_(torch.tensor([5, 3]))
        counts = torch.tensor([3, 2])
        logits.append(model(tokens[:, 5:], cache=cache, counts=counts))
    for b, n in enumerate((3, 2)):
        assert torch.equal(logits[0][b, :n], logits[1][b, :n])


def test_partial_acceptance_is_as_if_the_rest_had_never_been() -> None:
    model, tokens = build(), random_tokens(1, 9)
    cache = model.new_cache(1, 9)
    model(tokens[:, :4], cache=cache)
    cache.commit_(torch.tensor([4]))
    model(torch.full((1, 5), 12), cache=cache)
    cache.commit_(torch.tensor([0]))
    model(torch.cat((tokens[:, 4:6], tokens[:, :1]), 1), cache=cache)
    cache.commit_(torch.tensor([2]))
    close(model(tokens[:, 6:], cache=cache), model(tokens)[:, 6:])


def test_an_inactive_sequence_gives_finite_logits_and_stays_empty() -> None:
    model = build()
    cache = model.new_cache(2, 4)
    counts = torch.tensor([0, 0])
    assert model(random_tokens(2, 3), cache=cache, counts=counts).isfinite().all()
    assert not cache.k.any() and not cache.v.any()


def test_empty_inputs() -> None:
    model = build()
    assert model(random_tokens(2, 0)).shape == (2, 0, 13)
    assert model(random_tokens(0, 3)).shape == (0, 3, 13)
    assert model(random_tokens(2, 0), cache=model.new_cache(2, 4)).shape == (2, 0, 13)


def test_a_cache_longer_than_the_trained_positions() -> None:
    model, tokens = build(), random_tokens(1, 40)
    cache = model.new_cache(1, 40)
    model(tokens[:, :39], cache=cache)
    cache.commit_(torch.tensor([39]))
    close(model(tokens[:, 39:], cache=cache), model(tokens)[:, 39:])


# ---- rows, gradients, compilation


def test_rows_choose_logits() -> None:
    model, tokens = build(), random_tokens(3, 6)
    logits = model(tokens)
    close(model(tokens, rows=[0, -1, 2]), logits[:, [0, 5, 2]])
    close(model(tokens, rows=slice(-2, None)), logits[:, -2:])
    close(model(tokens, rows=torch.tensor([4, 4], dtype=torch.int32)), logits[:, [4, 4]])
    each = torch.tensor([[0, 1], [5, 2], [3, 3]])
    expected = torch.stack([logits[b, each[b]] for b in range(3)])
    close(model(tokens, rows=each), expected)
    close(model(tokens, rows=each.int(), cache=model.new_cache(3, 6)), expected)
    assert model(tokens, rows=[]).shape == (3, 0, 13)


def test_every_parameter_learns() -> None:
    for config in VARIANTS.values():
        model = build(config).requires_grad_(True)
        model(random_tokens(2, 5)).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_training_attention_equals_the_other() -> None:
    for config in VARIANTS.values():
        model, tokens = build(config), random_tokens(2, 6)
        logits = model(tokens)
        close(model.requires_grad_(True)(tokens), logits)


def test_inference_first_and_training_later() -> None:
    model = build().requires_grad_(True)
    with torch.inference_mode():
        model(random_tokens(1, 3), cache=model.new_cache(1, 3))
    model(random_tokens(1, 3)).sum().backward()
    assert not model(random_tokens(1, 3), cache=model.new_cache(1, 3)).requires_grad


@pytest.mark.parametrize("name", ["tiny-code", "tiny-hybrid", "tiny-recurrent"])
def test_autocast_is_refused_on_a_cache(name: str) -> None:
    """Decoders leave it by themselves."""
    model, tokens = pd.models.load(name), torch.tensor([[1, 2, 3]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens).shape == (1, 3, model.config.vocab_size)
        with pytest.raises(TypeError, match=r"and autocast changes it\. Call it under torch\.autocast\("):
            model(tokens, cache=model.new_cache(1, 8))
        assert len(pd.decoding.generate(model, [1, 2], max_new_tokens=2, end_tokens=()).tokens) == 2
        narrow = pd.models.load(name, dtype=torch.bfloat16)
        assert narrow(tokens, cache=narrow.new_cache(1, 8)).shape == (1, 3, model.config.vocab_size)


def test_layers_with_windows_train_after_inference() -> None:
    model = build(replace(CONFIG, head_dim=16, windows=(Window(2), None)), torch.float32).requires_grad_(True)
    with torch.inference_mode():
        model(random_tokens(1, 67))
    model(random_tokens(1, 67)).sum().backward()


@pytest.mark.parametrize("used", [False, True])
def test_an_exported_model_leaves_the_model_as_it_was(used: bool) -> None:
    """Its tables are not those of the export, whose tensors have no values."""
    model, tokens = build(), random_tokens(2, 5)
    if used:
        model(tokens)
    lengths = {1: torch.export.Dim("length", min=2, max=16)}
    exported = torch.export.export(model, (tokens,), dynamic_shapes=(lengths,), strict=False).module()
    for length in (5, 9):
        close(model(random_tokens(2, length)), build()(random_tokens(2, length)))
        close(exported(random_tokens(2, length)), model(random_tokens(2, length)))


def test_a_model_without_memory_has_shapes() -> None:
    with torch.device("meta"):
        model, tokens = Transformer(CONFIG), torch.zeros(2, 5, dtype=torch.int64)
    cached = model(tokens, cache=model.new_cache(2, 8))
    assert cached.shape == model(tokens).shape == (2, 5, CONFIG.vocab_size) and cached.is_meta


def test_a_model_of_fake_tensors() -> None:
    model = build()
    with FakeTensorMode(), torch.device("cpu"):
        assert Transformer(CONFIG)(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, CONFIG.vocab_size)
    close(model(random_tokens(2, 5)), build()(random_tokens(2, 5)))


def test_the_full_forward_compiles_to_one_graph() -> None:
    model = build()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for length in (3, 8, 5):
        close(compiled(random_tokens(2, length)), model(random_tokens(2, length)))


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model, tokens = Transformer(CONFIG), random_tokens(4, 32)
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), random_tokens(4, 32, seed=1).flatten())
    assert abs(loss.item() - math.log(13)) < 0.1


# ---- errors


@pytest.mark.parametrize(
    "message, changes",
    {
        "pdkernels.TransformerConfig: layers must be at least 1, got 0.": {"layers": 0},
        "TypeError: pdkernels.TransformerConfig: heads must be an int, got float.": {"heads": 4.0},
        "pdkernels.TransformerConfig: kv_heads must divide heads (4), got 3.": {"kv_heads": 3},
        "pdkernels.TransformerConfig: head_dim must be even (RoPE rotates pairs), got 7.": {"head_dim": 7},
        "pdkernels.TransformerConfig: rope_style must be 'half' or 'interleaved', got 'neox'.": {"rope_style": "neox"},
        "pdkernels.TransformerConfig: rope_theta must be positive, got 0.0.": {"rope_theta": 0.0},
        "TypeError: pdkernels.TransformerConfig: rope_scaling must be a RopeScaling or None, got dict.": {
            "rope_scaling": {"factor": 2.0}
        },
        "TypeError: pdkernels.TransformerConfig: qk_norm must be a bool, got str.": {"qk_norm": "both"},
        "pdkernels.TransformerConfig: norm_eps must not be negative, got -1.0.": {"norm_eps": -1.0},
    }.items(),
)
def test_config_errors(changes: dict[str, Any], message: str) -> None:
    error, message = kind_of(message)
    with pytest.raises(error) as caught:
        replace(CONFIG, **changes)
    assert str(caught.value) == message


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": torch.zeros(3, dtype=torch.int64)}, "tokens must have shape (batch, length), got (3,)."),
    ({"tokens": [[1, 2, 3]]}, "TypeError: tokens must be a tensor, got list."),
    ({"positions": [0, 1, 2]}, "TypeError: positions must be a tensor, got list."),
    ({"rows": 1}, "TypeError: rows must be a slice, a tensor or a list of ints, got int."),
    ({"tokens": torch.zeros(2, 3)}, "TypeError: tokens must be int64 or int32, got torch.float32."),
    (
        {"tokens": torch.zeros(2, 3, dtype=torch.int64, device="meta")},
        "tokens must be on the model's device (cpu), got meta.",
    ),
    ({"tokens": torch.full((2, 3), 13)}, "tokens must hold ids in [0, 13), got 13..13."),
    ({"counts": torch.tensor([1, 1])}, "counts must be None without a cache, got a tensor. Pass a cache too."),
    ({"positions": torch.zeros(4, dtype=torch.int64)}, "positions must have shape (3,) or (2, 3), got (4,)."),
    ({"positions": torch.zeros(3)}, "TypeError: positions must be int64 or int32, got torch.float32."),
    ({"positions": torch.tensor([0, -2, 1])}, "positions must not be negative, got -2."),
    ({"mask": torch.ones(3, 4, dtype=torch.bool)}, "mask must have shape (3, 3) or (2, 3, 3), got (3, 4)."),
    ({"mask": torch.ones(3, 3)}, "TypeError: mask must be bool (True = visible), got torch.float32."),
    ({"rows": [0, 3]}, "rows must lie in [-3, 3), got 3."),
    ({"rows": torch.tensor([0, 3])}, "rows must lie in [0, 3), got 0..3."),
    ({"rows": torch.tensor([-1])}, "rows must lie in [0, 3), got -1..-1."),
    ({"rows": torch.tensor([0.0])}, "TypeError: rows must be int64 or int32, got torch.float32."),
    ({"rows": torch.zeros(3, 1, dtype=torch.int64)}, "rows must have shape (R,) or (2, R), got (3, 1)."),
    ({"cache": 3}, "tokens must have the batch size of the cache (3), got 2."),
    ({"cache": 2, "counts": torch.tensor([1, 1, 1])}, "counts must have shape (2), got (3,)."),
    (
        {"cache": 2, "counts": torch.tensor([1.0, 1.0])},
        "TypeError: counts must be an int32 or int64 tensor, got torch.float32. Convert it with .to(torch.int64).",
    ),
]


@pytest.mark.parametrize("arguments, message", BAD_CALLS, ids=[m[:40] for _, m in BAD_CALLS])
def test_forward_errors(arguments: dict[str, Any], message: str) -> None:
    error, message = kind_of(message)
    model = build()
    arguments = {"tokens": torch.zeros(2, 3, dtype=torch.int64), **arguments}
    cache = None
    if "cache" in arguments:
        cache = arguments["cache"] = model.new_cache(arguments["cache"], 8)
    with pytest.raises(error) as caught:
        model(arguments.pop("tokens"), **arguments)
    assert str(caught.value) == f"pdkernels.Transformer: {message}"
    assert cache is None or not cache.k.any()


def test_too_many_tokens_for_the_cache_leave_it_alone() -> None:
    model = build()
    cache = model.new_cache(1, 4)
    model(random_tokens(1, 3), cache=cache)
    cache.commit_(torch.tensor([3]))
    before = cache.k.clone()
    with pytest.raises(ValueError, match="pdkernels.kv_append_"):
        model(random_tokens(1, 2), cache=cache)
    assert torch.equal(cache.k, before) and cache.lengths.tolist() == [3]


def test_model_and_cache_construction_errors() -> None:
    with pytest.raises(TypeError, match="config must be a TransformerConfig, got dict"):
        Transformer({})
    with pytest.raises(ValueError, match=r"end_tokens must be ids below vocab_size \(13\), got 13"):
        Transformer(CONFIG, end_tokens=[13])
    model = build()
    with pytest.raises(ValueError, match="kind must be 'contiguous' or 'paged', got 'ring'"):
        model.new_cache(1, 4, kind="ring")
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        model.new_cache(1, 4, kind="paged", page_size=0)
    for kind in ("contiguous", "paged"):
        with pytest.raises(ValueError, match="got 0"):
            model.new_cache(1, 0, kind=kind)
