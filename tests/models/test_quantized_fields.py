"""Every field that the writers of quantised folders write: followed as their library does, or refused by name."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdkernels import models
from pdkernels.models.checkpoints import compressed, gptq
from tests.models.test_quantized_folder import rewrite
from tests.support.quantized_files import KINDS, LLAMA, write_folder

NAME = "model.layers.0.mlp.down_proj.weight"


@cache
def written(kind: str, path: Path) -> torch.Tensor:
    """Writes a folder once; one matrix's numbers."""
    return write_folder(path, {**LLAMA, "num_hidden_layers": 1}, KINDS[kind])[NAME].float()


def folder(base: Path, kind: str, config: dict[str, Any]) -> tuple[Path, torch.Tensor]:
    path = base / kind
    expected = written(kind, path)
    rewrite(path, config=json.loads(json.dumps(config)))
    return path, expected


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


def numbers(path: Path) -> torch.Tensor:
    return models.load(path, packed=False).layers[0].down.detach()


# ---- compressed-tensors: each field of its schema, in each place

VALUES: dict[str, list[Any]] = {
    "num_bits": [4, 8, 2, 16, None],
    "type": ["int", "INT", "float"],
    "symmetric": [True, False],
    "group_size": [None, -1, 32, 64, 16, 0, -2],
    "strategy": [None, "channel", "group", "tensor", "block", "token", "tensor_group", "attn_head", "CHANNEL"],
    "block_structure": [None, [64, 64], "2x4"],
    "dynamic": [True, False, "local"],
    "actorder": [None, False, True, "weight", "static", "group", "dynamic"],
    "scale_dtype": [None, "torch.bfloat16"],
    "zp_dtype": [None, "torch.int8"],
    "observer": [None, "mse"],
    "observer_kwargs": [{}, {"averaging_constant": 0.1}],
}
ARGUMENTS = [
    (kind, place, name, value)
    for kind, place in (("packed 4 of 32", "weights"), ("packed 4 of rows, fp32", "weights"), ("int8", "weights"), ("int8", "input_activations"))
    for name, values in VALUES.items()
    for value in values
]  # fmt: skip
OF_THE_WHOLE: list[tuple[str, Any]] = [
    ("quantization_status", "frozen"),
    ("global_compression_ratio", 1.5),
    ("version", "0.20.1"),
    ("ignore", None),
    ("ignore", ["lm_head", "re:.*gate$"]),
    ("moe_sparsity_config", None),
    ("moe_sparsity_config", {"method": "prune", "num_experts": 2}),
    ("kv_cache_scheme", {"num_bits": 8, "type": "float", "dynamic": False}),
    ("sparsity_config", {"format": "dense"}),
    ("sparsity_config", {"format": "sparse-24-bitmask"}),
    ("transform_config", {}),
    ("format", "dense"),
    ("format", "mixed-precision"),
    ("dequantize", True),
]


def readable(config: dict[str, Any]) -> bool:
    """Whether the library takes it."""
    from compressed_tensors.quantization import QuantizationConfig

    try:
        QuantizationConfig.model_validate(copy.deepcopy(config))
    except (ValueError, NotImplementedError):
        return False
    return True


def check(base: Path, kind: str, config: dict[str, Any], name: str, takes: bool) -> None:
    """Numbers are those that were written, where the library takes the fields; a refusal names the field."""
    path, expected = folder(base, kind, config)
    try:
        ours = numbers(path)
    except (ValueError, NotImplementedError) as error:
        # Or the tensors that the other value asks for.
        assert (
            name in str(error)
            or re.search(r"weight_(packed|scale|zero_point)", str(error))
            or (name == "strategy" and "group_size" in str(error))
        ), error
        return
    assert takes, f"{name} is ignored, which the library refuses"
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(("kind", "place", "name", "value"), ARGUMENTS)
def test_arguments_of_compressed_tensors(kind: str, place: str, name: str, value: Any, base: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compares with compressed-tensors")
    config = copy.deepcopy(KINDS[kind].config)
    config["config_groups"]["group_0"][place][name] = value
    check(base, kind, config, name, readable(config))


@pytest.mark.parametrize(("name", "value"), OF_THE_WHOLE)
def test_fields_of_compressed_tensors(name: str, value: Any, base: Path) -> None:
    check(base, "packed 4 of 32", {**KINDS["packed 4 of 32"].config, name: value}, name, takes=True)


def test_no_field_of_compressed_tensors_is_left_out() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compares with compressed-tensors")
    arguments = set(quantization.QuantizationArgs.model_fields)
    assert arguments <= {*compressed._ARGUMENTS, *compressed._MAKING_ARGUMENTS} and arguments == set(VALUES)
    unread = set(quantization.QuantizationConfig.model_fields) - {*compressed._FOLLOWED, *compressed._MAKING}
    assert unread == {"moe_sparsity_config"}  # refused where it is not null


# ---- GPTQ and AWQ

MADE_BY_GPTQMODEL = {
    # What GPTQModel 7.3.4 writes beside the usual fields; 5.0 to 5.6 write pack_impl too.
    "method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "lm_head": False, "pack_dtype": "int32", "pack_impl": "cpu",
    "meta": {
        "quantizer": ["gptqmodel:7.3.4"], "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05, "damp_auto_increment": 0.01,
        "static_groups": False, "true_sequential": True, "mse": 0.0, "gptaq": None, "act_group_aware": True, "fallback": {"strategy": "rtn", "threshold": "0.5%"},
        "gc_mode": "interval", "hessian": {"staging_dtype": "float32"},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gptq 4 of 32", "gptq 8 of 64", "gptq_v2 4 of 32", "awq 32"])
def test_what_gptqmodel_writes(kind: str, base: Path) -> None:
    config = {**KINDS[kind].config, **MADE_BY_GPTQMODEL, "method": KINDS[kind].config["quant_method"]}
    form = {"awq 32": "gemm", "gptq_v2 4 of 32": "gptq_v2"}.get(kind, "gptq")
    config |= {"format": form, "checkpoint_format": form}
    if kind == "awq 32":  # symmetric by default; its words of zeros are there all the same
        config |= {"version": form, "zero_point": False}
    path, expected = folder(base, kind, config)
    assert torch.equal(numbers(path), expected)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gptq 4 of 32", {"method": "qqq"}),
        ("awq 32", {"method": "gptq"}),
        ("gptq 4 of 32", {"rotation": "hadamard"}),
        ("gptq 4 of 32", {"krot": 8}),
        ("gptq 4 of 32", {"format": "gptq_p", "checkpoint_format": "gptq_p"}),
        ("gptq 4 of 32", {"format": "gptq_v2"}),
        ("awq 32", {"format": "gemv_fast", "version": "gemv_fast"}),
        ("awq 32", {"desc_act": True}),
        ("gptq 4 of 32", {"adapter": {"rank": 8}}),
        ("gptq 4 of 32", {"load_in_4bit": True}),
        ("gptq 4 of 32", {"bits": "4"}),
        ("gptq 4 of 32", {"sym": None, "group_size": None}),
    ],
)
def test_what_gptqmodel_may_write_besides(kind: str, changes: dict[str, Any], base: Path) -> None:
    path, _ = folder(base, kind, {**KINDS[kind].config, **changes})
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        models.load(path)
    assert any(f"quantization_config: {form}" in str(caught.value) for name in changes for form in (name, f"'{name}'"))


@pytest.mark.parametrize("kind", ["gptq 4 of 32", "awq 32"])
def test_what_transformers_writes(kind: str, base: Path) -> None:
    classes = pytest.importorskip("transformers.utils.quantization_config", reason="compares with transformers")
    options = {"bits": 4, "group_size": 32}
    made = classes.AwqConfig(**options) if kind == "awq 32" else classes.GPTQConfig(**options, sym=False)
    config = {name: getattr(value, "value", value) for name, value in made.to_dict().items()}
    assert set(config) <= {*gptq._MAKING, *gptq._FOLLOWED}
    path, expected = folder(base, kind, config)
    assert torch.equal(numbers(path), expected)


# ---- MXFP4, and where the field stands


@pytest.mark.parametrize("kind", ["gemma4_text", "qwen3_5_text"])
@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.filterwarnings("ignore")
def test_an_inner_description_is_not_ignored(name: str, kind: str, tmp_path: Path) -> None:
    from tests.models import test_config_fields

    outer = {"model_type": kind.removesuffix("_text"), "text_config": test_config_fields.base(kind)}
    outer["text_config"][name] = KINDS["awq 32"].config
    (tmp_path / "config.json").write_text(json.dumps(outer))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(NotImplementedError, match=rf"text_config: {name} must be absent: the outer config says"):
        models.load(tmp_path)


def test_a_second_description_beside_mxfp4(tmp_path: Path) -> None:
    fields = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}, "compression_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"must describe quantised matrices once"):
        models.load(tmp_path)
