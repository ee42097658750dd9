"""The whole forward of a `Hybrid` as one op: the bits of its layers one by one, and the kernels that both call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels import _native, masks
from pdkernels.decoding import generate
from pdkernels.models.architectures import fused, mixer_ops
from pdkernels.models.architectures.hybrid import Hybrid, HybridConfig, HybridLayer
from pdkernels.models.architectures.windows import Window
from tests.harness.error_budget import assert_within_budget
from tests.models.test_row_invariance import DTYPES, VOCABULARY, some_tokens
from tests.models.test_whole_step import bits, both, count_runs

pytestmark = pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")

LFM2 = HybridConfig(
    vocab_size=VOCABULARY, hidden_size=48, layers=4, heads=4, kv_heads=2, head_dim=16, intermediate_size=40, qk_norm=True,
    mixers=("conv", "attention", "conv", "attention"), conv_width=3, tied_head=True,
)  # fmt: skip
QWEN = replace(
    LFM2, mixers=("delta", "delta", "attention", "delta"), conv_width=4, key_heads=2, value_heads=4, key_dim=8, value_dim=24,
    rotary_dim=8, gated_attention=True, centred_norms=True,
)  # fmt: skip
CONFIGS = {"lfm2": LFM2, "qwen": QWEN, "tiled": replace(QWEN, tiled_values=True, plain_decay=True)}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every run of the op that succeeds."""
    return count_runs(monkeypatch)


def a_model(config: HybridConfig, dtype: torch.dtype = torch.float32) -> Hybrid:
    torch.manual_seed(0)
    model = Hybrid(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
            elif "decay" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype).requires_grad_(False)


@st.composite
def configs(draw: st.DrawFn) -> HybridConfig:
    mixers = draw(st.lists(st.sampled_from(["conv", "delta", "attention"]), min_size=0, max_size=2))
    mixers += draw(st.permutations(["attention", draw(st.sampled_from(["conv", "delta"]))]))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
    key_heads, value_heads = draw(st.sampled_from([(1, 1), (2, 2), (2, 4), (1, 3)]))
    qk_norm = draw(st.booleans())
    return HybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=draw(st.sampled_from([16, 33, 48])),
        layers=len(mixers),
        mixers=tuple(mixers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 24])),
        intermediate_size=draw(st.sampled_from([24, 37])),
        qk_norm=qk_norm,
        tied_head=draw(st.booleans()),
        rope_style=draw(st.sampled_from(["half", "interleaved"])),
        rotary_dim=draw(st.sampled_from([None, 2, 8])),
        gated_attention=qk_norm and draw(st.booleans()),
        centred_norms=draw(st.booleans()),
        conv_width=draw(st.integers(2, 4)),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=draw(st.sampled_from([8, 17])),
        value_dim=draw(st.sampled_from([8, 40])),
        tiled_values=draw(st.booleans()),
        plain_decay=draw(st.booleans()),
        max_positions=128,
    )


def a_cache(model: Hybrid, batch: int, capacity: int, page_size: int | None = None) -> Any:
    if page_size is None:
        return model.new_cache(batch, capacity)
    cache = model.new_cache(batch, capacity, kind="paged", page_size=page_size)
    cache.reserve_([capacity] * batch)
    return cache


def kept(cache: Any) -> list[torch.Tensor]:
    """Copies of all that a cache holds."""
    states = [tensor for slots in cache.states.values() for tensor in (slots.state, *slots.pending)]
    return [tensor.clone() for tensor in (cache.k, cache.v, cache.state_lengths, cache.lengths, cache.pending_index, *states)]  # fmt: skip


def steps(model: Hybrid, batch: int, page_size: int | None, ragged: bool, accepted: int, prompt: int) -> list[torch.Tensor]:  # fmt: skip
    """Logits of a prompt, of a draft of which some rows are accepted, of one that is trimmed, and of a token, and all of
    the cache after each."""
    draft, found = 5, []
    cache = a_cache(model, batch, prompt + 12, page_size)
    tokens = some_tokens(batch, prompt + 12)

    def forward(first: int, rows: int, counts: list[int], kept_rows: list[int]) -> None:
        given = torch.tensor(counts[:batch]) if ragged else None
        found.append(model(tokens[:, first : first + rows], cache=cache, counts=given))
        cache.commit_(torch.tensor(kept_rows[:batch]))
        found.extend(kept(cache))

    sizes = [prompt, min(2, prompt), 0] if ragged else [prompt] * 3
    forward(0, prompt, sizes, sizes)
    counts = [draft, max(accepted, 1), accepted] if ragged else [draft] * 3
    forward(prompt, draft, counts, [accepted, min(accepted, 1), accepted])
    forward(prompt + 5, 3, [3] * 3, [3, 2, 0] if ragged else [3] * 3)
    cache.trim_(torch.maximum(cache.lengths - 1, cache.state_lengths.amax(0)))
    if page_size is not None:
        cache.reserve_([prompt + 12] * batch)
    forward(prompt + 8, 1, [1, 1, 0], [1, 1, 0] if ragged else [1] * 3)
    return found


@settings(max_examples=25)
@given(
    config=configs(),
    dtype=st.sampled_from(DTYPES),
    batch=st.sampled_from([1, 3]),
    page_size=st.sampled_from([None, None, 5, 16]),
    ragged=st.booleans(),
    accepted=st.integers(0, 5),
    prompt=st.sampled_from([1, 7, 70]),
)
def test_has_the_bits_of_its_layers(
    config: HybridConfig,
    dtype: torch.dtype,
    batch: int,
    page_size: int | None,
    ragged: bool,
    accepted: int,
    prompt: int,
) -> None:
    model = a_model(config, dtype)
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs = count_runs(monkeypatch)
        both(monkeypatch, lambda: steps(model, batch, page_size, ragged, accepted, prompt))
        assert len(runs) == 4


@pytest.mark.parametrize("accepted", range(6))
@pytest.mark.parametrize("name", CONFIGS)
def test_what_follows_a_draft_is_what_follows_its_rows(name: str, accepted: int, runs: list[int]) -> None:
    """The rows of an accepted part have the bits of decoding, whatever was rejected behind them."""
    model, tokens = a_model(CONFIGS[name]), some_tokens(1, 20)

    def follow(parts: Sequence[tuple[int, int]]) -> torch.Tensor:
        cache, at = model.new_cache(1, 32), 0
        for rows, committed in parts:
            model(tokens[:, at : at + rows], cache=cache)
            cache.commit_(torch.tensor([committed]))
            at += committed
        return model(tokens[:, at : at + 2], cache=cache)

    drafted = follow([(6, 6), (5, min(accepted, 5))])
    decoded = follow([(1, 1)] * (6 + min(accepted, 5)))
    assert torch.equal(bits(drafted), bits(decoded)) and len(runs) == 3 + 7 + min(accepted, 5)


@pytest.mark.parametrize("name", CONFIGS)
def test_trees_and_drafts_under_plans(name: str, monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    model, tokens = a_model(CONFIGS[name]), some_tokens(2, 30)
    tree, chain = masks.quadratic(3, 2), masks.causal(4)

    def call() -> list[torch.Tensor]:
        cache, found = model.new_cache(2, 40), []
        model(tokens[:, :6], cache=cache)
        cache.commit_(torch.tensor([6, 4]))
        width = len(tree.positions)
        found.append(
            model(tokens[:, 6 : 6 + width], cache=cache, mask=tree.plan(16, 16), positions=tree.positions, counts=torch.tensor([width, 1]))
        )  # fmt: skip
        cache.commit_(torch.tensor([1, 1]), torch.tensor([[0], [0]]))
        found.append(model(tokens[:, 20:24], cache=cache, mask=chain.plan(16, 16), counts=torch.tensor([4, 2])))
        cache.commit_(torch.tensor([2, 0]))
        return [*found, model(tokens[:, 24:25], cache=cache), *kept(cache)]

    both(monkeypatch, call)
    assert len(runs) == 4


@pytest.mark.parametrize("format", ["q4_0", "q8_0", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_matrices(name: str, format: str, monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    config = replace(CONFIGS[name], hidden_size=64, heads=4, intermediate_size=96, value_dim=32)
    model = pd.quantize(a_model(config), format)
    both(monkeypatch, lambda: steps(model, 3, None, True, 2, 7))
    assert len(runs) == 4


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16], ids=str)
def test_keys_and_values_in_another_form(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    model = a_model(QWEN)
    model.cache_dtype = dtype
    both(monkeypatch, lambda: steps(model, 3, 5, True, 3, 7))
    assert len(runs) == 4


@pytest.mark.parametrize("name", CONFIGS)
def test_taps_and_hidden_rows(name: str, monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    model, tokens = a_model(CONFIGS[name]), some_tokens(2, 5)

    def call() -> list[torch.Tensor]:
        tapped = model.tapped(tokens, [4, 0, 2], cache=model.new_cache(2, 8))
        return [*tapped, model.hidden(tokens, cache=model.new_cache(2, 8))]

    hidden, features, alone = both(monkeypatch, call)
    assert torch.equal(features[:, :, 0], hidden) and torch.equal(hidden, alone) and len(runs) == 2


def test_threads(monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    model, threads = a_model(replace(QWEN, value_dim=200, heads=8, head_dim=64)), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        both(monkeypatch, lambda: steps(model, 3, None, True, 4, 150))
    finally:
        torch.set_num_threads(threads)
    assert len(runs) == 4


# ---- decoders


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("autoregressive", {}),
        ("autoregressive", {"page_size": 3}),
        ("jacobi", {"draft": "lookup"}),
        ("linear_self_speculation", {"block_size": 4}),
        ("quadratic_self_speculation", {"block_size": 4}),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_decoders(
    name: str, method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    model = a_model(CONFIGS[name])
    model.mask_token = VOCABULARY - 1
    both(
        monkeypatch, lambda: list(generate(model, [[5, 3, 8, 8], [1, 2]], method, max_new_tokens=12, **options).tokens)
    )
    assert len(runs) > 3


# ---- where the layers run one by one, and what is bound


def decode(model: Hybrid) -> torch.Tensor:
    return model(some_tokens(2, 3), cache=model.new_cache(2, 8))


def scaled_decay(model: Hybrid) -> None:
    model.layers[0].decay.add_(0.5)


def scaled_convolution(model: Hybrid) -> None:
    model.layers[0].conv.mul_(-2)


def replaced_inputs(model: Hybrid) -> None:
    model.layers[1].inputs = torch.nn.Parameter(-model.layers[1].inputs, requires_grad=False)


def other_memory(model: Hybrid) -> None:
    model.layers[0].value_norm.data = model.layers[0].value_norm.data * 3


def converted(model: Hybrid) -> None:
    model.to(torch.bfloat16)


CHANGES: list[Callable[[Hybrid], None]] = [scaled_decay, scaled_convolution, replaced_inputs, other_memory, converted]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameters_are_seen(
    change: Callable[[Hybrid], None], monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    model = a_model(QWEN)
    before = decode(model)
    with torch.no_grad():
        change(model)
    (after,) = both(monkeypatch, lambda: [decode(model)])
    assert len(runs) == 2 and not torch.equal(before.float(), after.float())
    assert torch.equal(decode(copy.deepcopy(model)), after)


class OtherLayer(HybridLayer):
    pass


def other_class(model: Hybrid) -> None:
    model.layers[1].__class__ = OtherLayer


def own_method(model: Hybrid) -> None:
    model.layers[1]._delta = lambda x, rows: torch.zeros_like(x)


def hooked(model: Hybrid) -> None:
    model.layers[1].register_forward_hook(lambda layer, given, found: found * 2)


def own_run(model: Hybrid) -> None:
    model._run = lambda tokens, rows, states: model.embed(tokens)  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [other_class, own_method, hooked, own_run])
def test_where_layers_run_one_by_one(change: Callable[[Hybrid], None], runs: list[int]) -> None:
    model = a_model(QWEN)
    decode(model)
    change(model)
    decode(model)
    assert len(runs) == 1


def test_windows_run_one_by_one(runs: list[int]) -> None:
    decode(a_model(replace(LFM2, windows=(None, Window(3), None, None))))
    assert not runs


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_written_before_all_is_checked(name: str) -> None:
    """A prompt whose first rows go into the states at once, on a cache that has no room for its keys."""
    model, tokens = a_model(CONFIGS[name]), some_tokens(1, 90)
    cache = model.new_cache(1, 80)
    before = kept(cache)
    with pytest.raises(ValueError, match="must be at most the capacity 80"):
        model(tokens, cache=cache)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, kept(cache), strict=True))


@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("positions", [[0, 1000], [-7, -6]], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_positions_outside_of_the_tables_change_nothing(
    name: str, positions: list[int], switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", switch)
    model, tokens = a_model(CONFIGS[name]), some_tokens(1, 8)
    cache = model.new_cache(1, 32)
    model(tokens[:, :6], cache=cache)
    cache.commit_(torch.tensor([6]))
    before = kept(cache)
    with pytest.raises(ValueError, match=r"Hybrid: positions must lie in \[-length, 34 - length\)"):
        model(tokens[:, 6:], cache=cache, positions=torch.tensor(positions))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, kept(cache), strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_forwards_without_rows(name: str) -> None:
    model, tokens = a_model(CONFIGS[name]), some_tokens(2, 3)
    cache = model.new_cache(2, 8)
    model(tokens, cache=cache)
    cache.commit_(torch.tensor([3, 1]))
    assert model(tokens[:, :0], cache=cache).shape == (2, 0, VOCABULARY)
    with torch.no_grad():
        assert model(tokens[:, :0]).shape == (2, 0, VOCABULARY)


def test_gates_without_norms_of_heads_run_one_by_one(runs: list[int]) -> None:
    """Then q is rotated beside its gates."""
    model = a_model(replace(QWEN, qk_norm=False))
    cached = model(some_tokens(2, 9), cache=model.new_cache(2, 16))
    assert not runs
    torch.testing.assert_close(cached, model.double()(some_tokens(2, 9)).float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("tokens", "options", "kind", "words"),
    [
        ([[VOCABULARY]], {}, ValueError, "tokens must hold ids in"),
        ([[1] * 9], {}, ValueError, "be at most the capacity 8"),
        ([[1], [2]], {}, ValueError, "tokens must have the batch size of the cache"),
        ([[1, 2]], {"counts": torch.tensor([3])}, ValueError, "counts must be in"),
        ([[1, 2]], {"mask": masks.causal(2)}, TypeError, r"mask must be a TilePlan.* Call mask\.plan\(\)"),
    ],
)
def test_errors_are_those_of_the_layers(
    name: str, tokens: list[list[int]], options: dict[str, Any], kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    model = a_model(CONFIGS[name])
    for value in ("1", "0"):
        monkeypatch.setenv("PDKERNELS_WHOLE_STEP", value)
        with pytest.raises(kind, match=words):
            model(torch.tensor(tokens), cache=model.new_cache(1, 8), **options)


# ---- the kernels that both call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", get_args(mixer_ops.GateForm))
def test_gates(form: mixer_ops.GateForm, dtype: torch.dtype) -> None:
    """Of rows that lie in wider ones."""
    wide = (torch.randn(2, 5, 3, 100, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    x, gate = wide.split(50, -1)
    found = mixer_ops.gated_by(x[..., :37], gate[..., :37], form)
    forms = {"none": lambda t: t, "sigmoid": torch.sigmoid, "silu": F.silu}
    exact, plain = (forms[form](g[..., :37]) * t[..., :37] for t, g in ((x.double(), gate.double()), (x, gate)))
    assert found.is_contiguous()
    if form == "none":
        assert torch.equal(found, plain)
    assert_within_budget(found, exact, plain, name=form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decays(dtype: torch.dtype) -> None:
    decay = torch.linspace(-12, 6, 501).to(dtype)
    found = mixer_ops.decay_factors(decay)
    assert found.dtype == torch.float32
    assert_within_budget(found, -decay.double().exp(), -decay.float().exp(), name="decays")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 24, 65, 1000])
def test_centred_norms(width: int, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=drawn).to(dtype) for size in ((40, width), (width,)))
    found = mixer_ops.centred_rms_norm(x, weight, 1e-6)
    exact, plain = (
        (F.rms_norm(t, (width,), None, 1e-6) * (1 + w.to(t.dtype))).to(to)
        for t, w, to in ((x.double(), weight, torch.float64), (x.float(), weight, dtype))
    )
    assert_within_budget(found, exact, plain, name="norm")


@pytest.mark.parametrize("change", ["rows", "strides", "dtype", "form"])
def test_what_the_kernels_refuse(change: str) -> None:
    x = torch.randn(4, 2, 16)
    gate = {"rows": x[:3], "strides": torch.randn(4, 16, 2).mT, "dtype": x.half()}.get(change, x)
    with pytest.raises(RuntimeError, match="arguments must fit"):
        mixer_ops._gate(x, gate, "tanh" if change == "form" else "silu")


def test_plain_torch_where_there_is_a_gradient() -> None:
    x, gate = torch.randn(1, 2, 8, requires_grad=True), torch.randn(1, 2, 8)
    assert mixer_ops.gated_by(x, gate, "silu").requires_grad and not fused.enabled(x)
