"""The contents of a trace: a step of each kind of decoder."""

from __future__ import annotations

from typing import NamedTuple


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

    block: list[int]  # masked slots hold the mask token
    committed: dict[int, int]  # slot -> token


class MaskedStep(NamedTuple):
    """One forward of a masked-diffusion decoder, as one sequence of the batch saw it. Positions are relative to the
    start of the prompt."""

    tokens: list[int]  # the canvas before; masked positions hold the mask token
    committed: dict[int, int]  # position -> token
    confidence: dict[int, float]  # position -> score used to choose positions, for all with a guess
    window: tuple[int, int]  # positions that could be committed: the first, and one past the last


class AdaptiveStep(NamedTuple):
    """One token of adaptive recurrent decoding."""

    cursor: int
    token: int  # the input
    prediction: int
    recurrences: int
    values: list[float]  # of the criterion, one per check; inf where a check came too early to count


class RecurrentStep(NamedTuple):
    """One step of a recurrent-depth decoder, as one sequence of the batch saw it: rows i at positions ``cursor +
    i``."""

    cursor: int  # everything before it is frozen
    tokens: list[int]  # inputs of the rows; tokens[0] is already in the text
    predictions: list[int]  # predictions[i] is the token at position cursor + i + 1
    distance: list[float]  # measured by the exit test for each row; inf if not measured
    frozen: int  # predictions[:frozen] became text, and the cursor moved by that many


class ChunkStep(NamedTuple):
    """One forward of planned diffusion over the chunks of a round, as one sequence of the batch saw it. All numbering
    starts at 0."""

    round: int
    canvas: list[list[int]]  # the chunks' contents before, without their tags; masked positions hold the mask token
    committed: dict[tuple[int, int], int]  # (chunk, position) -> token


Trace = (
    list[list[TraceStep]]
    | list[list[LinearStep]]
    | list[list[DenoiseStep]]
    | list[list[MaskedStep]]
    | list[list[AdaptiveStep]]
    | list[list[RecurrentStep]]
    | list[list[ChunkStep]]
)
