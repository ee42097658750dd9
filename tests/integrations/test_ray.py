"""Files of prompts: read, generated for in one process or by Ray's workers, written once."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.batch.ledger import Ledger
from pdkernels.batch.prompt_files import check_output, read_prompts, writer
from pdkernels.batch.ray import generate_files
from pdkernels.cli._settings import assigned_options
from tests.support.errors import refused

SUMS = [f"{100 + 37 * i} + {990 - 53 * i} = ?" for i in range(9)]
METHOD: dict[str, Any] = dict(method="linear_self_speculation", max_new_tokens=12, block_size=8)
OP = "integrations.generate_files: "


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(SUMS)))
    return path


def expected(**options: Any) -> list[dict[str, Any]]:
    """By `generate`, all prompts in one batch."""
    options = {**METHOD, **options}
    found = pd.decoding.generate(pd.models.load("tiny-trimode"), SUMS, **options)
    rows = zip(SUMS, found.text, found.tokens)
    return [{"id": i, "prompt": a, "text": b, "tokens": len(c)} for i, (a, b, c) in enumerate(rows)]


def test_texts_are_those_of_one_batch(sums: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = generate_files(
        sums, tmp_path / "out.jsonl", "tiny-trimode", batch_size=4, progress=lambda *x: seen.append(x), **METHOD
    )
    assert lines(tmp_path / "out.jsonl") == expected()
    assert seen == [(4, 9), (8, 9), (9, 9)]
    assert (report.prompts, report.resumed, list(report.workers.values())) == (9, 0, [9])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "sums.jsonl"]


def test_draws_do_not_depend_on_the_batch(sums: Path, tmp_path: Path) -> None:
    for size in (2, 9):
        hot = dict(batch_size=size, seed=5, temperature=1.0, top_k=8, min_p=0.01)
        generate_files(sums, tmp_path / f"{size}.jsonl", "tiny-trimode", **hot, **METHOD)
    assert (
        lines(tmp_path / "2.jsonl")
        == lines(tmp_path / "9.jsonl")
        == expected(seed=5, temperature=1.0, top_k=8, min_p=0.01)
    )


class Stopped(Exception):
    pass


def stop_after(count: int) -> Any:
    def progress(done: int, total: int) -> None:
        if done >= count:
            raise Stopped

    return progress


def test_a_call_that_was_cut_off_goes_on(sums: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    with pytest.raises(Stopped):
        generate_files(sums, out, "tiny-trimode", batch_size=2, progress=stop_after(4), **METHOD)
    assert not out.exists() and len(partial.read_text().splitlines()) == 5
    with partial.open("a") as file:
        file.write('{"number": 4, "te')  # what a kill may leave
    report = generate_files(sums, out, "tiny-trimode", batch_size=3, **METHOD)
    assert lines(out) == expected() and (report.resumed, report.generated) == (4, 5)
    assert not partial.exists()


def test_another_run_is_refused(sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(Stopped):
        generate_files(sums, out, "tiny-trimode", batch_size=2, progress=stop_after(2), **METHOD)
    with refused(f"{OP}output cannot be resumed: {out}.partial is from a run with different values of options, seed"):
        generate_files(sums, out, "tiny-trimode", seed=1, **{**METHOD, "block_size": 4})
    sums.write_text(sums.read_text() + '{"prompt": "1 + 1 = ?"}\n')
    with refused("from a run with different values of prompts. Give the same arguments, or delete the file."):
        generate_files(sums, out, "tiny-trimode", **METHOD)


def test_a_result_is_written_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "out.jsonl", {"model": "m"}, 1)
    for text in ("first", "second"):
        ledger.add(0, {"text": text, "tokens": 1})
    ledger.flush()
    ledger.close()
    again = Ledger(tmp_path / "out.jsonl", {"model": "m"}, 1)
    assert list(again.offsets) == [0]
    again.finish(read_prompts([write(tmp_path, "a.txt", "x")], "prompt"), writer(tmp_path / "out.jsonl"))
    assert lines(tmp_path / "out.jsonl") == [{"prompt": "x", "text": "first", "tokens": 1}]


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def test_files_of_prompts(tmp_path: Path) -> None:
    text = write(tmp_path, "a.txt", "one \n\n  two\n")
    objects = write(tmp_path, "b.jsonl", '{"q": "é\\n", "id": 7}\n\n{"q": [{"role": "user", "content": "hi"}]}')
    found = list(read_prompts([text, objects], "q"))
    assert [prompt.number for prompt in found] == [0, 1, 2, 3]
    assert [prompt.fields["q"] for prompt in found[:3]] == ["one ", "  two", "é\n"]
    assert found[2].fields["id"] == 7 and found[3].fields["q"][0]["content"] == "hi"


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("a.jsonl", '{"q": "x"}\n{"q"\n', "prompts must be JSON, got .*a.jsonl, line 2"),
        ("a.jsonl", '["x"]\n', "prompts must be objects, got .*line 1"),
        (
            "a.jsonl",
            '{"text": 1, "id": 2}\n',
            "have a text or messages under 'q', got .*line 1. Its fields are 'text', 'id'",
        ),
        ("a.jsonl", '{"q": "x", "tokens": 2}\n', "prompts must have no field 'tokens', which results add"),
        ("a.csv", "q\n", r"prompts must be in files that end in \.jsonl, \.txt, \.parquet"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        list(read_prompts([write(tmp_path, name, content)], "q"))


def test_calls_that_are_refused(sums: Path, tmp_path: Path) -> None:
    with refused(f"{OP}prompts must be in files that exist"):
        list(read_prompts([tmp_path / "none.txt"], "q"))
    with refused(f"{OP}output must end in .jsonl or .parquet"):
        check_output(tmp_path / "out.txt")
    with refused(f"{OP}output must lie in a folder that exists"):
        check_output(tmp_path / "none" / "out.jsonl")
    with refused(f"{OP}output must be a new file"):
        generate_files(sums, sums, "tiny-trimode")
    with refused(f"TypeError: {OP}model must be a name or a path"):
        generate_files(sums, tmp_path / "out.jsonl", 3)  # type: ignore[arg-type]
    with refused("TypeError: method 'jacobi' has no option 'steps'"):
        generate_files(sums, tmp_path / "out.jsonl", "tiny-trimode", "jacobi", steps=3)
    with refused("batch: --option must be NAME=VALUE, got 'block_size'"):
        assigned_options("batch", ["block_size"])


def test_options_of_the_command_line() -> None:
    found = assigned_options("batch", ["block_size=16", "keep_changed=true", "draft=ngram"])
    assert found == dict(block_size=16, keep_changed=True, draft="ngram")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_workers_without_ray(sums: Path, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"workers need ray\[data\]. Install it with `pip install 'ray\[data\]'`"):
        generate_files(sums, tmp_path / "out.jsonl", "tiny-trimode", workers=2)


def test_parquet(sums: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
    import pyarrow.parquet as parquet

    generate_files(sums, tmp_path / "out.parquet", "tiny-trimode", **METHOD)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.to_pylist() == expected()
    parquet.write_table(table.select(["id", "prompt"]), tmp_path / "in.parquet")
    generate_files(tmp_path / "in.parquet", tmp_path / "out.jsonl", "tiny-trimode", **METHOD)
    assert lines(tmp_path / "out.jsonl") == expected()
    mixed = write(tmp_path, "mixed.jsonl", '{"prompt": "7 + 5 = ?"}\n{"prompt": "7 + 6 = ?", "note": "late"}\n')
    generate_files(mixed, tmp_path / "mixed.parquet", "tiny-trimode", **METHOD)
    assert parquet.read_table(tmp_path / "mixed.parquet")["note"].to_pylist() == [None, "late"]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of two cores on this machine."""
    library = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[data]'")
    pytest.importorskip("pyarrow", reason="Ray Data is not installed: pip install 'ray[data]'")
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, sys.path)])
    environment = {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}}
    library.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield library
    library.shutdown()


@pytest.mark.slow
def test_two_workers(ray: Any, sums: Path, tmp_path: Path) -> None:
    report = generate_files(sums, tmp_path / "out.jsonl", "tiny-trimode", workers=2, batch_size=1, **METHOD)
    assert lines(tmp_path / "out.jsonl") == expected()
    assert len(report.workers) == 2 and sum(report.workers.values()) == len(SUMS)


def ray_workers() -> list[int]:
    """Processes of this process's cluster that hold a model."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    parents = {int(row[0]): int(row[1]) for row in rows}

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    return [int(row[0]) for row in rows if "ray::MapWorker" in row[-1] and ours(int(row[0]))]


@pytest.mark.slow
def test_a_killed_worker_loses_and_doubles_nothing(ray: Any, sums: Path, tmp_path: Path) -> None:
    """One dies after the first result; a few results later the caller stops too, and starts again."""
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if not killed:
            killed.append(ray_workers()[0])
            os.kill(killed[0], signal.SIGKILL)
        if done == 6:
            raise Stopped

    options: dict[str, Any] = dict(workers=2, batch_size=1, **METHOD)
    with pytest.raises(Stopped):
        generate_files(sums, tmp_path / "out.jsonl", "tiny-trimode", progress=kill, **options)
    report = generate_files(sums, tmp_path / "out.jsonl", "tiny-trimode", **options)
    assert killed and report.resumed == 6 and lines(tmp_path / "out.jsonl") == expected()


@pytest.mark.slow
def test_an_error_of_a_worker_is_the_callers(ray: Any, sums: Path, tmp_path: Path) -> None:
    with refused("decoding.generate: prompt"):
        generate_files(sums, tmp_path / "out.jsonl", "tiny-trimode", workers=1, max_new_tokens=10**6)
