"""Windows of layers, as the keys of a GGUF file say them.

Source: `load_swa_pattern` and the loaders of architectures in src/llama-model.cpp and src/models of
github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import NoReturn

from pdkernels._validation import check, message
from pdkernels.models.architectures.rope import RopeScaling, YarnScaling
from pdkernels.models.architectures.windows import MAX_LAYERS, Window
from pdkernels.models.files.fields import OP, Kept, shown
from pdkernels.models.files.gguf_keys import Keys

_PATTERN, _BASE, _LOCAL_BASE = "attention.sliding_window_pattern", "rope.freq_base", "rope.freq_base_swa"


def windows_of(fields: Keys, size: int, period: int) -> tuple[Window | None, ...]:
    """Of each layer. Every `period`-th layer sees the whole text; the file may name another period. Some releases of
    llama.cpp ignore a list, so one that says anything else is refused."""
    layers, pattern = fields.integer("block_count"), fields.get(_PATTERN)
    check(layers <= MAX_LAYERS, OP, f"{fields.where}.block_count", f"be at most {MAX_LAYERS}", layers)
    if pattern is not None and not isinstance(pattern, (list, Kept)):
        period = fields.integer(_PATTERN, minimum=1)
    windows = tuple(None if (layer + 1) % period == 0 else Window(size) for layer in range(layers))
    if isinstance(pattern, (list, Kept)) and [bool(slides) for slides in pattern] != [*map(bool, windows)]:
        _refuse(fields, _PATTERN, f"give a window to all layers but every {period}th", pattern)
    return windows


def check_one_base(fields: Keys) -> None:
    """Refuses layers with a window that rotate otherwise than the others."""
    base = fields.number(_BASE, above=0)
    local = fields.get(_LOCAL_BASE) if _LOCAL_BASE in fields.values else base
    if local != base:
        _refuse(fields, _LOCAL_BASE, f"be rope.freq_base ({base})", local)
    if fields.get("rope.scaling.type") == "none" and (
        factor := fields.number("rope.scaling.factor", minimum=0)
    ) not in (0, 1):
        # llama.cpp then scales layers with a window alone.
        _refuse(fields, "rope.scaling.factor", "be 1 with rope.scaling.type none", factor)


def check_windows_unscaled(fields: Keys, scaling: RopeScaling | None) -> None:
    """Refuses a YaRN whose factor of queries and keys counts in layers with a window too, which rotate without scaling
    (Gemma 3)."""
    further = fields.number("rope.scaling.attn_factor", above=0)
    if isinstance(scaling, YarnScaling) and (further != 1 or scaling.factor < 1):
        name, expectation = ("factor", "be at least 1") if further == 1 else ("attn_factor", "be 1")
        _refuse(fields, f"rope.scaling.{name}", f"{expectation} beside windows", fields.get(f"rope.scaling.{name}"))


def check_one_width(fields: Keys) -> None:
    """Refuses layers with a window whose heads have another size than those of the others."""
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        local = fields.values.get(f"{name}_swa")
        if local is not None and local != fields.get(name):
            _refuse(fields, f"{name}_swa", f"be {name} ({fields.get(name)})", local)


def _refuse(fields: Keys, name: str, expectation: str, actual: object) -> NoReturn:
    raise NotImplementedError(message(OP, f"{fields.where}.{name}", expectation, shown(actual)))
