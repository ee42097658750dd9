#!/usr/bin/env bash
# Expected: Split with the behaviour "merged_with_next" cuts a text before each match, so that the pieces together are the text; OpenVINO's RegexSplit
# has a mode of that name.
# Seen: where two matches follow each other, as two spaces do, openvino-tokenizers 2026.4.1.0 leaves all of them out but the last: "a  b" is read as "a b",
# and an indentation of four spaces as one. With a single space between words nothing is lost.
# Output seen: "'a b': tokenizers aĠb openvino aĠb", "'a  b': tokenizers aĠĠb openvino aĠb", "'    a': tokenizers ĠĠĠĠa openvino Ġa".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import openvino as ov
import openvino_tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

print("openvino-tokenizers", openvino_tokenizers.__version__)
names = ["[UNK]", *sorted(pre_tokenizers.ByteLevel.alphabet())]  # a token is a byte
tokenizer = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(" ", "merged_with_next"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
)
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")
converted = ov.Core().compile_model(openvino_tokenizers.convert_tokenizer(fast), "CPU")
seen = []
for text in ("a b", "a  b", "    a"):
    theirs = "".join(names[token] for token in converted([text])["input_ids"][0].tolist())
    seen.append(f"{text!r}: tokenizers {''.join(tokenizer.encode(text).tokens)} openvino {theirs}")
print(*seen, sep="\n")
expected = [("a b", "aĠb", "aĠb"), ("a  b", "aĠĠb", "aĠb"), ("    a", "ĠĠĠĠa", "Ġa")]
sys.exit(seen != [f"{text!r}: tokenizers {right} openvino {wrong}" for text, right, wrong in expected])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 tokenizers==0.23.3 transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
