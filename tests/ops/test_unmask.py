"""unmask_ against the plain loops of the reference, against sorting, and by hand. Integers, so always exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.reference.philox import philox4x32
from pdkernels.reference.unmask import random_order
from tests.ops.implementations import NAMES, implementation
from tests.ops.unmask_cases import MASK, RULES, STYLES, Case, Outcome, differs, expected, make_case, run

calls = st.builds(
    make_case,
    st.integers(0, 2**20),
    batch=st.integers(0, 3),
    length=st.sampled_from([0, 1, 2, 5, 12, 40]),
    rule=st.sampled_from(RULES),
    segments=st.sampled_from([None, 0, 1, 3]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)


@given(case=calls, style=st.sampled_from(STYLES))
@settings(max_examples=250)
def test_equals_reference(impl, case: Case, style: str) -> None:
    assert not differs(run(impl, case, style), expected(case))


# --- the rules in another form: whole tensors, sorted ------------------------------------------------------------------------


def by_sorting(case: Case) -> Outcome:
    options, tokens = case.options, case.tokens.clone()
    columns: list[tuple[int, int]] = []
    for b in range(tokens.shape[0]):
        places = torch.tensor(case.positions(b), dtype=torch.int64)
        step = options["step"]
        scores = torch.tensor(
            random_order(
                options["seed"], int(step[b]) if isinstance(step, Tensor) else step, places.clamp(min=0).tolist()
            )
        )
        scores = (scores if case.confidence is None else case.confidence[b]).double()
        for g, (start, end) in enumerate(case.windows(b)):
            number = {
                name: int(x[b].flatten()[g] if isinstance(x := options[name], Tensor) else x)
                for name in ("quota", "min_count")
            }
            open_ = (places >= start) & (places < end) & (case.ids[b] >= 0) & (case.ids[b] != MASK)
            open_[open_.clone()] = tokens[b, places[open_]] == MASK
            sortable = torch.where(scores.isnan(), -torch.inf, scores)
            # Stable sorts, the last one decides: NaN after -inf, ineligible candidates after everything.
            order = sortable.argsort(descending=True, stable=True)
            order = order[scores[order].isnan().to(torch.int8).argsort(stable=True)]
            order = order[open_[order]]
            m, best = len(order), scores[order]
            n = min(number["quota"], m)
            if options.get("threshold") is not None:
                tau = options["threshold"]
                c = int((best > tau if options["strict"] else best >= tau).sum())
                n = c if c >= number["min_count"] else n
            if options.get("factor") is not None:
                holds = best >= 1 - options["factor"] / torch.arange(2, m + 2).double()
                holds[:1] = True
                n = int(holds.cumprod(0).sum())
                n = m if n == m - 1 else n
            tokens[b, places[order[:n]]] = case.ids[b, order[:n]]
            columns.append((n, int((tokens[b, start:end] == MASK).sum())))
    windows = options.get("windows")
    shape = (tokens.shape[0],) if windows is None else windows.shape[:-1]
    committed, remaining = torch.tensor(columns, dtype=torch.int64).reshape(-1, 2).T
    return Outcome(tokens, committed.reshape(shape), remaining.reshape(shape), remaining.reshape(shape) == 0)


@given(case=calls)
@settings(max_examples=150)
def test_equals_sorting(impl, case: Case) -> None:
    assert not differs(run(impl, case), by_sorting(case))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 31, 33, 257, 1024, 2000, 6000])
def test_lengths(impl, rule: str, length: int) -> None:
    """The longest one has more candidates than fit into the shared memory of a block."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.full((1, length), MASK)
        tokens[torch.rand(1, length, generator=generator) < 0.2] = 3
        confidence = torch.rand(1, length, generator=generator) ** 0.01
        options = {"quota": {"quota": length // 3}, "threshold": {"threshold": 0.99}, "factor": {"factor": 4.0}}[rule]
        common = {"mask_token": MASK, "quota": 1, "min_count": 1, "seed": seed, "step": 1, "strict": False}
        case = Case(
            tokens,
            torch.randint(10, 99, (1, length), generator=generator),
            confidence if seed else None,
            common | options,
        )
        assert not differs(run(impl, case), by_sorting(case))


@given(case=calls)
@settings(max_examples=60)
def test_what_a_step_promises(impl, case: Case) -> None:
    after = run(impl, case)
    changed = after.tokens != case.tokens
    for b in range(changed.shape[0]):
        guesses = {p: int(case.ids[b, r]) for r, p in enumerate(case.positions(b))}
        places = changed[b].nonzero().flatten().tolist()
        assert all(case.tokens[b, p] == MASK and after.tokens[b, p] == guesses[p] >= 0 for p in places)
        for g, (start, end) in enumerate(case.windows(b)):
            committed = int(changed[b, start:end].sum())
            assert committed == after.committed[b].flatten()[g]
            assert int((case.tokens[b, start:end] == MASK).sum()) - committed == after.remaining[b].flatten()[g]
        inside = [p for start, end in case.windows(b) for p in range(start, end)]
        assert set(places) <= set(inside)
    assert torch.equal(after.done, after.remaining == 0)


@given(case=calls)
@settings(max_examples=40)
def test_nothing_happens_to_what_is_done(impl, case: Case) -> None:
    case = case.with_(quota=2**62, threshold=None, factor=None, strict=False)
    case.ids.clamp_(min=MASK + 1)
    once = run(impl, case)
    again = run(impl, case._replace(tokens=once.tokens))
    assert torch.equal(again.tokens, once.tokens) and not again.committed.any()


@given(case=calls)
@settings(max_examples=40)
def test_a_batch_equals_its_sequences_alone(impl, case: Case) -> None:
    together = run(impl, case)
    for b in range(case.tokens.shape[0]):
        assert not differs(run(impl, case.sequence(b)), Outcome(*(x[b : b + 1] for x in together)))


@pytest.mark.parametrize("rule", RULES)
def test_result_does_not_depend_on_the_order_of_threads(rule: str) -> None:
    impl = implementation("cudasim")
    for seed, batch, length in ((1, 2, 12), (3, 1, 300)):
        case = make_case(seed, batch=batch, length=length, rule=rule, segments=3)
        for order in impl.schedules():
            with order:
                assert not differs(run(impl, case), expected(case))


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    case, threads = make_case(4, batch=64, length=300, segments=3), torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert not differs(run(implementation("cpu"), case), expected(case))
    finally:
        torch.set_num_threads(threads)


# --- by hand ---------------------------------------------------------------------------------------------------------------------


def step(impl, confidence: list[float] | None, canvas: str = "", **options: object) -> str:
    """Commits into `canvas` (_ is a mask; None: nothing but masks) guesses 10, 11, ..; x marks what was committed."""
    canvas = canvas or "_" * len(confidence or [])
    tokens = torch.tensor([[MASK if mark == "_" else 0 for mark in canvas]])
    scores = None if confidence is None else torch.tensor([confidence], dtype=torch.float32)
    result = run(impl, Case(tokens, 10 + torch.arange(len(canvas))[None], scores, {"mask_token": MASK, **options}))
    new = result.tokens[0].tolist()
    assert all(token in (0, MASK, 10 + p) for p, token in enumerate(new))
    return "".join("_" if token == MASK else "." if token == 0 else "x" for token in new)


@pytest.mark.parametrize(
    "confidence, options, after",
    [
        ([0.9, 0.4, 0.95, 0.8], {"quota": 2}, "x_x_"),
        ([0.5] * 4, {"quota": 2}, "xx__"),  # ties: the lower index
        ([0.0, -0.0, 0.0], {"quota": 2}, "xx_"),  # both zeros are equal
        ([math.nan, -math.inf, 0.1], {"quota": 2}, "_xx"),  # NaN last
        ([math.nan, math.nan], {"quota": 1}, "x_"),
        ([0.1, 0.2], {"quota": 0}, "__"),
        ([0.1, 0.2], {"quota": 2**62}, "xx"),
        ([0.9, 0.95, 0.3], {"threshold": 0.5}, "xx_"),
        ([0.2, 0.3, 0.1], {"threshold": 0.5}, "_x_"),  # none passes: the best quota
        ([0.2, 0.3, 0.1], {"threshold": 0.5, "quota": 2}, "xx_"),
        ([0.6, 0.3, 0.1], {"threshold": 0.5, "quota": 2, "min_count": 2}, "xx_"),  # not enough pass
        ([0.6, 0.7, 0.8], {"threshold": 0.5, "quota": 2, "min_count": 2}, "xxx"),
        ([0.2, 0.3], {"threshold": 0.5, "min_count": 0}, "__"),
        ([0.5, 0.75], {"threshold": 0.5, "min_count": 0}, "xx"),
        ([0.5, 0.75], {"threshold": 0.5, "min_count": 0, "strict": True}, "_x"),
        ([0.9, 0.95], {"threshold": 0.9, "min_count": 0}, "_x"),  # 0.9 in float32 is less than 0.9
        ([math.nan, -math.inf], {"threshold": -math.inf, "min_count": 0}, "_x"),
        ([math.inf, 3e38], {"threshold": math.inf, "min_count": 0}, "x_"),
        ([math.inf, 3e38], {"threshold": math.inf, "min_count": 0, "strict": True}, "__"),
        ([0.99, 0.01], {"factor": 1.0}, "xx"),  # a failure at the last rank does not count
        ([0.01], {"factor": 1.0}, "x"),
        ([0.01, 0.02], {"factor": 0.0}, "xx"),
        ([0.99, 0.01, 0.01], {"factor": 1.0}, "x__"),
        ([0.99, 0.7, 0.74], {"factor": 1.0}, "xxx"),  # ranks 2 and 3 need 2/3 and 3/4: the failure is at the last one
        ([0.99, 0.7, 0.74, 0.74], {"factor": 1.0}, "x_x_"),
        ([0.99, 0.7, 0.76, 0.8], {"factor": 1.0}, "xxxx"),
        ([0.1, math.nan, 0.1], {"factor": 30.0}, "xxx"),  # bounds below 0, which NaN fails at the last rank
        ([math.nan, 0.1, math.nan], {"factor": 30.0}, "_x_"),
    ],
)
def test_hand_made(impl, confidence: list[float], options: dict[str, object], after: str) -> None:
    assert step(impl, confidence, **options) == after


def test_only_masks_in_the_window_are_written(impl) -> None:
    confidence = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert step(impl, confidence, "_.__._", windows=torch.tensor([[1, 5]]), quota=9) == "_.xx._"
    assert step(impl, confidence, "......", quota=9) == "......"
    assert (
        step(
            impl,
            confidence,
            "______",
            windows=torch.tensor([[[4, 6], [2, 2], [0, 3]]]),
            quota=torch.tensor([[1, 5, 2]]),
        )
        == "_xx__x"
    )
    assert step(impl, confidence, "______", windows=torch.tensor([[3, 3]]), quota=9) == "______"


def test_sequences_at_different_positions(impl) -> None:
    """Half-filled canvases, each with its own window, quota and candidates."""
    tokens = torch.full((3, 6), MASK)
    tokens[1, :3], tokens[2] = 1, 2
    positions = torch.tensor([[5, 0, -1, 2], [4, 3, 0, 5], [0, 1, 2, 3]])
    confidence = torch.tensor([[0.9, 0.3, 0.99, 0.5], [0.2, 0.8, 0.9, 0.7], [0.5, 0.5, 0.5, 0.5]])
    options = {
        "mask_token": MASK,
        "positions": positions,
        "windows": torch.tensor([[0, 3], [3, 6], [0, 6]]),
        "quota": torch.tensor([1, 2, 4]),
    }
    after = run(impl, Case(tokens, 10 + positions.clamp(min=0), confidence, options))
    assert after.tokens.tolist() == [[7, 7, 12, 7, 7, 7], [1, 1, 1, 13, 7, 15], [2] * 6]
    assert (after.committed.tolist(), after.remaining.tolist(), after.done.tolist()) == (
        [1, 2, 0],
        [2, 1, 0],
        [False, False, True],
    )


def test_empty(impl) -> None:
    for batch, length, segments in ((0, 5, None), (2, 0, None), (2, 0, 2), (2, 5, 0)):
        windows = None if segments is None else torch.zeros(batch, segments, 2, dtype=torch.int64)
        case = Case(
            torch.full((batch, length), MASK),
            torch.full((batch, length), 3),
            None,
            {"mask_token": MASK, "windows": windows},
        )
        assert not differs(run(impl, case), expected(case))
    none = Case(
        torch.full((2, 3), MASK),
        torch.zeros(2, 0, dtype=torch.int64),
        None,
        {"mask_token": MASK, "positions": torch.zeros(2, 0, dtype=torch.int64)},
    )
    assert run(impl, none).remaining.tolist() == [3, 3]


# --- random order ------------------------------------------------------------------------------------------------------------------


def test_random_order_is_that_of_philox_words(impl) -> None:
    seed, moment, length = 2**40 + 5, 3, 50
    counters = torch.tensor([[0, p, moment, 2] for p in range(length)])
    words = philox4x32(counters, torch.tensor([5, 2**8]))[:, 0]
    wanted = set(words.argsort(descending=True)[:7].tolist())
    marks = step(impl, None, "_" * length, quota=7, seed=seed, step=moment)
    assert {p for p, mark in enumerate(marks) if mark == "x"} == wanted
    assert step(impl, None, "_" * length, quota=7, seed=seed, step=torch.tensor([moment], dtype=torch.int32)) == marks
    assert step(impl, None, "_" * length, quota=7, seed=seed, step=moment + 1) != marks


def test_random_order_depends_on_the_position_not_on_the_candidate(impl) -> None:
    positions = torch.tensor([[9, 2, 5, 0]])
    tokens = torch.full((1, 10), MASK)
    options = {"mask_token": MASK, "positions": positions, "quota": 2, "seed": 1, "step": 4}
    after = run(impl, Case(tokens, 10 + positions, None, options))
    turned = run(impl, Case(tokens, 10 + positions.flip(1), None, {**options, "positions": positions.flip(1)}))
    assert torch.equal(after.tokens, turned.tokens) and int(after.committed) == 2


def test_random_orders_of_sequences(impl) -> None:
    """A sequence has the order of its seed alone."""
    seeds, tokens = torch.tensor([9, -2, 2**40]), torch.full((3, 20), MASK)
    options = {"mask_token": MASK, "quota": 6, "step": 4}
    together = run(impl, Case(tokens, torch.zeros_like(tokens), None, {**options, "seed": seeds})).tokens
    for b in range(3):
        one = Case(tokens[:1], torch.zeros_like(tokens[:1]), None, {**options, "seed": int(seeds[b])})
        assert torch.equal(run(impl, one).tokens[0], together[b])
    assert len({tuple(row) for row in together.tolist()}) == 3


def test_random_order_is_uniform() -> None:
    """Which 2 of 6 positions: 15 pairs, chi-square with 14 degrees of freedom, 36.1 at 0.001."""
    trials, length = 6000, 6
    tokens = torch.full((trials, length), MASK)
    pd.unmask_(tokens, torch.zeros_like(tokens), mask_token=MASK, quota=2, step=torch.arange(trials))
    pairs = ((tokens == 0).long() * 2 ** torch.arange(length)).sum(1).unique(return_counts=True)[1].double()
    assert len(pairs) == 15
    assert float(((pairs - trials / 15) ** 2 / (trials / 15)).sum()) < 36.1


def test_random_order_with_a_threshold_is_a_coin_for_each_position() -> None:
    trials, length, p = 500, 40, 0.3
    tokens = torch.full((trials, length), MASK)
    committed = pd.unmask_(
        tokens, torch.zeros_like(tokens), mask_token=MASK, threshold=1 - p, min_count=0, step=torch.arange(trials)
    ).committed
    mean, spread = length * p, math.sqrt(length * p * (1 - p))
    assert abs(committed.double().mean() - mean) < 4 * spread / math.sqrt(trials)
    assert abs(committed.double().std() - spread) < 0.15 * spread


# --- torch integration -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_opcheck() -> None:
    for seed, (rule, segments) in enumerate([("quota", None), ("threshold", 3), ("factor", 0)]):
        case = make_case(seed, rule=rule, segments=segments)
        for device in [name for name in NAMES if name != "cudasim"]:
            options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in case.options.items()}
            numbers = {
                name: (0, x) if isinstance(x := options.get(name, 0), Tensor) else (x, None)
                for name in ("quota", "min_count", "step")
            }
            rule_options = (
                *numbers["quota"],
                options.get("threshold"),
                *numbers["min_count"],
                options.get("factor"),
                options.get("strict", False),
            )
            tensors = (
                case.tokens.to(device),
                case.ids.to(device),
                None if case.confidence is None else case.confidence.to(device),
            )
            arguments = (
                *tensors,
                MASK,
                options.get("positions"),
                options.get("windows"),
                *rule_options,
                options["seed"],
                torch.tensor([options["seed"]] * len(case.tokens), device=device),
                *numbers["step"],
            )
            torch.library.opcheck(torch.ops.pdkernels.unmask_.default, arguments)


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def body(tokens: Tensor, ids: Tensor, confidence: Tensor, min_count: Tensor, quota: int, moment: int) -> Tensor:
        result = pd.unmask_(
            tokens, ids, confidence, mask_token=MASK, threshold=0.5, min_count=min_count, quota=quota, step=moment
        )
        return result.remaining + result.committed

    compiled = torch.compile(body, fullgraph=True, dynamic=True, backend=counter)
    for moment, (batch, length, quota) in enumerate([(2, 4, 3), (3, 5, 2), (2, 9, 0), (4, 7, 5)], 2):
        tokens, confidence = torch.full((batch, length), MASK), torch.rand(batch, length)
        rest, mine = (
            (torch.randint(10, 99, (batch, length)), confidence, torch.arange(batch), quota, moment),
            tokens.clone(),
        )
        assert torch.equal(compiled(tokens, *rest), body(mine, *rest)) and torch.equal(tokens, mine)
    assert counter.frame_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_capture_and_replay_with_changed_data() -> None:
    tokens, confidence = torch.full((2, 40), MASK, device="cuda"), torch.rand(2, 40, device="cuda")
    ids, moment = torch.randint(10, 99, (2, 40), device="cuda"), torch.tensor([1, 1], device="cuda")
    options = {"mask_token": MASK, "quota": 3, "threshold": 0.9, "step": moment}
    pd.unmask_(tokens.clone(), ids, confidence, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = pd.unmask_(tokens, ids, confidence, **options)
    for _ in range(5):
        confidence.uniform_()
        wanted = expected(
            Case(
                tokens.cpu(),
                ids.cpu(),
                confidence.cpu(),
                {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()},
            )
        )
        graph.replay()
        assert not differs(Outcome(*(x.cpu() for x in (tokens, *result))), wanted)
