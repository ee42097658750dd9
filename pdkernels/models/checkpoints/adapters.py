"""LoRA adapters in folders as PEFT writes them: merged into a checkpoint's weights, or kept separate for drafting.

Source: github.com/huggingface/peft, `tuners/lora`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from pdkernels import _memory
from pdkernels._validation import check, fail, message
from pdkernels.models.checkpoints.lora_config import CONFIG, OLORA, PISSA, PLAIN, LoraSettings, check_saved
from pdkernels.models.checkpoints.packaged import weight_folders
from pdkernels.models.files.fields import OP, shown, some
from pdkernels.models.files.folder import Weights, member, read_fields
from pdkernels.models.files.layout import DTYPES, Layout

_WEIGHTS = "adapter_model.safetensors"
MASK_FILE, _MASK = "mask_token.safetensors", "embedding"
_PREFIX = "base_model.model."
_HALVES = {
    ".lora_A.weight": ("a", False),
    ".lora_B.weight": ("b", False),
    ".lora_embedding_A": ("a", True),
    ".lora_embedding_B": ("b", True),
}


class Pair(NamedTuple):
    """``W + scale * b @ a``; for an embedding, of its transpose. PiSSA and OLoRA first subtract a part of W, as PEFT
    does."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool = False
    start: str = PLAIN

    def add_to_(self, weight: torch.Tensor, name: str) -> None:
        if self.start != PLAIN:
            finite = bool(weight.isfinite().all())
            check(finite, OP, name, f"hold finite numbers for an adapter of {self.start}", "others")
        if self.start == PISSA:
            u, values, v = torch.linalg.svd(weight, full_matrices=False)
            rank = len(self.a)
            weight -= u[:, :rank] * values[:rank] @ v[:rank]
        elif self.start == OLORA:
            q, r = torch.linalg.qr(weight)
            rank = len(self.a)
            weight -= q[:, :rank] @ r[:rank] * self.scale
        product = self.b.to(weight.dtype) @ self.a.to(weight.dtype) * self.scale
        weight += product.T if self.transposed else product


class Adapter(NamedTuple):
    """The adapter of a checkpoint: low-rank pairs and replacement tensors, by published names."""

    pairs: dict[str, Pair]
    whole: dict[str, torch.Tensor]
    name: str

    def merged(self, state: Mapping[str, torch.Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Our parameters `state` with the adapter merged. Changed tensors have this dtype."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        merged = dict(state)
        for name, sources in layout.parts():
            if not any(source in self.pairs or source in self.whole for source in sources):
                continue
            parameter = merged[name].to(wide, copy=True)
            rows = parameter if parameter.dim() <= 2 else parameter.flatten(0, -2)
            targets = rows.split([shape[0] for shape in sources.values()]) if len(sources) > 1 else [rows]
            for source, target in zip(sources, targets):
                if source in self.whole:
                    whole = self.whole[source].view(target.shape)
                    target.copy_(whole if layout.shifted is None else layout.shifted(name, whole))
                if source in self.pairs:
                    self.pairs[source].add_to_(target.view(sources[source]), source)
            merged[name] = _memory.copied(parameter, dtype)
        return merged

    def drafting(self, layout: Layout) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pair of each layer's attention output projection; the second matrix includes the scale."""
        names = [next(iter(sources)) for name, sources in layout.parts() if re.fullmatch(r"layers\.\d+\.output", name)]
        other = sorted(set([*self.pairs, *self.whole]) - set(names))
        only = "change attention's output projections alone, which is what drafts are made with"
        if other:
            raise NotImplementedError(message(OP, f"drafter {self.name}", only, f"also {some(other)}"))
        changed = next((pair.start for pair in self.pairs.values() if pair.start != PLAIN), None)
        if changed is not None:
            label, expectation = (
                f"drafter {self.name}: {CONFIG}: init_lora_weights",
                "leave the model's own weights alone",
            )
            raise NotImplementedError(message(OP, label, expectation, repr(changed)))
        unpaired = [name for name in names if name not in self.pairs]
        check(not unpaired, OP, f"drafter {self.name}", "hold a pair for every layer", f"none for {some(unpaired)}")
        return [(pair.a.double(), pair.b.double() * pair.scale) for pair in map(self.pairs.__getitem__, names)]


def read_adapter(folder: str | Path, layout: Layout) -> Adapter:
    """The adapter in a folder, for a checkpoint with these tensors.

    The adapter is checked against the checkpoint before a tensor is read. It is refused if it needs a computation that
    we do not have.
    """
    folder = Path(folder)
    try:
        exists, is_file = folder.is_dir(), folder.is_file()
    except (OSError, ValueError):
        exists = is_file = False
    if is_file:
        fail(OP, "adapter", "be a folder", f"the file {shown(str(folder))}", f"Name the folder with its {CONFIG}.")
    remedy = f"Adapters that have names: {', '.join(sorted(weight_folders(CONFIG))) or 'none is installed'}."
    check(exists, OP, "adapter", "be a folder that exists", shown(str(folder)), remedy)
    fields = read_fields(folder, CONFIG)
    if fields is None:
        fail(OP, "adapter", f"hold {CONFIG}", f"none in {folder}")
    settings = LoraSettings(fields)
    remedy = "Older adapters are adapter_model.bin, which may run code: save it again with PEFT."
    check(member(folder, _WEIGHTS) is not None, OP, "adapter", f"hold {_WEIGHTS}", f"none in {folder}", remedy)
    weights = Weights(folder, [_WEIGHTS])
    shapes = {name: shape for _, sources in layout.parts() for name, shape in sources.items()}
    halves: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    modules: dict[str, str] = {}
    for stored in weights.stored:
        ending = next((ending for ending in _HALVES if stored.endswith(ending)), None)
        module = stored.removesuffix(ending) + ".weight" if ending else stored.replace(".base_layer.", ".")
        name = _published(module, shapes, layout)
        if name is None or (ending is None and ".lora_" in stored):
            label = f"{_WEIGHTS}: {shown(stored)}"
            raise NotImplementedError(message(OP, label, "belong to a tensor of the checkpoint", "none of that name"))
        stored_names = replaced if ending is None else halves.setdefault(name, {})
        key = name if ending is None else _HALVES[ending][0]
        check(key not in stored_names, OP, f"{_WEIGHTS}: {shown(stored)}", "be there once", "twice")
        stored_names[key] = stored
        if ending is not None:
            modules[name] = stored.removeprefix(_PREFIX).removesuffix(ending)
    _check_order(layout, {*halves, *replaced})
    for name in {*halves, *replaced} & {layout.embedding, layout.head}:
        tied = "leave a head that is tied to the embedding alone"
        if layout.tied:
            raise NotImplementedError(message(OP, _WEIGHTS, tied, f"one that changes {name}", "Merge it with PEFT."))
    _check_shapes(weights, halves, replaced, shapes)
    ranks = {name: weights.stored[pair["a"]].shape[0] for name, pair in halves.items()}
    _check_modules(settings, layout, ranks, modules, replaced)
    tensors = weights.tensors()
    pairs = {}
    for name, pair in halves.items():
        embedded = "lora_embedding" in pair["a"]
        # PEFT changes neither embeddings nor base weights that the file itself holds.
        start = PLAIN if embedded or name in replaced else settings.start
        pairs[name] = Pair(tensors[pair["a"]], tensors[pair["b"]], settings.scale(modules[name]), embedded, start)
    return Adapter(pairs, {name: tensors[stored] for name, stored in replaced.items()}, folder.name)


def read_mask_token(folder: str | Path, hidden_size: int) -> torch.Tensor | None:
    """The embedding ``(hidden_size,)`` of a mask token that a drafter's folder supplies for a checkpoint without one,
    or None."""
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


def _published(stored: str, shapes: Mapping[str, object], layout: Layout) -> str | None:
    """The checkpoint's tensor of this name. Names of an adapter of the headless model lack the first component."""
    if not stored.startswith(_PREFIX):
        return None
    name = stored.removeprefix(_PREFIX)
    body = layout.embedding.partition(".")[0]
    return next((candidate for candidate in (name, f"{body}.{name}") if candidate in shapes), None)


def _check_order(layout: Layout, names: set[str]) -> None:
    """Refuses changes of parameters whose rows have another order here, or other numbers."""
    for parameter, sources in layout.parts():
        changed = sorted(names & sources.keys())
        if changed and not layout.keeps(parameter, sources):
            expectation = "change tensors alone that have the same order here"
            raise NotImplementedError(message(OP, _WEIGHTS, expectation, f"one that changes {some(changed)}"))


def _check_shapes(
    weights: Weights,
    halves: Mapping[str, Mapping[str, str]],
    replaced: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    check(bool(halves) or bool(replaced), OP, _WEIGHTS, "hold tensors", "none")
    for stored, tensor in weights.stored.items():
        if tensor.dtype not in DTYPES:
            raise NotImplementedError(message(OP, f"{_WEIGHTS}: {stored}", f"be {', '.join(DTYPES)}", tensor.dtype))
    for name, stored in replaced.items():
        actual = weights.stored[stored].shape
        check(actual == shapes[name], OP, f"{_WEIGHTS}: {stored}", f"have shape {shapes[name]}", actual)
    for name, pair in halves.items():
        check(len(pair) == 2, OP, f"{_WEIGHTS}: {name}", "have both lora_A and lora_B", f"only {some(pair.values())}")
        a, b = (weights.stored[pair[half]].shape for half in "ab")
        embedded = ["lora_embedding" in pair[half] for half in "ab"]
        shape = shapes[name][::-1] if embedded[0] else shapes[name]
        matches = len(a) == len(b) == len(shape) == 2 and embedded[0] == embedded[1]
        matches = matches and (b[0], a[1]) == shape and a[0] == b[1] >= 1
        check(matches, OP, f"{_WEIGHTS}: {name}", f"have pairs for a matrix {shapes[name]}", f"{a} and {b}")


def _check_modules(
    settings: LoraSettings,
    layout: Layout,
    ranks: Mapping[str, int],
    modules: Mapping[str, str],
    replaced: Mapping[str, str],
) -> None:
    """Refuses tensors of modules that adapter_config.json does not name; PEFT drops them with a warning."""
    outside = (layout.embedding, layout.head)
    for name, module in modules.items():
        used = settings.adapts(module, name not in outside)
        check(
            used is not False, OP, f"{CONFIG}: target_modules", "name every module of the file", f"not {shown(module)}"
        )
        rank = settings.rank(module)
        label = f"{_WEIGHTS}: {shown(module)}"
        check(ranks[name] == rank, OP, label, f"have rank {rank}, as {CONFIG} says", ranks[name])
        scale = settings.scale(module)
        positive = settings.start != PISSA or scale > 0
        check(positive, OP, f"{CONFIG}: lora_alpha", "be positive with PiSSA", scale)
    for name, stored in replaced.items():
        wrapped = f"{_module(name)}.weight" in modules
        expected = "have .base_layer in its name if its module is adapted, and only then"
        check(
            (".base_layer." in stored) == wrapped,
            OP,
            f"{_WEIGHTS}: {shown(stored)}",
            expected,
            "a name that PEFT drops",
        )
    shapes = {name: shape for _, sources in layout.parts() for name, shape in sources.items()}
    check_saved(settings, map(_module, shapes), map(_module, replaced))
    if not settings.starts_at_zero:
        start = next((name.removesuffix(f"{module}.weight") for name, module in modules.items()), "")
        matrices = [name for name, shape in shapes.items() if len(shape) == 2 and name not in modules]
        unpaired = [
            name for name in matrices if settings.adapts(_module(name).removeprefix(start), name not in outside)
        ]
        check(
            not unpaired, OP, _WEIGHTS, "hold a pair for every module of target_modules", f"none for {some(unpaired)}"
        )


def _module(name: str) -> str:
    return name.rpartition(".")[0]
