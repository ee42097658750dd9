"""Draws calls of all ops and checks their outcome.

    python -m tests.ops.fuzz --calls 1000000 --seed 1

A call begins as the example of its op, in any dtype. Then its arguments are mutated: other sizes and strides, values at
the ends of their range, shared memory, and invalid arguments. It either gives what the reference gives, or raises an
error in the package's words and leaves all memory as it was.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from pdkernels.masks import TilePlan
from pdkernels.ops.library import OPS
from tests.ops.examples import PUBLIC, Arguments, example, run, tensors_in

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OTHER_DTYPES = [torch.float64, torch.int8, torch.bool, torch.complex64, torch.int64, torch.int32, torch.uint16]
HOUSE = (ValueError, TypeError, NotImplementedError, MemoryError)
FLOATS = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 1.0]
NORMAL = [
    x for x in FLOATS if not 0 < x < 1e-37
]  # subnormal numbers may count as zero in a product, times infinity too
INTEGERS = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 7, 63, 64, 65, 2**31, 2**32, 2**62, 2**63 - 1]
NUMBERS = [
    *INTEGERS,
    2**64,
    2**70,
    *FLOATS,
    1e-31,
    0.5,
    1e30,
    1e300,
    True,
    None,
    "linear",
    numpy.int64(1),
    numpy.float32(1.5),
    [],
]
COUNTERS = ["recurrences", "unchanged_steps", "steps", "cursor"]  # ops increment these
SECONDS = 60

Change = Callable[[random.Random, Arguments], None]


def tensors_of(arguments: Arguments) -> list[str]:
    return [name for name, x in arguments.items() if isinstance(x, Tensor)]


def pick(rng: random.Random, arguments: Arguments) -> str:
    return rng.choice(tensors_of(arguments))


def other_size(rng: random.Random, arguments: Arguments) -> None:
    """A size of the example becomes another one, wherever it occurs."""
    sizes = sorted({n for name in tensors_of(arguments) for n in arguments[name].shape})
    if not sizes:
        return
    old, new = rng.choice(sizes), rng.choice([0, 1, 2, 3, 5, 8, 17])
    for name in tensors_of(arguments):
        for dim, n in enumerate(arguments[name].shape):
            if n == old:
                arguments[name] = resized(arguments[name], dim, new)


def resized(x: Tensor, dim: int, size: int) -> Tensor:
    if size <= x.shape[dim]:
        return x.narrow(dim, 0, size).clone()
    return torch.cat([x] * -(-size // max(x.shape[dim], 1)), dim).narrow(dim, 0, size) if x.shape[dim] else x


def one_size(rng: random.Random, arguments: Arguments) -> None:
    name = pick(rng, arguments)
    if arguments[name].dim():
        arguments[name] = resized(arguments[name], rng.randrange(arguments[name].dim()), rng.choice([0, 1, 3, 6]))


def layout(rng: random.Random, arguments: Arguments) -> None:
    """The same numbers with other strides: in another order, with gaps, at an odd address."""
    name = pick(rng, arguments)
    x = arguments[name]
    order = list(range(x.dim()))
    kept = rng.choice([0, 0, 1])  # mostly the last dimension stays the last
    head = order[: x.dim() - 1 + kept]
    rng.shuffle(head)
    order = head + order[len(head) :]
    shape = [x.shape[d] + rng.choice([0, 0, 1, 8]) for d in order]
    room = torch.zeros(math.prod(shape) + 3, dtype=x.dtype)[rng.choice([0, 0, 1]) :][: math.prod(shape)].view(shape)
    view = room.permute([order.index(d) for d in range(x.dim())])[tuple(slice(0, n) for n in x.shape)]
    arguments[name] = view.copy_(x)


def index_width(rng: random.Random, arguments: Arguments) -> None:
    for name in tensors_of(arguments):
        if arguments[name].dtype == torch.int64 and rng.random() < 0.8:
            arguments[name] = arguments[name].to(torch.int32)


def is_product(arguments: Arguments) -> bool:
    return isinstance(arguments.get("weight"), Tensor) and (
        "hidden" in arguments or arguments.keys() <= {"x", "weight", "bias"}
    )


def odd_values(rng: random.Random, arguments: Arguments) -> None:
    x = arguments[name] if (name := pick(rng, arguments)) else None
    if x.numel() == 0 or x.dtype == torch.bool or x.is_complex():
        return
    product = is_product(arguments)
    for _ in range(rng.randint(1, 3)):
        at = tuple(rng.randrange(n) for n in x.shape)
        if x.is_floating_point():
            x[at] = rng.choice(NORMAL if product else FLOATS)
        else:
            most = torch.iinfo(x.dtype)
            x[at] = min(max(rng.choice(INTEGERS), most.min), most.max // (2 if name in COUNTERS else 1))


def number(rng: random.Random, arguments: Arguments) -> None:
    """An argument that is not a tensor, or an option that the example leaves out."""
    names = [name for name, x in arguments.items() if not isinstance(x, (Tensor, TilePlan))]
    names += [
        "seed",
        "step",
        "top_k",
        "top_p",
        "min_p",
        "temperature",
        "quota",
        "min_count",
        "threshold",
        "factor",
        "strict",
    ]
    names += [
        "max_selected",
        "horizon",
        "noise",
        "momentum",
        "headway",
        "min_recurrences",
        "eps",
        "update",
        "stability",
    ]
    arguments[rng.choice(names)] = rng.choice(NUMBERS)


def shared_memory(rng: random.Random, arguments: Arguments) -> None:
    """Makes one tensor start inside the memory of another."""
    a, b = pick(rng, arguments), pick(rng, arguments)
    x, y = arguments[a], arguments[b]
    if a == b or y.is_complex() or x.numel() == 0 or y.numel() == 0:
        return
    at = rng.randrange(0, x.nbytes + 64) // 8 * 8
    room = torch.zeros(x.nbytes + at + y.nbytes + 64, dtype=torch.uint8)
    first = room[: x.nbytes].view(x.dtype).view(x.shape)
    second = room[at : at + y.nbytes].view(y.dtype).view(y.shape)
    second.copy_(y), first.copy_(x)
    arguments[a], arguments[b] = first, second


def expanded(rng: random.Random, arguments: Arguments) -> None:
    name = pick(rng, arguments)
    x = arguments[name]
    if x.dim() and 0 not in x.shape:
        dim = rng.randrange(x.dim())
        sizes = list(x.shape)
        sizes[dim] = rng.choice([x.shape[dim], x.shape[dim], 2**40, 2**31])
        arguments[name] = x.narrow(dim, 0, 1).expand(sizes)


def overlapping(rng: random.Random, arguments: Arguments) -> None:
    name = pick(rng, arguments)
    x = arguments[name].contiguous()
    arguments[name] = x.as_strided(x.shape, [rng.choice([s, s, 1, 2]) for s in x.stride()]) if x.numel() else x


def nonsense(rng: random.Random, arguments: Arguments) -> None:
    name = pick(rng, arguments)
    x = arguments[name]
    arguments[name] = rng.choice(
        [
            lambda: None,
            lambda: x.tolist(),
            lambda: x.numpy() if x.dtype != torch.bfloat16 else 3,
            lambda: x.to(rng.choice(OTHER_DTYPES)),
            lambda: x.to("meta"),
            lambda: x.to_sparse(),
            lambda: x.unsqueeze(0),
            lambda: x.flatten(),
            lambda: x.mT if x.dim() > 1 else x,
            lambda: x.clone().requires_grad_() if x.is_floating_point() else x,
        ]
    )()


LIKELY: list[Change] = [other_size, other_size, layout, layout, index_width, odd_values]
UNLIKELY: list[Change] = [one_size, number, shared_memory, expanded, overlapping, nonsense]


def make(op: str, seed: int) -> Arguments:
    rng = random.Random(seed)
    arguments = example(op, seed % 1000, dtype=rng.choice(DTYPES))
    if is_product(
        arguments
    ):  # multiples of 1/4, whose sums are exact in any order: equal columns stay equal, and ids are the reference's
        for name in ("hidden", "x", "weight", "bias"):
            if name in arguments:
                arguments[name] = (arguments[name] * 4).round() / 4
    changes = [rng.choice(LIKELY) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
    changes += [rng.choice(UNLIKELY)] * (rng.random() < 0.35)
    for change in changes:
        try:
            change(rng, arguments)
        except (RuntimeError, TypeError, AttributeError):
            continue  # not possible after the previous change
    if "quota" in arguments and "plan" not in arguments and rng.random() < 0.5:
        arguments["quota"] = rng.choice([0, 1, 5])
    return arguments


def bytes_of(arguments: Arguments) -> list[bytes]:
    """All dense memory that contains the arguments."""
    found = []
    for x in arguments.values():
        if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta:
            storage = x.detach().untyped_storage()
            found.append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes())
    return found


def outcome(op: str, arguments: Arguments, backend: str) -> tuple[Any, Exception | None]:
    try:
        return run(op, arguments, backend=backend), None
    except Exception as error:
        return None, error


def differs(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return True
    if a.is_meta or a.numel() == 0:
        return False
    if not a.is_floating_point():
        return not torch.equal(a, b)
    tolerance = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(a.dtype, 1e-3)
    return not torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def check(op: str, seed: int) -> str:
    """Runs a call. Returns "valid" or "refused", or what is wrong."""
    first, second = make(op, seed), make(op, seed)
    before = bytes_of(first)
    found, error = outcome(op, first, "auto")
    if error is not None:
        if not isinstance(error, HOUSE) or not str(error).startswith("pdkernels.") or "\n" in str(error):
            if not (isinstance(error, TypeError) and "unexpected keyword" in str(error)):
                return f"foreign error: {type(error).__name__}: {str(error)[:300]}"
        if bytes_of(first) != before:
            return f"memory changed by a call that raised {error}"
    wanted, refusal = outcome(op, second, "reference")
    float64 = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in first.values())
    gradient = any(isinstance(x, Tensor) and x.requires_grad for x in first.values())
    meta = any(isinstance(x, Tensor) and x.is_meta for x in first.values())
    if (error is None) != (refusal is None) and not (float64 or gradient or meta):
        return f"the kernel says {error!r}, the reference {refusal!r}"
    if error is not None or refusal is not None:
        return "refused"
    pairs = [*zip(tensors_in(found), tensors_in(wanted), strict=True)]
    pairs += [(first[name], second[name]) for name in OPS[op].mutated if isinstance(first[name], Tensor)]
    if not meta and any(differs(a, b) for a, b in pairs):
        return "another result than the reference"
    return "valid"


def fuzz(calls: int, seed: int = 0, ops: list[str] | None = None) -> tuple[Counter[str], list[str]]:
    """How many calls of each op were valid and refused, and what was wrong."""
    counts: Counter[str] = Counter()
    faults = []
    names = ops or PUBLIC
    for n in range(calls):
        op, own = names[n % len(names)], seed * 10**9 + n
        if n % 100 == 0:
            faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)  # pytest replaces stderr
        verdict = check(op, own)
        if verdict not in ("valid", "refused"):
            faults.append(f"{op}, seed {own}: {verdict}")
            verdict = "wrong"
        counts[f"{op} {verdict}"] += 1
    faulthandler.cancel_dump_traceback_later()
    return counts, faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", nargs="*", choices=PUBLIC)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    counted, wrong = fuzz(given.calls, given.seed, given.ops)
    for fault in wrong:
        print(fault)
    for line, count in sorted(counted.items()):
        print(f"{count:9} {line}")
    print(f"{given.calls} calls in {time.monotonic() - start:.0f} s, {len(wrong)} wrong")
    raise SystemExit(bool(wrong))
