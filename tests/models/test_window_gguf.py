"""OLMo 2, OLMo 3 and gpt-oss from GGUF files as llama.cpp's converter writes them: logits and tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdkernels import models
from pdkernels.decoding import generate

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
pytest.importorskip("transformers", reason="builds models with transformers", minversion="5.20")
from tests.models.test_window_families import KINDS, NEW, TOKENS, YARN, a_model, theirs  # noqa: E402
from tests.support import gguf_files as files  # noqa: E402

EVERY = {"olmo2": 4, "gpt-oss": 2}
SLIDES = {arch: [(layer + 1) % every != 0 for layer in range(4)] for arch, every in EVERY.items()}
RULE = {**YARN, "attention_factor": None}


def built(family: str, **more: Any) -> Any:
    arch = "gpt-oss" if family == "gpt_oss" else "olmo2"
    kinds = [KINDS[slides] for slides in SLIDES[arch]]
    # transformers writes into a rule.
    layered = {} if family == "olmo2" else {"layer_types": kinds, "rope_scaling": {**RULE}}
    return a_model(family, num_hidden_layers=4, **layered, **more)


def written(path: Path, family: str, kind: str = "F32", **changes: Any) -> Any:
    """The file, its experts as `kind`, and the model of transformers with the same numbers; a key that is None is left
    out."""
    model, arch = built(family), "gpt-oss" if family == "gpt_oss" else "olmo2"
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    known: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": config.hidden_size,
        "block_count": 4,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": {"olmo2": 10000.0, "olmo3": 500000.0, "gpt_oss": 150000.0}[family],
    }
    if family != "olmo2":
        known |= {"attention.sliding_window": 7, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
        known["rope.scaling.original_context_length"] = 16
    if family == "gpt_oss":
        known |= {"attention.key_length": 16, "attention.value_length": 16, "expert_feed_forward_length": 32}
        known |= {"expert_count": 6, "expert_used_count": 3}
    for name, value in {**known, **changes}.items():
        if value is not None:
            files.add(writer, f"{arch}.{name}", value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper().replace("-", "_")), 4)
    for name, tensor in model.state_dict().items():
        if ".experts." not in name:
            suffixed = f"{name}.weight" if name.endswith("sinks") else name
            writer.add_tensor(names.get_name(suffixed, try_suffixes=(".weight", ".bias")), tensor.numpy())
            continue
        block = f"blk.{name.split('.')[2]}.ffn"
        values = tensor if name.endswith("bias") else tensor.transpose(1, 2)
        gate_up = "gate_up" in name
        halves = {"gate": values[:, ::2], "up": values[:, 1::2]} if gate_up else {"down": values}
        for half, own in halves.items():
            ending = "bias" if name.endswith("bias") else "weight"
            as_kind = gguf.GGMLQuantizationType["F32" if ending == "bias" else kind]
            stored = gguf.quants.quantize(np.ascontiguousarray(own.numpy()), as_kind)
            writer.add_tensor(f"{block}_{half}_exps.{ending}", stored, raw_dtype=as_kind)
            own.copy_(torch.from_numpy(np.array(gguf.quants.dequantize(stored, as_kind))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize(("family", "kind"), [("olmo2", "F32"), ("olmo3", "F32"), ("gpt_oss", "F32"), ("gpt_oss", "MXFP4")])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_a_file(family: str, kind: str, tmp_path: Path) -> None:
    model = written(tmp_path / "m.gguf", family, kind)
    own = models.load(tmp_path / "m.gguf", packed=False)
    torch.testing.assert_close(own(torch.tensor([TOKENS])), model(torch.tensor([TOKENS])).logits, rtol=1e-4, atol=1e-4)
    for method, options in {"autoregressive": {}, "jacobi": {"block_size": 9}}.items():
        found = generate(own, TOKENS, method, max_new_tokens=NEW, end_tokens=(), **options).tokens
        assert found.tolist() == theirs(model)
    packed = models.load(tmp_path / "m.gguf")
    for mine, other in zip(packed.layers, own.layers, strict=True):
        if kind == "MXFP4":
            assert torch.equal(mine.experts_gate_up.dequantize(), other.experts_gate_up)
            assert torch.equal(mine.experts_down.dequantize(), other.experts_down)
    if kind == "MXFP4":
        with pytest.raises(NotImplementedError, match="to stay packed, got 'F32'"):
            models.load(tmp_path / "m.gguf", packed=True)


@pytest.mark.filterwarnings("ignore")
def test_a_dense_matrix_in_mxfp4(tmp_path: Path) -> None:
    """Its rows in the order of our heads."""
    kind, writer = gguf.GGMLQuantizationType.MXFP4, files.write_gguf
    plain = {**files.LLAMA, "intermediate_size": 64}
    held = writer(tmp_path / "m.gguf", plain, kind="MXFP4")
    own = models.load(tmp_path / "m.gguf")
    numbers = models.load(tmp_path / "m.gguf", packed=False)
    for mine, other in zip(own.layers, numbers.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            assert torch.equal(getattr(mine, name).dequantize(), getattr(other, name)), (name, kind)
    assert torch.equal(own.layers[1].down.dequantize(), held["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.filterwarnings("ignore")
def test_the_layers_that_a_file_lists(tmp_path: Path) -> None:
    """llama.cpp reads a period from a file, and takes its own where that has a list."""
    written(tmp_path / "m.gguf", "olmo3", **{"attention.sliding_window_pattern": SLIDES["olmo2"]})
    assert [window is None for window in models.load(tmp_path / "m.gguf").config.windows] == [False] * 3 + [True]
    written(tmp_path / "m.gguf", "gpt_oss", **{"attention.sliding_window_pattern": 3})
    found = models.load(tmp_path / "m.gguf").config.windows
    assert [window is None for window in found] == [False, False, True, False]


@pytest.mark.parametrize(
    ("family", "changes", "error", "text"),
    [
        ("olmo3", {"attention.sliding_window_pattern": [True] * 4}, NotImplementedError, "give a window to all layers but every 4th"),
        ("olmo3", {"rope.freq_base_swa": 1e4}, NotImplementedError, r"freq_base_swa must be rope.freq_base \(500000.0\)"),
        ("gpt_oss", {"attention.sliding_window": None}, ValueError, "attention.sliding_window must be .* got 0"),
        ("gpt_oss", {"attention.sliding_window_pattern": 0}, ValueError, "sliding_window_pattern must be .* got 0"),
        ("gpt_oss", {"expert_count": None}, ValueError, "must hold|expert_count"),
        ("gpt_oss", {"expert_gating_func": 2}, NotImplementedError, "expert_gating_func must be 1"),
        ("gpt_oss", {"rope.scaling.type": "none"}, NotImplementedError, "scaling.factor must be 1 with rope.scaling.type none"),
        ("olmo3", {"block_count": 2**20}, ValueError, "block_count must be at most"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused(
    family: str, changes: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    written(tmp_path / "m.gguf", family, **changes)
    with pytest.raises(error, match=text):
        models.load(tmp_path / "m.gguf")
