#!/usr/bin/env bash
# Expected: a Decimal of a pydantic model holds the number that the JSON has, as it does where the number is in quotes, and a Literal takes its own value alone, as the model's own JSON
# schema says ({"const": 1}, and true is not 1 in JSON Schema).
# Seen: pydantic 2.14.4 reads a JSON number for a Decimal through a double, without a word: 0.1000000000000000055 is 0.1, 12345678901234567.89 loses its cents, and 9007199254740993.0 for an
# int loses one. Literal[1] takes true, and Literal[0] false. msgspec 0.23.0 keeps every digit and refuses true.
# Output seen: a line for each with what pydantic and msgspec give; msgspec is right in all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys
from decimal import Decimal
from typing import Literal

import jsonschema
import msgspec
import pydantic

right = True
for text, rounded in (
    ("12345678901234567.89", "12345678901234568"),
    ("0.1000000000000000055", "0.1"),
    ("12345678901234567", "12345678901234567"),
    ('"12345678901234567.89"', "12345678901234567.89"),
):
    seen = pydantic.TypeAdapter(Decimal).validate_json(text), msgspec.json.decode(text, type=Decimal)
    print(f"Decimal {text}: pydantic {seen[0]}, msgspec {seen[1]}")
    right &= seen == (Decimal(rounded), Decimal(text.strip('"')))
seen = pydantic.TypeAdapter(int).validate_json("9007199254740993.0"), pydantic.TypeAdapter(int).validate_json('"9007199254740993.0"')
print("int 9007199254740993.0:", *seen)
right &= seen == (2**53, 2**53 + 1)
for kind, text, value in ((Literal[1], "true", True), (Literal[0], "false", False)):
    adapter = pydantic.TypeAdapter(kind)
    valid = jsonschema.Draft202012Validator(adapter.json_schema()).is_valid(value)
    try:
        msgspec.json.decode(text, type=kind)
        refused = False
    except msgspec.ValidationError:
        refused = True
    print(f"{kind} {text}: pydantic {adapter.validate_json(text)}, {'valid' if valid else 'invalid'} for its schema, msgspec {'refuses' if refused else 'takes'} it")
    right &= (adapter.validate_json(text), valid, refused) == (int(value), False, True)
sys.exit(not right)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pydantic==2.14.4 msgspec==0.23.0 jsonschema==4.26.0
"$folder/venv/bin/python" "$folder/seen.py"
