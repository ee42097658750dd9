#!/usr/bin/env bash
# Expected: a character that the vocabulary of a BPE lacks is its unknown token once, as in tokenizers without fuse_unk; and WhitespaceSplit cuts at
# white space alone, as its name says.
# Seen: openvino-tokenizers 2026.4.1.0 writes the unknown token for every byte of the character, three times for the euro sign, and cuts as
# Whitespace does, also between letters and punctuation: with the words "a-b", "a", "-" and "b", the text "a-b" is three tokens.
# Output seen: "'€': tokenizers [UNK] openvino [UNK] [UNK] [UNK]", "'a-b': tokenizers a-b openvino a - b".
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


def read(text: str, tokenizer: Tokenizer) -> str:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")
    converted = ov.Core().compile_model(openvino_tokenizers.convert_tokenizer(fast), "CPU")
    theirs = [tokenizer.id_to_token(token) for token in converted([text])["input_ids"][0].tolist()]
    return f"{text!r}: tokenizers {' '.join(tokenizer.encode(text).tokens)} openvino {' '.join(theirs)}"


letters = Tokenizer(models.BPE({"[UNK]": 0, "a": 1, "b": 2}, [], unk_token="[UNK]"))
words = Tokenizer(models.WordLevel({"[UNK]": 0, "a-b": 1, "a": 2, "-": 3, "b": 4}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
seen = [read("€", letters), read("a-b", words)]
print(*seen, sep="\n")
sys.exit(seen != ["'€': tokenizers [UNK] openvino [UNK] [UNK] [UNK]", "'a-b': tokenizers a-b openvino a - b"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 tokenizers==0.23.3 transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
