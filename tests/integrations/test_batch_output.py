"""Where a batch run writes: links, files that are there, folders and disks that take nothing."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdkernels.batch import ledger as module
from pdkernels.batch.ledger import Ledger
from pdkernels.batch.ray import generate_files
from tests.integrations.test_prompt_files import JOINED, OPTIONS, RUN, SUMS, go_on, lines, texts
from tests.support.errors import refused


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums.txt"
    path.write_text("\n".join(SUMS) + "\n")
    return path


def test_links_are_refused(sums: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for end in ("", ".partial", ".writing"):
        link = tmp_path / f"out.jsonl{end}"
        for target in (victim, tmp_path / "none"):
            link.symlink_to(target)
            with refused(f"output must be no symbolic link, got {link}"):
                generate_files(sums, tmp_path / "out.jsonl", **OPTIONS)
            link.unlink()
    assert victim.read_text() == "precious" and not (tmp_path / "none").exists()


def test_a_link_made_in_between_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "refuse_links", lambda output: None)
    victim = tmp_path / "victim"
    (tmp_path / "out.jsonl.partial").symlink_to(victim)
    with pytest.raises(OSError, match="^pdkernels.*output must be writable"):
        Ledger(tmp_path / "out.jsonl", RUN, 1)
    (tmp_path / "out.jsonl.partial").unlink()
    (tmp_path / "out.jsonl.writing").symlink_to(victim)
    (tmp_path / "out.jsonl").symlink_to(victim)
    with refused("output must be a new file"):
        go_on(tmp_path / "out.jsonl")
    assert not victim.exists()


def test_a_file_that_appears_meanwhile_is_kept(sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with refused("output must be a new file, got .*. Move it away and repeat the call: .*partial has all texts"):
        generate_files(sums, out, progress=lambda *_: out.write_text("mine") and None, **OPTIONS)
    assert out.read_text() == "mine"
    out.unlink()
    assert generate_files(sums, out, **OPTIONS).resumed == 9


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_no_file(sums: Path, tmp_path: Path, kind: str) -> None:
    make = Path.mkdir if kind == "folder" else os.mkfifo
    for end, error in (("", ValueError), (".partial", (OSError, ValueError))):
        path = tmp_path / f"out.jsonl{end}"
        make(path)
        with pytest.raises(error, match="^pdkernels.*output must"):  # type: ignore[arg-type]
            generate_files(sums, tmp_path / "out.jsonl", **OPTIONS)
        path.rmdir() if kind == "folder" else path.unlink()


def test_a_folder_that_cannot_be_written(sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Any, *_: Any, **__: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(module.os, "open", denied)
    with pytest.raises(OSError, match=r"^pdkernels.*output must be writable, got Permission denied \(.*partial\)\. "):
        generate_files(sums, tmp_path / "out.jsonl", **OPTIONS)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", none)
    with refused("output must be on a file system that locks files"):
        go_on(tmp_path / "out.jsonl")


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(module.os, "link", none)
    go_on(tmp_path / "out.jsonl")
    assert lines(tmp_path / "out.jsonl") == JOINED and len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def small_files() -> Iterator[Any]:
    """Limits the size of a file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_at_the_end(sums: Path, tmp_path: Path, small_files: Any) -> None:
    def fill(done: int, total: int) -> None:
        if done == total:
            small_files(100)

    with pytest.raises(OSError, match=r"^pdkernels.*output must be written, got "):
        generate_files(sums, tmp_path / "out.jsonl", progress=fill, **OPTIONS)
    small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl.partial", "sums.txt"]
    assert generate_files(sums, tmp_path / "out.jsonl", **OPTIONS).resumed == 9


@pytest.mark.parametrize("size", [10, 700])
def test_a_full_disk(sums: Path, tmp_path: Path, small_files: Any, size: int) -> None:
    """In the first line and in a result: a sentence, and the same call goes on when there is room."""
    out = tmp_path / "out.jsonl"
    small_files(size)
    with pytest.raises(
        OSError, match=r"^pdkernels.*output must be written, got .* \(.*partial\)\. What is done is kept"
    ):
        generate_files(sums, out, batch_size=1, **OPTIONS)
    small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert not out.exists()
    report = generate_files(sums, out, batch_size=4, **OPTIONS)
    assert (report.resumed > 0) == (size > 100)
    assert lines(out) == [{"prompt": a, "text": b, "tokens": 6} for a, b in zip(SUMS, texts(SUMS))]
