"""verify_draft against the plain loop of the reference: integers and booleans, so always exactly."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.ops import library as _library
from pdkernels.reference.verify_draft import verify_draft as reference
from tests.ops.implementations import NAMES, implementation
from tests.support.errors import refused


def arguments(
    seed: int,
    batch: int,
    width: int,
    candidates: int | None,
    *,
    vocabulary: int = 3,
    dtype: torch.dtype = torch.int64,
    with_lengths: bool = True,
    ends: int = 1,
    with_refill: bool = True,
) -> dict[str, torch.Tensor]:
    """A call whose drafts often agree with the model: a small vocabulary, and predictions copied here and there."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, width) if candidates is None else (batch, candidates, width)
    draft = torch.randint(0, vocabulary, shape, generator=generator)
    predictions = torch.randint(0, vocabulary, shape, generator=generator)
    if width > 1:
        agree = torch.rand(shape, generator=generator) < rng.choice([0.0, 0.7, 0.95, 1.0])
        predictions[..., :-1] = torch.where(agree[..., 1:], draft[..., 1:], predictions[..., :-1])
    result = {"draft": draft.to(dtype), "predictions": predictions.to(dtype)}
    if with_lengths:
        result["draft_lengths"] = torch.tensor([rng.randint(0, width) for _ in range(batch)], dtype=dtype)
    if ends:
        result["end_tokens"] = torch.tensor(rng.sample(range(10), ends), dtype=dtype)
    if with_refill:
        result["refill"] = torch.randint(100, 200, (batch, width), generator=generator).to(dtype)
    return result


@st.composite
def calls(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    return arguments(
        draw(st.integers(0, 2**20)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([1, 2, 3, 5, 8, 33, 70])),
        draw(st.sampled_from([None, 1, 2, 4, 7])),
        dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        with_lengths=draw(st.booleans()),
        ends=draw(st.integers(0, 3)),
        with_refill=draw(st.booleans()),
    )


def check_equal(impl, call: dict[str, torch.Tensor]) -> pd.DraftVerdict:
    expected = pd.DraftVerdict(*reference(**call))
    actual = impl.verify_draft(**{name: t.to(impl.device) for name, t in call.items()})
    for name, a, b in zip(actual._fields, actual, expected):
        assert a.dtype == b.dtype, name
        assert torch.equal(a.cpu(), b), f"{name}: {a} instead of {b}"
    return actual


@given(call=calls())
@settings(max_examples=400)
def test_equals_reference(impl, call: dict[str, torch.Tensor]) -> None:
    check_equal(impl, call)


@given(call=calls())
@settings(max_examples=60)
def test_what_the_verdict_promises(impl, call: dict[str, torch.Tensor]) -> None:
    """The documented rules, checked as properties rather than by another implementation."""
    verdict = check_equal(impl, call)
    draft, predictions = (t if t.dim() == 3 else t[:, None] for t in (call["draft"], call["predictions"]))
    ends = set(call["end_tokens"].tolist()) if "end_tokens" in call else set()
    for b in range(draft.shape[0]):
        accepted, winner = int(verdict.accepted[b]), int(verdict.candidate[b])
        if accepted == 0:
            assert verdict.next_token[b] == -1 and not verdict.ended[b]
            continue
        d, p = draft[b, winner].tolist(), predictions[b, winner].tolist()
        assert d[1:accepted] == p[: accepted - 1]
        inside = [token for token in d[:accepted] if token in ends]
        assert inside in ([], [d[accepted - 1]])
        if not inside:
            assert verdict.next_token[b] == p[accepted - 1] == verdict.new_draft[b, 0]
        assert bool(verdict.ended[b]) == (int(verdict.next_token[b]) in ends)


@pytest.mark.parametrize(
    "draft, predictions, end, accepted, next_token, ended",
    [
        ([5, 1, 2, 3], [1, 2, 3, 4], 9, 4, 4, False),  # all accepted
        ([5, 1, 2, 3], [7, 2, 3, 4], 9, 1, 7, False),  # only the known token
        ([5], [6], 9, 1, 6, False),  # width 1 is plain decoding
        ([9, 1, 2, 3], [1, 2, 3, 4], 9, 1, 9, True),  # the known token ends it
        ([5, 1, 9, 3], [1, 9, 3, 4], 9, 3, 9, True),  # an end token among the accepted
        ([5, 1, 2, 3], [1, 9, 3, 4], 9, 2, 9, True),  # the end is the next token: not counted
        ([5, 1, 2, 9], [1, 8, 9, 4], 9, 2, 8, False),  # an end token in the rejected part does not count
        ([5, 9, 9, 3], [9, 9, 3, 4], 9, 2, 9, True),  # the first of two ends
    ],
)
def test_hand_made(impl, draft, predictions, end, accepted, next_token, ended) -> None:
    call = dict(draft=torch.tensor([draft]), predictions=torch.tensor([predictions]), end_tokens=torch.tensor([end]))
    verdict = check_equal(impl, call)
    assert (verdict.accepted.item(), verdict.next_token.item(), verdict.ended.item()) == (accepted, next_token, ended)


def test_ties_go_to_the_lowest_candidate(impl) -> None:
    draft = torch.tensor([[[1, 8, 8], [1, 2, 8], [1, 2, 7], [1, 2, 3]]] * 2)
    predictions = torch.tensor([[[2, 3, 4]] * 4] * 2)
    lengths = torch.tensor([3, 2])
    verdict = check_equal(impl, {"draft": draft, "predictions": predictions, "draft_lengths": lengths})
    assert verdict.candidate.tolist() == [3, 1]


def test_new_draft_is_the_models_continuation_then_refill(impl) -> None:
    call = {
        "draft": torch.tensor([[1, 2, 8, 8, 8]]),
        "predictions": torch.tensor([[2, 3, 4, 5, 6]]),
        "draft_lengths": torch.tensor([4]),
        "refill": torch.tensor([[90, 91, 92, 93, 94]]),
    }
    assert check_equal(impl, call).new_draft.tolist() == [[3, 4, 5, 93, 94]]


def test_extreme_ids_and_strides(impl) -> None:
    big = torch.tensor([[2**62, -(2**63), 2**63 - 1, 0]])
    call = {"draft": big, "predictions": torch.roll(big, -1, 1), "end_tokens": torch.tensor([2**63 - 1])}
    assert check_equal(impl, call).accepted.item() == 3
    wide = torch.randint(0, 2, (6, 12, 5), generator=torch.Generator().manual_seed(0))
    check_equal(impl, {"draft": wide[::2, ::3].transpose(1, 2), "predictions": wide[1::2, 1::3].transpose(1, 2)})
    check_equal(impl, {"draft": wide[:3, :4, :1].expand(3, 4, 5), "predictions": wide[:3, :4]})


@given(call=calls())
@settings(max_examples=30)
def test_a_batch_equals_its_sequences_alone(impl, call: dict[str, torch.Tensor]) -> None:
    together = check_equal(impl, call)
    for b in range(call["draft"].shape[0]):
        alone = check_equal(impl, {name: t if name == "end_tokens" else t[b : b + 1] for name, t in call.items()})
        assert all(torch.equal(a[0], t[b]) for a, t in zip(alone, together))


@given(call=calls())
@example(call=arguments(1, 2, 70, 7))
@settings(max_examples=15)
def test_result_does_not_depend_on_the_order_of_threads(call: dict[str, torch.Tensor]) -> None:
    impl = implementation("cudasim")
    for order in impl.schedules():
        with order:
            check_equal(impl, call)


# --- torch integration -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("candidates", [None, 3])
@pytest.mark.parametrize("optional", [True, False])
def test_opcheck(candidates: int | None, optional: bool) -> None:
    call = arguments(3, 2, 5, candidates, with_lengths=optional, ends=int(optional), with_refill=optional)
    for device in [name for name in NAMES if name != "cudasim"]:
        tensors = [
            call[name].to(device) if name in call else None
            for name in ("draft", "predictions", "draft_lengths", "end_tokens", "refill")
        ]
        torch.library.opcheck(torch.ops.pdkernels.verify_draft.default, tuple(tensors))


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(draft, predictions, lengths, refill):
        return pd.verify_draft(draft, predictions, draft_lengths=lengths, refill=refill)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for seed, (batch, width) in enumerate([(2, 4), (3, 5), (2, 9), (4, 7)]):
        call = arguments(seed, batch, width, None, ends=0)
        actual = compiled(call["draft"], call["predictions"], call["draft_lengths"], call["refill"])
        assert all(torch.equal(a, b) for a, b in zip(actual, reference(**call)))
    assert counter.frame_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_capture_and_replay_with_changed_data() -> None:
    call = {name: t.cuda() for name, t in arguments(5, 3, 9, 2).items()}
    pd.verify_draft(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = pd.verify_draft(**call)
    for seed in (6, 7):
        fresh = arguments(seed, 3, 9, 2)
        for name, t in call.items():
            t.copy_(fresh[name])
        graph.replay()
        assert all(torch.equal(a.cpu(), b) for a, b in zip(verdict, reference(**fresh)))


# --- errors ------------------------------------------------------------------------------------------------------------

D, P = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    "text, call",
    {
        "TypeError: verify_draft: draft must be a tensor, got list": {"draft": [1]},
        r"draft must have shape \(batch, width\) or \(batch, candidates, width\), got \(4,\)": {"draft": D[0]},
        "TypeError: draft must be an int32 or int64 tensor, got torch.float32": {"draft": D.float()},
        r"predictions must have shape \(2, 4\), got \(2, 3\)": {"predictions": P[:, :3]},
        "TypeError: predictions must be an int32 or int64 tensor": {"predictions": P.half()},
        "predictions must be on cpu, got meta": {"predictions": P.to("meta")},
        r"draft_lengths must have shape \(2\), got \(1,\)": {"draft_lengths": torch.tensor([4])},
        r"draft_lengths must be in \[0, 4\], got 5 for sequence 1\. A length counts": {
            "draft_lengths": torch.tensor([4, 5])
        },
        r"draft_lengths must be in \[0, 4\], got -1 for sequence 0": {"draft_lengths": torch.tensor([-1, 4])},
        "TypeError: end_tokens must be an int32 or int64 tensor, got int": {"end_tokens": 7},
        r"end_tokens must have shape \(any\), got \(2, 4\)": {"end_tokens": D},
        r"refill must have shape \(2, 4\), got \(2, 2\)": {"refill": D[:, :2]},
        "draft must have 1 to 65536 candidates": {
            "draft": D.view(2, 4, 1)[:, :0],
            "predictions": P.view(2, 4, 1)[:, :0],
        },
        "NotImplementedError: backend must be one of auto, native, reference on cpu, got 'triton'": {
            "backend": "triton"
        },
    }.items(),
)
def test_bad_call(call: dict[str, object], text: str) -> None:
    with refused(text):
        pd.verify_draft(**{"draft": D, "predictions": P, **call})


def test_wild_lengths_are_clamped_on_cuda(device_impl) -> None:
    lengths = torch.tensor([2**40, -5], device=device_impl.device)
    verdict = device_impl.verify_draft(D.to(device_impl.device), P.to(device_impl.device), draft_lengths=lengths)
    assert verdict.accepted.tolist() == [4, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_debug_checks_raise_on_cuda(monkeypatch) -> None:
    monkeypatch.setattr(_library, "DEBUG_CHECKS", True)
    with pytest.raises(ValueError, match=r"draft_lengths must be in \[0, 4\], got 5"):
        pd.verify_draft(D.cuda(), P.cuda(), draft_lengths=torch.tensor([4, 5]).cuda())
