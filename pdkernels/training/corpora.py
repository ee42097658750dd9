"""Training text of the tiny models: sums worked out digit by digit, which can be scored, and Python's source."""

from __future__ import annotations

import os
import random
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pdkernels._validation import check, check_type
from pdkernels.models.text.tokenizers import ByteTokenizer

# One problem and one file in this many are held out of training.
HELD_OUT_EVERY = 25
# Tests are repetitive, encodings and pydoc_data are tables, the rest is not code of the library proper.
_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
    "__pycache__",
    "turtledemo",
    "config",
}


class Problem(NamedTuple):
    """A sum of two or three numbers."""

    prompt: str
    """The question, one line."""
    steps: str
    """The solution, one line per digit from the right, with the result in the last line."""
    result: int

    def is_solved_by(self, text: str) -> bool:
        """Whether the last line of a continuation of the prompt is the result.

        >>> problem = Problem("1 + 2 = ?\\n", "1 + 2 = 3\\nanswer 3\\n", 3)
        >>> [problem.is_solved_by(text) for text in ("guess\\nanswer 3\\n", "answer 3", "answer 33\\n")]
        [True, True, False]
        """
        lines = text.strip().splitlines()
        return bool(lines) and lines[-1] == f"answer {self.result}"


def arithmetic(seed: int, *, held_out: bool = False) -> Iterator[Problem]:
    """Endless problems: additions, subtractions and products with one digit, of up to four digits, one or two in a row.

    Args:
        seed: determines the stream, which is the same on every machine.
        held_out: yield problems that no stream without `held_out` yields.

    Raises:
        TypeError: a seed that is not an int.

    Example:
        >>> from itertools import islice
        >>> from pdkernels.training import arithmetic
        >>> problem = next(problem for problem in arithmetic(0) if "+" in problem.prompt)
        >>> problem.is_solved_by(problem.steps)
        True
        >>> seen = {problem.prompt for problem in islice(arithmetic(0), 100)}
        >>> any(problem.prompt in seen for problem in islice(arithmetic(0, held_out=True), 100))
        False
    """
    check_type(type(seed) is int, "training.arithmetic", "seed", "be an int", type(seed).__name__)
    numbers = random.Random(seed)
    while True:
        problem = _problem(numbers)
        if (zlib.crc32(problem.prompt.encode()) % HELD_OUT_EVERY == 0) == held_out:
            yield problem


def standard_library() -> tuple[list[bytes], list[bytes]]:
    """Source files of the running interpreter's standard library: those to train on, and those held out.

    Raises:
        ValueError: the interpreter ships no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        # Pruned during the walk, because one of the excluded folders holds all installed packages.
        folders[:] = [name for name in folders if not _skipped(name)]
        files += [Path(folder, name) for name in names if name.endswith(".py") and not _skipped(name)]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    check(bool(files), "training.standard_library", "the interpreter", f"have source files in {root}", "none")
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    for index, path in enumerate(files):
        splits[index % HELD_OUT_EVERY == HELD_OUT_EVERY // 2].append(path.read_bytes())
    return splits


def _skipped(name: str) -> bool:
    return name in _SKIPPED or name.startswith("config-")


def as_ids(texts: list[bytes]) -> Tensor:
    """(n,) int16 byte ids of the concatenated texts, each followed by the end token.

    >>> as_ids([b"a", b"bc"]).tolist()
    [97, 256, 98, 99, 256]
    """
    end = torch.tensor([ByteTokenizer.end_token], dtype=torch.int16, device="cpu")
    encoded = [
        torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16), end]) for text in texts if text
    ]
    return torch.cat([torch.empty(0, dtype=torch.int16, device="cpu"), *encoded])


def _problem(numbers: random.Random) -> Problem:
    value, question, lines = _number(numbers), "", []
    for count in range(numbers.choice((1, 1, 2))):
        sign = numbers.choice("+-*")
        other = numbers.randint(2, 9) if sign == "*" else _number(numbers)
        if sign == "-" and other > value:
            if count:
                sign = "+"
            else:
                value, other = other, value
        question = (question or str(value)) + f" {sign} {other}"
        value, steps = _worked(value, sign, other)
        lines += steps
    return Problem(f"{question} = ?\n", "\n".join([*lines, f"answer {value}"]) + "\n", value)


def _number(numbers: random.Random) -> int:
    digits = numbers.randint(1, 4)
    return numbers.randint(10 ** (digits - 1), 10**digits - 1)


def _worked(a: int, sign: str, b: int) -> tuple[int, list[str]]:
    """The result, and a line per digit with the remaining digits of both numbers, their last digits, the result so
    far."""
    lines, carried, result = [], 0, ""
    while True:
        x, y = a % 10, b if sign == "*" else b % 10
        total = {"+": x + y + carried, "-": x - y - carried, "*": x * y + carried}[sign]
        result = str(total % 10) + result
        # The carry of a product is added, the borrow of a difference subtracted.
        carry_text = f" {'-' if sign == '-' else '+'} {carried}" if carried else ""
        lines.append(f"{a} {sign} {b}{carry_text}: {x} {sign} {y}{carry_text} = {total} so {result}")
        a, b, carried = a // 10, b if sign == "*" else b // 10, abs(total // 10)
        if a == 0 and (b == 0 or sign == "*"):
            break
    value = int((str(carried) if carried else "") + result)
    return value, lines
