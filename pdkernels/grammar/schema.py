"""JSON schemas as expressions of `language`: texts that satisfy the schema, written as `json.dumps` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pdkernels._validation import check, check_type, sentence
from pdkernels.grammar.budget import current, spend
from pdkernels.grammar.calls import call
from pdkernels.grammar.language import (
    NOTHING,
    OP,
    Alt,
    Expression,
    Repeat,
    Seq,
    TooLarge,
    either,
    is_nothing,
    optional,
    text,
)
from pdkernels.grammar.machines import deterministic
from pdkernels.grammar.numbers import numbers
from pdkernels.grammar.products import both, without
from pdkernels.grammar.schema_apart import OF_OBJECTS, OF_STRINGS, holds, told_apart
from pdkernels.grammar.schema_arrays import Arrays
from pdkernels.grammar.schema_keywords import KEYWORDS, TYPES, Unknown, check_keywords, check_values, is_note, kinds_of
from pdkernels.grammar.schema_merge import ALSO, CONDITIONS, Merged, is_among, merged, unsupported, whole
from pdkernels.grammar.schema_negate import negated, other_objects
from pdkernels.grammar.schema_numbers import has_number, number_of
from pdkernels.grammar.schema_objects import Objects
from pdkernels.grammar.schema_strings import string, string_of

Schema = Mapping[str, Any] | bool

_MAX_PARTS = 3_000
_STEPS_OF_PART = 30


class Size(NamedTuple):
    """What bounds the automaton of a schema."""

    longest: int | None = None
    """In place of larger maxLength and maxItems."""
    depth: int | None = 3
    """Levels of a reference inside itself; None: any number, and `free` does not count."""
    free: int = 3
    """Arrays and objects inside each other in a value without a schema."""
    ordered: bool = False
    """Whether `uniqueItems` of items that are not listed means ascending first letters, or one item."""


USUAL_SIZE = Size()


def parsed_schema(
    schema: Schema | str,
    whitespace: str | None = None,
    size: Size = USUAL_SIZE,
    unknown: Unknown | None = None,
    complete: bool = False,
    any_order: bool = False,
) -> tuple[list[Expression], list[str]]:
    """The texts that satisfy a schema, as `Grammar.json_schema` describes them; with `complete`, all in the order of its
    properties, and with `any_order` in every one. What demands nothing is added to `unknown`. Without a depth, the rules
    that are called follow; and what errors call each.

    Raises:
        ValueError: not a JSON schema.
        NotImplementedError: a keyword that is not followed.
    """
    memo, key = current().memo, ("schema", id(schema))
    if key not in memo:
        memo[key] = schema, _read(schema)
    root = memo[key][1]
    try:
        compiler = _Compiler(root, whitespace, size, {} if unknown is None else unknown, complete, any_order)
        compiler.rules[0] = compiler.value(root, "#")
        return compiler.rules, ["the schema", *(f"the schema at {place}" for place in compiler.places)]
    except RecursionError:
        raise ValueError(sentence(OP, "the schema has too many levels", "Lower the depth.")) from None


def _read(schema: Any) -> Schema:
    """The schema as JSON, checked."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(sentence(OP, f"the schema is not JSON: {error}")) from None
    check_type(isinstance(schema, (Mapping, bool)), OP, "schema", "be a dict", type(schema).__name__)
    assert not isinstance(schema, str)
    check_values(schema)
    schema_text = json.dumps(schema) if isinstance(schema, Mapping) else ""
    # A part that is there twice may have two bases.
    root: Schema = json.loads(schema_text) if '"$id"' in schema_text else schema
    return root


class _Compiler(Arrays, Objects):
    def __init__(
        self, root: Any, whitespace: str | None, size: Size, unknown: Unknown, complete: bool, any_order: bool
    ) -> None:
        super().__init__(root, whitespace, unknown, complete, any_order)
        (self._longest, self._depth, self._free, self._ordered), self._parts = size, 0
        self._open: dict[str, int] = {}  # how often each reference is being followed
        self._cycles: dict[str, list[str]] | None = None
        self._followed: dict[tuple[str, tuple[int, ...]], Expression] = {}
        self.rules: list[Expression] = [NOTHING]
        self.places = list[str]()
        """Of the rules after the first."""
        self._numbers: dict[str, int] = {}

    @property
    def _any(self) -> Expression:
        if self._depth is None:
            return self._called(
                "", "any", lambda inner: _with_inner(inner, self._gap, self._comma, self._colon, self._complete)
            )
        return _anything(self._free, self._gap, self._comma, self._colon, self._complete)

    def value(self, schema: Any, place: str) -> Expression:
        """The texts of the values of a schema, which errors call `place`."""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise TooLarge(sentence(OP, f"the schema unfolds to more than {_MAX_PARTS} parts", "Lower the depth."))
        spend(_STEPS_OF_PART)
        if isinstance(schema, Mapping) and "$ref" in schema:
            return self._reference(schema, place)
        flat = self._flat(schema, place)
        if isinstance(flat, bool):
            return self._any if flat else NOTHING
        if not flat:
            return self._any
        if flat.get(CONDITIONS):
            return self._conditional(flat, place)
        for name in ("anyOf", "oneOf"):
            if name in flat:
                return self._choice(flat, name, place)
        if ALSO in flat:
            (choice, *later_choices), without_choices = flat[ALSO], Merged({k: v for k, v in flat.items() if k != ALSO})
            without_choices.update({ALSO: later_choices} if later_choices else {})
            return self.value(merged(without_choices, self._flat(choice, place), place), place)
        if "const" in flat or "enum" in flat:
            return self._listed(flat, place)
        kinds = kinds_of(flat, place) if "type" in flat or not self._complete else [*KEYWORDS]
        typed = self._of_types(kinds, flat, place)
        if not typed and "type" not in flat:  # what its keywords are for does not satisfy them, and all else does
            typed = self._of_types([kind for kind in KEYWORDS if kind not in kinds], flat, place)
        return either(typed)

    def _of_types(self, kinds: Sequence[str], flat: Mapping[str, Any], place: str) -> list[Expression]:
        typed = [self._typed(kind, flat, place) for kind in kinds if kind != "integer" or "number" not in kinds]
        return [expression for expression in typed if not is_nothing(expression)]

    def _reference(self, schema: Mapping[str, Any], place: str) -> Expression:
        """A reference, no more than `depth` times inside itself: a value that needs more levels is none."""
        check_keywords(schema, place, self._flat.unknown)
        reference = self._flat.uri(schema, place)
        target, level = self._flat.found(reference, place), self._open.get(reference, 0)
        if self._cycles is None:
            self._cycles = self._flat.cycles()
        alone = all(name == "$ref" or is_note(name) for name in schema)
        if self._depth is None and self._cycles[reference]:
            text_of_schema = "" if alone else json.dumps(schema, sort_keys=True)
            called, there = (target, reference) if alone else ({"allOf": [schema]}, place)
            return self._called(f"{reference} {text_of_schema}", there, lambda _: self.value(called, there))
        if self._depth is not None and level > self._depth:
            return NOTHING
        key = reference, tuple(self._open.get(member, 0) for member in self._cycles[reference])
        if alone and key in self._followed:
            return self._followed[key]
        self._open[reference] = level + 1
        expression = self.value(target if alone else {"allOf": [schema]}, reference if alone else place)
        self._open[reference] = level
        if alone:
            self._followed[key] = expression
        return expression

    def _called(self, key: str, place: str, expression_of: Callable[[Expression], Expression]) -> Expression:
        """A call of the rule of a key, made when it is first called: it may call itself."""
        if key not in self._numbers:
            number = self._numbers[key] = len(self.rules)
            self.rules.append(NOTHING)
            self.places.append(place)
            self.rules[number] = expression_of(call(number))
        return call(self._numbers[key])

    def _conditional(self, schema: Mapping[str, Any], place: str) -> Expression:
        """Where the first condition holds and where it does not."""
        (when, then, otherwise), *later_conditions = schema[CONDITIONS]
        unconditional: Any = Merged({name: value for name, value in schema.items() if name != CONDITIONS})
        if later_conditions:
            unconditional[CONDITIONS] = later_conditions
        condition = self._flat(when, f"{place}/if")
        branches: list[tuple[Any, Any]] = []
        if condition is not False:
            branches.append((condition, then))
        if condition is not True:
            branches += [(denied, otherwise) for denied in self._denying(condition, unconditional, place)]
        flat_branches = [
            (self._flat(condition, place), self._flat(consequence, place)) for condition, consequence in branches
        ]
        if "unevaluatedItems" in unconditional:  # what is excluded evaluates none, so it comes last
            flat_branches = [(consequence, condition) for condition, consequence in flat_branches]
        alternatives = [
            merged(merged(unconditional, former, place), latter, place)
            for former, latter in flat_branches
            if former is not False and latter is not False
        ]
        values = [self.value(schema, place) for schema in alternatives if not self._hopeless(schema, place)]
        return either([value for value in values if not is_nothing(value)])

    def _denying(self, condition: Any, unconditional: Mapping[str, Any], place: str) -> list[Any]:
        """Schemas of the values that do not have a flat one: what it names has other values or is absent."""
        simple = not isinstance(condition, bool) and condition.keys() <= OF_OBJECTS
        if not simple or condition.get("type", "object") != "object":
            return negated(condition, f"{place}/if")
        branches: list[Any] = [*other_objects(condition.get("required", ()), condition.get("properties", {}))]
        if "type" in unconditional and "type" in condition:  # other values than objects do not satisfy it
            kinds = [kind for kind in kinds_of(unconditional, place) if kind != "object"]
            branches += [Merged(type=kinds)] if kinds else []
        elif "type" in condition and self._complete:
            branches.append(Merged(type=[kind for kind in KEYWORDS if kind != "object"]))
        return branches

    def _hopeless(self, schema: Any, place: str) -> bool:
        """Whether a schema, which is merged of several, is seen at once to have no value: a property that it requires
        may not be there, or has no value left of those that are listed."""
        if isinstance(schema, bool):
            return not schema
        if schema.get("enum", True) == [] or schema.get("type") == []:
            return True
        if schema.get("type", "object") not in ("object", ["object"]):
            return False
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name in properties:
                spend()
                flat = self._flat(properties[name], f"{place}/properties/{name}")
                if flat is False:
                    return True
                if not isinstance(flat, bool) and flat.keys() & {"const", "enum"} and self._none_listed(flat, place):
                    return True
        return False

    def _none_listed(self, flat: Mapping[str, Any], place: str) -> bool:
        values = flat["enum"] if "enum" in flat else [flat["const"]]
        if "const" in flat:
            values = [flat["const"]] if is_among(flat["const"], values) else []
        if "not" in flat:
            values = [value for value in values if not holds(self._flat, flat["not"], value, place)]
        return not values

    # Listed values, and choices

    def _listed(self, schema: Mapping[str, Any], place: str) -> Expression:
        """One of the values of an enum or a const that satisfy the rest of the schema."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        check(isinstance(values, list), OP, f"enum at {place}", "be a list", type(values).__name__)
        if "const" in schema and "enum" in schema:
            values = [value for value in values if is_among(value, schema["enum"])]
        if "not" in schema:
            values = [value for value in values if not holds(self._flat, schema["not"], value, place)]
        kinds = schema.get("type")
        if kinds is not None:
            type_names = kinds_of({"type": kinds}, place)
            values = [value for value in values if any(TYPES[kind](value) for kind in type_names)]
        constraints = {name: value for name, value in schema.items() if name not in ("enum", "const", "not", "type")}
        spend(len(values))
        if not constraints or not values:
            return self._one_of(values, place)
        spoken = [kind for kind, keywords in KEYWORDS.items() if keywords & constraints.keys()]
        spoken = spoken if kinds is None else kinds_of({"type": kinds}, place)
        branches, checked_values = list[Expression](), list[Any]()
        for value in values:
            if type(value) in (int, float):
                branches += [self._exactly(value)] if has_number(constraints, value, place) else []
            elif any(TYPES[kind](value) for kind in spoken):
                checked_values.append(value)
            else:
                branches.append(self._exactly(value))  # keywords for other types demand nothing of it
        if checked_values:
            # Whole numbers inside may be listed as 1.0, which is no text of the type integer.
            constrained, source = self.value(Merged(constraints, type=spoken), place), f"the schema at {place}"
            texts = [(self._exactly(value), self._exactly(whole(value))) for value in checked_values]
            branches.append(
                both(Alt(tuple(literal for literal, integral in texts if literal == integral)), constrained, source)
            )
            branches += [
                literal
                for literal, integral in texts
                if literal != integral and not is_nothing(both(integral, constrained, source))
            ]
        return either([branch for branch in branches if not is_nothing(branch)])

    def _choice(self, schema: Mapping[str, Any], name: str, place: str) -> Expression:
        branches = schema[name]
        is_list = isinstance(branches, list) and len(branches) > 0
        check(is_list, OP, f"{name} at {place}", "be a list with an entry", branches)
        siblings = {key: value for key, value in schema.items() if key != name}
        if name == "oneOf":
            branches = told_apart(self._flat, branches, siblings, place)
        if siblings:
            branches = [
                merged(siblings, self._flat(branch, f"{place}/{name}/{n}"), place) for n, branch in enumerate(branches)
            ]
            branches = [branch for branch in branches if not self._hopeless(branch, place)]
        values = [self.value(branch, f"{place}/{name}/{n}") for n, branch in enumerate(branches)]
        return Alt(tuple(value for value in values if not is_nothing(value)))

    # Types

    def _typed(self, kind: str, schema: Mapping[str, Any], place: str) -> Expression:
        if self._longest is not None:
            shorter = {name: min(schema[name], self._longest) for name in ("maxLength", "maxItems") if name in schema}
            schema = Merged(schema, **shorter)
        if kind == "null":
            expression: Expression = text("null")
        elif kind == "boolean":
            expression = Alt((text("true"), text("false")))
        elif kind == "string":
            expression = string_of(schema, place, complete=self._complete)
        elif kind == "array":
            expression = self._array(schema, place)
        elif kind == "object":
            expression = self._object(schema, place)
        else:
            expression = number_of(kind, schema, place, complete=self._complete, pointed=self._pointed)
        return self._denied(expression, kind, schema["not"], place) if "not" in schema else expression

    def _denied(self, expression: Expression, kind: str, schema: Any, place: str) -> Expression:
        """The texts of `made`, of values of one type, whose values do not satisfy the schema of a `not`."""
        flat = self._flat(schema, f"{place}/not")
        if isinstance(flat, bool):
            return NOTHING if flat else expression
        if flat.keys() == {"anyOf"}:
            for alternative in flat["anyOf"]:
                expression = self._denied(expression, kind, alternative, place)
            return expression
        if "const" in flat or "enum" in flat:
            enum = [flat["const"]] if "const" in flat else flat["enum"]
            values = [value for value in enum if TYPES[kind](value) and holds(self._flat, flat, value, place)]
            ambiguous = kind in ("number", "array", "object") and len(values) > 0
            unsupported(
                ambiguous, f"{place}/not", f"listed values of type {kind}", "They may be written in several ways."
            )
            if not values:
                return expression
            # Whole numbers are written without a point, and zero also with a sign.
            texts = [self._exactly(int(value) if kind == "integer" else value) for value in values]
            zero = [text("-0")] if kind == "integer" and 0 in values else []
            return without(expression, Alt((*texts, *zero)), f"the schema at {place}")
        stray = sorted(flat.keys() - OF_STRINGS)
        unsupported(bool(stray), f"{place}/not", f"{stray and stray[0]!r} in a not")
        if "type" in flat:
            kinds = kinds_of({"type": flat["type"]}, place)
            unsupported(kind == "number" and "integer" in kinds, f"{place}/not", "integers in a not of a number")
            if kind not in kinds and not (kind == "integer" and "number" in kinds):
                return expression
        strings = {name: value for name, value in flat.items() if name != "type"}
        if kind != "string" or not strings:
            return NOTHING
        return without(
            expression, string_of(strings, f"{place}/not", wide=True, complete=self._complete), f"the schema at {place}"
        )


@lru_cache(maxsize=8)
def _anything(depth: int, gap: Expression, comma: Expression, colon: Expression, complete: bool) -> Expression:
    """A value without a schema, with no more than `depth` arrays or objects inside each other."""
    inner = NOTHING if depth == 0 else _anything(depth - 1, gap, comma, colon, complete)
    return _with_inner(inner, gap, comma, colon, complete)


def _with_inner(inner: Expression, gap: Expression, comma: Expression, colon: Expression, complete: bool) -> Expression:
    """A value without a schema, with `inner` inside arrays and objects."""
    branches = [
        string(0, None, complete),
        numbers(None, None, complete=complete),
        text("true"),
        text("false"),
        text("null"),
    ]
    if not is_nothing(inner):
        for first, item, last in (("[", inner, "]"), ("{", Seq((string(0, None, complete), colon, inner)), "}")):
            # A part and its comma, or the last part: as one automaton they share their states.
            items = optional(Seq((Repeat(Seq((item, comma)), 0, None), item)))
            branches.append(Seq((text(first), gap, items, gap, text(last))))
    return deterministic(Alt(tuple(branches)), "a value without a schema")
