"""Edits of LLaDA2.2: a forward over a block fills masks, replaces tokens, deletes positions and inserts masks.

Source: JointThresholdInDel of SGLang (sgl-project/sglang, pull request 31773), which LLaDA2.2's own `generate` resembles
(docs/masked_diffusion.md says where). The plain form is reference/levenshtein_edits.py.

A guess of `delete_token` removes its position, one of `split_token` puts a mask before it; the rest of the block moves, and
masks fill it up, or what is beyond its end is dropped. The scan is sequential and runs on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from pdkernels.decoding.canvas.canvas import Canvas, Step
from pdkernels.generation.noise import suppress_
from pdkernels.generation.session import Session, to_device_async

Redraw = Callable[[int, set[int]], int]
"""From a place of the block and tokens that are excluded to the most probable of the others."""


class EditRules(NamedTuple):
    threshold: float
    edit_threshold: float
    max_edits: int
    mask_token: int
    delete_token: int
    split_token: int
    block_size: int


class Bounds(Protocol):
    """A block as its decoder keeps it (`fast_dllm_v2.Block`)."""

    start: int
    end: int
    complete: bool


@dataclass
class BlockEdits:
    """A block while it is edited: the tokens after the prompt's. `original` says which of them were masks at the beginning."""

    rules: EditRules
    original: list[bool]
    edits: int = 0
    """Forwards without an original mask."""
    updates: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    history: dict[int, set[int]] = field(default_factory=dict)
    """What has been written at each place."""
    finished: bool = False

    def rewritten(self, tokens: list[int], guesses: list[int], probs: list[float], redraw: Redraw) -> list[int]:
        """The block after a forward. `finished` from then on if it was the last update."""
        rules, guesses = self.rules, list(guesses)
        masked = [place for place, token in enumerate(tokens) if token == rules.mask_token]
        original_masks = sum(self.original[place] for place in masked)
        self.updates += 1
        self.edits += original_masks == 0
        last = self.edits >= rules.max_edits or self.updates > rules.block_size + rules.max_edits
        fills = self._fills(masked, original_masks, probs, last)
        places = [
            place
            for place, token in enumerate(tokens)
            if place in fills
            or (token != rules.mask_token and probs[place] > rules.edit_threshold and guesses[place] != token)
        ]
        if not places:
            self.finished = True
            return tokens
        special = {rules.mask_token, rules.delete_token, rules.split_token}
        if last:
            for place in places:
                if guesses[place] in special:
                    guesses[place] = redraw(place, special)
        elif tuple(tokens) in self.seen:
            # The least sure change becomes another one, so that states do not come again for ever.
            changing = [place for place in places if guesses[place] != tokens[place]]
            if changing:
                place = min(changing, key=lambda n: (probs[n], n))
                guesses[place] = redraw(place, self.history.get(place, set()) | {rules.mask_token})
        self.seen.add(tuple(tokens))
        for place in places:
            self.history.setdefault(place, set()).add(guesses[place])
        after = self._moved(tokens, {place: guesses[place] for place in places})
        self.finished = last
        return after

    def _fills(self, masked: list[int], original_masks: int, probs: list[float], last: bool) -> set[int]:
        """The masks that a forward fills: at least one that was there at the beginning, and all once none of these is left."""
        if last or original_masks == 0:
            return set(masked)
        required = 1 + len(masked) - original_masks
        confident = [place for place in masked if probs[place] > self.rules.threshold]
        if len(confident) < required:
            confident = sorted(masked, key=lambda place: (-probs[place], place))[:required]
        return set(confident)

    def _moved(self, tokens: list[int], new: dict[int, int]) -> list[int]:
        """The block with `new` tokens; those that delete and insert are followed, and positions keep their marks."""
        after: list[tuple[int, bool]] = []
        for place, (token, original) in enumerate(zip(tokens, self.original, strict=True)):
            chosen = new.get(place, token)
            if chosen == self.rules.split_token:
                after += [(self.rules.mask_token, False), (token, original)]
            elif chosen != self.rules.delete_token:
                after.append((chosen, original))
        after += [(self.rules.mask_token, False)] * (len(tokens) - len(after))
        del after[len(tokens) :]
        self.original = [original for _, original in after]
        return [token for token, _ in after]


class Rewriting:
    """The blocks of a batch, each with its `BlockEdits`."""

    def __init__(self, session: Session, canvas: Canvas, rules: EditRules) -> None:
        self._session, self._canvas, self._rules = session, canvas, rules
        self._edits: list[BlockEdits | None] = [None] * session.batch
        self._before: list[list[int]] = []
        canvas.final_ends = [0] * session.batch

    def begin(self, number: int) -> None:
        """Another sequence takes the place of one."""
        assert self._canvas.final_ends is not None
        self._edits[number], self._canvas.final_ends[number] = None, 0

    def write(
        self, hidden: torch.Tensor, blocks: Sequence[Bounds]
    ) -> tuple[Step, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rewrites blocks by a forward over them, whose first rows are those of `hidden`: the arguments of
        `Canvas.overwrite`."""
        canvas = self._canvas
        self._before = canvas.answers[:]
        pairs = zip(canvas.active, blocks, canvas.starts, strict=True)
        places = [range(max(block.start, prompt), block.end) if on else range(0) for on, block, prompt in pairs]
        width = max(map(len, places))
        padded = [[*span, *[-1] * (width - len(span))] for span in places]
        lines = [
            [span.start, span.stop, block.start, *row] for span, block, row in zip(places, blocks, padded, strict=True)
        ]
        packed = to_device_async(lines, canvas.tokens.device)
        number = torch.zeros_like(packed[:, :1])  # nothing is drawn
        step = Step(packed[:, :2], packed[:, 3:], min(map(len, places)) == width, number)
        guesses = canvas.guess(hidden, step, packed[:, 2])
        rows = zip(places, guesses.ids.tolist(), guesses.probs.double().tolist(), strict=True)
        rewritten = [
            self._rewritten(
                sequence, span, ids[: len(span)], probs[: len(span)], hidden[sequence, span.start - block.start :]
            )
            for (sequence, (span, ids, probs)), block in zip(enumerate(rows), blocks, strict=True)
        ]
        texts = [[*tokens, *[0] * (width - len(tokens))] for tokens, _ in rewritten]
        device = canvas.tokens.device
        changed = to_device_async([[count] for _, count in rewritten], device)[:, 0]
        return step, guesses.probs, to_device_async(texts, device), changed

    def _rewritten(
        self, sequence: int, places: range, ids: list[int], probs: list[float], hidden: torch.Tensor
    ) -> tuple[list[int], int]:
        """The tokens of a block after the prompt's, and how many of them are new; `hidden`: their rows."""
        model, canvas = self._session.model, self._canvas
        prompt = canvas.starts[sequence]
        tokens = canvas.answers[sequence][places.start - prompt : places.stop - prompt] if places else []
        edits = self._edits[sequence] or BlockEdits(self._rules, [token == canvas.mask_token for token in tokens])
        if not places or edits.finished:
            return tokens, 0
        self._edits[sequence] = edits

        def redraw(place: int, excluded: set[int]) -> int:
            logits = model.logits(hidden[None, place : place + 1]).double()
            for token in excluded:
                suppress_(logits, token)
            return int(logits.argmax(-1).item())

        after = edits.rewritten(tokens, ids, probs, redraw)
        return after, sum(new != old for new, old in zip(after, tokens, strict=True))

    def settle(self, blocks: Sequence[Bounds]) -> bool:
        """After a read: a block is final once a forward has run it as it is, and its edits are over. Whether there is one."""
        canvas, final = self._canvas, False
        assert canvas.final_ends is not None
        for number, block in enumerate(blocks):
            edits = self._edits[number]
            unchanged = canvas.answers[number] == self._before[number]
            block.complete = canvas.active[number] and unchanged and (edits is None or edits.finished)
            if block.complete:
                canvas.final_ends[number], self._edits[number], final = block.end - canvas.starts[number], None, True
        return final
