#!/usr/bin/env bash
# Expected: a tokenizer that transformers makes of a SentencePiece file alone cuts texts as sentencepiece does with that file, or says that it cannot: kind of model, normaliser, dummy
# prefix and the number of the unknown token are written in the file.
# Seen: transformers 5.24.0 takes them from the class, without a word. LlamaTokenizer cuts a unigram model into characters, begins with a space where the file has add_dummy_prefix false,
# and loses a space of the text that begins with one, with the settings of Llama's own file. T5Tokenizer ranks the pieces of a BPE model as if they were a unigram's, joins spaces
# that the file keeps, and of a file with sentencepiece's own numbers writes the end token for every character that it does not know.
# Output seen: a line for each file with what sentencepiece and transformers give; the same in two of eight, words alone for the class's own kind of model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import os
import random
import sys
import warnings

import sentencepiece
from transformers import LlamaTokenizer, T5Tokenizer, logging

warnings.simplefilter("ignore")
logging.set_verbosity_error()
random.seed(0)
words = "the cat sat on mat hat bat rat hello world foo bar antelope catalogue another then these those".split()
texts = [" ".join(random.choices(words, k=8)) for _ in range(400)]
llama = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True, "vocab_size": 400}
cases = [  # class, kind, settings of the file, text, what transformers gives where that is not what sentencepiece gives
    (LlamaTokenizer, "bpe", llama, "the   cat", None),
    (LlamaTokenizer, "bpe", llama, " the cat", ["▁the", "▁cat"]),
    (LlamaTokenizer, "bpe", {**llama, "add_dummy_prefix": False}, "the cat", ["▁the", "▁cat"]),
    (LlamaTokenizer, "unigram", {}, "the cat", [*"▁the▁cat"]),
    (T5Tokenizer, "unigram", {}, "the cat", None),
    (T5Tokenizer, "unigram", {}, "cat?", ["▁cat", "</s>"]),
    (T5Tokenizer, "unigram", {"remove_extra_whitespaces": False}, "the  cat", ["▁the", "▁cat"]),
    (T5Tokenizer, "bpe", {}, "the cat", ["▁t", "he", "▁c", "at"]),
]
right = True
for number, (kind, model_type, settings, text, other) in enumerate(cases):
    folder = os.path.join(sys.argv[1], str(number))
    os.mkdir(folder)
    model = os.path.join(folder, "spiece" if kind is T5Tokenizer else "tokenizer")
    options = {"vocab_size": 140, "hard_vocab_limit": False, "minloglevel": 2, **settings}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=model, model_type=model_type, **options)
    os.remove(model + ".vocab")
    theirs = sentencepiece.SentencePieceProcessor(model_file=model + ".model").encode(text, out_type=str)
    tokenizer = kind.from_pretrained(folder)
    ours = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
    print(kind.__name__, model_type, settings, repr(text), "sentencepiece", theirs, "transformers", "the same" if ours == theirs else ours)
    right &= ours == (theirs if other is None else other) and (other is None or ours != theirs)
sys.exit(not right)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile transformers==5.24.0 tokenizers==0.23.3 sentencepiece==0.2.3 protobuf==7.36.2
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/seen.py" "$folder"
