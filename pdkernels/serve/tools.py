"""Tools of a request: whether calls are asked for, and in which form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pdkernels.serve.calls import PLAIN, CallForm, CallParser, form_of
from pdkernels.serve.errors import Refused, shown
from pdkernels.serve.schema import ChatRequest
from pdkernels.serve.thoughts import ThoughtForm, opened, thoughts_of


@dataclass(frozen=True)
class Calling:
    """What a request says of calls.

    Attributes:
        form: of the model's calls; `PLAIN` where it is not known.
        tools: the parameters of those that may be called, JSON schemas, by their names.
        choice: as the request has it.
        forced: whether the answer must be a call.
        strict: whether calls that the model chooses must follow the schemas.
        single: whether an answer has one call at most.
        thoughts: forms of thoughts, in which calls do not count. None where the grammar has an answer begin with a call
            or a form.
        thought: the form of the one in which the answer begins.
    """

    form: CallForm
    tools: dict[str, Any]
    choice: Any
    forced: bool
    strict: bool
    single: bool
    thoughts: tuple[ThoughtForm, ...] = ()
    thought: ThoughtForm | None = None

    def after(self, tokenizer: Any, prompt: list[int], continued: Any) -> Calling:
        """The same, after a prompt that may have opened a thought. `continued`: the text that the answer continues, if
        it does."""
        decode = getattr(tokenizer, "decode_all", tokenizer.decode)  # tags may be special tokens
        return replace(self, thought=opened(self.thoughts, decode(prompt[-64:]), continued)) if self.thoughts else self

    def marks(self, tokenizer: Any) -> dict[int, str]:
        """The tags of thoughts that are special tokens, which texts leave out, by their ids."""
        id_of = getattr(tokenizer, "id_of", lambda tag: None)
        tags = {id_of(tag): tag for form in self.thoughts for tag in form}
        return {number: tag for number, tag in tags.items() if number is not None and not tokenizer.decode([number])}

    def parser(self) -> CallParser | None:
        """What finds the calls of an answer; None: they stay in its text."""
        if self.form is PLAIN and not self.forced:
            return None
        # A text that must be one call ends after it.
        most = 1 if self.single and not self.forced else None
        return CallParser(self.form, list(self.tools), most, self.thoughts, self.thought)


def asked_calls(body: ChatRequest, template: Any) -> Calling | None:
    """The calls that a chat may have; None: none.

    Args:
        template: the tokenizer's.

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
    source = source_of(template, body)
    form = form_of(source)
    forced, strict = choice != "auto", any(tool.function.strict for tool in body.tools)
    if "tools" not in source and not forced:
        words = "the chat template of this model has no place for tools; with tool_choice 'required' or one tool, an answer is a call nevertheless"
        raise Refused(words, 400, "tools")
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if name not in tools:
            raise Refused(f"tool_choice: there is no tool {shown(name)}", 400, "tool_choice")
        tools = {name: tools[name]}
    form = form or PLAIN
    single = isinstance(choice, dict) or body.parallel_tool_calls is False or not form.several
    formed = body.response_format is not None and body.response_format.type != "text"
    at_once = forced or formed or body.regex is not None or body.choice is not None
    thoughts = () if at_once or body.calls_in_thoughts else thoughts_of(source)
    return Calling(form, tools, choice, forced, strict, single, thoughts)


def source_of(template: Any, body: ChatRequest) -> str:
    """The text of the template that a request is rendered with."""
    if hasattr(template, "chosen"):
        return str(template.chosen((body.chat_template_kwargs or {}).get("chat_template"), body.tools))
    return str(getattr(template, "source", template))
