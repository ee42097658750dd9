"""speculative_attention with starts, windows and packed sequences (`cu_seqlens`): against the reference, and against each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels import masks
from pdkernels._attention import SpeculativeArguments
from pdkernels.masks import SegmentMask, TilePlan
from pdkernels.ops.speculative_attention import first_positions
from pdkernels.reference import speculative_attention as reference
from tests.harness.error_budget import assert_within_budget
from tests.harness.triton_interpreter import TRITON_FOUND, triton_device
from tests.ops.speculative_cases import Inputs, Results, in_pages, make_inputs
from tests.support.errors import refused

BACKENDS = ["cpu", *(["triton"] if TRITON_FOUND else [])]


class Seen(NamedTuple):
    starts: Tensor | None = None
    window: int | None = None


CASES = {
    "padding": Seen(torch.tensor([7, 0, 260])),
    "window": Seen(None, 20),
    "window of one": Seen(None, 1),
    "wider than all": Seen(None, 10_000),
    "padding and window": Seen(torch.tensor([12, 3, 250]), 30),
    "nothing of the prefix": Seen(torch.tensor([37, 1, 270])),
    "nothing at all": Seen(torch.tensor([1000, 0, 1000])),
}
LENGTHS = (37, 1, 270)


def run(where: str, inputs: Inputs, plan: TilePlan, seen: Seen, begins: Tensor | None = None, **more: Any) -> Results:
    *tensors, table = inputs
    options = {**seen._asdict(), "cu_seqlens": begins}
    if where == "cpu":
        function = pd.speculative_attention_append_ if more else pd.speculative_attention
        return Results(*function(*tensors, plan, **options, block_table=table, return_lse=True, **more))
    from pdkernels.triton.speculative_attention import forward

    *tensors, table = inputs.map(lambda x: x.to(triton_device()))
    starts, begins = (None if x is None else x.to(triton_device()) for x in (seen.starts, begins))
    first = first_positions("speculative_attention", tensors[0], tensors[5], starts, seen.window, begins)
    new = 0 if begins is None else plan.q_len
    scale = inputs.q.shape[-1] ** -0.5
    arguments = plan.to(triton_device()).arguments
    return Results(*forward(SpeculativeArguments(*tensors, *arguments, scale, table, first, begins, new)))


def check(backend: str, inputs: Inputs, mask: SegmentMask, seen: Seen, begins: Tensor | None = None) -> Results:
    found = run(backend, inputs, mask.plan(32, 32), seen, begins)
    first = first_positions("speculative_attention", inputs.q, inputs.lengths, seen.starts, seen.window, begins)
    options = {"starts": first, "cu_seqlens": begins, "block_table": inputs.block_table}
    exact, same = (
        reference.speculative_attention(*typed[:6], mask.dense(), **options)
        for typed in (inputs.to(torch.float64), inputs)
    )
    for name, *tensors in zip(Results._fields, found, exact, same):
        assert_within_budget(*tensors, name=name)
    return found


def packed(inputs: Inputs, counts: Sequence[int]) -> tuple[Inputs, Tensor]:
    """The first tokens of each sequence, one sequence after the other."""
    rows = [torch.cat([x[b, :count] for b, count in enumerate(counts)]) for x in inputs[:3]]
    return Inputs(*rows, *inputs[3:]), torch.tensor([0, *counts]).cumsum(0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_what_comes_first_is_hidden(name: str, backend: str) -> None:
    dtype = torch.float16 if backend == "triton" else torch.float32
    inputs = make_inputs(9, LENGTHS, head_dim=16, dtype=dtype)
    inputs = in_pages(inputs, 16) if name in ("window", "padding") else inputs
    out, lse = check(backend, inputs, masks.causal(9), CASES[name])
    if name == "nothing at all":
        assert not out[0].any() and bool(lse[0].isinf().all()) and bool(out[1].any())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_start_for_each_token(backend: str) -> None:
    """Of a tree, in which positions are depths: a window is a start for each token."""
    mask = masks.tree([max(-1, i - 1 - i % 3) for i in range(12)])
    inputs = make_inputs(12, LENGTHS, head_dim=16, dtype=torch.float16)
    starts = torch.randint(0, 60, (3, 12), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    check(backend, inputs, mask, Seen(starts))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seen", [Seen(), CASES["padding and window"]], ids=["all", "window"])
def test_packed_sequences(seen: Seen, backend: str) -> None:
    inputs, begins = packed(make_inputs(40, LENGTHS, head_dim=16, dtype=torch.float16), (3, 0, 40))
    check(backend, inputs, masks.causal(40), seen, begins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seen", [Seen(), CASES["padding and window"], Seen(None, 300)], ids=str)
def test_the_same_bits_packed_padded_and_alone(seen: Seen, dtype: torch.dtype) -> None:
    """Beyond 4096 keys there are several splits."""
    inputs, counts = make_inputs(21, (37, 4150, 270), dtype=dtype), (5, 21, 1)
    plan = masks.causal(21).plan(16, 32)
    whole = run("cpu", inputs, plan, seen)
    rows, begins = packed(inputs, counts)
    out, lse = run("cpu", rows, plan, seen, begins)
    for b, count in enumerate(counts):
        own = slice(int(begins[b]), int(begins[b + 1]))
        assert torch.equal(out[own], whole.out[b, :count]) and torch.equal(lse[:, own], whole.lse[b, :, :count])
        alone = inputs.sequence(b)
        first = Inputs(*(x[:, :count].contiguous() for x in alone[:3]), *alone[3:])
        starts = None if seen.starts is None else seen.starts[b : b + 1]
        few = run("cpu", first, masks.causal(count).plan(32, 16), Seen(starts, seen.window))
        assert torch.equal(few.out[0], whole.out[b, :count])


def test_a_row_does_not_know_what_is_cached() -> None:
    """Token by token after a cache that grows, and all at once: the same bits under a window and after padding."""
    length, window = 200, 50
    inputs = make_inputs(length, (0,), slots=length, dtype=torch.bfloat16)
    seen = Seen(torch.tensor([11]), window)
    whole = run("cpu", inputs, masks.causal(length).plan(64, 64), seen).out
    cached = inputs._replace(k_cache=inputs.k_new, v_cache=inputs.v_new)
    for at in (0, 10, 11, 12, 60, 127, 128, 199):
        one = Inputs(*(x[:, at : at + 1] for x in inputs[:3]), *cached[3:5], torch.tensor([at]))
        assert torch.equal(run("cpu", one, masks.causal(1).plan(16, 16), seen).out[:, 0], whole[:, at])


def test_packed_rows_are_stored() -> None:
    for backend in ("auto", "reference"):
        inputs, begins = packed(make_inputs(7, (5, 0, 30), slots=40), (3, 0, 7))
        caches = [x.nan_to_num(0) for x in inputs[3:5]]
        given = inputs._replace(k_cache=caches[0].clone(), v_cache=caches[1].clone())
        run("cpu", given, masks.causal(7).plan(16, 16), Seen(None, 4), begins, counts=None, backend=backend)
        for after, before, new in zip(given[3:5], caches, inputs[1:3]):
            before[0, 5:8], before[2, 30:37] = new[:3], new[3:]
            assert torch.equal(after, before)


def test_opcheck_and_a_compiled_step() -> None:
    inputs, begins = packed(make_inputs(4, (5, 9), slots=40, head_dim=16), (3, 4))
    tensors = [x.nan_to_num(0) for x in inputs[:5]]
    plan = masks.causal(4).plan(16, 16)
    starts = torch.tensor([[1], [2]])
    arguments = (*tensors, inputs.lengths, *plan.arguments, 0.2, None, starts, begins, 4)
    torch.library.opcheck(torch.ops.pdkernels.speculative_attention.default, arguments)

    def step(lengths: Tensor) -> Tensor:
        return pd.speculative_attention(*tensors, lengths, plan, starts=starts[:, 0], window=3, cu_seqlens=begins)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(inputs.lengths), step(inputs.lengths))


GOOD = make_inputs(4, (5, 9), slots=20, head_dim=16)
ROWS, BEGINS = packed(GOOD, (3, 4))


@pytest.mark.parametrize(
    "inputs, options, text",
    [
        (GOOD, {"window": 0}, "window must be 1 or more, got 0"),
        (GOOD, {"starts": [1, 2]}, "TypeError: starts must be a tensor, got list"),
        (GOOD, {"starts": torch.tensor([1, 2, 3])}, r"starts must have shape \(2, 1\)"),
        (GOOD, {"starts": torch.tensor([[1, 2]])}, r"starts must have shape \(2, 4\)"),
        (GOOD, {"starts": torch.tensor([1, 2, 3]), "window": 4}, r"starts must have shape \(2, "),
        (GOOD, {"starts": torch.tensor([-1, 2])}, "starts must be at least 0, got -1"),
        (GOOD, {"starts": torch.tensor([1.0, 2.0])}, "TypeError: starts must be"),
        (GOOD, {"cu_seqlens": BEGINS}, r"q must have shape \(rows, heads, head_dim\)"),
        (ROWS, {}, r"q must have shape \(batch, new, heads, head_dim\)"),
        (ROWS, {"cu_seqlens": torch.tensor([0, 7])}, r"cu_seqlens must have shape \(3\)"),
        (ROWS, {"cu_seqlens": torch.tensor([1, 3, 7])}, r"cu_seqlens\[0\] must be"),
        (ROWS, {"cu_seqlens": torch.tensor([0, 5, 7])}, r"cu_seqlens\[1\] must be in \[0, 4\], got 5"),
        (ROWS, {"cu_seqlens": torch.tensor([0, 3, 6])}, r"cu_seqlens\[2\] must be 7, got 6"),
        (ROWS, {"cu_seqlens": BEGINS, "starts": torch.zeros(2, 4, dtype=torch.int64)}, r"starts must"),
    ],
)
def test_errors(inputs: Inputs, options: dict[str, Any], text: str) -> None:
    plan = masks.causal(4).plan(16, 16)
    for backend in ("auto", "reference"):
        with refused(text):
            pd.speculative_attention(*inputs[:6], plan, **options, backend=backend)
