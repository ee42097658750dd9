"""Skeleton-of-Thought on token ids, without a cache or a batch: an outline, then its points one after the other.

Source: Ning et al., "Skeleton-of-Thought: prompting LLMs for efficient parallel generation", section 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .autoregressive import Model, autoregressive


class SkeletonResult(NamedTuple):
    skeleton: str
    points: list[tuple[str, str, str]]  # number, words, expansion
    critical_path: int  # forwards of the skeleton, and of the longest point: points do not wait for each other
    forwards: int  # of all


def skeleton_of_thought(
    model: Model,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    skeleton_prompt: str,
    point_prompt: Callable[[str, str, str], str],
    *,
    start: str = "1.",
    pattern: str = r"(?m)^[ \t]*(\d+)\.[ \t]*(\S.*?)[ \t]*$",
    max_skeleton_tokens: int,
    max_point_tokens: int,
    end_tokens: Sequence[int] = (),
) -> SkeletonResult:
    """Greedy.

    Args:
        model: as in :func:`~pdkernels.reference.autoregressive.autoregressive`.
        encode, decode: of its tokenizer; `decode` leaves end tokens out.
        skeleton_prompt: ends where the skeleton begins.
        point_prompt: of a skeleton, and the number and words of a point.
        start: the beginning of the skeleton, which is given.

    >>> def model(tokens, positions, mask):  # it repeats the last but one token
    ...     import torch
    ...     return torch.eye(128)[torch.cat([tokens[:, :1], tokens[:, :-1]], 1)]
    >>> told = skeleton_of_thought(
    ...     model, lambda text: list(text.encode()), lambda ids: bytes(ids).decode(), "?", lambda all, number, words: words + "ab",
    ...     start="1.x", max_skeleton_tokens=2, max_point_tokens=3)
    >>> told.skeleton, told.points, told.critical_path
    ('1.x.x', [('1', 'x.x', 'aba')], 5)
    """
    prompt = encode(skeleton_prompt + start)
    outline = autoregressive(model, prompt, max_skeleton_tokens, end_tokens=end_tokens)
    skeleton = start + decode([token for token in outline.tokens if token not in end_tokens])
    points, longest, forwards = list[tuple[str, str, str]](), 0, outline.forwards
    for number, words in re.findall(pattern, skeleton):
        prompt = encode(point_prompt(skeleton, number, words))
        written = autoregressive(model, prompt, max_point_tokens, end_tokens=end_tokens)
        text = decode([token for token in written.tokens if token not in end_tokens])
        points.append((number, words, text))
        longest, forwards = max(longest, written.forwards), forwards + written.forwards
    return SkeletonResult(skeleton, points, outline.forwards + longest, forwards)
