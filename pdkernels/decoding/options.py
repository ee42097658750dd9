"""Names of options: which a method has, and what is meant by one that it does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from pdkernels._validation import check, check_type, did_you_mean, sentence
from pdkernels.decoding.method import Method
from pdkernels.generation.generation_config import remedy_of
from pdkernels.generation.params import ALIASES, MAX_POSITIONS, SamplingParams

_OP = "decoding.generate"

Function = TypeVar("Function", bound=Callable[..., Any])

_ELSEWHERE = ALIASES | {"assistant_model": "drafter", "streamer": "on_tokens"}
"""What transformers, vLLM and OpenAI's interface call our arguments."""


def suggestion(name: str, names: Iterable[str]) -> str:
    """A hint at the argument that is meant by `name`; empty if there is none.

    >>> suggestion("stop", ["top_p", "stop_strings"]), suggestion("stop", ["top_p"]), suggestion("top", ["top_p"])
    ("Did you mean 'stop_strings'? ", '', "Did you mean 'top_p'? ")
    """
    if (meant := _ELSEWHERE.get(name)) is not None:  # another one like it would be far from what is meant
        names = {meant} & set(names)
    return did_you_mean(meant or name, names)


def check_options(method: Method, options: Mapping[str, Any], arguments: Iterable[str] = ()) -> None:
    """TypeError or ValueError for options that `method` does not have.

    `arguments`: those that the caller takes besides, one of which may be meant.
    """
    arguments = tuple(arguments)
    for name in options:
        if name not in method.options:
            hint = suggestion(name, (*arguments, *method.options))
            remedy = f"{hint}It accepts: {', '.join(method.options)}."
            raise TypeError(sentence(_OP, f"method {method.name!r} has no option {name!r}", remedy))
    page_size = options.get("page_size")
    if page_size is not None:
        check_type(type(page_size) is int, _OP, "page_size", "be an int", type(page_size).__name__)
        check(page_size >= 1, _OP, "page_size", "be at least 1", page_size)
        check(page_size <= MAX_POSITIONS, _OP, "page_size", f"be at most {MAX_POSITIONS}", page_size)


def refuse_settings(method: Method, params: SamplingParams, model: Any = None) -> None:
    """NotImplementedError for a setting that `method` does not follow."""
    for name, words in method.refusals(params).items():
        raise NotImplementedError(sentence(_OP, words, remedy_of(model, name)))


def suggests(op: str) -> Callable[[Function], Function]:
    """Decorates a function whose misspelt arguments are refused with a suggestion."""

    def decorate(function: Function) -> Function:
        parameters = tuple(signature(function).parameters)

        @wraps(function)
        def call(*values: Any, **arguments: Any) -> Any:
            for name in arguments:
                if name not in parameters:
                    remedy = f"{suggestion(name, parameters)}It accepts: {', '.join(parameters[1:])}."
                    raise TypeError(sentence(op, f"there is no argument {name!r}", remedy))
            return function(*values, **arguments)

        return cast(Function, call)

    return decorate
