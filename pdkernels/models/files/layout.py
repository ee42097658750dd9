"""The tensors of a published checkpoint: names, shapes, and the parameters of ours that they are parts of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, NoReturn, TypeAlias

import torch

from pdkernels._validation import check, fail, message
from pdkernels.models.files.fields import OP, some

Parts: TypeAlias = dict[str, tuple[int, ...]]
"""Published names and shapes of the tensors that concatenate to one of our parameters."""

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Stored(NamedTuple):
    """Shape and dtype of a tensor that is not yet read."""

    shape: tuple[int, ...]
    dtype: str
    file: str = ""


class Layout(NamedTuple):
    """The tensors of a checkpoint with a given configuration."""

    parts: Callable[[], Iterator[tuple[str, Parts]]]
    """Each of our parameters, and its parts."""
    layers: int
    embedding: str
    head: str
    tied: bool
    source: str = "config.json"
    """The configuration file."""
    experts: int = 0
    """Of a layer that has some: parameters called `experts_*` are stacks of so many matrices."""
    separate_experts: bool = True
    """Whether each has tensors of its own in the checkpoint."""
    apart: tuple[str, ...] = ()
    """Beginnings of the names of tensors that belong to another model in the same checkpoint."""
    turned: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    """One of our parameters in our order of rows, if that differs from the checkpoint's; the very tensor
    where it does not."""
    shifted: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    """One of our parameters with other numbers than the checkpoint's, in the same order (Gemma 3: norms plus 1)."""

    def stored(self, names: Mapping[str, Stored]) -> None:
        """Refuses a checkpoint with missing or extra tensors, wrong shapes, or integers instead of floats.

        Takes time linear in the checkpoint's tensors, whatever its config.json says.
        """
        unread = {
            _embedding(self, names, name): tensor
            for name, tensor in names.items()
            if not (_follows(name) or name.startswith(self.apart))
        }
        self.check_count(len(unread))
        absent_names = []
        for _, sources in self.parts():
            for name, shape in sources.items():
                tensor = unread.pop(name, None)
                if tensor is None:
                    absent_names.append(name)
                    continue
                label = f"{tensor.file}: {name}" if tensor.file else name
                check(tensor.shape == shape, OP, label, f"have shape {shape}", tensor.shape)
                _check_dtype(label, tensor.dtype)
        if self.tied and (head := unread.pop(self.head, None)) is not None:
            _check_dtype(f"{head.file}: {self.head}" if head.file else self.head, head.dtype)
        if absent_names:
            others = f"It also holds {some(sorted(unread))}: it may be of another architecture." if unread else ""
            self._lacks(f"none called {some(absent_names)}", others)
        label, described = self._described
        check(not unread, OP, label, f"hold only tensors {described}", f"also {some(sorted(unread))}")

    def check_count(self, tensors: int) -> None:
        """Refuses a checkpoint with fewer tensors than layers, or than experts of a layer: each has its own."""
        experts = self.experts if self.separate_experts else 0
        for count, kind in ((self.layers, "layers"), (experts, "experts")):
            if count > tensors:
                self._lacks(f"{tensors} for {count} {kind}")

    @property
    def _described(self) -> tuple[str, str]:
        """What holds the tensors, and by what they are known. A GGUF file describes its own."""
        alone = self.source.endswith(".json")
        return ("checkpoint", f"of its {self.source}") if alone else (self.source, "that its keys describe")

    def _lacks(self, actual: str, cause: str = "") -> NoReturn:
        label, described = self._described
        if not cause and label == self.source:
            cause = "It may be incomplete, or of another architecture."
        fail(OP, label, f"hold every tensor {described}", actual, cause)

    def gather(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Our parameters, from tensors with published names."""
        self.stored({name: Stored(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in state.items()})
        sources = {_embedding(self, state, name): tensor for name, tensor in state.items()}
        parameters = {}
        for name, shapes in self.parts():
            tensors = [sources[source] for source in shapes]
            joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            parameters[name] = self.shaped(name, joined)
        if self.tied and self.head in sources:
            head, embedding = sources[self.head], parameters["embedding"]
            # They may be stored in dtypes of different precision.
            self.check_tied(
                head.shape == embedding.shape
                and any(torch.equal(head.to(kind), embedding.to(kind)) for kind in {head.dtype, embedding.dtype})
            )
        return parameters

    def shaped(self, name: str, joined: torch.Tensor) -> torch.Tensor:
        """One of our parameters from its parts in one tensor: vectors and matrices, and stacks of matrices."""
        rows = joined if joined.dim() <= 2 else joined.flatten(0, -2)
        if self.turned is not None:
            rows = self.turned(name, rows)
        if self.shifted is not None:
            rows = self.shifted(name, rows)
        stacked = ".experts_" in name and not name.endswith("_bias")
        return rows.reshape(self.experts, -1, rows.shape[1]) if stacked else rows

    def keeps(self, name: str, sources: Parts) -> bool:
        """Whether one of our parameters has the rows of its parts in their order."""
        if self.turned is None:
            return True
        count = sum(math.prod(shape[:-1]) if len(shape) > 1 else shape[0] for shape in sources.values())
        rows = torch.empty((count, *next(iter(sources.values()))[1:][-1:]), device="meta")
        return self.turned(name, rows) is rows

    def check_tied(self, same: bool) -> None:
        """Refuses a stored head that is not the `same` as the embedding."""
        remedy = f"It is {self.source} that says whether they are tied."
        check(same, OP, self.head, "equal the embedding of a tied model", "another matrix", remedy)

    def name_in(self, names: Mapping[str, object], source: str) -> str:
        """The name under which a checkpoint with these `names` stores a part: a tied head may be stored as the
        embedding."""
        return self.head if self.tied and source == self.embedding and source not in names else source

    def scatter(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inverse of `gather`: views with the published names."""
        tensors: dict[str, torch.Tensor] = {}
        for name, shapes in self.parts():
            if len(shapes) == 1:
                ((source, shape),) = shapes.items()
                tensors[source] = state[name].view(shape)
            else:
                rows = state[name] if state[name].dim() <= 2 else state[name].flatten(0, -2)
                tensors.update(zip(shapes, rows.split([shape[0] for shape in shapes.values()]), strict=True))
        return tensors


def _follows(name: str) -> bool:
    """Whether a tensor is a stored RoPE table, which follows from the configuration and is ignored."""
    return name.endswith(("rotary_emb.inv_freq", "freqs_cis"))


def _embedding(layout: Layout, names: Mapping[str, object], name: str) -> str:
    """A tied head may be stored instead of the embedding."""
    alone = layout.tied and name == layout.head and layout.embedding not in names
    return layout.embedding if alone else name


def _check_dtype(label: str, dtype: str) -> None:
    if dtype not in DTYPES:
        remedy = "Our models do not read quantized weights; convert the checkpoint to bfloat16."
        raise NotImplementedError(message(OP, label, f"be {', '.join(DTYPES)}", dtype, remedy))
