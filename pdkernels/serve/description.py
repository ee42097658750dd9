"""The OpenAPI description at `/openapi.json`: FastAPI's own, with what the application knows better."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.routing import Route

_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}
"""One form for all routes."""
_STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_KINDS = {"/": "text/html", "/replay": "text/html", "/health": "text/plain", "/metrics": "text/plain"}
"""Of answers that are no JSON."""


def describe(app: FastAPI, names: Callable[[], list[str]]) -> None:
    """Has an application describe its routes with the names of the models that it serves, the form of its errors, and
    the kinds of its answers."""

    @cache
    def described() -> dict[str, Any]:
        with warnings.catch_warnings():  # of one function for GET and HEAD
            warnings.simplefilter("ignore", UserWarning)
            description = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):  # a body of another form has status 400 here
            schemas.pop(unused, None)
        schemas["Error"] = _ERROR
        error = {
            "description": "Refused",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                operation["operationId"] = f"{method}{path}"
                answers = operation["responses"]
                answers.pop("422", None)
                content = answers["200"].setdefault("content", {"application/json": {"schema": {}}})
                if path in _STREAMING:
                    content["text/event-stream"] = {"schema": {}}
                elif path in _KINDS:
                    answers["200"]["content"] = {_KINDS[path]: {"schema": {"type": "string"}}}
                if path == "/health":
                    answers["503"] = {"description": "Cannot answer", "content": answers["200"]["content"]}
                answers["default"] = error
        for schema in schemas.values():
            if schema.get("additionalProperties") is False:  # some clients send null in fields that ask for nothing
                schema["additionalProperties"] = {"type": "null"}
        return description

    def openapi() -> dict[str, Any]:
        description = described()
        for schema in description["components"]["schemas"].values():
            if (model := schema.get("properties", {}).get("model")) is not None:
                model["enum"] = [*names(), *([None] if "anyOf" in model else [])]
        return description

    app.openapi = openapi  # type: ignore[method-assign]


def methods_of(app: FastAPI, path: str) -> list[str]:
    """The methods of HTTP that an address takes, by all of its routes.

    >>> app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    >>> _ = app.get("/a")(lambda: 0), app.delete("/{name}")(lambda: 0)
    >>> methods_of(app, "/a"), methods_of(app, "/b")
    (['DELETE', 'GET'], ['DELETE'])
    """
    routes = [route for route in app.routes if isinstance(route, Route) and route.path_regex.match(path)]
    return sorted({method for route in routes for method in route.methods or ()})
