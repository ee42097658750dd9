"""JSON as it is committed: one record a line, without what no reader uses.

    python -m bench.records FILE ...

renews files that another program wrote, such as pytest-benchmark.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def text(value: Any) -> str:
    """`value` as JSON with a line for each element of a list, each entry of a table, and each value of the outermost object.

    >>> print(text({"machine": {"cores": 2}, "rows": [{"op": "linear", "us": [3.5, 4]}, {"op": "unmask_", "us": [1.25]}]}), end="")
    {
     "machine": {"cores": 2},
     "rows": [
      {"op": "linear", "us": [3.5, 4]},
      {"op": "unmask_", "us": [1.25]}
     ]
    }
    """
    return _lines(value, 0) + "\n"


def _lines(value: Any, depth: int) -> str:
    inside, between = "\n" + " " * (depth + 1), ",\n" + " " * (depth + 1)
    if isinstance(value, dict) and value and (depth == 0 or _depth(value) > 1):
        entries = [f"{json.dumps(name, ensure_ascii=False)}: {_lines(each, depth + 1)}" for name, each in value.items()]
        return f"{{{inside}{between.join(entries)}\n{' ' * depth}}}"
    if isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
        records = [json.dumps(each, ensure_ascii=False) for each in value]
        return f"[{inside}{between.join(records)}\n{' ' * depth}]"
    return json.dumps(value, ensure_ascii=False)


def _depth(value: Any) -> int:
    """How deep objects lie in each other."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(map(_depth, inner), default=0) + isinstance(value, dict)


def used(found: Any) -> Any:
    """What reports read of the files of pytest-benchmark and of sweeps; other files as they are."""
    if isinstance(found, dict) and found.keys() >= {"measured", "rows", "comparisons"}:
        # Of a sweep that has ended, the measurements of single prompts are in its rows.
        return {name: value for name, value in found.items() if name != "measured"}
    if not isinstance(found, dict) or "machine_info" not in found:
        return found
    machine, commit = found["machine_info"], found.get("commit_info") or {}
    machine = {
        name: machine[name] for name in ("gpu", "machine", "python_version", "system", "release") if name in machine
    }
    cpu = found["machine_info"].get("cpu", {})
    machine |= {"cpu": {name: cpu[name] for name in ("brand_raw", "count") if name in cpu}} if cpu else {}
    benchmarks = [
        {
            **{name: each[name] for name in ("group", "fullname") if name in each},
            "stats": {name: value for name, value in each["stats"].items() if name in ("iqr", "max", "rounds")},
            "extra_info": each["extra_info"],
        }
        for each in found["benchmarks"]
    ]
    kept = {"machine_info": machine, "commit_info": {name: commit[name] for name in ("id", "dirty") if name in commit}}
    return {**kept, "datetime": found.get("datetime"), "benchmarks": benchmarks}


def write(path: Path, found: Any) -> None:
    """Writes a file of results, as a whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text(used(found)), encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        write(file, json.loads(file.read_text()))
