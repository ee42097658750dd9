"""Exact speculation for a canvas: a forward also computes states that the canvas may pass through, and a step whose state
is among them needs no forward. Rows have the same bits in any batch, and random numbers belong to the number of a step.

Source: "Spiffy" (arXiv 2509.18085): states of the model's own last distribution, in a graph in which a state may follow
several others. The choice of states by `ranked_sets` is ours; Spiffy calibrates it offline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pdkernels.decoding.canvas.canvas import Canvas, Step, Window
from pdkernels.decoding.canvas.states import following, most_likely
from pdkernels.generation.session import Session, to_device_async

Schedule = Sequence[tuple[Window, int]]  # the window of each step, and how many positions the step fills


class States:
    """The forward over all `states` of each sequence of a batch, its canvas among them."""

    def __init__(self, session: Session, canvas: Canvas, states: int) -> None:
        self._session, self._canvas, self._states = session, canvas, states
        self._cache: Any = None
        self._hidden = torch.empty(0)
        self._computed: list[dict[tuple[int, ...], int]] = [{} for _ in canvas.starts]
        self._expected: list[list[tuple[int, int]]] = [[] for _ in canvas.starts]
        """Position and guess of what the last step left, in the order in which they are expected."""

    def begin(self, number: int) -> None:
        """Nothing is known of a canvas."""
        self._computed[number], self._expected[number] = {}, []

    def compute(self, next_quotas: Sequence[Sequence[int]], like: Any = None) -> None:
        """Runs the canvases, and states that come after them if the coming steps fill so many positions each. `like`: a
        cache that knows the adapter of each sequence; None: they have those of the session."""
        if self._cache is None:
            self._cache = self._session.new_cache(None, copies=self._states, pooled=False)
        if like is not None and hasattr(like, "adapters"):
            self._cache.adapt_((like.adapters or []) * self._states)
        answers = [self._drafts(number, quotas) for number, quotas in enumerate(next_quotas)]
        self._computed = [{state: copy for copy, state in reversed([*enumerate(states)])} for states in answers]
        canvas = self._canvas
        tokens = canvas.tokens.repeat(self._states, 1)
        limits = [len(answer) for answer in canvas.answers]
        width = max(limits)
        lines = [
            [*states[copy], *[0] * (width - len(states[copy]))] for copy in range(self._states) for states in answers
        ]
        new = to_device_async(lines, tokens.device)
        visible, starts = canvas.totals.repeat(self._states), canvas.prompt_lengths.repeat(self._states)
        at = torch.arange(tokens.shape[1], device=tokens.device) - starts[:, None]
        is_new = (at >= 0) & (at < (visible - starts)[:, None])
        tokens = torch.where(is_new, new.gather(1, at.clamp(0, width - 1)), tokens)
        hidden = self._session.model.recompute(
            tokens, self._cache, torch.zeros_like(visible), counts=visible, visible=visible
        )
        self._hidden = hidden.unflatten(0, (self._states, -1))

    def _drafts(self, number: int, quotas: Sequence[int]) -> list[tuple[int, ...]]:
        """`states` texts of a sequence: its own, others that may follow it, and copies of its own in place of more."""
        texts = most_likely(tuple(self._canvas.answers[number]), self._expected[number], quotas, self._states)
        return texts + texts[:1] * (self._states - len(texts))

    def matching(self) -> list[int | None]:
        """The state of each sequence that is its text now."""
        pairs = zip(self._computed, self._canvas.answers, strict=True)
        return [states.get(tuple(answer)) for states, answer in pairs]

    def hidden_of(self, copies: Sequence[int | None]) -> torch.Tensor:
        """Hidden states ``(batch, width, hidden_size)`` of these states; those of None are meaningless."""
        chosen = to_device_async([[copy or 0] for copy in copies], self._hidden.device)[:, 0]
        return self._hidden[chosen, torch.arange(len(copies), device=chosen.device)]

    def expect(self, step: Step, ids: torch.Tensor, confidence: torch.Tensor, stepping: Sequence[bool]) -> None:
        """Takes the guesses of a step for those of the next ones. Reads the device."""
        rows = zip(step.positions.tolist(), ids.tolist(), confidence.double().tolist(), stepping, strict=True)
        for number, (positions, tokens, scores, steps) in enumerate(rows):
            if steps:
                start, answer = self._canvas.starts[number], self._canvas.answers[number]
                places = [at - start for at in positions]
                self._expected[number] = following(answer, places, tokens, scores, self._canvas.mask_token)


def coming(schedule: Schedule) -> list[int]:
    """How many positions the steps of the current window fill."""
    return [quota for window, quota in schedule if window == schedule[0][0]]


def fill_speculating(session: Session, canvas: Canvas, schedules: Sequence[Schedule], speculate: int) -> int:
    """The loop of a sampler, with `speculate` states beside the canvas."""
    states, done = States(session, canvas, 1 + speculate), [0] * session.batch
    while any(on and n < len(schedule) for on, n, schedule in zip(canvas.active, done, schedules, strict=True)):
        states.compute([coming(schedule[n:]) for schedule, n in zip(schedules, done, strict=True)])
        first = True
        while True:
            copies = states.matching()
            on = zip(canvas.active, copies, done, schedules, strict=True)
            stepping = [active and copy is not None and n < len(schedule) for active, copy, n, schedule in on]
            if not any(stepping):
                break
            canvas.begin(stepping)
            if not first:
                canvas.reuse()
            first = False
            ahead = [schedule[min(n, len(schedule) - 1)] for schedule, n in zip(schedules, done, strict=True)]
            step = canvas.open([window for window, _ in ahead], [[quota for _, quota in ahead]])
            guesses = canvas.guess(states.hidden_of(copies), step)
            canvas.commit(step, guesses.ids, guesses.probs, quota=step.columns[0])
            canvas.poll()
            states.expect(step, guesses.ids, guesses.probs, stepping)
            done = [n + took for n, took in zip(done, stepping, strict=True)]
    return canvas.finish()
