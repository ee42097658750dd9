"""House rules: every op family has all its files, imports point one way, files have a readable size, everything is documented."""

from __future__ import annotations

import ast
import collections
import importlib
import inspect
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import pdkernels as pd
from pdkernels import config
from pdkernels.ops.library import OPS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pdkernels"


def ops_of(family: str) -> set[str]:
    """Its public ops."""
    return {op for op in OPS if getattr(getattr(pd, op, None), "__module__", None) == f"pdkernels.ops.{family}"}


# Other files beside them make what ops take.
FAMILIES = sorted(path.stem for path in (PACKAGE / "ops").glob("[!_]*.py") if ops_of(path.stem))
# Families whose ops all compose other ops on the CPU: they have no C++, but a Triton kernel.
COMPOSED_FAMILIES = {family for family in FAMILIES if ops_of(family) and all(OPS[op].composed for op in ops_of(family))}
# Ops that serve models alone, on the CPU, and what they are made of. Their reference is what the models do without them.
INTERNAL_FAMILIES = {
    "transformer_layers": "tests/models/test_whole_step.py",
    "experts": "tests/models/test_whole_step_experts.py",
    "state_mixer": "tests/models/test_whole_step_hybrid.py",
    "greedy_steps": "tests/models/test_whole_step.py",
    "draft_chain": "tests/models/test_drafter_steps.py",
    "next_token": "tests/decoding/test_next_token.py",
    "lora": "tests/models/test_request_adapters.py",
}

SOURCES = sorted(
    path
    for folder in ("csrc", "python_bindings", "pdkernels", "reference", "tests", "bench", "examples", "scripts")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".h", ".cpp", ".cu", ".sh"}
)
# 450 lines are a guide: a longer file needs a reason to stay one, such as a check and what it checks. This many have none.
LONGEST = 700
# Lines of the largest room, at most.
LARGEST_ROOM = 12_100
# Folders of a checkout that the installed package has not.
OUTSIDE = ("tests", "bench", "docs", "scripts", "examples")

# A module may import from its own room and from rooms of a lower rank.
RANKS = {
    "reference": 0,
    "base": 0,
    "grammar": 1,
    "masks": 1,
    "triton": 2,
    "gluon": 3,
    "ops": 4,
    "cache": 5,
    "models": 6,
}
RANKS |= {"generation": 7, "distributed": 8, "decoding": 8, "batch": 9, "engine": 9, "integrations": 9, "training": 9}
RANKS |= {"evaluation": 10, "serve": 10, "top": 11}
TOP = {"__init__", "__main__", "cli"}
# The same for the folders of `models`; its face imports all of them, and what it has besides imports none.
MODEL_RANKS = {"files": 1, "text": 2, "architectures": 3, "drafters": 4, "checkpoints": 5, "__init__": 6}
# What a room may import of the package, where its rank would allow more.
NEEDS = {"grammar": {"base", "grammar"}, "generation": {"base", "ops", "cache", "grammar", "models", "generation"}}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def files_of(family: str) -> list[list[str]]:
    """What a family must have: of each list at least one file."""
    # A kernel that has no values to check is in simd/ alone.
    native = [
        [f"csrc/ops/{family}.h"],
        [f"csrc/cpu/{family}.cpp", f"csrc/cpu/simd/{family}.cpp"],
        [f"python_bindings/{family}.h"],
    ]
    if family in INTERNAL_FAMILIES:
        return [*native, [INTERNAL_FAMILIES[family]]]
    return [
        [f"reference/{family}.py"],
        *([] if family in COMPOSED_FAMILIES else native),
        [f"csrc/cuda/{family}.cu", f"pdkernels/triton/{family}.py"],
        [f"pdkernels/ops/{family}.py"],
        [f"tests/ops/test_{family}.py"],
        [f"bench/bench_{family}.py"],
        [f"docs/ops/{family}.md"],
    ]


def missing(family: str, is_file: Callable[[str], bool]) -> list[list[str]]:
    return [paths for paths in files_of(family) if not any(map(is_file, paths))]


@pytest.mark.parametrize("family", [*FAMILIES, *INTERNAL_FAMILIES])
def test_every_op_family_has_all_its_files(family: str) -> None:
    def there(path: str) -> bool:
        return (ROOT / path).is_file()

    assert missing(family, there) == []
    # The rule notices each file that is taken away, unless another one of its list is there.
    for paths in files_of(family):
        present = [path for path in paths if there(path)]
        if len(present) == 1:
            assert missing(family, lambda path: path != present[0] and there(path)) == [paths]  # noqa: B023


def test_no_kernel_without_a_family() -> None:
    kernels = [*(ROOT / "csrc/cpu").rglob("*.cpp"), *(ROOT / "csrc/cuda").glob("*.cu")]
    loops = {"parallel"}  # the threads of all of them
    stems = {path.stem.removesuffix("_backward").removesuffix("_numbers") for path in kernels}
    assert stems - loops == {*FAMILIES, *INTERNAL_FAMILIES} - COMPOSED_FAMILIES


def room_of(module: str) -> str:
    """The room of a dotted name that starts with `pdkernels`."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in TOP:
        return "top"
    return parts[1] if parts[1] in RANKS else "base"


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path, module: str) -> Iterator[str]:
    """Modules and names of ours that a file imports, wherever in the file it does, for types too."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *filter(None, [node.module])])
            # `from pdkernels.models import fused` names a module, `from pdkernels.ops import x` an object in one.
            full = [f"{source}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES or source == "pdkernels" else source for name in full]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == "pdkernels")


def test_no_import_circle() -> None:
    """Type-only imports count as well."""
    graph = {module: set(imported(path, module)) & set(MODULES) for module, path in MODULES.items()}
    left = dict(graph)
    while free := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in free}
    assert {module: sorted(needs & left.keys()) for module, needs in left.items()} == {}


def outside(tree: ast.AST) -> list[str]:
    """Modules outside of the package that a file imports, or names in a string as `python -m` and `import_module` take them."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            path = ROOT / node.value.replace(".", "/")
            found += [node.value] * ("." in node.value and (path.is_dir() or path.with_suffix(".py").is_file()))
    return [name for name in found if name.partition(".")[0] in OUTSIDE]


def test_the_package_imports_nothing_outside_of_it() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "reference").rglob("*.py")]
    assert {relative(path): names for path in files if (names := outside(parsed(path)))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import tests.harness.sass",
        "def f():\n    from bench import report",
        "from scripts.methods import page",
        "run('-m', 'bench.papers')",
        "import_module('tests.harness.budgets')",
    ],
)
def test_imports_from_outside_are_found(source: str) -> None:
    assert outside(ast.parse(source)) != []


def test_only_ops_know_the_reference() -> None:
    """The package itself exposes it to users."""
    assert [
        f"{relative(path)} imports {name}"
        for module, path in MODULES.items()
        for name in imported(path, module)
        if room_of(name) == "reference" and room_of(module) != "ops" and module != "pdkernels"
    ] == []


# Modules of ops that define none and know a reference: what `backend="reference"` runs, the names of options, and the trial that
# compares a Gluon kernel before its first use.
REFERENCE_BESIDE_DEFINITIONS = {"pdkernels.ops._gluon"}


def test_only_definitions_of_ops_know_the_reference() -> None:
    """What makes or packs the arguments of an op does not compute with it: the oracle would be the implementation."""
    importers = {
        module
        for module, path in MODULES.items()
        if module != "pdkernels" and any(room_of(name) == "reference" for name in imported(path, module))
    }
    define = re.compile(r"\bdefine\(")
    assert {module for module in importers if not define.search(MODULES[module].read_text())} == (
        REFERENCE_BESIDE_DEFINITIONS
    )


def test_import_arrows_point_one_way() -> None:
    wrong = []
    for module, path in MODULES.items():
        room = "top" if path.parent == PACKAGE and path.stem in TOP else room_of(module)
        for name in imported(path, module):
            if room_of(name) != room and RANKS[room_of(name)] >= RANKS[room]:
                wrong.append(f"{relative(path)} ({room}) imports {name}")
    assert wrong == []


@pytest.mark.parametrize("room", NEEDS)
def test_rooms_import_only_what_they_need(room: str) -> None:
    others = {
        f"{relative(path)} imports {name}"
        for module, path in MODULES.items()
        for name in imported(path, module)
        if room_of(module) == room and room_of(name) not in NEEDS[room]
    }
    assert others == set()


def test_arrows_within_models_point_one_way() -> None:
    def rank(module: str) -> int:
        return MODEL_RANKS.get(module.split(".")[2], 0) if module.count(".") > 1 else MODEL_RANKS["__init__"]

    wrong = [
        f"{relative(path)} imports {name}"
        for module, path in MODULES.items()
        for name in imported(path, module)
        if room_of(module) == room_of(name) == "models"
        if rank(name) > rank(module)
    ]
    assert wrong == []


def private_names(tree: ast.AST, room: str) -> list[str]:
    """Private modules of other rooms, and private names in their modules, that a file of a room imports."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    private = re.compile(rf"pdkernels\.(?!{room}\.)\w+\.(\w+\.)*_(?!_)\w+(\.|$)")
    return [name for name in names if private.match(name)]


def test_no_room_imports_private_modules_of_another() -> None:
    """Those beside the rooms, such as `_validation`, are for all of them."""
    folder = {module: "" if path.parent == PACKAGE else module.split(".")[1] for module, path in MODULES.items()}
    assert {
        relative(path): names
        for module, path in MODULES.items()
        if (names := private_names(parsed(path), folder[module]))
    } == {}


@pytest.mark.parametrize(
    "source",
    [
        "from pdkernels.ops._gluon import fake",
        "import pdkernels.ops._gluon",
        "def f():\n    from pdkernels.ops import _gluon",
        "from pdkernels.ops.linear import _example",
    ],
)
def test_imports_of_private_modules_are_found(source: str) -> None:
    assert private_names(ast.parse(source), "models") != [] == private_names(ast.parse(source), "ops")


def test_no_room_is_endless() -> None:
    lines: dict[str, int] = {}
    for module, path in MODULES.items():
        room = room_of(module)
        if room == "models":
            room = relative(path.parent)
        lines[room] = lines.get(room, 0) + len(path.read_text().splitlines())
    assert {room: size for room, size in lines.items() if size > LARGEST_ROOM} == {}


def test_reference_imports_nothing_of_ours() -> None:
    names = {
        f"{relative(path)}: {name}"
        for path in (ROOT / "reference").rglob("*.py")
        for name in imported(path, f"pdkernels.reference.{path.stem}")
        if room_of(name) != "reference"
    }
    assert names == set()


def test_kernels_know_neither_torch_nor_python() -> None:
    foreign = re.compile(r'#include\s*[<"](torch|ATen|c10|pybind11|Python\.h)')
    assert [
        relative(path) for path in SOURCES if path.is_relative_to(ROOT / "csrc") and foreign.search(path.read_text())
    ] == []


# What a file of csrc may include from other folders of csrc. A CPU kernel asks the host for the vector level.
INCLUDES = {"common": {"common"}, "host": {"common", "host"}, "ops": {"common", "ops"}}
INCLUDES |= {"cpu": {"common", "ops"}, "cuda": {"common", "ops"}, "cpu/simd/dispatch.h": {"ops", "host"}}


@pytest.mark.parametrize("path", [path for path in SOURCES if path.is_relative_to(ROOT / "csrc")], ids=relative)
def test_includes_point_one_way(path: Path) -> None:
    name = path.relative_to(ROOT / "csrc")
    quoted = re.findall(r'#include\s*"([^"]+)"', path.read_text())
    folders = {included.partition("/")[0] for included in quoted if not (path.parent / included).is_file()}
    allowed = INCLUDES.get(str(name), INCLUDES[name.parts[0]])
    assert {folder for folder in folders if (ROOT / "csrc" / folder).is_dir()} <= allowed


def test_op_headers_do_not_depend_on_one_another() -> None:
    """Only one that extends the arguments of other ops or is made of them includes them; what several share is in common."""
    found = {
        path.stem: set(re.findall(r'#include\s*"ops/(\w+)\.h"', path.read_text()))
        for path in (ROOT / "csrc/ops").glob("*.h")
    }
    assert {name: included for name, included in found.items() if included} == {
        "experts": {"grouped_linear"},
        "draft_chain": {"next_token", "transformer_layers"},
        "greedy_steps": {"next_token", "transformer_layers"},
        "next_token": {"token_statistics"},
        "grouped_linear": {"linear", "quantized_linear"},
        "lora": {"linear", "low_rank"},
        "mixer_rows": {"transformer_ops"},
        "state_mixer": {"mixer_rows", "recurrent_state"},
        "transformer_layers": {
            "experts",
            "lora",
            "scaled_rows",
            "speculative_attention",
            "state_mixer",
            "transformer_ops",
        },
        "speculative_attention": {"block_sparse_attention"},
    }


def test_no_file_is_endless() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in [*SOURCES, ROOT / "setup.py"]}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}


def test_no_dataclass_compares_tensors() -> None:
    """Python would ask whether a tensor of several numbers is true: such a class says that its values equal only themselves."""
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "reference").glob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                made = [ast.unparse(decorator) for decorator in node.decorator_list]
                held = [ast.unparse(item.annotation) for item in node.body if isinstance(item, ast.AnnAssign)]
                compares = any("dataclass" in text and "eq=False" not in text for text in made)
                assert not (compares and "Tensor" in " ".join(held)), f"{relative(path)}: {node.name}"


def test_nothing_is_left_to_do() -> None:
    mark = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    assert [relative(path) for path in SOURCES if mark.search(path.read_text())] == []


# The backward pass of an op is called by autograd alone.
@pytest.mark.parametrize("op", sorted(op for op in OPS if not op.endswith("_backward")))
def test_every_op_is_public_and_shown(op: str) -> None:
    function = getattr(pd, op)
    assert op in pd.__all__ and op in pd.ops.__all__ and getattr(pd.ops, op) is function
    text = inspect.getdoc(function)
    assert text and "Example:" in text and ">>>" in text and "Args:" in text


@pytest.mark.parametrize(
    "module", ["pdkernels", *(f"pdkernels.{path.parent.name}" for path in sorted(PACKAGE.glob("*/__init__.py")))]
)
def test_every_public_name_has_a_docstring(module: str) -> None:
    loaded = importlib.import_module(module)
    assert loaded.__doc__
    public = {name: getattr(loaded, name) for name in loaded.__all__}
    documented = (inspect.isclass, inspect.isroutine, inspect.ismodule)
    # What a class inherits would be found too: each needs its own docstring.
    assert [
        name
        for name, value in public.items()
        if any(kind(value) for kind in documented) and not vars(value).get("__doc__", value.__doc__)
    ] == []


def test_every_environment_variable_is_in_show_config() -> None:
    reads = re.compile(r'(?:environ|getenv)\W[^\n]*?"(PDKERNELS_\w+)"')
    folders = ("pdkernels", "csrc", "python_bindings")
    read = {
        name
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] in folders
        for name in reads.findall(path.read_text())
    }
    assert read == set(config.ENVIRONMENT)


def test_linter_finds_nothing() -> None:
    ruff = pytest.importorskip("ruff")
    found = subprocess.run(
        [ruff.find_ruff_bin(), "check", "--no-cache", "--output-format=concise"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_specialised_constants_are_inline() -> None:
    """Without `inline` each file that includes one defines it anew: linking fails with GCC 16."""
    constant = re.compile(r"template <>\s+(?:static )?constexpr [^(){};]*=")
    assert constant.search("template <>\nconstexpr bool kIsCode<Code> = true;")
    assert not [
        relative(path) for path in SOURCES if path.suffix in (".h", ".cpp", ".cu") and constant.search(path.read_text())
    ]


VAGUE = frozenset(
    """
    given found known one kept whole held taken rest both others wanted part parts more over own what some every
    shown fits inside asked left ours words named made said likely sure plain usual broken many several fact facts
    listed absent counted written lacking missing theirs mine again
    """.split()
)
"""Participles and fillers, which do not say what a thing is."""


def assigned_names(source: str) -> list[str]:
    """The names that a module assigns, and its parameters."""
    nodes = list(ast.walk(ast.parse(source)))
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return stored + [node.arg for node in nodes if isinstance(node, ast.arg)]


def test_names_say_what_things_are() -> None:
    """A result of a search is not called `found`, nor a message `words`: fewer than one name in a hundred is."""
    assert assigned_names("def f(given):\n    found = lambda one: one") == ["found", "given", "one"]
    names = [name for path in (ROOT / "pdkernels").rglob("*.py") for name in assigned_names(path.read_text())]
    vague = collections.Counter(name for name in names if name in VAGUE)
    assert sum(vague.values()) < len(names) / 100, vague.most_common(10)
