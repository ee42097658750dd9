"""Bodies of requests: JSON that all readers take."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from pdkernels.serve.errors import shown
from pdkernels.serve.json_text import NotANumber, parsed_json


class JsonRequest(Request):
    """A request whose body has no NaN, no Infinity and no number beyond all floats."""

    async def json(self) -> Any:
        """The value of its body; FastAPI says what else is wrong with it."""
        try:
            return parsed_json(await self.body())
        except NotANumber as error:
            fault = f"the body is not JSON that all read: {shown(error.text)} is no number there"
            raise HTTPException(400, fault) from None


class JsonRoute(APIRoute):
    """A route that reads such a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        handler = super().get_route_handler()

        async def handled(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handled
