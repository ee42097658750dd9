"""All layers as one op where they are as those of Gemma and OLMo: the bits of the layers one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import _native, masks
from pdkernels.cache import WindowedCache
from pdkernels.decoding import generate
from pdkernels.masks import TilePlan
from pdkernels.models import ExpertsConfig, Transformer, TransformerConfig
from pdkernels.models.architectures import greedy_steps
from pdkernels.models.architectures.windows import Window
from tests.models.test_row_invariance import CONFIG, DTYPES, a_model, configs, some_tokens
from tests.models.test_transformer_cached_plans import MASKS
from tests.models.test_whole_step import both, count_runs, prompts_drafts_and_a_token, quantise_

pytestmark = pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")

NORMS: dict[str, Any] = {"outer_norms": True, "layers": 4}
GEMMA: dict[str, Any] = {**NORMS, "activation": "gelu", "embedding_scale": 48**0.5, "query_scale": 24**-0.5}


def windows(*sizes: int | None) -> tuple[Window | None, ...]:
    return tuple(size and Window(size) for size in sizes)


CONFIGS = {
    "Gemma 2": replace(CONFIG, **GEMMA, windows=windows(7, None, 7, None), attention_softcap=1.5, logits_softcap=2.0),
    "Gemma 3": replace(
        CONFIG, **GEMMA, qk_norm=True, windows=windows(7, 7, None, 7), rope_theta=5000.0, window_rope_theta=300.0
    ),
    "OLMo 2": replace(CONFIG, **NORMS, inner_norms=False, qk_norm=True, whole_qk_norm=True),
    "OLMo 3": replace(
        CONFIG, **NORMS, inner_norms=False, qk_norm=True, whole_qk_norm=True, windows=windows(16, 16, 16, None)
    ),
    "sinks": replace(CONFIG, layers=4, sinks=True, windows=windows(3, None, 16, None)),
    "experts": replace(
        CONFIG, **GEMMA, experts=ExpertsConfig(8, 2, 24, every=2, shared_size=24), windows=windows(1, 3, None, 1)
    ),
    "pieces": replace(CONFIG, **GEMMA, windows=(Window(7, chunked=True), None, Window(4, chunked=True), Window(7))),
}


@st.composite
def any_settings(draw: st.DrawFn) -> TransformerConfig:
    config = draw(configs())
    sizes = st.sampled_from([None, Window(1), Window(7), Window(16), Window(4, chunked=True)])
    chosen = tuple(draw(sizes) for _ in range(config.layers))
    inner, scale = draw(st.booleans()), st.sampled_from([None, 1.0, 0.37])
    return replace(
        config,
        windows=chosen,
        window_rope_theta=draw(st.sampled_from([None, 300.0])) if any(chosen) else None,
        outer_norms=draw(st.booleans()) or not inner,
        inner_norms=inner,
        whole_qk_norm=config.qk_norm and draw(st.booleans()),
        activation=draw(st.sampled_from(["silu", "gelu"])),  # type: ignore[arg-type]
        sinks=draw(st.booleans()),
        embedding_scale=draw(scale) or 6.93,
        query_scale=draw(scale),
        attention_softcap=draw(st.sampled_from([None, 1.5])),
        logits_softcap=draw(st.sampled_from([None, 2.0])),
        max_positions=32,
    )


@settings(max_examples=120)
@given(
    config=any_settings(),
    dtype=st.sampled_from(DTYPES),
    batch=st.sampled_from([1, 3]),
    page_size=st.sampled_from([None, None, 1, 5, 16]),
    ragged=st.booleans(),
    name=st.sampled_from([None, *sorted(MASKS)]),
    stacked=st.booleans(),
)
def test_any_settings(
    config: TransformerConfig,
    dtype: torch.dtype,
    batch: int,
    page_size: int | None,
    ragged: bool,
    name: str | None,
    stacked: bool,
) -> None:
    plan, positions, model = None, None, a_model(config, dtype)
    if name is not None:
        plan, positions = MASKS[name].plan(16, 16), MASKS[name].positions
        plan = TilePlan.stack([plan] * batch) if stacked else plan
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs = count_runs(monkeypatch)
        both(monkeypatch, lambda: prompts_drafts_and_a_token(model, batch, page_size, ragged, plan, positions))
        assert len(runs) == 3


TREE = masks.tree([-1, 0, 0, 1, 2, 2])
DEPTHS = torch.tensor([0, 1, 1, 2, 2, 2])


def a_long_text(model: Transformer, kind: str, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """A prompt past all windows, trees and drafts of which a part stays, single rows, and what taps get on the way."""
    options: dict[str, Any] = {"kind": "paged", "page_size": 8} if kind.startswith("paged") else {}
    cache: Any = model.new_cache(2, 288, drafts=None if kind in ("contiguous", "paged") else 6, dtype=dtype, **options)
    if options:
        cache.reserve_([288, 288])
    if kind.endswith("windows") and any(model.config.windows):
        assert isinstance(cache, WindowedCache)
    tokens, found, at = some_tokens(2, 250) % model.config.vocab_size, [], 0
    for count in (180, 5, 1, 6, 1, 5, 1):
        rows, kept = tokens[:, at : at + count], count if count > 6 else (count + 1) // 2
        counts = torch.tensor([count, max(1, count - 2)]) if count == 5 else None
        found.append(model(rows, cache=cache, counts=counts))
        if count == 6:
            found.append(model(rows, cache=cache, mask=TREE.plan(16, 16), positions=DEPTHS))
        found.extend(x.contiguous() for x in model.tapped(rows, [1, 4], cache=cache, counts=counts))
        cache.commit_(torch.full((2,), kept))
        at += kept
    return found


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "paged", "windows", "paged windows"])
@pytest.mark.parametrize("name", CONFIGS)
def test_published_settings_on_every_cache(
    name: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = dtype == torch.int8
    model = a_model(CONFIGS[name], torch.float32 if codes else dtype)
    runs = count_runs(monkeypatch)
    both(monkeypatch, lambda: a_long_text(model, kind, dtype if codes else None))
    assert len(runs) == 7 * 2 + 1


@pytest.mark.parametrize("formats", [["int8"], ["q4_0"], ["q8_0", None, "int4"]], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_matrices(name: str, formats: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model(replace(CONFIGS[name], hidden_size=64, intermediate_size=96), torch.float32)
    if model.config.experts is None:
        quantise_(model, formats)
    runs = count_runs(monkeypatch)
    both(monkeypatch, lambda: a_long_text(model, "windows", None))
    assert len(runs) == 7 * 2 + 1


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_decoders(
    name: str, page_size: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts outgrow windows and their pages. Greedy steps are one op, but for a cap of logits, and so is every forward."""
    model, prompts = a_model(CONFIGS[name], dtype), [some_tokens(1, 180)[0].tolist(), [3, 1, 4]]
    steps: list[int] = []
    own = greedy_steps._run

    def run(*arguments: Any) -> Any:
        entries = own(*arguments)
        steps.append(len(entries))
        return entries

    monkeypatch.setattr(greedy_steps, "_run", run)
    runs = count_runs(monkeypatch)
    options: dict[str, Any] = {"max_new_tokens": 40, "page_size": page_size, "end_tokens": ()}
    found = both(monkeypatch, lambda: list(generate(model, prompts, **options).tokens))
    capped = model.config.logits_softcap is not None
    assert sum(steps) == (0 if capped else 39) and len(runs) >= 39
    del runs[:]
    drafted = both(monkeypatch, lambda: list(generate(model, prompts, "jacobi", block_size=6, **options).tokens))
    assert all(torch.equal(a, b) for a, b in zip(drafted, found, strict=True)) and runs


def test_layers_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafting adapter's rows run one by one, and others of the same model as one op."""
    model = a_model(CONFIGS["Gemma 3"], torch.float32)
    width = CONFIG.heads * CONFIG.head_dim
    model.attach_adapter_([(torch.randn(2, width), torch.randn(CONFIG.hidden_size, 2))] * 4)
    runs = count_runs(monkeypatch)
    tokens, cache = some_tokens(2, 3), model.new_cache(2, 8)
    plain = model(tokens, cache=cache)
    assert len(runs) == 1 and not torch.equal(model(tokens, cache=cache, adapted=True), plain) and len(runs) == 1


@pytest.mark.parametrize("change", ["attention_out_norm", "mlp_out_norm", "attention_norm", "mlp_norm", "sinks"])
def test_parameters_may_change(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward sees it: in place, in other memory, and where a layer has lost it."""
    model = a_model(replace(CONFIGS["Gemma 3"], sinks=True), torch.float32)
    runs = count_runs(monkeypatch)
    tokens, layer = some_tokens(1, 9), model.layers[1]

    def forward() -> list[torch.Tensor]:
        return [model(tokens, cache=model.new_cache(1, 16))]

    before = both(monkeypatch, forward)[0]
    for make in ("in place", "memory", "none"):
        if make == "in place":
            getattr(layer, change).mul_(3)
        elif make == "memory":
            getattr(layer, change).data = -getattr(layer, change).data
        else:
            setattr(layer, change, None)
        found = both(monkeypatch, forward)[0]
        assert not torch.equal(found, before)
        before = found
    assert len(runs) == 4


def test_the_configuration_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = a_model(CONFIGS["Gemma 3"], torch.float32), some_tokens(1, 30)
    runs = count_runs(monkeypatch)

    def forward() -> list[torch.Tensor]:
        return [model(tokens, cache=model.new_cache(1, 32))]

    before = both(monkeypatch, forward)[0]
    for change in ({"embedding_scale": 2.0}, {"windows": windows(1, 1, None, 1)}, {"query_scale": 1.0}):
        model.config = replace(model.config, **change)
        found = both(monkeypatch, forward)[0]
        assert not torch.equal(found, before)
        before = found
    assert len(runs) == 4


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_refused_forward_leaves_the_pages_of_windows(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", switch)
    model = a_model(CONFIGS["Gemma 3"], torch.float32)
    cache: Any = model.new_cache(2, 288, drafts=6)
    model(some_tokens(2, 10), cache=cache)
    cache.commit_(torch.tensor([10, 10]))
    furthest = cache.furthest.clone()
    with pytest.raises(ValueError, match="tokens must have the batch size of the cache"):
        model(some_tokens(1, 100), cache=cache)
    with pytest.raises(ValueError, match="counts must"):
        model(some_tokens(2, 100), cache=cache, counts=torch.tensor([100, 100, 100]))
    assert cache.drafts == 6 and torch.equal(cache.furthest, furthest)


def test_experts_of_another_form_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIGS["experts"], experts=ExpertsConfig(8, 2, 24, clamp=7.0, matrix_biases=True))
    runs = count_runs(monkeypatch)
    a_model(config, torch.float32)(some_tokens(1, 3), cache=a_model(config, torch.float32).new_cache(1, 8))
    assert not runs
