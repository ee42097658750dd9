"""Uniform diffusion with an entropy budget: a canvas of random tokens that is redrawn in every step, with nothing committed.

Sources: the sampler in transformers for DiffusionGemma; the budget is that of "Accelerated Sampling from Masked Diffusion
Models via Entropy Bounded Unmasking" (arXiv 2505.24857).

A canvas of C tokens begins as noise. With n of N steps to go, a step divides the logits by ``t_min + (t_max - t_min) n / N``, draws
a token for every position, and accepts the positions of least entropy as long as the entropies of all better ones add up to at
most the budget. The others become fresh noise; an accepted position may change in the next step. The model also sees the
tempered logits of the previous step. A canvas is done when its likeliest tokens have been the same for some steps and its mean
entropy is low. The result is the likeliest tokens of its last step, not the canvas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# forward(prefix, canvas, logits (C, V) of the previous step or None) -> logits (C, V) for the canvas' own positions
Forward = Callable[[Sequence[int], Sequence[int], Tensor | None], Tensor]


class Draws(Protocol):
    """The source of random numbers."""

    def noise(self, length: int) -> list[int]:
        """Uniform tokens."""
        ...

    def tokens(self, probabilities: Tensor) -> list[int]:
        """A token for each row of probabilities."""
        ...


class RenoiseResult(NamedTuple):
    tokens: list[int]  # up to and including the end token
    forwards: int  # over canvases; those over the prefix are not counted


def accepted_positions(entropy: Sequence[float], budget: float) -> list[bool]:
    """Which positions to accept: those for which all of less entropy fit into the budget, and always the one of least entropy.

    >>> accepted_positions([0.5, 0.0, 0.3, 0.1], 0.1)
    [False, True, True, True]
    """
    chosen, before = [False] * len(entropy), 0.0
    for index in sorted(range(len(entropy)), key=lambda i: entropy[i]):
        chosen[index] = before <= budget
        before += entropy[index]
    return chosen


def renoise(
    forward: Forward,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    canvas_length: int,
    draws: Draws,
    steps: int,
    entropy_budget: float,
    t_min: float,
    t_max: float,
    stability: int,
    confidence: float,
    end_tokens: Sequence[int] = (),
) -> RenoiseResult:
    """Whole canvases until `max_new_tokens` are reached or one holds an end token."""
    text: list[int] = []
    forwards = 0
    while len(text) < max_new_tokens:
        canvas = draws.noise(canvas_length)
        answers: list[list[int]] = []
        before: Tensor | None = None
        for left in range(steps, 0, -1):
            logits = forward([*prompt, *text], canvas, before) / (t_min + (t_max - t_min) * left / steps)
            forwards += 1
            before = logits
            said = torch.log_softmax(logits.float(), -1)
            entropy = -(said.exp() * said).sum(-1)
            drawn, accepted = draws.tokens(said.exp()), accepted_positions(entropy.tolist(), entropy_budget)
            fresh = draws.noise(canvas_length)
            canvas = [a if yes else b for a, b, yes in zip(drawn, fresh, accepted)]
            answers.append(logits.argmax(-1).tolist())
            stable = len(answers) > stability and all(old == answers[-1] for old in answers[-1 - stability : -1])
            if stable and float(entropy.mean()) < confidence:
                break
        for token in answers[-1]:
            text.append(token)
            if token in end_tokens:
                return RenoiseResult(text, forwards)
    return RenoiseResult(text, forwards)
