"""Checks that a model of transformers gives the same results with our attention and caches as by itself.

The check runs a few tokens, because a config does not describe everything that a class computes: layers with a state
other than keys and values, position biases, scaled logits.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from pdkernels._validation import message
from pdkernels.integrations.transformers._attention import NotOurs
from pdkernels.integrations.transformers._cache import windowed
from pdkernels.integrations.transformers._plans import MaskIsPlan, asked_masks
from pdkernels.integrations.transformers._quantized import is_quantised
from pdkernels.masks import causal, full
from pdkernels.models.architectures.states import States
from pdkernels.models.architectures.windows import Window

OP = "wrap"
UNBOUNDED = 1 << 30
_ANY = "pdkernels.models.from_callable takes any function from tokens to logits."
TOKENS, _PREFIX = 10, (6, 3)  # of the two texts of a proof, and how much of each is cached before its last step
_LONGEST_PROOF = 256  # a window of more tokens is not tried, only read from the mask
# The tolerance of logits, relative to their size. A wrong context changes them by about their size.
_BUDGETS = {torch.float16: 0.05, torch.bfloat16: 0.15}
_EXACT = 1e-3
_QUANTISED = 0.05  # the last bits of a row may change 8-bit codes of it
_FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, NotImplementedError)


class Shape(NamedTuple):
    """The arguments that a model's layers pass to attention."""

    layers: int
    kv_heads: int
    head_dim: int
    attends: tuple[int, ...]


def refuse(expectation: str, actual: str, remedy: str = _ANY, cause: Exception | None = None) -> NoReturn:
    raise NotImplementedError(message(OP, "model", expectation, actual, remedy)) from cause


def reason(error: Exception) -> str:
    """The kind and the first words of an error."""
    text = " ".join(str(error).split()).removeprefix("pdkernels.")
    return f"{type(error).__name__}: {text if len(text) <= 120 else text[:117] + '...'}".rstrip(".: ")


class _Seen:
    """Replaces attention and records its calls."""

    def __init__(self) -> None:
        self.calls: list[int | None] = []
        self.shapes: set[tuple[int, int]] = set()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int | None, scale: float | None, sinks: Any = None
    ) -> Tensor:
        self.calls.append(layer)
        self.shapes.add((k.shape[2], k.shape[3]))  # `attention` has made values as wide as keys
        return q.new_zeros(*q.shape[:3], v.shape[3])


def shape_of(
    name: str,
    config: Any,
    run: Callable[[Tensor, Tensor, Any], Tensor],
    device: torch.device,
    states: States | None = None,
    scans: str = "",
) -> Shape:
    """Runs one token; refuses layers whose attention is not ours, exactly once each, or whose `states` are not ours:
    those of `scans`."""
    seen, token = _Seen(), torch.zeros(1, 1, dtype=torch.int64, device=device)
    cause: Exception | None = None
    try:
        with torch.no_grad():
            run(token, token, seen)
    except _FAULTS as error:
        cause = error
    layers = getattr(config, "num_hidden_layers", None) or len(set(seen.calls))
    expectation = f"take the attention of its {layers} layers from AttentionInterface"
    if isinstance(cause, NotOurs):
        refuse("have attention that our kernels compute", f"{name} with {cause.what}", cause=cause)
    if isinstance(cause, MaskIsPlan) or (cause is None and not seen.calls):
        refuse(expectation, f"{name}, which computes its own", cause=cause)
    if cause is not None:
        refuse("run on given tokens, positions and masks alone", f"{name} ({reason(cause)})", cause=cause)
    numbers = [call for call in seen.calls if call is not None]
    if len(numbers) < len(seen.calls):
        refuse("number its layers (layer_idx)", name)
    kinds = getattr(config, "layer_types", None) or [None] * layers
    recurrent = {layer for layer, _ in states.shapes} if states is not None else set()
    neither = {layer for layer, kind in enumerate(kinds) if states is not None and kind in ("mlp", "moe")}
    absent_layers = sorted(set(range(layers)) - set(numbers) - recurrent - neither)
    if absent_layers:
        keeping = (
            f"the state of {scans}, which has a decay for every channel"
            if scans
            else "another state than keys and values or none"
        )
        refuse(expectation, f"{name} with {len(absent_layers)} that do not, and keep {keeping}")
    if len(numbers) != len(set(numbers)) or max(numbers) >= layers:
        refuse(f"{expectation}, once each", f"{name} with {len(seen.calls)} calls")
    if len(seen.shapes) > 1:
        refuse("have the same key and value heads in every layer", f"{name} with {len(seen.shapes)} kinds")
    return Shape(layers, *seen.shapes.pop(), tuple(sorted(numbers)))


class Reach(NamedTuple):
    """How far back the layers of a model see, and how long its texts may be."""

    positions: int
    windows: dict[int, Window]
    """Of the layers that have one shorter than that, by their numbers."""


def reach_of(
    name: str, config: Any, run: Callable[[Tensor], Any], tokens: Tensor, positions: int, windows: bool = True
) -> Reach:
    """What the masks of the layers hide, if `run` runs them on tokens alone. Texts end where positions are ambiguous, and where a row would see something
    else than all earlier tokens or a window of them; without `windows` also where one begins to hide some."""
    for rule in _rotary_rules(config):
        # Phi-MoE multiplies by one of two numbers, by the longest text of a forward, under any rule.
        if rule.get("rope_type", rule.get("type")) in ("dynamic", "longrope") or "long_mscale" in rule:
            original = rule.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or positions
            positions = min(positions, int(original))
    if getattr(
        config, "attn_temperature_tuning", False
    ):  # Llama 4 scales queries by their place in the rows of a forward
        positions = min(positions, int(getattr(config, "floor_scale", positions)))
    rules: list[tuple[int | None, Any]] = []
    try:
        with torch.no_grad(), asked_masks(rules):
            run(tokens)
    except _FAULTS:
        rules = []  # our own masks still run; the comparison below decides
    windows_of: dict[int, Window] = {}
    for layer, visible in rules:
        longest = min(positions, 1 << 20)
        first_hidden = _sees_all(visible, longest, tokens.device, positions)
        if first_hidden >= positions:
            continue
        window = _window_of(visible, first_hidden, longest, tokens.device) if windows and layer is not None else None
        if window is None or layer is None:
            positions = min(positions, first_hidden)
        else:
            windows_of[layer] = window
    for layer_kinds, size in _stated(config):
        # Layers that state a window which no mask of theirs has may compute it themselves.
        hidden = {window.size for window in windows_of.values()}
        if size < positions and not (size in hidden and layer_kinds <= windows_of.keys()):
            positions = size
    if positions < 1:
        refuse("have rows that see what precedes them", name)
    return Reach(positions, {layer: window for layer, window in windows_of.items() if window.size < positions})


def _stated(config: Any) -> Iterator[tuple[set[int], int]]:
    """The windows of a configuration, and the layers that it names for them."""
    kinds = getattr(config, "layer_types", None)
    chunk = getattr(config, "attention_chunk_size", None) if kinds is None or "chunked_attention" in kinds else None
    for kind, size in (("sliding_attention", windowed(config)), ("chunked_attention", chunk)):
        if size is not None:
            yield {layer for layer, other in enumerate(kinds or ()) if other == kind}, int(size)
    special = {layer for layer, kind in enumerate(kinds or ()) if "sliding" in kind and kind != "sliding_attention"}
    if special and getattr(config, "sliding_window", None):  # Unlimited-OCR: its cache hides what no mask does
        yield special, int(config.sliding_window)


def _window_of(visible: Callable[..., Tensor], size: int, longest: int, device: torch.device) -> Window | None:
    """The window that hides what `visible` hides from row `size` on; None: it is another rule."""
    rows = {size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 5 * size // 2, 3 * size, longest - 1}
    for window in (Window(size), Window(size, chunked=True)) if size else ():
        if all(_same(visible, window, row, device) for row in sorted(rows) if size - 1 <= row < longest):
            return window
    return None


def _same(visible: Callable[..., Tensor], window: Window, row: int, device: torch.device) -> bool:
    keys = torch.arange(row + 1, device=device)
    zero = torch.zeros_like(keys)
    visible_keys = torch.as_tensor(visible(zero, zero, zero + row, keys)).expand(keys.shape)
    return torch.equal(visible_keys, keys >= window.first(keys[-1:]))


def _rotary_rules(config: Any) -> Iterator[dict[str, Any]]:
    for field in ("rope_parameters", "rope_scaling"):
        value = getattr(config, field, None)
        if isinstance(value, dict):
            yield value
            yield from (rule for rule in value.values() if isinstance(rule, dict))


def _sees_all(visible: Callable[..., Tensor], maximum: int, device: torch.device, otherwise: int) -> int:
    """The first row that does not attend to all earlier tokens."""

    def whole(row: int) -> bool:
        keys = torch.arange(row + 1, device=device)
        zero = torch.zeros_like(keys)
        return bool(torch.as_tensor(visible(zero, zero, zero + row, keys)).all())

    try:
        if whole(maximum - 1):
            return otherwise
        low, high = 0, maximum - 1  # the first hidden row lies in low .. high
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if whole(middle) else (low, middle)
        return low
    except _FAULTS:
        return otherwise  # a rule of these tokens, such as packed texts


def random_tokens(model: Any, rows: int, columns: int) -> Tensor:
    """Ids without special meaning for the model's code, the same in every call, without use of torch's own
    generator."""
    special: set[int] = set()

    def search(fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            if isinstance(value, dict):
                search(value)
            elif "token" in str(name) or str(name).endswith("index"):
                special.update(item for item in (value if isinstance(value, list) else [value]) if type(item) is int)

    search(model.config.to_dict())
    try:
        entries = len(model.get_input_embeddings().weight)
    except (NotImplementedError, AttributeError, TypeError):
        entries = 0
    config = model.config.get_text_config(decoder=True)
    count = min(entries or config.vocab_size, config.vocab_size)
    ordinary = torch.tensor([token for token in range(min(count, 4096)) if token not in special] or [0], device="cpu")
    drawn = torch.randint(len(ordinary), (rows, columns), generator=torch.Generator().manual_seed(0), device="cpu")
    return ordinary[drawn].to(model.device)


def prove(name: str, wrapped: Any, twin: Any, tokens: Tensor) -> None:
    """Compares the model's own forward with ours on a cache, for two texts of unequal prefixes."""
    try:
        with torch.no_grad():
            twin_logits = twin(input_ids=tokens, use_cache=True).logits
    except _FAULTS as error:
        refuse("run on tokens alone", f"{name} ({reason(error)})", cause=error)
    try:
        same, cached = _ours(wrapped, tokens, twin_logits)
    except _FAULTS as error:
        refuse("run with our attention and caches", f"{name} ({reason(error)})", cause=error)
    budget = _BUDGETS.get(wrapped.dtype, _EXACT)
    if is_quantised(twin):
        budget = max(budget, _QUANTISED)
    if not same <= budget:
        refuse(
            "compute the same with our attention as with its own",
            f"{name}, whose logits differ by {same:.0%} of their size",
        )
    if not cached <= budget:
        expectation = "compute the same from cached keys and values as from the whole text"
        refuse(expectation, f"{name}, whose logits then differ by {cached:.0%} of their size")


def proof_length(windows: Mapping[int, Window], positions: int) -> int:
    """Tokens of a proof: enough for the windows to hide some."""
    tried = [window.size for window in windows.values() if window.size <= _LONGEST_PROOF]
    return min(TOKENS + max(tried, default=0), positions)


def _ours(wrapped: Any, tokens: Tensor, twin_logits: Tensor) -> tuple[float, float]:
    """The differences of a whole forward, and of steps on a cache."""
    causal_model = wrapped.config.attention == "causal"
    all_at_once = wrapped(tokens, mask=causal(tokens.shape[1]).plan(64, 64, tokens.device))
    if all_at_once.shape != twin_logits.shape:
        raise ValueError(f"logits have shape {tuple(all_at_once.shape)} instead of {tuple(twin_logits.shape)}")
    same = _difference(all_at_once, twin_logits)
    if wrapped.config.predicts == "own" or not causal_model:
        everything = wrapped(tokens, mask=full(tokens.shape[1]).plan(64, 64, tokens.device))
        same = min(same, _difference(everything, twin_logits))
    prefix = tokens.shape[1] - (TOKENS - max(_PREFIX))
    counts = torch.tensor([prefix, _PREFIX[1]], device=tokens.device)
    cache = wrapped.new_cache(len(tokens), tokens.shape[1] + prefix)
    wrapped(tokens[:, :prefix], cache=cache, counts=counts, mask=_step(prefix, tokens.device))
    cache.commit_(counts)
    rows = tokens.shape[1] - prefix
    cached = []
    for first, last in ((0, rows - 1), (rows - 1, rows)):
        where = counts[:, None] + torch.arange(first, last, device=tokens.device)
        step = wrapped(tokens.gather(1, where), cache=cache, mask=_step(last - first, tokens.device))
        cache.commit_(torch.full_like(counts, last - first))
        cached.append(_difference(step, all_at_once.gather(1, where[..., None].expand(-1, -1, all_at_once.shape[2]))))
    return same, max(cached)


def prove_converted(name: str, converted: Any, twin: Any, tokens: Tensor) -> None:
    """Compares the logits of a model and of a conversion, at the first and the last positions."""
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    # At large positions the rounding of angles alone makes logits differ.
    for first in (0, max(0, min(converted.config.max_positions, 4096) - tokens.shape[1])):
        where = rows + first
        with torch.no_grad():
            twin_logits = twin(input_ids=tokens, position_ids=where[None].expand(tokens.shape), use_cache=False).logits
            logits = converted(tokens, positions=where)
        difference = _difference(logits, twin_logits)
        if not difference <= _BUDGETS.get(converted.dtype, _EXACT):
            expectation = f"compute what its configuration says, as a {name} of transformers does"
            actual = f"one whose logits differ by {difference:.0%} of their size"
            raise NotImplementedError(message("from_transformers", "model", expectation, actual, "Use wrap."))


def _step(rows: int, device: torch.device) -> Any:
    return causal(rows).plan(64, 64, device)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Of the rows' differences in parts of their spread, the largest; in half precision, where rounding may choose
    another expert for a row, the median."""
    half = ours.dtype in _BUDGETS
    ours, theirs = ours.double(), theirs.double()
    spread = (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
    rows = (ours - theirs).norm(dim=-1) / spread.clamp(min=1e-12)
    return float(rows.median() if half else rows.max())


_PROVEN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def _new_lock() -> None:
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may hold it
    os.register_at_fork(after_in_child=_new_lock)


def remembered(model: Any, *settings: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Reads and keeps what was found about this model as it is now: its modules, hooks, configuration, dtype and
    place."""
    modules = tuple((type(module), len(module._forward_hooks), "forward" in vars(module)) for module in model.modules())
    config = json.dumps(model.config.to_dict(), default=repr, sort_keys=True)
    key = (*settings, config, hash(modules), *model._forward_pre_hooks, model.dtype, model.device)

    def read() -> Any:
        with _LOCK:
            return _PROVEN.get(model, {}).get(key)

    def keep(found: Any) -> None:
        with _LOCK:
            _PROVEN.setdefault(model, {})[key] = found

    return read, keep


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Disables autocast and gradients, and restores torch's random state afterwards."""
    cuda = device.type == "cuda"
    before = torch.get_rng_state(), torch.cuda.get_rng_state(device) if cuda else None
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        if not torch.equal(torch.get_rng_state(), before[0]):
            torch.set_rng_state(before[0])
        if before[1] is not None and not torch.equal(torch.cuda.get_rng_state(device), before[1]):
            torch.cuda.set_rng_state(before[1], device)
