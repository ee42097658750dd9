"""Tables of bench/cpu_engines.py, for the docs and the README."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from bench.cpu_processes import package
from bench.gpu_report import table

SMALL, LARGER = "SmolLM2-135M", "random weights in the shape of Qwen3-1.7B"
REAL_MODELS = (
    ("SmolLM2-135M, as published", SMALL, "as published", "pdkernels chat"),
    ("SmolLM2-135M, Q4_0", SMALL, "Q4_0", "pdkernels chat --model smollm2-q4_0.gguf"),
    ("Qwen3-1.7B's shape, random weights, Q4_0", LARGER, "Q4_0", "pdkernels chat --model qwen3-1.7b-q4_0.gguf"),
)
"""A name, the model and the format of the figures, and how it is run."""
PEERS = ("pdkernels", "llama.cpp", "ik_llama.cpp", "OpenVINO")
ANSWERS = ("answer", "answer with lookup")
SUMMARY = ("1 after 64", "8 after 64", "1 after 1024", "prompt of 1024", "batch 32 after 64")


def engines(path: Path) -> str:
    """All figures."""
    return tables(json.loads(path.read_text())) if path.exists() else "not measured"


def summary(path: Path) -> str:
    """A line for each engine and format: one thread, the small model."""
    found = json.loads(path.read_text())
    figures, memory = found["figures"][SMALL]["1"], found["memory"].get(SMALL, {}).get("1", {})
    columns = [name for name in SUMMARY if name in figures]
    answers = [name for name in ANSWERS if name in figures]
    show = Cells(found, SMALL, "1")
    head = [f"ms, {SMALL}, one thread", *columns, *map(of_answer, answers)]
    lines = []
    for engine in names(figures):
        cells = [show(name, engine, number) for name in columns] + [show(name, engine, speed) for name in answers]
        lines.append([f"**{engine}**" if engine.startswith("pdkernels") else engine, *cells])
        if memory:
            lines[-1].append(megabytes(memory.get(engine)))
    return f"{table([*head, *(['peak MB'] if memory else [])], lines)}\n\n{show.legend()}{facts(found, '1')}"


def real_models(path: Path, drafts: Path) -> str:
    """A line for each model that one runs: its command, and tokens a second beside those of other engines, token by token and with lookup."""
    found, drafted = json.loads(path.read_text()), json.loads(drafts.read_text())
    shown = [
        (engine, way) for way in ("", ", lookup") for engine in PEERS if (engine, way) != ("ik_llama.cpp", ", lookup")
    ]
    measured = {name.split(", ")[0] for name in found["figures"][SMALL]["1"]["1 after 64"]}
    shown = [(engine, way) for engine, way in shown if engine in measured]
    head = ["tokens/s, one thread", "command"]
    head += [f"**{engine}**{way}" if engine == "pdkernels" else engine + way for engine, way in shown]
    lines = []
    for name, model, form, command in REAL_MODELS:
        figures = found["figures"][model]["1"]
        plain, looked = (figures.get(answer, {}) for answer in ANSWERS)
        plain = plain or figures["1 after 64"]
        cells = [speed((looked if way else plain).get(f"{engine}, {form}")) for engine, way in shown]
        lines.append([name, f"`{command}`", *cells])
    looked_up, count = drafted["rows"]["lookup, auto"], drafted["settings"]["questions"]
    per_forward = looked_up["tokens"] / looked_up["forwards"]
    note = f"With lookup, answers to {count} questions about Python take {per_forward:.2f} tokens a forward; {looked_up['equal']} of {count} have the tokens of greedy decoding."
    best = "Each engine has the fastest of its settings. " if found.get("settings") else ""
    return f"{table(head, lines)}\n\n{note} {best}{facts(found, '1', {engine for engine, _ in shown})}"


def tables(found: dict[str, Any]) -> str:
    """One of forwards and one of batches and answers for each model and number of threads."""
    parts = []
    for model, by_threads in found["figures"].items():
        for threads, figures in by_threads.items():
            batches = [name for name in figures if name.startswith("batch")]
            forwards = [name for name in figures if name not in (*batches, *ANSWERS)]
            show = Cells(found, model, threads)
            title = f"ms, {model}, {threads} thread{'s' if threads != '1' else ''}"
            lines = [[engine, *(show(name, engine, number) for name in forwards)] for engine in names(figures)]
            parts.append(table([title, *forwards], lines))
            memory = found["memory"].get(model, {}).get(threads, {})
            if batches:
                answers = [name for name in ANSWERS if name in figures]
                head = [title, *batches, *map(of_answer, answers)]
                lines = [
                    [
                        engine,
                        *(show(name, engine, number) for name in batches),
                        *(show(name, engine, speed) for name in answers),
                        megabytes(found["file_mb"].get(model, {}).get(engine)),
                        megabytes(memory.get(engine)),
                    ]
                    for engine in names(figures)
                ]
                parts.append(table([*head, "MB of the file", "peak MB"], lines))
            parts.append(show.legend() + facts(found, threads))
    return "\n\n".join(parts)


class Cells:
    """Figures with a letter for the setting they had, and what the letters mean."""

    def __init__(self, found: dict[str, Any], model: str, threads: str) -> None:
        self.figures = found["figures"][model][threads]
        self.settings: dict[str, dict[str, str]] = found.get("settings", {}).get(model, {}).get(threads, {})
        used = {(e.split(", ")[0], s) for by_engine in self.settings.values() for e, s in by_engine.items()}
        self.letters = {pair: chr(ord("a") + i) for i, pair in enumerate(sorted(used))}

    def __call__(self, cell: str, engine: str, form: Callable[[float | None], str]) -> str:
        setting = self.settings.get(cell, {}).get(engine)
        letter = "" if setting is None else f" {self.letters[engine.split(', ')[0], setting]}"
        return form(self.figures[cell].get(engine)) + letter

    def legend(self) -> str:
        each = [f"{letter}: {engine}, {setting}" for (engine, setting), letter in self.letters.items()]
        return f"The fastest of an engine's settings: {'; '.join(each)}. " if each else ""


def of_answer(name: str) -> str:
    return name.replace("answer", "tokens/s of an answer")


def names(figures: dict[str, dict[str, float | None]]) -> list[str]:
    return list(dict.fromkeys(engine for cell in figures.values() for engine in cell))


def number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:,.1f}"


def speed(ms: float | None) -> str:
    return "-" if ms is None else f"{1e3 / ms:,.0f}"


def megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def facts(found: dict[str, Any], threads: str, engines: Collection[str] | None = None) -> str:
    """The caption: the clock, the processor with the level of its instructions, and versions of `engines`; None: of all."""
    kind = "CPU time" if threads == "1" else "wall clock"
    versions = {name.split(", ")[0]: about.split(", ")[0] for name, about in found.get("builds", {}).items()}
    skipped = {"pdkernels", "ik_llama.cpp"} | ({*versions} - {*engines} if engines is not None else set[str]())
    others = [package(f"{engine} {version}") for engine, version in versions.items() if engine not in skipped]
    return ", ".join([f"{kind}, minimum of interleaved rounds; {found['machine']}", f"torch {found['torch']}", *others])
