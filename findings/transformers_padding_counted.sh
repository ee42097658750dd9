#!/usr/bin/env bash
# Expected: what follows a prompt does not depend on the prompts that share its batch. The shorter one is filled up on the left, and the attention mask leaves that out.
# Seen: transformers 5.24.0 takes the padding out of what repetition_penalty counts, and of nothing else: other processors of logits see whole rows. A call of generate with
# encoder_repetition_penalty, which makes the tokens of the prompt likelier, makes the padding token likelier in shorter rows; no_repeat_ngram_size takes two paddings for
# a pair that must not come again; min_length counts the padding. Each changes what follows the shorter prompt, without a word.
# Output seen (what follows [5] alone, and in a batch with [5, 6, 7, 8, 9]): for encoder_repetition_penalty "[1, 2, 3, 4] alone, [0, 0, 0, 0] in the batch", for
# no_repeat_ngram_size "[1, 0, 0, 2]" and "[1, 0, 2, 3]", for min_length "[1, 2, 3, 0]" and "[0]"; the same in both for repetition_penalty, and without any of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

print("transformers", transformers.__version__)
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
TOKENS, PAD = 16, 0
sizes = dict(vocab_size=TOKENS, hidden_size=TOKENS, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None)).eval()


@torch.no_grad()
def write(logits: dict[int, dict[int, float]]) -> None:
    """Makes the model look its logits up by the token before: the layer adds nothing, an embedding is a unit vector and the head a table."""
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(TOKENS))
    table = torch.zeros(TOKENS, TOKENS)
    for before, row in logits.items():
        for token, value in row.items():
            table[token, before] = value / TOKENS**0.5
    model.lm_head.weight.copy_(table)


def follows(prompts: list[list[int]], **settings: object) -> list[int]:
    """What follows the last of the prompts, up to its end token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    new = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=PAD, **settings)[-1, width:].tolist()
    end = settings.get("eos_token_id")
    return new[: new.index(end) + 1] if end in new else new


after = {5: {1: 5, 0: 4}, 1: {2: 5, 0: 4}, 2: {3: 5, 0: 4}, 3: {4: 5, 0: 4}, 0: {0: 5, 1: 4}}
pairs = {5: {1: 5}, 1: {0: 5}, 0: {0: 5, 2: 4}, 2: {3: 5}}
ends = {5: {0: 5, 1: 4}, 1: {0: 5, 2: 4}, 2: {0: 5, 3: 4}, 3: {0: 5, 4: 4}}
cases = {
    "none": (after, {}, [1, 2, 3, 4], [1, 2, 3, 4]),
    "encoder_repetition_penalty": (after, dict(encoder_repetition_penalty=2.0), [1, 2, 3, 4], [0, 0, 0, 0]),
    "no_repeat_ngram_size": (pairs, dict(no_repeat_ngram_size=2), [1, 0, 0, 2], [1, 0, 2, 3]),
    "min_length": (ends, dict(min_length=4, eos_token_id=0), [1, 2, 3, 0], [0]),
    "repetition_penalty": (ends, dict(repetition_penalty=2.0, eos_token_id=0), [0], [0]),
}
changed = False
for name, (logits, settings, expected_alone, expected_batch) in cases.items():
    write(logits)
    alone, batch = follows([[5]], **settings), follows([[5, 6, 7, 8, 9], [5]], **settings)
    print(f"{name}: {alone} alone, {batch} in the batch")
    changed |= alone != expected_alone or batch != expected_batch
sys.exit(changed)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
