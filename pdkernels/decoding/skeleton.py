"""Skeleton-of-Thought: an outline first, then each of its points on its own, all in one batch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdkernels._validation import check, check_type, message
from pdkernels.decoding.generate import find, generate
from pdkernels.generation.result import DecodeStats

SKELETON_TEMPLATE = (
    "Outline an answer to the question below. Write the outline alone and not the answer: a numbered list (1., 2., "
    "3., ..) of three to ten points, each of three to five words.\n\nQuestion: {question}\n\nOutline:\n"
)
"""A prompt for a skeleton. It asks for what the paper's asks for, without its examples and the roles of a chat."""
POINT_TEMPLATE = (
    "Question: {question}\n\nOutline of the answer:\n{skeleton}\n\nWrite out point {index} of it in one or two short "
    "sentences, and stop before any other point.\n\n{index}. {point}"
)
"""A prompt for a point, which ends with the beginning of its answer, as the paper's does."""
POINTS = r"(?m)^[ \t]*(\d+)\.[ \t]*(\S.*?)[ \t]*$"
"""Number and words of each point of a skeleton: one on a line."""
_OP = "decoding.skeleton_of_thought"


class Point(NamedTuple):
    """A point of a skeleton, written out."""

    number: str
    """Its index, as the skeleton writes it."""
    point: str
    """Its words in the skeleton."""
    expansion: str
    """What the model wrote after them."""


@dataclass(frozen=True)
class SkeletonResult:
    """Result of `skeleton_of_thought`.

    Attributes:
        text: the points, written out and joined; the skeleton itself if it has no points.
        skeleton: `start`, and how the first generation continued it.
        points: in the order of the skeleton.
        stats: of the skeleton, and of all points together; the latter is None without points.
    """

    text: str
    skeleton: str
    points: tuple[Point, ...]
    stats: tuple[DecodeStats, DecodeStats | None]

    @property
    def critical_path(self) -> int:
        """Forwards that waited for each other: those of the skeleton, and of the longest point."""
        return sum(stats.forwards for stats in self.stats if stats is not None)

    @property
    def seconds(self) -> float:
        """Of both generations."""
        return sum(stats.seconds for stats in self.stats if stats is not None)


def skeleton_of_thought(
    model: Any,
    question: str,
    method: str = "autoregressive",
    *,
    skeleton_template: str = SKELETON_TEMPLATE,
    point_template: str = POINT_TEMPLATE,
    start: str = "1.",
    pattern: str = POINTS,
    piece: str = "{index}. {point}{expansion}",
    joiner: str = "\n",
    max_skeleton_tokens: int = 128,
    max_point_tokens: int = 128,
    **options: Any,
) -> SkeletonResult:
    """Writes a skeleton of the answer, then expands its points in one batch. No point sees the text of another, so the
    answer is not that of token-by-token decoding.

    Args:
        model: with a tokenizer; any that `method` accepts. It has to follow the two prompts.
        question: of one user.
        method: of both generations; see `generate`.
        skeleton_template: prompt for the skeleton, with the field ``{question}``. Markers of a chat belong into the
            templates.
        point_template: prompt for a point, with the fields ``{question}``, ``{skeleton}``, ``{index}`` and ``{point}``.
        start: the beginning of the skeleton, which the model continues.
        pattern: regular expression whose two groups are the number and the words of a point.
        piece: how a point appears in the text, with the fields ``{index}``, ``{point}`` and ``{expansion}``.
        joiner: text between points.
        max_skeleton_tokens, max_point_tokens: new tokens of the skeleton, and of each point.
        options: of `generate`, for both generations.

    Raises:
        ValueError: a model without a tokenizer, a template with an unknown field, a pattern without two groups, what
            `generate` refuses.
        TypeError: a question or template that is not a str, `max_new_tokens`, what `generate` refuses.

    Source: Ning et al., "Skeleton-of-Thought: prompting LLMs for efficient parallel generation", section 2, whose
    prompts are other words for the same; a baseline of Planned Diffusion (section 5, decoding strategy 5).

    Example:
        >>> import pdkernels as pd
        >>> model = pd.models.load("tiny-code")  # which follows no prompts: two points, by means of `start`
        >>> found = pd.decoding.skeleton_of_thought(
        ...     model, "Say hello.", start="1. one\\n2. two\\n", max_skeleton_tokens=1, max_point_tokens=4
        ... )
        >>> [point[:2] for point in found.points], found.critical_path
        ([('1', 'one'), ('2', 'two')], 5)
    """
    strings = {"question": question, "skeleton_template": skeleton_template, "point_template": point_template}
    strings |= {"start": start, "pattern": pattern, "piece": piece, "joiner": joiner}
    for name, value in strings.items():
        check_type(isinstance(value, str), _OP, name, "be a str", type(value).__name__)
    remedy = "It is max_skeleton_tokens and max_point_tokens here."
    check_type("max_new_tokens" not in options, _OP, "max_new_tokens", "be left out", "one", remedy)
    check(getattr(model, "tokenizer", None) is not None, _OP, "model", "have a tokenizer", type(model).__name__)
    points_of = re.compile(pattern)
    check(points_of.groups == 2, _OP, "pattern", "have two groups, number and words", repr(pattern))
    # Both templates, and the piece, before the first forward.
    request = _filled("skeleton_template", skeleton_template, question=question)
    _filled("point_template", point_template, question=question, skeleton="", index="", point="")
    _filled("piece", piece, index="", point="", expansion="")

    chosen = find(method)
    outline = generate(model, request + start, chosen, max_new_tokens=max_skeleton_tokens, **options)
    skeleton = start + (outline.text or "")
    matches = points_of.findall(skeleton)
    if not matches:
        return SkeletonResult(skeleton, skeleton, (), (outline.stats, None))
    prompts = [
        _filled("point_template", point_template, question=question, skeleton=skeleton, index=index, point=point)
        for index, point in matches
    ]
    expansions = generate(model, prompts, chosen, max_new_tokens=max_point_tokens, **options)
    pairs = zip(matches, expansions.text or (), strict=True)
    points = tuple(Point(index, point, expansion) for (index, point), expansion in pairs)
    text = joiner.join(
        _filled("piece", piece, index=number, point=point, expansion=expansion) for number, point, expansion in points
    )
    return SkeletonResult(text, skeleton, points, (outline.stats, expansions.stats))


def _filled(name: str, template: str, **fields: str) -> str:
    try:
        return template.format(**fields)
    except (KeyError, IndexError, ValueError) as error:
        names = ", ".join(f"{{{field}}}" for field in fields)
        raise ValueError(message(_OP, name, f"have no other fields than {names}", repr(template))) from error
