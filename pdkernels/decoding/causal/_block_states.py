"""Exact speculation for a block: a forward also computes states that the block may pass through, and a step whose state is
among them needs no forward. Rows have the same bits in any batch, and random numbers belong to the number of a step.

Source: "SPOT" (arXiv 2610.22543) proposes a tree of block states and verifies it in one forward. Its text was not at hand: the
states are those of `ranked_sets`, and the loop is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pdkernels.decoding.canvas.states import groups_of, ranked_sets
from pdkernels.generation.session import Session, to_device_async
from pdkernels.masks import TilePlan


class BlockStates:
    """The forward over all `states` of each sequence's block, the block itself among them.

    The rows before the block are copied for each state when a block is done.
    """

    def __init__(self, session: Session, cache: Any, block_size: int, states: int, page_size: int | None) -> None:
        self._states, self._cache, self._batch = states, cache, session.batch
        self._wide = session.new_cache(page_size, copies=states, drafts=block_size)
        self._nothing = torch.zeros_like(self._wide.lengths)
        self.begin()

    def begin(self) -> None:
        """After rows have gone into the cache: nothing is known of the new block."""
        for copy in range(self._states):
            for row, length in enumerate(self._cache.lengths.tolist()):
                self._wide.copy_row_(copy * self._batch + row, self._cache, row, length)
        self._hidden = torch.empty(0)
        self._computed: list[dict[tuple[int, ...], int]] = [{} for _ in range(self._batch)]
        self._expected: list[list[tuple[int, int]]] = [[] for _ in range(self._batch)]
        """Slot and guess of what the last step left masked, in the order in which they are expected."""

    def hidden(
        self, model: Any, block: torch.Tensor, taking: torch.Tensor, mask: TilePlan, coming: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, bool]:
        """Hidden states ``(batch, block, hidden_size)`` of blocks, and whether a forward was needed. `coming`: how many
        slots the next steps of each sequence fill."""
        texts, on = [tuple(text) for text in block.tolist()], taking.tolist()
        copies = [known.get(text) for known, text in zip(self._computed, texts, strict=True)]
        ran = any(here and copy is None for here, copy in zip(on, copies, strict=True))
        if ran:
            drafts = [
                self._drafts(number, text, coming[number]) if on[number] else [text]
                for number, text in enumerate(texts)
            ]
            if max(map(len, drafts)) == 1:
                hidden = model.hidden(block, cache=self._cache, counts=self._nothing[: self._batch], mask=mask)[None]
            else:
                padded = [own + own[:1] * (self._states - len(own)) for own in drafts]
                tokens = to_device_async(
                    [list(own[copy]) for copy in range(self._states) for own in padded], block.device
                )
                hidden = model.hidden(tokens, cache=self._wide, counts=self._nothing, mask=mask)
                hidden = hidden.unflatten(0, (self._states, self._batch))
            self._hidden = hidden
            self._computed = [{text: copy for copy, text in reversed([*enumerate(own)])} for own in drafts]
            copies = [0] * self._batch
        at = to_device_async([[copy or 0] for copy in copies], block.device)[:, 0]
        return self._hidden[at, torch.arange(self._batch, device=block.device)], ran

    def expect(
        self,
        block: torch.Tensor,
        ids: torch.Tensor,
        confidence: torch.Tensor,
        taking: torch.Tensor,
        first: int,
        mask: int,
    ) -> None:
        """Takes the guesses of a step, for the slots from `first` on, for those of the next ones. Reads the device."""
        rows = zip(block.tolist(), ids.tolist(), confidence.double().tolist(), taking.tolist(), strict=True)
        for number, (text, tokens, scores, on) in enumerate(rows):
            if on:
                left = [n for n in range(len(tokens)) if text[first + n] == mask]
                order = [n for _, n in sorted((-scores[n], n) for n in left)]
                self._expected[number] = [(first + n, tokens[n]) for n in order]

    def _drafts(self, number: int, text: tuple[int, ...], coming: Sequence[int]) -> list[tuple[int, ...]]:
        """The block of a sequence, and others that may follow it, at most `states` in all."""
        groups = list(groups_of(range(len(self._expected[number])), coming))
        texts = [text]
        for chosen in ranked_sets(4 * self._states):
            if len(texts) == self._states:
                break
            if chosen[-1] < len(groups):
                filled = dict(self._expected[number][place] for group in chosen for place in groups[group])
                texts.append(tuple(filled.get(slot, token) for slot, token in enumerate(text)))
        return texts
