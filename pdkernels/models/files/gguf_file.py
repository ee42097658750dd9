"""A GGUF file: its metadata and list of tensors, read with checks, and the tensors themselves.

The package `gguf` is used only to dequantise blocks: its reader trusts every size in the
file. Source of the format: docs/gguf.md of github.com/ggml-org/ggml.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from pdkernels._validation import check, fail, message
from pdkernels.models.files.fields import OP, Kept, shown
from pdkernels.models.files.gguf_keys import ABSENT
from pdkernels.models.files.mistaken import refuse_mistaken

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MAX = 1 << 24  # elements of an array, bytes of a string; a fraction of it for keys and tensors
_MAX_NAMES, _MAX_STRINGS = 1 << 16, 1 << 20
_MAX_TEXT = 1 << 23  # bytes of the strings outside of lists, together
_SHORT = 16  # elements of an array that is read at once
_KINDS = "tokenizer.ggml.token_type"
# Elements dequantised at a time: a multiple of the block size of every type, and few enough for the second-level cache.
_CHUNK = 1 << 17


class GgufTensor(NamedTuple):
    """Offset, type and shape of a tensor; the shape is rows first, as in PyTorch."""

    shape: tuple[int, ...]
    type: int
    start: int
    bytes: int


class GgufFile:
    """The metadata (`fields`) and the tensors of a file. Every size is checked against the file's before use."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._quants = _library(path.name)
        self._open(path)
        try:
            version, tensors, keys = self._header(path)
            self.version = version
            self.fields: dict[str, Any] = {}
            self._strings = self._characters = 0
            for _ in range(keys):
                key = self._text("the name of a field")
                check(key not in self.fields, OP, self.name, "name every field once", f"{shown(key)} twice")
                self.fields[key] = self._value(self._number("I"), key)
            self._refuse_parts()
            self.tensors = self._table(tensors)
        except UnicodeDecodeError:
            self._broken("hold UTF-8 text", f"other bytes before byte {self._at}")

    def type_name(self, tensor: GgufTensor) -> str:
        return str(self._quants.GGMLQuantizationType(tensor.type).name)

    def is_number(self, tensor: GgufTensor) -> bool:
        """Whether the package can dequantise it."""
        return (
            tensor.type in (0, 1) or self._quants.GGMLQuantizationType(tensor.type) in self._quants.quants._type_traits
        )

    def read_into_(self, target: torch.Tensor, tensor: GgufTensor) -> None:
        """Writes the elements to `target`, a contiguous tensor of its shape and any dtype, one chunk at a time."""
        import numpy

        kind = self._quants.GGMLQuantizationType(tensor.type)
        flat = target.view(-1)
        data = numpy.frombuffer(self._map, numpy.uint8, tensor.bytes, tensor.start)
        block, width = self._quants.GGML_QUANT_SIZES[kind]
        for first in range(0, len(flat), _CHUNK):
            chunk = flat[first : first + _CHUNK]
            # As one row: the package takes small groups of rows at a time.
            row = data[first // block * width :][: len(chunk) // block * width].reshape(1, -1)
            with numpy.errstate(all="ignore"):  # scales may be infinite or NaN
                numbers = self._quants.quants.dequantize(row, kind)
            chunk.copy_(torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy()).view(-1))
        self._let_go(tensor)

    @contextmanager
    def bytes_of(self, tensor: GgufTensor) -> Iterator[memoryview]:
        """Its blocks as they lie in the file."""
        yield memoryview(self._map)[tensor.start : tensor.start + tensor.bytes]
        self._let_go(tensor)

    def _let_go(self, tensor: GgufTensor) -> None:
        """What was read need not stay in memory beside what was made of it."""
        if hasattr(self._map, "madvise"):
            first = tensor.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, tensor.start + tensor.bytes - first)

    # ---- the header

    def _open(self, path: Path) -> None:
        try:
            kind = path.stat()
            check(stat.S_ISREG(kind.st_mode), OP, self.name, "be a regular file", "something else")
            check(kind.st_size >= 24, OP, self.name, "be a whole GGUF file", f"{kind.st_size} bytes")
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            fail(OP, self.name, "be a file that can be read", os.strerror(error.errno or 0))
        self._at, self._size = 0, len(self._map)

    def _header(self, path: Path) -> tuple[int, int, int]:
        magic = self._bytes(4, "the mark of the format")
        if magic != b"GGUF":
            refuse_mistaken(path, self.name, "be a GGUF file")
            fail(OP, self.name, "be a GGUF file", f"one that begins with {shown(magic)}")
        version, tensors, keys = self._number("I"), self._number("Q"), self._number("Q")
        if version not in (2, 3):
            self._unsupported("have version 2 or 3, little-endian", version, "Convert the model again.")
        for count, noun in ((tensors, "tensors"), (keys, "fields")):
            check(count <= _MAX_NAMES, OP, self.name, f"have at most {_MAX_NAMES} {noun}", count)
        return version, tensors, keys

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            text = self._text(key)
            self._characters += len(text)
            check(self._characters <= _MAX_TEXT, OP, self.name, f"hold at most {_MAX_TEXT} bytes of text", "more")
            return text
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            self._broken(f"have a known type of {shown(key)}", kind)
        item, count = self._number("I"), self._number("Q")
        check(count <= _MAX, OP, f"{self.name}: {shown(key)}", f"hold at most {_MAX} values", count)
        if item == _STRING:
            self._room(8 * count, key)  # each takes 8 bytes for its length
            return self._texts(count, key)
        if item not in _SCALARS:
            self._broken(f"be a list of numbers or strings in {shown(key)}", f"values of type {item}")
        code = f"<{count}{_SCALARS[item]}"
        start = self._at
        self._room(struct.calcsize(code), key)
        self._at += struct.calcsize(code)

        def read() -> list[Any]:
            return list(struct.unpack_from(code, self._map, start))

        # As Python objects the elements take many times their size, so only the array that is used is converted.
        return read() if count <= _SHORT or (key == _KINDS and count <= _MAX_STRINGS) else Kept(count, read)

    def _texts(self, count: int, key: str) -> list[str] | Kept:
        """An array of strings, checked first, because as Python objects they take many times their size."""
        self._strings += count
        maximum = f"hold at most {_MAX_STRINGS} strings in lists"
        check(self._strings <= _MAX_STRINGS, OP, self.name, maximum, f"{self._strings} up to {shown(key)}")
        if count <= _SHORT:
            return [self._text(key) for _ in range(count)]
        start, spans = self._at, array("Q")
        for _ in range(count):
            self._text(key)
            spans.append(self._at)

        def read() -> list[str]:
            first, texts = start, []
            for end in spans:
                texts.append(self._map[first + 8 : end].decode("utf-8"))
                first = end
            return texts

        return Kept(count, read)

    def _table(self, count: int) -> dict[str, GgufTensor]:
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._text("the name of a tensor")
            check(name not in entries, OP, self.name, "name every tensor once", f"{shown(name)} twice")
            dims = self._number("I")
            check(1 <= dims <= 4, OP, f"{self.name}: {shown(name)}", "have 1 to 4 dimensions", dims)
            sizes = tuple(self._number("Q") for _ in range(dims))
            entries[name] = (sizes[::-1], self._number("I"), self._number("Q"))
        align = self.fields.get("general.alignment", ABSENT["general.alignment"])
        valid = type(align) is int and 8 <= align <= 1 << 20 and align & (align - 1) == 0
        check(valid, OP, f"{self.name}: general.alignment", "be a power of two from 8", shown(align))
        start = -(-self._at // align) * align
        tensors = {name: self._placed(name, *entry, start, align) for name, entry in entries.items()}
        nbytes = sum(tensor.bytes for tensor in tensors.values())
        check(
            nbytes <= max(self._size - start, 0),
            OP,
            self.name,
            "hold each tensor's bytes for itself",
            "tensors that overlap",
        )
        return tensors

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, align: int) -> GgufTensor:
        label = f"{self.name}: {shown(name)}"
        sizes = {int(kind_number): size for kind_number, size in self._quants.GGML_QUANT_SIZES.items()}
        if kind not in sizes:
            self._unsupported("hold tensors of types that the installed gguf knows", f"type {kind} of {shown(name)}")
        block, width = sizes[kind]
        check(min(shape) >= 1, OP, label, "have no empty dimension", shape)
        check(shape[-1] % block == 0, OP, label, f"have rows of whole blocks of {block}", f"rows of {shape[-1]}")
        nbytes = math.prod(shape) // block * width
        check(offset % align == 0, OP, label, f"begin at a multiple of {align}", offset)
        in_file = start + offset + nbytes <= self._size
        remedy = "Was it copied as a whole?"
        check(in_file, OP, label, f"lie inside the file ({self._size} bytes)", f"shape {shape} at {offset}", remedy)
        return GgufTensor(shape, kind, start + offset, nbytes)

    def _refuse_parts(self) -> None:
        count = self.fields.get("split.count", ABSENT["split.count"])
        if count not in (0, 1):
            remedy = "Join its parts with `llama-gguf-split --merge`."
            self._unsupported("be a whole model", f"one of {shown(count)} parts", remedy)

    # ---- bytes

    def _room(self, count: int, field: str) -> None:
        if count > self._size - self._at:
            self._broken(f"continue for {count} bytes with {shown(field)}", f"{self._size - self._at} more")

    def _bytes(self, count: int, field: str) -> bytes:
        self._room(count, field)
        self._at += count
        return self._map[self._at - count : self._at]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}"), "a number"))[0]

    def _text(self, field: str) -> str:
        start = self._at + 8
        end = start + _LENGTH.unpack_from(self._map, self._at)[0] if start <= self._size else start
        if end > self._size:
            self._broken(f"continue for a string in {shown(field)}", f"{self._size - self._at} bytes more")
        if end - start > _MAX:
            fail(OP, self.name, f"hold strings of at most {_MAX} bytes", f"{end - start} in {shown(field)}")
        self._at = end
        return self._map[start:end].decode("utf-8")

    def _broken(self, expectation: str, actual: object) -> NoReturn:
        fail(OP, self.name, expectation, actual, "Was it copied as a whole?")

    def _unsupported(self, expectation: str, actual: object, remedy: str = "") -> NoReturn:
        raise NotImplementedError(message(OP, self.name, expectation, actual, remedy))


def _library(name: str) -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ImportError(
            f"pdkernels.{OP}: {name} needs the optional library `gguf` ({error}). Install it with `pip install gguf`."
        ) from error
    return gguf
