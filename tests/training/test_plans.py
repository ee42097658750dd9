"""Planned texts: what is read is what was written, and every broken rule is reported with line and column."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.models import ByteTokenizer, PlanTokens
from pdkernels.training import PlanItem, PlannedSample, lay_out, plans
from pdkernels.training.plans import Item

LETTERS = st.text("ab <>/[]\n1", max_size=8)
TOPICS = st.text("ab1 ", min_size=1, max_size=6).map(str.strip).filter(bool)
NUMBERS = st.none() | st.integers(1, 99)


def is_clear(item: Item) -> bool:
    return item.number is not None or not item.topic.split()[-1].isdigit()


ITEMS = st.tuples(TOPICS, LETTERS, NUMBERS).map(lambda parts: Item(*parts)).filter(is_clear)
ROUNDS = st.lists(st.lists(ITEMS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple)


@settings(max_examples=150)
@given(ROUNDS)
def test_what_is_written_is_read(rounds: tuple[plans.Round, ...]) -> None:
    assert plans.parse(plans.format(rounds)) == rounds


@settings(max_examples=150)
@given(st.lists(st.sampled_from(["<topic>", "</topic>", "<async>", "</async>", "<sync/>", "a 1", " ", "\n", "b"])))
def test_any_text_is_read_or_refused(parts: list[str]) -> None:
    """And what is read may be written again, unless a chunk ended in pads."""
    text = "".join(parts)
    try:
        rounds = plans.parse(text)
    except plans.PlanError as error:
        lines = text.split("\n")
        assert 1 <= error.line <= len(lines) and 1 <= error.column <= len(lines[error.line - 1]) + 1
        assert f"at line {error.line}, column {error.column}." in str(error)
    else:
        assert plans.parse(plans.format(rounds)) == rounds


def test_chunks_with_attributes_are_the_same_rounds() -> None:
    """Planned Diffusion, 4.2: the paper's annotations, written as plans."""
    text = """
        <async topic="definition" tokens="30">A kernel is a program.</async>
        <async tokens="31" topic="two  more">[PAD] x[PAD]</async>
        <sync/>
        <async topic="use">y</async> <sync/> <topic>end 2</topic><async>z</async>"""
    rounds = (
        (Item("definition", "A kernel is a program.", 3), Item("two  more", "[PAD] x", 4)),
        (Item("use", "y", None),),
        (Item("end", "z", 2),),
    )
    assert plans.parse(text) == plans.parse(plans.format(rounds)) == rounds
    assert [item.number for item in plans.parse(text, unit=1)[0]] == [30, 31]
    with pytest.raises(ValueError, match="unit must be 1 or more, got 0"):
        plans.parse(text, unit=0)


def test_the_released_spelling_and_pads() -> None:
    text = "<promise>-<topic>list part 10 3</topic><async>one [PAD] two[PAD][PAD]\n[PAD]</async>"
    assert plans.parse(text) == ((Item("list part 10", "one [PAD] two", 3),),)
    assert plans.parse("<topic>a</topic><async>[PAD]</async>") == ((Item("a", "", None),),)


@pytest.mark.parametrize(
    "text, line, column, words",
    [
        ("", 1, 1, "begin every round with a plan, got the end of the text"),
        ("plain", 1, 1, "have all words inside of <async> or <topic>, got 'plain'"),
        ("<async>x</async>", 1, 1, "begin every round with a plan, got <async>"),
        ("<topic>a 1</topic>\n", 1, 1, "have a chunk for every <topic>, got none for 'a'"),
        ("<topic>a 1</topic><topic>b</topic><async>x</async>", 1, 19, "got none for 'b'"),
        ("<topic>a 1</topic>\n<async>x</async><async>y</async>", 2, 17, "have a <topic> for every chunk, got chunk 2"),
        ("<topic>a 1</topic>\n  <async>x", 2, 3, "close every <async> with </async>, got an open <async>"),
        ("<topic>a 1<async>x</async>", 1, 11, "close <topic> with </topic> before the next tag, got <async>"),
        ("<topic>a</topic><async>x<async>y</async></async>", 1, 25, "before the next tag, got <async>"),
        ("<topic>a</topic><async>x</async></async>", 1, 33, "every tag opened before it is closed, got </async>"),
        ("<topic>a</topic><async>x</async>\nand\n<sync/>", 2, 1, "got 'and'"),
        ("<topic>a</topic><async>x</async><sync/>", 1, 40, "begin every round with a plan, got the end of the text"),
        ("<topic>a</topic><async>x</async><sync/><sync/>", 1, 40, "begin every round with a plan, got <sync/>"),
        ("<topic>a</topic><async>x</async><topic>b</topic><async>y</async>", 1, 33, "<sync/> between two rounds"),
        ("<topic>a 0</topic><async>x</async>", 1, 10, "have numbers from 1 to 99, got 0"),
        ("<topic>a 100</topic><async>x</async>", 1, 10, "have numbers from 1 to 99, got 100"),
        ("<topic> 7 </topic><async>x</async>", 1, 8, "name a topic in every item, got none"),
        (
            "<topic> one two three four 2</topic><async>x</async>",
            1,
            9,
            "topics of at most 3 words, got 'one two three f",
        ),
        ('<async topic="a b c d" tokens="10">x</async>', 1, 15, "have topics of at most 3 words, got 'a b c d'"),
        ('<async topic="a" tokens="0">x</async>', 1, 26, "have tokens from 1 to 990, got '0'"),
        ('<async topic="a" tokens="991">x</async>', 1, 26, "have tokens from 1 to 990, got '991'"),
        ('<async topic="a" tokens="many">x</async>', 1, 26, "have tokens from 1 to 990, got 'many'"),
        ('<async topic="a" size="9">x</async>', 1, 18, 'tokens=".." once in <async>, got size="9"'),
        ('<async topic="a" topic="b">x</async>', 1, 18, 'once in <async>, got topic="b"'),
        ('<async tokens="9">x</async>', 1, 1, "name a topic in every item, got none"),
        ('<async topic="a">x</async><async>y</async>', 1, 27, "name a topic in every item, got none"),
        (
            '<topic>a</topic><async topic="a">x</async>',
            1,
            17,
            'attributes in chunks without a plan only, got topic="a"',
        ),
        ('<async topic="a">x</async><topic>a</topic>', 1, 27, "<sync/> between two rounds"),
    ],
)
def test_broken_rules(text: str, line: int, column: int, words: str) -> None:
    with pytest.raises(plans.PlanError) as caught:
        plans.parse(text)
    error = caught.value
    assert words in str(error) and str(error).startswith("pdkernels.training.plans.parse: text must ")
    assert (error.line, error.column) == (line, column)


@pytest.mark.parametrize(
    "words, rounds",
    [
        ("rounds must not be empty", []),
        ("rounds must hold items, got an empty round", [[]]),
        ("topic must be words", [[Item(" a", "x")]]),
        ("topic must not end with a number where none follows it, got 'part 2'", [[Item("part 2", "x")]]),
        ("topic and content must hold no tags", [[Item("a", "x<sync/>")]]),
        ("topic and content must hold no tags", [[Item("a", '<async topic="b">')]]),
        ("topic must have at most 3 words, got 'a b c d'", [[Item("a b c d", "x")]]),
        ("content must not end with [PAD]", [[Item("a", "x[PAD]")]]),
        ("number must lie in 1 .. 99, got 0", [[Item("a", "x", 0)]]),
    ],
)
def test_what_cannot_be_written(words: str, rounds: Any) -> None:
    with pytest.raises(ValueError, match="pdkernels.training.plans.format: ") as caught:
        plans.format(rounds)
    assert words in str(caught.value)


def test_from_text_to_tokens() -> None:
    rounds = plans.parse("<topic>ab 1</topic><async>xyz</async><sync/><topic>c</topic><async>w</async>")
    sample = plans.as_sample("?", rounds, ByteTokenizer())
    plan_tokens = PlanTokens(300, 301, 302, 303, 304, 305, digits=range(48, 58), unit=2)
    ids = lay_out(sample, plan_tokens, 256).tokens.tolist()
    assert ids == [
        *(63, 302, 97, 98, 32, 50, 303, 300, 120, 121, 122, 305, 301),
        *(304, 302, 99, 32, 49, 303, 300, 119, 305, 301, 256),
    ]
    kept = plans.as_sample("?", rounds, ByteTokenizer(), numbers=True, separator="")
    assert kept.rounds[0] == [PlanItem([97, 98], [120, 121, 122], 1)] and kept.rounds[1][0].number is None


def test_ablations_of_text_and_of_ids() -> None:
    rounds = plans.parse("<topic>a 1</topic><async>x</async><sync/><topic>b</topic><async>y</async>")
    assert plans.without_topics(rounds, "same") == ((Item("same", "x", 1),), (Item("same", "y"),))
    sample = PlannedSample([1], [[PlanItem([2], [3])], [PlanItem([4], [5])]])
    assert plans.without_syncs(sample.rounds) == ((PlanItem([2], [3]), PlanItem([4], [5])),)
