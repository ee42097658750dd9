"""Which matrices of a quantised checkpoint are quantised, and what AutoRound adds to the usual fields: as the libraries decide it."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pdkernels as pd
from pdkernels import models
from pdkernels.models.checkpoints import compressed, gptq
from pdkernels.models.files.fields import Fields
from tests.models.test_quantized_folder import rewrite
from tests.support.quantized_files import KINDS, LLAMA, write_folder

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (1, 11)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.gate", "mlp.down_proj")
]


def groups(*targets: list[str], ignore: tuple[str, ...] = ()) -> compressed.Scheme:
    """Group number i has scales of 32 * (i + 1) columns."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group"}
    made = {
        f"group_{index}": {"targets": names, "weights": {**weights, "group_size": 32 * (index + 1)}}
        for index, names in enumerate(targets)
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": made}
    return compressed.read(Fields({**config, "ignore": [*ignore]}))


def group_of(scheme: compressed.Scheme, module: str) -> int | None:
    form = scheme.format_of(module)
    return None if form is None else form.group // 32 - 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("targets", "group"),
    [
        ((["Linear"], ["re:.*q_proj"]), 1),
        ((["re:.*q_proj"], ["model.layers.1.self_attn.q_proj"]), 1),
        ((["re:model.*"], ["re:.*q_proj"]), 1),  # patterns by their letters, not by their groups
        ((["re:.*self_attn.*"], ["re:.*q_proj"]), 1),
        ((["Linear"], ["Linear"]), 1),  # of one target in two groups the last holds
        ((["Module"], ["Linear"]), 1),
        ((["Module"], ["re:lm_head"]), 0),
    ],
)
def test_the_order_of_targets(targets: tuple[list[str], ...], group: int) -> None:
    assert group_of(groups(*targets), "model.layers.1.self_attn.q_proj") == group


ENTRIES = [
    *MODULES[:3],
    "Linear",
    "Module",
    "re:.*proj$",
    "re:model.*",
    "re:.*mlp",
    "re:.*layers\\.1\\.",
    "re:.*q_proj",
]


def test_targets_are_those_of_the_library() -> None:
    library = pytest.importorskip("compressed_tensors.utils.match", reason="compares with compressed-tensors")
    chance, linear = random.Random(0), torch.nn.Linear(1, 1)
    for _ in range(300):
        chosen = [chance.sample(ENTRIES, chance.randint(1, 3)) for _ in range(chance.randint(1, 3))]
        ignore = tuple(chance.sample(ENTRIES, chance.choice([0, 0, 1])))
        scheme = groups(*chosen, ignore=ignore)
        owner = {target: index for index, names in enumerate(chosen) for target in names}
        for module in MODULES:
            matched = library.match_targets(module, linear, owner)
            left = library.is_match(module, linear, ignore)
            assert group_of(scheme, module) == (owner[matched[0]] if matched and not left else None), (chosen, ignore)


# ---- modules_to_not_convert


def by_parts(module: str, names: list[str]) -> bool:
    """AutoAWQ, vLLM, transformers 4."""
    return any(name in module for name in names)


def by_patterns(module: str, names: list[str]) -> bool:
    """transformers 5.23."""
    return any(re.match(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(name) for name in names)


NAMES = [["gate"], ["mlp.gate"], ["model.layers.1"], ["model.layers.1."], ["model.layers.*.mlp"], ["q_proj", "down"], ["attn.o"], []]  # fmt: skip


@pytest.mark.parametrize("names", NAMES)
def test_excluded_modules(names: list[str]) -> None:
    """Numbers if all programs say so, either if they differ, quantised otherwise."""
    fields = {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": names}
    scheme = gptq.read(Fields(fields), "awq")
    for module in MODULES:
        rules = by_parts(module, names), by_patterns(module, names)
        assert (scheme.format_of(module) is None) == all(rules), (module, names)
        assert scheme.may_hold_numbers(module) >= any(rules)
        assert not scheme.may_hold_numbers(module) or by_parts(module, names) or re.match(names[0], module)


def test_the_rules_are_those_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.quantizers.quantizers_utils")
    decide = getattr(theirs, "should_convert_module", None)
    if decide is None or decide("mlp.gate_proj", ["mlp.gate"]) is False:
        pytest.skip("an older rule, of beginnings")
    assert all(decide(module, names) != by_patterns(module, names) for module in MODULES for names in NAMES)


@pytest.mark.parametrize("quantised", [True, False])
def test_where_programs_differ_the_file_decides(quantised: bool, tmp_path: Path) -> None:
    held = write_folder(tmp_path, LLAMA, KINDS["awq 32"])
    state = load_file(tmp_path / "model.safetensors")
    if not quantised:
        modules = [
            name.removesuffix(".weight") for name in held if name.endswith(("gate_proj.weight", "up_proj.weight"))
        ]
        state = {name: tensor for name, tensor in state.items() if not name.startswith(tuple(modules))}
        state |= {f"{module}.weight": held[f"{module}.weight"] for module in modules}
    rewrite(tmp_path, state, {**KINDS["awq 32"].config, "modules_to_not_convert": ["mlp.gate", "mlp.up"]})
    layers = models.load(tmp_path).layers
    assert [isinstance(layer.gate_up, pd.QuantizedWeight) for layer in layers] == [quantised] * 2
    wide = models.load(tmp_path, packed=False)
    expected = torch.cat([held[f"model.layers.0.mlp.{half}_proj.weight"] for half in ("gate", "up")])
    assert torch.equal(wide.layers[0].gate_up.float(), expected.float())


# ---- AutoRound

AUTOROUND = {
    # All that auto-round 0.16.1 writes beside the usual fields.
    "autoround_version": "0.16.1", "provider": "auto-round", "data_type": "int", "iters": 200, "seqlen": 512, "nsamples": 64, "lr": 0.005,
    "minmax_lr": 0.005, "amp": False, "batch_size": 4, "enable_minmax_tuning": False, "enable_norm_bias_tuning": True,
    "enable_quanted_input": False, "gradient_accumulate_steps": 2, "low_gpu_mem_usage": True, "scale_dtype": "torch.float32",
    "act_bits": 16, "act_data_type": "int", "act_group_size": 32, "act_sym": True, "act_dynamic": True, "supported_types": ["Linear"],
    "quant_block_list": [["model.layers.0"]], "to_quant_block_names": "model.layers", "static_kv_granularity": "tensor",
    "static_attention_granularity": "tensor", "super_bits": None, "super_group_size": None, "static_kv_dtype": None,
    "static_attention_dtype": None, "rotation_configs": None, "regex_config": {}, "extra_config": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gptq 4 of 32", "awq 32"])
def test_what_autoround_writes(kind: str, tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA, KINDS[kind])
    state, plain = load_file(tmp_path / "model.safetensors"), models.load(tmp_path, packed=False).state_dict()
    more = {"sym": True, "zero_point": False} if kind == "awq 32" else {"sym": True}
    rewrite(tmp_path, state, {**KINDS[kind].config, **AUTOROUND, **more})
    found = models.load(tmp_path, packed=False).state_dict()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"data_type": "mx_fp"},
        {"data_type": "fp"},
        {"act_bits": 8},
        {"static_kv_dtype": "fp8"},
        {"static_attention_dtype": "fp8"},
        {"super_bits": 6},
        {"super_group_size": 8},
        {"rotation_configs": [{"hadamard_type": "hadamard"}]},
        {"extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}}},
        {"regex_config": {".*down.*": {"bits": 8}}},
        {"dynamic": {"+:.*down.*": {"bits": 8}}},
    ],
)
def test_what_changes_the_numbers_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA, KINDS["gptq 4 of 32"])
    state = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, state, {**copy.deepcopy(KINDS["gptq 4 of 32"].config), **AUTOROUND, **changes})
    with pytest.raises(NotImplementedError, match=rf"quantization_config: {next(iter(changes))} must be "):
        models.load(tmp_path)
