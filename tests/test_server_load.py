"""Load on servers: what is tried, what goes on where it ended, and the tables; with slices that are made up."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import load_servers, server_load
from bench.load_clients import body_of, drawn
from bench.load_report import load_table
from bench.load_servers import SETTINGS, SHAPES, Server

TOKENIZER: Any = SimpleNamespace(encode=lambda text: text.split(), encode_chat=lambda chat: chat[0]["content"].split())


def made_up(speed: int, seconds: float = 10.0) -> dict[str, Any]:
    """A slice with one answer of so many words a second, one that waits, and one that fails."""
    asked = {"kind": "greedy", "at": 1.0, "text": "a b c", "most": 99}
    count = round(speed * seconds)
    answer = {
        "times": [2.0, 9.0],
        "texts": ["x", "y"],
        "ended": 9.0,
        "usage": {"completion_tokens": count},
        "error": None,
    }
    waits = {"times": [], "texts": [], "ended": None, "usage": None, "error": None}
    requests = [{**asked, **answer}, {**asked, **waits}, {**asked, **waits, "error": "HTTP/1.1 500", "kind": "adapter"}]
    return {"requests": requests, "resident_mb": [1.0, 3.0, 2.0, 2.0], "load": 0.5}


class Slices:
    """In place of servers: the speed of each setting, and what was asked."""

    def __init__(self, speeds: dict[str, int | None]) -> None:
        self.speeds, self.asked = speeds, list[tuple[str, int, float]]()

    def __call__(self, bench: Any, server: Server, setting: str, seed: int, seconds: float) -> dict[str, Any]:
        self.asked.append((server.name(setting), seed, seconds))
        speed = self.speeds.get(setting, 1)
        if speed is None:
            raise SystemExit("it does not start")
        return made_up(speed)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that measures with such slices: what was asked, and the run."""
    run: dict[str, Any] = {"tried": {}, "figures": {}}
    found = [Server("llama.cpp", ["llama-server"], {}), Server("vLLM", ["python"], {})]
    monkeypatch.setattr(server_load, "model_file", lambda *_: tmp_path / "model.gguf")
    monkeypatch.setattr(server_load, "servers", lambda *_: found)
    monkeypatch.setattr(server_load.pd.models, "load", lambda _: SimpleNamespace(tokenizer=TOKENIZER))

    def measure(speeds: dict[str, int | None], **changes: Any) -> tuple[list[Any], dict[str, Any]]:
        slices = Slices(speeds)
        monkeypatch.setattr(server_load, "one_slice", slices)
        given = argparse.Namespace(
            **{"engines": list(SETTINGS), "tune": 10.0, "settings": "", "seconds": 10.0, "rounds": 1, "again": False}
            | changes
        )
        server_load.measure(server_load.Bench("smollm2", tmp_path, 1.0, given, lambda: None), run)
        return slices.asked, run

    return measure


def test_the_fastest_setting_goes_on_and_a_run_goes_on_where_it_ended(measured: Any) -> None:
    speeds: dict[str, int | None] = {"8 slots": 5, "32 slots": None, "float32, 16 rows": 7}
    asked, run = measured(speeds)
    tried = sum(len(SETTINGS[engine]) for engine in ("llama.cpp", "vLLM"))
    assert [name for name, *_ in asked[tried:]] == ["llama.cpp, 8 slots", "vLLM, float32, 16 rows"]
    assert run["tried"]["llama.cpp"]["32 slots"] is None and run["tried"]["llama.cpp"]["8 slots"] == 5
    assert {seed for _, seed, _ in asked[:tried]}.isdisjoint({seed for _, seed, _ in asked[tried:]})
    del run["figures"]["vLLM, float32, 16 rows"]
    again, _ = measured(speeds)
    assert [name for name, *_ in again] == ["vLLM, float32, 16 rows"], "what was tried and measured is not again"
    fresh, _ = measured(speeds, again=True, tune=0.0, settings="16")
    assert [name for name, *_ in fresh] == ["llama.cpp, 16 slots", "vLLM, bfloat16, 16 rows"]


def test_a_server_that_does_not_start_keeps_no_other_from_it(measured: Any) -> None:
    with pytest.raises(SystemExit, match=r"llama.cpp was not measured: .* answered nothing"):
        measured(dict.fromkeys(SETTINGS["llama.cpp"]))
    asked, _ = measured({})
    assert asked[-1][0] == "llama.cpp, 16 slots" and not any(name.startswith("vLLM") for name, *_ in asked)


@pytest.mark.parametrize("error", [SystemExit("an answer is another"), RuntimeError("no file")])
def test_a_server_whose_answers_fail_keeps_no_other_from_it(
    measured: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    whole = server_load._whole

    def failing(bench: Any, server: Server, *more: Any) -> dict[str, Any]:
        if server.engine == "llama.cpp":
            raise error
        return whole(bench, server, *more)

    monkeypatch.setattr(server_load, "_whole", failing)
    with pytest.raises(SystemExit, match="llama.cpp was not measured"):
        measured({}, tune=0.0)
    monkeypatch.setattr(server_load, "_whole", whole)
    asked, run = measured({}, tune=0.0)
    assert [name for name, *_ in asked] == ["llama.cpp, 16 slots"] and run["failed"] == {}
    assert {one["server"] for one in run["figures"].values()} == {"llama.cpp", "vLLM"}


def test_files_that_cannot_be_made_are_written_down(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(server_load, "servers", fails)
        with pytest.raises(SystemExit, match="vLLM was not measured: OSError: no room"):
            measured({}, tune=0.0)
    _, run = measured({}, tune=0.0)
    assert run["failed"] == {} and len(run["figures"]) == 2


def test_a_kept_slice_is_of_the_same_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = list[Any]()

    def run(words: list[str], **_: Any) -> Any:
        started.append(json.loads(words[-1]))
        return SimpleNamespace(returncode=0, stdout=json.dumps(made_up(4)).encode())

    monkeypatch.setattr(server_load, "processor", lambda: "a processor")  # which starts a process, too
    monkeypatch.setattr(server_load.subprocess, "run", run)
    given = argparse.Namespace(again=False, around="", threads=2)
    bench = server_load.Bench("smollm2", tmp_path, 1.0, given, lambda: None)
    one, other = Server("llama.cpp", ["a"], {}), Server("llama.cpp", ["a", "-x"], {})
    for server in (one, one, other, other._replace(environment={"A": "1"})):
        server_load.one_slice(bench, server, "16 slots", 0, 10.0)
    given.threads = 4
    server_load.one_slice(bench, one, "16 slots", 0, 10.0)
    assert [spec["command"][:2] for spec in started] == [["a", "-np"], ["a", "-x"], ["a", "-x"], ["a", "-np"]]


def test_options_of_peers_are_in_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load_servers, "model_file", lambda *_: tmp_path / "model.gguf")
    monkeypatch.setattr(load_servers, "adapters", lambda *_: (tmp_path, tmp_path))

    def fails(*_: Any) -> Any:
        raise OSError("no room")

    monkeypatch.setattr(load_servers, "dequantized", fails)
    given = argparse.Namespace(
        engines=list(SETTINGS), caches=["float16"], threads=2, llama_server=Path("l"), llama_options="-fa on",
        vllm_python=Path("v"), vllm_options="--seed 1", vllm_gigabytes=4,
    )  # fmt: skip
    failed = dict[str, str]()
    found = load_servers.servers("smollm2", tmp_path, given, failed)
    assert [server.name("") for server in found] == ["pdkernels, caches in float16", "llama.cpp, -fa on"]
    assert failed == {"vLLM, --seed 1": "OSError: no room"}


def test_an_answer_without_text_has_ended() -> None:
    given = made_up(4)
    silent = {"kind": "schema", "at": 2.0, "text": "a", "most": 9, "times": [], "texts": [], "ended": 3.0}
    given["requests"].append({**silent, "usage": {"completion_tokens": 1}, "error": None})
    found = server_load.figures([given], TOKENIZER, 10.0)
    assert (found["requests"], found["done"], found["waited"], found["empty"]) == (4, 2, 1, 1)


def test_what_waits_counts_in_its_kind() -> None:
    given = made_up(4)
    for request in given["requests"]:
        request["kind"] = "greedy" if request["times"] else "schema"
    assert server_load.figures([given], TOKENIZER, 10.0)["first_ms_by_kind"] == {"greedy": 1000.0, "schema": 9000.0}


def test_a_record_of_another_kind_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = tmp_path / "some.json"
    figures = {"vLLM, 16 rows": {"server": "vLLM", "checked": 0, **server_load.figures([made_up(4)], TOKENIZER, 10.0)}}
    run = {"file": "old.gguf", "machine": "x", "rate": 4.0, "seconds": 60.0, "rounds": 1, "threads": 2}
    record.write_text(json.dumps({"smollm2, 60 s": {**run, "tried": {}, "figures": figures}}))
    before, asked = record.read_text(), list[str]()

    def measure(bench: Any, _: Any) -> None:
        asked.append(bench.model)
        raise OSError("no file")

    monkeypatch.setattr(server_load, "measure", measure)
    words = ["server_load", "--model", *SHAPES, "--to", str(record), "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(
        SystemExit, match=r"'old.gguf', not 'SmolLM2-135M, Q4_0'.* left as it is(?s:.*)OSError: no file"
    ):
        server_load.main()
    assert record.read_text() == before and asked == ["qwen3-1.7b"]


def test_figures_count_what_waits_and_what_fails() -> None:
    found = server_load.figures([made_up(4)], TOKENIZER, 10.0)
    assert found["tokens_per_second"] == 4 and found["prompt_tokens_per_second"] == 0.3
    assert (found["requests"], found["done"], found["waited"], found["failed"]) == (3, 1, 1, 1)
    assert found["errors"] == ["adapter: HTTP/1.1 500"] and found["first_ms"] == [1000.0, 9000.0]
    assert found["resident_mb"] == 3 and found["resident_mb_by_quarter"] == [1, 3, 2, 2]


def test_the_table_has_each_run_with_its_facts(tmp_path: Path) -> None:
    assert load_table(tmp_path / "none.json") == "not measured"
    facts = {"file": "a file", "machine": "a machine", "rate": 1.0, "seconds": 600.0, "rounds": 1, "threads": 2}
    figures = {"vLLM, 16 rows": {"server": "vLLM", "checked": 0, **server_load.figures([made_up(4)], TOKENIZER, 10.0)}}
    figures["pdkernels, 8 rows"] = {**figures["vLLM, 16 rows"], "failed": 0, "checked": 3}
    path = tmp_path / "some.json"
    path.write_text(
        json.dumps(
            {
                "a": {
                    **facts,
                    "tried": {"vLLM": {"16 rows": 4.0, "32 rows": None}},
                    "figures": figures,
                    "failed": {"llama.cpp": "it does not start"},
                }
            }
        )  # fmt: skip
    )
    text = load_table(path)
    assert "| vLLM, 16 rows | 4.0 | 0 | 1 of 3 | 1,000 | 9,000 | 7,000 | 7,000 | 1.00 | 3 |" in text
    assert "a file, 1 requests a second, one slice of 600 s, 2 threads, 3 answers of ours compared; a machine" in text
    assert "vLLM: 16 rows 4.0, 32 rows failed" in text and "1 requests failed (adapter: HTTP/1.1 500)" in text
    assert "llama.cpp was not measured: it does not start" in text


@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_fit_their_shape(shape: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load_file

    peft, file = load_servers.adapters(SHAPES[shape], tmp_path)
    tensors = load_file(peft / "adapter_model.safetensors")
    assert len(tensors) == 4 * SHAPES[shape].layers == len(gguf.GGUFReader(file).tensors)
    down = tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"]
    assert down.shape[1] == SHAPES[shape].inner


def test_each_engine_is_asked_in_its_own_words() -> None:
    request = next(one for one in drawn(0, 50.0, 10.0) if one["kind"] == "adapter")
    bodies = {engine: body_of(request, engine) for engine in SETTINGS}
    assert bodies["pdkernels"]["model"] == bodies["vLLM"]["model"] == "style"
    assert bodies["llama.cpp"]["model"] == "load" and bodies["llama.cpp"]["lora"][0]["scale"] == 1.0
