"""What an op writes has memory for each entry: in an expanded tensor only the last write would remain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.ops.library import OPS
from tests.ops.examples import dims_to_expand, example, run, written_by

PLAN = pd.masks.causal(4).plan(16, 16)
# `log_step_` takes contiguous tensors alone.
WRITERS = [name for name, spec in OPS.items() if spec.mutated and name != "log_step_"]
CASES = [(op, name, dim) for op in WRITERS for name, tensor in written_by(op).items() for dim in dims_to_expand(tensor)]


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def kv(slots: int = 8, heads: int = 2) -> Tensor:
    return torch.randn(2, slots, heads, 16)


def test_what_is_marked_in_a_schema_is_in_the_example() -> None:
    assert all(
        set(written_by(op)) == set(spec.mutated) and ("!" in spec.schema) == bool(spec.mutated)
        for op, spec in OPS.items()
    )
    assert {op for op, _, _ in CASES} == set(WRITERS)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("op, name, dim", CASES)
def test_expanded_is_refused_and_left_alone(op: str, name: str, dim: int, backend: str) -> None:
    arguments = example(op)
    arguments[name] = arguments[name].narrow(dim, 0, 1).expand_as(arguments[name])
    before = {name: arguments[name].clone() for name in OPS[op].mutated}
    text = rf"pdkernels\.{op}: {name} must have a place in memory for each entry, got shape .* with strides .*\. It is written; pass a copy"
    with pytest.raises(ValueError, match=text):
        run(op, arguments, backend=backend)
    assert all(torch.equal(arguments[name], x) for name, x in before.items())


@pytest.mark.parametrize("op", WRITERS)
def test_whole_tensors_and_views_are_accepted(op: str) -> None:
    """Every other entry of a larger tensor has its own memory."""
    run(op, example(op) | {name: x.repeat_interleave(2, 0)[::2] for name, x in written_by(op).items()})


def test_layers_that_share_memory() -> None:
    layers, new, one = kv()[None].expand(3, -1, -1, -1, -1), kv(3)[None].expand(3, -1, -1, -1, -1), kv()[None]
    with pytest.raises(ValueError, match="v_cache must have a place in memory for each entry"):
        pd.kv_append_(layers.contiguous(), layers, new, new, ints(2))
    pd.kv_append_(layers.contiguous(), layers.contiguous(), new, new, ints(2))  # what is read may be anywhere
    pd.kv_append_(one.expand(1, -1, -1, -1, -1), one.clone(), new[:1], new[:1], ints(1).expand(2))


def test_empty_tensors_may_have_any_strides() -> None:
    pd.unmask_(ints(1, 0).expand(2, 0), ints(2, 0), mask_token=0)
    pd.kv_append_(kv(0)[:1].expand(2, 0, 2, 16), kv(0), kv(0), kv(0), ints(2))


def test_pages_that_share_memory() -> None:
    pages, table = kv(), torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match="k_cache must have a place in memory for each entry"):
        pd.kv_append_(pages[:1].expand_as(pages), pages.clone(), kv(3), kv(3), ints(2), block_table=table)


def test_attention_that_writes_nothing_reads_it() -> None:
    """A prefix that all sequences share."""
    one, new = kv()[:1], (kv(4), kv(4), kv(4))
    shared = pd.speculative_attention(*new, one.expand(2, -1, -1, -1), one.expand(2, -1, -1, -1), ints(2) + 5, PLAN)
    apart = pd.speculative_attention(*new, one.repeat(2, 1, 1, 1), one.repeat(2, 1, 1, 1), ints(2) + 5, PLAN)
    assert torch.equal(shared, apart)
