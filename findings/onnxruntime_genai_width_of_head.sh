#!/usr/bin/env bash
# Expected: the model builder of onnxruntime-genai makes a model that computes what transformers computes from the same folder, whatever the widths of its layers are: the
# logits are those of lm_head.
# Seen: onnxruntime-genai 0.18.0 takes for the head every Linear that has as many outputs as the vocabulary has tokens, those within the layers too. If the width of a model, of
# its MLP, or of its queries, keys and values is the size of its vocabulary, the logits are others, without a word. A vocabulary of bytes has 256 tokens, which is a usual width.
# Output seen (how far the logits are from those of transformers, over their size): "widths of their own: 0.00", "hidden_size: 1.47", "hidden_size, tied: 1.01",
# "intermediate_size: 1.12", "queries: 0.99", "keys and values: 1.05".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import contextlib
import io
import pathlib
import runpy
import sys

import numpy as np
import onnxruntime
import onnxruntime_genai
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

print("onnxruntime-genai", onnxruntime_genai.__version__)
HEAD, LAYERS, LENGTH = 64, 2, 20
cases = {  # hidden_size is 128, the MLP 96 wide; keys and values have one head
    "widths of their own": {"vocab_size": 80},
    "hidden_size": {"vocab_size": 128},
    "hidden_size, tied": {"vocab_size": 128, "tie_word_embeddings": True},
    "intermediate_size": {"vocab_size": 80, "intermediate_size": 80},
    "queries": {"vocab_size": 256, "num_attention_heads": 4},
    "keys and values": {"vocab_size": 64},
}


@torch.no_grad()
def distance(folder: pathlib.Path, options: dict) -> float:
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD}
    ends = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes | options, **ends, max_position_embeddings=512, initializer_range=0.1)).eval()
    text = torch.randint(options["vocab_size"], (1, LENGTH))
    right = model(text).logits.numpy()
    source, made = folder / "source", folder / "made"
    model.save_pretrained(source)
    tokenizer = Tokenizer(models.WordLevel({f"t{n}": n for n in range(options["vocab_size"])}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t0", pad_token="t0").save_pretrained(source)
    sys.argv = ["builder", "-i", str(source), "-o", str(made), "-p", "fp32", "-e", "cpu", "-c", str(made)]
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
    session = onnxruntime.InferenceSession(str(made / "model.onnx"), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": text.numpy(), "attention_mask": np.ones((1, LENGTH), np.int64)}
    for given in session.get_inputs():
        if given.name.startswith("past"):
            feeds[given.name] = np.zeros((1, 1, 0, HEAD), np.float32)
        elif given.name not in feeds:  # position_ids
            feeds[given.name] = np.arange(LENGTH)[None]
    (logits,) = session.run(["logits"], feeds)
    return float(np.abs(logits - right).max() / np.abs(right).max())


root = pathlib.Path(sys.argv[1])
found = {name: distance(root / str(number), options) for number, (name, options) in enumerate(cases.items())}
for name, value in found.items():
    print(f"{name}: {value:.2f}")
own, *others = found.values()
sys.exit(not (own < 1e-4 and min(others) > 0.3))
PYTHON
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile)
"${pip[@]}" torch==2.13.0 transformers==5.24.0 onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
