"""The recurrent-depth sampler's step besides the model, on Huginn's rows of 5280: noise and embeddings in, norm and exit test out.

Candidates: ours; the same mathematics in eager torch, one op at a time as in the published code; and under torch.compile, with
one graph for all widths, or with one per width, which takes a higher recompile limit. Torch has no counter-based generator. With noise
there are therefore two kinds of peers: those that are *given* the noise that ours generates in the call, and only mix it in; and
those that *draw* their own noise from the same distribution, with torch.rand and erfinv, so that their results differ from ours.

No rows froze in the previous step: otherwise peers would need a gather to find them on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare
from pdkernels.reference import recurrence as reference

SIZE = 5280
COUNT = 8  # recurrences so far
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WIDTHS = {"cpu": (1, 16, 64, 128, 512), "cuda": (1, 16, 64, 128, 512), "dry": (64,)}
WAVES = [(1, 16), (1, 128), (8, 128)]
MOMENTUM, THRESHOLD, EPS = 0.1, 0.03, 1e-6


class Setup:
    def __init__(self, width: int, dtype: torch.dtype, noise: float, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def rows() -> Tensor:
            return torch.randn(1, width, SIZE, generator=generator).to(dtype).to(device)

        def number(n: int) -> Tensor:
            return torch.tensor([n], device=device)

        self.state, self.embedding, self.previous, self.x, self.residual = (rows() for _ in range(5))
        self.weight = torch.rand(SIZE, generator=generator).to(dtype).to(device)
        self.recurrences = torch.full((1, width), COUNT, device=device)
        self.cursor, self.width, self.advance, self.steps = number(100), number(width), number(0), number(3)
        self.noise = noise
        positions = self.cursor[:, None] + torch.arange(width, device=device)
        self.drawn = reference.initial_state(1 + self.steps[:, None], positions, SIZE) if noise else None


def inject_ours(s: Setup) -> Tensor:
    vectors = (s.state, s.embedding, s.previous)
    return pd.recurrence_inject(
        *vectors, s.recurrences, s.cursor, s.width, s.advance, s.steps, noise=s.noise, momentum=MOMENTUM
    )


def inject_torch(s: Setup) -> Tensor:
    return mix(s.state, s.embedding, s.previous, s.recurrences, s.drawn, s.noise)


def draw(like: Tensor) -> Tensor:
    """The normal distribution truncated at +-3, by inversion, as many numbers as a tensor has."""
    uniform = torch.rand(like.shape, device=like.device)
    return (0.4**0.5 * 2**0.5) * torch.erfinv(0.9973002 * (2 * uniform - 1))


def mix(
    state: Tensor, embedding: Tensor, previous: Tensor, recurrences: Tensor, drawn: Tensor | None, noise: float
) -> Tensor:
    e = (1 - MOMENTUM) * embedding.float() + MOMENTUM * previous.float()
    if drawn is not None:
        beta = (noise * (1 - recurrences / 32).clamp(min=0))[..., None]
        state = ((1 - beta) * state.float() + beta * drawn).to(state.dtype)
    return torch.cat([state, e.to(state.dtype)], dim=-1)


def exit_ours(s: Setup) -> tuple[Tensor, ...]:
    vectors = (s.x, s.residual, s.weight, s.state)
    return pd.recurrence_exit(*vectors, s.recurrences, s.width, s.advance, threshold=THRESHOLD)


def exit_torch(s: Setup) -> tuple[Tensor, ...]:
    return normalise(s.x, s.residual, s.weight, s.state)


def normalise(x: Tensor, residual: Tensor, weight: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
    total = x.float() + residual.float()
    state = (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight
    now = state.float()
    distance = (now - previous.float()).norm(dim=-1) / now.norm(dim=-1)
    return state, distance, distance < THRESHOLD


@cache
def compiled(function: Callable, dynamic: bool) -> Callable:
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, fullgraph=True, dynamic=dynamic)


def inject_compiled(s: Setup, dynamic: bool = True) -> Tensor:
    return compiled(mix, dynamic)(s.state, s.embedding, s.previous, s.recurrences, s.drawn, s.noise)


def inject_torch_drawing(s: Setup) -> Tensor:
    return mix(s.state, s.embedding, s.previous, s.recurrences, draw(s.state), s.noise)


def inject_drawing(s: Setup) -> Tensor:
    # Drawn by single ops: the compiler's own random numbers are not vectorised and take far longer.
    return compiled(mix, False)(s.state, s.embedding, s.previous, s.recurrences, draw(s.state), s.noise)


def exit_compiled(s: Setup, dynamic: bool = True) -> tuple[Tensor, ...]:
    return compiled(normalise, dynamic)(s.x, s.residual, s.weight, s.state)


OPS: dict[str, dict[str, Callable[[Setup], object]]] = {
    "inject": {"pdkernels": inject_ours, "torch": inject_torch, "torch.compile": inject_compiled},
    "exit": {"pdkernels": exit_ours, "torch": exit_torch, "torch.compile": exit_compiled},
}
OPS["inject"]["torch.compile per width"] = lambda s: inject_compiled(s, False)
OPS["exit"]["torch.compile per width"] = lambda s: exit_compiled(s, False)
OPS["inject with noise"] = OPS["inject"] | {
    "torch, drawing": inject_torch_drawing,
    "torch.compile per width, drawing": inject_drawing,
}
NOISE = {"inject": 0.0, "inject with noise": 0.5, "exit": 0.0}


def check(s: Setup, name: str, result: object) -> None:
    """Against ours, which the tests compare with the reference; peers may round in another order, and draw other numbers."""
    tensors = (result,) if isinstance(result, Tensor) else result
    wanted = exit_ours(s) if name == "exit" else inject_ours(s)
    for a, b in zip(tensors, (wanted,) if isinstance(wanted, Tensor) else wanted):
        assert a.dtype == b.dtype and torch.allclose(
            a.float(), b.float(), rtol=2 * torch.finfo(s.state.dtype).eps, atol=1e-6
        )


def check_distribution(s: Setup, result: Tensor) -> None:
    beta = s.noise * (1 - COUNT / 32)
    drawn = (result[..., :SIZE].float() - (1 - beta) * s.state.float()) / beta
    assert drawn.abs().max() <= 3 * 0.4**0.5 * 1.2 and abs(drawn.var() / 0.3893 - 1) < 0.1


def bytes_of(s: Setup, op: str) -> int:
    """Half of the bytes that a call must read and write, as one side of a copy."""
    rows = s.state.numel() * s.state.element_size()
    return rows * 2 if op == "exit" else rows * 5 // 2


def measure(
    benchmark, call: Callable[[], object], setup: Setup, op: str, name: str, dtype: str, width: int, device: str
) -> None:
    compare(
        benchmark,
        call,
        baseline=partial(OPS[op]["torch"], setup),
        baseline_name="torch",
        device=device,
        rounds=50 if width >= 128 else 300,
        bytes_moved=bytes_of(setup, op),
        op="recurrence",
        case=op,
        candidate=name,
        dtype=dtype,
        width=width,
    )


@by_device("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, name", [(op, name) for op, candidates in OPS.items() for name in candidates])
def test_recurrence(benchmark, op: str, name: str, dtype: str, width: int, device: str) -> None:
    benchmark.group = f"recurrence {op} {dtype}, width {width}, {device}"
    setup = Setup(width, DTYPES[dtype], NOISE[op], device)
    candidate = OPS[op][name]
    if name.endswith("drawing"):
        check_distribution(setup, candidate(setup))
    else:
        check(setup, op, candidate(setup))
    measure(benchmark, partial(candidate, setup), setup, op, name, dtype, width, device)


@by_device("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", NOISE)
def test_copy(benchmark, op: str, dtype: str, width: int, device: str) -> None:
    """Memory bandwidth: ``copy_`` of as many bytes as the op must read and write."""
    benchmark.group = f"recurrence {op} {dtype}, width {width}, {device}"
    setup = Setup(width, DTYPES[dtype], NOISE[op], device)
    source, target = (torch.full((bytes_of(setup, op),), i, dtype=torch.uint8, device=device) for i in (1, 2))
    assert torch.equal(target.copy_(source), source)
    measure(benchmark, partial(target.copy_, source), setup, op, "a copy of as many bytes", dtype, width, device)


class Steps:
    """Bookkeeping of `batch` waves of `width` rows, half of them converged; the tensors are put back before every round."""

    def __init__(self, batch: int, width: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 50000, (batch, width + 1), generator=generator)
        self.predictions = tokens[:, 1:].clone().to(device)
        self.converged = (torch.arange(width) < width // 2).expand(batch, width).contiguous().to(device)
        counts = torch.full((batch, width), COUNT)
        numbers = [torch.full((batch,), n) for n in (width, 100, 0, 3, 10**6)]
        self.first = [x.to(device) for x in (tokens, counts, torch.zeros_like(counts), *numbers)]
        self.ends = torch.tensor([50001], device=device)
        self.reset()

    def reset(self) -> None:
        self.tokens, self.recurrences, self.unchanged_steps, *self.numbers = (x.clone() for x in self.first)


def advance_ours(s: Steps) -> None:
    pd.recurrence_advance_(
        s.tokens,
        s.predictions,
        s.recurrences,
        s.unchanged_steps,
        *s.numbers,
        converged=s.converged,
        inner_recurrence=4,
        end_tokens=s.ends,
    )


def advance_torch(s: Steps) -> None:
    """The same for full waves with `headway` 1 and rule "prefix" and nothing else, without a sync: about forty small ops."""
    width, cursor, advance, steps, remaining = s.numbers
    capacity = s.recurrences.shape[1]
    position = torch.arange(capacity, device=width.device)
    inside = position < width[:, None]
    again = inside & (s.recurrences > 0) & (s.predictions == s.tokens[:, 1:])
    s.unchanged_steps.copy_(torch.where(again, s.unchanged_steps + 1, 0))
    s.recurrences += 4 * inside
    changed = torch.zeros_like(inside)
    changed[:, 1:] = s.predictions[:, :-1] != s.tokens[:, 1:-1]
    leading = (s.converged & inside & ~changed).long().cumprod(1).sum(1)
    frozen = torch.minimum(leading, remaining)
    is_end = torch.isin(s.predictions, s.ends) & (position < frozen[:, None])
    ended = is_end.any(1)
    frozen = torch.where(ended, is_end.long().argmax(1) + 1, frozen)
    cursor += frozen
    remaining -= frozen
    steps += 1
    advance.copy_(frozen)
    chain = torch.cat([s.tokens[:, :1], s.predictions], dim=1)
    source = torch.arange(capacity + 1, device=width.device) + frozen[:, None]
    s.tokens.copy_(torch.where(source <= width[:, None], chain.gather(1, source.clamp(max=capacity)), s.tokens))
    source = source[:, :-1]
    for counts in (s.recurrences, s.unchanged_steps):
        counts.copy_(torch.where(source < width[:, None], counts.gather(1, source.clamp(max=capacity - 1)), 0))
    width.copy_(torch.where(ended, 0, torch.minimum((width - frozen + 1).clamp(max=capacity), remaining)))


ADVANCES: dict[str, Callable[[Steps], None]] = {"pdkernels": advance_ours, "torch": advance_torch}


@by_device("batch, width", {"cpu": WAVES, "cuda": WAVES, "dry": WAVES[:1]})
@pytest.mark.parametrize("name", ADVANCES)
def test_recurrence_advance(benchmark, name: str, batch: int, width: int, device: str) -> None:
    benchmark.group = f"recurrence_advance_ batch {batch}, width {width}, {device}"
    setup, other = Steps(batch, width, device), Steps(batch, width, device)
    ADVANCES[name](setup), advance_ours(other)
    for a, b in zip(
        (setup.recurrences, setup.unchanged_steps, *setup.numbers),
        (other.recurrences, other.unchanged_steps, *other.numbers),
    ):
        assert torch.equal(a, b)
    assert torch.equal(setup.tokens[:, : width // 2 + 1], other.tokens[:, : width // 2 + 1])
    compare(
        benchmark,
        lambda: ADVANCES[name](setup),
        baseline=lambda: advance_torch(setup),
        baseline_name="torch",
        reset=setup.reset,
        device=device,
        rounds=500,
        op="recurrence_advance_",
        candidate=name,
        batch=batch,
        width=width,
    )
