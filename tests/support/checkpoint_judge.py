"""The contents of a checkpoint's folder, read and computed without the library: the oracle for what was loaded from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from pdkernels import models
from reference import masked_model, recurrent_depth
from reference.recurrent_sampling import forward, position_states
from tests.support.checkpoints import plain_logits

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def parse(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    return header, content[8 + size :]


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes().decode())


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder that loads, read without the library."""
    index = folder / INDEX
    names = (
        set(read_json(index)["weight_map"].values())
        if index.exists()
        else {path.name for path in folder.glob("*.safetensors")}
    )
    state = {}
    for name in names:
        header, data = parse((folder / name).read_bytes())
        for tensor, known in header.items():
            first, last = known["data_offsets"]
            flat = torch.frombuffer(bytearray(data[first:last]) or bytearray(8), dtype=DTYPES[known["dtype"]])
            state[tensor] = flat[: math.prod(known["shape"])].view(known["shape"])
    return state


def expected(fields: dict[str, Any], state: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Logits of the plain models."""
    if fields.get("model_type") == "huginn_raven" or fields.get("architectures") == ["RavenForCausalLM"]:
        state.setdefault("transformer.wte.weight", state.get("lm_head.weight", torch.zeros(0)))
        plain = recurrent_depth.RecurrentDepthReference(
            state, rope_theta=fields.get("rope_base", 50000.0), norm_eps=float(fields.get("norm_eps", 1e-6))
        )
        return forward(
            plain, tokens, plain.new_past(), fields.get("mean_recurrence", 32), position_states(fields["n_embd"])
        )
    if fields["model_type"] == "llada":
        if fields.get("weight_tying", True):
            state.pop("model.transformer.ff_out.weight", None)
        plain = masked_model.MaskedTransformerReference(
            state,
            heads=fields["n_heads"],
            names="llada",
            rope_theta=fields.get("rope_theta", 10000.0),
            norm_eps=float(fields.get("rms_norm_eps", 1e-5)),
        )
        length = len(tokens)
        return plain(torch.tensor([tokens]), torch.arange(length)[None], torch.ones(length, length, dtype=torch.bool))[
            0
        ]
    if fields.get("tie_word_embeddings"):
        state.setdefault("model.embed_tokens.weight", state.get("lm_head.weight", torch.zeros(0)))
    if fields["model_type"] == "ministral3":  # what its class sets
        yarn = dict(type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, mscale=1.0)
        yarn |= dict(mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
        fields = {"rms_norm_eps": 1e-5, "rope_parameters": yarn, **fields}
    rope = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    rope = {name: value for name, value in rope.items() if value is not None}
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings", 2048))
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope}
    whole = {
        "num_key_value_heads": fields["num_attention_heads"],
        **fields,
        "rope_parameters": rope,
        "rope_scaling": None,
    }
    everything = [[True] * len(tokens)] * len(tokens) if fields["model_type"] == "Dream" else None
    return plain_logits(state, whole, tokens, visible=everything)


def check_right(model: Any, folder: Path) -> None:
    """What was loaded is what is on disk."""
    fields = {name: value for name, value in read_json(folder / "config.json").items() if value is not None}
    dtype = DTYPES[
        {"float64": "F64", "bfloat16": "BF16", "float16": "F16"}.get(
            fields.get("dtype", fields.get("torch_dtype")), "F32"
        )
    ]
    assert model.dtype == dtype, "another dtype"
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    ends = generation.get("eos_token_id", fields.get("eos_token_id", []))  # null: none, as in transformers
    ends = [] if ends is None else ends
    assert set(model.end_tokens) == set(ends if isinstance(ends, list) else [ends]), "other end tokens"
    if isinstance(model, models.Transformer) and "mask_token_id" in fields:
        assert model.mask_token == fields["mask_token_id"], "another mask token"
    state = {name: x.to(dtype).double() for name, x in on_disk(folder).items()}
    tokens = [3, 1, 4, 1, 5][: model.config.max_positions]
    logits = model.double()(torch.tensor([tokens]))[0]
    assert torch.allclose(logits, expected(fields, state, tokens), rtol=1e-8, atol=1e-8, equal_nan=True), "other logits"
    if model.tokenizer is not None:
        try:
            assert len(model.tokenizer.encode("a b a")) < 100
        except ValueError as error:
            assert str(error).startswith("pdkernels.models.load: tokenizer.json must encode the text")
