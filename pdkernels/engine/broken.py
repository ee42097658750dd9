"""A model that computes nothing, such as one with NaN in its weights: no request of an engine can go on."""

from __future__ import annotations

from typing import Any

import torch

from pdkernels._validation import sentence


class BrokenModel(RuntimeError):
    """The model's logits are NaN whatever the text is."""


def refuse_broken(model: Any, error: Exception) -> None:
    """Raises BrokenModel if all logits of a model are NaN after each of two tokens alone: not the request that failed
    with `error` is to blame then."""
    try:
        with torch.inference_mode():
            cache = model.new_cache(2, 2)
            logits = model(torch.tensor([[0], [1]], device=cache.device), cache=cache)
            all_nan = bool(logits.isnan().all())
    except Exception:  # a model that runs otherwise
        return
    if all_nan:
        fault = "the model's logits are NaN whatever the text is"
        raise BrokenModel(sentence("Engine", fault, "Look for NaN in its weights.")) from error
