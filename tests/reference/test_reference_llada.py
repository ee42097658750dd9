"""LLaDA's sampler and what all samplers share: quotas, ranks, distributions, ends, and steps written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference import masked_sampling as shared
from pdkernels.reference.llada import llada, spread_quotas
from pdkernels.reference.masked_sampling import Canvas, MaskedStep
from pdkernels.reference.sampling import uniforms
from tests.support.masked import MASK, ScriptedMasked, Tabled, chance, fixed, moody, spreading, word

PROMPT = [3]
RULES = {"fixed": fixed([0.3, 0.9, 0.5, 0.9, 0.7]), "spreading": spreading, "moody": moody}
models = st.builds(ScriptedMasked, st.sampled_from(list(RULES.values())), st.sampled_from(["own", "next"]))


@given(masks=st.integers(0, 60), steps=st.integers(1, 60))
def test_quotas_are_the_published_table(masks: int, steps: int) -> None:
    table = [masks // steps] * steps
    for i in range(masks % steps):
        table[i] += 1
    assert shared.quotas(masks, steps) == table and sum(table) == masks


@given(masks=st.integers(0, 60), steps=st.integers(1, 60))
def test_spread_quotas_are_equation_6(masks: int, steps: int) -> None:
    """As the equation stands, in whole numbers: L positions, N steps, ``t = k / N``; steps that fill nothing are left out."""
    unmasked = [masks * (steps - (k - 1)) // steps for k in range(steps, 0, -1)]
    assert spread_quotas(masks, steps) == [n for n in (b - a for a, b in zip([0, *unmasked], unmasked)) if n]
    assert sorted(spread_quotas(masks, steps), reverse=True) == [n for n in shared.quotas(masks, steps) if n]


@given(
    confidence=st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.75, 0.9, 1.0]), min_size=1, max_size=8),
    threshold=st.sampled_from([0.0, 0.5, 0.9, 1.1]),
    otherwise=st.integers(0, 3),
    strict=st.booleans(),
)
def test_threshold_rule(confidence: list[float], threshold: float, otherwise: int, strict: bool) -> None:
    scores = dict(enumerate(confidence, start=10))
    chosen = shared.surest(scores, threshold=threshold, quota=otherwise, strict=strict)
    reaching = {p for p, c in scores.items() if c > threshold or (c == threshold and not strict)}
    if reaching:
        assert set(chosen) == reaching
    else:
        assert len(chosen) == min(otherwise, len(scores))
        assert all((scores[p], -p) > (scores[q], -q) for p in chosen for q in set(scores) - set(chosen))


@given(
    confidence=st.lists(st.integers(0, 40).map(lambda n: n / 40), min_size=1, max_size=9),
    factor=st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.7]),
)
def test_factor_rule_by_its_inequality(confidence: list[float], factor: float) -> None:
    count = len(shared.surest(dict(enumerate(confidence)), factor=factor))
    best_first = sorted(confidence, reverse=True)
    holds = [c >= 1 - factor / (n + 1) for n, c in enumerate(best_first, start=1)]
    assert all(holds[1:count]) or count == len(confidence)
    if count < len(confidence):
        assert not holds[count] and count + 1 < len(confidence)  # the failure, and it is not the last one
    elif len(confidence) > 1:
        assert all(holds[1:-1])


@given(st.lists(st.sampled_from([0.1, 0.5, math.nan, 0.9]), max_size=7))
def test_ranks(confidence: list[float]) -> None:
    order = shared.surest(dict(enumerate(confidence)), quota=9)
    assert sorted(order) == list(range(len(confidence)))
    for before, after in zip(order, order[1:]):
        a, b = confidence[before], confidence[after]
        tied = a == b or (math.isnan(a) and math.isnan(b))
        assert before < after if tied else a > b or math.isnan(b)


def test_scores() -> None:
    distribution = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    assert shared.probability(distribution, [1]).item() == 0.3
    assert shared.margin(distribution, [1]).item() == pytest.approx(0.2)
    assert shared.negative_entropy(distribution, [1]).item() == pytest.approx(
        sum(p * math.log(p) for p in (0.5, 0.3, 0.2))
    )
    one = torch.ones(1, 1, dtype=torch.float64)
    assert shared.margin(one, [0]).item() == 1.0 and shared.negative_entropy(one, [0]).item() == 0.0


@settings(max_examples=25)
@given(model=models, limit=st.integers(0, 9), block_size=st.one_of(st.none(), st.integers(1, 5)), data=st.data())
def test_what_holds_for_every_run(
    model: ScriptedMasked, limit: int, block_size: int | None, data: st.DataObject
) -> None:
    windows = shared.blocks(Canvas(PROMPT, limit, MASK), block_size)
    per_block = data.draw(st.one_of(st.none(), st.integers(1, 6)))
    steps = None if per_block is None or not windows else per_block * len(windows)
    ends = data.draw(st.lists(st.integers(0, MASK - 1), max_size=2))
    remasking = data.draw(st.sampled_from(["low_confidence", "random"]))
    run = lambda ends: llada(  # noqa: E731
        model, PROMPT, limit, mask_token=MASK, block_size=block_size, steps=steps, remasking=remasking, end_tokens=ends
    )
    whole, result = run(()), run(ends)
    assert len(whole.tokens) == limit and MASK not in whole.tokens
    assert (
        whole.forwards == len(whole.trace) == sum(min(per_block or size, size) for size in (e - s for s, e in windows))
    )
    first = next((i for i, token in enumerate(whole.tokens) if token in ends), limit)
    assert result.tokens == whole.tokens[: first + 1]
    assert result.trace == whole.trace[: result.forwards] and result.forwards == len(result.trace)
    canvas = PROMPT + [MASK] * limit
    for step in whole.trace:
        assert step.tokens == canvas and step.committed
        assert set(step.confidence) == {p for p in range(*step.window) if canvas[p] == MASK}
        assert all(canvas[p] == MASK for p in range(step.window[1], 1 + limit))
        if remasking == "low_confidence":
            for p, token in step.committed.items():
                said, confidence = model.rule(canvas, p)
                assert token == said and step.confidence[p] == pytest.approx(confidence, abs=1e-9)
        for p, token in step.committed.items():
            canvas[p] = token
    assert canvas[1:] == whole.tokens


@pytest.mark.parametrize("predicts", ["own", "next"])
def test_one_token_a_step_takes_the_most_confident_position_each_time(predicts: str) -> None:
    model = ScriptedMasked(moody, predicts)
    result = llada(model, [3, 1], 7, mask_token=MASK, steps=7)
    canvas = [3, 1] + [MASK] * 7
    for step in result.trace:
        open_places = [p for p in range(2, 9) if canvas[p] == MASK]
        best = max(open_places, key=lambda p: moody(canvas, p)[1])
        assert step.committed == {best: moody(canvas, best)[0]}
        canvas[best] = moody(canvas, best)[0]
    assert result == llada(model, [3, 1], 7, mask_token=MASK)  # the default


def test_two_blocks_by_hand() -> None:
    """After [3]; confidence 0.3, 0.9, 0.5, 0.9, 0.7 from position 1 on."""
    model = ScriptedMasked(RULES["fixed"])
    result = llada(model, [3], 5, mask_token=MASK, block_size=3, steps=4)
    w = word
    assert [(step.tokens, step.committed, step.window) for step in result.trace] == [
        ([3, MASK, MASK, MASK, MASK, MASK], {2: w(2), 3: w(3)}, (1, 4)),  # three masks in two steps: two, then one
        ([3, MASK, w(2), w(3), MASK, MASK], {1: w(1)}, (1, 4)),
        ([3, w(1), w(2), w(3), MASK, MASK], {4: w(4)}, (4, 6)),
        ([3, w(1), w(2), w(3), w(4), MASK], {5: w(5)}, (4, 6)),
    ]
    assert result.tokens == [w(p) for p in range(1, 6)] and isinstance(result.trace[0], MaskedStep)


def test_random_order_is_that_of_the_positions_and_forwards() -> None:
    model = ScriptedMasked(RULES["fixed"])
    result = llada(model, [3], 6, mask_token=MASK, steps=3, remasking="random", seed=5)
    left = set(range(1, 7))
    for number, step in enumerate(result.trace, start=1):
        numbers = chance(5, number, sorted(left))
        assert step.confidence == numbers
        assert set(step.committed) == set(sorted(left, key=lambda p: -numbers[p])[:2])
        left -= set(step.committed)
    assert all(0 < u < 1 for u in result.trace[0].confidence.values())
    orders = {
        tuple(llada(model, [3], 4, mask_token=MASK, remasking="random", seed=s).trace[0].committed) for s in range(20)
    }
    assert orders == {(1,), (2,), (3,), (4,)}


def test_sampling_draws_the_guess_and_ranks_it_without_the_noise() -> None:
    model = Tabled(6, seed=1)
    result = llada(model, [1], 5, mask_token=5, temperature=1.3, seed=9)
    for number, step in enumerate(result.trace, start=1):
        logits = model(torch.tensor([step.tokens]), torch.arange(6)[None], torch.ones(6, 6, dtype=torch.bool))[0, :, :5]
        noise = torch.log(-torch.log(uniforms(9, number, torch.arange(6)[:, None], torch.arange(6))))[:, :5]
        guesses = (logits - 1.3 * noise).argmax(-1).tolist()
        distribution = logits.softmax(-1)
        assert step.confidence == pytest.approx({p: distribution[p, guesses[p]].item() for p in step.confidence})
        best = max(step.confidence, key=step.confidence.__getitem__)
        assert step.committed == {best: guesses[best]}
    assert len({tuple(llada(model, [1], 5, mask_token=5, temperature=1.3, seed=s).tokens) for s in range(8)}) > 4


def test_guidance() -> None:
    model = Tabled(6, seed=2)
    prompt, full = [1, 4], torch.ones(5, 5, dtype=torch.bool)
    result = llada(model, prompt, 3, mask_token=5, guidance=0.8)
    assert result.forwards == 3
    for step in result.trace:
        conditional, unconditional = (
            model(torch.tensor([tokens]), torch.arange(5)[None], full)[0, :, :5]
            for tokens in (step.tokens, [5, 5, *step.tokens[2:]])
        )
        distribution = (unconditional + 1.8 * (conditional - unconditional)).softmax(-1)
        assert step.confidence == pytest.approx({p: distribution[p].max().item() for p in step.confidence})
    scripted = ScriptedMasked(fixed([0.5]))
    llada(scripted, [3], 1, mask_token=MASK, guidance=0.5)
    llada(scripted, [3], 1, mask_token=MASK)
    assert scripted.calls == [[3, MASK], [MASK, MASK], [3, MASK]]


def test_late_end_and_no_end() -> None:
    """Position 1 predicts 7 with 0.6, position 2 predicts 5 with 0.5."""
    model = ScriptedMasked(lambda tokens, position: [(7, 0.6), (5, 0.5)][position - 1])
    run = lambda **options: llada(model, [3], 2, mask_token=MASK, end_tokens=(7,), **options)  # noqa: E731
    assert run().tokens == [7] and run().forwards == 1
    late = run(late_end=True)
    assert late.tokens == [7] and [list(step.committed) for step in late.trace] == [[2], [1]]
    assert late.trace[0].confidence == pytest.approx({1: 0.0, 2: 0.5 / (1 - 0.5 / 11)})
    never = run(no_end=True)
    assert never.tokens == [0, 5]  # the lowest of the ids that share the rest
    assert never.trace[0].confidence == pytest.approx({1: 1 / 11, 2: 0.5 / (1 - 0.5 / 11)})
    sampled = run(late_end=True, temperature=1.0, seed=4)
    for step in sampled.trace:
        assert all((step.confidence[p] == 0) == (token == 7) for p, token in step.committed.items())


def test_refusals() -> None:
    model = ScriptedMasked(moody)
    with pytest.raises(ValueError, match=r"llada: steps must be a multiple of the number of blocks \(3\), got 10"):
        llada(model, PROMPT, 10, mask_token=MASK, block_size=4, steps=10)
    with pytest.raises(ValueError, match=r"llada: steps must be a multiple of the number of blocks \(1\), got 0"):
        llada(model, PROMPT, 10, mask_token=MASK, steps=0)
    with pytest.raises(ValueError, match="llada: remasking must be 'low_confidence' or 'random', got 'none'"):
        llada(model, PROMPT, 10, mask_token=MASK, remasking="none")
    with pytest.raises(ValueError, match="llada: late_end must be False where chance decides, got True"):
        llada(model, PROMPT, 10, mask_token=MASK, remasking="random", late_end=True)
    with pytest.raises(ValueError, match="logits must allow a token at every position"):
        llada(lambda tokens, positions, mask: torch.full((1, 3, 4), -torch.inf), [1], 2, mask_token=3)
