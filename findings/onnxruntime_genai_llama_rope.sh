#!/usr/bin/env bash
# Expected: the model builder of onnxruntime-genai makes a model that computes what transformers computes from the same folder, or refuses it. It has code for linear
# scaling and for yarn, and says of other rules that they are "not currently supported".
# Seen: in onnxruntime-genai 0.18.0 that holds for Mistral. A Llama with linear or yarn scaling gets none, without a word: the class of Llama reads the rule llama3 alone and
# does not ask the one it is derived from. dynamic, which that one refuses, goes the same way.
# Output seen (how far the logits are from those of transformers, and from those of the model without scaling, over their size): "Llama default: 0.00, 0.00",
# "Llama llama3: 0.00, 0.76", "Llama linear: 0.84, 0.00", "Llama yarn: 0.50, 0.00", "Llama dynamic: built, 0.00", "Mistral default: 0.00, 0.00",
# "Mistral linear: 0.00, 0.85", "Mistral yarn: 0.00, 0.50", "Mistral dynamic: NotImplementedError".
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
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedTokenizerFast

print("onnxruntime-genai", onnxruntime_genai.__version__)
folder = pathlib.Path(sys.argv[1])
TOKENS, HEAD = 80, 64
text = torch.randint(TOKENS, (1, 128), generator=torch.Generator().manual_seed(0))
rules = {
    "default": {"rope_type": "default"},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}


@torch.no_grad()
def build(kind: type, rule: str, out: pathlib.Path) -> np.ndarray:
    """Writes the folder of a model, and gives its logits in transformers."""
    config = kind(
        vocab_size=TOKENS, hidden_size=2 * HEAD, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=HEAD,
        max_position_embeddings=4096, initializer_range=0.1, sliding_window=None, bos_token_id=1, eos_token_id=0, pad_token_id=0,
        rope_parameters={"rope_theta": 10000.0, **rules[rule]},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(out)
    tokenizer = Tokenizer(models.WordLevel({f"t{n}": n for n in range(TOKENS)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t0", pad_token="t0").save_pretrained(out)
    return model(text).logits.numpy()


def run(source: pathlib.Path, out: pathlib.Path) -> np.ndarray:
    """Logits of the model that the builder makes of a folder."""
    sys.argv = ["builder", "-i", str(source), "-o", str(out), "-p", "fp32", "-e", "cpu", "-c", str(out)]
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = {}
    for argument in session.get_inputs():
        if argument.name == "input_ids":
            inputs[argument.name] = text.numpy()
        elif argument.name == "attention_mask":
            inputs[argument.name] = np.ones_like(text.numpy())
        elif argument.name == "position_ids":
            inputs[argument.name] = np.arange(text.shape[1])[None]
        else:
            inputs[argument.name] = np.zeros((1, 1, 0, HEAD), np.float32)
    return session.run(["logits"], inputs)[0]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


expected = {  # None: transformers scales only texts that are longer than these
    "Llama default": (0, 0),
    "Llama llama3": (0, 0.76),
    "Llama linear": (0.84, 0),
    "Llama dynamic": (None, 0),
    "Llama yarn": (0.5, 0),
    "Mistral default": (0, 0),
    "Mistral linear": (0, 0.85),
    "Mistral dynamic": "NotImplementedError",
    "Mistral yarn": (0, 0.5),
}
seen, plain = {}, {}
for name in expected:
    kind, rule = name.split()
    source = folder / name.replace(" ", "_")
    right = build({"Llama": LlamaConfig, "Mistral": MistralConfig}[kind], rule, source)
    try:
        built = run(source, folder / f"{source.name}_onnx")
    except NotImplementedError:
        seen[name] = "NotImplementedError"
        print(f"{name}: NotImplementedError")
        continue
    off, same = None if rule == "dynamic" else distance(built, right), distance(built, plain.setdefault(kind, built))
    seen[name] = off, same
    print(f"{name}: {'built' if off is None else f'{off:.2f}'}, {same:.2f}")


def near(a: float | None, b: float | None) -> bool:
    return a is b if a is None or b is None else abs(a - b) < 0.03


sys.exit(not all(seen[name] == other if isinstance(other, str) else all(map(near, seen[name], other)) for name, other in expected.items()))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.24.0 onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
