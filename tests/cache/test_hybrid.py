"""A cache of attention and recurrent states against a replay of every text from its beginning, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pdkernels.cache import ContiguousKVCache, HybridCache, PagedKVCache, StateShape
from pdkernels.masks import TilePlan, causal
from pdkernels.models.architectures.states import States, parents_of

BATCH, CAPACITY, PENDING, IDS = 3, 20, 6, 50
F32 = torch.float32
SHAPES = {
    "conv": StateShape((2, 6), torch.bfloat16, (((6,), torch.bfloat16),)),
    "delta": StateShape((2, 4, 3), F32, (((1, 4), F32), ((2, 3), F32), ((2,), F32))),
    "selective": StateShape((2, 5, 3), F32, (((2, 3), F32), ((1, 5), F32), ((2,), F32))),
}


def table(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn((IDS, *shape), generator=torch.Generator().manual_seed(seed))


TABLES = {
    name: table(*shape, seed=seed)
    for seed, (name, shape) in enumerate(
        {"x": (6,), "q": (1, 4), "k": (1, 4), "v": (2, 3), "g": (2,), "beta": (2,), "dt": (2,), "b": (1, 5), "c": (1, 5)}.items()
    )
}  # fmt: skip
TABLES["beta"] = TABLES["beta"].sigmoid()  # once: bits of torch's sigmoid depend on where a number is in a tensor
WEIGHT, A = table(3, seed=90)[:6].bfloat16(), -table(seed=91)[:2].abs()


def layers(states: States, ids: torch.Tensor) -> torch.Tensor:
    """The outputs of three layers for tokens ``(batch, rows)``."""
    at = {name: rows[ids] for name, rows in TABLES.items()}
    conv = states.short_conv("conv", at["x"].bfloat16(), WEIGHT, None, "silu")
    delta = states.gated_delta("delta", at["q"], at["k"], at["v"], -at["g"].abs(), at["beta"], 1e-6)
    scan = (at["v"], at["dt"], A, at["b"], at["c"], None, None, True, (0.0, float("inf")))
    return torch.cat([conv.float(), delta.flatten(2), states.selective_state("selective", *scan).flatten(2)], -1)


def replayed(text: list[int]) -> torch.Tensor:
    """The output of the last token of a text, on no cache."""
    return layers(States(None, 1, len(text), torch.device("cpu")), torch.tensor([text]))[0, -1]


def make(page_size: int | None, batch: int = BATCH) -> HybridCache:
    if page_size is None:
        return HybridCache(ContiguousKVCache(1, batch, CAPACITY, 1, 4), SHAPES, pending=PENDING)
    pages = -(-CAPACITY // page_size)
    kv = PagedKVCache(1, batch, batch * pages, page_size, 1, 4, max_pages_per_sequence=pages)
    kv.reserve_(CAPACITY)
    return HybridCache(kv, SHAPES, pending=PENDING)


class Tree:
    """A mask of random branches; `plan` sees what precedes a row in its branch."""

    def __init__(self, draw: random.Random, rows: int) -> None:
        self.parents = [draw.randrange(-1, row) for row in range(rows)]
        visible = torch.eye(rows, dtype=torch.bool)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                visible[row] |= visible[parent]
        self.visible = visible

    def path(self, row: int) -> list[int]:
        return ([] if self.parents[row] < 0 else self.path(self.parents[row])) + [row]


class Plan:
    """What `parents_of` reads of a plan."""

    def __init__(self, visible: torch.Tensor) -> None:
        self._visible, self.kv_len = visible, visible.shape[0]

    def dense(self) -> torch.Tensor:
        return self._visible


def fuzz(seed: int, steps: int, page_size: int | None) -> None:
    draw = random.Random(seed)
    cache, texts = make(page_size), [[] for _ in range(BATCH)]  # type: ignore[var-annotated]
    base = [0] * BATCH
    for _ in range(steps):
        rows = draw.randrange(1, 9)
        ids = torch.tensor([[draw.randrange(IDS) for _ in range(rows)] for _ in range(BATCH)])
        room = [CAPACITY - len(text) for text in texts]
        tree = Tree(draw, rows) if rows <= min(room) and draw.random() < 0.5 else None
        counts = [min(draw.choice([rows, draw.randrange(rows + 1)]), free) for free in room]
        given = None if tree is None and counts == [rows] * BATCH else torch.tensor(counts)
        if tree is None:
            states = States(cache, BATCH, rows, torch.device("cpu"), given)
        else:
            mask: Any = Plan(tree.visible)
            states = States(cache, BATCH, rows, torch.device("cpu"), given, mask)
        out = layers(states, ids)
        for b in range(BATCH):
            for row in range(rows if tree else counts[b]):
                path = tree.path(row) if tree else range(row + 1)
                assert torch.equal(out[b, row], replayed(texts[b] + [int(ids[b, i]) for i in path])), (b, row)
        if draw.random() < 0.1:  # a forward that is forgotten
            continue
        fresh = [len(text) == 0 for text in texts]
        paths = [list(range(counts[b])) for b in range(BATCH)]
        if tree is not None:  # a branch: what a row adds to a state depends on those before it
            ends = [draw.randrange(rows) for _ in range(BATCH)]
            paths = [tree.path(end)[: room[b]] for b, end in enumerate(ends)]
        accepted = [draw.randrange(len(path) + 1) for path in paths]
        for b in range(BATCH):
            if fresh[b] and tree is None:  # what a prompt has put into the states has to be committed
                accepted[b] = max(accepted[b], counts[b] - cache.pending)
        source = None
        if tree is not None:
            source = torch.zeros(BATCH, rows, dtype=torch.int64)
            for b, path in enumerate(paths):
                source[b, : len(path)] = torch.tensor(path, dtype=torch.int64)
        cache.commit_(torch.tensor(accepted), source)
        for b, (path, count) in enumerate(zip(paths, accepted)):
            base[b] = len(texts[b])
            texts[b] += [int(ids[b, i]) for i in path[:count]]
        if draw.random() < 0.4:
            wanted = [draw.choice([0, draw.randrange(at, len(text) + 1)]) if draw.random() < 0.5 else len(text) for at, text in zip(base, texts)]  # fmt: skip
            low = cache.state_lengths.amax(0).tolist()
            wanted = [length if length in (0, len(text)) else max(length, least) for length, text, least in zip(wanted, texts, low)]  # fmt: skip
            cache.trim_(wanted)
            texts = [text[:length] for text, length in zip(texts, wanted)]
            if page_size is not None:
                cache.reserve_(CAPACITY)
        if draw.random() < 0.2:
            row, other = draw.randrange(BATCH), make(draw.choice([None, 2]), 1)
            ids = torch.tensor([[draw.randrange(IDS) for _ in range(draw.randrange(1, 9))]])
            layers(States(other, 1, ids.shape[1], torch.device("cpu")), ids)
            taken = draw.randrange(max(0, ids.shape[1] - PENDING), ids.shape[1] + 1)
            other.commit_(torch.tensor([taken]))
            cache.copy_row_(row, other, 0, taken)
            texts[row], base[row] = ids[0, :taken].tolist(), 0
        assert cache.lengths.tolist() == [len(text) for text in texts]


@pytest.mark.parametrize("page_size", [None, 3])
def test_states_equal_a_replay(page_size: int | None) -> None:
    fuzz(1, 60, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_states_equal_a_replay_often(seed: int) -> None:
    fuzz(100 + seed, 5000, (None, 1, 2, 5)[seed % 4])


def test_parents_of_plans() -> None:
    tree = Tree(random.Random(3), 30)
    from pdkernels.masks import Segment, SegmentMask

    segments = [Segment(1, "causal", tuple(range(i, i + 1) for i in tree.path(row)[:-1])) for row in range(30)]
    plan: TilePlan = SegmentMask(segments).plan(16, 16)
    parents = parents_of(plan)
    assert parents is not None and parents.tolist() == tree.parents
    assert parents_of(causal(9).plan()) is None


def started(rows: int = 9) -> HybridCache:
    """A cache with texts of nine tokens, three of them in the states."""
    cache = make(None)
    layers(States(cache, BATCH, rows, torch.device("cpu")), torch.zeros(BATCH, rows, dtype=torch.int64))
    cache.commit_(torch.full((BATCH,), rows))
    return cache


def test_what_cannot_be_taken_back_is_refused() -> None:
    cache = started()
    with pytest.raises(ValueError, match=r"state_trim_: new_lengths must be in \[3, 9\], got 2 for sequence 1"):
        cache.trim_([9, 2, 9])
    assert cache.lengths.tolist() == [9, 9, 9]
    cache.trim_([3, 9, 0])
    assert cache.lengths.tolist() == [3, 9, 0] and cache.state_lengths[:, 2].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="state_commit_: lengths"):
        cache.commit_(torch.tensor([7, 0, 0]))
    assert cache.lengths.tolist() == [3, 9, 0]
    with pytest.raises(ValueError, match="other must have the same states, got others"):
        cache.copy_row_(0, HybridCache(ContiguousKVCache(1, 1, 4, 1, 4), {"a": SHAPES["conv"]}), 0, 0)
    with pytest.raises(ValueError, match="length must be 0 or at least 3, got 2"):
        cache.copy_row_(0, started(), 1, 2)
    with pytest.raises(ValueError, match="states must hold at least one, got none"):
        HybridCache(ContiguousKVCache(1, 1, 4, 1, 4), {})
    with pytest.raises(ValueError, match="pending must be 1 or more, got 0"):
        HybridCache(ContiguousKVCache(1, 1, 4, 1, 4), SHAPES, pending=0)
    with pytest.raises(AttributeError, match="has no attribute 'reserve_'"):
        cache.reserve_(3)


def test_memory_is_checked() -> None:
    with pytest.raises(ValueError, match="cache.HybridCache: pending must fit in memory"):
        HybridCache(ContiguousKVCache(1, 1, 4, 1, 4), SHAPES, pending=2**44)
    cache = started()
    with pytest.raises(ValueError, match="reserve_drafts_: rows must fit in memory"):
        cache.reserve_drafts_(2**44)
    assert cache.pending == PENDING


def test_room_for_longer_drafts() -> None:
    """A draft longer than the room for pending rows makes more, and what was pending stays."""
    cache, ids = started(), torch.arange(12).repeat(BATCH, 1)
    before = [kept.data_ptr() for kept in cache.states["delta"].pending]
    out = layers(States(cache, BATCH, 9, torch.device("cpu")), ids[:, :9])
    assert cache.pending == 9 and before != [kept.data_ptr() for kept in cache.states["delta"].pending]
    assert torch.equal(out[0, -1], replayed([0] * 9 + list(range(9))))
    cache.commit_(torch.tensor([1, 0, 9]))
    out = layers(States(cache, BATCH, 1, torch.device("cpu")), ids[:, 9:10])
    for b, count in enumerate((1, 0, 9)):
        assert torch.equal(out[b, 0], replayed([0] * 9 + list(range(count)) + [9]))
