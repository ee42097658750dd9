"""What an op of a whole step does not take: it is asked once, and steps before the one that fails are not lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels import _native
from pdkernels.generation.session import Session
from pdkernels.models.architectures import hybrid_step, whole_step
from pdkernels.models.architectures.greedy_steps import greedy_steps
from pdkernels.models.architectures.hybrid import Hybrid
from pdkernels.models.architectures.transformer import Transformer
from pdkernels.models.architectures.windows import Window
from tests.models import test_whole_step_hybrid as hybrids
from tests.models.test_row_invariance import CONFIG, a_model, some_tokens

pytestmark = pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")


@pytest.mark.parametrize("way", ["forward", "hidden", "tapped"])
@pytest.mark.parametrize("architecture", ["transformer", "hybrid"])
def test_a_refused_forward_is_asked_once(architecture: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, asked = (whole_step if architecture == "transformer" else hybrid_step), []
    if architecture == "transformer":
        model: Any = a_model(replace(CONFIG, head_dim=20), torch.float32)
    else:
        model = hybrids.a_model(replace(hybrids.LFM2, head_dim=20))
    run = step.run_forward

    def counted(*arguments: Any) -> Any:
        asked.append(run(*arguments))
        return asked[-1]

    monkeypatch.setattr(step, "run_forward", counted)
    tokens, more = some_tokens(2, 3), {"taps": [1]} if way == "tapped" else {}
    for options in ({}, {"counts": torch.tensor([3, 2])}):
        asked.clear()
        getattr(model, way)(tokens, cache=model.new_cache(2, 8), **more, **options)
        assert asked == [None]


@pytest.mark.parametrize("architecture", ["transformer", "hybrid"])
def test_a_replaced_part_of_a_refused_forward_runs(architecture: str) -> None:
    model: Any = a_model(CONFIG, torch.float32) if architecture == "transformer" else hybrids.a_model(hybrids.LFM2)
    hidden, seen = model.hidden, []

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(1)
        return hidden(*arguments, **options)

    model.hidden = watched
    model(some_tokens(2, 3), cache=model.new_cache(2, 8))
    assert seen == [1]


CACHES: dict[str, dict[str, Any]] = {
    "pages": {"windows": (), "capacity": 64, "pages": 12},
    "windows and pages": {"windows": (Window(3), None, Window(3)), "capacity": 256, "pages": 12},
    "windows": {"windows": (Window(3), None, None), "capacity": 256, "pages": None, "text": 250},
    "capacity": {"windows": (), "capacity": 12, "pages": None},
}


@pytest.mark.parametrize("kind", CACHES)
def test_steps_before_one_that_fails(kind: str) -> None:
    """The room of a cache ends after six steps, of the eight that run as one op."""
    shape = {"text": 6, **CACHES[kind]}
    text = shape["text"]
    model = a_model(replace(CONFIG, layers=3, windows=shape["windows"]), torch.float32)
    paged: dict[str, Any] = {"kind": "paged", "page_size": 4} if shape["pages"] else {}

    def begun() -> tuple[Any, torch.Tensor, torch.Tensor]:
        cache: Any = model.new_cache(2, shape["capacity"], drafts=1, **paged)
        if paged:
            cache.reserve_([shape["pages"]] * 2)
        first = model(some_tokens(2, text), cache=cache)[:, -1:].argmax(-1)
        cache.commit_(torch.tensor([text, text]))
        return cache, torch.cat([torch.tensor([[1, 0], [1, 0]]), first], 1), torch.tensor([50, 50])

    with torch.inference_mode():
        cache, table, remaining = begun()
        steps: Any = greedy_steps(model, cache, table, 2, remaining, None, ())
        room = (shape["pages"] or cache.capacity) - text
        assert room == 6
        assert steps.run(8) is None and steps.run(room) is not None
        assert cache.lengths.tolist() == [text + room] * 2 and remaining.tolist() == [50 - room] * 2
        found, written = table.clone(), [cache.layer(layer, text + room) for layer in range(3)]
        cache, table, remaining = begun()
        steps = greedy_steps(model, cache, table, 2, remaining, None, ())
        assert all(steps.run(1) is not None for _ in range(room)) and torch.equal(table, found)
        seen = slice(text + room - 3, None)
        for layer, (k, v) in enumerate(written):
            again_k, again_v = cache.layer(layer, text + room)
            assert torch.equal(k[:, seen], again_k[:, seen]) and torch.equal(v[:, seen], again_v[:, seen])


def test_a_text_that_fills_its_cache_reports_the_tokens_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a session that nobody watches run several at a time, too."""
    model, told = a_model(CONFIG, torch.float32), list[int]()
    own = type(model).new_cache

    def small(self: Any, batch: int, capacity: int, **options: Any) -> Any:
        return own(self, batch, 9, **options)

    monkeypatch.setattr(Transformer, "new_cache", small)
    log = Session.log_step

    def logged(self: Any, sequence: int, *arguments: Any, **options: Any) -> Any:
        told.append(options["next_token"])
        return log(self, sequence, *arguments, **options)

    monkeypatch.setattr(Session, "log_step", logged)
    with pytest.raises(ValueError, match="Make the cache larger"):
        pd.decoding.generate(model, some_tokens(1, 4)[0].tolist(), "autoregressive", max_new_tokens=20)
    assert len(told) == 5


def test_windows_that_are_all_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation of layers with a window is that of none of them."""
    plain = a_model(replace(CONFIG, windows=()), torch.float32)
    model = Transformer(replace(CONFIG, windows=(None,) * CONFIG.layers, window_rope_theta=77.0)).requires_grad_(False)
    model.load_state_dict(plain.state_dict())
    tokens = some_tokens(2, 9)
    assert torch.equal(model(tokens), plain(tokens))
    for switch in "01":
        monkeypatch.setenv("PDKERNELS_WHOLE_STEP", switch)
        found, expected = (each(tokens, cache=each.new_cache(2, 16, drafts=4)) for each in (model, plain))
        assert torch.equal(found, expected)


MIXERS: dict[str, dict[str, Any]] = {
    "conv": {},
    "delta": {"gated_attention": True, "centred_norms": True, "rotary_dim": 4, "qk_norm": True},
    "delta, as in GGUF": {"tiled_values": True, "plain_decay": True},
    "windows": {"windows": (Window(3),) * 3},
}


@pytest.mark.parametrize("head_dim", [16, 12])
@pytest.mark.parametrize("kind", MIXERS)
def test_hybrid_models_in_float64(kind: str, head_dim: int) -> None:
    """On a cache, without one, and with the arithmetic of gradients; the float32 model is near."""
    mixer: Any = kind.partition(",")[0] if kind != "windows" else "conv"
    config = replace(hybrids.QWEN, layers=3, mixers=(mixer, "attention", mixer), head_dim=head_dim)
    fields: dict[str, Any] = {"rotary_dim": None, "gated_attention": False, "centred_norms": False}
    config = replace(config, **{**fields, **MIXERS[kind]})
    model: Hybrid = hybrids.a_model(config)
    tokens = some_tokens(2, 9)
    near = model(tokens)
    model.double()
    with torch.enable_grad():
        expected = model(tokens)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(expected.float(), near, atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), expected, atol=1e-11, rtol=1e-11)
    plan = pd.masks.causal(9).plan(64, 64)
    torch.testing.assert_close(model(tokens, mask=plan), expected, atol=1e-11, rtol=1e-11)
    for page_size in (None, 4):
        cache: Any = model.new_cache(2, 16, **({} if page_size is None else {"kind": "paged", "page_size": page_size}))
        if page_size is not None:
            cache.reserve_([16, 16])
        rows = []
        for first, last, kept in ((0, 4, 4), (4, 7, 1), (5, 6, 1), (6, 9, 3)):  # a draft of which two rows are rejected
            rows.append(model(tokens[:, first:last], cache=cache)[:, :kept])
            cache.commit_(torch.tensor([kept, kept]))
        torch.testing.assert_close(torch.cat(rows, 1), expected, atol=1e-11, rtol=1e-11)
    alone, drafted = (
        pd.decoding.generate(model, [1, 2, 3], method, max_new_tokens=6).tokens.tolist()
        for method in ("autoregressive", "jacobi")
    )
    assert alone == drafted
