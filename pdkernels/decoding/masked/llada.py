"""LLaDA's sampler: a fixed number of forwards fills a canvas, the most confident guesses first.

Source: "Large Language Diffusion Models", section 2.4 and its released sampler. The plain form is reference/llada.py,
which notes where that code differs; both take the same forwards, draw the same tokens and fill the same positions.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from pdkernels._validation import check
from pdkernels.decoding.canvas.canvas import Canvas, GuessOptions, Window, blocks_of, checked_masked_model, share
from pdkernels.decoding.canvas.forward import WholeCanvas
from pdkernels.decoding.canvas.states import checked_states
from pdkernels.decoding.canvas.steps import CanvasSteps, Forward
from pdkernels.decoding.masked._speculation import Schedule, States, coming, fill_speculating
from pdkernels.decoding.steps import Steps, with_defaults
from pdkernels.generation.noise import checked_flag, checked_name, checked_number, checked_size
from pdkernels.generation.params import MAX_SCALE
from pdkernels.generation.session import Session, to_device_async

_OP = "decoding.llada"

Remasking = Literal["low_confidence", "random"]
Remainder = Literal["first", "spread"]


def decode(
    session: Session,
    *,
    block_size: int | None = None,
    steps: int | None = None,
    remasking: Remasking = "low_confidence",
    remainder: Remainder = "first",
    guidance: float = 0.0,
    no_end: bool = False,
    late_end: bool = False,
    revise: float = 0.0,
    speculate: int = 0,
    mask_token: int | None = None,
) -> int:
    """Fills `session` block by block, the most confident positions of a block first. A filled position is final, unless
    `revise` is set.

    Args:
        block_size: new positions that are filled together; None: all of them.
        steps: number of forwards, divided evenly among the blocks; None: one per token. A block never takes more
            forwards than it has positions.
        remasking: "low_confidence" fills the most confident positions, "random" random ones.
        remainder: where a block's steps do not divide its positions: "first" fills one more in each of the first steps,
            as the released code does; "spread" fills what equation 6 of SlowFast Sampling says, n / `steps` of them,
            rounded down, after n steps.
        guidance: weight w of classifier-free guidance: ``logits = uncond + (1 + w) (cond - uncond)``, where `uncond`
            does not see the prompt. Above 0 a forward computes every position twice.
        no_end: never guess end tokens.
        late_end: give end tokens confidence 0, so that they are filled last.
        revise: above 0, a step masks positions of its block again if its forward gives their token less than this
            probability, each position at most once. Steps fill equal shares until the block is full, which may take
            more than `steps`; tokens are reported only then.
        speculate: further states of the canvas that a forward computes, those that the coming steps may reach. A step
            whose state is among them needs no forward; the tokens are the same. Without random remasking, guidance and
            `revise`.
        temperature: sampling temperature of the guesses; positions are chosen by their confidence at temperature 1,
            without filters.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    canvas, blocks = begin(
        _OP,
        session,
        block_size=block_size,
        steps=steps,
        remasking=remasking,
        guidance=guidance,
        no_end=no_end,
        late_end=late_end,
        mask_token=mask_token,
    )
    spread = checked_name(_OP, "remainder", remainder, get_args(Remainder)) == "spread"
    checked_number(_OP, "revise", revise, 1.0)
    check(revise == 0 or not spread, _OP, "remainder", "be 'first' with revise, whose shares are equal", remainder)
    by_confidence = by_confidence_of_own(remasking, guidance) and not late_end
    check(revise == 0 or by_confidence, _OP, "revise", "be 0 with random remasking, late ends or guidance", revise)
    if checked_speculation(speculate, remasking, guidance, revise) > 0:
        return fill_speculating(session, canvas, schedules(canvas, blocks, steps, spread), speculate)
    forward = WholeCanvas(session, canvas)
    if revise > 0:
        return fill_revising(canvas, forward, blocks, steps, revise)
    return fill(canvas, forward, blocks, steps, remasking == "random", spread)


class LladaSteps(CanvasSteps):
    """`decode` with a schedule on the device."""

    states: States | None = None

    def __init__(self, session: Session, **options: Any) -> None:
        chosen = with_defaults(decode, options)
        revise, steps = checked_number(_OP, "revise", chosen.pop("revise"), 1.0), chosen["steps"]
        spread = checked_name(_OP, "remainder", chosen.pop("remainder"), get_args(Remainder)) == "spread"
        speculate = checked_speculation(chosen.pop("speculate"), chosen["remasking"], chosen["guidance"], revise)
        self.lacks = "a `revise` above 0" if revise > 0 else ""
        self.needs_host = self.lacks or ("`speculate` above 0" if speculate else "")
        canvas, blocks = begin(_OP, session, **chosen)
        self._build_blocks(session, canvas, WholeCanvas(session, canvas), blocks, steps, chosen["remasking"], spread)
        self.states = States(session, canvas, 1 + speculate) if speculate else None

    def _build_blocks(
        self,
        session: Session,
        canvas: Canvas,
        forward: Forward,
        blocks: list[Window],
        steps: int | None,
        remasking: Remasking,
        spread: bool = False,
    ) -> None:
        rows = [
            (first, last, quota) for first, last in blocks for quota in quotas(last - first, steps, len(blocks), spread)
        ]
        self.schedule = torch.tensor(rows, device=canvas.tokens.device)
        self.windows: Schedule = [((first, last), quota) for first, last, quota in rows]
        widest = max(last - first for first, last in blocks)
        self._build(session, canvas, forward, widest, random=remasking == "random")

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        super().admit(row, other, length, capacity, other_row)
        if self.states is not None:
            self.states.begin(row)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        states, canvas, entry = self.states, self.canvas, self.entry
        if states is None:
            super().step()
            return
        self._read()
        copies = states.matching()
        stepping = [on and copy is not None for on, copy in zip(canvas.active, copies, strict=True)]
        runs = not any(stepping)
        if runs:
            states.compute([coming(self.windows[row.number :]) for row in entry.seen], self.cache)
            copies, stepping = states.matching(), canvas.active
        moved = to_device_async([[int(takes), int(runs) if takes else -1] for takes in stepping], entry.table.device)
        entry.taking.copy_(moved[:, 0])
        entry.ran.copy_(moved[:, 1])
        step, rule = self._open()
        guesses = self._fill(step, rule, states.hidden_of(copies), None)
        canvas.answers = entry.answer.tolist()
        states.expect(step, guesses.ids, guesses.probs, stepping)

    def _plan(self, first_only: bool = False) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        # A sequence that is done stays at its last step, in which nothing is filled.
        first, last, quota = self.schedule[self.number.clamp(max=len(self.schedule) - 1)].unbind(1)
        return first, last, {"quota": quota.contiguous()}


def checked_speculation(speculate: int, remasking: Remasking, guidance: float, revise: float) -> int:
    checked_states(_OP, speculate)
    supported = by_confidence_of_own(remasking, guidance) and revise == 0
    check(supported or speculate == 0, _OP, "speculate", "be 0 with random remasking, guidance or revise", speculate)
    return speculate


def by_confidence_of_own(remasking: Remasking, guidance: float) -> bool:
    """Whether the confidence of a state's own logits decides what a step fills."""
    return remasking != "random" and guidance == 0


def schedules(canvas: Canvas, blocks: list[Window], steps: int | None, spread: bool) -> list[Schedule]:
    """The steps of each sequence; where prompts have masks, a block's are those of its open positions."""
    counts = [canvas.open_counts(first, last) for first, last in blocks]
    return [
        [
            (window, quota)
            for window, masks in zip(blocks, own, strict=True)
            for quota in quotas(masks, steps, len(blocks), spread)
            if masks
        ]
        for own in zip(*counts, strict=True)
    ]


def quotas(masks: int, steps: int | None, blocks: int, spread: bool = False) -> list[int]:
    """How many of a block's masks each of its forwards fills.

    >>> quotas(4, None, 2), quotas(4, 6, 2), quotas(4, 20, 2)
    ([1, 1, 1, 1], [2, 1, 1], [1, 1, 1, 1])
    """
    runs = masks if steps is None else min(masks, steps // blocks)
    return [share(masks, runs, run, spread) for run in range(runs)]


def begin(
    op: str,
    session: Session,
    *,
    block_size: int | None,
    steps: int | None,
    remasking: Remasking,
    guidance: float,
    no_end: bool,
    late_end: bool,
    mask_token: int | None,
) -> tuple[Canvas, list[Window]]:
    """The canvas of `decode`, for this and other decoders `op` with its options, and the blocks of its positions."""
    mask_token = checked_masked_model(op, session, mask_token)
    if block_size is not None:
        checked_size(op, "block_size", block_size)
    checked_name(op, "remasking", remasking, get_args(Remasking))
    checked_number(op, "guidance", guidance)
    check(guidance != math.inf, op, "guidance", "be finite", guidance)
    check(guidance <= MAX_SCALE, op, "guidance", f"be at most {MAX_SCALE:g}", guidance)
    checked_flag(op, "no_end", no_end)
    checked_flag(op, "late_end", late_end)
    ends = session.end_tokens
    banned, late = ends if no_end else (), ends if late_end else ()
    guesses = GuessOptions(session.sampler.when_drawing, banned=banned, late=late, guidance=guidance)
    blocks = blocks_of(session.max_new_tokens, block_size)
    if steps is not None:
        checked_size(op, "steps", steps)
        check(
            not blocks or steps % len(blocks) == 0,
            op,
            "steps",
            f"be a multiple of the number of blocks ({len(blocks)})",
            steps,
        )
    check(
        not late_end or remasking != "random",
        op,
        "late_end",
        "be False with remasking='random', which ignores confidence",
        late_end,
    )
    return Canvas(session, mask_token, guesses), blocks


def fill(
    canvas: Canvas, forward: WholeCanvas, blocks: list[Window], steps: int | None, random: bool, spread: bool = False
) -> int:
    """The loop of the sampler for any forward: block after block, an equal share of its positions in each of its
    steps."""
    if canvas.fills_prompts:
        return fill_all(canvas, forward, blocks, steps, random, spread)
    for first, last in blocks:
        masks = last - first
        for quota in quotas(masks, steps, len(blocks), spread):
            canvas.begin()
            step = canvas.open_on_device(first, last, masks, full=True)
            guesses = canvas.guess(forward(), step, forward.first_row)
            canvas.commit(step, guesses.ids, None if random else guesses.probs, quota=quota)
            masks -= quota
            if canvas.needs_polls:
                canvas.poll()
            if not canvas.unfinished:
                return canvas.finish()
    return canvas.finish()


def fill_all(
    canvas: Canvas, forward: WholeCanvas, blocks: list[Window], steps: int | None, random: bool, spread: bool
) -> int:
    """`fill` for prompts with masks: a block then has a different number of masked positions, and of steps, in each
    sequence."""
    for first, last in blocks:
        masks = canvas.open_counts(first, last)
        runs = [count if steps is None else min(count, steps // len(blocks)) for count in masks]
        for run in range(max(runs)):
            quotas = [
                share(count, maximum, run, spread) if run < maximum else 0
                for count, maximum in zip(masks, runs, strict=True)
            ]
            taking = [quota > 0 for quota in quotas]
            if not any(on and quota for on, quota in zip(canvas.active, taking, strict=True)):
                continue
            canvas.begin(taking)
            step = canvas.open([(first, last)] * len(masks), [quotas])
            guesses = canvas.guess(forward(), step, forward.first_row)
            canvas.commit(step, guesses.ids, None if random else guesses.probs, quota=step.columns[0])
            canvas.poll()
    return canvas.finish()


def fill_revising(canvas: Canvas, forward: WholeCanvas, blocks: list[Window], steps: int | None, revise: float) -> int:
    """The loop where a step may take tokens back: equal shares until a block is full."""
    for first, last in blocks:
        canvas.final_ends = [first] * len(canvas.starts)
        masks = canvas.open_counts(first, last)
        runs = [count if steps is None else min(count, steps // len(blocks)) for count in masks]
        quotas = [-(-count // run) if run else 0 for count, run in zip(masks, runs, strict=True)]
        while any(masked := canvas.open_counts(first, last)):
            canvas.begin([count > 0 for count in masked])
            step = canvas.open([(first, last)] * len(masks), [quotas])
            hidden = forward()
            guesses = canvas.guess(hidden, step, forward.first_row)
            canvas.commit(step, guesses.ids, guesses.probs, quota=step.columns[0])
            canvas.reopen(hidden, (first, last), revise, forward.first_row)
            canvas.poll()
        canvas.final_ends = [last] * len(canvas.starts)
        canvas.poll()
        if not canvas.unfinished:
            break
    return canvas.finish()
