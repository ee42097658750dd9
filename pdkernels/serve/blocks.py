"""An answer as a sequence of blocks: thoughts, texts and calls, as Responses and Messages have it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from pdkernels.serve.choices import Choice, New
from pdkernels.serve.parser import Thought
from pdkernels.serve.tagged import CallDelta

Step = Literal["begin", "more", "end"]


@dataclass
class Block:
    """A thought, a text, or a call."""

    kind: Literal["thought", "text", "call"]
    number: int
    """In its answer, from 0."""
    call_id: str = ""
    name: str = ""
    text: str = ""
    """So far; of a call the arguments, JSON."""
    last: bool = False
    """Whether the answer has ended with it, which is known at its end."""


async def block_steps(choice: Choice, thoughts: bool = True) -> AsyncIterator[tuple[Step, Block, str]]:
    """The beginnings and ends of a choice's blocks, and what is new in them. Without any there is an empty text.

    Args:
        choice: the answer.
        thoughts: whether they are shown.
    """
    block, count = None, 0
    async for new in choice.news():
        if isinstance(new, list) or (isinstance(new, Thought) and not thoughts):
            continue
        begun = _begun(new, count)
        if block is None or begun.kind != block.kind or begun.name:
            if block is not None:
                yield "end", block, ""
            block, count = begun, count + 1
            yield "begin", block, ""
        piece = new.arguments if isinstance(new, CallDelta) else str(new)
        if piece:
            block.text += piece
            yield "more", block, piece
    if block is None:
        block = Block("text", 0)
        yield "begin", block, ""
    block.last = True
    yield "end", block, ""


def _begun(new: New, number: int) -> Block:
    if isinstance(new, CallDelta):
        return Block("call", number, new.id or "", new.name or "")
    return Block("thought" if isinstance(new, Thought) else "text", number)
