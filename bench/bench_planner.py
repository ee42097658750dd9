"""Planning a noise-aware mask against FlexAttention's `create_block_mask`, at 128x128.

Prompt and blocks of 32 as in Jacobi Forcing: 1152, 4608, 16384 and 1048576 tokens; dual streams of as many.
FlexAttention gets the mask as its trainer writes it: arithmetic on indices, interleaved order. The cost of every first call
(imports, compilation) is reported separately, as
``first_call_ms``. Eager creation is left out at 16384 tokens: it holds several int64 arrays of all 268 million pairs. On a GPU the
mask is made there, and our plan, made by the host, is moved there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from bench.devices import DRY_RUN, refusals
from bench.timing import compare
from pdkernels.integrations.flex_attention import to_block_mask
from pdkernels.masks import SegmentMask, dual_stream, noise_aware_causal
from pdkernels.masks.segment_mask import _plan

BLOCK = 32
CASES = {1152: (128, 16), 4608: (512, 64), 16384: (512, 248), 1048576: (512, 16376)}
MOST_EAGER = 5000
# Beyond that FlexAttention's pass over all pairs, and lists of millions of partial tiles, take minutes.
MOST_TILES = 20000
Call = Callable[[], object]


def arithmetic(prompt_len: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The interleaved noise-aware mask, computed for each pair."""

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_block, k_block = (q - prompt_len) // BLOCK, (k - prompt_len) // BLOCK
        same_stream = (q_block % 2 == k_block % 2) & (q >= prompt_len)
        return (q >= k) & ((k < prompt_len) | same_stream)

    return mask_mod


def scratch(prompt_len: int, num_blocks: int, layout: str, device: str) -> Callable[[], SegmentMask]:
    def call() -> SegmentMask:
        _plan.cache_clear()
        mask = noise_aware_causal(prompt_len, BLOCK, num_blocks, layout=layout)
        mask.plan(128, 128, device)
        return mask

    return call


def plan_only(mask: SegmentMask, device: str) -> Call:
    def call() -> None:
        _plan.cache_clear()
        mask.plan(128, 128, device)

    return call


def flex(prompt_len: int, length: int, compiled: bool, device: str) -> Call:
    mask_mod = arithmetic(prompt_len)
    return lambda: create_block_mask(mask_mod, None, None, length, length, device=device, _compile=compiled)


def candidate(name: str, length: int, device: str) -> Call:
    prompt_len, num_blocks = CASES[length]
    return {
        "pdkernels, mask and plan, streams": lambda: scratch(prompt_len, num_blocks, "streams", device),
        "pdkernels, mask and plan, interleaved": lambda: scratch(prompt_len, num_blocks, "interleaved", device),
        "pdkernels, plan alone, streams": lambda: plan_only(noise_aware_causal(prompt_len, BLOCK, num_blocks), device),
        "pdkernels, plan alone, dual stream": lambda: plan_only(dual_stream(length // 2, BLOCK), device),
        "create_block_mask, eager": lambda: flex(prompt_len, length, False, device),
        "create_block_mask, compiled": lambda: flex(prompt_len, length, True, device),
    }[name]()


NAMES = [
    "pdkernels, mask and plan, streams",
    "pdkernels, mask and plan, interleaved",
    "pdkernels, plan alone, streams",
    "pdkernels, plan alone, dual stream",
    "create_block_mask, eager",
    "create_block_mask, compiled",
]


def check(length: int, block_mask) -> None:
    """FlexAttention found the tiles that the interleaved plan lists."""
    prompt_len, num_blocks = CASES[length]
    ours = to_block_mask(
        noise_aware_causal(prompt_len, BLOCK, num_blocks, layout="interleaved"), device=block_mask.kv_indices.device
    )
    for kind in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(block_mask, kind), getattr(ours, kind))
    assert torch.equal(block_mask.to_dense(), ours.to_dense())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", CASES)
def test_planner(benchmark, name: str, length: int, device: str) -> None:
    if name.endswith("eager") and length > MOST_EAGER:
        pytest.skip("several int64 arrays of all pairs")
    if length > MOST_TILES and (name.startswith("create_block_mask") or name.endswith("interleaved")):
        pytest.skip("minutes")
    if DRY_RUN and (name.startswith("create_block_mask") or length > MOST_EAGER):
        pytest.skip("compiled, or long")
    benchmark.group = f"planner, {length} tokens, {device}"
    torch._dynamo.reset()
    call = candidate(name, length, device)
    start = time.perf_counter()
    with refusals(name, device):
        result = call()
    first_call = time.perf_counter() - start
    if name.startswith("create_block_mask"):
        check(length, result)
    compare(
        benchmark,
        call,
        baseline=scratch(*CASES[length], "streams", device),
        baseline_name="pdkernels, mask and plan, streams",
        rounds=200 if name.startswith("pdkernels") else 10 if length > MOST_EAGER else 20,
        device=device,
        graph=False,
        op="planner",
        candidate=name,
        length=length,
        plan_bytes=noise_aware_causal(CASES[length][0], BLOCK, CASES[length][1]).plan(128, 128).nbytes,
        first_call_ms=round(first_call * 1e3, 2),
    )
