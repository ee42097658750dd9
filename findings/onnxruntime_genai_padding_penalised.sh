#!/usr/bin/env bash
# Expected: what follows a prompt does not depend on the prompts that share its batch. A penalty for repeated tokens counts the tokens of the text, and a shorter prompt is
# filled up with pad_token_id, which the attention mask leaves out.
# Seen: onnxruntime-genai 0.18.0 counts the filling too. Where pad_token_id is an end token, as in the folders that its builder makes of models without a padding token, the
# end of the shorter text is penalised from the first token on, and the text goes on where it ends alone. With another pad_token_id nothing is seen of it.
# Output seen (a model whose logits are the same after every token, the end token first): "end token, no penalty: alone [], in a batch []",
# "end token, penalty 1.5: alone [], in a batch [8, 9, 10]", "another, no penalty: alone [], in a batch []", "another, penalty 1.5: alone [], in a batch []".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/seen.py" <<'PYTHON'
import json
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime_genai
from onnx import TensorProto, helper, numpy_helper

print("onnxruntime-genai", onnxruntime_genai.__version__)
TOKENS, END, OTHER = 64, 0, 63
logits = np.full((TOKENS, TOKENS), -20, np.float32)  # a row for each token that was read
logits[:, END] = 5.5
logits[:, 8:16] = 5 - 0.5 * np.arange(8)
CACHE = ("key", "value")


def rows(name: str, kind: int, *sizes: object) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, ["batch", *sizes])


def write(folder: pathlib.Path, pad: int) -> None:
    """Writes a model that looks its logits up. Its cache has the length that is asked of it and holds zeros."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["logits"]),
        helper.make_node("Shape", ["input_ids"], ["batch_size"], start=0, end=1),
        helper.make_node("Shape", ["input_ids"], ["new"], start=1, end=2),
        helper.make_node("Concat", ["batch_size", "one", "new", "one"], ["sizes"], axis=0),
        helper.make_node("ConstantOfShape", ["sizes"], ["zeros"], value=numpy_helper.from_array(np.zeros(1, np.float32))),
        *(helper.make_node("Concat", [f"past.0.{kind}", "zeros"], [f"present.0.{kind}"], axis=2) for kind in CACHE),
    ]
    graph = helper.make_graph(
        nodes,
        "table",
        [rows("input_ids", TensorProto.INT64, "n"), rows("attention_mask", TensorProto.INT64, "m")]
        + [rows(f"past.0.{kind}", TensorProto.FLOAT, 1, "p", 1) for kind in CACHE],
        [rows("logits", TensorProto.FLOAT, "n", TOKENS)] + [rows(f"present.0.{kind}", TensorProto.FLOAT, 1, "q", 1) for kind in CACHE],
        [numpy_helper.from_array(logits, "table"), numpy_helper.from_array(np.array([1], np.int64), "one")],
    )
    folder.mkdir()
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "model.onnx")
    sizes = ("head_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    decoder = {
        "session_options": {"provider_options": []},
        "filename": "model.onnx",
        **dict.fromkeys(sizes, 1),
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **{f"past_{kind}_names": f"past.%d.{kind}" for kind in CACHE}},
        "outputs": {"logits": "logits", **{f"present_{kind}_names": f"present.%d.{kind}" for kind in CACHE}},
    }
    model = {"type": "llama", "vocab_size": TOKENS, "context_length": 64, "bos_token_id": 1, "eos_token_id": END, "pad_token_id": pad, "decoder": decoder}
    (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": {"max_length": 64, "past_present_share_buffer": False}}))


def follows(model: onnxruntime_genai.Model, pad: int, prompts: list[list[int]], penalty: float) -> list[int]:
    """What follows the last of the prompts, at most three tokens."""
    width = max(map(len, prompts))
    options = onnxruntime_genai.GeneratorParams(model)
    options.set_search_options(batch_size=len(prompts), max_length=width + 3, do_sample=False, repetition_penalty=penalty)
    generator = onnxruntime_genai.Generator(model, options)
    generator.append_tokens(np.array([[pad] * (width - len(prompt)) + prompt for prompt in prompts], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(len(prompts) - 1)[width:].tolist()


seen = []
for name, pad in (("end token", END), ("another", OTHER)):
    folder = pathlib.Path(sys.argv[1], name)
    write(folder, pad)
    model = onnxruntime_genai.Model(str(folder))
    for penalty in (1.0, 1.5):
        alone, batch = (follows(model, pad, prompts, penalty) for prompts in ([[5]], [[5, 6, 7], [5]]))
        seen.append(f"{name}, {f'penalty {penalty}' if penalty > 1 else 'no penalty'}: alone {alone}, in a batch {batch}")
print(*seen, sep="\n")
expected = [
    "end token, no penalty: alone [], in a batch []",
    "end token, penalty 1.5: alone [], in a batch [8, 9, 10]",
    "another, no penalty: alone [], in a batch []",
    "another, penalty 1.5: alone [], in a batch []",
]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-compile onnxruntime-genai==0.18.0 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder"
