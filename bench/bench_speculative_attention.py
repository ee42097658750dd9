"""Attention of a quadratic draft over a cached prefix, compared with other ways to compute it, and its cost as the prefix grows.

Draft width 8: 81 new tokens (9 drafts, 9 groups of 8 masks), 32 query heads and 8 KV heads of 128, prefixes of 2048 and 8192 in
a cache with room for the draft. Candidates start with the draft's K and V after the prefix and with prebuilt masks, and are
compared with float64 before they are timed. A baseline runs before every round: scaled dot-product attention under a dense mask,
the query heads of a KV head packed into rows. Two threads on the CPU. On a GPU only bf16, widths of 4 to 32 and longer prefixes.

Then the cost of storing rows in the same pass, compared with two calls.
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
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import pdkernels as pd
from bench.devices import DRY_RUN, by_device, refusals
from bench.timing import compare
from pdkernels.masks import SegmentMask
from pdkernels.reference.speculative_attention import speculative_attention as reference
from tests.harness.error_budget import assert_within_budget

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP = Q_HEADS // KV_HEADS
TILE = 128
THREADS = 2
SECONDS = {"cpu": 2.0, "cuda": 0.2}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
# Width of the draft, prefix, dtype.
CASES = {
    "cpu": [(8, prefix, dtype) for dtype in ("fp32", "bf16") for prefix in (2048, 8192)],
    "cuda": [
        (width, prefix, "bf16")
        for width, prefix in ((4, 4096), (4, 32768), (8, 2048), (8, 8192), (8, 32768), (16, 8192), (32, 8192))
    ],
    "dry": [(2, 100, "bf16")],
}


class Step(NamedTuple):
    """One decoding step: ``(1, tokens, heads, head_dim)``, the cache with the new tokens' rows after the prefix."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    prefix: int
    mask: SegmentMask

    @property
    def new(self) -> int:
        return self.mask.q_len

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([self.prefix], device=self.q.device)

    @property
    def keys(self) -> tuple[Tensor, Tensor]:
        """All keys and values, heads first."""
        return tuple(cache[:, : self.prefix + self.new].transpose(1, 2) for cache in (self.k_cache, self.v_cache))


@lru_cache(maxsize=1)
def make_step(width: int, prefix: int, dtype: torch.dtype, device: str) -> Step:
    return step_of(pd.masks.quadratic(width), prefix, dtype, device)


Attention = Callable[[], Tensor]


def step_of(mask: SegmentMask, prefix: int, dtype: torch.dtype, device: str) -> Step:
    new = mask.q_len
    generator = torch.Generator().manual_seed(0)
    randn = lambda tokens, heads: torch.randn(1, tokens, heads, HEAD_DIM, generator=generator).to(device, dtype)  # noqa: E731
    k_cache, v_cache = randn(prefix + new, KV_HEADS), randn(prefix + new, KV_HEADS)
    return Step(
        randn(new, Q_HEADS), k_cache[:, prefix:].clone(), v_cache[:, prefix:].clone(), k_cache, v_cache, prefix, mask
    )


def dense_mask(step: Step) -> Tensor:
    return torch.cat([torch.ones(step.new, step.prefix, dtype=torch.bool), step.mask.dense()], dim=1).to(step.q.device)


def packed(q: Tensor) -> Tensor:
    """``(1, tokens, heads, head_dim)`` -> ``(1, KV heads, group * tokens, head_dim)``."""
    return q.unflatten(2, (KV_HEADS, GROUP)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def unpacked(out: Tensor) -> Tensor:
    return out.unflatten(2, (GROUP, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


# ---- candidates


def ours(step: Step) -> Attention:
    plan, lengths = step.mask.plan(TILE, TILE, step.q.device), step.lengths
    return lambda: pd.speculative_attention(*step[:5], lengths, plan)


def sdpa_packed(step: Step) -> Attention:
    mask = dense_mask(step).repeat(GROUP, 1)
    return lambda: unpacked(F.scaled_dot_product_attention(packed(step.q), *step.keys, attn_mask=mask))


def sdpa_gqa(step: Step) -> Attention:
    mask = dense_mask(step)
    return lambda: F.scaled_dot_product_attention(
        step.q.transpose(1, 2), *step.keys, attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)


def two_parts(step: Step) -> Attention:
    """Prefix without a mask, tail with one, merged by their log-sum-exps: the best form PyTorch's own operators allow."""
    aten, new = torch.ops.aten, step.new
    if step.q.is_cuda:  # the kernel that splits the keys, and one that takes a mask
        prefix_attention = lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[:2]  # noqa: E731
        tail_attention = lambda q, k, v, bias: aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[:2]  # noqa: E731
    else:
        prefix_attention = aten._scaled_dot_product_flash_attention_for_cpu
        tail_attention = lambda q, k, v, bias: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)  # noqa: E731
    # On a GPU the kernel requires rows of the mask to begin at multiples of 16 bytes.
    seen = F.pad(step.mask.dense(), (0, -new % 8 if step.q.is_cuda else 0)).repeat(GROUP, 1)
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(step.q)
    bias = bias.expand(1, KV_HEADS, -1, -1).contiguous()[..., :new]

    def attention() -> Tensor:
        q, (k, v), n = packed(step.q), step.keys, step.prefix
        first, first_lse = prefix_attention(q, k[:, :, :n], v[:, :, :n])
        second, second_lse = tail_attention(q, k[:, :, n:], v[:, :, n:], bias)
        if step.q.is_cuda:
            second_lse = second_lse[..., : q.shape[2]]
        weight = torch.sigmoid(first_lse - second_lse)
        weight = (weight if weight.shape[1] == KV_HEADS else weight.transpose(1, 2))[..., : q.shape[2], None].to(
            q.dtype
        )
        return unpacked(torch.lerp(second, first, weight))

    return attention


def flex(step: Step, block: tuple[int, int] | int) -> Attention:
    seen = dense_mask(step)
    block_mask = create_block_mask(
        lambda b, h, i, j: seen[i, j], None, None, step.new, step.prefix + step.new, step.q.device, BLOCK_SIZE=block
    )
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda: compiled(step.q.transpose(1, 2), *step.keys, block_mask=block_mask, enable_gqa=True).transpose(1, 2)


def flashinfer(step: Step) -> Attention:
    """Its kernel compiles itself on the first call."""
    prefill = pytest.importorskip("flashinfer").single_prefill_with_kv_cache
    mask = dense_mask(step)
    keys, values = (cache[0, : step.prefix + step.new] for cache in (step.k_cache, step.v_cache))
    return lambda: prefill(step.q[0], keys, values, custom_mask=mask)[None]


FITTED = "FlexAttention, compiled, blocks that fit (81, 128)"
CANDIDATES: dict[str, Callable[[Step], Attention]] = {
    "pdkernels": ours,
    "SDPA, dense mask, heads packed": sdpa_packed,
    "SDPA, dense mask, enable_gqa": sdpa_gqa,
    "SDPA on prefix and tail, merged": two_parts,
    "FlexAttention, compiled, its own blocks": lambda step: flex(step, 128),
    FITTED: lambda step: flex(step, (step.new, 128)),
}
ON_CUDA: dict[str, Callable[[Step], Attention]] = {"FlashInfer, custom mask": flashinfer}


def left_out(name: str, device: str) -> str | None:
    """The reason why a candidate does not run."""
    if name in ON_CUDA and (device == "cpu" or DRY_RUN):
        return "a kernel of CUDA"
    if name == FITTED and device == "cuda":
        return "blocks of its kernel are powers of two"
    if name.startswith("FlexAttention") and DRY_RUN:
        return "compiled"
    return None


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def oracle(width: int, prefix: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    step = make_step(width, prefix, dtype, device)
    run = lambda dtype: reference(*(x.to(dtype) for x in step[:5]), step.lengths, step.mask.dense().to(device))[0]  # noqa: E731
    return run(torch.float64), run(dtype)


@pytest.mark.parametrize("name", [*CANDIDATES, *ON_CUDA])
@by_device("width, prefix, dtype", CASES)
def test_speculative_attention(benchmark, width: int, prefix: int, dtype: str, name: str, device: str) -> None:
    if reason := left_out(name, device):
        pytest.skip(reason)
    benchmark.group = f"speculative_attention, width {width}, prefix {prefix}, {dtype}, {device}"
    torch._dynamo.reset()
    step = make_step(width, prefix, DTYPES[dtype], device)
    baseline = sdpa_packed(step)
    # Peers may round the results of both parts once more.
    exact, eagerly = oracle(width, prefix, DTYPES[dtype], device)
    with refusals(name, device):
        candidate = (CANDIDATES | ON_CUDA)[name](step)
        found = candidate()
    if name == "pdkernels":
        assert_within_budget(found, exact, eagerly, name=name)
    else:
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=4 * torch.finfo(DTYPES[dtype]).eps)
    baseline()
    started = time.perf_counter()
    baseline().sum().item()
    flops = 4 * HEAD_DIM * Q_HEADS * (step.new * prefix + step.mask.plan(TILE, TILE).visible_pairs)
    rows = 2 * (step.new * Q_HEADS + (prefix + step.new) * KV_HEADS)  # q, out, K and V
    compare(
        benchmark,
        candidate,
        baseline=baseline,
        baseline_name="SDPA, dense mask, heads packed",
        device=device,
        rounds=max(5, min(60, int(SECONDS[device] / (time.perf_counter() - started)))),
        warmup=2,
        op="speculative_attention",
        candidate=name,
        prefix=prefix,
        width=width,
        dtype=dtype,
        flops=flops,
        bytes_moved=rows * HEAD_DIM * DTYPES[dtype].itemsize // 2,
    )
    if "median_us" in benchmark.extra_info:
        benchmark.extra_info["useful_tflops"] = round(flops / benchmark.extra_info["median_us"] / 1e6, 4)


GROWING = {
    "pdkernels": None,
    "FlexAttention, prefix length in the mask function": int,
    "FlexAttention, prefix length in a tensor": torch.tensor,
}


@pytest.mark.parametrize("name", GROWING)
def test_growing_prefix(benchmark, name: str, device: str) -> None:
    """Five steps whose prefix grows by 9 tokens each, including all that a step needs: masks, plans, compilation."""
    benchmark.group = f"speculative_attention, growing prefix, {device}"
    torch._dynamo.reset()
    if DRY_RUN and GROWING[name] is not None:
        pytest.skip("compiled")
    step = make_step(8, 2048, torch.bfloat16, device)
    plan, seen, new = step.mask.plan(TILE, TILE, device), step.mask.dense().to(device), step.new
    compiled = torch.compile(flex_attention, fullgraph=True)
    prefixes = iter(range(512, 2048, 9))

    def one_step() -> Tensor:
        prefix = next(prefixes)
        if GROWING[name] is None:
            return pd.speculative_attention(*step[:5], torch.tensor([prefix], device=device), plan)
        length = GROWING[name](prefix)
        length = length.to(device) if isinstance(length, Tensor) else length

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j < length) | seen[i, (j - length).clamp(0, new - 1)]

        block_mask = create_block_mask(
            visible, None, None, new, prefix + new, device, BLOCK_SIZE=(new if device == "cpu" else 128, 128)
        )
        k, v = (cache[:, : prefix + new].transpose(1, 2) for cache in (step.k_cache, step.v_cache))
        return compiled(step.q.transpose(1, 2), k, v, block_mask=block_mask, enable_gqa=True)

    with refusals(name, device):
        one_step()
    compare(
        benchmark,
        one_step,
        baseline=lambda: None,
        baseline_name="nothing",
        device=device,
        rounds=5,
        warmup=0,
        graph=False,
        op="speculative_attention growing",
        candidate=name,
        dtype="bf16",
    )


def append_first(*step: Tensor | None, plan: pd.masks.TilePlan, counts: Tensor) -> Tensor:
    pd.kv_append_(*step[3:5], *step[1:3], step[5], counts=counts)
    return pd.speculative_attention(*step, plan)


APPENDING = {"pdkernels": pd.speculative_attention_append_, "kv_append_, then speculative_attention": append_first}


@by_device("rows", {"cpu": [1, 8, 72], "cuda": [1, 8, 72], "dry": [1, 6]})
@pytest.mark.parametrize("name", APPENDING)
def test_appending(benchmark, rows: int, name: str, device: str) -> None:
    """A layer of a step that stores this many of its rows: a single token, a draft, a quadratic draft of 8."""
    benchmark.group = f"speculative_attention_append_, {rows} rows, {device}"
    prefix = 100 if DRY_RUN else 512
    step, mask = make_step(2 if DRY_RUN else 8, prefix, torch.bfloat16, device), pd.masks.causal(rows)
    tensors = (*(x[:, :rows].contiguous() for x in step[:3]), *(x.clone() for x in step[3:5]), step.lengths)
    options = {"plan": mask.plan(TILE, TILE, device), "counts": torch.tensor([rows], device=device)}
    call, baseline = (
        lambda function=function: function(*tensors, **options) for function in (APPENDING[name], append_first)
    )
    tensors[3][:, prefix:] = 0
    assert torch.equal(call(), pd.speculative_attention(*tensors, options["plan"]))
    assert torch.equal(tensors[3][:, prefix : prefix + rows], tensors[1]) and not tensors[3][:, prefix + rows :].any()
    compare(
        benchmark,
        call,
        baseline=baseline,
        baseline_name="kv_append_, then speculative_attention",
        device=device,
        op="speculative_attention_append_",
        candidate=name,
        rows=rows,
        dtype="bf16",
    )
