#!/usr/bin/env bash
# Expected: a parser of lm-format-enforcer lets through no text that its schema forbids, or says which keywords it passes over.
# Seen: in 0.11.3 maxItems of 0 counts as no bound, so [1] passes, while [1, 2] does not pass a bound of 1; minProperties, prefixItems and bounds
# of numbers are passed over without a word.
# Output seen: True for each of the five texts that jsonschema refuses, False for [1,2] under maxItems 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import importlib.metadata
import json
import sys

from jsonschema import Draft202012Validator
from lmformatenforcer import JsonSchemaParser

print("lm-format-enforcer", importlib.metadata.version("lm-format-enforcer"))


def passes(schema: dict, text: str) -> bool:
    parser = JsonSchemaParser(schema)
    for letter in text:
        if letter not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(letter)
    return parser.can_end()


integers = {"type": "array", "items": {"type": "integer"}}
cases = [
    (integers | {"maxItems": 1}, "[1,2]"),
    (integers | {"maxItems": 0}, "[1]"),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}, "{}"),
    ({"type": "array", "prefixItems": [{"type": "integer"}]}, '["a"]'),
    ({"type": "integer", "minimum": 3}, "2"),
    ({"type": "number", "exclusiveMaximum": 5}, "6"),
]
seen = []
for schema, text in cases:
    assert not Draft202012Validator(schema).is_valid(json.loads(text))
    seen.append(passes(schema, text))
    print(json.dumps(schema), text, seen[-1])
sys.exit(seen != [False, True, True, True, True, True])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check lm-format-enforcer==0.11.3 jsonschema==4.26.0
"$folder/venv/bin/python" "$folder/seen.py"
