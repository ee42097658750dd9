"""How often a decoder waits for its GPU: once a step, and for no copy to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.cache import ContiguousKVCache, PagedKVCache
from tests.decoding.test_devices import CASES, MASKED, PROMPTS, label, request
from tests.harness.pretended_gpu import pretended_gpu, waits, without_gpu
from tests.support.drafters import with_drafters
from tests.support.plans import END, planning_model

pytestmark = without_gpu

STEPS = [case for case in CASES if case[0] not in ("recurrent_adaptive", "planned")] + [
    ("jacobi_multiblock", {"block_size": 3, "blocks": 3, "spawn_ratio": 0.5}),
    ("linear_self_speculation", {"threshold": 0.9}),
    ("linear_self_speculation", {"threshold": 0.9, "block_size": 2}),
    ("quadratic_self_speculation", {"block_size": 4, "ensemble_weight": 0.5, "trace": True}),
    ("block_diffusion", {"block_size": 4, "refresh": "bidirectional"}),
    ("recurrent_self_speculation", {"block_size": 2, "trace": True}),
    ("recurrent_diffusion", {"headway": 2, "exit": "latent-acceleration", "trace": True}),
]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with pretended_gpu():
        yield


@cache
def on_gpu(name: str, drafters: bool = False) -> Any:
    model = pd.models.load(name).to("cuda")
    return with_drafters(model) if drafters else model


def watched(method: str | pd.decoding.Method, options: dict[str, Any]) -> tuple[list[str], pd.decoding.DecodeStats]:
    known = pd.decoding.find(method)
    model, (prompts, limit) = on_gpu(known.example, "drafter" in known.requires), request(known)
    with waits(model.embedding) as log:
        stats = pd.decoding.generate(model, prompts, method, max_new_tokens=limit, **options).stats
    return log, stats


@pytest.mark.covering(of=["method"], share=3)
@pytest.mark.parametrize(  # of planning methods the last test here is the fast one
    ("method", "options"),
    [*STEPS, *(pytest.param(*case, marks=pytest.mark.slow) for case in (("planned", {}),))],
    ids=label,
)
def test_one_read_of_the_device_per_step(method: str | pd.decoding.Method, options: dict[str, Any]) -> None:
    for _ in range(2):
        log, stats = watched(method, options)
        forwards = [n for n, event in enumerate(log) if event == "forward"]
        if "upload" not in log[forwards[1] :]:
            break  # once more otherwise: plans of masks are made on the host, but only once
    assert len(forwards) >= stats.forwards > 2
    assert "read" not in log[: forwards[0]], "nothing is read before the first forward"
    assert "upload" not in log[forwards[1] :], "a step waits for a copy to the device: use _session.to_device_async"
    # Drafting and verifying are one step, unless draft passes continue up to a threshold: then the device is read after each
    # forward. The single mask of a block of 2 needs no second pass.
    passes = "threshold" in options and options.get("block_size") != 2
    whole = method == "recurrent_self_speculation" or (method == "linear_self_speculation" and not passes)
    steps = max(map(len, stats.accepted)) if whole else stats.forwards - 1
    # A canvas keeps the trace of its forwards on the device until it is full.
    record = pd.decoding.find(method).example == MASKED or method == "fast_dllm_v2"
    assert log.count("read") <= 1 + steps + record
    between = [log[here:there].count("read") for here, there in pairwise(forwards)]
    assert max(between) == 1 and log[forwards[-1] :].count("read") <= 1 + record


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({}, False),
        pytest.param({}, True, marks=pytest.mark.slow),
        ({"criterion": "kl", "threshold": 0.05}, True),
        pytest.param(
            {"criterion": "argmax-stability", "threshold": 2, "check_every": 2, "min_recurrences": 0},
            False,
            marks=pytest.mark.slow,
        ),
        ({"min_recurrences": 5, "max_recurrences": 7, "page_size": 16}, True),
        ({"check_every": 4, "max_recurrences": 3}, False),  # no check at all
    ],
)
def test_adaptive_exits_read_the_device_once_per_check(options: dict[str, Any], stops: bool) -> None:
    """A token is read with the first check after it, which belongs to a token that is not needed if it was the last."""
    model, method = on_gpu("tiny-recurrent"), "recurrent_adaptive"
    free = pd.decoding.generate(model, PROMPTS, method, max_new_tokens=4, end_tokens=(), **options).tokens
    ends = tuple({int(tokens[-1]) for tokens in free}) if stops else ()
    log, stats = watched(method, {**options, "end_tokens": ends})
    traced = watched(method, {**options, "end_tokens": ends, "trace": True})[1]
    assert stats.forwards == traced.forwards and stats.recurrences == traced.recurrences
    assert (stats.forwards < request(pd.decoding.find(method))[1]) == stops
    # A batch has as many checks of a token as its most demanding sequence.
    looked = [[sum(map(math.isfinite, step.values)) for step in steps] for steps in traced.trace]
    checks = [max(counts[n] for counts in looked if n < len(counts)) for n in range(stats.forwards - 1)]
    assert log.count("read") == 1 + (sum(checks) + 1 if any(checks) else len(checks))
    assert log.count("forward") == stats.forwards + stops
    assert "upload" not in log[log.index("forward") :]


def test_caches_wait_for_nothing_but_pages_that_come_back() -> None:
    sizes = {"layers": 2, "batch": 2, "kv_heads": 1, "head_dim": 4, "device": "cuda"}
    rows, counts, lengths = (
        torch.ones(2, 3, 1, 4, device="cuda"),
        torch.tensor([3, 1], device="cuda"),
        torch.tensor([1, 1], device="cuda"),
    )
    paged = PagedKVCache(num_pages=4, page_size=2, **sizes)
    paged.reserve_([3, 3])
    for kept in (ContiguousKVCache(capacity=4, **sizes), paged):
        with waits() as log:
            kept.append_(0, rows, rows, counts)
            kept.commit_(counts, torch.zeros(2, 3, dtype=torch.int64, device="cuda"))
            kept.trim_(lengths)
            kept.layer(0, 3)
        assert log == []
    with waits() as log:
        paged.reclaim_()
    assert log == ["read", "upload"] and (paged.block_table >= 0).sum().item() == 2


def test_what_counts_as_waiting() -> None:
    table = torch.ones(4, 2, device="cuda")
    x, y = torch.arange(4, device="cuda"), torch.zeros(4, device="cuda")
    reads = (
        lambda: x[0].item(),
        lambda: bool(x.any()),
        lambda: int(x[1]),
        lambda: range(9)[x[1]],
        x.tolist,
        x.cpu,
        x.nonzero,
        x.unique,
        lambda: x[x > 1],
        lambda: torch.where(x > 1),
        lambda: torch.equal(x, x),
        lambda: torch.repeat_interleave(x, x),
        lambda: torch.zeros(4).copy_(y),
        lambda: y.clone().index_put_((x < 2,), y[:2]),
    )
    uploads = (
        lambda: torch.tensor([1, 2], device="cuda"),
        lambda: torch.ones(4).to("cuda"),
        lambda: y.copy_(torch.ones(4)),
        lambda: x[torch.tensor([1, 2])],
    )
    nothing = (
        lambda: torch.ones(4).to("cuda", non_blocking=True),
        lambda: y.copy_(torch.ones(4), non_blocking=True),
        lambda: x.to("cuda"),
        lambda: torch.full((3,), 2, device="cuda"),
        lambda: y.masked_fill_(x > 1, 3),
        lambda: y[1:].fill_(3),
        x.double,
        x.sort,
        lambda: y * 3 + torch.tensor(2.0),
        lambda: x[x],
        lambda: y.__setitem__(x > 1, 3.0),
        lambda: torch.ones(4).copy_(torch.zeros(4)),
        lambda: torch.nn.functional.embedding(x, table.clone()),
    )
    lookup = (lambda: torch.nn.functional.embedding(x, table),)
    for actions, expected in ((reads, ["read"]), (uploads, ["upload"]), (nothing, []), (lookup, ["forward"])):
        for action in actions:
            with waits(table) as log:
                action()
            assert log == expected, action


@pytest.mark.parametrize("chunks", ["diffusion", "autoregressive"])
def test_chunks_of_several_sequences_wait_once_a_step(chunks: str) -> None:
    """For plans, chunks that enter the cache and open chunks together."""
    model = planning_model.__wrapped__(1, "own", 16, "float32").to("cuda")
    prompts, options = (
        [[11, 3, END], [12, 12, 12, END], [10, END]],
        {"temperature": 0.7, "seed": 1, "max_new_tokens": 40, "chunks": chunks},
    )
    for _ in range(2):  # plans of masks are made on the host, but only once
        with waits(model.embedding) as log:
            stats = pd.decoding.generate(model, prompts, "planned", **options).stats
    forwards = [n for n, event in enumerate(log) if event == "forward"]
    assert "read" not in log[: forwards[0]] and "upload" not in log[forwards[1] :]
    assert stats.plans is not None
    steps = max(report.critical_path for report in stats.plans)
    assert log.count("read") == steps < stats.forwards
