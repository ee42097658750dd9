"""Two runs, kills, damaged files and full disks: texts belong to their prompts, or a sentence says why there are none."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.batch import ledger as module
from pdkernels.batch.ledger import Ledger
from pdkernels.batch.prompt_files import Contents, Prompt, model_identity, writer
from pdkernels.batch.ray import generate_files
from tests.support.errors import refused

SUMS = [f"{100 + 37 * i} + {990 - 53 * i} = ?" for i in range(9)]
OPTIONS: dict[str, Any] = dict(model="tiny-code", max_new_tokens=6)
RUN = {"model": "m", "seed": 3}
PROMPTS = [Prompt(i, {"prompt": f"p{i}\né"}) for i in range(7)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(prompts: list[str], **options: Any) -> list[str]:
    """Each alone."""
    model = pd.models.load("tiny-code")
    return [pd.decoding.generate(model, prompt, max_new_tokens=6, **options).text for prompt in prompts]


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums.txt"
    path.write_text("\n".join(SUMS) + "\n")
    return path


def result(number: int) -> dict[str, Any]:
    if number == 4:
        return {"text": None, "tokens": 0, "error": "too long"}
    return {"text": f"text of {number} \0 \n é \ud800", "tokens": number}


JOINED = [{**prompt.fields, **result(prompt.number)} for prompt in PROMPTS]


def go_on(out: Path, pause: float = 0) -> None:
    """What a run does."""
    ledger = Ledger(out, RUN, len(PROMPTS))
    for number in range(len(PROMPTS)):
        ledger.add(number, result(number))
        ledger.flush()
        time.sleep(pause)
    ledger.finish(PROMPTS, writer(out))


# ---- damaged ledgers


def whole_ledger(folder: Path) -> bytes:
    ledger = Ledger(folder / "whole.jsonl", RUN, len(PROMPTS))
    for number in (3, 0, 1, 2, 6, 5, 4):
        ledger.add(number, result(number))
    ledger.flush()
    ledger.close()
    return (folder / "whole.jsonl.partial").read_bytes()


def mutated(content: bytes, draw: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        kind, at = draw.randrange(9), draw.randrange(len(found) + 1)
        rows = bytes(found).splitlines(keepends=True)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del found[at:]
        elif kind == 2:
            found[at : at + draw.randrange(40)] = bytes(draw.randrange(40))
        elif kind == 3 and rows:
            rows.insert(draw.randrange(len(rows) + 1), draw.choice(rows))
            found = bytearray(b"".join(rows))
        elif kind == 4 and len(rows) > 1:
            draw.shuffle(rows)
            found = bytearray(b"".join(rows))
        elif kind == 5 and rows:
            del rows[draw.randrange(len(rows))]
            found = bytearray(b"".join(rows))
        elif kind == 6:
            found[at:at] = draw.choice(
                (b"\n", b"{}\n", b"[1]\n", b'{"number": 1}\n', b"\xff", b"NaN\n", b"[" * 9999 + b"\n")
            )
        elif kind == 7:
            digits = [i for i, byte in enumerate(found) if chr(byte).isdigit()]
            if digits:
                found[draw.choice(digits)] = ord(draw.choice("0123456789"))
        else:
            del found[at : at + draw.randrange(30)]
    return bytes(found)


def outcome(folder: Path, content: bytes) -> str:
    """A run over a ledger with this content: the right join, or a sentence and a file as it was."""
    out = folder / "out.jsonl"
    partial = folder / "out.jsonl.partial"
    partial.write_bytes(content)
    try:
        go_on(out)
    except ValueError as error:
        assert str(error).startswith("pdkernels.integrations.generate_files: output ")
        assert partial.read_bytes() == content and not out.exists()
        return str(error)
    assert lines(out) == JOINED and not partial.exists()
    out.unlink()
    return "joined"


def fuzz(folder: Path, count: int, seed: int) -> set[str]:
    draw, content = random.Random(seed), whole_ledger(folder)
    return {outcome(folder, mutated(content, draw)).partition(", got")[0].partition(": /")[0] for _ in range(count)}


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "fsync", lambda _: None)


@pytest.mark.usefixtures("no_waiting")
def test_a_damaged_ledger_gives_the_right_texts_or_a_sentence(tmp_path: Path) -> None:
    assert len(fuzz(tmp_path, 400, 0)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("no_waiting")
def test_many_damaged_ledgers(tmp_path: Path) -> None:
    assert len(fuzz(tmp_path, 40_000, 1)) == 3


def test_what_is_said_of_a_damaged_ledger(tmp_path: Path) -> None:
    head, *rows = whole_ledger(tmp_path).splitlines(keepends=True)
    rest = b"".join(rows)
    for content, words in [
        (head + rows[0][:20] + b"\n" + rest, "line 2, which is not JSON. Nothing was changed. Restore the file, or delete that line"),
        (head + rows[0] + b"\0\0\0\n", "line 3, NUL bytes"),
        (head + rest + rows[2], "line 9, a second result of prompt 1"),
        (head + rows[0].replace(b'"number": 3', b'"number": 2'), "line 2, whose checksum is wrong"),
        (head + rows[0].replace(b'"number": 3, ', b""), "line 2, which has no number"),
        (head + rows[0].replace(b"text of", b"Text of"), "line 2, whose checksum is wrong"),
        (head[:-9] + b"\n" + rest, "line 1, which does not say of what run it is"),
        (b"notes of mine", "line 1, which does not say of what run it is"),
        (head.replace(b"3", b"4") + rest, "from a run with different values of seed"),
    ]:  # fmt: skip
        assert words in outcome(tmp_path, content)
    for content in (b"", head, head[:5], head + rest, head + rest[:-30], head + rows[0] + b"\0" * 50):
        assert outcome(tmp_path, content) == "joined"


# ---- two runs


def test_a_second_run_is_refused_while_the_first_writes(sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    seen = []

    def again(done: int, total: int) -> None:
        with refused(f"output must be written by one run at a time, got {out}.partial, which another process has open"):
            generate_files(sums, out, **OPTIONS)
        seen.append(done)

    generate_files(sums, out, batch_size=4, progress=again, **OPTIONS)
    assert seen == [4, 8, 9]
    assert lines(out) == [{"prompt": a, "text": b, "tokens": 6} for a, b in zip(SUMS, texts(SUMS))]
    with refused("output must be a new file"):
        generate_files(sums, out, **OPTIONS)
    assert len(list(tmp_path.iterdir())) == 2


_RUNNER = """
import sys
from pdkernels.batch.ray import generate_files
print("ready", flush=True)
for name in sys.stdin:
    try:
        report = generate_files(sys.argv[1], name.strip(), "tiny-code", max_new_tokens=6, batch_size=2)
        print("done", report.prompts, flush=True)
    except ValueError as error:
        print(error, flush=True)
"""


def runners(sums: Path, count: int) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _RUNNER, str(sums)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    found = [subprocess.Popen(command, **pipes) for _ in range(count)]
    for process in found:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_two_processes_into_one_output(sums: Path, tmp_path: Path, rounds: int) -> None:
    """Again and again, at once: one writes, the other is refused, and each text is that of its prompt alone."""
    right = [{"prompt": a, "text": b, "tokens": 6} for a, b in zip(SUMS, texts(SUMS))]
    draw, both = random.Random(0), runners(sums, 2)
    for number in range(rounds):
        out = tmp_path / f"{number}.jsonl"
        for process in both:
            assert process.stdin is not None
            process.stdin.write(f"{out}\n")
            process.stdin.flush()
            time.sleep(draw.choice((0, 0.001, 0.02)))
        said = sorted(process.stdout.readline() for process in both if process.stdout is not None)
        assert said[0] == "done 9\n" and ("one run at a time" in said[1] or "be a new file" in said[1])
        assert lines(out) == right and not Path(f"{out}.partial").exists()
    for process in both:
        process.communicate()


# ---- kills


@pytest.mark.parametrize("kills", [7, pytest.param(70, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_of_writing_loses_nothing(tmp_path: Path, kills: int) -> None:
    """Runs, one after the other, until that many kills met one at work: how many runs that takes is the machine's affair."""
    draw = random.Random(0)
    killed = runs = 0
    while killed < kills:
        assert runs < 20 * kills
        out, longest = tmp_path / f"{runs}.jsonl", 0.012
        runs += 1
        while not out.exists() or Path(f"{out}.partial").exists():
            child, longest = os.fork(), 1.5 * longest
            if child == 0:
                try:
                    go_on(out, 0.001)
                finally:
                    os._exit(0)
            time.sleep(draw.uniform(0.001, longest))
            os.kill(child, signal.SIGKILL)
            killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        assert lines(out) == JOINED
    assert len(list(tmp_path.iterdir())) == runs


def test_a_kill_between_any_two_steps_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output and the ledger may both be there; then the next call compares them."""

    class Killed(BaseException):
        pass

    steps = ("fsync", "link", "unlink")
    for stop in range(12):
        out, left = tmp_path / f"{stop}.jsonl", stop
        with monkeypatch.context() as patch:

            def killing(function: Any) -> Any:
                def step(*arguments: Any, **named: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise Killed
                    return function(*arguments, **named)

                return step

            for name in steps:
                patch.setattr(os, name, killing(getattr(os, name)))
            ledger = Ledger(out, RUN, len(PROMPTS))
            for number in range(len(PROMPTS)):
                ledger.add(number, result(number))
            ledger.flush()
            try:
                ledger.finish(PROMPTS, writer(out))
            except Killed:
                pass
            ledger._file.close()
        if not out.exists() or Path(f"{out}.partial").exists():
            go_on(out)
        assert lines(out) == JOINED
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl"}


@pytest.mark.slow
def test_a_killed_process_goes_on(sums: Path, tmp_path: Path) -> None:
    out, draw = tmp_path / "out.jsonl", random.Random(0)
    right = [{"prompt": a, "text": b, "tokens": 6} for a, b in zip(SUMS, texts(SUMS))]
    for number in range(4):
        out, longest = tmp_path / f"{number}.jsonl", 0.4
        while not out.exists() or Path(f"{out}.partial").exists():
            (process,) = runners(sums, 1)
            assert process.stdin is not None
            process.stdin.write(f"{out}\n")
            process.stdin.flush()
            longest *= 1.5
            time.sleep(draw.uniform(0, longest))
            process.send_signal(draw.choice((signal.SIGKILL, signal.SIGTERM)))
            process.communicate()
        assert lines(out) == right


# ---- what a run is bound to


class Stopped(Exception):
    pass


def begun(sums: Path, out: Path, **options: Any) -> None:
    def stop(done: int, total: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        generate_files(sums, out, batch_size=2, progress=stop, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"model": "tiny-jacobi"}, "model, model_files"),
        ({"max_new_tokens": 7}, "options"),
        ({"method": "jacobi"}, "method"),
        ({"seed": 1}, "seed"),
        ({"on_error": "stop"}, "on_error"),
        ({"repetition_penalty": 1.1}, "options"),
    ],
)
def test_a_run_is_bound_to_its_inputs(sums: Path, tmp_path: Path, other: dict[str, Any], name: str) -> None:
    out = tmp_path / "out.jsonl"
    begun(sums, out)
    with refused(f"from a run with different values of {name}. Give the same arguments, or delete the file."):
        generate_files(sums, out, **{**OPTIONS, **other})


def test_the_column_is_an_input(tmp_path: Path) -> None:
    file = tmp_path / "two.jsonl"
    file.write_text("".join(json.dumps({"a": text, "b": text[::-1]}) + "\n" for text in SUMS))
    begun(file, tmp_path / "out.jsonl", column="a")
    with refused("from a run with different values of column"):
        generate_files(file, tmp_path / "out.jsonl", column="b", **OPTIONS)


def test_the_contents_of_a_model_are_its_identity(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(3 << 20))
    assert model_identity(first) == model_identity(second)
    for at in (5, (2 << 20) + 17, (3 << 20) - 1):
        with (second / "model.safetensors").open("r+b") as file:
            file.seek(at if at < (3 << 20) - 1 else 2 << 20)
            file.write(b"x")
        assert model_identity(first) != model_identity(second)
    (first / "adapter.json").touch()
    assert model_identity(first) != model_identity(tmp_path)


def test_prompts_that_change_during_a_run(sums: Path, tmp_path: Path) -> None:
    def change(done: int, total: int) -> None:
        sums.write_text("\n".join([*SUMS[:-1], "1 + 1 = ?"]) + "\n")

    with refused("prompts must stay as they are during a run, got another prompt 8"):
        generate_files(sums, tmp_path / "out.jsonl", batch_size=2, progress=change, **OPTIONS)
    assert not (tmp_path / "out.jsonl").exists()
    contents = Contents(PROMPTS, tmp_path / "out.jsonl")
    with refused("another prompt 6"):
        list(contents.watched(PROMPTS[:-1]))


def test_a_run_without_results_binds_nothing(sums: Path, tmp_path: Path) -> None:
    """A mistyped model can be corrected."""
    with refused("name_or_path must name a model"):
        generate_files(sums, tmp_path / "out.jsonl", "tiny-cod")
    assert generate_files(sums, tmp_path / "out.jsonl", **OPTIONS).generated == 9
