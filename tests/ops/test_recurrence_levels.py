"""The recurrence kernels of every vector unit: see test_block_sparse_attention_levels.py. Injected rows have the reference's bits."""

from __future__ import annotations

import pytest
import torch

from pdkernels.reference import recurrence as reference
from tests.harness.error_budget import assert_within_budget
from tests.ops.recurrence_cases import DTYPES, SIZES, bits, inject_options, make_rows

NAMES = ("seed", "seeds", "noise", "schedule", "horizon", "mixer", "momentum", "init_std", "new_state", "damp_new")


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_injected_bits(level_ops: object, dtype: torch.dtype, size: int) -> None:
    for seed in range(3 if size > 1000 else 12):
        rows, options = make_rows(seed, batch=2, rows=6, size=size, dtype=dtype), inject_options(seed)
        options["seeds"] = torch.tensor([-seed, 2**40 + seed]) if seed % 2 else None
        actual = level_ops.recurrence_inject(*rows.inject_arguments(), *(options[name] for name in NAMES))
        assert torch.equal(bits(actual), bits(reference.recurrence_inject(*rows.inject_arguments(), **options))), (
            options
        )


@pytest.mark.parametrize("size", SIZES[2:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exit_within_the_error_budget(level_ops: object, dtype: torch.dtype, size: int) -> None:
    rows = make_rows(size, batch=2, rows=6, size=size, dtype=dtype)
    for older in ((None, None), (rows.older, rows.older_advance)):
        state, distance, converged = level_ops.recurrence_exit(*rows.exit_arguments(), 1.4, *older, 1, 1e-6)
        same = reference.recurrence_exit(*rows.exit_arguments(), 1.4, *older)
        exact = reference.recurrence_exit(
            *rows.to(torch.float64).exit_arguments(),
            1.4,
            *(x if x is None or x.dtype == torch.int64 else x.double() for x in older),
        )
        assert_within_budget(state, exact[0], same[0], name="state")
        # A state that rounds the other way moves the distance by some thousandths of the dtype's last place.
        assert torch.allclose(distance, same[1], rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(converged, distance < 1.4)
