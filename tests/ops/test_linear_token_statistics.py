"""linear_token_statistics against the logits in double precision, and against token_statistics of stored logits."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels import backends
from tests.ops import linear_token_cases as cases
from tests.ops.implementations import NAMES
from tests.ops.linear_token_cases import DRAWS, inputs, whole_numbers
from tests.ops.test_block_sparse_attention_memory import peak_can_be_reset
from tests.support.errors import refused

ops = importlib.import_module("pdkernels.ops.linear_token_statistics")  # the function has the name of its module
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = [name for name in NAMES if name != "cudasim"]  # the ops it is made of are simulated there
NAN = math.nan


def run(device: str, hidden: Tensor, weight: Tensor, **options: Any) -> pd.TokenStatistics:
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return pd.TokenStatistics(
        *(t.cpu() for t in pd.linear_token_statistics(hidden.to(device), weight.to(device), **options))
    )


def same_bits(a: pd.TokenStatistics, b: pd.TokenStatistics) -> bool:
    return all(torch.equal(x.nan_to_num(-1), y.nan_to_num(-1)) for x, y in zip(a, b))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature, distribution", DRAWS)
@pytest.mark.parametrize("rows, width, depth", [(150, 37, 8), (64, 1031, 48)])
def test_within_the_error_budget(
    device: str, rows: int, width: int, depth: int, temperature: float, distribution: str, dtype: torch.dtype
) -> None:
    hidden, weight = inputs(rows, width, depth, dtype)
    options = dict(temperature=temperature, distribution=distribution, seed=11, step=7, suppress=(4, width - 1))
    cases.check(run(device, hidden, weight, **options), hidden, weight, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature, distribution", DRAWS)
@pytest.mark.parametrize("rows, width, depth, top_k", [(1, 1, 1, 1), (3, 2, 5, 2), (9, 700, 3, 16)])
def test_ties_go_to_the_lowest_id(
    device: str, rows: int, width: int, depth: int, top_k: int, temperature: float, distribution: str
) -> None:
    hidden, weight = whole_numbers(rows, width, depth)
    options = dict(temperature=temperature, distribution=distribution, top_k=top_k, seed=2**40, step=2**32 - 1)
    cases.check_exactly(run(device, hidden, weight, **options), hidden, weight, **options)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3, "step": 2, "suppress": 5},
    {"temperature": 1.2, "top_p": 0.8, "distribution": "sampling", "positions": torch.arange(24).view(4, 6) + 50},
    {"min_p": 0.05, "distribution": "sampling", "top_k": 2},
    {"temperature": 0.9, "seed": torch.tensor([[7], [-1], [2**40], [0]])},
    {"temperature": 0.5, "step": torch.arange(6), "top_p": 0.9, "min_p": 0.01, "suppress": [0, 9]},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_means_what_token_statistics_means(options: dict[str, Any], dtype: torch.dtype) -> None:
    hidden, weight = inputs(24, 300, 16, dtype)
    hidden = hidden.view(4, 6, 16)
    found = pd.linear_token_statistics(hidden, weight, **options)
    assert same_bits(found, pd.token_statistics(pd.linear(hidden, weight), **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize("chosen", [False, True])
def test_blocks_of_rows_change_nothing(
    device: str, chosen: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows at a time, then one, against all at once; the product of whole numbers is the same anyway."""
    hidden, weight = whole_numbers(30, 200, 12)
    hidden[7] = NAN
    shape = (5, 6)
    if chosen:
        options = options | {"row_index": torch.tensor([3, -1, 29, 3, 0, 8] * 4).view(4, 6)}
        shape = (4, 6)
    elif "positions" in options:
        options = options | {"positions": torch.arange(30).view(5, 6)}
    if isinstance(options.get("seed"), Tensor):
        options = options | {"seed": torch.arange(shape[0])[:, None]}
    expected = run(device, hidden.view(5, 6, 12), weight, **options)
    assert expected.ids.shape == shape
    for limit in (5 * 200, 10):
        monkeypatch.setattr(ops, "BLOCK_LOGITS", limit)
        assert same_bits(run(device, hidden.view(5, 6, 12), weight, **options), expected)


def test_never_more_logits_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of a block are freed before the next block."""
    product = ops._product
    held: list[weakref.ref] = []
    sizes = []

    def watched(x: Tensor, weight: Tensor) -> Tensor:
        assert not any(ref() is not None for ref in held)
        logits = product(x, weight)
        sizes.append(logits.numel())
        held.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(ops, "_product", watched)
    monkeypatch.setattr(ops, "BLOCK_LOGITS", 1000)
    hidden, weight = whole_numbers(64, 90, 4)
    found = pd.linear_token_statistics(hidden, weight)
    assert sizes == [990] * 5 + [810]
    cases.check_exactly(found, hidden, weight)


# A separate process, whose peak resident memory comes from the system, so that what compiled code allocates counts too.
PROGRAM = """
import sys
import torch, pdkernels as pd

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

rows, width, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
hidden, weight = torch.randn(rows, 8), torch.randn(width, 8)
pd.linear_token_statistics(hidden[:4], weight[:64], backend=backend)  # loads code, starts threads
resident = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
pd.linear_token_statistics(hidden, weight, backend=backend)
print(status("VmHWM") - resident)
"""


def peak(rows: int, width: int, backend: str = "auto") -> int:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    arguments = [sys.executable, "-c", PROGRAM, str(rows), str(width), backend]
    answer = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not peak_can_be_reset(), reason="the system does not let a process forget its peak of memory")
@pytest.mark.skipif(
    ("native", "cpu") not in backends.CHOICES["token_statistics"], reason="no compiled kernel for the CPU"
)
def test_memory_does_not_grow_with_rows_times_vocabulary() -> None:
    """1024 rows of 32768 logits are 128 MiB, a block of them 64 MiB."""
    extra = peak(1024, 32768)
    print(f"{extra / 2**20:.1f} MiB")
    assert extra < 1.25 * 4 * ops.BLOCK_LOGITS
    assert peak(128, 32768, "reference") >= 4 * 128 * 32768  # the measurement sees them


# --- rows, layouts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    weight = torch.ones(9, 8)
    found = run(device, torch.zeros(shape), weight, temperature=1.0)
    assert all(t.shape[: len(shape) - 1] == shape[:-1] and t.numel() == 0 for t in found)
    found = run(device, torch.zeros(shape), weight, row_index=torch.tensor([-1, -1]))
    assert found.ids.tolist() == [-1, -1] and found.top_ids.shape == (2, 5) and found.logsumexp.isneginf().all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_single_row(device: str) -> None:
    hidden, weight = whole_numbers(4, 30, 8)
    together = run(device, hidden, weight)
    assert same_bits(run(device, hidden[2], weight), pd.TokenStatistics(*(t[2] for t in together)))


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    hidden, weight = whole_numbers(6, 40, 12)
    wide = torch.full((6, 40), NAN)
    wide[:, 4:28:2] = hidden
    expected = run(device, hidden, weight)
    for h, w in (
        (wide[:, 4:28:2], weight),
        (hidden, weight.T.contiguous().T),
        (hidden.view(2, 3, 12).transpose(0, 1), weight),
    ):
        found = pd.TokenStatistics(*(t.cpu() for t in pd.linear_token_statistics(h.to(device), w.to(device))))
        order = [0, 3, 1, 4, 2, 5] if h.dim() == 3 else list(range(6))
        flat = pd.TokenStatistics(*(t.flatten(0, h.dim() - 2) for t in found))
        assert same_bits(flat, pd.TokenStatistics(*(t[order] for t in expected)))


def test_repeats_bit_for_bit() -> None:
    hidden, weight = inputs(20, 500, 24, torch.bfloat16)
    assert same_bits(*(pd.linear_token_statistics(hidden, weight, temperature=0.6) for _ in range(2)))


# --- torch integration --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    for device in DEVICES:
        hidden, weight = (t.to(device) for t in inputs(6, 30, 8, dtype))
        numbers = torch.tensor([[1, -1], [5, 0]], device=device)
        options = (0.7, 1, numbers, 2, numbers, numbers.abs(), numbers, [4], 3, 0.9, 0.1, "sampling")
        for call in ((hidden, weight), (hidden.view(2, 3, 8), weight, *options)):
            torch.library.opcheck(torch.ops.pdkernels.linear_token_statistics.default, call)


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(hidden: Tensor, weight: Tensor, rows: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        found = pd.linear_token_statistics(hidden, weight, temperature=0.5, step=steps, row_index=rows, suppress=3)
        return found.ids, found.probs > 0.5, found.entropy

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for rows, width, chosen in [(2, 30, 5), (3, 50, 2), (7, 16, 9), (4, 90, 3)]:
        call = (*inputs(rows, width, 8), torch.arange(chosen) % rows, torch.arange(chosen))
        assert all(torch.equal(a, b) for a, b in zip(compiled(*call), step(*call)))
    assert counter.frame_count == 1


def test_gradients_stop_here() -> None:
    hidden, weight = (t.requires_grad_() for t in inputs(3, 20, 4))
    assert not pd.linear_token_statistics(hidden, weight).probs.requires_grad


def test_reference_backend() -> None:
    hidden, weight = inputs(3, 20, 4)
    found = pd.linear_token_statistics(hidden.double(), weight.double(), backend="reference")
    assert found.probs.dtype == torch.float64
    torch.testing.assert_close(found.probs.float(), pd.linear_token_statistics(hidden, weight).probs)


H, W, IDS = torch.zeros(2, 4), torch.zeros(9, 4), torch.tensor([0, 1])


@pytest.mark.parametrize(
    "call, text",
    [
        ({"hidden": [1.0]}, r"TypeError: hidden must be a tensor, got list"),
        ({"hidden": H[0, 0]}, r"hidden must have shape \(\.\.\., E\), E at least 1, got \(\)"),
        ({"hidden": H[:, :0]}, r"E at least 1, got \(2, 0\)"),
        ({"hidden": H.int()}, r"TypeError: hidden must be float32, float16 or bfloat16, got torch\.int32"),
        (
            {"hidden": H.double(), "weight": W.double()},
            r"TypeError: for the kernels, got torch\.float64\. Pass backend=",
        ),
        ({"weight": None}, r"TypeError: weight must be a tensor, got NoneType"),
        ({"weight": W.half()}, r"TypeError: weight must be torch\.float32 like the others, got torch\.float16"),
        ({"weight": W.to("meta")}, r"weight must be on cpu, got meta"),
        ({"weight": W[:, :3]}, r"weight must have shape \(V, 4\), V at least 1, got \(9, 3\)"),
        ({"weight": W[:0]}, r"V at least 1, got \(0, 4\)"),
        ({"weight": W[0]}, r"weight must have shape \(V, 4\), V at least 1, got \(4,\)"),
        ({"temperature": -1.0}, r"temperature must be in \[0, 1e30\], got -1\.0"),
        ({"top_k": 10}, r"top_k must be in 1 \.\. min\(V, 16\) = 9, got 10"),
        ({"top_p": 1.5}, r"top_p must be in \[0, 1\], got 1\.5"),
        ({"distribution": "any"}, r"distribution must be 'model' or 'sampling', got 'any'"),
        ({"suppress": 9}, r"suppress must hold ids in \[0, 8\], got 9"),
        (
            {"step": torch.zeros(3, dtype=torch.int64)},
            r"step must broadcast to the shape \(2,\) of the rows, got \(3,\)",
        ),
        ({"step": IDS, "hidden": 1.0}, r"TypeError: hidden must be a tensor, got float"),
        ({"positions": IDS[:1]}, r"positions must have shape \(2\), got \(1,\)"),
        ({"row_index": IDS.float()}, r"TypeError: row_index must be an int32 or int64 tensor, got torch\.float32"),
        ({"row_index": IDS + 1}, r"row_index must be in \[-1, 1\], got 2\."),
        ({"row_index": IDS - 2}, r"row_index must be in \[-1, 1\], got -2\."),
        ({"row_index": IDS + 1, "backend": "reference"}, r"row_index must be in \[-1, 1\], got 2\."),
        ({"positions": IDS - 1, "temperature": 1.0}, r"positions must be in \[0, 2\*\*32\), got -1"),
        ({"step": IDS + 2**32, "temperature": 1.0}, r"step must be in \[0, 2\*\*32\), got 4294967296"),
        (
            {"backend": "triton"},
            r"NotImplementedError: backend must be one of auto, native, reference on cpu, got 'triton'",
        ),
    ],
)
def test_bad_call(call: dict[str, object], text: str) -> None:
    with refused(text) as error:
        pd.linear_token_statistics(**{"hidden": H, "weight": W, **call})
    assert str(error.value).startswith("pdkernels.linear_token_statistics: ")


def test_numbers_that_no_draw_uses_may_be_anything() -> None:
    rows = torch.tensor([1, -1])
    anything = torch.tensor([5, -7])
    found = pd.linear_token_statistics(H, W, temperature=1.0, positions=anything, step=anything, row_index=rows)
    assert found.ids[1] == -1
    pd.linear_token_statistics(H, W, positions=anything - 9, step=anything - 9)  # a maximum draws nothing
