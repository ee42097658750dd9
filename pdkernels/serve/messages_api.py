"""Anthropic's `/v1/messages`: translated into a chat, and its answer back into content blocks and events.

Source: docs.anthropic.com/en/api/messages and /messages-streaming, and the types of the `anthropic` client 2.14.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from pdkernels.serve.answers import Answer
from pdkernels.serve.blocks import Block, Step, block_steps
from pdkernels.serve.errors import NO_THREAD, Refused, error_body, renamed, shown
from pdkernels.serve.gate import told
from pdkernels.serve.messages import CACHED, SENT_ALONG, check_fields, handed_on, part
from pdkernels.serve.schema import (
    LONGEST,
    TO_FIRST,
    ChatRequest,
    Common,
    Depth,
    Flag,
    Integer,
    InUnicode,
    ObjectList,
    OneAnswer,
    Strict,
    one_of,
)
from pdkernels.serve.service import Service, Stream
from pdkernels.serve.threads import in_thread

_FIELDS = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""What fields of a chat are called here."""
_BLOCKS = {
    "text": ("type", "text", "citations"),
    "tool_result": ("type", "tool_use_id", "content", "is_error"),
    "thinking": ("type", "thinking", "signature"),
    "tool_use": ("type", "id", "name", "input", "caller"),
}
"""Fields of blocks. What an answer quoted, who has called, and a signature are sent back with it and change no text."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: str | None = None


class _Tool(Strict):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    strict: Flag | None = None
    cache_control: _CacheControl | None = None
    eager_input_streaming: Flag | None = None
    """Arguments are streamed as they are written anyhow."""
    defer_loading: Literal[False] = False
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


class _ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag = False

    @model_validator(mode="after")
    def _of_one(self) -> _ToolChoice:
        if (self.name is None) == (self.type == "tool"):
            raise PydanticCustomError("tool_choice", "name must be given exactly for the type 'tool'")
        return self


class _Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Integer, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None
    """A thought that is shown comes whole."""

    @model_validator(mode="after")
    def _of_thoughts(self) -> _Thinking:
        if self.type == "disabled" and (self.budget_tokens or self.display) is not None:
            raise PydanticCustomError("thinking", "budget_tokens and display are of thoughts, which are disabled")
        return self


class _Format(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    key_order: Literal["schema", "any"] | None = None
    whitespace: str | None = None
    depth: Depth | None = None


class _OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class _Metadata(Strict):
    user_id: str | None = None


class _Edit(Strict):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class _ContextManagement(Strict):
    """What stays of the thoughts that are sent back: all."""

    edits: list[_Edit] = []


class CountRequest(Strict):
    """The body of `/v1/messages/count_tokens`."""

    model: str
    messages: Annotated[ObjectList, Field(min_length=1)]
    system: Annotated[str | ObjectList | None, one_of("a text or a list of blocks"), InUnicode] = None
    tools: Annotated[list[_Tool], TO_FIRST, LONGEST] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    cache_control: _CacheControl | None = None
    """It changes no text: what can be shared is."""
    context_management: _ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self, **extra: Any) -> ChatRequest:
        """The same as a chat, with `extra` fields."""
        system = [] if self.system is None else [{"role": "system", "content": _text(self.system, "system")}]
        chat_fields: dict[str, Any] = {"messages": [*system, *chat_messages(self.messages)], "model": self.model}
        variables = dict(self.chat_template_kwargs or {})
        if self.messages[-1].get("role") == "assistant":
            variables["continue_final_message"] = True
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
            chat_fields["thinking_token_budget"] = self.thinking.budget_tokens
        if variables:
            chat_fields["chat_template_kwargs"] = variables
        if self.tools:
            chat_fields["tools"] = [
                {
                    "type": "function",
                    "function": {
                        **tool.model_dump(include={"name", "description", "strict"}, exclude_none=True),
                        "parameters": tool.input_schema,
                    },
                }
                for tool in self.tools
            ]
        if (choice := self.tool_choice) is not None:
            one_tool = {"type": "function", "function": {"name": choice.name or ""}}
            choices = {"auto": "auto", "any": "required", "none": "none", "tool": one_tool}
            chat_fields |= {
                "tool_choice": choices[choice.type],
                "parallel_tool_calls": not choice.disable_parallel_tool_use,
            }
        if (output := self.output_config) is not None:
            chat_fields["reasoning_effort"] = output.effort
            if output.format is not None:
                schema = {
                    "name": "output",
                    **output.format.model_dump(exclude={"type"}, exclude_none=True, by_alias=True),
                }
                chat_fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatRequest(**chat_fields, **extra)


class MessagesRequest(CountRequest, OneAnswer, Common):  # type: ignore[misc]
    """The body of `/v1/messages`."""

    max_tokens: Annotated[Integer, Field(ge=1)]
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)] | None
    ) = None
    metadata: _Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]
    thread: dict[str, Any] | None = None
    """Is refused: no conversation is kept here."""

    def chat(self, **extra: Any) -> ChatRequest:
        """The same as a chat."""
        shared = ChatRequest.model_fields.keys() & OneAnswer.model_fields.keys() | Common.model_fields.keys()
        chat_fields = {name: getattr(self, name) for name in self.model_fields_set & shared - {"model", "service_tier"}}
        if self.stop_sequences is not None:
            chat_fields["stop"] = self.stop_sequences
        return super().chat(max_tokens=self.max_tokens, **chat_fields, **extra)


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of blocks as those of a chat: what tools have answered is a message each, before the text beside it.

    >>> result = {"type": "tool_result", "tool_use_id": "c", "content": "rain"}
    >>> chat_messages([{"role": "user", "content": [result]}])
    [{'role': 'tool', 'tool_call_id': 'c', 'content': 'rain'}]

    Raises:
        Refused: blocks of a kind that is not known here.
    """
    chat = list[dict[str, Any]]()
    for place, message in enumerate(messages):
        where, role, content = f"messages.{place}", message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise Refused(f"{where}.role must be 'user' or 'assistant', got {shown(role)}", 400, f"{where}.role")
        check_fields(message, ("role", "content"), where)
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            raise Refused(f"{where}.content must be text or a list of blocks", 400, f"{where}.content")
        chat_message: dict[str, Any] = {"role": role, "content": ""}
        for number, block in enumerate(blocks):
            at, kind = f"{where}.content.{number}", block.get("type")
            if isinstance(kind, str) and kind in _BLOCKS:
                check_fields(block, (*_BLOCKS[kind], *CACHED), at)
            if kind == "text":
                chat_message["content"] += _block_text(block, at)
            elif kind == "tool_result" and role == "user":
                result = block.get("content")
                answer = "" if result is None else _text(result, f"{at}.content")
                call_id = part(block, "tool_use_id", at, str)
                chat.append({"role": "tool", "tool_call_id": call_id, "content": answer})
            elif kind == "thinking" and role == "assistant":
                thought = part(block, "thinking", at, str)
                chat_message["reasoning_content"] = chat_message.get("reasoning_content", "") + thought
            elif kind == "tool_use" and role == "assistant":
                arguments = json.dumps(part(block, "input", at, Mapping, {}))
                function = {"name": part(block, "name", at, str), "arguments": arguments}
                call = {"id": part(block, "id", at, str), "type": "function", "function": function}
                chat_message.setdefault("tool_calls", []).append(call)
            else:
                raise Refused(f"{at}: a block of type {shown(kind)} is not supported here", 400, at)
        if role == "assistant" or chat_message["content"] or not blocks:
            chat_message["content"] = chat_message["content"] or (None if chat_message.get("tool_calls") else "")
            chat.append(chat_message)
    return chat


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    texts = list[str]()
    for number, block in enumerate(content if isinstance(content, list) else [content]):
        texts.append(_block_text(block, place))
        check_fields(block, (*_BLOCKS["text"], *SENT_ALONG), f"{place}.{number}")
    return "".join(texts)


def _block_text(block: Any, place: str) -> str:
    kind, text = (block.get("type"), block.get("text")) if isinstance(block, Mapping) else (None, None)
    if kind != "text" or not isinstance(text, str):
        raise Refused(f"{place}: a block of type {shown(kind)} is not supported; only text is", 400, place)
    return text


class _Writer:
    """Writes the blocks of an answer, and the events of a stream."""

    def __init__(self, body: MessagesRequest, answer: Answer) -> None:
        self._answer, self._choice, self._content = answer, answer.choices[0], list[dict[str, Any]]()
        self._steps = block_steps(self._choice, body.thinking is None or body.thinking.display != "omitted")
        self._stops = body.stop_sequences or ()
        self._head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": body.model}

    async def whole(self) -> dict[str, Any]:
        """The message."""
        async for step, block, _ in self._steps:
            if step == "end":
                is_cut = block.last and self._choice.reason not in ("stop", "tool_calls")
                self._content.append(_whole(block, is_cut))
        return {**self._head, "content": self._content, **self._ending(), "usage": self._usage()}

    async def events(self) -> AsyncGenerator[str, None]:
        """The events of a stream."""
        try:
            none: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            start = {"input_tokens": len(self._choice.prompt), "output_tokens": 0}
            yield _event("message_start", message={**self._head, **none, "usage": start})
            async for step, block, piece in self._steps:
                yield _block_event(step, block, piece)
            yield _event("message_delta", delta=self._ending(), usage=self._usage())
            yield _event("message_stop")
        except Exception as error:
            yield _event("error", **error_body(*told(error)))

    def _ending(self) -> dict[str, Any]:
        reason, stop = self._choice.reason, self._choice.stopped_by
        is_asked = stop is not None and stop in self._stops  # and not one of the checkpoint's
        stop_reason = "stop_sequence" if reason == "stop" and is_asked else _REASONS.get(reason, reason)
        return {"stop_reason": stop_reason, "stop_sequence": stop if stop_reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        usage, cached = self._answer.usage(), self._choice.cached
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._choice.thought_tokens},
        }


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({**fields, 'type': kind})}\n\n"


def _block_event(step: Step, block: Block, piece: str) -> str:
    if step == "begin":
        return _event(
            "content_block_start", index=block.number, content_block=_whole(Block(**{**vars(block), "text": ""}))
        )
    if step == "end":
        return _event("content_block_stop", index=block.number)
    kinds = {"thought": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
    kind, word = kinds.get(block.kind, ("input_json_delta", "partial_json"))
    return _event("content_block_delta", index=block.number, delta={"type": kind, word: piece})


def _whole(block: Block, is_cut: bool = False) -> dict[str, Any]:
    """A block. A call that `is_cut` has no arguments."""
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    arguments = {} if is_cut else handed_on(block.text)
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def add_messages(app: FastAPI, service: Service) -> None:
    """Adds the routes of messages to an application."""

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        if body.thread is not None:
            raise Refused("thread is not supported here: send the whole conversation", 400, "thread", NO_THREAD)
        with renamed(_FIELDS):
            chat = await in_thread(body.chat)
        with renamed(_FIELDS, inside=False):
            answer = await service.chat(request, chat)
        writer = _Writer(body, answer)
        if body.stream:
            return Stream(writer.events(), answer.cancel)
        return await service.whole(request, answer, writer.whole())

    @app.post("/v1/messages/count_tokens")
    async def count(body: CountRequest) -> dict[str, int]:
        with renamed(_FIELDS):
            chat = await in_thread(body.chat)
        with renamed(_FIELDS, inside=False):
            return {"input_tokens": len(await in_thread(service.front.chat_tokens, chat))}
