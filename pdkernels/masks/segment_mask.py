"""The mask type: segments of tokens, the segments that each attends to, and its other forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain, groupby, repeat
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pdkernels import _host, _memory, _validation
from pdkernels._validation import check, check_type, fail, message
from pdkernels.masks.draw import Picture, draw
from pdkernels.masks.tile_plan import TilePlan, numbered

# Masks are in host memory regardless of torch's default device.
arange = partial(torch.arange, device="cpu")

# Longer masks do not fit the 32-bit numbers of a plan.
MAX_TOKENS = 2**31 - 1
MAX_SEGMENTS = 2**22  # each is a Python object
if TYPE_CHECKING:
    from typing_extensions import Self

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Segment(NamedTuple):
    """A run of tokens that are visible together, and the segments that they attend to."""

    length: int
    """Number of tokens; 0 is allowed, so that empty segments do not change the indices of the others."""
    inside: Literal["causal", "full", "none"]
    """Attention inside the segment: causal, full or none."""
    sees: tuple[range, ...] = ()
    """Indices of the other segments that it attends to: ascending ranges that do not overlap."""
    kind: str = "tokens"
    """The kind of segment, such as ``"prompt"`` or ``"noisy"``, which sets its colour in pictures."""
    sample: int = 0
    """Index of the packed sample."""


class Sees(NamedTuple):
    """Segments ``range(start, stop, step)`` that a repeated segment attends to; both ends advance each time."""

    start: int
    stop: int
    step: int = 1
    start_by: int = 0
    stop_by: int = 0


class Repeated(NamedTuple):
    """A segment in a run of identical ones."""

    length: int
    inside: Literal["causal", "full", "none"]
    sees: tuple[Sees, ...] = ()
    kind: str = "tokens"


# A list of segments, and how many times it repeats.
Run = tuple[int, tuple[Repeated, ...]]


class SegmentMask:
    """An attention mask as a short list of segments.

    A segment attends to all of another segment or to none of it; inside a segment attention is causal, full or none. So
    a mask over 16k tokens takes a few hundred numbers, from which all other forms are made. Slices are masks too:
    ``mask[a:b, c:d]`` has rows ``a..b`` and columns ``c..d``, so the numbers of queries and keys may differ::

        prompt of 2, then two separate branches of 2:   m[2:4] (queries of the first branch)
            1 . | . . | . .                                 1 1 | 1 . | . .
            1 1 | . . | . .                                 1 1 | 1 1 | . .
            1 1 | 1 . | . .
            1 1 | 1 1 | . .
            1 1 | . . | 1 .
            1 1 | . . | 1 1

    Args:
        segments: in token order.
        positions: ``(tokens,)`` int64 position ids; None: 0, 1, 2, ...

    Raises:
        ValueError: negative lengths, unknown `inside`, ranges that are not ascending, name no segment or the segment
            itself, or positions of another shape.
        TypeError: something that is not a `Segment`, `sees` that is not a tuple of ranges, positions that are not
            int64.

    Equal masks have equal segments, windows and positions; they share their plans.

    Example:
        >>> from pdkernels.masks import Segment, SegmentMask
        >>> branch = Segment(1, "full", (range(0, 1),))
        >>> mask = SegmentMask([Segment(2, "causal"), branch, branch])
        >>> mask.dense().int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
        >>> mask[2:, 1:].dense().int().tolist()
        [[1, 1, 0], [1, 0, 1]]
    """

    def __init__(self, segments: Sequence[Segment], positions: Tensor | None = None) -> None:
        op = "masks.SegmentMask"
        segments = tuple(segments)
        for segment in segments:
            if not (isinstance(segment, Segment) and isinstance(segment.length, int)):
                raise TypeError(message(op, "segments", "be Segments with int lengths", segment))
        tokens = sum(segment.length for segment in segments)
        if positions is not None:
            check_type(
                getattr(positions, "dtype", None) == torch.int64, op, "positions", "be an int64 tensor", positions
            )
            check(positions.shape == (tokens,), op, "positions", f"have shape ({tokens},)", tuple(positions.shape))
        self._given: tuple[Segment, ...] = segments
        self._runs: tuple[Run, ...] | None = None
        self._set_up(positions, (0, tokens), (0, tokens))

    @classmethod
    def _repeat(cls, runs: Sequence[Run], positions: Tensor) -> Self:
        """A mask of runs of identical segments, whose `Segment` objects are created on demand."""
        mask = cls.__new__(cls)
        mask._given, mask._runs = (), tuple(run for run in runs if run[0] > 0)
        tokens = sum(count * sum(segment.length for segment in segments) for count, segments in mask._runs)
        mask._set_up(positions, (0, tokens), (0, tokens))
        return mask

    def _set_up(self, positions: Tensor | None, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        self._rows, self._columns = rows, columns
        self._positions = positions
        self._table_labels: list[tuple[str, int, int]] | None = None
        self._table = self._make_table()

    @classmethod
    def _of_table(cls, table: _host.SegmentMask, labels: list[tuple[str, int, int]], positions: Tensor) -> Self:
        """A mask whose table was built from tensors. Every step makes a new one, so few plans are cached."""
        mask = cls.__new__(cls)
        mask._given, mask._runs, mask._table_labels = (), None, labels
        mask._rows = mask._columns = (0, table.tokens)
        mask._positions, mask._table = positions, table
        return mask

    def _make_table(self) -> _host.SegmentMask:
        if self._runs is not None:
            runs = [(count, [segment[:3] for segment in segments]) for count, segments in self._runs]
            return _host.SegmentMask.repeat(runs, self._rows, self._columns)
        return _host.SegmentMask(self._given, self._rows, self._columns)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, including those outside the window of a slice."""
        if self._runs is None and self._table_labels is None:
            return self._given
        labels = (label for kind, sample, count in self._labels for label in repeat((kind, sample), count))
        return tuple(
            Segment(length, pattern, tuple(range(*numbers) for numbers in sees), kind, sample)
            for (length, pattern, sees), (kind, sample) in zip(self._table.listed(), labels)
        )

    @cached_property
    def _labels(self) -> list[tuple[str, int, int]]:
        """Kind, sample and length of each run of segments with the same kind and sample."""
        if self._table_labels is not None:
            return self._table_labels
        labels: Iterable[tuple[tuple[str, int], int]] = (((item.kind, item.sample), 1) for item in self._given)
        if self._runs is not None:
            alone = (
                ((count, segments[:1]),) if len(segments) == 1 else ((1, segments),) * count
                for count, segments in self._runs
            )
            labels = (((item.kind, 0), count) for count, run in chain.from_iterable(alone) for item in run)
        return [(*key, sum(count for _, count in same)) for key, same in groupby(labels, key=lambda label: label[0])]

    # What it is

    @property
    def q_len(self) -> int:
        """Rows."""
        return self._rows[1] - self._rows[0]

    @property
    def kv_len(self) -> int:
        """Columns."""
        return self._columns[1] - self._columns[0]

    @property
    def shape(self) -> tuple[int, int]:
        """``(q_len, kv_len)``."""
        return self.q_len, self.kv_len

    @property
    def positions(self) -> Tensor:
        """``(q_len,)`` int64 position ids of the rows."""
        return self._all_positions[slice(*self._rows)]

    @property
    def kv_positions(self) -> Tensor:
        """``(kv_len,)`` int64 position ids of the columns: the same as `positions` unless the mask is a slice."""
        return self._all_positions[slice(*self._columns)]

    @cached_property
    def _all_positions(self) -> Tensor:
        with _memory.lasting():
            return arange(self._table.tokens) if self._positions is None else self._positions

    @property
    def density(self) -> float:
        """Visible pairs as a share of all pairs; 0 for an empty mask."""
        return self.plan().visible_pairs / max(self.q_len * self.kv_len, 1)

    def __getitem__(self, window: slice | tuple[slice, slice]) -> SegmentMask:
        op = "masks.SegmentMask"
        window = window if isinstance(window, tuple) else (window, slice(None))
        check_type(
            len(window) == 2, op, "slices", "be of rows and columns", f"{len(window)} slices", "Write mask[a:b, c:d]."
        )
        rows, columns = window
        for name, bounds in (("rows", rows), ("columns", columns)):
            check_type(isinstance(bounds, slice), op, name, "be a slice", bounds, "Write mask[a:b] or mask[a:b, c:d].")
            check(bounds.step in (None, 1), op, name, "have step 1", bounds.step)
        view = SegmentMask.__new__(SegmentMask)
        view._given, view._runs, view._table_labels = self._given, self._runs, self._table_labels
        view._positions = self._positions
        view._rows, view._columns = _narrow(self._rows, rows), _narrow(self._columns, columns)
        view._table = self._table.window(view._rows, view._columns)
        return view

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickling. The planner's table and all caches are derived from it."""
        state = {
            name: value for name, value in vars(self).items() if name != "_table" and not hasattr(type(self), name)
        }
        return state if self._table_labels is None else {**state, "_given": self.segments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._table = self._make_table()

    @cached_property
    def _hash(self) -> int:
        return self._table.hash()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SegmentMask):
            return NotImplemented
        same = self._table.equals(other._table) and self._labels == other._labels
        return same and torch.equal(self._all_positions, other._all_positions)

    def __repr__(self) -> str:
        kinds: dict[str, int] = {}
        for kind, _, count in self._labels:
            kinds[kind] = kinds.get(kind, 0) + count
        counts = (f"{count} {kind}" for kind, count in kinds.items())
        return f"{type(self).__name__}({self.q_len} x {self.kv_len}: {', '.join(counts)})"

    # Other forms

    @cached_property
    def relation(self) -> Tensor:
        """``(segments, segments)`` uint8: 0 if the row's segment sees nothing of the column's, 1: all, 2: itself
        causally."""
        size = self._table.segments
        if size == 0:
            return torch.zeros(0, 0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._table.relation(), dtype=torch.uint8).view(size, size)

    @cached_property
    def segment_ids(self) -> Tensor:
        """``(tokens,)`` int32: the segment of each token, including those outside the window of a slice."""
        if self._table.segments == 0:
            return torch.zeros(0, dtype=torch.int32, device="cpu")
        lengths = torch.frombuffer(self._table.lengths(), dtype=torch.int64)
        return torch.repeat_interleave(arange(len(lengths), dtype=torch.int32), lengths)

    def _visible(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Visibility of the given rows and columns, both indexed over all tokens."""
        ids = self.segment_ids.to(torch.int64)
        relation = self.relation[ids[rows]][:, ids[columns]]
        return (relation == 1) | ((relation == 2) & (rows[:, None] >= columns))

    def dense(self) -> Tensor:
        """``(q_len, kv_len)`` bool, True where the row attends to the column. For checks: it stores every pair.

        Example:
            >>> import pdkernels as pd
            >>> pd.masks.causal(3).dense().int().tolist()
            [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        """
        return self._visible(arange(*self._rows), arange(*self._columns))

    def mask_mod(self, device: torch.device | str = "cpu") -> MaskMod:
        """The mask as FlexAttention's ``mask_mod(batch, head, q_index, kv_index)``.

        It reads tensors (the segment of each token, the relation of segments), so that a compiled kernel does not
        depend on the sizes within the mask. For a whole `BlockMask` see `pdkernels.integrations.flex_attention`.

        Example:
            >>> import torch, pdkernels as pd
            >>> mask_mod, zero = pd.masks.causal(4).mask_mod(), torch.tensor(0)
            >>> mask_mod(zero, zero, torch.tensor(1), torch.tensor([0, 1, 2, 3])).tolist()
            [True, True, False, False]
        """
        ids, relation = self.segment_ids.to(device), self.relation.to(device)
        q_ids, kv_ids = ids[slice(*self._rows)], ids[slice(*self._columns)]
        shift = torch.tensor(self._rows[0] - self._columns[0], device=device)

        def mask_mod(batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
            seen = relation[q_ids[q_index], kv_ids[kv_index]]
            return (seen == 1) | ((seen == 2) & (q_index + shift >= kv_index))

        return mask_mod

    def plan(self, block_q: int = 128, block_k: int = 128, device: torch.device | str = "cpu") -> TilePlan:
        """The tiles that a block-sparse kernel visits. Plans are cached and shared between equal masks.

        Args:
            block_q, block_k: tile sizes, multiples of 16 in ``[16, 1024]``.
            device: device of the plan's tensors.

        Raises:
            ValueError: other tile sizes.
            TypeError: a tile size that is not an int.

        Example:
            >>> import pdkernels as pd
            >>> plan = pd.masks.causal(96).plan(32, 32)
            >>> plan.visited_tiles, round(plan.tile_efficiency, 3)
            (6, 0.758)
        """
        sizes = (
            _validation.integer("masks.plan", name, size, 0)
            for name, size in (("block_q", block_q), ("block_k", block_k))
        )
        planner: Callable[..., TilePlan] = _plan if self._table_labels is None else _plan_of_a_step
        if isinstance(self._positions, FakeTensor):  # which do not say whether they are equal to others
            planner = _make_plan
        return planner(self, *sizes, numbered(device))

    def draw(
        self, path: str | PathLike[str], tile: int | tuple[int, int] | None = None, title: str | None = None
    ) -> None:
        """Writes a picture of the mask as PNG. Needs matplotlib.

        Args:
            path: the file.
            tile: overlays tiles of this size: full ones are outlined, partial ones hatched.
            title: above the picture; None: the kinds of segments. The size and the density are always added.
        """
        plan = None if tile is None else self.plan(*(tile if isinstance(tile, tuple) else (tile, tile)))
        picture = Picture(self.segments, self.segment_ids, self._rows, self._columns, self.density, self._visible)
        draw(picture, path, plan, title)


def _narrow(window: tuple[int, int], selection: slice) -> tuple[int, int]:
    start, stop, _ = selection.indices(window[1] - window[0])
    return window[0] + start, window[0] + max(start, stop)


def _make_plan(mask: SegmentMask, block_q: int, block_k: int, device: torch.device) -> TilePlan:
    if device.type != "cpu":
        return mask.plan(block_q, block_k).to(device)
    return TilePlan._from_host(mask._table.plan(block_q, block_k), *mask.shape, block_q, block_k)


_plan = lru_cache(maxsize=128)(_make_plan)
# Masks of a training step never recur and must not evict masks that do. Layers of a few kinds share them.
_plan_of_a_step = lru_cache(maxsize=16)(_make_plan)


# What builders share


def integer(builder: str, argument: str, value: object, minimum: int) -> int:
    """The value as a Python int, at least `minimum`."""
    number = _validation.integer(f"masks.{builder}", argument, value, minimum)
    if number > MAX_TOKENS:
        fail(f"masks.{builder}", argument, "be less than 2**31", number)
    return number


def check_tokens(builder: str, argument: str, tokens: int, segments: int) -> None:
    """Checks that an argument makes a mask that fits a plan, of segments that fit in memory as a list."""
    if tokens > MAX_TOKENS:
        fail(f"masks.{builder}", argument, "make a mask of less than 2**31 tokens", tokens)
    if segments > MAX_SEGMENTS:
        fail(f"masks.{builder}", argument, f"make at most {MAX_SEGMENTS} segments", segments)


def flag(builder: str, argument: str, value: object) -> bool:
    check_type(isinstance(value, bool), f"masks.{builder}", argument, "be a bool", type(value).__name__)
    return bool(value)


def choice(builder: str, argument: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        fail(f"masks.{builder}", argument, f"be one of {', '.join(map(repr, choices))}", repr(value))


def blocks(length: int, block_size: int) -> list[int]:
    """Lengths of the blocks of a run; the last may be shorter."""
    return [min(block_size, length - start) for start in range(0, length, block_size)]


def inverse(permutation: Tensor) -> Tensor:
    result = torch.empty_like(permutation)
    result[permutation] = arange(len(permutation))
    return result
