"""A task for models that plan: short lists, written in parallel, or later if they depend on a pick."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pdkernels._validation import check, check_type
from pdkernels.training.corpora import HELD_OUT_EVERY

_NAMES = "zero one two three four five six seven eight nine ten eleven twelve".split()
_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
_DAYS = "mon tue wed thu fri sat sun".split()
_ROMAN = "i ii iii iv v vi vii viii ix x xi xii xiii".split()
_LISTS: dict[str, Callable[[int], list[str]]] = {
    "x": lambda d: [str(d * i) for i in range(1, 9)],
    "u": lambda d: _NAMES[d : d + 4],
    "d": lambda d: _NAMES[d + 3 : d - 1 : -1],
    "m": lambda d: [_MONTHS[(d - 1 + i) % 12] for i in range(6)],
    "w": lambda d: [_DAYS[(d - 1 + i) % 7] for i in range(7)],
    "l": lambda d: list("abcdefghijklmnopqr"[d - 1 : d + 9]),
    "q": lambda d: [str(i * i) for i in range(d, d + 6)],
    "r": lambda d: _ROMAN[d - 1 : d + 4],
}
KINDS = "".join(_LISTS)
DIGITS = "12345"
PICK, PICKED = "*p", "p"


def written_out(kind: str, digit: int) -> str:
    """The list of a kind for a digit.

    >>> [written_out(kind, 4) for kind in "xudm"]
    ['4 8 12 16 20 24 28 32', 'four five six seven', 'seven six five four', 'apr may jun jul aug sep']
    >>> [written_out(kind, 4) for kind in "wlqr"]
    ['thu fri sat sun mon tue wed', 'd e f g h i j k l m', '16 25 36 49 64 81', 'iv v vi vii viii']
    """
    return " ".join(_LISTS[kind](digit))


class Orders(NamedTuple):
    """A prompt of orders and one of its right answers."""

    prompt: str
    """Orders of two characters, each followed by a semicolon, then a line feed."""
    rounds: tuple[tuple[tuple[str, str], ...], ...]
    """Topic and content of each chunk: the order, and ``ORDER:LIST;``. Lists of the picked digit come second."""

    @property
    def text(self) -> str:
        """The answer without a plan."""
        return "".join(content for items in self.rounds for _, content in items)

    def right(self, text: str) -> dict[str, bool]:
        """For each order, whether an answer has its list exactly once, at any place.

        A pick is right if it is a digit, a list of the picked digit if it belongs to the digit in the answer.

        >>> asked = Orders("4r;*p;px;\\n", ())
        >>> asked.right("px:3 6 9 12 15 18 21 24;*p:3;4r:iv v vi vii viii;")
        {'4r': True, '*p': True, 'px': True}
        >>> asked.right("*p:2;px:3 6 9 12 15 18 21 24;4r:iv;")
        {'4r': False, '*p': True, 'px': False}
        """
        answers_of: dict[str, list[str]] = {}
        for piece in text.split(";")[:-1]:
            answers_of.setdefault(piece[:3], []).append(piece[3:])
        results = {}
        for order in self.prompt.strip().split(";")[:-1]:
            argument, answers = order[0], answers_of.get(f"{order}:", [])
            if order == PICK:
                results[order] = len(answers) == 1 and len(answers[0]) == 1 and answers[0] in DIGITS
                continue
            if argument == PICKED:
                argument = (answers_of.get(f"{PICK}:") or [""])[0]
            is_digit = len(argument) == 1 and argument in DIGITS
            results[order] = is_digit and answers == [written_out(order[1], int(argument))]
        return results


def orders(
    seed: int, *, held_out: bool = False, items: tuple[int, int] = (3, 4), picks: float = 0.5
) -> Iterator[Orders]:
    """Endless prompts of orders, with an answer for each.

    An order is a digit from 1 to 5 and a kind of list::

        4x    4 8 12 16 20 24 28 32          4w    thu fri sat sun mon tue wed
        4u    four five six seven            4l    d e f g h i j k l m
        4d    seven six five four            4q    16 25 36 49 64 81
        4m    apr may jun jul aug sep        4r    iv v vi vii viii

    These can all be written at the same time and in any order: only a plan, or the text so far, determines the place of
    each. ``*p`` requests any digit, and ``px`` the list of kind x of that digit, which has to wait because the prompt
    does not determine the digit.

    Args:
        seed: determines the stream, which is the same on every machine.
        held_out: yield prompts that no stream without `held_out` yields. The lists themselves are always the same 40.
        items: minimum and maximum number of orders, besides those of the picked digit.
        picks: share of the prompts with a pick, followed by one or two orders of the picked digit.

    Raises:
        ValueError: a range that is empty or too long, a share outside [0, 1].
        TypeError: a seed that is not an int.

    Example:
        >>> from itertools import islice
        >>> from pdkernels.training import orders
        >>> all(all(some.right(some.text).values()) for some in islice(orders(0), 100))
        True
    """
    op = "training.orders"
    check_type(type(seed) is int, op, "seed", "be an int", type(seed).__name__)
    check(1 <= items[0] <= items[1] <= len(KINDS), op, "items", f"be a range within 1 .. {len(KINDS)}", items)
    check(0 <= picks <= 1, op, "picks", "lie in [0, 1]", picks)
    numbers = random.Random(seed)
    while True:
        example = _orders(numbers, items, picks)
        if (zlib.crc32(example.prompt.encode()) % HELD_OUT_EVERY == 0) == held_out:
            yield example


def _orders(numbers: random.Random, items: tuple[int, int], picks: float) -> Orders:
    count, has_pick = numbers.randint(*items), numbers.random() < picks
    kinds = numbers.sample(KINDS, len(KINDS))
    chunks = []
    for kind in kinds[: count - has_pick]:
        digit = numbers.choice(DIGITS)
        chunks.append((digit + kind, f"{digit}{kind}:{written_out(kind, int(digit))};"))
    later = []
    if has_pick:
        picked = numbers.choice(DIGITS)
        chunks.append((PICK, f"{PICK}:{picked};"))
        for kind in kinds[count : count + numbers.randint(1, 2)]:
            later.append((PICKED + kind, f"{PICKED}{kind}:{written_out(kind, int(picked))};"))
    topics = numbers.sample([topic for topic, _ in chunks + later], len(chunks) + len(later))
    rounds = [tuple(numbers.sample(chunks, len(chunks)))] + ([tuple(later)] if later else [])
    return Orders("".join(f"{order};" for order in topics) + "\n", tuple(rounds))
