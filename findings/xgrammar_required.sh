#!/usr/bin/env bash
# Expected: a property that a schema requires is in every text, whether `properties` describes it or not, and what stands beside `enum` and `$ref` holds too, as JSON Schema
# 2020-12 has it; or a schema that is not followed is refused or warned of, as xgrammar does for overlapping branches of oneOf.
# Seen: xgrammar 0.2.9 drops a required name that `properties` lacks without a word. With its default strict_mode it then accepts {"a": 1}, which is invalid, and refuses
# {"a": 1, "b": 1}, which is valid; without it accepts both. `type` and bounds beside `enum` and `$ref` are dropped too, and bounds without a `type`.
# Output seen: nine lines with a schema, a mode, a text, xgrammar's answer and jsonschema's, which differ in seven.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import json
import sys

import jsonschema
import xgrammar

tokens = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(256)] + [b"</s>"], xgrammar.VocabType.RAW, stop_token_ids=[256]
)


def accepts(schema, text, strict=True):
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=strict)
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(tokens).compile_grammar(grammar))
    return matcher.accept_string(text) and matcher.accept_token(256)


required = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}
cases = [  # schema, text, strict_mode, what is accepted, what is valid
    (required, '{"a": 1}', True, True, False),
    (required, '{"a": 1, "b": 1}', True, False, True),
    (required, '{"a": 1}', False, True, False),
    (required, '{"a": 1, "b": 1}', False, True, True),
    ({"type": "integer", "enum": [1, "a"]}, '"a"', True, True, False),
    ({"enum": [1, 5], "minimum": 3}, "1", True, True, False),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "1", True, True, False),
    ({"minimum": 3}, "1", True, True, False),
    ({"type": "integer", "minimum": 3}, "1", True, False, False),
]
right = True
for schema, text, strict, accepted, valid in cases:
    found = accepts(schema, text, strict), jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    print(json.dumps(schema), "strict" if strict else "not strict", text, "accepted" if found[0] else "refused", "valid" if found[1] else "invalid")
    right &= found == (accepted, valid)
sys.exit(not right)
PYTHON
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile)
"${pip[@]}" torch==2.13.0 transformers==5.24.0 apache-tvm-ffi==0.1.15.post2 jsonschema==4.26.0 numpy==2.4.6 pydantic==2.14.4
"${pip[@]}" --no-deps xgrammar==0.2.9  # it requires triton too, which it does not use on a CPU
"$folder/venv/bin/python" "$folder/seen.py"
