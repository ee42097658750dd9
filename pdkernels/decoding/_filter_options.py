"""The options of `generate` that filter logits by tokens: their checks, and the methods that cannot follow one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from pdkernels._validation import check, check_fits_float, check_type, sentence
from pdkernels.decoding._filters import Filters, Hook
from pdkernels.decoding._method import Method
from pdkernels.decoding._sampling import MAX_SCALE
from pdkernels.decoding._session import MAX_POSITIONS
from pdkernels.ops.filter_logits import LARGEST

_OP = "decoding.generate"

FILTERS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "min_new_tokens",
    "forced_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "logits_processor",
)
"""The options, in the order in which they are applied."""

_PARALLEL = "it writes tokens in parallel, so a row has no prefix that is final"
_PLANS = "its texts begin with a plan, in which tokens have other places"


def refusal(method: Method, option: str) -> str:
    """Why a method does not follow an option of `FILTERS`; empty if it does. "bad_words" stands for words of several tokens."""
    if method.writes_in_parallel and option in ("logits_processor", "bad_words"):
        return _PARALLEL
    if method.wing == "planned" and option in ("min_new_tokens", "forced_tokens", "begin_suppress_tokens"):
        return _PLANS
    return ""


def no_logprobs(method: Method) -> str:
    """Why a method has no log-probabilities; empty if it has."""
    return "its chunks are put together once they are written" if method.wing == "planned" else ""


def writes_logprobs(method: Method) -> bool:
    """Whether the log-probabilities of a token are those of the forward that wrote it: a pass over the text would compute other rows."""
    return method.writes_in_parallel or method.wing == "recurrent"


def checked_filters(method: Method, vocabulary: int, end_tokens: Sequence[int], options: Mapping[str, Any]) -> Filters:
    """The filters of `options`, which has all of `FILTERS`, for a method that follows them."""
    found = Filters(
        repetition_penalty=_penalty(options["repetition_penalty"]),
        presence_penalty=_number("presence_penalty", options["presence_penalty"]),
        frequency_penalty=_number("frequency_penalty", options["frequency_penalty"]),
        logit_bias=_bias(options["logit_bias"], vocabulary),
        bad_words=_words("bad_words", options["bad_words"], vocabulary),
        min_new_tokens=_count(options["min_new_tokens"]),
        end_tokens=tuple(end_tokens),
        forced_tokens=_forced(options["forced_tokens"], vocabulary),
        suppress_tokens=_tokens("suppress_tokens", options["suppress_tokens"], vocabulary),
        begin_suppress_tokens=_tokens("begin_suppress_tokens", options["begin_suppress_tokens"], vocabulary),
        hooks=_hooks(options["logits_processor"]),
    )
    asked = {
        "bad_words": any(len(word) > 1 for word in found.bad_words),
        "min_new_tokens": found.min_new_tokens > 0,
        "forced_tokens": bool(found.forced_tokens),
        "begin_suppress_tokens": bool(found.begin_suppress_tokens),
        "logits_processor": bool(found.hooks),
    }
    for option, given in asked.items():
        if given and (reason := refusal(method, option)):
            words = f"method {method.name!r} does not follow {option}"
            words += " of several tokens" if option == "bad_words" else ""
            raise NotImplementedError(sentence(_OP, f"{words}: {reason}"))
    return found


def _penalty(value: Any) -> float:
    check_type(type(value) in (int, float), _OP, "repetition_penalty", "be a number", type(value).__name__)
    check(0 < value < math.inf, _OP, "repetition_penalty", "be finite and above 0", value)
    check_fits_float(_OP, "repetition_penalty", value)
    check(1 / MAX_SCALE <= value, _OP, "repetition_penalty", f"be at least {1 / MAX_SCALE:g}", value)
    check(value <= LARGEST, _OP, "repetition_penalty", "be finite in float32", value)
    return float(value)


def _number(name: str, value: Any) -> float:
    check_type(type(value) in (int, float), _OP, name, "be a number", type(value).__name__)
    check_fits_float(_OP, name, value)
    check(math.isfinite(value), _OP, name, "be finite", value)
    check(abs(value) <= LARGEST, _OP, name, "be finite in float32", value)
    return float(value)


def _count(value: Any) -> int:
    check_type(type(value) is int, _OP, "min_new_tokens", "be an int", type(value).__name__)
    check(0 <= value <= MAX_POSITIONS, _OP, "min_new_tokens", f"be in 0 .. {MAX_POSITIONS}", value)
    return int(value)


def _token(name: str, token: Any, vocabulary: int) -> int:
    check_type(type(token) is int, _OP, name, "hold ints", type(token).__name__)
    check(0 <= token < vocabulary, _OP, name, f"hold ids in 0 .. {vocabulary - 1}", token)
    return int(token)


def _listed(name: str, value: Any, what: str) -> list[Any]:
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, torch.Tensor))
    several = several and getattr(value, "ndim", 1) > 0
    check_type(several, _OP, name, f"be {what}", type(value).__name__)
    return list(value)


def _tokens(name: str, value: Any, vocabulary: int) -> tuple[int, ...]:
    return tuple(_token(name, token, vocabulary) for token in _listed(name, value, "a sequence of ints"))


def _words(name: str, value: Any, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    words = tuple(_tokens(name, word, vocabulary) for word in _listed(name, value, "a sequence of lists of ints"))
    check(all(words), _OP, name, "hold no empty list", "one")
    return words


def checked_sequences(value: Any, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """Sequences of tokens that end a text."""
    return _words("stop_sequences", value, vocabulary)


def _bias(value: Any, vocabulary: int) -> dict[int, float] | None:
    if value is None:
        return None
    check_type(isinstance(value, Mapping), _OP, "logit_bias", "map tokens to numbers", type(value).__name__)
    return {_token("logit_bias", token, vocabulary): _number("logit_bias", bias) for token, bias in value.items()}


def _forced(value: Any, vocabulary: int) -> dict[int, int] | None:
    if value is None:
        return None
    words = "map places in the new text to tokens"
    check_type(isinstance(value, Mapping), _OP, "forced_tokens", words, type(value).__name__)
    for place in value:
        check_type(type(place) is int, _OP, "forced_tokens", "have ints as places", type(place).__name__)
        check(0 <= place <= MAX_POSITIONS, _OP, "forced_tokens", f"have places in 0 .. {MAX_POSITIONS}", place)
    return {place: _token("forced_tokens", token, vocabulary) for place, token in value.items()}


def _hooks(value: Any) -> tuple[Hook, ...]:
    if value is None:
        return ()
    hooks = [value] if callable(value) else _listed("logits_processor", value, "a function or a list of functions")
    for hook in hooks:
        check_type(callable(hook), _OP, "logits_processor", "hold functions", type(hook).__name__)
    return tuple(hooks)
