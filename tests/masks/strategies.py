"""Masks of every builder, with the arguments they were built from; and masks that no builder makes."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from pdkernels import masks

Call = tuple[str, dict[str, Any]]


def sizes(most: int, least: int = 0) -> st.SearchStrategy[int]:
    return st.integers(least, most)


@st.composite
def noise_aware(draw: st.DrawFn) -> Call:
    conditioning = draw(st.sampled_from(["noisy", "clean", "window"]))
    return "noise_aware_causal", {
        "prompt_len": draw(sizes(9)),
        "block_size": draw(sizes(5, 1)),
        "num_blocks": draw(sizes(5)),
        "conditioning": conditioning,
        "window": draw(sizes(6, 1)) if conditioning == "window" else None,
        "layout": draw(st.sampled_from(["streams", "interleaved"])),
    }


@st.composite
def dual_stream(draw: st.DrawFn) -> Call:
    length = draw(sizes(20))
    prefix_len = draw(st.one_of(st.just(0), sizes(length)))
    kept = draw(st.one_of(st.none(), st.sets(sizes(length - 1, prefix_len)) if prefix_len < length else st.just(set())))
    return "dual_stream", {
        "length": length,
        "block_size": draw(sizes(7, 1)),
        "clean": draw(st.sampled_from(["causal", "block"])),
        "order": draw(st.sampled_from(["noisy_first", "clean_first"])),
        "noisy_positions": None if kept is None else sorted(kept),
        "prefix_len": prefix_len,
    }


@st.composite
def block_causal(draw: st.DrawFn) -> Call:
    length = draw(sizes(20))
    return "block_causal", {"length": length, "block_size": draw(sizes(7, 1)), "prefix_len": draw(sizes(length))}


@st.composite
def planned(draw: st.DrawFn, name: str = "planned") -> Call:
    stage = st.tuples(sizes(4), st.lists(sizes(4), max_size=3).map(tuple), st.booleans())
    stages, sparse = draw(st.lists(stage, max_size=4)), draw(st.booleans())
    inside = {"inside": draw(st.sampled_from(["full", "causal"]))} if name == "planned" and sparse else {}
    open_chunks = draw(st.sampled_from(["hidden", "visible"]))
    return name, {"stages": stages, "sparse": sparse, "open_chunks": open_chunks, **inside}


@st.composite
def quadratic(draw: st.DrawFn) -> Call:
    return "quadratic", {
        "block_size": draw(sizes(5, 1)),
        "masks_per_group": draw(st.one_of(st.none(), sizes(4))),
        "in_group": draw(st.sampled_from(["bidirectional", "causal"])),
        "layout": draw(st.sampled_from(["spec_first", "interleaved"])),
        "anchor_group": draw(st.booleans()),
    }


@st.composite
def anchored(draw: st.DrawFn) -> Call:
    lengths = draw(st.lists(sizes(7), max_size=4))
    documents: Any = lengths
    if draw(st.booleans()):
        numbers = draw(st.permutations(range(len(lengths)))) if lengths else []
        ids = [number for number, length in zip(numbers, lengths) for _ in range(length)]
        documents = torch.tensor(ids + [-1] * draw(sizes(4)), dtype=torch.int64)
    tokens = len(documents) if isinstance(documents, torch.Tensor) else sum(lengths)
    anchors = draw(st.lists(sizes(tokens - 1), max_size=4)) if tokens else []
    ragged = st.lists(sizes(4), min_size=len(anchors), max_size=len(anchors))
    return "anchored", {
        "documents": documents,
        "anchors": anchors,
        "block": draw(st.one_of(sizes(4), ragged)),
        "inside": draw(st.sampled_from(["full", "causal"])),
        "window": draw(st.one_of(st.none(), sizes(5))),
        "inclusive": draw(st.booleans()),
        "base": draw(st.sampled_from(["none", "causal"])),
    }


@st.composite
def tree(draw: st.DrawFn) -> Call:
    count = draw(sizes(14))
    # Parents are often the preceding token, so that chains occur.
    parent = lambda i: st.one_of(st.just(i - 1), sizes(i - 1, -1))  # noqa: E731
    return "tree", {"parents": [draw(parent(i)) for i in range(count)]}


def _of(name: str, **arguments: st.SearchStrategy) -> st.SearchStrategy[Call]:
    return st.fixed_dictionaries(arguments).map(lambda values: (name, values))


BUILDERS: dict[str, st.SearchStrategy[Call]] = {
    "causal": _of("causal", q_len=sizes(9), kv_len=st.one_of(st.none(), sizes(9))),
    "full": _of("full", q_len=sizes(9), kv_len=st.one_of(st.none(), sizes(9))),
    "block_causal": block_causal(),
    "noise_aware_causal": noise_aware(),
    "dual_stream": dual_stream(),
    "planned": planned(),
    "planned_streams": planned("planned_streams"),
    "quadratic": quadratic(),
    "candidates": _of("candidates", count=sizes(4), length=sizes(5)),
    "tree": tree(),
    "anchored": anchored(),
    "width_scaling": _of("width_scaling", length=sizes(8), factor=sizes(5, 1), kv_share=st.booleans()),
}
WHOLE = [name for name in BUILDERS if name not in ("causal", "full")]
calls = st.one_of(*BUILDERS.values())
whole_calls = st.one_of(*(BUILDERS[name] for name in WHOLE))


def build(call: Call) -> masks.SegmentMask:
    name, arguments = call
    return getattr(masks, name)(**arguments)


@st.composite
def random_masks(draw: st.DrawFn, most_tokens: int = 40) -> masks.SegmentMask:
    """Segments of any kind that see any others, and a window onto them."""
    count = draw(sizes(8))
    length = st.one_of(sizes(3), sizes(most_tokens))
    segments = []
    for i in range(count):
        seen = draw(st.sets(sizes(count - 1))) - {i}
        inside = draw(st.sampled_from(["causal", "full", "none"]))
        segments.append(masks.Segment(draw(length), inside, ranges(sorted(seen), draw(st.booleans()))))
    mask = masks.SegmentMask(segments)
    if draw(st.booleans()):
        edges = [draw(sizes(mask.q_len)) for _ in range(4)]
        mask = mask[min(edges[:2]) : max(edges[:2]), min(edges[2:]) : max(edges[2:])]
    return mask


def ranges(numbers: list[int], strided: bool) -> tuple[range, ...]:
    """The numbers as ranges; pairs of neighbours as one with a step, if asked."""
    found: list[range] = []
    for number in numbers:
        last = found[-1] if found else None
        if last and len(last) == 1 and (strided or number == last.start + 1):
            found[-1] = range(last.start, number + 1, number - last.start)
        elif last and len(last) > 1 and number == last[-1] + last.step:
            found[-1] = range(last.start, number + 1, last.step)
        else:
            found.append(range(number, number + 1))
    return tuple(found)
