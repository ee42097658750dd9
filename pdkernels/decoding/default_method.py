"""The default method and options of a model: the method that it was trained for, or else one that costs nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pdkernels.decoding.methods import METHODS
from pdkernels.models.capabilities import capabilities
from pdkernels.models.protocols import missing

# Nothing in a model tells that it was trained to jump ahead.
_TRAINED_TO_JUMP = ("tiny-jacobi",)
_LOOKUP = {"draft": "lookup", "block_size": "auto"}


def default_method(
    model: Any, options: Collection[str] = (), *, name: str = "", several: bool = False
) -> tuple[str, dict[str, Any]]:
    """The method for a model when the caller names none, and its options.

    A model that was trained for a method gets it. Any other decodes token by token, with drafts that are looked up in
    the text, as far as they pay: these never change the tokens, and without a match a forward has one row, as without
    drafts. A model with a drafter uses it: a head, if it has both a head and a second model.

    Args:
        model: as for `generate`.
        options: names of those that the caller gives, which come before the choice's own; with `draft` or `window` the
            choice has no `block_size`. For one that only decoders of recurrent depth have, such as `init_scale`, the
            method is "recurrent_static".
        name: the name that the model was loaded by. Only tiny-jacobi is recognised by it.
        several: whether many prompts share a forward. Then nothing is looked up: forwards become fewer only where all
            of them accept drafts, and every draft adds rows.

    Returns:
        The method's name, and the options that the choice includes.

    >>> import pdkernels as pd
    >>> default_method(pd.models.load("tiny-code"))
    ('jacobi', {'draft': 'lookup', 'block_size': 'auto'})
    >>> default_method(pd.models.load("tiny-code"), several=True)
    ('autoregressive', {})
    >>> default_method(pd.models.load("tiny-trimode"))
    ('linear_self_speculation', {})
    """
    drafters = () if several else getattr(model, "drafters", None) or ()
    attached = next((method for method in reversed(METHODS) if method in drafters), None)
    if attached is not None:
        chosen = {"block_size": "auto"}
        return attached, {option: value for option, value in chosen.items() if option not in options}
    method, chosen = _trained_for(model, name) or ("jacobi", dict(_LOOKUP))
    if chosen and (several or missing(model, METHODS[method].model_protocol)):
        method, chosen = "autoregressive", {}
    if "recurrent" in capabilities(model) and not METHODS[method].options.keys() >= set(options):
        return "recurrent_static", {}
    if method == "jacobi" and ("window" in options or "draft" in options or not _has_row_times(model)):
        chosen = {option: value for option, value in chosen.items() if option != "block_size"}
    return method, {option: value for option, value in chosen.items() if option not in options}


def _has_row_times(model: Any) -> bool:
    """Whether the times of its forwards say what drafts cost: not those of a function, nor those of one of several
    ranks."""
    return hasattr(model, "parameters") and not hasattr(getattr(model, "model_itself", model), "ranks")


def _trained_for(model: Any, name: str) -> tuple[str, dict[str, Any]] | None:
    offered = capabilities(model)
    if "plan_tokens" in offered:
        return "planned", {}
    if "causal" not in offered:
        return ("llada" if "bidirectional" in offered else "fast_dllm_v2"), {}
    if "recurrent" not in offered and name in _TRAINED_TO_JUMP:
        return "jacobi", {}
    speculates = METHODS["linear_self_speculation"]
    fills_masks = speculates.supports(model) and getattr(model, "mask_token", None) is not None
    if fills_masks and not missing(model, speculates.model_protocol):
        return speculates.name, {}
    return None
