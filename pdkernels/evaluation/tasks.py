"""The tasks: sums and chains, whose answers are right or wrong, and source text, where only cost is measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from pdkernels._validation import check, did_you_mean
from pdkernels.training import Problem, arithmetic, chains, standard_library

TASKS = ("sums", "source", "chains")

# The longest solutions have about 320 bytes, followed by the end token.
_SUMS_LIMIT = 360
_SOURCE_PROMPT, _SOURCE_LIMIT = 128, 64
# Answers have 24 bytes; a wave that knew where the text ends would narrow before it.
_CHAINS_LIMIT = 48
_WARM_UP = 5
# Problems to search for each one that is needed, because short ones are rare.
_LONGEST_SEARCH = 1000


class Judge(Protocol):
    """A problem whose answer can be checked."""

    def is_solved_by(self, text: str) -> bool:
        """Whether a continuation of its prompt is right."""


class Task(NamedTuple):
    """Prompts to continue, and how the answers are judged."""

    name: str
    prompts: list[str]
    warm_up: list[str]
    """Prompts of the same kind for warm-up, which are not measured."""
    limit: int
    """Maximum new tokens."""
    end_tokens: tuple[int, ...] | None
    """End tokens; None: those of the model."""
    problems: Sequence[Judge] | None
    """One per prompt, if answers are right or wrong."""


def make_task(name: str, problems: int, seed: int = 0, *, canvas: int | None = None) -> Task:
    """`problems` prompts that no model was trained on, determined by the seed (and, for "source", the Python version).

    Args:
        name: "sums": `pdkernels.training.arithmetic`, to be solved completely. "source": 128 bytes from a held-out file
            of the standard library, to be continued by 64 tokens. "chains": `pdkernels.training.chains`, to be solved
            completely.
        problems: how many.
        seed: determines the choice.
        canvas: only sums whose solution and end token fit into this many tokens, the limit of all candidates. None:
            any.

    Raises:
        ValueError: no such task, fewer than one problem, a canvas for too few of them, an interpreter without source
            files.

    Example:
        >>> make_task("sums", 2).prompts[0].endswith("= ?\\n")
        True
    """
    op = "evaluation.make_task"
    check(name in TASKS, op, "task", f"be one of {', '.join(TASKS)}", repr(name), did_you_mean(name, TASKS).strip())
    check(problems >= 1, op, "problems", "be at least 1", problems)
    count = _WARM_UP + problems
    if name == "sums":
        sums: dict[str, Problem] = {}
        for problem in islice(arithmetic(seed, held_out=True), _LONGEST_SEARCH * count):  # small ones repeat
            if canvas is None or len(problem.steps) < canvas:
                sums[problem.prompt] = problem
            if len(sums) == count:
                break
        check(len(sums) == count, op, "canvas", f"have room for {count} different sums", canvas)
        prompts = list(sums)
        return Task(
            name, prompts[_WARM_UP:], prompts[:_WARM_UP], canvas or _SUMS_LIMIT, None, list(sums.values())[_WARM_UP:]
        )
    if name == "chains":
        examples = list(islice(chains(seed, held_out=True), count))
        prompts = [example.prompt for example in examples]
        return Task(name, prompts[_WARM_UP:], prompts[:_WARM_UP], _CHAINS_LIMIT, None, examples[_WARM_UP:])
    files = [text for text in standard_library()[1] if len(text) > _SOURCE_PROMPT + _SOURCE_LIMIT]
    chance, prompts = random.Random(seed), []
    for _ in range(count):
        text = chance.choice(files)
        start = chance.randrange(len(text) - _SOURCE_PROMPT - _SOURCE_LIMIT)
        # A window may begin or end inside a character.
        prompts.append(text[start : start + _SOURCE_PROMPT].decode("utf-8", errors="ignore"))
    # No end token: all candidates write the same amount.
    return Task(name, prompts[_WARM_UP:], prompts[:_WARM_UP], _SOURCE_LIMIT, (), None)
