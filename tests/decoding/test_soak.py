"""Thousands of generations with all methods leak no memory: ``python -m tests.decoding.test_soak 20000``."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels.decoding import available, find, generate
from pdkernels.models import (
    PlanTokens,
    RecurrentDepth,
    RecurrentDepthConfig,
    Transformer,
    TransformerConfig,
    from_callable,
)
from pdkernels.ops.library import OPS
from tests.ops.examples import example, run
from tests.support.drafters import with_drafters

STATUS = Path("/proc/self/statm")
SIZES = {"vocab_size": 24, "hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}
MASK = 23
MIB = 2**20
GROWTH = 3 * MIB  # allowance for what an allocator keeps; a leak of 1 KiB per generation would show


@cache
def model_of(method: str) -> Any:
    torch.manual_seed(0)
    known = find(method)
    if known.wing == "recurrent":
        config = RecurrentDepthConfig(24, 16, 2, 8, 24, 1, 1, 1, mean_recurrence=3)
        return RecurrentDepth(config).requires_grad_(False)
    kind: dict[str, Any] = {"attention": "bidirectional", "predicts": "own"} if known.wing == "masked" else {}
    tags = PlanTokens(16, 17, 18, 19, 20, 21, digits=range(10), unit=1) if (known.wing == "planned") else None
    model = Transformer(TransformerConfig(**SIZES, intermediate_size=24, **kind), mask_token=MASK, plan_tokens=tags)
    return with_drafters(model.requires_grad_(False)) if "drafter" in known.requires else model.requires_grad_(False)


@cache
def function_of(method: str) -> Any:
    """The same as a function, for methods that take one."""
    model = model_of(method)
    own = model.config.predicts == "own"
    return from_callable(lambda tokens: model(tokens), vocab_size=24, mask_token=MASK if own else None)


def generations(count: int, seed: int = 0) -> Iterator[str]:
    """Each method in turn, with random sizes and options; the name of the method that has just run."""
    chance = random.Random(seed)
    methods = available()
    for number in range(count):
        method = methods[number % len(methods)]
        known = find(method)
        prompts = [[chance.randrange(MASK) for _ in range(chance.randint(1, 9))] for _ in range(chance.randint(1, 3))]
        options: dict[str, Any] = {"max_new_tokens": chance.randint(0, 8), "trace": chance.random() < 0.2}
        for name, values in (
            ("block_size", (2, 4)),
            ("temperature", (0.0, 0.8)),
            ("page_size", (None, 4)),
            ("seed", (0, 7)),
        ):
            if name in known.options:
                options[name] = chance.choice(values)
        if "small_block_size" in known.options:
            options["small_block_size"] = 2
        if chance.random() < 0.3:
            ends = range(10, 16) if (known.wing == "planned") else range(MASK)  # not those of plans
            options["end_tokens"] = tuple(chance.sample(ends, 3))
        model = model_of(method)
        if method in ("llada", "dream", "slowfast", "jacobi", "autoregressive") and chance.random() < 0.3:
            model, options["page_size"] = function_of(method), None
            if "page_size" not in known.options:
                del options["page_size"]
        generate(model, prompts, known, **options)
        yield method


def resident() -> int:
    gc.collect()
    return int(STATUS.read_text().split()[1]) * 4096


def soak(count: int, every: int) -> list[int]:
    """Resident bytes after every n-th generation."""
    return [resident() for number, _ in enumerate(generations(count), start=1) if number % every == 0]


def grown(sizes: list[int]) -> int:
    """Bytes from the end of the warm-up, the first third, to the end; medians of a few samples each."""
    warm = len(sizes) // 3
    median = lambda part: sorted(part)[len(part) // 2]  # noqa: E731
    return median(sizes[-3:]) - median(sizes[warm : warm + 3])


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="the size of a process is read from /proc")
def test_memory_is_flat_after_warm_up() -> None:
    torch.set_num_threads(1)
    assert grown(soak(2400, 100)) < GROWTH


class Allocated(ctypes.Structure):
    """What glibc's `mallinfo2` tells."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


TAKE_STRINGS = [
    op
    for op in OPS
    if any(isinstance(a.type, torch.StringType) for a in getattr(torch.ops.pdkernels, op).default._schema.arguments)
]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc counts what is allocated")
@pytest.mark.parametrize("op", TAKE_STRINGS)
def test_arguments_that_are_strings_are_freed(op: str) -> None:
    """The conversion that comes with torch 2.13 leaks 32 bytes a string and call, and more if it is long: 64 KB here."""
    count = ctypes.CDLL(None).mallinfo2
    count.restype = Allocated
    arguments, calls = example(op, 0), 2000
    for _ in range(100):
        run(op, dict(arguments))
    gc.collect()
    before = count().uordblks
    for _ in range(calls):
        run(op, dict(arguments))
    gc.collect()
    assert count().uordblks - before < 16 * calls


def test_ops_that_take_strings() -> None:
    assert {"token_statistics", "recurrence_inject", "short_conv_"} <= {*TAKE_STRINGS}


def test_every_method_takes_part() -> None:
    assert set(generations(len(available()), seed=3)) == set(available())


if __name__ == "__main__":
    torch.set_num_threads(1)
    total = int(sys.argv[1])
    found = soak(total, max(1, total // 40))
    print([round(size / MIB, 2) for size in found])
    print(f"{total} generations: {grown(found) / MIB:+.2f} MiB after warm-up, {found[-1] / MIB:.1f} MiB resident")
    sys.exit(grown(found) >= GROWTH)
