"""Prompts that fail, beside others that do not; and files that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.batch.prompt_files import read_prompts
from pdkernels.batch.ray import generate_files
from tests.integrations.test_prompt_files import OPTIONS, SUMS, lines, texts
from tests.support.errors import refused


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums.txt"
    path.write_text("\n".join(SUMS) + "\n")
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Ten prompts: one with a byte that is not UTF-8, one with half a character, one that is empty."""
    rows = [json.dumps({"prompt": text}).encode() for text in SUMS[:7]]
    rows[2:2] = [b'{"prompt": "caf\xe9", "id": 2}', b'{"prompt": "\\ud83d"}', b'{"prompt": ""}']
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(rows))
    return path


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_prompt_that_fails_costs_no_other_its_text(mixed: Path, tmp_path: Path, size: int) -> None:
    report = generate_files(mixed, tmp_path / "out.jsonl", batch_size=size, **OPTIONS)
    assert (report.prompts, report.failed) == (10, 3)
    found = lines(tmp_path / "out.jsonl")
    assert [row["text"] for row in found] == [*texts(SUMS[:2]), None, None, None, *texts(SUMS[2:7])]
    bad = found[2:5]
    assert all(row["tokens"] == 0 and row["error"].startswith("pdkernels.") for row in bad)
    assert bad[0]["prompt"] == "caf\ufffd" and bad[0]["id"] == 2
    assert f"prompts must be UTF-8, got {mixed}, line 3" in bad[0]["error"]
    assert bad[1]["prompt"] == "\ud83d" and "only Unicode characters" in bad[1]["error"]
    assert "hold at least one token" in bad[2]["error"]
    assert all("error" not in row for row in [*found[:2], *found[5:]])


def test_draws_are_the_same_beside_a_prompt_that_fails(mixed: Path, tmp_path: Path) -> None:
    for size in (1, 8):
        generate_files(mixed, tmp_path / f"{size}.jsonl", batch_size=size, temperature=1.0, seed=4, **OPTIONS)
    assert lines(tmp_path / "1.jsonl") == lines(tmp_path / "8.jsonl")


def test_a_prompt_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    model = pd.models.load("tiny-code")
    model.config = replace(model.config, max_positions=40)
    monkeypatch.setattr(pd.models, "load", lambda *_, **__: model)
    path = tmp_path / "long.txt"
    path.write_text("\n".join([SUMS[0], "x" * 50, SUMS[1]]))
    assert generate_files(path, tmp_path / "out.jsonl", **OPTIONS).failed == 1
    found = lines(tmp_path / "out.jsonl")
    assert [row["text"] for row in found] == [texts(SUMS[:1])[0], None, texts(SUMS[1:2])[0]]
    assert "leave room for max_new_tokens in the model's 40 positions, got 50 tokens and 6 more" in found[1]["error"]
    path.write_text("x" * 50)  # alone: it is still the prompt's fault
    assert generate_files(path, tmp_path / "alone.jsonl", **OPTIONS).failed == 1


def test_memory_that_one_batch_lacks(sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdkernels.batch import ray

    made = ray.generate

    def small(model: Any, prompts: Any, *rest: Any, **options: Any) -> Any:
        if len(prompts) > 2 or SUMS[3] in prompts:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return made(model, prompts, *rest, **options)

    monkeypatch.setattr(ray, "generate", small)
    assert generate_files(sums, tmp_path / "out.jsonl", **OPTIONS).failed == 1
    found = lines(tmp_path / "out.jsonl")
    assert "a prompt does not fit in memory" in found[3]["error"]
    assert [row["text"] for row in found] == [text if i != 3 else None for i, text in enumerate(texts(SUMS))]


def test_settings_that_no_prompt_works_with_end_the_run(sums: Path, tmp_path: Path) -> None:
    for options in ({"block_size": 0, "method": "jacobi"}, {"temperature": -1.0}, {"max_new_tokens": 10**12}):
        with refused("pdkernels.decoding"):
            generate_files(sums, tmp_path / "out.jsonl", **{**OPTIONS, **options})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sums.txt"]


def test_a_fault_of_the_program_is_no_error_of_a_prompt(
    sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdkernels.batch import ray

    def broken(*_: Any, **__: Any) -> None:
        raise IndexError("a fault")

    monkeypatch.setattr(ray, "generate", broken)
    with pytest.raises(IndexError):
        generate_files(sums, tmp_path / "out.jsonl", **OPTIONS)


def test_stop_ends_the_run_at_the_first_error(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with refused("prompts must be UTF-8"):
        generate_files(mixed, out, batch_size=2, on_error="stop", **OPTIONS)
    kept = Path(f"{out}.partial").read_text().splitlines()
    assert len(kept) == 3
    mixed.write_bytes(mixed.read_bytes().replace(b"\xe9", b"\xc3\xa9"))
    with refused("from a run with different values of prompts"):
        generate_files(mixed, out, batch_size=2, on_error="stop", **OPTIONS)


def test_what_a_line_must_hold_is_said_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, words in [
        ("[" * 100_000, "prompts must be JSON"),
        ('{"prompt": "x", "n": ' + "1" * 5000 + "}", "prompts must be JSON"),
        ('{"prompt": "x", "error": 1}', "prompts must have no field 'error'"),
        ('{"text": "x"}', "prompts must have a text or messages under 'prompt'"),
    ]:
        path.write_text('{"prompt": "x"}\n' + line)
        with refused(words):
            list(read_prompts([path], "prompt"))
    path.unlink()
    path.touch()
    assert generate_files(path, tmp_path / "none.jsonl", **OPTIONS).prompts == 0
    assert (tmp_path / "none.jsonl").read_text() == ""


def test_parquet_fields(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
    import datetime

    import pyarrow
    import pyarrow.parquet as parquet

    day = datetime.date(2026, 1, 2)
    parquet.write_table(pyarrow.table({"prompt": SUMS[:2], "day": [day, day]}), tmp_path / "in.parquet")
    with refused("field 'day' must be JSON for an output of JSON lines"):
        generate_files(tmp_path / "in.parquet", tmp_path / "out.jsonl", **OPTIONS)
    generate_files(tmp_path / "in.parquet", tmp_path / "out.parquet", **OPTIONS)
    assert parquet.read_table(tmp_path / "out.parquet")["day"].to_pylist() == [day, day]
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "in.parquet").read_bytes()[:-9])
    with refused("prompts must be a whole Parquet file"):
        generate_files(tmp_path / "torn.parquet", tmp_path / "b.parquet", **OPTIONS)
    two = tmp_path / "two.jsonl"
    two.write_text('{"prompt": "a", "x": 1}\n{"prompt": "b", "x": "1"}\n{"prompt": ""}\n')
    with refused("fields must have one type each in a Parquet file"):
        generate_files(two, tmp_path / "c.parquet", **OPTIONS)
    (tmp_path / "c.parquet.partial").rename(tmp_path / "c.jsonl.partial")
    report = generate_files(two, tmp_path / "c.jsonl", **OPTIONS)
    assert (report.resumed, report.failed) == (3, 1) and len(lines(tmp_path / "c.jsonl")) == 3
