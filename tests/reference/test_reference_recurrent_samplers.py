"""Static and adaptive decoding and self-speculation of recurrent-depth models, and what they draw."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference.recurrence import initial_state
from pdkernels.reference.recurrent_adaptive import (
    THRESHOLDS,
    at_first,
    change,
    minp_distribution,
    observed,
    recurrent_adaptive,
)
from pdkernels.reference.recurrent_sampling import choose, filtered, forward, position_states, refine, rows
from pdkernels.reference.recurrent_self_speculation import recurrent_self_speculation
from pdkernels.reference.recurrent_static import recurrent_static
from tests.support.base import follows
from tests.support.causal import SCRIPTS, VOCABULARY
from tests.support.recurrent import Scripted, init, tiny, zeros

PROMPT = [3, 1, 4]


def test_initial_states_belong_to_positions() -> None:
    states = position_states(6, seed=5, scale=0.5)
    assert states(0, rows(2, 3)).dtype == torch.float64
    assert torch.equal(states(0, rows(2, 3))[1:], states(0, rows(3, 2)))
    assert torch.equal(
        states(2, rows(4, 1))[0], initial_state(torch.tensor(2), torch.tensor(4), 6, 5, 0.4**0.5 * 0.5).double()
    )
    assert not torch.equal(states(0, rows(2, 1)), states(1, rows(2, 1)))


# ---- draws


def filtered_by_hand(distribution: list[float], top_p: float, min_p: float, top_k: int) -> list[bool]:
    order = sorted(range(len(distribution)), key=lambda v: (-distribution[v], v))
    least = distribution[order[:top_k][-1]]
    order = [v for v in order if distribution[v] >= least]
    kept, mass = {order[0]}, 0.0
    for v in order:
        mass += distribution[v]
        if mass <= top_p:
            kept.add(v)
    return [v in kept and distribution[v] >= min_p * distribution[order[0]] for v in range(len(distribution))]


@given(
    counts=st.lists(st.integers(1, 16), min_size=1, max_size=8),
    top_p=st.floats(0.01, 0.99),
    min_p=st.floats(0, 1),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(1, 9),
)
def test_filters(counts: list[int], top_p: float, min_p: float, temperature: float, top_k: int) -> None:
    logits = torch.tensor([counts], dtype=torch.float64).log() * temperature
    distribution = torch.softmax(logits / temperature, -1)[0].tolist()
    assert filtered(logits, temperature, top_p, min_p, top_k).isfinite()[0].tolist() == filtered_by_hand(
        distribution, top_p, min_p, top_k
    )
    assert torch.equal(filtered(logits, temperature, 1.0, 0.0), logits)
    assert torch.equal(filtered(logits, temperature, None, None), logits)
    assert torch.equal(filtered(logits, 0.0, top_p, min_p), logits)


def test_top_p_drops_the_token_that_crosses_the_line() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    assert filtered(logits, 1.0, 0.75, None).isfinite()[0].tolist() == [True, True, False, False]
    assert filtered(logits, 1.0, 0.7, None).isfinite()[0].tolist() == [True, False, False, False]
    assert filtered(logits, 1.0, 0.1, None).isfinite()[0].tolist() == [True, False, False, False]


def test_choices_follow_the_filtered_distribution() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    counts = Counter((token,) for token in choose(logits.expand(3000, 4), range(3000), 1.0, 0.95, 0.4, seed=7))
    assert follows(counts, {(0,): 0.4 / 0.9, (1,): 0.3 / 0.9, (2,): 0.2 / 0.9})
    assert choose(logits[None], [4], 0.0, 0.1, 0.9, seed=1) == [0]


# ---- static


@given(
    name=st.sampled_from(sorted(SCRIPTS)),
    limit=st.integers(0, 9),
    ends=st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
)
def test_every_method_writes_the_script(name: str, limit: int, ends: list[int]) -> None:
    written: list[int] = []
    while len(written) < limit and not (written and written[-1] in ends):
        written.append(SCRIPTS[name]([*PROMPT, *written]))
    for method, options in (
        (recurrent_static, {}),
        (recurrent_adaptive, {"threshold": 0.1}),
        (recurrent_self_speculation, {"block_size": 3, "draft_recurrences": 1}),
    ):
        model = Scripted(SCRIPTS[name], lambda position: position % 3)
        result = method(model, PROMPT, limit, init=zeros, recurrences=4, end_tokens=ends, **options)  # type: ignore[operator]
        assert result.tokens == written
        if limit:
            stored = len(PROMPT) + len(written) - 1 + (len(model.stored) == len(PROMPT) + len(written))
            assert model.stored == [*PROMPT, *written][:stored]


def test_static_by_hand() -> None:
    """Two tokens, each part called by hand."""
    model = tiny(2)
    past = model.new_past()
    tokens = []
    for text in (PROMPT, None):
        piece = text or tokens[-1:]
        start = past.length
        e = model.prelude(torch.tensor(piece), start, past)
        z = init(0, rows(start, len(piece)))
        for _ in range(3):
            z = model.core(z, e, start, past)
        tokens += model.coda(z, start, past)[-1:].argmax(-1).tolist()
        past.freeze(len(piece))
    result = recurrent_static(model, PROMPT, 2, init=init, recurrences=3)
    assert result.tokens == tokens and (result.forwards, result.recurrences) == (2, 6)
    assert result.trace == [(3, tokens[:1], tokens[1:], [math.inf], 1)]


# ---- adaptive


@pytest.mark.covering
@pytest.mark.parametrize("criterion", sorted(THRESHOLDS))
@pytest.mark.parametrize(
    ("check_every", "min_recurrences", "first_check"), [(1, 0, None), (1, 1, None), (2, 3, None), (3, 1, 2), (2, 0, 3)]
)
def test_adaptive_exits_where_the_criterion_says(
    criterion: str, check_every: int, min_recurrences: int, first_check: int | None
) -> None:
    """Recurrence by recurrence, with the criteria written out independently."""
    model, most = tiny(1, state_scale=0.4), 8
    threshold = {**THRESHOLDS, "cosine": 1e-4, "entropy-diff": 3e-3, "kl": 1e-4, "argmax-stability": 2}[criterion]
    options: dict[str, Any] = {"check_every": check_every, "min_recurrences": min_recurrences, "max_recurrences": most}
    result = recurrent_adaptive(
        model,
        PROMPT,
        4,
        init=init,
        recurrences=5,
        criterion=criterion,
        threshold=threshold,
        first_check=first_check,
        **options,
    )
    past = model.new_past()
    tokens = forward(model, PROMPT, past, 5, init)[-1:].argmax(-1).tolist()
    past.freeze(3)
    for step in result.trace:
        e = model.prelude(torch.tensor(tokens[-1:]), past.length, past)
        z = init(0, rows(past.length, 1))
        states, logits = [z[0]], []
        for _ in range(most):
            states.append(model.core(states[-1][None], e, past.length, past)[0])
            logits.append(model.coda(states[-1][None], past.length, past)[0])
        distributions = [torch.full((13,), 1 / 13, dtype=torch.float64), *torch.softmax(torch.stack(logits), -1)]
        entropies = [100.0, *(-(p * torch.log(p + 1e-10)).sum().item() for p in distributions[1:])]
        sharp = [distributions[0]]
        for p in distributions[1:]:
            q = torch.tensor([v if v >= 0.1 * p.max() else 1 / 13 for v in p.tolist()], dtype=torch.float64)
            sharp.append(q / q.sum())
        ids = [-1, *(row.argmax().item() for row in logits)]
        at, stable, last = most, 0, 0
        for number, now in enumerate(range(first_check or check_every, most + 1, check_every)):
            a, b = states[now], states[last]
            counts = last >= min_recurrences
            stable = stable + 1 if counts and ids[now] == ids[last] else 0
            value = {
                "latent-diff": ((a - b).norm() / a.norm()).item(),
                "cosine": 1 - torch.nn.functional.cosine_similarity(a, b, 0).item(),
                "entropy-diff": abs(entropies[now] - entropies[last]),
                "kl": torch.nn.functional.kl_div(distributions[now].log(), distributions[last], reduction="sum").item(),
                "minp-kl": torch.nn.functional.kl_div(sharp[now].log(), sharp[last], reduction="sum").item(),
                "argmax-stability": float(stable),
            }[criterion]
            last, seen = now, step.values[number]
            assert seen == pytest.approx(value, rel=1e-6, abs=1e-12) if counts else math.isinf(seen)
            if counts and (value >= threshold if criterion == "argmax-stability" else value < threshold):
                at = now
                break
        assert step.recurrences == at
        # The K and V of the token are those of the recurrence it stopped at, so the past has to be rebuilt.
        logits_now = model.coda(refine(model, z, e, past.length, past, at), past.length, past)
        past.freeze(1)
        tokens += logits_now.argmax(-1).tolist()
    assert result.tokens == tokens
    assert result.recurrences == 5 + sum(step.recurrences for step in result.trace)


def test_criteria_on_known_distributions() -> None:
    state = torch.tensor([3.0, 4.0])
    assert change("latent-diff", state, torch.tensor([0.0, 4.0])) == pytest.approx(0.6)
    assert change("latent-diff", torch.zeros(2), torch.zeros(2)) == 0
    assert change("latent-diff", torch.zeros(2), state) == math.inf
    flat, sharp = torch.zeros(4), torch.tensor([0.0, -100.0, -100.0, -100.0])
    assert observed("entropy-diff", state, flat).item() == pytest.approx(math.log(4))
    assert change("kl", observed("kl", state, flat), at_first("kl", state, 4)) == pytest.approx(0, abs=1e-12)
    assert change("kl", observed("kl", state, sharp), observed("kl", state, flat)) == pytest.approx(75 - math.log(4))
    assert minp_distribution(sharp).tolist() == pytest.approx([4 / 7, 1 / 7, 1 / 7, 1 / 7])
    for criterion, first in (("entropy-diff", 100), ("argmax-stability", 1)):
        assert change(criterion, observed(criterion, state, sharp), at_first(criterion, state, 4)) == pytest.approx(
            first
        )


def test_checks_that_do_not_count_are_not_counted() -> None:
    """A model whose likeliest token never changes is done after five checks that count, as if it had begun after the others."""
    model = tiny(1, state_scale=0.4)
    coda, always = model.coda, torch.eye(13, dtype=torch.float64)[3]
    model.coda = lambda z, cursor, past: 0 * coda(z, cursor, past) + always  # type: ignore[method-assign]
    options: dict[str, Any] = {"init": init, "criterion": "argmax-stability", "max_recurrences": 20}
    for least, needed in ((0, 6), (1, 6), (4, 9)):
        result = recurrent_adaptive(model, PROMPT, 3, min_recurrences=least, **options)
        assert [step.recurrences for step in result.trace] == [needed] * 2
    # The released code with min_steps = 4: the first of its checks follows the fifth recurrence.
    released = recurrent_adaptive(model, PROMPT, 3, min_recurrences=0, first_check=5, check_every=2, **options)
    assert [step.recurrences for step in released.trace] == [5 + 5 * 2] * 2


@pytest.mark.parametrize("criterion", sorted(THRESHOLDS))
def test_a_threshold_out_of_reach_is_static_decoding(criterion: str) -> None:
    model, never = tiny(), 10**6 if criterion == "argmax-stability" else 0.0
    result = recurrent_adaptive(
        model, PROMPT, 5, init=init, recurrences=5, criterion=criterion, threshold=never, check_every=2
    )
    assert result.tokens == recurrent_static(model, PROMPT, 5, init=init, recurrences=5).tokens
    assert [step.recurrences for step in result.trace] == [5] * 4
    assert [len(step.values) for step in result.trace] == [2] * 4  # the fifth recurrence has no check


def test_adaptive_refuses_unknown_options() -> None:
    with pytest.raises(ValueError, match="criterion must be one of"):
        recurrent_adaptive(tiny(), PROMPT, 2, init=init, criterion="mood")
    with pytest.raises(ValueError, match="first_check must be at least 1, got 0"):
        recurrent_adaptive(tiny(), PROMPT, 2, init=init, first_check=0)
    with pytest.raises(ValueError, match="check_every must be at least 1, got 0"):
        recurrent_adaptive(tiny(), PROMPT, 2, init=init, check_every=0)


# ---- self-speculation


@given(
    seed=st.integers(0, 5),
    limit=st.integers(0, 7),
    block_size=st.integers(0, 4),
    draft_recurrences=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 0.7]),
    ends=st.lists(st.integers(0, 12), max_size=2),
    data=st.data(),
)
@settings(max_examples=14)
def test_self_speculation_writes_static_decodings_text(
    seed, limit, block_size, draft_recurrences, temperature, ends, data
) -> None:
    """With one recurrence for any model, with more for one that has converged: the first recurrence is its fixed point."""
    recurrences, state_scale = data.draw(st.sampled_from([(1, 1.0), (3, 0.0), (10, 0.1)]))
    model = tiny(seed, state_scale)
    options: dict[str, Any] = {"init": init, "recurrences": recurrences, "end_tokens": ends, "seed": seed}
    options |= {"temperature": temperature, "top_p": 0.95}
    static = recurrent_static(model, PROMPT, limit, **options)
    result = recurrent_self_speculation(
        model, PROMPT, limit, block_size=block_size, draft_recurrences=draft_recurrences, **options
    )
    assert result.tokens == static.tokens
    drafted = sum(len(step.draft) - 1 for step in result.trace)
    assert result.forwards == (limit > 0) + drafted + len(result.trace)
    assert result.recurrences == draft_recurrences * drafted + recurrences * (result.forwards - drafted)
    assert all(1 <= step.accepted <= len(step.draft) <= block_size + 1 for step in result.trace)
    if state_scale == 0.0:
        assert all(step.accepted == len(step.draft) or step.draft[step.accepted - 1] in ends for step in result.trace)


def test_self_speculation_is_not_static_decoding_before_convergence() -> None:
    """A verify forward reads intermediate states of draft rows, static decoding their final ones: the logits differ."""
    model, text = tiny(0), [5, 9, 2]
    past = model.new_past()
    forward(model, PROMPT, past, 3, init)
    past.freeze(3)
    block = forward(model, text, past, 3, init)
    one = []
    for token in text:
        one.append(forward(model, [token], past, 3, init))
        past.freeze(1)
    single = torch.cat(one)
    assert torch.allclose(block[0], single[0], rtol=1e-11) and not torch.allclose(block[1], single[1], rtol=1e-3)


def test_no_recurrence_left_of_the_draft() -> None:
    """The prefix that a verify forward sees is that of static decoding, whatever was drafted before."""
    model = tiny(3)
    a = recurrent_self_speculation(model, PROMPT, 8, init=init, recurrences=1, block_size=3, draft_recurrences=2)
    b = recurrent_self_speculation(model, PROMPT, 8, init=init, recurrences=1, block_size=3, draft_recurrences=3)
    assert a.tokens == b.tokens and [step.draft for step in a.trace] != [step.draft for step in b.trace]
