"""Numbers of JSON schemas: exactly the texts of so many digits that jsonschema accepts, with decimals of any precision in place of floats."""

from __future__ import annotations

import decimal
import json
import random
import re
from decimal import Decimal
from typing import Any

import pytest

from pdkernels.decoding import Grammar

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

PLAIN = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d{1,10})?")
SCIENTIFIC = re.compile(r"-?[1-9](\.\d{1,10})?[eE][+-]?\d{1,2}")
WHOLE = re.compile(r"-?(0|[1-9]\d{0,14})")
FAR = [
    0.0,
    -0.0,
    1e-300,
    -1e-300,
    1e300,
    -1.7976931348623157e308,
    1e15,
    10**18,
    2**63 - 1,
    -(2**63),
    1e22,
    123456789012.5,
]
ODD = ["-0", "0", "-0.0", "0.0", "0e0", "1e5", "1E+05", "-1e-3", "0.5", "-0.5", "01", "1.", ".5", "-", "+1", "1e", "1.0e-0", "5e-00"]  # fmt: skip


def exact(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def oracle(schema: dict[str, Any]) -> Any:
    """A validator of exact decimals."""
    base = jsonschema.Draft202012Validator
    kinds = base.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int or value == int(value))
    return jsonschema.validators.extend(base, type_checker=kinds)(exact(json.dumps(schema)))


def bound(draw: random.Random) -> float:
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randint(-3, 3)
    if kind == 1:
        return draw.choice(FAR)
    if kind == 2:
        return draw.uniform(-1, 1) * 10 ** draw.randint(-12, 12)
    return round(draw.uniform(-2, 2) * draw.choice([1, 100]), draw.randint(0, 3))


def written(draw: random.Random, schema: dict[str, Any]) -> str:
    """A number near a bound, in one of its forms."""
    ends = [Decimal(repr(value)) for name, value in schema.items() if "imum" in name]
    value = draw.choice([*ends, *ends, Decimal(repr(bound(draw)))])
    value += draw.choice([0, 0, 1, -1]) * draw.randint(1, 9) * Decimal(10) ** draw.randint(-11, 2)
    kind = draw.randrange(6)
    if kind == 0:
        return draw.choice(ODD)
    if kind == 1:
        return f"{value:.{draw.randint(0, 10)}{draw.choice('eE')}}".replace("+", draw.choice(["", "+"]))
    if kind == 2:
        return repr(float(value))
    return f"{value:f}" if kind == 3 else f"{value:.{draw.randint(0, 11)}f}"


def compare(seed: int, texts: int) -> int:
    """How many of so many texts belong to the language of a random schema, which are those that belong to the schema."""
    draw = random.Random(seed)
    schema: dict[str, Any] = {"type": draw.choice(["number", "number", "integer"])}
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if draw.random() < 0.4:
            schema[name] = bound(draw)
    if draw.random() < 0.15:
        schema["multipleOf"] = draw.choice([1, 2, 3, 7, 12, 2.0])
    check, matches = oracle(schema), lambda text: False
    try:
        matches = Grammar.json_schema(schema).matches
    except NotImplementedError as error:
        assert "more than 10 digits after the point, or 40 before it" in str(error), error
        return 0
    except ValueError as error:
        assert "no text satisfies" in str(error), error
    found = 0
    for text in (written(draw, schema) for _ in range(texts)):
        try:
            with decimal.localcontext() as context:
                context.prec = 1000  # of the remainders of jsonschema
                fits = check.is_valid(exact(text))
        except json.JSONDecodeError:
            fits = False
        belongs = matches(text)
        found += belongs
        assert fits or not belongs, (schema, text)
        if schema["type"] == "integer":
            promised = bool(WHOLE.fullmatch(text)) and (text != "-0" or matches("-1"))
        else:
            bounded = any("imum" in name for name in schema)
            promised = PLAIN.fullmatch(text) or (SCIENTIFIC.fullmatch(text) and bounded and "multipleOf" not in schema)
        assert belongs or not (fits and promised), (schema, text)
    return found


def test_texts_are_those_of_jsonschema() -> None:
    assert sum(compare(seed, 40) for seed in range(80)) > 400


@pytest.mark.slow
def test_more_texts_are_those_of_jsonschema() -> None:
    assert sum(compare(seed, 100) for seed in range(80, 1100)) > 15_000


def language(**bounds: Any) -> Any:
    return Grammar.json_schema({"type": "number", **bounds}).matches


def test_numbers_between_whole_ones() -> None:
    share = language(exclusiveMinimum=0, maximum=1)
    assert all(map(share, ["0.5", "1", "1.0", "1.0000000000", "0.0000000001", "1e-9", "1e0", "9.99e-01"]))
    assert not any(map(share, ["0", "0.0", "-0.0", "0.0000000000", "1.0000000001", "1.1", "2e0", "0.00000000001"]))
    inner = language(exclusiveMinimum=0, exclusiveMaximum=1)
    assert all(map(inner, ["0.5", "0.9999999999"])) and not any(map(inner, ["0", "1", "1.0"]))
    tenths = language(minimum=-0.3, exclusiveMaximum=0.1)
    assert all(map(tenths, ["-0.3", "-0.30", "0", "-0", "0.09", "-3e-1"]))
    assert not any(map(tenths, ["0.1", "0.10", "-0.31", "1e-1", "-0.3000000001"]))


def test_bounds_beyond_the_usual_digits() -> None:
    large = Grammar.json_schema({"type": "integer", "minimum": 10**15}).matches
    assert large(str(10**15)) and large("9" * 16) and not large("9" * 15) and not large(str(10**16))
    signed = Grammar.json_schema({"type": "integer", "format": "int64"}).matches
    assert signed(str(2**63 - 1)) and signed(str(-(2**63))) and not signed(str(2**63)) and not signed(str(-(2**63) - 1))
    assert language(minimum=0, maximum=1.7976931348623157e308)("99999999999999999999.5")
    for bounds in ({"exclusiveMinimum": 0, "maximum": 1e-200}, {"minimum": 1e300}, {"minimum": 0.12345678901, "maximum": 0.12345678902, "exclusiveMinimum": 0.12345678901, "exclusiveMaximum": 0.12345678902}):  # fmt: skip
        with pytest.raises(NotImplementedError, match="numbers that need more than 10 digits after the point"):
            language(**bounds)


def test_whole_numbers_have_no_point() -> None:
    """jsonschema counts 1.0 as an integer, and the language is smaller; multiples of a number may have one."""
    whole = Grammar.json_schema({"type": "integer", "minimum": 0, "maximum": 200}).matches
    assert whole("100") and not any(map(whole, ["1.0", "1e2", "-0"]))
    assert Grammar.json_schema({"type": "integer", "minimum": -1}).matches("-0")
    even = language(multipleOf=2, minimum=0, maximum=10)
    assert all(map(even, ["4", "4.0", "10.000", "0"])) and not any(map(even, ["4.5", "5", "5.0", "12", "4e0"]))


def test_bounds_take_few_states() -> None:
    """Each state has a row for the tokens of a model."""
    for bounds in ({"minimum": -273.15, "maximum": 60.5}, {"exclusiveMinimum": 0}, {"minimum": -90, "maximum": 90}):
        assert Grammar.json_schema({"type": "number", **bounds}).automaton.states < 110
