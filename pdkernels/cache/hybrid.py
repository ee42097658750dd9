"""A cache of layers with attention and layers with a recurrent state.

A state cannot be trimmed like K and V. So it stays where it was when a draft began, and what the draft's rows add to it
is kept beside it: the *pending* rows. A commit only says which of them were accepted; the next forward replays these,
writes the state once, and goes on from there (`pdkernels.models.architectures.states`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels import _memory
from pdkernels._validation import check, check_fits_memory, integer
from pdkernels.cache.contiguous import KVCacheBase
from pdkernels.cache.windowed import WindowedCache
from pdkernels.ops.recurrent_state import state_commit_, state_trim_

_OF_PAGES = ("reserve_", "reclaim_", "resize_row_", "hold_row_", "pages", "shared_pool", "page_size", "num_pages")
_OF_WINDOWS = ("slide_", "need", "promise_row_", "hold_windows_", "window_pages", "piece", "drafts")

PENDING_ROWS = 64
"""Rows of a draft that can be rejected, unless `HybridCache.reserve_drafts_` makes room for more."""


class StateShape(NamedTuple):
    """A recurrent state of one layer, without the batch: its tensor, and what is kept of a row to replay it."""

    state: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def nbytes(self, pending: int) -> int:
        """Bytes of a sequence."""
        rows = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.inputs)
        return torch.Size(self.state).numel() * self.dtype.itemsize + pending * rows


class StateSlots(NamedTuple):
    """The memory of one state: `state` ``(batch, ..)`` after the first `lengths` ``(batch,)`` tokens, and what is kept
    of the rows after these, ``(batch, pending, ..)`` each."""

    state: Tensor
    lengths: Tensor
    pending: tuple[Tensor, ...]


class SavedStates(NamedTuple):
    """The states of a sequence at some time, with which another one goes on, if it has the K and V (`save_states`)."""

    earliest: int
    """The shortest length that they can be cut to."""
    lengths: Tensor
    """``(states,)``"""
    tensors: list[Tensor]
    """Of each state: it, and the rows that have not gone into it."""
    pending: int
    """These rows."""


class StateStep(NamedTuple):
    """The arguments that the ops of all states share in one forward."""

    lengths: Tensor
    counts: Tensor | None
    pending_index: Tensor | None
    parents: Tensor | None
    keep: int | None


class HybridCache:
    """K and V of some layers and recurrent states of others, with one length for each sequence.

    `append_`, `commit_` and `trim_` work as those of the KV cache that it is made of. `trim_` goes back to any of the
    pending rows, those of the last forward, or to 0; a state does not know what was before them.

    Args:
        kv: the cache of the layers with attention, contiguous or paged, or one whose layers have windows.
        states: shapes of the states, under names such as ``(layer, "conv")``.
        pending: rows of a draft that can be rejected. More are made room for when a forward has them.

    Raises:
        ValueError: a size below 1, or more memory than there is.

    Example:
        >>> import torch
        >>> from pdkernels.cache import ContiguousKVCache, HybridCache, StateShape
        >>> shape = StateShape((2, 4, 4), torch.float32, (((2, 4), torch.float32), ((2, 4), torch.float32)))
        >>> cache = HybridCache(ContiguousKVCache(1, 2, 16, 1, 8), {"a": shape}, pending=4)
        >>> cache.states["a"].state.shape, [rows.shape for rows in cache.states["a"].pending]
        (torch.Size([2, 2, 4, 4]), [torch.Size([2, 4, 2, 4]), torch.Size([2, 4, 2, 4])])
    """

    def __init__(
        self, kv: KVCacheBase | WindowedCache, states: Mapping[Any, StateShape], *, pending: int = PENDING_ROWS
    ) -> None:
        op = "cache.HybridCache"
        self.kv, self.shapes, self.pending = kv, dict(states), integer(op, "pending", pending, 1)
        self.lengths = kv.lengths
        self.batch, self.capacity, self.layers = kv.batch, kv.capacity, kv.layers
        self.kv_heads, self.head_dim = kv.kv_heads, kv.head_dim
        check(bool(self.shapes), op, "states", "hold at least one", "none", "Use the KV cache.")
        nbytes = kv.batch * sum(shape.nbytes(self.pending) for shape in self.shapes.values())
        check_fits_memory(op, "pending", self.pending, nbytes, kv.device)
        self.state_lengths = torch.zeros(len(self.shapes), kv.batch, dtype=torch.int64, device=kv.device)
        """``(states, batch)``: how many tokens each state has seen."""
        self.pending_index = self._index_of_rows()
        """``(batch, pending)``: the pending rows that come after them, as far as the length of the sequence."""
        self.states = {
            name: StateSlots(
                _memory.zeros((kv.batch, *shape.state), shape.dtype, kv.device), lengths, self._pending_rows(shape)
            )
            for (name, shape), lengths in zip(self.shapes.items(), self.state_lengths, strict=True)
        }

    def _index_of_rows(self) -> Tensor:
        return torch.arange(self.pending, device=self.kv.device).repeat(self.kv.batch, 1)

    def _pending_rows(self, shape: StateShape) -> tuple[Tensor, ...]:
        rows = (self.kv.batch, self.pending)
        return tuple(_memory.zeros((*rows, *size), dtype, self.kv.device) for size, dtype in shape.inputs)

    @property
    def device(self) -> torch.device:
        return self.kv.device

    @property
    def dtype(self) -> torch.dtype:
        return self.kv.dtype

    def __getattr__(self, name: str) -> Any:
        if name in (*_OF_PAGES, *_OF_WINDOWS):
            return getattr(self.kv, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def k(self) -> Any:
        """Of the layers with attention."""
        return self.kv.k

    @property
    def v(self) -> Any:
        """Of the layers with attention."""
        return self.kv.v

    @property
    def block_table(self) -> Tensor | None:
        """That of the KV cache."""
        return self.kv.block_table

    def expect_(self, rows: int, counts: Tensor | None = None) -> None:
        """As that of a `WindowedCache`, if the layers with attention have one."""
        if isinstance(self.kv, WindowedCache):
            self.kv.expect_(rows, counts)

    @property
    def another(self) -> Callable[[int, int], HybridCache] | None:
        """As that of a `WindowedCache`, if the layers with attention have one; None: they do not."""
        kv = self.kv
        if not isinstance(kv, WindowedCache):
            return None
        return lambda batch, capacity: HybridCache(kv.another(batch, capacity), self.shapes, pending=self.pending)

    def table(self, layer: int) -> Tensor | None:
        """The page table of a layer with attention, as that of the KV cache."""
        return self.kv.table(layer)

    def append_(self, layer: int, k_new: Tensor, v_new: Tensor, counts: Tensor | None = None) -> None:
        """Appends to the KV cache; `layer` counts those with attention."""
        self.kv.append_(layer, k_new, v_new, counts)

    def layer(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer with attention, as the KV cache returns them."""
        keys_values: tuple[Tensor, Tensor] = self.kv.layer(layer, length)  # type: ignore[union-attr]
        return keys_values

    def row(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of one sequence, as the KV cache returns them."""
        return self.kv.row(row, length)

    def reserve_drafts_(self, rows: int) -> None:
        """Makes room for drafts of `rows` rows; the pending rows stay. Captured graphs have the old memory."""
        rows = integer("cache.HybridCache.reserve_drafts_", "rows", rows, 0)
        if isinstance(self.kv, WindowedCache):
            self.kv.reserve_drafts_(rows)
        self._reserve_pending(rows)

    def _reserve_pending(self, rows: int) -> None:
        before = self.pending
        if rows <= before:
            return
        added = self.batch * sum(shape.nbytes(rows) - shape.nbytes(0) for shape in self.shapes.values())
        check_fits_memory("cache.HybridCache.reserve_drafts_", "rows", rows, added, self.device)
        self.pending, index = rows, self.pending_index
        self.pending_index = self._index_of_rows()
        self.pending_index[:, :before] = index
        for name, slots in self.states.items():
            wider = self._pending_rows(self.shapes[name])
            for new, old in zip(wider, slots.pending, strict=True):
                new[:, :before] = old
            self.states[name] = slots._replace(pending=wider)

    def begin_(
        self, rows: int, counts: Tensor | None = None, *, parents: Tensor | None = None, compute_all: bool = False
    ) -> StateStep:
        """Prepares a forward over `rows` new rows; every state then takes the step that is returned.

        Args:
            rows: of each sequence, padding included.
            counts: ``(batch,)`` rows that may be committed; None: all.
            parents: ``(rows,)`` or ``(batch, rows)``, the new row that each row follows, -1: none; None: the last.
            compute_all: compute the rows after the first `counts` as well. Otherwise they are padding.
        """
        lengths = self.lengths
        on_host = lengths.device.type == "cpu"
        # A sequence that was emptied begins anew.
        self.state_lengths.masked_fill_(lengths == 0, 0)
        if parents is not None:  # no row of a tree can go into a state before its branch is chosen
            self._reserve_pending(rows)
            parents = parents.expand(self.batch, rows).contiguous()
        elif rows > self.pending and (on_host or compute_all):
            self._reserve_pending(self._max_pending(rows, counts, compute_all) if on_host else rows)
        keep = self.pending if rows > self.pending else None
        return StateStep(lengths, None if compute_all else counts, self.pending_index, parents, keep)

    def _max_pending(self, rows: int, counts: Tensor | None, compute_all: bool) -> int:
        """The largest number of rows at the end of a forward that have to stay pending. For a new prompt these are only
        the rows that cannot be committed: the others go into the state at once."""
        computed = torch.full_like(self.lengths, rows)
        stored = computed if counts is None else counts
        computed = computed if compute_all else stored
        return int(torch.where(self.lengths == 0, computed - stored, computed).max())

    def commit_(self, counts: Tensor, source_index: Tensor | None = None) -> None:
        """Keeps accepted rows, as that of the KV cache; of a tree those of one branch, since what a row adds to a state
        depends on the rows before it. No state changes, and no pending row moves.

        Raises:
            ValueError: more rows than can be pending; fewer than are in the states already, those of a prompt but for
                the last `pending`. Nothing changes then.
        """
        if isinstance(self.kv, WindowedCache):
            self.kv.check_commit(counts)
        state_commit_(self.lengths, self.pending_index, self.state_lengths, counts, source_index, advance=False)
        self.kv.commit_(counts, source_index)

    def trim_(self, new_lengths: int | Sequence[int] | Tensor) -> None:
        """Shortens sequences, as that of the KV cache, to 0 or to a length that the states can go back to.

        Raises:
            ValueError: a length before the pending rows; nothing changes then.
        """
        if not isinstance(new_lengths, Tensor):
            numbers = self.kv._numbers("cache.HybridCache.trim_", "new_lengths", new_lengths)
            new_lengths = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        if isinstance(self.kv, WindowedCache):
            self.kv.check_trim(new_lengths)
        emptied = self.state_lengths.masked_fill(new_lengths == 0, 0)
        state_trim_(self.lengths, new_lengths, emptied)
        self.state_lengths.copy_(emptied)
        self.kv.trim_(new_lengths)

    def idle_row_(self, row: int) -> None:
        """Empties a sequence, as the KV cache does."""
        self.kv.idle_row_(row)
        self.state_lengths[:, row] = self.lengths[row]

    def earliest(self, row: int) -> int:
        """The shortest length but 0 that a sequence can be cut to. Reads the device."""
        of_states = int(self.state_lengths[:, row].max())
        return max(of_states, self.kv.earliest(row)) if isinstance(self.kv, WindowedCache) else of_states

    def copy_row_(self, row: int, other: Any, other_row: int, length: int) -> None:
        """Replaces sequence `row` by the first `length` tokens of a sequence of another cache, as that of the KV cache.

        Raises:
            ValueError: a cache with other states, or a length that the other's states cannot go back to.
        """
        op = "cache.HybridCache.copy_row_"
        check(getattr(other, "shapes", None) == self.shapes, op, "other", "have the same states", "others")
        if self.device.type == "cpu":
            low = other.earliest(other_row)
            check(length == 0 or low <= length, op, "length", f"be 0 or at least {low}", length)
        self.kv.copy_row_(row, other.kv, other_row, length)
        self._copy_states(row, other, other_row)

    def move_row_(self, row: int, other: HybridCache, other_row: int, length: int) -> None:
        """Takes over a sequence of `length` tokens from another cache on the same pool, with its pages."""
        self.kv.move_row_(row, other.kv, other_row, length)  # type: ignore[union-attr]
        self._copy_states(row, other, other_row)
        other.idle_row_(other_row)

    def save_states(self, row: int) -> SavedStates:
        """A copy of the states of a sequence, and of the rows that have not gone into them. Reads the device."""
        seen = self.state_lengths[:, row].clone()
        index = self.pending_index[row, : int(self.lengths[row] - seen.min())]
        tensors = [
            tensor
            for slots in self.states.values()
            for tensor in (slots.state[row].clone(), *(rows[row].index_select(0, index) for rows in slots.pending))
        ]
        return SavedStates(int(seen.max()), seen, tensors, len(index))

    def load_states_(self, row: int, saved: SavedStates) -> None:
        """Gives a sequence, whose length is from `saved.earliest` on, the states of another of a cache of this model."""
        self._reserve_pending(saved.pending)
        tensors = iter(saved.tensors)
        for slots in self.states.values():
            slots.state[row].copy_(next(tensors))
            for rows in slots.pending:
                pending = next(tensors)
                rows[row, : len(pending)] = pending
        self.state_lengths[:, row].copy_(saved.lengths)
        self.pending_index[row].copy_(torch.arange(self.pending, device=self.device))

    def _copy_states(self, row: int, other: HybridCache, other_row: int) -> None:
        self._reserve_pending(other.pending)
        for name, slots in self.states.items():
            source_slots = other.states[name]
            slots.state[row].copy_(source_slots.state[other_row])
            for target, source in zip(slots.pending, source_slots.pending, strict=True):
                target[row, : other.pending].copy_(source[other_row])
        self.state_lengths[:, row].copy_(other.state_lengths[:, other_row])
        self.pending_index[row, : other.pending].copy_(other.pending_index[other_row])

    def reset_(self) -> None:
        """Empties every sequence."""
        self.trim_(0)
