"""Multi-block Jacobi decoding against greedy and single-block decoding, and against steps written out by hand."""

from __future__ import annotations

import math
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference import masks
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.jacobi import filler_words, fillers, jacobi
from pdkernels.reference.jacobi_multiblock import (
    JacobiMultiblockResult,
    MultiblockStep,
    PseudoBlock,
    branch_predictions,
    continuation,
    jacobi_multiblock,
    recycled,
)
from tests.support.causal import SCRIPTS, VOCABULARY, from_list
from tests.support.tri_mode import MASK, ScriptedTriMode, Table, TinyTransformer, assert_clean_rows_see_no_noise

token = st.integers(0, VOCABULARY - 1)
PAD = VOCABULARY - 1


def alternating(history: list[int]) -> int:
    """Four tokens that depend on the one before, then four that depend on their position only."""
    return (3 * history[-1] + 1) % VOCABULARY if len(history) // 4 % 2 == 0 else (5 * len(history) + 2) % VOCABULARY


def repeating(history: list[int]) -> int:
    return (history[-1] + 1) % 7 if len(history) % 5 else (history[-1] + 2) % 7


ALL_SCRIPTS = {**SCRIPTS, "alternating": alternating, "repeating": repeating}


def assert_sound(result: JacobiMultiblockResult, rows: int, pseudo: int) -> None:
    """Invariants of every forward, whatever the model."""
    for step in result.trace:
        lengths = [len(row) for row in step.rows]
        assert len(set(lengths)) == 1 and 1 <= len(step.rows) <= rows and len(step.pseudo) <= pseudo
        assert len(step.predictions) == lengths[0] and 0 <= step.row < len(step.rows)
        winner = step.rows[step.row]
        assert winner[1 : step.accepted] == step.predictions[: max(0, step.accepted - 1)]
        assert len({tuple(row[:1]) for row in step.rows}) == 1  # all start with the token known to be right


@settings(max_examples=60)
@given(
    script=st.sampled_from(sorted(ALL_SCRIPTS)),
    prompt=st.lists(token, min_size=1, max_size=6),
    limit=st.integers(0, 24),
    block_size=st.integers(1, 9),
    blocks=st.integers(1, 4),
    spawn_ratio=st.sampled_from([0.0, 0.3, 0.85, 1.0]),
    pool_size=st.integers(0, 6),
    verification_size=st.integers(1, 5),
    ends=st.lists(token, max_size=2),
    seed=st.integers(0, 2**64 - 1),
)
def test_equals_greedy(
    script, prompt, limit, block_size, blocks, spawn_ratio, pool_size, verification_size, ends, seed
) -> None:
    model = ScriptedTriMode(ALL_SCRIPTS[script])
    greedy = autoregressive(model, prompt, limit, end_tokens=ends)
    model.calls.clear()
    result = jacobi_multiblock(
        model,
        prompt,
        limit,
        block_size=block_size,
        blocks=blocks,
        spawn_ratio=spawn_ratio,
        pool_size=pool_size,
        verification_size=verification_size,
        end_tokens=ends,
        seed=seed,
    )
    assert result.tokens == greedy.tokens
    assert result.forwards == len(model.calls) == len(result.trace) + (limit > 0) <= greedy.forwards
    assert_sound(result, min(verification_size, 1 + pool_size), blocks - 1)
    for step in result.trace:
        assert all(step.accepted >= 1 and 1 <= len(row) <= block_size for row in step.rows)
        assert len({tuple(row) for row in step.rows}) == len(step.rows)
        assert all(1 <= len(block.accepted) + len(block.draft) <= block_size for block in step.pseudo)
    assert_clean_rows_see_no_noise(model.calls, MASK)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 99), prompt=st.lists(st.integers(0, 4), min_size=1, max_size=5), block_size=st.integers(1, 6)
)
def test_greedy_on_a_transformer(seed: int, prompt: list[int], block_size: int) -> None:
    model = TinyTransformer(5, seed)
    greedy = autoregressive(model, prompt, 12)
    for blocks in (1, 3):
        assert (
            jacobi_multiblock(model, prompt, 12, block_size=block_size, blocks=blocks, spawn_ratio=0.5).tokens
            == greedy.tokens
        )


@settings(max_examples=40)
@given(
    script=st.sampled_from(sorted(ALL_SCRIPTS)),
    limit=st.integers(0, 20),
    block_size=st.integers(1, 8),
    pool_size=st.integers(0, 4),
    seed=st.integers(0, 2**64 - 1),
)
def test_one_block_and_one_row_is_single_block_decoding(
    script: str, limit: int, block_size: int, pool_size: int, seed: int
) -> None:
    model = ScriptedTriMode(ALL_SCRIPTS[script])
    single = jacobi(model, [5, 2, 7], limit, block_size=block_size, seed=seed)
    multi = jacobi_multiblock(
        model, [5, 2, 7], limit, block_size=block_size, blocks=1, pool_size=pool_size, verification_size=1, seed=seed
    )
    assert (multi.tokens, multi.forwards) == (single.tokens, single.forwards)
    assert [(step.rows, step.predictions, step.accepted) for step in multi.trace] == [
        ([step.draft], step.predictions, step.accepted) for step in single.trace
    ]


def test_a_promoted_block_continues() -> None:
    """Off its track the script predicts 0. Blocks of four; the second one opens after two accepted tokens."""
    written = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    result = jacobi_multiblock(ScriptedTriMode(from_list(written, 2)), [9, 8], 9, block_size=4, spawn_ratio=0.5, seed=5)
    spare = fillers(filler_words(5, 3, 4)[2], [9, 8, 1])[2:]  # drawn by forward 2 from what was committed before it
    assert 0 not in spare
    assert result.trace[:5] == [
        MultiblockStep([[1, 0, 0, 0]], [], 0, [2, 0, 0, 0], 1),
        MultiblockStep([[2, 0, 0]], [], 0, [3, 0, 0], 1),
        # The clone of the new draft, and fillers after it.
        MultiblockStep([[3, 0]], [PseudoBlock([], [3, 0, *spare])], 0, [4, 0], 1),
        # 3 is accepted without a test, the 0 after it because the model predicts it; the rest are the model's
        # predictions.
        MultiblockStep([[4]], [PseudoBlock([3, 0], [0, 0])], 0, [5], 1),
        # Promoted: the known token first, the rest as a draft. No room for a third block.
        MultiblockStep([[5, 0, 0, 0]], [], 0, [6, 0, 0, 0], 1),
    ]
    assert result.tokens == written


def test_a_candidate_wins() -> None:
    """The text repeats itself: what followed 1 before is tried again, and is right for three tokens."""
    written = [1, 2, 3, 1, 2, 3, 4, 5, 6]
    result = jacobi_multiblock(ScriptedTriMode(from_list(written, 2)), [9, 8], 9, block_size=8, blocks=1)
    assert [step.accepted for step in result.trace] == [1, 1, 1, 3, 1, 1]
    # Newest first: the text after forward 3, then the text after forward 2. On ties the first one.
    assert result.trace[3] == MultiblockStep(
        [[1, 0, 0, 0, 0], [1, 2, 3, 1, 0], [1, 2, 3, 0, 0]], [], 1, [2, 3, 4, 0, 0], 3
    )
    assert result.trace[4].rows[0] == [4, 0]
    plain = jacobi_multiblock(ScriptedTriMode(from_list(written, 2)), [9, 8], 9, block_size=8, blocks=1, pool_size=0)
    assert plain.forwards == result.forwards + 2 and all(len(step.rows) == 1 for step in plain.trace)


@pytest.mark.parametrize("script", sorted(ALL_SCRIPTS))
@pytest.mark.parametrize("blocks", [2, 3])
def test_each_forward_leads_to_the_next(script: str, blocks: int) -> None:
    """What the real block, the pseudo blocks and their order must be, derived from one recorded forward to the next."""
    prompt, size, needed, limit = [3, 1, 4, 1], 6, math.ceil(0.5 * 6), 31
    model = ScriptedTriMode(ALL_SCRIPTS[script])
    result = jacobi_multiblock(model, prompt, limit, block_size=size, blocks=blocks, spawn_ratio=0.5, seed=3)
    committed, block_start = 0, 0
    pool: deque[list[int]] = deque(maxlen=4)
    for number, (step, following) in enumerate(zip(result.trace, result.trace[1:]), start=1):
        history = prompt + result.tokens[:committed]
        after = [token for block in step.pseudo for token in block.accepted + block.draft]
        branch = step.rows[step.row] + after
        (answers,) = branch_predictions(model, history, [branch])
        pseudo, at = [], len(step.rows[0])
        for block in step.pseudo:
            tokens = block.accepted + block.draft
            kept = len(block.accepted)
            while kept < len(tokens) and (kept == len(block.accepted) or tokens[kept] == answers[at + kept - 1]):
                kept += 1
            tail = answers[at + kept - 1 : at + len(tokens) - 1] if kept < len(tokens) else []
            pseudo.append(PseudoBlock(tokens[:kept], tail))
            at += len(tokens)
        draft = step.predictions[step.accepted - 1 : -1]
        committed += step.accepted
        if draft:
            standing = [*result.tokens[block_start:committed], *draft]
            pool.append(standing + [token for block in pseudo for token in block.accepted + block.draft])
        newest = len(pseudo[-1].accepted) if pseudo else committed - block_start
        words = fillers(filler_words(3, number + 1, size)[number], history)
        room = min(size, limit - 1 - block_start - size * (1 + len(pseudo)))
        if newest >= needed and len(pseudo) + 1 < blocks and room > 0:
            pseudo.append(PseudoBlock([], (draft + words[len(draft) :])[:room]))
        if not draft:
            block_start += size
            assert committed == block_start
            following_block = pseudo.pop(0) if pseudo else PseudoBlock([], words)
            draft = [step.predictions[-1], *(following_block.accepted + following_block.draft)[1:]][
                : limit - 1 - committed
            ]
        assert following.pseudo == pseudo and following.rows == [draft, *recycled(pool, draft, 3)]
        if len(step.predictions) > step.accepted + 1:
            pool.append(step.predictions[step.accepted : -1])


def test_blocks_and_candidates_save_forwards() -> None:
    def forwards(script: str, **options: int) -> int:
        model = ScriptedTriMode(ALL_SCRIPTS[script])
        return jacobi_multiblock(model, [3, 1, 4, 1], 40, block_size=8, spawn_ratio=0.5, seed=1, **options).forwards

    assert forwards("alternating", blocks=1) > forwards("alternating", blocks=2) > forwards("alternating", blocks=3)
    assert forwards("repeating", pool_size=0) > forwards("repeating", pool_size=4)


def test_the_mask_of_branches() -> None:
    model = ScriptedTriMode(repeating)
    result = jacobi_multiblock(model, [3, 1, 4], 20, block_size=6, spawn_ratio=0.5)
    start, counts = 3, set()
    for call, step in zip(model.calls[1:], result.trace, strict=True):
        after = [token for block in step.pseudo for token in block.accepted + block.draft]
        count, length = len(step.rows), len(step.rows[0]) + len(after)
        tail, relative = masks.candidates(count, length)
        assert call.tokens[start:] == [token for row in step.rows for token in row + after]
        assert call.tokens[:start] == [3, 1, 4, *result.tokens][:start]
        assert torch.equal(call.mask[start:, start:], tail) and call.mask[start:, :start].all()
        assert torch.equal(call.mask[:start, :start], masks.causal(start)[0]) and not call.mask[:start, start:].any()
        assert call.positions == [*range(start), *(start + relative).tolist()]
        start += step.accepted
        counts.add(count)
    assert len(counts) > 2


def test_branches_equal_separate_forwards() -> None:
    model = Table(6)
    branches = [[1, 2, 3], [1, 4, 4], [1, 2, 0]]
    together = branch_predictions(model, [5, 2], branches)
    for branch, predictions in zip(branches, together):
        assert branch_predictions(model, [5, 2], [branch]) == [predictions]


@pytest.mark.parametrize(
    ("entry", "draft", "expected"),
    [
        ([4, 5, 6], [4, 1, 2], [4, 5, 6]),
        ([7, 4, 5], [4, 1, 2], [4, 5, 2]),  # short: completed with the draft's own end
        ([4, 4, 5, 6, 7], [4, 1, 2], [4, 4, 5]),  # the first occurrence, cut
        ([7], [4, 1], None),
        ([], [4], None),
    ],
)
def test_continuation(entry: list[int], draft: list[int], expected: list[int] | None) -> None:
    assert continuation(entry, draft) == expected


def test_recycled() -> None:
    pool = [[4, 5], [9], [4, 1, 2], [4, 5, 2], [4, 8, 8]]
    assert recycled(pool, [4, 1, 2], 3) == [[4, 8, 8], [4, 5, 2]]  # the draft itself and a repeated row are left out
    assert recycled(pool, [4, 1, 2], 1) == [[4, 8, 8]] and recycled(pool, [4, 1, 2], 0) == []


@pytest.mark.parametrize(
    ("ends", "limit", "tokens"),
    [
        ((1,), 9, [1]),
        ((2,), 9, [1, 2]),
        ((4,), 9, [1, 2, 3, 4]),  # the last token of a block
        ((5,), 9, [1, 2, 3, 4, 5]),  # the first of the next one
        ((0,), 6, [1, 2, 3, 4, 5, 6]),  # an end token in pseudo blocks and rejected drafts does not count
        ((), 1, [1]),
        ((), 4, [1, 2, 3, 4]),
        ((), 5, [1, 2, 3, 4, 5]),
    ],
)
def test_where_it_stops(ends: tuple[int, ...], limit: int, tokens: list[int]) -> None:
    model = ScriptedTriMode(from_list([1, 2, 3, 4, 5, 6, 7, 8, 9], 2))
    result = jacobi_multiblock(model, [9, 8], limit, block_size=4, spawn_ratio=0.5, end_tokens=ends)
    assert result.tokens == tokens
