#!/usr/bin/env bash
# Expected: apply_chat_template hands a message's `"content": None` to the template, as transformers 4.57 does.
# Seen: transformers 5.24.0 drops the key, so `content is none` is false and `content is not none` is true for a message that has only calls of
# tools; a template that joins the content to text when it "is not none" raises. 4.57.6 renders the branch for none.
# Output seen: "4.57.6: none" and "5.24.0: not none".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/render.py" <<'PYTHON'
import sys

import transformers
from tokenizers import Tokenizer, models

tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
template = "{% for m in messages %}{{ 'none' if m.content is none else 'not none' }}{% endfor %}"
call = {"type": "function", "function": {"name": "clock", "arguments": {}}}
chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
seen = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
print(f"{transformers.__version__}: {seen}")
sys.exit(seen != sys.argv[1])
PYTHON
for pair in "4.57.6=none" "5.24.0=not none"; do
  python3 -m venv "$folder/${pair%%=*}"
  "$folder/${pair%%=*}/bin/pip" install -q --disable-pip-version-check "transformers==${pair%%=*}" jinja2==3.1.6
  "$folder/${pair%%=*}/bin/python" "$folder/render.py" "${pair#*=}" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
done
