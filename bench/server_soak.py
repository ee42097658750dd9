"""Many clients at once for a long time, some of which do everything wrong, against the command in a process of its own.

    python -m bench.server_soak [--clients 64] [--seconds 600] [--to bench/results/server_soak.json]

Every text must be that of `generate` alone, every request must end, and at the end SIGTERM finds answers under way, which are finished.
What the server holds is looked at every five seconds; the figures are the maxima of each quarter of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from bench.gpu_report import table
from bench.records import write
from pdkernels.evaluation.machine import processor

RESULTS = Path(__file__).resolve().parent / "results/server_soak.json"
KINDS = {
    "whole": "whole answers", "stream": "streams", "slow": "slow readers", "vanish": "gone in the middle of a stream",
    "drop": "gone before, or in the middle of a request", "bad": "broken JSON", "unknown": "an unknown field",
}  # fmt: skip


def soak_table(path: Path) -> str:
    """What clients did, and what the server held in each quarter of the time."""
    if not path.exists():
        return "not measured"
    found = json.loads(path.read_text())
    counts, held = found["counts"], found["held"]
    done = [[words, f"{counts.get(kind, 0):,}"] for kind, words in KINDS.items()]
    done.append(["answered with 429", f"{counts.get('full', 0):,}"])
    rows = [
        ["resident memory, MB", *(f"{value:.0f}" for value in held["resident_mb"])],
        ["open files", *map(str, held["files"])],
        ["threads", *map(str, held["threads"])],
    ]
    tables = table(["what clients did", "times"], done), table(["most, in each quarter", "1", "2", "3", "4"], rows)
    facts = f"{found['clients']} clients, {found['seconds']:.0f} seconds, tiny-code, no error; {found['machine']}, load average before it {found['load_before']:.1f}"
    return "\n\n".join([*tables, facts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    from bench.soak_clients import soak  # with httpx, which a table does without

    before = os.getloadavg()[2]
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder) / "log", chosen.clients, chosen.seconds)
    facts = {"machine": processor(), "python": sys.version.split()[0], "load_before": before}
    write(chosen.to, facts | found)
    print(soak_table(chosen.to))


if __name__ == "__main__":
    main()
