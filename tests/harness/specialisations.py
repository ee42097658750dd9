"""Compiles the Triton kernels as the public functions launch them, for every kind of argument, without a GPU.

    python -m tests.harness.specialisations sm_90:ttir:speculative_attention:2      a JSON object on stdout

A case is an architecture, how far to compile (`ttir`: the front end, which checks types; `cubin`: to machine code), a public function
which calls: with `3`, every combination of the choices of any three arguments occurs in some call; `presences`: all combinations of
arguments that are absent or given; `extremes`: every row of the tables of blockings; `large` and `empty`: sizes beyond a grid's second dimension, and 0. The choices of a function are those of its
parameters; one without an entry in `CHOICES` is an error, so a new argument enters here.

Runs as a separate process, like `tests.harness.triton_budgets`: calls of our ops on CPU tensors go to the code that launches kernels
on CUDA, and a launch ends once the kernel is compiled.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import loop_names, triton_budgets
from tests.harness import state_specialisations as states
from tests.harness.choices import ABSENT, DTYPES, HEAD_DIMS, INDEX, LAYOUTS, Choices, index, zeros

# The grid's limits in each dimension: CUDA programming guide, table of technical specifications.
GRID_LIMIT = (2**31 - 1, 65535, 65535)

# (kind of scales, bits of a code, blocks of a group) of packed matrices; a group of 0 is the whole row.
MATRICES = (
    *(("half", bits, 1) for bits in (4, 5, 8)),
    *(("half_min", bits, 1) for bits in (4, 5)),
    *(("super", bits, 8) for bits in (4, 5)),
    ("super16", 6, 8),
    *((scales, bits, group) for scales in ("float", "half_zero", "float_zero") for bits in (4, 8) for group in (0, 4)),
)

# Parameters of the public functions that decide which tensors are made, with choices that specialise kernels differently.
_ATTENTION: Choices = {
    "dtype": DTYPES,
    "head_dim": HEAD_DIMS,
    "heads": ((1, 1), (4, 1), (7, 7), (28, 4)),
    "batch": (1, 2),
    "layout": LAYOUTS,
    "plan": ((16, 16), (48, 96), (128, 128)),
    "stacked": (False, True),
    "scale": (ABSENT, -0.5),
    "sinks": (ABSENT, "float32"),
}
_SPECULATIVE: Choices = {
    **_ATTENTION,
    "new": (1, 5, 81),
    "codes": (False, True),
    "capacity": (1, 300, 4096),
    "lengths": INDEX,
    "starts": index(("sequence", "token")),
    "window": (ABSENT, 7),
    "cu_seqlens": index(("packed",)),
    # A step lies within a page, or does not; pages that are no power of two.
    "block_table": index((1, 16, 24, 64, 128)),
}
CHOICES: dict[str, Choices] = {
    **states.CHOICES,
    "block_sparse_attention": {**_ATTENTION, "lengths": ((1, 1), (16, 130), (200, 200)), "grad_lse": (False, True)},
    "speculative_attention": _SPECULATIVE,
    "speculative_attention_append_": {
        **_SPECULATIVE,
        "counts": index(("sequence",)),
        "source_index": index(("rows", "columns")),
    },
    "kv_quantize": {"dtype": DTYPES, "head_dim": HEAD_DIMS, "heads": (1, 3), "rows": (1, 17, 160), "layout": LAYOUTS},
    "linear": {
        "dtype": (*((one, one) for one in DTYPES), ("float32", "bfloat16"), ("float32", "float16")),
        "rows": (1, 17, 160),
        "outputs": (1, 16, 50),
        "width": (1, 16, 40, 4096),
        "layout": LAYOUTS,
        "bias": (False, True),
    },
    "quantized_linear": {
        "dtype": DTYPES,
        "matrix": MATRICES,
        "rows": (1, 17, 160),
        "outputs": (1, 16, 50),
        "width": (32, 256, 768, 4096),
        "layout": LAYOUTS,
        "bias": (False, True),
    },
    "grouped_linear": {
        "dtype": (*((one, one) for one in DTYPES), ("float32", "bfloat16"), ("float32", "float16")),
        "rows": (1, 17, 160),
        "groups": (1, 8, 128),
        "outputs": (1, 16, 50),
        "width": (1, 16, 40, 4096),
        "layout": LAYOUTS,
        "ends": INDEX,
        "bias": (False, True),
    },
    "quantized_grouped_linear": {
        "dtype": DTYPES,
        "matrix": MATRICES,
        "rows": (1, 17, 160),
        "groups": (1, 8, 128),
        "outputs": (1, 16, 50),
        "width": (32, 256, 768, 4096),
        "layout": LAYOUTS,
        "ends": INDEX,
        "bias": (False, True),
    },
    "quantized_embedding": {
        "dtype": DTYPES,
        "matrix": MATRICES,
        "ids": INDEX,
        "rows": (1, 17),
        "outputs": (1, 50),
        "width": (32, 256, 768),
    },
    "linear_token_statistics": {
        "dtype": DTYPES,
        "rows": (1, 70, 160),
        "width": (1, 40, 64, 4096),
        "vocabulary": (2, 1000, 126464),
        "layout": (*LAYOUTS, "transposed"),
        "temperature": (0.0, 0.7),
        "seed": (3, *INDEX),
        "step": (0, 5, *INDEX),
        "positions": (ABSENT, *INDEX),
        "row_index": (ABSENT, *INDEX),
        "suppress": ((), (1,), (0, 1)),
        "top_k": (ABSENT, 1, 2, 16),
        "distribution": ("model", "sampling"),
    },
}
# What has no influence on a launch, or is made from the choices above.
OTHERS = {"backend", "return_lse", "q", "k", "v", "k_new", "v_new", "k_cache", "v_cache", "x", "weight", "hidden"}
# With filters the product is PyTorch's, in a group too, and then no kernel of Triton runs; these have no soft cap.
OTHERS |= {"softcap", "top_p", "min_p", "keep_top_k", "typical_p", "filters", "group", "first_id"} | states.OTHERS


def unknown(name: str) -> list[str]:
    """Parameters of a public function that no choice covers."""
    import pdkernels as pd

    return [one for one in inspect.signature(getattr(pd, name)).parameters if one not in OTHERS | CHOICES[name].keys()]


def covering(choices: Choices, strength: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Few calls in which all combinations of the choices of any `strength` arguments occur.

    >>> rows = list(covering({"a": (0, 1), "b": (0, 1), "c": (0, 1)}, 2))
    >>> len(rows) <= 6, {(row["a"], row["c"]) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    (True, True)
    """
    names, draw = list(choices), random.Random(seed)
    left = {
        tuple(zip(group, picked))
        for group in itertools.combinations(range(len(names)), strength)
        for picked in itertools.product(*(range(len(choices[names[at]])) for at in group))
    }
    for wanted in sorted(left):
        if wanted not in left:
            continue
        row = dict(wanted)
        others = [at for at in range(len(names)) if at not in row]
        draw.shuffle(others)
        for at in others:
            options = list(range(len(choices[names[at]])))
            draw.shuffle(options)
            groups = list(itertools.combinations(row.items(), strength - 1))
            row[at] = max(options, key=lambda one: sum(tuple(sorted((*g, (at, one)))) in left for g in groups))
        left -= set(itertools.combinations(sorted(row.items()), strength))
        yield {names[at]: choices[names[at]][one] for at, one in sorted(row.items())}


def presences(choices: Choices) -> Iterator[dict[str, Any]]:
    """All combinations of arguments that may be absent, each absent or given in its different kinds, with either dtype of indices."""
    rest = {name: values[0] for name, values in choices.items() if None not in values}
    seen = set()
    for dtype in INDEX:
        kinds = {name: [one for one in values if not (set(INDEX) - {dtype}) & _words(one)]
                 for name, values in choices.items() if name not in rest}  # fmt: skip
        if "block_table" in kinds:
            kinds["block_table"] = [one for one in kinds["block_table"] if one is None or one[0] in (24, 64)]
        for picked in itertools.product(*kinds.values()):
            if picked not in seen:
                seen.add(picked)
                yield rest | dict(zip(kinds, picked))


def _words(choice: Any) -> set[str]:
    return {one for one in (choice if isinstance(choice, tuple) else (choice,)) if isinstance(one, str)}


# --------------------------------------------------------------------------------------------------------------------- calls


def _plan(given: dict[str, Any], rows: int, columns: int) -> Any:
    from pdkernels.masks import Segment, SegmentMask
    from pdkernels.masks.tile_plan import TilePlan

    size = max(rows, columns)
    plan = SegmentMask([Segment(size, "causal")])[size - rows :, size - columns :].plan(*given["plan"])
    return TilePlan.stack([plan] * given["batch"]) if given["stacked"] else plan


def _call_block_sparse(function: Callable[..., Any], given: dict[str, Any]) -> None:
    (q_len, kv_len), (heads, kv_heads) = given["lengths"], given["heads"]
    q, k, v = (
        zeros(given["layout"], given["batch"], rows, count, given["head_dim"], dtype=given["dtype"]).requires_grad_()
        for rows, count in ((q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads))
    )
    sinks = torch.zeros(heads, requires_grad=True) if given["sinks"] else None
    out, lse = function(q, k, v, _plan(given, q_len, kv_len), scale=given["scale"], sinks=sinks, return_lse=True)
    results = (out, lse) if given["grad_lse"] else (out,)
    torch.autograd.grad(results, (q, k, v), [torch.zeros_like(x) for x in results])


def _call_speculative(function: Callable[..., Any], given: dict[str, Any]) -> None:
    batch, new, dim, layout = given["batch"], given["new"], given["head_dim"], given["layout"]
    heads, kv_heads = given["heads"]
    number = lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype))  # noqa: E731
    options: dict[str, Any] = {"scale": given["scale"], "window": given["window"]}
    options["sinks"] = number(heads, given["sinks"]) if given["sinks"] else None
    whole: tuple[int, ...] = (batch, new)
    if given["cu_seqlens"] is not None:
        whole, options["cu_seqlens"] = (batch * new,), number(batch + 1, given["cu_seqlens"][1])
    q = zeros(layout, *whole, heads, dim, dtype=given["dtype"])
    dtype, width = given["dtype"], dim
    if given["codes"]:  # of an 8-bit cache; its scales are where floats may be
        dtype, width, layout = "int8", dim + 4, "contiguous" if layout == "shifted" else layout
    k, v = (zeros(layout, *whole, kv_heads, width, dtype=dtype) for _ in range(2))
    pages, page_size = batch, given["capacity"]
    if given["block_table"] is not None:
        page_size, of_table = given["block_table"]
        pages = -(-given["capacity"] // page_size)
        options["block_table"] = number((batch, pages), of_table)
    if given["starts"] is not None:
        kind, of_index = given["starts"]
        by_token = kind == "token" and given["cu_seqlens"] is None
        options["starts"] = number((batch, new) if by_token else batch, of_index)
    if given.get("counts") is not None:
        options["counts"] = number(batch, given["counts"][1])
    if given.get("source_index") is not None:
        kind, of_index = given["source_index"]
        chosen = number((batch, 3), of_index)
        options["source_index"] = chosen if kind == "rows" else chosen.T.contiguous().T
    caches = (zeros(layout, pages, page_size, kv_heads, width, dtype=dtype) for _ in range(2))
    function(q, k, v, *caches, number(batch, given["lengths"]), _plan(given, new, new), **options)


def _call_quantize(function: Callable[..., Any], given: dict[str, Any]) -> None:
    function(zeros(given["layout"], 1, given["rows"], given["heads"], given["head_dim"], dtype=given["dtype"]))


def _call_linear(function: Callable[..., Any], given: dict[str, Any]) -> None:
    layout, (dtype, of_weight) = given["layout"], given["dtype"]
    x = zeros(layout, given["rows"], given["width"], dtype=dtype)
    weight = zeros(layout, given["outputs"], given["width"], dtype=of_weight)
    function(x, weight, zeros(layout, given["outputs"], dtype=dtype) if given["bias"] else None)


def _packed(given: dict[str, Any], matrices: int | None = None) -> Any:
    import pdkernels as pd
    from pdkernels.ops.quantized_weight import Part
    from pdkernels.reference.quantized_linear import Layout

    layout, width = Layout(*given["matrix"]), given["width"]
    data = torch.empty((matrices or 1) * layout.nbytes(given["outputs"], width), dtype=torch.uint8)
    return pd.QuantizedWeight([Part("any", layout, given["outputs"], data)], width, matrices)


def _call_quantized(function: Callable[..., Any], given: dict[str, Any]) -> None:
    layout, dtype = given["layout"], given["dtype"]
    x = zeros(layout, given["rows"], given["width"], dtype=dtype)
    function(x, _packed(given), zeros(layout, given["outputs"], dtype=dtype) if given["bias"] else None)


def _call_grouped(function: Callable[..., Any], given: dict[str, Any]) -> None:
    layout, groups, (dtype, of_weight) = given["layout"], given["groups"], given["dtype"]
    x = zeros(layout, given["rows"], given["width"], dtype=dtype)
    weight = zeros(layout, groups, given["outputs"], given["width"], dtype=of_weight)
    bias = zeros(layout, groups, given["outputs"], dtype=dtype) if given["bias"] else None
    function(x, weight, torch.zeros(groups, dtype=getattr(torch, given["ends"])), bias)


def _call_quantized_grouped(function: Callable[..., Any], given: dict[str, Any]) -> None:
    layout, groups, dtype = given["layout"], given["groups"], given["dtype"]
    x = zeros(layout, given["rows"], given["width"], dtype=dtype)
    bias = zeros(layout, groups, given["outputs"], dtype=dtype) if given["bias"] else None
    function(x, _packed(given, groups), torch.zeros(groups, dtype=getattr(torch, given["ends"])), bias)


def _call_embedding(function: Callable[..., Any], given: dict[str, Any]) -> None:
    ids = torch.zeros(given["rows"], dtype=getattr(torch, given["ids"]))
    function(ids, _packed(given), getattr(torch, given["dtype"]))


def _call_statistics(function: Callable[..., Any], given: dict[str, Any]) -> None:
    layout, rows, options = given["layout"], given["rows"], dict(given)
    for name in ("dtype", "rows", "width", "vocabulary", "layout"):
        options.pop(name)
    for name in ("seed", "step", "positions", "row_index"):
        if isinstance(options[name], str):
            options[name] = torch.zeros(rows, dtype=getattr(torch, options[name]))
    if options["top_k"] is not None:
        options["top_k"] = min(options["top_k"], given["vocabulary"])
    hidden, weight = (zeros(layout, size, given["width"], dtype=given["dtype"]) for size in (rows, given["vocabulary"]))
    function(hidden, weight, **options)


CALLS: dict[str, Callable[[Callable[..., Any], dict[str, Any]], None]] = {
    **states.CALLS,
    "block_sparse_attention": _call_block_sparse,
    "speculative_attention": _call_speculative,
    "speculative_attention_append_": _call_speculative,
    "kv_quantize": _call_quantize,
    "linear": _call_linear,
    "quantized_linear": _call_quantized,
    "grouped_linear": _call_grouped,
    "quantized_grouped_linear": _call_quantized_grouped,
    "quantized_embedding": _call_embedding,
    "linear_token_statistics": _call_statistics,
}


def extremes(name: str) -> Iterator[dict[str, Any]]:
    """Calls for every row of the tables of blockings, with all optional arguments and with none."""
    plainest = {key: values[0] for key, values in CHOICES[name].items()}
    fullest = {key: values[-1] for key, values in CHOICES[name].items()} | {"layout": "contiguous"}
    if "plan" in plainest:
        for dtype, dim in itertools.product(("bfloat16", "float32"), (48, 64, 96, 128, 192, 256, 512)):
            sizes = {"dtype": dtype, "head_dim": dim, "heads": (28, 4), "plan": (128, 128), "scale": None}
            if name == "block_sparse_attention":
                yield fullest | sizes
                continue
            for new in (1, 81):
                large = sizes | {"new": new, "capacity": 4096}
                yield plainest | large
                yield fullest | large  # pages as long as steps
                yield fullest | large | {"block_table": (16, "int64"), "cu_seqlens": None}
    else:
        layout = {"layout": ("contiguous",)} if "layout" in plainest else {}
        yield from covering({**CHOICES[name], **layout}, 1)
        for dtype in () if name in states.CHOICES else CHOICES[name]["dtype"]:
            yield plainest | {"dtype": dtype, "rows": 160, "width": 4096}
            yield fullest | {"dtype": dtype, "rows": 1, "width": 4096}


# More than 65,535 of what a second dimension of a grid could count.
LARGE: dict[str, dict[str, Any]] = {
    **states.LARGE,
    "block_sparse_attention": {"batch": 70_000},
    "speculative_attention": {"batch": 70_000, "capacity": 4096},
    "speculative_attention_append_": {"batch": 70_000, "capacity": 4096},
    "kv_quantize": {"rows": 1_200_000},
    "linear": {"rows": 1_200_000, "outputs": 2_500_000},
    "quantized_linear": {"rows": 600_000, "outputs": 2_500_000},
    "grouped_linear": {"rows": 600_000, "outputs": 2_500_000},
    "quantized_grouped_linear": {"rows": 600_000, "outputs": 2_500_000},
    "quantized_embedding": {"rows": 70_000},
    "linear_token_statistics": {"rows": 1_200_000},
}


def large(name: str) -> Iterator[dict[str, Any]]:
    """One call for each size in `LARGE`."""
    for size, count in LARGE[name].items():
        others = {other: most for other, most in LARGE[name].items() if other == "capacity"}
        yield {key: values[0] for key, values in CHOICES[name].items()} | others | {size: count}


def empty(name: str) -> Iterator[dict[str, Any]]:
    """One call for each size that may be 0: it launches no grid of 0."""
    plainest = {key: values[0] for key, values in CHOICES[name].items()}
    for size in ("batch", "new", "capacity", "rows", "outputs", "width"):
        # A row of no width has no statistics.
        if size in plainest and (name, size) != ("linear_token_statistics", "width"):
            yield plainest | {size: 0}
    if name == "block_sparse_attention":
        yield from (plainest | {"lengths": lengths} for lengths in ((0, 5), (5, 0), (0, 0)))


EVERY: dict[str, Callable[[str], Iterator[dict[str, Any]]]] = {
    "extremes": extremes,
    "large": large,
    "empty": empty,
    "presences": lambda name: presences(CHOICES[name]),
}


# ------------------------------------------------------------------------------------------------------------------ compiling


class _OnCuda(TorchDispatchMode):
    """Sends ops with a Triton kernel to the code that launches it on CUDA."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from pdkernels.ops.library import NAMESPACE, OPS

        space, name = function._schema.name.split("::")
        if space == NAMESPACE and torch._C._dispatch_has_kernel_for_dispatch_key(f"{space}::{name}", "CUDA"):
            if OPS[name].overload is function:
                return function.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class Compiler:
    """What a launch ends in while it is `in_place`."""

    def __init__(self, architecture: str, level: str) -> None:
        self.architecture, self.level = architecture, level
        self.done: set[str] = set()
        self.kinds: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.sources: dict[str, str] = {}
        self.shared: dict[str, int] = defaultdict(int)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        import triton
        from triton.runtime.jit import JITFunction

        from pdkernels.triton import blocking as _blocking

        triton.runtime.driver.set_active(triton_budgets._Driver(self.architecture))
        version = int(self.architecture[3:-1]), int(self.architecture[-1])
        choose, self.launch = _blocking.architecture.__wrapped__, JITFunction.run
        with (
            patch.object(torch.cuda, "get_device_capability", lambda device=None: version),
            patch.object(_blocking, "architecture", lambda device: choose(torch.device("cuda"))),
            patch.object(JITFunction, "run", lambda kernel, *given, **options: self.compile(kernel, *given, **options)),
            _OnCuda(),
        ):
            yield

    def compile(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """One launch, to the level wanted; the first of equals only."""
        from triton._C.libtriton import ir
        from triton.compiler import ASTSource

        name = f"{kernel.__module__.split('.')[-1]} {kernel.__name__}"
        assert "enable_fp_fusion" in options, "see pdkernels/triton/blocking.py"
        sizes = (*grid, 1, 1)[:3]
        for size, limit in zip(sizes, GRID_LIMIT):
            assert 0 < size <= limit, f"a grid of {sizes}"
        _, _, target, backend, binder = kernel.device_caches[int(self.architecture[3:])]
        bound, found, given = binder(*arguments, **options, debug=False, instrumentation_mode="")
        for parameter, (kind, _) in zip(kernel.params, found):
            constant = kind == "constexpr" and parameter.is_constexpr
            self.kinds[name][parameter.name].add(
                str(bound[parameter.name]) if constant else "absent" if kind == "constexpr" and bound[parameter.name] is None else str(kind)
            )  # fmt: skip
        self.sources[name] = kernel.src
        if (key := f"{name} {found} {given} {sorted(options.items())}") in self.done:
            return
        if self.level == "cubin":
            made = self.launch(kernel, *arguments, grid=grid, warmup=True, **options)
            self.shared[name] = max(self.shared[name], made.metadata.shared)
            limit = triton_budgets.SHARED_LIMIT[self.architecture]
            assert made.metadata.shared <= limit, f"{made.metadata.shared} bytes of shared memory"
        else:
            chosen, signature, constants, attributes = kernel._pack_args(backend, options, bound, found, given)
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            stages: dict[str, Any] = {}
            source = ASTSource(kernel, signature, constants, attributes)
            backend.add_stages(stages, chosen, source.language)
            functions = backend.get_codegen_implementation(chosen), backend.get_module_map()
            stages["ttir"](source.make_ir(target, chosen, *functions, context), {"target": target, **chosen.__dict__})
        self.done.add(key)


def optional(source: str) -> set[str]:
    """Names that a kernel compares with None."""
    return set(re.findall(r"(\w+) is (?:not )?None", source))


def main(cases: list[str]) -> None:
    """Writes what the calls of each case compile, and those that fail."""
    import pdkernels as pd

    report = {}
    for case in cases:
        architecture, level, name, strength = case.split(":")
        if missing := unknown(name):
            raise ValueError(f"{name} has no choices for {', '.join(missing)}: add them to {__name__}.CHOICES")
        compiler, failures, calls = Compiler(architecture, level), {}, 0
        every = covering(CHOICES[name], int(strength)) if strength.isdigit() else EVERY[strength](name)
        with compiler.in_place(), loop_names.forgotten() as forgotten:
            for given in every:
                calls += 1
                try:
                    CALLS[name](getattr(pd, name), given)
                except Exception as error:
                    while error.__cause__ is not None:
                        error = error.__cause__
                    failures[str(given)] = f"{type(error).__name__}: {str(error)[-400:]}"
        one_sided = {
            f"{kernel} {argument}"
            for kernel, source in compiler.sources.items()
            for argument in optional(source) & compiler.kinds[kernel].keys()
            if "absent" not in (seen := compiler.kinds[kernel][argument]) or len(seen) < 2
        }
        report[case] = {
            "calls": calls,
            "compiled": len(compiler.done),
            "failures": failures,
            "shared": compiler.shared,
            "one-sided": sorted(one_sided),
            "forgotten": sorted({*forgotten}),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
