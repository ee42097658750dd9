"""What a decoder hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch
from typing_extensions import TypeVar

# on_tokens(batch index, new token ids, how many of them, from the front, were accepted drafts); a `ChunkTokens` instead of a list
# comes when its chunk is complete, maybe before chunks that are in front of it in the text
OnTokens = Callable[[int, list[int], int], None]


class TraceStep(NamedTuple):
    """One forward over a draft, as one sequence of the batch saw it."""

    draft: list[int]
    predictions: list[int]  # the model's own next token after each draft token
    accepted: int  # draft[:accepted] was committed


class LinearStep(NamedTuple):
    """One cycle of linear self-speculation: a `TraceStep` with the forwards that drafted and judged it."""

    draft: list[int]
    predictions: list[int]
    accepted: int
    forwards: int  # draft passes of this sequence, and the verify pass


class DenoiseStep(NamedTuple):
    """One forward of block diffusion over an unfinished block, as one sequence of the batch saw it."""

    block: list[int]  # open slots hold the mask token
    committed: dict[int, int]  # slot -> token


class MaskedStep(NamedTuple):
    """One forward of a masked-diffusion decoder, as one sequence of the batch saw it. Positions count from the prompt's start."""

    tokens: list[int]  # the canvas before; open places hold the mask token
    committed: dict[int, int]  # place -> token
    confidence: dict[int, float]  # place -> score that places were chosen by, of all that had a guess
    window: tuple[int, int]  # places that could be committed: the first, and the one behind the last


class AdaptiveStep(NamedTuple):
    """One token of adaptive recurrent decoding."""

    cursor: int
    token: int  # the input
    prediction: int
    recurrences: int
    values: list[float]  # of the criterion, one per check; inf where a check came too early to count


class RecurrentStep(NamedTuple):
    """One step of a recurrent-depth decoder, as one sequence of the batch saw it: rows i at positions ``cursor + i``."""

    cursor: int  # everything before it is frozen
    tokens: list[int]  # inputs of the rows; tokens[0] is in the text already
    predictions: list[int]  # predictions[i] is the token of position cursor + i + 1
    distance: list[float]  # what the exit test measured of each row; inf where it measured nothing
    frozen: int  # predictions[:frozen] became text, and the cursor moved by as much


class ChunkStep(NamedTuple):
    """One forward of planned diffusion over the chunks of a round, as one sequence of the batch saw it. All counts start at 0."""

    round: int
    canvas: list[list[int]]  # the chunks' contents before, without their tags; open positions hold the mask token
    committed: dict[tuple[int, int], int]  # (chunk, position) -> token


class ChunkTokens(list[int]):
    """A finished chunk, its two tags included, as `on_tokens` gets it."""

    def __init__(self, ids: list[int], chunk: int) -> None:
        super().__init__(ids)
        self.chunk = chunk
        """Which one of the whole text; they are numbered from 0 in the order of the text."""


class PlanRound(NamedTuple):
    """One round of planned diffusion."""

    plan: list[int]
    """Its tokens, without the one that ended it."""
    topics: list[list[int]]
    """Of each item, without its number."""
    lengths: list[int]
    """Tokens of each chunk, without tags."""
    steps: int
    """Forwards that filled the chunks."""
    stop: str
    """What ended the plan: "sync", "end", or "length" where there was no room for more of it."""


class PlanReport(NamedTuple):
    """What became of one sequence of planned diffusion."""

    rounds: list[PlanRound]
    reason: str
    """What ended the text: "end" (token), "length", "rounds", or what was wrong with its last plan (`BAD_PLANS`)."""
    forwards: dict[str, int]
    """In which it took part: "plan" (the prompt's included), "chunks", and "refresh", which adds finished chunks to the cache and
    starts the next plan."""
    rows: dict[str, int]
    """Tokens that went through the model in these forwards."""

    @property
    def critical_path(self) -> int:
        """Forwards that had to wait for each other."""
        return sum(self.forwards.values())


Trace = (
    list[list[TraceStep]]
    | list[list[LinearStep]]
    | list[list[DenoiseStep]]
    | list[list[MaskedStep]]
    | list[list[AdaptiveStep]]
    | list[list[RecurrentStep]]
    | list[list[ChunkStep]]
)


@dataclass(frozen=True)
class DecodeStats:
    """What a generation cost.

    Attributes:
        method: name of the decoding method.
        forwards: forward passes of the model over the batch. The prompt's own forward counts.
        tokens: new tokens, all sequences together.
        tokens_per_forward: `tokens` over the forwards in which their sequences took part (a finished sequence takes
            part in none), so that the figure of a sequence is the same alone and in a batch; 1.0 is autoregressive.
        seconds: wall time from the first allocation to the last token on the host, without the time spent in
            `on_tokens`.
        accepted: per sequence, the draft tokens committed by each forward that judged a draft, the always right first
            one included; in block diffusion and masked diffusion the places that each forward filled; in recurrent diffusion
            the tokens that each step froze. One list per sequence, also for a single prompt.
        trace: per sequence, one `TraceStep` (or the method's own form of it) per judged draft; None unless asked for.
        recurrences: times that the core of a recurrent-depth model ran over the batch, whatever its rows; the prompt's count.
            None for a method that does not decide about them.
        plans: per sequence, what it planned and how that went; None for methods without plans.
    """

    method: str
    forwards: int
    tokens: int
    tokens_per_forward: float
    seconds: float
    accepted: list[list[int]]
    trace: Trace | None = None
    recurrences: int | None = None
    plans: list[PlanReport] | None = None

    @property
    def tokens_per_second(self) -> float:
        """`tokens` over `seconds`; 0.0 for a generation of no tokens."""
        return self.tokens / self.seconds if self.tokens else 0.0


Tokens = TypeVar("Tokens", bound=torch.Tensor | list[torch.Tensor], default=torch.Tensor | list[torch.Tensor])
Text = TypeVar("Text", bound=str | list[str], default=str | list[str])


@dataclass(frozen=True)
class DecodeResult(Generic[Tokens, Text]):
    """New tokens, without the prompt. Of one prompt it is a ``DecodeResult[Tensor, str]``, of a batch one of lists.

    Attributes:
        tokens: int64 ``(length,)`` on the CPU, or a list of those for a batch. An end token that stopped a
            sequence is its last token.
        text: the decoded tokens, special ones left out; None where the model has no tokenizer.
        stats: see `DecodeStats`.
    """

    tokens: Tokens
    text: Text | None
    stats: DecodeStats
