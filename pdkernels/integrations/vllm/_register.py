"""The function that vLLM calls when it loads its plugins."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

BACKEND = "pdkernels.integrations.vllm._attention.AttentionBackend"


def register() -> None:
    """Registers our attention as ``attention_backend="CUSTOM"`` of vLLM. Idempotent.

    vLLM calls it in each of its processes, through the entry point ``pdkernels`` of the group ``vllm.general_plugins``.

    Example:
        >>> from vllm.v1.attention.backends.registry import AttentionBackendEnum
        >>> from pdkernels.integrations.vllm import register
        >>> register()
        >>> AttentionBackendEnum.CUSTOM.get_class().__module__
        'pdkernels.integrations.vllm._attention'
    """
    custom = AttentionBackendEnum.CUSTOM
    register_backend(custom, BACKEND)
    platform = type(current_platform)
    usual = platform.get_attn_backend_cls
    if not current_platform.is_cpu() or hasattr(usual, "of_pdkernels"):
        return

    # On CPUs vLLM always uses its single backend, whatever the engine asks for.
    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **options: Any) -> str:
        if selected_backend is custom:
            return str(custom.get_path())
        return str(usual(selected_backend, *args, **options))

    get_attn_backend_cls.of_pdkernels = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
