"""The tokens that a grammar allows in each row of a forward, for the sequences of a session.

A row of a draft has the state after the draft before it, so a rejected draft leaves nothing to undo. A row that guesses
a masked position gets the tokens with which the masks around it can still be filled: the known tokens of its canvas
lead one way, its masks every way (`grammar.canvases`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels import _host
from pdkernels._validation import refuse
from pdkernels.generation.filters import unpacked
from pdkernels.generation.prefixes import Prefixes, Seen
from pdkernels.grammar.canvases import MASK, Filled, completed, filled
from pdkernels.grammar.context_free import PrefixAutomaton

_OP = "decoding.generate"
_FAR = 2**31 - 1
Redraw = Callable[[int, int, Tensor], int]
"""From the number of a sequence, a position of its canvas and the words of the tokens allowed there to one of them."""


class Text(NamedTuple):
    """The grammar of one sequence."""

    automaton: _host.TokenAutomaton | _host.PushdownText | PrefixAutomaton
    fill: str
    start: int
    """The state where its new tokens begin."""
    limit: int
    """How many of them there are at most."""
    source: str


class GrammarRows:
    """The grammars of a session's sequences; None for one without."""

    def __init__(self, texts: Sequence[Text | None], vocabulary: int, mask_token: int | None) -> None:
        self._texts, self._mask_token = texts, mask_token
        self._width, self._vocabulary = (vocabulary + 31) // 32, vocabulary
        self._known: list[tuple[list[int], int]] = [([], text.start if text else -1) for text in texts]
        self.whole = True
        """Whether the grammar is that of a whole text, not of its chunks."""
        self.forced: list[dict[int, int]] = [{} for _ in texts]
        """Of each sequence, the tokens that were drafted because no text has others there, by their places."""
        self.failure: BaseException | None = None
        """What `JoinedGrammars` met in it."""

    def words(self, rows: Prefixes) -> Tensor:
        """As `Filters.allowed`: int32 ``(batch, R, ceil(V / 32))``."""
        bits = torch.full((*rows.number.shape, self._width), -1, dtype=torch.int32, device="cpu")
        seen = rows.read().seen if rows.seen is None else rows.seen
        assert seen is not None
        if rows.tokens.shape[1] == 0:
            self._canvases(seen, bits)
        else:
            self._drafts(seen, bits)
        return bits.to(rows.number.device, non_blocking=True)

    def _canvases(self, seen: Seen, bits: Tensor) -> None:
        """Rows of canvases, which see all of them."""
        for line, sequence in enumerate(seen.sequences):
            text = self._texts[sequence]
            if text is None:
                continue
            end = seen.length[line]
            start = end - text.limit
            canvas = [
                token if there else MASK
                for token, there in zip(seen.text[line][start:end], seen.filled[line][start:end], strict=True)
            ]
            filled_canvas = filled(text.automaton, canvas, text.start, 0)
            for row, position in enumerate(seen.number[line]):
                if filled_canvas and position < len(canvas) and canvas[position] == MASK:
                    filled_canvas.allowed(position, _buffer(bits[line, row]))

    def _drafts(self, seen: Seen, bits: Tensor) -> None:
        for line, sequence in enumerate(seen.sequences):
            self.draft(sequence, seen, line, bits[line])

    def draft(self, sequence: int, seen: Seen, line: int, bits: Tensor) -> None:
        """Writes the words ``(R, ceil(V / 32))`` of a line of drafts that is a sequence's."""
        text = self._texts[sequence]
        if text is None:
            return
        begun, tokens, visible = seen.new[line], seen.tokens[line], seen.visible[line]
        committed = seen.text[line][seen.prompts[line] : seen.length[line]] if begun else []
        state = self._state(sequence, text, committed)
        drafted = list[tuple[int, int, tuple[int, ...]]]()
        canvases: dict[tuple[int, ...], tuple[int, Filled | None]] = {}
        for row, number in enumerate(seen.number[line]):
            sees = tuple(token for token, there in zip(tokens, visible[row], strict=True) if there) if begun else ()
            if seen.guessing[line][row]:
                if begun:
                    self._guess(text, state, sees, number - len(committed), len(committed), canvases, bits[row])
                continue
            drafted.append((row, text.limit - number - 1, sees))
        if drafted and state >= 0:
            text.automaton.masks(state, drafted, _buffer(bits))

    def _state(self, sequence: int, text: Text, committed: list[int]) -> int:
        """The state after the tokens in the cache."""
        before, state = self._known[sequence]
        if committed[: len(before)] == before:
            state = self._follow(text, state, committed[len(before) :])
        else:
            state = self._follow(text, text.start, committed)
        self._known[sequence] = committed, state
        return state

    def committed(self, sequence: int) -> list[int]:
        """The new tokens of a sequence that were in the cache when `words` was last asked."""
        return self._known[sequence][0]

    def _follow(self, text: Text, state: int, tokens: Sequence[int]) -> int:
        return text.automaton.follow(state, list(tokens)) if state >= 0 else state

    def _guess(
        self,
        text: Text,
        state: int,
        sees: tuple[int, ...],
        position: int,
        before: int,
        filled_of: dict[tuple[int, ...], tuple[int, Filled | None]],
        bits: Tensor,
    ) -> None:
        """A row of a mask: what may stand at its `position` of the tokens that it sees, of which `before` come earlier
        in the text."""
        if sees not in filled_of:
            canvas = self.canvas(sees)[: max(0, text.limit - before)]
            budget = text.limit - before - len(canvas)
            filled_of[sees] = len(canvas), filled(text.automaton, canvas, state, budget) if state >= 0 else None
        length, filled_canvas = filled_of[sees]
        if filled_canvas and 0 <= position < length:
            filled_canvas.allowed(position, _buffer(bits))

    def canvas(self, tokens: Sequence[int]) -> list[int]:
        """Tokens with `MASK` in place of the mask token."""
        return [MASK if token == self._mask_token else token for token in tokens]

    # What is committed together

    def settled(
        self,
        sequence: int,
        prefix: Sequence[int],
        before: Sequence[int],
        after: Sequence[int],
        confidence: Sequence[float],
        redraw: Redraw,
    ) -> list[int]:
        """`after`, with other tokens where those that were filled in at once exclude each other.

        Args:
            prefix: the new tokens before the canvas.
            before, after: a canvas before and after a step, masks included; positions past the limit of the text do not
                count.
            confidence: of the filled positions: those of the greatest keep their tokens.
            redraw: gives another token for a position.
        """
        text = self._texts[sequence]
        result = list(after)
        if text is None:
            return result
        room = max(0, text.limit - len(prefix))
        start, budget = self._follow(text, text.start, prefix), max(0, room - len(before))
        old, new = self.canvas(before)[:room], self.canvas(after)[:room]
        new_places = [at for at in range(len(new)) if old[at] == MASK != new[at]]
        if start < 0 or not new_places or filled(text.automaton, new, start, budget, with_tokens=False):
            return result
        bits = torch.zeros(self._width, dtype=torch.int32, device="cpu")
        canvas, order = old, sorted(new_places, key=lambda place: (-confidence[place], place))

        def with_first(places: Sequence[int]) -> list[int]:
            return [new[at] if at in places else token for at, token in enumerate(canvas)]

        while order:
            # The most of them that fit together: fewer fit where more do.
            fitting, conflict = 0, len(order) + 1
            while conflict - fitting > 1:
                middle = (fitting + conflict) // 2
                together = filled(text.automaton, with_first(order[:middle]), start, budget, with_tokens=False)
                fitting, conflict = (middle, conflict) if together else (fitting, middle)
            canvas, order = with_first(order[:fitting]), order[fitting:]
            if order:
                at, *order = order
                filled_canvas = filled(text.automaton, canvas, start, budget)
                if not filled_canvas:
                    return result  # it was lost before this step
                filled_canvas.allowed(at, _buffer(bits))
                result[at] = new[at] = redraw(sequence, at, bits)
                canvas = [*canvas[:at], new[at], *canvas[at + 1 :]]
        return result

    def joint(self, sequence: int, prefix: Sequence[int], tokens: Sequence[int], scores: Tensor) -> list[int]:
        """The most probable valid completion of a canvas; empty if there is none, or its grammar is filled position by
        position.

        `scores`: log-probabilities ``(masks, V)`` of its masks up to the limit of the text.
        """
        text = self._texts[sequence]
        if text is None or text.fill != "joint":
            return []
        room = max(0, text.limit - len(prefix))
        start, canvas = self._follow(text, text.start, prefix), self.canvas(tokens)[:room]
        if start < 0:
            return []
        rows = scores.detach().to("cpu", torch.float32).contiguous()
        return completed(text.automaton, canvas, start, room - len(canvas), _buffer(rows))

    def is_joint(self, sequence: int) -> bool:
        text = self._texts[sequence]
        return text is not None and text.fill == "joint"

    def masks(self, sequence: int, prefix: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The masked positions of a canvas up to the limit of the text."""
        text = self._texts[sequence]
        room = len(tokens) if text is None else max(0, text.limit - len(prefix))
        return [at for at, token in enumerate(self.canvas(tokens)[:room]) if token == MASK]

    # Chunks, each of which is a text of the grammar

    def least(self, sequence: int) -> tuple[int, str]:
        """The fewest tokens of a text of a sequence's grammar, and what the grammar is; 0 without one."""
        text = self._texts[sequence]
        return (0, "") if text is None else (text.automaton.distance(text.start), text.source)

    def chunk(self, sequence: int, tokens: Sequence[int]) -> Tensor:
        """The words of the masks of a chunk: ``(masks, ceil(V / 32))``."""
        text, canvas = self._texts[sequence], self.canvas(tokens)
        masks = [at for at, token in enumerate(canvas) if token == MASK]
        packed = torch.full((len(masks), self._width), -1, dtype=torch.int32, device="cpu")
        filled_canvas = filled(text.automaton, canvas, text.start, 0) if text else None
        for row, at in enumerate(masks):
            if filled_canvas:
                filled_canvas.allowed(at, _buffer(packed[row]))
        return packed

    def settled_chunk(
        self, sequence: int, before: Sequence[int], after: Sequence[int], confidence: Sequence[float], redraw: Redraw
    ) -> list[int]:
        """`settled` of a chunk."""
        text = self._texts[sequence]
        alone = GrammarRows([text and text._replace(limit=len(before))], self._vocabulary, self._mask_token)
        return alone.settled(0, [], before, after, confidence, redraw)

    # Jump-forward

    def drafted(self, sequence: int, tokens: Sequence[int], room: int) -> list[int]:
        """The tokens that write what every text has next, at most `room`: after `tokens`, the new ones so far."""
        text = self._texts[sequence]
        if text is None:
            return []
        state, draft = self._follow(text, text.start, tokens), list[int]()
        bits = torch.zeros(self._width, dtype=torch.int32, device="cpu")
        while state >= 0 and len(draft) < room and state != text.automaton.done:
            count, last = text.automaton.mask(state, text.limit - len(tokens) - len(draft) - 1, _buffer(bits))
            token = last if count == 1 else self._longest(text, state, bits)
            if token < 0:
                break
            draft.append(token)
            state = self._follow(text, state, [token])
        for at, token in enumerate(draft):
            self.forced[sequence][len(tokens) + at] = token
        return draft

    def _longest(self, text: Text, state: int, bits: Tensor) -> int:
        """The longest token of the bytes that come next without a choice; -1: there is a choice."""
        if isinstance(text.automaton, _host.PushdownText):
            return -1  # it knows the tokens without a choice, not the bytes
        forced_bytes = bytes(text.automaton.forced(state))
        if not forced_bytes:
            return -1
        allowed = unpacked(bits, self._vocabulary).nonzero()[:, 0].tolist()
        # All of them write a beginning of the same bytes, so the furthest one is the longest.
        return max(allowed, key=lambda token: self._progress(text, state, token), default=-1)

    def _progress(self, text: Text, state: int, token: int) -> int:
        assert not isinstance(text.automaton, _host.PushdownText)
        to = text.automaton.next(state, token)
        return -len(text.automaton.forced(to)) if to >= 0 else -_FAR

    def forced_counts(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        """How many of each sequence's tokens were drafted because no text has others there."""
        return [
            sum(place < len(text) and text[place] == token for place, token in forced.items())
            for forced, text in zip(self.forced, tokens, strict=True)
        ]

    def check_complete(self, tokens: Sequence[Sequence[int]], stopped: Sequence[bool]) -> None:
        """Raises ValueError for a text that is not whole: other filters or a hook excluded what the grammar needed."""
        for sequence, (text, text_tokens) in enumerate(zip(self._texts, tokens, strict=True)):
            if text is None or stopped[sequence] or not self.whole:
                continue
            state = self._follow(text, text.start, text_tokens)
            complete = state >= 0 and text.automaton.accepting(state)
            fault = f"sequence {sequence} is no text of {text.source}: another option excluded what it needed"
            if isinstance(text.automaton, PrefixAutomaton):
                fault = (
                    f"{text.source} could not be completed within max_new_tokens ({text.limit}) in sequence {sequence}"
                )
            refuse(not complete, _OP, fault)


class JoinedGrammars:
    """The grammars of requests that share a batch, each of them that of one text: what fails in one is told to its request
    alone (`GrammarRows.failure`), which ends before anything else is written."""

    def __init__(self) -> None:
        self.now: Sequence[GrammarRows | None] = ()
        """Of each row of the next forward; rows beyond have none."""

    def words(self, rows: Prefixes) -> Tensor:
        """As `Filters.allowed`."""
        seen = rows.read().seen if rows.seen is None else rows.seen
        assert seen is not None
        bits = torch.full((*rows.number.shape, (rows.vocabulary + 31) // 32), -1, dtype=torch.int32, device="cpu")
        for line, sequence in enumerate(seen.sequences):
            grammar = self.now[sequence] if sequence < len(self.now) else None
            if grammar is not None and grammar.failure is None:
                try:
                    grammar.draft(0, seen, line, bits[line])
                except BaseException as error:
                    grammar.failure = error
                    bits[line] = -1
        return bits.to(rows.number.device, non_blocking=True)


def _buffer(tensor: Tensor) -> Any:
    """The elements of a contiguous tensor on the host, for C++."""
    kind = ctypes.c_float if tensor.dtype == torch.float32 else ctypes.c_int32
    return (kind * tensor.numel()).from_address(tensor.data_ptr())
