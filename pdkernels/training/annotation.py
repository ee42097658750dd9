"""Asks a language model to mark what of an answer can be written in parallel, and reads its reply: data for planned diffusion.

Source: Planned Diffusion, section 4.2, "fine-tuning dataset", and the rules of appendix A, in other words than the
paper's. Appendix A asks at temperature 1 and top-p 0.95.
"""

from __future__ import annotations

import re

from pdkernels._validation import check, check_type, integer, message
from pdkernels.training.plans import Round, parse

__all__ = ["AnnotationError", "ask", "read"]

SEQUENTIAL = "<sequential/>"
"""The reply about an answer of which nothing can be written in parallel."""

_TASK = """\
You prepare texts for a writer that works on several parts of an answer at once. You are given a question and its answer.

First decide whether the answer has parts that could be written at the same moment by people who do not see each other's
words: entries of a list, sides of a comparison, sections about different things. Derivations, instructions in which a
step uses the one before, and stories have none. If there are none, reply {sequential} and nothing more.

Otherwise reply with the answer and these tags in it:

- <async topic="..." tokens="..."> before a part and </async> after it. Parts between two <sync/> belong together: who
  writes one of them knows the topics of all of them, but no word of the others.
- <sync/>, alone between two parts. What follows it may use every word before it.

Rules:

1. Every word of the answer is in a part, and in one only. A part holds no other part.
2. Copy the answer word by word, in its order: correct nothing, add nothing, leave out nothing.
3. A part has {words} words or more.
4. A topic says in one to three words what its part is about, so that no other part says the same. It has no quotation
   marks and no angle brackets.
5. The number of tokens is your estimate of the part's length, in whole multiples of {unit}.
6. Where a part needs words of an earlier one, put <sync/> between them. Use as few as the answer allows, because the
   writer waits at each.
"""

_TEXT = "<question>\n{prompt}\n</question>\n<answer>\n{answer}\n</answer>"
_TAG = re.compile(r"</?async\b[^<>]*>|<sync/>|</?topic>|" + SEQUENTIAL)
_FENCE = re.compile(r"\A\s*```[a-z]*\n(.*?)\n?```\s*\Z", re.DOTALL)


class AnnotationError(ValueError):
    """An annotation that its rules do not allow."""


def ask(prompt: str, answer: str, *, min_words: int = 5, unit: int = 10) -> list[dict[str, str]]:
    """The messages that ask for an annotation of `answer`, for a chat template or an interface like OpenAI's.

    Args:
        prompt: what the answer answers.
        answer: the text to be annotated, without tags.
        min_words: the fewest words of a part.
        unit: lengths are estimated in multiples of so many tokens, `PlanTokens.unit` of the model to be trained.

    Returns:
        A message of the system and one of the user, each with ``role`` and ``content``.

    Raises:
        TypeError: texts that are not str, sizes that are not int.
        ValueError: an empty answer, one that contains tags, a size below 1.

    Source: Planned Diffusion, appendix A (the rules) and section 4.2 (the attributes).

    Example:
        >>> from pdkernels.training import annotation
        >>> system, user = annotation.ask("What are cats and dogs?", "Cats are small and purr. Dogs are loud and bark.")
        >>> system["role"], "A part has 5 words or more." in system["content"]
        ('system', True)
        >>> user["content"].splitlines()[-2]
        'Cats are small and purr. Dogs are loud and bark.'
    """
    op = "training.annotation.ask"
    for name, text in (("prompt", prompt), ("answer", answer)):
        check_type(isinstance(text, str), op, name, "be a str", type(text).__name__)
    min_words, unit = integer(op, "min_words", min_words, 1), integer(op, "unit", unit, 1)
    check(bool(answer.strip()), op, "answer", "have words", "none")
    check(not _TAG.search(answer), op, "answer", "have no tags", repr(answer[:60]))
    task = _TASK.format(sequential=SEQUENTIAL, words=min_words, unit=unit)
    return [
        {"role": "system", "content": task},
        {"role": "user", "content": _TEXT.format(prompt=prompt, answer=answer)},
    ]


def read(reply: str, answer: str, *, min_words: int = 5, unit: int = 10) -> tuple[Round, ...] | None:
    """The rounds of a reply to `ask`, for `plans.as_sample`; None if nothing can be written in parallel.

    A reply that breaks a rule is refused: the paper discards such samples. `plans.parse` checks balance, overlap,
    coverage, and the types and ranges of the attributes; here the words are compared with those of the answer, and
    counted. White space may differ, and the reply may be in a fence of three backticks. Estimated lengths are kept,
    though `plans.as_sample` counts tokens unless it is told to keep them.

    Args:
        reply: what the model wrote.
        answer: the text that `ask` was given.
        min_words, unit: as for `ask`.

    Raises:
        PlanError: malformed tags, with line and column.
        AnnotationError: words that were changed, added or left out; a part with too few words. Both are ValueErrors.
        TypeError: texts that are not str, sizes that are not int.
        ValueError: a size below 1.

    Source: Planned Diffusion, section 4.2, "fine-tuning dataset", and appendix A.

    Example:
        >>> from pdkernels.training import annotation
        >>> answer = "Cats are small and purr. Dogs are loud and bark."
        >>> rounds = annotation.read('<async topic="cats" tokens="10">Cats are small and purr.</async>'
        ...                          '<async topic="dogs" tokens="10">Dogs are loud and bark.</async>', answer)
        >>> [(item.topic, item.number) for item in rounds[0]]
        [('cats', 1), ('dogs', 1)]
        >>> annotation.read('<async topic="pets">Cats are small and meow.</async>', answer)
        Traceback (most recent call last):
        pdkernels.training.annotation.AnnotationError: pdkernels.training.annotation.read: reply must have the words of
        the answer, got 'meow.' in place of 'purr.', word 5.
    """
    op = "training.annotation.read"
    for name, text in (("reply", reply), ("answer", answer)):
        check_type(isinstance(text, str), op, name, "be a str", type(text).__name__)
    min_words = integer(op, "min_words", min_words, 1)
    fenced = _FENCE.match(reply)
    reply = fenced[1] if fenced else reply
    if reply.strip() == SEQUENTIAL:
        return None
    rounds = parse(reply, unit=unit)
    contents = [item.content.split() for round_ in rounds for item in round_]
    copied, expected = [word for content in contents for word in content], answer.split()
    for number in range(max(len(copied), len(expected))):
        actual, right = (repr(text[number]) if number < len(text) else "none" for text in (copied, expected))
        if actual != right:
            fault = f"{actual} in place of {right}, word {number + 1}"
            raise AnnotationError(message(op, "reply", "have the words of the answer", fault))
    for content in contents:
        if len(content) < min_words:
            fault = repr(" ".join(content))
            raise AnnotationError(message(op, "reply", f"have at least {min_words} words in a part", fault))
    return rounds
