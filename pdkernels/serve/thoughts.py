"""Thoughts in an answer: the tags between which models think before they answer.

Sources: the chat templates of DeepSeek R1, Qwen 3, GLM 4.5 and others (`<think>`), Magistral (`[THINK]`), Seed-OSS,
gpt-oss, Gemma 4, Kimi VL, Command A Reasoning, EXAONE Deep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class ThoughtForm(NamedTuple):
    """The tags of a thought."""

    opening: str
    closing: str
    answer: str = "\n\n"
    """What leads from the closing tag to the answer."""
    silent: tuple[str, ...] = ()
    """Further tags of the model's format, which are part of no text."""


THINK = ThoughtForm("<think>", "</think>")
_CHANNELS = ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>")
HARMONY = ThoughtForm(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|start|>assistant<|channel|>final<|message|>",
    (*_CHANNELS, "<|end|>", "<|return|>", "<|call|>"),
)
_FORMS = (
    THINK,
    ThoughtForm("[THINK]", "[/THINK]"),
    ThoughtForm("<seed:think>", "</seed:think>"),
    HARMONY,
    ThoughtForm("<|channel>thought", "<channel|>", ""),
    ThoughtForm("◁think▷", "◁/think▷"),
    ThoughtForm("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtForm("<thought>", "</thought>"),
    ThoughtForm("<thinking>", "</thinking>"),
)


def thoughts_of(template: str) -> tuple[ThoughtForm, ...]:
    """The forms whose tags a chat template names; `<think>` where it names none, since models write it nevertheless.

    >>> [form.opening for form in thoughts_of("{{ '[THINK]' }}")], [form.opening for form in thoughts_of("")]
    (['[THINK]'], ['<think>'])
    """
    channels = "<|channel|>" in template and "analysis" in template  # which a template puts together
    named = tuple(
        form
        for form in _FORMS
        if (channels if form is HARMONY else form.opening in template or form.closing in template)
    )
    return named or (THINK,)


def opened(forms: Sequence[ThoughtForm], prompt: str, continued: Any = None) -> ThoughtForm | None:
    """The thought in which an answer begins: the one that the prompt ends by opening, or that the `continued` text has
    not closed.

    >>> opened([THINK], "<|im_start|>assistant\\n<think>\\n").closing
    '</think>'
    >>> opened([THINK], "..", "<think>So far").opening, opened([THINK], "<think></think>\\n")
    ('<think>', None)
    """
    text = continued if isinstance(continued, str) else ""
    for form in forms:
        if prompt.rstrip().endswith(form.opening) or text.rfind(form.opening) > text.rfind(form.closing):
            return form
    return None
