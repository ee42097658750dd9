"""From a body to requests of the engine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from pdkernels._validation import refuse
from pdkernels.decoding import Grammar, find, sequence_seed
from pdkernels.engine import Engine, Generation
from pdkernels.generation.generation_config import completed
from pdkernels.generation.params import SamplingParams
from pdkernels.generation.prompts import token_lists
from pdkernels.serve.answers import Answer
from pdkernels.serve.choices import Choice, Rest
from pdkernels.serve.errors import Refused, in_http_words, shown
from pdkernels.serve.forms import Asked, asked_grammar
from pdkernels.serve.infill import infilled
from pdkernels.serve.messages import check_function, plain
from pdkernels.serve.options import MethodSettings
from pdkernels.serve.schema import ChatRequest, CompletionRequest, Settings
from pdkernels.serve.tools import Reading, asked_calls, asked_reading, source_of


class Draft(NamedTuple):
    """A request that has been read, and waits for its grammar."""

    kind: str
    """"chat" or "text"."""
    prompts: list[Any]
    most: int | None
    """New tokens of an answer; None: as many as there is room for."""
    asked: Asked | None
    """The form of its texts, to be compiled."""
    reading: Reading | None = None
    """What a chat's answer may hold."""
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
        refuse(name in self.adapters, "serve", f"the model and an adapter are both called {name!r}")

    @property
    def adapters(self) -> list[str]:
        """Names of the model's adapters, which requests may name in its place."""
        return list(getattr(self.engine.model, "adapters", ()))

    def check_model(self, model: str) -> None:
        """Refuses a name that is neither the model's nor that of an adapter."""
        if model != self.name and model not in self.adapters:
            names = " and ".join(map(repr, (self.name, *self.adapters)))
            fault = f"the model {shown(model)} is not served here; {names} {'are' if self.adapters else 'is'}"
            raise Refused(fault, 404, "model", "model_not_found")

    def unload(self, name: str) -> None:
        """Takes an adapter from the model. Refused for the model itself, and for an adapter that a request uses."""
        self.check_model(name)
        if name == self.name:
            raise Refused(f"{name!r} is the model; only its adapters can be deleted", 400, "model")
        try:
            self.engine.unload_adapter(name)
        except ValueError:
            self.check_model(name)  # someone else has deleted it meanwhile
            raise Refused(f"requests use {name!r}: delete it when they have ended", 409, "model") from None

    def prepare(self, grammar: Grammar) -> int:
        """Makes a grammar's automaton over the tokens, as requests will ask for it; returns the bytes of its automata,
        about."""
        return grammar.nbytes(self.engine.model, tuple(self.engine.model.end_tokens))

    def chat(self, body: ChatRequest) -> Draft:
        """Reads a chat."""
        tokenizer, source = self.engine.model.tokenizer, self._source(body)
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise Refused("max_tokens and max_completion_tokens exclude each other", 400, "max_tokens")
        if body.top_logprobs and not body.logprobs:
            raise Refused("top_logprobs needs logprobs to be true", 400, "top_logprobs")
        calling = asked_calls(body, source, tokenizer)
        prompt = self.prompt(body, source)
        reading = asked_reading(body, calling, source, tokenizer, prompt)
        grammar_key = asked_grammar(body, reading)
        if body.thinking_token_budget is not None:
            _check_budget(body, grammar_key)
        return Draft("chat", [prompt], body.max_completion_tokens or body.max_tokens, grammar_key, reading)

    def chat_tokens(self, body: ChatRequest) -> list[int]:
        """The tokens of a chat's prompt."""
        return self.prompt(body, self._source(body))

    def _source(self, body: ChatRequest) -> str:
        """The template of a chat."""
        tokenizer = self.engine.model.tokenizer
        self._check_model(body)
        if getattr(tokenizer, "chat_template", None) is None:
            raise Refused("this model has no chat template; use /v1/completions", 400, "messages")
        for name in {"messages", "tools", "self"} & (body.chat_template_kwargs or {}).keys():
            fault = "is no variable of a template" if name == "self" else "has a field of its own"
            raise Refused(f"chat_template_kwargs: {name!r} {fault}", 400, "chat_template_kwargs")
        return source_of(tokenizer.chat_template, body)

    def prompt(self, body: ChatRequest, source: str) -> list[int]:
        """The tokens of a chat, up to the beginning of the answer, by the template with this source."""
        for number, tool in enumerate(body.tools or []):
            check_function(tool.function.model_extra or {}, source, f"tools.{number}.function")
        tools = [tool.shown() for tool in body.tools or []] if body.tool_choice != "none" else []
        variables = {
            **_effort(body, source),
            **(body.chat_template_kwargs or {}),
            **({"tools": tools} if tools else {}),
        }
        try:
            ids: list[int] = self.engine.model.tokenizer.encode_chat(plain(body.messages, source), **variables)
        except (ValueError, TypeError) as error:
            raise Refused(_template_words(str(error)), 400, _blamed(body)) from None
        return ids

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
        self._check_choices(len(prompts) * (body.n or 1))  # before the work that each takes
        if body.suffix:
            prompts = [self._infilled(body, prompt) for prompt in prompts]
        return Draft("text", prompts, body.max_tokens, asked_grammar(body), echo=body.echo)

    def _infilled(self, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
        """The tokens of a prompt with what comes after the answer; tokens of the form may end the answer then."""
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(body, name):
                raise Refused(f"suffix and {name} exclude each other", 400, "suffix")
        ids, ends = infilled(self.engine.model.tokenizer, prompt, body.suffix or "")
        if ends:
            body.stop_token_ids = list(dict.fromkeys((*(body.stop_token_ids or ()), *ends)))
        return ids

    def _check_choices(self, count: int) -> None:
        if count > self._max_choices:
            fault = f"at most {self._max_choices} choices can be asked for at once, got {count}"
            raise Refused(fault, 400, "n")

    def _check_model(self, body: Settings) -> None:
        """Checks the names of a request; an adapter that it calls the model becomes its adapter."""
        self.check_model(body.model)
        if body.adapter is not None and body.adapter not in self.adapters:
            names = " and ".join(map(repr, self.adapters)) or "none"
            fault = f"the adapter {shown(body.adapter)} is not served here, {names} can be named"
            raise Refused(fault, 404, "adapter", "model_not_found")
        if body.model != self.name:
            if body.adapter not in (None, body.model):
                raise Refused("model and adapter name two adapters", 400, "adapter")
            body.adapter = body.model

    def submit(self, body: Settings, draft: Draft, grammar: Grammar | None) -> Answer:
        """Submits a request that has been read, with the grammar that it asks for."""
        self._check_model(body)  # its adapter may have been unloaded meanwhile
        kind, prompts, most, _, reading, echo = draft
        method = find(body.method or self.method)
        params, options = self.settings.of_request(body, method)
        count, seed = params.n, cast(int, params.seed)
        self._check_choices(count * len(prompts))
        if body.provisional and not body.stream:
            raise Refused("provisional text comes in a stream", 400, "provisional")
        if body.stream_options is not None and not body.stream:
            raise Refused("stream_options are those of a stream: stream must be true", 400, "stream_options")
        params = params.replace(n=1, grammar=grammar)
        ends = () if body.ignore_eos else tuple(self.engine.model.end_tokens)
        if body.ignore_eos or "end_tokens" in body.settings():  # beside the model's, as vLLM has it
            params = params.replace(end_tokens=tuple(dict.fromkeys((*ends, *(params.end_tokens or ())))))
        choices, tokenizer = list[Choice](), self.engine.model.tokenizer
        if tokenizer is None:
            raise Refused("this model has no tokenizer, and what it writes is no text", 400, "model")
        limit_field = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) else "max_tokens"
        run: Callable[..., Generation] = partial(
            self.engine.submit, method=method, provisional=body.provisional, **options
        )
        try:
            for prompt in prompts:
                text, ids = "", prompt
                if isinstance(prompt, str):
                    text, ids = prompt, tokenizer.encode(prompt)
                elif echo:
                    (checked,), _ = token_lists(self.engine.model, prompt, self.engine.model.config.vocab_size)
                    text = tokenizer.decode(checked)
                ids = self._truncated(ids, body.truncate_prompt_tokens)
                limit = self.limit(kind, len(ids), most, limit_field)
                for number in range(count):
                    # With a seed, the answers to a prompt are those that it gets alone.
                    place = len(choices) if body.seed is None else number
                    own_params = params.replace(
                        max_new_tokens=limit, seed=sequence_seed(seed, place) if place else seed
                    )
                    if own_params.min_new_tokens > limit:  # also where a budget of thoughts makes two texts of one
                        fault = f"min_tokens must be at most {limit_field} ({limit}), got {own_params.min_new_tokens}"
                        raise Refused(fault, 400, "min_tokens")
                    own_params = completed("Engine.submit", own_params, self.engine.model)
                    stops = own_params.stop_strings
                    if reading is None:
                        handle = run(ids, params=own_params, timeout=body.timeout)
                        choices.append(Choice(handle, tokenizer, stops, before=text if echo else ""))
                    else:
                        choices.append(self._chatting(body, reading, run, ids, own_params, stops))
        except BaseException:
            for choice in choices:
                choice.cancel()
            self._check_model(body)  # its adapter may have been unloaded just now
            raise
        return Answer(kind, body.model, choices, len(prompts), getattr(body, "include_reasoning", True))

    def _truncated(self, ids: list[int], most: int | None) -> list[int]:
        if most is None:
            return ids
        if most == 0:
            raise Refused("truncate_prompt_tokens must leave a token", 400, "truncate_prompt_tokens")
        return ids[-(self.engine.max_prompt_tokens if most == -1 else most) :]

    def _chatting(
        self,
        body: Any,
        reading: Reading,
        run: Callable[..., Generation],
        ids: list[int],
        params: SamplingParams,
        stops: Sequence[str],
    ) -> Choice:
        """An answer of a chat. A budget of its thought ends a first generation; a second one goes on, whose prompt has
        all tokens so far, so that their K and V are known: no hook runs, and no request waits for another batch."""
        tokenizer, begun = self.engine.model.tokenizer, time.monotonic()
        marks = reading.marks(tokenizer)
        reading_options: dict[str, Any] = {"parser": reading.parser(marks.values()), "marks": marks}
        forms, budget = (reading.thought, *reading.thoughts), getattr(body, "thinking_token_budget", None)
        form = next((thought_form for thought_form in forms if thought_form is not None), None)
        if form is None or budget is None:
            return Choice(run(ids, params=params, timeout=body.timeout), tokenizer, stops, **reading_options)
        opening = 0 if reading.thought else len(_encoded(tokenizer, form.opening))
        closing, limit = _encoded(tokenizer, form.closing + form.answer), params.max_new_tokens
        if len(ids) + budget + opening + len(closing) > self.engine.max_prompt_tokens:
            fault = f"thinking_token_budget must leave room in {self.engine.max_prompt_tokens} tokens, of which the prompt takes {len(ids)}"
            raise Refused(fault, 400, "thinking_token_budget")

        def go_on(thought: Generation, tokens: list[int], closes: bool) -> Rest:
            forced = closing[: limit - len(tokens)] if closes else []
            room = limit - len(tokens) - len(forced)
            if room <= 0:
                return Rest(None, len(forced))
            spent = time.monotonic() - begun
            seconds_left = None if body.timeout is None else body.timeout - spent
            if seconds_left is not None and seconds_left <= 0:
                return Rest(None, len(forced), late=True)
            least = max(0, params.min_new_tokens - len(tokens) - len(forced))
            max_time = None if params.max_time is None else max(0.0, params.max_time - spent)
            rest_params = params.replace(max_new_tokens=room, min_new_tokens=least, max_time=max_time)
            rest = run([*ids, *tokens, *forced], params=rest_params, timeout=seconds_left, after=thought)
            return Rest(rest, len(forced))

        if budget + opening == 0:
            reading_options["parser"].feed(form.closing)
            return Choice(
                run([*ids, *closing], params=params, timeout=body.timeout), tokenizer, stops, **reading_options
            )
        first_params = params.shortened(budget + opening)
        reading_options |= {"closing": form.closing + form.answer, "go_on": go_on if limit > budget + opening else None}
        first = run(ids, params=first_params, timeout=body.timeout)
        first.keeps_adapter = reading_options["go_on"] is not None
        return Choice(first, tokenizer, stops, **reading_options)

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


def _blamed(body: ChatRequest) -> str:
    """The field that a template stumbles over: one with half of a character, else the messages."""
    for name in ("tools", "chat_template_kwargs"):
        try:
            json.dumps(body.model_dump(include={name}), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return name
    return "messages"


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text in the middle of another."""
    plain_only = getattr(tokenizer, "bos_token_id", None) is None
    ids: list[int] = tokenizer.encode(text) if plain_only else tokenizer.encode(text, add_special_tokens=False)
    return ids


def _effort(body: ChatRequest, source: str) -> dict[str, Any]:
    """The template's variables for `reasoning_effort`."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if effort == "none" and "enable_thinking" in source:
        return {"enable_thinking": False}
    if "reasoning_effort" not in source:
        fault = "the chat template of this model does not know reasoning_effort"
        remedy = "; chat_template_kwargs has enable_thinking" if "enable_thinking" in source else ""
        raise Refused(fault + remedy, 400, "reasoning_effort")
    return {"reasoning_effort": effort}


_COUNTED = (
    "presence_penalty",
    "frequency_penalty",
    "forced_tokens",
    "begin_suppress_tokens",
    "stop_sequences",
    "logprobs",
)
"""Fields of what counts from the beginning of an answer, or is looked for in the whole of it."""


def _check_budget(body: ChatRequest, grammar_key: Asked | None) -> None:
    """Refuses what would be wrong for an answer that has two parts."""
    fields = [name for name in _COUNTED if getattr(body, name)]
    if grammar_key is not None:
        fields = ["response_format" if grammar_key.content else "tool_choice", *fields]
    if fields:
        raise Refused(f"thinking_token_budget and {fields[0]} exclude each other", 400, "thinking_token_budget")
