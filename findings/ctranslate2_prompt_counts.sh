#!/usr/bin/env bash
# Expected: include_prompt_in_result says whether the prompt is a part of what is returned; the tokens that follow the prompt are the same.
# Seen: ctranslate2 4.8.5 applies repetition_penalty, no_repeat_ngram_size and suppress_sequences to the prompt only if it is included (the default). Without it
# the answer repeats a token or a pair of the prompt, and a sequence that is suppressed may begin there. A model whose logits are the same after every token, a before b:
# Output seen: "plain: with aaaa, without aaaa", "repetition_penalty: with baaa, without abaa", "no_repeat_ngram_size: with aca, without aaba", "suppress_sequences: with baba, without abab".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import ctranslate2
import numpy as np
from ctranslate2.specs import transformer_spec

print("ctranslate2", ctranslate2.__version__)
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "c", "d"]
LOGITS = [-9, -9, 0.5, 3, 2, 1, 0]
WIDTH = 8


def zeros(*sizes: int) -> np.ndarray:
    return np.zeros(sizes, np.float32)


spec = transformer_spec.TransformerDecoderModelSpec.from_config(num_layers=1, num_heads=1, pre_norm=True)
decoder = spec.decoder
decoder.embeddings.weight = zeros(len(TOKENS), WIDTH)
decoder.position_encodings.encodings = zeros(64, WIDTH)
decoder.scale_embeddings = False
(layer,) = decoder.layer
for norm in (decoder.layer_norm, layer.self_attention.layer_norm, layer.ffn.layer_norm):
    norm.gamma, norm.beta = zeros(WIDTH), zeros(WIDTH)
decoder.layer_norm.beta[0] = 1  # whatever was computed, the last rows are (1, 0, 0, ...)
for linear, rows, columns in (
    (layer.self_attention.linear[0], 3 * WIDTH, WIDTH),
    (layer.self_attention.linear[1], WIDTH, WIDTH),
    (layer.ffn.linear_0, 16, WIDTH),
    (layer.ffn.linear_1, WIDTH, 16),
    (decoder.projection, len(TOKENS), WIDTH),
):
    linear.weight, linear.bias = zeros(rows, columns), zeros(rows)
decoder.projection.weight[:, 0] = LOGITS
spec.register_vocabulary(TOKENS)
spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "</s>", "<unk>"
spec.config.layer_norm_epsilon = 1e-5
spec.validate()
spec.save(sys.argv[1])
generator = ctranslate2.Generator(sys.argv[1], device="cpu", compute_type="float32")


def answer(prompt: str, included: bool, **options: object) -> str:
    given = ["<s>", *prompt]
    # An included prompt counts for the length.
    length = 4 + (len(given) if included else 0)
    (found,) = generator.generate_batch([given], max_length=length, include_prompt_in_result=included, **options)
    return "".join(found.sequences[0]).removeprefix("<s>").removeprefix(prompt if included else "")[:4]


cases = [
    ("plain", "ba", {}),
    ("repetition_penalty", "a", {"repetition_penalty": 1.6}),
    ("no_repeat_ngram_size", "aba", {"no_repeat_ngram_size": 2}),
    ("suppress_sequences", "ba", {"suppress_sequences": [["a", "a"]]}),
]
seen = [f"{name}: with {answer(prompt, True, **options)}, without {answer(prompt, False, **options)}" for name, prompt, options in cases]
print(*seen, sep="\n")
expected = [
    "plain: with aaaa, without aaaa",
    "repetition_penalty: with baaa, without abaa",
    "no_repeat_ngram_size: with aca, without aaba",
    "suppress_sequences: with baba, without abab",
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check ctranslate2==4.8.5 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder"
