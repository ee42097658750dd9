"""Pages of earlier texts in a folder, for the engine of a program that starts again.

A file holds the K and V of a page, and is called by a hash of all that they depend on: the model, its tokens, and the
file of the page before it. So a text finds the files of its beginning without a list of them, and several engines may
have one folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from pdkernels._host import cpu_isa
from pdkernels._threads import Worker
from pdkernels._validation import sentence
from pdkernels.cache import PagePool, WindowedPool
from pdkernels.cache.hybrid import SavedStates
from pdkernels.config import __version__

_LOG = logging.getLogger("pdkernels.engine")
_VERSION = "1"
"""Of the files."""
_ENDING = ".safetensors"
_WAITING = 64  # texts that wait to be written; more replace the oldest
_ABANDONED = 3600.0  # seconds after which a file that nobody has finished is deleted

Rows = dict[str, Tensor]
"""K and V of a page, ``(layers, tokens, kv_heads, width)``, or the tensors of recurrent states; and the `tokens`."""


class Piece(NamedTuple):
    """A page of a text, and the name of its file."""

    name: str
    start: int
    end: int

    @property
    def of_states(self) -> str:
        """The name of the file with the recurrent states after it."""
        return hashlib.sha256(f"{self.name} states".encode()).hexdigest()

    @property
    def of_windows(self) -> str:
        """The name of the file with its rows of the layers with windows."""
        return hashlib.sha256(f"{self.name} windows".encode()).hexdigest()


class Written(NamedTuple):
    """What is to be written: a file's name and tokens, and its rows, or something that copies them when it is time and
    gives None if they are gone."""

    name: str
    tokens: Sequence[int]
    rows: Rows | Callable[[], Rows | None]


class PrefixFolder:
    """A folder with pages of earlier texts, of at most `limit` bytes; the least recently used are deleted.

    Files that are torn, are not of this format or do not hold what their name says are ignored, with a line in the log
    of ``pdkernels.engine``. Several processes may have the same folder: a file appears under its name when it is whole.

    Args:
        folder: is made, for this user alone, if it is not there.
        limit: bytes of all files.
        model, pool: whose pages they are.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int, model: Any, pool: PagePool) -> None:
        self.folder, self.limit, self.written, self.bytes = Path(folder), limit, 0, 0
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            reason = str(error.strerror or error).lower()
            raise OSError(
                sentence("Engine", f"prefix_dir {str(self.folder)!r} cannot be written to: {reason}")
            ) from None
        self._size, self._identity = pool.page_size, identity_of(model, pool)
        groups = pool.groups if isinstance(pool, WindowedPool) else {}
        self._windows = {name: len(group.k) for window, group in groups.items() for name in names_of(window)}
        """The layers of each tensor in a file of layers with windows."""
        self._pages, self._dtype = dict.fromkeys("kv", len(pool.k)), pool.k.dtype
        self._rows = dict.fromkeys("kv", tuple(pool.k.shape[3:]))
        self._rows |= {name: tuple(group.k.shape[3:]) for window, group in groups.items() for name in names_of(window)}
        """Heads and their size, by tensor."""
        self._most = pool.nbytes
        """Bytes of files that have been read and wait for their request: more than it can have are of no use."""
        self._read: OrderedDict[str, Rows] = OrderedDict()
        self._held, self._told = 0, False
        self._told_errno: int | None = None
        """Of the error that the log has, since when nothing was written."""
        self._bad: set[str] = set()
        self._jobs: deque[list[Written]] = deque(maxlen=_WAITING)
        self._ready, self._closed = threading.Condition(), False
        self._writer = Worker(self._run, self.close, "pdkernels-prefixes")
        self._scan()
        self._writer.start()

    def pieces(self, root: tuple[Any, ...], text: Sequence[int]) -> list[Piece]:
        """The whole pages of a text, and the rest of it, which is no page yet."""
        pieces, name = list[Piece](), self._first(root)
        for start in range(0, len(text), self._size):
            tokens = text[start : start + self._size]
            pieces.append(Piece(name := self._name(name, tokens), start, start + len(tokens)))
        return pieces

    def prepare(self, root: tuple[Any, ...], text: Sequence[int], start: int, states: bool) -> list[Piece]:
        """Reads the files of a text beyond `start` tokens, whole pages, and the recurrent states of the last one that
        has some. Returns those that `take` has now. Any thread may wait for this; others go on."""
        pages = [piece for piece in self.pieces(root, text) if piece.end - piece.start == self._size]
        pieces = [piece for piece in pages if piece.end <= start]
        for piece in pages[len(pieces) :]:
            if not self._fetch(piece.name, text[piece.start : piece.end], self._pages):
                break
            pieces.append(piece)
        at, before = (pieces[-1].end, pieces[-1].name) if pieces else (0, self._first(root))
        for end in range(min(at + self._size - 1, len(text)), at, -1):
            piece = Piece(self._name(before, text[at:end]), at, end)
            if self._fetch(piece.name, text[at:end], self._pages):
                pieces.append(piece)
                break
        now, new = time.time(), [piece for piece in pieces if piece.end > start]
        for depth, piece in enumerate(pieces):  # the end of a text is older than its beginning, and goes first
            self._use(piece.name, now - depth * 1e-3)
        for piece in new if self._windows else ():
            if self._fetch(piece.of_windows, text[piece.start : piece.end], self._windows):
                self._use(piece.of_windows, now)
        for piece in reversed(new) if states else ():
            if self._fetch(piece.of_states, text[piece.start : piece.end], None):
                self._use(piece.of_states, now)
                break
        return new

    def take(self, name: str) -> Rows | None:
        """What `prepare` has read of a file; None: nothing."""
        with self._ready:
            rows = self._read.pop(name, None)
            self._held -= _nbytes(rows or {})
            return rows

    def write(self, job: list[Written]) -> None:
        """Writes pages of a text, from the first to the last, some time later and in another thread."""
        with self._ready:
            self._jobs.append(job)
            self._ready.notify()

    def close(self) -> None:
        """Takes no more; what is there is written by the time its thread has ended."""
        with self._ready:
            self._closed = True
            self._ready.notify()

    def join(self) -> None:
        """Waits for its thread."""
        self._writer.join()

    def _first(self, root: tuple[Any, ...]) -> str:
        return hashlib.sha256(repr((self._identity, root)).encode()).hexdigest()

    def _name(self, before: str, tokens: Sequence[int]) -> str:
        return hashlib.sha256(f"{before} {','.join(map(str, tokens))}".encode()).hexdigest()

    def _path(self, name: str) -> Path:
        return self.folder / (name + _ENDING)

    def _use(self, name: str, when: float) -> None:
        try:
            os.utime(self._path(name), (when, when))
        except OSError:  # another process has deleted it
            pass

    def _fetch(self, name: str, tokens: Sequence[int], layers: dict[str, int] | None) -> bool:
        """Whether a file is there; reads it. `layers`: of its tensors of K and V; None: it has recurrent states."""
        with self._ready:
            if name in self._read:
                return True
        rows = self._load(name, list(tokens), layers)
        if rows is None:
            return False
        with self._ready:
            self._read[name] = rows
            self._held += _nbytes(rows)
            while self._held > self._most:
                self._held -= _nbytes(self._read.popitem(last=False)[1])
            return name in self._read

    def _fits(self, rows: Rows, count: int, layers: dict[str, int]) -> bool:
        return rows.keys() == {*layers, "tokens"} and all(
            (tuple(rows[side].shape), rows[side].dtype) == ((number, count, *self._rows[side]), self._dtype)
            for side, number in layers.items()
        )

    def _load(self, name: str, tokens: list[int], layers: dict[str, int] | None) -> Rows | None:
        if name in self._bad:
            return None
        try:
            data = _contents(self._path(name), self.limit)
        except OSError:
            return None
        try:
            size = int.from_bytes(data[:8], "little")
            metadata = json.loads(data[8 : 8 + size])["__metadata__"]
            rows = load(data)
            right = rows["tokens"].tolist() == tokens and metadata == _facts(name, rows)
            if not right or (layers is not None and not self._fits(rows, len(tokens), layers)):
                raise ValueError("it does not hold what its name says")
            return rows
        except Exception as error:  # whatever is in it
            self._refuse(name, str(error) or type(error).__name__)
            return None

    def _refuse(self, name: str, why: str) -> None:
        self._bad.add(name)
        _LOG.warning("ignored %s: %s", self._path(name), why.splitlines()[0][:200])

    def _run(self) -> None:
        while True:
            with self._ready:
                while not (self._jobs or self._closed):
                    self._ready.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                self._write(job)
            except OSError as error:
                if error.errno != self._told_errno:
                    _LOG.warning("texts are not written to %s: %s", self.folder, error)
                self._told_errno = error.errno
            except Exception:
                _LOG.exception("a text was not written to %s", self.folder)

    def _write(self, job: list[Written]) -> None:
        oldest, now = self._scan(), time.time()
        for depth, (name, tokens, rows) in enumerate(job):
            path, when = self._path(name), now - depth * 1e-3
            if name not in self._bad and path.exists():
                self._use(name, when)
                continue
            tensors = rows() if callable(rows) else rows
            if tensors is None:  # forgotten meanwhile, and with it what comes after
                return
            tensors = {**tensors, "tokens": torch.tensor(tokens, dtype=torch.int64, device="cpu")}
            data = save(tensors, _facts(name, tensors))
            while self.bytes + len(data) > self.limit and oldest:
                self._delete(*oldest.popleft())
            if self.bytes + len(data) > self.limit:
                return
            self._replace(path, data)
            self._use(name, when)
            self._bad.discard(name)
            self.written += len(tokens) if "k" in tensors else 0
            self.bytes += len(data)

    def _replace(self, path: Path, data: bytes) -> None:
        """Writes a whole file or none."""
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
            self._told_errno = None
        except BaseException:
            os.unlink(temporary)
            raise

    def _scan(self) -> deque[tuple[Path, int]]:
        """The files of this folder with their sizes, the least recently used first; counts their bytes."""
        files, foreign = [], 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:  # another process has deleted it
                    continue
                stem, ending = os.path.splitext(entry.name)
                if stem.startswith(".") and ending == ".tmp":
                    if time.time() - status.st_mtime > _ABANDONED:
                        self._delete(Path(entry.path), 0)
                elif ending == _ENDING and len(stem) == 64 and stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime, Path(entry.path), status.st_size))
                else:
                    foreign += 1
        if foreign and not self._told:
            self._told = True
            _LOG.warning("ignored %d files in %s that are no pages", foreign, self.folder)
        self.bytes = sum(size for _, _, size in files)
        return deque((path, size) for _, path, size in sorted(files))

    def _delete(self, path: Path, size: int) -> None:
        path.unlink(missing_ok=True)
        self.bytes -= size


def identity_of(model: Any, pool: PagePool) -> str:
    """A hash of all that K and V depend on but tokens: the weights, the config, and what computes them."""
    device = pool.k.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {cpu_isa()}"
    groups = [*pool.groups] if isinstance(pool, WindowedPool) else []
    kind = type(model).__name__, repr(model.config), str(pool.k.dtype), pool.page_size, *groups
    digest = hashlib.sha256(repr((_VERSION, __version__, torch.__version__, where, kind)).encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _facts(name: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What is written beside the tensors."""
    checksum = 0
    for key in sorted(tensors):
        checksum = zlib.crc32(_bytes(tensors[key]), checksum)
    return {"format": "pdkernels prefix", "version": _VERSION, "name": name, "crc32": f"{checksum:08x}"}


def names_of(window: int) -> tuple[str, str]:
    """Of K and V of the layers with a window in a file.

    >>> names_of(512)
    ('k 512', 'v 512')
    """
    return f"k {window}", f"v {window}"


def rows_of_states(saved: SavedStates) -> Rows:
    """Recurrent states as tensors of a file.

    >>> saved = SavedStates(3, torch.tensor([3, 3]), [torch.ones(2), torch.zeros(1)], 1)
    >>> states_of_rows(rows_of_states(saved)).tensors
    [tensor([1., 1.]), tensor([0.])]
    """
    numbered = {f"{number:04d}": tensor.cpu() for number, tensor in enumerate(saved.tensors)}
    return {**numbered, "lengths": saved.lengths.cpu(), "pending": torch.tensor(saved.pending, device="cpu")}


def states_of_rows(rows: Rows) -> SavedStates:
    """The same the other way."""
    tensors = [rows[name] for name in sorted(rows) if name.isdecimal()]
    return SavedStates(int(rows["lengths"].max()), rows["lengths"], tensors, int(rows["pending"]))


def _nbytes(rows: Rows) -> int:
    return sum(tensor.nbytes for tensor in rows.values())


def _contents(path: Path, most: int) -> bytes:
    """Of a regular file of at most so many bytes; a pipe would be waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise OSError(sentence("Engine", f"{path} is no file of this size"))
        return file.read()
