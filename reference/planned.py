"""Planned diffusion: a plan is written token by token, then the chunks that it requests are filled in together.

Source: "Planned Diffusion" and the decoder published with it.

No cache: every forward runs over the whole text under the mask of its rounds (masks.py). Order of the text: plan, chunks, stop
token. Order of generation: plan, stop token, chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autoregressive import Model
from .masked_sampling import margin, negative_entropy, probability
from .masks import planned as planned_mask
from .sampling import OWN, draw, without
from .token_statistics import kept
from .unmask import random_order, ranked

LARGEST = 10**9  # of a number in a plan; no text is that long


class Tags(NamedTuple):
    """Control tokens, the digits 0 .. 9, tokens of a chunk per unit of its number, and what a chunk's row predicts."""

    chunk_open: int
    chunk_close: int
    topic_open: int
    topic_close: int
    sync: int
    pad: int
    digits: Sequence[int]
    unit: int = 10
    predicts: str = "own"


class BadPlan(Exception):
    """A plan that cannot be carried out; its argument is the reason."""


class Item(NamedTuple):
    topic: list[int]
    number: int


class PlannedStep(NamedTuple):
    """One denoising forward. Chunks and positions within them count from 0."""

    round: int
    canvas: list[list[int]]  # the chunks' contents before
    committed: dict[tuple[int, int], int]  # (chunk, position) -> token


class PlannedRound(NamedTuple):
    plan: list[int]  # without the token that ended it
    items: list[Item]
    chunks: list[list[int]]
    steps: int
    stop: str  # "sync", "end" or "length"


class PlannedResult(NamedTuple):
    tokens: list[int]  # new tokens, control tokens included
    rounds: list[PlannedRound]
    reason: str  # "end", "length", "rounds", or what is wrong with the last plan
    forwards: tuple[int, int]  # plan rows, denoising steps
    trace: list[PlannedStep]


# ----------------------------------------------------------------------------------------------------- plans


def parse_last_number(plan: Sequence[int], tags: Any) -> list[Item]:
    """The items of a plan: the number of each is the last run of digits in it. Tokens between items are ignored.

    >>> tags = Tags(10, 11, 12, 13, 14, 15, range(10))
    >>> [item.number for item in parse_last_number([12, 20, 1, 21, 4, 13, 12, 22, 1, 0, 0, 13], tags)]
    [4, 100]
    """
    items: list[Item] = []
    inside: list[int] | None = None
    for token in plan:
        if token == tags.topic_open:
            if inside is not None:
                raise BadPlan("nested")
            inside = []
        elif token == tags.topic_close:
            if inside is None:
                raise BadPlan("not opened")
            items.append(_item(inside, list(tags.digits)))
            inside = None
        elif inside is not None:
            inside.append(token)
    if inside is not None:
        raise BadPlan("not closed")
    return items


def _item(inside: list[int], digits: list[int]) -> Item:
    ends = [offset for offset, token in enumerate(inside) if token in digits]
    if not ends:
        raise BadPlan("no number")
    start = stop = ends[-1] + 1
    while start > 0 and inside[start - 1] in digits:
        start -= 1
    return Item(inside[:start], min(int("".join(str(digits.index(t)) for t in inside[start:stop])), LARGEST))


def fitted(lengths: Sequence[int], room: int) -> list[int] | None:
    """Lengths of chunks that fit into `room` tokens with their tags: the longest ones are cut to fit; None: not even the tags fit.

    >>> fitted([4, 9, 2], 21), fitted([4, 9, 2], 18), fitted([4, 9], 3)
    ([4, 9, 2], [4, 6, 2], None)
    """
    cut = [min(length, max(room, 0)) for length in lengths]
    while sum(cut) + 2 * len(cut) > room:
        if max(cut) == 0:
            return None
        longest = max(cut)
        last = max(offset for offset, length in enumerate(cut) if length == longest)
        cut[last] -= 1
    return cut


# ------------------------------------------------------------------------------------------------- schedules


def steps_of(longest: int, ratio: float) -> int:
    """Forwards of a round whose longest chunk has this many masks.

    >>> steps_of(10, 0.25), steps_of(2, 0.25), steps_of(0, 1.0)
    (3, 1, 0)
    """
    return -int(-longest * ratio // 1)


def quota(masks: int, step: int, steps: int) -> int:
    """How many of a chunk's masks a step commits: the same share in each of the steps left, rounded up.

    >>> quota(7, 0, 3), quota(4, 1, 3), quota(2, 2, 3)
    (3, 2, 2)
    """
    return -(-masks // (steps - step))


# ------------------------------------------------------------------------------------------------------- logits

Stage = tuple[int, tuple[int, ...], bool]


def scaffold(chunks: Sequence[Sequence[int]], tags: Any) -> list[int]:
    return list(itertools.chain.from_iterable([tags.chunk_open, *chunk, tags.chunk_close] for chunk in chunks))


class Whole:
    """Every forward runs over the whole text."""

    def __init__(self, model: Model, tags: Any, sparse: bool, inside: str = "full") -> None:
        self._model, self._tags, self._sparse, self._inside = model, tags, sparse, inside
        self._stages = list[Stage]()
        self._start = 0  # of the round, after the last sync

    def plan(self, text: list[int]) -> Tensor:
        """``(1, V)``, for the last token."""
        return self._forward(text, (len(text) - self._start, (), False))[-1:]

    def fill(self, text: list[int], chunks: list[list[int]]) -> list[Tensor]:
        """``(n + 2, V)`` for each chunk that has masks, tags included; the others are ignored."""
        lengths = tuple(len(chunk) + 2 for chunk in chunks)
        rows = self._forward(text + scaffold(chunks, self._tags), (len(text) - self._start, lengths, False))
        return list(rows[len(text) :].split(lengths))

    def end(self, text: list[int], chunks: list[list[int]]) -> None:
        """The text now ends with these chunks and a sync token."""
        lengths = tuple(len(chunk) + 2 for chunk in chunks)
        self._stages.append((len(text) - self._start - sum(lengths) - 1, lengths, True))
        self._start = len(text)

    def _forward(self, tokens: list[int], stage: Stage) -> Tensor:
        mask, positions = planned_mask([*self._stages, stage], self._sparse, inside=self._inside)
        return self._model(torch.tensor([tokens], dtype=torch.int64), positions[None], mask)[0]


# ------------------------------------------------------------------------------------------------------ decoder

SCORES: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "entropy": negative_entropy,
    "confidence": probability,
    "margin": margin,
}


class _Sampling(NamedTuple):
    temperature: float
    top_p: float
    top_k: int | None
    seed: int

    def guess(
        self, rows: Tensor, offsets: Sequence[int], step: int, banned: Sequence[int], order: str
    ) -> tuple[list[int], list[float]]:
        """A token for each row, and its score, both of the tempered and filtered distribution."""
        rows = rows.double()
        for token in banned:
            rows = without(rows, token)
        drawn = rows.masked_fill(~kept(rows, self.temperature or 1.0, self.top_p, 0.0), -torch.inf)
        if self.top_k is not None:
            drawn = drawn.masked_fill(rows < rows.topk(min(self.top_k, rows.shape[-1])).values[:, -1:], -torch.inf)
        ids = draw(drawn, offsets, self.temperature, self.seed, step)
        if order == "uniform":
            return ids, random_order(self.seed, step, offsets)
        return ids, SCORES[order](torch.softmax(drawn / (self.temperature or 1.0), -1), ids).tolist()


class Choices:
    """What a run decides by rules that the released code does not share."""

    def __init__(self, tags: Any, mask_token: int, steps_ratio: float, threshold: float | None) -> None:
        self.tags, self.mask_token, self.steps_ratio, self.threshold = tags, mask_token, steps_ratio, threshold

    def rows(self, model: Model, sparse: bool, inside: str = "full") -> Whole:
        return Whole(model, self.tags, sparse, inside)

    def items(self, text: list[int], plan: list[int]) -> list[Item]:
        """Of a text that ends with this plan."""
        return parse_last_number(plan, self.tags)

    def steps_of(self, longest: int) -> int:
        return steps_of(longest, self.steps_ratio)

    def count(self, chunk: int, scores: list[float], step: int, steps: int) -> int:
        """How many of a chunk's guesses with these scores a step commits."""
        if self.threshold is None:
            return quota(len(scores), step, steps)
        return max(1, sum(score >= self.threshold for score in scores))


@torch.no_grad()
def planned(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    tags: Any,
    *,
    mask_token: int,
    sparse: bool = False,
    steps_ratio: float = 1.0,
    order: str | None = None,
    threshold: float | None = None,
    chunks: str = "diffusion",
    length_scale: float = 1.0,
    unit: int | None = None,
    on_bad_plan: str = "stop",
    max_rounds: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
    choices: type[Choices] = Choices,
) -> PlannedResult:
    """Rounds of a plan and its chunks, until a plan ends with an end token.

    In each step of a round all chunks that have masks commit their most confident ones. All share one clock, which the longest
    chunk sets. Guesses for masks are never the mask, a control token other than the filler, or an end token.

    Where the published code differs, besides parser, schedule, threshold and cache (docs/papers/released.md): it may guess any
    token; it never checks whether the chunks fit; an empty plan is an assertion.

    Args:
        model: callable ``(tokens (1, T), positions (1, T), mask (T, T) bool) -> logits (1, T, V)``. Plan rows predict the next
            token, chunk rows follow `tags.predicts`.
        prompt, max_new_tokens, mask_token, end_tokens, seed: as in :func:`~pdkernels.reference.llada.llada`. All new tokens count,
            control tokens included; chunks that do not fit are cut, the longest first.
        tags: control tokens, :class:`Tags` or the like.
        sparse: chunks of a round do not see each other.
        steps_ratio: r; a round has r times as many steps as its longest chunk has masks.
        order: score that ranks masks: "entropy" (equation 7), "confidence" or "margin", or "uniform": a random order (equation 6);
            None: entropy, or confidence with a threshold.
        threshold: commit all whose confidence reaches it instead, and always the best one.
        chunks: "autoregressive": each chunk is written token by token, beside the others and without seeing them, and ends with
            the first filler or closing tag (Pasta); a step writes a token of every open chunk.
        length_scale, unit: a chunk has ``int(number * unit * length_scale)`` masks; unit None: that of the tags.
        on_bad_plan: "stop" or "raise".
        max_rounds: end after this many; None: no limit.
        temperature, top_p, top_k: of all draws.
        choices: the rules of parser, schedule, threshold and cache.

    >>> tags = Tags(10, 11, 12, 13, 14, 15, range(10), unit=1)
    >>> script = [12, 2, 13, 12, 1, 13, 9]
    >>> def model(tokens, positions, mask):
    ...     rows = torch.full((1, tokens.shape[1], 17), 0.0, dtype=torch.float64)
    ...     for row in range(tokens.shape[1]):
    ...         rows[0, row, 5 if tokens[0, row] == 16 else script[min(row, 6)]] = 9.0
    ...     return rows
    >>> planned(model, [3], 20, tags, mask_token=16, end_tokens=(9,)).tokens
    [12, 2, 13, 12, 1, 13, 10, 5, 5, 11, 10, 5, 11, 9]
    """
    order = order or ("entropy" if threshold is None else "confidence")
    sampling = _Sampling(temperature, top_p, top_k, seed)
    text, limit = list(prompt), len(prompt) + max_new_tokens
    rules = choices(tags, mask_token, steps_ratio, threshold)
    in_turn = chunks == "autoregressive"
    rows = rules.rows(model, sparse or in_turn, "causal" if in_turn else "full")
    banned = [mask_token, *(set(_control(tags)) - {tags.pad}), *end_tokens]
    unit = tags.unit if unit is None else unit
    rounds, trace = list[PlannedRound](), list[PlannedStep]()
    forwards, steps_taken = 0, 0

    def done(reason: str) -> PlannedResult:
        return PlannedResult(text[len(prompt) :], rounds, reason, (forwards, steps_taken), trace)

    while True:
        first, stop = len(text), -1
        while stop < 0:
            if len(text) == limit:
                if len(text) > first:
                    rounds.append(PlannedRound(text[first:], [], [], 0, "length"))
                return done("length")
            forwards += 1
            token = sampling.guess(rows.plan(text), [len(text)], OWN, [mask_token], "confidence")[0][0]
            if token == tags.sync or token in end_tokens:
                stop = token
            else:
                text.append(token)
        plan, name = text[first:], "sync" if stop == tags.sync else "end"
        try:
            items = rules.items(text, plan)
            if not plan and not items and name == "sync" and rounds and not rounds[-1].plan and not rounds[-1].chunks:
                raise BadPlan("no items")
        except BadPlan as bad:
            if on_bad_plan == "raise":
                raise
            text.append(stop)
            rounds.append(PlannedRound(plan, [], [], 0, name))
            return done(str(bad))
        asked = [int(item.number * (unit * length_scale)) for item in items]
        lengths = fitted(asked, limit - len(text) - 1)
        if lengths is None:
            text.append(stop)
            rounds.append(PlannedRound(plan, items, [], 0, name))
            return done("length")

        contents = [[mask_token] * length for length in lengths]
        steps, step = rules.steps_of(max(lengths, default=0)), 0
        while any(mask_token in chunk for chunk in contents):
            steps_taken += 1
            logits = rows.fill(text, contents)
            before, committed = [list(chunk) for chunk in contents], dict[tuple[int, int], int]()
            base = len(text) + 1
            for number, chunk in enumerate(contents):
                offsets = [offset for offset, token in enumerate(chunk) if token == mask_token]
                if offsets and in_turn:
                    at, ends = offsets[0], [tags.pad, tags.chunk_close]
                    others = [token for token in banned if token not in ends]
                    now = forwards + steps_taken
                    token = sampling.guess(logits[number][[at]], [base + at], now, others, "confidence")[0][0]
                    committed |= {(number, o): tags.pad for o in offsets} if token in ends else {(number, at): token}
                elif offsets:
                    shift = 1 if tags.predicts == "next" else 0
                    ids, scores = sampling.guess(
                        logits[number][[1 + offset - shift for offset in offsets]],
                        [base + offset for offset in offsets],
                        forwards + steps_taken,
                        banned,
                        order,
                    )
                    for rank in ranked(scores)[: rules.count(number, scores, step, steps)]:
                        committed[number, offsets[rank]] = ids[rank]
                base += len(chunk) + 2
            for (number, offset), token in committed.items():
                contents[number][offset] = token
            trace.append(PlannedStep(len(rounds), before, committed))
            step += 1
        rounds.append(PlannedRound(plan, items, contents, step, name))
        text += [*scaffold(contents, tags), stop]
        rows.end(text, contents)
        if name == "end":
            return done("end")
        if lengths != asked:
            return done("length")
        if len(rounds) == max_rounds:
            return done("rounds")


def _control(tags: Any) -> list[int]:
    return [tags.chunk_open, tags.chunk_close, tags.topic_open, tags.topic_close, tags.sync, tags.pad]
