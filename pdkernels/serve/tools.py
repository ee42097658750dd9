"""Tools of a request: whether calls are asked for, and in which form."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pdkernels.serve.calls import PLAIN, CallForm, form_of, several
from pdkernels.serve.errors import Refused, shown
from pdkernels.serve.parser import AnswerParser
from pdkernels.serve.schema import ChatRequest
from pdkernels.serve.tagged import GEMMA4, HARMONY_CALLS, TaggedForm
from pdkernels.serve.thoughts import ThoughtForm, opened, thoughts_of

_LOG = logging.getLogger("pdkernels.serve")
_PARTS = re.compile(r"<[^<>]+>|\[/?[A-Z_]+\]|◁[^▷]+▷")


@dataclass(frozen=True)
class Calling:
    """What a request says of calls.

    Attributes:
        form: of the model's calls; `PLAIN` where it is not known, or cannot be forced.
        tools: the parameters of those that may be called, JSON schemas, by their names.
        choice: as the request has it.
        forced: whether the answer must be a call.
        strict: whether calls that the model chooses must follow the schemas.
        single: whether an answer has one call at most.
    """

    form: CallForm
    tools: dict[str, Any]
    choice: Any
    forced: bool
    strict: bool
    single: bool


@dataclass(frozen=True)
class Reading:
    """What a chat's answer may hold.

    Attributes:
        calling: None: no calls.
        thoughts: forms of thoughts that the answer may have. None where a grammar has it begin with a call or a form.
        thought: the form of the one in which it begins.
        split: whether thoughts come apart from the text.
    """

    calling: Calling | None
    thoughts: tuple[ThoughtForm, ...] = ()
    thought: ThoughtForm | None = None
    split: bool = True

    def marks(self, tokenizer: Any) -> dict[int, str]:
        """The tags that are special tokens, which texts leave out, by their ids."""
        tags = [tag for form in self.thoughts for tag in (form.opening, form.closing, *form.silent)]
        if self.thought is not None:
            tags.append(self.thought.closing)
        if self.calling is not None and isinstance(self.calling.form, TaggedForm):
            tags += self.calling.form.tags
        return special_tags(tokenizer, tags)

    def parser(self, tags: Collection[str] = ()) -> AnswerParser:
        """What reads the answer. `tags`: those that are special tokens."""
        calling, most = self.calling, None
        form = None if calling is None or (calling.form is PLAIN and not calling.forced) else calling.form
        if calling is not None and calling.single and not calling.forced:  # a text that must be one call ends after it
            most = 1
        special = [one.opening for one in self.thoughts if one.opening in tags]
        schemas = calling.tools if calling else {}
        return AnswerParser(form, schemas, most, self.thoughts, self.thought, self.split, special)


def special_tags(tokenizer: Any, tags: Iterable[str]) -> dict[int, str]:
    """The special tokens in these tags that texts leave out, by their ids."""
    id_of = getattr(tokenizer, "id_of", lambda tag: None)
    tag_texts = {tag_text for tag in tags for tag_text in (tag, *_PARTS.findall(tag))}
    ids = {id_of(tag_text): tag_text for tag_text in tag_texts}
    return {
        number: tag_text for number, tag_text in ids.items() if number is not None and not tokenizer.decode([number])
    }


def asked_reading(
    body: ChatRequest, calling: Calling | None, source: str, tokenizer: Any, prompt: list[int]
) -> Reading:
    """What the answer to a prompt may hold.

    Args:
        body: the request.
        calling: what it says of calls.
        source: of the template.
        tokenizer: of the model.
        prompt: which may have opened a thought.
    """
    if body.calls_in_thoughts:
        return Reading(calling)
    forms, variables = thoughts_of(source), body.chat_template_kwargs or {}
    continued = body.messages[-1].get("content") if variables.get("continue_final_message") else None
    decode = getattr(tokenizer, "decode_all", tokenizer.decode)  # tags may be special tokens
    thought = opened(forms, decode(prompt[-64:]), continued)
    formed = body.response_format is not None and body.response_format.type != "text"
    if (calling and calling.forced) or formed or body.regex is not None or body.choice is not None:
        if thought is not None and special_tags(tokenizer, [thought.closing]):
            thought = None  # no text can close it
        forms = ()
    return Reading(calling, forms, thought, body.separate_reasoning)


def asked_calls(body: ChatRequest, source: str, tokenizer: Any) -> Calling | None:
    """The calls that a chat may have; None: none.

    Args:
        body: the request.
        source: of the template.
        tokenizer: of the model.

    Raises:
        Refused: tools that this template does not show to the model, unless a call is forced; a choice of what is no
            tool.
    """
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice not in ("auto", "none"):
            raise Refused("tool_choice needs tools", 400, "tool_choice")
        return None
    tools = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in body.tools}
    if len(tools) < len(body.tools):
        raise Refused("tools must have different names", 400, "tools")
    if choice == "none":
        return None
    form = form_of(source)
    forced, strict = choice != "auto", any(tool.function.strict for tool in body.tools)
    if "tools" not in source and not forced:
        fault = "the chat template of this model has no place for tools; with tool_choice 'required' or one tool, an answer is a call nevertheless"
        raise Refused(fault, 400, "tools")
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if name not in tools:
            raise Refused(f"tool_choice: there is no tool {shown(name)}", 400, "tool_choice")
        tools = {name: tools[name]}
    if form is None:
        _tell_unknown(source)
        form = PLAIN
    strictly = forced or strict or body.response_format is not None
    if isinstance(form, TaggedForm) and strictly and not writable(form, tokenizer):
        form = PLAIN
    single = isinstance(choice, dict) or body.parallel_tool_calls is False or not several(form)
    return Calling(form, tools, choice, forced, strict, single)


def writable(form: TaggedForm, tokenizer: Any) -> bool:
    """Whether a grammar can have the model write the form: its tags are text."""
    return form not in (GEMMA4, HARMONY_CALLS) and not special_tags(tokenizer, form.tags)


@lru_cache(maxsize=64)
def _tell_unknown(source: str) -> None:
    """Once for each template."""
    _LOG.warning("the form in which the chat template writes calls of tools is not known here: they stay in the text")


def source_of(template: Any, body: ChatRequest) -> str:
    """The text of the template that a request is rendered with."""
    if hasattr(template, "chosen"):
        return str(template.chosen((body.chat_template_kwargs or {}).get("chat_template"), body.tools))
    return str(getattr(template, "source", template))
