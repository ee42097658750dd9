#!/usr/bin/env bash
# Expected: generate_batch, transformers' continuous batching, follows the GenerationConfig it is given, or names what it does not follow: its log does name
# repetition_penalty, whose "processor isn't supported" and is dropped.
# Seen: transformers 5.24.0 passes over min_new_tokens, min_length, num_beams and stop_strings without an error, a warning or a line in its log: a text ends before
# the least length that was asked for, beams are greedy, and no text ends at a string. generate follows the first three, and asks for a tokenizer for the last.
# Output seen: "min_new_tokens=9: generate 12 tokens, generate_batch as without it, said nothing", the same for min_length=11, for num_beams=2 (9 tokens) and for
# stop_strings (ValueError), where the greedy text has 4 tokens; for repetition_penalty the line of the log.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import logging
import sys
import warnings

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

print("transformers", transformers.__version__)
torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5, bos_token_id=1, eos_token_id=0)).eval()
prompt, said = [1, 2], []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())
for name in ("ContinuousBatchingLogger", "transformers"):
    logging.getLogger(name).addHandler(handler)
warnings.showwarning = lambda message, *_: said.append(str(message))
end = model.generate(torch.tensor([prompt]), generation_config=GenerationConfig(max_new_tokens=4, eos_token_id=-1, pad_token_id=0))[0, -1].item()


def config(**setting):
    return GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=0, **setting)


def alone(**setting):
    model.set_attn_implementation("sdpa")
    try:
        return model.generate(torch.tensor([prompt]), generation_config=config(**setting))[0, len(prompt) :].tolist()
    except ValueError:
        return "ValueError"


def together(**setting):
    model.set_attn_implementation("sdpa")
    said.clear()
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    (answer,) = model.generate_batch([prompt], generation_config=config(**setting), continuous_batching_config=small).values()
    return answer.generated_tokens, [line for line in said if any(word in line for word in ("Processor", *setting))]


greedy, lines = together()
assert greedy == alone() and len(greedy) == 4 and not lines
seen = {}
for setting in (dict(min_new_tokens=9), dict(min_length=11), dict(num_beams=2), dict(stop_strings=["a"]), dict(repetition_penalty=2.0)):
    right, (got, lines) = alone(**setting), together(**setting)
    ((name, value),) = setting.items()
    length = right if isinstance(right, str) else f"{len(right)} tokens"
    seen[name] = (right != greedy, got == greedy, bool(lines))
    print(f"{name}={value}: generate {length}, generate_batch {'as without it' if got == greedy else 'other tokens'}, {lines or 'said nothing'}")
ignored = dict.fromkeys(("min_new_tokens", "min_length", "num_beams", "stop_strings"), (True, True, False))
sys.exit({name: seen[name] for name in ignored} != ignored or not seen["repetition_penalty"][2])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 numpy==2.4.6 psutil==7.2.2
"$folder/venv/bin/python" "$folder/seen.py"
