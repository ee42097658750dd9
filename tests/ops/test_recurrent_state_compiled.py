"""The Triton kernels of layers with a state compile for every architecture, within budget, without spills and contraction."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from typing import Any
from unittest import mock

import pytest

from tests.harness import triton_budgets as harness
from tests.harness.triton_interpreter import requires_triton
from tests.ops.test_quantized_linear_compiled import arithmetic

pytestmark = requires_triton
# Budgets are named "sm_90:bf16:128 state delta": keys and values of a head, and what a kernel is compiled for.
BUDGETS = {name: budget for name, budget in json.loads(harness.BUDGET_FILE.read_text()).items() if " state " in name}
CASES = sorted({name.split(" ")[0] for name in BUDGETS})
FIRST = "sm_90:bf16:128"


def launch(given: Any, batch: int = 16) -> tuple[Any, Any]:
    """Steps of 8 rows of layers such as Qwen3.5's and Granite 4's, in the place of block-sparse attention."""
    import torch

    from pdkernels._recurrent_state import DeltaArguments
    from pdkernels.triton import recurrent_state as kernels

    size, dtype = given.q.shape[-1], given.q.dtype
    heads, key_heads, rows = 32, 16, 8
    state, lengths = torch.zeros(batch, heads, size, size), torch.zeros(batch, dtype=torch.int64)
    k, v = (torch.zeros(batch, rows, count, size, dtype=dtype) for count in (key_heads, heads))
    gate, number = torch.zeros(batch, rows, heads, dtype=dtype), torch.zeros(heads)
    index = torch.zeros(batch, rows, dtype=torch.int64)
    delta = DeltaArguments(
        state, lengths.clone(), k, v.float(), gate, k, k, v, gate, gate, lengths, pending_index=index, l2norm_eps=1e-6,
        A=number, dt_bias=number, sigmoid_beta=True,
    )  # fmt: skip
    kernels.gated_delta_(delta)
    return given.q, given.q


def launch_tree(given: Any) -> tuple[Any, Any]:
    """A delta rule's, which sums over keys for ancestors of a row as well as for the row."""
    import torch

    from pdkernels._recurrent_state import DeltaArguments
    from pdkernels.triton import recurrent_state as kernels

    lengths, rows, gate = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2)
    state, parents = torch.zeros(1, 2, 16, 16), torch.zeros(1, 8, dtype=torch.int64)
    kernels.gated_delta_(
        DeltaArguments(state, lengths.clone(), rows, rows, gate, rows, rows, rows, gate, gate, lengths, parents=parents)
    )
    return given.q, given.q


def launch_selective(given: Any, batch: int = 16) -> tuple[Any, Any]:
    import torch

    from pdkernels._recurrent_state import ConvArguments, SelectiveArguments
    from pdkernels.triton import recurrent_state as kernels

    size, dtype = given.q.shape[-1], given.q.dtype
    heads, rows = 48, 8
    state, lengths = torch.zeros(batch, heads, size, 64), torch.zeros(batch, dtype=torch.int64)
    k, v = (torch.zeros(batch, rows, count, width, dtype=dtype) for count, width in ((1, size), (heads, 64)))
    gate, number = torch.zeros(batch, rows, heads, dtype=dtype), torch.zeros(heads)
    index = torch.zeros(batch, rows, dtype=torch.int64)
    selective = SelectiveArguments(
        state, lengths.clone(), v, k, gate, v, k, k, gate, number, lengths, pending_index=index, D=number, dt_bias=number,
        dt_softplus=True,
    )  # fmt: skip
    kernels.selective_state_(selective)
    x, weight = torch.zeros(batch, rows, 4096, dtype=dtype), torch.zeros(4096, 4, dtype=dtype)
    window = torch.zeros(batch, 3, 4096, dtype=dtype)
    kernels.short_conv_(ConvArguments(window, lengths.clone(), x, x, weight, lengths, activation="silu"))
    return given.q, given.q


def compile_variant(case: str, of: Any) -> dict[str, Any]:
    """What the harness compiles when these launches replace those of the block-sparse kernels."""
    from pdkernels.triton import block_sparse_attention

    with mock.patch.multiple(block_sparse_attention, forward=of, backward=mock.DEFAULT):
        return harness.compile_case(case)


def lanes(kernel: Any) -> list[str]:
    """How the lanes of a warp lie in the keys and columns of each sum over keys."""
    ttgir = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = #ttg.blocked<.*?threadsPerWarp = (\[[\d, ]+\])", ttgir, re.MULTILINE))
    summed = re.findall(r'"tt.reduce"\(.*?\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)', ttgir, re.DOTALL)
    return [layouts[name] for name in summed]


def main(cases: list[str]) -> None:
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        tree = compile_variant(case, launch_tree)["_scan"]
        found[f"{case} tree"] = {"loops": tree.asm["ttir"].count("scf.while"), "lanes": {"tree": lanes(tree)}}
        for kind, of in (("delta", launch), ("mamba", launch_selective)):
            compiled = compile_variant(case, of)
            labelled = {kind: compiled["_scan"], f"{kind}, few": compile_variant(case, partial(of, batch=1))["_scan"]}
            found[f"{case} tree"]["lanes"] |= {label: lanes(kernel) for label, kernel in labelled.items()}
            for label, kernel in {**labelled, **({"conv": compiled["_conv"]} if kind == "mamba" else {})}.items():
                figures = harness.read_figures(kernel, case.split(":")[0])
                found[f"{case} state {label}"] = figures | {"contracted": arithmetic(kernel)[r"\bfma\."]}
    print(json.dumps(found))


def check(*cases: str) -> set[str]:
    measured, found = harness.measure(list(cases), __name__), []
    for case in cases:  # over the ancestors of a row, and from each upwards
        tree = measured.pop(f"{case} tree")
        found += [f"{case}: {tree['loops']} loops over a tree, not 2"] if tree["loops"] != 2 else []
        # Of ancestors with k, of a row with k and q: in one order, or bits would depend on branches and batches.
        for label, sums in {"tree": 3, "delta": 2, "delta, few": 2, "mamba": 1, "mamba, few": 1}.items():
            if tree["lanes"][label] != ["[8, 4]"] * sums:
                found.append(f"{case}: sums of {label} over {tree['lanes'][label]}, not {sums} over [8, 4]")
    for name, figures in measured.items():
        contracted, budget = figures.pop("contracted"), BUDGETS.get(name, {})
        # Those that a kernel writes; exponentials and quotients are made of them too.
        if contracted > budget.get("fma", 0):
            found.append(f"{name} has {contracted} contracted products, its budget is {budget.get('fma', 0)}")
        figures["mma.sync"] = 1  # it multiplies no matrices
        found += harness.problems(name, figures, {key: most for key, most in budget.items() if key != "fma"} or None)
    assert not found, "\n" + "\n".join(found)
    return set(measured)


def test_kernels_stay_within_budget() -> None:
    assert len(check(FIRST)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != FIRST])
def test_the_rest_stays_within_budget(case: str) -> None:
    assert check(case) == {name for name in BUDGETS if name.split(" ")[0] == case}


if __name__ == "__main__":
    main(sys.argv[1:])
