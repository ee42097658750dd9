"""A value of each setting that changes something, for tests that walk the settings through a door."""

from __future__ import annotations

from typing import Any

import torch

from pdkernels.decoding import Grammar
from pdkernels.generation.params import SETTINGS


def halved(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A logits processor."""
    return logits / 2


def long_enough(ids: torch.Tensor, logits: None) -> bool:
    """A stopping criterion."""
    return ids.shape[1] >= 12


EXAMPLES: dict[str, Any] = {
    "adapter": "style",
    "temperature": 0.75,
    "top_k": 5,
    "top_p": 0.875,
    "min_p": 0.0625,
    "typical_p": 0.75,
    "seed": 7,
    "repetition_penalty": 1.25,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {101: -1.5, 32: 2.0},
    "bad_words": [[101], [10, 32]],
    "min_new_tokens": 3,
    "forced_tokens": {0: 97, 2: 98},
    "suppress_tokens": [101, 32],
    "begin_suppress_tokens": [32],
    "logits_processor": halved,
    "grammar": Grammar.regex("[a-z ]+"),
    "max_new_tokens": 6,
    "end_tokens": [10],
    "stop_strings": ["ab", "\n\n"],
    "stop_sequences": [[97, 10], [98]],
    "stopping_criteria": long_enough,
    "max_time": 60.0,
    "n": 2,
    "logprobs": 2,
}
"""An adapter of this name must be loaded (`tests/support/lora.py`). Token ids are those of texts in the byte vocabularies of the package's models."""


def beside(name: str) -> dict[str, Any]:
    """The settings without which this one changes nothing: a temperature for those of a draw."""
    return {"temperature": 0.75} if SETTINGS[name].effect == "draw" and name != "temperature" else {}
