"""The names that transformers gives to a model's cache, in arguments and outputs: "cache" from 5.24 on; before that
"past_key_values", or "cache_params" where a model has states alone. Remote code keeps the older ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

NAMES = ("cache", "past_key_values", "cache_params")


def cache_argument(function: Callable[..., Any]) -> str:
    """The name of a function's cache argument."""
    parameters = inspect.signature(function).parameters
    return next(name for name in NAMES if name in parameters)


def cache_in(values: Mapping[str, Any]) -> tuple[str, Any]:
    """The name and the cache among the arguments or outputs of a model; the newest name and None if there is none."""
    return next(((name, values[name]) for name in NAMES if values.get(name) is not None), (NAMES[0], None))
