"""Every field of the config.json of a drafter: followed as the speculators library follows it, or refused by name."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pdkernels.models import Transformer, load_drafter, save_drafter
from pdkernels.models.architectures.windows import Window
from pdkernels.models.checkpoints.drafters import dflash_folder, dflash_kinds, folder
from tests.models import test_dflash_folders as dflash
from tests.models import test_eagle_folders as eagle

ABSENT = ...
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 100.0}
S, F = "sliding_attention", "full_attention"
LAYERS: dict[str, list[Any]] = {
    "num_key_value_heads": [None, ABSENT],
    "head_dim": [None, ABSENT],
    "hidden_act": ["gelu", "swish"],
    "max_position_embeddings": [16, ABSENT],
    "rms_norm_eps": [0.1, ABSENT],
    "tie_word_embeddings": [True],
    "attention_bias": [True, None, ABSENT],
    "mlp_bias": [True],
    "rope_parameters": [
        None, {}, ABSENT, YARN, eagle.LLAMA3, {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0},
        {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}, {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 50.0},
    ],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}, {"type": "mrope", "mrope_section": [2, 3, 3]}],
    "rope_theta": [7.0],
    "partial_rotary_factor": [0.5],
    "attention_dropout": [0.5],
    "pretraining_tp": [2],
    "is_causal": [False],
    "model_type": ["llama", "qwen3", "qwen2", "gemma3_text", ABSENT],
}  # fmt: skip
WINDOWS: dict[str, list[Any]] = {
    "sliding_window": [3, 4096, None, ABSENT],
    "use_sliding_window": [True, False, ABSENT],
    "max_window_layers": [0, 1],
    "layer_types": [[S, S], [F, F], [S, F], [F], None, ABSENT, ["chunked_attention"] * 2],
}
HEADS: dict[str, list[Any]] = {
    "draft_vocab_size": [40, ABSENT],
    "target_hidden_size": [None, 48],
    "embed_requires_grad": [True],
    "tie_word_embeddings": [True],
    "dtype": ["float16"],
    "architectures": [["Other"]],
    "speculators_version": ["0.1.0"],
    "logit_scale": [2.0],
    "is_causal": [False],
}
EAGLE: dict[str, list[Any]] = {
    **HEADS,
    "eagle_aux_hidden_state_layer_ids": [[0, 1, 2], None, ABSENT, [1, 2]],
    "norm_before_residual": [True, None],
    "norm_before_fc": [True],
    "fc_norm": [True],
    "norm_output": [True],
    "eagle_config": [{"use_aux_hidden_state": False}],
    "mask_token_id": [3],
}
DFLASH: dict[str, list[Any]] = {
    **HEADS,
    "aux_hidden_state_layer_ids": [[0, 1, 2]],
    "block_size": [3, ABSENT],
    "mask_token_id": [5, None, ABSENT],
    "sliding_window_non_causal": [True, ABSENT],
    "sample_from_anchor": [True, None],
    "dflash_config": [{"use_swa": True}],
    "markov_rank": [4],
}


def cases(*tables: tuple[str, dict[str, list[Any]]]) -> list[tuple[str, str, Any]]:
    return [(place, name, value) for place, table in tables for name, values in table.items() for value in values]


def changed(path: Path, place: str, name: str, value: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    section = config["transformer_layer_config"] if place == "layers" else config
    section.pop(name, None)
    if value is not ABSENT:
        section[name] = value
    file.write_text(json.dumps(config))


TENSORS = r"\.weight must have shape|hold every tensor of its config.json|hold only tensors|got 1\d for 32 layers"


def ours(path: Path, name: str, target: Transformer) -> Any:
    """The head; None if it is refused by the field's name, or because it has other tensors."""
    try:
        return load_drafter(path, target)
    except (ValueError, NotImplementedError) as error:
        alike = {"num_key_value_heads": "kv_heads", "target_hidden_size": "hidden size", "rope_scaling": "rope_type"}
        inner = "partial_rotary_factor|rope_type" if name == "rope_parameters" else name
        assert re.search(f"{inner}|{alike.get(name, name)}|{TENSORS}", str(error)), error
        return None


@pytest.fixture(scope="module")
def target() -> Transformer:
    torch.manual_seed(1)
    return Transformer(eagle.TARGET).requires_grad_(False)


@pytest.fixture(scope="module")
def library() -> Any:
    """The modules of the library, by name."""
    pytest.importorskip("transformers", reason="speculators needs it")
    with eagle.without_data():
        pytest.importorskip("speculators", reason="compares with speculators where it is installed")
        names = ("eagle3", "peagle", "dflash", "dspark", "dflash2", "xpress")
        return {name: importlib.import_module(f"speculators.models.{name}") for name in names}


@pytest.mark.parametrize(("place", "name", "value"), cases(("layers", LAYERS), ("head", EAGLE)))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.filterwarnings("ignore")
def test_eagle(family: str, place: str, name: str, value: Any, library: Any, target: Any, tmp_path: Path) -> None:
    path = tmp_path / "head"
    save_drafter(eagle.a_head({"qk_norm": family == "qwen3"}), path)
    changed(path, place, name, value)
    found = ours(path, name, target)
    if found is None:
        return
    read = library["eagle3"].Eagle3SpeculatorConfig.from_pretrained(path)
    read.transformer_layer_config._attn_implementation = "eager"
    model = library["eagle3"].Eagle3DraftModel(read).eval()
    eagle.fill(model, path)
    generator = torch.Generator().manual_seed(1)
    features, tokens = torch.randn(1, 9, 3, 32, generator=generator), torch.randint(40, (1, 9), generator=generator)
    expected, rolled = (make(head, features, tokens, 2) for make, head in ((eagle.their_logits, model), (eagle.our_logits, found)))  # fmt: skip
    for rows, wanted in zip(rolled, expected, strict=True):
        torch.testing.assert_close(rows, wanted[:, : rows.shape[1]], rtol=1e-3, atol=1e-3)


VARIANTS = {"reduced vocabulary": (LAYERS, DFLASH), "windows": (WINDOWS, {}), "windows, whole blocks": (WINDOWS, {})}


@pytest.mark.parametrize(
    ("variant", "place", "name", "value"),
    [
        (variant, *case)
        for variant, (layers, head) in VARIANTS.items()
        for case in cases(("layers", layers), ("head", head))
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_dflash(variant: str, place: str, name: str, value: Any, library: Any, target: Any, tmp_path: Path) -> None:
    path = tmp_path / "head"
    save_drafter(dflash.a_head(variant), path)
    changed(path, place, name, value)
    found = ours(path, name, target)
    if found is None:
        return
    read = library["dflash"].DFlashSpeculatorConfig.from_pretrained(path)
    read.transformer_layer_config._attn_implementation = "eager"
    model = library["dflash"].DFlashDraftModel(read).eval()
    shared = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.embedding}
    shared |= {"verifier_lm_head.weight": model.verifier_lm_head.weight, "verifier_norm.weight": target.norm}
    model.load_state_dict({**shared, **load_file(path / "model.safetensors")})
    generator = torch.Generator().manual_seed(1)
    features, tokens = torch.randn(1, 24, 3, 32, generator=generator), torch.randint(40, (1, 24), generator=generator)
    with torch.no_grad():
        hidden, documents = torch.zeros(1, 24, 32), torch.zeros_like(tokens)
        rows = model._backbone_forward(features.flatten(-2), tokens, documents + 1, hidden, documents, max_anchors=4)
    size, fused = found.config.block_size, found.fused(features)
    for number, anchor in enumerate(rows[4][::size].tolist()):
        cache = found.new_cache(1, 24 + size)
        found.read(fused[:, :anchor], cache=cache)
        cache.commit_(torch.tensor([anchor]))
        block = torch.full((1, size), found.config.mask_token)
        block[0, 0] = tokens[0, anchor]
        embedded = (target.embed if found.embedding is None else found.embed)(block)
        logits = found.logits(found(embedded, cache=cache), target.embedding)
        expected = rows[1][:, number * size : (number + 1) * size]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_no_field_of_the_library_is_left_out(library: Any) -> None:
    kinds = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2", "xpress": "XPress", "eagle3": "Eagle3", "peagle": "PEagle"}  # fmt: skip
    for kind, name in kinds.items():
        fields = set(getattr(library[kind], f"{name}SpeculatorConfig").model_fields)
        followed = {*folder._FIELDS, "mask_token_id"} if kind in ("eagle3", "peagle") else {*dflash_folder._FIELDS, *dflash_kinds.OWN_FIELDS.get(kind, ())}  # fmt: skip
        assert fields <= {*followed, *dflash_kinds._BOOKKEEPING}, kind


def test_windows_longer_than_all_texts_are_kept(target: Transformer, tmp_path: Path) -> None:
    """Without the library: rows of a block see none after them in such layers."""
    save_drafter(dflash.a_head("windows"), tmp_path / "head")
    changed(tmp_path / "head", "layers", "sliding_window", 4096)
    config = load_drafter(tmp_path / "head", target).config
    assert config.body.windows == (Window(4096), None) and config.body.max_positions == 2048
    save_drafter(load_drafter(tmp_path / "head", target), tmp_path / "again")
    assert load_drafter(tmp_path / "again", target).config == config


def test_layers_with_the_class_of_llama(target: Transformer, tmp_path: Path) -> None:
    """Absent sizes of heads are those of its class: 2048 positions, and what follows from the hidden size."""
    head = dflash.a_head("the target's head")
    save_drafter(head, tmp_path / "head")
    changed(tmp_path / "head", "layers", "model_type", "llama")
    for name in ("max_position_embeddings", "head_dim", "num_key_value_heads"):
        changed(tmp_path / "head", "layers", name, ABSENT)
    with pytest.raises(ValueError, match=r"q_proj.weight must have shape \(32, 32\), got \(64, 32\)"):
        load_drafter(tmp_path / "head", target)


# ---- heads as their authors publish them


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config: 'use_aux_hidden_state' must be absent or True"),
        ({"eagle_config": {"use_last_layernorm": False}}, "'use_last_layernorm' must be absent or True, got False"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "'use_mtp_layernorm' must be absent or False, got True"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "'parallel_draft_step' must be absent or 1, got 4"),
        ({"eagle_config": {"head_sharing": True}}, "'head_sharing' must be absent: what it means is not known here"),
        ({"eagle_config": [1]}, "eagle_config must hold an object"),
        ({"logit_scale": 0.5}, "logit_scale must be absent or 1, got 0.5"),
    ],
)  # fmt: skip
def test_settings_of_published_eagle_heads(changes: Any, words: str, target: Transformer, tmp_path: Path) -> None:
    save_drafter(eagle.a_head(), tmp_path / "head")
    eagle.as_published(tmp_path / "head", **changes)
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(words)):
        load_drafter(tmp_path / "head", target)


def test_what_model_optimizer_writes(target: Transformer, tmp_path: Path) -> None:
    """Its template has every setting, null where it has none."""
    inner = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
        "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
    }  # fmt: skip
    head = eagle.a_head()
    save_drafter(head, tmp_path / "head")
    eagle.as_published(tmp_path / "head", eagle_config=inner, logit_scale=None, pretraining_tp=1)
    assert load_drafter(tmp_path / "head", target).config.taps == head.config.taps
