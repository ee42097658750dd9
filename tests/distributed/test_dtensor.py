"""Our ops on DTensors: the bits of one process, cut by the rules and with nothing moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

import pdkernels as pd
from pdkernels.distributed.dtensor import register_dtensor
from tests.distributed.ranks import COUNTS, FOUR


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(found: Any, whole: torch.Tensor, placement: Any, exact: bool = True) -> None:
    assert isinstance(found, DTensor) and found.placements == (placement,), (found.placements, placement)
    full = found.full_tensor()
    assert torch.equal(full, whole) if exact else torch.allclose(full, whole, atol=1e-5)


def attention(group: Any, dim: int, stacked: bool) -> None:
    register_dtensor()
    mesh = DeviceMesh.from_group(group, "cpu")
    mask = pd.masks.noise_aware_causal(prompt_len=20, block_size=8, num_blocks=4)
    plan = mask.plan(32, 32)
    if stacked:
        plan = pd.masks.TilePlan.stack([plan] * 4)
    plain = [draw(4, mask.q_len, heads, 32, seed=heads).requires_grad_() for heads in (8, 4, 4)]
    cut = [distribute_tensor(x.detach().clone(), mesh, [Shard(dim)]).requires_grad_() for x in plain]
    out, lse = pd.block_sparse_attention(*plain, plan, return_lse=True)
    (out.sum() + lse.sum()).backward()
    with implicit_replication(), CommDebugMode() as moved:
        found, found_lse = pd.block_sparse_attention(*cut, plan, return_lse=True)
        assert moved.get_total_counts() == 0
        (found.to_local().sum() + found_lse.to_local().sum()).backward()
        assert moved.get_total_counts() == 0
    same(found.detach(), out.detach(), Shard(dim))
    same(found_lse.detach(), lse.detach(), Shard(1 if dim == 2 else 0))
    for a, b in zip(cut, plain):
        same(a.grad, b.grad, Shard(dim))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dim, stacked", [(0, False), (2, False), (0, True), (2, True)])
def test_attention_by_heads_and_by_sequences(ranks, count: int, dim: int, stacked: bool) -> None:
    ranks.run(count, attention, dim, stacked)


def few_heads(group: Any) -> None:
    """Two KV heads on four ranks, and rows: both are gathered, since no rule can cut them."""
    register_dtensor()
    mesh = DeviceMesh.from_group(group, "cpu")
    q, k = draw(2, 40, 4, 32), draw(2, 40, 2, 32, seed=1)
    plan = pd.masks.causal(40).plan(16, 16)
    whole = pd.block_sparse_attention(q, k, k, plan)
    for dim in (1, 2):
        with implicit_replication():
            found = pd.block_sparse_attention(*(distribute_tensor(x, mesh, [Shard(dim)]) for x in (q, k, k)), plan)
        assert torch.equal(found.full_tensor(), whole)  # type: ignore[attr-defined]


@FOUR
def test_what_no_rule_cuts(ranks) -> None:
    ranks.run(4, few_heads)


def others(group: Any) -> None:
    register_dtensor()
    mesh = DeviceMesh.from_group(group, "cpu")

    def cut(x: torch.Tensor, dim: int) -> Any:
        return distribute_tensor(x, mesh, [Shard(dim)])

    x, weight, ids = draw(4, 6, 32), draw(48, 32, seed=1), draw(4, 6, seed=6).argsort(-1)
    norm = draw(32, seed=2)
    cache, plan = draw(4, 20, 4, 32, seed=3), pd.masks.causal(3).plan(16, 16)
    q, new, lengths = draw(4, 3, 8, 32, seed=4), draw(4, 3, 4, 32, seed=5), torch.tensor([5, 9, 0, 17])
    positions = torch.arange(24).view(4, 6)
    Call = Callable[[Any], Any]
    drawn = {"temperature": 1.0, "seed": 3}
    calls: list[tuple[Call, Any, Any, Any]] = [
        (lambda y: pd.linear(y, weight), x, 0, 0),
        (lambda y: pd.linear(y, weight), x, 1, 1),
        (lambda w: pd.linear(x, w), weight, 0, 2),
        (lambda y: pd.add_rms_norm(y, y, norm)[0], x, 1, 1),
        (lambda y: pd.add_rms_norm(y, y, norm, next_weight=norm)[1], x, 0, 0),
        (pd.silu_and_mul, x, 0, 0),
        (pd.gelu_and_mul, x, 0, 0),
        (pd.kv_quantize, x, 0, 0),
        (lambda y: pd.token_statistics(y).entropy, x, 0, 0),
        (lambda y: pd.linear_token_statistics(y, weight).ids, x, 1, 1),
        (lambda y: pd.logit_divergence(y, y * 2).kl, x, 1, 1),
        (lambda y: pd.gather_rows(y, ids[:, :2]), x, 0, 0),
        (lambda y: pd.verify_draft(y, ids).accepted, ids, 0, 0),
    ]
    with implicit_replication():
        for number, (function, given, dim, result) in enumerate(calls):
            whole, found = function(given), function(cut(given, dim))
            assert isinstance(found, DTensor), number
            assert found.placements == (Shard(result),), (number, found.placements)
            assert torch.equal(found.full_tensor(), whole), number
        # Draws: with positions row by row, without them on all rows together.
        for places in (positions, None):
            whole = pd.token_statistics(x, positions=places, **drawn).ids
            given = None if places is None else cut(places, 0)
            found = pd.token_statistics(cut(x, 0), positions=given, **drawn).ids
            assert found.placements == ((Shard(0) if places is not None else Replicate()),)  # type: ignore[attr-defined]
            assert torch.equal(found.full_tensor(), whole)  # type: ignore[attr-defined]
        whole = pd.speculative_attention(q, new, new, cache, cache, lengths, plan)
        for dim in (0, 2):
            tensors = [cut(y, dim) for y in (q, new, new, cache, cache)]
            found = pd.speculative_attention(*tensors, cut(lengths, 0) if dim == 0 else lengths, plan)
            same(found, whole, Shard(dim))
        summed = pd.linear(cut(x, 2), cut(weight, 1))
        assert summed.placements[0].is_partial()  # type: ignore[attr-defined]
        assert torch.allclose(summed.full_tensor(), pd.linear(x, weight), atol=1e-5)  # type: ignore[attr-defined]


def test_rows_columns_and_sequences(ranks) -> None:
    ranks.run(2, others)


def compiled(group: Any) -> None:
    register_dtensor()
    mesh, plan = DeviceMesh.from_group(group, "cpu"), pd.masks.causal(64).plan(32, 32)
    x = draw(2, 64, 4, 32)

    def run(y: Any) -> Any:
        return pd.block_sparse_attention(y, y, y, plan)

    plain, cut = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
    whole = run(plain)
    whole.sum().backward()
    with implicit_replication():
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(cut)
        found.to_local().sum().backward()
    same(found.detach(), whole.detach(), Shard(2))
    same(cut.grad, plain.grad, Shard(2))


@pytest.mark.slow
def test_in_a_compiled_graph(ranks) -> None:
    ranks.run(2, compiled)
