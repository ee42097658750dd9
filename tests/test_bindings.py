"""What the bindings of ops may do: turn tensors into pointers. What is computed is in csrc."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pdkernels import _native
from pdkernels.generation import next_token
from pdkernels.models.architectures import greedy_steps, lora, mixer_ops, whole_step
from pdkernels.models.drafters import chain
from pdkernels.ops.library import NAMESPACE, OPS

BINDINGS = Path(__file__).resolve().parent.parent / "python_bindings"
# Headers of the ops. Those of the host module bind classes.
HEADERS = {path.name: path.read_text() for path in sorted(BINDINGS.glob("[!h]*.h"))}
SOURCE = "\n".join(HEADERS.values())
LONGEST = 260
# Ops that serve models and decoders alone, on the CPU.
INTERNAL = {whole_step.OP, whole_step.BIND, greedy_steps.OP, chain.OP, next_token.OP, lora.BIND, lora.ADD}
INTERNAL |= {mixer_ops.GATE, mixer_ops.DECAY, mixer_ops.NORM}
IMPLEMENTED = dict(re.findall(r'^PDK_IMPL\("(\w+)", (\w+)\)', SOURCE, re.MULTILINE))

# What reads, writes or copies the elements of a tensor, and what runs a loop over them.
COMPUTES = re.compile(
    r"\b(parallel_for|run_parallel|memcpy|memmove|memset|fill_n|copy_n|transform|accumulate|numeric_limits)\b"
    r"|\b(data<[^>]*>|bytes)\([^()]*\)\s*\[|= \*\s*(data<[^>]*>|bytes)\("
    r"|\bfor \([^;)]*;[^;]*\b(rows|width|batch|tokens|chosen|experts)_?\b[^;]*;"
)


def faults(text: str) -> list[str]:
    """What a header of bindings must not have."""
    violations = [match[0] for match in COMPUTES.finditer(text)]
    launches, ops = len(re.findall(r"\blaunch_?\(PDK_", text)), len(re.findall(r"^PDK_IMPL\(", text, re.MULTILINE))
    # The kernels of one op follow each other in csrc.
    violations += [f"{launches} launches of {ops} ops"] * (ops > 0 and launches > ops)
    return violations + [f"{text.count(chr(10))} lines"] * (text.count("\n") > LONGEST)


@pytest.mark.parametrize("name", HEADERS)
def test_bindings_compute_nothing(name: str) -> None:
    assert faults(HEADERS[name]) == []


@pytest.mark.parametrize(
    "code",
    [
        "parallel_for(0, rows_, 16, [&](int64_t begin, int64_t end) {});",
        "std::memcpy(bytes(sorted_), bytes(normed_), row_bytes);",
        "data<float>(own)[i] = 0;",
        "float best = *data<float>(scores);",
        "for (int64_t i = 0; i < rows * experts; ++i) to[i] += 1;",
        "launch(PDK_VECTOR(add_rms_norm), args);\nlaunch(PDK_VECTOR(linear), args);\nPDK_IMPL(\"x\", x)",
        "\n" * (LONGEST + 1),
    ],
)  # fmt: skip
def test_what_computes_is_noticed(code: str) -> None:
    assert faults(code) != []


def body_of(structure: str, source: str) -> str:
    return re.search(rf"struct {structure} {{(.*?)\n}};", source, re.DOTALL)[1]


KINDS = {"Tensor": "Tensor", "int64_t": "int", "double": "float", "bool": "bool", "std::string": "str", "Word": "str"}


def kind_of(declared: str) -> str:
    """A C++ type as a schema prints it."""
    written = {"Written": "Tensor!", "OptionalWritten": "Optional[Tensor]!", "WrittenList": "List[Tensor]!"}
    if declared in written:
        return written[declared]
    if inner := re.fullmatch(r"std::vector<(.+)>", declared):
        return f"List[{kind_of(inner[1])}]"
    if inner := re.fullmatch(r"std::optional<(.+)>|Optional(Tensor)", declared):
        return f"Optional[{kind_of(inner[1] or inner[2])}]"
    return KINDS[declared]


def fields(structure: str, cache: str = "", source: str = SOURCE) -> list[tuple[str, str]]:
    """The names and kinds of a structure's fields in the order of `fields()`, those of the structures in it in place of them."""
    body = re.sub(r" = (\{\}|\d+)(?=[,;])", "", body_of(structure, source))  # without what they are by default
    declared = {}
    for kind, names in re.findall(r"^  ([\w:<>]+) (\w[\w, ]*);", body, re.MULTILINE):
        declared |= {name: cache if kind == "Cache" else kind for name in names.split(", ")}
    flat = []
    for name in re.split(r",\s*", re.search(r"std::tie\(([\w,\s]+)\)", body)[1]):
        kind, _, argument = declared[name].partition("<")
        if f"struct {kind} {{" in source:
            flat += fields(kind, argument.removesuffix(">"), source)
        else:
            flat.append((name, kind_of(declared[name])))
    return flat


def structured() -> dict[str, tuple[str, str]]:
    """The ops whose bindings take one structure: its name, and its template's argument."""
    signatures = {op: rf"\b{function}\(const (\w+Inputs)(?:<(\w+)>)?& \w+\) {{" for op, function in IMPLEMENTED.items()}
    matches = {op: re.search(signature, SOURCE) for op, signature in signatures.items()}
    return {op: (match[1], match[2] or "") for op, match in matches.items() if match}


STRUCTURED = structured()


def test_every_binding_is_an_op_of_the_package() -> None:
    assert set(IMPLEMENTED) == {name for name, spec in OPS.items() if not spec.composed} | INTERNAL
    assert {*INTERNAL, "speculative_attention_append_", "gated_delta_", "token_statistics"} <= STRUCTURED.keys()


def in_schema(op: str) -> list[tuple[str, str]]:
    schema = getattr(getattr(torch.ops, NAMESPACE), op).default._schema
    return [(a.name, f"{a.type}{'!' if a.alias_info and a.alias_info.is_write else ''}") for a in schema.arguments]


@pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")
@pytest.mark.parametrize("op", STRUCTURED)
def test_a_binding_takes_the_fields_of_the_schema(op: str) -> None:
    assert fields(*STRUCTURED[op]) == in_schema(op)


@pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("lengths, counts, cu_seqlens", "lengths, cu_seqlens, counts"),
        ("int64_t first = 0, end;  // layers", "int64_t end, first, unused;"),
        ("Tensor cos, sin;\n  OptionalTensor window_cos = {}", "int64_t cos, sin;\n  OptionalTensor window_cos"),
        ("Written k_cache, v_cache;  // of all layers", "Tensor k_cache, v_cache;"),
        ("positions, starts, adapted,", "positions, adapted, starts,"),
    ],
)
def test_another_order_or_kind_is_noticed(before: str, after: str) -> None:
    assert before in SOURCE
    changed = SOURCE.replace(before, after)
    same = before.startswith("int64_t first")  # the order of declarations does not matter
    assert (fields("LayersInputs", "", changed) == in_schema(whole_step.OP)) == same
