"""A plugin for SGLang: how its diffusion models fill a block.

Installed with SGLang, the package is found through the entry point ``sglang.srt.plugins``. That alone changes nothing;
``--dllm-algorithm PdkernelsFill`` selects the algorithm, which computes with `token_statistics` and `unmask_`: one pass
over the logits in place of a softmax that is written and read. A YAML file of ``--dllm-algorithm-config`` may have
``threshold`` (0.95, the rule of SGLang's LowConfidence) or ``factor`` (Fast-dLLM's).

Tested with the published sources of SGLang 0.5.23 and not in an engine, which needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["NAME", "register"]

NAME = "PdkernelsFill"
"""What ``--dllm-algorithm`` calls it."""
LOOKUP = "sglang.srt.dllm.algorithm.get_algorithm_cls"


def register() -> None:
    """Lets SGLang find `NAME` among its diffusion algorithms. SGLang calls it in each of its processes, before it applies hooks.

    Example:
        >>> from sglang.srt.dllm.algorithm import get_algorithm_cls  # doctest: +SKIP
        >>> from sglang.srt.plugins import load_plugins  # doctest: +SKIP
        >>> load_plugins()  # doctest: +SKIP
        >>> get_algorithm_cls("PdkernelsFill").__module__  # doctest: +SKIP
        'pdkernels.integrations.sglang._fill'
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(LOOKUP, _algorithm, HookType.AROUND)


def _algorithm(others: Callable[[str], Any], name: str) -> Any:
    if name != NAME:
        return others(name)
    from pdkernels.integrations.sglang._fill import Fill

    return Fill
