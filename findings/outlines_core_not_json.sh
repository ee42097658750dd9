#!/usr/bin/env bash
# Expected: every text that outlines_core accepts for a schema is JSON, and a schema that has texts gets some.
# Seen: outlines_core 0.2.14 puts names and patterns into its expression as they are. A property called a"b is accepted as {"a"b":1} alone, which is no JSON; "^a.c$"
# accepts "a"c"; and "^a", a pattern with one anchor, accepts nothing at all, as the anchor stays behind the quotation mark.
# Output seen: "name: {\"a\"b\":1} accepted, {\"a\\\"b\":1} refused", "dot: \"a\"c\" accepted, \"abc\" accepted", "one anchor: \"a\" refused, \"ab\" refused".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import json
import re
import sys

from outlines_core.json_schema import build_regex_from_schema

cases = {
    "name": (
        {"type": "object", "properties": {'a"b': {"type": "integer"}}, "required": ['a"b']},
        ['{"a"b":1}', '{"a\\"b":1}'],
    ),
    "dot": ({"type": "string", "pattern": "^a.c$"}, ['"a"c"', '"abc"']),
    "one anchor": ({"type": "string", "pattern": "^a"}, ['"a"', '"ab"']),
}
seen = []
for name, (schema, texts) in cases.items():
    expression = build_regex_from_schema(json.dumps(schema))
    words = [f"{text} {'accepted' if re.fullmatch(expression, text) else 'refused'}" for text in texts]
    seen.append(f"{name}: {', '.join(words)}")
print(*seen, sep="\n")
expected = [
    'name: {"a"b":1} accepted, {"a\\"b":1} refused',
    'dot: "a"c" accepted, "abc" accepted',
    'one anchor: "a" refused, "ab" refused',
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check outlines_core==0.2.14
"$folder/venv/bin/python" "$folder/seen.py"
