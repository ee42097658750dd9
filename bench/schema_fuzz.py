"""Random small schemas of all keywords, against jsonschema in both directions.

    python -m bench.schema_fuzz [--schemas 100000] [--first 0] [--again] [--to bench/results/schema_fuzz.json]

Of the texts of every second schema's "usual" language, and of all texts of the others: six drawn from the automaton, which must satisfy the
schema, and ten random values, which must satisfy it where their text is taken. Counted are values that satisfy the schema and have no text in
the language whatever the order of their properties. The schemas follow from their numbers, so a fault is one number: it is printed.
The file is written after every thousand schemas: a run that is cut off goes on there, and `--again` begins anew.
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
    parser.add_argument("--again", action="store_true", help="forget what the file has")
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    from tests.support.schema_fuzz import compare  # needs jsonschema

    found = json.loads(chosen.to.read_text()) if chosen.to.exists() and not chosen.again else {}
    seeds = range(chosen.first, chosen.first + chosen.schemas)
    done = found.get("next", seeds.start) if found.get("first") == seeds.start else seeds.start
    kept = {row.pop("language"): row for row in found.get("rows", [])} if done > seeds.start else {}
    tallies = {language: Counter[str](kept.get(language, {})) for language in LANGUAGES}
    for seed in seeds[done - seeds.start :]:
        language = LANGUAGES[seed % 2]
        tallies[language]["schemas"] += 1
        try:
            compare(seed, language, tallies[language])
        except AssertionError as fault:
            tallies[language]["faults"] += 1
            print(language, fault, flush=True)
        if seed % 1000 == 999 or seed == seeds[-1]:
            rows = [
                {"language": name, **{column: tally[column] for column in ("schemas", *COLUMNS)}}
                for name, tally in tallies.items()
            ]
            found = {"first": seeds.start, "next": seed + 1, "rows": rows}
            write(chosen.to, found)
    print(report(found))


if __name__ == "__main__":
    main()
