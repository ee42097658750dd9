"""FlexAttention's own Triton kernel, from the template that torch ships, for a fixed shape: a control for what we predict of ours.

torch renders the template while it compiles for a GPU that it sees. Here the few functions that the template calls are filled in by
hand, with the blocks that torch takes by default on an H100, so that no GPU is needed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from tests.cudasim.build import ROOT, build_once, digest_text

FOLDER = Path(torch.__file__).parent / "_inductor" / "kernel" / "flex" / "templates"
# Of `h100_default_flex_config` for bf16 and heads of 128: rows, keys, stages, warps.
BLOCK_M, BLOCK_N, STAGES, WARPS = 128, 64, 3, 8
HEADS, KV_HEADS, LENGTH, HEAD_DIM, TILE = 28, 4, 4608, 128, 128
CONSTANTS: dict[str, Any] = {
    "BLOCK_M": BLOCK_M,
    "BLOCK_N": BLOCK_N,
    "SPARSE_Q_BLOCK_SIZE": TILE,
    "SPARSE_KV_BLOCK_SIZE": TILE,
    "QK_HEAD_DIM": HEAD_DIM,
    "QK_HEAD_DIM_ROUNDED": HEAD_DIM,
    "V_HEAD_DIM": HEAD_DIM,
    "V_HEAD_DIM_ROUNDED": HEAD_DIM,
    "GQA_SHARED_HEADS": HEADS // KV_HEADS,
    "SM_SCALE": HEAD_DIM**-0.5,
    "FLOAT32_PRECISION": "ieee",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "HAS_FULL_BLOCKS": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
    "IS_DIVISIBLE": True,
    "SAFE_HEAD_DIM": True,
}
# Of tensors: batch, heads, then tokens and elements, or tiles and their lists.
SHAPES = {
    "Q": (1, HEADS, LENGTH, HEAD_DIM),
    "K": (1, KV_HEADS, LENGTH, HEAD_DIM),
    "V": (1, KV_HEADS, LENGTH, HEAD_DIM),
    "KV_NUM_BLKS": (1, 1, LENGTH // TILE),
    "KV_IDX": (1, 1, LENGTH // TILE, LENGTH // TILE),
    "FULL_KV_NUM_BLKS": (1, 1, LENGTH // TILE),
    "FULL_KV_IDX": (1, 1, LENGTH // TILE, LENGTH // TILE),
}


def source() -> str:
    """A Python module with the kernel `flex_attention`, whose mask is a causal one."""
    import jinja2

    def stride(name: str, axis: int | None = None) -> str:
        found = torch.empty(SHAPES[name], device="meta").stride()
        return repr(found) if axis is None else repr(found[axis])

    def modification(subgraph_number: int, output_name: str, **names: Any) -> str:
        return f"{output_name} = " + ("{score}", "{m} >= {n}")[subgraph_number].format(**names)

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["indent_except_first"] = lambda text, levels: text.replace("\n", "\n" + "    " * levels)
    parts = (FOLDER.joinpath(f"{name}.py.jinja").read_text() for name in ("flex_attention", "utilities", "common"))
    body = environment.from_string("\n".join(parts)).render(
        def_kernel=lambda *names: f"@triton.jit\ndef flex_attention({', '.join(names)}, OUT):",
        gen_argdefs=lambda: "Q",
        gen_defines=lambda: "",
        size=lambda name, axis: repr(SHAPES[name][axis]),
        stride=stride,
        modification=modification,
        store_output=lambda at, value, mask, **_: (
            f"tl.store(OUT + ({at[1]} * {LENGTH} + {at[2]}) * {HEAD_DIM} + {at[3]}, {value}.to(tl.bfloat16), mask={mask})"
        ),
        USE_TMA=False,
        HAS_FULL_BLOCKS=True,
    )
    constants = [f"{name} = tl.constexpr({value!r})" for name, value in CONSTANTS.items()]
    return "\n".join(["import triton", "import triton.language as tl", "", *constants, "INDEX_DTYPE = tl.int32", body])


def compile_kernel() -> Any:
    """The kernel, compiled for the target of Triton's active driver."""
    text = source()
    path = build_once(
        ROOT / "build" / "triton_budgets" / f"flex_{digest_text(text)}.py", lambda file: file.write_text(text)
    )
    spec = importlib.util.spec_from_file_location("flex_template_rendered", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    matrix = torch.zeros(1, dtype=torch.bfloat16)
    numbers, floats = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    arguments = [matrix] * 3 + [floats] * 2 + [numbers] * 4 + [matrix]
    return module.flex_attention.run(*arguments, grid=(1,), warmup=True, num_warps=WARPS, num_stages=STAGES)
