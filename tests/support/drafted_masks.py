"""The masks of a draft, beside those of each of its rows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def check_masks_of_a_draft(automaton: Any, vocabulary: int, draw: random.Random) -> None:
    """Of random trees: rows whose tokens lead nowhere are left as they are."""
    for _ in range(4):
        start = max(0, automaton.follow(0, [draw.randrange(vocabulary) for _ in range(draw.randint(0, 2))]))
        paths: list[list[int]] = [[]]
        for _ in range(draw.randint(0, 9)):
            paths.append([*draw.choice(paths), draw.randrange(vocabulary)])
        draw.shuffle(paths)
        rows = [(row, draw.choice([-1, 0, 1, 2, 3, 50, 51]), path) for row, path in enumerate(paths)]
        bits: Any = np.full((len(rows) + 1, 1), 77, dtype=np.int32)
        automaton.masks(start, rows, bits)
        assert bits[-1, 0] == 77
        for row, budget, path in rows:
            expected: Any = np.full(1, 77, dtype=np.int32)
            state = automaton.follow(start, path)
            if state >= 0:
                automaton.mask(state, budget, expected)
            assert bits[row, 0] == expected[0], (path, budget)
