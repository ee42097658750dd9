#!/usr/bin/env bash
# Expected: the normalizer Lowercase of a tokenizer.json gives the same letters in tokenizers and in @huggingface/tokenizers, for any script.
# Seen: tokenizers 0.23.3 lowers letter by letter, and every capital sigma is σ. @huggingface/tokenizers 0.2.0 lowers the text, and a sigma at the end of a
# word is ς: the ids of Greek words in capitals differ, under BertNormalizer too. Python's str.lower does as JavaScript.
# Output seen: "Lowercase: rust οδοσ, js οδος", "BertNormalizer: rust οδοσ, js οδος", "str.lower: οδος".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/rust.py" <<'PYTHON'
import json

from tokenizers import Tokenizer, models, normalizers

TEXT = "ΟΔΟΣ"
vocabulary = {letter: number for number, letter in enumerate("?οδσς")}
made = {}
for name, normalizer in {"Lowercase": normalizers.Lowercase(), "BertNormalizer": normalizers.BertNormalizer()}.items():
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    tokenizer.normalizer = normalizer
    made[name] = {"file": json.loads(tokenizer.to_str()), "tokens": tokenizer.encode(TEXT).tokens}
print(json.dumps({"text": TEXT, "made": made, "python": TEXT.lower()}))
PYTHON
cat > "$folder/js.mjs" <<'JS'
import { readFileSync } from "fs";
import { Tokenizer } from "@huggingface/tokenizers";

const { text, made, python } = JSON.parse(readFileSync("rust.json"));
const seen = Object.entries(made).map(([name, { file, tokens }]) => {
  const found = new Tokenizer(file, {}).encode(text).tokens;
  return `${name}: rust ${tokens.join("")}, js ${found.join("")}`;
});
seen.push(`str.lower: ${python}`);
console.log(seen.join("\n"));
const expected = ["Lowercase: rust οδοσ, js οδος", "BertNormalizer: rust οδοσ, js οδος", "str.lower: οδος"];
process.exit(JSON.stringify(seen) === JSON.stringify(expected) ? 0 : 1);
JS
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check tokenizers==0.23.3
cd "$folder"
npm install --silent --no-fund --no-audit @huggingface/tokenizers@0.2.0
venv/bin/python rust.py > rust.json
node js.mjs
