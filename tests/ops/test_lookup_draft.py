"""lookup_draft_ against the plain lists of the reference, and against torch ops: integers, so always exactly."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from bench.bench_lookup_draft import REACH, searched
from pdkernels.ops import library as _library
from pdkernels.reference.lookup_draft import lookup_draft_ as reference
from tests.ops.implementations import NAMES, implementation
from tests.support.errors import refused

Call = dict[str, torch.Tensor | int]
WRITTEN = ("draft", "draft_lengths", "tokens")


def arguments(seed: int, batch: int, slots: int, width: int, vocabulary: int = 3) -> Call:
    """Texts of few different tokens, so that they repeat themselves, with a separator here and there."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    # As in a decoder, lengths are a column of a larger tensor and drafts lie apart.
    state = torch.full((batch, slots + 3), -9)
    draft, lengths = state[:, 1 : slots + 1], state[:, -1]
    draft.copy_(torch.randint(0, vocabulary, draft.shape, generator=generator))
    lengths.copy_(torch.tensor([rng.randint(0, slots) for _ in range(batch)], dtype=torch.int64))
    tokens = torch.randint(0, vocabulary, (batch, width), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < rng.choice([0.0, 0.05, 0.2])] = -1
    start = rng.choice([0, rng.randrange(width)])
    ends = torch.tensor([rng.choice([start, width - 1, rng.randrange(start, width)]) for _ in range(batch)])
    return {"draft": draft, "draft_lengths": lengths, "tokens": tokens, "ends": ends.long(), "start": start}


@st.composite
def calls(draw: st.DrawFn) -> Call:
    call = arguments(
        draw(st.integers(0, 2**20)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([1, 2, 3, 9, 40, 300])),
        draw(st.sampled_from([1, 2, 7, 33, 70, 300])),
        draw(st.sampled_from([1, 2, 3, 9])),
    )
    if draw(st.booleans()):
        call |= {"max_match": draw(st.sampled_from([1, 3, 8, 2**62])), "min_match": draw(st.integers(1, 4))}
        call["growth"] = draw(st.sampled_from([1, 2, 2**62]))
    if draw(st.booleans()):
        call["ends"] = call["ends"].int()
    return call


def on(device: torch.device, call: Call) -> Call:
    """A copy with the same strides."""

    def copied(x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return result.copy_(x)

    return {name: copied(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()}


def check_equal(impl, call: Call) -> Call:
    expected, actual = on(torch.device("cpu"), call), on(impl.device, call)
    reference(**expected)
    impl.lookup_draft_(**actual)
    for name in WRITTEN:
        assert torch.equal(actual[name].cpu(), expected[name]), f"{name}: {actual[name]} instead of {expected[name]}"
    return expected


@given(call=calls())
@example(call=arguments(3, 2, 9, 2000, 2))
@settings(max_examples=60)
def test_equals_the_reference(impl, call: Call) -> None:
    check_equal(impl, call)


@given(call=calls())
@settings(max_examples=10)
def test_result_does_not_depend_on_the_order_of_threads(call: Call) -> None:
    impl = implementation("cudasim")
    for order in impl.schedules():
        with order:
            check_equal(impl, call)


@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=3),
    pool=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=6),
    slots=st.integers(6, 18),
    most=st.integers(1, 6),
)
@settings(max_examples=40)
def test_equals_torch_ops(impl, texts: list[list[int]], pool: list[list[int]], slots: int, most: int) -> None:
    """On the memory of a decoder: earlier texts of one length, then the text, behind which rejected tokens are left."""
    start = REACH - 1 + len(pool) * 8
    tokens = torch.full((len(texts), start + 31), -1)
    for number, entry in enumerate(pool):
        tokens[:, REACH - 1 + 8 * number :][:, : len(entry)] = torch.tensor(entry)
    tokens[:, start:] = 3
    for row, text in zip(tokens, texts):
        row[start : start + len(text)] = torch.tensor(text)
    stops = start + torch.tensor([len(text) for text in texts])
    guesses, found = searched(
        tokens, start, stops, torch.arange(REACH, tokens.shape[1]), torch.arange(slots - 1), torch.arange(-REACH, 0)
    )
    known = tokens.gather(1, stops[:, None] - 1)
    call: Call = {
        "draft": torch.cat([known, torch.full((len(texts), slots - 1), -9)], 1),
        "draft_lengths": torch.full((len(texts),), most),
        "tokens": tokens.scatter(1, stops[:, None] - 1, 7),  # the known token is not there yet
        "ends": stops - 1,
        "start": start,
    }
    call = on(impl.device, call)
    impl.lookup_draft_(**call)
    assert torch.equal(call["tokens"].cpu(), tokens)
    assert torch.equal(call["draft_lengths"].cpu(), (1 + found).clamp(max=most))
    there = torch.arange(slots - 1) < found[:, None]
    assert torch.equal(call["draft"].cpu(), torch.cat([known, torch.where(there, guesses, 0)], 1))


@pytest.mark.parametrize(
    "before, text, options, guesses",
    [
        ([], [1, 2, 3, 1, 2], {}, [3, 1, 2, 3, 1, 2]),  # continues with itself, three tokens for each that matched
        ([], [1, 2, 3, 1, 2], {"growth": 1}, [3, 1]),
        ([], [1, 2, 3, 1, 2], {"min_match": 3}, []),
        (
            [],
            [1, 2, 3, 1, 2],
            {"max_match": 2},
            [3, 1, 2, 3, 1, 2, 3, 1],
        ),  # a match of all that is compared fills the draft
        ([], [4, 4, 4], {}, [4, 4, 4, 4, 4, 4]),
        ([], [1, 2, 3], {}, []),
        ([], [7], {"min_match": 1}, []),
        ([7, 1, 2, 4], [7, 1, 2], {}, [4]),  # another text ends the draft
        ([7, 1, 2], [7, 1, 2], {}, []),  # nothing follows there
        ([9, 1, 2, 5, -1, 9, 1, 2, 6], [9, 1, 2], {}, [6]),  # the newer
        ([3, 1, 2, 5, 5], [1, 2, 6, 1, 2], {}, [6, 1, 2, 6, 1, 2]),  # the text before the others
        ([8, 1, 2, 5], [1, 2, 6, 8, 1, 2], {}, [5]),  # the longest before the text
        ([1], [2, 3, 1, 2], {}, []),  # no match crosses the start
        ([5, 1, 2, 3], [9, 1, 2, -1, 5, 1, 2], {}, [3]),  # a separator in a text
        ([], [2, -1, 2, -1], {"min_match": 1}, []),
    ],
)
def test_hand_made(impl, before: list[int], text: list[int], options: dict[str, int], guesses: list[int]) -> None:
    call: Call = {
        "draft": torch.tensor([[text[-1], *[-5] * 8]]),
        "draft_lengths": torch.tensor([9]),
        "tokens": torch.tensor([[*before, *text[:-1], -7, 1]]),
        "ends": torch.tensor([len(before) + len(text) - 1]),
        "start": len(before),
        **options,
    }
    found = check_equal(impl, call)
    assert found["draft"].tolist() == [[text[-1], *guesses, *[0] * (8 - len(guesses))]]
    assert found["draft_lengths"].item() == 1 + len(guesses)
    assert found["tokens"].tolist() == [[*before, *text, 1]]


def test_an_inactive_sequence_is_left_alone(impl) -> None:
    call = arguments(5, 3, 6, 30)
    call["draft_lengths"][1] = 0
    call["ends"][1] = -(2**40)
    found = on(impl.device, call)
    impl.lookup_draft_(**found)
    assert all(torch.equal(found[name][1].cpu(), call[name][1]) for name in WRITTEN)


@given(call=calls())
@settings(max_examples=15)
def test_a_batch_equals_its_sequences_alone(impl, call: Call) -> None:
    together = on(impl.device, call)
    impl.lookup_draft_(**together)
    for b in range(len(call["ends"])):
        alone = on(impl.device, {name: x[b : b + 1] if isinstance(x, torch.Tensor) else x for name, x in call.items()})
        impl.lookup_draft_(**alone)
        assert all(torch.equal(alone[name][0], together[name][b]) for name in WRITTEN)


def test_extreme_tokens(impl) -> None:
    low, high = -(2**63), 2**63 - 1
    call = {
        "draft": torch.tensor([[high, 0, 0, 0]]),
        "draft_lengths": torch.tensor([4]),
        "tokens": torch.tensor([[low, high, -2, low, 0]]),
        "ends": torch.tensor([4]),
    }
    assert check_equal(impl, call)["draft"].tolist() == [[high, -2, low, high]]


# --- torch integration -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_opcheck() -> None:
    for device in [name for name in NAMES if name != "cudasim"]:
        call = on(torch.device(device), arguments(2, 3, 8, 30))
        torch.library.opcheck(torch.ops.pdkernels.lookup_draft_.default, tuple(call.values()))


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(draft: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> None:
        pd.lookup_draft_(draft, lengths, tokens, ends, start=0)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for seed, (batch, slots, width) in enumerate([(2, 4, 20), (3, 5, 30), (4, 9, 25)]):
        call = {name: x for name, x in arguments(seed, batch, slots, width).items() if name != "start"}
        call = {name: x.contiguous() for name, x in call.items()}
        expected = on(torch.device("cpu"), call)
        compiled(*call.values())
        reference(**expected)
        assert all(torch.equal(call[name], expected[name]) for name in WRITTEN)
    assert counter.frame_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_capture_and_replay_with_changed_data() -> None:
    def made(seed: int) -> Call:
        call = arguments(seed, 3, 9, 60)
        call["start"] = 0
        return call

    call = on(torch.device("cuda"), made(5))
    pd.lookup_draft_(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pd.lookup_draft_(**call)
    for seed in (6, 7):
        fresh = made(seed)
        for name in (*WRITTEN, "ends"):
            call[name].copy_(fresh[name])
        graph.replay()
        reference(**fresh)
        assert all(torch.equal(call[name].cpu(), fresh[name]) for name in WRITTEN)


# --- errors ------------------------------------------------------------------------------------------------------------


def good() -> Call:
    return {
        "draft": torch.zeros(2, 4, dtype=torch.int64),
        "draft_lengths": torch.tensor([4, 4]),
        "tokens": torch.zeros(2, 9, dtype=torch.int64),
        "ends": torch.tensor([8, 5]),
        "start": 2,
    }


@pytest.mark.parametrize(
    "text, changed",
    {
        "TypeError: lookup_draft_: draft must be a tensor, got list": {"draft": [1]},
        "TypeError: draft must be torch.int64, got torch.int32": {"draft": torch.zeros(2, 4, dtype=torch.int32)},
        "TypeError: tokens must be torch.int64, got torch.float32": {"tokens": torch.zeros(2, 9)},
        "TypeError: draft_lengths must be an int32 or int64 tensor, got torch.float32": {
            "draft_lengths": torch.zeros(2)
        },
        r"draft must have shape \(batch, slots\), with a slot for the known token, got \(2, 0\)": {
            "draft": torch.zeros(2, 0, dtype=torch.int64)
        },
        r"tokens must have shape \(2, any\), got \(1, 9\)": {"tokens": torch.zeros(1, 9, dtype=torch.int64)},
        r"tokens must have contiguous rows, got strides \(18, 2\)": {
            "tokens": torch.zeros(2, 18, dtype=torch.int64)[:, ::2]
        },
        r"ends must have shape \(2\), got \(1,\)": {"ends": torch.tensor([5])},
        "ends must be on cpu, got meta": {"ends": torch.zeros(2, dtype=torch.int64, device="meta")},
        r"draft_lengths must be in \[0, 4\], got 5 for sequence 1\. A length counts": {
            "draft_lengths": torch.tensor([4, 5])
        },
        r"draft_lengths must be in \[0, 4\], got -1 for sequence 0": {"draft_lengths": torch.tensor([-1, 4])},
        r"ends must be in \[2, 8\], got 9 for sequence 0\. The known token is written there": {
            "ends": torch.tensor([9, 5])
        },
        r"ends must be in \[2, 8\], got 1 for sequence 1": {"ends": torch.tensor([8, 1])},
        "start must be at least 0, got -1": {"start": -1},
        "max_match must be at least 1, got 0": {"max_match": 0},
        "min_match must be at least 1, got 0": {"min_match": 0},
        "growth must be at least 1, got 0": {"growth": 0},
        "NotImplementedError: backend must be one of auto, native, reference on cpu, got 'triton'": {
            "backend": "triton"
        },
    }.items(),
)
def test_bad_call(changed: dict[str, object], text: str) -> None:
    call = good()
    before = {name: call[name].clone() for name in WRITTEN}
    with refused(text):
        pd.lookup_draft_(**call | changed)
    assert all(torch.equal(call[name], before[name]) for name in WRITTEN)


def test_bad_values_on_cuda(device_impl) -> None:
    """An end out of its range leaves its sequence alone; a length above `slots` asks for all there is."""
    call = on(device_impl.device, good())
    call["ends"][0], call["draft_lengths"][1] = 2**40, 2**40
    device_impl.lookup_draft_(**call)
    assert call["draft_lengths"].tolist() == [4, 4]
    call = on(device_impl.device, good())
    call["ends"][0], call["draft_lengths"][1] = 1, -3
    device_impl.lookup_draft_(**call)
    assert call["draft_lengths"].tolist() == [4, -3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_debug_checks_raise_on_cuda(monkeypatch) -> None:
    monkeypatch.setattr(_library, "DEBUG_CHECKS", True)
    call = on(torch.device("cuda"), good())
    call["ends"][0] = 9
    with pytest.raises(ValueError, match=r"ends must be in \[2, 8\], got 9"):
        pd.lookup_draft_(**call)
