"""K and V of earlier texts in a folder: for an engine that is made later, whatever happens to the files."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.engine.tree import PrefixTree
from pdkernels.models import Transformer, TransformerConfig

PAGE = 8
NEW: dict[str, Any] = {"max_new_tokens": 30, "end_tokens": (60,), "temperature": 1.0}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkernels.engine.pages.PAGE", PAGE)
    monkeypatch.setattr("pdkernels.engine.tree.PrefixTree.every", 64)


def engine(model: Any, folder: Path, **sizes: Any) -> pd.Engine:
    sizes = {"max_prompt_tokens": 400, "max_new_tokens": 30, "prompt_tokens_per_step": 64, **sizes}
    return pd.Engine(model, prefix_dir=folder, **sizes)


def drawn(seed: int, count: int) -> list[int]:
    return torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def asked(engine: pd.Engine, text: list[int]) -> tuple[int, list[int]]:
    """Tokens of a prompt that did not run, and the answer, which is that of `generate`."""
    handle = engine.submit(text, **NEW)
    tokens = handle.result(60).tokens
    assert tokens.equal(generate(engine.model, text, **NEW).tokens)
    return handle.reused, tokens.tolist()


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)


@pytest.mark.parametrize("name", ["tiny-code", "tiny-hybrid"])
def test_an_engine_that_is_made_later_goes_on_with_a_chat(name: str, tmp_path: Path) -> None:
    model, text = pd.models.load(name), drawn(0, 150)
    for turn in range(3):
        with engine(model, tmp_path) as one:
            before = len(text) - 20 - 1 if turn else 0
            known, answer = asked(one, text)
            assert known == before and one.metrics().restored_tokens == before
        assert one.metrics().written_tokens > 0 and one.metrics().folder_bytes > 0
        text += answer + drawn(turn + 1, 20)
    assert all(len(path.stem) == 64 and path.suffix == ".safetensors" for path in files(tmp_path))


def test_a_chat_of_thousands_of_tokens_runs_what_is_new_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkernels.engine.pages.PAGE", 64)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 24, "max_positions": 8192}
    model = Transformer(TransformerConfig(vocab_size=61, hidden_size=16, layers=2, **sizes)).requires_grad_(False)
    forward, ran = Transformer.forward, list[int]()

    def counting(self: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        ran.append(tokens.shape[1])
        return forward(self, tokens, **options)

    text = drawn(0, 4000)
    with engine(model, tmp_path, max_prompt_tokens=5000) as one:
        text += one.submit(text, **NEW).result(60).tokens.tolist() + drawn(1, 12)
    monkeypatch.setattr(Transformer, "forward", counting)
    with engine(model, tmp_path, max_prompt_tokens=5000) as one:
        found = one.submit(text, max_new_tokens=1).result(60).tokens
    assert one.metrics().reused_tokens == len(text) - 13 and max(ran) == 13
    monkeypatch.undo()
    assert found.equal(generate(model, text, max_new_tokens=1).tokens)


@pytest.mark.parametrize("name", ["tiny-code", "tiny-hybrid"])
def test_rows_from_a_folder_have_the_bits_of_computed_ones(name: str, tmp_path: Path) -> None:
    model, text = pd.models.load(name), drawn(0, 150)
    kept = []
    for _ in range(2):
        with engine(model, tmp_path) as one:
            asked(one, text)
        tree: Any = one._memory.pages
        path = tree.path((), text[: 18 * PAGE])
        states = [state.saved for page in path for end, state in sorted(page.states.items()) if end == 128]
        numbers = torch.tensor([page.number for page in path])
        kept.append([tree.pool.k[:, numbers], tree.pool.v[:, numbers], *(t for one in states for t in one.tensors)])
    assert one.metrics().restored_tokens >= 144
    assert len(kept[0]) == len(kept[1]) and all(torch.equal(*pair) for pair in zip(*kept))


def test_other_models_dtypes_and_roots_have_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = pd.models.load("tiny-code"), drawn(0, 100)
    with engine(model, tmp_path) as one:
        asked(one, text)
    other = pd.models.load("tiny-code")
    with torch.no_grad():
        next(other.parameters()).view(-1)[5] += 1
    narrow = pd.models.load("tiny-code", cache_dtype=torch.int8)
    for changed in (other, narrow):
        with engine(changed, tmp_path) as one:
            one.submit(text, **NEW).result(60)
        assert one.metrics().restored_tokens == 0 and one.metrics().written_tokens > 100
    with engine(narrow, tmp_path) as one:
        assert one.submit(text, **NEW).result(60) and one.metrics().restored_tokens > 90
    monkeypatch.setattr("pdkernels.engine.pages.Memory.root", lambda *_: ("adapter",))
    with engine(model, tmp_path) as one:
        asked(one, text)
    assert one.metrics().restored_tokens == 0


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "cut off":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "zeros":
        path.write_bytes(data[:-100] + bytes(100))
    elif how == "another's":
        path.write_bytes(next(other for other in files(path.parent) if other != path).read_bytes())
    elif how == "no safetensors":
        path.write_bytes(b"\xff" * 8 + b"{" * 1000)
    elif how == "other tensors":
        save_file({"k": torch.zeros(3)}, path)
    elif how == "another shape":
        save_file({**load_file(path), "k": torch.zeros(1, 2, 3)}, path)
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "a link":
        path.rename(path.with_suffix(".moved"))
        path.symlink_to(path.with_suffix(".moved"))
    else:
        path.unlink()


@pytest.mark.parametrize(
    "how",
    ["cut off", "empty", "zeros", "another's", "no safetensors", "other tensors", "another shape", "a folder", "a pipe",
     "a link", "deleted"],
)  # fmt: skip
def test_files_that_are_not_whole_are_ignored(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, text = pd.models.load("tiny-code"), drawn(0, 100)
    with engine(model, tmp_path) as one:
        asked(one, text)
        names = [piece.name for piece in one._memory.folder.pieces((), text)]  # type: ignore[union-attr]
    spoil(tmp_path / f"{names[5]}.safetensors", how)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "pdkernels.engine"), engine(model, tmp_path) as one:
        assert asked(one, text)[0] == 5 * PAGE
        asked(one, [*text[:50], *drawn(1, 40)])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if how == "deleted" else 1), lines
    if how not in ("a folder", "a pipe", "a link"):  # they are written anew
        with engine(model, tmp_path) as one:
            assert asked(one, text)[0] > 90


def test_files_of_others_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".abandoned.tmp").write_text("half")
    os.utime(tmp_path / ".abandoned.tmp", (1, 1))
    (tmp_path / ".new.tmp").write_text("half")
    with caplog.at_level(logging.WARNING, "pdkernels.engine"), engine(pd.models.load("tiny-code"), tmp_path) as one:
        asked(one, drawn(0, 100))
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == ["ignored 1 files"]
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / ".new.tmp").exists()
    assert not (tmp_path / ".abandoned.tmp").exists()


def test_a_folder_has_a_bound_and_the_oldest_text_goes(tmp_path: Path) -> None:
    model, texts = pd.models.load("tiny-code"), [drawn(seed, 100) for seed in range(4)]
    with engine(model, tmp_path) as one:
        asked(one, texts[0])
    size = one.metrics().folder_bytes
    text = texts[0] + generate(model, texts[0], **NEW).tokens.tolist()[:-1]
    names = [piece.name for piece in one._memory.folder.pieces((), text)]  # type: ignore[union-attr]
    assert [path.stem for path in files(tmp_path)] == names[::-1]  # the end of a text goes before its beginning
    for text in texts[1:]:
        with engine(model, tmp_path, prefix_dir_bytes=2 * size + 1000) as one:
            asked(one, text)
            asked(one, texts[0])  # which is used all the time
        assert sum(path.stat().st_size for path in files(tmp_path)) == one.metrics().folder_bytes <= 2 * size + 1000
    for text, known in ((texts[0], True), (texts[3], True), (texts[1], False)):
        with engine(model, tmp_path) as one:
            assert (asked(one, text)[0] >= 96) == known


def test_files_are_for_their_owner_and_a_bad_folder_is_refused(tmp_path: Path) -> None:
    model = pd.models.load("tiny-code")
    with engine(model, tmp_path / "new" / "folder") as one:
        asked(one, drawn(0, 50))
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files(tmp_path / "new" / "folder"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        engine(model, tmp_path / "file")
    with pytest.raises(ValueError, match="prefix_dir is for a model with pages"):
        engine(pd.models.from_callable(lambda ids: torch.zeros(*ids.shape, 9), vocab_size=9), tmp_path)


FULL = """
import logging, pathlib, resource, sys, time
import pdkernels as pd
import pdkernels.engine.pages
from tests.engine.test_prefix_folder import asked, drawn, engine
pdkernels.engine.pages.PAGE = 8
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
with engine(pd.models.load("tiny-code"), pathlib.Path(sys.argv[1])) as one:
    for seed in range(3):
        asked(one, drawn(seed, 100))
    while one._memory.folder._jobs:
        time.sleep(0.01)
    time.sleep(0.1)  # for the last one
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    asked(one, drawn(3, 100))
"""


def test_a_full_disk_costs_no_request_and_one_line(tmp_path: Path) -> None:
    """As the system says it: nothing of a file that was not finished stays, and what comes when there is room is kept."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stderr.count("WARNING") == 1 and f"texts are not written to {tmp_path}" in ended.stderr, ended.stderr
    assert files(tmp_path) and all(path.suffix == ".safetensors" for path in files(tmp_path))
    with engine(pd.models.load("tiny-code"), tmp_path) as one:
        assert [asked(one, drawn(seed, 100))[0] > 90 for seed in (3, 0)] == [True, False]


def test_a_slow_disk_delays_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is being copied stays; one that waits to be written may be forgotten."""
    model, told, began = pd.models.load("tiny-code"), threading.Event(), threading.Event()
    copied = PrefixTree.copy

    def slow(self: PrefixTree, page: Any, count: int) -> Any:
        began.set()
        assert told.wait(60)
        return copied(self, page, count)

    monkeypatch.setattr(PrefixTree, "copy", slow)
    with engine(model, tmp_path, cache_tokens=200, max_prompt_tokens=150) as one:
        for seed in range(6):
            asked(one, drawn(seed, 100))
        assert began.is_set() and one.metrics().written_tokens == 0
        told.set()
    assert files(tmp_path)
    for path in files(tmp_path):
        rows = load_file(path)
        assert rows["k"].shape[1] == len(rows["tokens"])
    with engine(model, tmp_path) as one:
        for seed in range(6):
            asked(one, drawn(seed, 100))


OTHER = """
import sys, torch
import pdkernels as pd
from tests.engine.test_prefix_folder import asked, drawn, engine
import pdkernels.engine.pages, pathlib
pdkernels.engine.pages.PAGE = 8
model, folder, limit = pd.models.load("tiny-code"), pathlib.Path(sys.argv[1]), int(sys.argv[2])
with engine(model, folder, prefix_dir_bytes=limit) as one:
    print(asked(one, drawn(9, 80))[0], flush=True)
for round in range(4):
    with engine(model, folder, prefix_dir_bytes=limit) as one:
        for seed in range(6):
            asked(one, drawn(seed, 60 + 10 * round))
"""


def test_two_processes_have_one_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One reads what the other has written; then both write more than the folder may hold."""
    model, limit = pd.models.load("tiny-code"), 1_000_000

    def ask(*seeds: int) -> int:
        with engine(model, tmp_path, prefix_dir_bytes=limit) as one:
            return [asked(one, drawn(seed, 80))[0] for seed in seeds][-1]

    with caplog.at_level(logging.WARNING, "pdkernels.engine"):
        ask(9)
        command = [sys.executable, "-c", OTHER, str(tmp_path), str(limit)]
        other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert other.stdout is not None and int(other.stdout.readline()) > 0
        while other.poll() is None:
            ask(*range(6))
            time.sleep(0.05)
        ask(5)
        assert ask(5) > 0  # nobody has written since
    assert other.wait() == 0 and other.stderr is not None and b"ignored" not in other.stderr.read()
    assert not caplog.records
    assert all(path.suffix == ".safetensors" for path in files(tmp_path))


def test_a_prompt_is_restored_between_the_steps_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the order of events: no turn copies more than a turn may run, and others get tokens in between."""
    model, text, restore, events = pd.models.load("tiny-code"), drawn(0, 300), PrefixTree.restore, list[Any]()

    def watched(*arguments: Any, **more: Any) -> int:
        tokens = restore(*arguments, **more)
        events.append(tokens)
        return tokens

    with engine(model, tmp_path) as one:
        asked(one, text)
    monkeypatch.setattr(PrefixTree, "restore", watched)
    with engine(model, tmp_path) as one:
        begun, waits = threading.Event(), threading.Event()

        def told(*_: Any) -> None:
            events.append("token")
            begun.set()
            waits.wait(60)

        running = one.submit([1, 2, 3], max_new_tokens=30, end_tokens=(), on_tokens=told)
        assert begun.wait(60)
        events.clear()
        handle = one.submit(text, **NEW)
        waits.set()
        found = handle.result(60)
        running.result(60)
        assert handle.reused == one.metrics().restored_tokens == 296
    copies = [at for at, event in enumerate(events) if event != "token"]
    assert [events[at] for at in copies] == [64, 64, 64, 64, 40]
    assert all("token" in events[earlier:later] for earlier, later in zip(copies, copies[1:]))
    assert found.tokens.equal(generate(model, text, **NEW).tokens)
