"""Mask and plan of a drafter's training step against FlexAttention's `create_block_mask`, at 128x128.

Anchors are new in every step, so everything is rebuilt: from the tensors to what a kernel reads. Packs of 8,192 and 16,384 tokens with
512 and 1024 anchors of 16, as DFlash is trained by speculators, which compiles `create_block_mask`. The cost of the first call
is reported separately. Eager creation is left out: it holds several int64 arrays of all 134 million pairs.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from bench.devices import DRY_RUN, refusals
from bench.timing import compare
from pdkernels.integrations.flex_attention import to_block_mask
from pdkernels.masks import AnchoredMask, anchored

BLOCK = 16
CASES = {8192: 512, 16384: 1024}
OURS, THEIRS = "pdkernels, mask and plan", "create_block_mask, compiled"


def pack(tokens: int) -> tuple[Tensor, Tensor]:
    """Documents of 100 to 1500 tokens, and sorted anchors."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 1500, (tokens // 100,), generator=generator)
    documents = torch.repeat_interleave(lengths)[:tokens]
    return documents, torch.randperm(tokens - BLOCK, generator=generator)[: CASES[tokens]].sort().values


class Step:
    """The masks of successive steps, each with other anchors."""

    def __init__(self, tokens: int, device: str) -> None:
        self.documents, self.anchors = pack(tokens)
        self.device = device
        self.there = self.documents.to(device)
        self.number = 0

    def next(self) -> Tensor:
        self.number += 1
        return (self.anchors + self.number) % (len(self.documents) - BLOCK)

    def mask(self) -> AnchoredMask:
        return anchored(self.documents, self.next(), BLOCK)

    def ours(self) -> object:
        return self.mask().queries.plan(128, 128, self.device)

    def theirs(self) -> BlockMask:
        documents, anchors, base = self.there, self.next().to(self.device), len(self.documents)

        def mask_mod(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            anchor, token = anchors[q // BLOCK], k.clamp(max=base - 1)
            before = (k < anchor) & (documents[token] == documents[anchor]) & (documents[anchor] != -1)
            return torch.where(k < base, before, q // BLOCK == (k - base) // BLOCK)

        rows = BLOCK * len(anchors)
        return create_block_mask(mask_mod, None, None, rows, base + rows, device=self.device, _compile=True)


@pytest.mark.parametrize("name", [OURS, THEIRS])
@pytest.mark.parametrize("tokens", CASES)
def test_anchored(benchmark, name: str, tokens: int, device: str) -> None:
    if DRY_RUN and name == THEIRS:
        pytest.skip("compiled")
    benchmark.group = f"anchored, {tokens} tokens, {device}"
    torch._dynamo.reset()
    step = Step(tokens, device)
    call = step.ours if name == OURS else step.theirs
    start = time.perf_counter()
    with refusals(name, device):
        result = call()
    first_call = time.perf_counter() - start
    if isinstance(result, BlockMask):
        step.number = 0
        same = to_block_mask(step.mask().queries, 128, device)
        assert torch.equal(result.to_dense(), same.to_dense())
        assert torch.equal(result.full_kv_num_blocks, same.full_kv_num_blocks)
    compare(
        benchmark,
        call,
        baseline=step.ours,
        baseline_name=OURS,
        rounds=200 if name == OURS else 10,
        device=device,
        graph=False,
        op="anchored",
        candidate=name,
        length=tokens,
        anchors=CASES[tokens],
        first_call_ms=round(first_call * 1e3, 2),
    )
