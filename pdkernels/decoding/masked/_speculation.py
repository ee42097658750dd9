"""Exact speculation for a canvas: a forward also computes states that the canvas may pass through, and a step whose state
is among them needs no forward. Rows have the same bits in any batch, and random numbers belong to the number of a step.

Source: "Spiffy" (arXiv 2509.18085): states of the model's own last distribution, in a graph in which a state may follow
several others. The choice of states by `ranked_sets` is ours; Spiffy calibrates it offline.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdkernels.decoding.canvas.canvas import Canvas, Step, Window
from pdkernels.decoding.canvas.states import groups_of, ranked_sets
from pdkernels.generation.session import Session, to_device_async

Schedule = Sequence[tuple[Window, int]]  # the window of each step, and how many positions the step fills


class States:
    """The forward over all `states` of each sequence of a batch, its canvas among them."""

    def __init__(self, session: Session, canvas: Canvas, states: int) -> None:
        self._session, self._canvas, self._states = session, canvas, states
        self._cache = session.new_cache(None, copies=states)
        self._visible = canvas.totals.repeat(states)
        self._starts = torch.zeros_like(self._visible)
        self._counts = session.ragged(self._visible)
        self._hidden = torch.empty(0)
        self._computed: list[dict[tuple[int, ...], int]] = []
        self._expected: list[list[int]] = [[] for _ in canvas.starts]
        """Positions that the last step left, in the order in which they are expected."""
        self._tokens: list[dict[int, int]] = [{} for _ in canvas.starts]

    def compute(self, next_quotas: Sequence[Sequence[int]]) -> None:
        """Runs the canvases, and states that come after them if the coming steps fill so many positions each."""
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
        at = torch.arange(tokens.shape[1], device=tokens.device) - canvas.prompt_lengths.repeat(self._states)[:, None]
        is_new = (at >= 0) & (at < (self._visible - canvas.prompt_lengths.repeat(self._states))[:, None])
        tokens = torch.where(is_new, new.gather(1, at.clamp(0, width - 1)), tokens)
        hidden = self._session.model.recompute(
            tokens, self._cache, self._starts, counts=self._counts, visible=self._visible
        )
        self._hidden = hidden.unflatten(0, (self._states, -1))

    def _drafts(self, number: int, quotas: Sequence[int]) -> list[tuple[int, ...]]:
        """`states` texts of a sequence: its own, others that may follow it, and copies of its own in place of more."""
        answer, expected, tokens = self._canvas.answers[number], self._expected[number], self._tokens[number]
        groups = list(groups_of(expected, quotas))
        texts = [tuple(answer)]
        for chosen in ranked_sets(4 * self._states):
            if len(texts) == self._states:
                break
            if chosen[-1] < len(groups):
                filled = {place for group in chosen for place in groups[group]}
                texts.append(tuple(tokens[n] if n in filled else token for n, token in enumerate(answer)))
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
        rows = torch.stack([step.positions.double(), ids.double(), confidence.double()], -1).tolist()
        for number, (row, steps, start) in enumerate(zip(rows, stepping, self._canvas.starts, strict=True)):
            if not steps:
                continue
            answer, mask = self._canvas.answers[number], self._canvas.mask_token
            guesses = [
                (int(at) - start, int(token), confidence_there) for at, token, confidence_there in row if at >= 0
            ]
            left = [guess for guess in guesses if answer[guess[0]] == mask]
            self._tokens[number] = {at: token for at, token, _ in left}
            self._expected[number] = [at for at, _, _ in sorted(left, key=lambda guess: (-guess[2], guess[0]))]


def _coming(schedule: Schedule) -> list[int]:
    """How many positions the steps of the current window fill."""
    return [quota for window, quota in schedule if window == schedule[0][0]]


def fill_speculating(session: Session, canvas: Canvas, schedules: Sequence[Schedule], speculate: int) -> int:
    """The loop of a sampler, with `speculate` states beside the canvas."""
    states, done = States(session, canvas, 1 + speculate), [0] * session.batch
    while any(on and n < len(schedule) for on, n, schedule in zip(canvas.active, done, schedules, strict=True)):
        states.compute([_coming(schedule[n:]) for schedule, n in zip(schedules, done, strict=True)])
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
