#!/usr/bin/env bash
# Expected: the schema that the client sends for a model allows the model's values, or what it cannot say is refused, as it is for a field of type Any.
# Seen: transform_schema of anthropic 2.14.0, which `output_format` of its parse and stream goes through too, makes {"type": "object", "properties": {}, "additionalProperties": false} of
# dict[str, int]: {} alone is left, without a word. A tuple becomes an array of anything of any length, and a model that allows other fields one that forbids them.
# Output seen: "dict: valid for the model, refused by the schema", "other fields: valid for the model, refused by the schema",
# "tuple: invalid for the model, allowed by the schema", "list: valid for the model, allowed by the schema", "any: ValueError".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys
from typing import Any

import anthropic
import jsonschema
import pydantic


class Counts(pydantic.BaseModel):
    counts: dict[str, int]


class Open(pydantic.BaseModel, extra="allow"):
    a: int


class Pair(pydantic.BaseModel):
    pair: tuple[int, str]


class Items(pydantic.BaseModel):
    items: list[int]


class Anything(pydantic.BaseModel):
    any: Any


cases = {
    "dict": (Counts, {"counts": {"apples": 3}}),
    "other fields": (Open, {"a": 1, "b": 2}),
    "tuple": (Pair, {"pair": ["x", 1, None]}),
    "list": (Items, {"items": [1, 2]}),
}
seen = []
for name, (model, value) in cases.items():
    try:
        model.model_validate(value)
        valid = "valid"
    except pydantic.ValidationError:
        valid = "invalid"
    allowed = jsonschema.Draft202012Validator(anthropic.transform_schema(model)).is_valid(value)
    seen.append(f"{name}: {valid} for the model, {'allowed' if allowed else 'refused'} by the schema")
try:
    anthropic.transform_schema(Anything)
    seen.append("any: taken")
except ValueError:
    seen.append("any: ValueError")
print(*seen, sep="\n")
expected = [
    "dict: valid for the model, refused by the schema",
    "other fields: valid for the model, refused by the schema",
    "tuple: invalid for the model, allowed by the schema",
    "list: valid for the model, allowed by the schema",
    "any: ValueError",
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check anthropic==2.14.0 jsonschema==4.26.0 pydantic==2.14.4
"$folder/venv/bin/python" "$folder/seen.py"
