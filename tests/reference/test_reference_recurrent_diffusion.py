"""The diffusion-forcing sampler: its wave, its freezes, and what it becomes at the edges of its options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference.jacobi import fillers
from pdkernels.reference.philox import random_words
from pdkernels.reference.recurrence import recurrence_advance_, recurrence_exit, recurrence_inject
from pdkernels.reference.recurrent_adaptive import recurrent_adaptive
from pdkernels.reference.recurrent_diffusion import leading, noise_level, recurrent_diffusion
from pdkernels.reference.recurrent_sampling import choose, forward, position_states, rows
from pdkernels.reference.recurrent_static import recurrent_static
from tests.support.causal import SCRIPTS, VOCABULARY, Script
from tests.support.recurrent import WIDE, Scripted, init, tiny, zeros

PROMPT = [3, 1, 4]
token = st.integers(0, 12)


def text_of(script: Script, prompt: list[int], limit: int, ends: Sequence[int] = ()) -> list[int]:
    """What a script writes, token by token."""
    written: list[int] = []
    while len(written) < limit and not (written and written[-1] in ends):
        written.append(script([*prompt, *written]))
    return written


@given(
    seed=st.integers(0, 3),
    prompt=st.lists(token, min_size=1, max_size=5),
    limit=st.integers(0, 9),
    recurrences=st.integers(1, 5),
    ends=st.lists(token, max_size=2),
    temperature=st.sampled_from([0.0, 0.8]),
)
@settings(max_examples=20)
def test_all_recurrences_in_one_step_are_static_decoding(
    seed: int, prompt: list[int], limit: int, recurrences: int, ends: list[int], temperature: float
) -> None:
    options: dict[str, Any] = {"init": init, "recurrences": recurrences, "end_tokens": ends, "seed": seed}
    options |= {"temperature": temperature, "top_p": 0.9, "min_p": 0.05}
    static = recurrent_static(tiny(seed), prompt, limit, **options)
    result = recurrent_diffusion(tiny(seed), prompt, limit, exit="fixed", inner_recurrence=recurrences, **options)
    assert result == static
    assert len(result.tokens) == limit or result.tokens[-1] in ends
    assert result.forwards == len(result.tokens) and result.recurrences == recurrences * result.forwards


@given(seed=st.integers(0, 5), inner=st.integers(1, 3), state_scale=st.sampled_from([0.1, 0.5, 1.0]))
@settings(max_examples=10)
def test_a_wave_of_one_is_adaptive_decoding(seed: int, inner: int, state_scale: float) -> None:
    model, most = tiny(seed, state_scale), 4 * inner
    options: dict[str, Any] = {"init": init, "recurrences": 6, "max_recurrences": most, "threshold": 0.1}
    adaptive = recurrent_adaptive(model, PROMPT, 5, check_every=inner, **options)
    result = recurrent_diffusion(model, PROMPT, 5, inner_recurrence=inner, max_wavefront=1, momentum=0.0, **options)
    assert result.tokens == adaptive.tokens and result.recurrences == adaptive.recurrences
    distances = iter(step.distance for step in result.trace)
    for step in adaptive.trace:
        assert [value for _ in step.values for value in next(distances)] == step.values
        assert step.recurrences == inner * len(step.values) and math.isinf(step.values[0])


@given(seed=st.integers(0, 8), inner=st.integers(1, 3), data=st.data())
@settings(max_examples=10)
def test_a_contraction_converges_to_the_tokens_of_static_decoding(seed: int, inner: int, data: st.DataObject) -> None:
    """Remark 3.1: the first position settles, then the conditioning of the next one, and so on."""
    model = tiny(seed, state_scale=0.03)  # at 0.1 some of these models never settle
    prompt = data.draw(st.lists(token, min_size=1, max_size=4))
    options: dict[str, Any] = {
        "momentum": data.draw(st.sampled_from([0.0, 0.1, 0.4])),
        "headway": data.draw(st.integers(1, 3)),
        "max_wavefront": data.draw(st.integers(1, 6)),
        "new_state": data.draw(st.sampled_from(["fresh", "copied"])),
        "exit": data.draw(st.sampled_from(["latent-diff", "latent-acceleration"])),
    }
    static = recurrent_static(model, prompt, 6, init=init, recurrences=14)
    result = recurrent_diffusion(
        model,
        prompt,
        6,
        init=init,
        recurrences=14,
        inner_recurrence=inner,
        threshold=1e-6,
        max_recurrences=1000,
        **options,
    )
    assert result.tokens == static.tokens
    assert result.forwards < 300, "some row was stopped, not converged"


def test_without_a_limit_every_row_settles() -> None:
    options: dict[str, Any] = {"init": init, "recurrences": 2, "inner_recurrence": 1, "threshold": 1e-6}
    for limit, settles in ((None, False), (0, True)):
        result = recurrent_diffusion(
            tiny(0, state_scale=0.1), PROMPT, 3, max_recurrences=limit, max_wavefront=1, **options
        )
        assert all(step.distance[0] < 1e-6 for step in result.trace if step.frozen) == settles


@given(data=st.data())
@settings(max_examples=40)
def test_the_tokens_of_a_model_that_settles_at_once(data: st.DataObject) -> None:
    """Whatever the schedule, rows whose input changed are kept, so tokens are exactly the script's."""
    name = data.draw(st.sampled_from(sorted(SCRIPTS)))
    prompt = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5))
    limit, headway, cap = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    ends = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2))
    slow = data.draw(st.integers(0, 9))
    settle = lambda position: position * 7 % (slow + 1)  # noqa: E731
    written = text_of(SCRIPTS[name], prompt, limit, ends)
    model = Scripted(SCRIPTS[name], settle)
    inner = data.draw(st.integers(1, 3))
    result = recurrent_diffusion(
        model,
        prompt,
        limit,
        init=zeros,
        inner_recurrence=inner,
        headway=headway,
        max_wavefront=cap,
        end_tokens=ends,
        rule=data.draw(st.sampled_from(["prefix", "last"])),
        exit=data.draw(st.sampled_from(["latent-diff", "fixed"])),
        recurrences=10,
    )
    assert result.tokens == written
    assert len(result.trace) == result.forwards - (limit > 0) <= 12 * limit
    assert all(1 <= len(step.tokens) <= cap for step in result.trace) and max(model.widths, default=0) <= cap
    if limit:
        assert model.stored == [*prompt, *written][: len(model.stored)]
        assert len(model.stored) == len(prompt) + len(written) - 1
    for step, following in zip(result.trace, result.trace[1:], strict=False):
        assert following.cursor == step.cursor + step.frozen


def test_without_the_guard_stale_keys_stay() -> None:
    """A frozen row keeps the K and V of the token it was when it ran."""
    script, prompt = SCRIPTS["bigram"], [2, 5, 1]
    options: dict[str, Any] = {"init": zeros, "headway": 3, "inner_recurrence": 1, "recurrences": 3}
    kept = Scripted(script)
    with_guard = recurrent_diffusion(kept, prompt, 16, **options)
    stale = Scripted(script)
    without = recurrent_diffusion(stale, prompt, 16, keep_changed=False, **options)
    assert kept.stored == [*prompt, *with_guard.tokens][:-1]
    assert stale.stored != [*prompt, *without.tokens][:-1]
    assert without.forwards < with_guard.forwards


@pytest.mark.parametrize(("rule", "frozen"), [("prefix", 1), ("last", 3)])
def test_prefix_and_last_on_distances_made_by_hand(rule: str, frozen: int) -> None:
    """Rows 0 and 2 have converged, row 1 has not: the prefix rule freezes one row, the last rule three."""
    slow = {3: 6, 4: 100}  # row 0 is at position 3 at first
    model = Scripted(SCRIPTS["position"], lambda position: slow.get(position, 0))
    result = recurrent_diffusion(
        model, PROMPT, 12, init=zeros, inner_recurrence=2, rule=rule, max_recurrences=40, threshold=0.03
    )
    step = next(step for step in result.trace if step.frozen)
    low = [value < 0.03 for value in step.distance]
    assert low[:3] == [True, False, True] and step.frozen == frozen
    assert leading([True, False, True], rule) == frozen
    assert leading([False, True], rule) == (0 if rule == "prefix" else 2)
    assert (leading([True] * 4, rule), leading([False] * 3, rule)) == (4, 0)


def test_a_row_that_never_settles_is_frozen_at_the_most_recurrences() -> None:
    model = Scripted(SCRIPTS["history"], lambda position: 10**6)
    result = recurrent_diffusion(model, PROMPT, 9, init=zeros, inner_recurrence=1, recurrences=3, max_recurrences=5)
    assert [step.frozen for step in result.trace[:6]] == [0, 0, 0, 0, 1, 1]
    assert [len(step.tokens) for step in result.trace[:6]] == [1, 2, 3, 4, 5, 5]
    assert result.tokens == text_of(SCRIPTS["history"], PROMPT, 9)
    # Not a multiple of the inner recurrences: the step in which it is reached.
    result = recurrent_diffusion(model, PROMPT, 9, init=zeros, inner_recurrence=2, recurrences=3, max_recurrences=5)
    assert [step.frozen for step in result.trace[:4]] == [0, 0, 1, 1]
    # By default at four times the recurrences of the prompt.
    result = recurrent_diffusion(model, PROMPT, 3, init=zeros, inner_recurrence=1, recurrences=3)
    assert [step.frozen for step in result.trace] == [0] * 11 + [1, 1]


def test_fixed_freezes_when_a_position_has_had_its_recurrences() -> None:
    """Algorithm 1 with ceil(r / r') steps, whatever the states do: the wave grows to that many rows and stays."""
    model = Scripted(SCRIPTS["position"])
    result = recurrent_diffusion(model, PROMPT, 20, init=zeros, exit="fixed", inner_recurrence=4, recurrences=10)
    assert [len(step.tokens) for step in result.trace] == [1, 2, *[3] * 17, 2, 1]
    assert [step.frozen for step in result.trace] == [0, 0, *[1] * 19]
    assert result.recurrences == 10 + 4 * 21


def test_token_stability() -> None:
    """With the position script the wave's predictions are right at once: `stability` steps confirm the first one."""
    model = Scripted(SCRIPTS["position"], lambda position: 10**6)
    options: dict[str, Any] = {"init": zeros, "inner_recurrence": 2, "recurrences": 6, "max_recurrences": 0}
    options |= {"exit": "token-stability"}
    result = recurrent_diffusion(model, PROMPT, 12, **options)
    assert [step.frozen for step in result.trace[:6]] == [0, 0, 0, 0, 1, 1]  # 6 // 2 + 1 = 4 unchanged steps
    # A token that changes restarts its count. This one is never the same in three steps: only the limit of 24 freezes it.
    calls = {"forward": 0}

    def script(history: list[int]) -> int:
        calls["forward"] += len(history) == 4
        return 9 if len(history) == 4 and calls["forward"] % 3 == 0 else 8

    flips = recurrent_diffusion(Scripted(script), PROMPT, 3, stability=2, **{**options, "max_recurrences": 24})
    assert [step.frozen for step in flips.trace[:12]] == [0] * 11 + [1]
    result = recurrent_diffusion(model, PROMPT, 12, stability=1, **options)
    assert [step.frozen for step in result.trace[:4]] == [0, 1, 1, 1]


def test_acceleration_needs_three_steps() -> None:
    model = Scripted(SCRIPTS["position"])
    options: dict[str, Any] = {"init": zeros, "inner_recurrence": 1, "recurrences": 9}
    result = recurrent_diffusion(model, PROMPT, 12, exit="latent-acceleration", **options)
    assert [step.frozen for step in result.trace[:5]] == [0, 0, 1, 1, 1]
    infinite = [[math.isinf(value) for value in step.distance] for step in result.trace[:3]]
    assert infinite == [[True], [True] * 2, [False, True, True]]


@given(
    seed=st.integers(0, 3),
    short=st.integers(0, 6),
    more=st.integers(1, 6),
    cap=st.integers(1, 5),
    inner=st.integers(1, 3),
)
@settings(max_examples=8)
def test_a_shorter_generation_is_the_beginning_of_a_longer_one(
    seed: int, short: int, more: int, cap: int, inner: int
) -> None:
    options: dict[str, Any] = dict(init=init, recurrences=4, inner_recurrence=inner, max_wavefront=cap, threshold=0.3)
    options |= {"max_recurrences": 8, "temperature": 0.7, "seed": seed, "noise": 0.2}
    long = recurrent_diffusion(tiny(seed), PROMPT, short + more, **options)
    assert recurrent_diffusion(tiny(seed), PROMPT, short, **options).tokens == long.tokens[:short]


@pytest.mark.parametrize("cut", range(1, 9))
def test_an_end_token_stops_at_any_step(cut: int) -> None:
    """The script predicts increasing ids, so each one comes once."""
    script = lambda history: len(history) % VOCABULARY  # noqa: E731
    end = len(PROMPT) + cut - 1
    for settle in (0, 5):
        model = Scripted(script, lambda position: settle)  # noqa: B023
        result = recurrent_diffusion(model, PROMPT, 12, init=zeros, inner_recurrence=1, end_tokens=[end], headway=2)
        assert result.tokens == list(range(len(PROMPT), end + 1))


def by_rows(model: Any, prompt: list[int], limit: int, seed: int, **options: Any) -> list[tuple[Any, ...]]:
    """The sampler once more, built from the row kernels' references: rows read at an offset, integers decided at once."""
    inner, headway, most = options["inner_recurrence"], options["headway"], options["max_wavefront"]
    captured: dict[str, Any] = {}
    norm = model._norm

    def capturing(x: torch.Tensor, name: str) -> torch.Tensor:
        if name == "core_block.1.norm_4.weight":
            captured["sum"] = x
        return norm(x, name)

    model._norm = capturing
    start = position_states(WIDE, seed=seed)
    past = model.new_past()
    logits = forward(model, prompt, past, options["recurrences"], start)
    past.freeze(len(prompt))
    text = [*prompt, *choose(logits[-1:], [len(prompt)], 0.0, None, None, seed)]

    def vector(value: int) -> torch.Tensor:
        return torch.tensor([value])

    tokens, counts = torch.zeros(1, most + 1, dtype=torch.int64), torch.zeros(1, most, dtype=torch.int64)
    stable = torch.zeros_like(counts)
    tokens[0, 0] = text[-1]
    width, cursor, advance, steps, remaining = vector(1), vector(len(prompt)), vector(0), vector(0), vector(limit - 1)
    state = blended = older = None
    older_advance = vector(0)
    trace: list[tuple[Any, ...]] = []
    while int(width) > 0:
        w, c = int(width), int(cursor)
        inputs = tokens[0, :w].tolist()
        e = model.prelude(tokens[0, :w], c, past)[None]
        both = recurrence_inject(
            state,
            e,
            blended,
            counts,
            cursor,
            width,
            advance,
            steps,
            seed,
            None,
            options["noise"],
            options["schedule"],
            options["recurrences"],
            options["mixer"],
            options["momentum"],
            new_state=options["new_state"],
        )
        z, blended = both[0, :, :WIDE], both[..., WIDE:]
        for _ in range(inner):
            z = model.core(z, blended[0], c, past)
        latent, twice = options["exit"].startswith("latent"), options["exit"] == "latent-acceleration"
        after, distance, converged = recurrence_exit(
            captured["sum"][None],
            torch.zeros_like(z)[None],
            model["core_block.1.norm_4.weight"],
            state,
            counts,
            width,
            advance,
            options["threshold"],
            older if twice else None,
            older_advance if twice else None,
            2 * inner if twice else 1,
        )
        if twice and older is None:
            distance, converged = torch.full_like(distance, torch.inf), torch.zeros_like(converged)
        assert torch.equal(after[0], z)
        said = choose(model.coda(z, c, past), [c + 1 + i for i in range(w)], 0.0, None, None, seed)
        words = random_words(seed, steps, torch.tensor(0), torch.arange(headway - 1)).tolist()
        older, older_advance, state = state, advance.clone(), after
        recurrence_advance_(
            tokens,
            torch.tensor([said]),
            counts,
            stable,
            width,
            cursor,
            advance,
            steps,
            remaining,
            converged if latent else None,
            inner,
            most,
            5 if options["exit"] == "fixed" else options["max_recurrences"],
            2 if options["exit"] == "token-stability" else 0,
            options["rule"],
            headway,
            keep_changed=options["keep_changed"],
            filler=torch.tensor([fillers(words, text)], dtype=torch.int64),
        )
        past.freeze(int(advance))
        text += said[: int(advance)]
        trace.append((c, inputs, said, distance[0].tolist() if latent else [math.inf] * w, int(advance)))
    del model._norm
    return trace


@given(data=st.data())
@settings(max_examples=15)
def test_against_the_row_kernels_references(data: st.DataObject) -> None:
    """What is kept by position here is kept by row there; every step must be the same."""
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    seed, limit = data.draw(st.integers(0, 4)), data.draw(st.integers(2, 8))
    options: dict[str, Any] = {
        "recurrences": 5,
        "inner_recurrence": draw(1, 2, 3),
        "threshold": draw(0.05, 0.3, 0.8),
        "noise": draw(0.0, 0.3),
        "schedule": draw("constant", "linear", "harmonic", "root"),
        "mixer": draw("linear", "sqrt"),
        "momentum": draw(0.0, 0.2),
        "headway": draw(1, 2, 3),
        "max_wavefront": draw(1, 2, 4, 9),
        "rule": draw("prefix", "last"),
        "exit": draw("latent-diff", "latent-acceleration", "token-stability", "fixed"),
        "stability": 2,
        "new_state": draw("fresh", "copied"),
        "keep_changed": draw(True, False),
        "max_recurrences": 6,
    }
    model = tiny(seed, state_scale=draw(0.3, 1.0))
    result = recurrent_diffusion(model, PROMPT, limit, init=position_states(WIDE, seed=seed), seed=seed, **options)
    steps = by_rows(model, PROMPT, limit, seed, **options)
    assert [step[:3] + step[4:] for step in steps] == [tuple(step[:3]) + tuple(step[4:]) for step in result.trace]
    for step, expected in zip(steps, result.trace):
        assert step[3] == pytest.approx(expected.distance, rel=1e-9)


def algorithm_1(
    model: Any, prompt: list[int], count: int, init_state: Any, r: int, inner: int, beta: Any
) -> tuple[list[int], list[list[int]]]:
    """Algorithm 1 line by line, one state to a position. A position is complete after ceil(r / r') steps, so that r' = r is
    autoregressive decoding, as the text says. The frozen prefix is in the cache, which is why the prelude gets the rest."""
    past = model.new_past()
    y = [*prompt, int(forward(model, prompt, past, r, init_state)[-1].argmax())]
    past.freeze(len(prompt))
    frozen, steps = len(y), []
    z = init_state(0, rows(len(prompt), 1))
    ages = [0]
    for t in range(1, 1000):  # line 4
        first = frozen - 1
        e = model.prelude(torch.tensor(y[first:]), first, past)  # line 5
        z_noise = init_state(t, rows(first, len(z)))  # line 6
        share = torch.tensor([beta(age) for age in ages], dtype=z.dtype)[:, None]
        z = (1 - share) * z + share * z_noise  # line 7
        for _ in range(inner):  # lines 8 to 10
            z = model.core(z, e, first, past)
        y_hat = model.coda(z, first, past).argmax(-1).tolist()  # lines 11 and 12
        steps.append(y_hat)
        y = [*y[:frozen], *y_hat]  # line 13
        ages = [age + inner for age in ages]
        done = sum(age >= -(-r // inner) * inner for age in ages)  # line 14
        past.freeze(done)
        frozen, z, ages = frozen + done, z[done:], ages[done:]
        if frozen - len(prompt) >= count:  # line 15
            return y[len(prompt) :][:count], steps
        z = torch.cat([z, init_state(0, rows(frozen - 1 + len(z), 1))])  # line 17
        ages.append(0)
    raise AssertionError("no end")


@pytest.mark.parametrize("schedule", ["constant", "linear", "harmonic", "root"])
@pytest.mark.parametrize(("r", "inner"), [(6, 1), (6, 2), (5, 2), (4, 4)])
def test_algorithm_1_literally(schedule: str, r: int, inner: int) -> None:
    """Line 7 for every row, new ones too. The algorithm goes on past the last token asked for; until then all rows agree."""
    beta = {
        "constant": lambda age: 0.3,
        "linear": lambda age: 0.3 * (1 - age / r) if age < r else 0.0,
        "harmonic": lambda age: 0.3 / (1 + age),
        "root": lambda age: 0.3 / (1 + age) ** 0.5,
    }[schedule]
    texts = set()
    for seed in range(4):
        model, start = tiny(seed, state_scale=1.0), position_states(WIDE, seed=seed)
        tokens, steps = algorithm_1(model, PROMPT, 7, start, r, inner, beta)
        fixed: dict[str, Any] = {"init": start, "exit": "fixed", "recurrences": r, "inner_recurrence": inner}
        fixed |= {"momentum": 0.0, "keep_changed": False, "schedule": schedule}
        result = recurrent_diffusion(model, PROMPT, 7, noise=0.3, **fixed)
        assert result.tokens == tokens
        assert [step.predictions == row[: len(step.predictions)] for step, row in zip(result.trace, steps)] == [
            True
        ] * len(result.trace)
        texts.add(tuple(tokens) == tuple(recurrent_diffusion(model, PROMPT, 7, noise=0.0, **fixed).tokens))
    assert False in texts, "noise changes no text of these models, so this compares nothing"


def test_noise_levels() -> None:
    for count in (0, 4, 31, 32, 40):
        assert noise_level(0.5, count, "constant", 32) == 0.5
        assert noise_level(0.5, count, "linear", 32) == pytest.approx(max(0, 0.5 - count / 64))
        assert noise_level(0.5, count, "harmonic", 32) == pytest.approx(0.5 / (count + 1))
        assert noise_level(0.5, count, "root", 32) == pytest.approx(0.5 * (count + 1) ** -0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"exit": "soon"},
        {"rule": "first"},
        {"mixer": "cubic"},
        {"schedule": "log"},
        {"new_state": "old"},
        {"headway": 0},
        {"inner_recurrence": 0},
        {"max_wavefront": 0},
    ],
)
def test_unknown_options(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=f"pdkernels.recurrent_diffusion: {name} must"):
        recurrent_diffusion(Scripted(SCRIPTS["position"]), PROMPT, 3, init=zeros, **wrong)


def test_no_tokens_requested() -> None:
    assert recurrent_diffusion(tiny(), PROMPT, 0, init=init) == ([], 0, 0, [])
    assert recurrent_diffusion(tiny(), PROMPT, 1, init=init, recurrences=2)[1:] == (1, 2, [])
    assert rows(3, 0).tolist() == []
