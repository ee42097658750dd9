"""Every op in a CUDA graph: captured once, replayed with other data, the same bits as a call; and no call waits for the device.

Without a GPU the calls run on a pretended one, where a replay is one more call: that tests the cases, not the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.ops.library import OPS
from tests.harness.pretended_gpu import pretended_gpu
from tests.ops.examples import Arguments, example, run, tensors_in

HAS_GPU = torch.cuda.is_available()


def arguments_of(op: str, seed: int) -> Arguments:
    return example(op, seed, "cuda", torch.bfloat16)


def results(op: str, arguments: Arguments) -> list[Tensor]:
    """Tensors that the op writes to are results too."""
    return tensors_in(run(op, arguments)) + [arguments[name] for name in OPS[op].mutated]


def cloned(arguments: Arguments) -> Arguments:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(op: str, held: Arguments) -> tuple[list[Tensor], Callable[[], object]]:
    """What a replay writes to, and the replay."""
    if not HAS_GPU:
        found = results(op, held)
        return found, lambda: [a.copy_(b) for a, b in zip(found, results(op, held)) if a is not b]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled and loaded by their first call
        results(op, cloned(held))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(op, held)
    return found, graph.replay


@pytest.fixture
def gpu() -> Iterator[None]:
    if HAS_GPU:
        yield
        return
    with pretended_gpu():
        yield


@pytest.mark.parametrize("op", OPS)
def test_capture_and_replay_with_other_data(op: str, gpu: None) -> None:
    if op.endswith("_backward") and not HAS_GPU:
        pytest.skip("no backward pass on a pretended GPU")
    held = arguments_of(op, 1)
    found, replay = captured(op, held)
    for seed in (2, 3, 2):
        fresh = arguments_of(op, seed)
        for name, x in fresh.items():
            if isinstance(x, Tensor):
                held[name].copy_(x)
            elif isinstance(x, pd.QuantizedWeight):
                held[name].load_state_dict(x.state_dict())
        replay()
        wanted = results(op, fresh)
        assert len(found) == len(wanted) > 0
        for a, b in zip(found, wanted):
            assert torch.equal(a.cpu().nan_to_num(7), b.cpu().nan_to_num(7))


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("op", OPS)
def test_a_captured_op_does_not_sync(op: str) -> None:
    first, second = arguments_of(op, 1), arguments_of(op, 2)
    results(op, first)
    with no_sync():
        results(op, second)
