"""Token by token with a fixed number of recurrences: the plain reference's tokens, and those of plain autoregressive decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import RecurrentStep, generate, is_lossless
from pdkernels.decoding.methods import METHODS
from pdkernels.generation.params import SamplingParams
from pdkernels.generation.sampler import Sampler
from pdkernels.models.architectures.recurrent_depth import RecurrentDepth
from pdkernels.reference.recurrent_sampling import filtered as plain_filtered
from pdkernels.reference.recurrent_static import recurrent_static
from tests.support.base import HostReads, streams
from tests.support.errors import kind_of
from tests.support.recurrent import RECURRENCES, draws, init_of, models, page_sizes, prompts, seeds, token

METHOD = "recurrent_static"
RECURRENT = [name for name, method in METHODS.items() if method.wing == "recurrent"]


@settings(max_examples=50, deadline=None)
@given(
    weights=st.tuples(st.sampled_from([1, 2]), st.sampled_from([0.3, 1.0])),
    batch=prompts,
    limit=st.integers(0, 10),
    recurrences=st.sampled_from([None, 1, 2, 5]),
    ends=st.lists(token, max_size=2),
    draw=draws,
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_the_reference(weights, batch, limit, recurrences, ends, draw, seed, page_size) -> None:
    model, plain = models(*weights)
    options = dict(zip(("temperature", "top_p", "min_p", "top_k"), draw, strict=True)) | dict(
        end_tokens=ends, seed=seed
    )
    result = generate(
        model, batch, METHOD, max_new_tokens=limit, recurrences=recurrences, trace=True, page_size=page_size, **options
    )
    depth = recurrences or RECURRENCES
    expected = [
        recurrent_static(plain, prompt, limit, init=init_of(own["seed"]), recurrences=depth, **own)
        for prompt, own in streams(batch, options)
    ]
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    assert result.stats.forwards == max(one.forwards for one in expected)
    assert result.stats.recurrences == max(one.recurrences for one in expected)
    traces = [[tuple(step) for step in one.trace] for one in expected]
    assert [[tuple(step) for step in steps] for steps in result.stats.trace] == traces


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autoregressive_decoding_is_the_same(dtype: torch.dtype) -> None:
    """A recurrent-depth model is an ordinary one unless its depth is requested."""
    torch.manual_seed(1)
    model = RecurrentDepth(models(2, hidden=32)[0].config).to(dtype).requires_grad_(False)
    model.load_state_dict(models(2, hidden=32)[0].state_dict())
    batch = [[1, 2, 3, 4], [5], [6, 7]]
    greedy = generate(model, batch, max_new_tokens=12).tokens
    static = generate(model, batch, METHOD, max_new_tokens=12).tokens
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(static, greedy, strict=True))
    assert len({token for tokens in static for token in tokens.tolist()}) > 4
    for (prompt, own), tokens in zip(streams(batch, {"max_new_tokens": 12}), static, strict=True):
        assert torch.equal(generate(model, prompt, METHOD, **own).tokens, tokens)


@settings(max_examples=40, deadline=None)
@given(
    numbers=st.lists(st.sampled_from([-1.0, 0.0, 0.3, 0.3, 2.0, 5.0]), min_size=1, max_size=7),
    temperature=st.sampled_from([0.1, 1.0, 3.0]),
    top_p=st.sampled_from([None, 0.0, 0.2, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.2, 1.0]),
    top_k=st.sampled_from([None, 1, 2, 9]),
)
def test_filters_are_those_of_the_reference(
    numbers: list[float], temperature: float, top_p: float | None, min_p: float | None, top_k: int | None
) -> None:
    """Ties, a single token, and thresholds that are met exactly."""
    logits = torch.tensor([numbers, numbers[::-1]])
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    ours = Sampler.of(params, "within").filtered(logits[:, None])[:, 0].double()
    plain = plain_filtered(logits, temperature, top_p, min_p, top_k)
    assert torch.equal(ours, plain) and plain.isfinite().any(-1).all()


@pytest.mark.slow
@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("headway", [1, 3])
def test_one_read_of_the_device_in_a_step(trace: bool, headway: int) -> None:
    """Static decoding and the sampler read once a step, adaptive exits once more for every check, drafts once a cycle."""
    model, batch = models(2)[0], [[3, 1, 4], [1]]
    common = {"max_new_tokens": 9, "trace": trace, "end_tokens": (11,)}
    sampler = {"headway": headway, "noise": 0.1, "exit": "latent-acceleration"}
    for method, options in ((METHOD, {}), ("recurrent_diffusion", sampler)):
        with HostReads() as reads:
            stats = generate(model, batch, method, temperature=0.5, **common, **options).stats
        assert reads.count == stats.forwards > 8
    with HostReads() as reads:
        stats = generate(model, batch, "recurrent_self_speculation", **common).stats
    assert reads.count == 1 + max(len(counts) for counts in stats.accepted)
    with HostReads() as reads:
        stats = generate(model, batch, "recurrent_adaptive", check_every=2, **common).stats
    assert stats.forwards < reads.count <= stats.forwards + (stats.recurrences - RECURRENCES) // 2


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("recurrences", [1, 9])
@pytest.mark.parametrize("method", RECURRENT)
def test_the_cache_has_one_slot_per_layer(
    method: str, recurrences: int, page_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, caches = models(2)[0], []
    original = RecurrentDepth.new_cache
    monkeypatch.setattr(
        RecurrentDepth, "new_cache", lambda self, *a, **k: caches.append(original(self, *a, **k)) or caches[-1]
    )
    generate(model, [[3, 1, 4], [1]], method, max_new_tokens=6, recurrences=recurrences, page_size=page_size)
    (cache,) = caches
    assert cache.k.shape[0] == model.config.layers == 4
    rows = cache.k.shape[1] * cache.k.shape[2]
    assert rows == 2 * 9 if page_size is None else rows <= 2 * (9 + page_size)
    assert cache.lengths.tolist() == [3 + 5, 1 + 5]


STATIC, ADAPTIVE = "pdkernels.decoding.recurrent_static: ", "pdkernels.decoding.recurrent_adaptive: "
SPECULATION, DIFFUSION = "pdkernels.decoding.recurrent_self_speculation: ", "pdkernels.decoding.recurrent_diffusion: "
ERRORS: list[tuple[str, dict[str, Any], str]] = [
    (METHOD, {"recurrences": 0}, STATIC + "recurrences must be at least 1, got 0."),
    (METHOD, {"recurrences": 2.0}, "TypeError: " + STATIC + "recurrences must be an int, got float."),
    (METHOD, {"temperature": -1}, "pdkernels.decoding.generate: temperature must be finite and at least 0, got -1."),
    (METHOD, {"top_p": 1.5}, "pdkernels.decoding.generate: top_p must be in 0 .. 1, got 1.5."),
    (METHOD, {"top_k": 0}, "pdkernels.decoding.generate: top_k must be at least 1, got 0."),
    (METHOD, {"min_p": "x"}, "TypeError: " + "pdkernels.decoding.generate: min_p must be a number, got str."),
    (
        METHOD,
        {"seed": None},
        "TypeError: " + "pdkernels.decoding.generate: seed must be an int or a list of ints, got NoneType.",
    ),
    ("recurrent_adaptive", {"criterion": "luck"}, ADAPTIVE + "criterion must be one of 'latent-diff', 'cosine', "),
    ("recurrent_adaptive", {"threshold": -0.1}, ADAPTIVE + "threshold must be at least 0, got -0.1."),
    ("recurrent_adaptive", {"max_recurrences": 0}, ADAPTIVE + "max_recurrences must be at least 1, got 0."),
    ("recurrent_adaptive", {"min_recurrences": -1}, ADAPTIVE + "min_recurrences must be at least 0, got -1."),
    ("recurrent_adaptive", {"first_check": 0}, ADAPTIVE + "first_check must be at least 1, got 0."),
    ("recurrent_adaptive", {"check_every": 0}, ADAPTIVE + "check_every must be at least 1, got 0."),
    ("recurrent_self_speculation", {"block_size": -1}, SPECULATION + "block_size must be at least 0, got -1."),
    ("recurrent_self_speculation", {"draft_recurrences": 0}, SPECULATION + "draft_recurrences must be at least 1"),
    ("recurrent_diffusion", {"inner_recurrence": 0}, DIFFUSION + "inner_recurrence must be at least 1, got 0."),
    ("recurrent_diffusion", {"max_wavefront": 0}, DIFFUSION + "max_wavefront must be at least 1, got 0."),
    ("recurrent_diffusion", {"headway": 0}, DIFFUSION + "headway must be at least 1, got 0."),
    ("recurrent_diffusion", {"momentum": 2}, DIFFUSION + "momentum must be in 0 .. 1, got 2."),
    ("recurrent_diffusion", {"noise": float("inf")}, DIFFUSION + "noise must be finite, got inf."),
    ("recurrent_diffusion", {"exit": "now"}, DIFFUSION + "exit must be one of 'latent-diff', 'fixed', "),
    ("recurrent_diffusion", {"rule": "all"}, DIFFUSION + "rule must be one of 'prefix', 'last', got 'all'."),
    ("recurrent_diffusion", {"keep_changed": 1}, "TypeError: " + DIFFUSION + "keep_changed must be a bool, got int."),
    ("recurrent_diffusion", {"max_recurrences": -1}, DIFFUSION + "max_recurrences must be at least 0, got -1."),
    ("recurrent_diffusion", {"stability": 0}, DIFFUSION + "stability must be at least 1, got 0."),
    (
        "recurrent_diffusion",
        {"published": True},
        "TypeError: pdkernels.decoding.generate: method 'recurrent_diffusion' has no option 'published'. It accepts: ",
    ),
]


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("method, options, text", ERRORS)
def test_errors(method: str, options: dict[str, Any], text: str, limit: int) -> None:
    error, text = kind_of(text)
    with pytest.raises(error) as raised:
        generate(models(1)[0], **{"prompt": [1], "method": method, "max_new_tokens": limit, **options})
    assert str(raised.value).startswith(text)


def test_lossless() -> None:
    assert [method for method in RECURRENT if is_lossless(method)] == [METHOD]
    trace = generate(models(1)[0], [4, 2], METHOD, max_new_tokens=3, trace=True).stats.trace[0]
    assert all(isinstance(step, RecurrentStep) for step in trace) and [step.cursor for step in trace] == [2, 3]
