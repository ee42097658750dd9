"""A task whose answers take many steps each: names that lead to names, from one to the next up to the last."""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from pdkernels._validation import check, check_type
from pdkernels.training.corpora import HELD_OUT_EVERY

NAMES = string.ascii_letters + string.digits
_SPREAD = 4  # asked names are adjacent in a chain, so they are about equally far from its end


class Chains(NamedTuple):
    """Links between names in any order, and the names whose chains have to be followed."""

    prompt: str
    """Links of two names with a space after each, ``?``, the asked names, ``=``. A last name leads to itself."""
    paths: tuple[str, ...]
    """For each asked name, all names from it to the last one."""

    @property
    def answer(self) -> str:
        """The last names, in the order of the asked ones."""
        return "".join(path[-1] for path in self.paths)

    @property
    def hops(self) -> int:
        """Steps of the longest path."""
        return max(map(len, self.paths)) - 1

    def is_solved_by(self, text: str) -> bool:
        """Whether a continuation of the prompt is the answer.

        >>> asked = Chains("bc yz zz cc ab xy ?ax=", ("abc", "xyz"))
        >>> asked.answer, asked.hops, asked.is_solved_by("cz"), asked.is_solved_by("cc")
        ('cz', 2, True, False)
        """
        return text == self.answer


def chains(
    seed: int,
    *,
    held_out: bool = False,
    hops: tuple[int, int] = (2, 30),
    count: tuple[int, int] = (2, 4),
    queries: int = 24,
) -> Iterator[Chains]:
    """Endless prompts of equally long chains of different names, whose links are shuffled.

    Asked names lie at the beginnings of the chains, so all answers of a prompt take about the same number of hops, and
    names are asked repeatedly. No answer depends on another one.

    Args:
        seed: determines the stream, which is the same on every machine.
        held_out: yield prompts that no stream without `held_out` yields.
        hops: minimum and maximum number of links of a chain. The number is the larger of two random ones.
        count: minimum and maximum number of chains, if the 62 names suffice.
        queries: number of names to ask for.

    Raises:
        ValueError: a range that is empty or needs more names, no queries.
        TypeError: a seed that is not an int.

    Example:
        >>> from pdkernels.training import chains
        >>> example = next(chains(0, hops=(3, 3), count=(2, 2), queries=5))
        >>> example.is_solved_by(example.answer), example.hops <= 3, len(example.prompt) == 3 * 8 + 1 + 5 + 1
        (True, True, True)
    """
    op = "training.chains"
    check_type(type(seed) is int, op, "seed", "be an int", type(seed).__name__)
    check(1 <= count[0] <= count[1], op, "count", "be a range from 1 on", count)
    maximum = len(NAMES) // count[0] - 1
    check(1 <= hops[0] <= hops[1] <= maximum, op, "hops", f"be a range within 1 .. {maximum}", hops)
    check(queries >= 1, op, "queries", "be at least 1", queries)
    numbers = random.Random(seed)
    while True:
        example = _chains(numbers, hops, count, queries)
        if (zlib.crc32(example.prompt.encode()) % HELD_OUT_EVERY == 0) == held_out:
            yield example


def _chains(numbers: random.Random, hops: tuple[int, int], count: tuple[int, int], queries: int) -> Chains:
    length = max(numbers.randint(*hops), numbers.randint(*hops)) + 1
    num_chains = numbers.randint(count[0], min(count[1], len(NAMES) // length))
    names = numbers.sample(NAMES, num_chains * length)
    sequences = ["".join(names[first : first + length]) for first in range(0, len(names), length)]
    links = [f"{a}{b} " for sequence in sequences for a, b in zip(sequence, sequence[1:] + sequence[-1])]
    numbers.shuffle(links)
    paths = tuple(numbers.choice(sequences)[numbers.randrange(min(_SPREAD, length - 1)) :] for _ in range(queries))
    return Chains(f"{''.join(links)}?{''.join(path[0] for path in paths)}=", paths)
