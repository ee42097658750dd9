"""Writes the ops, masks and caches as a kernel of Hugging Face's library `kernels`: FOLDER/build/VARIANT.

    python scripts/hf_kernels.py [--to FOLDER]

Such a kernel is a part of the package. It uses only relative imports, and its ops have their own namespace, so it can be loaded
together with an installed pdkernels or another build of itself. Models, decoders and training are left out.
The environment variables of setup.py apply: PDKERNELS_BUILD_CUDA, and PDKERNELS_HOST_PYTHONS for further Python versions.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("masks", "triton", "gluon", "ops", "cache")  # each needs those before it, and MODULES
MODULES = (
    "_aliasing",
    "_attention",
    "_extras",
    "_memory",
    "_native",
    "_philox",
    "_early_answers",
    "_python",
    "_quantized_formats",
    "_recurrent_state",
    "_structures",
    "_validation",
    "_version",
    "backends",
    "config",
)
ENTRY = '''"""Kernels for parallel decoding of language models: ops at the top level, masks, KV caches, and plain references."""

from . import _python as _python
from . import cache as cache
from . import masks as masks
from . import ops as ops
from . import reference as reference
from ._native import has_native as has_native
from .config import __version__ as __version__
from .config import show_config as show_config
from .ops import *

__all__ = ["__version__", "cache", "has_native", "masks", "ops", "reference", "show_config", *vars(ops)["__all__"]]
'''


def relative(source: str, package: tuple[str, ...]) -> str:
    """`source` with its absolute imports of pdkernels made relative to `package`, the folders that the module lies in.

    >>> relative("from pdkernels.ops import linear\\nfrom pdkernels import _host", ("ops",))
    'from . import linear\\nfrom .. import _host'
    """
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "pdkernels" for alias in node.names):
            raise ValueError(f"line {node.lineno} must import from pdkernels by `from`, got {ast.unparse(node)}")
        if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").partition(".")[0] != "pdkernels":
            continue
        target = tuple((node.module or "").split(".")[1:])
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(target, package)))
        name = "." * (1 + len(package) - common) + ".".join(target[common:])
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = re.sub(rf"\bfrom\s+{re.escape(node.module or '')}\s", f"from {name} ", line, count=1)
    return "\n".join(lines)


def sources() -> dict[Path, Path]:
    """What a kernel holds of the package: the path in the kernel, and the file here."""
    package = ROOT / "pdkernels"
    found = {Path(f"{name}.py"): package / f"{name}.py" for name in MODULES}
    for name in PACKAGES:
        found |= {path.relative_to(package): path for path in sorted((package / name).rglob("*.py"))}
    references = sorted((ROOT / "reference").rglob("*.py"))
    return found | {Path("reference") / path.relative_to(ROOT / "reference"): path for path in references}


def identity(files: dict[Path, Path]) -> str:
    """Of a build, by its sources: also the namespace of its ops, so two builds get on in one process."""
    digest = hashlib.sha256()
    compiled = [path for folder in ("csrc", "python_bindings") for path in sorted((ROOT / folder).rglob("*.*"))]
    for path in [*files.values(), *compiled, ROOT / "setup.py"]:
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def write_sources(files: dict[Path, Path], folder: Path) -> None:
    for inside, path in files.items():
        target = folder / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(relative(path.read_text(), inside.parent.parts))
    (folder / "__init__.py").write_text(ENTRY)


def backend_of(archs: str, cuda: str) -> tuple[str, dict[str, Any]]:
    """The backend's part of a variant's name, and its entry in metadata.json, from what the library was compiled for.

    >>> backend_of("", ""), backend_of("80;90a;100", "13.0")[1]["archs"]
    (('cpu', {'type': 'cpu'}), ['8.0', '9.0a', '10.0+PTX'])
    """
    if not archs:
        return "cpu", {"type": "cpu"}
    dotted = [re.sub(r"(\d)(\D?)$", r".\1\2", arch) for arch in archs.split(";")]
    return "cu" + cuda.replace(".", ""), {"type": "cuda", "archs": [*dotted[:-1], f"{dotted[-1]}+PTX"]}


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pdkernels_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled_for(setup: ModuleType) -> tuple[str, str]:
    """CUDA's version and the architectures, as `cuda_archs` joins them; both empty without CUDA kernels."""
    nvcc = setup.find_nvcc()
    if nvcc is None:
        return "", ""
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", printed)
    return found[1] if found else "", ";".join(setup.cuda_archs(nvcc))


def build(folder: Path) -> Path:
    """Compiles, and writes the variant into `folder`. Its path."""
    setup = load_setup()
    files = sources()
    cuda, archs = compiled_for(setup)
    backend, described = backend_of(archs, cuda)
    name = f"_pdkernels_{backend}_{identity(files)}"
    abi = "".join(map(str, setup.OLDEST_TORCH))
    variant = folder / "build" / f"torch-stable-abi{abi}-{backend}-{platform.machine()}-{sys.platform}"
    with tempfile.TemporaryDirectory() as temporary:
        options = ["build_ext", "--build-lib", temporary, "--build-temp", f"{temporary}/temporary"]
        environment = os.environ | {"PDKERNELS_OPS_NAMESPACE": name}
        subprocess.run([sys.executable, "setup.py", "-q", *options], cwd=ROOT, env=environment, check=True)
        shutil.rmtree(variant, ignore_errors=True)
        write_sources(files, variant)
        for library in (Path(temporary) / "pdkernels").glob("_*.so"):
            shutil.copy2(library, variant)
    metadata = {
        "id": name,
        "name": "pdkernels",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": described,
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy2(ROOT / "LICENSE", folder)
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "dist" / "hf-kernels", metavar="FOLDER")
    variant = build(parser.parse_args().to)
    size = sum(path.stat().st_size for path in variant.rglob("*") if path.is_file())
    print(f"{variant}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
