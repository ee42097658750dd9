#!/usr/bin/env bash
# Expected: orjson.loads gives the integer that the JSON has, or refuses it as orjson.dumps does beyond 64 bits; its notes on integers speak of no other number.
# Seen: orjson 3.13.0 gives a float for an integer beyond 64 bits, without a word: 18446744073709551617 is 1.8446744073709552e+19, which is written back as another kind of number, and two
# different ids are equal. json, ujson 6.1.0, msgspec 0.23.0 and pydantic-core give the integer.
# Output seen: "orjson float 1.8446744073709552e+19", "json int 18446744073709551617" and so on, "two ids are equal: True", "dumps: Integer exceeds 64-bit range".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import json
import sys

import msgspec
import orjson
import pydantic_core
import ujson

text = "18446744073709551617"
readers = {"orjson": orjson.loads, "json": json.loads, "ujson": ujson.loads, "msgspec": msgspec.json.decode, "pydantic-core": pydantic_core.from_json}
seen = {name: read(text) for name, read in readers.items()}
for name, value in seen.items():
    print(name, type(value).__name__, value)
equal = orjson.loads("[18446744073709551617, 18446744073709551618]")
print("two ids are equal:", equal[0] == equal[1])
try:
    orjson.dumps(int(text))
    refused = "written"
except TypeError as error:
    refused = str(error)
print("dumps:", refused)
exact = all(type(value) is int and value == int(text) for name, value in seen.items() if name != "orjson")
sys.exit(type(seen["orjson"]) is not float or equal[0] != equal[1] or not exact or refused == "written")
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check orjson==3.13.0 ujson==6.1.0 msgspec==0.23.0 pydantic-core==2.50.5
"$folder/venv/bin/python" "$folder/seen.py"
