"""What clients send: the fields of OpenAI's interface that a model here can follow, and a few more.

Source: platform.openai.com/docs/api-reference, "Chat" and "Completions". A field that is not here is refused by name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    WrapValidator,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from pdkernels.generation.params import SETTINGS, Setting

_MOST = 4096
"""Items of lists and objects."""
LONGEST = Field(max_length=_MOST)
"""Of lists."""
TO_FIRST = Field(fail_fast=True)
"""Of lists: nothing is said of what comes after a wrong item."""
TextList = Annotated[list[str], TO_FIRST]
IdList = Annotated[list[StrictInt], TO_FIRST]
ObjectList = Annotated[list[dict[str, Any]], TO_FIRST]


def _number(kind: Literal["int_type", "float_type"]) -> BeforeValidator:
    def validate(value: Any) -> Any:
        if isinstance(value, (bool, str)):
            raise PydanticKnownError(kind)
        return value

    return BeforeValidator(validate)


# Neither true nor "1" is a number in a body, and neither 1 nor "yes" a flag; 16.0 is an integer.
Integer = Annotated[int, _number("int_type")]
Number = Annotated[float, _number("float_type")]
Flag = StrictBool


def _in_unicode(texts: Any) -> Any:
    if isinstance(texts, list) and texts and isinstance(texts[0], int):  # a prompt of many ids
        return texts
    for item in [texts] if isinstance(texts, str) else texts or ():
        text = item.get("text") if isinstance(item, dict) else item
        try:
            if isinstance(text, str):
                text.encode()
        except UnicodeEncodeError as error:
            character = ascii(error.object[error.start])
            fault = "must hold only Unicode characters, got the surrogate {character}"
            raise PydanticCustomError("unicode", fault, {"character": character}) from None
    return texts


def few(most: int) -> BeforeValidator:
    """Of objects with at most so many fields, which are counted before each of them is looked at: errors of many would take
    seconds."""

    def validate(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticKnownError(
                "too_long", {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            )
        return value

    return BeforeValidator(validate)


InUnicode = AfterValidator(_in_unicode)
"""Of texts that are tokens then; others may hold halves of characters, and come back with them."""


def one_of(kinds: str) -> WrapValidator:
    """Of a field of several kinds: what it must be, where pydantic names its classes."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            # Only a text, or an object with one, gives such an error, and of a long list there are many others.
            if isinstance(value, (str, dict)) and any(one["type"] == "string_unicode" for one in error.errors()):
                raise PydanticKnownError("string_unicode") from None
            raise PydanticCustomError("kinds", f"must be {kinds}") from None

    return WrapValidator(validate)


def _place(key: Any) -> Any:
    if isinstance(key, str) and not re.fullmatch(r"0|-?[1-9][0-9]*", key):
        raise PydanticKnownError("int_parsing")
    return key


Place = Annotated[int, BeforeValidator(_place)]
"""A number that is the name of a field, of which there is one spelling: "01" would be a second "1"."""


class Strict(BaseModel):
    """A body, or a part of one, whose fields are all known here."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, value: Any) -> Any:
        """Some clients send null in fields that ask for nothing, known here or not. Of many unknown ones the first is told."""
        if not isinstance(value, dict):
            return value
        fields = {name: field for name, field in value.items() if field is not None}
        if cls.model_config.get("extra") == "forbid":
            names = {*cls.model_fields, *(field.alias for field in cls.model_fields.values())}
            for name in [name for name in fields if name not in names][1:]:
                del fields[name]
        return fields


class Unpadded(Strict):
    """Of a stream whose events have no padding."""

    include_obfuscation: Literal[False] | None = None


class StreamOptions(Unpadded):
    """How a stream ends."""

    include_usage: Flag = False


def _json_type(setting: Setting) -> Any:
    """The type of a setting's field."""
    minimum, maximum = setting.wire_bounds
    number = Annotated[Number, Field(ge=minimum, le=maximum, allow_inf_nan=False)]
    token_ids = Annotated[IdList, LONGEST]
    types = {
        "number": number,
        "integer": Annotated[Integer, Field(ge=minimum, le=maximum)],
        "integers": token_ids,
        "sequences": Annotated[list[token_ids], LONGEST, TO_FIRST],
        "numbers by token": Annotated[dict[Place, number], few(_MOST)],
        "tokens by place": Annotated[dict[Place, StrictInt], few(_MOST)],
        "name": Annotated[str, Field(min_length=1, max_length=256)],
        "strings": Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)],
    }
    return types[setting.kind]


_FIELDS: dict[str, Any] = {s.wire: (_json_type(s) | None, None) for s in SETTINGS.values() if s.wire}
Sampling: Any = create_model("Sampling", __base__=Strict, **_FIELDS)
"""The fields of settings: one for each that has a name on the wire."""
_OF_CHOICES = ("max_tokens", "n", "logprobs", "stop", "stop_sequences")
OneAnswer: Any = create_model(
    "OneAnswer", __base__=Strict, **{k: v for k, v in _FIELDS.items() if k not in _OF_CHOICES}
)
"""The same for routes whose answers are one, with a name of their own for its length."""


class Common(Strict):
    """Fields of all routes that generate."""

    model: str
    stream: Flag = False
    # These say who asks or what for, which changes no text, or ask for nothing.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Beyond OpenAI's: in its client they are passed by `extra_body`.
    method: str | None = None
    """The decoding method; None: the server's."""
    options: dict[str, Any] | None = None
    """Options of the method."""
    timeout: Annotated[Number, Field(gt=0)] | None = None
    """Seconds after which an answer ends with what it has."""
    ignore_eos: Flag = False
    """Whether the model's end tokens are tokens like others."""
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1)] | None = None
    """So many tokens at the end of a prompt are kept; -1: as many as are taken here."""
    priority: Literal[0] = 0


Metadata = Annotated[dict[str, str], few(16)]


class Settings(Sampling, Common):  # type: ignore[misc]
    """Fields of OpenAI's older endpoints."""

    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    store: Literal[False] | None = None
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: Annotated[TextList, Field(min_length=1)] | None = None
    """Texts of which the answer is one."""
    provisional: Flag = False
    """Whether a stream also says what stands after its text so far, and may still change; of methods that fill
    positions in any order."""

    @field_validator("stop", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def settings(self) -> dict[str, Any]:
        """The settings that it has, by their names in `SamplingParams`."""
        values = {setting.name: getattr(self, setting.wire) for setting in SETTINGS.values() if setting.wire}
        return {name: value for name, value in values.items() if value is not None}


Depth = Annotated[
    Annotated[int, Field(strict=True, ge=0, le=64)] | Literal["any"], one_of('an integer from 0 to 64, or "any"')
]
"""How often a reference of a schema may be inside itself."""


class JsonSchema(Strict):
    """A schema that an answer follows."""

    model_config = ConfigDict(populate_by_name=True)
    name: str = ""
    description: str | None = None
    strict: Flag | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    key_order: Literal["schema", "any"] = "schema"
    whitespace: str | None = None
    depth: Depth | None = None
    """As those of `Grammar.json_schema`; a depth of "any" is its None."""


class ResponseFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Strict):
    """A function that a model may call. Templates may name further fields of it."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    type: Literal["function"] | None = None
    """Once more, as some clients say."""
    cache_control: dict[str, Any] | None = None


class Tool(Strict):
    """A tool, which is a function."""

    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = None
    """It changes no text: what can be shared is."""

    def shown(self) -> dict[str, Any]:
        """As templates know it."""
        unshown: Any = {"function": {"strict", "type", "cache_control"}, "cache_control": True}
        return self.model_dump(exclude_none=True, exclude=unshown)


class ChatRequest(Settings):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[ObjectList, Field(min_length=1)]
    max_completion_tokens: _json_type(SETTINGS["max_new_tokens"]) | None = None  # type: ignore[valid-type]
    tools: Annotated[list[Tool], TO_FIRST, LONGEST] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    """Of a dictionary, a function's: `{"type": "function", "function": {"name": ..}}`."""
    parallel_tool_calls: Flag | None = None
    """False: an answer has at most one call."""
    calls_in_thoughts: Flag = False
    """Whether calls inside a thought count, too."""
    verbosity: Literal["medium"] | None = None
    modalities: Annotated[list[Literal["text"]], TO_FIRST] | None = None
    response_format: ResponseFormat | None = None
    logprobs: Flag | None = None
    top_logprobs: _json_type(SETTINGS["logprobs"]) | None = None  # type: ignore[valid-type]
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """For templates that know it."""
    thinking_token_budget: Annotated[Integer, Field(ge=0)] | None = None
    """Tokens of a thought, after which it is closed."""
    separate_reasoning: Flag = True
    """Whether a thought comes apart from the text; else it is part of it, with its tags."""
    include_reasoning: Flag = True
    """Whether a thought that comes apart comes at all."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as `enable_thinking`."""

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _one_of(cls, value: Any) -> Any:
        named = value.get("function") if isinstance(value, dict) and value.keys() == {"type", "function"} else None
        function = isinstance(named, dict) and named.keys() == {"name"} and isinstance(named["name"], str)
        if value in ("auto", "none", "required") or (function and value["type"] == "function"):
            return value
        fault = """must be "auto", "none", "required", or a function: {"type": "function", "function": {"name": ..}}"""
        raise PydanticCustomError("tool_choice", fault)

    def settings(self) -> dict[str, Any]:
        """The settings that it has; `logprobs` is a number here, too."""
        asked = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        asked["max_new_tokens"] = self.max_completion_tokens or self.max_tokens
        return {name: value for name, value in (super().settings() | asked).items() if value is not None}


class CompletionRequest(Settings):
    """The body of `/v1/completions`."""

    prompt: Annotated[
        str | IdList | Annotated[TextList, LONGEST] | Annotated[list[IdList], TO_FIRST, LONGEST],
        one_of("a text, a list of token ids, or a list of at most 4096 texts or lists of ids"),
        InUnicode,
    ]
    max_tokens: _json_type(SETTINGS["max_new_tokens"]) | None = 16  # type: ignore[valid-type]
    suffix: Annotated[str | None, InUnicode] = None
    """What comes after the answer, for models that fill in the middle."""
    echo: Flag = False
    best_of: Integer | None = None


class ReplayRequest(Strict):
    """The body of `/replay`: a page that shows a generation step by step."""

    prompt: Annotated[str, Field(min_length=1), InUnicode]
    chat: Flag = False
    method: str | None = None
    options: dict[str, Any] | None = None
    max_tokens: Annotated[Integer, Field(ge=1)] = 64
    stream: Flag = False
