"""Random small schemas, and what becomes of them beside jsonschema."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from fractions import Fraction
from typing import Any, Literal

import jsonschema

from pdkernels.decoding import Grammar
from tests.support.grammar_texts import drawn

NAMES = ["a", "b", "ab", "é"]
TEXTS = ["", "a", "ab", "b", "é", "2024-02-29"]
NUMBERS: list[Any] = [0, 1, 2, 3, -1, 0.5, 1.5, 2.0, 2.25]
PATTERNS = ["^a", "b$", "^[a-b]{1,2}$", "é"]


def _multiple_of(validator: Any, step: Any, value: Any, schema: Any) -> Any:
    """In decimals, as JSON writes numbers: jsonschema divides binary fractions, and 0.3 is no multiple of 0.1 to it."""
    if validator.is_type(value, "number") and (Fraction(repr(value)) / Fraction(repr(step))).denominator > 1:
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": _multiple_of})
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


class Writer:
    """Random schemas and values of a few names, strings and numbers, so that their parts often speak of the same."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def some(self, values: list[Any], most: int = 2) -> list[Any]:
        return self.draw.sample(values, self.draw.randint(1, most))

    def schema(self, depth: int = 2) -> Any:
        if self.draw.random() < 0.06:
            return self.draw.choice([True, False, {}])
        kinds = self.draw.choices(["string", "number", "array", "object", "listed"], [3, 3, 2, 4, 2])
        made: dict[str, Any] = {}
        for kind in kinds:
            made |= getattr(self, f"_{kind}")(depth)
        if self.draw.random() < 0.7 and kinds != ["listed"]:
            kind = self.draw.choice(["integer", "number"]) if kinds == ["number"] else kinds[0]
            made["type"] = kind if self.draw.random() < 0.7 else [kind, self.draw.choice(["null", "boolean"])]
        if depth and self.draw.random() < 0.35:
            made |= self._applied(depth - 1)
        return made

    def _string(self, depth: int) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {"minLength": 1},
            {"maxLength": 2},
            {"pattern": self.draw.choice(PATTERNS)},
            {"format": "date"},
        ]
        return self.draw.choice([*choices, {**choices[2], **choices[1]}])

    def _number(self, depth: int) -> dict[str, Any]:
        bound = self.draw.choice([0, 1, 1.5, 2])
        choices = [{name: bound} for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")]
        return self.draw.choice(
            [*choices, {"multipleOf": self.draw.choice([2, 3, 0.5, 0.75])}, {"minimum": 0, "maximum": bound}]
        )

    def _array(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if depth and self.draw.random() < 0.6:
            made["items"] = self.schema(depth - 1)
        if depth and self.draw.random() < 0.3:
            made["prefixItems"] = [self.schema(depth - 1) for _ in range(self.draw.randint(1, 2))]
        if depth and self.draw.random() < 0.3:
            made["contains"] = self.schema(depth - 1)
            made |= self.draw.choice([{}, {"minContains": 2}, {"maxContains": 1}, {"minContains": 0, "maxContains": 1}])
        if depth and self.draw.random() < 0.15:
            made["unevaluatedItems"] = self.draw.choice([False, self.schema(depth - 1)])
        return made | self.draw.choice([{}, {"minItems": 1}, {"maxItems": 2}])

    def _object(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if self.draw.random() < 0.8:
            made["properties"] = {name: self.schema(depth - 1) if depth else {} for name in self.some(NAMES)}
        if self.draw.random() < 0.4:
            made["required"] = self.some(NAMES)
        if depth and self.draw.random() < 0.3:
            made["additionalProperties"] = self.draw.choice([False, self.schema(depth - 1)])
        if depth and self.draw.random() < 0.2:
            made["patternProperties"] = {pattern: self.schema(depth - 1) for pattern in self.some(PATTERNS)}
        if self.draw.random() < 0.15:
            made["propertyNames"] = self.draw.choice([{"maxLength": 1}, {"pattern": "^a"}, {"enum": ["a", "b"]}])
        if self.draw.random() < 0.15:
            made |= self.draw.choice([{"maxProperties": 1}, {"dependentRequired": {"a": ["b"]}}, {"minProperties": 1}])
        if depth and self.draw.random() < 0.1:
            made["dependentSchemas"] = {self.draw.choice(NAMES): self.schema(depth - 1)}
        return made

    def _listed(self, depth: int) -> dict[str, Any]:
        return {"enum": self.some([*TEXTS, *NUMBERS, True, None, [], [1], {}, {"a": 1}], 3)}

    def _applied(self, depth: int) -> dict[str, Any]:
        name = self.draw.choice(["allOf", "anyOf", "oneOf", "not", "if"])
        if name == "not":
            return {"not": self.schema(depth)}
        if name == "if":
            return {part: self.schema(depth) for part in ("if", *self.some(["then", "else"]))}
        return {name: [self.schema(depth) for _ in range(2)]}

    def value(self, depth: int = 2) -> Any:
        kind = self.draw.choice(
            ["string", "number", "number", "array", "object", "object", "other"][0 if depth else 6 :]
        )
        if kind == "string" or (kind == "other" and self.draw.random() < 0.4):
            return self.draw.choice(TEXTS)
        if kind == "number" or (kind == "other" and self.draw.random() < 0.6):
            return self.draw.choice(NUMBERS)
        if kind == "array":
            return [self.value(depth - 1) for _ in range(self.draw.randint(0, 3))]
        if kind == "object":
            return {name: self.value(depth - 1) for name in self.draw.sample(NAMES, self.draw.randint(0, 2))}
        return self.draw.choice([True, False, None])


def _orders(value: Any) -> list[Any]:
    """A value with the properties of its objects in every order."""
    if isinstance(value, list):
        return [list(items) for items in itertools.product(*map(_orders, value))]
    if not isinstance(value, dict):
        return [value]
    made = []
    for names in itertools.permutations(value):
        made += [dict(zip(names, values)) for values in itertools.product(*(_orders(value[name]) for name in names))]
    return made


def has(grammar: Grammar, value: Any) -> bool:
    return any(
        grammar.matches(json.dumps(one, ensure_ascii=ascii)) for one in _orders(value) for ascii in (False, True)
    )


def compare(seed: int, texts: Literal["usual", "all"], tally: Counter[str]) -> None:
    """Counts what becomes of a random schema; fails at a text that does not satisfy it."""
    writer = Writer(seed)
    schema = writer.schema()
    check = Validator(schema, format_checker=FORMATS)
    try:
        grammar = Grammar.json_schema(schema, texts=texts, unknown="ignore")
    except NotImplementedError as error:
        assert "which is not supported" in str(error)
        tally["refused"] += 1
        return
    except ValueError as error:
        empty = "no text satisfies" in str(error)
        tally["empty" if empty else "too large"] += 1
        found = sum(check.is_valid(writer.value()) for _ in range(10)) if empty else 0
        tally["missed"] += found
        tally["values"] += found
        return
    tally["compiled"] += 1
    for text in drawn(grammar, 6, seed):
        tally["texts"] += 1
        assert check.is_valid(json.loads(text)), (seed, json.dumps(schema), text)
    for value in (writer.value() for _ in range(10)):
        valid = check.is_valid(value)
        taken = has(grammar, value)
        assert valid or not taken, (seed, json.dumps(schema), value)
        tally["values"] += valid
        tally["missed"] += valid and not taken
