#!/usr/bin/env bash
# Expected: a pattern speaks of the value of a string, as in JSON Schema: the text that is accepted is JSON whose value matches, anywhere in it where there are no anchors.
# Seen: xgrammar 0.2.9 takes a pattern for the text between the quotation marks. '^a"b$' accepts "a"b", which is no JSON, and refuses "a\"b", the only one that is valid; so does a
# backslash or a line break in a pattern. "a" without anchors counts as "^a$", in patternProperties too. `contains` is passed over, and an array with no other keyword has no
# items: {"type": "array", "contains": {"const": 1}} accepts [] alone, which is invalid.
# Output seen: ten lines with a schema, a text, xgrammar's answer and jsonschema's, which differ in all but the last.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import json
import sys

import jsonschema
import xgrammar

tokens = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"</s>"], xgrammar.VocabType.RAW, stop_token_ids=[256])
compiler = xgrammar.GrammarCompiler(tokens)


def accepts(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_grammar(xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)))
    return matcher.accept_string(text) and matcher.accept_token(256)


def judged(schema, text):
    try:
        return "valid" if jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) else "invalid"
    except ValueError:
        return "no JSON"


quote, backslash, line = ({"type": "string", "pattern": pattern} for pattern in ('^a"b$', "^\\\\$", "^a\\nb$"))
names = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False}
array = {"type": "array", "contains": {"const": 1}}
cases = [  # schema, text, what is accepted, what it is
    (quote, '"a"b"', True, "no JSON"),
    (quote, r'"a\"b"', False, "valid"),
    (backslash, '"\\"', True, "no JSON"),
    (backslash, '"\\\\"', False, "valid"),
    (line, '"a\nb"', True, "no JSON"),
    ({"type": "string", "pattern": "a"}, '"bab"', False, "valid"),
    (names, '{"ab": 1}', False, "valid"),
    (array, "[]", True, "invalid"),
    (array, "[1]", False, "valid"),
    ({"type": "string", "pattern": "^[a-c]{2}$"}, '"ab"', True, "valid"),
]
right = True
for schema, text, accepted, value in cases:
    seen = accepts(schema, text), judged(schema, text)
    print(json.dumps(schema), ascii(text), "accepted" if seen[0] else "refused", seen[1])
    right &= seen == (accepted, value)
sys.exit(not right)
PYTHON
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile)
"${pip[@]}" torch==2.13.0 transformers==5.24.0 apache-tvm-ffi==0.1.15.post2 jsonschema==4.26.0 numpy==2.4.6 pydantic==2.14.4
"${pip[@]}" --no-deps xgrammar==0.2.9  # it requires triton too, which it does not use on a CPU
"$folder/venv/bin/python" "$folder/seen.py"
