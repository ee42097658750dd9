#!/usr/bin/env bash
# Expected: `generate` of transformers.js follows top_p, epsilon_cutoff and eta_cutoff of its GenerationConfig, which describes them as transformers does, or says that it does not.
# Seen: @huggingface/transformers 4.3.2 samples as if they were not there, without a word. Of a token with the probability 0.6 and forty with 0.01, top_p 0.5 leaves the first alone, and
# so do an epsilon_cutoff of 0.1 and an eta_cutoff of 0.5; it draws the others as often as without. top_k and temperature are followed.
# Output seen: "none: 58.5 % of 200 are the first token" and about the same for top_p, epsilon_cutoff and eta_cutoff, 100 % for top_k 1 and the temperature 0.05.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/model.py" <<'PYTHON'
import json
import os
import sys

import numpy
import onnx
from onnx import TensorProto, helper, numpy_helper

folder, size = sys.argv[1], 41
table = numpy.tile(numpy.log(numpy.array([0.6] + [0.01] * 40, numpy.float32)), (size, 1))
integers = lambda name: helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"])
logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", size])
node = helper.make_node("Gather", ["table", "input_ids"], ["logits"], axis=0)
graph = helper.make_graph([node], "g", [integers("input_ids")], [logits], [numpy_helper.from_array(table, "table")])
os.makedirs(f"{folder}/onnx")
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), f"{folder}/onnx/model.onnx")
config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 0, "n_head": 1, "n_embd": 4, "vocab_size": size}
json.dump({**config, "eos_token_id": None, "bos_token_id": 0}, open(f"{folder}/config.json", "w"))
json.dump({}, open(f"{folder}/generation_config.json", "w"))
PYTHON
cat > "$folder/seen.mjs" <<'JS'
import { AutoModelForCausalLM, Tensor, env } from "@huggingface/transformers";

env.allowRemoteModels = false;
env.localModelPath = process.cwd();
const model = await AutoModelForCausalLM.from_pretrained("tiny", { dtype: "fp32", device: "cpu" });
const inputs = { input_ids: new Tensor("int64", [1n], [1, 1]), attention_mask: new Tensor("int64", [1n], [1, 1]) };
const seen = {};
const cases = { none: {}, top_p: { top_p: 0.5 }, epsilon_cutoff: { epsilon_cutoff: 0.1 }, eta_cutoff: { eta_cutoff: 0.5 }, top_k: { top_k: 1 }, temperature: { temperature: 0.05 } };
for (const [name, options] of Object.entries(cases)) {
  const tokens = await model.generate({ ...inputs, do_sample: true, max_new_tokens: 200, ...options });
  seen[name] = [...tokens.data].slice(1).filter((token) => token === 0n).length / 200;
  console.log(`${name}: ${seen[name] * 100} % of 200 are the first token`);
}
const spread = ["none", "top_p", "epsilon_cutoff", "eta_cutoff"].every((name) => seen[name] > 0.4 && seen[name] < 0.8);
process.exit(spread && seen.top_k === 1 && seen.temperature === 1 ? 0 : 1);
JS
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check onnx==1.23.2 numpy==2.4.6
venv/bin/python model.py tiny
npm install --silent --no-fund --no-audit --ignore-scripts @huggingface/transformers@4.3.2
node seen.mjs
