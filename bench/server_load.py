"""A server under a load like that of people, beside llama.cpp's on the same file: requests arrive by a Poisson law.

    python -m bench.server_load --llama-server PATH [--rate 4] [--seconds 60] [--rounds 2] [--around COMMAND] [--to bench/results/server_load.json]

Prompts have 50 to 2,000 tokens and answers 16 to 128, evenly in their logarithms. Of 100 requests 40 are greedy, 20 sampled, 10 name
another method (llama.cpp has none: it answers them greedily), 10 follow a JSON schema, 10 name an adapter, and 10 hang up in the middle.
At most 64 are asked at a time; a request that finds no free client waits, and its first token counts from when it arrived. Both servers
get the same requests at the same times, one after the other, each alone with all cores, and others in each round.

A request without a first token when a slice ends counts with the time that it has waited: a lower bound. Greedy answers of ours must be
those that `generate` gives alone, or no figure counts. `--around` is put before each slice, such as a command that holds other work back.
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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import pdkernels as pd
from bench.gguf_files import requantized
from bench.gpu_report import table
from bench.load_clients import CLIENTS, body_of
from bench.records import write
from pdkernels.decoding import generate
from pdkernels.evaluation.machine import processor
from pdkernels.models.checkpoints.packaged import packaged

RESULTS = Path(__file__).resolve().parent / "results/server_load.json"
_RANK, _ALPHA, _CHECKED = 8, 16, 6
_PAIRS = {"attn_v": ("self_attn.v_proj", 576, 192), "ffn_down": ("mlp.down_proj", 1536, 576)}
"""Names in a GGUF file and in a folder of PEFT, width and outputs, of SmolLM2-135M."""
_LAYERS = 30


def adapters(folder: Path) -> tuple[Path, Path]:
    """One adapter of small random weights as PEFT's folder and as a GGUF file."""
    import gguf

    draw, tensors = torch.Generator().manual_seed(0), {}
    file = folder / "style.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", _ALPHA)
    for layer in range(_LAYERS):
        for name, (module, width, outputs) in _PAIRS.items():
            for side, shape in (("A", (_RANK, width)), ("B", (outputs, _RANK))):
                weight = torch.randn(shape, generator=draw) * 0.02
                tensors[f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"] = weight
                writer.add_tensor(f"blk.{layer}.{name}.weight.lora_{side.lower()}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    peft = folder / "style"
    peft.mkdir()
    save_file(tensors, peft / "adapter_model.safetensors")
    modules = [module.split(".")[1] for module, _, _ in _PAIRS.values()]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _ALPHA,
        "target_modules": modules,
    }
    (peft / "adapter_config.json").write_text(json.dumps(config))
    return peft, file


def commands(
    file: Path, folder: Path, llama: Path | None, given: argparse.Namespace
) -> dict[str, tuple[str, list[str]]]:
    """By name: the engine and the command of each server, but for its port."""
    peft, lora = adapters(folder)
    ours = [
        sys.executable,
        "-m",
        "pdkernels",
        "serve",
        "--model",
        str(file),
        "--name",
        "load",
        "--adapter",
        f"style={peft}",
    ]
    ours += ["--threads", str(given.threads), "--max-new-tokens", "256", "--method", "autoregressive"]
    found = {
        f"pdkernels, {rows} rows, caches in {kind}": ("pdkernels", [*ours, "--max-running", str(rows), *_cache(kind)])
        for rows in given.rows
        for kind in given.caches
    }
    for slots in given.slots if llama else ():
        theirs = [
            str(llama),
            "-m",
            str(file),
            "--lora",
            str(lora),
            "--lora-init-without-apply",
            "-t",
            str(given.threads),
            "-tb",
            str(given.threads),
        ]
        theirs += ["-np", str(slots), "-c", str(slots * 2560), "--no-webui", *shlex.split(given.llama_options)]
        found[f"llama.cpp, {slots} slots"] = "llama.cpp", theirs
    return found


def _cache(kind: str) -> list[str]:
    return [] if kind == "float32" else ["--cache-dtype", kind]


def one_slice(engine: str, command: list[str], seed: int, given: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Runs it in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    spec = {
        "engine": engine, "command": [*command, "--port", str(port)], "port": port, "seed": seed, "rate": given.rate,
        "seconds": given.seconds, "clients": CLIENTS, "log": str(log), "env": {"OMP_NUM_THREADS": str(given.threads)},
    }  # fmt: skip
    around = shlex.split(given.around)
    done = subprocess.run(
        [*around, sys.executable, "-m", "bench.load_clients", json.dumps(spec)], stdout=subprocess.PIPE, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"a slice of {engine} failed; the server's last words: {log.read_text()[-1000:]}")
    return dict(json.loads(done.stdout))


def percentile(values: list[float], share: float) -> float:
    """The smallest value that this share of the values does not pass.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5), percentile([3.0, 1.0], 0.99)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def figures(slices: list[dict[str, Any]], tokenizer: Any, seconds: float) -> dict[str, Any]:
    """Of all slices of a server together."""
    first, gaps, speeds, waited = list[float](), list[float](), list[float](), 0
    by_kind: dict[str, list[float]] = {}
    prompts = tokens = done = left = 0
    for request in [request for each in slices for request in each["requests"]]:
        if request.get("error"):
            raise SystemExit(f"a request failed: {request['error']}")
        times, text = request.get("times", []), "".join(request.get("texts", []))
        if not times:
            if request["at"] < seconds:
                waited += 1
                first.append(seconds - request["at"])
            continue
        whole = request["usage"] is not None and request["kind"] != "cancelled"
        count = request["usage"]["completion_tokens"] if whole else len(tokenizer.encode(text))
        prompts += len(tokenizer.encode_chat([{"role": "user", "content": request["text"]}]))
        tokens += count
        done += request["ended"] is not None
        left += request["ended"] is None
        first.append(times[0] - request["at"])
        by_kind.setdefault(request["kind"], []).append(times[0] - request["at"])
        gaps += [later - earlier for earlier, later in zip(times, times[1:])]
        if request["kind"] in ("greedy", "sampled") and count >= 16 and times[-1] > times[0]:
            speeds.append((count - 1) / (times[-1] - times[0]))
    total = seconds * len(slices)
    return {
        "tokens_per_second": tokens / total, "prompt_tokens_per_second": prompts / total, "requests_per_second": done / total,
        "first_ms": [1e3 * percentile(first, share) for share in (0.5, 0.99)],
        "gap_ms": [1e3 * percentile(gaps, share) for share in (0.5, 0.99)],
        "requests": len(first), "done": done, "left": left, "waited": waited,
        "fairness": sum(speeds) ** 2 / (len(speeds) * sum(speed**2 for speed in speeds)),
        "first_ms_by_kind": {kind: 1e3 * percentile(times, 0.5) for kind, times in sorted(by_kind.items())},
        "resident_mb": max(each["resident_mb"] for each in slices), "load": max(each["load"] for each in slices),
    }  # fmt: skip


def check_texts(slices: list[dict[str, Any]], file: Path, kind: str) -> int:
    """Compares some greedy answers with those of `generate` alone, with caches of this kind; returns how many."""
    model: Any = pd.models.load(file, cache_dtype=None if kind == "float32" else getattr(torch, kind))
    whole = [
        one for each in slices for one in each["requests"] if one["kind"] in ("greedy", "lookup") and one.get("ended")
    ]
    for request in whole[:: max(1, len(whole) // _CHECKED)][:_CHECKED]:
        prompt = model.tokenizer.encode_chat(body_of(request, "pdkernels")["messages"])
        alone = generate(model, prompt, max_new_tokens=request["most"], end_tokens=()).text
        if alone != "".join(request["texts"]):
            raise SystemExit(
                f"an answer under load is not the one that it is alone:\n{''.join(request['texts'])!r}\n{alone!r}"
            )
    return min(_CHECKED, len(whole))


def load_table(path: Path) -> str:
    """A line for each server."""
    if not path.exists():
        return "not measured"
    found, lines = json.loads(path.read_text()), []
    for name, one in found["figures"].items():
        shown = f"**{name}**" if name.startswith("pdkernels") else name
        times = [f"{ms:,.0f}" for ms in (*one["first_ms"], *one["gap_ms"])]
        counts = (
            f"{one['tokens_per_second']:,.0f}",
            f"{one['prompt_tokens_per_second']:,.0f}",
            f"{one['done']} of {one['requests']}",
        )
        lines.append([shown, *counts, *times, f"{one['fairness']:.2f}", f"{one['resident_mb']:,.0f}"])
    head = [
        "server",
        "new tokens a second",
        "of prompts",
        "ended",
        "first token, ms: p50",
        "p99",
        "gap: p50",
        "p99",
        "fairness",
        "MB",
    ]
    facts = f"{found['file']}, {found['rate']:g} requests a second, {found['rounds']} slices of {found['seconds']:g} s each, {found['threads']} threads, {found['checked']} answers of ours compared; {found['machine']}"
    return f"{table(head, lines)}\n\n{facts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server")
    parser.add_argument("--llama-options", default="", help="more options for it")
    parser.add_argument("--slots", type=int, nargs="+", default=[16], help="of llama.cpp; each number is a server")
    parser.add_argument("--rows", type=int, nargs="+", default=[16], help="of ours: --max-running")
    parser.add_argument("--caches", nargs="+", default=["float32", "float16", "int8"], help="of ours: --cache-dtype")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a slice")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--around", default="", metavar="COMMAND")
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    slices: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = requantized(packaged("smollm2-135m-instruct"), "Q4_0", folder)
        servers = commands(file, folder, given.llama_server, given)
        for seed in range(given.rounds):
            for server, (engine, command) in servers.items():
                slices.setdefault(server, []).append(one_slice(engine, command, seed, given, folder / "log"))
        tokenizer = pd.models.load(file).tokenizer
        found = {server: figures(each, tokenizer, given.seconds) for server, each in slices.items()}
        ours = {server: each for server, each in slices.items() if servers[server][0] == "pdkernels"}
        checked = sum(check_texts(each, file, server.split()[-1]) for server, each in ours.items())
    facts = {
        "file": file.name, "machine": processor(), "python": sys.version.split()[0], "rate": given.rate, "seconds": given.seconds,
        "rounds": given.rounds, "threads": given.threads, "clients": CLIENTS, "checked": checked,
    }  # fmt: skip
    write(given.to, facts | {"figures": found})
    print(load_table(given.to))


if __name__ == "__main__":
    main()
