"""Block diffusion with a trained sampler: the slots of the plain reference, and scores at the ends of their range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.decoding import generate
from pdkernels.models import SamplerConfig, SamplerHead, Transformer
from pdkernels.reference.block_diffusion import Sampler, block_diffusion
from pdkernels.reference.sampler_features import sampler_features
from tests.support import tri_mode
from tests.support.base import page_sizes
from tests.support.tri_mode import prompts, small_transformer

METHOD, MASK = "block_diffusion", 12


def head_of(kind: str, seed: int = 0) -> SamplerHead:
    torch.manual_seed(seed)
    config = SamplerConfig(semantics=3, width=16, feed_forward=24, layers=2, heads=2, kind=kind)  # type: ignore[arg-type]
    head = SamplerHead(config, torch.randn(13, 3)).requires_grad_(False)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(3)  # widely spread scores
    return head


def whole(model: Transformer) -> Any:
    """For the reference; its rows predict the mask token too, as the network expects."""
    return lambda tokens, positions, mask: model(tokens, positions=positions, mask=mask)


def plain(head: SamplerHead) -> Sampler:
    """The head on the plain features of one block."""

    def score(logits: Tensor, block: list[int], active: list[bool]) -> list[float]:
        features = sampler_features(logits[None], torch.tensor([block]), torch.tensor([active]), head.table)
        scores: list[float] = head(head.normalised(features.float()))[0].sigmoid().tolist()
        return scores

    return score


@settings(max_examples=25, deadline=None)
@given(
    weights=st.integers(0, 3),
    batch=prompts(13),
    limit=st.integers(1, 14),
    block_size=st.integers(1, 6),
    rule=st.sampled_from([(0.5, None), (0.0, None), (0.7, None), (1.1, None), (None, None), (None, 2)]),
    refresh=st.sampled_from(["causal", "bidirectional"]),
    kind=st.sampled_from(["attention", "pointwise"]),
    ends=st.lists(st.integers(0, 11), max_size=3),
    page_size=page_sizes,
)
def test_equals_the_reference(weights, batch, limit, block_size, rule, refresh, kind, ends, page_size) -> None:
    model, head = small_transformer(weights), head_of(kind, weights)
    options: dict[str, Any] = {
        "block_size": block_size,
        "threshold": rule[0],
        "steps_per_block": rule[1],
        "refresh": refresh,
    }
    given_options = {"max_new_tokens": limit, "end_tokens": ends, "trace": True, "page_size": page_size}
    result = generate(model, batch, METHOD, sampler=head, **given_options, **options)
    expected = [
        block_diffusion(whole(model), p, limit, mask_token=MASK, end_tokens=ends, sampler=plain(head), **options)
        for p in batch
    ]
    tri_mode.assert_same(result, expected, lockstep=False, accepted=lambda step: len(step.committed))


def test_low_thresholds_fill_all_at_once_and_high_ones_one_by_one() -> None:
    model, head = small_transformer(1), head_of("attention")
    options: dict[str, Any] = {"max_new_tokens": 12, "block_size": 6, "end_tokens": (), "sampler": head, "trace": True}
    at_once = generate(model, [[1, 2]], METHOD, threshold=0.0, **options)
    assert at_once.stats.accepted == [[5, 5]]
    single = generate(model, [[1, 2]], METHOD, threshold=1.1, **options)
    assert single.stats.accepted == [[1] * 10]
    logits = generate(model, [[1, 2]], METHOD, threshold=None, **options)
    assert single.tokens[0].equal(logits.tokens[0]), "one by one is in the order of scores"


def test_nothing_after_an_end_token_is_filled() -> None:
    model, head = small_transformer(0), head_of("attention")
    seen = 0
    for end in range(0, 12, 2):
        options: dict[str, Any] = {"max_new_tokens": 16, "block_size": 8, "threshold": 1.1, "trace": True}
        result = generate(model, [[3]], METHOD, end_tokens=(end,), sampler=head, **options)
        for step in result.stats.trace[0]:
            ends = [position for position, token in enumerate(step.block) if token == end]
            if ends:
                seen += 1
                assert all(slot < ends[0] for slot in step.committed)
    assert seen > 0


def test_the_mask_is_never_a_guess() -> None:
    """The network sees the probability of the mask; the best of the other tokens is filled in."""
    model, head = small_transformer(2), head_of("attention")
    with torch.no_grad():
        model.embedding[MASK] *= 9
    result = generate(model, [[1, 5]], METHOD, max_new_tokens=20, end_tokens=(), block_size=5, sampler=head)
    assert MASK not in result.tokens[0].tolist() and len(result.tokens[0]) == 20


def test_a_batch_is_its_prompts_alone() -> None:
    model, head = small_transformer(3).float(), head_of("attention")
    batch = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    options: dict[str, Any] = {
        "max_new_tokens": 17,
        "block_size": 4,
        "end_tokens": (2,),
        "threshold": 0.5,
        "sampler": head,
    }
    together = generate(model, batch, METHOD, **options)
    for prompt, tokens in zip(batch, together.tokens, strict=True):
        assert generate(model, [prompt], METHOD, **options).tokens[0].equal(tokens)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"sampler": "head"}, TypeError, "sampler must be a SamplerHead, got str"),
        (
            {"sampler": head_of("attention"), "temperature": 0.5},
            ValueError,
            "temperature must be 0 with a sampler, got 0.5",
        ),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        generate(small_transformer(0), [[1]], METHOD, max_new_tokens=4, **options)
