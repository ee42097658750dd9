"""The sampler published with SDAR and LLaDA2, as plainly as it can be written: whole texts under a block-causal mask, no cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Logits (T, V) of T tokens, where row i sees column j if ``visible[i, j]``.
Forward = Callable[[list[int], Tensor], Tensor]


class Written(NamedTuple):
    tokens: list[int]  # after the prompt, up to the end of a block
    forwards: int  # that fill


def block_sampler(
    forward: Forward, prompt: list[int], new: int, mask: int, block: int, steps: int, threshold: float
) -> Written:
    """Greedy. Blocks begin at multiples of `block`, and the end of the prompt lies in the first one that is filled.

    A step fills what is more probable than `threshold`, or its share of a block if that is more. Other than in the published code the
    mask token is never a guess.
    """
    length = -(-(len(prompt) + new) // block) * block
    text = [*prompt, *[mask] * (length - len(prompt))]
    number = torch.arange(length) // block
    visible = number[:, None] >= number
    forwards = 0
    for first in range(len(prompt) // block * block, length, block):
        end = first + block
        for step in range(steps):
            masked = [p for p in range(max(first, len(prompt)), end) if text[p] == mask]
            if not masked:
                break
            logits = forward(text[:end], visible[:end, :end]).double().index_fill(-1, torch.tensor([mask]), -torch.inf)
            forwards += 1
            sure, tokens = (found.tolist() for found in logits.softmax(-1).max(-1))
            share = block // steps + (step < block % steps)
            chosen = [p for p in masked if sure[p] > threshold]
            if len(chosen) < share:
                chosen = sorted(masked, key=lambda p: -sure[p])[:share]
            for p in chosen:
                text[p] = tokens[p]
    return Written(text[len(prompt) :], forwards)


class Edited(NamedTuple):
    tokens: list[int]
    edits: int  # tokens that were replaced


def joint_threshold(
    forward: Forward,
    prompt: list[int],
    new: int,
    mask: int,
    block: int,
    threshold: float,
    edit_threshold: float,
    most: int,
) -> Edited:
    """The loop of JointThreshold in SGLang (python/sglang/srt/dllm/algorithm/joint_threshold.py), without its penalty.

    Other than there the mask token is never a guess.
    """
    text, edits = [*prompt, *[mask] * new], 0
    number = torch.arange(len(text)) // block
    visible = number[:, None] >= number
    for first in range(len(prompt) // block * block, len(text), block):
        end, posts = first + block, 0
        for _ in range(block + most):
            logits = forward(text[:end], visible[:end, :end]).double().index_fill(-1, torch.tensor([mask]), -torch.inf)
            sure, tokens = (found.tolist() for found in logits.softmax(-1).max(-1))
            masked = [p for p in range(first, end) if text[p] == mask]
            fills = [p for p in masked if sure[p] > threshold] or sorted(masked, key=lambda p: -sure[p])[:1]
            posts += not masked
            if posts > most:
                break
            inside = range(max(first, len(prompt)), end)
            others = [p for p in inside if p not in masked and sure[p] > edit_threshold and tokens[p] != text[p]]
            for p in fills + others:
                text[p] = tokens[p]
            edits += len(others)
            if not fills + others:
                break
    return Edited(text[len(prompt) :], edits)
