#!/usr/bin/env bash
# Expected: greedy decoding with a draft model writes the tokens of greedy decoding, whatever processes the logits. Without one, penalties for repeated tokens count the
# prompt.
# Seen: mlx-lm 0.32.2 shows its processors of logits the prompt without a draft model. With one they see its last token and what was written, and where a whole draft was
# accepted, its last token twice: a penalty no longer counts the prompt, and a frequency is wrong. Other tokens are written, without a word. A bias, which counts nothing, is
# the same in both.
# Output seen (Llamas with random weights, 12 prompts of 16 tokens, 24 new ones; texts that are those of greedy decoding, with another model's drafts and with its own):
# "none: 12, 12", "logit_bias: 12, 12", and "0, 0" for repetition_penalty, presence_penalty
# and frequency_penalty.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import random
import sys
from importlib.metadata import version

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_logits_processors

print("mlx-lm", version("mlx-lm"), "mlx", version("mlx"))
mx.set_default_device(mx.cpu)
TOKENS = 32
sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=TOKENS)


def made(seed: int) -> llama.Model:
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, tie_word_embeddings=False, **sizes))
    model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.35 if p.ndim > 1 else mx.ones(p.shape), model.parameters()))
    return model


model, draft = made(1), made(2)
numbers = random.Random(0)
prompts = [mx.array([numbers.randrange(TOKENS) for _ in range(16)]) for _ in range(12)]
settings = {
    "none": {},
    "logit_bias": dict(logit_bias={3: 2.0, 5: -4.0}),
    "repetition_penalty": dict(repetition_penalty=1.5),
    "presence_penalty": dict(presence_penalty=2.0),
    "frequency_penalty": dict(frequency_penalty=2.0),
}
seen = {}
for name, setting in settings.items():
    same = [0, 0]
    for prompt in prompts:
        processed = dict(max_tokens=24, logits_processors=make_logits_processors(**setting))
        plain = [int(token) for token, _ in generate_step(prompt, model, **processed)]
        for case, drafter in enumerate((draft, model)):
            same[case] += plain == [int(token) for token, *_ in speculative_generate_step(prompt, model, drafter, num_draft_tokens=3, **processed)]
    seen[name] = same
    print(f"{name}: {same[0]}, {same[1]}")
exact = seen["none"] == seen["logit_bias"] == [12, 12]
sys.exit(not (exact and all(max(seen[name]) < 6 for name in settings if "penalty" in name)))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile mlx-lm==0.32.2 "mlx[cpu]==0.32.4" numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
