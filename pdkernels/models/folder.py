"""The files of a checkpoint's folder: regular files inside it, checked before they are opened, and read within limits."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pdkernels._validation import check, fail
from pdkernels.models.fields import OP, Fields, shown, some
from pdkernels.models.layout import Stored

INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_OTHERS = ("consolidated", "adapter_model", "mask_token")
"""Files of other programs or with other contents, which often lie beside a checkpoint's own."""
_TEXT_BYTES = 1 << 22
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

    A checkpoint may come from anywhere: its files must lie in its folder and must not be links out of it, pipes or devices.
    In the cache of the Hugging Face Hub a snapshot's files are links into the folder ``blobs`` next to it; those are followed.
    """
    label = f"{named_by}: {shown(name)}" if named_by else name
    inside = name and not os.path.isabs(name) and not {"..", "", "."} & set(name.split("/")) and "\\" not in name
    check(bool(inside), OP, label, "be the name of a file inside the folder", "a path that leads elsewhere")
    path = folder / name
    try:
        home = folder.resolve()
        kind = path.lstat().st_mode
        real = path.resolve()
        if real != home / name:
            # An adapter is in a subfolder of the snapshot.
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
    """The names, without the ending, of the entries of a subfolder that have it, in order; none if there is no subfolder."""
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
    """The tensors of a folder: first their shapes and dtypes, from the headers alone, then their data."""

    def __init__(self, folder: Path, files: list[str] | None = None) -> None:
        self.stored: dict[str, Stored] = {}
        self._open: dict[str, Any] = {}
        listed = _listed(folder) if files is None else {}
        for file in files or dict.fromkeys(listed.values()) or _found(folder):
            self._read_header(folder / file, file)
        for name, file in listed.items():
            held = self.stored.get(name)
            if held is None or held.file != file:
                fail(OP, file, f"hold what {INDEX} says", f"no tensor called {some([name])}")

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, on the CPU."""
        try:
            return {name: self._open[known.file].get_tensor(name) for name, known in self.stored.items()}
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            fail(OP, some(sorted(self._open)), "be readable as safetensors", _why(error))

    def part(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """The slice from `start` to `stop` along dimension `dim` of a 1-D or 2-D tensor; no more is read."""
        file = self.stored[name].file
        try:
            known = self._open[file].get_slice(name)
            part: torch.Tensor = known[start:stop] if dim == 0 else known[:, start:stop]
            return part
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
            check(size <= _HEADER_BYTES, OP, name, header, size, "Is it a whole safetensors file?")
            opened: Any = safe_open(path, framework="pt")
            self._open[name] = opened
            for tensor in opened.keys():
                known = opened.get_slice(tensor)
                dtype = str(known.get_dtype())
                if tensor in self.stored:
                    other = self.stored[tensor].file
                    fail(OP, name, f"hold no tensor that {other} holds too", some([tensor]), "Leave one of them out.")
                self.stored[tensor] = Stored(tuple(known.get_shape()), _NUMBERS.get(dtype, dtype), name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            if str(error).startswith("pdkernels."):
                raise
            fail(OP, name, "be a whole safetensors file", _why(error))


def _listed(folder: Path) -> dict[str, str]:
    """The files of all tensors as the index names them, checked to exist; empty if there is no index."""
    index = read_fields(folder, INDEX)
    if index is None:
        return {}
    index.require(["weight_map"])
    weight_map = index.get("weight_map")
    fits = isinstance(weight_map, dict) and weight_map and all(isinstance(file, str) for file in weight_map.values())
    check(bool(fits), OP, f"{INDEX}: weight_map", "name the file of each tensor", shown(weight_map))
    missing = [name for name in sorted(set(weight_map.values())) if member(folder, name, INDEX) is None]
    check(not missing, OP, "name_or_path", f"hold the files of {INDEX}", f"none called {some(missing)}")
    if _SINGLE not in weight_map.values() and member(folder, _SINGLE) is not None:
        fail(OP, INDEX, f"name {_SINGLE}, which is there too", "only other files", "Leave one of them out.")
    return dict(weight_map)


def _found(folder: Path) -> list[str]:
    try:
        found = sorted(path.name for path in folder.glob("*.safetensors"))
    except OSError as error:
        fail(OP, "name_or_path", "be a folder that can be read", f"{folder} ({_why(error)})")
    # With a model.safetensors, model.fp16.safetensors is the same in other numbers.
    others = (*_OTHERS, "model.") if _SINGLE in found else _OTHERS
    names = [name for name in found if name == _SINGLE or not name.startswith(others)]
    only = f", only {some(found)}" if found else ""
    check(bool(names), OP, "name_or_path", "hold *.safetensors files", f"none in {folder}{only}")
    return [name for name in names if member(folder, name) is not None]


def _why(error: Exception) -> str:
    """The cause reported by another library, on one line."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    words = " ".join(words.split()).rstrip(".")
    return words if len(words) <= 200 else words[:197] + "..."
