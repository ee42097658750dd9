"""Bodies of requests: JSON that all readers take."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from json import JSONDecodeError
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from pdkernels.serve.errors import shown
from pdkernels.serve.json_text import NotANumber, parsed_json


class JsonRequest(Request):
    """A request whose body has no NaN, no Infinity and no number beyond all floats."""

    async def json(self) -> Any:
        """The value of its body."""
        try:
            return parsed_json(await self.body())
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


class JsonRoute(APIRoute):
    """A route that reads such a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        handler = super().get_route_handler()

        async def handled(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handled
