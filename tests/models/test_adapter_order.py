"""Adapters of models whose checkpoints have some tensors in another order than ours: the others are changed as by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdkernels import models

peft = pytest.importorskip("peft", reason="compares with peft where it is installed")
transformers = pytest.importorskip("transformers", reason="builds models with transformers", minversion="5.20")
from tests.models import test_hybrid as hybrid  # noqa: E402
from tests.models import test_window_families as windows  # noqa: E402

TOKENS = torch.tensor([windows.TOKENS])


def adapted(model: Any, folder: Path, **config: Any) -> Any:
    """PEFT's model, with an adapter as if trained a little."""
    torch.manual_seed(1)
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, **config)).eval()
    for name, parameter in found.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    found.save_pretrained(folder)
    return found


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS, use_cache=False).logits
        return logits


def pair(folder: Path, module: str, outputs: int, width: int) -> Path:
    """A folder with the pair of one module."""
    halves = {"A": torch.randn(2, width), "B": torch.randn(outputs, 2) * 0.1}
    folder.mkdir()
    save_file({f"base_model.model.{module}.lora_{half}.weight": numbers for half, numbers in halves.items()}, folder / "adapter_model.safetensors")  # fmt: skip
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [module.rpartition(".")[2]]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("stored", ["numbers", "mxfp4"])
@pytest.mark.filterwarnings("ignore")
def test_attention_of_gpt_oss(stored: str, tmp_path: Path) -> None:
    """Merged and of requests; experts have another order."""
    if stored == "mxfp4":
        model = windows.in_mxfp4(tmp_path / "base")
    else:
        model = windows.a_model("gpt_oss")
        model.save_pretrained(tmp_path / "base")
    theirs = adapted(model, tmp_path / "lora", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    expected = logits_of(theirs)
    own: Any = models.load(tmp_path / "base", dtype=torch.float32, adapter=tmp_path / "lora")
    torch.testing.assert_close(own(TOKENS), expected, rtol=1e-4, atol=1e-4)
    plain: Any = models.load(tmp_path / "base", dtype=torch.float32, packed=False if stored == "mxfp4" else None)
    models.load_adapter(plain, "a", tmp_path / "lora")
    cache = plain.new_cache(1, 64)
    cache.adapt_([plain.adapters["a"]])
    with torch.inference_mode():
        torch.testing.assert_close(plain(TOKENS, cache=cache), expected, rtol=1e-4, atol=1e-4)
    assert (plain(TOKENS) - expected).abs().max() > 1e-2
    experts = {"base_model.model.model.layers.1.mlp.experts.gate_up_proj_bias": torch.zeros(6, 64)}
    save_file(experts, tmp_path / "lora" / "adapter_model.safetensors")
    for load in (lambda: models.load(tmp_path / "base", adapter=tmp_path / "lora"), lambda: models.load_adapter(plain, "b", tmp_path / "lora")):  # fmt: skip
        with pytest.raises(NotImplementedError, match="the same order here, got one that changes .*gate_up_proj_bias"):
            load()


@pytest.mark.parametrize("values", [2, 4])
@pytest.mark.filterwarnings("ignore")
def test_gguf_files_of_qwen(values: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta rules with more values than keys have another order there; norms are stored plus 1 in any file."""
    monkeypatch.setitem(hybrid.QWEN, "linear_num_value_heads", values)
    model = hybrid.build("qwen3_5_text")
    fields = {"ssm.time_step_rank": values, "ssm.inner_size": 32 * values}
    plain = hybrid.write

    from tests.support import gguf_files as files

    add = files.add
    monkeypatch.setattr(files, "add", lambda writer, name, value: add(writer, name, fields.get(name.removeprefix("qwen35."), value)))  # fmt: skip
    plain(tmp_path / "m.gguf", model, "F32", hybrid.QWEN, "qwen35")
    everywhere = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    delta = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
    saved = ["input_layernorm", "post_attention_layernorm", "q_norm", "model.norm"]
    targets = everywhere if values == 4 else everywhere + delta
    theirs = adapted(model, tmp_path / "lora", target_modules=targets, modules_to_save=saved)
    own = models.load(tmp_path / "m.gguf", dtype=torch.float32, adapter=tmp_path / "lora")
    assert hybrid.close(own(TOKENS), logits_of(theirs), 5e-4)
    assert not hybrid.close(models.load(tmp_path / "m.gguf")(TOKENS), logits_of(theirs), 5e-2)
    if values == 4:
        for module, rows, width in (("in_proj_z", 128, 32), ("out_proj", 32, 128)):
            folder = pair(tmp_path / module, f"model.layers.0.linear_attn.{module}", rows, width)
            with pytest.raises(NotImplementedError, match=f"the same order here, got one that changes .*{module}.weight"):  # fmt: skip
                models.load(tmp_path / "m.gguf", adapter=folder)


def test_what_keeps_its_order() -> None:
    """Of LLaDA2 all but queries and keys, of gpt-oss all but experts."""
    from pdkernels.models.checkpoints import hf, llada2
    from tests.models.test_llada2 import FIELDS

    layout = llada2.layout(llada2.from_llada2_config(FIELDS))
    others = {name.rpartition(".")[2] for name, sources in layout.parts() if not layout.keeps(name, sources)}
    assert others == {"qkv", "q_norm", "k_norm"}
    config = hf.from_hf_config(json.loads(windows.a_model("gpt_oss").config.to_json_string()))
    layout = hf.layout(config, "gpt_oss")
    others = {name.rpartition(".")[2] for name, sources in layout.parts() if not layout.keeps(name, sources)}
    assert others == {"experts_gate_up", "experts_gate_up_bias", "experts_down"}
