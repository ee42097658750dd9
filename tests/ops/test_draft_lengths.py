"""draft_lengths_ against the plain form of the reference: lengths exactly, the counts to the last bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels.reference.draft_lengths import draft_lengths_ as reference
from tests.ops.implementations import implementation
from tests.support.errors import refused

Call = dict[str, Any]


def arguments(seed: int, batch: int, slots: int, **numbers: float) -> Call:
    """After some steps: places were reached no less often than accepted."""
    generator = torch.Generator().manual_seed(seed)

    def ints(most: torch.Tensor) -> torch.Tensor:
        return (torch.rand(len(most), generator=generator) * (most + 1)).long().minimum(most)

    lengths = ints(torch.full((batch,), slots))
    acceptance_counts = torch.rand(batch, 2, slots, generator=generator, dtype=torch.float64).sort(1).values * 20
    costs = 1 + torch.rand(slots, generator=generator, dtype=torch.float64).cumsum(0) / 3
    return {
        "lengths": lengths,
        "accepted": ints(lengths),
        "remaining": ints(torch.full((batch,), 2 * slots)),
        "acceptance_counts": acceptance_counts,
        "budget": torch.rand(batch, generator=generator, dtype=torch.float64) * 2 - 0.5,
        "ready": torch.rand(batch, generator=generator) < 0.7,
        "costs": costs,
        **numbers,
    }


@st.composite
def calls(draw: st.DrawFn) -> Call:
    share, cost = st.floats(0, 1), st.sampled_from([0.0, 0.1, 1.5])
    numbers = {"warmup_cost": draw(cost), "decay": draw(share), "prior": draw(share), "max_slowdown": draw(cost)}
    batch, slots = draw(st.sampled_from([0, 1, 2, 33, 70])), draw(st.sampled_from([1, 2, 5, 16]))
    return arguments(draw(st.integers(0, 2**20)), batch, slots, **numbers)


def copied(call: Call, device: torch.device | str = "cpu") -> Call:
    return {name: value.clone().to(device) if torch.is_tensor(value) else value for name, value in call.items()}


def check_equal(impl: Any, call: Call) -> None:
    expected, actual = copied(call), copied(call, impl.device)
    reference(**expected)
    impl.draft_lengths_(**actual)
    for name in ("acceptance_counts", "budget"):  # a multiply and an add may be rounded once
        torch.testing.assert_close(actual[name].cpu(), expected[name], rtol=1e-14, atol=1e-14)
    assert torch.equal(actual["lengths"].cpu(), expected["lengths"])


@given(call=calls())
@example(call=arguments(0, 3, 16))
@settings(max_examples=60)
def test_equals_the_reference(impl: Any, call: Call) -> None:
    check_equal(impl, call)


@given(call=calls())
@settings(max_examples=10)
def test_result_does_not_depend_on_the_order_of_threads(call: Call) -> None:
    impl = implementation("cudasim")
    for order in impl.schedules():
        with order:
            check_equal(impl, call)


def test_columns_and_int32(impl: Any) -> None:
    """Lengths are a column of a decoder's table, and may be int32."""
    call = arguments(3, 6, 7, warmup_cost=0.2)
    expected = copied(call)
    reference(**expected)
    table = torch.full((6, 5), -9, dtype=torch.int32)
    table[:, 2] = call["lengths"]
    table = table.to(impl.device)
    moved = copied(call, impl.device) | {"lengths": table[:, 2]}
    moved["acceptance_counts"] = moved["acceptance_counts"].mT.contiguous().mT
    impl.draft_lengths_(**moved)
    assert torch.equal(table[:, 2].long().cpu(), expected["lengths"])
    assert (table[:, [0, 1, 3, 4]] == -9).all()


def test_a_sequence_has_the_same_length_alone(impl: Any) -> None:
    call = copied(arguments(5, 40, 8), impl.device)
    alone = [copied({k: v if k == "costs" else v[b : b + 1] for k, v in call.items()}, impl.device) for b in range(40)]
    impl.draft_lengths_(**call)
    for b, one in enumerate(alone):
        impl.draft_lengths_(**one)
        assert all(torch.equal(one[name][0], call[name][b]) for name in ("lengths", "acceptance_counts", "budget"))


@pytest.mark.parametrize("length, accepted, name", [(5, 0, "lengths"), (-1, 0, "lengths"), (2, 3, "accepted")])
def test_bad_values(impl: Any, length: int, accepted: int, name: str) -> None:
    call = copied(arguments(1, 3, 4), impl.device)
    call["lengths"][1], call["accepted"][1] = length, accepted
    before = copied(call, impl.device)
    if impl.raises:
        most = length if name == "accepted" else 4
        with pytest.raises(ValueError, match=rf"{name} must be in \[0, {most}\], got -?\d for sequence 1\. [NI]"):
            impl.draft_lengths_(**call)
        assert all(torch.equal(call[each], before[each]) for each in ("lengths", "acceptance_counts", "budget"))
    else:
        clamped = before | {"lengths": before["lengths"].clamp(0, 4)}
        clamped["accepted"] = before["accepted"].minimum(clamped["lengths"])
        impl.draft_lengths_(**call), impl.draft_lengths_(**clamped)
        assert torch.equal(call["lengths"], clamped["lengths"])


@pytest.mark.parametrize(
    "text, changed",
    {
        "TypeError: lengths must be an int32 or int64 tensor, got torch.float32": {"lengths": torch.zeros(3)},
        r"accepted must have shape \(3\), got \(2,\)": {"accepted": torch.zeros(2, dtype=torch.int64)},
        "TypeError: acceptance_counts must be torch.float64, got torch.float32": {
            "acceptance_counts": torch.zeros(3, 2, 4)
        },
        r"acceptance_counts must have shape \(3, 2, 4\), got \(3, 2, 5\)": {
            "acceptance_counts": torch.zeros(3, 2, 5).double()
        },
        r"budget must have shape \(3\), got \(4,\)": {"budget": torch.zeros(4).double()},
        "TypeError: ready must be torch.bool, got torch.int64": {"ready": torch.zeros(3, dtype=torch.int64)},
        r"costs must have shape \(slots,\), with at least one slot, got \(0,\)": {"costs": torch.zeros(0).double()},
        r"prior must be in \[0, 1\], got 2": {"prior": 2.0},
        "warmup_cost must be at least 0, got -1": {"warmup_cost": -1.0},
        r"decay must be in \[0, 1\], got nan": {"decay": float("nan")},
    }.items(),
)
def test_bad_call(text: str, changed: Call) -> None:
    with refused(text):
        pd.draft_lengths_(**{**arguments(1, 3, 4), **changed})
