"""Folders of EAGLE-3 heads: tensor by tensor and forward against the speculators library, and what is refused."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdkernels.models import EagleConfig, EagleHead, Transformer, TransformerConfig, load_drafter, save_drafter
from pdkernels.training.eagle import _Rollouts

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 2048}
TARGET = TransformerConfig(
    vocab_size=40, hidden_size=32, layers=6, heads=2, kv_heads=1, head_dim=16, intermediate_size=24
)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(scope="module")
def target() -> Transformer:
    return Transformer(TARGET).requires_grad_(False)


def randomised(head: EagleHead, seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
        head.vocabulary.copy_(torch.randperm(head.config.body.vocab_size)[: len(head.vocabulary)].sort().values)
    return head.requires_grad_(False).eval()


def a_head(body: dict[str, Any] | None = None, **changes: Any) -> EagleHead:
    sizes = {"vocab_size": 40, "hidden_size": 32, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16}
    config = TransformerConfig(**{**sizes, "intermediate_size": 48, "tied_head": False, **(body or {})})
    known = {"taps": (1, 3, 4), "draft_vocab_size": 12, "target_hidden_size": 32}
    return randomised(EagleHead(EagleConfig(config, **{**known, **changes})))


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "as published": ({}, {"norm_before_residual": True}),
    "whole vocabulary": ({}, {"draft_vocab_size": 40}),
    "norm before fc": ({}, {"norm_before_fc": True}),
    "norms before fc": ({}, {"fc_norm": True, "norm_output": True}),
    "two layers": ({"layers": 2}, {}),
    "qwen3": ({"qk_norm": True}, {"norm_before_residual": True}),
    "biases": ({"qkv_bias": True, "output_bias": True, "mlp_bias": True}, {}),
    "two taps": ({}, {"taps": (0, 6)}),
    "parallel": ({"layers": 2}, {"mask_token": 39, "norm_before_fc": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, target: Transformer, tmp_path: Path) -> None:
    body, changes = VARIANTS[variant]
    head = a_head(body, **changes)
    save_drafter(head, tmp_path / "head", target="somewhere")
    found = load_drafter(tmp_path / "head", target)
    assert found.config == head.config
    ours, again = head.state_dict(), found.state_dict()
    assert ours.keys() == again.keys() and all(torch.equal(ours[name], again[name]) for name in ours)
    save_drafter(found, tmp_path / "head", target="somewhere")
    again = load_drafter(tmp_path / "head", target, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(ours[name].to(again[name].dtype), again[name]) for name in ours)


def as_published(folder: Path, **fields: Any) -> dict[str, Any]:
    """A checkpoint as EAGLE's authors publish them, from one in the format of speculators."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 12, **SIZES}
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6, **fields}))
    return tensors


@pytest.mark.parametrize("stated", ["nowhere", "inside", "outside"])
def test_a_published_checkpoint(stated: str, target: Transformer, tmp_path: Path) -> None:
    head, folder = a_head(), tmp_path / "head"
    save_drafter(head, folder)
    name = "eagle_aux_hidden_state_layer_ids"
    inner = {"eagle_config": {name: [5, 0, 1]}} if stated == "inside" else {}
    as_published(folder, **inner, **({name: [5, 0, 1]} if stated == "outside" else {}))
    found = load_drafter(folder, target)
    assert found.config.taps == ((2, 3, 3) if stated == "nowhere" else (5, 0, 1))
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in head.state_dict().items())


BROKEN: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "hidden size": (
        {"target_hidden_size": 48},
        ValueError,
        "drafter must be for a hidden size of 32, the target's, got 48",
    ),
    "vocabulary": ({"vocab_size": 41}, ValueError, "drafter must be for 40 tokens, the target's, got 41"),
    "taps": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]},
        ValueError,
        r"eagle_aux_hidden_state_layer_ids must be layers in 0 .. 6, the target's, got \[1, 2, 7\]",
    ),
    "number of taps": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        ValueError,
        r"fc.weight must have shape \(32, 64\), got \(32, 96\)",
    ),
    "kind": (
        {"speculators_model_type": "medusa"},
        NotImplementedError,
        "speculators_model_type must be one of eagle3, peagle, dflash, dspark, dflash2, xpress, got 'medusa'",
    ),
    "family": ({"model_type": "gpt2"}, NotImplementedError, "model_type must be one of llama, qwen3, got 'gpt2'"),
    "map": ({"draft_vocab_size": 13}, ValueError, r"lm_head.weight must have shape \(13, 32\), got \(12, 32\)"),
    "mask": (
        {"speculators_model_type": "peagle", "mask_token_id": 40},
        ValueError,
        "mask_token must be in 0 .. 39, got 40",
    ),
    "no mask": ({"speculators_model_type": "peagle"}, ValueError, "config.json must hold 'mask_token_id'"),
    "no row of masks": (
        {"speculators_model_type": "peagle", "mask_token_id": 3},
        ValueError,
        "checkpoint must hold every tensor of its config.json, got none called mask_hidden",
    ),
    "a mask for one after the other": (
        {"mask_token_id": 3},
        NotImplementedError,
        "config.json: 'mask_token_id' must be absent: what it means is not known here, got 3",
    ),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, ValueError, "fc_norm must be False with norm_before_fc"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_differs_is_named(what: str, target: Transformer, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    save_drafter(a_head(), folder)
    changes, kind, words = BROKEN[what]
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        inner = name in config["transformer_layer_config"]
        (config["transformer_layer_config"] if inner else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind, match=words):
        load_drafter(folder, target)


def test_maps_that_do_not_fit(target: Transformer, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    for name, change, words in (
        ("d2t", lambda t: t + 40, r"d2t must lead to ids in 0 .. 39, got \d+..\d+"),
        ("d2t", lambda t: -torch.arange(12), "d2t must lead to different ids, got the same one twice"),
        ("d2t", lambda t: t[:5], r"d2t must have shape \(12,\), got \(5,\)"),
        ("t2d", lambda t: ~t, "t2d must name the tokens of d2t, got others"),
        ("d2t", None, "drafter must hold d2t, the map of its 12 tokens to the target's 40, got none"),
        ("norm.weight", None, "checkpoint must hold every tensor of its config.json, got none called norm.weight"),
    ):
        save_drafter(a_head(), folder)
        tensors = load_file(folder / "model.safetensors")
        given = tensors.pop(name)
        if change is not None:
            tensors[name] = change(given).contiguous()
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            load_drafter(folder, target)


def test_other_heads_are_refused(target: Transformer, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    save_drafter(a_head(), folder)
    tensors = as_published(folder)
    del tensors["lm_head.weight"]
    save_file({name.replace("midlayer", "layers.0"): t for name, t in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(NotImplementedError, match="drafter must be an EAGLE-3 head, got .*an EAGLE-1 or EAGLE-2 head"):
        load_drafter(folder, target)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        NotImplementedError, match=r"hold \*.safetensors files, got pytorch_model.bin, which can run code"
    ):
        load_drafter(folder, target)
    with pytest.raises(ValueError, match="drafter must be a folder with config.json"):
        load_drafter(tmp_path / "nothing", target)


# ---- the library


class _Absent(types.ModuleType):
    """A module of training data, which the drafters do not use."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = name.partition(".")[0] in ("openai", "datasets", "hs_connectors")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> Any:
        return _Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@contextmanager
def without_data() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.append(finder)  # only for what is not installed
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@pytest.fixture(scope="module")
def speculators() -> Any:
    pytest.importorskip("transformers", reason="speculators needs it")
    with without_data():
        return pytest.importorskip(
            "speculators.models.eagle3", reason="compares with speculators where it is installed"
        )


def theirs(speculators: Any, head: EagleHead, rope: dict[str, Any] | None = None) -> Any:
    """The library's model with the weights of a head."""
    import transformers

    config, body = head.config, head.config.body
    family = transformers.Qwen3Config if body.qk_norm else transformers.LlamaConfig
    more = {} if body.qk_norm else {"mlp_bias": body.mlp_bias}
    layer = family(
        **{**SIZES, "num_hidden_layers": body.layers},
        rms_norm_eps=body.norm_eps,
        attention_bias=body.qkv_bias,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": body.rope_theta},
        **more,
    )
    layer._attn_implementation = "eager"
    given = {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size"}
    made = speculators.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        eagle_aux_hidden_state_layer_ids=list(config.taps),
        **{name: getattr(config, name) for name in given},
    )
    return speculators.Eagle3DraftModel(made).eval()


def test_the_forward_of_parallel_heads(
    speculators: Any, target: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-EAGLE: a head that we wrote, read by the library, and its rows at every depth after two anchors; and theirs, read by us."""
    with without_data():
        from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
    body, changes = VARIANTS["parallel"]
    head, folder = a_head(body, **changes), tmp_path / "head"
    save_drafter(head, folder)
    made = PEagleSpeculatorConfig.from_pretrained(folder)
    made.transformer_layer_config._attn_implementation = "eager"
    model = PEagleDraftModel(made).eval()
    fill(model, folder)
    model.config.save_pretrained(tmp_path / "theirs")
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("verifier")}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "theirs" / "model.safetensors")
    found = load_drafter(tmp_path / "theirs", target)
    assert isinstance(found, EagleHead) and found.config == head.config
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in head.state_dict().items())

    length, anchors, depths = 9, (3, 6), 4
    places = [(row, 0) for row in range(length)] + [
        (row, depth) for depth in range(1, depths) for row in anchors if row + depth < length
    ]
    chosen = torch.tensor(places).T
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (chosen[0], chosen[1]))
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, length, 3, 32, generator=generator)
    tokens = torch.randint(40, (1, length), generator=generator)
    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, given, out: seen.append(out))
    losses = importlib.import_module("speculators.losses").resolve_loss_config("kl_div", "eager")
    with torch.no_grad():
        documents, hidden = torch.zeros_like(tokens), torch.randn(1, length, 32, generator=generator)
        model(
            features.flatten(-2),
            tokens,
            documents,
            verifier_last_hidden_states=hidden,
            loss_config=losses,
            num_depths=depths,
        )
    handle.remove()
    compared = 0
    for anchor in anchors:
        cache, fused = found.new_cache(1, 16), found.fused(features)
        rows = found(found.embed(tokens[:, : anchor + 1]), fused[:, : anchor + 1], cache=cache)[:, -1:]
        cache.commit_(torch.tensor([anchor + 1]))
        mask = found.embed(torch.full((1, depths - 1), 39))
        rows = torch.cat([rows, found(mask, found.masks().expand(1, depths - 1, -1), cache=cache)], 1)
        for number, (row, depth) in enumerate(places):
            if row == anchor:
                torch.testing.assert_close(found.logits(rows[:, depth]), seen[0][:, number], rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared == 4 + 3


def fill(model: Any, folder: Path) -> None:
    missing, extra = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not extra and set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight"}


def their_logits(model: Any, features: torch.Tensor, tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Those of every depth of their training-time test, with the text's own tokens."""
    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, given, out: seen.append(out))
    with torch.no_grad():
        model(features.flatten(-2), tokens, torch.zeros_like(tokens), ttt_steps=steps)
    handle.remove()
    return seen


def our_logits(head: EagleHead, features: torch.Tensor, tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """The same by rollouts, as training does."""
    rollouts: Any = _Rollouts(head)
    hidden, found = head.fused(features), []
    for depth in range(steps):
        rows = tokens.shape[1] - depth
        rollouts.depth = depth
        hidden = head.run(head.embed(tokens[:, depth:]), hidden[:, :rows], rollouts)
        found.append(head.logits(hidden))
    return found


ROPES: dict[str, Any] = {"default": None, "llama3": LLAMA3}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("two taps", "parallel")])
def test_the_forward_of_speculators(
    variant: str, rope: str, speculators: Any, target: Transformer, tmp_path: Path
) -> None:
    """A head that we wrote, read by them; one that they wrote, read by us; and their drafts at every depth."""
    if rope != "default" and variant not in ("as published", "qwen3"):
        return
    body, changes = VARIANTS[variant]
    head, folder = a_head(body, **changes), tmp_path / "head"
    save_drafter(head, folder)
    model = theirs(speculators, head, ROPES[rope])
    fill(model, folder)
    model.config.save_pretrained(tmp_path / "theirs")
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("verifier")}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "theirs" / "model.safetensors")
    found = load_drafter(tmp_path / "theirs", target)
    if rope == "default":
        assert found.config == head.config
        # Their from_pretrained also wants the target's folder.
        read = speculators.Eagle3SpeculatorConfig.from_pretrained(folder)
        assert read.to_dict()["transformer_layer_config"] == model.config.to_dict()["transformer_layer_config"]
        read.transformer_layer_config._attn_implementation = "eager"
        model = speculators.Eagle3DraftModel(read).eval()
        fill(model, folder)
    for name, tensor in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, 9, len(head.config.taps), 32, generator=generator)
    tokens = torch.randint(40, (1, 9), generator=generator)
    expected, rolled = their_logits(model, features, tokens, 3), our_logits(found, features, tokens, 3)
    for depth, (ours, wanted) in enumerate(zip(rolled, expected, strict=True)):
        torch.testing.assert_close(ours, wanted[:, : 9 - depth], rtol=1e-4, atol=1e-4)
    # On a cache, as decoding does: features in two parts, then the drafts after the sixth row.
    cache, hidden, depths = found.new_cache(1, 16), found.fused(features), []
    for first, last in ((0, 4), (4, 6)):
        rows = found(found.embed(tokens[:, first:last]), hidden[:, first:last], cache=cache)
        torch.testing.assert_close(found.logits(rows), expected[0][:, first:last], rtol=1e-4, atol=1e-4)
        cache.commit_(torch.tensor([last - first]))
    last = rows[:, -1:]
    for depth in (1, 2):
        last = found(found.embed(tokens[:, 5 + depth : 6 + depth]), last, cache=cache)
        cache.commit_(torch.tensor([1]))
        depths.append(found.logits(last))
    for depth, logits in enumerate(depths, 1):
        torch.testing.assert_close(logits, expected[depth][:, 5:6], rtol=1e-4, atol=1e-4)
