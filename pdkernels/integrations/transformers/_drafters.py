"""The drafter of a call of `generate`, transformers' `assistant_model` and prompt lookup included, as options of a
decoding method."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdkernels._validation import check, check_type, fail
from pdkernels.decoding import find
from pdkernels.integrations.transformers._model import wrap
from pdkernels.models.checkpoints.drafters.folder import drafter_method, is_own_folder

_OP = "generate"


def method_of(method: str | None, model: Any, drafter: Any, assistant: Any, lookup: int | None) -> str:
    """The name of the decoding method: the one that was named, or the one that the drafter is for."""
    if assistant is not None:
        kind = type(assistant).__name__
        check(drafter is None, _OP, "drafter", "be None beside an assistant_model", type(drafter).__name__)
        expectation = f"be None for method {method!r}"
        check(method in (None, "draft_model"), _OP, "assistant_model", expectation, kind, "Pass drafter.")
    if lookup is not None:
        check_type(type(lookup) is int, _OP, "prompt_lookup_num_tokens", "be an int", type(lookup).__name__)
        check(lookup >= 1, _OP, "prompt_lookup_num_tokens", "be at least 1", lookup)
        expectation_of_lookup = f"be None for method {method!r}"
        check(method in (None, "jacobi"), _OP, "prompt_lookup_num_tokens", expectation_of_lookup, lookup)
        other = drafter if assistant is None else assistant
        check(other is None, _OP, "prompt_lookup_num_tokens", "be None beside a drafter", lookup)
    if method is not None:
        return method
    if assistant is not None:
        return "draft_model"
    if drafter is None:
        return "jacobi"
    if isinstance(drafter, (str, os.PathLike)):
        path = drafter if isinstance(drafter, str) else Path(drafter)
        is_own = is_own_folder(getattr(model, "name_or_path", ""), path)
        return drafter_method(path) or ("mtp" if is_own else "draft_model")
    name: str = getattr(drafter, "method", "draft_model")
    return name


def options_of(method: str, model: Any, drafter: Any, assistant: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options `drafter` and, if an assistant says it, `block_size`; `given` are those of the caller."""
    stated = given.get("drafter")
    if stated is not None:
        alone = drafter is None and assistant is None
        check(alone, _OP, "method_options", "not hold a drafter beside another one", type(stated).__name__)
        drafter = stated
    if assistant is not None:
        size, assistant_size = (owner.config.get_text_config(decoder=True).vocab_size for owner in (model, assistant))
        remedy = "A drafter writes the model's own tokens."
        check(
            size == assistant_size,
            _OP,
            "assistant_model",
            f"have the model's vocabulary of {size} tokens",
            assistant_size,
            remedy,
        )
        drafter = assistant
    elif drafter is None:
        return {}
    if "drafter" not in find(method).options:
        fail(_OP, "drafter", f"be None for method {method!r}, which has none", type(drafter).__name__)
    if hasattr(drafter, "get_output_embeddings"):
        check(method == "draft_model", _OP, "drafter", f"be a head for method {method!r}", type(drafter).__name__)
        return {"drafter": wrap(drafter), **_length(drafter, given)}
    return {"drafter": drafter}


def _length(drafter: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """`block_size` by the drafter's generation config, where transformers reads it, unless the caller gives one."""
    config: Any = getattr(drafter, "generation_config", None)
    count = getattr(config, "num_assistant_tokens", None)
    # transformers 4 fills it in.
    if "block_size" in given or count is None or count == type(config)().num_assistant_tokens:
        return {}
    check_type(type(count) is int, _OP, "num_assistant_tokens", "be an int", type(count).__name__)
    check(count >= 1, _OP, "num_assistant_tokens", "be at least 1", count)
    return {"block_size": count + 1}
