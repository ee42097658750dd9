"""Drafts, commits, trims and sequences that join and leave, at random: states and rows are those of a replay from the beginning.

python -m tests.ops.test_recurrent_state_rollback --steps 100000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import time

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from tests.ops.state_cases import LAYERS, Cache, bits, path_to, random_tree, small

SIZE, PENDING, LONGEST = 3, 5, 40


class Sequence:
    """What was committed: for each layer, the inputs and the output of each row."""

    def __init__(self) -> None:
        self.rows: dict[str, list[list[Tensor]]] = {name: [] for name in LAYERS}
        self.outputs: dict[str, list[Tensor]] = {name: [] for name in LAYERS}
        self.rollback = 0
        """How short it can be made."""

    def __len__(self) -> int:
        return len(self.outputs["conv"])

    def shorten(self, length: int) -> None:
        for name in LAYERS:
            del self.rows[name][length:], self.outputs[name][length:]


class Random:
    """Layers of all kinds with one length for each row of their caches."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.layers = {name: small(name, seed) for name in LAYERS}
        self.caches = {name: Cache(layer, SIZE, PENDING) for name, layer in self.layers.items()}
        first = self.caches["conv"]
        self.lengths, self.index = first.lengths, first.pending_index
        for cache in self.caches.values():
            cache.lengths, cache.pending_index = self.lengths, self.index
        self.sequences = [Sequence() for _ in range(SIZE)]
        self.checked = self.trimmed = self.trees = 0

    def held(self) -> list[Tensor]:
        return [cache.state_lengths for cache in self.caches.values()]

    def replayed(self, r: int) -> None:
        """Compares a sequence with its rows in one step of a new cache."""
        sequence = self.sequences[r]
        count = len(sequence)
        if count == 0:
            return
        for name, layer in self.layers.items():
            rows = [torch.stack(one)[None] for one in zip(*sequence.rows[name])]
            fresh, last = Cache(layer, 1, PENDING), layer.rows(1, 1)
            out = fresh.step(rows, keep=0)
            assert torch.equal(bits(out[0]), bits(torch.stack(sequence.outputs[name]))), name
            fresh.lengths += count
            mine = self.caches[name].step(last, cache_rows=torch.tensor([r]), keep=None)
            assert torch.equal(bits(mine), bits(fresh.step(last)))
            assert torch.equal(bits(self.caches[name].state[r]), bits(fresh.state[0])), name
        sequence.rollback = count
        self.checked += 1

    def leave(self, r: int) -> None:
        self.replayed(r)
        self.lengths[r] = 0
        for held in self.held():
            held[r] = 0
        self.sequences[r] = Sequence()

    def draft(self) -> None:
        """A step of some sequences: prompts, paths or trees, which may be repeated; then up to two commits and a trim."""
        rng = self.rng
        chosen = rng.sample(range(SIZE), rng.randint(1, SIZE))
        keep = rng.choice([None, None, None, 0, 2, PENDING])
        rows = rng.randint(1, PENDING if keep is None else 9)
        counts = [rng.choice([0, rows, rng.randint(0, rows)]) for _ in chosen]
        settled = [0 if keep is None else max(count - keep, 0) for count in counts]
        trees = None
        if rng.random() < 0.4:
            trees = [random_tree(rng, rows, path) for path in settled]
            self.trees += 1
        parents = trees or [list(range(-1, rows - 1))] * len(chosen)
        options = {
            "cache_rows": torch.tensor(chosen),
            "counts": torch.tensor(counts),
            "keep": keep,
            "parents": None if trees is None else torch.tensor(trees),
        }
        drafts, outputs = {}, {}
        for name, layer in self.layers.items():
            drafts[name] = layer.rows(len(chosen), rows)
            if keep is None and rng.random() < 0.2:  # a draft that is given up
                self.caches[name].step(layer.rows(len(chosen), rows), **options)
            outputs[name] = self.caches[name].step(drafts[name], **options)
        committed, sources = [0] * SIZE, [[0] * 9 for _ in range(SIZE)]
        for b, r in enumerate(chosen):
            if counts[b] == 0:
                continue
            self.sequences[r].rollback = len(self.sequences[r]) + settled[b]
            path = path_to(parents[b], rng.randrange(max(settled[b], 1) - 1, counts[b]))
            if settled[b] == 0:
                path = path[: rng.randint(0, len(path))]
            for name in LAYERS:
                self.sequences[r].rows[name] += [[x[b, i] for x in drafts[name]] for i in path]
                self.sequences[r].outputs[name] += [outputs[name][b, i] for i in path]
            committed[r], sources[r][: len(path)] = len(path), path
        self.commit(committed, sources)
        if rng.random() < 0.3:
            self.trim()

    def commit(self, counts: list[int], sources: list[list[int]]) -> None:
        """At once, or in two parts, the second of which counts from the new length."""
        rng = self.rng
        held = [int(self.caches["conv"].state_lengths[r]) - int(self.lengths[r]) for r in range(SIZE)]
        first = [rng.randint(max(held[r], 0), n) if n and rng.random() < 0.3 else n for r, n in enumerate(counts)]
        for part, begin in ((first, [0] * SIZE), ([n - m for n, m in zip(counts, first)], first)):
            index = [[s - b for s in source[b:]] + [0] * b for source, b in zip(sources, begin)]
            pd.state_commit_(self.lengths, self.index, self.held(), torch.tensor(part), torch.tensor(index))

    def trim(self) -> None:
        wanted = [self.rng.randint(min(one.rollback, len(one)), len(one)) for one in self.sequences]
        pd.state_trim_(self.lengths, torch.tensor(wanted), self.held())
        for sequence, length in zip(self.sequences, wanted):
            self.trimmed += len(sequence) - length
            sequence.shorten(length)

    def step(self) -> None:
        if self.rng.random() < 0.1:
            self.leave(self.rng.randrange(SIZE))
        self.draft()
        for r, sequence in enumerate(self.sequences):
            assert self.lengths[r] == len(sequence)
            if len(sequence) > LONGEST:
                self.leave(r)


def run(steps: int, seed: int) -> Random:
    found = Random(seed)
    for _ in range(steps):
        found.step()
    for r in range(SIZE):
        found.leave(r)
    return found


def test_states_are_those_of_a_replay() -> None:
    found = run(2000, seed=0)
    assert found.checked > 200 and found.trimmed > 100 and found.trees > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_states_are_those_of_a_replay_for_long(seed: int) -> None:
    found = run(20_000, seed)
    assert found.checked > 2000 and found.trimmed > 1000 and found.trees > 2000


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start = time.monotonic()
    done = run(given.steps, given.seed)
    print(
        f"{given.steps} steps in {time.monotonic() - start:.0f} s: {done.checked} replays, {done.trimmed} rows trimmed"
    )
