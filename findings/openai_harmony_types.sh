#!/usr/bin/env bash
# Expected: openai-harmony writes the parameters of a tool as a TypeScript type that says what the schema says; where it cannot, "any".
# Seen: openai-harmony 0.0.8 writes a list of strings or numbers as `string | number[]`, which in TypeScript is a string, or a list of numbers; so for lists of enums and of nullable
# items. A name with a hyphen stands without quotes, quotes within an enum are not escaped, and the second line of a description of a field without `//`. What the prompt tells
# the model is another type, or none. The vocabulary comes from npm's tiktoken; no text of it matters here.
# Output seen: list: string | number[], enum: "x" | "y"[], nullable: string | null[][], my-prop: string, quotes: "a"b", said: // one / two.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/ranks.mjs" <<'JS'
import fs from "fs";
const { bpe_ranks: lines } = JSON.parse(fs.readFileSync("node_modules/tiktoken/encoders/o200k_base.json"));
const ranks = lines.split("\n").flatMap((line) => {
  const [, first, ...tokens] = line.split(" ");
  return tokens.map((token, i) => [token, Number(first) + i]);
});
fs.writeFileSync("o200k_base.tiktoken", ranks.map((pair) => pair.join(" ") + "\n").join(""));
JS
cat > "$folder/seen.py" <<'PYTHON'
import re
import sys

from openai_harmony import Conversation, DeveloperContent, HarmonyEncodingName, Message, Role, ToolDescription, load_harmony_encoding

encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
properties = {
    "list": {"type": "array", "items": {"type": ["string", "number"]}},
    "enum": {"type": "array", "items": {"type": "string", "enum": ["x", "y"]}},
    "nullable": {"type": "array", "items": {"type": "array", "items": {"type": ["string", "null"]}}},
    "my-prop": {"type": "string"},
    "quotes": {"type": "string", "enum": ['a"b']},
    "said": {"type": "object", "properties": {"x": {"type": "string", "description": "one\ntwo"}}, "required": ["x"]},
}
tool = ToolDescription.new("f", "A tool.", parameters={"type": "object", "properties": properties, "required": [*properties]})
message = Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_function_tools([tool]))
text = encoding.decode(encoding.render_conversation(Conversation.from_messages([message])))
field = lambda name: re.search(rf"\n *{name}: (.*),\n", text)[1]
seen = {name: field(name) for name in ("list", "enum", "nullable", "my-prop", "quotes")}
seen["said"] = re.sub(r"\s*\n\s*", " / ", re.search(r"(// one\n.*?)\n *x: string", text, re.DOTALL)[1])
for name, written in seen.items():
    print(f"{name}: {written}")
expected = {
    "list": "string | number[]",
    "enum": '"x" | "y"[]',
    "nullable": "string | null[][]",
    "my-prop": "string",
    "quotes": '"a"b"',
    "said": "// one / two",
}
sys.exit(seen != expected or "\nmy-prop: string,\n" not in text)
PYTHON
cd "$folder"
npm install --silent --no-fund --no-audit tiktoken@1.0.22
node ranks.mjs
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check openai-harmony==0.0.8 pydantic==2.14.4
TIKTOKEN_ENCODINGS_BASE="$folder" venv/bin/python seen.py
