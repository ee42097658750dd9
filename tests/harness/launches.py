"""How many kernels a decoding step launches, counted on a simulated GPU. Nothing here is measured.

    python -m tests.harness.launches             the table of docs/gpu_proof.md
    python -m tests.harness.launches --write     puts it there
    python -m tests.harness.launches --json F    the same numbers; `--captured`: nodes of really captured graphs, on a GPU

A step is what `DeviceLoop` captures. An op of ours counts the launches of its source. Any other operator that computes counts one,
which is the least it takes. The step is counted once more where plain PyTorch computes what is between matrix products and
attention: norms, gates, rotations and a recurrence's input and exit.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import pdkernels as pd
from pdkernels import backends
from pdkernels.models.architectures import fused
from pdkernels.ops.token_statistics import Options
from tests.cudasim.build import ROOT
from tests.harness import sessions
from tests.harness.pretended_gpu import operators, pretended_gpu

PAGE = ROOT / "docs" / "gpu_proof.md"
REGION = re.compile(r"(<!-- launches -->\n).*?(<!-- /launches -->)", re.DOTALL)

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("tiny-code", "autoregressive", {}),
    ("tiny-code", "autoregressive", {"temperature": 0.7}),
    ("tiny-code", "jacobi", {"block_size": 16}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 16}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 16, "threshold": 0.9}),
    ("tiny-trimode", "quadratic_self_speculation", {"block_size": 8}),
    ("tiny-trimode", "block_diffusion", {"block_size": 16}),
    ("tiny-masked", "llada", {"block_size": 16}),
    ("tiny-masked", "fast_dllm", {"block_size": 16}),
    ("tiny-recurrent", "autoregressive", {}),
    ("tiny-recurrent", "recurrent_diffusion", {"max_wavefront": 16}),
]

# By op; others launch one kernel.
LAUNCHES: dict[str, Callable[[dict[str, Any]], int]] = {
    "kv_commit_": lambda given: 1 + (given["source_index"] is not None),
    "token_statistics": lambda given: statistics_launches(given),
    "linear_token_statistics": lambda given: 2,
    # One for each part of the matrix; the rows are quantised first.
    "quantized_linear": lambda given: 1 + len(given["weights"]),
    "quantized_grouped_linear": lambda given: 1 + len(given["weights"]),
    "quantized_embedding": lambda given: len(given["weights"]),
    "speculative_attention": lambda given: attention_launches(given),
    "speculative_attention_append_": lambda given: attention_launches(given),
}
# Operators that compute nothing, besides views.
IDLE = {
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
UNFUSED = ("recurrence_inject", "recurrence_exit")


class Count(NamedTuple):
    """Launches of a step."""

    products: int
    ours: int
    others: int

    @property
    def total(self) -> int:
        return sum(self)


def statistics_launches(given: dict[str, Any]) -> int:
    """One for all rows; filters of the logits and of the distribution before."""
    options = Options(**{name: given[name] for name in Options._fields})
    draws = options.temperature > 0 or options.distribution == "sampling"
    return 1 + (options.cuts and draws) + options.filters.changes


def attention_launches(given: dict[str, Any]) -> int:
    """A second kernel merges the parts, unless there is only one."""
    from pdkernels.triton.speculative_attention import choose_splits

    k, table = given["k_cache"], given["block_table"]
    capacity = k.shape[1] if table is None else table.shape[1] * k.shape[1]
    return 1 + (choose_splits(capacity, k.shape[2]) > 1)


def counted(run: Callable[[], object]) -> Count:
    """The launches of `run` on the pretended GPU."""
    with operators() as calls:
        run()
    products = ours = others = 0
    for function, arguments in calls:
        space, name = function._schema.name.split("::")
        if space == "pdkernels":
            asked = function._schema.arguments
            given = {one.name: one.default_value for one in asked} | dict(zip((one.name for one in asked), arguments))
            ours += LAUNCHES.get(name, lambda given: 1)(given)
        elif name in PRODUCTS:
            products += 1
        else:
            others += not (function.is_view or name in IDLE)
    return Count(products, ours, others)


@contextmanager
def plain() -> Iterator[None]:
    """Plain PyTorch between products and attention."""
    choices = {op: {**backends.CHOICES[op], ("auto", "cuda"): "reference"} for op in UNFUSED}
    with patch.object(fused, "enabled", lambda x: False), patch.dict(backends.CHOICES, choices):
        yield


def steps_of(name: str, method: str, options: dict[str, Any]) -> Iterator[tuple[str, Count]]:
    """Each form of a step, for one sequence in the middle of a generation."""
    model = pd.models.load(name).to("cuda")
    session, _ = sessions.open_session(model, [[1] * 32], 128, ())
    with torch.inference_mode():
        steps = sessions.steps_of(method, session, **options)
        steps.start(session)
        forms = [getattr(steps, form) for form in steps.forms]
        for form in forms * 2:  # tables are made once
            form()
        for form in forms:
            yield form.__name__, counted(form)


Found = list[tuple[str, str, Count, Count]]


def rows(cases: list[tuple[str, str, dict[str, Any]]] = CASES) -> Found:
    """Method and options, form, counts before and after, one for each form of each case."""
    found = []
    with pretended_gpu():
        for case in cases:
            after = list(steps_of(*case))
            with plain():
                before = list(steps_of(*case))
            options = ", ".join(f"{key}={value}" for key, value in case[2].items())
            label = f"`{case[1]}`" + (f", {options}" if options else "") + f" ({case[0]})"
            found += [(label, form, was, now) for (form, now), (_, was) in zip(after, before, strict=True)]
    return found


def simulated() -> list[dict[str, Any]]:
    """`rows` for a JSON file."""
    return [
        {"step": label, "form": form, "plain": was._asdict(), "now": now._asdict()} for label, form, was, now in rows()
    ]


def markdown(found: Found | None = None) -> str:
    lines = [
        "| method | form | plain PyTorch between products | now | products | kernels of ours | others |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for label, form, was, now in found or rows():
        lines.append(f"| {label} | {form} | {was.total} | {now.total} | {now.products} | {now.ours} | {now.others} |")
    return "\n".join(lines)


def captured(cases: list[tuple[str, str, dict[str, Any]]] = CASES) -> list[dict[str, Any]]:
    """Nodes of the graphs that `DeviceLoop` captures on a GPU, by kind."""
    from pdkernels.integrations.device_loop import DeviceLoop

    found = []
    for name, method, options in cases:
        model = pd.models.load(name).cuda()
        loop = DeviceLoop(model, method, longest_prompt=32, max_new_tokens=128, end_tokens=(), **options)
        found.append({"model": name, "method": method, "options": options, "nodes": loop.nodes})
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kernel launches of decoding steps, counted on a simulated GPU.")
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu_proof.md")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to a file")
    parser.add_argument("--captured", action="store_true", help="count the nodes of captured graphs, on a GPU")
    given = parser.parse_args(arguments)
    if given.json:
        kind, numbers = ("captured", captured()) if given.captured else ("simulated", simulated())
        Path(given.json).write_text(json.dumps({kind: numbers}, indent=1) + "\n")
        return 0
    table = markdown()
    if given.write:
        PAGE.write_text(REGION.sub(lambda found: f"{found[1]}{table}\n{found[2]}", PAGE.read_text()))
    else:
        print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
