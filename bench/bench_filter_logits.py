"""Filters of logits over the 151936 tokens of Qwen2: ours, and PyTorch's ops in transformers' and vLLM's way."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from bench.devices import by_device
from bench.timing import compare

VOCABULARY = 151_936
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = {"cpu": (1, 16), "cuda": (1, 16, 128), "dry": (3,)}


def filters_of(rows: int, vocabulary: int = VOCABULARY) -> pd.LogitFilters:
    """A bias, the counts of 500 tokens of one sequence and drafts of its rows, and a grammar's bits for each row."""
    generator = torch.Generator().manual_seed(rows)
    text = torch.randint(vocabulary, (500,), generator=generator)
    counts = torch.zeros(vocabulary, dtype=torch.int32).index_add_(0, text[250:], torch.ones(250, dtype=torch.int32))
    counts[text[:250]] = torch.where(counts[text[:250]] == 0, -1, counts[text[:250]])
    draft = torch.randint(vocabulary, (1, rows), generator=generator).expand(rows, rows)
    words = torch.randint(-(2**31), 2**31, (rows, (vocabulary + 31) // 32), generator=generator).int()
    return pd.LogitFilters(
        bias=0.1 * torch.randn(vocabulary, generator=generator),
        counts=counts,
        recent=torch.where(torch.ones(rows, rows).tril() > 0, draft, -1),
        banned=torch.tensor([3, 5]),
        allowed=words,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
    )


def eager(logits: Tensor, filters: pd.LogitFilters) -> Tensor:
    """With a table of counts for each row."""
    recent, banned, allowed = filters.recent, filters.banned, filters.allowed
    assert recent is not None and banned is not None and allowed is not None
    x = logits.float() + filters.bias
    counts = torch.nn.functional.pad(filters.counts.expand_as(x), (0, 1)).long()
    generated = counts.clamp(min=0).scatter_add_(1, torch.where(recent < 0, VOCABULARY, recent), (recent >= 0).long())
    seen, generated = ((counts != 0) | (generated > 0))[:, :VOCABULARY], generated[:, :VOCABULARY]
    penalty = filters.repetition_penalty
    x = torch.where(seen, torch.where(x < 0, x * penalty, x / penalty), x)
    x -= filters.presence_penalty * (generated > 0) + filters.frequency_penalty * generated
    x.index_fill_(-1, banned, -torch.inf)
    bits = (allowed[..., None] >> torch.arange(32, device=x.device, dtype=torch.int32)) & 1
    return x.masked_fill_(bits.flatten(1)[:, :VOCABULARY] == 0, -torch.inf)


@by_device("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("pdkernels", "torch eager"))
def test_filter_logits(benchmark, name: str, dtype: str, rows: int, device: str) -> None:
    benchmark.group = f"filter_logits, {dtype}, {rows} rows, {device}"
    generator = torch.Generator().manual_seed(rows)
    logits = (3 * torch.randn(rows, VOCABULARY, generator=generator)).to(DTYPES[dtype]).to(device)
    filters = pd.LogitFilters(*(x.to(device) if isinstance(x, Tensor) else x for x in filters_of(rows)))
    peer = partial(eager, logits, filters)
    ours = partial(pd.filter_logits, logits, **filters._asdict())
    call = ours if name == "pdkernels" else peer
    with torch.inference_mode():
        torch.testing.assert_close(ours(), peer())
        compare(
            benchmark,
            call,
            baseline=peer,
            baseline_name="torch eager",
            device=device,
            rounds=max(20, 100 // rows),
            warmup=3,
            bytes_moved=rows * VOCABULARY * (DTYPES[dtype].itemsize + 4) // 2,
            op="filter_logits",
            candidate=name,
            dtype=dtype,
            rows=rows,
        )
