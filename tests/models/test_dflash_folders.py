"""Folders of DFlash heads: tensor by tensor and forward against the speculators library, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pdkernels as pd
from pdkernels.models import DFlashConfig, DFlashHead, Transformer, TransformerConfig, load_drafter, save_drafter
from pdkernels.models.architectures.rope import apply_rope
from pdkernels.models.architectures.windows import Window
from pdkernels.models.drafters.parts import window_config
from tests.models.test_eagle_folders import LLAMA3, SIZES, TARGET, without_data

BODY = {"vocab_size": 40, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "tied_head": False}
BODY |= {"intermediate_size": 48, "qk_norm": True}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reduced vocabulary": ({}, {"draft_vocab_size": 12}),
    "the target's head": ({}, {"own_head": False}),
    "one layer, from the anchor": ({"layers": 1}, {"sample_from_anchor": True, "draft_vocab_size": 12}),
    "windows": ({"windows": (Window(5), None)}, {"draft_vocab_size": 12}),
    "windows, whole blocks": ({"windows": (Window(1), Window(1))}, {"whole_blocks": True}),
    "biases": ({"qkv_bias": True, "output_bias": True}, {"taps": (0, 6), "own_embedding": True}),
}


@pytest.fixture(scope="module")
def target() -> Transformer:
    return Transformer(TARGET).requires_grad_(False)


def a_head(variant: str) -> DFlashHead:
    body, changes = VARIANTS[variant]
    config = TransformerConfig(**{**BODY, **body})
    known = {"taps": (1, 3, 4), "draft_vocab_size": 40, "block_size": 4, "mask_token": 39}
    torch.manual_seed(0)
    head = DFlashHead(DFlashConfig(config, **{**known, **changes}))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
        head.vocabulary.copy_(torch.randperm(40)[: len(head.vocabulary)].sort().values)
    return head.requires_grad_(False).eval()


@pytest.mark.parametrize("variant", ["windows", "windows, whole blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_of_a_block_see_what_their_windows_say(variant: str, dtype: torch.dtype) -> None:
    """The rule of speculators, pair by pair: the last rows of the context, as many as the window, for every row of the block; and of
    the block the rows up to its own, or all of them."""
    head = a_head(variant).to(dtype)
    body, size = head.config.body, head.config.block_size
    features, embedded = torch.randn(2, 9, 3, 32, dtype=dtype), torch.randn(2, size, 32, dtype=dtype)
    lengths = [9, 4]
    cache = head.new_cache(2, 9 + size)
    head.read(head.fused(features), cache=cache, counts=torch.tensor(lengths))
    cache.commit_(torch.tensor(lengths))
    found = head(embedded, cache=cache)
    for sequence, length in enumerate(lengths):
        context = head.fused(features[sequence : sequence + 1, :length])

        def attend(
            qkv: torch.Tensor, layer: int, context: torch.Tensor = context, length: int = length
        ) -> torch.Tensor:
            window = body.windows[layer]
            table = head.tables.covering(length + size, torch.device("cpu"), dtype)
            k, v = head.layers[layer].project(context)[:, :, body.heads :].split(body.kv_heads, 2)
            q, own_k, own_v = qkv.split([body.heads, body.kv_heads, body.kv_heads], 2)
            q, own_k = (apply_rope(x, table.span(length, size), "half") for x in (q, own_k))
            k, v = torch.cat([apply_rope(k, table.span(0, length), "half"), own_k], 1), torch.cat([v, own_v], 1)
            seen = torch.zeros(size, length + size, dtype=torch.bool)
            for row in range(size):
                for key in range(length + size):
                    if key < length:
                        seen[row, key] = window is None or key >= length - window.size
                    else:
                        seen[row, key] = window is None or head.config.whole_blocks or key - length <= row
            mixed = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen, enable_gqa=True
            )
            return mixed.transpose(1, 2)

        expected = head.run(embedded[sequence : sequence + 1], attend)
        torch.testing.assert_close(found[sequence : sequence + 1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, target: Transformer, tmp_path: Path) -> None:
    head = a_head(variant)
    save_drafter(head, tmp_path / "head", target="somewhere")
    found = load_drafter(tmp_path / "head", target)
    assert isinstance(found, DFlashHead) and found.config == head.config
    ours, again = head.state_dict(), found.state_dict()
    assert ours.keys() == again.keys() and all(torch.equal(ours[name], again[name]) for name in ours)


def test_packed_there_and_back(target: Transformer, tmp_path: Path) -> None:
    head = pd.quantize(a_head("reduced vocabulary"), "q8_0", skip="down")
    save_drafter(head, tmp_path / "head")
    found = load_drafter(tmp_path / "head", target)
    features, embedded = torch.randn(1, 5, 3, 32), torch.randn(1, 4, 32)
    rows = []
    for one in (head, found):
        cache = one.new_cache(1, 9)
        one.read(one.fused(features), cache=cache)
        cache.commit_(torch.tensor([5]))
        rows.append(one.logits(one(embedded, cache=cache)))
    assert torch.equal(*rows)


def as_published(folder: Path, inside: bool) -> None:
    """A checkpoint as DFlash's authors publish them, from one in the format of speculators."""
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **SIZES, "num_hidden_layers": 2}
    config |= {"rms_norm_eps": 1e-6, "num_target_layers": 6}
    config["dflash_config"] = {"mask_token_id": 39, "target_layer_ids": [0, 2, 3]}  # whose outputs are read
    (config["dflash_config"] if inside else config)["block_size"] = 4
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("inside", [False, True])
def test_a_published_checkpoint(inside: bool, target: Transformer, tmp_path: Path) -> None:
    head = a_head("the target's head")
    save_drafter(head, tmp_path / "head")
    as_published(tmp_path / "head", inside)
    found = load_drafter(tmp_path / "head", target)
    assert found.config == head.config
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in head.state_dict().items())


BROKEN: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "MTP": (
        {"speculators_model_type": "mtp"},
        NotImplementedError,
        "be one of eagle3, peagle, dflash, dspark, dflash2, xpress, got 'mtp'",
    ),
    "windows": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        NotImplementedError,
        "layer_types must be 'full_attention' without use_sliding_window, got other layers",
    ),
    "no window": (
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 0},
        ValueError,
        "sliding_window must be .* got 0",
    ),
    "a negative window": (
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": -4},
        ValueError,
        "sliding_window must be .* got -4",
    ),
    "hidden size": (
        {"target_hidden_size": 48},
        NotImplementedError,
        "target_hidden_size must be the head's own, 32, got 48",
    ),
    "vocabulary": ({"vocab_size": 41}, ValueError, "drafter must be for 40 tokens, the target's, got 41"),
    "taps": (
        {"aux_hidden_state_layer_ids": [1, 7]},
        ValueError,
        r"must be layers in 0 .. 6, the target's, got \[1, 7\]",
    ),
    "no taps": ({"aux_hidden_state_layer_ids": None}, ValueError, "must be layers in 0 .. 6, the target's, got None"),
    "mask": ({"mask_token_id": 40}, ValueError, "mask_token must be in 0 .. 39, got 40"),
    "no mask": ({"mask_token_id": None}, ValueError, "mask_token_id"),
    "block": ({"block_size": 1}, ValueError, "block_size must be in 2 .. 256, got 1"),
    "map": ({"draft_vocab_size": 13}, ValueError, r"lm_head.weight must have shape \(13, 32\), got \(12, 32\)"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_differs_is_named(what: str, target: Transformer, tmp_path: Path) -> None:
    save_drafter(a_head("reduced vocabulary"), tmp_path / "head")
    changes, kind, words = BROKEN[what]
    file = tmp_path / "head" / "config.json"
    config = json.loads(file.read_text())
    for name, value in changes.items():
        inner = name in config["transformer_layer_config"] or name == "layer_types" or "sliding_window" in name
        (config["transformer_layer_config"] if inner else config)[name] = value
    file.write_text(json.dumps(config))
    with pytest.raises(kind, match=words):
        load_drafter(tmp_path / "head", target)


def test_other_tensors_are_refused(target: Transformer, tmp_path: Path) -> None:
    """DSpark's heads beside a DFlash head."""
    save_drafter(a_head("reduced vocabulary"), tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    save_file({**load_file(file), "markov_head.w1.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(ValueError, match="also markov_head.w1.weight"):
        load_drafter(tmp_path / "head", target)


# ---- the library


@pytest.fixture(scope="module")
def speculators() -> Any:
    pytest.importorskip("transformers", reason="speculators needs it")
    with without_data():
        return pytest.importorskip(
            "speculators.models.dflash", reason="compares with speculators where it is installed"
        )


@pytest.mark.parametrize("rope", [None, LLAMA3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_of_speculators(
    variant: str, rope: dict[str, Any] | None, speculators: Any, target: Transformer, tmp_path: Path
) -> None:
    """A head that we wrote, read by them; one that they wrote, read by us; and the rows of blocks at anchors that they draw."""
    import transformers

    head, folder = a_head(variant), tmp_path / "head"
    config, body = head.config, head.config.body
    save_drafter(head, folder)
    layer = transformers.Qwen3Config(
        **{**SIZES, "num_hidden_layers": body.layers},
        rms_norm_eps=body.norm_eps,
        attention_bias=body.qkv_bias,
        tie_word_embeddings=False,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": body.rope_theta},
        **window_config(body),
    )
    layer._attn_implementation = "eager"
    made = speculators.DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=config.draft_vocab_size,
        block_size=config.block_size,
        aux_hidden_state_layer_ids=list(config.taps),
        mask_token_id=config.mask_token,
        sample_from_anchor=config.sample_from_anchor,
        sliding_window_non_causal=config.whole_blocks,
    )
    model = speculators.DFlashDraftModel(made).eval()
    state = load_file(folder / "model.safetensors")
    shared = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.embedding}
    shared |= {"verifier_lm_head.weight": model.verifier_lm_head.weight, "verifier_norm.weight": target.norm}
    missing, extra = model.load_state_dict({**shared, **state}, strict=False)
    assert not extra and not missing

    kept = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name in state}
    (tmp_path / "theirs").mkdir()
    model.config.save_pretrained(tmp_path / "theirs")
    save_file(kept, tmp_path / "theirs" / "model.safetensors")
    found = load_drafter(tmp_path / "theirs", target)
    assert isinstance(found, DFlashHead)
    for name, tensor in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    if rope is None:
        assert found.config == config
        read = speculators.DFlashSpeculatorConfig.from_pretrained(folder)
        assert read.to_dict()["transformer_layer_config"] == model.config.to_dict()["transformer_layer_config"]

    rows, blocks = 24, 6
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, rows, len(config.taps), 32, generator=generator)
    tokens = torch.randint(40, (1, rows), generator=generator)
    with torch.no_grad():
        _, expected, _, _, places = model._backbone_forward(
            features.flatten(-2),
            tokens,
            torch.ones_like(tokens),
            torch.randn(1, rows, 32, generator=generator),
            torch.zeros_like(tokens),
            max_anchors=blocks,
        )
    embed = target.embed if found.embedding is None else found.embed
    size, hidden = config.block_size, found.fused(features)
    for number, anchor in enumerate(places[::size].tolist()):
        cache = found.new_cache(1, rows + size)
        for first, last in ((0, anchor // 2), (anchor // 2, anchor)):  # in two parts, as decoding reads
            if first < last:
                found.read(hidden[:, first:last], cache=cache)
                cache.commit_(torch.tensor([last - first]))
        block = torch.full((1, size), config.mask_token)
        block[0, 0] = tokens[0, anchor]
        ours = found.logits(found(embed(block), cache=cache), target.embedding)
        torch.testing.assert_close(ours, expected[:, number * size : (number + 1) * size], rtol=1e-4, atol=1e-4)


def test_windows_of_layers_that_no_list_names(target: Transformer, tmp_path: Path) -> None:
    """The class of the layers' config makes the list from the first layer with a window."""
    save_drafter(a_head("windows"), tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    config = json.loads(file.read_text())
    layers = config["transformer_layer_config"]
    del layers["layer_types"]
    layers |= {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    file.write_text(json.dumps(config))
    found = load_drafter(tmp_path / "head", target).config.body.windows
    assert found == (None, Window(3))
    transformers = pytest.importorskip("transformers", reason="compares with its class")
    kinds = transformers.Qwen3Config(**layers).layer_types
    assert [kind == "sliding_attention" for kind in kinds] == [window is not None for window in found]
