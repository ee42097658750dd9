"""Steps of layers with a state: drafts of some rows, all of which are accepted and replayed in the next step.

Compared with transformers' row-by-row function, eager and compiled, which writes the state once per call but could not take a row
back, and with reading and writing the states of the same layers once. Several layers are run in turn, so that no cache holds them.

`python -m bench.bench_recurrent_state` writes the CPU times of one thread, the minimum of many, and prints them as a table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.bench_grouped_linear import seconds
from bench.devices import by_device
from bench.records import write
from bench.timing import compare
from pdkernels.evaluation.machine import processor

RESULT = Path(__file__).parent / "results/recurrent_state.json"

# Kind, heads, key heads or groups, keys, values, sequences, and layers run in turn.
MODELS: dict[str, tuple[str, int, int, int, int, int, int]] = {
    "Qwen3.5-9B": ("delta", 32, 16, 128, 128, 1, 24),
    "Qwen3.5-9B, 16 sequences": ("delta", 32, 16, 128, 128, 16, 4),
    "Granite-4-Tiny": ("mamba", 48, 1, 128, 64, 1, 24),
    "Granite-4-Tiny, 16 sequences": ("mamba", 48, 1, 128, 64, 16, 4),
    "MiniMax-Text-01": ("lightning", 64, 64, 128, 128, 1, 12),
    "dry": ("delta", 4, 2, 16, 16, 1, 2),
    "dry, 2 sequences": ("mamba", 4, 2, 16, 16, 2, 2),
}
SHAPES = {
    "cpu": ("Qwen3.5-9B", "Granite-4-Tiny", "MiniMax-Text-01"),
    "cuda": ("Qwen3.5-9B", "Granite-4-Tiny", "Qwen3.5-9B, 16 sequences", "Granite-4-Tiny, 16 sequences"),
    "dry": ("dry", "dry, 2 sequences"),
}
ROWS = (1, 2, 4, 8)
FLOOR = "a read and a write of the states"
CANDIDATES = ("pdkernels", "PyTorch", "torch.compile", FLOOR)


def delta_rows(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """`torch_recurrent_gated_delta_rule` of transformers for one sequence: q and k are normalised, heads repeated."""
    heads = v.shape[1]

    def prepared(x: Tensor) -> Tensor:
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(heads // x.shape[1], 1)

    q, k, out = prepared(q) * k.shape[-1] ** -0.5, prepared(k), []
    for i in range(len(v)):
        state = state * g[i].exp()[:, None, None]
        update = (v[i] - (state * k[i][..., None]).sum(-2)) * beta[i][:, None]
        state = state + k[i][..., None] * update[:, None]
        out.append((state * q[i][..., None]).sum(-2))
    return torch.stack(out), state


def selective_rows(state: Tensor, C: Tensor, B: Tensor, x: Tensor, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """`mamba2_selective_state_update` of transformers, row by row, for one sequence."""
    repeat, out = x.shape[1] // B.shape[1], []
    for i in range(len(x)):
        key = B[i].repeat_interleave(repeat, 0) * dt[i][:, None]
        state = state * (dt[i] * A).exp()[:, None, None] + key[..., None] * x[i][:, None]
        out.append((state * C[i].repeat_interleave(repeat, 0)[..., None]).sum(-2))
    return torch.stack(out), state


class Setup:
    """The layers of a model, and the rows of a step."""

    def __init__(self, model: str, rows: int, device: str) -> None:
        self.kind, heads, key_heads, keys, values, batch, self.layers = MODELS[model]
        generator = torch.Generator().manual_seed(rows)

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.states = [torch.zeros(batch, heads, keys, values, device=device) for _ in range(self.layers)]
        self.q, self.k, self.v = (
            floats(batch, rows, key_heads, keys),
            floats(batch, rows, key_heads, keys),
            floats(batch, rows, heads, values),
        )
        self.gate, self.beta = -floats(batch, rows, heads).abs(), floats(batch, rows, heads).sigmoid()
        self.A = floats(heads).abs() if self.kind == "lightning" else -floats(heads).abs()
        if self.kind != "delta":
            self.gate = self.gate.abs()
        shapes = [x.shape[2:] for x in (self.k, self.v, self.gate)]
        self.pending = [[torch.zeros(batch, rows, *shape, device=device) for shape in shapes] for _ in self.states]
        self.state_lengths = torch.zeros(self.layers, batch, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.index = torch.zeros(batch, rows, dtype=torch.int64, device=device)
        self.counts = torch.full((batch,), rows, device=device)
        self.nbytes = sum(state.nbytes for state in self.states)

    def ours(self) -> list[Tensor]:
        out = []
        for state, held, (k, v, gate) in zip(self.states, self.state_lengths, self.pending):
            step = {"pending_index": self.index}
            if self.kind == "delta":
                given = (k, v, gate, self.q, self.k, self.v, self.gate, self.beta)
                out.append(pd.gated_delta_(state, held, *given, self.lengths, l2norm_eps=1e-6, **step))
            elif self.kind == "mamba":
                given = (v, k, gate, self.v, self.k, self.q, self.gate, self.A)
                out.append(pd.selective_state_(state, held, *given, self.lengths, **step))
            else:
                given = (v, k, None, self.v, self.k, self.q, None, -self.A)
                out.append(pd.selective_state_(state, held, *given, self.lengths, **step))
        pd.state_commit_(self.lengths, self.index, self.state_lengths, self.counts)
        return out

    def plain(self, form: Callable[..., Callable[..., Any]]) -> list[Tensor]:
        def together(x: Tensor) -> Tensor:
            """The heads of all sequences as those of one."""
            return x.transpose(0, 1).flatten(1, 2)

        batch, heads = self.states[0].shape[:2]
        q, k, v, gate = map(together, (self.q, self.k, self.v, self.gate))
        out = []
        for i, state in enumerate(self.states):
            if self.kind == "delta":
                y, after = form(delta_rows)(state.flatten(0, 1), q, k, v, gate, together(self.beta))
            else:
                one = gate if self.kind == "mamba" else torch.ones_like(gate)
                A = self.A if self.kind == "mamba" else -self.A
                y, after = form(selective_rows)(state.flatten(0, 1), q, k, v, one, A.repeat(batch))
            self.states[i].copy_(after.unflatten(0, (batch, heads)))
            out.append(y.unflatten(1, (batch, heads)).transpose(0, 1))
        return out

    def floor(self) -> list[Tensor]:
        return [state.mul_(1.0) for state in self.states]


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def candidate(name: str, model: str, rows: int, device: str) -> tuple[Setup, Callable[[], list[Tensor]]]:
    """Layers, and a call of them whose results are checked."""
    setup, other = Setup(model, rows, device), Setup(model, rows, device)
    call: Callable[[], list[Tensor]] = {
        "pdkernels": setup.ours,
        "PyTorch": partial(setup.plain, eager),
        "torch.compile": partial(setup.plain, compiled),
        FLOOR: setup.floor,
    }[name]
    if name in ("pdkernels", "torch.compile"):
        for _ in range(3):  # the rows of the second step follow those that the first one left pending
            for found, wanted in zip(call(), other.plain(eager), strict=True):
                assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3)
    return setup, call


@by_device("model", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CANDIDATES)
def test_state_step(benchmark, name: str, rows: int, model: str, device: str) -> None:
    benchmark.group = f"recurrent state, {model}, {rows} rows, {device}"
    with torch.inference_mode():
        setup, call = candidate(name, model, rows, device)
        compare(
            benchmark,
            call,
            baseline=partial(Setup(model, rows, device).plain, eager),
            baseline_name="PyTorch",
            device=device,
            rounds=12,
            warmup=2,
            bytes_moved=setup.nbytes,
            op="recurrent_state",
            candidate=name,
            model=model,
            rows=rows,
        )


def measured(rounds: int = 15) -> dict[str, Any]:
    """The minimum CPU time of a layer's step for each model, implementation and number of rows, in ms; the implementations take turns."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    with torch.inference_mode():
        for model in SHAPES["cpu"]:
            found[model] = {name: [] for name in CANDIDATES}
            for rows in ROWS:
                layers = MODELS[model][-1]
                calls = {name: candidate(name, model, rows, "cpu")[1] for name in CANDIDATES}
                times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
                for turn in range(rounds):
                    for name, call in calls.items():
                        if turn < 4 or name not in ("PyTorch", "torch.compile"):  # which take seconds
                            times[name].append(seconds(call) / layers)
                for name in CANDIDATES:
                    found[model][name].append(round(1000 * min(times[name]), 4))
    return {"rounds": rounds, "processor": processor(), "rows": ROWS, "ms": found}


def markdown(found: dict[str, Any]) -> str:
    """A table, in which a floor is one read and one write of the state."""
    counts = found["rows"]
    heads = [f"{count} row{'s' * (count > 1)}" for count in counts]
    lines = [f"| ms of a layer (floors) | {' | '.join(heads)} | {counts[-1]} rows / 1 row |"]
    lines.append("| --- |" + " ---: |" * (len(counts) + 1))
    for model, candidates in found["ms"].items():
        for name, times in candidates.items():
            floors = [time / floor for time, floor in zip(times, candidates[FLOOR])]
            cells = [f"{time:.2f} ({ratio:.2f})" for time, ratio in zip(times, floors)]
            label = f"**{model}, {name}**" if name == "pdkernels" else f"{model}, {name}"
            lines.append(f"| {label} | {' | '.join(cells)} | {times[-1] / times[0]:.2f} |")
    return "\n".join([*lines, "", f"CPU time, minimum of {found['rounds']} rounds; {found['processor']}, 1 thread"])


if __name__ == "__main__":
    result = measured()
    write(RESULT, result)
    print(markdown(result))
