"""How routes get their answers: a request is compiled, submitted and waited for, and cancelled if its client goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from pdkernels.decoding import Grammar
from pdkernels.serve.answers import Answer
from pdkernels.serve.compiling import GrammarPool
from pdkernels.serve.errors import Refused
from pdkernels.serve.forms import Asked
from pdkernels.serve.frontend import Draft, Frontend
from pdkernels.serve.gate import Escaped
from pdkernels.serve.schema import ChatRequest, CompletionRequest
from pdkernels.serve.threads import in_thread

POLL = 0.25  # seconds between looks for a client that has gone


class Stream(StreamingResponse):
    """A response with events as they come. Whatever ends it calls `cancel`, also a client that goes before the first event.

    Args:
        events: are closed then.
        cancel: ends what they come from.
        kind: of the content.
    """

    def __init__(
        self, events: AsyncGenerator[str, None], cancel: Callable[[], None], kind: str = "text/event-stream"
    ) -> None:
        super().__init__(events, media_type=kind)
        self._events, self._cancel = events, cancel

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends it, and looks for a client that goes: `send` would raise then from ASGI 2.4 on, but that of uvicorn 0.30,
        which says 2.4, does not."""
        scope = {**scope, "asgi": {**scope.get("asgi", {}), "spec_version": "2.3"}}
        try:
            with suppress(OSError):
                await super().__call__(scope, receive, send)
        finally:
            self._cancel()
            await self._events.aclose()


class Service:
    """Answers requests of all routes.

    Args:
        front: reads and submits them.
        grammars: compiles what they ask for.
        seconds: that an answer may take; None: no limit.
    """

    def __init__(self, front: Frontend, grammars: GrammarPool, seconds: float | None) -> None:
        self.front, self._grammars, self._seconds = front, grammars, seconds

    async def chat(self, request: Request, body: ChatRequest) -> Answer:
        """The answer to a chat, which has begun."""
        self._bound(body)
        # A template runs in a process of its own, for which this waits.
        return await self._submitted(request, body, await in_thread(self.front.chat, body))

    async def completion(self, request: Request, body: CompletionRequest) -> Answer:
        """The same for a completion."""
        self._bound(body)
        # So does the tokenizer with a long prompt, where a text goes on after the answer.
        return await self._submitted(request, body, await in_thread(self.front.completion, body))

    async def whole(self, request: Request, answer: Answer, content: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        """The response with what `content` makes of an answer, unless the client goes."""
        making = asyncio.ensure_future(content)
        try:
            while not making.done():
                if await request.is_disconnected():
                    return Response(status_code=499)
                await asyncio.wait([making], timeout=POLL)
            return await in_thread(Escaped, making.result())
        finally:
            answer.cancel()
            making.cancel()
            with suppress(BaseException):
                await making

    def _bound(self, body: ChatRequest | CompletionRequest) -> None:
        if self._seconds is not None:
            body.timeout = self._seconds if body.timeout is None else min(body.timeout, self._seconds)

    async def _submitted(self, request: Request, body: ChatRequest | CompletionRequest, draft: Draft) -> Answer:
        grammar = await self._compiled(request, body, draft.asked)
        return await in_thread(self.front.submit, body, draft, grammar)

    async def _compiled(
        self, request: Request, body: ChatRequest | CompletionRequest, form: Asked | None
    ) -> Grammar | None:
        """The grammar of a request, whose time this takes."""
        begun = time.monotonic()
        if form is None:
            return None
        making = asyncio.ensure_future(self._grammars.get(form, form.grammar, body.timeout))
        try:
            while not making.done():
                await asyncio.wait([making], timeout=POLL)
                if not making.done() and await request.is_disconnected():
                    raise Refused("the client has gone", 499)
            if body.timeout is not None:
                body.timeout = max(1e-3, body.timeout - (time.monotonic() - begun))
            return making.result()
        finally:
            making.cancel()
