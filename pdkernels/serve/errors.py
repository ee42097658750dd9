"""Errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_KINDS = {404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 405: "method_not_supported", 429: "rate_limit_exceeded"}


class Refused(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        parameter: the field that it is about.
        code: a word for programs, such as "context_length_exceeded"; None: that of the status, if it has one.
    """

    def __init__(self, message: str, status: int = 400, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.parameter, self.code = status, parameter, code


def error_body(message: str, status: int, parameter: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an answer with this status."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code or _CODES.get(status)}}


def invalid(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """What the first of pydantic's `errors` says of a body, and of which field."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']}, at character {place}", None
    if not place:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    if first["type"] == "extra_forbidden":
        return f"{place} is not supported here", place
    return f"{place}: {first['msg']}", place
