"""log_step_ against the plain form of the reference: integers, so always exactly; and the condition it sets in a graph."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.reference.log_step import log_step_ as reference
from tests.ops.implementations import NAMES, implementation
from tests.support.errors import refused

HANDLES = [0, 5, 2**63 + 7]  # any 64 bits


def arguments(seed: int, steps: int, batch: int, columns: int, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    entry = torch.randint(-5, 2**40, (batch, columns), generator=generator)
    # Most sequences are done, so that often all are.
    entry[:, 0] = torch.randint(1, 9, (batch,), generator=generator) * (torch.rand(batch, generator=generator) < 0.3)
    log = torch.full((steps, batch, columns), -7)
    return {"log": log, "count": torch.tensor([count]), "condition": torch.tensor([bool(seed % 2)]), "entry": entry}


@st.composite
def calls(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    steps = draw(st.integers(1, 4))
    batch, columns = draw(st.sampled_from([0, 1, 2, 3, 300])), draw(st.sampled_from([1, 2, 5, 70]))
    return arguments(draw(st.integers(0, 2**20)), steps, batch, columns, draw(st.integers(0, steps - 1)))


def check_equal(impl, call: dict[str, torch.Tensor], handle: int | None = None) -> None:
    expected = {name: t.clone() for name, t in call.items()}
    actual = {name: t.clone().to(impl.device) for name, t in call.items()}
    reference(**expected)
    impl.log_step_(**actual, **({} if handle is None else {"handle": handle}))
    assert all(torch.equal(actual[name].cpu(), expected[name]) for name in expected)


@given(call=calls())
@example(call=arguments(0, 3, 1, 4, 2))
@settings(max_examples=60)
def test_equals_the_reference(impl, call: dict[str, torch.Tensor]) -> None:
    check_equal(impl, call)


@given(call=calls())
@settings(max_examples=15)
def test_result_does_not_depend_on_the_order_of_threads(call: dict[str, torch.Tensor]) -> None:
    impl = implementation("cudasim")
    for order in impl.schedules():
        with order:
            check_equal(impl, call)


def test_a_whole_log(impl) -> None:
    log, count, condition = (
        t.to(impl.device) for t in (torch.zeros(4, 2, 3, dtype=torch.int64), torch.tensor([0]), torch.tensor([False]))
    )
    entries = [torch.tensor([[left, n, -n], [0, 9, n]]) for n, left in enumerate((3, 1, 0))]
    continues = []
    for entry in entries:
        impl.log_step_(log, count, condition, entry.to(impl.device))
        continues.append(condition.item())
    assert continues == [True, True, False] and count.item() == 3
    assert torch.equal(log[:3].cpu(), torch.stack(entries)) and not log[3].any()


@pytest.mark.parametrize("count", [-1, 3, 2**40])
def test_a_full_log_ends_the_loop(impl, count: int) -> None:
    call = {name: t.to(impl.device) for name, t in arguments(1, 3, 2, 4, 0).items()}
    call["count"].fill_(count)
    call["condition"].fill_(True)
    call["entry"][:, 0] = 1
    if impl.raises:
        with pytest.raises(ValueError, match=rf"log_step_: count must be in \[0, 2\], got {count}\. It counts entries"):
            impl.log_step_(**call)
    else:
        impl.log_step_(**call)
        assert not call["condition"].item()
    assert call["count"].item() == count and (call["log"] == -7).all()


@pytest.mark.parametrize("handle", HANDLES)
def test_the_condition_of_a_graph_is_set(handle: int) -> None:
    impl = implementation("cudasim")
    condition = impl.library.cudasim_condition
    condition.argtypes, condition.restype = [ctypes.c_uint64], ctypes.c_longlong
    call = arguments(0, 3, 2, 4, 0)
    for left, count, continues in ((5, 0, 1), (0, 1, 0), (5, 2, 0), (5, 3, 0)):  # the last one finds the log full
        call["entry"][:, 0] = torch.tensor([0, left])
        call["count"].fill_(count)
        impl.log_step_(**call, handle=handle)
        assert condition(handle) == continues
        assert all(condition(other) == -1 for other in HANDLES)
    impl.log_step_(**call)
    assert condition(handle) == -1


# --- torch integration -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_opcheck() -> None:
    for device in [name for name in NAMES if name != "cudasim"]:
        call = {name: t.to(device) for name, t in arguments(2, 3, 2, 5, 1).items()}
        torch.library.opcheck(torch.ops.pdkernels.log_step_.default, tuple(call.values()))


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda *tensors: pd.log_step_(*tensors), fullgraph=True, dynamic=True, backend=counter)
    for seed, (batch, columns) in enumerate([(2, 4), (3, 5), (4, 9)]):
        call = arguments(seed, 3, batch, columns, 1)
        expected = {name: t.clone() for name, t in call.items()}
        compiled(*call.values())
        reference(**expected)
        assert all(torch.equal(call[name], expected[name]) for name in call)
    assert counter.frame_count == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_capture_and_replay_with_changed_data() -> None:
    call = {name: t.cuda() for name, t in arguments(5, 4, 3, 9, 0).items()}
    pd.log_step_(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pd.log_step_(**call)
    for seed in (6, 7):
        fresh = arguments(seed, 4, 3, 9, seed - 5)
        for name, t in call.items():
            t.copy_(fresh[name])
        graph.replay()
        reference(**fresh)
        assert all(torch.equal(t.cpu(), fresh[name]) for name, t in call.items())


# --- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, changed",
    {
        "TypeError: entry must be a tensor, got list": {"entry": [1]},
        "TypeError: entry must be torch.int64, got torch.float32": {"entry": torch.zeros(2, 4)},
        "TypeError: log must be torch.int64, got torch.int32": {"log": torch.zeros(3, 2, 4, dtype=torch.int32)},
        "TypeError: condition must be torch.bool, got torch.float32": {"condition": torch.zeros(1)},
        r"entry must have shape \(batch, columns\)": {"entry": torch.zeros(2, 4, 1, dtype=torch.int64)},
        r"with at least one column, got \(2, 0\)": {"entry": torch.zeros(2, 0, dtype=torch.int64)},
        r"entry must be contiguous, got strides \(8, 2\)": {"entry": torch.zeros(2, 8, dtype=torch.int64)[:, ::2]},
        r"log must have shape \(steps, 2, 4\), got \(3, 2, 5\)": {"log": torch.zeros(3, 2, 5, dtype=torch.int64)},
        r"count must have shape \(1\), got \(2,\)": {"count": torch.zeros(2, dtype=torch.int64)},
        r"condition must have shape \(1\), got \(\)": {"condition": torch.tensor(True)},
        "log must be on cpu like entry, got meta": {"log": torch.zeros(3, 2, 4, dtype=torch.int64, device="meta")},
        "TypeError: handle must be an int, got str": {"handle": "3"},
        "handle must be None on the CPU, got 3. Conditional nodes are parts of CUDA graphs.": {"handle": 3},
        "NotImplementedError: backend must be one of native, reference on cpu|one of auto, native, reference on cpu": {
            "backend": "triton"
        },
    }.items(),
)
def test_bad_call(changed: dict[str, object], text: str) -> None:
    with refused(text):
        pd.log_step_(**{**arguments(1, 3, 2, 4, 0), **changed})
