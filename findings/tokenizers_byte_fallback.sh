#!/usr/bin/env bash
# Expected: a text that ends inside a character keeps the characters before it, as in sentencepiece, whose decoder ByteFallback stands in for, and as in the
# ByteLevel decoder. A limit of tokens, or a stream, cuts there whenever a model writes two characters in a row that its vocabulary lacks.
# Seen: ByteFallback of tokenizers 0.23.3 decodes a run of byte tokens as a whole or not at all: after two bytes of "€" the whole "古" before it becomes
# replacement characters too. sentencepiece 0.2.3 keeps it.
# Output seen: "4 bytes: tokenizers ���� sentencepiece 古�", "5 bytes: tokenizers ����� sentencepiece 古��", "6 bytes: tokenizers 古€ sentencepiece 古€".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import io
import sys

import sentencepiece
from tokenizers import Tokenizer, decoders, models

file = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["hello world a b c d e"] * 50),
    model_writer=file,
    vocab_size=290,
    byte_fallback=True,
    hard_vocab_limit=False,
    model_type="bpe",
    minloglevel=2,
)
theirs = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
vocabulary = {theirs.id_to_piece(token): token for token in range(theirs.get_piece_size())}
ours = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
ours.decoder = decoders.Sequence(  # that of Llama 2
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
tokens = [vocabulary[f"<0x{byte:02X}>"] for byte in "古€".encode()]
seen = [f"{n} bytes: tokenizers {ours.decode(tokens[:n])} sentencepiece {theirs.decode(tokens[:n])}" for n in (3, 4, 5, 6)]
print(*seen, sep="\n")
expected = ["古", "����", "�����", "古€"], ["古", "古�", "古��", "古€"]
sys.exit(seen != [f"{n} bytes: tokenizers {a} sentencepiece {b}" for n, a, b in zip((3, 4, 5, 6), *expected)])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check tokenizers==0.23.3 sentencepiece==0.2.3
"$folder/venv/bin/python" "$folder/seen.py"
