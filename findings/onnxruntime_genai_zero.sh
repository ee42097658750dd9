#!/usr/bin/env bash
# Expected: top_p = 0 keeps the most probable token, as the smallest positive top_p does, or is refused; top_k = 0 keeps all tokens, as in transformers, vLLM and llama.cpp.
# Seen: onnxruntime-genai 0.18.0 takes a top_p of 0 for no filter and draws among all tokens, where 1e-9 keeps one; a top_k of 0 keeps the most probable token alone. Of
# 60 draws from probabilities 0.4, 0.24, 0.14 and less:
# Output seen: "top_p 1e-09: 1 token", "top_p 0.0: several", "top_p 1.0: several", "top_k 0: 1 token", "top_k 1: 1 token", "top_k 2: 2 tokens".
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
folder = pathlib.Path(sys.argv[1])
TOKENS, BEST = 64, 8
logits = np.full((TOKENS, TOKENS), -20, np.float32)  # the same after every token
logits[:, BEST : BEST + 8] = 5 - 0.5 * np.arange(8)


def cache(name: str, length: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1, length, 1])


nodes = [
    helper.make_node("Gather", ["table", "input_ids"], ["logits"]),
    helper.make_node("Shape", ["input_ids"], ["shape"]),
    helper.make_node("Slice", ["shape", "0", "1"], ["batch"]),
    helper.make_node("Slice", ["shape", "1", "2"], ["new"]),
    helper.make_node("Concat", ["batch", "1", "new", "1"], ["rows"], axis=0),
    helper.make_node("ConstantOfShape", ["rows"], ["zeros"], value=numpy_helper.from_array(np.zeros(1, np.float32))),
    helper.make_node("Concat", ["past.0.key", "zeros"], ["present.0.key"], axis=2),
    helper.make_node("Concat", ["past.0.value", "zeros"], ["present.0.value"], axis=2),
]
whole = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", size]) for name, size in (("input_ids", "n"), ("attention_mask", "m"))]
numbers = [numpy_helper.from_array(np.array([n], np.int64), str(n)) for n in range(3)]
graph = helper.make_graph(
    nodes,
    "table",
    [*whole, cache("past.0.key", "p"), cache("past.0.value", "p")],
    [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "n", TOKENS]), cache("present.0.key", "q"), cache("present.0.value", "q")],
    [numpy_helper.from_array(logits, "table"), *numbers],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "model.onnx")
caches = {f"{which}_{kind}_names": f"{which}.%d.{kind}" for which in ("past", "present") for kind in ("key", "value")}
decoder = {
    "session_options": {"provider_options": []},
    "filename": "model.onnx",
    **{name: 1 for name in ("head_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")},
    "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **{n: v for n, v in caches.items() if "past" in n}},
    "outputs": {"logits": "logits", **{n: v for n, v in caches.items() if "present" in n}},
}
model = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0, "context_length": 512, "type": "llama", "vocab_size": TOKENS}
config = {"model": {**model, "decoder": decoder}, "search": {"max_length": 512, "past_present_share_buffer": False}}
(folder / "genai_config.json").write_text(json.dumps(config))
loaded = onnxruntime_genai.Model(str(folder))


def drawn(seed: int, **options: float) -> int:
    given = onnxruntime_genai.GeneratorParams(loaded)
    given.set_search_options(max_length=3, do_sample=True, random_seed=seed, **options)
    generator = onnxruntime_genai.Generator(loaded, given)
    generator.append_tokens(np.array([[5, 6]], np.int32))
    generator.generate_next_token()
    return int(generator.get_sequence(0)[-1])


def words(**options: float) -> str:
    found = {drawn(seed, **options) for seed in range(60)}
    (name, value), = options.items()
    assert BEST in found
    return f"{name} {value}: {'several' if len(found) > 4 else f'{len(found)} token' + 's' * (len(found) > 1)}"


seen = [words(top_p=p) for p in (1e-9, 0.0, 1.0)] + [words(top_k=k) for k in (0, 1, 2)]
print(*seen, sep="\n")
expected = ["top_p 1e-09: 1 token", "top_p 0.0: several", "top_p 1.0: several", "top_k 0: 1 token", "top_k 1: 1 token", "top_k 2: 2 tokens"]
sys.exit(seen != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check onnxruntime-genai==0.18.0 onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" "$folder/seen.py" "$folder"
