"""Drafts for the training of a drafter, against the paper's own two passes, a literal loop, and the law of the samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.reference.sampling import draw as reference_draw
from pdkernels.training import count_accepted, drafter_loss, draw_drafts, pack_drafts
from tests.support.errors import kind_of
from tests.training.test_drafter import by_the_book, close, draw

MASK = 257


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_literally(logits: Tensor, seed: int, share: float, temperature: float) -> list[list[int]]:
    """One block after the other: a coin, then the best tokens, or a draw for each row."""
    source = generator(seed)
    coins = torch.rand(len(logits), dtype=torch.float64, generator=source).tolist()
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(logits),), generator=source).tolist()
    width = logits.shape[1]
    return [
        reference_draw(block, range(width), temperature if coin < share else 0.0, number, 0)
        for block, coin, number in zip(logits, coins, seeds, strict=True)
    ]


def active(drafts: list[int], predictions: list[int]) -> set[int]:
    """The paper's A, from 1: up to the smallest j with a mismatch, or all."""
    for j, (draft, prediction) in enumerate(zip(drafts, predictions), 1):
        if draft != prediction:
            return set(range(1, j + 1))
    return set(range(1, len(drafts) + 1))


@given(
    seed=st.integers(0, 10**6),
    blocks=st.integers(0, 5),
    width=st.integers(0, 4),
    vocab=st.integers(1, 9),
    share=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    temperature=st.sampled_from([0.4, 1.0, 2.5]),
)
def test_a_literal_loop(seed: int, blocks: int, width: int, vocab: int, share: float, temperature: float) -> None:
    """Equations 6 to 9 on the rows of A, in float64."""
    draft, verifier = draw(seed, blocks, width, vocab, spread=1.0)
    drafts = draw_drafts(draft, generator(seed), sampled_share=share, temperature=temperature)
    literal = drawn_literally(draft, seed, share, temperature)
    assert drafts.tolist() == literal and drafts.shape == (blocks, width)

    accepted = count_accepted(drafts, verifier)
    predictions = [[max(range(vocab), key=row.__getitem__) for row in block] for block in verifier.tolist()]
    rows = [active(*pair) for pair in zip(literal, predictions, strict=True)]
    read = [set(range(1, min(count + 1, width) + 1)) for count in accepted.tolist()]
    assert read == rows
    loss = drafter_loss(draft, verifier, accepted)
    matching, entropy = by_the_book(draft, verifier, [len(each) - 1 for each in rows], 3.0, 200, 0.5)
    assert close(loss.matching, matching) and close(loss.cross_entropy, entropy)
    assert close(loss.total, matching + entropy)


def test_samples_have_the_law_of_the_drafter() -> None:
    """Frequencies against the probabilities in float64, each block's rows independent of each other."""
    count, share, temperature = 20_000, 0.9, 1.0
    rows = torch.tensor([[1.0, 0.2, -0.5, -math.inf], [0.0, 2.0, 1.0, 0.5]], dtype=torch.float64)
    drafts = draw_drafts(rows.expand(count, 2, 4), generator(3))
    law = share * (rows / temperature).softmax(-1) + (1 - share) * torch.eye(4, dtype=torch.float64)[rows.argmax(-1)]
    for row in range(2):
        seen = torch.bincount(drafts[:, row], minlength=4).double() / count
        assert ((seen - law[row]).abs() <= 4.5 * (law[row] * (1 - law[row]) / count).sqrt()).all()
    # The coin is a block's: both rows are greedy with probability 0.1, and independent otherwise.
    p = (rows / temperature).softmax(-1)
    best = rows.argmax(-1)
    together = (1 - share) + share * float(p[0, best[0]] * p[1, best[1]])
    seen_together = (drafts == best).all(1).double().mean().item()
    assert abs(seen_together - together) < 4.5 * math.sqrt(together * (1 - together) / count)


def test_the_draws_depend_on_the_generator_alone() -> None:
    logits = draw(5, 40, 3, 50)[0]
    one, same, other = (draw_drafts(logits, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    torch.manual_seed(1)
    assert torch.equal(draw_drafts(logits), one), "without a generator those of torch"
    # A greedy run draws as much, so that what else is drawn from the generator stays.
    states = []
    for share in (0.0, 0.9, 1.0):
        source = generator(4)
        drafts = draw_drafts(logits.requires_grad_(), source, sampled_share=share)
        assert not drafts.requires_grad and drafts.dtype == torch.int64
        states.append(source.get_state())
    assert all(torch.equal(state, states[0]) for state in states)
    assert torch.equal(draw_drafts(logits, sampled_share=0.0), logits.argmax(-1))
    greedy_blocks = (draw_drafts(torch.zeros(4000, 8, 100), generator(0)) == 0).all(1).double().mean()
    assert abs(greedy_blocks - 0.1) < 0.02
    assert draw_drafts(torch.full((2, 3, 4), -math.inf), generator(0), sampled_share=1.0).unique().tolist() == [-1]


@pytest.mark.parametrize("size", [4, 8])
def test_one_packed_forward_is_the_two_passes_of_the_paper(size: int) -> None:
    """Draft every block after its prefix; verify the drafts themselves. Rows that the loss reads are those of the packed forward."""
    ours: Any = pd.models.load("tiny-trimode")
    prompts = [torch.tensor(list(text)) for text in (b"12 + 345 = ?\n", b"def middle(values):\n    ", b"3 * 7 = ?\n")]
    texts = [
        (torch.cat([prompt, generate(ours, prompt, max_new_tokens=limit, end_tokens=[]).tokens]), len(prompt))
        for prompt, limit in zip(prompts, (45, 38, 1))
    ]
    batch = pack_drafts(texts, size, MASK)
    hidden = ours.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan(), adapted=batch.drafting)[
        0
    ]
    draft, verifier = (ours.logits(hidden[rows])[..., :MASK] for rows in (batch.draft_rows, batch.verifier_rows))
    drafts = draw_drafts(draft, generator(size))
    assert not torch.equal(drafts, draft.argmax(-1))
    accepted = count_accepted(drafts, verifier).tolist()

    block, seen = 0, set()
    for text, prompt_len in texts:
        for start in range(0, len(text) - size + 1, size):
            if start < prompt_len:
                continue
            prefix, known = text[:start], text[start : start + 1]
            tokens = torch.cat([prefix, known, torch.full((size - 1,), MASK)])
            inside = torch.arange(len(tokens)) >= start
            mask = torch.ones(len(tokens), len(tokens)).tril().bool() | inside[:, None] & inside
            literal = ours(tokens[None], mask=mask, adapted=inside)[0, start + 1 :, :MASK]
            torch.testing.assert_close(draft[block], literal, rtol=1e-4, atol=1e-4)
            # The verification reads the drafts, not the text.
            rows = ours(torch.cat([prefix, known, drafts[block]])[None])[0, start:-1, :MASK]
            predictions = rows.argmax(-1).tolist()
            read = sorted(active(drafts[block].tolist(), predictions))
            assert len(read) == min(accepted[block] + 1, size - 1)
            torch.testing.assert_close(verifier[block, : len(read)], rows[: len(read)], rtol=1e-4, atol=1e-4)
            seen.add(len(read))
            block += 1
    assert block == len(accepted) == len(batch.draft_rows) and len(seen) > 1


def test_texts_without_a_whole_block_and_no_texts() -> None:
    for texts in ([], [(torch.tensor([1, 2, 3]), 1)], [(torch.tensor([1, 2, 3, 4, 5, 6, 7]), 5)]):
        batch = pack_drafts(texts, 4, MASK)
        assert batch.draft_rows.shape == batch.verifier_rows.shape == (0, 3) and not batch.drafting.any()
        assert len(batch.tokens) == len(batch.drafting) == sum(len(ids) for ids, _ in texts)


ZEROS = torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    "text, call",
    {
        "draft_logits must have shape (blocks, k, vocab), got (3, 5)": lambda: draw_drafts(ZEROS[0]),
        "TypeError: draft_logits must be floating, got torch.int64": lambda: draw_drafts(ZEROS.long()),
        "sampled_share must be in 0 .. 1, got 1.5": lambda: draw_drafts(ZEROS, sampled_share=1.5),
        "temperature must be in [1e-30, 1e30], got 0.0": lambda: draw_drafts(ZEROS, temperature=0.0),
        "drafts must have shape (2, 3), got (2, 2)": lambda: count_accepted(torch.zeros(2, 2).long(), ZEROS),
        "TypeError: drafts must be an int32 or int64 tensor": lambda: count_accepted(ZEROS[..., 0], ZEROS),
        "verifier_logits must have shape (blocks, k, vocab)": lambda: count_accepted(torch.zeros(2).long(), ZEROS[0]),
        "block_size must be 2 or more, got 1": lambda: pack_drafts([], 1, MASK),
        "texts must have a prompt of 0 .. 3 tokens, got 4": lambda: pack_drafts([(torch.arange(3), 4)], 2, MASK),
        "TypeError: texts must be an int32 or int64 tensor": lambda: pack_drafts([(torch.rand(3), 1)], 2, MASK),
    }.items(),
)
def test_errors(call: Any, text: str) -> None:
    error, text = kind_of(text)
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value) and str(caught.value).startswith("pdkernels.training.")
