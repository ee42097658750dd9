"""The training-time test of EAGLE-3: its terms against plain forwards of the head, and that heads learn to draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdkernels.decoding import generate
from pdkernels.models import Transformer, TransformerConfig
from pdkernels.models.architectures.config import ExpertsConfig
from pdkernels.training import eagle_loss, new_eagle_head, usual_taps
from tests.support.drafters import eagle_head


def a_model(**changes: Any) -> Transformer:
    sizes = {"vocab_size": 12, "hidden_size": 32, "layers": 4, "heads": 2, "kv_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**{**sizes, "intermediate_size": 24, **changes}))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 8
    return model.requires_grad_(False).eval()


def read(model: Transformer, head: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, features = model.tapped(ids[None], head.config.taps)
    return model.embed(ids[None]), features, model.logits(hidden)[..., head.vocabulary]


@pytest.mark.parametrize("changes", [{}, {"norm_output": True, "norm_before_residual": True}, {"fc_norm": True}])
def test_each_term_is_that_of_a_draft_on_a_cache(changes: dict[str, Any]) -> None:
    """Every position drafts by itself, as a decoder does, and is scored there."""
    model = a_model().double()
    head = eagle_head(model, 1, (1, 2, 4), **changes)
    ids, steps, decay = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3]), 3, 0.7
    embedded, features, targets = read(model, head, ids)
    scored = torch.arange(len(ids))[None] >= 4
    found = eagle_loss(head, embedded, features, targets, scored, steps=steps, decay=decay)
    sums, counts = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps)
    right, length = torch.zeros(steps), len(ids)
    fused = head.fused(features)
    for row in range(length - 1):
        cache = head.new_cache(1, length)
        own, agrees = head(embedded[:, 1 : row + 2], fused[:, : row + 1], cache=cache)[:, -1:], True
        cache.commit_(torch.tensor([row + 1]))
        for depth in range(min(steps, length - 1 - row)):
            if depth:
                own = head(embedded[:, row + 1 + depth : row + 2 + depth], own, cache=cache)
                cache.commit_(torch.tensor([1]))
            logits, wanted, counted = head.logits(own)[0, 0], targets[0, row + 1 + depth], scored[0, row + 1 + depth]
            agrees &= bool(logits.argmax() == wanted.argmax())
            sums[depth] -= (wanted.float().softmax(-1) * logits.float().log_softmax(-1)).sum().double() * counted
            counts[depth] += counted
            right[depth] += agrees and bool(counted)
    weights = torch.tensor([decay**depth for depth in range(steps)], dtype=torch.float64)
    torch.testing.assert_close(
        found.total.double(), (weights * sums / counts).sum() / weights.sum(), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(found.agreed, right / counts)


def test_a_head_learns_to_draft() -> None:
    """A few passes over the model's own texts raise what the decoder accepts."""
    model = a_model()
    head = new_eagle_head(model, torch.arange(12))
    prompts = torch.randint(12, (24, 4), generator=torch.Generator().manual_seed(0)).tolist()
    answers = generate(model, prompts, max_new_tokens=24, end_tokens=()).tokens
    texts = [torch.cat([torch.tensor(prompt), answer]) for prompt, answer in zip(prompts, answers)]

    def forwards() -> int:
        drafted = {"drafter": head.eval(), "max_new_tokens": 24, "end_tokens": ()}
        accepted = generate(model, prompts, "eagle", **drafted).stats.accepted
        return sum(1 + len(steps) for steps in accepted)  # the prompt's, then one for each step

    before, optimizer = forwards(), torch.optim.AdamW(head.parameters(), lr=1e-2)
    for step in range(160):
        ids = texts[step % len(texts)]
        scored = torch.arange(len(ids))[None] >= 3
        eagle_loss(head, *read(model, head, ids), scored, steps=3).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    least = 7 * len(prompts)  # the prompt, then 23 tokens, at most 4 at a time
    assert forwards() - least < 0.5 * (before - least)


def test_a_new_head_starts_from_its_target() -> None:
    for changes in ({}, {"qkv_bias": True, "qk_norm": True}, {"experts": ExpertsConfig(3, 2, intermediate_size=8)}):
        model = a_model(**changes)
        head: Any = new_eagle_head(model, torch.tensor([1, 5, 7]))
        assert head.config.taps == (1, 2, 1) and head.embedding is None and head.config.body.experts is None
        assert torch.equal(head.head, model.embedding[torch.tensor([1, 5, 7])])
        assert torch.equal(head.layers[0].output, model.layers[-1].output)
        assert torch.isfinite(head.fc).all()
    packed = a_model(hidden_size=64).quantized("int8", group=32)
    with pytest.raises(ValueError, match="new_eagle_head: model must hold numbers, got packed matrices"):
        new_eagle_head(packed, torch.tensor([1]))


def test_what_is_refused() -> None:
    assert usual_taps(36) == (2, 18, 33)
    with pytest.raises(ValueError, match="usual_taps: layers must be at least 4, got 3"):
        usual_taps(3)
    model = a_model()
    head = eagle_head(model, 0, (1, 2, 4))
    given, scored = read(model, head, torch.tensor([1, 2, 3, 4])), torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="eagle_loss: embedded must have more than 4 rows, got 4"):
        eagle_loss(head, *given, scored, steps=3)
    together = eagle_head(model, 0, (1, 2, 4), mask_token=0)
    with pytest.raises(ValueError, match="head must guess token after token, got a P-EAGLE head"):
        eagle_loss(together, *given, scored, steps=2)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        eagle_loss(head, *given, scored, steps=0)
    with pytest.raises(ValueError, match="decay must be in 0 .. 1, got 2"):
        eagle_loss(head, *given, scored, decay=2)
