"""Dream's sampler: its times, its scores of the distribution that is drawn from, and random orders."""

from __future__ import annotations

import collections
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference import masked_sampling as shared
from pdkernels.reference.dream import dream, time_quota
from pdkernels.reference.sampling import uniforms
from tests.support.masked import MASK, ScriptedMasked, Tabled, chance, fixed, moody, spreading, word

PROMPT = [3, 1]


def committed(result: shared.MaskedResult) -> list[int]:
    return [len(step.committed) for step in result.trace]


def test_as_many_steps_as_tokens_begin_with_none_and_end_with_two() -> None:
    times, left, counts = shared.timesteps(256), 256, []
    for t, s in itertools.pairwise(times):
        counts.append(time_quota(left, t, s) if len(counts) < 255 else left)
        left -= counts[-1]
    assert counts[0] == 0 and counts[-1] == 2 and set(counts[1:-1]) == {1}
    assert times[0] == 1 and times[-1] == pytest.approx(1e-3) and len(times) == 257
    assert len({round(t - s, 12) for t, s in itertools.pairwise(times)}) == 1


@settings(max_examples=30)
@given(
    rule=st.sampled_from([fixed([0.3, 0.9, 0.5, 0.9, 0.7]), spreading, moody]),
    predicts=st.sampled_from(["own", "next"]),
    limit=st.integers(0, 9),
    steps=st.one_of(st.none(), st.integers(1, 14)),
    algorithm=st.sampled_from(["origin", "maskgit_plus", "topk_margin", "entropy"]),
    eps=st.sampled_from([1e-3, 0.1737]),
    ends=st.lists(st.integers(0, MASK - 1), max_size=2),
)
def test_what_holds_for_every_run(
    rule: object, predicts: str, limit: int, steps: int | None, algorithm: str, eps: float, ends: list[int]
) -> None:
    model = ScriptedMasked(rule, predicts)  # type: ignore[arg-type]
    run = lambda ends: dream(  # noqa: E731
        model, PROMPT, limit, mask_token=MASK, steps=steps, algorithm=algorithm, eps=eps, end_tokens=ends
    )
    whole, result = run(()), run(ends)
    first = next((i for i, token in enumerate(whole.tokens) if token in ends), limit)
    assert result.tokens == whole.tokens[: first + 1] and result.trace == whole.trace[: result.forwards]
    assert len(whole.tokens) == limit and MASK not in whole.tokens and whole.forwards == len(whole.trace)
    total = limit if steps is None else steps
    assert whole.forwards == total * (limit > 0) or (algorithm == "origin" and whole.forwards < total)
    canvas = PROMPT + [MASK] * limit
    for i, step in enumerate(whole.trace):
        assert step.tokens == canvas and step.window == (2, 2 + limit)
        masks = [p for p in range(2, 2 + limit) if canvas[p] == MASK]
        assert sorted(step.confidence) == masks
        t, s = (1 - (1 - eps) * j / total for j in (i, i + 1))
        if i == total - 1:
            assert sorted(step.committed) == masks
        elif algorithm == "origin":
            assert step.confidence == chance(0, i + 1, masks)
            assert sorted(step.committed) == [p for p in masks if step.confidence[p] >= s / t]
        else:
            said = {p: model.rule(canvas, p)[1] for p in masks}
            best = sorted(masks, key=lambda p: (-said[p], p))[: int(len(masks) * (1 - s / t) + 1e-9)]
            # All three scores grow with the confidence of a script. Equal ones differ in the last bit by their token.
            assert sorted(round(said[p], 9) for p in step.committed) == sorted(round(said[p], 9) for p in best)
        for p, token in step.committed.items():
            assert token == model.rule(step.tokens, p)[0]
            canvas[p] = token


@pytest.mark.covering(2)
@pytest.mark.parametrize("algorithm", ["maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize("top_k", [None, 1, 2, 9])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.0, 0.7), (0.8, 1.0), (0.8, 0.7)])
def test_scores_are_of_the_distribution_that_is_drawn_from(
    algorithm: str, temperature: float, top_p: float, top_k: int | None
) -> None:
    model = Tabled(7, "next", seed=3)
    result = dream(
        model,
        [1],
        6,
        mask_token=6,
        algorithm=algorithm,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=2,
        steps=3,
    )
    for number, step in enumerate(result.trace, start=1):
        logits = model(torch.tensor([step.tokens]), torch.arange(7)[None], torch.ones(7, 7, dtype=torch.bool))[0]
        scores, tokens = {}, {}
        for p in step.confidence:
            distribution = (logits[p - 1, :6] / (temperature or 1)).softmax(-1).tolist()
            kept = [v for v in range(6) if sum(q for q in distribution if q > distribution[v]) < top_p]
            kept = sorted(kept, key=lambda v: -distribution[v])[:top_k]
            noise = -torch.log(-torch.log(uniforms(2, number, torch.tensor(p), torch.arange(6))))
            tokens[p] = max(kept, key=lambda v: logits[p - 1, v].item() + temperature * noise[v].item())
            mass = sum(distribution[v] for v in kept)
            probs = sorted(((distribution[v] / mass) for v in kept), reverse=True)
            scores[p] = {
                "maskgit_plus": distribution[tokens[p]] / mass,
                "topk_margin": probs[0] - (probs[1] if len(probs) > 1 else 0),
                "entropy": sum(q * math.log(q) for q in probs),
            }[algorithm]
        assert step.confidence == pytest.approx(scores, abs=1e-12)
        best = sorted(scores, key=lambda p: -scores[p])[: len(step.committed)]
        assert step.committed == {p: tokens[p] for p in best}


def test_the_order_is_drawn_by_the_scores() -> None:
    """Two of three positions; the distribution of the pair is that of drawing without replacement."""
    confidence = [0.9, 0.5, 0.3]
    model = ScriptedMasked(fixed(confidence))
    seen: collections.Counter[tuple[int, ...]] = collections.Counter()
    runs = 200
    for seed in range(runs):
        result = dream(
            model, [3], 3, mask_token=MASK, algorithm="maskgit_plus", order_temperature=0.4, steps=2, eps=0.3, seed=seed
        )
        uniform = chance(seed, 1, [1, 2, 3])
        keys = {p: c / 0.4 - math.log(-math.log(uniform[p])) for p, c in zip((1, 2, 3), confidence)}
        assert result.trace[0].confidence == pytest.approx(keys) and committed(result) == [1, 2]
        assert list(result.trace[0].committed) == [max(keys, key=keys.__getitem__)]
        seen[tuple(result.trace[0].committed)] += 1
    weights = [math.exp(c / 0.4) for c in confidence]
    for position in (1, 2, 3):
        share = weights[position - 1] / sum(weights)
        assert abs(seen[(position,)] - runs * share) < 4 * math.sqrt(runs * share * (1 - share))


def test_by_hand() -> None:
    model = ScriptedMasked(fixed([0.3, 0.9, 0.5, 0.8, 0.7]), "next")
    result = dream(model, [3], 5, mask_token=MASK, steps=2, end_tokens=(word(3),))
    # int(5 * (1 - 0.5005)) = 2, then the rest: the end token at position 3 cuts what follows it.
    assert [step.committed for step in result.trace] == [{2: word(2), 4: word(4)}, {1: word(1), 3: word(3), 5: word(5)}]
    assert result.tokens == [word(1), word(2), word(3)] and result.forwards == 2
    assert committed(dream(model, [3], 2, mask_token=MASK, steps=6)) == [0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "margin"}, "algorithm must be one of .*'topk_margin'.*, got 'margin'"),
        (
            {"algorithm": "origin", "order_temperature": 0.1},
            "order_temperature must be 0 where chance decides, got 0.1",
        ),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dream(ScriptedMasked(moody), [1], 3, mask_token=MASK, **options)  # type: ignore[arg-type]
