"""The control tokens of a model that plans its text before it writes it (planned diffusion)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from pdkernels._validation import check, check_choice, check_int, check_type

Predicts = Literal["own", "next"]


@dataclass(frozen=True)
class PlanTokens:
    """Ids of the tokens that structure a planned text, and two properties of chunks that a decoder needs.

    A plan is a sequence of items ``topic_open, topic, number, topic_close``; item i asks for chunk i, which is
    ``chunk_open``, `unit` times the number of tokens, ``chunk_close``. `sync` after the chunks starts another round, an
    end token ends the text.

    Source: Planned Diffusion, section 3; the ids of the released checkpoints are `PUBLISHED`.

    >>> PlanTokens(chunk_open=10, chunk_close=11, topic_open=12, topic_close=13, sync=14, pad=15, digits=range(10)).control
    (10, 11, 12, 13, 14, 15)
    """

    chunk_open: int
    chunk_close: int
    topic_open: int
    topic_close: int
    sync: int
    pad: int
    """Padding at the end of a chunk, which is not part of its text."""
    digits: Sequence[int]
    """The ids of "0" to "9", in this order."""
    unit: int = 10
    """Tokens of a chunk for each unit of the number in its plan."""
    predicts: Predicts = "own"
    """The token that the logits of a chunk's row i predict: i itself, which is then a mask, or i + 1."""

    def __post_init__(self) -> None:
        op = "PlanTokens"
        check_choice(op, "predicts", self.predicts, get_args(Predicts))
        check_type(isinstance(self.digits, Sequence), op, "digits", "be ten ids", type(self.digits).__name__)
        object.__setattr__(self, "digits", tuple(self.digits))
        for name, value in [(name, getattr(self, name)) for name in self.control_names()] + [
            ("digits", d) for d in self.digits
        ]:
            check_type(type(value) is int, op, name, "be an int", type(value).__name__)
            check_int(op, name, value, 0)
        check_type(type(self.unit) is int, op, "unit", "be an int", type(self.unit).__name__)
        check_int(op, "unit", self.unit, 1)
        check(len(self.digits) == 10, op, "digits", "be ten ids", len(self.digits))
        ids = (*self.control, *self.digits)
        check(len(set(ids)) == len(ids), op, "ids", "differ from each other", ids)

    @classmethod
    def control_names(cls) -> list[str]:
        """The fields that hold a control token."""
        return [field.name for field in fields(cls) if field.name not in ("digits", "unit", "predicts")]

    @property
    def control(self) -> tuple[int, ...]:
        """The six control tokens, in the order of the fields."""
        return tuple(getattr(self, name) for name in self.control_names())


PUBLISHED = PlanTokens(151667, 151668, 151669, 151670, 151671, 151672, digits=range(15, 25), predicts="next")
"""The tokens of the released checkpoints: Dream with six added tokens."""


def checked_plan_tokens(
    op: str, tokens: PlanTokens | None, vocab_size: int, mask_token: int | None
) -> PlanTokens | None:
    """Checks the tokens for a model with this vocabulary and mask token."""
    if tokens is None:
        return None
    check_type(isinstance(tokens, PlanTokens), op, "plan_tokens", "be PlanTokens or None", type(tokens).__name__)
    ids = (*tokens.control, *tokens.digits)
    check(max(ids) < vocab_size, op, "plan_tokens", f"be ids below vocab_size ({vocab_size})", max(ids))
    check(mask_token not in ids, op, "plan_tokens", "differ from the mask token", mask_token)
    return tokens
