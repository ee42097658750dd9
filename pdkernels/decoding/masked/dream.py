"""Dream's sampler: a schedule of times sets how many masks each forward leaves, a score selects which.

Source: "Dream 7B: Diffusion Large Language Models" and its released sampler. The plain form is reference/dream.py,
which notes where that code differs; both take the same forwards, draw the same tokens and fill the same positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pdkernels._validation import check, check_type
from pdkernels.decoding.canvas.canvas import Canvas, GuessOptions, Step, checked_masked_model
from pdkernels.decoding.canvas.forward import WholeCanvas
from pdkernels.decoding.canvas.steps import CanvasSteps
from pdkernels.decoding.steps import with_defaults
from pdkernels.decoding.steps.contract import most_forwards
from pdkernels.generation.noise import checked_name, checked_number, checked_size
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.session import Session
from pdkernels.ops import TokenStatistics

_OP = "decoding.dream"

Algorithm = Literal["origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"]
# (number of the forward, texts (batch, L), positions (batch, R), logits (batch, R, V)) -> logits
LogitsHook = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# (number of the forward, texts (batch, L)) -> texts
TokensHook = Callable[[int, Tensor], Tensor]


def decode(
    session: Session,
    *,
    steps: int | None = None,
    algorithm: Algorithm = "entropy",
    eps: float = 1e-3,
    order_temperature: float = 0.0,
    threshold: float = 0.9,
    logits_hook: LogitsHook | None = None,
    tokens_hook: TokensHook | None = None,
    mask_token: int | None = None,
) -> int:
    """Fills `session` as its masks would disappear over time: ``m (1 - s / t)`` of m between the times t and s.

    Args:
        steps: number of forwards; None: one per token, or as many as a threshold takes. The last one fills all
            remaining positions.
        algorithm: which positions are filled first. "entropy": those of lowest entropy. "maskgit_plus": those with the
            most probable guesses. "topk_margin": those with the largest margin to the second-best token. "origin":
            every position with probability ``1 - s / t``. "confidence_threshold": all whose guess reaches the
            probability `threshold`, and always the best one.
        threshold: the threshold of "confidence_threshold".
        logits_hook: called as ``(step, texts, positions, logits)`` with the texts ``(batch, L)``, their masked
            `positions` ``(batch, R)``, padded with -1, and the logits ``(batch, R, vocab_size)`` there. Guesses come
            from the logits that it returns.
        tokens_hook: called as ``(step, texts)`` after every step with a copy of the texts; what it returns replaces
            them. It may change or mask tokens after the prompts, which later steps fill again, but not the prompts.
            With it no token is final before the last step.
        eps: the time of the last step; the first is 1.
        temperature: sampling temperature of the guesses, and of the distribution that scores them.
        top_p: sample from, and score, only the likeliest tokens that have this probability mass.
        top_k: sample from, and score, only this many of the likeliest tokens; with `top_p`, both limits apply.
        min_p: sample from, and score, only tokens with at least this share of the largest probability.
        order_temperature: above 0, positions are sampled without replacement from ``softmax(scores /
            order_temperature)``.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    canvas = begin(
        session,
        steps=steps,
        algorithm=algorithm,
        eps=eps,
        order_temperature=order_temperature,
        threshold=threshold,
        logits_hook=logits_hook,
        tokens_hook=tokens_hook,
        mask_token=mask_token,
    )
    masks = session.max_new_tokens
    if masks == 0:
        return canvas.finish()
    forward = WholeCanvas(session, canvas)
    if algorithm == "confidence_threshold" or tokens_hook is not None:
        rule = algorithm, order_temperature, steps, eps, threshold
        return _fill_polled(canvas, forward, *rule, tokens_hook)
    if canvas.fills_prompts and algorithm != "origin":
        return _fill_all(canvas, forward, algorithm, order_temperature, steps, eps)
    if canvas.fills_prompts:
        has_steps = steps is not None or session.batch == 1
        check(has_steps, _OP, "steps", "be given with algorithm 'origin' and infill=True for a batch", steps)
        masks = max(canvas.open_counts())
    steps = masks if steps is None else steps
    full = not canvas.fills_prompts and (algorithm != "origin" or session.batch == 1)
    for number in range(steps):
        canvas.begin()
        step = canvas.open_on_device(0, session.max_new_tokens, masks, full)
        guesses = canvas.guess(forward(), step)
        stays = _stays(number, steps, eps)
        if algorithm == "origin":
            canvas.commit(step, guesses.ids, None, threshold=stays, min_count=0)
            canvas.poll()
            masks = max(canvas.open_counts())
        else:
            quota = int(masks * (1 - stays))
            canvas.commit(step, guesses.ids, _scores(canvas, step, guesses, algorithm, order_temperature), quota=quota)
            masks -= quota
            if canvas.needs_polls:
                canvas.poll()
        if not canvas.unfinished:
            break
    return canvas.finish()


def begin(
    session: Session,
    *,
    steps: int | None,
    algorithm: Algorithm,
    eps: float,
    order_temperature: float,
    threshold: float,
    logits_hook: LogitsHook | None,
    tokens_hook: TokensHook | None,
    mask_token: int | None,
) -> Canvas:
    """The canvas of `decode`, whose options are checked."""
    mask_token = checked_masked_model(_OP, session, mask_token)
    if steps is not None:
        checked_size(_OP, "steps", steps)
    checked_name(_OP, "algorithm", algorithm, get_args(Algorithm))
    check_type(type(eps) in (int, float), _OP, "eps", "be a number", type(eps).__name__)
    check(0 < eps < 1, _OP, "eps", "lie between 0 and 1", eps)
    checked_number(_OP, "order_temperature", order_temperature)
    check(
        order_temperature == 0 or algorithm != "origin",
        _OP,
        "order_temperature",
        "be 0 with algorithm 'origin'",
        order_temperature,
    )
    checked_number(_OP, "threshold", threshold)
    for name, hook in (("logits_hook", logits_hook), ("tokens_hook", tokens_hook)):
        check_type(hook is None or callable(hook), _OP, name, "be a function", type(hook).__name__)
    check(
        tokens_hook is None or algorithm != "origin",
        _OP,
        "tokens_hook",
        "be None with algorithm 'origin'",
        "a function",
    )
    canvas = Canvas(session, mask_token, GuessOptions(Sampler.of(session.params, "joint"), "sampling"))
    canvas.logits_hook = logits_hook
    return canvas


def _fill_all(
    canvas: Canvas, forward: WholeCanvas, algorithm: Algorithm, order_temperature: float, steps: int | None, eps: float
) -> int:
    """The loop for prompts with masks: sequences then have different numbers of masks, and of steps unless given."""
    masks = canvas.open_counts()
    runs = [count if steps is None else steps for count in masks]
    for number in range(max(runs)):
        canvas.begin([number < maximum for maximum in runs])
        stays = [_stays(number, maximum, eps) if number < maximum else 1.0 for maximum in runs]
        quotas = [int(count * (1 - share)) for count, share in zip(masks, stays, strict=True)]
        step = canvas.open([(0, len(answer)) for answer in canvas.answers], [quotas])
        guesses = canvas.guess(forward(), step)
        scores = _scores(canvas, step, guesses, algorithm, order_temperature)
        canvas.commit(step, guesses.ids, scores, quota=step.columns[0])
        masks = [count - quota for count, quota in zip(masks, quotas, strict=True)]
        canvas.poll()
        if not canvas.unfinished:
            break
    return canvas.finish()


def _fill_polled(
    canvas: Canvas,
    forward: WholeCanvas,
    algorithm: Algorithm,
    order_temperature: float,
    steps: int | None,
    eps: float,
    threshold: float,
    tokens_hook: TokensHook | None,
) -> int:
    """The loop whose steps follow from what the texts hold: filled by a threshold, or changed by a hook."""
    runs = [count if steps is None else steps for count in canvas.open_counts()]
    if tokens_hook is not None:
        canvas.final_ends = [0] * len(canvas.starts)
    for number in range(max(runs)):
        masks = canvas.open_counts()
        taking = [number < maximum and count > 0 for maximum, count in zip(runs, masks, strict=True)]
        if not any(taking):
            break
        canvas.begin(taking)
        last = [number == maximum - 1 for maximum in runs]
        stays = [_stays(number, maximum, eps) if number < maximum else 1.0 for maximum in runs]
        if (
            algorithm == "confidence_threshold"
        ):  # the last step needs more confident positions than there are, so its quota counts
            quotas = [count if at_last else 1 for count, at_last in zip(masks, last, strict=True)]
        else:
            quotas = [int(count * (1 - share)) for count, share in zip(masks, stays, strict=True)]
        min_counts = [count + 1 if at_last else 1 for count, at_last in zip(masks, last, strict=True)]
        step = canvas.open([(0, len(answer)) for answer in canvas.answers], [quotas, min_counts])
        guesses = canvas.guess(forward(), step)
        quota, min_count = step.columns
        if algorithm == "confidence_threshold":
            canvas.commit(step, guesses.ids, guesses.probs, quota=quota, min_count=min_count, threshold=threshold)
        else:
            scores = _scores(canvas, step, guesses, algorithm, order_temperature)
            canvas.commit(step, guesses.ids, scores, quota=quota)
        if tokens_hook is not None:
            canvas.rewrite(tokens_hook(number, canvas.tokens.clone()), last)
        canvas.poll()
    if tokens_hook is not None:
        canvas.final_ends = None
        canvas.poll()
    return canvas.finish()


class DreamSteps(CanvasSteps):
    """`decode` with its times on the device."""

    def __init__(self, session: Session, **options: Any) -> None:
        chosen = with_defaults(decode, options)
        hooks = [name for name in ("logits_hook", "tokens_hook") if chosen[name] is not None]
        self.lacks = self.needs_host = f"a `{hooks[0]}`" if hooks else ""
        canvas, limit = begin(session, **chosen), session.max_new_tokens
        self.algorithm, self.order_temperature = chosen["algorithm"], chosen["order_temperature"]
        self.threshold, self.steps = chosen["threshold"], chosen["steps"] or limit
        check(self.steps <= most_forwards(limit), _OP, "steps", f"be at most {most_forwards(limit)}", self.steps)
        # As numbers of the host: a device may divide by a number in another way.
        shares = [_stays(number, self.steps, chosen["eps"]) for number in range(self.steps)]
        self._build(session, canvas, WholeCanvas(session, canvas), limit)
        self.stays = torch.tensor(shares, dtype=torch.float64, device=self.number.device)
        """The share of the masks that stays in each step."""
        self.begins, self.left = torch.zeros_like(self.number), torch.zeros_like(self.number)
        """Where the canvas begins, and how many masks the schedule has left."""

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.left

    @property
    def max_entries(self) -> int:
        return 1 + self.steps

    def start(self, session: Session) -> None:
        super().start(session)
        self.left.fill_(self.limit)

    def _stay_after(self, number: torch.Tensor) -> torch.Tensor:
        """The share of each sequence after `number` of its steps."""
        return self.stays[number.clamp(0, self.steps - 1)]

    def _plan(self, first_only: bool = False) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        last, rule = self.number >= self.steps - 1, dict[str, Any]()
        if self.algorithm == "confidence_threshold":
            # The last step needs more confident positions than there are, so its quota counts.
            quota, min_count = torch.where(last, self.limit, 1), torch.where(last, self.limit + 1, 1)
            rule = {"quota": quota, "min_count": min_count, "threshold": self.threshold}
        elif self.algorithm == "origin":
            rule = {"min_count": 0, "threshold": 0.5}
        else:
            quota = (self.left * (1 - self._stay_after(self.number))).long() * self.entry.taking
            self.left -= quota
            rule = {"quota": quota}
        return self.begins, self.begins + self.limit, rule

    def _confidence(self, step: Step, guesses: TokenStatistics) -> tuple[torch.Tensor | None, torch.Tensor]:
        if self.algorithm == "confidence_threshold":
            return guesses.probs, guesses.probs
        if self.algorithm == "origin":  # 1 where the random number reaches what the sequence's time says
            turns = self.canvas.turns(step)
            reaches = turns >= self._stay_after(self.number - 1)[:, None]
            return reaches.to(guesses.probs.dtype), turns
        scores = _scores(self.canvas, step, guesses, self.algorithm, self.order_temperature)
        return scores, scores


def _stays(number: int, steps: int, eps: float) -> float:
    """The share of the masks that stays in a step; the last one leaves none."""
    return _time(number + 1, steps, eps) / _time(number, steps, eps) if number < steps - 1 else 0.0


def _time(step: int, steps: int, eps: float) -> float:
    """Falls from 1 to `eps` in equal steps."""
    return 1 + (eps - 1) * step / steps


def _scores(
    canvas: Canvas, step: Step, guesses: TokenStatistics, algorithm: Algorithm, order_temperature: float
) -> torch.Tensor:
    """The score that ranks positions."""
    if algorithm == "maskgit_plus":
        scores = guesses.probs
    else:
        scores = guesses.margin if algorithm == "topk_margin" else -guesses.entropy
    if order_temperature > 0:
        scores = (scores / order_temperature - torch.log(-torch.log(canvas.turns(step)))).to(scores.dtype)
    return scores
