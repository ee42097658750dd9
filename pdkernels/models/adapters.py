"""LoRA adapters in folders as PEFT writes them: merged into a checkpoint's weights, or kept separate for drafting.

Source: github.com/huggingface/peft, `tuners/lora`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from pdkernels._validation import check, fail, message
from pdkernels.models.fields import OP, Fields, shown, some
from pdkernels.models.folder import Weights, member, read_fields
from pdkernels.models.layout import DTYPES, Layout

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MASK_FILE, _MASK = "mask_token.safetensors", "embedding"
PACKAGED = Path(__file__).parent / "weights" / "adapters"
_PREFIX = "base_model.model."
# Kinds of LoRA that compute something other than W + scale * B @ A.
_OTHERWISE = (
    "use_dora use_qalora fan_in_fan_out alora_invocation_tokens target_parameters layer_replication "
    "trainable_token_indices lora_bias megatron_config arrow_config use_bdlora monteclora_config velora_config"
).split()
_HALVES = {
    ".lora_A.weight": ("a", False),
    ".lora_B.weight": ("b", False),
    ".lora_embedding_A": ("a", True),
    ".lora_embedding_B": ("b", True),
}


class Pair(NamedTuple):
    """``W + scale * b @ a``; for an embedding, of its transpose."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool = False

    def delta(self, dtype: torch.dtype) -> torch.Tensor:
        product = self.b.to(dtype) @ self.a.to(dtype) * self.scale
        return product.T if self.transposed else product


class Adapter(NamedTuple):
    """The adapter of a checkpoint: low-rank pairs and replacement tensors, by published names."""

    pairs: dict[str, Pair]
    whole: dict[str, torch.Tensor]
    name: str

    def merged(self, state: Mapping[str, torch.Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Our parameters `state` with the adapter merged, in this dtype where it changes them."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        ours = dict(state)
        for name, parts in layout.parts():
            if not any(part in self.pairs or part in self.whole for part in parts):
                continue
            whole = ours[name].to(wide, copy=True)
            targets = whole.split([shape[0] for shape in parts.values()]) if len(parts) > 1 else [whole]
            for part, target in zip(parts, targets):
                if part in self.whole:
                    target.copy_(self.whole[part].view(target.shape))
                if part in self.pairs:
                    target += self.pairs[part].delta(wide).view(target.shape)
            ours[name] = whole.to(dtype)
        return ours

    def drafting(self, layout: Layout) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each layer the pair of its attention's output projection, the second scaled."""
        names = [next(iter(parts)) for name, parts in layout.parts() if re.fullmatch(r"layers\.\d+\.output", name)]
        other = sorted(set([*self.pairs, *self.whole]) - set(names))
        only = "change attention's output projections alone, which is what drafts are made with"
        if other:
            raise NotImplementedError(message(OP, f"drafter {self.name}", only, f"also {some(other)}"))
        missing = [name for name in names if name not in self.pairs]
        check(not missing, OP, f"drafter {self.name}", "hold a pair for every layer", f"none for {some(missing)}")
        return [(pair.a.double(), pair.b.double() * pair.scale) for pair in map(self.pairs.__getitem__, names)]


def read_adapter(folder: str | Path, layout: Layout) -> Adapter:
    """The adapter in a folder, for a checkpoint with these tensors.

    Everything is checked against the checkpoint before a tensor is read. Anything in an adapter that we do not compute is refused.
    """
    folder = Path(folder)
    try:
        found = folder.is_dir()
    except (OSError, ValueError):
        found = False
    remedy = f"Adapters of the package: {', '.join(available_adapters())}."
    check(found, OP, "adapter", "be a folder that exists", shown(str(folder)), remedy)
    fields = read_fields(folder, _CONFIG)
    if fields is None:
        fail(OP, "adapter", f"hold {_CONFIG}", f"none in {folder}")
    _refuse_other_kinds(fields)
    remedy = "Older adapters are adapter_model.bin, which may run code: save it again with PEFT."
    check(member(folder, _WEIGHTS) is not None, OP, "adapter", f"hold {_WEIGHTS}", f"none in {folder}", remedy)
    weights = Weights(folder, [_WEIGHTS])
    shapes = {name: shape for _, parts in layout.parts() for name, shape in parts.items()}
    halves: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for stored in weights.stored:
        ending = next((ending for ending in _HALVES if stored.endswith(ending)), None)
        module = stored.removesuffix(ending) + ".weight" if ending else stored.replace(".base_layer.", ".")
        name = _published(module, shapes, layout)
        if name is None or (ending is None and ".lora_" in stored):
            label = f"{_WEIGHTS}: {shown(stored)}"
            raise NotImplementedError(message(OP, label, "belong to a tensor of the checkpoint", "none of that name"))
        both = whole if ending is None else halves.setdefault(name, {})
        key = name if ending is None else _HALVES[ending][0]
        check(key not in both, OP, f"{_WEIGHTS}: {shown(stored)}", "be there once", "twice")
        both[key] = stored
    for name in {*halves, *whole} & {layout.embedding, layout.head}:
        tied = "leave a head that is tied to the embedding alone"
        if layout.tied:
            raise NotImplementedError(message(OP, _WEIGHTS, tied, f"one that changes {name}", "Merge it with PEFT."))
    _check_shapes(weights, halves, whole, shapes)
    scales = {name: _scale(fields, name, weights.stored[pair["a"]].shape[0]) for name, pair in halves.items()}
    tensors = weights.tensors()
    pairs = {
        name: Pair(tensors[pair["a"]], tensors[pair["b"]], scales[name], "lora_embedding" in pair["a"])
        for name, pair in halves.items()
    }
    return Adapter(pairs, {name: tensors[stored] for name, stored in whole.items()}, folder.name)


def named_adapter(name_or_folder: str | Path) -> Path:
    """The folder of an adapter. A string may name one in the package, a path never does."""
    packaged = isinstance(name_or_folder, str) and name_or_folder in available_adapters()
    return PACKAGED / name_or_folder if packaged else Path(name_or_folder)


def available_adapters() -> tuple[str, ...]:
    """Names of the adapters in the package."""
    return tuple(sorted(path.parent.name for path in PACKAGED.glob(f"*/{_CONFIG}")))


def read_mask_token(folder: str | Path, hidden_size: int) -> torch.Tensor | None:
    """The embedding ``(hidden_size,)`` of a mask token that a drafter's folder supplies for a checkpoint without one, or None."""
    folder = Path(folder)
    if member(folder, MASK_FILE) is None:
        return None
    weights = Weights(folder, [MASK_FILE])
    check(list(weights.stored) == [_MASK], OP, MASK_FILE, f"hold {_MASK} alone", some(weights.stored))
    actual = weights.stored[_MASK]
    check(actual.shape == (hidden_size,), OP, f"{MASK_FILE}: {_MASK}", f"have shape ({hidden_size},)", actual.shape)
    if actual.dtype not in DTYPES:
        raise NotImplementedError(message(OP, f"{MASK_FILE}: {_MASK}", f"be {', '.join(DTYPES)}", actual.dtype))
    return weights.tensors()[_MASK]


def _refuse_other_kinds(fields: Fields) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise NotImplementedError(message(OP, f"{_CONFIG}: peft_type", "be 'LORA'", shown(kind)))
    for name in _OTHERWISE:
        value = fields.get(name)
        if value:
            raise NotImplementedError(
                message(OP, f"{_CONFIG}: {name}", "be absent", shown(value), "Merge it with PEFT.")
            )


def _published(stored: str, shapes: Mapping[str, object], layout: Layout) -> str | None:
    """The checkpoint's tensor of this name. An adapter of the headless model lacks the first part of the name."""
    if not stored.startswith(_PREFIX):
        return None
    name = stored.removeprefix(_PREFIX)
    body = layout.embedding.partition(".")[0]
    return next((candidate for candidate in (name, f"{body}.{name}") if candidate in shapes), None)


def _check_shapes(
    weights: Weights,
    halves: Mapping[str, Mapping[str, str]],
    whole: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    check(bool(halves) or bool(whole), OP, _WEIGHTS, "hold tensors", "none")
    for stored, known in weights.stored.items():
        if known.dtype not in DTYPES:
            raise NotImplementedError(message(OP, f"{_WEIGHTS}: {stored}", f"be {', '.join(DTYPES)}", known.dtype))
    for name, stored in whole.items():
        actual = weights.stored[stored].shape
        check(actual == shapes[name], OP, f"{_WEIGHTS}: {stored}", f"have shape {shapes[name]}", actual)
    for name, pair in halves.items():
        check(len(pair) == 2, OP, f"{_WEIGHTS}: {name}", "have both lora_A and lora_B", f"only {some(pair.values())}")
        a, b = (weights.stored[pair[half]].shape for half in "ab")
        embedded = ["lora_embedding" in pair[half] for half in "ab"]
        shape = shapes[name][::-1] if embedded[0] else shapes[name]
        fits = len(a) == len(b) == len(shape) == 2 and embedded[0] == embedded[1]
        fits = fits and (b[0], a[1]) == shape and a[0] == b[1] >= 1
        check(fits, OP, f"{_WEIGHTS}: {name}", f"have pairs for a matrix {shapes[name]}", f"{a} and {b}")


def _scale(fields: Fields, name: str, rank: int) -> float:
    alpha = fields.number("lora_alpha", 8.0)
    module = name.removesuffix(".weight")
    for pattern, value in fields.part("alpha_pattern").values.items():
        # Patterns come from the file: without repetition none of them can take long.
        plain = re.fullmatch(r"[\w.^$|()\\-]{1,1000}", pattern) is not None
        if not plain:
            label = f"{_CONFIG}: alpha_pattern"
            raise NotImplementedError(message(OP, label, "have patterns without repetition", shown(pattern)))
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module) is not None
        except re.error as error:
            fail(OP, f"{_CONFIG}: alpha_pattern", "hold regular expressions", f"{shown(pattern)} ({error})")
        if matches:
            alpha = Fields({"alpha": value}, f"{_CONFIG}: alpha_pattern").number("alpha")
            break
    return alpha / math.sqrt(rank) if fields.flag("use_rslora", False) else alpha / rank
