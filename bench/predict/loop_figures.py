"""Instructions, waits and spills in the loops of the compiled Triton kernels for Hopper, and the number of programs per SM.

    python -m bench.predict.loop_figures sm_90:bf16:128      a JSON object on stdout

Runs as a process of its own, as `tests.harness.triton_budgets` does, whose cache it shares.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.harness import triton_budgets as harness
from tests.harness.sass import Instruction, disassemble, mix, pipe_cycles, steady_loops

CASE = "sm_90:bf16:128"
REGISTERS, THREADS, SHARED = 65536, 2048, 227 * 1024
"""Of an SM of Hopper; a block takes 1 KiB of shared memory besides its own."""


def tensor_cycles(loop: Sequence[Instruction]) -> int:
    """Of a warp group: ``HGMMA.64xNx16`` multiplies for N / 2 cycles, ``IGMMA.64xNx32`` too."""
    shapes = [x.name.split(".")[1] for x in loop if x.name.startswith(("HGMMA", "IGMMA"))]
    return sum(int(shape.split("x")[1]) // 2 for shape in shapes)


def _last_number(x: Instruction) -> int:
    return int(x.operands.split(",")[1], 16)


def read_loop(loop: Sequence[Instruction]) -> dict[str, int]:
    """A step: slots and MUFU cycles of a warp, tensor cycles of a warp group, and what it waits for.

    ``wait``: groups of loads that may still be under way where the loop waits for one; 99: it waits for none. ``drains``: how often it
    waits until no product is under way. ``loaded``: bytes that a warp copies to shared memory.
    """
    waits = [_last_number(x) for x in loop if x.name.startswith("DEPBAR")]
    copies = [x.name for x in loop if x.name.startswith("LDGSTS")]
    return {
        "slots": len(loop),
        "tensor": tensor_cycles(loop),
        "mufu": pipe_cycles(loop, "MUFU"),
        "wait": min(waits, default=99),
        "drains": sum(x.name.startswith("WARPGROUP.DEPBAR") and _last_number(x) == 0 for x in loop),
        "spills": mix(loop)["LDL"] + mix(loop)["STL"],
        "loaded": sum(512 if "128" in name else 256 if "64" in name else 128 for name in copies),
    }


def read_scan(kernel: Any) -> dict[str, Any]:
    """Of a layer with a state; ``steady``: the longest loop, over new rows."""
    return _read(kernel, lambda loop: len(loop) > 0)


def read_kernel(kernel: Any) -> dict[str, Any]:
    """``steady``: the loop with the most work for tensor cores, of equals the shortest; ``masked``: the longest of the others that
    have any."""
    return _read(kernel, lambda loop: tensor_cycles(loop) or mix(loop)["HMMA"] or mix(loop)["IMMA"])


def _read(kernel: Any, wanted: Callable[[list[Instruction]], object]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        (code,) = disassemble(cubin, "sm_90a").values()
    loops = [loop for loop in steady_loops(code) if wanted(loop)]
    if any(map(tensor_cycles, loops)):
        loops.sort(key=lambda loop: (-tensor_cycles(loop), len(loop)))
    figures, warps = harness.read_figures(kernel, "sm_90"), kernel.metadata.num_warps
    registers = -(-figures["registers"] // 8) * 8 * 32 * warps
    programs = min(REGISTERS // registers, THREADS // (32 * warps), SHARED // (figures["shared"] + 1024))
    return {
        "steady": read_loop(loops[0]),
        "masked": read_loop(max(loops[1:], key=len)) if len(loops) > 1 else None,
        "code": len(code),
        "warps": warps,
        "programs": programs,
    }


def main(cases: list[str]) -> None:
    from tests.harness import flex_template
    from tests.ops.test_linear_compiled import compile_variant as compile_product
    from tests.ops.test_linear_token_statistics_compiled import MANY_ROWS
    from tests.ops.test_linear_token_statistics_compiled import compile_variant as compile_head
    from tests.ops.test_quantized_linear_compiled import compile_variant as compile_packed
    from tests.ops.test_quantized_linear_compiled import matrices
    from tests.ops.test_recurrent_state_compiled import compile_variant as compile_states
    from tests.ops.test_recurrent_state_compiled import launch, launch_selective
    from tests.ops.test_speculative_attention_compiled import compile_variant

    found = {}
    for case in cases:
        for name, kernel in harness.compile_case(case).items():
            if name != "_sum_kernel":
                found[name.strip("_").removesuffix("_kernel")] = read_kernel(kernel)
        for layout in ("contiguous", "paged"):
            found[f"speculative {layout}"] = read_kernel(compile_variant(case, 81, layout)["_split_kernel"])
        for name, rows in {"few": 4, "many": MANY_ROWS}.items():
            found[f"vocabulary {name}"] = read_kernel(compile_head("sm_90:bf16:4096", 0.0, rows)["_parts_kernel"])
        for rows in (16, 64):
            found[f"product, {rows} rows"] = read_kernel(compile_product("sm_90:bf16:4096", False, rows, 28672))
        # Those that an H200 has timed.
        for name, sizes in {"half 4": (8, 16, 64), "half 8": (8, 16, 64), "super 4": (8,)}.items():
            for rows in sizes:
                kernel = compile_packed("sm_90:bf16:4096", matrices()[name], rows)["_products"]
                found[f"packed {name}, {rows} rows"] = read_kernel(kernel)
        for name, of in (("delta", launch), ("mamba", launch_selective)):
            for columns, batch in ((16, 16), (8, 1)):
                found[f"state {name}, {columns} columns"] = read_scan(
                    compile_states(case, partial(of, batch=batch))["_scan"]
                )
        found["flex"] = read_kernel(flex_template.compile_kernel())
    print(json.dumps(found))


def measure() -> dict[str, dict[str, Any]]:
    """The figures of all kernels, from a process of their own."""
    return harness.measure([CASE], "bench.predict.loop_figures")


if __name__ == "__main__":
    main(sys.argv[1:])
