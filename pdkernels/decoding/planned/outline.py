"""Plans of planned diffusion: what they request, how much of it fits, and the text without them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple, get_args

from pdkernels.models.plan_tokens import PlanTokens

BadPlanReason = Literal["no number", "not closed", "not opened", "nested", "no items"]
BAD_PLANS: tuple[str, ...] = get_args(BadPlanReason)
"""An item without a number, without its closing or its opening token, or inside another one; two empty plans in a
row."""

_LARGEST = 10**9  # of a number in a plan; no text is that long


class BadPlan(ValueError):
    """A plan that does not say what to write; `reason` is one of `BAD_PLANS`."""

    def __init__(self, reason: BadPlanReason, text: str = "") -> None:
        super().__init__(text or reason)
        self.reason = reason


class Item(NamedTuple):
    """What a plan requests for one chunk."""

    topic: list[int]
    number: int


def items_by_last_number(plan: Sequence[int], tags: PlanTokens) -> list[Item]:
    """The items of a plan; the number is the last run of digits in each. Tokens between items are ignored.

    Raises `BadPlan`.

    >>> tags = PlanTokens(10, 11, 12, 13, 14, 15, digits=range(10))
    >>> items_by_last_number([12, 20, 1, 21, 4, 13, 12, 22, 1, 0, 0, 13], tags)
    [Item(topic=[20, 1, 21], number=4), Item(topic=[22], number=100)]
    """
    items = []
    opened: int | None = None
    for index, token in enumerate(plan):
        if token == tags.topic_open:
            if opened is not None:
                raise BadPlan("nested")
            opened = index + 1
        elif token == tags.topic_close:
            if opened is None:
                raise BadPlan("not opened")
            items.append(_last_number(plan[opened:index], tags))
            opened = None
    if opened is not None:
        raise BadPlan("not closed")
    return items


def _last_number(tokens: Sequence[int], tags: PlanTokens) -> Item:
    values = [tags.digits.index(token) if token in tags.digits else None for token in tokens]
    while values and values[-1] is None:
        values.pop()
    first = len(values)
    while first and values[first - 1] is not None:
        first -= 1
    if first == len(values):
        raise BadPlan("no number")
    number = 0
    for value in values[first:]:
        number = min(10 * number + (value or 0), _LARGEST)
    return Item(list(tokens[:first]), number)


def fitted(lengths: Sequence[int], room: int) -> list[int] | None:
    """Lengths of chunks that fit into `room` tokens, their tags included; the longest ones are cut to a common length,
    the first of them may be one token longer. None: there is no room for the tags.

    >>> fitted([4, 9, 2], 21), fitted([4, 9, 6], 20), fitted([4, 9], 3)
    ([4, 9, 2], [4, 5, 5], None)
    """
    room -= 2 * len(lengths)
    if room < 0:
        return None
    if sum(lengths) <= room:
        return list(lengths)
    level, remaining, waiting = 0, room, sorted(lengths)
    for index, length in enumerate(waiting):  # the short ones are not cut
        level = remaining // (len(waiting) - index)
        if length > level:
            break
        remaining -= length
    spare = room - sum(min(length, level) for length in lengths)
    cut = []
    for length in lengths:
        extra = length > level and spare > 0
        spare -= extra
        cut.append(min(length, level) + extra)
    return cut


def text_pieces(tokens: Sequence[int], tags: PlanTokens, excluded: Collection[int]) -> list[list[int]]:
    """The text of some tokens without plans, tags, filler and those `excluded`: a list for each chunk and each part
    outside them.

    >>> tags = PlanTokens(10, 11, 12, 13, 14, 15, digits=range(10))
    >>> text_pieces([12, 20, 1, 13, 10, 4, 5, 15, 11, 10, 15, 11, 10, 6, 11, 99], tags, {99})
    [[4, 5], [6]]
    """
    pieces: list[list[int]] = [[]]
    planning = False
    for token in tokens:
        if token == tags.pad or token in excluded:
            continue
        if token in tags.control:
            planning = token == tags.topic_open
            pieces.append([])
        elif not planning:
            pieces[-1].append(token)
    return [piece for piece in pieces if piece]


def joined(pieces: Sequence[Sequence[int]], tags: PlanTokens, decode: Callable[..., str], joiner: str | None) -> str:
    """Joins the pieces of a text. A `joiner` of None is a space, or a line break before a digit."""
    text = ""
    for piece in pieces:
        if text:
            text += joiner if joiner is not None else "\n" if piece[0] in tags.digits else " "
        text += decode(piece)
    return text
