"""The files of a checkpoint folder: only regular files inside it, checked before they are opened, and with limits on
their size."""

from __future__ import annotations

import ctypes
import json
import math
import os
import stat
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pdkernels import _memory
from pdkernels._validation import check, fail
from pdkernels.models.files.fields import OP, Fields, shown, some
from pdkernels.models.files.layout import DTYPES, Layout, Parts, Stored
from pdkernels.models.files.mistaken import FROM_TORCH, refuse_mistaken

INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_OTHERS = ("consolidated", "adapter_model", "mask_token")
"""Files of other programs, which are often in the folder of a checkpoint."""
_OF_TORCH = "pytorch_model.bin", "model.bin", "pytorch_model.bin.index.json"
_TEXT_BYTES = 1 << 22
_READ_BYTES = 1 << 23  # at a time, where numbers are converted
_COMPARED = 1 << 20  # numbers at a time
_HEADER_BYTES = 1 << 24
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NUMBERS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def member(folder: Path, name: str, named_by: str = "") -> Path | None:
    """The regular file of this name inside the folder, or None. It is not opened here.

    A checkpoint is untrusted: its files must be in its folder, and must not be links out of it, pipes or devices.
    In the cache of the Hugging Face Hub, the files of a snapshot are links into the folder ``blobs`` next to it, which
    are followed.
    """
    label = f"{named_by}: {shown(name)}" if named_by else name
    is_inside = name and not os.path.isabs(name) and not {"..", "", "."} & set(name.split("/")) and "\\" not in name
    check(bool(is_inside), OP, label, "be the name of a file inside the folder", "a path that leads elsewhere")
    path = folder / name
    try:
        home = folder.resolve()
        kind = path.lstat().st_mode
        real = path.resolve()
        if real != home / name:
            # An adapter may be in a subfolder of the snapshot.
            snapshots = next((up for up in (home.parent, home.parent.parent) if up.name == "snapshots"), None)
            follow = snapshots is not None and real.parent == snapshots.parent / "blobs"
            remedy = "Put the file itself there."
            check(follow, OP, label, "be a file inside the folder", f"a link to {shown(str(real))}", remedy)
            kind = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RuntimeError, ValueError) as error:
        if str(error).startswith("pdkernels."):
            raise
        fail(OP, label, "be a file that can be read", _why(error))
    check(stat.S_ISREG(kind), OP, label, "be a regular file", _KINDS.get(stat.S_IFMT(kind), "something else"))
    return path


def members(folder: Path, subfolder: str, ending: str) -> list[str]:
    """The sorted names, without the extension, of the files of a subfolder with this extension; empty without the
    subfolder."""
    try:
        names = sorted(entry.name for entry in (folder / subfolder).iterdir() if entry.name.endswith(ending))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        fail(OP, subfolder, "be a folder that can be read", _why(error))
    return [name.removesuffix(ending) for name in names]


def read_fields(folder: Path, name: str) -> Fields | None:
    """The JSON object in a file, None if there is no such file."""
    text = read_text(folder, name)
    if text is None:
        return None
    try:
        values: Any = json.loads(text)
    except RecursionError:
        fail(OP, name, "be JSON", "too many brackets inside each other")
    except ValueError as error:
        refuse_mistaken(folder / name, name, "be JSON")
        fail(OP, name, "be JSON", f"{folder / name} ({_why(error)})")
    return Fields(values, name)


def read_text(folder: Path, name: str) -> str | None:
    """The text of a file, None if there is no such file."""
    path = member(folder, name)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            content = file.read(_TEXT_BYTES + 1)
        check(len(content) <= _TEXT_BYTES, OP, name, f"have at most {_TEXT_BYTES} bytes", "more")
        return content.decode("utf-8")
    except OSError as error:
        fail(OP, name, "be a file that can be read", _why(error))
    except UnicodeDecodeError as error:
        fail(OP, name, "be UTF-8 text", f"{folder / name} ({_why(error)})")


class Weights:
    """The tensors of a folder. Shapes and dtypes are read from the headers, before any data."""

    def __init__(self, folder: Path, files: list[str] | None = None) -> None:
        self.stored: dict[str, Stored] = {}
        self._open: dict[str, Any] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        file_of = _listed(folder) if files is None else {}
        for file in files or dict.fromkeys(file_of.values()) or _found(folder):
            self._read_header(folder / file, file)
        for name, file in file_of.items():
            stored = self.stored.get(name)
            if stored is None or stored.file != file:
                fail(OP, file, f"hold what {INDEX} says", f"no tensor called {some([name])}")

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, on the CPU."""
        try:
            return {name: self._open[stored.file].get_tensor(name) for name, stored in self.stored.items()}
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            fail(OP, some(sorted(self._open)), "be readable as safetensors", _why(error))

    def parameters(self, layout: Layout, dtype: torch.dtype | None, device: torch.device) -> dict[str, torch.Tensor]:
        """Our parameters, as `Layout.gather` makes them of all tensors, but one after the other; `dtype` None: as
        stored."""
        parameters = {
            name: layout.shaped(name, self.parameter(layout, sources, dtype)).to(device)
            for name, sources in layout.parts()
        }
        self.check_tied(layout)
        return parameters

    def parameter(self, layout: Layout, shapes: Parts, dtype: torch.dtype | None) -> torch.Tensor:
        """One of our parameters from its parts."""
        sources = {layout.name_in(self.stored, name): shape for name, shape in shapes.items()}
        kinds = [DTYPES[self.stored[source].dtype] for source in sources]
        rows = sum(math.prod(shape[:-1]) if len(shape) > 1 else shape[0] for shape in sources.values())
        last = next(iter(sources.values()))
        result = _memory.empty((rows, *last[1:][-1:]), dtype or reduce(torch.promote_types, kinds))
        first = 0
        for source, shape in sources.items():
            count = math.prod(shape)
            self.read_into_(result.view(-1)[first : first + count], source)
            first += count
        return result

    def check_tied(self, layout: Layout) -> None:
        """Refuses a stored head of a tied model that is not the embedding."""
        if layout.tied and {layout.head, layout.embedding} <= self.stored.keys():
            layout.check_tied(self._equal(layout.head, layout.embedding))

    def _equal(self, name: str, other: str) -> bool:
        """Whether two tensors have equal numbers in the dtype of one of them."""
        pair = [self.stored[name], self.stored[other]]
        count = math.prod(pair[0].shape)

        def same(start: int, dtype: torch.dtype) -> bool:
            pieces = [torch.empty(min(_COMPARED, count - start), dtype=dtype, device="cpu") for _ in pair]
            for piece, name_ in zip(pieces, (name, other)):
                self.read_into_(piece, name_, start)
            return torch.equal(*pieces)

        dtypes, starts = {DTYPES[tensor_name.dtype] for tensor_name in pair}, range(0, count, _COMPARED)
        return pair[0].shape == pair[1].shape and any(all(same(start, dtype) for start in starts) for dtype in dtypes)

    def read_into_(self, target: torch.Tensor, name: str, first: int = 0) -> None:
        """The numbers of a tensor from the `first` on, as many as `target` has room for, a contiguous tensor of any
        dtype.

        Bytes go from the file straight into it: the file is not mapped, so nothing is in memory twice.
        """
        dtype = DTYPES[self.stored[name].dtype]
        flat = target.view(-1)
        if dtype == target.dtype:
            return self._read_bytes(flat, name, first)
        if self._buffer.numel() == 0:  # one for all tensors: the heap would not take a freed one again
            self._buffer = torch.empty(_READ_BYTES, dtype=torch.uint8, device="cpu")
        buffer, step = self._buffer.view(dtype), _READ_BYTES // dtype.itemsize
        for start in range(0, len(flat), step):
            piece = buffer[: len(flat) - start]
            self._read_bytes(piece, name, first + start)
            flat[start : start + step] = piece

    def _read_bytes(self, target: torch.Tensor, name: str, first: int) -> None:
        path, start = self._places[name]
        memory = memoryview((ctypes.c_ubyte * target.nbytes).from_address(target.data_ptr()))
        done = 0
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start + first * target.itemsize)
                while done < len(memory):
                    got = file.readinto(memory[done:])
                    check(bool(got), OP, path.name, "be a whole safetensors file", "one that was cut off meanwhile")
                    done += got or 0
        except OSError as error:
            fail(OP, path.name, "be readable as safetensors", _why(error))

    def part(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """The slice from `start` to `stop` along dimension `dim` of a 1-D or 2-D tensor. Nothing else is read."""
        file = self.stored[name].file
        try:
            stored = self._open[file].get_slice(name)
            rows: torch.Tensor = stored[start:stop] if dim == 0 else stored[:, start:stop]
            return rows
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            fail(OP, file, "be readable as safetensors", _why(error))

    def whole(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU."""
        file = self.stored[name].file
        try:
            tensor: torch.Tensor = self._open[file].get_tensor(name)
            return tensor
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            fail(OP, file, "be readable as safetensors", _why(error))

    def _read_header(self, path: Path, name: str) -> None:
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = f"have a header of at most {_HEADER_BYTES} bytes"
                if size > _HEADER_BYTES:
                    refuse_mistaken(path, name, "be a safetensors file")
                check(size <= _HEADER_BYTES, OP, name, header, size, "Is it a whole safetensors file?")
                header_text = file.read(size)
            opened: Any = safe_open(path, framework="pt")  # which checks the header
            entries = json.loads(header_text)
            self._open[name] = opened
            for tensor in opened.keys():
                tensor_slice = opened.get_slice(tensor)
                dtype = str(tensor_slice.get_dtype())
                if tensor in self.stored:
                    other = self.stored[tensor].file
                    fail(OP, name, f"hold no tensor that {other} holds too", some([tensor]), "Leave one of them out.")
                self.stored[tensor] = Stored(tuple(tensor_slice.get_shape()), _NUMBERS.get(dtype, dtype), name)
                self._places[tensor] = path, 8 + size + _offset(entries.get(tensor), self.stored[tensor])
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            if str(error).startswith("pdkernels."):
                raise
            fail(OP, name, "be a whole safetensors file", _why(error))


def _offset(entry: Any, stored: Stored) -> int:
    """Where a tensor's data begins after the header. What the library read of a header with names given twice may
    differ."""
    start, end = entry["data_offsets"]
    dtype = DTYPES.get(stored.dtype)
    same_shape = tuple(entry["shape"]) == stored.shape
    if not same_shape or (dtype is not None and end - start != math.prod(stored.shape) * dtype.itemsize):
        raise ValueError("its header names a tensor twice")
    return int(start)


def _listed(folder: Path) -> dict[str, str]:
    """The file of each tensor by the index, checked to exist; empty if there is no index."""
    index = read_fields(folder, INDEX)
    if index is None:
        return {}
    index.require(["weight_map"])
    weight_map = index.get("weight_map")
    valid = isinstance(weight_map, dict) and weight_map and all(isinstance(file, str) for file in weight_map.values())
    check(bool(valid), OP, f"{INDEX}: weight_map", "name the file of each tensor", shown(weight_map))
    absent_files = [name for name in sorted(set(weight_map.values())) if member(folder, name, INDEX) is None]
    check(not absent_files, OP, "name_or_path", f"hold the files of {INDEX}", f"none called {some(absent_files)}")
    if _SINGLE not in weight_map.values() and member(folder, _SINGLE) is not None:
        fail(OP, INDEX, f"name {_SINGLE}, which is there too", "only other files", "Leave one of them out.")
    return dict(weight_map)


def _found(folder: Path) -> list[str]:
    try:
        names_found = sorted(path.name for path in folder.glob("*.safetensors"))
    except OSError as error:
        fail(OP, "name_or_path", "be a folder that can be read", f"{folder} ({_why(error)})")
    # Next to a model.safetensors, model.fp16.safetensors has the same tensors in another dtype.
    excluded = (*_OTHERS, "model.") if _SINGLE in names_found else _OTHERS
    names = [name for name in names_found if name == _SINGLE or not name.startswith(excluded)]
    others = names_found or [name for name in _OF_TORCH if member(folder, name) is not None]
    only = f", only {some(others)}" if others else ""
    remedy = "" if names_found or not others else FROM_TORCH
    check(bool(names), OP, "name_or_path", "hold *.safetensors files", f"none in {folder}{only}", remedy)
    return [name for name in names if member(folder, name) is not None]


def _why(error: Exception) -> str:
    """The message of another library, on one line."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    reason = " ".join(reason.split()).rstrip(".")
    return reason if len(reason) <= 200 else reason[:197] + "..."
