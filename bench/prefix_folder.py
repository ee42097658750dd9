"""The second turn of a long chat after the server has started again, beside llama.cpp's files of slots.

    python -m bench.prefix_folder [--llama-server PATH] [--words 3300] [--rounds 3] [--to bench/results/prefix_folder.json]

The first turn has about 4,000 tokens. Then the server is stopped, which ours uses to write what is left, and started again: the time to the
first token of the second turn, by CPU time of the server and by the clock, and the same where nothing was kept. llama.cpp is told to save
the slot after the first turn, and to restore it before the second: its restore counts. One thread; the least of some rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench.gguf_files import requantized
from bench.gpu_report import table
from bench.load_clients import WORDS
from bench.records import write
from pdkernels.evaluation.machine import processor
from pdkernels.models.checkpoints.packaged import packaged

RESULTS = Path(__file__).resolve().parent / "results/prefix_folder.json"


class Server:
    """A server of one of both."""

    def __init__(self, engine: str, command: list[str], folder: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        kept = ["--prefix-dir", str(folder)] if engine == "pdkernels" else ["--slot-save-path", str(folder)]
        self.engine, self.address = engine, f"http://127.0.0.1:{port}"
        with log.open("w") as file:
            command = [*command, *kept, "--port", str(port)]
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        for _ in range(600):
            try:
                httpx.get(f"{self.address}/health").raise_for_status()
                return
            except httpx.HTTPError:
                assert self.process.poll() is None, log.read_text()[-2000:]
                time.sleep(0.1)

    def seconds(self) -> float:
        """CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def slot(self, action: str) -> None:
        """Has llama.cpp save or restore its slot."""
        httpx.post(f"{self.address}/slots/0?action={action}", json={"filename": "slot"}, timeout=300).raise_for_status()

    def first(self, messages: list[dict[str, str]]) -> tuple[str, float, float]:
        """The answer, and how long its first token took: CPU time and clock."""
        body = {
            "model": "load",
            "messages": messages,
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        cpu, clock, text, found = self.seconds(), time.perf_counter(), "", (0.0, 0.0)
        with httpx.stream("POST", f"{self.address}/v1/chat/completions", json=body, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    piece = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                    if piece and not text:
                        found = self.seconds() - cpu, time.perf_counter() - clock
                    text += piece
        return text, *found

    def stop(self) -> None:
        """As an operator does."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def measure(engine: str, command: list[str], words: int, seed: int, log: Path) -> dict[str, Any]:
    """One round of a server."""
    chance = random.Random(seed)
    messages = [{"role": "user", "content": " ".join(chance.choices(WORDS, k=words))}]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as empty:
        server = Server(engine, command, Path(name), log)
        text, *found["first"] = server.first(messages)
        if engine != "pdkernels":
            server.slot("save")
        server.stop()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
        found["bytes"] = sum(file.stat().st_size for file in Path(name).iterdir())
        for kind, folder in (("kept", name), ("cold", empty)):
            server = Server(engine, command, Path(folder), log)
            server.first([{"role": "user", "content": "Hello."}])  # what a start costs once
            cpu, clock = server.seconds(), time.perf_counter()
            if engine != "pdkernels" and kind == "kept":
                server.slot("restore")
            cpu, clock = server.seconds() - cpu, time.perf_counter() - clock
            found[f"{kind} text"], first_cpu, first_clock = server.first(messages)
            found[kind] = [first_cpu + cpu, first_clock + clock]
            server.stop()
    if engine == "pdkernels" and found["kept text"] != found["cold text"]:
        raise SystemExit("the answer after a restored prompt is another one")
    return found


def folder_table(path: Path) -> str:
    """A line for each server."""
    if not path.exists():
        return "not measured"
    found, lines = json.loads(path.read_text()), []
    for name, one in found["figures"].items():
        shown = f"**{name}**" if name == "pdkernels" else name
        lines.append(
            [
                shown,
                *(f"{one[kind][which]:.2f}" for which in (0, 1) for kind in ("cold", "kept")),
                f"{one['bytes'] / 1e6:,.0f}",
            ]
        )
    head = ["server", "nothing kept, CPU s", "kept", "nothing kept, s", "kept", "MB on disk"]
    facts = f"{found['file']}, a first turn of about {found['tokens']:,} tokens; one thread, the least of {found['rounds']} rounds; {found['machine']}"
    return f"{table(head, lines)}\n\n{facts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, metavar="PATH")
    parser.add_argument("--words", type=int, default=3900, help="of the first turn, a token or a little more each")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = requantized(packaged("smollm2-135m-instruct"), "Q4_0", folder)
        sizes = ["--max-prompt-tokens", "4600", "--max-new-tokens", "64"]
        commands = {
            "pdkernels": [
                sys.executable,
                "-m",
                "pdkernels",
                "serve",
                "--model",
                str(file),
                "--name",
                "load",
                "--threads",
                "1",
                *sizes,
            ]
        }
        if given.llama_server:
            commands["llama.cpp"] = [
                str(given.llama_server),
                "-m",
                str(file),
                "-t",
                "1",
                "-tb",
                "1",
                "-np",
                "1",
                "-c",
                "6144",
                "--no-webui",
            ]
        for seed in range(given.rounds):
            for engine, command in commands.items():
                found = measure(engine, command, given.words, seed, folder / "log")
                least = figures.setdefault(engine, {"bytes": found["bytes"]})
                for kind in ("first", "cold", "kept"):
                    least[kind] = [min(pair) for pair in zip(found[kind], least.get(kind, found[kind]), strict=True)]
    facts = {
        "file": file.name,
        "machine": processor(),
        "python": sys.version.split()[0],
        "tokens": given.words,
        "rounds": given.rounds,
    }
    write(given.to, facts | {"figures": figures})
    print(folder_table(given.to))


if __name__ == "__main__":
    main()
