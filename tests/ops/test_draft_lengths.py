"""draft_lengths_ against the plain form of the reference, and that against all splits of a batch's rows."""

from __future__ import annotations

import itertools
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


def arguments(seed: int, batch: int, slots: int, **numbers: Any) -> Call:
    """After some steps: places were reached no less often than accepted."""
    generator = torch.Generator().manual_seed(seed)

    def ints(most: torch.Tensor) -> torch.Tensor:
        return (torch.rand(len(most), generator=generator) * (most + 1)).long().minimum(most)

    lengths = ints(torch.full((batch,), slots))
    acceptance_counts = torch.rand(batch, 2, slots, generator=generator, dtype=torch.float64).sort(1).values * 20
    steps = torch.rand(2, batch * slots, generator=generator, dtype=torch.float64) / 3
    costs = 1 + steps.cumsum(1) + torch.tensor([[0.0], [0.1]])
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
    numbers = {name: draw(cost) for name in ("warmup_cost", "max_slowdown", "sequence_cost", "guess_cost")}
    numbers |= {"decay": draw(share), "prior": draw(share)}
    batch, slots = draw(st.sampled_from([0, 1, 2, 7, 33])), draw(st.sampled_from([1, 2, 5, 16]))
    return arguments(draw(st.integers(0, 2**20)), batch, slots, **numbers, padded=draw(st.booleans()))


def copied(call: Call, device: torch.device | str = "cpu") -> Call:
    return {name: value.clone().to(device) if torch.is_tensor(value) else value for name, value in call.items()}


def check_equal(impl: Any, call: Call) -> None:
    expected, actual = copied(call), copied(call, impl.device)
    reference(**expected)
    impl.draft_lengths_(**actual)
    for name in ("acceptance_counts", "budget"):  # a multiply and an add may be rounded once
        torch.testing.assert_close(actual[name].cpu(), expected[name], rtol=1e-12, atol=1e-12)
    assert torch.equal(actual["lengths"].cpu(), expected["lengths"])


@given(call=calls())
@example(call=arguments(0, 3, 16))
@example(call=arguments(0, 3, 16, padded=True))
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
    moved["costs"] = moved["costs"].T.contiguous().T
    impl.draft_lengths_(**moved)
    assert torch.equal(table[:, 2].long().cpu(), expected["lengths"])
    assert (table[:, [0, 1, 3, 4]] == -9).all()


# ---- the choice itself

SPLITS = st.tuples(st.integers(0, 2**20), st.integers(1, 3), st.integers(2, 4), st.booleans())


def choice(seed: int, batch: int, slots: int, padded: bool) -> Call:
    """Before the first draft, with known acceptance, and a budget for anything."""
    call = arguments(seed, batch, slots, decay=1.0, padded=padded)
    call["lengths"].zero_(), call["accepted"].zero_(), call["budget"].fill_(1e6)
    return call


def worth(call: Call, drafts: tuple[int, ...]) -> float:
    """Expected tokens over the cost of a step, in tokens, in which the sequences guess so many tokens."""
    n, tokens = sum(left > 0 for left in call["remaining"].tolist()), 0.0
    for (counts, reached), guesses, left in zip(
        call["acceptance_counts"].tolist(), drafts, call["remaining"].tolist(), strict=True
    ):
        chance, expected = (counts[0] + 1) / (reached[0] + 1), 1.0
        for place in range(1, guesses + 1):
            chance *= (counts[place] + 0.75) / (reached[place] + 1)
            expected += chance
        tokens += expected * (left > 0)
    total = n * max(drafts) if call["padded"] else sum(drafts)
    plain = call["costs"][0].tolist()
    saved = plain[n - 1] / n
    if n > 1 and not call["padded"]:
        saved = (saved + min(saved, plain[n - 1] - plain[n - 2])) / 2
    return tokens / (n + (float(call["costs"][int(total > 0), n + total - 1]) - plain[n - 1]) / saved)


@given(split=SPLITS)
@settings(max_examples=200)
def test_no_other_split_of_the_rows_is_worth_more(split: tuple[int, int, int, bool]) -> None:
    call = choice(*split)
    rooms = [max(0, min(split[2], left) - 1) for left in call["remaining"].tolist()]
    if not call["remaining"].any():
        return
    chosen = copied(call)
    pd.draft_lengths_(**chosen)
    drafts = tuple((chosen["lengths"] - 1).clamp(min=0).tolist())
    best = max(worth(call, each) for each in itertools.product(*(range(room + 1) for room in rooms)))
    assert worth(call, drafts) == pytest.approx(best, rel=1e-12)
    assert (chosen["lengths"] > 0).tolist() == (call["remaining"] > 0).tolist()


def test_rows_go_to_the_sequence_whose_guesses_are_right() -> None:
    """Eight rows are free, and four sequences share them."""
    call = choice(0, 4, 8, False)
    call["costs"] = torch.cat([torch.ones(8), torch.arange(2.0, 26.0)]).double().expand(2, -1)  # none is wasted
    call["remaining"].fill_(99), call["acceptance_counts"].fill_(100)
    call["acceptance_counts"][1:, 0, 1:] = 1  # hardly anything was right
    pd.draft_lengths_(**call)
    assert call["lengths"].tolist() == [5, 1, 1, 1]


@given(seed=st.integers(0, 2**20), padded=st.booleans(), rate=st.floats(0, 1))
@settings(max_examples=30)
def test_no_batch_loses_more_than_its_budgets(seed: int, padded: bool, rate: float) -> None:
    """Whatever is accepted."""
    call = arguments(seed, 4, 5, padded=padded, max_slowdown=0.005, sequence_cost=0.25, guess_cost=0.05)
    call |= {"ready": torch.ones(4, dtype=torch.bool), "remaining": torch.full((4,), 99)}
    for name in ("lengths", "accepted", "acceptance_counts"):
        call[name].zero_()
    call["budget"].fill_(0.47)
    generator, spent, plain = torch.Generator().manual_seed(seed), 0.0, 0.0
    base = float(call["costs"][0, 3]) + 0.25 * 3
    for _ in range(60):
        pd.draft_lengths_(**call)
        right = torch.rand(4, 5, generator=generator) < rate
        right[:, 0] = True
        call["accepted"] = torch.minimum(right.long().cumprod(1).sum(1), call["lengths"])
        guesses = call["lengths"] - 1
        total = int(4 * guesses.max() if padded else guesses.sum())
        spent += base if total == 0 else float(call["costs"][1, 3 + total]) + 0.25 * 3 + 0.05 * total
        plain += float(call["accepted"].sum()) * base / 4
    assert spent <= plain * 1.005 + 4 * 0.47 * base / 4 + 1e-9


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
        r"acceptance_counts must have shape \(3, 2, 4\), got \(2, 2, 4\)": {
            "acceptance_counts": torch.zeros(2, 2, 4).double()
        },
        r"acceptance_counts must have shape \(batch, 2, slots\), with 1 .. 256 slots, got \(3, 2, 0\)": {
            "acceptance_counts": torch.zeros(3, 2, 0).double()
        },
        r"budget must have shape \(3\), got \(4,\)": {"budget": torch.zeros(4).double()},
        "TypeError: ready must be torch.bool, got torch.int64": {"ready": torch.zeros(3, dtype=torch.int64)},
        r"costs must have shape \(2, rows\), with at least 12 rows, got \(2, 11\)": {
            "costs": torch.zeros(2, 11).double()
        },
        r"prior must be in \[0, 1\], got 2": {"prior": 2.0},
        "warmup_cost must be at least 0, got -1": {"warmup_cost": -1.0},
        "guess_cost must be at least 0, got -1": {"guess_cost": -1.0},
        "sequence_cost must be at least 0, got -1": {"sequence_cost": -1.0},
        "TypeError: padded must be a bool, got int": {"padded": 1},
        r"decay must be in \[0, 1\], got nan": {"decay": float("nan")},
    }.items(),
)
def test_bad_call(text: str, changed: Call) -> None:
    with refused(text):
        pd.draft_lengths_(**{**arguments(1, 3, 4), **changed})


def test_most_sequences(impl: Any) -> None:
    check_equal(impl, arguments(2, 300, 2, padded=True))
    with refused("lengths must have at most 1024 sequences, got 1025"):
        pd.draft_lengths_(**arguments(1, 1025, 1))
