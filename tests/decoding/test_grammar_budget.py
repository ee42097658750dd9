"""What compiling a grammar costs: steps grow as the schema does, whatever its shape, and end at a budget."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pdkernels.decoding import Grammar
from pdkernels.grammar import schema as schema_module
from pdkernels.grammar import schema_parts
from pdkernels.grammar.budget import Abandoned, bounded
from pdkernels.grammar.language import one_of
from pdkernels.grammar.recursion import cycles
from pdkernels.grammar.schema_keywords import check_values
from tests.support.grammar_texts import drawn

INTEGER = {"type": "integer"}
STRING = {"type": "string"}


def steps(make: Callable[[], Grammar]) -> int:
    with bounded() as budget:
        make()
    return budget.steps


def of_schema(schema: Any, **options: Any) -> int:
    return steps(lambda: Grammar.json_schema(schema, **options))


def tree(count: int) -> dict[str, Any]:
    """A node with so many optional strings and children."""
    properties = {f"p{n}": STRING for n in range(count)}
    return {"type": "object", "properties": {**properties, "children": {"type": "array", "items": {"$ref": "#"}}}}


def chain(levels: int, level: Callable[[dict[str, str]], dict[str, Any]], last: Any = INTEGER) -> dict[str, Any]:
    """Definitions of which each uses the next one, as `level` says."""
    made = {f"d{n}": level({"$ref": f"#/$defs/d{n + 1}"}) for n in range(levels)}
    return {"$defs": {**made, f"d{levels}": last}, "$ref": "#/$defs/d0"}


def nested(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        made = {"type": "array", "items": made}
    return made


def labelled(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": {"const": count}, "v": STRING}, "required": ["k"]}


SHAPES: dict[str, Callable[[int], Any]] = {
    "optional properties, recursive": tree,
    "allOf of one definition twice": lambda n: chain(n, lambda next_: {"allOf": [next_, next_]}),
    "allOf of a definition and more": lambda n: chain(n, lambda next_: {"allOf": [next_, {**next_, "minimum": 1}]}),
    "allOf in a property": lambda n: chain(
        n, lambda next_: {"type": "object", "properties": {"a": {"allOf": [next_, {**next_, "title": "x"}]}}}
    ),
    "anyOf of one definition twice": lambda n: chain(n, lambda next_: {"anyOf": [next_, next_]}),
    "a chain of definitions": lambda n: chain(n, lambda next_: {"type": "array", "items": next_, "minItems": 1}),
    "arrays": nested,
    "properties": lambda n: {"type": "object", "properties": {f"p{i}": INTEGER for i in range(n)}, "required": [f"p{i}" for i in range(n)]},
    "properties of allOf": lambda n: {"type": "object", "allOf": [{"properties": {f"p{i}": INTEGER}, "required": [f"p{i}"]} for i in range(n)]},
    "two enums": lambda n: {"allOf": [{"enum": list(range(10 * n))}, {"enum": list(range(10 * n))}]},
    "a const of an enum": lambda n: {"enum": list(range(10 * n)), "not": {"enum": list(range(1, 10 * n))}},
    "branches with labels": lambda n: {"oneOf": [labelled(i) for i in range(n)]},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_schema_takes_about_twice_the_steps(shape: str) -> None:
    """Before, most of these were quadratic, or doubled with each level."""
    make = SHAPES[shape]
    few, more = of_schema(make(12)), of_schema(make(24))
    assert more < 3 * few and of_schema(make(48)) < 3 * more


def test_choices_and_repetitions() -> None:
    draw = random.Random(0)
    texts = ["".join(draw.choice("abcdefgh") for _ in range(8)) for _ in range(2000)]
    assert steps(lambda: Grammar.choice(texts)) < 3 * steps(lambda: Grammar.choice(texts[:1000]))
    for pattern in ("(a|b){%d}", "([a-z]{2}){0,%d}", "((a{%d})?b)*", "(%s)"):
        few, more = (pattern % (n if "%d" in pattern else "|".join(map(str, range(n)))) for n in (200, 400))
        assert steps(lambda few=few: Grammar.regex(few)) * 3 > steps(lambda more=more: Grammar.regex(more))  # type: ignore[misc]


def test_the_endings_of_choices_are_shared() -> None:
    """The automaton of texts is the smallest one: a state for each set of endings."""
    texts = [str(n) for n in range(1000)]
    assert Grammar.choice(texts).automaton.states == 4
    assert Grammar.choice(["walking", "talking", "king"]).automaton.states == 8
    grammar = Grammar.choice(texts)
    assert all(map(grammar.matches, texts)) and not any(map(grammar.matches, ["", "00", "1000", "01"]))


def test_each_optional_property_is_in_an_automaton_once() -> None:
    """At each level, so that levels multiply nothing."""
    states = [Grammar.json_schema(tree(4), depth=depth).automaton.states for depth in range(6)]
    levels = [after - before for before, after in zip(states, states[1:], strict=False)]
    assert len(set(levels[1:])) == 1 and levels[-1] <= 1.1 * states[0]
    count = [Grammar.json_schema(tree(n)).automaton.states for n in (5, 10, 20)]
    assert count[2] - count[1] < 2.2 * (count[1] - count[0])


def test_trees_are_written_as_jsonschema_reads_them() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = tree(10)
    grammar, check = Grammar.json_schema(schema), jsonschema.Draft202012Validator(schema)
    for text in drawn(grammar, 100):
        assert check.is_valid(json.loads(text))
    draw = random.Random(0)

    def node(depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {f"p{n}": "x" for n in range(10) if draw.random() < 0.5}
        if depth and draw.random() < 0.8:
            made["children"] = [node(depth - 1) for _ in range(draw.randrange(3))]
        return made

    for _ in range(50):
        value = node(3)
        assert grammar.matches(json.dumps(value)) and not grammar.matches(json.dumps(node(0) | {"children": 1}))
        wrong = dict(reversed(value.items()))  # the order of the schema
        assert grammar.matches(json.dumps(wrong)) == (list(wrong) == list(value))


@pytest.mark.parametrize("least", [0, 1, 2, 4])
@pytest.mark.parametrize("most", [None, 0, 1, 3, 9])
def test_how_many_properties_an_object_has(least: int, most: int | None) -> None:
    """All objects of five properties, two of them required."""
    counts = {"minProperties": least} | ({} if most is None else {"maxProperties": most})
    names, required = "abcde", {"b", "d"}
    schema = {"type": "object", "properties": {name: {"const": 1} for name in names}, "required": [*required], **counts}
    objects = [{name: 1 for bit, name in enumerate(names) if number >> bit & 1} for number in range(32)]
    fits = [required <= one.keys() and least <= len(one) <= (32 if most is None else most) for one in objects]
    if not any(fits):
        with pytest.raises(ValueError, match="no text satisfies"):
            Grammar.json_schema(schema)
        return
    grammar = Grammar.json_schema(schema)
    assert [grammar.matches(json.dumps(one)) for one in objects] == fits


def test_a_text_may_be_empty_in_ebnf() -> None:
    """A sequence of nothing is a text; a choice of nothing is none."""
    grammar = Grammar.ebnf('start: "a" "" more?\nmore: ""')
    assert grammar.matches("a") and not grammar.matches("")


def test_a_budget_ends_every_compile() -> None:
    """And says which one, and what to do."""
    remedy = "Use fewer alternatives, shorter repetitions, or a smaller depth"
    makes: list[Callable[[], Grammar]] = [
        lambda: Grammar.json_schema(tree(10)),
        lambda: Grammar.json_schema({"type": "string", "not": {"pattern": "a{9}b"}, "maxLength": 99}),
        lambda: Grammar.json_schema({"enum": list(range(500)), "not": {"enum": [1]}}),
        lambda: Grammar.regex("([a-z]{9}|[0-9]{9}){0,40}"),
        lambda: Grammar.ebnf('start: ("a" ~ 1..20) ~ 1..20'),
    ]
    for make in makes:
        with pytest.raises(ValueError, match=f"takes more than 600 steps. {remedy}"), bounded(600):
            make()
        with pytest.raises(ValueError, match=f"takes more than 0 seconds. {remedy}"), bounded(seconds=0):
            make()
        with pytest.raises(Abandoned), bounded(abandoned=lambda: True):
            make()
        make()


def test_two_budgets_at_once_are_the_outer_one() -> None:
    with bounded() as outer, bounded(max_steps=1) as inner:
        assert inner is outer
    with bounded() as other:
        assert other is not outer


def test_a_shape_that_still_doubles_ends_at_the_budget() -> None:
    denied = chain(40, lambda next_: {"anyOf": [next_, next_]})
    schema = {"$defs": denied["$defs"], "type": ["integer", "string"], "not": {"$ref": "#/$defs/d0"}}
    with pytest.raises(ValueError, match="takes more than 20000 steps"), bounded(20_000):
        Grammar.json_schema(schema)


def test_cycles() -> None:
    """By walking every way."""
    draw = random.Random(0)
    for _ in range(60):
        names = "abcdefg"
        uses = {name: [other for other in names if draw.random() < 0.2] for name in names}
        reached: dict[str, set[str]] = {}
        for name in names:
            queue = list(uses[name])
            for one in queue:
                queue += [other for other in uses[one] if other not in queue]
            reached[name] = set(queue)
        expected = {
            name: [other for other in names if other in reached[name] and name in reached[other]] for name in names
        }
        assert cycles(uses) == expected


def test_what_fails_costs_its_steps() -> None:
    """A pattern whose automaton doubles with each repetition is given up after as many steps as it took."""
    with bounded() as budget, pytest.raises(ValueError, match="too large"):
        Grammar.regex("(a|b)*a(a|b){20}")
    assert budget.steps > 10_000


def test_sizes_that_are_tried_share_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema is checked once, and many listed values become one automaton once, however many sizes are tried."""
    seen = Counter[str]()

    def counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*given: Any) -> Any:
            seen[name] += 1
            return plain(*given)

        return spy

    monkeypatch.setattr(schema_module, "check_values", counted("checks", check_values))
    monkeypatch.setattr(schema_parts, "one_of", counted("lists", one_of))
    listed = {"enum": [f"value {n:03d}" for n in range(200)]}
    large = {"type": "string", "maxLength": 20_000}
    with bounded() as budget, pytest.warns(UserWarning, match="needs too many states"):
        Grammar.json_schema({"properties": {"a": listed, "b": large}}, fit=True)
    assert seen["checks"] == 1 and seen["lists"] > 1  # several sizes
    assert sum(key[0] == "texts" for key in budget.memo if isinstance(key, tuple)) == 1


@pytest.mark.parametrize("texts", ["usual", "all"])
def test_many_listed_values_are_written_as_few_are(texts: Any) -> None:
    values = [*(f'a "{n}"\\' for n in range(20)), "é", "\n", "\x7f", 7, -0.0, None, {"a": "é"}, ["b", 1.0]]
    many = Grammar.json_schema({"enum": values}, texts=texts)
    for value in values:
        alone = Grammar.json_schema({"const": value}, texts=texts)
        for form in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
            assert many.matches(form) == alone.matches(form)
        assert many.matches(json.dumps(value, ensure_ascii=False))
    assert not many.matches('"a \\"20\\"\\\\"')
