"""The host's half of a canvas: the texts as last read, the finished sequences, and the record of the session."""

from __future__ import annotations

from collections.abc import Sequence

from pdkernels.generation.session import Session


class CanvasRecord:
    """The texts of a batch as the host has last read them.

    Attributes:
        mask_token: the id of masked positions.
        starts: lengths of the prompts.
        active: sequences with masks that they still need.
        answers: the new positions of each sequence.
    """

    def __init__(self, session: Session, mask_token: int) -> None:
        self.mask_token = mask_token
        self._session, self._limits = session, session.limits
        self.starts = [len(prompt) for prompt in session.prompts]
        self.active = [limit > 0 for limit in self._limits]
        self.answers = [[mask_token] * limit for limit in self._limits]
        if session.tails is not None:
            pairs = zip(session.tails, self._limits, strict=True)
            self.answers = [tail + [mask_token] * (limit - len(tail)) for tail, limit in pairs]
        self._recorded = [0] * session.batch  # tokens of each sequence on record
        self._numbers = [0] * session.batch  # guessing forwards of each sequence
        self._others = 0  # other forwards, summed over sequences
        self._part = self.active
        self.final_ends: list[int] | None = None
        """New positions of each sequence from here on are not final, even if no mask is before them; None: all are."""
        self._doubted: list[set[int]] = [set() for _ in self.starts]  # positions that were opened again
        self._asked: list[list[int]] = [[] for _ in self.starts]  # positions whose tokens the last step judged

    def take(self, sequences: Sequence[bool], numbers: list[int]) -> None:
        """Says who takes part in a forward, and its number for each, where a host leads steps (`CanvasSteps`)."""
        self._part, self._numbers = list(sequences), numbers

    @property
    def unfinished(self) -> bool:
        """Whether any sequence continues, as of the last read."""
        return any(self.active)

    @property
    def taken_part(self) -> int:
        """Forwards that the sequences took part in, summed."""
        return sum(self._numbers) + self._others

    def begin(self, sequences: Sequence[bool] | None = None) -> None:
        """Starts a forward, in which the sequences of `active` take part, or those of them in `part`."""
        self._session.forwards += 1
        self._part = (
            self.active if sequences is None else [a and b for a, b in zip(self.active, sequences, strict=True)]
        )
        self._numbers = [number + taking for number, taking in zip(self._numbers, self._part, strict=True)]

    def run_again(self) -> None:
        """The step needs one more forward of the sequences that take part: it is counted, and keys no random
        numbers."""
        self._session.forwards += 1
        self._others += sum(self._part)

    def reuse(self) -> None:
        """The step takes rows of an earlier forward: none is counted, but it has random numbers of its own."""
        self._session.forwards -= 1
        self._others -= sum(self._part)

    def is_open(self, sequence: int, first: int, last: int) -> bool:
        """Whether a sequence has a mask in a window, as of the last read."""
        return self.mask_token in self.answers[sequence][first:last]

    def open_counts(self, first: int = 0, last: int | None = None) -> list[int]:
        """Masks in a window of each active sequence, as of the last read."""
        answers = zip(self.active, self.answers, strict=True)
        return [on * answer[first:last].count(self.mask_token) for on, answer in answers]

    def look(self, sequence: int, answer: list[int], no_choice: bool) -> None:
        """Stores the new positions of a sequence, and emits those that are final. `no_choice`: logits gave no choice.

        Tokens with no mask before them are final and go on record. A sequence is done with its last
        position, or with an end token among those.
        """
        session, limit = self._session, self._limits[sequence]
        self.answers[sequence] = answer
        if not self.active[sequence]:
            return
        self._doubted[sequence] |= {n for n in self._asked[sequence] if answer[n] == self.mask_token}
        self._asked[sequence] = []
        if no_choice:
            session.fail_without_choice(sequence)
        last = limit if self.final_ends is None else min(limit, self.final_ends[sequence])
        recorded = end = self._recorded[sequence]
        ended = False
        tail = session.tails[sequence] if session.tails else []
        while not ended and end < last and answer[end] != self.mask_token:
            ended = end >= len(tail) and answer[end] in session.end_tokens
            end += 1
        if end > recorded:
            session.given += sum(token != self.mask_token for token in tail[recorded:end])
            session.emit(sequence, answer[recorded:end], end - recorded)
            self._recorded[sequence] = end
        session.stopped[sequence] |= session.stops.time_is_up
        if ended or end == limit or session.stopped[sequence]:
            self.active = [on and other != sequence for other, on in enumerate(self.active)]
