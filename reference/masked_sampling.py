"""Shared by the samplers of masked-diffusion models: the canvas, guesses for its masks and their confidence, schedules.

The *canvas* is the prompt, followed by a mask token for every new token. A forward reads all of it and gives a guess and a
confidence for every mask of a *window*, and some of them are committed: their guess is written and never changes. A position
is relative to the sequence's own text. All samplers agree on this:

- Only masks after the prompt are filled; a mask token inside the prompt is part of the prompt. LLaDA's code also fills those,
  though it does not count them.
- The mask token is never a guess: its logit counts as -inf, also in the distribution of the confidence. In the published
  codes it may win, and such a commit leaves the position masked.
- Among equal confidences the lowest position comes first, among equal logits the lowest id; NaN confidences come last.
- A sequence ends when an end token follows the prompt with no mask between, or when no mask is left.
- Token draws of position p in forward f of this sequence, counted from 1, use the numbers of step f and row p (sampling.py), and
  random choices of what is committed use the number that unmask.py defines for the order at step f and position p.

A model is a callable ``(tokens (1, T), positions (1, T), mask (T, T) bool) -> logits (1, T, V)``. Its attribute `predicts`
says what row i predicts: "own" (token i, LLaDA; the default without the attribute) or "next" (token i + 1, Dream).

Sources: "Large Language Diffusion Models" (LLaDA) and its sampler; Dream 7B's sampler for the scores and the timesteps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .autoregressive import Model
from .sampling import draw, without
from .token_statistics import kept
from .unmask import count_to_commit, ranked

Window = tuple[int, int]  # positions start .. end - 1

# Logits (T, V) of the first T positions of a canvas: row p predicts position p.
Forward = Callable[[Sequence[int]], Tensor]


class MaskedStep(NamedTuple):
    """One forward and its result."""

    tokens: list[int]  # the whole canvas before the step
    committed: dict[int, int]  # position -> token
    confidence: dict[int, float]  # of every mask in the window
    window: Window


class MaskedResult(NamedTuple):
    tokens: list[int]  # new tokens only; an end token that stopped the generation is the last one
    forwards: int
    trace: list[MaskedStep]


class Guesses(NamedTuple):
    tokens: dict[int, int]  # position -> token
    confidence: dict[int, float]


class Canvas:
    """A prompt and the masks after it.

    >>> canvas = Canvas([5, 9], 3, mask_token=9, end_tokens=(7,))
    >>> canvas.masks((0, 5)), canvas.done
    ([2, 3, 4], False)
    >>> canvas.commit(Guesses({2: 4, 3: 7}, {2: 0.5, 3: 0.9}), [2, 3], (2, 4))
    >>> canvas.done, canvas.result().tokens
    (True, [4, 7])
    """

    def __init__(
        self, prompt: Sequence[int], max_new_tokens: int, mask_token: int, end_tokens: Sequence[int] = ()
    ) -> None:
        self.start, self.end = len(prompt), len(prompt) + max_new_tokens
        self.tokens = [*prompt, *[mask_token] * max_new_tokens]
        self.mask_token, self.end_tokens = mask_token, tuple(end_tokens)
        self.forwards = 0  # guessing forwards, whose number keys their draws
        self.others = 0
        self.trace: list[MaskedStep] = []

    def masks(self, window: Window) -> list[int]:
        """Positions of the window that are still masked, in order."""
        start, end = max(window[0], self.start), min(window[1], self.end)
        return [position for position in range(start, end) if self.tokens[position] == self.mask_token]

    @property
    def text(self) -> list[int]:
        """The new tokens before the first mask, cut after the first end token."""
        closed = self.tokens[self.start : next(iter(self.masks((self.start, self.end))), self.end)]
        ends = [i + 1 for i, token in enumerate(closed) if token in self.end_tokens]
        return closed[: ends[0]] if ends else closed

    @property
    def done(self) -> bool:
        written = self.text
        return len(written) == self.end - self.start or (bool(written) and written[-1] in self.end_tokens)

    def commit(self, guesses: Guesses, chosen: Iterable[int], window: Window) -> None:
        """Writes the guesses of the positions `chosen`, and the step into the trace."""
        committed = {position: guesses.tokens[position] for position in sorted(chosen)}
        self.trace.append(MaskedStep(list(self.tokens), committed, guesses.confidence, window))
        for position, token in committed.items():
            self.tokens[position] = token

    def result(self) -> MaskedResult:
        return MaskedResult(self.text, self.forwards + self.others, self.trace)


def predicts(model: object) -> str:
    return getattr(model, "predicts", "own")


def by_position(logits: Tensor, predicted: str) -> Tensor:
    """Rows of logits ``(T, V)``, shifted so that row p predicts position p. Row 0 of a model that predicts the next token is kept
    (as in Dream's code), but must not be read: position 0 belongs to the prompt.

    >>> by_position(torch.tensor([[1.0], [2.0], [3.0]]), "next").flatten().tolist()
    [1.0, 1.0, 2.0]
    """
    return torch.cat([logits[:1], logits[:-1]]) if predicted == "next" else logits


def bidirectional(model: Model) -> Forward:
    """Every row sees the whole input; positions count from 0."""

    def forward(tokens: Sequence[int]) -> Tensor:
        length = len(tokens)
        visible = torch.ones(length, length, dtype=torch.bool)
        logits = model(torch.tensor([list(tokens)], dtype=torch.int64), torch.arange(length)[None], visible)[0]
        return by_position(logits, predicts(model))

    return forward


def probability(distribution: Tensor, tokens: Sequence[int]) -> Tensor:
    return distribution[range(len(tokens)), tokens]


def margin(distribution: Tensor, tokens: Sequence[int]) -> Tensor:
    """The probability of the most probable token minus that of the second one, or 0 if there is only one token."""
    top = distribution.topk(min(2, distribution.shape[-1]), -1).values
    return top[:, 0] - (top[:, 1] if top.shape[-1] > 1 else 0.0)


def negative_entropy(distribution: Tensor, tokens: Sequence[int]) -> Tensor:
    """Sum of p ln p, where 0 ln 0 is 0 (published: p ln(p + 1e-10), less than 2e-5 away)."""
    return torch.special.xlogy(distribution, distribution).sum(-1)


def guess(
    canvas: Canvas,
    logits: Tensor,
    window: Window,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    banned: Sequence[int] = (),
    distribution: str = "model",
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_k: int | None = None,
    score: Callable[[Tensor, Sequence[int]], Tensor] = probability,
) -> Guesses:
    """A token for every mask of the window, sampled with the random numbers of the canvas's last forward, and its confidence.

    Args:
        logits: ``(T, V)``, row p for position p; T may end anywhere after the window.
        banned: ids with probability 0, besides the mask token.
        distribution: that of the confidence. "model": softmax(logits). "sampling": the tempered and filtered distribution that the
            token was sampled from.
        top_p, min_p: filters of sampling, see token_statistics.py. The published filters sort, cut between ties, and keep the
            token if the mass before it is exactly `top_p`.
        top_k: after these filters, keep only the `top_k` most probable tokens and ties with the last one.
        score: of a distribution ``(R, V)`` and the tokens; the token's probability by default.
    """
    positions = canvas.masks(window)
    if not positions:
        return Guesses({}, {})
    rows = logits[positions].double()
    for token in (canvas.mask_token, *banned):
        rows = without(rows, token)
    if (rows == -torch.inf).all(-1).any():
        raise ValueError("pdkernels.guess: logits must allow a token at every position, got a row of only -inf.")
    drawn = rows.masked_fill(~kept(rows, temperature or 1.0, top_p, min_p), -torch.inf)
    if top_k is not None:
        drawn = drawn.masked_fill(rows < rows.topk(min(top_k, rows.shape[-1])).values[:, -1:], -torch.inf)
    tokens = draw(drawn, positions, temperature, seed, canvas.forwards)
    scores = drawn / (temperature or 1.0) if distribution == "sampling" else rows
    confidence = score(torch.softmax(scores, -1), tokens).tolist()
    return Guesses(dict(zip(positions, tokens)), dict(zip(positions, confidence)))


def surest(
    confidence: Mapping[int, float],
    *,
    quota: int = 1,
    threshold: float | None = None,
    min_count: int = 1,
    factor: float | None = None,
    strict: bool = False,
) -> list[int]:
    """The positions to commit, in descending order of confidence (unmask.py has the order and the rules).

    - quota: the number of positions, or all if there are fewer.
    - threshold: all positions that reach it (strict: exceed it); if fewer than `min_count` do, the best `quota`.
    - factor: Fast-dLLM's rule as in its code: with c_1 >= c_2 >= .. >= c_m, find the first n >= 2 with
      c_n < 1 - factor / (n + 1) and commit n - 1 positions; but all m if n = m, or if there is no such n. The paper commits the
      largest n with (n + 1) (1 - c_n) < factor: ignoring a failure at only the last rank is a slip of the code.

    >>> surest({3: 0.5, 4: float("nan"), 5: 0.9, 6: 0.5}, quota=4)
    [5, 3, 6, 4]
    >>> surest({3: 0.9, 4: 0.5}, threshold=0.9), surest({3: 0.9, 4: 0.5}, threshold=0.9, quota=2, strict=True)
    ([3], [3, 4])
    >>> surest({0: 0.99, 1: 0.01}, factor=1.0), surest({0: 0.99, 1: 0.01, 2: 0.01}, factor=1.0)
    ([0, 1], [0])
    """
    positions = sorted(confidence)
    positions = [positions[rank] for rank in ranked([confidence[position] for position in positions])]
    count = count_to_commit(
        [confidence[position] for position in positions],
        quota=quota,
        threshold=threshold,
        min_count=min_count,
        factor=factor,
        strict=strict,
    )
    return positions[:count]


def quotas(masks: int, steps: int) -> list[int]:
    """Commits of each of `steps` forwards: `masks` spread evenly, the remainder first. With more steps than masks the last
    ones have none.

    >>> quotas(7, 3), quotas(3, 8)
    ([3, 2, 2], [1, 1, 1, 0, 0, 0, 0, 0])
    """
    return [masks // steps + (step < masks % steps) for step in range(steps)]


def blocks(canvas: Canvas, block_size: int | None) -> list[Window]:
    """Windows of `block_size` positions counted from the end of the prompt, the last one shorter if needed; None: one window.

    >>> blocks(Canvas([1, 2], 5, 9), 2)
    [(2, 4), (4, 6), (6, 7)]
    """
    size = block_size or max(canvas.end - canvas.start, 1)
    return [(start, min(start + size, canvas.end)) for start in range(canvas.start, canvas.end, size)]


def steps_per_block(op: str, steps: int | None, windows: Sequence[Window]) -> list[int]:
    """`steps` divided evenly among the blocks; None: as many for each block as it has positions, one token per step."""
    if steps is None:
        return [end - start for start, end in windows]
    if steps < 1 or steps % max(len(windows), 1):
        raise ValueError(
            f"pdkernels.{op}: steps must be a multiple of the number of blocks ({len(windows)}), got {steps}."
        )
    return [steps // max(len(windows), 1)] * len(windows)


def timesteps(steps: int, eps: float = 1e-3) -> list[float]:
    """Dream's times 1 .. eps, ``steps + 1`` of them: forward i goes from time i to time i + 1.

    >>> timesteps(2, 0.5)
    [1.0, 0.75, 0.5]
    """
    return [1 + (eps - 1) * step / max(steps, 1) for step in range(steps + 1)]
