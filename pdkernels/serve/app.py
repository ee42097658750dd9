"""The application: routes, limits, errors."""

from __future__ import annotations

import asyncio
import html
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from pdkernels._validation import check_type, sentence

try:
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import HTMLResponse, PlainTextResponse, Response
    from pydantic import ValidationError
    from starlette.exceptions import HTTPException
except ModuleNotFoundError as missing:
    fault = "a server needs FastAPI and uvicorn"
    raise ImportError(sentence("serve", fault, "Install them with `pip install fastapi uvicorn`.")) from missing

from pdkernels.decoding import available, find
from pdkernels.engine import Engine, EngineFull
from pdkernels.serve.answers import Answer
from pdkernels.serve.bodies import JsonRoute
from pdkernels.serve.compiling import GrammarPool
from pdkernels.serve.description import describe, methods_of
from pdkernels.serve.errors import Refused, clipped, error_body, invalid, of_failure, why_closed
from pdkernels.serve.frontend import Frontend
from pdkernels.serve.gate import Escaped, Gate, log_failure
from pdkernels.serve.messages_api import add_messages
from pdkernels.serve.metrics import prometheus
from pdkernels.serve.options import MethodSettings, placed
from pdkernels.serve.replays import filling, replay_page
from pdkernels.serve.responses import add_responses
from pdkernels.serve.schema import ChatRequest, CompletionRequest, ReplayRequest, Settings
from pdkernels.serve.service import POLL, Service, Stream
from pdkernels.serve.threads import in_thread
from pdkernels.serve.tokenizing import add_tokenizer


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        body: bytes of a request.
        body_seconds: in which it must arrive; so must the head of a request.
        unread_seconds: after which a client that takes nothing more of its answer is cut off (on Linux, by `run`). Of a large
            answer a client must read some hundred kilobytes in this time: the kernel counts what makes room.
        choices: answers that one request may ask for.
        seconds: of an answer; None: no limit. A request's own `timeout` counts if it is smaller.
        shutdown: seconds that requests have to finish after the server was told to stop.
        compile: seconds of CPU time that a request's grammar may take to compile, besides the steps that `Grammar`
            allows.
    """

    body: int = 1 << 20
    body_seconds: float = 30.0
    unread_seconds: float = 60.0
    choices: int = 16
    seconds: float | None = 600.0
    shutdown: float = 30.0
    compile: float = 10.0


def create_app(
    engine: Engine,
    name: str,
    *,
    method: str = "autoregressive",
    options: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    api_key: str | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
    drafters: Mapping[str, Any] | None = None,
    allow_unload: bool = False,
) -> FastAPI:
    """An application with the routes `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, counts of
    the tokens of the last two, `/v1/tokenize`, `/v1/detokenize`, `/v1/models` (an adapter there can be deleted), `/health`,
    `/metrics`, `/openapi.json`, and a page at `/`.

    Args:
        engine: closed when the application ends.
        name: of the model, as clients name it.
        method, options: of requests that name no method.
        sampling: temperature and other settings of requests that have none.
        limits: None: the defaults.
        api_key: what clients must send as a bearer token, but for `/health`; None: nothing.
        origins: of pages on other hosts whose scripts may send requests (CORS), such as "http://localhost:3000"; "*":
            all.
        hosts: names by which clients reach it, such as "api.example.org"; "*": all. None: any, but at a loopback
            address only loopback's.
        drafters: that requests may name in `options.drafter`: models with the same vocabulary, and heads for the model.
        allow_unload: whether whoever may send requests may also delete an adapter of the model.

    Raises:
        TypeError: no engine; a string where several are expected.
        ValueError: an unknown method.

    Example:
        >>> import pdkernels as pd
        >>> from fastapi.testclient import TestClient
        >>> from pdkernels.serve import create_app
        >>> with TestClient(create_app(pd.Engine(pd.models.load("tiny-code")), "tiny", method="jacobi")) as client:
        ...     body = {"model": "tiny", "prompt": "import os\\n", "max_tokens": 4, "temperature": 0}
        ...     client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"]
        4
    """
    op = "serve.create_app"
    remedy = "Pass pdkernels.Engine(model)."
    check_type(isinstance(engine, Engine), op, "engine", "be an Engine", type(engine).__name__, remedy)
    check_type(isinstance(name, str), op, "name", "be a str", type(name).__name__)
    for argument, value in (("origins", origins), ("hosts", hosts)):
        check_type(not isinstance(value, (str, bytes)), op, argument, "be a list of strings", repr(value))
    find(method)
    bounds = limits or Limits()
    settings = MethodSettings(method, options or {}, sampling or {}, drafters or {})
    front = Frontend(engine, name, method, settings, bounds.choices)
    grammars = GrammarPool(front.prepare, bounds.compile)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        grammars.close()
        with ThreadPoolExecutor(1) as closing:  # the loop's own threads may all wait for something
            run = partial(asyncio.get_running_loop().run_in_executor, closing)
            if not await run(partial(engine.close, finish=True, timeout=bounds.shutdown)):
                await run(partial(engine.close, finish=False, timeout=10.0))

    app = FastAPI(title="pdkernels", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    checks: dict[str, Any] = {"api_key": api_key, "origins": origins, "hosts": hosts}
    app.add_middleware(Gate, body=bounds.body, seconds=bounds.body_seconds, **checks)
    if origins:  # before the gate: a browser asks without the key whether it may send it
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.state.engine, app.state.grammars, app.state.limits = engine, grammars, bounds

    def refused(request: Request, error: Exception) -> Escaped:
        parameter, code, headers = None, None, dict[str, str]()
        text, status = of_failure(error)
        if isinstance(error, Refused):
            status, parameter, code, text = error.status, error.parameter, error.code, str(error)
        elif isinstance(error, HTTPException):
            status, headers, where = error.status_code, dict(error.headers or {}), clipped(request.url.path, 200)
            if status == 405:
                headers = {"Allow": ", ".join(methods_of(app, request.url.path))}
            texts = {404: f"there is no {where} here", 405: f"{where} does not take {request.method}"}
            text = texts.get(status, error.detail)
        elif isinstance(error, EngineFull):
            status, headers, text = 429, {"Retry-After": "1"}, "too many requests wait already: try again later"
        elif status == 500:
            log_failure(request.method, request.url.path, error)
        else:
            text, parameter = placed(text)
        return Escaped(error_body(text, status, parameter, code), status, headers)

    for kind in (Refused, EngineFull, ValueError, TypeError, NotImplementedError, RuntimeError, HTTPException):
        app.add_exception_handler(kind, refused)

    @app.exception_handler(ValidationError)  # of a chat that another route's body was translated into
    @app.exception_handler(RequestValidationError)
    async def misformed(_request: Request, error: RequestValidationError | ValidationError) -> Escaped:
        text, parameter = invalid(error.errors())
        return Escaped(error_body(text, 400, parameter), 400)

    service = Service(front, grammars, bounds.seconds)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await answered(request, body, await service.chat(request, body))

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await answered(request, body, await service.completion(request, body))

    async def answered(request: Request, body: Settings, answer: Answer) -> Response:
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return Stream(answer.events(with_usage), answer.cancel)
        return await service.whole(request, answer, answer.whole())

    add_responses(app, service)
    add_messages(app, service)
    add_tokenizer(app, front)

    def described(model: str) -> dict[str, Any]:
        entry = {"id": model, "object": "model", "created": started, "owned_by": "pdkernels"}
        return entry if model == name else {**entry, "parent": name}

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(model) for model in (name, *front.adapters)]}

    @app.api_route("/v1/models/{model:path}", methods=["GET", "HEAD"])
    async def one(model: str) -> dict[str, Any]:
        front.check_model(model)
        return described(model)

    @app.delete("/v1/models/{model:path}")
    async def unload(model: str) -> dict[str, Any]:
        if not allow_unload:
            fault = "adapters are not deleted by requests here; a server that is started with --allow-unload does it"
            raise Refused(fault, 403, "model")
        await in_thread(lambda: front.unload(model))
        return {"id": model, "object": "model", "deleted": True}

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if not engine.running:
            return PlainTextResponse(f"{why_closed(engine.failure)}\n", 503)
        running, waiting = grammars.counts
        state = f"grammars: {running} compiling, {waiting} waiting\n" if running + waiting else ""
        return PlainTextResponse(f"stuck\n{state}", 503) if grammars.stuck else PlainTextResponse(f"ok\n{state}")

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        return PlainTextResponse(prometheus(await in_thread(engine.metrics)), media_type="text/plain; version=0.0.4")

    @app.post("/replay")
    async def replay(body: ReplayRequest, request: Request) -> Response:
        def submit() -> Any:
            tokenizer, found = engine.model.tokenizer, find(body.method or method)
            if body.chat and getattr(tokenizer, "chat_template", None) is None:
                raise Refused("this model has no chat template", 400, "chat")
            asked = [{"role": "user", "content": body.prompt}]
            ids = tokenizer.encode_chat(asked) if body.chat else tokenizer.encode(body.prompt)
            settings = front.settings.options_of(found, body.options)
            most = front.limit("text", len(ids), body.max_tokens)
            settings["provisional"] = body.stream and getattr(found.steps, "shows_provisional", False)
            return engine.submit(ids, found, max_new_tokens=most, trace=True, timeout=bounds.seconds, **settings)

        handle = await in_thread(submit)
        if body.stream:
            return Stream(filling(handle, engine.model.tokenizer), handle.cancel, "application/x-ndjson")
        try:
            while not handle.done:
                if await request.is_disconnected():
                    return Response(status_code=499)
                await asyncio.sleep(POLL / 5)
        finally:
            handle.cancel()
        return HTMLResponse(await in_thread(replay_page, handle))

    @app.api_route("/", methods=["GET", "HEAD"])
    async def page() -> Response:
        model = engine.model
        facts = {
            "methods": [one for one in available() if find(one).steps is not None and find(one).supports(model)],
            "method": method,
            "most": engine.max_new_tokens,
            "chat": getattr(model.tokenizer, "chat_template", None) is not None,
            "key": api_key is not None,
        }
        text = files("pdkernels.serve").joinpath("page.html").read_text(encoding="utf-8")
        data = json.dumps(facts).replace("<", "\\u003c")  # no text can close the script's element
        return HTMLResponse(text.replace("{{facts}}", data).replace("{{name}}", html.escape(name)))

    describe(app, lambda: [name, *front.adapters])
    return app
