"""SlowFast Sampling: explore until the place is stable up to which the model is sure, then fill everything before it quickly.

Source: "Accelerating Diffusion Large Language Models with Slow Fast Sampling", section 3.3 and equations 7 to 10, and its
released code. The plain form is reference/slowfast.py, which says where they differ; both take the same forwards, draw the
same tokens and fill the same places.

A cycle starts at some place. Its slow steps fill the surest places behind that, one forward after the other, and note how far
the model has an opinion. Where that settles, the span ends; fast steps fill the span, all sure places at once, and the next
cycle starts behind it. Every sequence of a batch is in its own cycle: where it stands is kept on the device.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding._masked import Canvas, KeptCanvas, SamplingOptions, WholeCanvas, checked_masked_model
from pdkernels.decoding._sampling import check_sampling, checked_flag, checked_name, checked_number, checked_size
from pdkernels.decoding._session import Session
from pdkernels.ops import TokenStatistics

_OP = "decoding.slowfast"

Cycle = Literal["last", "mean", "published"]


class Options(NamedTuple):
    """Options of a cycle."""

    block_size: int
    max_exploration: int
    window: int
    variance: float
    tau_min: float
    tau_high: float
    k_slow: int
    k_fast: int
    cycle: Cycle
    drop_suffix: bool


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
    temperature: float = 0.0,
    mask_token: int | None = None,
    seed: int = 0,
) -> int:
    """Fill `session` span by span, each explored slowly and filled fast. What a place holds is never judged again.

    Args:
        block_size: new places that are filled before those behind them; None: all of them.
        max_exploration: K_max, most slow steps of a cycle. 0: every span is a whole block.
        window: W_hist, how many of the last candidates for the span's end are compared.
        variance: sigma^2; the end is stable if their variance is less.
        tau_min: the furthest place with more confidence than this is the candidate of a slow step.
        tau_high: a fast step fills all places with more confidence than this.
        k_slow: places that a slow step fills.
        k_fast: places that a fast step fills where none is sure.
        cycle: where the span ends: "last" at the last candidate once that is stable, else at their mean; "mean" at the mean, as
            equation 9 says; "published" as the released code, which always takes all `max_exploration` steps, fills sure
            places in those too, and counts confidences that equal a threshold.
        drop_suffix: fast steps after the first leave out what stands behind the span, as the released code does.
        prompt_interval, gen_interval, transfer_ratio: those of `dllm_cache`, whose feature cache then does the forwards;
            without a `prompt_interval` nothing is kept from one to the next.
        temperature: of the guesses; places are chosen by the confidence without it.

    Returns:
        Forwards that the sequences took part in, all together.
    """
    mask_token = checked_masked_model(_OP, session, mask_token)
    if block_size is not None:
        checked_size(_OP, "block_size", block_size)
    sizes = {
        "max_exploration": (max_exploration, 0),
        "window": (window, 1),
        "k_slow": (k_slow, 0),
        "k_fast": (k_fast, 1),
    }
    for name, (size, least) in sizes.items():
        check_type(type(size) is int, _OP, name, "be an int", type(size).__name__)
        check(size >= least, _OP, name, f"be at least {least}", size)
    checked_number(_OP, "variance", variance)
    checked_number(_OP, "tau_min", tau_min)
    checked_number(_OP, "tau_high", tau_high)
    checked_name(_OP, "cycle", cycle, get_args(Cycle))
    checked_flag(_OP, "drop_suffix", drop_suffix)
    if prompt_interval is not None:
        checked_size(_OP, "prompt_interval", prompt_interval)
    checked_size(_OP, "gen_interval", gen_interval)
    checked_number(_OP, "transfer_ratio", transfer_ratio, 1.0)
    for name, given, default in (("gen_interval", gen_interval, 1), ("transfer_ratio", transfer_ratio, 0)):
        check(
            prompt_interval is not None or given == default,
            _OP,
            name,
            f"be {default} without a cache",
            given,
            "Pass a prompt_interval.",
        )
    check_sampling(_OP, temperature, seed)
    limit = session.max_new_tokens
    canvas = Canvas(session, mask_token, SamplingOptions(temperature, seed=seed))
    if limit == 0:
        return canvas.finish()
    if prompt_interval is None:
        forward = WholeCanvas(session, canvas)
    else:
        kept = {"prompt_interval": prompt_interval, "gen_interval": gen_interval, "transfer_ratio": transfer_ratio}
        forward = KeptCanvas(session, canvas, **kept)
    size = limit if block_size is None else block_size
    spans = Spans(
        canvas,
        limit,
        Options(size, max_exploration, window, variance, tau_min, tau_high, k_slow, k_fast, cycle, drop_suffix),
    )
    masks, width = min(size, limit), forward.width
    while canvas.unfinished:
        canvas.begin()
        windows = spans.windows()
        places = canvas.open_places(windows, masks)
        guesses = canvas.guess(forward(spans.ends(), width), places, forward.first_row)
        spans.step(windows, places, guesses)
        facts = canvas.poll(spans.masks(), spans.ends())
        going = [fact for fact, running in zip(facts, canvas.running, strict=True) if running]
        masks, width = (max((fact[part] for fact in going), default=0) for part in range(2))
    return canvas.finish()


class Spans:
    """Where each sequence stands in its cycle; places count from the end of its prompt.

    Attributes:
        start, end: ``(batch,)`` int64, the span: where the cycle started, and where its fast steps end.
        last: ``(batch,)`` int64, the end of the block.
        fast: ``(batch,)`` bool, whether the next step is a fast one.
        taken: ``(batch,)`` int64, steps of this kind that the cycle has had.
    """

    def __init__(self, canvas: Canvas, limit: int, options: Options) -> None:
        self._canvas, self._limit, self._options = canvas, limit, options
        self.start = torch.zeros_like(canvas.totals)
        self.last = torch.full_like(canvas.totals, min(options.block_size, limit))
        self.end = self.last.clone()
        self.fast = torch.full_like(canvas.going, options.max_exploration == 0)
        self.taken = torch.zeros_like(canvas.totals)
        self._settled = torch.zeros_like(canvas.going)
        self._candidates = canvas.totals.new_zeros(canvas.totals.shape[0], options.window)  # the newest one last
        self._newest_first = torch.arange(options.window - 1, -1, -1, device=canvas.totals.device)

    def windows(self) -> torch.Tensor:
        """Where the next step fills places."""
        return self._canvas.windows(self.start, torch.where(self.fast, self.end, self.last))

    def masks(self) -> torch.Tensor:
        """``(batch,)``: open places in `windows`."""
        return self._canvas.masked(self.windows()).sum(1)

    def ends(self) -> torch.Tensor:
        """``(batch,)``: where the canvas of the next step ends."""
        canvas = self._canvas
        shown = canvas.totals
        if self._options.drop_suffix:
            shown = torch.where(self.fast & (self.taken > 0), canvas.prompt_lengths + self.end, shown)
        return torch.where(canvas.going, shown, canvas.prompt_lengths)  # those that are done cost little

    def step(self, windows: torch.Tensor, places: torch.Tensor, guesses: TokenStatistics) -> None:
        """Commit what the step of each sequence commits, then move it on."""
        options, canvas = self._options, self._canvas
        published = options.cycle == "published"
        slow = ~self.fast
        candidate = self._candidate(places, guesses.probs)
        # No number of sure places lets a slow step of the paper fill more than its few.
        need = torch.ones_like(self.taken) if published else torch.where(slow, canvas.tokens.shape[1] + 1, 1)
        done = canvas.commit(
            windows,
            places,
            guesses.ids,
            guesses.probs,
            quota=torch.where(slow, options.k_slow, options.k_fast),
            need=need,
            threshold=options.tau_high,
            strict=not published,
        ).done
        self.taken = self.taken + 1

        # Slow steps: where does the span end?
        moved = torch.cat([self._candidates[:, 1:], candidate[:, None]], 1)
        self._candidates = torch.where(slow[:, None], moved, self._candidates)
        known = self.taken.clamp(max=options.window)
        seen = self._candidates * (self._newest_first < known[:, None])
        total = seen.sum(1)
        spread = known * (seen * seen).sum(1) - total * total  # the variance, times known ** 2: whole numbers
        stable = (self.taken >= options.window) & (spread < options.variance * (known * known).double())
        end = total // known
        if options.cycle != "mean":
            end = torch.where(stable, candidate, end)
        self.end = torch.where(slow & ~self._settled, end, self.end)
        self._settled = self._settled | (slow & stable)
        over = self.taken >= options.max_exploration
        if not published:
            over = over | stable | done
        turned = slow & over
        self.fast, self.taken = self.fast | turned, self.taken.masked_fill(turned, 0)

        # Fast steps: is the span full, and with it the block?
        full = self.fast & ~self._any_open(self.end)
        self.start = torch.where(full, self.end, self.start)
        left = full & ~self._any_open(self.last)
        self.start = torch.where(left, self.last, self.start)
        self.last = torch.where(left, (self.last + options.block_size).clamp(max=self._limit), self.last)
        self.end = torch.where(full, self.last, self.end)
        self.fast, self.taken = self.fast & (~full | (options.max_exploration == 0)), self.taken.masked_fill(full, 0)
        self._settled = self._settled & ~full

    def _candidate(self, places: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
        """The place behind the furthest one with an opinion, or behind the first one if there is none."""
        options = self._options
        sure = confidence >= options.tau_min if options.cycle == "published" else confidence > options.tau_min
        furthest = (places - self._canvas.prompt_lengths[:, None]).masked_fill(~sure | (places < 0), -1)
        if furthest.shape[1] == 0:
            return self.start + 1
        return torch.maximum(furthest.amax(1), self.start) + 1

    def _any_open(self, last: torch.Tensor) -> torch.Tensor:
        return self._canvas.masked(self._canvas.windows(self.start, last)).any(1)
