"""GGUF files of diffusion models: the folder's logits, and files that are written as converters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pdkernels as pd
from pdkernels import models
from pdkernels.decoding import available, generate, supports
from pdkernels.ops.quantized_weight import QuantizedWeight

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
from tests.support.gguf_diffusion import FIELDS, write_both  # noqa: E402

TOKENS = torch.arange(20)[None] * 7 % 44
METHODS = {"llada": "llada", "dream": "dream", "llada-moe": "llada", "llada2": "fast_dllm_v2"}


@pytest.mark.parametrize("kind", FIELDS)
def test_a_file_is_the_folder(kind: str, tmp_path: Path) -> None:
    path = write_both(tmp_path, kind)
    own, folder = models.load(path), models.load(tmp_path)
    assert own.config == folder.config and own.state_dict().keys() == folder.state_dict().keys()
    assert (own.mask_token, own.end_tokens) == (folder.mask_token, folder.end_tokens) == (44, (45,))
    assert torch.equal(own(TOKENS), folder(TOKENS))
    assert [name for name in available() if supports(name, own)] == [
        name for name in available() if supports(name, folder)
    ]
    found = [generate(model, TOKENS[0].tolist(), METHODS[kind], max_new_tokens=12).tokens for model in (own, folder)]
    assert torch.equal(*found) and 44 not in found[0]


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("kind", FIELDS)
def test_a_file_that_stays_packed(kind: str, format: str, tmp_path: Path) -> None:
    path = write_both(tmp_path, kind, format)
    packed, numbers = models.load(path), models.load(path, packed=False)
    matrices = {name: own for name, own in packed.named_modules() if isinstance(own, QuantizedWeight)}
    inside = {"layers.1.experts_gate_up", "layers.1.experts_down"} if "num_experts" in FIELDS[kind] else set()
    assert {"embedding", "head", "layers.0.qkv", "layers.1.output", *inside} <= matrices.keys()
    for name, matrix in matrices.items():
        assert torch.equal(matrix.dequantize(), numbers.get_parameter(name)), name
    left = dict(packed.named_parameters())
    assert all(torch.equal(values, numbers.get_parameter(name)) for name, values in left.items())


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("llada", {"llada.attention.causal": True}, r"m.gguf: llada.attention.causal must be false, got True"),
        ("llada-moe", {"diffusion.shift_logits": None}, "diffusion.shift_logits must be false for llada-moe, got True"),
        ("llada-moe", {"llada-moe.expert_weights_norm": True}, "expert_weights_norm must be false for llada-moe"),
        ("llada2", {"llada2.expert_weights_norm": False}, "llada2.expert_weights_norm must be True, got False"),
        ("llada2", {"llada2.expert_gating_func": 1}, "llada2.expert_gating_func must be 2, got 1"),
        ("llada2", {"llada2.rope.scaling.type": "yarn"}, "llada2.rope.scaling.type must be none, got 'yarn'"),
    ],
)
def test_what_is_refused(kind: str, changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=text):
        models.load(write_both(tmp_path, kind, **changes))


def test_factors_of_frequencies_are_refused_where_nothing_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_header = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.full(4, 2, np.float32))
        write_header(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    with pytest.raises(ValueError, match="rope_freqs.weight"):
        models.load(write_both(tmp_path, "llada2"))


def test_what_a_row_predicts_is_what_the_file_says(tmp_path: Path) -> None:
    """llama.cpp shifts logits unless a file says that it must not."""
    cases: list[tuple[str, Any]] = [("dream", None), ("dream", False), ("llada", None), ("llada", True)]
    own = [models.load(write_both(tmp_path, kind, **{"diffusion.shift_logits": said})) for kind, said in cases]
    assert [model.config.predicts for model in own] == ["next", "own", "next", "next"]


def test_a_file_without_a_mask_token(tmp_path: Path) -> None:
    """Those of LLaDA-MoE and LLaDA2 are always the same, if the vocabulary reaches that far."""
    for kind in FIELDS:
        assert models.load(write_both(tmp_path, kind, **{"tokenizer.ggml.mask_token_id": None})).mask_token is None
    assert models.load(write_both(tmp_path, "llada", **{"llada.attention.causal": None})).config.predicts == "own"


@pytest.mark.parametrize("format", ["F32", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("kind", FIELDS)
def test_a_saved_file_has_the_bytes_of_the_converter(kind: str, format: str, tmp_path: Path) -> None:
    model = models.load(write_both(tmp_path, kind, format))
    models.save_gguf(model, tmp_path / "own.gguf")
    theirs, own = (gguf.GGUFReader(tmp_path / name) for name in ("m.gguf", "own.gguf"))
    expected, found = ({tensor.name: tensor for tensor in file.tensors} for file in (theirs, own))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].tensor_type == tensor.tensor_type and found[name].shape.tolist() == tensor.shape.tolist()
        assert (found[name].data == tensor.data).all(), name
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert own.fields[name].contents() == field.contents(), name
    assert torch.equal(models.load(tmp_path / "own.gguf")(TOKENS), model(TOKENS))
    assert {path.name for path in tmp_path.glob("*.gguf")} == {"m.gguf", "own.gguf"}


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
@pytest.mark.parametrize("kind", ["llada", "llada2"])
def test_a_quantised_model_is_saved(kind: str, format: str, tmp_path: Path) -> None:
    """One format for q, k and v in one matrix of ours, which are three of the file."""
    write_both(tmp_path, kind)
    model = pd.quantize(models.load(tmp_path), format, skip="embedding")
    models.save_gguf(model, tmp_path / "own.gguf")
    own = models.load(tmp_path / "own.gguf", dtype=torch.float32)
    assert torch.equal(own(TOKENS), model(TOKENS))


def test_what_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(NotImplementedError, match="embedding must be packed in one of the formats q8_0, .* got int4"):
        models.save_gguf(pd.quantize(models.load("tiny-masked"), "int4", group=32), path)
    with pytest.raises(NotImplementedError, match="model.config must be one of LLaDA, Dream, LLaDA-MoE or LLaDA2"):
        models.save_gguf(models.load("tiny-code"), path)
    with pytest.raises(TypeError, match="model must be a Transformer, got str"):
        models.save_gguf("tiny-masked", path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_configuration_that_no_file_holds_is_not_saved(tmp_path: Path) -> None:
    """Whatever the file would say otherwise."""
    config = models.TransformerConfig(
        vocab_size=40, hidden_size=32, layers=1, heads=2, kv_heads=2, head_dim=16, intermediate_size=32,
        attention="bidirectional", predicts="own", rope_scaling=models.LinearScaling(2.0),
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="model.config.rope_scaling must be None, as in the file, got Linear"):
        models.save_gguf(models.Transformer(config), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())
