#!/usr/bin/env bash
# Expected: `patternProperties: {"": ...}` matches every name of a property, since the empty pattern is found in every text, so `additionalProperties`
# says nothing about any of them.
# Seen: jsonschema 4.26.0 applies `additionalProperties` to properties that the empty pattern has matched, and calls {"ab": 2} invalid; with the
# pattern ".*", which matches the same names, it is valid.
# Output seen: "pattern '': valid False" and "pattern '.*': valid True".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/validate.py" <<'PYTHON'
import sys
from importlib.metadata import version

from jsonschema import Draft202012Validator

print("jsonschema", version("jsonschema"))
seen = []
for pattern in ("", ".*"):
    schema = {"patternProperties": {pattern: {"type": "number"}}, "additionalProperties": {"type": "array"}}
    seen.append(Draft202012Validator(schema).is_valid({"ab": 2}))
    print(f"pattern {pattern!r}: valid {seen[-1]}")
sys.exit(seen != [False, True])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jsonschema==4.26.0
"$folder/venv/bin/python" "$folder/validate.py"
