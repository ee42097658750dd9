"""A CUDA graph that repeats a captured graph while a kernel sets its condition, built with cuda-python: PyTorch has no such node.

    graph                                            a conditional node of type WHILE tests a value that kernels set
    ├─ kernel   sets the value
    └─ while    its value is not 0:
       ├─ the captured graph, as a child
       └─ kernel   sets the value

The captured graph may hold kernels, copies and memsets of device memory: what PyTorch records for decoders. It must not have
conditional nodes or allocations: PyTorch's allocator serves those from a pool that belongs to its own graph object.
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

OLDEST = 13000  # CUDA version of bindings and driver since which `cuGraphAddNode` has its current arguments


def require(op: str, device: torch.device) -> None:
    """ImportError or NotImplementedError if such a graph cannot be built for a device."""
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
    """The launches of `step`, as a graph. It must have run on `stream` before, so that nothing is allocated or compiled in the
    capture."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph


class WhileGraph:
    """Repeats a graph. It reads the memory of that graph's pool, so the object it came from must be kept alive.

    Args:
        step: the raw `cudaGraph_t` of the body. It is copied.
        set_condition: launches one kernel on the current stream that sets the condition of the given handle, before
            the first round and after every round.
        stream: used only for capturing.
    """

    def __init__(self, step: int, set_condition: Callable[[int], None], stream: torch.cuda.Stream) -> None:
        context = _call(driver.cuCtxGetCurrent())
        graph = _call(driver.cuGraphCreate(0))
        release = weakref.finalize(self, driver.cuGraphDestroy, graph)
        release.atexit = False  # the driver may be gone by then
        # By default a launch starts from 0: without a condition set there is no round, rather than endless rounds.
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
        """Launches it on the current stream, without waiting."""
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        _call(driver.cuGraphLaunch(self._executable, stream))


def _record(graph: Any, after: list[Any], stream: torch.cuda.Stream, launch: Callable[[], None]) -> None:
    """Adds the launches of `launch` to a graph, after some of its nodes."""
    raw = driver.CUstream(stream.cuda_stream)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    _call(driver.cuStreamBeginCaptureToGraph(raw, graph, after, _plain_edges(after), len(after), mode))
    try:
        with torch.cuda.stream(stream):
            launch()
    finally:
        ended = driver.cuStreamEndCapture(raw)
    _call(ended)


def _plain_edges(nodes: list[Any]) -> list[Any]:
    """Full dependencies. The driver accepts null for it, the bindings require one per node."""
    return [driver.CUgraphEdgeData() for _ in nodes]


def _call(answer: tuple[Any, ...]) -> Any:
    """The results of a driver function, without its status."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        said = driver.cuGetErrorString(status)[1]
        actual = f"{status.name} ({said.decode()})" if said else status.name
        raise RuntimeError(message("integrations.while_graph", "the driver", "take the graph", actual))
    return values[0] if len(values) == 1 else values
