"""Summaries of long outputs: runs of the tests, and of compute-sanitizer."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any


def test_summary(record: Path) -> dict[str, Any]:
    """Summary of what `tests/harness/record.py` wrote: how many tests passed, failed and were skipped; every failure with its
    first lines, every reason to skip, the ten slowest."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    failures: dict[str, str] = {}
    for line in lines:
        if line["outcome"] == "failed":  # twice if a test fails and ends its worker
            failures[line["test"]] = "\n".join(filter(None, [failures.get(line["test"]), line["said"]]))
    outcomes = Counter(line["outcome"] for line in lines)
    slowest = sorted(lines, key=lambda line: -line["seconds"])[:10]
    return {
        "passed": outcomes["passed"],
        "failed": len(failures),
        "skipped": outcomes["skipped"],
        "failures": failures,
        "skips": dict(
            Counter(
                line["said"].removeprefix("Skipped: ") for line in lines if line["outcome"] == "skipped"
            ).most_common()
        ),
        "slowest": {line["test"]: line["seconds"] for line in slowest},
    }


def sanitizer_summary(said: str) -> dict[str, Any]:
    """Summary of compute-sanitizer's report: its verdict, what it found and in which kernel, and which ops were called.

    >>> sanitizer_summary('''
    ... ========= COMPUTE-SANITIZER
    ... kv_trim_: 60 calls on cuda
    ... ========= Invalid __global__ write of size 4 bytes
    ... =========     at void pdkernels::cuda::trim<int>(int *, long)+0x90 in kv_cache.cu:33
    ... =========     by thread (3,0,0) in block (0,0,0)
    ... ========= ERROR SUMMARY: 1 error
    ... ''')
    {'verdict': 'ERROR SUMMARY: 1 error', 'found': {'Invalid __global__ write of size 4 bytes, pdkernels::cuda::trim': 1}, 'called': ['kv_trim_']}
    """
    lines = re.findall(r"^=+ +(.*)$", said, re.MULTILINE)
    found: Counter[str] = Counter()
    for before, line in zip(["", *lines], lines):
        # The location is on the next line, for races on the same one.
        location = re.search(r"^(.*?) ?\bat (?:void )?([\w:]+).*\+0x", line)
        if location:
            found[f"{location[1] or before}, {location[2]}"] += 1
    verdicts = [line for line in lines if re.match("(ERROR|RACECHECK) SUMMARY", line)]
    return {
        "verdict": verdicts[-1] if verdicts else "none",
        "found": dict(found.most_common(40)),
        "called": re.findall(r"^(\w+): \d+ calls on", said, re.MULTILINE),
    }
