"""Steps for the trained sampler: which guesses count as final, under both policies; AUC; and that training learns what can be learned."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.models import SamplerConfig, SamplerHead, Transformer, semantic_table
from pdkernels.training import SamplerSteps, auc, collect_sampler_steps, score_steps, train_sampler
from tests.support.tri_mode import small_transformer

PROMPTS = [[1, 2, 3], [4], [5, 6]]


def model_of(seed: int = 0) -> Transformer:
    return small_transformer(seed).float()


def table_of(model: Transformer) -> torch.Tensor:
    return semantic_table(model.embedding, 4)


def test_the_confidence_policy_is_block_diffusion_one_by_one() -> None:
    model = model_of()
    steps = collect_sampler_steps(model, PROMPTS, 5, table=table_of(model), max_new_tokens=15)
    assert steps.features.shape == (36, 5, 32) and steps.features.dtype == torch.float32
    result = pd.decoding.generate(
        model, PROMPTS, "block_diffusion", block_size=5, threshold=None, max_new_tokens=15, end_tokens=(), trace=True
    )
    for number in range(3):
        own = steps.of(torch.tensor([number]))
        assert len(own.final) == 12 and set(own.prompts.tolist()) == {number}
        for step, active, final, features in zip(result.stats.trace[number], own.active, own.final, own.features):
            assert active.tolist() == [token == model.mask_token for token in step.block]
            (position,) = step.committed
            assert final[position], "what is filled in is final"
            assert features[0, 11] == active.sum() / 5


def test_the_hybrid_policy_follows_the_text() -> None:
    """With the model's own text every agreeing guess is taken; with nonsense it fills one by one, like the other policy."""
    model, table = model_of(1), table_of(model_of(1))
    options: dict[str, Any] = {"block_size": 6, "table": table, "max_new_tokens": 12}
    plain = collect_sampler_steps(model, PROMPTS, **options)
    own = pd.decoding.generate(
        model, PROMPTS, "block_diffusion", block_size=6, threshold=None, max_new_tokens=12, end_tokens=()
    )
    texts = [tokens.tolist() for tokens in own.tokens]
    hybrid = collect_sampler_steps(model, PROMPTS, policy="hybrid", texts=texts, **options)
    assert len(hybrid.final) < len(plain.final)
    for number in range(3):
        kept = hybrid.of(torch.tensor([number]))
        for before, after in zip(kept.active, kept.active[1:]):
            if after.sum() < before.sum():
                assert (before & ~after).any() and not (after & ~before).any()
    wrong = collect_sampler_steps(model, PROMPTS, policy="hybrid", texts=[[], [], []], **options)
    assert all(a.equal(b) for a, b in zip(wrong, plain))


def test_nothing_after_an_end_is_requested() -> None:
    model = copy.deepcopy(model_of(2))
    model.end_tokens = ()
    options: dict[str, Any] = {"table": table_of(model), "max_new_tokens": 18}
    everything = collect_sampler_steps(model, PROMPTS, 6, **options)
    text = pd.decoding.generate(
        model, PROMPTS[0], "block_diffusion", block_size=6, threshold=None, max_new_tokens=18
    ).tokens
    model.end_tokens = (int(text[8]),)
    steps = collect_sampler_steps(model, PROMPTS, 6, **options)
    assert 0 < len(steps.final) < len(everything.final)
    # One position is filled in each step, so a block's steps count down to 1: what an end leaves as masks is never among them.
    for number in range(3):
        counts = steps.of(torch.tensor([number])).active.sum(1).tolist()
        assert counts[-1] == 1
        assert all(after == before - 1 or before == 1 for before, after in zip(counts, counts[1:]))


def test_a_batch_is_its_prompts_alone() -> None:
    small = model_of(3)
    # Bit for bit with our attention alone, and that starts at heads of 16.
    model = Transformer(replace(small.config, head_dim=16), mask_token=small.mask_token, end_tokens=small.end_tokens)
    model.requires_grad_(False)
    together = collect_sampler_steps(model, PROMPTS, 4, table=table_of(model), max_new_tokens=8)
    for number, prompt in enumerate(PROMPTS):
        alone = collect_sampler_steps(model, [prompt], 4, table=table_of(model), max_new_tokens=8)
        kept = together.of(torch.tensor([number]))
        assert kept.features.equal(alone.features) and kept.final.equal(alone.final) and kept.active.equal(alone.active)


def test_auc_is_what_counting_pairs_gives() -> None:
    chance = random.Random(0)
    for _ in range(50):
        scores = [chance.choice([0.1, 0.2, 0.3, chance.random()]) for _ in range(12)]
        labels = [True, False, *(chance.random() < 0.5 for _ in range(10))]
        pairs = [(a > b) + 0.5 * (a == b) for a, x in zip(scores, labels) if x for b, y in zip(scores, labels) if not y]
        assert auc(torch.tensor(scores, dtype=torch.float64), torch.tensor(labels)) == pytest.approx(
            sum(pairs) / len(pairs)
        )
    with pytest.raises(ValueError, match="labels must contain both kinds, got 2 true, 0 false"):
        auc(torch.zeros(2), torch.ones(2))


def synthetic(count: int, seed: int) -> SamplerSteps:
    """A guess is final exactly if that of the position before is more confident: a position's own features do not decide it."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 6, 32, generator=generator)
    features[..., 10] = 0
    active = torch.rand(count, 6, generator=generator) < 0.8
    final = features[..., 0].roll(1, 1) > 0
    return SamplerSteps(features, final, active, torch.arange(count))


def test_training_finds_what_other_positions_decide() -> None:
    train, held_out = synthetic(400, 0), synthetic(200, 1)
    found = {}
    for kind in ("attention", "pointwise"):
        torch.manual_seed(0)
        config = SamplerConfig(semantics=4, width=32, feed_forward=64, layers=2, heads=4, kind=kind)  # type: ignore[arg-type]
        head = SamplerHead(config, torch.zeros(13, 4))
        reported: list[int] = []
        areas = train_sampler(
            head,
            train,
            held_out,
            epochs=12,
            lr=5e-3,
            progress=lambda epoch, *_, reported=reported: reported.append(epoch),
        )
        assert reported == list(range(len(areas)))
        assert auc(*score_steps(head, held_out)) == pytest.approx(max(areas)), "the weights of the best epoch"
        assert not any(parameter.requires_grad for parameter in head.parameters())
        assert head.std[10] == 0 and head.normalised(held_out.features).isfinite().all()
        found[kind] = max(areas)
    assert found["attention"] > 0.9 and found["pointwise"] < 0.6
    assert abs(auc(*held_out.confidence()) - 0.5) < 0.1


def test_training_stops_when_nothing_gets_better() -> None:
    train, held_out = synthetic(40, 0), synthetic(40, 1)
    head = SamplerHead(SamplerConfig(semantics=4, feed_forward=8, layers=2, kind="pointwise"), torch.zeros(13, 4))
    areas = train_sampler(head, train, held_out, epochs=60, lr=0.05, patience=2)
    best = areas.index(max(areas))
    assert len(areas) < 60 and len(areas) - 1 - best == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "greedy"}, "policy must be 'confidence' or 'hybrid', got 'greedy'"),
        ({"policy": "hybrid"}, "texts must be one for each prompt with 'hybrid'"),
        ({"texts": [[1]] * 3}, "texts must be one for each prompt with 'hybrid', and None otherwise"),
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"prompts": []}, "prompts must be a list of at least one"),
    ],
)
def test_errors_name_what_is_wrong(options: dict[str, Any], said: str) -> None:
    model = model_of()
    given: dict[str, Any] = {"prompts": PROMPTS, "block_size": 4, "table": table_of(model), **options}
    with pytest.raises(ValueError, match=said):
        collect_sampler_steps(model, **given)


def test_steps_of_another_width_are_refused() -> None:
    head = SamplerHead(SamplerConfig(semantics=5, width=16, feed_forward=8, layers=1, heads=2), torch.zeros(13, 5))
    with pytest.raises(ValueError, match="steps must have 36 features, got 32"):
        train_sampler(head, synthetic(4, 0), synthetic(4, 1))
