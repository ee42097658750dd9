"""Runs `DeviceLoop` on CPU tensors, in a process that has loaded the fake driver.

Real are: cuda-python and how it passes arguments, the assembly of the graph, the decoders' steps, and the CUDA source of
`log_step_`, executed by tests/cudasim. The fake driver executes the graph. PyTorch's capture of a step is a kernel that calls it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

STREAM = 0x57AE


class Stream:
    cuda_stream = STREAM

    def wait_stream(self, other: Stream) -> None:
        pass


class FakeDriver:
    """The loaded library: kernels are Python functions, known by number."""

    def __init__(self, path: Path) -> None:
        # cuda-python now finds it under its name when it looks for libcuda.so.1.
        self.library = ctypes.CDLL(str(path))
        self.functions: list[Callable[[], None]] = []
        self.captures: list[Callable[[], None]] = []  # what graphs were captured from
        self.failures: list[BaseException] = []
        self.library.fake_set_condition.argtypes = [ctypes.c_uint64, ctypes.c_uint]
        self.library.fake_launch.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._keep = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._run)
        self.library.fake_functions(self._keep)

    def _run(self, number: int) -> None:
        try:
            self.functions[number]()
        except BaseException as failure:  # ctypes would print it and continue
            self.failures.append(failure)

    def launch(self, function: Callable[[], None]) -> None:
        """Adds a kernel to the graph under capture, or calls it."""
        self.functions.append(function)
        if not self.library.fake_launch(STREAM, len(self.functions) - 1):
            function()

    def raise_failures(self) -> None:
        if self.failures:
            raise self.failures[0]

    def captured(self, step: Callable[[], None]) -> SimpleNamespace:
        """As `while_graph.capture` returns it: a separate graph with one kernel."""
        self.captures.append(step)
        from cuda.bindings import driver

        _, graph = driver.cuGraphCreate(0)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver.cuStreamBeginCaptureToGraph(driver.CUstream(STREAM), graph, None, None, 0, mode)
        self.launch(step)
        driver.cuStreamEndCapture(driver.CUstream(STREAM))
        return SimpleNamespace(raw_cuda_graph=lambda: int(graph), replay=step)


def install(driver: FakeDriver) -> None:
    """Makes `DeviceLoop` accept models on the CPU."""
    from pdkernels.integrations import device_loop
    from tests.ops.implementations import implementation

    simulated = implementation("cudasim")
    simulated.library.cudasim_condition.argtypes = [ctypes.c_uint64]
    simulated.library.cudasim_condition.restype = ctypes.c_longlong

    def record(*tensors: torch.Tensor, handle: int | None) -> None:
        def kernel() -> None:
            simulated.log_step_(*tensors, handle=handle)
            if handle is not None:
                driver.library.fake_set_condition(handle, simulated.library.cudasim_condition(handle))

        driver.launch(kernel)

    launch = device_loop.WhileGraph.launch
    device_loop.WhileGraph.launch = lambda graph: (launch(graph), driver.raise_failures())
    require = device_loop.require
    device_loop.require = lambda op, device: require(op, torch.device("cuda"))
    device_loop.log_step_ = record
    device_loop.capture = lambda step, stream: driver.captured(step)
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = Stream
    torch.cuda.stream = torch.cuda.device = lambda which: contextlib.nullcontext()
