"""``attn_implementation="pdkernels"`` on every shape of attention that models of transformers have: its own sdpa is the oracle."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from pdkernels.integrations.transformers import PdCache, register, wrap  # noqa: E402
from pdkernels.integrations.transformers._attention import REFUSED  # noqa: E402
from pdkernels.integrations.transformers._rows import narrowed, widened  # noqa: E402
from tests.support.transformers_names import CACHE, VERSION  # noqa: E402

MLA: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 49,
    "pad_token_id": 0,
}


def module(heads: int, kv_heads: int, causal: bool) -> Any:
    made = torch.nn.Module().eval()
    made.is_causal, made.num_key_value_groups = causal, heads // kv_heads
    return made


@torch.no_grad()
@pytest.mark.parametrize("width", [16, 24, 64, 128, 136, 192, 256, 512, 520, 1000])
@pytest.mark.parametrize("values", [-8, 0, 8], ids=["narrower", "equal", "wider"])
@pytest.mark.parametrize("causal", [True, False])
def test_widths_of_heads(width: int, values: int, causal: bool) -> None:
    check(4, 2, 7, 7, width, width + values, causal, None, None)


@torch.no_grad()
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (6, 2), (10, 2), (7, 1), (14, 2), (48, 4), (5, 5)])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_groups_and_scales(heads: int, kv_heads: int, scale: float | None) -> None:
    check(heads, kv_heads, 5, 5, 32, 24, True, scale, None)


@torch.no_grad()
@pytest.mark.parametrize(("rows", "keys"), [(1, 9), (4, 9), (9, 4), (7, 7)])
@pytest.mark.parametrize("values", [24, 32, 40])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_cross_attention(rows: int, keys: int, values: int, mask: str | None) -> None:
    """Rows that read another sequence, all of it or what a 4-D mask shows."""
    shown: torch.Tensor | None = None
    if mask is not None:
        shown = torch.rand(2, 1, rows, keys) < 0.6
        shown[..., 0] = True
        shown = shown if mask == "bool" else torch.where(shown, torch.randn(shown.shape), -torch.inf)
    check(4, 2, rows, keys, 32, values, False, None, shown)


def check(
    heads: int,
    kv_heads: int,
    rows: int,
    keys: int,
    width: int,
    values: int,
    causal: bool,
    scale: float | None,
    mask: torch.Tensor | None,
) -> None:
    register()
    attend, layer = transformers.AttentionInterface()["pdkernels"], module(heads, kv_heads, causal)
    q, k = torch.randn(2, heads, rows, width), torch.randn(2, kv_heads, keys, width)
    v = torch.randn(2, kv_heads, keys, values)
    ours = attend(layer, q, k, v, mask, scaling=scale, is_causal=causal)[0]
    theirs = sdpa_attention_forward(layer, q, k, v, mask, scaling=scale, is_causal=causal)[0]
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_gradients_of_narrower_values() -> None:
    register()
    layer = module(4, 2, True)
    found = []
    for attend in (transformers.AttentionInterface()["pdkernels"], sdpa_attention_forward):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, n, 6, width, requires_grad=True) for n, width in ((4, 32), (2, 32), (2, 24)))
        attend(layer, q, k, v, None)[0].square().sum().backward()
        found.append([x.grad for x in (q, k, v)])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


MASKED: dict[str, dict[str, Any]] = {
    "BigBirdPegasus": {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64},
    "Doge": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
}


@torch.no_grad()
@pytest.mark.parametrize("name", MASKED)
def test_models_that_would_see_later_tokens_are_refused(name: str) -> None:
    """BigBird-Pegasus calls its causal layers not causal, and Doge computes with its mask."""
    register()
    sizes = {"vocab_size": 50, "is_encoder_decoder": False, "is_decoder": True, "pad_token_id": 0, "eos_token_id": 1}
    config = getattr(transformers, f"{name}Config")(**sizes, **MASKED[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_attn_implementation("pdkernels")
    tokens = torch.randint(3, 40, (2, 11))
    if name == "BigBirdPegasus" and VERSION < (5, 0):  # whose layers have a mask
        ours = model(tokens).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(ours, model(tokens).logits, atol=1e-4, rtol=1e-4)
        return
    if name == "Doge" and (5, 0) <= VERSION < (5, 23):
        pytest.skip("in 5.15 its own sdpa sees them, too")
    words = "keeps masks as tile plans" if name == "Doge" else "is_causal must be True in causal layers"
    with pytest.raises(NotImplementedError, match=words):
        model(tokens)


@torch.no_grad()
@pytest.mark.skipif(VERSION < (5, 0), reason="Gemma of this version is causal")
def test_layers_without_a_mask_say_whether_they_are_causal() -> None:
    """PaliGemma's text layers are not; sdpa is the oracle, since eager layers have a mask."""
    register()
    config = transformers.GemmaConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        initializer_range=0.2,
        use_bidirectional_attention=True,
    )
    model = transformers.GemmaForCausalLM(config).eval()
    tokens, found = torch.randint(3, 40, (2, 11)), []
    for implementation in ("sdpa", "pdkernels"):
        model.set_attn_implementation(implementation)
        found.append(model(tokens).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [1, 8, 12, 15, 20, 100, 508])
def test_widths_that_are_refused_by_name(width: int) -> None:
    register()
    q = torch.zeros(1, 2, 3, width)
    with pytest.raises(NotImplementedError, match=f"multiple of 8 in .*with heads of {width}"):
        transformers.AttentionInterface()["pdkernels"](torch.nn.Module(), q, q, q, None)


@pytest.mark.parametrize(
    "options", [{"softcap": 30.0}, {"position_bias": torch.zeros(1, 4, 3, 3)}, {"attention_bias": torch.zeros(1)}, {"dropout": 0.1}, {"output_attentions": True}, {"block_indices": torch.zeros(1)}, {"indices": torch.zeros(1)}, {"sinks": torch.zeros(1)}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_narrower_values_are_refused_what_others_are(options: dict[str, Any]) -> None:
    register()
    q, v = torch.zeros(1, 4, 3, 32), torch.zeros(1, 4, 3, 24)
    with pytest.raises(NotImplementedError, match=next(iter(options))):
        transformers.AttentionInterface()["pdkernels"](torch.nn.Module(), q, q, v, None, **options)


@pytest.mark.parametrize(
    "settings",
    [{"position_embedding_type": "relative_key"}, {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_what_a_layer_says_itself_is_refused(settings: dict[str, Any]) -> None:
    register()
    layer, q = module(2, 2, True), torch.zeros(1, 2, 3, 16)
    vars(layer).update(settings)
    with pytest.raises(NotImplementedError, match=next(iter(settings))):
        transformers.AttentionInterface()["pdkernels"](layer, q, q, q, None)


def test_attention_of_transformers_takes_no_other_arguments() -> None:
    """Every argument of the models' own attention functions, and all that these read from their layer, is followed or refused."""
    followed = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "s_aux", "is_causal"}
    same = {"query_states", "key_states", "value_states"}  # of functions inside eager ones
    in_mask = {"sliding_window"}
    refused = {*REFUSED, "output_attentions"}
    of_layer = {"num_key_value_groups", "training", "head_dim", "layer_idx", "sinks"}  # sinks are passed as s_aux too
    of_old = {"position_embedding_type", "distance_embedding", "max_position_embeddings", "scale_attn_weights"}
    of_old |= {"scale_attn_by_inverse_layer_idx", "is_cross_attention", "attn_dropout", "bias"}
    arguments, read = set(), set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        if path.parent.name == "modernbert":  # whose functions in 4.57 are not those of AttentionInterface
            continue
        for found in re.finditer(r"^def \w*attention_forward\(.*?(?=^\S(?<!\)))", path.read_text(), re.M | re.S):
            [function] = ast.parse(found[0]).body
            assert isinstance(function, ast.FunctionDef)
            arguments |= {a.arg for a in [*function.args.args, *function.args.kwonlyargs]}
            read |= {
                node.attr
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "module"
            }
    assert {"query", "softcap"} <= arguments and "num_key_value_groups" in read
    assert not arguments - followed - same - in_mask - refused
    assert not read - of_layer - of_old


def test_rows_of_a_cache_are_widened_without_a_copy() -> None:
    rows = torch.arange(24.0).view(1, 1, 3, 8)
    cut = narrowed(rows, 5)
    assert cut.shape == (1, 1, 3, 5) and widened(cut, 8) is rows
    assert torch.equal(widened(cut.clone(), 8), torch.nn.functional.pad(cut, (0, 3)))
    assert narrowed(rows, 8) is rows and widened(rows, 8) is rows


# ---- DeepSeek's MLA


def deepseek(values: int) -> Any:
    register()
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**MLA, v_head_dim=values)
    return transformers.DeepseekV3ForCausalLM(config).eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "pdkernels"])
@pytest.mark.parametrize("values", [24, 40])
def test_latent_attention_on_any_cache(implementation: str, values: int) -> None:
    """Values narrower and wider than keys; padding, beams and drafts too."""
    model, tokens = deepseek(values), torch.randint(1, 40, (2, 9))
    padding = {"attention_mask": (torch.arange(9) >= torch.tensor([[3], [0]])).long()}

    def texts(tokens: torch.Tensor, cache: Any = None, **more: Any) -> Any:
        return model.generate(tokens, max_new_tokens=6, do_sample=False, **{CACHE: cache}, **more)

    model.set_attn_implementation("sdpa")
    plain, padded, beams = texts(tokens), texts(tokens, **padding), texts(tokens[:1], num_beams=3)
    model.set_attn_implementation(implementation)
    config = model.config
    assert torch.equal(texts(tokens), plain) and torch.equal(texts(tokens, **padding), padded)
    assert torch.equal(texts(tokens, PdCache(config, 2, 16)), plain)
    assert torch.equal(texts(tokens, PdCache(config, 2, 16, kind="paged", page_size=4)), plain)
    assert torch.equal(texts(tokens, PdCache(config, 2, 16), **padding), padded)
    assert torch.equal(texts(tokens[:1], PdCache(config, 3, 16), num_beams=3), beams)
    drafts = {"prompt_lookup_num_tokens": 3}
    assert torch.equal(texts(tokens[:1], PdCache(config, 1, 24), **drafts), plain[:1])


@pytest.mark.parametrize("widths", [(32, 24), (24, 40), (16, 16)], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_a_cache_of_two_widths(widths: tuple[int, int], kind: Any) -> None:
    register()
    attend, layer = transformers.AttentionInterface()["pdkernels"], module(4, 2, True)
    config = transformers.LlamaConfig(num_hidden_layers=1)
    ours, theirs = PdCache(config, 2, 16, kind=kind, page_size=4), transformers.DynamicCache(config=config)
    for rows in (5, 1, 3):
        k, v = (torch.randn(2, 2, rows, width) for width in widths)
        mine, their = ours.update(k, v, 0), theirs.update(k, v, 0)
        assert [x.shape for x in mine] == [x.shape for x in their]
        q = torch.randn(2, 4, rows, widths[0])
        shown = torch.ones(rows, their[0].shape[2], dtype=torch.bool).tril(their[0].shape[2] - rows)
        wanted = sdpa_attention_forward(layer, q, *their, shown[None, None])[0]
        torch.testing.assert_close(attend(layer, q, *mine, None)[0], wanted, atol=1e-5, rtol=0)
        if widths[0] != widths[1] and kind == "contiguous":
            assert widened(min(mine, key=lambda x: x.shape[3]), max(widths)).data_ptr() in (
                ours.storage.k.data_ptr(),
                ours.storage.v.data_ptr(),
            )
    assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
    assert torch.equal(ours.layers[0].values, theirs.layers[0].values)


def test_latent_attention_in_our_decoders() -> None:
    import pdkernels as pd

    model, tokens = deepseek(24), torch.randint(1, 40, (1, 9))
    plain = model.generate(tokens, max_new_tokens=6, do_sample=False)[0, 9:].tolist()
    for options in ({}, {"page_size": 4}):
        found = pd.decoding.generate(
            wrap(model), tokens[0].tolist(), "jacobi", max_new_tokens=6, end_tokens=(), **options
        )
        assert found.tokens.tolist() == plain
