"""A CUDA graph that repeats a captured one for as long as a kernel says so, made with cuda-python: PyTorch exposes no such node.

    graph                                            a conditional node of type WHILE tests a value that kernels set
    ├─ kernel   sets the value
    └─ while    its value is not 0:
       ├─ the captured graph, as a child
       └─ kernel   sets the value

The captured graph may hold kernels, copies and memsets of device memory: what PyTorch records of decoders. It needs no
conditional nodes and no allocations: PyTorch's allocator serves those from a pool that belongs to its own graph object.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from pdkernels._validation import message

try:
    from cuda.bindings import driver  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError:
    driver = None

OLDEST = 13000  # CUDA version of bindings and driver: with it `cuGraphAddNode` took its present arguments


def require(op: str, device: torch.device) -> None:
    """ImportError or NotImplementedError where such a graph cannot be made for a device."""
    if device.type != "cuda":
        remedy = "Decode with pdkernels.decoding.generate there."
        raise NotImplementedError(message(op, "the model", "be on a GPU", device, remedy))
    install = "Install it with: pip install 'pdkernels[cuda-graphs]'"
    if driver is None:
        raise ImportError(message(op, "cuda-python", "be installed", "no cuda.bindings", install))
    if driver.CUDA_VERSION < OLDEST:
        raise NotImplementedError(message(op, "cuda-python", "be for CUDA 13", driver.CUDA_VERSION, install))
    version = _call(driver.cuDriverGetVersion())
    if version < OLDEST:
        remedy = "Update it, or decode with pdkernels.decoding.generate."
        raise NotImplementedError(message(op, "the driver", "be for CUDA 13.0 or newer", version, remedy))


def capture(step: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """What `step` launches, as a graph. It has to have run on `stream` before, so that nothing in it is made for the first time."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph


class WhileGraph:
    """Repeats a graph. It reads the memory of that graph's pool, so the object it came from has to live on.

    Args:
        step: the raw `cudaGraph_t` of the body. It is copied.
        set_condition: launches one kernel on the current stream that sets the condition behind the handle it is given, before
            the first round and after every one.
        stream: used for capturing alone.
    """

    def __init__(self, step: int, set_condition: Callable[[int], None], stream: torch.cuda.Stream) -> None:
        context = _call(driver.cuCtxGetCurrent())
        graph = _call(driver.cuGraphCreate(0))
        release = weakref.finalize(self, driver.cuGraphDestroy, graph)
        release.atexit = False  # the driver may be gone by then
        # By default a launch starts from 0: whoever fails to set the condition gets no round, not rounds for ever.
        handle = _call(driver.cuGraphConditionalHandleCreate(graph, context, 0, driver.CU_GRAPH_COND_ASSIGN_DEFAULT))

        _record(graph, [], stream, lambda: set_condition(int(handle)))
        count = _call(driver.cuGraphGetNodes(graph, 0))[1]
        entry = _call(driver.cuGraphGetNodes(graph, count))[0]
        loop = driver.CUgraphNodeParams()
        loop.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        loop.conditional.handle = handle
        loop.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        loop.conditional.size = 1
        loop.conditional.ctx = context
        _call(driver.cuGraphAddNode(graph, entry, _plain_edges(entry), len(entry), loop))

        body = loop.conditional.phGraph_out[0]
        round_ = _call(driver.cuGraphAddChildGraphNode(body, None, 0, driver.CUgraph(step)))
        _record(body, [round_], stream, lambda: set_condition(int(handle)))

        self._executable = _call(driver.cuGraphInstantiate(graph, 0))
        executable = weakref.finalize(self, driver.cuGraphExecDestroy, self._executable)
        executable.atexit = False

    def launch(self) -> None:
        """Runs it on the current stream, without waiting for it."""
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        _call(driver.cuGraphLaunch(self._executable, stream))


def _record(graph: Any, behind: list[Any], stream: torch.cuda.Stream, launch: Callable[[], None]) -> None:
    """Adds what `launch` launches to a graph, behind some of its nodes."""
    raw = driver.CUstream(stream.cuda_stream)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    _call(driver.cuStreamBeginCaptureToGraph(raw, graph, behind, _plain_edges(behind), len(behind), mode))
    try:
        with torch.cuda.stream(stream):
            launch()
    finally:
        ended = driver.cuStreamEndCapture(raw)
    _call(ended)


def _plain_edges(nodes: list[Any]) -> list[Any]:
    """Whole dependencies. The driver would take none for it, the bindings ask for one of each node."""
    return [driver.CUgraphEdgeData() for _ in nodes]


def _call(answer: tuple[Any, ...]) -> Any:
    """What a function of the driver returned, without its status."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        said = driver.cuGetErrorString(status)[1]
        actual = f"{status.name} ({said.decode()})" if said else status.name
        raise RuntimeError(message("integrations.while_graph", "the driver", "take the graph", actual))
    return values[0] if len(values) == 1 else values
