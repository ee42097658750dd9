"""Tables of bench/cpu_engines.py, for the docs and the README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.gpu_report import table

SMALL, LARGER = "SmolLM2-135M", "random weights in the shape of Qwen3-1.7B"
REAL_MODELS = (
    ("SmolLM2-135M, as published", SMALL, "as published", "pdkernels chat"),
    ("SmolLM2-135M, Q4_0", SMALL, "Q4_0", "pdkernels chat --model smollm2-q4_0.gguf"),
    ("Qwen3-1.7B's shape, random weights, Q4_0", LARGER, "Q4_0", "pdkernels chat --model qwen3-1.7b-q4_0.gguf"),
)
"""A name, the model and the format of the figures, and how it is run."""
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
    head = [f"ms, {SMALL}, one thread", *columns]
    head += [name.replace("answer", "tokens/s of an answer") for name in ANSWERS if name in figures]
    lines = []
    for engine in names(figures):
        cells = [number(figures[name].get(engine)) for name in columns]
        cells += [speed(figures[name].get(engine)) for name in ANSWERS if name in figures]
        lines.append([f"**{engine}**" if engine.startswith("pdkernels") else engine, *cells])
        if memory:
            lines[-1].append(megabytes(memory.get(engine)))
    return f"{table([*head, *(['peak MB'] if memory else [])], lines)}\n\n{facts(found, '1')}"


def real_models(path: Path, drafts: Path) -> str:
    """A line for each model that one runs: its command, and tokens a second beside those of other engines, token by token and with lookup."""
    found, questions = json.loads(path.read_text()), json.loads(drafts.read_text())["rows"]["lookup, auto"]
    head = ["tokens/s, one thread", "command"]
    head += [f"{engine}{way}" for way in ("", ", lookup") for engine in ("**pdkernels**", "llama.cpp", "OpenVINO")]
    lines = []
    for name, model, form, command in REAL_MODELS:
        figures = found["figures"][model]["1"]
        cells = [figures.get(answer, figures["1 after 64"] if answer == "answer" else {}) for answer in ANSWERS]
        lines.append([name, f"`{command}`"])
        lines[-1] += [
            speed(cell.get(f"{engine}, {form}")) for cell in cells for engine in ("pdkernels", "llama.cpp", "OpenVINO")
        ]
    per_forward = questions["tokens"] / questions["forwards"]
    note = f"With lookup, 50 questions about Python take {per_forward:.2f} tokens a forward, {100 * questions['equal'] // 50}% of them with the tokens of greedy decoding."
    return f"{table(head, lines)}\n\n{note} {facts(found, '1')}"


def tables(found: dict[str, Any]) -> str:
    """One of forwards and one of batches and answers for each model and number of threads."""
    parts = []
    for model, by_threads in found["figures"].items():
        for threads, figures in by_threads.items():
            batches = [name for name in figures if name.startswith("batch")]
            forwards = [name for name in figures if name not in (*batches, *ANSWERS)]
            title = f"ms, {model}, {threads} thread{'s' if threads != '1' else ''}"
            parts.append(
                table(
                    [title, *forwards],
                    [[engine, *(number(figures[name].get(engine)) for name in forwards)] for engine in names(figures)],
                )
            )
            memory = found["memory"].get(model, {}).get(threads, {})
            if batches:
                answers = [name for name in ANSWERS if name in figures]
                head = [title, *batches, *(name.replace("answer", "tokens/s of an answer") for name in answers)]
                lines = [
                    [
                        engine,
                        *(number(figures[name].get(engine)) for name in batches),
                        *(speed(figures[name].get(engine)) for name in answers),
                        megabytes(found["file_mb"].get(model, {}).get(engine)),
                        megabytes(memory.get(engine)),
                    ]
                    for engine in names(figures)
                ]
                parts.append(table([*head, "MB of the file", "peak MB"], lines))
            parts.append(facts(found, threads))
    return "\n\n".join(parts)


def names(figures: dict[str, dict[str, float | None]]) -> list[str]:
    return list(dict.fromkeys(engine for cell in figures.values() for engine in cell))


def number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:,.1f}"


def speed(ms: float | None) -> str:
    return "-" if ms is None else f"{1e3 / ms:,.0f}"


def megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def facts(found: dict[str, Any], threads: str) -> str:
    kind = "CPU time" if threads == "1" else "wall clock"
    return f"{kind}, minimum of interleaved rounds; {found['machine']}, torch {found['torch']}"
