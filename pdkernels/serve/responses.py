"""OpenAI's `/v1/responses`: translated into a chat, and its answer back into items and events.

Source: platform.openai.com/docs/api-reference/responses, and the types of the `openai` client 3.57.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, Literal, NamedTuple
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from pdkernels.serve.answers import Answer
from pdkernels.serve.blocks import Block, Step, block_steps
from pdkernels.serve.errors import Refused, renamed, shown
from pdkernels.serve.gate import Escaped, told
from pdkernels.serve.items import messages_of
from pdkernels.serve.json_text import written_json
from pdkernels.serve.messages import handed_on
from pdkernels.serve.schema import (
    LONGEST,
    TO_FIRST,
    ChatRequest,
    Common,
    Depth,
    Flag,
    Integer,
    InUnicode,
    Metadata,
    ObjectList,
    OneAnswer,
    Strict,
    Unpadded,
    one_of,
)
from pdkernels.serve.service import Service, Stream
from pdkernels.serve.threads import in_thread

_ENCRYPTED = "reasoning.encrypted_content"
_MAX_STORED = 1024
_MAX_BYTES = 1 << 26  # of all that is stored, as JSON


class _Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    """A thought comes whole, without a summary."""


class _Format(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Flag | None = None
    key_order: Literal["schema", "any"] | None = None
    whitespace: str | None = None
    depth: Depth | None = None


class _Text(Strict):
    format: _Format = _Format()
    verbosity: Literal["medium"] | None = None


class _Tool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class _Chosen(Strict):
    type: Literal["function"]
    name: str


class InputRequest(Strict):
    """The body of `/v1/responses/input_tokens`."""

    model: str
    input: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[ObjectList, Field(min_length=1)],
        one_of("a text or a list of items, not empty"),
    ]
    instructions: Annotated[str | None, InUnicode] = None
    previous_response_id: str | None = None
    tools: Annotated[list[_Tool], TO_FIRST, LONGEST] | None = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | _Chosen | None,
        one_of('"auto", "none", "required", or a function: {"type": "function", "name": ..}'),
    ] = None
    parallel_tool_calls: Flag | None = None
    text: _Text = _Text()
    reasoning: _Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self, before: list[dict[str, Any]], **extra: Any) -> ChatRequest:
        """The same as a chat, after the messages of an earlier one, with `extra` fields."""
        chat_fields = {**{name: getattr(self, name) for name in self.model_fields_set & _SHARED}, "model": self.model}
        messages = [*before, *messages_of(self.input)]
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        if self.tools:
            chat_fields["tools"] = [{"type": "function", "function": _without(tool, "type")} for tool in self.tools]
        if self.tool_choice is not None:
            is_named = isinstance(self.tool_choice, _Chosen)
            choice = {"type": "function", "function": {"name": self.tool_choice.name}} if is_named else self.tool_choice  # type: ignore[union-attr]
            chat_fields["tool_choice"] = choice
        schema = _without(self.text.format, "type", by_alias=True)
        if self.text.format.type == "text" and schema:
            raise Refused(f"text.format: a text has no {next(iter(schema))}", 400, "text.format")
        if self.text.format.type != "text":
            kind = self.text.format.type
            chat_fields["response_format"] = {"type": kind, **({"json_schema": schema} if schema else {})}
        if self.reasoning is not None:
            chat_fields["reasoning_effort"] = self.reasoning.effort
        return ChatRequest(messages=messages, **chat_fields, **extra)


class ResponseRequest(InputRequest, OneAnswer, Common):  # type: ignore[misc]
    """The body of `/v1/responses`."""

    store: Flag = True
    """Whether it can be named as `previous_response_id`, and be read again."""
    background: Literal[False] = False
    stream_options: Unpadded | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)] | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = None
    metadata: Metadata | None = None
    client_metadata: dict[str, Any] | None = None
    """What Codex says of itself."""
    include: Annotated[list[Literal["reasoning.encrypted_content"]], TO_FIRST] | None = None  # `_ENCRYPTED`
    """A thought is part of its item, which can be sent back: nothing is encrypted."""
    thinking_token_budget: Annotated[Integer, Field(ge=0)] | None = None

    def chat(self, before: list[dict[str, Any]], **extra: Any) -> ChatRequest:
        """The same as a chat."""
        if self.stream_options is not None:
            extra["stream_options"] = self.stream_options.model_dump()
        return super().chat(before, max_completion_tokens=self.max_output_tokens, **extra)


_SHARED = ChatRequest.model_fields.keys() - {"tools", "tool_choice", "metadata", "store", "stream_options"}


_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What fields of a chat are called here."""


def _without(model: Strict, name: str, by_alias: bool = False) -> dict[str, Any]:
    return model.model_dump(exclude_none=True, by_alias=by_alias, exclude={name})


class Stored(NamedTuple):
    """A response as it is kept."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    """Of the chat, with the answer; without instructions."""
    nbytes: int
    """As JSON."""

    @classmethod
    def of(cls, response: dict[str, Any], messages: list[dict[str, Any]]) -> Stored:
        """The response with its chat."""
        return cls(response, messages, len(written_json([response, messages])))


class ResponseStore:
    """The latest responses, by their ids. For the event loop alone."""

    def __init__(self, most: int = _MAX_STORED, nbytes: int = _MAX_BYTES) -> None:
        self._most, self._max_bytes, self._nbytes = most, nbytes, 0
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._items = dict[str, dict[str, Any]]()

    def keep(self, stored: Stored) -> None:
        """Keeps a response, unless it is larger than all may be. The oldest ones make room."""
        if stored.nbytes > self._max_bytes:
            return
        self._kept[stored.response["id"]] = stored
        self._nbytes += stored.nbytes
        self._items |= {item["id"]: item for item in stored.response.get("output", [])}
        while len(self._kept) > self._most or self._nbytes > self._max_bytes:
            self.forget(next(iter(self._kept)))

    def messages(self, response_id: str | None) -> list[dict[str, Any]]:
        """Those of the chat that ends with a response; None: none."""
        if response_id is None:
            return []
        if response_id not in self._kept:
            raise self._missing(response_id, 400, "previous_response_id", "previous_response_not_found")
        return self._kept[response_id].messages

    def whole(self, items: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """The items of an input, with those that stand for kept ones."""
        if isinstance(items, str):
            return items
        return [
            self._item(item.get("id"), place) if item.get("type") == "item_reference" else item
            for place, item in enumerate(items)
        ]

    def _item(self, item_id: Any, place: int) -> dict[str, Any]:
        if not isinstance(item_id, str) or item_id not in self._items:
            raise Refused(f"input.{place}: the item {shown(item_id)} is not kept here", 400, f"input.{place}.id")
        return self._items[item_id]

    def response(self, response_id: str) -> dict[str, Any]:
        """The response with an id."""
        if response_id not in self._kept:
            raise self._missing(response_id, 404, "response_id")
        return self._kept[response_id].response

    def forget(self, response_id: str) -> None:
        """Removes a response."""
        response = self.response(response_id)
        self._nbytes -= self._kept.pop(response_id).nbytes
        for item in response.get("output", []):
            self._items.pop(item["id"], None)

    @staticmethod
    def _missing(response_id: str, status: int, field: str, code: str | None = None) -> Refused:
        return Refused(f"the response {shown(response_id)} is not kept here", status, field, code)


class _Writer:
    """Writes the items of an answer, and the events of a stream."""

    def __init__(self, body: ResponseRequest, chat: ChatRequest, answer: Answer, store: ResponseStore) -> None:
        self._body, self._chat, self._answer, self._store = body, chat, answer, store
        self._number, self._items = 0, list[dict[str, Any]]()
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "background": False, "error": None, "incomplete_details": None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {}, "model": body.model,
            "output": [], "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id, "store": body.store,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "temperature": body.temperature, "top_p": body.top_p, "truncation": "disabled", "usage": None,
            "text": body.text.model_dump(exclude_none=True, by_alias=True), "user": body.user,
            "tool_choice": _dumped(body.tool_choice or "auto"), "tools": list(map(_dumped, body.tools or [])),
        }  # fmt: skip

    async def whole(self) -> dict[str, Any]:
        """The response."""
        async for step, block, piece in block_steps(self._answer.choices[0]):
            self._step(step, block, piece)
        return await self._finished()

    async def events(self) -> AsyncGenerator[str, None]:
        """The events of a stream."""
        try:
            for kind in ("response.created", "response.in_progress"):
                yield await in_thread(self._whole_event, kind, self._response)
            async for step, block, piece in block_steps(self._answer.choices[0]):
                for kind, fields in self._step(step, block, piece):
                    yield self._event(kind, **fields)
            response = await self._finished()
            yield await in_thread(self._whole_event, f"response.{response['status']}", response)
        except Exception as error:
            failure = {"code": "server_error", "message": told(error)[0]}
            failed = {**self._response, "status": "failed", "error": failure}
            yield await in_thread(self._whole_event, "response.failed", failed)

    def _whole_event(self, kind: str, response: dict[str, Any]) -> str:
        """One that repeats the request, whose tools may take long."""
        return self._event(kind, written_json, response=response)

    def _event(self, kind: str, write: Callable[[Any], str] = json.dumps, **fields: Any) -> str:
        content = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {write(content)}\n\n"

    def _step(self, step: Step, block: Block, piece: str) -> list[tuple[str, dict[str, Any]]]:
        """The events of a step; at its end a block's item is among the items."""
        ids, events = {"output_index": block.number}, list[tuple[str, dict[str, Any]]]()
        if step == "begin":
            item = _item(block, "in_progress")
            self._items.append(item)
            opened = [] if block.kind == "call" else [("response.content_part.added", {"part": _part(block)})]
            events = [("response.output_item.added", {"item": item}), *opened]
        elif step == "more":
            events = [(f"response.{_DELTAS[block.kind]}.delta", {"delta": piece, **_LOGPROBS[block.kind]})]
        else:
            cut = block.last and self._answer.choices[0].reason not in ("stop", "tool_calls")
            ended = "incomplete" if cut else "completed"
            item = {**_item(block, ended), "id": self._items[-1]["id"]}
            self._items[-1] = item
            word = "arguments" if block.kind == "call" else "text"
            closed = [] if block.kind == "call" else [("response.content_part.done", {"part": _part(block)})]
            done: tuple[str, dict[str, Any]] = (
                f"response.{_DELTAS[block.kind]}.done",
                {word: block.text, **_LOGPROBS[block.kind]},
            )
            events = [done, *closed, ("response.output_item.done", {"item": item})]
        item_events = ("response.output_item.added", "response.output_item.done")
        place_fields = {"item_id": self._items[-1]["id"], **({} if block.kind == "call" else {"content_index": 0})}
        return [(kind, {**ids, **({} if kind in item_events else place_fields), **fields}) for kind, fields in events]

    async def _finished(self) -> dict[str, Any]:
        reason, usage = self._answer.choices[0].reason, self._answer.usage()
        ended = reason in ("stop", "tool_calls")
        details = {"reason": "max_output_tokens" if reason == "length" else reason}
        response = {
            **self._response,
            "status": "completed" if ended else "incomplete",
            "completed_at": int(time.time()) if ended else None,
            "incomplete_details": None if ended else details,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
                "total_tokens": usage["total_tokens"],
            },
        }
        if self._body.store:
            self._store.keep(await in_thread(self._stored, response))
        return response

    def _stored(self, response: dict[str, Any]) -> Stored:
        messages = self._chat.messages[1:] if self._body.instructions is not None else self._chat.messages
        return Stored.of(response, [*messages, *messages_of([*map(_kept, self._items)])])


def _kept(item: dict[str, Any]) -> dict[str, Any]:
    """An item as the next chat has it: what the model wrote is no reason to refuse that one."""
    if item["type"] != "function_call" or "INVALID_JSON" not in (arguments := handed_on(item["arguments"])):
        return item
    return {**item, "arguments": json.dumps(arguments)}


_DELTAS = {"thought": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_LOGPROBS: dict[str, dict[str, Any]] = {"thought": {}, "text": {"logprobs": []}, "call": {}}


def _dumped(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Strict) else value


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str) -> dict[str, Any]:
    """A block as an item of the output; while it is in progress it is empty."""
    content = [] if status == "in_progress" else [_part(block)]
    if block.kind == "thought":
        head: dict[str, Any] = {"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": [], "content": content}
    elif block.kind == "text":
        head = {"type": "message", "id": f"msg_{uuid4().hex}", "role": "assistant", "content": content}
    else:
        head = {"type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": block.call_id}
        head |= {"name": block.name, "arguments": block.text}
    return {**head, "status": status}


def add_responses(app: FastAPI, service: Service) -> None:
    """Adds the routes of responses to an application."""
    store = ResponseStore()

    @app.post("/v1/responses")
    async def respond(body: ResponseRequest, request: Request) -> Response:
        with renamed(_FIELDS):
            body.input = store.whole(body.input)
            chat = await in_thread(body.chat, store.messages(body.previous_response_id))
        with renamed(_FIELDS, inside=False):
            answer = await service.chat(request, chat)
        writer = await in_thread(_Writer, body, chat, answer, store)
        if body.stream:
            return Stream(writer.events(), answer.cancel)
        return await service.whole(request, answer, writer.whole())

    @app.post("/v1/responses/input_tokens")
    async def count(body: InputRequest) -> dict[str, Any]:
        with renamed(_FIELDS):
            body.input = store.whole(body.input)
            chat = await in_thread(body.chat, store.messages(body.previous_response_id))
        with renamed(_FIELDS, inside=False):
            tokens = len(await in_thread(service.front.chat_tokens, chat))
        return {"object": "response.input_tokens", "input_tokens": tokens}

    @app.api_route("/v1/responses/{response_id}", methods=["GET", "HEAD"])
    async def response(response_id: str, request: Request) -> Response:
        for name, value in request.query_params.multi_items():
            if not (value == "false" or (name.startswith("include") and value == _ENCRYPTED)):
                raise Refused(f"{name} is not supported here: a response that is kept comes whole", 400, name)
        return await in_thread(Escaped, store.response(response_id))

    @app.delete("/v1/responses/{response_id}")
    async def forget(response_id: str) -> dict[str, Any]:
        store.forget(response_id)
        return {"id": response_id, "object": "response", "deleted": True}
