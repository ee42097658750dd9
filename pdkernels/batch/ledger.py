"""The results so far of a run over files of prompts: ``<output>.partial``, one line per prompt, locked by the run that
writes it.

The first line identifies the run. Every other line has a checksum over the first line and itself, so a damaged line, or
a line of another run, is never taken for a result. Damage is refused with an error; only a last line that a kill has
cut off is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from pdkernels._validation import check, fail, message, refuse
from pdkernels.batch.prompt_files import OP, Prompt, json_line

_TORN_REMEDY = "Nothing was changed. Restore the file, or delete that line: its prompt is then generated again."
_HEADER_REMEDY = "Nothing was changed. Restore the file, or move it away to start from the beginning."
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def failed(doing: str, path: Path, error: OSError) -> NoReturn:
    """The message of an OSError: the action that failed, and the reason."""
    reason = f"{error.strerror or error} ({path})"
    raise OSError(
        message(OP, "output", f"be {doing}", reason, "What is done is kept; the same call goes on.")
    ) from error


def refuse_links(output: Path) -> None:
    """Raises ValueError for a symbolic link where the run would write, because someone else may have put it there."""
    for path in (output, ledger_path(output), _unfinished(output)):
        check(not path.is_symlink(), OP, "output", "be no symbolic link", str(path), "Name the file itself.")


def ledger_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def _unfinished(output: Path) -> Path:
    return output.with_name(output.name + ".writing")


class Ledger:
    """The results of a run. While it is open, no other process can open it.

    Args:
        output: the final file.
        run: all settings that determine the texts. A ledger of another run is refused.
        count: number of prompts.
    """

    def __init__(self, output: Path, run: dict[str, Any], count: int) -> None:
        self.output, self.count = output, count
        self.path = ledger_path(output)
        self.offsets: dict[int, int] = {}
        """The offset of each prompt's line."""
        self.failed = 0
        """Results that are errors."""
        self._waiting: list[bytes] = []
        self._header = json_line(run)
        self._salt = hashlib.sha256(self._header)
        refuse_links(output)
        self._file = _locked(self.path)
        try:
            self._end = self._read(json.loads(self._header))
        except BaseException:
            self._file.close()
            raise

    # ---- reading

    def _read(self, run: dict[str, Any]) -> int:
        """Reads the existing lines and returns the offset of the next one. A last line that was cut off is dropped."""
        file, end = self._file, 0
        reader = io.BufferedReader(file)
        for number, line in enumerate(reader, 1):
            if number == 1:
                if not line.endswith(b"\n") and self._header.startswith(line):
                    break  # killed while writing the first line
                self._check_run(line, run)
            elif not line.endswith(b"\n"):
                break
            else:
                result = self._parsed(line, number)
                if result["number"] in self.offsets:
                    self._damaged(number, f"a second result of prompt {result['number']}")
                self.offsets[result["number"]] = end
                self.failed += result["text"] is None
            end += len(line)
        reader.detach()
        with self._failures("written"):
            if os.fstat(file.fileno()).st_size != end:
                os.ftruncate(file.fileno(), end)
            if end == 0:
                _write_all(file, self._header)
                end = len(self._header)
        return end

    def _check_run(self, line: bytes, run: dict[str, Any]) -> None:
        there: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            there = json.loads(line)
        if not isinstance(there, dict) or not line.endswith(b"\n"):
            self._damaged(1, "which does not say of what run it is", _HEADER_REMEDY)
        other = sorted(name for name in there.keys() | run.keys() if there.get(name) != run.get(name))
        if other or line != self._header:
            fault = f"output cannot be resumed: {self.path} is from a run with different values of {', '.join(other) or 'its first line'}"
            refuse(True, OP, fault, "Give the same arguments, or delete the file.")

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        """The result of a line, if the line is intact."""
        try:
            result = json.loads(line)
        except (ValueError, RecursionError):
            self._damaged(number, "NUL bytes" if b"\0" in line else "which is not JSON")
        if not isinstance(result, dict):
            self._damaged(number, "which is no object")
        sum_there = result.pop("check", None)
        if not isinstance(result.get("number"), int):
            self._damaged(number, "which has no number")
        # The bytes are compared too: JSON has many spellings of a result, and any other spelling was edited.
        if sum_there != self._sum(result) or line != json_line({**result, "check": sum_there}):
            self._damaged(number, "whose checksum is wrong")
        if not 0 <= result["number"] < self.count:
            self._damaged(number, f"a result of prompt {result['number']} among {self.count}")
        return result

    def _damaged(self, number: int, fault: str, remedy: str = _TORN_REMEDY) -> NoReturn:
        fail(OP, "output", "have an undamaged ledger", f"{self.path}, line {number}, {fault}", remedy)

    def _sum(self, result: dict[str, Any]) -> str:
        digest = self._salt.copy()
        digest.update(json_line(result))
        return digest.hexdigest()[:16]

    # ---- writing

    def add(self, number: int, result: dict[str, Any]) -> None:
        """Adds a result, once: ``text`` and ``tokens``, and an ``error`` if there is no text."""
        if number in self.offsets:
            return
        row = {"number": number, **result}
        line = json_line({**row, "check": self._sum(row)})
        self.offsets[number] = self._end + sum(map(len, self._waiting))
        self._waiting.append(line)
        self.failed += result["text"] is None

    def flush(self) -> None:
        """Flushes added results, so that they survive a kill of this process."""
        content = b"".join(self._waiting)
        self._waiting.clear()
        with self._failures("written"):
            try:
                _write_all(self._file, content)
            except OSError:
                with contextlib.suppress(OSError):  # removes a partly written line
                    os.ftruncate(self._file.fileno(), self._end)
                raise
        self._end += len(content)

    def close(self) -> None:
        """Releases the lock. A ledger without results is deleted, because the next call may be another run."""
        if not self._file.closed:
            if not self.offsets:
                with contextlib.suppress(OSError):
                    self.path.unlink()
            self._file.close()

    def finish(self, prompts: Iterable[Prompt], write: Callable[[BinaryIO, Iterator[dict[str, Any]]], None]) -> None:
        """Writes the output, prompts and results together in their order, and deletes the ledger.

        `write` writes rows to a file. After a kill at any moment there is the ledger, or the output, or both with equal
        contents.
        """
        unfinished = _unfinished(self.output)
        refuse_links(self.output)
        with self._failures("written"):
            os.fsync(self._file.fileno())
            with contextlib.suppress(FileNotFoundError):
                # Left by an earlier run that was killed here; the ledger has all of it.
                unfinished.unlink()
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                with open(descriptor, "wb") as file:
                    write(file, self._joined(prompts))
                    file.flush()
                    os.fsync(file.fileno())
                self._publish(unfinished)
            finally:
                with contextlib.suppress(OSError):
                    unfinished.unlink()
            sync_folder(self.output.parent)
            self.path.unlink()
            sync_folder(self.output.parent)
        self._file.close()

    def _publish(self, unfinished: Path) -> None:
        """Renames the complete file, unless the name is taken by anything but a run that was killed before it deleted
        the ledger."""
        try:
            os.link(unfinished, self.output, follow_symlinks=False)
        except FileExistsError:
            same = not self.output.is_symlink() and self.output.is_file() and _same_bytes(unfinished, self.output)
            remedy = f"Move it away and repeat the call: {self.path} has all texts."
            check(same, OP, "output", "be a new file", str(self.output), remedy)
        except OSError:  # a file system without hard links
            exists = os.path.lexists(self.output)
            check(not exists, OP, "output", "be a new file", str(self.output), "Move it away and repeat the call.")
            os.rename(unfinished, self.output)

    def _joined(self, prompts: Iterable[Prompt]) -> Iterator[dict[str, Any]]:
        order = {number: index for index, number in enumerate(sorted(self.offsets, key=self.offsets.__getitem__), 2)}
        reader = io.BufferedReader(self._file)
        for prompt in prompts:
            reader.seek(self.offsets[prompt.number])
            line = order[prompt.number]
            result = self._parsed(reader.readline(), line)
            if result.pop("number") != prompt.number:
                self._damaged(line, f"which is not the result of prompt {prompt.number}")
            yield {**prompt.fields, **result}
        reader.detach()

    @contextlib.contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if str(error).startswith("pdkernels."):
                raise
            failed(doing, self.path, error)


def _locked(path: Path) -> io.FileIO:
    """The ledger, opened and locked for reading and writing."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            failed("writable", path, error)
        file = io.FileIO(descriptor, "r+")
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            check(regular, OP, "output", "have a regular file for what is done", str(path), "Move that away.")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another run may have finished and deleted the file after it was opened.
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError:
            file.close()
            remedy = "Wait for that one, or end it and repeat the call."
            fail(OP, "output", "be written by one run at a time", f"{path}, which another process has open", remedy)
        except OSError as error:
            file.close()
            if error.errno in _NO_LOCKS:
                remedy = "Write into a local folder, and copy the output."
                fail(OP, "output", "be on a file system that locks files", f"{path} ({error.strerror})", remedy)
            failed("locked", path, error)
        except BaseException:
            file.close()
            raise
        file.close()


def _write_all(file: io.FileIO, content: bytes) -> None:
    file.seek(0, os.SEEK_END)
    view = memoryview(content)
    while view:
        view = view[os.write(file.fileno(), view) :]


def _same_bytes(first: Path, second: Path) -> bool:
    with first.open("rb") as a, second.open("rb") as b:
        while True:
            block = a.read(1 << 20)
            if block != b.read(1 << 20):
                return False
            if not block:
                return True


def sync_folder(folder: Path) -> None:
    """Syncs a folder, so that its names survive a power loss, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
