"""How the core is run, besides how often: kept recurrences, scales, noise, where new tokens start, own criteria, adaptive prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.decoding import ExitCheck, generate
from pdkernels.reference.recurrence import initial_state
from pdkernels.reference.recurrent_adaptive import recurrent_adaptive
from pdkernels.reference.recurrent_depth import RecurrentDepthReference
from pdkernels.reference.recurrent_diffusion import recurrent_diffusion
from pdkernels.reference.recurrent_sampling import Init, NoisyCore
from pdkernels.reference.recurrent_self_speculation import recurrent_self_speculation
from pdkernels.reference.recurrent_static import recurrent_static
from tests.support.base import streams
from tests.support.recurrent import HIDDEN, RECURRENCES, models, page_sizes, prompts

BATCH = [[3, 1, 4], [1], [5, 9]]
cores = st.fixed_dictionaries(
    {
        "kept_recurrences": st.sampled_from([1, 2, 3, 0]),
        "init_scale": st.sampled_from([1.0, 0.0, 2.0]),
        "core_noise": st.sampled_from([0.0, 0.3]),
        "core_noise_schedule": st.sampled_from(["harmonic", "root", "linear", "constant"]),
        "new_state": st.sampled_from(["fresh", "copied"]),
    }
)


def scaled(seed: int, scale: float) -> Init:
    return lambda step, positions: initial_state(torch.tensor(step), positions, HIDDEN, seed, 0.4**0.5 * scale).double()


def twin(weights: tuple[int, float], core: dict[str, Any], most: int, seed: int) -> tuple[Any, Init]:
    """The plain model with the options of `core`, and its initial states."""
    plain = RecurrentDepthReference(models(*weights)[1].weights, kept=min(core["kept_recurrences"] or most, most))
    init = scaled(seed, core["init_scale"])
    if core.get("core_noise"):
        unit = lambda step, positions: initial_state(torch.tensor(step), positions, HIDDEN, seed, 1.0).double()  # noqa: E731
        plain = NoisyCore(plain, unit, core["core_noise"], core["core_noise_schedule"], most)
    return plain, init


@settings(max_examples=12, deadline=None)
@given(core=cores, batch=prompts, recurrences=st.sampled_from([1, 3, 5]), page_size=page_sizes)
def test_static_decoding(core: dict[str, Any], batch: Any, recurrences: int, page_size: int | None) -> None:
    model, weights = models(1, 1.0)[0], (1, 1.0)
    options = {"recurrences": recurrences, "max_new_tokens": 7}
    result = generate(model, batch, "recurrent_static", page_size=page_size, **options, **core)
    for (prompt, own), tokens in zip(streams(batch, {}), result.tokens, strict=True):
        plain, init = twin(weights, core, recurrences, own["seed"])
        settings = {"recurrences": recurrences, "new_state": core["new_state"], "init": init}
        assert tokens.tolist() == recurrent_static(plain, prompt, 7, seed=own["seed"], **settings).tokens


def test_all_recurrences_kept_are_one_forward_over_the_text() -> None:
    """Then it does not matter what was cached: that is what sharing gives up."""
    model, _ = models(1, 1.0)
    told = generate(model, BATCH, "recurrent_static", max_new_tokens=8, kept_recurrences=0)
    shared = generate(model, BATCH, "recurrent_static", max_new_tokens=8)
    for (prompt, own), tokens in zip(streams(BATCH, {}), told.tokens, strict=True):
        text = [*prompt, *tokens.tolist()]
        logits = model(torch.tensor([text]), seed=own["seed"] - 2**64 * (own["seed"] >= 2**63))
        assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == tokens.tolist()
    assert [t.tolist() for t in told.tokens] != [t.tolist() for t in shared.tokens]


class Turned:
    """Ends a token whose state has turned by little; says so, or how much."""

    def __init__(self, as_bool: bool) -> None:
        self.as_bool = as_bool

    def __call__(self, seen: ExitCheck) -> torch.Tensor:
        row = (seen.counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, seen.state.shape[-1])
        moved = (seen.state - seen.before).gather(1, row)[:, 0].norm(dim=-1)
        assert seen.logits().shape == (len(moved), 13) and seen.recurrences >= 1
        return moved < 1.5 if self.as_bool else moved

    def plain(self, now: torch.Tensor, before: torch.Tensor, say: Any, count: int) -> bool | float:
        moved = (now - before)[-1].norm().item()
        assert say().shape == (len(now), 13) and count >= 1
        return moved < 1.5 if self.as_bool else moved


@settings(max_examples=15, deadline=None)
@given(
    core=cores,
    batch=prompts,
    criterion=st.sampled_from(["latent-diff", "cosine", "kl", "argmax-stability", Turned(True), Turned(False)]),
    adaptive_prompt=st.booleans(),
    most=st.sampled_from([4, 9]),
    page_size=page_sizes,
)
def test_adaptive_decoding(core, batch, criterion, adaptive_prompt, most, page_size) -> None:
    weights, threshold = (2, 0.3), 2 if criterion == "argmax-stability" else 0.4
    threshold = 1.5 if isinstance(criterion, Turned) else threshold
    options = {"threshold": threshold, "max_recurrences": most, "adaptive_prompt": adaptive_prompt}
    model = models(*weights)[0]
    result = generate(
        model,
        batch,
        "recurrent_adaptive",
        max_new_tokens=6,
        trace=True,
        page_size=page_size,
        criterion=criterion,
        **options,
        **core,
    )
    for (prompt, own), tokens, trace in zip(streams(batch, {}), result.tokens, result.stats.trace, strict=True):
        plain, init = twin(weights, core, max(most, RECURRENCES), own["seed"])
        rule = criterion.plain if isinstance(criterion, Turned) else criterion
        settings = {"criterion": rule, "recurrences": RECURRENCES, "new_state": core["new_state"], "init": init}
        expected = recurrent_adaptive(plain, prompt, 6, seed=own["seed"], **options, **settings)
        assert tokens.tolist() == expected.tokens
        assert [step.recurrences for step in trace] == [step.recurrences for step in expected.trace]
        if len(batch) == 1:
            assert result.stats.recurrences == expected.recurrences


@settings(max_examples=12, deadline=None)
@given(
    core=cores,
    batch=prompts,
    depths=st.sampled_from([(1, 3), (3, 2), (2, 5)]),
    threshold=st.sampled_from([1.0, 0.5, 0.0]),
    page_size=page_sizes,
)
def test_self_speculation(core, batch, depths, threshold, page_size) -> None:
    weights, (draft, judge) = (2, 1.0), depths
    options = {"recurrences": judge, "draft_recurrences": draft, "block_size": 3, "verification_threshold": threshold}
    model = models(*weights)[0]
    result = generate(
        model, batch, "recurrent_self_speculation", max_new_tokens=7, trace=True, page_size=page_size, **options, **core
    )
    for (prompt, own), tokens, trace in zip(streams(batch, {}), result.tokens, result.stats.trace, strict=True):
        plain, init = twin(weights, core, max(draft, judge), own["seed"])
        settings = {"new_state": core["new_state"], "init": init, "seed": own["seed"]}
        expected = recurrent_self_speculation(plain, prompt, 7, **options, **settings)
        assert tokens.tolist() == expected.tokens
        assert [step.accepted for step in trace] == [step.accepted for step in expected.trace]
    if threshold == 0:  # every draft is likely enough
        assert all(step.accepted == len(step.draft) for trace in result.stats.trace for step in trace)


@settings(max_examples=8, deadline=None)
@given(core=cores, batch=prompts, inner=st.sampled_from([1, 2, 3]), page_size=page_sizes)
def test_the_wave(core: dict[str, Any], batch: Any, inner: int, page_size: int | None) -> None:
    weights = (2, 0.3)
    core = {"kept_recurrences": core["kept_recurrences"], "init_scale": core["init_scale"]}
    options = {"inner_recurrence": inner, "recurrences": 5}
    model = models(*weights)[0]
    result = generate(model, batch, "recurrent_diffusion", max_new_tokens=7, page_size=page_size, **options, **core)
    for (prompt, own), tokens in zip(streams(batch, {}), result.tokens, strict=True):
        plain, init = twin(weights, core, 5, own["seed"])
        assert tokens.tolist() == recurrent_diffusion(plain, prompt, 7, init=init, seed=own["seed"], **options).tokens


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("recurrent_static", "kept_recurrences", -1),
        ("recurrent_static", "init_scale", float("inf")),
        ("recurrent_adaptive", "criterion", lambda seen: seen.state),
        ("recurrent_adaptive", "core_noise_schedule", "sqrt"),
        ("recurrent_self_speculation", "verification_threshold", 1.5),
        ("recurrent_diffusion", "kept_recurrences", -2),
    ],
)
def test_what_is_refused(method: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        generate(models(1)[0], BATCH, method, max_new_tokens=3, **{option: value})
