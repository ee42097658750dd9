#!/usr/bin/env bash
# Expected: greedy decoding with drafts (prompt lookup, or an assistant model) writes the tokens of greedy decoding, whatever processes the logits. A
# watermark of green lists keeps to that.
# Seen: transformers 5.24.0 keeps the context of a SynthID watermark as a state that every call moves on by the last token of what it is shown. With drafts the
# processor is also called for tokens that are then dropped, and its context is no longer that of the text: other tokens are written, without a word, and most of
# the watermark is lost. Its own g-values, whose mean is 0.5 in a text without it, say so.
# Output seen (tokens of 12 texts that are those of greedy decoding with the same watermark, and the mean of the g-values): "SynthID, plain: 12 of 12 g 0.94",
# "SynthID, prompt lookup: 0 of 12 g 0.65", "SynthID, assistant: 0 of 12 g 0.53", and for green lists 12 of 12 in all three.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, SynthIDTextWatermarkingConfig, WatermarkingConfig

print("transformers", transformers.__version__)
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
TOKENS, NEW = 64, 40
sizes = dict(vocab_size=TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def made(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1, bos_token_id=None, eos_token_id=None)).eval()


model, assistant = made(0), made(1)
watermarks = {"SynthID": SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3), "green lists": WatermarkingConfig(bias=2.5)}
ways = {"plain": {}, "prompt lookup": dict(prompt_lookup_num_tokens=4), "assistant": dict(assistant_model=assistant)}
values = watermarks["SynthID"].construct_processor(TOKENS, "cpu")
right = {}
for name, watermark in watermarks.items():
    for way, settings in ways.items():
        same, mean = 0, []
        for seed in range(12):
            prompt = torch.randint(TOKENS, (1, 8), generator=torch.Generator().manual_seed(seed)).repeat(1, 2)
            common = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, watermarking_config=watermark)
            plain, new = (model.generate(prompt, **common, **kind)[:, prompt.shape[1] :] for kind in ({}, settings))
            same += plain.equal(new)
            mean.append(values.compute_g_values(new).float().mean())
        right[name, way] = same, float(torch.stack(mean).mean())
        print(f"{name}, {way}: {same} of 12", f"g {right[name, way][1]:.2f}" if name == "SynthID" else "")
exact = all(right["green lists", way][0] == 12 for way in ways) and right["SynthID", "plain"][0] == 12
lost = all(right["SynthID", way][0] < 4 and right["SynthID", way][1] < right["SynthID", "plain"][1] - 0.1 for way in list(ways)[1:])
sys.exit(not (exact and lost))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
