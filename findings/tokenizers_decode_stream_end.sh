#!/usr/bin/env bash
# Expected: the pieces of tokenizers' DecodeStream, put together, are the text that decode gives of the same tokens, at the latest with the last of them.
# Seen: DecodeStream of tokenizers 0.23.3 holds back every text that ends in U+FFFD and has no call for its end. A model that closes with that character, which is a token of its own in many
# vocabularies, loses it, and all text of the same token before it; a following token would bring it out.
# Output seen: "decode 'a �', stream 'a'", "decode 'a wrong: �', stream 'a'", "decode 'a �b', stream 'a �b'".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

words = ["a", "▁\ufffd", "▁wrong:▁\ufffd", "b"]
tokenizer = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, []))
tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
seen = []
for ids in ([0, 1], [0, 2], [0, 1, 3]):
    stream = DecodeStream(skip_special_tokens=True)
    pieces = "".join(stream.step(tokenizer, token) or "" for token in ids)
    seen.append((tokenizer.decode(ids), pieces))
    print(f"decode {seen[-1][0]!r}, stream {pieces!r}")
ends = [name for name in dir(DecodeStream) if not name.startswith("_")]
print("calls:", *ends)
expected = [("a \ufffd", "a"), ("a wrong: \ufffd", "a"), ("a \ufffdb", "a \ufffdb")]
sys.exit(seen != expected or ends != ["step"])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check tokenizers==0.23.3
"$folder/venv/bin/python" "$folder/seen.py"
