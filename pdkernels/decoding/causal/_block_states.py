"""Exact speculation for a block: a forward also computes states that the block may pass through, and a step whose state is
among them needs no forward. Rows have the same bits in any batch, and random numbers belong to the number of a step.

Source: "SPOT" (arXiv 2610.22543) proposes a tree of block states and verifies it in one forward. Its text was not at hand: the
states are those of `ranked_sets`, and the loop is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pdkernels.decoding.canvas.states import following, most_likely
from pdkernels.generation.session import Session, to_device_async

Text = tuple[int, ...]
Forward = Callable[[torch.Tensor, Any, int], torch.Tensor]
"""From blocks ``(copies * batch, block)``, a cache with as many rows and the number of copies to hidden states."""


@dataclass(eq=False)
class _Known:
    """What is known of a sequence's block."""

    hidden: dict[Text, tuple[int | None, torch.Tensor]] = field(default_factory=dict)
    """The states of the last forward: the copy that computed it, None for the sequence's own cache, and its rows."""
    expected: list[tuple[int, int]] = field(default_factory=list)
    """Slot and guess of what the last step left masked, in the order in which they are expected."""
    copied: bool = False
    """Whether the copies have the rows before the block."""


class BlockStates:
    """The forward over all `states` of each sequence's block, the block itself among them.

    The rows before the block are in `cache`, and copied for each state when a forward first needs them. The copies are
    contiguous, or in pages of their own; with `drafts`, layers with windows keep the last rows (`Session.new_cache`).
    """

    def __init__(
        self, session: Session, cache: Any, block_size: int, states: int, page_size: int | None, drafts: int = 0
    ) -> None:
        self._states, self._cache, self._batch, self._width = states, cache, session.batch, block_size
        self._session, self._page_size, self._drafts = session, page_size, drafts
        self._copies: Any = None
        self._known = [_Known() for _ in range(session.batch)]

    def begin(self, sequences: Iterable[int] | None = None) -> None:
        """After rows have gone into the cache: nothing is known of the new block."""
        for number in range(self._batch) if sequences is None else sequences:
            self._known[number] = _Known()

    def admit(self, number: int, other: BlockStates, other_number: int) -> None:
        """Knows of a sequence what another batch does, from which it comes."""
        self._known[number] = replace(other._known[other_number], copied=False)

    def stepping(self, texts: Sequence[Text], active: Sequence[bool]) -> tuple[list[bool], bool]:
        """Which sequences take the next step, and whether it needs a forward: those whose state is known, as long as there
        are any; the others wait for them."""
        known = [on and text in row.hidden for on, text, row in zip(active, texts, self._known, strict=True)]
        return (known, False) if any(known) else (list(active), True)

    def compute(
        self,
        forward: Forward,
        texts: Sequence[Text],
        active: Sequence[bool],
        coming: Sequence[Sequence[int]],
        lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        """A forward over the blocks of all sequences. `coming`: how many slots the next steps of each may fill; `lengths`:
        rows before the block."""
        ahead = [
            most_likely(text, row.expected, quotas, self._states) if on else [text]
            for on, text, row, quotas in zip(active, texts, self._known, coming, strict=True)
        ]
        copies = self._states if max(map(len, ahead)) > 1 else 1
        cache = self._cache
        if copies > 1:
            self._copy(active, lengths)
            cache = self._copies
        padded = [own + own[:1] * (copies - len(own)) for own in ahead]
        lines = [[*own[copy], *[0] * (self._width - len(own[copy]))] for copy in range(copies) for own in padded]
        hidden = forward(to_device_async(lines, device), cache, copies).unflatten(0, (copies, self._batch))
        for number, (row, own) in enumerate(zip(self._known, ahead, strict=True)):
            ran = reversed([*enumerate(own)])
            row.hidden = {text: (copy if copies > 1 else None, hidden[copy, number]) for copy, text in ran}

    def _copy(self, active: Sequence[bool], lengths: Sequence[int]) -> None:
        if self._copies is None:
            self._copies = self._session.new_cache(
                self._page_size, copies=self._states, drafts=self._drafts, pooled=False
            )
        for number, (on, row, length) in enumerate(zip(active, self._known, lengths, strict=True)):
            if on and not row.copied:
                for copy in range(self._states):
                    self._copies.copy_row_(copy * self._batch + number, self._cache, number, length)
                row.copied = True

    def hidden(self, texts: Sequence[Text], stepping: Sequence[bool]) -> torch.Tensor:
        """``(batch, block, hidden_size)`` of these states; of sequences that wait meaningless."""
        rows = [
            row.hidden[text][1] if takes else None
            for takes, text, row in zip(stepping, texts, self._known, strict=True)
        ]
        other = next(row for row in rows if row is not None)
        return torch.stack([other if row is None else row for row in rows])

    def keep(self, number: int, text: Text, length: int) -> None:
        """Puts the rows of a computed state into the sequence's own cache, which has `length` rows with them."""
        copy, _ = self._known[number].hidden[text]
        if copy is not None:
            self._cache.copy_row_(number, self._copies, copy * self._batch + number, length)

    def expect(
        self,
        texts: Sequence[Text],
        slots: Sequence[Sequence[int]],
        ids: torch.Tensor,
        confidence: torch.Tensor,
        stepping: Sequence[bool],
        mask: int,
    ) -> None:
        """Takes guesses for `slots` of each block, as it is after a step, for those of the next steps; negative slots have
        none. Reads the device."""
        rows = zip(texts, slots, ids.tolist(), confidence.double().tolist(), stepping, strict=True)
        for row, (text, own, tokens, scores, takes) in zip(self._known, rows, strict=True):
            if takes:
                row.expected = following(text, own, tokens, scores, mask)
