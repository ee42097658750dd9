"""Loads the sources of kernels with stand-ins for Gluon, and launches them."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.gluonsim import language
from tests.gluonsim.program import Descriptor, Program
from tests.gluonsim.values import NAMES, Pointer, Value, scalar
from tests.gluonsim.world import World

GLUON = "triton.experimental.gluon"


class Edit(NamedTuple):
    """A change of a source, of text that occurs there so many times."""

    module: str
    old: str
    new: str
    times: int = 1


class Kernel:
    """A function of a kernel: called by other such functions, or launched."""

    def __init__(self, simulator: Simulator, function: Callable[..., Any]) -> None:
        self.simulator, self.function = simulator, function
        self.__name__ = function.__name__
        self.signature = inspect.signature(function)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, enable_fp_fusion: bool = True, num_warps: int = 4, **named: Any) -> None:
            del enable_fp_fusion  # a product and a sum are rounded apart here
            given = self.signature.bind(*arguments, **named)
            for name, value in given.arguments.items():
                constant = "constexpr" in str(self.signature.parameters[name].annotation)
                given.arguments[name] = value if constant else _argument(value)
            self.simulator.run_programs(grid[0], num_warps, lambda: self.function(*given.args, **given.kwargs))

        return launch


def _argument(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        layout, dtype = value.layout, NAMES[value.base.dtype]
        strided = torch.as_strided(value.base, value.shape, value.strides, value.base.storage_offset())
        return Descriptor(strided, list(value.block_shape), layout, dtype)
    if isinstance(value, torch.Tensor):
        return Pointer.of(value)
    return None if value is None else Value(scalar(value))


class Simulator:
    def __init__(self, edits: Sequence[Edit] = ()) -> None:
        self.edits, self.modules = edits, dict[str, ModuleType]()
        self.random = random.Random(0)
        self.resident = 0
        """Programs that run at once; 0: they run one after the other."""

    @contextmanager
    def schedule(self, seed: int) -> Iterator[None]:
        """Launches run under the schedule of this seed."""
        self.random = random.Random(seed)
        yield

    def run_programs(self, programs: int, warps: int, body: Callable[[], None]) -> None:
        """One after the other, as most programs are independent of each other, or `resident` at once."""
        if self.resident:
            world = World(self.random, self.resident)
            world.run(programs, lambda number: self._run_program(number, programs, warps, body, world))
            return
        for number in range(programs):
            self._run_program(number, programs, warps, body)

    def _run_program(
        self, number: int, programs: int, warps: int, body: Callable[[], None], world: World | None = None
    ) -> None:
        program = Program(number, programs, warps, self.random, world)
        language.enter(program)
        try:
            body()
            program.end()
        finally:
            language.enter(None)

    def load(self, name: str) -> Any:
        """A module of kernels, from its source, with what it imports from its package."""
        if name not in self.modules:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None, name
            text = Path(spec.origin).read_text()
            for edit in self.edits:
                if edit.module == name:
                    assert text.count(edit.old) == edit.times, (
                        f"{edit.old!r} occurs {text.count(edit.old)} times in {name}"
                    )
                    text = text.replace(edit.old, edit.new)
            self.modules[name] = self.execute(text, name, spec.origin)
        return self.modules[name]

    def execute(self, text: str, name: str, path: str = "<source>") -> ModuleType:
        module = ModuleType(name)
        module.__file__ = path
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        # Dataclasses and named tuples look up the module of a class.
        known = sys.modules.get(name)
        sys.modules[name] = module
        try:
            exec(compile(text, path, "exec"), module.__dict__)
        finally:
            if known is None:
                del sys.modules[name]
            else:
                sys.modules[name] = known
        return module

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name == "triton.experimental" and "gluon" in fromlist:
            return SimpleNamespace(gluon=self._gluon())
        if name == GLUON:
            return self._gluon()
        if name == f"{GLUON}.language.nvidia.hopper":
            return language.hopper
        if name.startswith("pdkernels.gluon.") and fromlist:
            return self.load(name)
        return builtins.__import__(name, globals, locals, fromlist, level)

    def _gluon(self) -> Any:
        def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
            return (lambda f: Kernel(self, f)) if function is None else Kernel(self, function)

        return SimpleNamespace(jit=jit, constexpr_function=lambda f: f, language=language.language)
