"""recurrence_advance_: which rows freeze, how a wave advances, when a sequence ends. Integers, so always exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.reference import recurrence as reference
from tests.ops.implementations import NAMES, implementation
from tests.ops.recurrence_cases import AdvanceCase, Wave, make_advance

calls = st.builds(
    make_advance,
    st.integers(0, 2**20),
    batch=st.integers(0, 3),
    capacity=st.sampled_from([0, 1, 2, 5, 6, 40, 200]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)


def run(impl, case: AdvanceCase) -> Wave:
    wave, options = case.moved(impl.device)
    impl.recurrence_advance_(*wave, **options)
    return wave.to(torch.device("cpu"))


def equal(a: Wave, b: Wave) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b))


def expected(case: AdvanceCase) -> Wave:
    wave = case.wave.clone()
    options = {**case.options, "max_wavefront": case.options["max_wavefront"] or 0}
    reference.recurrence_advance_(*wave, **options)
    return wave


@given(case=calls)
@settings(max_examples=300)
def test_equals_reference(impl, case: AdvanceCase) -> None:
    actual, wanted = run(impl, case), expected(case)
    for name, a, b in zip(Wave._fields, actual, wanted):
        assert torch.equal(a, b), f"{name}: {a} instead of {b}"


# --- a second implementation, from the rules alone
# -------------------------------------------------------------------------------


class Sequence:
    """One sequence as its text and the rows after it: what a sampler without buffers would keep."""

    def __init__(self, case: AdvanceCase, b: int) -> None:
        wave, self.options = case
        self.width, self.budget = int(wave.width[b]), int(wave.remaining[b])
        self.rows = [
            {
                "input": int(wave.tokens[b, i]),
                "before": int(wave.tokens[b, i + 1]),
                "prediction": int(wave.predictions[b, i]),
                "count": int(wave.recurrences[b, i]),
                "unchanged_steps": int(wave.unchanged_steps[b, i]),
            }
            for i in range(self.width)
        ]
        converged = case.options["converged"]
        for i, row in enumerate(self.rows):
            row["converged"] = converged is not None and bool(converged[b, i])
        filler = case.options["filler"]
        self.filler = [0] * (case.options["headway"] - 1) if filler is None else filler[b].tolist()
        ends = case.options["end_tokens"]
        self.ends = [] if ends is None else ends.tolist()

    def step(self) -> tuple[list[int], list[dict[str, int]]]:
        """The text that was added, and the rows of the next step: none if the sequence has finished."""
        options = self.options
        ready = set()
        for i, row in enumerate(self.rows):
            known = row["count"] > 0
            row["count"] += options["inner_recurrence"]
            row["unchanged_steps"] = row["unchanged_steps"] + 1 if known and row["prediction"] == row["before"] else 0
            limit, patience = options["max_recurrences"], options["stability"]
            if (
                row["converged"]
                or (limit and row["count"] >= limit)
                or (patience and row["unchanged_steps"] >= patience)
            ):
                ready.add(i)
        everything = set(range(len(self.rows)))
        if options["rule"] == "prefix":
            freeze = min(everything - ready, default=len(self.rows))
        else:
            freeze = max(ready, default=-1) + 1
        if options["keep_changed"]:
            stale = {i for i in everything - {0} if self.rows[i - 1]["prediction"] != self.rows[i]["input"]}
            freeze = min([freeze, *stale])
        if options["keep_last"] and freeze:
            freeze -= 1
        text = [row["prediction"] for row in self.rows[: min(freeze, self.budget)]]
        for place, token in enumerate(text):
            if token in self.ends:
                return text[: place + 1], []
        left = self.budget - len(text)
        if left == 0:
            return text, []
        # The chain of tokens: each row's input is the prediction of the row before it.
        chain = [self.rows[0]["input"], *(row["prediction"] for row in self.rows)]
        rows = [{**row, "input": token} for row, token in zip(self.rows, chain)][len(text) :]
        joining = [chain[-1], *self.filler]
        rows += [{"input": token, "count": 0, "unchanged_steps": 0} for token in joining]
        return text, rows[: min(options["max_wavefront"] or 10**9, left)]


@given(case=calls)
@settings(max_examples=200)
def test_is_what_the_rules_say(impl, case: AdvanceCase) -> None:
    room = case.wave.recurrences.shape[1]
    case.options["max_wavefront"] = case.options["max_wavefront"] or (room or None)
    after = run(impl, case)
    for b in range(case.wave.width.shape[0]):
        old = int(case.wave.width[b])
        if old == 0:
            continue
        text, rows = Sequence(case, b).step()
        assert int(after.advance[b]) == len(text) and int(after.width[b]) == len(rows)
        assert int(after.cursor[b]) == int(case.wave.cursor[b]) + len(text)
        assert int(after.remaining[b]) == int(case.wave.remaining[b]) - len(text)
        assert int(after.steps[b]) == int(case.wave.steps[b]) + 1
        assert after.tokens[b, : len(rows)].tolist() == [row["input"] for row in rows]
        if rows:
            padding = [0] * (room - len(rows))
            assert after.recurrences[b].tolist() == [row["count"] for row in rows] + padding
            assert after.unchanged_steps[b].tolist() == [row["unchanged_steps"] for row in rows] + padding


# --- by hand -------------------------------------------------------------------------------------------------------------------


def settle(impl, pattern: str, **options: object) -> tuple[Wave, Wave]:
    """A wave whose rows are converged where `pattern` has an x, every input as predicted; before and after."""
    w, room = len(pattern), len(pattern) + 3
    text = torch.arange(100, 101 + room)
    wave = Wave(
        text[None].clone(),
        text[None, 1 : w + 1].clone(),
        torch.full((1, room), 4),
        torch.zeros(1, room, dtype=torch.int64),
        *(torch.tensor([n]) for n in (w, 50, 0, 7, 1000)),
    )
    converged = torch.tensor([[mark == "x" for mark in pattern]])
    return wave, run(impl, AdvanceCase(wave, {"converged": converged, "inner_recurrence": 4, **options}))


@pytest.mark.parametrize(
    "pattern, prefix, last",
    [
        ("x.x", 1, 3),
        ("xxx", 3, 3),
        ("...", 0, 0),
        (".xx", 0, 3),
        ("xx.", 2, 2),
        ("x", 1, 1),
        (".", 0, 0),
        ("x..x.", 1, 4),
    ],
)
def test_prefix_and_last(impl, pattern: str, prefix: int, last: int) -> None:
    for rule, frozen in (("prefix", prefix), ("last", last)):
        _, after = settle(impl, pattern, rule=rule)
        w = len(pattern)
        assert (after.advance.item(), after.cursor.item(), after.width.item()) == (frozen, 50 + frozen, w - frozen + 1)
        assert after.tokens[0, : w - frozen + 1].tolist() == list(range(100 + frozen, 101 + w))
        assert after.recurrences[0].tolist() == [8] * (w - frozen) + [0] * (3 + frozen)
        kept = settle(impl, pattern, rule=rule, keep_last=True)[1]
        assert kept.advance.item() == max(frozen - 1, 0)


def test_guard_stops_at_the_first_changed_input(impl) -> None:
    before, _ = settle(impl, "xxxx")
    before.predictions[0, 1] = 7  # row 2's input becomes 7: rows 2 and 3 of the cache belong to 102 and 103
    options = {"converged": torch.ones(1, 4, dtype=torch.bool), "inner_recurrence": 4}
    after = run(impl, AdvanceCase(before, options))
    assert after.advance.item() == 2 and after.tokens[0, :3].tolist() == [7, 103, 104]
    assert run(impl, AdvanceCase(before, {**options, "keep_changed": False})).advance.item() == 4


def test_filler_rows_never_freeze_after_a_wrong_guess(impl) -> None:
    _, after = settle(impl, "x.", headway=4, filler=torch.tensor([[1, 2, 3]]))
    assert after.width.item() == 5 and after.tokens[0, :5].tolist() == [101, 102, 1, 2, 3]
    predictions = torch.tensor([[102, 103, 104, 105, 106]])
    everything = {"converged": torch.ones(1, 5, dtype=torch.bool), "inner_recurrence": 4}
    after = run(impl, AdvanceCase(after._replace(predictions=predictions), everything))
    assert after.advance.item() == 2 and after.tokens[0, :3].tolist() == [103, 104, 105]


def test_headway_is_capped_by_the_wavefront_and_what_remains(impl) -> None:
    assert settle(impl, "x..", headway=3, max_wavefront=4)[1].width.item() == 4
    before, _ = settle(impl, "x..")
    before.remaining[0] = 2
    options = {"converged": torch.tensor([[True, False, False]]), "inner_recurrence": 4}
    after = run(impl, AdvanceCase(before, options))
    assert (after.width.item(), after.remaining.item()) == (1, 1)
    assert after.recurrences[0].tolist() == [8, 0, 0, 0, 0, 0]


def test_a_wave_that_cannot_grow_keeps_its_width(impl) -> None:
    _, after = settle(impl, "...", max_wavefront=3)
    assert after.width.item() == 3 and after.advance.item() == 0
    assert after.tokens[0, :4].tolist() == [100, 101, 102, 103]


@pytest.mark.parametrize(
    "end, remaining, frozen, text",
    [
        (102, 99, 2, [101, 102]),
        (101, 99, 1, [101]),
        (77, 2, 2, [101, 102]),
        (103, 2, 2, [101, 102]),
        (105, 99, 3, None),
    ],
)
def test_the_end(impl, end: int, remaining: int, frozen: int, text: list[int] | None) -> None:
    before, _ = settle(impl, "xxx.")
    before.remaining[0] = remaining
    options = dict(
        converged=torch.tensor([[True, True, True, False]]), inner_recurrence=4, end_tokens=torch.tensor([55, end])
    )
    after = run(impl, AdvanceCase(before, options))
    assert after.advance.item() == frozen and after.remaining.item() == remaining - frozen
    assert (after.width.item() == 0) == (text is not None)
    if text is not None:
        assert before.predictions[0, :frozen].tolist() == text
        again = run(impl, AdvanceCase(after._replace(predictions=before.predictions), options))
        assert equal(again, after._replace(predictions=before.predictions, advance=torch.tensor([0]))), (
            "a finished sequence stays"
        )


def test_stability_and_the_limit(impl) -> None:
    """A new row has nothing to agree with; a row that agrees often enough freezes, and so does one that reached the limit."""
    before, _ = settle(impl, "..")
    before.recurrences[0, :2] = torch.tensor([4, 0])
    wave, widths = before, []
    for _ in range(3):
        predictions = torch.tensor([[101, 102, 103, 104, 105]])[:, : int(wave.width)] + int(wave.cursor) - 50
        wave = run(impl, AdvanceCase(wave._replace(predictions=predictions), {"inner_recurrence": 4, "stability": 2}))
        widths.append((wave.advance.item(), wave.unchanged_steps[0, :3].tolist()))
    assert widths == [(0, [1, 0, 0]), (1, [1, 0, 0]), (1, [1, 0, 0])]
    assert settle(impl, "...", max_recurrences=8)[1].advance.item() == 3
    assert settle(impl, "...", max_recurrences=9)[1].advance.item() == 0


def test_a_wavefront_of_one_is_autoregression(impl) -> None:
    """With max_recurrences = inner_recurrence a token a step, whatever has converged."""
    wave = Wave(
        torch.tensor([[5, 0]]),
        torch.tensor([[6]]),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(1, 1, dtype=torch.int64),
        *(torch.tensor([n]) for n in (1, 3, 0, 0, 4)),
    )
    text = []
    for token in (6, 7, 8, 9):
        wave = run(
            impl,
            AdvanceCase(
                wave._replace(predictions=torch.tensor([[token]])), {"inner_recurrence": 32, "max_recurrences": 32}
            ),
        )
        assert wave.advance.item() == 1
        text.append(int(wave.tokens[0, 0]))
    assert text[:3] == [6, 7, 8] and wave.width.item() == 0 and wave.cursor.item() == 7


def test_many_steps_keep_states_and_positions_together(impl) -> None:
    """The data of a position are at row i + advance, step after step, where the published code is misaligned."""
    generator = torch.Generator().manual_seed(0)
    room, target = 8, torch.arange(1000, 1100)
    tokens = torch.zeros(1, room + 1, dtype=torch.int64)
    tokens[0, 0] = target[0]
    zeros = torch.zeros(1, room, dtype=torch.int64)
    wave = Wave(tokens, zeros, zeros.clone(), zeros.clone(), *(torch.tensor([n]) for n in (1, 0, 0, 0, 60)))
    last: list[int] = []
    for _ in range(200):
        w, cursor, advance = (int(x) for x in (wave.width, wave.cursor, wave.advance))
        if w == 0:
            break
        here = [cursor + i for i in range(w)]
        old = [i for i in range(w) if wave.recurrences[0, i] > 0]
        assert all(last[i + advance] == here[i] for i in old), "a row was taken for its neighbour"
        predictions = torch.zeros(1, room, dtype=torch.int64)
        predictions[0, :w] = target[torch.tensor(here) + 1]
        converged = torch.rand(1, room, generator=generator) < 0.6
        wave = run(
            impl,
            AdvanceCase(
                wave._replace(predictions=predictions), {"converged": converged, "inner_recurrence": 4, "rule": "last"}
            ),
        )
        last = here
    assert int(wave.cursor) == 60 and int(wave.width) == 0


# --- memory and order ----------------------------------------------------------------------------------------------------------


@given(case=calls)
@settings(max_examples=60)
def test_strides_and_bytes_outside(impl, case: AdvanceCase) -> None:
    """Tensors inside larger ones: the same results, and nothing around them changes."""
    rooms = [torch.full((*(3 * n + 4 for n in x.shape),), -7, dtype=x.dtype, device=impl.device) for x in case.wave]
    places = [room[tuple(slice(2, 3 * n + 2, 3) for n in x.shape)] for room, x in zip(rooms, case.wave)]
    for place, x in zip(places, case.wave):
        place.copy_(x)
    impl.recurrence_advance_(*places, **case.moved(impl.device).options)
    assert equal(Wave(*(place.cpu() for place in places)), expected(case))
    for room, place in zip(rooms, places):
        place.fill_(-7)
        assert (room == -7).all()


@given(case=calls)
@settings(max_examples=40)
def test_a_batch_equals_its_sequences_alone(impl, case: AdvanceCase) -> None:
    together = run(impl, case)
    for b in range(case.wave.width.shape[0]):
        options = {
            name: x[b : b + 1] if isinstance(x, Tensor) and name != "end_tokens" else x
            for name, x in case.options.items()
        }
        alone = run(impl, AdvanceCase(Wave(*(x[b : b + 1].clone() for x in case.wave)), options))
        assert equal(alone, Wave(*(x[b : b + 1] for x in together)))


@given(case=calls)
@settings(max_examples=15)
def test_result_does_not_depend_on_the_order_of_threads(case: AdvanceCase) -> None:
    impl = implementation("cudasim")
    for order in impl.schedules():
        with order:
            assert equal(run(impl, case), expected(case))


@pytest.mark.parametrize("name, value", [("width", 7), ("width", -1), ("remaining", -1), ("cursor", -1)])
def test_a_bad_sequence_is_left_alone_on_cuda(device_impl, name: str, value: int) -> None:
    case = make_advance(3, batch=3, capacity=6)
    wanted = expected(case)
    getattr(case.wave, name)[1] = value
    after = run(device_impl, case)
    for a, b, c in zip(after, wanted, case.wave):
        assert torch.equal(a[0], b[0]) and torch.equal(a[2], b[2]) and torch.equal(a[1], c[1])


# --- torch integration ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_opcheck() -> None:
    for device in [name for name in NAMES if name != "cudasim"]:
        wave, options = make_advance(5).moved(torch.device(device))
        options["max_wavefront"] = options["max_wavefront"] or 0
        torch.library.opcheck(torch.ops.pdkernels.recurrence_advance_.default, tuple(wave), options)


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(wave: Wave, converged: Tensor) -> Tensor:
        pd.recurrence_advance_(*wave, converged=converged, inner_recurrence=4)
        return wave.cursor + wave.advance

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for seed, (batch, room) in enumerate([(2, 4), (3, 5), (2, 9), (4, 7)]):
        wave = make_advance(seed, batch=batch, capacity=room).wave
        predictions = wave.tokens[:, 1:].clone()
        wave = wave._replace(predictions=predictions, width=torch.full((batch,), 3), remaining=torch.full((batch,), 50))
        converged, mine = torch.rand(batch, room) < 0.7, wave.clone()
        assert torch.equal(compiled(wave, converged), step(mine, converged)) and equal(wave, mine)
    assert counter.frame_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_capture_and_replay() -> None:
    wave = make_advance(1, batch=2, capacity=6).wave.to(torch.device("cuda"))
    converged, mine = torch.ones(2, wave.predictions.shape[1], dtype=torch.bool, device="cuda"), wave.clone()
    pd.recurrence_advance_(*wave.clone(), converged=converged, inner_recurrence=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pd.recurrence_advance_(*wave, converged=converged, inner_recurrence=4)
    for _ in range(3):
        graph.replay()
        pd.recurrence_advance_(*mine, converged=converged, inner_recurrence=4)
        assert equal(wave, mine)
