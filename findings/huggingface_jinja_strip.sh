#!/usr/bin/env bash
# Expected: @huggingface/jinja, with which transformers.js renders chat templates, renders what jinja2 renders, or refuses what it does not know.
# Seen: @huggingface/jinja 0.5.11 passes over the argument of strip, lstrip and rstrip and takes all blanks away: an answer that begins with indented code loses
# its indentation under `content.split('</think>')[-1].lstrip('\n')`, as Qwen3's template has it. A list never equals an equal one, -7 % 3 is -1 (jinja2: 2), and
# capitalize leaves the other letters. jinja2 3.1.6.
# Output seen: a line for each of the six, with what both gave; "1 of 6 equal", a strip without argument.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/python.py" <<'PYTHON'
import json

import jinja2

given = {"content": "<think>\nso\n</think>\n\n    return 1\n", "role": "uSER", "list": [1, 2]}
templates = [
    r"{{ content.split('</think>')[-1].strip() }}",
    r"{{ content.split('</think>')[-1].lstrip('\n') }}",
    "{{ 'xxabcxx'.strip('x') }}",
    "{{ 'yes' if list == [1, 2] else 'no' }}",
    "{{ -7 % 3 }}",
    "{{ role|capitalize }}",
]
rendered = [jinja2.Environment().from_string(template).render(**given) for template in templates]
print(json.dumps({"given": given, "templates": templates, "rendered": rendered}))
PYTHON
cat > "$folder/js.mjs" <<'JS'
import { readFileSync } from "fs";
import { Template } from "@huggingface/jinja";

const { given, templates, rendered } = JSON.parse(readFileSync("python.json"));
const found = templates.map((template) => new Template(template).render(given));
found.forEach((text, i) => console.log(`${templates[i]}: jinja2 ${JSON.stringify(rendered[i])}, js ${JSON.stringify(text)}`));
const equal = found.filter((text, i) => text === rendered[i]).length;
console.log(`${equal} of ${found.length} equal`);
const expected = [
  ["return 1", "    return 1\n", "abc", "yes", "2", "User"],
  ["return 1", "return 1\n", "xxabcxx", "no", "-1", "USER"],
];
process.exit(JSON.stringify([rendered, found]) === JSON.stringify(expected) ? 0 : 1);
JS
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jinja2==3.1.6
cd "$folder"
npm install --silent --no-fund --no-audit @huggingface/jinja@0.5.11
venv/bin/python python.py > python.json
node js.mjs
