"""SlowFast Sampling as released: the loops for LLaDA and for Dream.

Source: the code released with "Accelerating Diffusion Large Language Models with Slow Fast Sampling". `plain_slowfast` is the plain
form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pdkernels._validation import check_choice
from pdkernels.decoding import Method, find
from pdkernels.decoding.canvas.canvas import Step
from pdkernels.decoding.masked import slowfast
from pdkernels.decoding.method import Option
from pdkernels.generation.noise import checked_number
from pdkernels.generation.session import Session
from pdkernels.ops import TokenStatistics

Loop = Literal["llada", "dream"]


def decode(session: Session, *, loop: Loop = "llada", tau_explore: float | None = None, **options: Any) -> int:
    """Takes the options of method "slowfast" too, but `cycle`.

    Args:
        loop: "llada" always takes all `max_exploration` slow steps, fills confident positions in those too, counts confidences that
            equal a threshold, and ends a span as ``cycle="last"`` does. "dream" is its variant for Dream, whose settings are
            ``max_exploration=6, tau_min=0.1, tau_explore=0.8, tau_high=0.9``.
        tau_explore: a slow step fills all positions with that much confidence; None: `tau_high`.
    """
    check_choice("papers.released", "loop", loop, get_args(Loop))
    if tau_explore is not None:
        checked_number("papers.released", "tau_explore", tau_explore)
    return slowfast.decode(session, partial(ReleasedLoop, loop, tau_explore), **options)


class _Released(Method):
    @cached_property
    def options(self) -> dict[str, Option]:
        inherited = {name: option for name, option in find("slowfast").options.items() if name != "cycle"}
        return inherited | super().options


SLOWFAST = _Released("slowfast", decode, "masked", find("slowfast").requires, title="SlowFast as released")


class ReleasedLoop(slowfast.Loop):
    """The steps of a batch. In both loops a slow step fills confident positions too, and equality reaches a threshold."""

    def __init__(self, loop: Loop, tau_explore: float | None, session: Session, *parts: Any) -> None:
        self._loop, self._tau_explore = loop, tau_explore
        super().__init__(session, *parts)

    def _span(self, limit: int) -> slowfast.Span:
        return (DreamSpan if self._loop == "dream" else LLaDASpan)(limit, self._options)

    def _columns(self) -> list[list[int]]:
        quotas, _ = super()._columns()
        return [quotas, [int(not span.fast) for span in self._spans]]

    def _is_sure(self, probs: Tensor) -> Tensor:
        return probs >= self._options.tau_min

    def _commit(self, step: Step, guesses: TokenStatistics) -> None:
        _, quota, exploring = step.columns
        threshold, scores = self._options.tau_high, guesses.probs
        if self._tau_explore is not None and self._tau_explore != threshold:
            # One threshold for all sequences: what reaches its own is above 1.
            own = torch.where(exploring > 0, self._tau_explore, threshold)[:, None]
            threshold, scores = 1.5, torch.where(scores.double() >= own, scores + 2, scores)
        rule: dict[str, Any] = {"threshold": threshold, "quota": quota, "strict": False}
        self._canvas.commit(step, guesses.ids, scores, shown=guesses.probs, **rule)


class LLaDASpan(slowfast.Span):
    """A sequence's cycle. The first stable candidate ends the span; the slow phase goes on."""

    _settled = False

    def step(self, furthest: int, is_open: Callable[[int, int], bool]) -> None:
        super().step(furthest, is_open)
        if not self.fast and self.taken == 0:
            self._begin()

    def _begin(self) -> None:
        """Begins a cycle."""
        self._settled = False

    def _explored(self, candidate: int, done: bool) -> None:
        self._candidates = [*self._candidates, candidate][-self._options.window :]
        stable, mean = self._ends(self._candidates)
        if not self._settled:
            self.end = candidate if stable else mean
            self._settled = stable
        if self.taken >= self._options.max_exploration or self._is_over(done):
            self.fast, self.taken = True, 0

    def _ends(self, seen: list[int]) -> tuple[bool, int]:
        """Whether these candidates are stable, and their mean."""
        spread = len(seen) * sum(n * n for n in seen) - sum(seen) ** 2  # the variance, times len(seen) ** 2
        stable = len(seen) == self._options.window and spread < self._options.variance * len(seen) ** 2
        return stable, sum(seen) // len(seen)

    def _is_over(self, done: bool) -> bool:
        """Whether a full block ends the slow phase."""
        return False


class DreamSpan(LLaDASpan):
    """A sequence's cycle. Candidates are lengths from the block's start on, and zeros come before the first one."""

    _first = 0  # the block's start

    def __init__(self, limit: int, options: slowfast.Options) -> None:
        super().__init__(limit, options)
        self._begin()

    def step(self, furthest: int, is_open: Callable[[int, int], bool]) -> None:
        last = self.last
        super().step(furthest, is_open)
        if self.last != last:
            self._first = self.start
            self._begin()

    def _begin(self) -> None:
        super()._begin()
        self._candidates = [self._first] * self._options.window

    def _ends(self, seen: list[int]) -> tuple[bool, int]:
        """By the unbiased variance, which may equal the bound; the mean is rounded, and after the cycle's start."""
        spread = len(seen) * sum(n * n for n in seen) - sum(seen) ** 2
        stable = len(seen) > 1 and spread <= self._options.variance * len(seen) * (len(seen) - 1)
        rounded = round(sum(n - self._first for n in seen) / len(seen))
        return stable, max(self._first + rounded, self.start + 1)

    def _is_over(self, done: bool) -> bool:
        return done
