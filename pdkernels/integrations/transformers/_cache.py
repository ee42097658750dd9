"""Our KV caches as a cache of transformers."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from pdkernels._validation import check, check_choice, check_type, fail, integer
from pdkernels.cache import ContiguousKVCache, PagedKVCache

try:  # of transformers 5
    from transformers.cache_utils import DummyLayer, LinearAttentionLayer

    _STATES: tuple[Any, ...] = (LinearAttentionLayer,)
except ImportError:
    _STATES = ()

OP = "PdCache"
PAGES = "_pdkernels_pages"
"""The attribute on the keys of a paged cache that locates the others."""


class Pages(NamedTuple):
    """One layer of a paged cache, before a step."""

    k: Tensor
    v: Tensor
    lengths: Tensor
    block_table: Tensor
    prefix: int


class PdCache(Cache):  # type: ignore[misc]
    """A KV cache of transformers that is written in place: no step copies cached rows.

    It holds what a `DynamicCache` holds, padding included, in memory that is allocated once. Rows left by a rejected draft are
    dropped by `crop`, which only changes a number. States of recurrent layers are kept by transformers' own layers and cannot be cropped.

    Args:
        config: of the model; its layers must not have a sliding window shorter than `capacity`.
        batch: sequences, including beams and returned sequences.
        capacity: the maximum number of tokens of a sequence, including the prompt and its padding.
        kind: "contiguous", or "paged", which assigns memory page by page, for texts without padding.
        page_size: tokens of a page.
        dtype, device: of the rows; None: those of the first forward.

    Raises:
        ValueError: a size below 1, an unknown kind; in a forward: more tokens than `capacity`, another batch.
        NotImplementedError: a model with sliding windows shorter than `capacity`; in `crop`: one with recurrent layers.

    Example:
        >>> import torch, transformers
        >>> from pdkernels.integrations.transformers import PdCache, register
        >>> register()
        >>> config = transformers.Qwen3Config(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        ...     num_key_value_heads=1, head_dim=16, intermediate_size=48, attn_implementation="pdkernels")
        >>> model = transformers.Qwen3ForCausalLM(config).eval()
        >>> prompt = torch.tensor([[1, 2, 3]])
        >>> a = model.generate(prompt, max_new_tokens=5, do_sample=False, past_key_values=PdCache(config, 1, 16))
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
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        check_choice(OP, "kind", kind, ("contiguous", "paged"))
        self.batch, self.capacity = integer(OP, "batch", batch, 1), integer(OP, "capacity", capacity, 1)
        self.page_size = integer(OP, "page_size", page_size, 1)
        floating = dtype is None or dtype.is_floating_point
        check_type(floating, OP, "dtype", "be floating-point: its layers read numbers", dtype)
        window = windowed(config)
        if window is not None and window < capacity:
            raise NotImplementedError(
                f"{OP}: a model with a sliding window of {window} tokens needs a capacity of at most that, got {capacity}. "
                "Use transformers' own cache."
            )
        self.kind, self.seen = kind, 0
        self._dtype, self._device = dtype, device
        self.storage: ContiguousKVCache | PagedKVCache | None = None
        super().__init__(layers=_layers(self, config))
        self._attends = [layer for layer in self.layers if isinstance(layer, PdLayer)]
        self._recurrent = [layer for layer in self.layers if isinstance(layer, _STATES)]

    def _allocate(self, key: Tensor) -> ContiguousKVCache | PagedKVCache:
        layers, kv_heads, head_dim = len(self._attends), key.shape[1], key.shape[3]
        dtype, device = self._dtype or key.dtype, self._device or key.device
        if self.kind == "contiguous":
            return ContiguousKVCache(layers, self.batch, self.capacity, kv_heads, head_dim, dtype=dtype, device=device)
        pages = -(-self.capacity // self.page_size)
        return PagedKVCache(
            layers, self.batch, self.batch * pages, self.page_size, kv_heads, head_dim,
            max_pages_per_sequence=pages, dtype=dtype, device=device,
        )  # fmt: skip

    def store(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Writes the new rows ``(batch, kv_heads, rows, head_dim)`` of one layer; returns the keys and values for attention."""
        batch, _, rows, _ = key.shape
        check(batch == self.batch, OP, "batch", "be that of the model's inputs", f"{self.batch} for {batch}")
        if layer == 0:
            self._started = self.seen
            full = self.seen + rows <= self.capacity
            remedy = "Make it for all tokens of the generation, padding included."
            check(full, OP, "capacity", f"be at least {self.seen + rows}", self.capacity, remedy)
            if self.storage is None:
                self.storage = self._allocate(key)
            if isinstance(self.storage, PagedKVCache):
                self.storage.reserve_([self.seen + rows] * self.batch)
        storage, before = self.storage, self._started
        assert storage is not None
        if layer == 0:
            storage.lengths.fill_(before)
        storage.append_(layer, key.transpose(1, 2), value.transpose(1, 2))
        self.seen = before + rows
        if isinstance(storage, PagedKVCache):
            # Only the new rows: the earlier ones are in pages.
            held = key.view_as(key)
            setattr(
                held, PAGES, Pages(storage.k[layer], storage.v[layer], storage.lengths, storage.block_table, before)
            )
            return held, value
        k, v = storage.layer(layer, self.seen)
        return k.transpose(1, 2), v.transpose(1, 2)

    def crop(self, max_length: int) -> None:
        """Keeps the first `max_length` tokens; a negative number drops that many."""
        check_type(type(max_length) is int, OP, "max_length", "be an int", type(max_length).__name__)
        length = self.seen + max_length if max_length < 0 else min(max_length, self.seen)
        check(length >= 0, OP, "max_length", f"keep some of the {self.seen} cached tokens", max_length)
        if self._recurrent and length < self.seen:
            words = "the states of recurrent layers cannot go back to fewer tokens; use pdkernels.decoding.generate, or reset()"
            raise NotImplementedError(f"{OP}: {words}.")
        self.seen = length

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can drop tokens."""
        return not self._recurrent

    def reset(self) -> None:
        """Drops all tokens but keeps the memory."""
        self.seen = 0
        for layer in self._recurrent:
            _STATES[0].reset(layer)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i continues from sequence ``beam_idx[i]``."""
        self.batch_select_indices(beam_idx)
        for layer in self._recurrent:
            _STATES[0].reorder_cache(layer, beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these sequences; their number must not change."""
        if self.storage is None:
            return
        same = len(indices) == self.batch
        check(same, OP, "batch", "stay the same when sequences are selected", f"{self.batch} -> {len(indices)}")
        if isinstance(self.storage, PagedKVCache):
            fail(OP, "kind", "be 'contiguous' for beams", "'paged'")
        for rows in (self.storage.k, self.storage.v):
            for layer in rows:
                layer[:, : self.seen] = layer[indices.to(layer.device), : self.seen]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not possible in place."""
        fail(
            OP,
            "batch",
            "count the repeated sequences from the start",
            self.batch,
            f"Make it for {self.batch * repeats}.",
        )


class PdLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `PdCache`, with the interface of transformers."""

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, owner: PdCache, index: int) -> None:
        super().__init__()
        self.owner, self.index, self.is_initialized = owner, index, True

    def lazy_initialization(self, *_: Any) -> None:
        """The owner allocates memory for all layers at once."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.owner.store(key_states, value_states, self.index)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        rows = query_length if isinstance(query_length, int) else len(query_length)  # 4.57 passes positions
        return self.owner.seen + rows, 0

    def get_seq_length(self, *_: Any) -> int:
        return self.owner.seen

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length

    def crop(self, max_length: int) -> None:
        if self.index == 0:
            self.owner.crop(max_length)

    def reset(self) -> None:
        self.owner.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.index == 0:
            self.owner.reorder_cache(beam_idx)


class PdBoth(*_STATES, PdLayer):  # type: ignore[misc]
    """A layer with attention and a recurrent state side by side (Falcon-H1). transformers keeps the state."""

    is_compileable = False

    def __init__(self, owner: PdCache, index: int) -> None:
        PdLayer.__init__(self, owner, index)
        for kind in _STATES:
            kind.__init__(self)
        self.is_initialized = True

    def lazy_initialization(self, *keys: Any, **states: Any) -> None:
        """Of the state; the owner allocates memory for keys and values."""
        if states:
            _STATES[0].lazy_initialization(self, **states)

    is_croppable = PdLayer.is_croppable
    reset = PdLayer.reset
    crop = PdLayer.crop
    reorder_cache = PdLayer.reorder_cache
    get_max_length = get_max_cache_shape = PdLayer.get_max_length


def _layers(owner: PdCache, config: Any) -> list[Any]:
    """Layers of ours where there is attention, and transformers' own for states, whose size is fixed."""
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if not _STATES or not any(kind in ("conv", "linear_attention", "hybrid", "hybrid_sliding") for kind in kinds):
        return [PdLayer(owner, layer) for layer in range(config.num_hidden_layers)]
    found: list[Any] = []
    slots = 0
    for kind in kinds:
        if kind == "hybrid_sliding":
            raise NotImplementedError(f"{OP}: layers with a sliding window and a state are not supported.")
        if kind in ("conv", "linear_attention"):
            found.append(_STATES[0]())
        elif kind in ("mlp", "moe"):
            found.append(DummyLayer())
        else:
            found.append((PdBoth if kind == "hybrid" else PdLayer)(owner, slots))
            slots += 1
    return found


def windowed(config: Any) -> int | None:
    """The shortest sliding window of a model's layers; None: no layer has one."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    return int(window) if kinds is None or "sliding_attention" in kinds else None
