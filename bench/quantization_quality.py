"""Quality of quantised weights: perplexity and greedy agreement of SmolLM2-135M in each format, against its numbers.

The text ships with Python: docstrings of the standard library. The numbers are those of the packaged file, which is quantised
itself; every format quantises them once more, so that a row says what is lost from there on. "stored" has the same numbers as
the first row, in the file's own formats: what it loses is by products that quantise their other factor to 8 bits. Behind a format
", numbers" leaves that factor as it is (`pdkernels.models.packed_rows_`). "cache float16" and "cache int8" have the numbers and a narrower KV cache.

    python -m bench.quantization_quality --formats q8_0 q4_0 int8 --bytes 50000
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch

import pdkernels as pd
from bench.records import write
from pdkernels.decoding import generate

MODEL = "smollm2-135m-instruct"
CACHES = {"cache float16": torch.float16, "cache int8": torch.int8}
ROWS = ", numbers"
FORMATS = (
    "stored",
    f"stored{ROWS}",
    "q8_0",
    f"q8_0{ROWS}",
    "q5_1",
    "q5_0",
    "q4_1",
    "q4_0",
    f"q4_0{ROWS}",
    "int8",
    "int4",
    "int4/128",
    *CACHES,
)
MODULES = ("argparse", "asyncio", "collections", "csv", "datetime", "decimal", "difflib", "email", "fractions", "heapq")
MODULES += ("inspect", "json", "logging", "pathlib", "random", "re", "shutil", "statistics", "string", "subprocess")
MODULES += ("tempfile", "textwrap", "threading", "typing", "unittest", "uuid", "zipfile")


def text(size: int) -> str:
    """Docstrings, one after the other, of at least 80 letters."""
    found: dict[str, None] = {}
    warnings.simplefilter("ignore", DeprecationWarning)  # of old names in modules
    for name in MODULES:
        module = import_module(name)
        for holder in (module, *(value for value in vars(module).values() if inspect.isclass(value))):
            for value in (holder, *tuple(vars(holder).values())):
                words = inspect.cleandoc(value.__doc__) if isinstance(getattr(value, "__doc__", None), str) else ""
                if len(words) >= 80 and words.isascii():
                    found[words] = None
    whole = "\n\n".join(found)
    return whole[:size]


def windows(tokens: list[int], length: int) -> Iterator[torch.Tensor]:
    for start in range(0, len(tokens) - 1, length):
        piece = tokens[start : start + length + 1]
        if len(piece) > 1:
            yield torch.tensor([piece])


@torch.no_grad()
def run(model: pd.models.Transformer, pieces: list[torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Perplexity, and the likeliest token after each."""
    total, choices = 0.0, []
    for piece in pieces:
        # The rows of one forward on an empty cache see each other as the cache holds them.
        cache = model.new_cache(1, piece.shape[1]) if model.cache_dtype is not None else None
        logits = model(piece[:, :-1], cache=cache)[0].float()
        total += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
        choices.append(logits.argmax(-1))
    found = torch.cat(choices)
    return math.exp(total / len(found)), found


def continuations(model: pd.models.Transformer, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    found = generate(model, prompts, max_new_tokens=tokens, end_tokens=())
    return [row.tolist() for row in found.tokens]


def common(a: list[int], b: list[int]) -> int:
    """How many tokens two continuations share from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def in_format(numbers: pd.models.Transformer, name: str) -> pd.models.Transformer:
    if name.endswith(ROWS):
        return pd.models.packed_rows_(in_format(numbers, name.removesuffix(ROWS)), "numbers")
    if name in CACHES:
        own = copy.copy(numbers)
        own.cache_dtype = CACHES[name]
        return own
    if name == "stored":
        stored = pd.models.load(MODEL, packed=True)
        assert isinstance(stored, pd.models.Transformer)
        return stored
    kind, _, group = name.partition("/")
    return pd.quantize(numbers, kind, group=int(group) if group else None)


def packed_bytes(model: pd.models.Transformer) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--formats", nargs="+", default=FORMATS, help="of pd.quantize, with /GROUP; stored: as in the file"
    )
    parser.add_argument("--bytes", type=int, default=50_000, help="of text")
    parser.add_argument("--window", type=int, default=512, help="tokens of context")
    parser.add_argument("--prompts", type=int, default=16, help="texts to continue")
    parser.add_argument("--new", type=int, default=64, help="tokens of a continuation")
    parser.add_argument("--json", help="a file for the rows")
    given = parser.parse_args(arguments)
    numbers = pd.models.load(MODEL, packed=False)
    assert isinstance(numbers, pd.models.Transformer) and numbers.tokenizer is not None
    tokens = numbers.tokenizer.encode(text(given.bytes))
    pieces = list(windows(tokens, given.window))
    step = max(len(tokens) // max(given.prompts, 1), 1)
    prompts = [tokens[i * step : i * step + 32] for i in range(given.prompts)]
    perplexity, expected = run(numbers, pieces)
    theirs = continuations(numbers, prompts, given.new)
    rows: list[dict[str, object]] = []
    print(f"{len(tokens)} tokens, windows of {given.window}; {len(prompts)} continuations of {given.new}", flush=True)
    print(
        "| format | MB | perplexity | same choice | tokens before a continuation differs |\n|---|---:|---:|---:|---:|"
    )
    for name in ("numbers", *given.formats):
        model = numbers if name == "numbers" else in_format(numbers, name)
        if name != "numbers":
            perplexity, found = run(model, pieces)
            ours = continuations(model, prompts, given.new)
        else:
            found, ours = expected, theirs
        same = float((found == expected).double().mean())
        length = sum(map(common, ours, theirs)) / max(len(theirs), 1)
        rows.append(
            {"format": name, "bytes": packed_bytes(model), "perplexity": perplexity, "same": same, "length": length}
        )
        size = packed_bytes(model) / 1e6
        print(f"| {name} | {size:.0f} | {perplexity:.3f} | {same:.1%} | {length:.1f} |", flush=True)
    if given.json:
        write(Path(given.json), rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
