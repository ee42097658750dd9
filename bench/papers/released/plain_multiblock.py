"""Multi-block Jacobi decoding as released, forward by forward.

Source: the code released with "Jacobi Forcing" (arXiv 2512.14681). It ends each call with the first block and discards the promoted one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from pdkernels.reference.autoregressive import Model
from pdkernels.reference.jacobi import accepted_length
from pdkernels.reference.jacobi_multiblock import (
    JacobiMultiblockResult,
    MultiblockStep,
    PseudoBlock,
    _first_draft,
    _forward,
    _fresh,
    continuation,
)


def released_multiblock(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    pad_token: int,
    block_size: int = 64,
    blocks: int = 2,
    spawn_ratio: float = 0.85,
    pool_size: int = 4,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
    max_iterations: int = 128,
) -> JacobiMultiblockResult:
    """What the authors' released decoder does, forward by forward, for one or two blocks: its tokens are also the greedy ones.

    A call per block, see :func:`_call`; the next one starts from a draft of random earlier tokens, with an empty pool.
    The last call runs in full, then is cut to `max_new_tokens`. Three blocks and more are refused: in the released code
    they end in blocks with unequal numbers of rows.

    Args: as in :func:`pdkernels.reference.jacobi_multiblock.jacobi_multiblock`, and
        pad_token: completes spawned blocks; left out of the pool.
        max_iterations: forwards per call.
    """
    op = "papers.released_multiblock"
    if blocks not in (1, 2):
        raise ValueError(f"{op}: blocks must be 1 or 2, got {blocks}. Use jacobi_multiblock.")
    prompt = list(prompt)
    if max_new_tokens == 0:
        return JacobiMultiblockResult([], 0, [])
    trace: list[MultiblockStep] = []
    draft = _first_draft(model, prompt, block_size, seed)
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in end_tokens):
        written, next_token = _call(
            model,
            prompt + tokens,
            draft,
            trace,
            pad_token=pad_token,
            blocks=blocks,
            spawn_at=math.ceil(spawn_ratio * block_size),
            pool_size=pool_size,
            end_tokens=end_tokens,
            max_iterations=max_iterations,
        )
        tokens = tokens + written
        draft = [next_token, *_fresh(seed, len(trace), block_size, prompt + tokens)[1:]]
    return JacobiMultiblockResult(tokens[:max_new_tokens], 1 + len(trace), trace)


def _call(
    model: Model,
    start: list[int],
    draft: list[int],
    trace: list[MultiblockStep],
    *,
    pad_token: int,
    blocks: int,
    spawn_at: int,
    pool_size: int,
    end_tokens: Sequence[int],
    max_iterations: int,
) -> tuple[list[int], int]:
    """The tokens that a call writes after `start`, and the token after them; its forwards go to `trace`.

    The pool takes two entries when a draft is partly accepted: all blocks as they are, and the rejected tail. The search
    skips the newest entry, keeps duplicates, and gives up if it finds fewer than two candidates. Pseudo blocks follow the
    first row, whichever wins. A pad after the clone of the real draft completes a spawned block.

    When the real block is full, the first pseudo block with progress becomes real and one block fewer is considered: then all
    of these are full, and the call ends. A real block that is full before its pseudo block was fed costs one more forward, and
    each skipped block counts as one active block fewer. So a third block may be spawned in that forward, though
    two are allowed. The call then continues with the promoted block, and considers the third, and a fourth, when more are spawned.
    """
    size = len(draft)
    accepted: list[list[int]] = [[]]
    drafts, provisional = [[draft]], [False]  # rows of each block; whether it is a pseudo block
    count, active, real = 1, 1, 0  # blocks that are considered; how many the code counts as active
    next_token = draft[0]
    pool: deque[list[int]] = deque(maxlen=pool_size)

    def written() -> list[int]:
        sure = [b for b in range(count) if b != real and not provisional[b]]
        return [token for b in [*sure, real] for token in accepted[b]]

    for _ in range(max_iterations):
        waiting = [b for b in range(count) if b != real and provisional[b]]
        pseudo, rows = [PseudoBlock(accepted[b], drafts[b][0]) for b in waiting], drafts[real]
        for b in waiting:
            if 1 < len(drafts[b]) != len(rows) > 1:
                raise ValueError(
                    f"papers.released_multiblock: blocks must have equally many rows, got {len(rows)} and "
                    f"{len(drafts[b])}, where the released code fails as well. Use jacobi_multiblock."
                )
        row, predictions, answers = _forward(model, start + written(), rows, pseudo)
        taken = accepted_length(rows[row], predictions, end_tokens) if rows[0] else 0
        trace.append(MultiblockStep(rows, pseudo, row, predictions, taken))
        if taken:
            accepted[real] = accepted[real] + rows[row][:taken]
            last = accepted[real][-1]
            next_token = last if last in end_tokens else predictions[taken - 1]
            if next_token in end_tokens:
                return written() + [next_token] * (last not in end_tokens), next_token
            own, rejected = predictions[taken - 1 : -1], predictions[taken:-1]
            drafts[real] = [own]
            if own:
                standing = [token for b in range(count) for token in accepted[b] + drafts[b][0]]
                pool.append([token for token in standing if token != pad_token])
                if rejected:
                    pool.append(rejected)
                found = [continuation(entry, own) for entry in reversed(list(pool)[:-1])]
                others = [candidate for candidate in found if candidate is not None]
                drafts[real] = [own, *others] if len(others) > 1 else [own]
        for b, block, own in zip(waiting, pseudo, answers[0]):
            accepted[b], tail = block.verified(own)
            drafts[b] = [tail]
        if len(accepted[count - 1]) >= spawn_at and active < blocks:
            accepted.append([])
            drafts.append([own + [pad_token] * (size - len(own)) for own in drafts[real]])
            provisional.append(True)
            count, active = count + 1, active + 1
        if len(accepted[real]) >= size:
            for b in range(count):
                active -= 1
                if provisional[b] and accepted[b]:
                    drafts[b] = [[next_token, *(accepted[b] + drafts[b][0])[1:]]]
                    accepted[b], provisional[b], real, count = [], False, b, count - 1
                    break
        if all(len(accepted[b]) >= size for b in range(count)):
            break
    return written(), next_token
