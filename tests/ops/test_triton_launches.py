"""What holds for the launches of all Triton kernels: the device, how often they are compiled, how far their pointers reach."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from pdkernels import backends
from pdkernels._attention import AttentionArguments, GradientArguments, SpeculativeArguments
from pdkernels.ops.library import OPS, _on_its_device
from tests.harness import triton_budgets as harness
from tests.harness.triton_interpreter import requires_triton

pytestmark = [requires_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")]
# Numbers of tokens or rows: Triton would compile separate kernels for 1, for multiples of 16 and for others.
SIZES = (160, 1, 100)


class CurrentDevice:
    """Records the device switches of torch while it is patched in."""

    def __init__(self) -> None:
        self.index = 0

    def exchange(self, index: int) -> int:
        before = self.index
        if index >= 0:
            self.index = index
        return before

    def patched(self) -> Any:
        return mock.patch.multiple(
            torch.cuda, _exchange_device=self.exchange, _maybe_exchange_device=lambda index: self.exchange(index)
        )


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="pretends that there is a second GPU, which a driver denies")
def test_the_device_of_the_tensors_is_current() -> None:
    with FakeTensorMode():
        x = torch.empty(3, device="cuda:1")
    device = CurrentDevice()
    with device.patched():
        assert _on_its_device(lambda _: device.index)(x) == 1
        with pytest.raises(ZeroDivisionError):
            _on_its_device(lambda _: 1 // 0)(x)
    assert device.index == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="calls the kernels of CUDA on CPU tensors")
@pytest.mark.parametrize("op", [op for op, kernel in backends.ON_CUDA.items() if kernel == "triton"])
def test_every_op_switches_to_it(op: str) -> None:
    from tests.ops.examples import raw_arguments

    arguments, options = raw_arguments(op)
    with mock.patch.object(torch.cuda, "device_of", side_effect=torch.cuda.device_of) as switch:
        OPS[op].overload.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *arguments, **options)
    switch.assert_called_once_with(arguments[0])


# --- compiled once


def launch_all(size: int) -> None:
    """Each kernel of Triton on `size` tokens or rows."""
    from pdkernels.masks import Segment, SegmentMask
    from pdkernels.reference.quantized_linear import Layout
    from pdkernels.triton import (
        block_sparse_attention,
        grouped_linear,
        linear,
        linear_token_statistics,
        quantized_linear,
        speculative_attention,
    )

    make = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)  # noqa: E731
    plan = SegmentMask([Segment(size, "causal")]).plan(128, 128).arguments
    q, k = make(1, size, 8, 64), make(1, size, 2, 64)
    given = AttentionArguments(q, k, k, *plan, 0.1)
    out, lse = block_sparse_attention.forward(given)
    block_sparse_attention.backward(GradientArguments(out, None, out, lse, given))
    each = torch.stack([plan.plan_rows] * 2)
    pages, lengths = make(300, 16, 2, 64), torch.zeros(2, dtype=torch.int64)
    table, chosen = torch.zeros(2, 1000 + size, dtype=torch.int32), torch.zeros(2, size, dtype=torch.int64)
    new = (x.expand(2, -1, -1, -1)[:, :40] for x in (make(1, 40, 8, 64), make(1, 40, 2, 64), make(1, 40, 2, 64)))
    rows = {"counts": lengths, "source_index": chosen}
    speculative = SpeculativeArguments(*new, pages, pages, lengths, each, *plan[1:], 0.1, table, **rows)
    speculative_attention.forward(speculative, append=True)
    linear.forward(make(size, 64), make(96, 64), None)
    layout = Layout("half", 4, 1)
    packed = [torch.zeros(layout.nbytes(96, 64), dtype=torch.uint8)], [layout.number], [96]
    quantized_linear.forward(make(size, 64), *packed, None)
    ends = torch.zeros(8, dtype=torch.int64)
    grouped_linear.forward(make(size, 64), make(8, 96, 64), ends, None)
    experts = [torch.zeros(8 * layout.nbytes(96, 64), dtype=torch.uint8)], *packed[1:]
    grouped_linear.quantized_forward(make(size, 64), *experts, ends, None)
    quantized_linear.rows_of(torch.zeros(size, dtype=torch.int64), *packed, 64, torch.bfloat16)
    linear_token_statistics.forward(make(size, 64), make(96, 64), 1.0, 0, None, 0, None, None, None, (), 2, "sampling")


def main(cases: list[str]) -> None:
    """Writes how many different kernels of each name the calls compile."""
    import triton
    from triton.runtime.jit import JITFunction

    from pdkernels.triton import blocking as _blocking

    kernels: dict[str, set[str]] = defaultdict(set)
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        kernels[f"{self.__module__.split('.')[-1]} {self.__name__}"].add(
            launch(self, *arguments, warmup=True, **options).hash
        )

    JITFunction.run = compile_only
    for architecture in cases:
        triton.runtime.driver.set_active(harness._Driver(architecture))
        _blocking.architecture = lambda device, architecture=architecture: architecture
        for size in SIZES:
            launch_all(size)
    print(json.dumps({name: len(hashes) for name, hashes in kernels.items()}))


def test_no_kernel_is_recompiled_for_another_length() -> None:
    compiled = harness.measure(["sm_90"], __name__)
    # Tiles of packed products are smaller for up to 8 rows.
    assert compiled.pop("quantized_linear _products") == 2
    assert compiled.pop("grouped_linear _grouped_products") == 3
    assert len(compiled) == 13 and set(compiled.values()) == {1}, compiled


# --- far apart


def heads_first(memory: Tensor, at: int, values: Tensor) -> Tensor:
    """A view of `values`, whose heads are so far apart that the third one is 2**31 elements from the first."""
    _, tokens, heads, head_dim = values.shape
    view = memory.as_strided((1, tokens, heads, head_dim), (head_dim, head_dim, 2**30, 1), 2**31 + at)
    return view.copy_(values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory is that of the host, which the interpreter reads")
def test_heads_of_a_view_may_be_far_apart(tmp_path: Path) -> None:
    """Offsets of 32 bits would wrap to the other side; the memory extends as far there, and holds other numbers."""
    from tests.ops.test_block_sparse_attention_triton import causal, make_plan, randn, run_kernels

    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 2**20, dtype=torch.float16)
    inputs = [randn(1, 20, 3, 16, dtype=torch.float16, seed=seed) for seed in range(4)]
    q, k, v, grad = (heads_first(memory, 2**16 * i, x.cpu()) for i, x in enumerate(inputs))
    plan = make_plan(causal(20), 32, 32)
    wanted = run_kernels(*inputs[:3], plan, 0.25, inputs[3], None)
    assert all(torch.equal(a, b) for a, b in zip(run_kernels(q, k, v, plan, 0.25, grad, None), wanted))


def far(memory: Tensor, values: Tensor, at: int) -> Tensor:
    """A copy whose first dimension has a stride of 2**30 elements: its third entry is 2**31 from its first."""
    strides = (2**30, *values.contiguous().stride()[1:])
    return memory.as_strided(values.shape, strides, 2**31 + at).copy_(values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory is that of the host, which the interpreter reads")
def test_pages_and_rows_may_be_far_apart(tmp_path: Path) -> None:
    """Caches and weights of more than 2**31 elements."""
    from pdkernels.masks import causal
    from pdkernels.reference.quantized_linear import Layout
    from pdkernels.triton import linear, linear_token_statistics, quantized_linear, speculative_attention

    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 2**20, dtype=torch.float16)
    draw = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(shape, generator=draw).half()  # noqa: E731
    q, k_new, v_new = make(1, 4, 2, 16), make(1, 4, 1, 16), make(1, 4, 1, 16)
    k, v = make(3, 16, 1, 16), make(3, 16, 1, 16)
    plan, table = causal(4).plan(16, 16).arguments, torch.tensor([[2, 0, 1]], dtype=torch.int32)

    def attend(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, ...]:
        arguments = (q, k_new, v_new, k_cache, v_cache, torch.tensor([37]), *plan, 0.25, table)
        found = speculative_attention.forward(SpeculativeArguments(*arguments), append=True)
        return *found, k_cache, v_cache

    wanted = attend(k.clone(), v.clone())
    assert all(torch.equal(a, b) for a, b in zip(attend(far(memory, k, 0), far(memory, v, 2**16)), wanted))
    batch = [x.expand(3, -1, -1, -1) for x in (q, k_new, v_new)]
    contiguous = (*batch, k, v, torch.tensor([16, 9, 16]), *plan, 0.25)
    apart = (*batch, far(memory, k, 0), far(memory, v, 2**16), *contiguous[5:])
    found, wanted = (speculative_attention.forward(SpeculativeArguments(*x)) for x in (apart, contiguous))
    for a, b in zip(found, wanted):
        assert torch.equal(a, b)
    x, weight = make(2, 40), make(3, 40)
    assert torch.equal(linear.forward(x, far(memory, weight, 0), None), linear.forward(x, weight, None))
    layout, codes = Layout("half", 4, 1), torch.randint(0, 60, (1 << 10,), generator=draw, dtype=torch.uint8)
    packed = [codes[: layout.nbytes(3, 64)]], [layout.number], [3]
    x = make(3, 64)
    assert torch.equal(
        quantized_linear.forward(far(memory, x, 0), *packed, None), quantized_linear.forward(x, *packed, None)
    )
    rest = (0.0, 0, None, 0, None, None, None, (), 2, "model")
    for a, b in zip(
        linear_token_statistics.forward(far(memory, make(3, 40), 2**17), far(memory, weight, 0), *rest),
        linear_token_statistics.forward(memory.as_strided((3, 40), (2**30, 1), 2**31 + 2**17).clone(), weight, *rest),
    ):
        assert torch.equal(a, b)


if __name__ == "__main__":
    main(sys.argv[1:])
