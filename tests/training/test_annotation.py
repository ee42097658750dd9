"""Prompts for annotations of planned diffusion, and their replies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkernels.models import ByteTokenizer
from pdkernels.training import annotation, plans

ANSWER = "Cats are small and purr.\n\nDogs are loud and bark. All of them are kept."
CATS = '<async topic="cats" tokens="10">Cats are small and purr.</async>'
DOGS = '<async topic="what dogs do" tokens="12">Dogs are loud and bark.</async>'
ALL = '<async topic="summary">All of them are kept.</async>'
REPLY = f"{CATS}\n{DOGS}\n<sync/>\n{ALL}"


def test_the_messages_hold_the_texts_and_the_rules() -> None:
    system, user = annotation.ask("What are pets?", ANSWER, min_words=4, unit=20)
    assert (system["role"], user["role"]) == ("system", "user")
    assert ANSWER in user["content"] and "What are pets?" in user["content"]
    task = system["content"]
    for rule in (
        "one to three words",
        "has 4 words or more",
        "multiples of 20",
        annotation.SEQUENTIAL,
        "<sync/>",
        'topic="..."',
    ):
        assert rule in task
    assert "{" not in task


def test_braces_of_texts_stay() -> None:
    assert "{unit} {x}" in annotation.ask("{words}", "{unit} {x}")[1]["content"]


def test_a_reply_becomes_rounds_and_ids() -> None:
    for reply in (REPLY, f"```\n{REPLY}\n```", f"\n```xml\n{REPLY}```\n"):
        rounds = annotation.read(reply, ANSWER)
        assert rounds is not None
        assert [[(item.topic, item.number) for item in items] for items in rounds] == [
            [("cats", 1), ("what dogs do", 2)],
            [("summary", None)],
        ]
    sample = plans.as_sample("What are pets?", rounds, ByteTokenizer())
    assert bytes(sample.rounds[0][1].content) == b"Dogs are loud and bark."


def test_nothing_in_parallel() -> None:
    assert annotation.read(f" {annotation.SEQUENTIAL}\n", ANSWER) is None


REFUSED: dict[str, tuple[str, type[ValueError]]] = {
    "a word changed": (REPLY.replace("loud", "quiet"), annotation.AnnotationError),
    "a word added": (REPLY.replace("kept.", "kept. Always."), annotation.AnnotationError),
    "a word left out": (REPLY.replace(" of them", ""), annotation.AnnotationError),
    "parts in another order": (f"{DOGS}{CATS}<sync/>{ALL}", annotation.AnnotationError),
    "a part of four words": (REPLY.replace("<async topic=\"summary\">All", '<async topic="a">All</async><async topic="b">'), annotation.AnnotationError),
    "a topic of four words": (REPLY.replace("what dogs do", "what all dogs do"), plans.PlanError),
    "words outside": (f"Here it is: {REPLY}", plans.PlanError),
    "an open part": (REPLY.replace("</async>", "", 1), plans.PlanError),
    "no attributes": (REPLY.replace(' topic="cats" tokens="10"', ""), plans.PlanError),
    "no number": (REPLY.replace('"12"', '"a dozen"'), plans.PlanError),
    "no text": ("", plans.PlanError),
    "a part and nothing parallel": (REPLY + annotation.SEQUENTIAL, plans.PlanError),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_replies_that_break_a_rule(name: str) -> None:
    reply, error = REFUSED[name]
    with pytest.raises(error) as raised:
        annotation.read(reply, ANSWER)
    assert type(raised.value) is error


@given(
    parts=st.lists(
        st.lists(st.sampled_from(["a", "bc", "d.", "é", "1"]), min_size=2, max_size=6), min_size=1, max_size=5
    ),
    syncs=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_any_annotation_is_read_as_it_was_made(parts: list[list[str]], syncs: list[bool]) -> None:
    reply, expected = "", [[]]
    for number, (part, sync) in enumerate(zip(parts, [False, *syncs])):
        if sync:
            reply, expected = f"{reply}<sync/>", [*expected, []]
        reply += f'<async topic="t{number}" tokens="{10 * len(part)}">{" ".join(part)}</async>\n'
        expected[-1].append((f"t{number}", " ".join(part), len(part)))
    rounds = annotation.read(reply, "\n".join(word for part in parts for word in part), min_words=2)
    assert [[tuple(item) for item in items] for items in rounds or ()] == expected


ERRORS: dict[str, Any] = {
    "answer must have words, got none.": lambda: annotation.ask("?", " \n"),
    "answer must have no tags, got '<sync/>'.": lambda: annotation.ask("?", "<sync/>"),
    "min_words must be 1 or more, got 0.": lambda: annotation.ask("?", "a", min_words=0),
    "prompt must be a str, got int.": lambda: annotation.ask(1, "a"),  # type: ignore[arg-type]
    "reply must be a str, got list.": lambda: annotation.read([], "a"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("text, call", ERRORS.items())
def test_errors(text: str, call: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert str(raised.value).endswith(text)
