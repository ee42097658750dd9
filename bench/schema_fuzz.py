"""Random small schemas of all keywords, against jsonschema in both directions.

    python -m bench.schema_fuzz [--schemas 100000] [--first 0] [--to bench/results/schema_fuzz.json]

Of the texts of every second schema's "usual" language, and of all texts of the others: six drawn from the automaton, which must satisfy the
schema, and ten random values, which must satisfy it where their text is taken. Counted are values that satisfy the schema and have no text in
the language whatever the order of their properties. The schemas follow from their numbers, so a fault is one number: it is printed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from bench.gpu_report import table
from bench.records import write

RESULTS = Path(__file__).resolve().parent / "results/schema_fuzz.json"
LANGUAGES = ("all", "usual")
COLUMNS = ("compiled", "refused", "empty", "too large", "texts", "values", "missed", "faults")


def report(found: dict[str, Any]) -> str:
    """A table of the counts."""
    head = [
        "texts",
        "schemas",
        "compiled",
        "refused",
        "of no value",
        "too large",
        "texts drawn",
        "valid values",
        "of them without a text",
        "wrong",
    ]
    lines = [[row["language"], *(f"{row[name]:,}" for name in ("schemas", *COLUMNS))] for row in found["rows"]]
    return table(head, lines)


def counts(path: Path = RESULTS) -> str:
    return report(json.loads(path.read_text())) if path.exists() else "not measured"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.schema_fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--schemas", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    from tests.support.schema_fuzz import compare  # needs jsonschema

    tallies = {language: Counter[str]() for language in LANGUAGES}
    for seed in range(chosen.first, chosen.first + chosen.schemas):
        language = LANGUAGES[seed % 2]
        tallies[language]["schemas"] += 1
        try:
            compare(seed, language, tallies[language])
        except AssertionError as fault:
            tallies[language]["faults"] += 1
            print(language, fault, flush=True)
        if seed % 1000 == 999:
            print(seed + 1, {name: dict(tally) for name, tally in tallies.items()}, flush=True)
    rows = [
        {"language": language, **{name: tallies[language][name] for name in ("schemas", *COLUMNS)}}
        for language in LANGUAGES
    ]
    write(chosen.to, {"first": chosen.first, "rows": rows})
    print(report({"rows": rows}))


if __name__ == "__main__":
    main()
