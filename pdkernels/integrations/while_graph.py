"""A CUDA graph that repeats a captured graph while a kernel sets its condition, built with cuda-python: PyTorch has no
such node.

    graph                                            a conditional node of type WHILE tests a value that kernels set
    ├─ kernel   sets the value
    └─ while    its value is not 0:
       ├─ the captured graph, as a child; of two, a conditional node of type IF / ELSE chooses by a second value
       └─ kernel   sets the value, and a second one the other

A captured graph may have kernels, copies and memsets of device memory, which is what PyTorch records for decoders. It
must not have conditional nodes or allocations, because PyTorch's allocator serves these from a pool that belongs to its
own graph object.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pdkernels._validation import message

try:
    from cuda.bindings import driver  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError:
    driver = None

OLDEST = 13000  # CUDA version of bindings and driver since which `cuGraphAddNode` has its current arguments


def require(op: str, device: torch.device) -> None:
    """Raises ImportError or NotImplementedError if such a graph cannot be built for a device."""
    if device.type != "cuda":
        remedy = "Decode with pdkernels.decoding.generate there."
        raise NotImplementedError(message(op, "the model", "be on a GPU", device, remedy))
    install = "Install it with: pip install 'cuda-bindings>=13.0.3,<14'"
    if driver is None:
        raise ImportError(message(op, "cuda-python", "be installed", "no cuda.bindings", install))
    if driver.CUDA_VERSION < OLDEST:
        raise NotImplementedError(message(op, "cuda-python", "be for CUDA 13", driver.CUDA_VERSION, install))
    version = _call(driver.cuDriverGetVersion())
    if version < OLDEST:
        remedy = "Update it, or decode with pdkernels.decoding.generate."
        raise NotImplementedError(message(op, "the driver", "be for CUDA 13.0 or newer", version, remedy))


def capture(step: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """The launches of `step`, as a graph. It must have run on `stream` before, so that nothing is allocated or compiled
    during capture."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph


class WhileGraph:
    """Repeats a graph, or one of two graphs. It uses the memory of their pools, so their graph objects must be kept
    alive.

    Args:
        forms: the raw `cudaGraph_t` of the body, or two of them. They are copied.
        set_condition: launches kernels on the current stream that set the condition of the given handle, before
            the first round and after every round.
        set_form: the same for a second handle: not 0 if the second of two forms is next.
        stream: used only for capturing.
    """

    def __init__(
        self,
        forms: Sequence[int],
        set_condition: Callable[[int], None],
        stream: torch.cuda.Stream,
        set_form: Callable[[int], None] | None = None,
    ) -> None:
        context = _call(driver.cuCtxGetCurrent())
        graph = _call(driver.cuGraphCreate(0))
        release = weakref.finalize(self, driver.cuGraphDestroy, graph)
        release.atexit = False  # the driver may be gone by then
        # A launch starts with a condition of 0: if no kernel sets it, there is no round instead of endless rounds.
        # Handles belong to the outer graph even if the node is inside the body.
        handles = [
            _call(driver.cuGraphConditionalHandleCreate(graph, context, 0, driver.CU_GRAPH_COND_ASSIGN_DEFAULT))
            for _ in forms
        ]

        def set_all() -> None:
            set_condition(int(handles[0]))
            if set_form is not None:
                set_form(int(handles[1]))

        def conditional(where: Any, after: list[Any], handle: Any, kind: str, size: int) -> tuple[Any, list[Any]]:
            node = driver.CUgraphNodeParams()
            node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
            node.conditional.handle = handle
            node.conditional.type = getattr(driver.CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind}")
            node.conditional.size = size
            node.conditional.ctx = context
            added = _call(driver.cuGraphAddNode(where, after, _plain_edges(after), len(after), node))
            return added, node.conditional.phGraph_out

        _record(graph, [], stream, set_all)
        (body,) = conditional(graph, nodes_of(graph), handles[0], "WHILE", 1)[1]
        if len(forms) == 1:
            round_ = _call(driver.cuGraphAddChildGraphNode(body, None, 0, driver.CUgraph(forms[0])))
        else:
            # The first graph of an IF node runs if its value is not 0, the second if it is.
            round_, choices = conditional(body, [], handles[1], "IF", 2)
            for choice, form in zip(choices, reversed(forms), strict=True):
                _call(driver.cuGraphAddChildGraphNode(choice, None, 0, driver.CUgraph(form)))
        _record(body, [round_], stream, set_all)

        self._executable = _call(driver.cuGraphInstantiate(graph, 0))
        executable = weakref.finalize(self, driver.cuGraphExecDestroy, self._executable)
        executable.atexit = False

    def launch(self) -> None:
        """Launches it on the current stream, without waiting."""
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        _call(driver.cuGraphLaunch(self._executable, stream))


def nodes_of(graph: Any) -> list[Any]:
    """Its nodes."""
    count = _call(driver.cuGraphGetNodes(graph, 0))[1]
    return list(_call(driver.cuGraphGetNodes(graph, count))[0])


def kinds_of(graph: int) -> dict[str, int]:
    """How many nodes of each kind a raw `cudaGraph_t` has, such as ``{"kernel": 41, "memset": 2}``."""
    types = [_call(driver.cuGraphNodeGetType(node)) for node in nodes_of(driver.CUgraph(graph))]
    return dict(
        Counter(driver.CUgraphNodeType(kind).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower() for kind in types)
    )


def _record(graph: Any, after: list[Any], stream: torch.cuda.Stream, launch: Callable[[], None]) -> None:
    """Adds the launches of `launch` to a graph, after the given nodes."""
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
        description = driver.cuGetErrorString(status)[1]
        actual = f"{status.name} ({description.decode()})" if description else status.name
        raise RuntimeError(message("integrations.while_graph", "the driver", "take the graph", actual))
    return values[0] if len(values) == 1 else values
