"""Layers for multi-token prediction in folders of models: tensor by tensor and row by row against those of transformers, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pdkernels as pd
from pdkernels.models import Hybrid, MtpHead, Transformer, load_drafter, save_drafter
from pdkernels.models.checkpoints.drafters import mtp_folder
from tests.support.tri_mode import small_transformer

transformers = pytest.importorskip("transformers", reason="compares with its layers", minversion="5.15")
from tests.support.transformers_names import CACHE  # noqa: E402

SIZES: dict[str, Any] = {"vocab_size": 23, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 48, "head_dim": 16, "initializer_range": 0.3, "tie_word_embeddings": False}
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
RECURRENT |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
KINDS = ("mimo", "qwen3_5_text")
# Our published names by those of transformers' layer.
NAMES = {
    "mimo": {
        "enorm.": "model.mtp_layers.0.token_layernorm.",
        "hnorm.": "model.mtp_layers.0.hidden_layernorm.",
        "eh_proj.": "model.mtp_layers.0.input_proj.",
        "post_norm.": "model.mtp_layers.0.final_layernorm.",
        "mtp_block.": "model.mtp_layers.0.",
    },
    "qwen3_5_text": {
        "enorm.": "mtp.pre_fc_norm_embedding.",
        "hnorm.": "mtp.pre_fc_norm_hidden.",
        "eh_proj.": "mtp.fc.",
        "post_norm.": "mtp.norm.",
        "mtp_block.": "mtp.layers.0.",
    },
}


class Published:
    """A model of transformers with a next-token layer of its own code, both in fp64."""

    def __init__(self, kind: str, seed: int = 0, **sizes: Any) -> None:
        from transformers.modeling_layers import MtpLayer

        torch.manual_seed(seed)
        self.kind = kind
        if kind == "mimo":  # the released class is Qwen2 with such a layer, which reads the hidden state first
            from transformers.models.qwen2 import modeling_qwen2 as code

            config = transformers.Qwen2Config(**{**SIZES, **sizes}, num_hidden_layers=2)
            config.mtp_hidden_states_first = True
            made = transformers.Qwen2ForCausalLM(config)
            layer, norm = code.Qwen2DecoderLayer, code.Qwen2RMSNorm
            count = {"num_nextn_predict_layers": 1, "attention_bias": True}
        else:
            from transformers.models.qwen3_5 import modeling_qwen3_5 as hybrid_code

            config = transformers.Qwen3_5TextConfig(**{**SIZES, **RECURRENT, **sizes}, num_hidden_layers=3)
            made = transformers.Qwen3_5ForCausalLM(config)
            layer, norm = hybrid_code.Qwen3_5DecoderLayer, hybrid_code.Qwen3_5RMSNorm
            count = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
        self.model = made.double().eval().requires_grad_(False)
        at = 0 if kind == "mimo" else RECURRENT["layer_types"].index("full_attention")
        self.layer = MtpLayer(config, layer, norm, at).double().eval().requires_grad_(False)
        for parameter in (*self.model.parameters(), *self.layer.parameters()):
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (parameter.dim() == 1))
        self.config = {**config.to_dict(), "model_type": kind, **count}

    def save(self, folder: Path, **changes: Any) -> Path:
        folder.mkdir(exist_ok=True)
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        save_file({**state, **self.tensors()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**self.config, "dtype": "float64", **changes}))
        return folder

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the layer, by their published names."""
        found = {}
        for name, tensor in self.layer.state_dict().items():
            ours = next(inner for inner in NAMES[self.kind] if name.startswith(inner))
            found[name.replace(ours, NAMES[self.kind][ours], 1)] = tensor.clone()
        return found

    def features(self, text: torch.Tensor) -> torch.Tensor:
        """``(n, hidden_size)``."""
        found: torch.Tensor = self.model.model(text[None]).last_hidden_state[0]
        return found

    def rows(self, tokens: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        """The layer's rows over a whole text, without a cache."""
        count = len(tokens)
        embedded = self.model.get_input_embeddings()(tokens[None])
        places = torch.arange(count)[None]
        # Positions count from one, as transformers' do: attention depends on their differences alone.
        rotation = self.model.model.rotary_emb(embedded, places + 1)
        mask = torch.zeros(count, count, dtype=embedded.dtype).masked_fill(
            torch.ones(count, count).triu(1).bool(), -torch.inf
        )[None, None]
        options = {"attention_mask": mask, "position_ids": places + 1, CACHE: None}
        found: torch.Tensor = self.layer(embedded, read[None], rotation, **options)[0]
        return found

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor(kind: str, tmp_path: Path) -> None:
    published = Published(kind)
    folder = published.save(tmp_path / "model")
    for dtype in (torch.float64, torch.bfloat16):
        model: Any = pd.models.load(folder, dtype=dtype, drafter=folder)
        head = model.drafters["mtp"]
        assert type(model) is (Transformer if kind == "mimo" else Hybrid) and isinstance(head, MtpHead)
        parameters, left = dict(head.named_parameters()), published.tensors()
        for name, parts in mtp_folder.layout(head.config).parts():
            theirs = torch.cat([left.pop(part) for part in parts])
            assert torch.equal(parameters.pop(name), theirs.to(dtype)), name
        assert not left and list(parameters) == ["target_norm"] and torch.equal(head.target_norm, model.norm)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_every_depth(kind: str, tmp_path: Path) -> None:
    published = Published(kind)
    folder = published.save(tmp_path / "model")
    model: Any = pd.models.load(folder)
    head: Any = load_drafter(folder, model)
    text = torch.randint(23, (12,))
    first = 7
    read = published.features(text[:first])
    cache = head.new_cache(1, 16)
    features = head.fused(model.tapped(text[None, :first], head.config.taps).features)
    torch.testing.assert_close(features[0], read, rtol=1e-4, atol=1e-4)  # transformers rotates and norms in fp32
    hidden = head(model.embed(text[None, 1 : first + 1]), features, cache=cache)
    cache.commit_(torch.tensor([first]))
    for count in range(first, 11):
        theirs = published.rows(text[1 : count + 1], read)
        torch.testing.assert_close(hidden[0], theirs[-hidden.shape[1] :], rtol=1e-4, atol=1e-4)
        ours = head.logits(hidden, model.head)
        torch.testing.assert_close(ours[0, -1], published.head(theirs[-1]), rtol=1e-4, atol=1e-4)
        read = torch.cat([read, theirs[-1:]])  # its own row takes the place of the target's
        hidden = head(model.embed(text[None, count + 1 : count + 2]), hidden[:, -1:], cache=cache)
        cache.commit_(torch.tensor([1]))


def test_a_model_for_images(tmp_path: Path) -> None:
    published = Published("qwen3_5_text")
    folder = published.save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": config, "dtype": "float64", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole))
    state = load_file(folder / "model.safetensors")
    state = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state.items()}
    save_file({**state, "model.visual.patch.weight": torch.zeros(2)}, folder / "model.safetensors")
    model: Any = pd.models.load(folder, drafter=folder)
    assert torch.equal(model.drafters["mtp"].fc, published.layer.eh_proj.weight)


def test_a_target_whose_norms_hold_one_more(tmp_path: Path) -> None:
    """As a GGUF file of Qwen3.5 has them."""
    folder = Published("qwen3_5_text").save(tmp_path / "model")
    model: Any = pd.models.load(folder)
    head: Any = load_drafter(folder, model)
    expected = head.fused(torch.ones(1, 1, 1, 32, dtype=torch.float64))
    model.config = replace(model.config, centred_norms=False)
    model.norm += 1
    head = load_drafter(folder, model)
    torch.testing.assert_close(head.fused(torch.ones(1, 1, 1, 32, dtype=torch.float64)), expected)


REFUSED: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "another architecture": ("mimo", {"model_type": "glm4_moe"}, NotImplementedError, "be one of mimo, qwen3_5, "),
    "two layers": ("mimo", {"num_nextn_predict_layers": 2}, NotImplementedError, "predict_layers must be 1, got 2"),
    "no layer": ("qwen3_5_text", {"mtp_num_hidden_layers": 0}, NotImplementedError, "hidden_layers must be 1, got 0"),
    "its own embedding": (
        "qwen3_5_text",
        {"mtp_use_dedicated_embeddings": True},
        NotImplementedError,
        "mtp_use_dedicated_embeddings must be false",
    ),
    "quantised": (
        "mimo",
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        NotImplementedError,
        "quantization_config must be absent, for layers that draft",
    ),
    "another model": (
        "mimo",
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
        ValueError,
        "drafter must be for 2 layers, the target's, got 3",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_differs_is_named(what: str, tmp_path: Path) -> None:
    kind, changes, error, words = REFUSED[what]
    published = Published(kind)
    model = pd.models.load(published.save(tmp_path / "model"))
    with pytest.raises(error, match=words):
        load_drafter(published.save(tmp_path / "other", **changes), model)


def test_missing_tensors_and_other_targets(tmp_path: Path) -> None:
    published = Published("mimo")
    folder = published.save(tmp_path / "model")
    model = pd.models.load(folder)
    with pytest.raises(ValueError, match="drafter must be for a hidden size of 16, the target's, got 32"):
        load_drafter(folder, small_transformer(0))
    bare = pd.models.from_callable(lambda tokens: torch.zeros(*tokens.shape, 23), vocab_size=23)
    with pytest.raises(TypeError, match="target must have a last `norm` and an embedding, got"):
        load_drafter(folder, bare)
    with pytest.raises(TypeError, match="head must be an EagleHead or a DFlashHead, got MtpHead"):
        save_drafter(load_drafter(folder, model), tmp_path / "head")  # type: ignore[arg-type]
    state = load_file(folder / "model.safetensors")
    del state["model.mtp_layers.0.input_proj.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match="hold every tensor .*mtp_layers.0.input_proj.weight"):
        load_drafter(folder, model)
