"""The released sampler with its errors: each of them shown on a model whose states and tokens are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.papers.released.plain_recurrent import FREEZES, Memory, ReleasedResult, released_recurrent
from pdkernels.reference.philox import random_words
from pdkernels.reference.recurrent_depth import RecurrentDepthReference, RecurrentPast
from pdkernels.reference.recurrent_diffusion import recurrent_diffusion
from pdkernels.reference.recurrent_sampling import choose, position_states, rows
from tests.support.base import page_sizes
from tests.support.causal import SCRIPTS, VOCABULARY, Script
from tests.support.recurrent import (
    RECURRENCES,
    Parts,
    Scripted,
    direction,
    draws,
    init,
    init_of,
    models,
    seeds,
    tiny,
    token,
    zeros,
)
from tests.support.recurrent import VOCABULARY as TOKENS

PROMPT = [3, 1, 4]


def greedy(logits: Tensor, positions: Sequence[int]) -> list[int]:
    return choose(logits, positions, 0.0, None, None, seed=0)


def run(
    script: Script | str, limit: int, settle: Any = lambda position: 0, **options: Any
) -> tuple[ReleasedResult, Scripted]:
    """Without noise, which the scripted states do not support."""
    model = Scripted(SCRIPTS[script] if isinstance(script, str) else script, settle)
    options = {"init": zeros, "sample": greedy, "noise": 0.0, "inner_recurrence": 1, "recurrences": 4, **options}
    return released_recurrent(model, PROMPT, limit, **options), model


def far(positions: int) -> float:
    """Distance of two converged states, a number of positions apart."""
    return (direction(0) - direction(positions)).norm().item()


def test_a_step_after_a_freeze_compares_with_the_neighbour() -> None:
    """All states have converged, so an aligned distance is 0. A row's first one is to its initial state, which is 0: it is 1."""
    result, _ = run("position", 12, max_wavefront=16)
    assert [step.distance for step in result.trace[:3]] == [
        [],  # the first step has nothing to compare
        [pytest.approx(0, abs=1e-8), pytest.approx(1)],
        [pytest.approx(0, abs=1e-8), pytest.approx(0, abs=1e-8), pytest.approx(1)],
    ]
    freezing = [s for s, step in enumerate(result.trace[:-1]) if step.frozen]
    assert freezing[0] == 2 and len(freezing) >= 3
    for step, after in ((result.trace[s], result.trace[s + 1]) for s in freezing):
        assert after.cursor == step.cursor + step.frozen and after.frozen == 0
        assert len(after.distance) == len(after.tokens) - step.frozen
        assert after.distance[:-1] == [pytest.approx(far(step.frozen), rel=1e-6)] * (len(after.distance) - 1)
        assert after.distance[-1] == pytest.approx(1)
    for step, after in zip(result.trace[1:], result.trace[2:]):
        if not step.frozen:
            assert after.distance == [pytest.approx(0, abs=1e-8)] * (len(after.tokens) - 1) + [pytest.approx(1)]


def test_the_aligned_sampler_does_not_lose_those_steps() -> None:
    published, _ = run("position", 16)
    model = Scripted(SCRIPTS["position"])
    aligned = recurrent_diffusion(model, PROMPT, 16, init=zeros, inner_recurrence=1, recurrences=4)
    assert aligned.tokens == published.tokens[:16] and aligned.forwards < published.forwards


def test_a_converged_row_stays_and_the_last_one_counts() -> None:
    """Row 0 never settles, row 1 does: the cursor moves to row 1, whose prediction is still a draft."""
    result, model = run("position", 6, lambda position: 10**6 if position == 3 else 0)
    step, after = result.trace[2:4]
    assert [value < 0.03 for value in step.distance] == [False, True, False]
    assert (step.cursor, step.frozen, after.cursor) == (3, 1, 4)
    assert after.tokens[0] == step.predictions[0] and after.predictions[0] == step.predictions[1]


def test_a_converged_first_row_changes_nothing() -> None:
    result, model = run("position", 4, lambda position: 0 if position == 3 else 10**6, max_steps=30)
    assert result.trace[2].distance[0] < 0.03 and {step.frozen for step in result.trace} == {0}
    assert len(result.tokens) == 1 and len(result.trace) == 32


def test_a_wave_of_one_makes_no_progress() -> None:
    result, model = run("position", 4, max_wavefront=1, max_steps=20)
    assert result.tokens == [SCRIPTS["position"](PROMPT)]
    assert len(result.trace) == 22 and result.standing == 22 and set(model.widths) == {1}
    assert len(run("position", 4, max_wavefront=2)[0].tokens) >= 4


@pytest.mark.parametrize("cap", [2, 3, 5])
def test_the_wave_stays_at_its_limit(cap: int) -> None:
    result, model = run("bigram", 10, lambda position: position % 5, max_wavefront=cap)
    assert max(model.widths) == cap and result.standing > 0
    # The script's tokens all the same, as long as no stale key is frozen, which the script would read.
    assert all(b.cursor == a.cursor + a.frozen for a, b in zip(result.trace, result.trace[1:]))


def test_stale_keys_are_frozen() -> None:
    """A script that reads its history writes another text than it would in order, because it reads discarded tokens."""
    result, model = run(SCRIPTS["bigram"], 14, headway=3, guess=lambda step, count: [7] * count)
    text = [*PROMPT, *result.tokens]
    assert model.stored != text[: len(model.stored)]
    assert any(a != b for a, b in zip(result.tokens, in_order("bigram", 14)))


def in_order(name: str, limit: int) -> list[int]:
    written: list[int] = []
    while len(written) < limit:
        written.append(SCRIPTS[name]([*PROMPT, *written]))
    return written


def test_fixed_freezes_first_at_step_nine_and_stays_at_ten_rows() -> None:
    """r' = 4, r = 32: ten steps are 40 recurrences of the first position, not 32."""
    result, model = run("position", 12, freeze="fixed", inner_recurrence=4, recurrences=32)
    assert [step.frozen for step in result.trace] == [0] * 9 + [1] * 11
    assert [len(step.tokens) for step in result.trace] == [*range(1, 11), *[10] * 10]
    assert result.tokens == in_order("position", 12) and all(step.distance == [] for step in result.trace)
    assert model.stored == [*PROMPT, *result.tokens][:-1]


def test_fixed_needs_a_wave_that_grows() -> None:
    """Where the released code moves its cache without its states."""
    with pytest.raises(ValueError, match="max_wavefront must let the wave grow.*got 10. It takes 11."):
        run("position", 12, freeze="fixed", inner_recurrence=4, recurrences=32, max_wavefront=10)
    assert (
        len(run("position", 12, freeze="fixed", inner_recurrence=4, recurrences=32, max_wavefront=11)[0].tokens) == 12
    )


def test_fixed_with_headway_freezes_guesses_that_were_read() -> None:
    """Two rows freeze at once: their predictions become text, the second of which at first came from a guessed input."""
    result, model = run("position", 8, freeze="fixed", headway=2, guess=lambda step, count: [5] * count)
    assert [step.frozen for step in result.trace] == [0] * 5 + [2] * 4
    assert [len(step.tokens) for step in result.trace] == [1, 3, 5, 7, 9, 11, 11, 11, 11]
    assert result.tokens == in_order("position", 9)  # one more than requested


def test_token_stability_counts_all_unchanged_steps() -> None:
    """The counter of the released code is not reset: a token that flips on every third step still gets there."""
    calls = {"forward": 0}

    def script(history: list[int]) -> int:
        if len(history) == 4:
            calls["forward"] += 1
            return 9 if calls["forward"] % 3 == 0 else 8
        return calls["forward"] % 2

    result, _ = run(script, 3, lambda position: 10**6, freeze="token-stability", recurrences=3, max_steps=12)
    assert [step.predictions[0] for step in result.trace[:8]] == [8, 8, 9, 8, 8, 9, 8, 8]
    # Unchanged in steps 1, 4, 7 and 10: more than 3 // 1 of them in step 10. The tokens after it change in every step.
    assert [step.frozen for step in result.trace[:11]] == [0] * 10 + [1]
    steady, _ = run(lambda history: 2, 3, lambda position: 10**6, freeze="token-stability", recurrences=3)
    assert [step.frozen for step in steady.trace] == [0, 0, 0, 0, 1, 1]


def test_stop_tokens_count_only_after_step_r_and_nothing_is_cut() -> None:
    """Increasing ids: each comes once. Those that froze before step number `recurrences` are passed over."""
    script = lambda history: len(history) % VOCABULARY  # noqa: E731
    free, _ = run(script, 18, recurrences=8)
    end_of = {}  # token -> step that froze it
    for s, step in enumerate(free.trace):
        for position in range(step.cursor, step.cursor + step.frozen):
            end_of[(position + 1) % VOCABULARY] = s
    passed = next(token for token, s in end_of.items() if s <= 8)
    seen = next(token for token, s in end_of.items() if s > 8)
    assert run(script, 18, recurrences=8, stop_tokens=[passed])[0] == free
    stopped, _ = run(script, 18, recurrences=8, stop_tokens=[seen])
    assert len(stopped.trace) == end_of[seen] + 1 < len(free.trace)
    assert seen in stopped.tokens and stopped.tokens == free.tokens[: len(stopped.tokens)]
    # With a long first wait, the prompt itself holds the stop token.
    late, _ = run(script, 18, lambda position: 20, recurrences=4, stop_tokens=[PROMPT[0]])
    assert sum(step.frozen > 0 for step in late.trace) <= 1 and len(late.tokens) < 18


def test_more_tokens_than_were_requested() -> None:
    result, _ = run("position", 5, lambda position: 8 if position == 3 else 0, freeze="latent-diff")
    assert len(result.tokens) > 5


def test_it_stops_at_the_models_context() -> None:
    result, _ = run("position", 30, max_positions=9)
    assert len(result.tokens) < 30 and max(step.cursor + len(step.tokens) for step in result.trace) <= 9


# ---- the numbers that are mixed, on the tiny random model


class Spy:
    """Delegates to a model, and records its pasts, the embeddings it made, and the first input of its core in each step."""

    def __init__(self, model: RecurrentDepthReference) -> None:
        self.model = model
        self.pasts: list[RecurrentPast] = []
        self.e_new: list[Tensor] = []
        self.given: list[tuple[Tensor, Tensor]] = []

    def new_past(self) -> RecurrentPast:
        self.pasts.append(self.model.new_past())
        return self.pasts[-1]

    def coda(self, state: Tensor, start: int, past: RecurrentPast) -> Tensor:
        return self.model.coda(state, start, past)

    def prelude(self, tokens: Tensor, start: int, past: RecurrentPast) -> Tensor:
        e = self.model.prelude(tokens, start, past)
        if start:
            self.e_new.append(e.clone())
            self.first = True
        return e

    def core(self, state: Tensor, e: Tensor, start: int, past: RecurrentPast) -> Tensor:
        if start and self.first:
            self.given.append((state.clone(), e.clone()))
            self.first = False
        return self.model.core(state, e, start, past)


def spied(**options: Any) -> tuple[ReleasedResult, Spy]:
    spy = Spy(tiny(2, state_scale=0.2))
    options = {"init": init, "sample": greedy, "recurrences": 4, "inner_recurrence": 2, **options}
    return released_recurrent(spy, PROMPT, 6, **options), spy


def test_a_new_embedding_is_damped() -> None:
    """0.9 of its norm in its first step (0.898 with the roundings of bf16); the first position is blended with itself."""
    result, spy = spied(noise=0.0)
    old: dict[int, Tensor] = {}
    for s, (step, new, (_, e)) in enumerate(zip(result.trace, spy.e_new, spy.given, strict=True)):
        for i in range(len(step.tokens)):
            position = step.cursor + i
            if position in old:
                assert torch.allclose(e[i], 0.9 * new[i] + 0.1 * old[position])
            else:
                expected = 1.0 if s == 0 else 0.9
                assert (e[i].norm() / new[i].norm()).item() == pytest.approx(expected, rel=1e-12)
        old = {step.cursor + i: e[i] for i in range(len(step.tokens))}
    assert len(result.trace) > 6 and any(step.frozen for step in result.trace)


def test_no_momentum_leaves_embeddings_alone() -> None:
    _, spy = spied(noise=0.0, momentum=0.0)
    assert all(torch.equal(new, e) for new, (_, e) in zip(spy.e_new, spy.given, strict=True))


@pytest.mark.parametrize(("mixer", "schedule"), [("linear", "harmonic"), ("sqrt", "harmonic"), ("linear", "constant")])
def test_noise_of_every_row(mixer: str, schedule: str) -> None:
    """Also of new ones, harmonic in the recurrences of the position; the first position counts those of the prompt."""
    result, spy = spied(noise=0.5, mixer=mixer, schedule=schedule, threshold=0.0, max_steps=4)
    counts = {3: 4}
    for s, (step, (z, _)) in enumerate(zip(result.trace, spy.given, strict=True)):
        width = len(step.tokens)
        assert (step.cursor, width) == (3, s + 1)
        position, count = 3 + s, counts.get(3 + s, 0)  # the newest row: its state was never refined
        beta = 0.5 / (1 + count) if schedule == "harmonic" else 0.5
        fresh, noise = init(0, rows(position, 1))[0], init(s + 1, rows(position, 1))[0]
        keep, mix = (math.sqrt(1 - beta), math.sqrt(beta)) if mixer == "sqrt" else (1 - beta, beta)
        assert torch.allclose(z[-1], keep * fresh + mix * noise, rtol=1e-12)
        for i in range(width):
            counts[3 + i] = counts.get(3 + i, 0) + 2


def test_copied_states() -> None:
    result, spy = spied(noise=0.0, new_state="copied", threshold=0.0, max_steps=3, inner_recurrence=1)
    plain, other = spied(noise=0.0, threshold=0.0, max_steps=3, inner_recurrence=1)
    for s in range(1, 4):
        z = spy.given[s][0]
        assert torch.equal(z[-1], z[-2]) and not torch.equal(other.given[s][0][-1], other.given[s][0][-2])


def test_accelerations() -> None:
    """Second differences; -1 keeps the last difference by row number, -2 by shifted positions."""
    torch.manual_seed(0)
    a, b, c = (torch.randn(n, 4, dtype=torch.float64) for n in (3, 3, 4))
    for freeze, eps in (("latent-acceleration-1", 0.0), ("latent-acceleration-2", 1e-6)):
        memory = Memory(torch.zeros(1, 4).double())
        assert memory.distances(freeze, a, 7, 0) == []
        memory.keep(a, 0)
        memory.distances(freeze, b, 7, 7)
        memory.keep(b, 7)
        expected = (c[:3] - 2 * b + a).norm(dim=-1) / (c[:3].norm(dim=-1) + eps)
        assert memory.distances(freeze, c, 7, 7) == pytest.approx(expected.tolist(), rel=1e-9)
    # After a freeze of one row: the kept states start one position later than the code assumes.
    memory = Memory(torch.zeros(1, 4).double())
    memory.keep(a, 0)
    memory.keep(b, 7)
    expected = (c[:2] - 2 * b[1:] + a[1:]).norm(dim=-1) / (c[:2].norm(dim=-1) + 1e-6)
    assert memory.distances("latent-acceleration-2", c, 8, 7) == pytest.approx(expected.tolist(), rel=1e-9)


def test_states_that_do_not_meet() -> None:
    """The released code subtracts empty slices from non-empty ones: it fails, unless those have one row."""
    memory = Memory(torch.zeros(1, 4).double())
    with pytest.raises(
        ValueError, match="the states of three steps must meet .* got 2, 0 and 0 rows, on which the released"
    ):
        memory.distances("latent-acceleration-2", torch.ones(3, 4).double(), 2, 0)
    assert memory.distances("latent-acceleration-2", torch.ones(3, 4).double(), 3, 0) == []
    model = tiny()
    options: dict[str, Any] = {"freeze": "latent-acceleration-2", "headway": 2, "noise": 0.3, "max_steps": 3}
    options |= {"init": position_states(model.hidden_size), "sample": greedy}
    with pytest.raises(ValueError, match="the states of three steps must meet"):
        released_recurrent(model, [1, 2], 12, **options)
    assert len(released_recurrent(model, [1, 2, 3, 4, 5, 6], 12, **options).trace) == 5


@given(
    freeze=st.sampled_from(FREEZES), seed=st.integers(0, 3), headway=st.integers(1, 3), cap=st.sampled_from([0, 4, 128])
)
@settings(max_examples=12)
def test_invariants_of_all_modes(freeze: str, seed: int, headway: int, cap: int) -> None:
    """The cache is as long as the text minus one token, the text only grows, and consists of what the trace froze."""
    cap = 128 if freeze == "fixed" else cap
    model, prompt = Spy(tiny(seed, state_scale=0.2)), PROMPT * 3
    result = released_recurrent(
        model,
        prompt,
        6,
        init=init,
        sample=greedy,
        recurrences=4,
        inner_recurrence=2,
        headway=headway,
        max_wavefront=cap,
        freeze=freeze,
        noise=0.1,
        max_steps=25,
        guess=lambda step, count: [step % 13] * count,
    )
    assert model.pasts[0].length == len(prompt) + len(result.tokens) - 1
    assert sum(step.frozen for step in result.trace) == len(result.tokens) - 1
    assert all(b.cursor == a.cursor + a.frozen for a, b in zip(result.trace, result.trace[1:]))
    assert all(cap == 0 or len(step.tokens) <= cap for step in result.trace)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="freeze must be one of"):
        run("position", 2, freeze="sometimes")
    with pytest.raises(ValueError, match="schedule must be"):
        run("position", 2, schedule="linear")


@settings(max_examples=30, deadline=None)
@given(
    weights=st.tuples(st.sampled_from([1, 2]), st.sampled_from([0.3, 1.0])),
    prompt=st.lists(token, min_size=1, max_size=5),
    limit=st.integers(1, 12),
    ends=st.lists(token, max_size=2),
    draw=draws,
    seed=seeds,
    freeze=st.sampled_from(FREEZES),
    options=st.fixed_dictionaries(
        {"max_wavefront": st.integers(8, 30)},
        optional={
            "inner_recurrence": st.integers(1, 4),
            "threshold": st.sampled_from([0.03, 0.1, 0.5]),
            "noise": st.sampled_from([0, 0.2, 0.5]),
            "schedule": st.sampled_from(["constant", "harmonic"]),
            "mixer": st.sampled_from(["linear", "sqrt"]),
            "momentum": st.sampled_from([0, 0.5]),
            "headway": st.integers(1, 3),
            "recurrences": st.integers(1, 4),
            "new_state": st.sampled_from(["fresh", "copied"]),
        },
    ),
    page_size=page_sizes,
)
def test_the_parts_of_our_model_take_the_same_steps(
    weights, prompt, limit, ends, draw, seed, freeze, options, page_size
) -> None:
    """On a KV cache, pages included."""
    temperature, top_p, min_p, top_k = draw
    model, plain = models(*weights)
    # Rows that never settle would run for 4096 steps.
    options = dict(recurrences=RECURRENCES, noise=0.0, freeze=freeze, stop_tokens=ends, max_steps=25) | options

    def sampled(parts: Any, stretched: float = 1.0) -> ReleasedResult:
        return released_recurrent(
            parts,
            prompt,
            limit,
            init=lambda *where: stretched * init_of(seed)(*where),
            sample=lambda logits, positions: choose(logits, positions, temperature, top_p, min_p, seed, top_k),
            guess=lambda step, count: [
                word % TOKENS
                for word in random_words(seed, torch.tensor(step), torch.tensor(0), torch.arange(count)).tolist()
            ],
            **options,
        )

    def ours() -> ReleasedResult:
        return sampled(Parts(model, len(prompt) + limit + 2 * options["max_wavefront"], page_size))

    try:
        expected = sampled(plain)
    except ValueError as error:
        assert "max_wavefront must let the wave grow" in str(error) or "states of three steps must meet" in str(error)
        with pytest.raises(ValueError) as other:
            ours()
        assert str(other.value) == str(error)
        return
    # A core that is not a contraction may amplify a rounding until it decides: then there is nothing to compare.
    assume(same(sampled(plain, 1 + 1e-15), expected, 1e-8))
    result = ours()
    assert result.forwards == expected.forwards
    assert same(result, expected, 1e-6)


def same(a: ReleasedResult, b: ReleasedResult, tolerance: float) -> bool:
    """Whether two runs took the same steps, with close distances."""
    return (
        a.tokens == b.tokens
        and len(a.trace) == len(b.trace)
        and all(
            x[:3] == y[:3]
            and x.frozen == y.frozen
            and x.distance == pytest.approx(y.distance, rel=tolerance, abs=1e-9, nan_ok=True)
            for x, y in zip(a.trace, b.trace)
        )
    )
