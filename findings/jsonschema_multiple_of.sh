#!/usr/bin/env bash
# Expected: 19.99 is a multiple of 0.01, as JSON Schema counts decimal numbers, and of two amounts with two decimals none is refused.
# Seen: jsonschema 4.26.0 divides floats and asks for a whole quotient: of the amounts 0.00 to 100.00 it refuses 1,363, the first of them 0.07. Tenths fare no better, and
# 9007199254740993 counts as a multiple of 2.0. jsonschema-rs 0.61.2 is right in all.
# Output seen: "0.01: jsonschema refuses 1363 of 10001 (0.07, 0.14, 0.28), jsonschema-rs 0", "0.1: ... 3228 ...", "2^53 + 1 by 2.0: jsonschema valid, jsonschema-rs invalid".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import json
import sys

import jsonschema
import jsonschema_rs

seen = []
for step, digits in (("0.01", 2), ("0.1", 1)):
    schema = {"multipleOf": json.loads(step)}
    texts = [f"{n // 10**digits}.{n % 10**digits:0{digits}}" for n in range(10001)]
    refused = []
    for validator in (jsonschema.Draft202012Validator(schema), jsonschema_rs.Draft202012Validator(schema)):
        refused.append([text for text in texts if not validator.is_valid(json.loads(text))])
    seen.append((len(refused[0]), refused[0][:3], len(refused[1])))
    print(f"{step}: jsonschema refuses {len(refused[0])} of {len(texts)} ({', '.join(refused[0][:3])}), jsonschema-rs {len(refused[1])}")
schema = {"multipleOf": 2.0}
odd = [kind(schema).is_valid(2**53 + 1) for kind in (jsonschema.Draft202012Validator, jsonschema_rs.Draft202012Validator)]
print("2^53 + 1 by 2.0: jsonschema", *("valid" if odd[0] else "invalid",), "jsonschema-rs", "valid" if odd[1] else "invalid")
expected = [(1363, ["0.07", "0.14", "0.28"], 0), (3228, ["0.3", "0.6", "0.7"], 0)]
sys.exit(seen != expected or odd != [True, False])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jsonschema==4.26.0 jsonschema_rs==0.61.2
"$folder/venv/bin/python" "$folder/seen.py"
