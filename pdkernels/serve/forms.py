"""The languages of answers: what a request's `response_format`, `regex`, `choice` and tools demand of a text."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from pdkernels._validation import refuse
from pdkernels.decoding import Grammar
from pdkernels.grammar.language import Alt, Chars, Expression, Repeat, complement, either, optional, sequence, text
from pdkernels.grammar.products import without
from pdkernels.grammar.regex import parsed
from pdkernels.grammar.schema import Size, parsed_schema
from pdkernels.serve.calls import PLAIN, CallForm, JsonForm
from pdkernels.serve.errors import Refused, in_http_words, shown
from pdkernels.serve.schema import ChatRequest, Settings
from pdkernels.serve.tagged import DEEPSEEK_V3, GLM, KIMI, QWEN_CODER, TaggedForm, kinds_of, resolved
from pdkernels.serve.thoughts import ThoughtForm
from pdkernels.serve.tools import Reading

_DEPTH = 3  # of references, as in Grammar.json_schema
_SPACE = ((9, 10), (13, 13), (32, 32))
_BETWEEN = {QWEN_CODER: "\n", GLM: "\n", DEEPSEEK_V3: "\n"}  # what separates two calls
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
        if (thought := self.thoughts[1]) is not None:
            return Grammar(sequence(_inside(thought, kind), _expression(kind, source)), kind)
        if kind == "regex":
            return Grammar.regex(source)
        form = json.loads(source)
        if kind == "choice":
            return Grammar.choice(form)
        return Grammar.json_schema(**form | {"depth": _depth_of(form)}, unknown="ignore")


def asked_grammar(body: Settings, reading: Reading | None = None) -> Asked | None:
    """What a request asks of the form of its text; None: nothing.

    Raises:
        Refused: demands that exclude each other.
    """
    content, calling = _content(body), reading.calling if reading else None
    thoughts = (reading.thoughts, reading.thought) if reading else ((), None)
    if calling is None or not (calling.forced or calling.strict or content):
        return None if content is None else Asked(content, thoughts=thoughts)
    if calling.forced and content is not None:
        raise Refused(f"{content[0]} and tool_choice {calling.choice!r} exclude each other", 400, "tool_choice")
    if calling.form is PLAIN and not calling.forced:
        fault = "this model's calls have a form that a grammar cannot write here, so only tool_choice 'required' or one tool can be followed with"
        raise Refused(f"{fault} {content[0] if content else 'strict'}", 400, "tools")
    tools = tuple((name, json.dumps(parameters)) for name, parameters in calling.tools.items())
    return Asked(content, (calling.form, tools, calling.single, calling.forced), thoughts)


def _content(body: Settings) -> tuple[str, str] | None:
    """What kind of text is asked for, and its source."""
    form = body.response_format if isinstance(body, ChatRequest) else None
    choice = None if body.choice is None else json.dumps(body.choice)
    asked: dict[str, str | None] = {"regex": body.regex, "choice": choice}
    if form is not None and (form.json_schema is None) == (form.type == "json_schema"):
        raise Refused("json_schema must be given exactly for the type 'json_schema'", 400, "response_format")
    if form is not None and form.type != "text":
        any_object: dict[str, Any] = {"schema": {"type": "object", "additionalProperties": True}}
        asked["response_format"] = json.dumps(
            any_object
            if form.json_schema is None
            else form.json_schema.model_dump(by_alias=True, include={"schema_", "key_order", "whitespace", "depth"})
        )
    demands = [(kind, source) for kind, source in asked.items() if source is not None]
    if len(demands) > 1:
        raise Refused(f"{' and '.join(kind for kind, _ in demands)} exclude each other", 400, demands[-1][0])
    return demands[0] if demands else None


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
    marked = not isinstance(form, JsonForm) or form.marked
    is_list = isinstance(form, JsonForm) and form.listed
    if isinstance(form, JsonForm) and marked:
        calls = sequence(form.opening, calls, form.closing)
    if not single:  # both copies of a call begin at once, so that an automaton has one
        between = form.between if isinstance(form, JsonForm) else _BETWEEN.get(form, "")
        calls = sequence(Repeat(sequence(calls, between), 0, None), calls)
    if is_list:
        calls = sequence("[", calls, "]")
    elif isinstance(form, TaggedForm) and form.begin and form.arguments == "json":
        calls = sequence(form.openings[0], calls, form.closing)
    source = "the calls of tools"
    openings = [thought_form.opening for thought_form in thoughts]
    if content is not None:
        calls = Alt((_expression(*content), calls))
    elif not forced and marked:
        calls = sequence(without(_ANY, _with([*form.openings, *openings]), source), optional(calls))
    elif not forced:
        space, bracket = Repeat(Chars(_SPACE), 0, None), "[" if is_list else "{"
        begun = sequence(space, bracket, _ANY)
        calls = Alt((without(_ANY, either([begun, _with(openings)]) if openings else begun, source), calls))
    if thought is not None:
        calls = sequence(_inside(thought, source), calls)
    elif thoughts:
        calls = sequence(
            optional(
                either([sequence(thought_form.opening, _inside(thought_form, source)) for thought_form in thoughts])
            ),
            calls,
        )
    return Grammar(calls, source)


def _with(tags: list[str]) -> Expression:
    return sequence(_ANY, either([text(tag) for tag in tags]), _ANY)


def _inside(thought: ThoughtForm, words: str) -> Expression:
    """The rest of a thought, with its closing tag and the line breaks after it."""
    return sequence(without(_ANY, _with([thought.closing]), words), thought.closing, Repeat(text("\n"), 0, None))


def _call(form: CallForm, name: str, parameters: str) -> Expression:
    try:
        if isinstance(form, JsonForm):
            return sequence(f'{{"name": {json.dumps(name)}, "{form.arguments}": ', _schema(parameters), "}")
        if form.arguments == "fields":
            return _fields(form, name, json.loads(parameters))
        arguments = _schema(parameters)
        if form is KIMI:
            number = Repeat(Chars(((48, 57),)), 1, 3)
            return sequence(form.begin, f"functions.{name}:", number, form.name_end, arguments, form.end)
        if not form.framed:
            return sequence(f"{form.begin}{name}{form.name_end}", arguments, form.end)
        return sequence(f"{form.begin}function{form.name_end}{name}\n```json\n", arguments, f"\n```{form.end}")
    except (ValueError, TypeError, NotImplementedError) as error:
        raise Refused(f"the parameters of tool {name!r}: {in_http_words(str(error))}", 400, "tools") from None


def _schema(source: Any) -> Expression:
    return parsed_schema(source, size=Size(depth=_DEPTH))[0][0]


def _fields(form: TaggedForm, name: str, schema: dict[str, Any]) -> Expression:
    """A call whose arguments are fields, in the order of the schema's properties."""
    line = "\n" if form.framed else ""
    shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    fields, properties, required = list[Expression](), schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        raise ValueError(f"properties must be an object, got {shown(properties)}")
    if not _are_texts(required):
        raise ValueError(f"required must be a list of texts, got {shown(required)}")
    for key, property_schema in properties.items():
        value = _field(
            {**property_schema, **shared} if isinstance(property_schema, dict) else property_schema, form.field_end
        )
        field = sequence(f"{form.key_begin}{key}{form.key_end}{line}", value, f"{line}{form.field_end}\n")
        fields.append(field if key in required else optional(field))
    head = f"{form.openings[0]}\n{form.begin}{name}{form.name_end}\n" if form.begin else f"{form.openings[0]}{name}\n"
    tail = f"{form.end}\n{form.closing}" if form.end else form.closing
    return sequence(head, *fields, tail)


def _field(schema: Any, end: str) -> Expression:
    """A value: JSON, but a text as it is."""
    if kinds_of(schema, schema) != {"string"}:
        return _schema(json.dumps(schema))
    schema = resolved(schema, schema)
    word = next((word for word in ("enum", "const") if word in schema), None)
    if word is None:
        return without(_ANY, _with([end]), "a text")
    choices = schema["enum"] if word == "enum" else [schema["const"]]
    if not _are_texts(choices) or not choices:
        raise ValueError(
            f"{word} of texts must be {'a list of texts' if word == 'enum' else 'one'}, got {shown(schema[word])}"
        )
    return either([text(choice) for choice in choices])


def _are_texts(several: Any) -> bool:
    return isinstance(several, list) and all(isinstance(one, str) for one in several)


def _expression(kind: str, source: str) -> Expression:
    if kind == "regex":
        return parsed(source)
    form = json.loads(source)
    if kind == "choice":
        return Alt(tuple(map(text, form)))
    any_order, size = form.get("key_order") == "any", Size(depth=_depth_of(form))
    refuse(size.depth is None, "serve", "a depth of 'any' beside tools or a thought", "Pass a number.")
    return parsed_schema(form["schema"], form.get("whitespace"), size, any_order=any_order)[0][0]


def _depth_of(form: dict[str, Any]) -> int | None:
    depth = form.get("depth")
    return _DEPTH if depth is None else None if depth == "any" else int(depth)
