"""Masks of transformers as tile plans.

transformers calls a mask function once per forward and kind of layer, and passes the result to every layer. Its own
code reads only the mask's shape, so the mask is a tensor without storage that carries a plan; None means a forward over
its own tokens that is causal if its layers say so, as for sdpa.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from pdkernels import masks
from pdkernels.masks import TilePlan

TILE = 64
_ROWS = 1024  # rows of a dense mask held at a time
_TAKES_LENGTHS = "q_length" in inspect.signature(sdpa_mask).parameters  # 4.57 takes positions instead


class MaskIsPlan(NotImplementedError):
    """A model reads the values of its mask, which has no storage."""


class PlanMask(Tensor):
    """A bool mask ``(batch, 1, rows, keys)`` without storage.

    With a `plan` it is the mask of the plan. Without one, row i is key ``offset + i`` and attends to all
    keys up to itself, from ``starts[:, i]`` on if there are `starts` ``(batch, rows)``. With a `step`, the step computes attention in every layer (`WrappedModel`): models pass on a
    four-dimensional mask even if their layers drop other arguments.
    """

    plan: TilePlan | None
    offset: Tensor | int
    starts: Tensor | None = None
    step: Any = None
    rule: Callable[..., Any] | None = None

    @staticmethod
    def __new__(
        cls, batch: int, rows: int, keys: int, offset: Tensor | int, plan: TilePlan | None, device: torch.device
    ) -> PlanMask:
        self = torch.Tensor._make_wrapper_subclass(cls, (batch, 1, rows, keys), dtype=torch.bool, device=device)
        # A static cache moves its offset in place before attention runs.
        self.offset = offset.clone() if isinstance(offset, Tensor) else offset
        self.plan = plan
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._opname in ("contiguous", "clone", "_to_copy", "to"):
            return args[0]
        if func._opname in ("detach", "alias"):  # a view, as which PyTorch takes no tensor twice
            mask, (batch, _, rows, keys) = args[0], args[0].shape
            copied = PlanMask(batch, rows, keys, mask.offset, mask.plan, mask.device)
            copied.__dict__.update(mask.__dict__)
            return copied
        raise MaskIsPlan(
            f'attn_implementation="pdkernels" keeps masks as tile plans, so {func} has no pairs to work on. '
            'Use attn_implementation="sdpa" for a model that computes with its mask.'
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PlanMask({tuple(self.shape)}, {'causal' if self.plan is None else self.plan})"


@lru_cache(maxsize=64)
def causal_plan(rows: int, keys: int, device: torch.device) -> TilePlan:
    """A causal plan for the last `rows` of `keys` tokens."""
    return masks.causal(keys)[keys - rows :].plan(TILE, TILE, device)


@lru_cache(maxsize=64)
def full_plan(rows: int, keys: int, device: torch.device) -> TilePlan:
    """A plan in which all rows attend to all keys."""
    return masks.full(rows, keys).plan(TILE, TILE, device)


def plan_of(visible: Callable[[int, int], Tensor], rows: int, keys: int) -> TilePlan:
    """A plan of ``visible(first, last)`` ``(batch, last - first, keys)``, bool, evaluated for a few rows at a time.

    Sequences with equal masks share a plan; others get a stacked one.
    """
    columns = -(-keys // TILE)
    full: list[Tensor] = []
    owners: list[Tensor] = []
    contents: list[Tensor] = []
    for first in range(0, rows, _ROWS):
        visible_rows = visible(first, min(first + _ROWS, rows))
        tall = -(-visible_rows.shape[1] // TILE)
        padded = F.pad(visible_rows, (0, columns * TILE - keys, 0, tall * TILE - visible_rows.shape[1]))
        tiles = padded.unflatten(1, (tall, TILE)).unflatten(3, (columns, TILE)).transpose(2, 3)
        any_visible, all_visible = tiles.flatten(3).any(-1), tiles.flatten(3).all(-1)
        partial = (any_visible & ~all_visible).nonzero()
        full.append(all_visible)
        contents.append(tiles[partial[:, 0], partial[:, 1], partial[:, 2]])
        owners.append(partial + torch.tensor([0, first // TILE, 0], device=partial.device))
    wholes, owner, content = torch.cat(full, 1), torch.cat(owners), torch.cat(contents)
    plans = []
    for sequence in range(len(wholes)):
        is_owner = owner[:, 0] == sequence
        plans.append(
            TilePlan.from_tiles(
                wholes[sequence], (owner[is_owner, 1], owner[is_owner, 2]), content[is_owner], rows, keys
            )
        )
    return plans[0] if len(plans) == 1 else TilePlan.stack(plans)


def _starts(seen: Tensor, offset: int) -> Tensor | None:
    """The first key that each row ``(batch, rows, keys)`` sees, if it sees all from there to itself: row i is key
    ``offset + i``."""
    first = seen.to(torch.uint8).argmax(-1)
    keys = torch.arange(seen.shape[2], device=seen.device)
    rows_at = torch.arange(offset, offset + seen.shape[1], device=seen.device)
    run = (keys >= first[..., None]) & (keys <= rows_at[:, None])
    return first if torch.equal(run, seen) else None


def plan_after(starts: Tensor, offset: int, keys: int) -> TilePlan:
    """The plan of rows that see all from `starts` to themselves: row i is key ``offset + i``."""
    key, rows_at = (torch.arange(first, keys, device=starts.device) for first in (0, offset))

    def visible(first: int, last: int) -> Tensor:
        return (key >= starts[:, first:last, None]) & (key <= rows_at[first:last, None])

    return plan_of(visible, starts.shape[1], keys)


_ASKED: ContextVar[list[Any] | None] = ContextVar("asked", default=None)


@contextmanager
def asked_masks(rules: list[Any]) -> Iterator[None]:
    """Adds to `rules` the layers and the masks by which they attend in this thread: functions of batch, head, row and
    key."""
    token = _ASKED.set(rules)
    try:
        yield
    finally:
        _ASKED.reset(token)


def note_rule(layer: int | None, mask: PlanMask) -> None:
    """Called with the mask of a layer that has a `rule`."""
    if (rules := _ASKED.get()) is not None:
        rules.append((layer, mask.rule))


def mask_function(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: Tensor | int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Tensor | None:
    """Called by `AttentionMaskInterface`. Padding, windows, packed texts and other rules become a plan; None: what the
    layer's `is_causal` says, no cache."""
    positions = rest.get("cache_position")
    if positions is not None:
        q_length, q_offset, device = len(positions), positions[0], positions.device
    assert q_length is not None
    device = torch.device(device)
    compiling = torch.compiler.is_compiling()

    def dense(first: int, last: int) -> Tensor:
        common = {"kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask}
        common |= {"allow_is_causal_skip": False, "use_vmap": use_vmap}
        if _TAKES_LENGTHS:
            shown: Tensor = sdpa_mask(batch_size, last - first, kv_length, q_offset + first, device=device, **common)
        else:
            rows = torch.arange(first, last, device=device) + q_offset
            shown = sdpa_mask(batch_size, rows, kv_length, **common)
        return shown.expand(batch_size, -1, -1, -1)

    padding = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    simple = mask_function is causal_mask_function and kv_offset == 0
    if simple and (padding is None or (not compiling and bool(padding.all()))):
        causal = isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length
        causal = causal and rest.get("allow_is_causal_skip", True)  # False: the model computes with its mask
        return None if causal else PlanMask(batch_size, q_length, kv_length, q_offset, None, device)
    if compiling:  # a plan depends on values, which a traced graph does not have
        return dense(0, q_length)
    first = dense(0, min(q_length, _ROWS))
    if (offset := int(q_offset) - kv_offset) > 0 and q_length <= _ROWS:
        starts = _starts(first[:, 0], offset)
        if starts is not None:
            mask = PlanMask(batch_size, q_length, kv_length, offset, None, device)
            mask.starts = starts
            return mask
    # Sequences differ only by padding, packing and blocks.
    alike = batch_size == 1 or (q_length <= _ROWS and bool((first == first[:1]).all()))
    plan = plan_of(lambda a, b: (dense(a, b) if a else first)[: 1 if alike else None, 0], q_length, kv_length)
    mask = PlanMask(batch_size, q_length, kv_length, offset, plan, device)
    if _ASKED.get() is not None:
        mask.rule = mask_function
    return mask
