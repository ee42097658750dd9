#!/usr/bin/env bash
# Expected: one tokenizer.json cuts a text into the same tokens in tokenizers and in @huggingface/tokenizers. Its README excepts the behaviours MergedWithPrevious,
# MergedWithNext and Contiguous of a Split, not Removed and Isolated.
# Seen: @huggingface/tokenizers 0.2.0 keeps what Removed removes (the tokens of a space), and drops what an inverted Isolated keeps: "Hello World" at
# [a-z]+ is "ello", "orld". tokenizers 0.23.3 removes the space, and keeps "H" and " W".
# Output seen: "Removed: rust Hello|World, js Hello| |World", "inverted Isolated: rust H|ello| W|orld, js ello|orld".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/rust.py" <<'PYTHON'
import json

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

TEXT = "Hello World"
cases = {
    "Removed": pre_tokenizers.Split(" ", "removed"),
    "inverted Isolated": pre_tokenizers.Split(Regex("[a-z]+"), "isolated", invert=True),
}
vocabulary = {word: number for number, word in enumerate(["?", "Hello", "World", " ", "H", "ello", " W", "orld"])}
made = {}
for name, split in cases.items():
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = split
    made[name] = {"file": json.loads(tokenizer.to_str()), "tokens": tokenizer.encode(TEXT).tokens}
print(json.dumps({"text": TEXT, "made": made}))
PYTHON
cat > "$folder/js.mjs" <<'JS'
import { readFileSync } from "fs";
import { Tokenizer } from "@huggingface/tokenizers";

const { text, made } = JSON.parse(readFileSync("rust.json"));
const seen = Object.entries(made).map(([name, { file, tokens }]) => {
  const found = new Tokenizer(file, {}).encode(text).tokens;
  return `${name}: rust ${tokens.join("|")}, js ${found.join("|")}`;
});
console.log(seen.join("\n"));
const expected = ["Removed: rust Hello|World, js Hello| |World", "inverted Isolated: rust H|ello| W|orld, js ello|orld"];
process.exit(JSON.stringify(seen) === JSON.stringify(expected) ? 0 : 1);
JS
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check tokenizers==0.23.3
cd "$folder"
npm install --silent --no-fund --no-audit @huggingface/tokenizers@0.2.0
venv/bin/python rust.py > rust.json
node js.mjs
