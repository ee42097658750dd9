"""Bodies of requests: JSON that all readers take."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from json import JSONDecodeError
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from pdkernels._json import NotANumber, parsed_json
from pdkernels.serve.errors import shown
from pdkernels.serve.threads import in_thread

_MAX_NESTED = 1 << 16
"""Lists and objects of a body. Python's collector looks at each of them, and meanwhile nothing else runs."""
_AT_ONCE = 1 << 14
"""Bytes that are parsed on the event loop."""


class JsonRequest(Request):
    """A request whose body has no NaN, no Infinity and no number beyond all floats, and not too many lists."""

    async def json(self) -> Any:
        """The value of its body."""
        body = await self.body()
        try:
            return parsed_json(body) if len(body) <= _AT_ONCE else await in_thread(_of_bounded, body)
        except JSONDecodeError:
            raise  # FastAPI says where
        except NotANumber as error:
            fault = f"that all read: {shown(error.text)} is no number there"
        except UnicodeDecodeError as error:
            fault = f"in {error.encoding.upper()}: byte {error.start} is part of no character"
        except RecursionError:
            fault = "that can be read here: it is too deep"
        except ValueError:
            fault = "that can be read here: a number has too many digits"
        raise HTTPException(400, f"the body is not JSON {fault}")


def _of_bounded(body: bytes) -> Any:
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    if _nested(text) > _MAX_NESTED:
        raise HTTPException(400, f"the body must have at most {_MAX_NESTED} lists and objects")
    return parsed_json(text)


def _nested(text: str) -> int:
    """The lists and objects of a JSON text, and brackets in its strings if there are few."""
    count = text.count("[") + text.count("{")
    if count <= _MAX_NESTED:
        return count
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    return outside.count("[") + outside.count("{")


class JsonRoute(APIRoute):
    """A route that reads such a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        handler = super().get_route_handler()

        async def handled(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handled
