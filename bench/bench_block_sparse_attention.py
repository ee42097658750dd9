"""Block-sparse attention over a tile plan, compared with other ways to compute the same masks, forward and backward.

Noise-aware masks as Jacobi Forcing trains on (prompt, 16 or 64 blocks of 32) and the dual stream of block diffusion (1024 tokens,
blocks of 32), 8 query heads and 2 KV heads. Every candidate gets its inputs in its preferred layout and its mask prebuilt;
its results and gradients are compared with float64 before it is timed. Candidates run in the streams order except for one:
FlexAttention in the interleaved order, as published. On the CPU FlexAttention has no backward pass. A baseline runs before every
round: scaled dot-product attention under the dense boolean mask. Two threads on the CPU.

On a GPU the sizes are those of models of 7 and 8 billion parameters: 28 query and 4 KV heads of 128 under the noise-aware mask, 32 and
8 under the dual stream and a causal mask, whose backward pass is measured. "pdkernels, one pass" has the gradients of five products. The float64 oracle then computes the heads of the first KV head only: heads are independent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import pdkernels as pd
from bench.devices import DRY_RUN, by_device, refusals
from bench.timing import compare
from pdkernels.integrations.flex_attention import to_block_mask
from pdkernels.masks import NoiseAwareMask, SegmentMask
from pdkernels.ops._gluon import CHECKED
from pdkernels.reference.block_sparse_attention import block_sparse_attention as reference
from tests.harness.error_budget import assert_within_budget

BLOCK_Q, BLOCK_K = 128, 128
FLEX_BLOCKS = (32, 64, 128)
BLOCK = 32
THREADS = 2
# What the baseline may take, roughly, in all rounds of a candidate together; but at least four rounds.
SECONDS = {"cpu": 2.0, "cuda": 0.3}
# Longer masks are too large for a whole score matrix in float32.
MOST_EAGER = 10_000
# Work of a backward pass in forwards: five products of q_len x kv_len against two.
BACKWARD = 2.5
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Case(NamedTuple):
    layout: str
    """``noise-aware``, ``dual-stream`` or ``causal``."""
    size: tuple[int, int]
    """Prompt and number of blocks, or tokens and 0."""
    head_dim: int
    dtype: torch.dtype
    backward: bool
    heads: tuple[int, int] = (8, 2)
    """Query and KV heads."""

    def mask(self, layout: str = "streams") -> SegmentMask:
        return make_mask(self.layout, self.size, layout)

    @property
    def name(self) -> str:
        passes = "fwd+bwd" if self.backward else "fwd"
        return f"{self.layout} {self.mask().q_len} d{self.head_dim} {NAMES[self.dtype]} {passes}"


@lru_cache
def make_mask(layout: str, size: tuple[int, int], order: str) -> SegmentMask:
    if layout == "dual-stream":
        return pd.masks.dual_stream(size[0], BLOCK)
    if layout == "causal":
        return pd.masks.causal(size[0])
    return pd.masks.noise_aware_causal(size[0], BLOCK, size[1], layout=order)


DTYPES = (torch.float32, torch.bfloat16)
PASSES = (False, True)
ON_CPU = [
    Case("noise-aware", (128, 16), d, dtype, backward) for backward in PASSES for dtype in DTYPES for d in (64, 128)
]
ON_CPU += [Case("dual-stream", (1024, 0), 128, dtype, backward) for backward in PASSES for dtype in DTYPES]
ON_CPU += [Case("noise-aware", (512, 64), 128, torch.bfloat16, False)]
ON_GPU = [
    Case("noise-aware", (512, n), 128, torch.bfloat16, backward, (28, 4)) for backward in PASSES for n in (64, 248)
]
ON_GPU += [Case("dual-stream", (4096, 0), 128, torch.bfloat16, backward, (32, 8)) for backward in PASSES]
ON_GPU += [Case("causal", (8192, 0), 128, torch.bfloat16, True, (32, 8))]
DRY = [
    Case(layout, size, 16, torch.bfloat16, False, (4, 2))
    for layout, size in (("noise-aware", (32, 2)), ("dual-stream", (64, 0)), ("causal", (64, 0)))
]
CASES = {"cpu": ON_CPU, "cuda": ON_GPU, "dry": DRY}


class Inputs(NamedTuple):
    """``(1, tokens, heads, head_dim)``, the gradient of the output last."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    def of(self, rows: Tensor) -> Inputs:
        """In another order of tokens."""
        return Inputs(*(x[:, rows].contiguous() for x in self))

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(x.to(dtype) for x in self))

    def first_group(self) -> list[Inputs]:
        """The first KV head with each of the query heads that share it."""
        group = self.q.shape[2] // self.k.shape[2]
        return [Inputs(*(x[:, :, head : head + 1] for x, head in zip(self, (i, 0, 0, i)))) for i in range(group)]

    def heads_first(self) -> Inputs:
        """In the layout of SDPA and FlexAttention, without a copy."""
        return Inputs(*(x.transpose(1, 2).contiguous() for x in self))


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Candidate(NamedTuple):
    """Attention on its own inputs, and how to convert the result to ``(1, tokens, heads, head_dim)`` in the streams order."""

    attention: Attention
    inputs: Inputs
    back: Callable[[Tensor], Tensor]


@lru_cache(maxsize=2)
def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q_heads, kv_heads = case.heads
    shapes = [(1, case.mask().q_len, h, case.head_dim) for h in (q_heads, kv_heads, kv_heads, q_heads)]
    return Inputs(*(torch.randn(shape, generator=generator).to(device, case.dtype) for shape in shapes))


def swap(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


# ---- candidates


def ours(case: Case, inputs: Inputs) -> Candidate:
    plan = case.mask().plan(BLOCK_Q, BLOCK_K, inputs.q.device)
    return Candidate(lambda q, k, v: pd.block_sparse_attention(q, k, v, plan), inputs, lambda x: x)


def eager(case: Case, inputs: Inputs) -> Candidate:
    """The whole score matrix, softmax in float32."""
    mask = case.mask().dense().to(inputs.q.device)
    return Candidate(lambda q, k, v: reference(q, k, v, mask)[0], inputs, lambda x: x)


def sdpa(case: Case, inputs: Inputs, expanded: bool = False, backends: tuple[SDPBackend, ...] = ()) -> Candidate:
    mask = case.mask().dense().to(inputs.q.device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if expanded:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=not expanded)

    return Candidate(on(backends, attention), inputs.heads_first(), swap)


def split_causal(case: Case, inputs: Inputs, backends: tuple[SDPBackend, ...] = ()) -> Candidate:
    """By hand: prompt and clean stream, prompt and noisy stream as a batch of two causal sequences, and back."""
    mask = case.mask()
    if case.layout == "causal":

        def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return Candidate(on(backends, causal), inputs.heads_first(), swap)
    if not isinstance(mask, NoiseAwareMask):
        return split_dual(case, inputs, backends)
    device, prompt = inputs.q.device, mask.prompt_len
    rows = torch.stack(
        [torch.cat([mask.prompt_rows, part.flatten()]) for part in (mask.clean_rows, mask.noisy_rows)]
    ).to(device)
    width = rows.shape[1]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0, :, rows].transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        # The streams order is the first sequence, then the second without its prompt.
        return torch.cat([out[:1], out[1:, :, prompt:width]], dim=2)

    return Candidate(on(backends, attention), inputs.heads_first(), swap)


def split_dual(case: Case, inputs: Inputs, backends: tuple[SDPBackend, ...]) -> Candidate:
    """By hand: the clean stream is causal; half the pairs of the noisy one are visible, so it gets its part of the dense mask."""
    half = case.size[0]
    noisy = case.mask().dense()[:half].to(inputs.q.device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q[:, :, :half], k, v, attn_mask=noisy, enable_gqa=True)
        clean = (x[:, :, half:] for x in (q, k, v))
        return torch.cat([first, F.scaled_dot_product_attention(*clean, is_causal=True, enable_gqa=True)], dim=2)

    return Candidate(on(backends, attention), inputs.heads_first(), swap)


def flex(case: Case, inputs: Inputs, block: int, layout: str = "streams") -> Candidate:
    device, mask = inputs.q.device, case.mask(layout)
    block_mask = to_block_mask(mask, block, device)
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    back: Callable[[Tensor], Tensor] = swap
    if layout == "interleaved":
        order, inverse = case.mask().to_interleaved.to(device), case.mask().from_interleaved.to(device)
        inputs, back = inputs.of(order), lambda x: swap(x)[:, inverse]
    return Candidate(
        lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=True), inputs.heads_first(), back
    )


def on(backends: tuple[SDPBackend, ...], attention: Attention) -> Attention:
    """With only these kernels of SDPA; none given: PyTorch's choice, as in a dry run, where there is no CUDA for the others."""
    if not backends or DRY_RUN:
        return attention

    def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(list(backends)):
            return attention(q, k, v)

    return chosen


Build = Callable[[Case, Inputs], Candidate]
ONE_PASS = "pdkernels, one pass"
SDPA, EAGER = "SDPA, dense boolean mask", "eager, softmax in fp32"
# PyTorch's fused kernels take either a mask or grouped heads. A baseline of plain products would flatter all candidates.
BASELINES = {"cpu": f"{SDPA}, enable_gqa", "cuda": f"{SDPA}, K and V expanded"}
CANDIDATES: dict[str, Build] = {
    "pdkernels": ours,
    ONE_PASS: ours,
    f"{SDPA}, enable_gqa": sdpa,
    f"{SDPA}, K and V expanded": lambda case, inputs: sdpa(case, inputs, expanded=True),
    "by hand: causal SDPA on parts": split_causal,
    **{
        f"FlexAttention, compiled, blocks of {block}": (lambda case, inputs, block=block: flex(case, inputs, block))
        for block in FLEX_BLOCKS
    },
    "FlexAttention, interleaved as published": lambda case, inputs: flex(case, inputs, 128, "interleaved"),
    EAGER: eager,
}
ON_CUDA: dict[str, Build] = {
    "by hand, cuDNN": lambda case, inputs: split_causal(case, inputs, (SDPBackend.CUDNN_ATTENTION,)),
    "by hand, flash": lambda case, inputs: split_causal(case, inputs, (SDPBackend.FLASH_ATTENTION,)),
    f"{SDPA}, cuDNN": lambda case, inputs: sdpa(case, inputs, backends=(SDPBackend.CUDNN_ATTENTION,)),
}


# ---- the measurement


def run(candidate: Candidate, backward: bool) -> list[Tensor]:
    """Output, and the gradients of q, k, v if asked for."""
    q, k, v, grad = candidate.inputs
    if not backward:
        with torch.no_grad():
            return [candidate.attention(q, k, v)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = candidate.attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@lru_cache(maxsize=1)
def oracle(case: Case, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """In float64, and eagerly in the case's dtype; on a GPU for the first group of heads, one at a time."""
    inputs = make_inputs(case, device)

    def computed(dtype: torch.dtype) -> list[Tensor]:
        if device == "cpu":
            return run(eager(case, inputs.to(dtype)), case.backward)
        heads = [run(eager(case, part.to(dtype)), case.backward) for part in inputs.first_group()]
        # Output and dQ of each head are side by side, dK and dV of one KV head are summed.
        joined = [torch.cat(parts, dim=2) for parts in [*zip(*heads)][:2]]
        wide = torch.promote_types(dtype, torch.float32)
        return joined + [torch.stack(parts).sum(0, dtype=wide).to(dtype) for parts in [*zip(*heads)][2:]]

    return computed(torch.float64), computed(case.dtype)


def check(name: str, candidate: Candidate, case: Case, device: str) -> None:
    """Ours must keep within the budget that the kernels are tested with. The others only have to compute the same thing: some round more
    often than the eager computation (by hand, the prompt's gradients are two roundings added up in the inputs' dtype), so their
    root-mean-square error may be four times its."""
    for what, actual, exact, eagerly in zip(
        "out dq dk dv".split(), run(candidate, case.backward), *oracle(case, device)
    ):
        actual = candidate.back(actual)[:, :, : exact.shape[2]]
        if name in ("pdkernels", ONE_PASS):
            assert_within_budget(actual, exact, eagerly, name=f"{case.name}, {what}")
            continue
        error, allowed = ((x.double() - exact).square().mean().sqrt().item() for x in (actual, eagerly))
        rounding = torch.finfo(case.dtype).eps / 2 * exact.square().mean().sqrt().item()
        assert error <= 4 * allowed + rounding, f"{name}, {case.name}, {what}: error {error:.2e}, eager {allowed:.2e}"


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(threads)


def left_out(name: str, case: Case, device: str) -> str | None:
    """Why a candidate does not run."""
    if name.startswith("FlexAttention"):
        if device == "cpu" and case.backward:
            return "FlexAttention has no backward pass on the CPU"
        if name.endswith("published") and case.layout != "noise-aware":
            return "the mask has one order"
        if device == "cuda" and name.endswith(("of 32", "of 64")):
            return "its kernel is made for blocks of 128"
        if DRY_RUN:
            return "compiled"
    if name in (EAGER, f"{SDPA}, enable_gqa") and case.mask().q_len > MOST_EAGER:
        return "no room for the scores"
    if name in ON_CUDA and device == "cpu":
        return "a kernel of CUDA"
    if name == ONE_PASS and not (device == "cuda" and case.backward):
        return "gradients on a GPU alone"
    if name.startswith("by hand, ") and case.layout == "dual-stream":
        return "its noisy part needs a mask"
    if case.dtype == torch.float32 and name in ON_CUDA:
        return "half precision only"
    return None


@pytest.mark.parametrize("name", [*CANDIDATES, *ON_CUDA])
@by_device("case", CASES)
def test_block_sparse_attention(benchmark, case: Case, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := left_out(name, case, device):
        pytest.skip(reason)
    if name == ONE_PASS:
        monkeypatch.setenv("PDKERNELS_GLUON", "one-pass")
    benchmark.group = f"block_sparse_attention {case.name}, {device}"
    torch._dynamo.reset()
    inputs = make_inputs(case, device)
    baseline = CANDIDATES[BASELINES[device]](case, inputs)
    with refusals(name, device):
        candidate = (CANDIDATES | ON_CUDA)[name](case, inputs)
        check(name, candidate, case, device)
    if name == ONE_PASS and not any(passed for key, passed in CHECKED.items() if key[1].endswith("_one_pass")):
        pytest.skip("its kernel does not serve here")
    pairs = case.mask().plan().visible_pairs
    flops = 4 * pairs * case.head_dim * case.heads[0] * (1 + BACKWARD * case.backward)
    run(baseline, case.backward)
    started = time.perf_counter()
    run(baseline, case.backward)[0].sum().item()
    compare(
        benchmark,
        lambda: run(candidate, case.backward),
        baseline=lambda: run(baseline, case.backward),
        baseline_name=BASELINES[device],
        device=device,
        rounds=max(4, min(40, int(SECONDS[device] / (time.perf_counter() - started)))),
        warmup=1,
        op="block_sparse_attention",
        candidate=name,
        case=case.name,
        heads=f"{case.heads[0]}/{case.heads[1]}",
        length=case.mask().q_len,
        head_dim=case.head_dim,
        dtype=NAMES[case.dtype],
        backward=case.backward,
        flops=flops,
        tile=f"{BLOCK_Q}x{BLOCK_K}",
        tile_efficiency=round(case.mask().plan(BLOCK_Q, BLOCK_K).tile_efficiency, 4),
        density=round(case.mask().density, 4),
    )
    if "median_us" in benchmark.extra_info:
        benchmark.extra_info["useful_tflops"] = round(flops / benchmark.extra_info["median_us"] / 1e6, 4)
