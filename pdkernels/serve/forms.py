"""The languages of answers: what a request's `response_format`, `regex`, `choice` and tools demand of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pdkernels.decoding import Grammar
from pdkernels.grammar.language import (
    Alt,
    Chars,
    Expression,
    Repeat,
    complement,
    either,
    optional,
    sequence,
    text,
    without,
)
from pdkernels.grammar.regex import parsed
from pdkernels.grammar.schema import Size, parsed_schema
from pdkernels.serve.calls import PLAIN, CallForm
from pdkernels.serve.errors import Refused, in_http_words
from pdkernels.serve.schema import ChatRequest, Settings
from pdkernels.serve.thoughts import ThoughtForm
from pdkernels.serve.tools import Calling

_DEPTH = 3  # of references, as in Grammar.json_schema
_SPACE = ((9, 10), (13, 13), (32, 32))
_ANY = Repeat(Chars(complement(())), 0, None)


class Asked(NamedTuple):
    """The form of text that a request asks for: its content, calls of tools, or either."""

    content: tuple[str, str] | None
    calling: tuple[CallForm, tuple[tuple[str, str], ...], bool, bool] | None = None
    """The form of calls, the tools with their schemas, whether there is one call at most, and whether the text must be
    calls."""

    thoughts: tuple[tuple[ThoughtForm, ...], ThoughtForm | None] = ((), None)
    """Those that may come before calls, and the one in which the answer begins."""

    def grammar(self) -> Grammar:
        """Compiles it.

        Raises:
            Refused: a form that cannot be followed; it names the field.
        """
        field = self.content[0] if self.content is not None else "tools"
        try:
            return self._grammar()
        except (ValueError, TypeError, NotImplementedError) as error:
            raise Refused(f"{field}: {in_http_words(str(error))}", 400, field) from None

    def _grammar(self) -> Grammar:
        if self.calling is not None:
            return _calls(*self.calling, self.content, *self.thoughts)
        assert self.content is not None
        kind, source = self.content
        if kind == "regex":
            return Grammar.regex(source)
        given = json.loads(source)
        return Grammar.choice(given) if kind == "choice" else Grammar.json_schema(given, unknown="ignore")


def asked_grammar(body: Settings, calling: Calling | None = None) -> Asked | None:
    """What a request asks of the form of its text; None: nothing.

    Raises:
        Refused: demands that exclude each other.
    """
    content = _content(body)
    if calling is None or not (calling.forced or calling.strict or content):
        return None if content is None else Asked(content)
    if calling.forced and content is not None:
        raise Refused(f"{content[0]} and tool_choice {calling.choice!r} exclude each other", 400, "tool_choice")
    if calling.form is PLAIN and not calling.forced:
        words = "the form of this model's calls is not known here, so only tool_choice 'required' or one tool can be followed with"
        raise Refused(f"{words} {content[0] if content else 'strict'}", 400, "tools")
    tools = tuple((name, json.dumps(parameters)) for name, parameters in calling.tools.items())
    return Asked(content, (calling.form, tools, calling.single, calling.forced), (calling.thoughts, calling.thought))


def _content(body: Settings) -> tuple[str, str] | None:
    """What kind of text is asked for, and its source."""
    form = body.response_format if isinstance(body, ChatRequest) else None
    choice = None if body.choice is None else json.dumps(body.choice)
    asked: dict[str, str | None] = {"regex": body.regex, "choice": choice}
    if form is not None and form.type != "text":
        if (form.json_schema is None) == (form.type == "json_schema"):
            raise Refused("json_schema must be given exactly for the type 'json_schema'", 400, "response_format")
        schema: Mapping[str, Any] = {"type": "object", "additionalProperties": True}
        asked["response_format"] = json.dumps(schema if form.json_schema is None else form.json_schema.schema_)
    given = [(kind, source) for kind, source in asked.items() if source is not None]
    if len(given) > 1:
        raise Refused(f"{' and '.join(kind for kind, _ in given)} exclude each other", 400, given[-1][0])
    return given[0] if given else None


def _calls(
    form: CallForm,
    tools: tuple[tuple[str, str], ...],
    single: bool,
    forced: bool,
    content: tuple[str, str] | None,
    thoughts: tuple[ThoughtForm, ...] = (),
    thought: ThoughtForm | None = None,
) -> Grammar:
    """Texts that are calls; unless `forced`, also a text, before or in place of calls, that `content` says more of. It
    may begin with a thought of any text, and must end the `thought` in which it begins."""
    calls = either([_call(form, name, parameters) for name, parameters in tools])
    if form.marked:
        calls = sequence(form.opening, calls, form.closing)
    if not single:  # both copies of a call begin at once, so that an automaton has one
        calls = sequence(Repeat(sequence(calls, form.between), 0, None), calls)
    if form.listed:
        calls = sequence("[", calls, "]")
    words = "the calls of tools"
    openings = [one.opening for one in thoughts]
    if content is not None:
        calls = Alt((_expression(*content), calls))
    elif not forced and form.marked:
        calls = sequence(without(_ANY, _with([form.opening.strip(), *openings]), words), optional(calls))
    elif not forced:
        space, bracket = Repeat(Chars(_SPACE), 0, None), "[" if form.listed else "{"
        begun = sequence(space, bracket, _ANY)
        calls = Alt((without(_ANY, either([begun, _with(openings)]) if openings else begun, words), calls))
    if thought is not None:
        calls = sequence(_inside(thought, words), calls)
    elif thoughts:
        calls = sequence(optional(either([sequence(one.opening, _inside(one, words)) for one in thoughts])), calls)
    return Grammar(calls, words)


def _with(tags: list[str]) -> Expression:
    return sequence(_ANY, either([text(tag) for tag in tags]), _ANY)


def _inside(thought: ThoughtForm, words: str) -> Expression:
    """The rest of a thought, with its closing tag and the line breaks after it."""
    return sequence(without(_ANY, _with([thought.closing]), words), thought.closing, Repeat(text("\n"), 0, None))


def _call(form: CallForm, name: str, parameters: str) -> Expression:
    try:
        arguments = parsed_schema(parameters, size=Size(depth=_DEPTH))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise Refused(f"the parameters of tool {name!r}: {in_http_words(str(error))}", 400, "tools") from None
    return sequence(f'{{"name": {json.dumps(name)}, "{form.arguments}": ', arguments, "}")


def _expression(kind: str, source: str) -> Expression:
    if kind == "regex":
        return parsed(source)
    given = json.loads(source)
    return Alt(tuple(map(text, given))) if kind == "choice" else parsed_schema(given, size=Size(depth=_DEPTH))
