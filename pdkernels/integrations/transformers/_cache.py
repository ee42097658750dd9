"""Our KV caches as a cache of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from pdkernels import _memory
from pdkernels._attention import autocast_dtype, halves
from pdkernels._validation import (  # fmt: skip
    check,
    check_choice,
    check_fits_memory,
    check_type,
    fail,
    integer,
    sentence,
)
from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.cache.windowed import BLOCK
from pdkernels.integrations.transformers._experts import NAME
from pdkernels.integrations.transformers._rows import PagedRows, Pages, narrowed, widened

try:  # of transformers 5.6
    from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

    _STATES: tuple[Any, ...] = (LinearAttentionLayer,)
    _BOTH: tuple[Any, ...] = (LinearAttentionAndFullAttentionLayer,)
except ImportError:
    _STATES = _BOTH = ()

OP = "PdCache"
ANOTHER = "Use transformers' own cache."


class PdCache(Cache):  # type: ignore[misc]
    """A KV cache of transformers that is written in place: no step copies cached rows.

    It holds what a `DynamicCache` holds, padding included, in memory that is allocated once. Rows left by a rejected
    draft are dropped by `crop`, which only changes numbers and takes its argument as `DynamicCache.crop` of the
    installed transformers does. Layers with a window keep the last rows: the window, `drafts` more, and up to 127 in
    front, so that attention reads blocks of the same positions; rows have the bits that they have if all are kept. States of recurrent layers are kept by transformers' own layers; those of convolutions
    can be cropped after `activate_past_recording`.

    Any attention implementation may read it. "pdkernels" reads pages in place, others get them gathered.

    Args:
        config: of the model.
        batch: sequences, including beams and returned sequences.
        capacity: the maximum number of tokens of a sequence, including the prompt and its padding.
        kind: "contiguous", or "paged", which assigns memory page by page, for texts without padding but on the left.
        page_size: tokens of a page.
        drafts: tokens by which `crop` goes back in layers with windows, at most, from the longest that the text has been.
        dtype, device: of the rows; None: those of the first forward, under autocast its dtype. Attention reads rows of another
            dtype in that of the model, which copies them in every forward.

    Raises:
        ValueError: a size below 1, an unknown kind; in a forward: more tokens than `capacity`, another batch, layers
            with other heads; in `crop`: a length before what is kept.
        NotImplementedError: a model with layers that keep something else; in `crop`: one whose recurrent layers cannot
            go back; offloading.

    Example:
        >>> import inspect, torch, transformers
        >>> from pdkernels.integrations.transformers import PdCache, register
        >>> register()
        >>> config = transformers.Qwen3Config(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        ...     num_key_value_heads=1, head_dim=16, intermediate_size=48, attn_implementation="pdkernels")
        >>> model = transformers.Qwen3ForCausalLM(config).eval()
        >>> prompt = torch.tensor([[1, 2, 3]])
        >>> name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
        >>> a = model.generate(prompt, max_new_tokens=5, do_sample=False, **{name: PdCache(config, batch=1, capacity=16)})
        >>> torch.equal(a, model.generate(prompt, max_new_tokens=5, do_sample=False))
        True
    """

    def __init__(
        self,
        config: Any,
        batch: int,
        capacity: int,
        *,
        kind: Literal["contiguous", "paged"] = "contiguous",
        page_size: int = 16,
        drafts: int = 64,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        check_type(hasattr(config, "num_hidden_layers"), OP, "config", "be that of a model", type(config).__name__)
        check_choice(OP, "kind", kind, ("contiguous", "paged"))
        self.batch, self.capacity = integer(OP, "batch", batch, 1), integer(OP, "capacity", capacity, 1)
        self.page_size, self.drafts = integer(OP, "page_size", page_size, 1), integer(OP, "drafts", drafts, 0)
        floating = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        check_type(floating, OP, "dtype", "be floating-point: its layers read numbers", dtype)
        self.kind, self._dtype, self._device, self._config = kind, dtype, device, config
        self.storage: ContiguousKVCache | PagedKVCache | None = None
        self._written = self._reserved = 0  # the number in `storage.lengths`, and of the tokens that have pages
        super().__init__(layers=_layers(self, config))

    def _allocate(self, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        layers = sum(isinstance(layer, PdLayer) and not layer.is_sliding for layer in self.layers)
        if self.kind == "contiguous":
            self.storage = ContiguousKVCache(
                layers, self.batch, self.capacity, kv_heads, head_dim, dtype=dtype, device=device
            )
            return
        pages = -(-self.capacity // self.page_size)
        self.storage = PagedKVCache(
            layers, self.batch, self.batch * pages, self.page_size, kv_heads, head_dim,
            max_pages_per_sequence=pages, dtype=dtype, device=device,
        )  # fmt: skip

    def ready(self, key: Tensor, value: Tensor) -> ContiguousKVCache | PagedKVCache:
        """The memory of all layers, for rows like these ``(batch, kv_heads, rows, head_dim)``."""
        heads, dtype, device = self.sizes(key, value)
        if self.storage is None:
            with torch.inference_mode(False):  # later forwards may run without it
                self._allocate(*heads, dtype, device)
        storage = self.storage
        assert storage is not None
        check_alike((storage.kv_heads, storage.head_dim), heads, storage.device, key.device)
        return storage

    def sizes(self, key: Tensor, value: Tensor) -> tuple[tuple[int, int], torch.dtype, torch.device]:
        """The heads and their size, dtype and device of memory for rows like these."""
        batch, kv_heads = key.shape[:2]
        check(batch == self.batch, OP, "batch", "be that of the model's inputs", f"{self.batch} for {batch}")
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            fault = "rows that are written in place cannot require a gradient"
            raise NotImplementedError(sentence(OP, fault, "Call the model under torch.no_grad()."))
        place = key.device if self._device is None else torch.device(self._device)
        return (kv_heads, max(key.shape[3], value.shape[3])), self._dtype or self.dtype_for(key), place

    def dtype_for(self, key: Tensor) -> torch.dtype:
        """The dtype in which attention reads rows like these: under autocast PyTorch's and ours convert them."""
        converts = getattr(self._config, "_attn_implementation", None) in (NAME, "sdpa")
        return autocast_dtype(key) if converts else key.dtype

    def check_room(self, length: int) -> None:
        """Refuses a text of so many tokens, if it is too long."""
        remedy = "Make it for all tokens of the generation, padding included."
        check(length <= self.capacity, OP, "capacity", f"be at least {length}", self.capacity, remedy)

    def write(self, layer: int, first: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores rows of one layer from position `first` on; returns all its keys and values for attention."""
        storage, length = self.ready(key, value), first + key.shape[2]
        self.check_room(length)
        if isinstance(storage, PagedKVCache) and length > self._reserved:
            storage.reserve_(length)
            self._reserved = length
        if self._written != first:
            storage.lengths.fill_(first)
            self._written = first
        k, v = (widened(rows, storage.head_dim).transpose(1, 2).to(storage.dtype) for rows in (key, value))
        storage.append_(layer, k, v)
        sides = self.read(layer, length, (key.shape[3], value.shape[3]), (k, v))
        dtype = self.dtype_for(key)
        if (
            isinstance(sides[0], PagedRows)
            and getattr(self._config, "_attn_implementation", None) == NAME
            and halves(dtype, k.dtype)
        ):
            return sides  # which our attention reads as they are
        return sides[0].to(dtype), sides[1].to(dtype)

    def read(
        self, layer: int, length: int, widths: tuple[int, int], new: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of a layer: views, or gathered from pages if something reads them."""
        storage = self.storage
        assert storage is not None
        if isinstance(storage, PagedKVCache):
            none = new or (storage.k.new_empty(self.batch, 0, storage.kv_heads, storage.head_dim),) * 2
            first = length - none[0].shape[1]
            pages = Pages(storage.k[layer], storage.v[layer], storage.block_table, first, *none)
            rows = [PagedRows(pages, side, storage.head_dim) for side in (0, 1)]
            # The compiled code of FlexAttention takes no subclass of a tensor.
            late = new and getattr(self._config, "_attn_implementation", None) != "flex_attention"
            sides = rows if late else [side.gathered() for side in rows]
        else:
            sides = [side.transpose(1, 2) for side in storage.layer(layer, length)]
        return narrowed(sides[0], widths[0]), narrowed(sides[1], widths[1])

    def crop(self, tokens_to_remove: int) -> None:
        """Drops tokens as `DynamicCache.crop` does: a negative number drops that many. What 0 and a positive number
        mean depends on the version of transformers: a length in older ones, in newer ones 0 drops none and positive
        numbers are refused.
        """
        _crop(self.layers, tokens_to_remove)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can drop tokens."""
        return all(_goes_back(layer) for layer in self.layers)

    @property
    def is_linear(self) -> list[bool]:
        """Which layers have a state and no keys and values."""
        return [isinstance(layer, _STATES) and not isinstance(layer, PdLayer) for layer in self.layers]

    __iter__ = DynamicCache.__iter__


class PdLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `PdCache`, with the interface of transformers."""

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, owner: PdCache, slot: int) -> None:
        self.owner, self.slot, self.length = owner, slot, 0
        self.widths = (0, 0)
        self.is_initialized = False

    batch_size = max_batch_size = property(lambda self: self.owner.batch)
    max_cache_len = property(lambda self: self.owner.capacity)
    keys = property(lambda self: self._rows(0))
    values = property(lambda self: self._rows(1))

    def _rows(self, side: int) -> Tensor | None:
        return self.owner.read(self.slot, self.length, self.widths)[side] if self.is_initialized else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states  # 4.57 passes one tensor
        self.owner.ready(key_states, value_states)
        self.widths = (key_states.shape[3], value_states.shape[3])  # of `early_initialization`, one for both
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.widths = (key_states.shape[3], value_states.shape[3])
        rows = self.owner.write(self.slot, self.length, key_states, value_states)
        self.length += key_states.shape[2]
        return rows

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        rows = query_length if isinstance(query_length, int) else len(query_length)  # 4.57 passes positions
        return self.length + rows, 0

    def get_seq_length(self, *_: Any) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        _crop([self], tokens_to_remove)

    def reset(self) -> None:
        """Drops all tokens but keeps the memory."""
        self.length, self.is_initialized = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i continues from sequence ``beam_idx[i]``."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these sequences; their number must not change."""
        storage = self.owner.storage
        if storage is None or not self.length:
            return
        chosen = self._chosen(indices, storage.device)
        if isinstance(storage, PagedKVCache):
            fail(OP, "kind", "be 'contiguous' for beams", "'paged'")
        for rows in (storage.k[self.slot], storage.v[self.slot]):
            rows[:, : self.length] = rows[chosen, : self.length]

    def _chosen(self, indices: Tensor, device: torch.device) -> Tensor:
        batch = self.owner.batch
        chosen = torch.arange(batch, device=device)[indices]
        same = tuple(chosen.shape) == (batch,)
        check(same, OP, "batch", "stay the same when sequences are selected", f"{batch} -> {len(chosen)}")
        return chosen

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not possible in place."""
        if self.length:
            batch, remedy = self.owner.batch, f"Make it for {self.owner.batch * repeats}."
            fail(OP, "batch", "count the repeated sequences from the start", batch, remedy)

    def offload(self) -> None:
        """Not possible: the memory belongs to all layers."""
        fault = "its rows cannot be offloaded: the memory belongs to all layers"
        raise NotImplementedError(f"{OP}: {fault}. {ANOTHER}")

    prefetch = offload


class PdWindow(PdLayer):
    """A layer with a window, which keeps the last rows one after the other, from position `base` on."""

    is_sliding = True

    def __init__(self, owner: PdCache, window: int) -> None:
        super().__init__(owner, -1)
        self.window, self.base = window, 0
        self.room = room_of(window, owner.drafts)
        self._sides: list[Tensor] = []  # (batch, room, kv_heads, head_dim) each

    def _first(self, length: int, back: int = 0) -> int:
        """The first position that rows from `length` - `back` on read, where a block of attention begins."""
        return max(self.base, (length - back - self.window + 1) // BLOCK * BLOCK)

    def _rows(self, side: int) -> Tensor | None:
        if not self.is_initialized:
            return None
        rows = self._sides[side][:, self._first(self.length) - self.base : self.length - self.base]
        return narrowed(rows.transpose(1, 2), self.widths[side])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        (kv_heads, width), dtype, device = self.owner.sizes(key_states, value_states)
        shape = (self.owner.batch, self.room, kv_heads, width)
        if not self._sides:
            nbytes = 2 * dtype.itemsize * torch.Size(shape).numel()
            check_fits_memory(OP, "drafts", self.owner.drafts, nbytes, device)
            with torch.inference_mode(False):  # as in `PdCache.ready`
                self._sides = [_memory.zeros(shape, dtype, device) for _ in range(2)]
        self.widths = (key_states.shape[3], value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        heads, kept_heads = self.owner.sizes(key_states, value_states)[0], tuple(self._sides[0].shape[2:])
        check_alike(kept_heads, heads, self._sides[0].device, key_states.device)
        self.widths = (key_states.shape[3], value_states.shape[3])
        first, length = self._first(self.length), self.length + key_states.shape[2]
        self.owner.check_room(length)
        # The first of the kept rows that stay if the new ones fit after them, and otherwise.
        base, end = self._first(self.length, self.owner.drafts), self._first(length, self.owner.drafts)
        fits, moves = length - base <= self.room, length - self.base > self.room
        seen = []
        for side, (kept, new) in enumerate(zip(self._sides, (key_states, value_states), strict=True)):
            rows = widened(new, kept.shape[3]).transpose(1, 2).to(kept.dtype)
            if fits:
                if moves:
                    kept[:, : self.length - base] = kept[:, base - self.base : self.length - self.base].clone()
                after = base if moves else self.base
                kept[:, self.length - after : length - after] = rows
                joined = kept[:, first - after : length - after]
            else:
                joined = torch.cat([kept[:, : self.length - self.base], rows], 1)
                kept[:, : length - end] = joined[:, end - self.base :]
                joined = joined[:, first - self.base :]
            seen.append(narrowed(joined.transpose(1, 2), self.widths[side]).to(self.owner.dtype_for(key_states)))
        self.base = end if not fits else base if moves else self.base
        self.length = length
        return seen[0], seen[1]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        keys, _ = PdLayer.get_mask_sizes(self, query_length)
        first = self._first(self.length)
        return keys - first, first

    @property
    def earliest(self) -> int:
        """The shortest length but 0 that `crop` can leave."""
        return self.base + self.window - 1 if self.base else 0

    def reset(self) -> None:
        super().reset()
        self.base = 0

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.length:
            chosen = self._chosen(indices, self._sides[0].device)
            for kept in self._sides:
                kept[:, : self.length - self.base] = kept[chosen, : self.length - self.base]


class PdBoth(PdLayer, *_STATES):  # type: ignore[misc]
    """A layer with attention and a recurrent state side by side (Falcon-H1). transformers keeps the state."""

    def __init__(self, owner: PdCache, slot: int, theirs: Any) -> None:
        self.__dict__ |= {name: held for name, held in vars(theirs).items() if name not in ("keys", "values")}
        PdLayer.__init__(self, owner, slot)

    is_croppable = property(lambda self: _goes_back(self))

    def lazy_initialization(self, *keys: Any, **states: Any) -> None:
        if states:
            _STATES[0].lazy_initialization(self, **states)
        else:
            PdLayer.lazy_initialization(self, *keys)

    def reset(self) -> None:
        PdLayer.reset(self)
        _STATES[0].reset(self)

    def batch_select_indices(self, indices: Tensor) -> None:
        PdLayer.batch_select_indices(self, indices)
        _STATES[0].reorder_cache(self, indices)


def _layers(owner: PdCache, config: Any) -> list[Any]:
    """The layers of a `DynamicCache`, with ours in the place of those for keys and values. Others keep states of a
    fixed size, or nothing."""
    dynamic = DynamicCache(config=config).layers or [DynamicLayer() for _ in range(config.num_hidden_layers)]
    kinds = getattr(config, "layer_types", None) or ()
    recurrent = any(kind in ("conv", "linear_attention", "hybrid") for kind in kinds)
    if not _STATES and (recurrent or any(name.startswith("mamba_") for name in vars(config))):
        raise NotImplementedError(f"{OP}: layers with a state need transformers 5.6 or newer. {ANOTHER}")
    layers: list[Any] = []
    slots = 0
    for layer in dynamic:
        exact = type(layer)
        if exact is DynamicSlidingWindowLayer and room_of(layer.sliding_window, owner.drafts) < owner.capacity:
            layer = PdWindow(owner, layer.sliding_window)
        elif exact in (DynamicLayer, DynamicSlidingWindowLayer):
            layer = PdLayer(owner, slots)
        elif exact in _BOTH:
            layer = PdBoth(owner, slots, layer)
        elif exact not in _STATES and exact.__name__ != "DummyLayer":
            raise NotImplementedError(f"{OP}: layers of {exact.__name__} are not supported. {ANOTHER}")
        slots += isinstance(layer, PdLayer) and not layer.is_sliding
        layers.append(layer)
    return layers


def _crop(layers: Sequence[Any], tokens_to_remove: int) -> None:
    number = integer(OP, "tokens_to_remove", tokens_to_remove, -(2**63))
    initialized = [layer for layer in layers if isinstance(layer, PdLayer) and layer.is_initialized]
    after = [_after_crop(layer.length, number) for layer in initialized]
    back = max((layer.length - length for layer, length in zip(initialized, after)), default=max(0, -number))
    longest = max((layer.length for layer in initialized), default=None)
    states = [layer for layer in layers if isinstance(layer, _STATES)]
    if back and not all(_goes_back(layer) and _has_past(layer, back, longest) for layer in states):
        fault = (
            "the states of recurrent layers cannot go back to fewer tokens; use pdkernels.decoding.generate, or reset()"
        )
        hint = "; convolutions alone can, after activate_past_recording() before the forward" if _STATES else ""
        raise NotImplementedError(f"{OP}: {fault}{hint}.")
    for layer, length in zip(initialized, after):
        if isinstance(layer, PdWindow):
            expectation = f"leave 0 tokens or at least {layer.earliest}, since rows before its windows are gone"
            remedy = "Make it with more drafts, or reset() it and run the text again."
            check(length in (0, layer.length) or length >= layer.earliest, OP, "tokens_to_remove", expectation, length, remedy)  # fmt: skip
    for layer, length in zip(initialized, after):
        layer.length = length
        if isinstance(layer, PdWindow) and not length:
            layer.base = 0
    for layer in states:
        if getattr(layer, "record_past", False) and _any(layer.is_conv_states_initialized):
            _STATES[0].crop(layer, -back)


@lru_cache(maxsize=16)
def _after_crop(length: int, number: int) -> int:
    """The length after ``crop(number)``. Its meaning has changed in transformers, so a layer of the installed version
    says it."""
    check(-number <= length, OP, "tokens_to_remove", f"keep some of the {length} cached tokens", number)
    layer = DynamicLayer()
    layer.keys = layer.values = torch.empty(1, 1, 1, 1, device="cpu").expand(1, 1, length, 1)
    layer.is_initialized = True
    layer.crop(number)
    return int(layer.keys.shape[-2])


def _any(flags: Any) -> bool:
    """Of one state, or of several."""
    return any(flags.values()) if isinstance(flags, dict) else bool(flags)


def _goes_back(layer: Any) -> bool:
    """Whether a layer keeps what `crop` needs: no recurrent state, and convolutions whose past can be recorded."""
    if not isinstance(layer, _STATES):
        return True
    started = _any(layer.is_conv_states_initialized) and not _any(layer.is_recurrent_states_initialized)
    return started and hasattr(layer, "record_past")


def _has_past(layer: Any, back: int, length: int | None) -> bool:
    """Whether the convolutions of a layer still have the `back` tokens before the ones that they need, or the whole
    text."""
    needed = [size + back if length is None else min(size + back, length) for size in layer.conv_kernel_size.values()]
    return layer.record_past and all(state.shape[-1] >= n for state, n in zip(layer.conv_states.values(), needed))


def check_alike(have: Any, heads: tuple[int, int], place: torch.device, device: torch.device) -> None:
    """Refuses rows with other heads than those that are there, or from another device."""
    expectation = "have the same key and value heads in all layers"
    check(have == heads, OP, "config", expectation, f"{have} and {heads}", ANOTHER)
    check(device == place, OP, "device", f"be {place} for all layers", device, ANOTHER)


def room_of(window: int, drafts: int) -> int:
    """Rows that a layer with a window has room for: those that it keeps, and some before they move to the front."""
    return window - 1 + drafts + BLOCK - 1 + max(BLOCK, drafts)


def windowed(config: Any) -> int | None:
    """The shortest sliding window of a model's layers; None: no layer has one."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    return int(window) if kinds is None or "sliding_attention" in kinds else None
