"""From a body to requests of the engine, and from their pieces to answers in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import CancelledError
from itertools import groupby
from typing import Any, NamedTuple, cast

from pdkernels.decoding import Grammar, LogProbs, find, sequence_seed
from pdkernels.engine import Engine, Generation
from pdkernels.serve import log_probs
from pdkernels.serve.calls import CallDelta, CallParser, joined
from pdkernels.serve.errors import Refused, error_body, in_http_words, of_failure, shown
from pdkernels.serve.forms import Asked, asked_grammar
from pdkernels.serve.gate import log_failure
from pdkernels.serve.messages import plain
from pdkernels.serve.options import MethodSettings
from pdkernels.serve.schema import ChatRequest, CompletionRequest, Settings
from pdkernels.serve.stops import StopCut
from pdkernels.serve.tools import Calling, asked_calls, source_of

Standing = list[str | None]
"""What stands after a text: pieces of text, None for each position where nothing is written."""


class Choice:
    """One of the answers to a request."""

    def __init__(
        self,
        handle: Generation,
        tokenizer: Any,
        stops: Sequence[str],
        before: str = "",
        calls: CallParser | None = None,
        marks: Mapping[int, str] = {},
    ) -> None:
        self.handle, self.tokenizer, self._stops, self._before, self._calls = handle, tokenizer, stops, before, calls
        self._marks, self._ids, self._size = marks, list[int](), 0
        self.text = ""
        """What `news` has read so far, calls included."""

    async def news(self) -> AsyncIterator[str | CallDelta | Standing]:
        """Pieces of its text, none empty, and of its calls; and what stands after the text, if that was asked for."""
        cut, calls = StopCut(self._stops), self._calls
        if self._before:
            yield self._before
        async for piece in self.handle:
            if piece.provisional is not None:
                pending = (calls.held if calls else "") + cut.held
                yield [*([pending] if pending else []), *self._written(piece.provisional)]
            else:
                for text, mark in self._sections(piece.ids, piece.text or ""):
                    for new in self._read(cut.feed(text)):
                        yield new
                    for new in calls.mark(mark) if calls and mark else []:
                        yield new
            if calls and calls.over:
                self.handle.cancel()  # and it soon ends
        for new in self._read(cut.flush()):
            yield new
        for new in calls.flush() if calls else []:
            yield new

    def _read(self, text: str) -> Sequence[str | CallDelta]:
        if self._calls is None or not self._calls.over:
            self.text += text
        return self._calls.feed(text) if self._calls else [text] if text else []

    def _sections(self, ids: Sequence[int], text: str) -> list[tuple[str, str]]:
        """The parts of a piece's text, each with the tag behind it that the text leaves out."""
        sections, start = list[tuple[str, str]](), 0
        for token in ids if self._marks else ():
            if token in self._marks:
                end = max(start, len(self.tokenizer.decode(self._ids)) - self._size)
                sections.append((text[start:end], self._marks[token]))
                start = end
            self._ids.append(token)
        self._size += len(text)
        return [*sections, (text[start:], "")]

    def _written(self, tokens: list[int | None]) -> Standing:
        standing: Standing = []
        for is_written, run in groupby(tokens, key=lambda token: token is not None):
            group = list(run)
            if not is_written:
                standing += [None] * len(group)
            elif text := self._decoded([token for token in group if token is not None]):
                standing.append(text)
        return standing

    def _decoded(self, ids: list[int]) -> str:
        """The text of `ids` inside a text, where some tokenizers have a space that they leave out at its beginning."""
        if not getattr(self.tokenizer, "skips_first_space", False):
            return str(self.tokenizer.decode(ids))
        before = str(self.tokenizer.decode(ids[:1]))
        return str(self.tokenizer.decode([ids[0], *ids])).removeprefix(before)

    @property
    def reason(self) -> str:
        """OpenAI's name of why it ended; a time limit has none there."""
        reason, calls = self.handle.finish_reason or "stop", self._calls
        if calls is None or not (reason == "stop" or calls.over):
            return reason
        if calls.unfinished:
            return "length"  # so that nobody runs half a call
        return "tool_calls" if calls.count else reason


class Answer:
    """The choices of a request, whole or as they come."""

    def __init__(self, kind: str, name: str, choices: list[Choice], prompts: int) -> None:
        self.chat = kind == "chat"
        self._head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }
        self.choices, self._prompts = choices, prompts

    def cancel(self) -> None:
        """Ends what still runs."""
        for choice in self.choices:
            choice.handle.cancel()

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        read = await asyncio.gather(*map(_all, self.choices))
        entries = []
        for index, (choice, (text, calls)) in enumerate(zip(self.choices, read, strict=True)):
            content = {"message": {"role": "assistant", **_message(text, calls)}} if self.chat else {"text": text}
            entries.append(
                {"index": index, **content, "logprobs": self._likely(choice), "finish_reason": choice.reason}
            )
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": entries, "usage": self.usage()}

    def _likely(self, choice: Choice) -> dict[str, Any] | None:
        """The log-probabilities of a choice, if they were asked for."""
        try:
            result = choice.handle.result()
        except CancelledError:  # its time was over before it began
            return None
        if result.logprobs is None:
            return None
        assert isinstance(result.logprobs, LogProbs)
        return log_probs.entries(self.chat, choice.tokenizer, result.tokens.tolist(), choice.text, result.logprobs)

    async def events(self, with_usage: bool) -> AsyncIterator[str]:
        """The events of a stream. Whoever stops reading cancels the answer."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        news: asyncio.Queue[tuple[int, str | CallDelta | Standing | None, BaseException | None]] = asyncio.Queue()

        async def read(index: int, choice: Choice) -> None:
            error: BaseException | None = None
            try:
                async for item in choice.news():
                    news.put_nowait((index, item, None))
            except Exception as failed:
                error = failed
            news.put_nowait((index, None, error))

        def event(entries: list[dict[str, Any]], **fields: Any) -> str:
            return f"data: {json.dumps({**self._head, 'object': kind, 'choices': entries, **fields})}\n\n"

        def entry(index: int, new: str | CallDelta | Standing | None) -> dict[str, Any]:
            content_fields: dict[str, Any] = {"provisional": new} if isinstance(new, list) else {}
            if isinstance(new, str):
                content_fields = {"content" if self.chat else "text": new}
            elif isinstance(new, CallDelta):
                content_fields = {"tool_calls": [new.written()]}
            content = {"delta": content_fields} if self.chat else {"text": "", **content_fields}
            choice = self.choices[index]
            # Log-probabilities are known at the end.
            logprobs, reason = (self._likely(choice), choice.reason) if new is None else (None, None)
            return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

        readers = [asyncio.create_task(read(*pair)) for pair in enumerate(self.choices)]
        none = {"usage": None} if with_usage else {}
        try:
            if self.chat:
                for index in range(len(self.choices)):
                    first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                    yield event([first], **none)
            unfinished = len(readers)
            while unfinished:
                index, new, error = await news.get()
                if error is not None:
                    text, status = of_failure(error)
                    if status == 500:
                        log_failure("POST", "a stream", error)
                    yield f"data: {json.dumps(error_body(text, status))}\n\n"
                    return
                unfinished -= new is None
                yield event([entry(index, new)], **none)
            if with_usage:
                yield event([], usage=self.usage())
            yield "data: [DONE]\n\n"
        finally:
            self.cancel()
            for reader in readers:
                reader.cancel()

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of the answers."""
        prompt = sum(len(choice.handle.prompt) for choice in self.choices[: self._prompts])
        pieces = [piece for choice in self.choices for piece in choice.handle.pieces]
        new, accepted = sum(len(piece.ids) for piece in pieces), sum(piece.accepted for piece in pieces)
        details = {"accepted_prediction_tokens": accepted}
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**counts, "completion_tokens_details": details}


async def _all(choice: Choice) -> tuple[str, list[dict[str, Any]]]:
    """The text of a choice without its calls, and the calls."""
    news = [new async for new in choice.news()]
    text = "".join(new for new in news if isinstance(new, str))
    return text, joined([new for new in news if isinstance(new, CallDelta)])


def _message(text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": text or None, "tool_calls": calls} if calls else {"content": text}


class Draft(NamedTuple):
    """A request that has been read, and waits for its grammar."""

    kind: str
    """"chat" or "text"."""
    prompts: list[Any]
    most: int | None
    """New tokens of an answer; None: as many as there is room for."""
    asked: Asked | None
    """The form of its texts, to be compiled."""
    calling: Calling | None = None
    echo: bool = False


class Frontend:
    """An engine with the names and defaults of a server.

    Args:
        engine: runs the requests.
        name: of the model, as clients name it.
        method: where a request names none.
        settings: of methods, where a request has none.
        max_choices: of one request, over all its prompts.
    """

    def __init__(self, engine: Engine, name: str, method: str, settings: MethodSettings, max_choices: int) -> None:
        self.engine, self.name, self.method = engine, name, method
        self.settings, self._max_choices = settings, max_choices

    def prepare(self, grammar: Grammar) -> int:
        """Makes a grammar's automaton over the tokens, as requests will ask for it; returns the bytes of its automata,
        about."""
        ends, nbytes = tuple(self.engine.model.end_tokens), 1024 * grammar.automaton.states
        if ends:
            automaton = grammar.for_model(self.engine.model, ends)
            nbytes += 8 * automaton.states * automaton.classes
        return nbytes

    def chat(self, body: ChatRequest) -> Draft:
        """Reads a chat."""
        tokenizer = self.engine.model.tokenizer
        self._check_model(body)
        if getattr(tokenizer, "chat_template", None) is None:
            raise Refused("this model has no chat template; use /v1/completions", 400, "messages")
        for name in {"messages", "tools"} & (body.chat_template_kwargs or {}).keys():
            raise Refused(f"chat_template_kwargs: {name!r} has a field of its own", 400, "chat_template_kwargs")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise Refused("max_tokens and max_completion_tokens exclude each other", 400, "max_tokens")
        if body.top_logprobs and not body.logprobs:
            raise Refused("top_logprobs needs logprobs to be true", 400, "top_logprobs")
        template = tokenizer.chat_template
        calling = asked_calls(body, template)
        tools = [tool.shown() for tool in body.tools or []] if body.tool_choice != "none" else []
        variables = {**(body.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
        messages = plain(body.messages, source_of(template, body))
        try:
            prompt = tokenizer.encode_chat(messages, **variables)
        except (ValueError, TypeError) as error:
            raise Refused(_template_words(str(error)), 400, "messages") from None
        if calling is not None:
            continued = messages[-1]["content"] if variables.get("continue_final_message") else None
            calling = calling.after(tokenizer, prompt, continued)
        most = body.max_completion_tokens or body.max_tokens
        return Draft("chat", [prompt], most, asked_grammar(body, calling), calling)

    def completion(self, body: CompletionRequest) -> Draft:
        """Reads a request with one prompt or several."""
        self._check_model(body)
        if body.best_of not in (None, body.n or 1):
            raise Refused("best_of must be n: all choices are returned", 400, "best_of")
        prompts: list[Any]
        prompt = body.prompt
        single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
        prompts = [prompt] if single else list(prompt)
        if not all(prompts) or not prompts:
            raise Refused("prompt must not be empty", 400, "prompt")
        if body.echo and body.logprobs is not None:
            fault = "logprobs with echo would be those of the prompt too, which are not computed"
            raise Refused(fault, 400, "logprobs")
        return Draft("text", prompts, body.max_tokens, asked_grammar(body), echo=body.echo)

    def _check_model(self, body: Settings) -> None:
        if body.model != self.name:
            raise self.unknown(body.model)

    def submit(self, body: Settings, draft: Draft, grammar: Grammar | None) -> Answer:
        """Submits a request that has been read, with the grammar that it asks for."""
        kind, prompts, most, _, calling, echo = draft
        method = find(body.method or self.method)
        params, options = self.settings.of_request(body, method)
        count, seed, stops = params.n, cast(int, params.seed), params.stop_strings
        if count * len(prompts) > self._max_choices:
            fault = f"at most {self._max_choices} choices can be asked for at once, got {count * len(prompts)}"
            raise Refused(fault, 400, "n")
        if body.provisional and not body.stream:
            raise Refused("provisional text comes in a stream", 400, "provisional")
        params = params.replace(n=1, grammar=grammar)
        if "end_tokens" in body.settings():  # beside the model's, as vLLM has it
            ends = dict.fromkeys((*self.engine.model.end_tokens, *(params.end_tokens or ())))
            params = params.replace(end_tokens=tuple(ends))
        choices, tokenizer = list[Choice](), self.engine.model.tokenizer
        if tokenizer is None:
            raise Refused("this model has no tokenizer, and what it writes is no text", 400, "model")
        try:
            for prompt in prompts:
                text, ids = "", prompt
                if isinstance(prompt, str):
                    text, ids = prompt, tokenizer.encode(prompt)
                elif echo:
                    text = tokenizer.decode(prompt)
                limit_field = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) else "max_tokens"
                limit = self.limit(kind, len(ids), most, limit_field)
                for number in range(count):
                    handle = self.engine.submit(
                        ids,
                        method,
                        params=params,
                        max_new_tokens=limit,
                        seed=sequence_seed(seed, number) if count > 1 else seed,
                        timeout=body.timeout,
                        provisional=body.provisional,
                        **options,
                    )
                    calls, marks = (calling.parser(), calling.marks(tokenizer)) if calling else (None, {})
                    choices.append(Choice(handle, tokenizer, stops, text if echo else "", calls, marks))
        except BaseException:
            for choice in choices:
                choice.handle.cancel()
            raise
        return Answer(kind, self.name, choices, len(prompts))

    def unknown(self, model: str) -> Refused:
        """Says which model is served here."""
        fault = f"the model {shown(model)} is not served here; {self.name!r} is"
        return Refused(fault, 404, "model", "model_not_found")

    def limit(self, kind: str, prompt: int, most: int | None, asked: str = "max_tokens") -> int:
        """New tokens of an answer to so many: `most`, for which the request has the field `asked`, or what there is
        room for."""
        engine, code, field = self.engine, "context_length_exceeded", "messages" if kind == "chat" else "prompt"
        if prompt > engine.max_prompt_tokens:
            fault = f"the prompt has {prompt} tokens; at most {engine.max_prompt_tokens} are taken here"
            raise Refused(fault, 400, field, code)
        positions = getattr(engine.model.config, "max_positions", None)
        room = engine.max_new_tokens if positions is None else min(engine.max_new_tokens, positions - prompt)
        if most is not None and most > engine.max_new_tokens:
            raise Refused(f"{asked} must be at most {engine.max_new_tokens} here, got {shown(most)}", 400, asked)
        if room < (most or 1):
            fault = f"the model takes {positions} tokens; the prompt has {prompt}, and {most or 1} more are asked for"
            raise Refused(fault, 400, field, code)
        return most or room


def _template_words(text: str) -> str:
    """What a template says of the messages, without Jinja's name for it."""
    match = re.search(r"must render the messages, got \w+ \((.*)\)\.?$", text)
    return f"the chat template does not take these messages: {match[1]}" if match else in_http_words(text)
