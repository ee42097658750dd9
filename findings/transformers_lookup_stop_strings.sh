#!/usr/bin/env bash
# Expected: greedy decoding with prompt lookup writes the tokens of greedy decoding, also where stop_strings end the text, and a stopping criterion of one's own.
# Seen: transformers 5.24.0 asks the criteria once for each draft that was verified, and they look at the end of the text. A stop string that was completed
# within a draft is passed over: the text goes on to its limit, or to a draft that happens to end with the string. Nothing is said. End tokens are looked for in the
# whole draft. With an assistant_model, stop_strings end in a ValueError that asks for the tokenizer which was given.
# Output seen (a model that writes the alphabet, after "abc...zabc"): "end token f: plain 'def', lookup 'def'", "stop string 'f': plain 'def', lookup
# 'defghijklmnopqrstuvwxyzabcdefghijklmnopq'", the same for a criterion that looks for f at the end, "assistant: ValueError".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import string
import sys

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, StoppingCriteria

print("transformers", transformers.__version__)
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
letters = string.ascii_lowercase
tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
tokenizer.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
sizes = dict(vocab_size=26, hidden_size=26, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None)).eval()
with torch.no_grad():  # the layer adds nothing, and the head turns a letter into the next one
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(26))
    model.lm_head.weight.copy_(torch.eye(26).roll(1, 0))
prompt = torch.tensor([[*range(26), 0, 1, 2]])


class EndsWithF(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == letters.index("f")


def text(**settings: object) -> str:
    rows = model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0, **settings)
    return "".join(letters[token] for token in rows[0, prompt.shape[1] :])


lookup = dict(prompt_lookup_num_tokens=6)
ends = {
    "end token f": dict(eos_token_id=letters.index("f")),
    "stop string 'f'": dict(stop_strings=["f"], tokenizer=tokenizer),
    "criterion": dict(stopping_criteria=[EndsWithF()]),
}
assert text() == text(**lookup) and len(text()) == 40
seen = []
for name, settings in ends.items():
    plain, drafted = text(**settings), text(**settings, **lookup)
    print(f"{name}: plain {plain!r}, lookup {drafted!r}")
    seen.append((plain, drafted == plain, len(drafted)))
try:
    text(**ends["stop string 'f'"], assistant_model=model)
    assistant = "no error"
except ValueError as error:
    assistant = f"ValueError, {'tokenizer' in str(error)}"
print("assistant:", assistant)
sys.exit(seen != [("def", True, 3), ("def", False, 40), ("def", False, 40)] or assistant != "ValueError, True")
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py"
