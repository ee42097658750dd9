"""Dense masks as rules on single pairs: each function lists the tokens, then evaluates for every (row, column) whether the rule of
the source lets the row see the column. Returns ``(visible, positions)``: bool ``(rows, columns)`` and int64 ``(rows,)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Mask = tuple[Tensor, Tensor]


def _evaluate(
    rows: Sequence[Any], columns: Sequence[Any], sees: Callable[[Any, Any], bool], positions: Sequence[int]
) -> Mask:
    visible = torch.tensor([[bool(sees(q, k)) for k in columns] for q in rows], dtype=torch.bool)
    return visible.view(len(rows), len(columns)), torch.tensor(list(positions), dtype=torch.int64)


def causal(q_len: int, kv_len: int | None = None) -> Mask:
    """The last row is the token of the last column; a row sees columns up to its own token."""
    kv_len = q_len if kv_len is None else kv_len
    rows = range(kv_len - q_len, kv_len)
    return _evaluate(rows, range(kv_len), lambda q, k: k <= q, rows)


def full(q_len: int, kv_len: int | None = None) -> Mask:
    kv_len = q_len if kv_len is None else kv_len
    rows = range(kv_len - q_len, kv_len)
    return _evaluate(rows, range(kv_len), lambda q, k: True, rows)


def block_causal(length: int, block_size: int, prefix_len: int = 0) -> Mask:
    """In the prefix ``k <= q``; after it the whole prefix, and ``block(k) <= block(q)``, blocks counted from the end of the
    prefix."""

    def sees(q: int, k: int) -> bool:
        if q < prefix_len:
            return k <= q
        return k < prefix_len or (k - prefix_len) // block_size <= (q - prefix_len) // block_size

    return _evaluate(range(length), range(length), sees, range(length))


def width_scaling(length: int, factor: int, kv_share: bool = False) -> Mask:
    """Copy j of token i sees copies 1 to j of token i, and of an earlier token all copies or the last one."""
    copies = [(i, j) for i in range(length) for j in range(1, factor + 1)]

    def sees(q: tuple[int, int], k: tuple[int, int]) -> bool:
        (i, j), (other, its) = q, k
        return its <= j if other == i else other < i and (its == factor or not kv_share)

    return _evaluate(copies, copies, sees, [i for i, _ in copies])


class _Packed(NamedTuple):
    stream: str  # "prompt", "k" (noisy) or "l" (clean)
    block: int
    offset: int
    position: int


def noise_aware_causal(
    prompt_len: int,
    block_size: int,
    num_blocks: int,
    conditioning: str = "noisy",
    window: int | None = None,
    layout: str = "streams",
) -> Mask:
    """Jacobi Forcing, the table of its three trainers. "Own" is the same block, and a key not after the query.

    prompt: causal in the prompt. l_j: prompt, all l_{<j}, own. k_j: prompt, own, and
    noisy (NC): all k_{<j}; clean (2a): all l_{<j}; window (NC-IC): l_{<i} and k_i .. k_{j-1} with i = floor(j / w) * w.
    """
    size, count = block_size, num_blocks
    prompt = [_Packed("prompt", 0, p, p) for p in range(prompt_len)]

    def block(stream: str, j: int) -> list[_Packed]:
        return [_Packed(stream, j, t, prompt_len + j * size + t) for t in range(size)]

    if layout == "interleaved":
        tokens = prompt + [token for j in range(count) for token in block("k", j) + block("l", j)]
    else:
        tokens = prompt + [token for stream in "lk" for j in range(count) for token in block(stream, j)]

    def sees(q: _Packed, k: _Packed) -> bool:
        if q.stream == "prompt":
            return k.stream == "prompt" and k.offset <= q.offset
        if k.stream == "prompt":
            return True
        if q.stream == k.stream and q.block == k.block:
            return k.offset <= q.offset
        if q.stream == "l":
            return k.stream == "l" and k.block < q.block
        if conditioning == "noisy":
            return k.stream == "k" and k.block < q.block
        if conditioning == "clean":
            return k.stream == "l" and k.block < q.block
        assert window is not None
        start = q.block // window * window
        return (k.stream == "l" and k.block < start) or (k.stream == "k" and start <= k.block < q.block)

    return _evaluate(tokens, tokens, sees, [token.position for token in tokens])


def dual_stream(
    length: int,
    block_size: int,
    clean: str = "causal",
    order: str = "noisy_first",
    noisy_positions: Sequence[int] | None = None,
    prefix_len: int = 0,
) -> Mask:
    """Nemotron-Labs-Diffusion (clean stream causal) and BD3-LM, Fast-dLLM v2 (clean stream causal by blocks).

    noisy to noisy: the same block. noisy to clean: an earlier block, or the prefix. clean to noisy: never.
    clean to clean: ``k <= q``, or ``block(k) <= block(q)`` after the prefix.
    """
    kept = range(prefix_len, length) if noisy_positions is None else noisy_positions
    noisy_tokens, clean_tokens = [("noisy", p) for p in kept], [("clean", p) for p in range(length)]
    tokens = noisy_tokens + clean_tokens if order == "noisy_first" else clean_tokens + noisy_tokens

    def block(position: int) -> int:
        return -1 if position < prefix_len else (position - prefix_len) // block_size

    def sees(q: tuple[str, int], k: tuple[str, int]) -> bool:
        (q_stream, q_pos), (k_stream, k_pos) = q, k
        if q_stream == "noisy":
            return block(k_pos) == block(q_pos) if k_stream == "noisy" else block(k_pos) < block(q_pos)
        if k_stream == "noisy":
            return False
        if clean == "causal" or block(q_pos) == -1:
            return k_pos <= q_pos
        return block(k_pos) <= block(q_pos)

    return _evaluate(tokens, tokens, sees, [position for _, position in tokens])


def planned(
    stages: Sequence[tuple[int, Sequence[int], bool]],
    sparse: bool = False,
    open_chunks: str = "hidden",
    inside: str = "full",
) -> Mask:
    """Planned Diffusion. The mask is built as in the released training code, row by row of text:

    plan tokens attend to what has been shown to plan tokens so far, and to each other causally; the chunks of a round see the
    same (or, with "visible" open chunks, all earlier rows), and each other (dense) or only their own chunk (sparse), of
    which a causal one shows what comes before; a sync token sees all earlier rows and shows them to all later rows.
    """
    shown: set[int] = set()  # tokens that plan rows may see
    seen_by: list[set[int]] = []
    for plan, chunks, sync in stages:
        for _ in range(plan):
            shown.add(len(seen_by))
            seen_by.append(set(shown))
        start = len(seen_by)
        spans: list[tuple[int, int]] = []
        for length in chunks:
            begin = spans[-1][1] if spans else start
            spans.append((begin, begin + length))
        for begin, end in spans:
            mates = range(begin, end) if sparse else range(start, spans[-1][1])
            past = shown if open_chunks == "hidden" else set(range(start))
            seen_by += [past | {k for k in mates if inside == "full" or k <= q} for q in range(begin, end)]
        if sync:
            shown = set(range(len(seen_by) + 1))
            seen_by.append(set(shown))
    tokens = range(len(seen_by))
    return _evaluate(tokens, tokens, lambda q, k: k in seen_by[q], tokens)


def planned_streams(
    stages: Sequence[tuple[int, Sequence[int], bool]], sparse: bool = False, open_chunks: str = "hidden"
) -> Mask:
    """A noisy copy of all chunks, then the clean text without the chunks that no other round may see. Clean rows see clean rows
    as in `planned`; noisy rows see their own round's noisy rows, and the clean rows of all others, as in `planned`."""
    text, _ = planned(stages, sparse, open_chunks)
    round_of: list[int] = []  # -1 for tokens outside chunks
    for number, (plan, chunks, sync) in enumerate(stages):
        round_of += [-1] * plan + [number] * sum(chunks) + [-1] * sync
    everything = range(len(round_of))
    noisy = [("noisy", i) for i in everything if round_of[i] >= 0]

    def is_read(i: int) -> bool:
        return round_of[i] < 0 or any(text[q, i] for q in everything if round_of[q] != round_of[i])

    def sees(q: tuple[str, int], k: tuple[str, int]) -> bool:
        if q[0] == "clean":
            stream = "clean"
        else:
            stream = "noisy" if round_of[k[1]] == round_of[q[1]] else "clean"
        return k[0] == stream and bool(text[q[1], k[1]])

    tokens = noisy + [("clean", i) for i in everything if is_read(i)]
    return _evaluate(tokens, tokens, sees, [i for _, i in tokens])


def quadratic(
    block_size: int,
    masks_per_group: int | None = None,
    in_group: str = "bidirectional",
    layout: str = "spec_first",
    anchor_group: bool = True,
) -> Mask:
    """Self-speculation, closed form over (group g, rank r): ``(r_k == 0 and g_k <= g_q) or (g_k == g_q and r_q != 0)``, in the
    second part ``r_k <= r_q`` too for causal groups. Position ``g + r``."""
    count = block_size if masks_per_group is None else masks_per_group

    def size(g: int) -> int:
        return count if anchor_group or g > 0 else 0

    if layout == "interleaved":
        tokens = [(g, r) for g in range(block_size) for r in range(1 + size(g))]
    else:
        tokens = [(g, 0) for g in range(block_size)] + [
            (g, r) for g in range(block_size) for r in range(1, 1 + size(g))
        ]

    def sees(q: tuple[int, int], k: tuple[int, int]) -> bool:
        (g_q, r_q), (g_k, r_k) = q, k
        in_own = g_k == g_q and r_q != 0 and (in_group == "bidirectional" or r_k <= r_q)
        return (r_k == 0 and g_k <= g_q) or in_own

    return _evaluate(tokens, tokens, sees, [g + r for g, r in tokens])


def anchored(
    documents: Sequence[int] | Tensor,
    anchors: Sequence[int] | Tensor,
    block: int | Sequence[int] | Tensor,
    inside: str = "full",
    window: int | None = None,
    inclusive: bool = False,
    base: str = "none",
) -> Mask:
    """A block sees the tokens of its anchor's document before the anchor, at most `window`, and itself."""
    if isinstance(documents, Tensor):
        ids = documents.tolist()
    else:
        ids = [document for document, length in enumerate(documents) for _ in range(length)]
    anchor_tokens = [int(anchor) for anchor in anchors]
    sizes = [block] * len(anchor_tokens) if isinstance(block, int) else [int(size) for size in block]
    # Number of the block or None, base token or anchor, offset in the block.
    tokens: list[tuple[int | None, int, int]] = [(None, i, 0) for i in range(len(ids))]
    tokens += [(j, anchor, t) for j, (anchor, size) in enumerate(zip(anchor_tokens, sizes)) for t in range(size)]

    def sees(q: tuple[int | None, int, int], k: tuple[int | None, int, int]) -> bool:
        if k[0] is not None:
            return q[0] == k[0] and (inside == "full" or k[2] <= q[2])
        same_document = ids[q[1]] == ids[k[1]] != -1
        if q[0] is None:
            return base == "causal" and same_document and k[1] <= q[1]
        near = window is None or k[1] >= q[1] - window
        return same_document and near and (k[1] < q[1] or (inclusive and k[1] == q[1]))

    def position(token: int) -> int:
        return 0 if ids[token] == -1 else token - ids.index(ids[token])

    return _evaluate(tokens, tokens, sees, [position(i) + t for _, i, t in tokens])


def candidates(count: int, length: int) -> Mask:
    """The same branch, and ``k <= q``."""
    tokens = [(branch, i) for branch in range(count) for i in range(length)]
    return _evaluate(tokens, tokens, lambda q, k: q[0] == k[0] and k[1] <= q[1], [i for _, i in tokens])


def tree(parents: Sequence[int]) -> Mask:
    """The token itself, or an ancestor."""

    def line(token: int) -> list[int]:
        return [token, *line(parents[token])] if token >= 0 else []

    lines = [line(token) for token in range(len(parents))]
    tokens = range(len(parents))
    return _evaluate(tokens, tokens, lambda q, k: k in lines[q], [len(path) - 1 for path in lines])


def pack(masks: Sequence[Mask], length: int | None = None) -> Mask:
    """The same sample, and visible there. Padding is fully masked, as rows and as columns; its position is 0."""
    used = sum(len(positions) for _, positions in masks)
    tokens = [(sample, i) for sample, (_, positions) in enumerate(masks) for i in range(len(positions))]
    tokens += [(-1, 0)] * ((used if length is None else length) - used)

    def sees(q: tuple[int, int], k: tuple[int, int]) -> bool:
        return q[0] == k[0] != -1 and bool(masks[q[0]][0][q[1], k[1]])

    return _evaluate(tokens, tokens, sees, [int(masks[sample][1][i]) if sample >= 0 else 0 for sample, i in tokens])
