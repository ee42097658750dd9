"""Files of prompts, and files of what was generated from them, written so that a run that was cut off goes on.

Results are appended to ``<output>.partial``, a line for each prompt, as they come. When all are there they are written to the output in
the order of the prompts, and only then does the output exist.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdkernels._validation import check, fail

OP = "integrations.generate_files"
ADDED = ("text", "tokens")
"""What a result has besides the fields of its prompt."""
_SUFFIXES = (".jsonl", ".txt", ".parquet")
_ROWS = 1024


class Prompt(NamedTuple):
    """One prompt of the files."""

    number: int
    """Counted over all files, in their order."""
    fields: dict[str, Any]
    """What its line has, the prompt among them."""


def arrow() -> Any:
    """pyarrow.parquet, which only files of this kind need."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as missing:
        remedy = "Install it with `pip install pyarrow`."
        raise ImportError(f"pdkernels.{OP}: Parquet files must have pyarrow, got none. {remedy}") from missing
    return pyarrow.parquet


def read_prompts(paths: Sequence[str | os.PathLike[str]], column: str) -> Iterator[Prompt]:
    """The prompts of all files: lines of .txt that are not empty, objects of .jsonl, rows of .parquet.

    Raises:
        ValueError: for a line without a text or messages under `column`, with the file and the line.
    """
    number = 0
    for path in map(Path, paths):
        for line, fields in _rows(path, column):
            where = f"{path}, line {line}"
            check(isinstance(fields, dict), OP, "prompts", "be objects", where)
            found = fields.get(column)
            remedy = f"Its fields are {', '.join(map(repr, fields)) or 'none'}; pass column=... or --column."
            fits = isinstance(found, str) or (isinstance(found, list) and all(isinstance(x, dict) for x in found))
            check(fits, OP, "prompts", f"have a text or messages under {column!r}", where, remedy)
            for name in ADDED:
                check(name not in fields, OP, "prompts", f"have no field {name!r}, which results add", where)
            yield Prompt(number, fields)
            number += 1


def _rows(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    """Line numbers and what they hold."""
    check(path.suffix in _SUFFIXES, OP, "prompts", f"be in files that end in {', '.join(_SUFFIXES)}", str(path))
    check(path.is_file(), OP, "prompts", "be in files that exist", str(path))
    if path.suffix == ".parquet":
        number = 0
        for batch in arrow().ParquetFile(path).iter_batches(_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, row
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\r\n")
            if not line.strip():
                continue
            if path.suffix == ".txt":
                yield number, {column: line}
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                fail(OP, "prompts", "be JSON", f"{path}, line {number} ({error})")


def check_output(path: Path) -> None:
    """ValueError for an output that could not be written at the end."""
    ends = (".jsonl", ".parquet")
    check(path.suffix in ends, OP, "output", f"end in {' or '.join(ends)}", str(path))
    check(path.parent.is_dir(), OP, "output", "lie in a folder that exists", str(path))
    if path.suffix == ".parquet":
        arrow()


class Ledger:
    """Which prompts have their results, in ``<output>.partial``; its first line says of what run.

    Args:
        output: where the whole will be.
        run: what decides about the texts. A ledger of another run is refused.
    """

    def __init__(self, output: Path, run: dict[str, Any]) -> None:
        self.output = output
        self.path = output.with_name(output.name + ".partial")
        self.offsets: dict[int, int] = {}
        """Where the line of each prompt starts."""
        # As it comes back from the file.
        run = json.loads(json.dumps(run))
        if self.path.exists():
            self._read(run)
        if not self.path.exists() or self.path.stat().st_size == 0:
            self.path.write_bytes(_line(run))
        self._file = self.path.open("ab")

    def _read(self, run: dict[str, Any]) -> None:
        """What is there, without a line that was cut off."""
        whole = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if whole:
                    self.offsets[json.loads(line)["number"]] = whole
                else:
                    self._check_run(json.loads(line), run)
                whole += len(line)
        os.truncate(self.path, whole)

    def _check_run(self, there: dict[str, Any], run: dict[str, Any]) -> None:
        other = sorted(name for name in there.keys() | run.keys() if there.get(name) != run.get(name))
        if other:
            words = f"{self.path} of a run with another {', '.join(other)}"
            fail(OP, "output", "be begun by the same run", words, "Give the same arguments, or delete the file.")

    def add(self, number: int, result: dict[str, Any]) -> None:
        """One result, once."""
        if number not in self.offsets:
            self.offsets[number] = self._file.tell()
            self._file.write(_line({"number": number, **result}))

    def flush(self) -> None:
        """What was added is now safe from a kill of this process."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def finish(self, prompts: Iterable[Prompt]) -> None:
        """Writes the output, prompts and results together in their order, and deletes the ledger."""
        self.close()
        unfinished = self.output.with_name(self.output.name + ".writing")
        with self.path.open("rb") as file:
            write = _write_parquet if self.output.suffix == ".parquet" else _write_lines
            write(unfinished, self._joined(prompts, file))
        os.replace(unfinished, self.output)
        self.path.unlink()

    def _joined(self, prompts: Iterable[Prompt], file: Any) -> Iterator[dict[str, Any]]:
        for prompt in prompts:
            file.seek(self.offsets[prompt.number])
            result = json.loads(file.readline())
            yield {**prompt.fields, **{name: result[name] for name in ADDED}}


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _write_lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("wb") as file:
        file.writelines(_line(row) for row in rows)


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    import pyarrow

    whole = list(rows)
    names = list(dict.fromkeys(name for row in whole for name in row))  # pyarrow takes the first row's for all
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in whole])
    arrow().write_table(table, path)


def fingerprint(prompts: Iterable[Prompt]) -> tuple[int, str]:
    """How many there are, and a hash of what they hold."""
    count, digest = 0, hashlib.sha256()
    for prompt in prompts:
        digest.update(_line(prompt.fields))
        count += 1
    return count, digest.hexdigest()
