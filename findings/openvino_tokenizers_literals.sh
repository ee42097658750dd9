#!/usr/bin/env bash
# Expected: a pattern of tokenizers that is a string, {"String": "."} in tokenizer.json, means those characters, and one that is {"Regex": "."} any of them.
# convert_tokenizer keeps the difference, or refuses what it cannot say.
# Seen: openvino-tokenizers 2026.4.1.0 takes the string for a regular expression: Replace(".", "!") makes "!!!" of "a.b", Split(".", "removed") leaves nothing
# of "ab", and Replace("a?", "b") changes texts that do not have it. Nothing is said, at the conversion or later.
# Output seen: "Replace . with !: tokenizers a!b openvino !!!", "Replace a? with b: tokenizers ca openvino bcbb", "Split at . that goes: tokenizers ab openvino ".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import openvino as ov
import openvino_tokenizers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

print("openvino-tokenizers", openvino_tokenizers.__version__)


def read(text: str, normalizer=None, splits=()) -> str:
    """The text's tokens, which are characters, in both."""
    names = ["[UNK]", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, []))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")
    converted = ov.Core().compile_model(openvino_tokenizers.convert_tokenizer(fast), "CPU")
    theirs = converted([text])["input_ids"][0].tolist()
    return f"tokenizers {''.join(tokenizer.encode(text).tokens)} openvino {''.join(names[token] for token in theirs)}"


seen = [
    f"Replace . with !: {read('a.b', normalizers.Replace('.', '!'))}",
    f"Replace a? with b: {read('ca', normalizers.Replace('a?', 'b'))}",
    f"Split at . that goes: {read('ab', splits=[pre_tokenizers.Split('.', 'removed')])}",
]
print(*seen, sep="\n")
expected = [
    "Replace . with !: tokenizers a!b openvino !!!",
    "Replace a? with b: tokenizers ca openvino bcbb",
    "Split at . that goes: tokenizers ab openvino ",
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 tokenizers==0.23.3 transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
