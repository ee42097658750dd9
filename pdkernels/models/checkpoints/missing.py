"""Published families with windows that no model here computes, and what they need beyond it."""

from __future__ import annotations

from pdkernels._validation import sentence
from pdkernels.models.files.fields import OP

_LLAMA4 = (
    "layers without positions, queries scaled by their position, norms of rotated queries and keys, and experts whose "
    "input is weighted"
)
_NEEDED = dict.fromkeys(("llama4", "llama4_text"), _LLAMA4)


def refuse_missing(kind: object, where: str) -> None:
    """Raises NotImplementedError for one of them, by its `model_type` or its name in a GGUF file.

    >>> refuse_missing("gemma2", "config.json")
    """
    needed = _NEEDED.get(str(kind))
    if needed is not None:
        reason = f"{where}: {kind} has {needed}, which the models of this package have not"
        raise NotImplementedError(sentence(OP, reason, "pdkernels.integrations.transformers.wrap may run it."))
