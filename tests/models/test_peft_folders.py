"""Folders that PEFT itself writes: logits equal PEFT's, or the field of its LoraConfig is refused by name."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels import models
from pdkernels.models.checkpoints.lora_config import FOLLOWED, REFUSED, WITHOUT_EFFECT, LoraSettings
from pdkernels.models.files.fields import Fields

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
PLAIN = dict(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
SIZES: dict[str, Any] = dict(
    vocab_size=23,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=20,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return folder


def reopened(base: Path, adapter: Path | None = None) -> torch.Tensor:
    model = transformers.LlamaForCausalLM.from_pretrained(base).eval()
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def saved(base: Path, folder: Path, **config: Any) -> Path:
    """An adapter made by PEFT, as if trained a little."""
    torch.manual_seed(1)
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM.from_pretrained(base), peft.LoraConfig(**{**PLAIN, **config})
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name or (parameter.requires_grad and name.endswith("bias")):
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    return folder


def check_equal(base: Path, adapter: Path) -> None:
    ours = models.load(base, adapter=adapter)(TOKENS)
    expected = reopened(base, adapter)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert (expected - reopened(base)).abs().max() > 2e-3


def check_refused(base: Path, adapter: Path, field: str) -> None:
    with pytest.raises((NotImplementedError, ValueError)) as caught:
        models.load(base, adapter=adapter)
    assert str(caught.value).startswith("pdkernels.models.load: ") and field in str(caught.value)


def changed(adapter: Path, **fields: Any) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return adapter


# ---- all fields

NEWER = ("mica", "lora_ga") if hasattr(peft.tuners.lora.config, "LoraGAConfig") else ()
"""Ways to begin that PEFT 0.18 lacks."""

WRITTEN: dict[str, list[dict[str, Any]]] = {
    "task_type": [{"task_type": None}],
    "peft_type": [{}],
    "r": [{"r": 3}],
    "rank_pattern": [{"rank_pattern": {"q_proj": 2, r"layers\.[12]\.mlp\..*": 5, "layers.0.self_attn.v_proj": 7}}],
    "lora_alpha": [{"lora_alpha": 17}],
    "alpha_pattern": [
        {"alpha_pattern": {"model.layers.0.self_attn.q_proj": 1, r"^model.layers.[0-9].*": 30}},
        {"alpha_pattern": {r".*\.self_attn\..*": 30, "proj": 2, "down_proj": 1}},
        {"alpha_pattern": {"layers.1": 30, r"layers\.\d+\.(self_attn|attn)\.[qk]_proj": 1, r"mlp.\w+": 24}},
    ],
    "use_rslora": [{"use_rslora": True}],
    "init_lora_weights": [
        {"init_lora_weights": value}
        for value in (True, False, "gaussian", "pissa", "olora", "OLoRA", "orthogonal", "eva", *NEWER)
    ]
    + [{"init_lora_weights": value, "use_rslora": True, "rank_pattern": {"q_proj": 2}} for value in ("pissa", "olora")]
    + [{"init_lora_weights": value, "target_modules": ["embed_tokens", "lm_head"]} for value in ("pissa", "olora")],
    "target_modules": [
        {"target_modules": value}
        for value in ("all-linear", r".*\.layers\.[01]\.(self_attn|mlp)\.(?:q|up)_proj", ["layers.1.mlp.gate_proj"])
    ],
    "exclude_modules": [{"exclude_modules": ["layers.1.self_attn.q_proj"]}, {"exclude_modules": r".*\.2\..*"}],
    "layers_to_transform": [
        {"layers_to_transform": [0, 2]},
        {"layers_to_transform": 1},
        # a whole name needs no number
        {"layers_to_transform": [0], "target_modules": ["model.layers.1.mlp.gate_proj", "v_proj"]},
    ],
    "layers_pattern": [{"layers_to_transform": [1], "layers_pattern": ["layers"]}],
    "modules_to_save": [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens", "input_layernorm"]}],
    "bias": [{"bias": "all"}, {"bias": "lora_only"}],
    "auto_mapping": [{"auto_mapping": {"base_model_class": "LlamaForCausalLM"}}],
    "peft_version": [{"peft_version": "0.11.0"}],
    "base_model_name_or_path": [{"base_model_name_or_path": "somebody/else"}],
    "revision": [{"revision": "main"}],
    "inference_mode": [{"inference_mode": False}],
    "lora_dropout": [{"lora_dropout": 0.4}],
    "fan_in_fan_out": [{"fan_in_fan_out": True}],
    "megatron_core": [{"megatron_core": "other.core"}],
    "loftq_config": [{"loftq_config": {"loftq_bits": 4}}],
    "eva_config": [{"eva_config": peft.EvaConfig()}],
    "corda_config": [{"corda_config": peft.tuners.lora.config.CordaConfig()}],
    "lora_ga_config": [{"lora_ga_config": peft.tuners.lora.config.LoraGAConfig()}] if NEWER else [],
    "qalora_group_size": [{"qalora_group_size": 8}],
    "runtime_config": [{}],
    "ensure_weight_tying": [{"ensure_weight_tying": True}],
}
"""Arguments of LoraConfig with which PEFT writes folders that load."""

BY_HAND: dict[str, list[Any]] = {
    "peft_type": ["LOHA", "ADALORA", "IA3", None, 5],
    "task_type": ["SEQ_CLS"],
    "init_lora_weights": ["pissa_niter_4", "corda", "loftq", "newest", 5, ["pissa"]],
    "bias": ["some"],
    "target_modules": [None, ["q_proj", "v_proj"], r".*\.[qv]_proj", 5, [["q_proj"]]],
    "exclude_modules": [["q_proj"]],
    "layers_to_transform": [[0], ["a"]],
    "modules_to_save": [["lm_head"]],
    "r": [5, 0, "4"],
    "rank_pattern": [{"q_proj": 5}, {"(a)\\1": 3}, [4]],
    "alpha_pattern": [{"q_proj": "6"}, {"(": 3}],
    "use_dora": [True],
    "use_qalora": [True],
    "use_bdlora": [{"nblocks": 2}],
    "lora_bias": [True],
    "alora_invocation_tokens": [[1, 2]],
    "target_parameters": [["mlp.experts"]],
    "layer_replication": [[[0, 2], [1, 3]]],
    "trainable_token_indices": [[1]],
    "megatron_config": [{"a": 1}],
    "arrow_config": [{"top_k": 2}],
    "monteclora_config": [{"num_samples": 2}],
    "kasa_config": [{"a": 1}],
    "velora_config": [{"num_groups": 4}],
    "a_field_of_next_year": [True, "on", {"a": 1}],
}
"""Values written into the config.json of a plain adapter that must be refused."""


def test_every_field_of_the_installed_peft_is_decided() -> None:
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert known <= FOLLOWED | WITHOUT_EFFECT | REFUSED, known - FOLLOWED - WITHOUT_EFFECT - REFUSED
    assert not FOLLOWED & WITHOUT_EFFECT and not FOLLOWED & REFUSED and not WITHOUT_EFFECT & REFUSED
    assert set(WRITTEN) >= FOLLOWED | WITHOUT_EFFECT and set(BY_HAND) >= REFUSED
    values = peft.LoraConfig.__dataclass_fields__["init_lora_weights"].type
    for value in ("gaussian", "eva", "olora", "pissa", "corda", "loftq", "orthogonal"):
        assert value in str(values)
    assert NEWER == (("mica", "lora_ga") if "mica" in str(values) else ())


@pytest.mark.parametrize(("field", "config"), [(field, config) for field, all_ in WRITTEN.items() for config in all_])
@pytest.mark.filterwarnings("ignore")
def test_logits_are_those_of_peft(field: str, config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    try:
        adapter = saved(base, tmp_path, **config)
    except Exception:  # PEFT makes these only after a run over data
        init = config.get("init_lora_weights")
        assert init in ("eva", "lora_ga"), config
        adapter = changed(saved(base, tmp_path), init_lora_weights=init)
    check_equal(base, adapter)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, all_ in BY_HAND.items() for value in all_])
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_computed_is_refused_by_name(field: str, value: Any, base: Path, tmp_path: Path) -> None:
    named = "rank" if field in ("r", "rank_pattern") and value not in (0, "4") else field
    named = "target_modules" if field in ("exclude_modules", "layers_to_transform") and value != ["a"] else named
    check_refused(base, changed(saved(base, tmp_path), **{field: value}), named)


@pytest.mark.filterwarnings("ignore")
def test_fields_without_a_value_do_not_matter(base: Path, tmp_path: Path) -> None:
    check_equal(base, changed(saved(base, tmp_path), a_field_of_next_year=None, use_dora=False, another=[]))


@pytest.mark.filterwarnings("ignore")
def test_pissa_converted_to_a_plain_adapter(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = peft.LoraConfig(**PLAIN, init_lora_weights="pissa")
    model = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "first")
    model.peft_config["default"].init_lora_weights = "pissa"
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(tmp_path / "last", path_initial_model_for_weight_conversion=tmp_path / "first")
    check_equal(base, tmp_path / "last")
    with torch.no_grad():
        trained = model.eval()(TOKENS).logits
    torch.testing.assert_close(models.load(base, adapter=tmp_path / "last")(TOKENS), trained, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.filterwarnings("ignore")
def test_base_weights_that_are_no_numbers(init: str, base: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    adapter = saved(base, tmp_path / "lora", init_lora_weights=init)
    state = load_file(base / "model.safetensors")
    state["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("nan")
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(
        ValueError, match=rf"q_proj\.weight must hold finite numbers for an adapter of {init}, got others"
    ):
        models.load(tmp_path, adapter=adapter)


@pytest.mark.parametrize("init", ["pissa", "olora", False, "orthogonal"])
@pytest.mark.filterwarnings("ignore")
def test_a_module_without_tensors(init: Any, base: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    adapter = saved(base, tmp_path, init_lora_weights=init)
    path = adapter / "adapter_model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if "layers.1.self_attn.q_proj" not in name}
    save_file(kept, path)
    check_refused(base, adapter, "adapter_model.safetensors must hold a pair for every module of target_modules")
    check_equal(base, changed(adapter, init_lora_weights=True))


@pytest.mark.parametrize(
    "pattern", ["(|)" * 20 + "x", "(a+)+b", "(a|a)*b" * 20, "(.*)*" * 40 + "x", "((((.*)*)*)*)*x", "(()*)*" * 100 + "x", "(x?){9999}y"]
)  # fmt: skip
@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern", "target_modules", "exclude_modules"])
@pytest.mark.filterwarnings("ignore")
def test_no_pattern_takes_long(field: str, pattern: str, base: Path, tmp_path: Path) -> None:
    adapter = changed(saved(base, tmp_path), **{field: {pattern: 4} if field.endswith("pattern") else pattern})
    start = time.perf_counter()
    try:
        models.load(base, adapter=adapter)
    except (NotImplementedError, ValueError) as error:
        assert field in str(error)
    assert time.perf_counter() - start < 2


@pytest.mark.filterwarnings("ignore")
def test_thousands_of_patterns(base: Path, tmp_path: Path) -> None:
    adapter = changed(saved(base, tmp_path), alpha_pattern={f"{'a' * 30}{number}": 4 for number in range(60_000)})
    start = time.perf_counter()
    try:
        models.load(base, adapter=adapter)
    except NotImplementedError as error:
        assert "alpha_pattern must hold patterns of names that can be matched in few steps" in str(error)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("pattern", [None, "layers"])
def test_numbers_of_layers_are_where_peft_looks_for_them(pattern: str | None) -> None:
    """In names of the model without a head too."""
    chosen: dict[str, Any] = {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": pattern}
    settings = LoraSettings(Fields({"peft_type": "LORA", **chosen}))
    theirs = peft.tuners.tuners_utils.check_target_module_exists
    for name in ("layers.0", "layers.1", "model.layers.0", "model.layers.1", "model.layers.0.experts.1"):
        module = f"{name}.self_attn.q_proj"
        assert bool(settings.adapts(module, True)) == bool(theirs(peft.LoraConfig(**chosen), module)), module


FAMILIES = ("gemma4_text", "qwen3_5_text", "lfm2", "gpt_oss", "gemma2", "gemma3_text", "olmo2", "olmo3", "qwen3_moe")


@pytest.mark.parametrize(
    "kind", [kind if kind in FAMILIES[:3] else pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES]
)
@pytest.mark.filterwarnings("ignore")
def test_every_matrix_of_a_family(kind: str, tmp_path: Path) -> None:
    """With another rank and scale in some layers, and the norms of one kind saved whole."""
    from tests.models import test_config_fields

    fields, folder = {**test_config_fields.base(kind), "tie_word_embeddings": False}, tmp_path / "base"
    folder.mkdir()
    assert test_config_fields.written(fields, folder) is not None

    def reopened() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    modules = {name: module for name, module in reopened().named_modules() if "." in name or name == "lm_head"}
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    names = sorted({name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, kinds)})
    norms = sorted({name.rpartition(".")[2] for name in modules if name.endswith("norm") and "layers" in name})
    chosen = {"target_modules": names, "rank_pattern": {r"layers\.1\..*": 3}, "alpha_pattern": {names[-1]: 3}}
    for number, config in enumerate((chosen, {"target_modules": names[:1], "modules_to_save": norms[:1]})):
        torch.manual_seed(1)
        made = peft.get_peft_model(reopened(), peft.LoraConfig(**{**PLAIN, **config}))
        for name, parameter in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.data += torch.randn_like(parameter) * 0.1
        adapter = tmp_path / f"adapter{number}"
        made.save_pretrained(adapter)
        with torch.no_grad():
            expected = peft.PeftModel.from_pretrained(reopened(), adapter).eval()(TOKENS, return_dict=True).logits
        ours = models.load(folder, adapter=adapter, dtype=torch.float32)
        torch.testing.assert_close(ours(TOKENS), expected, rtol=2e-4, atol=2e-4)
