"""Files of prompts, and files of generated texts. `ledger` holds the results of a run until it is complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pdkernels._validation import check, fail, message

OP = "integrations.generate_files"
ADDED = ("text", "tokens", "error")
"""The fields of a result besides those of its prompt; the error only if there is no text."""
_SUFFIXES = (".jsonl", ".txt", ".parquet")
_ROWS = 1024


class Prompt(NamedTuple):
    """One prompt of the files."""

    number: int
    """Index over all files, in their order."""
    fields: dict[str, Any]
    """All fields of its line, including the prompt."""
    error: str = ""
    """The reason why no text can be generated from it."""


def arrow() -> Any:
    """pyarrow.parquet, which only Parquet files need."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as missing:
        remedy = "Install it with `pip install pyarrow`."
        raise ImportError(f"pdkernels.{OP}: Parquet files need pyarrow. {remedy}") from missing
    return pyarrow.parquet


def read_prompts(paths: Sequence[str | os.PathLike[str]], column: str) -> Iterator[Prompt]:
    """The prompts of all files: lines of .txt that are not empty, objects of .jsonl, rows of .parquet.

    Raises:
        ValueError: for a line without a text or messages under `column`, with the file and the line.
    """
    number = 0
    for path in map(Path, paths):
        for line, fields, bad in _rows(path, column):
            where = f"{path}, line {line}"
            check(isinstance(fields, dict), OP, "prompts", "be objects", where)
            prompt = fields.get(column)
            remedy = f"Its fields are {', '.join(map(repr, fields)) or 'none'}; pass column=... or --column."
            valid = isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(x, dict) for x in prompt))
            check(valid, OP, "prompts", f"have a text or messages under {column!r}", where, remedy)
            for name in ADDED:
                check(name not in fields, OP, "prompts", f"have no field {name!r}, which results add", where)
            error = message(OP, "prompts", "be UTF-8", f"{where}, with other bytes") if bad else ""
            yield Prompt(number, fields, error)
            number += 1


def _rows(path: Path, column: str) -> Iterator[tuple[int, Any, bool]]:
    """Line numbers, contents, and whether bytes that are not UTF-8 were replaced."""
    check(path.suffix in _SUFFIXES, OP, "prompts", f"be in files that end in {', '.join(_SUFFIXES)}", str(path))
    check(path.is_file(), OP, "prompts", "be in files that exist", str(path))
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        # Bytes that are not UTF-8 become surrogates, which UTF-8 cannot encode; a byte-order mark is not text.
        file = path.open(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        fail(OP, "prompts", "be in files that can be read", f"{path} ({error.strerror})")
    with file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\r\n")
            if not line.strip():
                continue
            read = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            bad = read != line
            if path.suffix == ".txt":
                yield number, {column: read}, bad
                continue
            try:
                yield number, json.loads(read), bad
            except (ValueError, RecursionError) as error:
                fail(OP, "prompts", "be JSON", f"{path}, line {number} ({error})")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any, bool]]:
    parquet, number = arrow(), 0
    import pyarrow

    try:
        for batch in parquet.ParquetFile(path).iter_batches(_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, row, False
    except (pyarrow.ArrowException, OSError) as error:
        fail(OP, "prompts", "be a whole Parquet file", f"{path} ({str(error).splitlines()[0]})")


def check_output(path: Path) -> None:
    """Raises ValueError for an output that could not be written at the end."""
    ends = (".jsonl", ".parquet")
    check(path.suffix in ends, OP, "output", f"end in {' or '.join(ends)}", str(path))
    check(path.parent.is_dir(), OP, "output", "lie in a folder that exists", str(path))
    if path.suffix == ".parquet":
        arrow()


def json_line(content: dict[str, Any]) -> bytes:
    """A line of JSON in UTF-8. Lone surrogates, which UTF-8 cannot encode, are escaped."""
    try:
        return json.dumps(content, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(content).encode() + b"\n"


def writer(output: Path) -> Callable[[BinaryIO, Iterator[dict[str, Any]]], None]:
    """The function that writes rows in the format of the output's extension."""
    return _write_parquet if output.suffix == ".parquet" else _write_lines


def _write_lines(file: BinaryIO, rows: Iterator[dict[str, Any]]) -> None:
    file.writelines(map(json_line, rows))


def _write_parquet(file: BinaryIO, rows: Iterator[dict[str, Any]]) -> None:
    import pyarrow

    records = list(rows)
    names = list(
        dict.fromkeys(name for row in records for name in row)
    )  # pyarrow uses the fields of the first row for all rows
    try:
        table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in records])
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
        remedy = (
            "Rename the .parquet.partial file to .jsonl.partial, and repeat the call with that output: no text is lost."
        )
        fail(OP, "fields", "have one type each in a Parquet file", str(error).splitlines()[0], remedy)
    arrow().write_table(table, file)


class Contents:
    """Hashes of the prompts of a run, which reveal a file that changes during the run."""

    def __init__(self, prompts: Iterable[Prompt], output: Path) -> None:
        self._sums = bytearray()
        digest = hashlib.sha256()
        for prompt in prompts:
            if output.suffix == ".jsonl":
                _check_json(prompt)
            line = self._line(prompt)
            digest.update(line)
            self._sums += hashlib.sha256(line).digest()[:8]
        self.digest = digest.hexdigest()
        self.count = len(self._sums) // 8

    def watched(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Passes the prompts through; raises ValueError at the first that has changed."""
        count = 0
        for prompt in prompts:
            there = self._sums[8 * prompt.number : 8 * prompt.number + 8]
            self._same(there == hashlib.sha256(self._line(prompt)).digest()[:8], prompt.number)
            count += 1
            yield prompt
        self._same(count == self.count, count)

    def _same(self, same: bool, number: int) -> None:
        remedy = "Restore the file and repeat the call, or delete <output>.partial and start again."
        check(same, OP, "prompts", "stay as they are during a run", f"another prompt {number}", remedy)

    @staticmethod
    def _line(prompt: Prompt) -> bytes:
        return json.dumps([prompt.fields, bool(prompt.error)], default=repr).encode()


def _check_json(prompt: Prompt) -> None:
    for name, value in prompt.fields.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            remedy = "Name an output that ends in .parquet."
            fail(OP, f"field {name!r}", "be JSON for an output of JSON lines", str(error), remedy)


_SAMPLED = 1 << 20


def model_identity(path: Path) -> str:
    """A hash over the names and contents of a model's files; for a file above 1 MiB, over its size and the first 4 KiB
    of every MiB.

    Training changes every matrix, so a sample detects it, and 14 GB take a second. Dates are ignored: a copy is the
    same model.
    """
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file() or file.name.startswith("."):
            continue
        size = file.stat().st_size
        digest.update(json.dumps([file.name if file != path else "", size]).encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_SAMPLED))
            for start in range(_SAMPLED, size, _SAMPLED):
                opened.seek(start)
                digest.update(opened.read(4096))
    return digest.hexdigest()
