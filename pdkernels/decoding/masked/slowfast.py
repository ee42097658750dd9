"""SlowFast Sampling: explore until the end of the model's confident span is stable, then fill everything before it
quickly.

Source: "Accelerating Diffusion Large Language Models with Slow Fast Sampling", section 3.3 and equations 7 to 10, and
its released code. The plain form is reference/slowfast.py, which notes where they differ; both take the same forwards,
draw the same tokens and fill the same positions.

A cycle starts at some position. Its slow steps fill the most confident positions after it, one forward after another,
and note how far the model is confident. Once that settles, the span ends; fast steps fill the span, all confident
positions at once, and the next cycle starts after it. Every sequence of a batch is in its own cycle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding.canvas.canvas import Canvas, GuessOptions, Step, Window, checked_masked_model
from pdkernels.decoding.canvas.forward import KeptCanvas, KeptRows, WholeCanvas
from pdkernels.decoding.canvas.steps import CanvasSteps
from pdkernels.decoding.steps import Steps, with_defaults
from pdkernels.generation.noise import checked_flag, checked_name, checked_number, checked_size
from pdkernels.generation.params import MAX_POSITIONS
from pdkernels.generation.session import Session
from pdkernels.ops import TokenStatistics

_OP = "decoding.slowfast"

Cycle = Literal["last", "mean"]


class Options(NamedTuple):
    """Those of `decode`."""

    block_size: int | None
    max_exploration: int
    window: int
    variance: float
    tau_min: float
    tau_high: float
    k_slow: int
    k_fast: int
    cycle: Cycle
    drop_suffix: bool
    prompt_interval: int | None
    gen_interval: int
    transfer_ratio: float
    mask_token: int | None

    @property
    def refreshed(self) -> dict[str, Any] | None:
        """Those of a feature cache, if there is one."""
        names = ("prompt_interval", "gen_interval", "transfer_ratio")
        return None if self.prompt_interval is None else {name: getattr(self, name) for name in names}


def decode(
    session: Session,
    *,
    block_size: int | None = None,
    max_exploration: int = 8,
    window: int = 2,
    variance: float = 1.0,
    tau_min: float = 0.1,
    tau_high: float = 0.85,
    k_slow: int = 1,
    k_fast: int = 1,
    cycle: Cycle = "last",
    drop_suffix: bool = True,
    prompt_interval: int | None = None,
    gen_interval: int = 1,
    transfer_ratio: float = 0.0,
    mask_token: int | None = None,
) -> int:
    """Fills `session` span by span, each explored slowly and filled fast. A filled position is never revised.

    Args:
        block_size: new positions that are filled before those after them; None: all of them.
        max_exploration: K_max, the maximum number of slow steps in a cycle. 0: every span is a whole block.
        window: W_hist, how many recent candidates for the end of the span are compared.
        variance: sigma^2; the end is stable if their variance is below this.
        tau_min: the last position with more confidence than this is the candidate of a slow step.
        tau_high: a fast step fills all positions with more confidence than this.
        k_slow: how many positions a slow step fills.
        k_fast: how many positions a fast step fills if none is confident.
        cycle: where the span ends: "last" at the last candidate once that is stable, else at their mean; "mean" at the
            mean, as equation 9 says.
        drop_suffix: fast steps after the first leave out everything after the span, as the released code does.
        prompt_interval, gen_interval, transfer_ratio: as in `dllm_cache`, whose feature cache then runs the forwards;
            without a `prompt_interval` nothing is cached.
        temperature: sampling temperature of the guesses; positions are chosen by their confidence at temperature 1,
            without filters.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    cycles = block_size, max_exploration, window, variance, tau_min, tau_high, k_slow, k_fast, cycle, drop_suffix
    options = Options(*cycles, prompt_interval, gen_interval, transfer_ratio, mask_token)
    canvas, kept = _begin(session, options), options.refreshed
    if session.max_new_tokens == 0:
        return canvas.finish()
    forward = WholeCanvas(session, canvas) if kept is None else KeptCanvas(session, canvas, **kept)
    return Loop(session, canvas, forward, options).run()


def _begin(session: Session, options: Options) -> Canvas:
    """The canvas of `decode`, whose options are checked."""
    mask_token = checked_masked_model(_OP, session, options.mask_token)
    for name in ("block_size", "prompt_interval", "gen_interval"):
        if (size := getattr(options, name)) is not None or name == "gen_interval":
            checked_size(_OP, name, size)
    for name, minimum in {"max_exploration": 0, "window": 1, "k_slow": 0, "k_fast": 1}.items():
        size = getattr(options, name)
        check_type(type(size) is int, _OP, name, "be an int", type(size).__name__)
        check(size >= minimum, _OP, name, f"be at least {minimum}", size)
        check(size <= MAX_POSITIONS, _OP, name, f"be at most {MAX_POSITIONS}", size)
    for name in ("variance", "tau_min", "tau_high"):
        checked_number(_OP, name, getattr(options, name))
    checked_name(_OP, "cycle", options.cycle, get_args(Cycle))
    checked_flag(_OP, "drop_suffix", options.drop_suffix)
    checked_number(_OP, "transfer_ratio", options.transfer_ratio, 1.0)
    for name, default in (("gen_interval", 1), ("transfer_ratio", 0)):
        valid, value = options.prompt_interval is not None, getattr(options, name)
        expectation, remedy = f"be {default} without a cache", "Pass a prompt_interval."
        check(valid or value == default, _OP, name, expectation, value, remedy)
    return Canvas(session, mask_token, GuessOptions(session.sampler.when_drawing))


class Loop:
    """The steps of a batch."""

    def __init__(self, session: Session, canvas: Canvas, forward: WholeCanvas | KeptCanvas, options: Options) -> None:
        self._canvas, self._forward, self._options = canvas, forward, options
        self._spans = [Span(limit, options) for limit in session.limits]

    def run(self) -> int:
        """Until all are full; returns the forwards that the sequences took part in."""
        canvas, spans = self._canvas, self._spans
        while canvas.unfinished:
            canvas.begin()
            # A finished canvas costs little.
            ends = [at + on * span.shown() for at, on, span in zip(canvas.starts, canvas.active, spans, strict=True)]
            step = canvas.open([span.window for span in spans], [ends, *_columns(spans, self._options)])
            width = max(end for end, on in zip(ends, canvas.active, strict=True) if on)
            guesses = canvas.guess(self._forward(step.columns[0], width), step, self._forward.first_row)
            canvas.fact.copy_(_furthest(step, guesses, self._options))
            canvas.commit(step, guesses.ids, guesses.probs, **_rule(step, self._options))
            furthest = canvas.poll()
            for sequence, span in enumerate(spans):
                if canvas.active[sequence]:
                    span.step(furthest[sequence] - canvas.starts[sequence], partial(canvas.is_open, sequence))
        return canvas.finish()


def _columns(spans: list[Span], options: Options) -> list[list[int]]:
    """Of each sequence: how many positions a step fills, and how many must be confident for it to fill those instead."""
    quotas = [options.k_fast if span.fast else options.k_slow for span in spans]
    # A slow step never fills more than its few, however many positions are confident.
    return [quotas, [1 if span.fast else MAX_POSITIONS for span in spans]]


def _rule(step: Step, options: Options) -> dict[str, Any]:
    _, quota, min_count = step.columns
    return {"threshold": options.tau_high, "quota": quota, "min_count": min_count, "strict": True}


def _furthest(step: Step, guesses: TokenStatistics, options: Options) -> torch.Tensor:
    """The last confident position of each sequence, where a candidate for the end of a span may be; -1: none."""
    if not step.positions.shape[1]:
        return torch.full_like(step.windows[:, 0], -1)
    return torch.where(guesses.probs > options.tau_min, step.positions, -1).amax(1)


class SlowFastSteps(CanvasSteps):
    """`decode` in steps whose windows the host chooses: each sequence is in its own cycle."""

    needs_host, led = "cycles, whose windows the host chooses", True

    def __init__(self, session: Session, **options: Any) -> None:
        self.options = Options(**with_defaults(decode, options))
        canvas, kept = _begin(session, self.options), self.options.refreshed
        self.kept = None if kept is None else KeptRows(session, canvas, **kept)
        self.rows = WholeCanvas(session, canvas) if self.kept is None else self.kept
        self._build(session, canvas, self.rows, min(self.options.block_size or canvas.limit, canvas.limit))
        self.spans = [Span(canvas.limit, self.options) for _ in range(session.batch)]

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        super().admit(row, other, length, capacity, other_row)
        assert isinstance(other, SlowFastSteps)
        self.spans[row] = copy.copy(other.spans[other_row])

    def start(self, session: Session) -> None:
        super().start(session)
        self.spans = [Span(self.limit, self.options) for _ in self.spans]

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        canvas, spans, taking = self.canvas, self.spans, self._read()
        self._take(taking, 1, [row.number for row in self.entry.seen])
        ends = [at + on * span.shown() for at, on, span in zip(canvas.starts, taking, spans, strict=True)]
        step = canvas.open([span.window for span in spans], [ends, *_columns(spans, self.options)])
        if self.kept is not None:
            self.kept.taking = taking
        width = max(end for end, on in zip(ends, taking, strict=True) if on)
        guesses = self._fill(step, _rule(step, self.options), self.rows(step.columns[0], width), self.rows.first_row)
        seen = torch.cat([_furthest(step, guesses, self.options)[:, None], self.entry.answer], 1)
        for row, (furthest, *canvas.answers[row]) in enumerate(seen.tolist()):
            if taking[row]:
                spans[row].step(furthest - canvas.starts[row], partial(canvas.is_open, row))


class Span:
    """A sequence's cycle; positions are relative to the end of its prompt.

    Attributes:
        start, end: the span: where the cycle started, and where its fast steps end.
        last: the end of the block.
        fast: whether the next step is a fast one.
        taken: steps of this kind in the cycle so far.
    """

    def __init__(self, limit: int, options: Options) -> None:
        self._limit, self._options, self._size = limit, options, options.block_size or limit
        self.start = self.taken = 0
        self.last = self.end = min(self._size, limit)
        self.fast = options.max_exploration == 0
        self._candidates: list[int] = []  # from the cycle's slow steps, as many as are compared

    @property
    def window(self) -> Window:
        """Where the next step fills positions."""
        return self.start, self.end if self.fast else self.last

    def shown(self) -> int:
        """Where the canvas of the next step ends."""
        return self.end if self._options.drop_suffix and self.fast and self.taken > 0 else self._limit

    def step(self, furthest: int, is_open: Callable[[int, int], bool]) -> None:
        """Advances after a step. `furthest` is the last confident position, if any."""
        options = self._options
        self.taken += 1
        if not self.fast:
            self._explored(max(furthest, self.start) + 1, not is_open(self.start, self.last))
        if self.fast and not is_open(self.start, self.end):  # the span is full, and with it the block?
            self.start = self.end
            if not is_open(self.start, self.last):
                self.start, self.last = self.last, min(self.last + self._size, self._limit)
            self.end, self.fast, self.taken = self.last, options.max_exploration == 0, 0
            self._candidates = []

    def _explored(self, candidate: int, done: bool) -> None:
        """A slow step: where does the span end?"""
        options = self._options
        seen = self._candidates = [*self._candidates, candidate][-options.window :]
        spread = len(seen) * sum(n * n for n in seen) - sum(seen) ** 2  # the variance, times len(seen) ** 2
        stable = len(seen) == options.window and spread < options.variance * len(seen) ** 2
        self.end = candidate if stable and options.cycle == "last" else sum(seen) // len(seen)
        if stable or done or self.taken >= options.max_exploration:
            self.fast, self.taken = True, 0
