"""Checkpoints of compressed-tensors: whole numbers of four or eight bits, in words or as int8, with scales for groups
or outputs.

Source: github.com/vllm-project/compressed-tensors (`compressors/pack_quantized`, `compressors/naive_quantized`,
`quantization/lifecycle/forward_helpers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pdkernels._validation import check
from pdkernels.models.checkpoints.integers import (
    FLOATS,
    MATRIX,
    WORDS,
    Format,
    Integers,
    NamePattern,
    Needed,
    Role,
    Scheme,
    fields_of_words,
    group_size,
    groups_of,
    refuse,
    refuse_others,
    words_for,
)
from pdkernels.models.files.fields import OP, Fields, shown
from pdkernels.models.files.patterns import Budget

METHOD = "compressed-tensors"
Entry: TypeAlias = "str | NamePattern"
"""A name of modules or of their class, or a pattern of names."""
_WORDS_FORMAT, _BYTES_FORMATS = "pack-quantized", ("int-quantized", "naive-quantized")
_MARK = "re:"
_LINEAR = "Linear"
_MAKING = ("global_compression_ratio", "provider", "quant_method", "quantization_status", "version", "run_compressed")
_FOLLOWED = ("config_groups", "format", "ignore", "kv_cache_scheme", "sparsity_config", "transform_config")
_MAKING_ARGUMENTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_ARGUMENTS = ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder")
_STATIC = "Quantise its activations dynamically for each token, or not at all."


@dataclass(frozen=True)
class Compressed:
    """Codes in words of consecutive inputs or, with `whole`, as int8; zeros in words of consecutive outputs, or as
    int8."""

    bits: int
    strategy: str
    group: int
    symmetric: bool
    whole: bool

    @property
    def name(self) -> str:
        return f"compressed-tensors int{self.bits}"

    def tensors(self, outputs: int, width: int) -> Mapping[str, Needed]:
        if self.group:
            expectation = f"be a multiple of group_size ({self.group}) in the format of compressed-tensors"
            check(width % self.group == 0, MATRIX, "width", expectation, width)
        groups = groups_of(width, self.group)
        each = (1,) if self.strategy == "tensor" else (outputs, groups)
        needed = {"weight_scale": Needed(each, FLOATS)}
        if self.whole:
            needed["weight"] = Needed((outputs, width), ("I8",))
        else:
            needed["weight_packed"] = Needed((outputs, words_for(width, self.bits)), WORDS)
            needed["weight_shape"] = Needed((2,), ("I64", "I32"))
        if not self.symmetric:
            in_words = not self.whole and self.strategy != "tensor"
            shape = (words_for(outputs, self.bits), groups) if in_words else each
            needed["weight_zero_point"] = Needed(shape, WORDS if in_words else ("I8",))
        return needed

    def read(self, tensor: Callable[[str], Tensor | None], outputs: int, width: int) -> Integers:
        codes = tensor("weight" if self.whole else "weight_packed")
        scales, zeros, shape = (tensor(f"weight_{name}") for name in ("scale", "zero_point", "shape"))
        assert codes is not None and scales is not None
        if shape is not None:
            check(shape.tolist() == [outputs, width], MATRIX, "weight_shape", f"be {[outputs, width]}", shape.tolist())
        groups = groups_of(width, self.group)
        half = 2 ** (self.bits - 1)
        if zeros is None:
            zeros = torch.full((outputs, groups), half, dtype=torch.uint8, device="cpu")
        elif zeros.dtype == torch.int32:
            zeros = fields_of_words(zeros.T, self.bits, outputs).T
        else:
            low, high = (int(value) for value in zeros.aminmax())
            check(
                -half <= low and high < half, MATRIX, "weight_zero_point", f"be in [{-half}, {half})", f"{low}..{high}"
            )
            zeros = (zeros.int() + half).to(torch.uint8).expand(outputs, groups)
        unpacked = codes.view(torch.uint8) ^ 128 if self.whole else fields_of_words(codes, self.bits, width)
        return Integers(unpacked, scales.expand(outputs, groups), zeros, self.bits, self.group)


@dataclass(frozen=True)
class Groups:
    """The formats of config_groups, each with the modules that it is for; none for those to ignore."""

    groups: tuple[tuple[tuple[Entry, ...], Format], ...]
    ignored: tuple[Entry, ...]

    def format_of(self, module: str, role: Role = "linear") -> Format | None:
        classes = ("Embedding" if role == "embedding" else _LINEAR, "Module")
        if any(_names(entry, module) or entry in classes for entry in self.ignored):
            return None
        # As the library sorts them: names, patterns, classes, each by their letters. Of a target in two groups the last
        # one holds.
        formats = {_text(target): (target, form) for targets, form in self.groups for target in targets}
        listed = sorted(formats.values(), key=lambda pair: (isinstance(pair[0], NamePattern), _text(pair[0])))
        for matches in (lambda target: _names(target, module), classes.__contains__):
            for target, form in listed:
                if matches(target):
                    return form
        return None

    def may_hold_numbers(self, module: str) -> bool:
        return False


def _names(entry: Entry, module: str) -> bool:
    """Whether a target or an entry of the ignore list names this module, or matches its name."""
    return entry.matches(module) if isinstance(entry, NamePattern) else entry == module


def _text(entry: Entry) -> str:
    return _MARK + entry.text if isinstance(entry, NamePattern) else entry


def read(fields: Fields) -> Scheme:
    """What a quantization_config of compressed-tensors says."""
    refuse_others(fields, (*_MAKING, *_FOLLOWED))
    if fields.get("kv_cache_scheme"):
        refuse(fields, "kv_cache_scheme", "be absent", fields.get("kv_cache_scheme"))
    if fields.get("transform_config"):
        refuse(fields, "transform_config", "be empty", fields.get("transform_config"))
    sparsity = fields.part("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        refuse(sparsity, "format", "be dense", sparsity.get("format"))
    groups = fields.part("config_groups")
    check(bool(groups), OP, f"{fields.where}: config_groups", "hold a group", "none")
    budget = Budget()
    made = tuple(_group(groups.part(name), fields, budget) for name in groups.values)
    return Groups(made, _entries(fields, "ignore", budget))


def _entries(fields: Fields, name: str, budget: Budget) -> tuple[Entry, ...]:
    return tuple(
        NamePattern(fields, name, entry.removeprefix(_MARK), budget) if entry.startswith(_MARK) else entry
        for entry in fields.texts(name)
    )


def _group(group: Fields, fields: Fields, budget: Budget) -> tuple[tuple[Entry, ...], Format]:
    refuse_others(group, ("targets", "weights", "input_activations", "output_activations", "format"))
    targets = _entries(group, "targets", budget)
    check(bool(targets), OP, f"{group.where}: targets", "name modules", "none")
    if group.get("output_activations"):
        refuse(group, "output_activations", "be absent", group.get("output_activations"))
    if not group.part("weights"):
        refuse(group, "weights", "say how weights are quantised", group.get("weights"))
    unpacked = _is_whole(group if "format" in group.values else fields)
    if "input_activations" in group.values:
        _check_activations(group.part("input_activations"))
    return targets, _weights(group.part("weights"), unpacked)


def _is_whole(fields: Fields) -> bool:
    form = fields.get("format")
    if form != _WORDS_FORMAT and form not in _BYTES_FORMATS:
        refuse(fields, "format", f"be {', '.join((_WORDS_FORMAT, *_BYTES_FORMATS))}", form)
    return form in _BYTES_FORMATS


def _check_activations(fields: Fields) -> None:
    """Products quantise rows to 8 bits anyway, in blocks of 32: finer than for a whole row."""
    refuse_others(fields, (*_ARGUMENTS, *_MAKING_ARGUMENTS))
    expected = {"num_bits": (8,), "type": ("int",), "dynamic": (True,), "strategy": ("token",), "symmetric": (True,)}
    defaults = {"num_bits": 8, "type": "int", "dynamic": False, "symmetric": True}
    for name, allowed in expected.items():
        value = fields.get(name, defaults.get(name))
        value = value.lower() if isinstance(value, str) else value
        if value not in allowed or type(value) is not type(allowed[0]):
            refuse(fields, name, f"be {allowed[0]}", value, _STATIC)
    _refuse_shapes(fields, "token")
    if fields.get("actorder") not in (None, False):
        refuse(fields, "actorder", "be absent: activations have no order", fields.get("actorder"))


def _refuse_shapes(fields: Fields, strategy: str) -> None:
    """Sizes of other strategies, which the library refuses too."""
    size = fields.get("group_size")
    if strategy != "group" and size not in (None, -1):
        refuse(fields, "group_size", f"be -1 or absent for the strategy {strategy}", size)
    if "block_structure" in fields.values:
        refuse(fields, "block_structure", f"be absent for the strategy {strategy}", fields.get("block_structure"))


def _weights(fields: Fields, unpacked: bool) -> Compressed:
    refuse_others(fields, (*_ARGUMENTS, *_MAKING_ARGUMENTS))
    bits, kind = fields.get("num_bits", 8), str(fields.get("type", "int")).lower()
    if kind != "int":
        refuse(fields, "type", "be int", fields.get("type"))
    allowed = (8,) if unpacked else (4, 8)
    if bits not in allowed or type(bits) is not int:
        refuse(fields, "num_bits", f"be {' or '.join(map(str, allowed))}", bits)
    if fields.get("dynamic", False) is not False:
        refuse(fields, "dynamic", "be false", fields.get("dynamic"))
    # By activation order or not, inputs are stored in their own order unless a g_idx says otherwise.
    order = fields.get("actorder")
    if order not in (None, False, "weight", "static"):
        refuse(fields, "actorder", "be weight, static or absent", order)
    size = fields.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = str(fields.get("strategy") or inferred).lower()
    if strategy not in ("channel", "group", "tensor"):
        refuse(fields, "strategy", "be channel, group or tensor", strategy)
    _refuse_shapes(fields, strategy)
    group = group_size(fields, "group_size", size) if strategy == "group" else 0
    if strategy == "group" and group == 0:
        check(False, OP, f"{fields.where}: group_size", "be a number of columns for the strategy group", shown(size))
    return Compressed(bits, strategy, group, fields.flag("symmetric", True), unpacked)
