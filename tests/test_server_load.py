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
            **{"tune": 10.0, "settings": "", "seconds": 10.0, "rounds": 1, "again": False} | changes
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
        json.dumps({"a": {**facts, "tried": {"vLLM": {"16 rows": 4.0, "32 rows": None}}, "figures": figures}})
    )
    text = load_table(path)
    assert "| vLLM, 16 rows | 4.0 | 0 | 1 of 3 | 1,000 | 9,000 | 7,000 | 7,000 | 1.00 | 3 |" in text
    assert "a file, 1 requests a second, one slice of 600 s, 2 threads, 3 answers of ours compared; a machine" in text
    assert "vLLM: 16 rows 4.0, 32 rows refused" in text and "1 requests failed (adapter: HTTP/1.1 500)" in text


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
