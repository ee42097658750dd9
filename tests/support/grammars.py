"""A hundred schemas and expressions of the kinds that people ask models for: those of json-schema.org's examples, function calls, extraction,
classification; and the patterns of dates, numbers, identifiers and formats in documentations of structured output."""

from __future__ import annotations

from typing import Any

from pdkernels.decoding import Grammar


def _object(required: int | None = None, **properties: Any) -> dict[str, Any]:
    """An object whose first `required` properties are required; None: all."""
    return {"type": "object", "properties": properties, "required": list(properties)[:required]}


def _string(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


SHORT = _string(maxLength=8)
WORD = _string(pattern="^[a-z]{1,8}$")
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
FLAG = {"type": "boolean"}

SCHEMAS: dict[str, Any] = {
    # json-schema.org/learn
    "basic": _object(0, firstName=WORD, lastName=WORD, age={"type": "integer", "minimum": 0}),
    "arrays": {
        **_object(0, fruits={"type": "array", "items": WORD, "maxItems": 3}),
        "$defs": {"veggie": _object(veggieName=WORD, veggieLike=FLAG)},
    },
    "veggies": {
        "$id": "https://example.com/arrays.schema.json",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "description": "A representation of vegetables",
        **_object(vegetables={"type": "array", "items": {"$ref": "#/$defs/veggie"}, "maxItems": 2}),
        "$defs": {"veggie": _object(veggieName=WORD, veggieLike=FLAG)},
    },
    "enumerated": _object(data={"enum": [42, True, "hello", None, [1, 2, 3]]}),
    "pattern": _object(code=_string(pattern="^[A-Z]{3}-\\d{3}$")),
    "nested": _object(
        name=WORD, age=COUNT, address=_object(street=WORD, city=WORD, postalCode=_string(pattern="^\\d{5}$"))
    ),
    "calendar": _object(2, startDate=_string(format="date"), summary=WORD, location=WORD),
    "coordinates": _object(
        latitude={"type": "number", "minimum": -90, "maximum": 90},
        longitude={"type": "number", "minimum": -180, "maximum": 180},
    ),
    "post": _object(2, title=WORD, content=WORD, tags={"type": "array", "items": WORD, "maxItems": 2}),
    "movie": _object(3, title=WORD, director=WORD, year={"type": "integer", "minimum": 1888, "maximum": 2030}, genre={"enum": ["Action", "Comedy", "Drama"]}),
    "profile": _object(username=WORD, email=_string(format="email")),
    "device": {
        "oneOf": [
            _object(kind={"const": "phone"}, inches=COUNT),
            _object(kind={"const": "server"}, cores=COUNT),
        ]
    },
    "product": _object(name=WORD, price={"type": "number", "minimum": 0, "maximum": 99}),
    "blood": _object(bloodType={"enum": ["A+", "A-", "B+", "O-"]}, allergies={"type": "array", "items": WORD, "maxItems": 2}),
    # values
    "integer": {"type": "integer"},
    "positive": {"type": "integer", "exclusiveMinimum": 0, "maximum": 1000},
    "negative": {"type": "integer", "minimum": -40, "exclusiveMaximum": -7},
    "number": {"type": "number"},
    "share": {"type": "number", "minimum": 0, "maximum": 1},
    "open share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "temperature": {"type": "number", "minimum": -273.15, "maximum": 60.5},
    "string": _string(minLength=2, maxLength=12),
    "unicode": _string(pattern="^[ж-ю]{2,5}$"),
    "quoted": _string(pattern='^say "[a-z]{1,5}"$'),
    "path": _string(pattern="^C:\\\\[a-z]{1,6}$"),
    "found": _string(pattern="needle"),
    "boolean": FLAG,
    "null": {"type": "null"},
    "nullable": {"type": ["string", "null"], "maxLength": 5},
    "anything of three": {"type": ["integer", "boolean", "null"]},
    "date": _string(format="date"),
    "time": _string(format="time"),
    "moment": _string(format="date-time"),
    "uuid": _string(format="uuid"),
    "address": _string(format="ipv4"),
    "mail": _string(format="email"),
    "constant": {"const": {"a": [1, {"b": None}]}},
    "constants": {"enum": ["x", 1, 1.5, False, None, "é"]},
    "listed strings": {"type": "string", "enum": ["low", 3, "high"]},
    # arrays
    "list": {"type": "array", "items": COUNT, "minItems": 1, "maxItems": 4},
    "pairs": {"type": "array", "items": {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 2}, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [WORD, COUNT, FLAG], "items": False, "minItems": 3},
    "open tuple": {"type": "array", "prefixItems": [WORD, COUNT], "items": FLAG, "maxItems": 4},
    "short tuple": {"type": "array", "prefixItems": [WORD, COUNT, FLAG], "minItems": 1, "maxItems": 2},
    "no items": {"type": "array", "maxItems": 0},
    "one item": {"type": "array", "items": WORD, "maxItems": 1, "uniqueItems": True},
    # objects
    "empty": {"type": "object", "additionalProperties": False},
    "optional first": _object(0, a=COUNT, b=COUNT, c=COUNT),
    "middle": {**_object(0, a=FLAG, b=FLAG, c=FLAG, d=FLAG), "required": ["b", "d"]},
    "map": {"type": "object", "additionalProperties": COUNT},
    "strict": {**_object(id=COUNT), "additionalProperties": False},
    "missing": {"type": "object", "properties": {"a": COUNT}, "required": ["b"], "additionalProperties": FLAG},
    "deep": _object(a=_object(b=_object(c=_object(d=FLAG)))),
    # combined
    "either": {"anyOf": [COUNT, WORD]},
    "either beside": {"type": "object", "properties": {"a": FLAG}, "anyOf": [{"required": ["a"]}, {"properties": {"b": FLAG}}]},
    "types": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    "all": {"allOf": [_object(a=COUNT), _object(b=FLAG)]},
    "bounds": {"allOf": [{"type": "integer", "minimum": 3}, {"minimum": 5, "maximum": 9}]},
    "reference": {"$ref": "#/$defs/one", "$defs": {"one": _object(x=COUNT)}},
    "node": {
        "$ref": "#/$defs/node",
        "$defs": {"node": _object(1, value=COUNT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
    },
    "tree": {
        "$defs": {"tree": _object(1, n=COUNT, kids={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2})},
        "$ref": "#/$defs/tree",
    },
    # calls and extraction
    "call": _object(name={"const": "get_weather"}, arguments=_object(city=WORD, unit={"enum": ["C", "F"]})),
    "calls": {
        "anyOf": [
            _object(name={"const": "search"}, arguments=_object(query=WORD)),
            _object(name={"const": "add"}, arguments=_object(a=COUNT, b=COUNT)),
        ]
    },
    "sentiment": _object(sentiment={"enum": ["positive", "negative", "neutral"]}, score={"type": "number", "minimum": 0, "maximum": 1}),
    "person": _object(2, name=WORD, age=COUNT, email=SHORT),
    "steps": _object(steps={"type": "array", "items": _object(explanation=WORD, output=WORD), "maxItems": 2}, answer=SHORT),
    # keywords together
    "short code": _string(pattern="^[A-Z]+-\\d+$", minLength=4, maxLength=7),
    "multiple of five": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95},
    "options": {"type": "array", "items": {"enum": ["fast", "safe", "quiet"]}, "uniqueItems": True, "minItems": 1},
    "payment": {
        **_object(1, method={"enum": ["card", "cash"]}, number=_string(pattern="^\\d{4}$"), change=FLAG),
        "if": {"properties": {"method": {"const": "card"}}},
        "then": {"required": ["number"]},
        "else": {"properties": {"number": False}},
    },
    "one of two": {**_object(0, id=COUNT, name=WORD), "oneOf": [{"required": ["id"]}, {"required": ["name"]}]},
    "headers": {"type": "object", "patternProperties": {"^x-[a-z]{1,4}$": WORD}, "additionalProperties": False, "maxProperties": 2},
    "languages": {"type": "object", "propertyNames": {"enum": ["en", "de", "fr"]}, "additionalProperties": WORD, "maxProperties": 2},
    "billing": {**_object(0, card=_string(pattern="^\\d{4}$"), address=WORD), "dependentRequired": {"card": ["address"]}},
    "closed": {"allOf": [{**_object(0, a=COUNT, b=FLAG), "additionalProperties": False}, {"required": ["b"], "type": "object"}]},
    "old tuple": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [WORD, COUNT], "additionalItems": False, "minItems": 2},
    "not listed": {"type": "string", "pattern": "^[a-z]{2,4}$", "not": {"enum": ["none", "null"]}},
    "beside a reference": {"$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": COUNT}},
    "link": _string(format="uri", maxLength=24),
    "true": True,
}  # fmt: skip

PATTERNS: dict[str, str] = {
    "yes or no": "yes|no",
    "digit": r"\d",
    "phone": r"\+1 \(\d{3}\) \d{3}-\d{4}",
    "iso date": r"20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "clock": r"([01]\d|2[0-3]):[0-5]\d",
    "hex colour": r"#[0-9a-fA-F]{6}",
    "version": r"v?\d{1,3}\.\d{1,3}\.\d{1,3}(-(alpha|beta)\.\d)?",
    "ip": r"(\d{1,2}\.){3}\d{1,2}",
    "mail": r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)",
    "address": r"https?://[a-z]{1,6}\.(net|io)(/[a-z]{0,5}){0,2}",
    "plate": r"[A-Z]{2} \d{2} [A-Z]{3}",
    "price": r"\$\d{1,3}(,\d{3})?\.\d{2}",
    "binary": r"0b[01]{4,8}",
    "roman": r"M{0,3}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})",
    "identifier": r"[A-Za-z_]\w{0,10}",
    "assignment": r"[a-z]{1,4} = (\d{1,3}|'[^'\n]{0,6}'|True|None)",
    "call": r"[a-z]{1,6}\((\d{1,2}(, \d{1,2}){0,2})?\)",
    "comma list": r"[a-z]+(, [a-z]+){0,3}",
    "markdown": r"(- [A-Za-z ]{1,10}\n){1,3}",
    "answer": r"The answer is -?\d{1,4}\.",
    "reasoning": r"<think>[^<]{0,12}</think>(A|B|C|D)",
    "csv": r"\d{1,2}(,\d{1,2}){2}\n\d{1,2}(,\d{1,2}){2}",
    "sign": r"[+-]?\d+(\.\d+)?([eE][+-]?\d{1,2})?",
    "not digits": r"\D{1,5}",
    "spaces": r"a\s{1,3}b",
    "any": r".{3,9}",
    "lines": r"(?s).{2,6}",
    "umlauts": r"[äöüß]{1,4}",
    "emoji": r"[\U0001F600-\U0001F64F]{1,2}",
    "alternatives": r"(foo|bar|ba){1,3}z",
    "optional": r"a?b?c?d",
    "lazy": r"a+?b*?c",
    "groups": r"(?:ab)+(?P<end>cd)?",
}

CHOICES: list[list[str]] = [
    ["positive", "negative", "neutral"],
    ["a", "ab", "abc"],
    ["", "x"],
    ["Zürich", "Genève", "東京"],
]

RULES: dict[str, tuple[str, str]] = {
    "sum": ('start: term ("+" term)~0..2\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,2}/', r"[-+()0-9]+"),
    "select": (
        'start: "SELECT " columns " FROM " name [" WHERE " name "=" number]\ncolumns: "*" | name ("," name)*\n'
        "name: /[a-z]{1,5}/\nnumber: /[0-9]{1,2}/",
        r"SELECT (\*|[a-z]{1,5}(,[a-z]{1,5})*) FROM [a-z]{1,5}( WHERE [a-z]{1,5}=[0-9]{1,2})?",
    ),
    "brackets": ('start: "[" start "]" | "x"', r"\[*x\]*"),
    "range": ('start: "a".."e" ~ 2..3', r"[a-e]{2,3}"),
}


def all_grammars() -> dict[str, Grammar]:
    """All of them, by name."""
    made = {f"schema {name}": Grammar.json_schema(schema) for name, schema in SCHEMAS.items()}
    made |= {f"pattern {name}": Grammar.regex(pattern) for name, pattern in PATTERNS.items()}
    made |= {f"choice {n}": Grammar.choice(texts) for n, texts in enumerate(CHOICES)}
    return made | {f"rules {name}": Grammar.ebnf(rules) for name, (rules, _) in RULES.items()}
