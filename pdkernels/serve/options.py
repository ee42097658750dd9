"""Settings and options of methods: those of a request, of the server, and of the checkpoint."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from pdkernels.decoding import Method, available, find
from pdkernels.generation.params import SETTINGS, SamplingParams, names_of
from pdkernels.serve.errors import Refused, field_hint, in_http_words, kind_of, shown
from pdkernels.serve.schema import ChatRequest, CompletionRequest, Settings

_SMALL = 1e-6
_PLAIN = ("int", "float", "bool", "str", "Literal[", "Sequence[int]")


class MethodSettings:
    """Settings and options of methods.

    A value that comes by HTTP is a number, a flag or a word, or the name of a drafter that is offered: it never names a
    file or a model.

    Args:
        method, options: of requests that name no method; settings may be among the options.
        sampling: settings where neither a request nor `options` have them, such as those that a checkpoint suggests.
        drafters: that requests may name.
    """

    def __init__(
        self, method: str, options: Mapping[str, Any], sampling: Mapping[str, Any], drafters: Mapping[str, Any]
    ) -> None:
        self._method, self._options, self._sampling, self._drafters = method, dict(options), dict(sampling), drafters

    def options_of(
        self, method: Method, asked: Mapping[str, Any] | None, fields: Collection[str] = ()
    ) -> dict[str, Any]:
        """The options of a request's method: its own, which are not among its `fields`, over the server's if that is
        its method too."""
        for name in asked or {}:
            if name not in method.options or name in fields:
                words = f"is no option of method {method.name!r}{field_hint(name)}"
                words = "has a field of its own" if name in method.options else words
                raise Refused(f"options: {shown(name)} {words}", 400, "options")
        served = self._options if method.name == self._method else {}
        return {**served, **{name: self._value(method, name, value) for name, value in (asked or {}).items()}}

    def _value(self, method: Method, name: str, value: Any) -> Any:
        place = f"options.{name}"
        if name == "drafter":
            return self._drafter(method, value)
        kind = method.options[name].type
        if not any(plain in kind for plain in _PLAIN):
            raise Refused(f"{place} cannot be sent by HTTP", 400, place)
        words = isinstance(value, str) and not ("Literal[" in kind or "str" in kind)
        if words or isinstance(value, dict):
            raise Refused(f"{place} must be {kind_of(kind)}, got {shown(value)}", 400, place)
        return value

    def _drafter(self, method: Method, value: Any) -> Any:
        """The drafter of this name, if the operator offers it for the method."""
        if value is None:
            return None
        offered = {name: one for name, one in self._drafters.items() if _method_of(one) == method.name}
        if not isinstance(value, str) or value not in offered:
            names = f"one of {', '.join(map(repr, offered))}" if offered else "left out: none is offered here"
            words = f"options.drafter must be {names} for method {method.name!r}, got {shown(value)}"
            raise Refused(words, 400, "options.drafter")
        return offered[value]

    def of_request(self, body: Settings, method: Method) -> tuple[SamplingParams, dict[str, Any]]:
        """Settings and options. A field of the request wins over the server's options, and those over the suggested
        ones."""
        options = self.options_of(method, body.options, SETTINGS)
        served = {name: options.pop(name) for name in SETTINGS if name in options}
        asked = body.settings()
        settings = {"seed": secrets.randbits(62), **self._sampling, **served, **asked}
        if settings.get("top_p") == 0:  # OpenAI's for the likeliest token alone, which any small mass is
            settings["top_p"] = _SMALL
        greedy = not settings.get("temperature")  # the largest logit is chosen, which every filter keeps
        off = {*names_of("draw")} - {"seed"} if greedy else ()
        chosen = {name: SETTINGS[name].neutralised(value) for name, value in settings.items() if name not in off}
        params = SamplingParams(**chosen)
        refusals = method.refusals(params)
        for name in refusals.keys() & asked.keys():
            raise Refused(in_http_words(refusals[name]), 400, SETTINGS[name].wire)
        dropped = {name: SETTINGS[name].default for name in refusals.keys() - served.keys()}
        return params.replace(**dropped), options


def placed(text: str) -> tuple[str, str | None]:
    """An error with the field that it begins with as a request has it, and the name of this field.

    >>> placed("block_size must be at least 1, got 0.")
    ('options.block_size must be at least 1, got 0.', 'options.block_size')
    """
    name, must, _ = text.partition(" must ")
    if must and (name in ChatRequest.model_fields or name in CompletionRequest.model_fields):
        return text, name
    return (f"options.{text}", f"options.{name}") if must and name in _option_names() else (text, None)


@lru_cache
def _option_names() -> frozenset[str]:
    return frozenset(name for method in available() for name in find(method).options)


def _method_of(drafter: Any) -> str:
    """Heads say which method they are for; another drafter is a model."""
    return str(getattr(drafter, "method", "draft_model"))
