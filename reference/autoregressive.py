"""Greedy autoregressive decoding, one token per forward: what every lossless parallel decoder must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# model(tokens (1, T), positions (1, T), mask (T, T) bool) -> logits (1, T, V)
Model = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class AutoregressiveResult(NamedTuple):
    tokens: list[int]  # new tokens only; an end token that stopped the generation is the last one
    forwards: int


def greedy_predictions(model: Model, tokens: Sequence[int]) -> list[int]:
    """The model's own next token after each of `tokens` under the causal mask; ties go to the lowest id."""
    ids = torch.tensor([list(tokens)], dtype=torch.int64)
    length = ids.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return model(ids, positions, mask)[0].argmax(-1).tolist()


def autoregressive(
    model: Model, prompt: Sequence[int], max_new_tokens: int, *, end_tokens: Sequence[int] = ()
) -> AutoregressiveResult:
    """Decode greedily without a cache: the whole sequence goes through the model for every token.

    Args:
        model: callable ``(tokens (1, T), positions (1, T), mask (T, T) bool) -> logits (1, T, V)``.
        prompt: token ids, at least one.
        max_new_tokens: stop after this many new tokens.
        end_tokens: stop after one of these; it is kept as the last token.
    """
    tokens: list[int] = []
    forwards = 0
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in end_tokens):
        tokens.append(greedy_predictions(model, [*prompt, *tokens])[-1])
        forwards += 1
    return AutoregressiveResult(tokens, forwards)
