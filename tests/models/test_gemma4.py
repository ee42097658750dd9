"""Gemma 4 from folders: logits and tokens of transformers, past its windows, with heads of two sizes, layers that read the
keys of others, what layers get of tokens themselves, and experts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pdkernels as pd
from pdkernels import models
from pdkernels.cache import PooledWindowedCache, WindowedCache
from pdkernels.decoding import generate
from pdkernels.models.checkpoints.gemma4 import from_gemma4_config
from pdkernels.training import attach_drafter_, new_dflash_head, new_eagle_head
from tests.support import quantized_files

transformers = pytest.importorskip("transformers", reason="builds models with transformers", minversion="5.24")
from tests.integrations.test_shadow import small  # noqa: E402
from tests.models.test_gemma3 import NEW, TOKENS, theirs  # noqa: E402

S, F = "sliding_attention", "full_attention"
SIZES = {
    "num_hidden_layers": 4, "layer_types": [S, F, S, F], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 32, "intermediate_size": 64, "max_position_embeddings": 512,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64, "vocab_size": 64,
}  # fmt: skip
SHARED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 4.0}
INPUTS = {"hidden_size_per_layer_input": 32}
KINDS: dict[str, dict[str, Any]] = {
    "31B": {**SHARED},
    "E2B": {**INPUTS, "num_hidden_layers": 7, "layer_types": [S, F, S, S, S, S, F], "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "num_key_value_heads": 1},
    "26B": {**SHARED, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    "all": {**SHARED, **INPUTS, "num_hidden_layers": 6, "layer_types": [S, F, S, F, S, F], "num_kv_shared_layers": 2, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32},
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {"autoregressive": {}, "jacobi": {"block_size": 9}, "suffix": {"block_size": 8}}


def a_model(kind: str, window: int = 7, **more: Any) -> Any:
    model = small("Gemma4Text", **{**SIZES, "sliding_window": window, **KINDS[kind], **more})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.6 if "self_attn" in name else 1.0, 0.2)
        for index, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(0.6 + 0.1 * index)
    return model.requires_grad_(False)


def folder_of(kind: str, folder: Path, **more: Any) -> Any:
    model = a_model(kind, **more)
    model.save_pretrained(folder)
    return model


def changed(folder: Path, **changes: Any) -> None:
    """Fields of its config.json; an Ellipsis takes one away."""
    file = folder / "config.json"
    fields = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def check_logits(own: Any, model: Any) -> None:
    tokens = torch.tensor([TOKENS])
    torch.testing.assert_close(own(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [2, 7, 16, 512])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_folder(kind: str, window: int, tmp_path: Path) -> None:
    model = folder_of(kind, tmp_path, window=window)
    own: Any = models.load(tmp_path, dtype=torch.float32)
    check_logits(own, model)
    tokens, logits = torch.tensor([TOKENS]), model(torch.tensor([TOKENS])).logits
    cache = own.new_cache(1, 64)
    with torch.inference_mode():
        for part in tokens.split([11, 1, 28], 1):
            at = int(cache.lengths)
            found = own(part, cache=cache)
            torch.testing.assert_close(found, logits[:, at : at + part.shape[1]], rtol=1e-4, atol=1e-4)
            cache.commit_(torch.tensor([part.shape[1]]))
    expected = theirs(model), theirs(model, TOKENS[:3])
    assert len(set(expected[0])) > 3
    for method, options in METHODS.items():
        for page_size in (None, 7):
            more: dict[str, Any] = {**options, "page_size": page_size}
            found = generate(own, [TOKENS, TOKENS[:3]], method, max_new_tokens=NEW, end_tokens=(), **more).tokens
            assert (found[0].tolist(), found[1].tolist()) == expected


@pytest.mark.parametrize("kind", ["E2B", "all"])
@pytest.mark.filterwarnings("ignore")
def test_double_precision(kind: str, tmp_path: Path) -> None:
    """Where no kernel computes attention: masks that are made dense, prefixes that are copied."""
    model = folder_of(kind, tmp_path).double()
    model.set_experts_implementation("eager")
    own: Any = models.load(tmp_path, dtype=torch.float64)
    tokens, logits = torch.tensor([TOKENS]), model(torch.tensor([TOKENS])).logits
    torch.testing.assert_close(own(tokens), logits, rtol=1e-5, atol=1e-5)  # whose norms are in float32
    cache = own.new_cache(1, 64, kind="paged", page_size=7)
    cache.reserve_([64])
    for part in tokens.split([11, 29], 1):
        at = int(cache.lengths)
        found = own(part, cache=cache)
        torch.testing.assert_close(found, own(tokens)[:, at : at + part.shape[1]], rtol=1e-9, atol=1e-9)
        cache.commit_(torch.tensor([part.shape[1]]))


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_drafts_do_not_change_the_tokens(kind: str, cache_dtype: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """In 16 bits, on contiguous caches, pages, pages that take turns, and those of an engine, with temperature."""
    monkeypatch.setattr("pdkernels.engine.pages.PAGE", 8)
    for module in ("pdkernels.engine.pages", "pdkernels.cache.windowed_pool"):
        monkeypatch.setattr(f"{module}.PIECE", 32)
    folder_of(kind, tmp_path)
    own: Any = models.load(tmp_path, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    text = [(13 * i * i + i) % 61 for i in range(330)]
    for temperature in (0.0, 0.8):
        settings: dict[str, Any] = {"max_new_tokens": NEW, "end_tokens": (), "temperature": temperature, "seed": 5}
        alone = generate(own, text, **settings).tokens
        for method, options in METHODS.items():
            for page_size in (None, 8):
                more: Any = {**options, "page_size": page_size, **settings}
                assert torch.equal(generate(own, text, method, **more).tokens, alone), (method, page_size)
        twice = generate(own, [text, text], "jacobi", block_size=9, page_size=8, **settings).tokens
        assert torch.equal(twice[0], alone)
        with pd.Engine(own, max_running=2, max_prompt_tokens=330, max_new_tokens=NEW) as engine:
            for _ in range(2):  # the second time after an earlier text
                requests = [engine.submit(text, method, **settings) for method in ("autoregressive", "jacobi")]
                assert all(torch.equal(request.result().tokens, alone) for request in requests)
            shorter = engine.submit(text[:310], **settings).result().tokens
            assert torch.equal(shorter, generate(own, text[:310], **settings).tokens)
            assert isinstance(engine._memory.pages.pool, pd.cache.WindowedPool)


@pytest.mark.filterwarnings("ignore")
def test_caches(tmp_path: Path) -> None:
    """Only layers with keys and values of their own are in them."""
    folder_of("E2B", tmp_path)
    own: Any = models.load(tmp_path, dtype=torch.float32)
    assert [own.config.source(layer) for layer in range(7)] == [0, 1, 2, 3, 3, 3, 1]
    assert own.new_cache(2, 10).k.shape == (4, 2, 10, 1, 32)
    turning, contiguous = own.new_cache(2, 1000, kind="paged", page_size=8, drafts=4), own.new_cache(1, 30)
    assert isinstance(turning, WindowedCache)  # whose rows are as wide as their layers need
    assert [tuple(rows.shape[-2:]) for rows in turning.k] == [(1, 16), (1, 32), (1, 16), (1, 16)]
    tokens = torch.tensor([TOKENS[:20]])
    with torch.inference_mode():
        own(tokens, cache=contiguous)
        contiguous.commit_(torch.tensor([20]))
        turning.reserve_([30, 30])
        turning.copy_row_(1, contiguous, 0, 20)
        next_tokens = torch.tensor([[1], [1]])
        expected = own(next_tokens[:1], cache=contiguous)
        assert torch.equal(own(next_tokens, cache=turning)[1:], expected)
    pool = own.new_pool(20, 8, window_pages={7: 40})
    assert isinstance(own.new_cache(1, 100, pool=pool), PooledWindowedCache) and pool.windows == (7, None, 7, 7)
    assert pool.k.shape == (1, 21, 8, 1, 32) and pool.groups[7].k.shape == (3, 41, 8, 1, 16)
    wide = replace(own.config, heads=8, kv_heads=8, head_dim=16, full_kv_heads=1, full_head_dim=136)
    assert wide.cache_heads == (8, 24)  # 8 rows of 20 bytes and one of 140, 128 numbers and 136


@pytest.mark.parametrize("kind", ["E2B", "26B"])
@pytest.mark.filterwarnings("ignore")
def test_packed_weights(kind: str, tmp_path: Path) -> None:
    model = folder_of(kind, tmp_path)
    own: Any = models.load(tmp_path, dtype=torch.float32)
    packed: Any = pd.quantize(own, "int8", group=32)
    names = {name.rpartition(".")[2] for name, _ in own.named_parameters()} - {
        name.rpartition(".")[2] for name, _ in packed.named_parameters()
    }
    inputs = {"layer_embedding", "layer_projection", "input_gate", "input_projection"}
    mixture = {"experts_gate_up", "experts_down"}
    assert names == {"embedding", "qkv", "output", "gate_up", "down", *(inputs if kind == "E2B" else mixture)}
    tokens = torch.tensor([TOKENS])
    exact, found = model(tokens).logits, packed(tokens)
    assert (found - exact).norm() < 0.25 * exact.norm()
    settings: dict[str, Any] = {"max_new_tokens": NEW, "end_tokens": ()}
    alone = generate(packed, TOKENS, **settings).tokens
    for method, options in METHODS.items():
        more: Any = {**options, "page_size": 16, **settings}
        assert torch.equal(generate(packed, TOKENS, method, **more).tokens, alone)


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_folder(tmp_path: Path) -> None:
    """What layers get of tokens is an embedding, which a group of linear layers is not for."""
    folder_of("E2B", tmp_path)
    kind, file = quantized_files.KINDS["packed 4 of 32"], tmp_path / "model.safetensors"
    stored, numbers = load_file(file), {}
    for name in [name for name, tensor in stored.items() if tensor.dim() == 2 and "embed" not in name]:
        matrix = quantized_files.quantised(stored.pop(name), kind.bits, kind.group, symmetric=kind.symmetric, dtype=kind.dtype)  # fmt: skip
        module, numbers[name] = name.removesuffix(".weight"), matrix.numbers()
        stored |= {f"{module}.{part}": value for part, value in kind.pack(matrix).items()}
    save_file(stored, file)
    changed(tmp_path, quantization_config=kind.config)
    own: Any = models.load(tmp_path, dtype=torch.float32)
    assert torch.equal(own.layer_embedding, stored["model.embed_tokens_per_layer.weight"])
    found = own.layers[2].input_gate.dequantize(kind.dtype)
    assert torch.equal(found, numbers["model.layers.2.per_layer_input_gate.weight"])
    exact: Any = models.load(tmp_path, dtype=torch.float32, packed=False)
    tokens = torch.tensor([TOKENS])
    assert (own(tokens) - exact(tokens)).norm() < 0.1 * exact(tokens).norm()


@pytest.mark.parametrize("kind", ["E2B", "26B"])
@pytest.mark.filterwarnings("ignore")
def test_adapters(kind: str, tmp_path: Path) -> None:
    """Of requests, and merged: as PEFT."""
    peft = pytest.importorskip("peft")
    model = folder_of(kind, tmp_path / "base")
    targets = "(.*q_proj|.*k_proj|.*v_proj|.*o_proj|.*mlp.(gate|up|down)_proj)"
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    for name, parameter in theirs.named_parameters():
        if "lora" in name:
            parameter.data.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "lora")
    tokens = torch.tensor([TOKENS, TOKENS])
    with torch.no_grad():
        adapted = theirs(tokens).logits[0]
        with theirs.disable_adapter():
            plain = theirs(tokens).logits[0]
    own: Any = models.load(tmp_path / "base", dtype=torch.float32)
    models.load_adapter(own, "a", tmp_path / "lora")
    cache = own.new_cache(2, 64)
    cache.adapt_([own.adapters["a"], None])
    with torch.inference_mode():
        found = own(tokens, cache=cache)
    torch.testing.assert_close(found, torch.stack([adapted, plain]), rtol=1e-4, atol=1e-4)
    merged: Any = models.load(tmp_path / "base", dtype=torch.float32, adapter=tmp_path / "lora")
    torch.testing.assert_close(merged(tokens)[0], adapted, rtol=1e-4, atol=1e-4)
    assert (adapted - plain).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore")
def test_gradients(tmp_path: Path) -> None:
    model = folder_of("all", tmp_path).requires_grad_(True)
    own: Any = models.load(tmp_path, dtype=torch.float32).requires_grad_(True)
    tokens = torch.tensor([TOKENS])
    model(tokens).logits.square().sum().backward()
    own(tokens).square().sum().backward()
    layer, found = model.model.layers[1], own.layers[1]
    expected = torch.cat([layer.self_attn.q_proj.weight.grad, layer.self_attn.k_proj.weight.grad])
    torch.testing.assert_close(found.qkv.grad, expected, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(own.layer_embedding.grad, model.model.embed_tokens_per_layer.weight.grad, rtol=1e-3, atol=1e-2)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_inputs_of_layers(tmp_path: Path) -> None:
    """`tapped` has the hidden states of transformers."""
    model = folder_of("E2B", tmp_path)
    own: Any = models.load(tmp_path, dtype=torch.float32)
    states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    hidden, features = own.tapped(torch.tensor([TOKENS]), [0, 2, 6, 7])
    expected = torch.stack([states[tap] for tap in (0, 2, 6)], 2)
    torch.testing.assert_close(features[:, :, :3], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(features[:, :, 3], hidden)


@pytest.mark.parametrize("kind", ["31B", "E2B"])
@pytest.mark.filterwarnings("ignore")
def test_a_published_folder(kind: str, tmp_path: Path) -> None:
    """Fields of their own for layers that see the whole text, no rules of rotations, and in layers that read keys the
    matrices that nobody reads."""
    model = folder_of(kind, tmp_path)
    published = {name: value for name, value in {**SIZES, **KINDS[kind]}.items() if "global" in name}
    changed(tmp_path, per_layer_config=..., rope_parameters=..., **published)
    state = load_file(tmp_path / "model.safetensors")
    for name in list(state):
        if "layers.0.self_attn" in name and ("k_" in name or "v_" in name):
            unread = {f"layers.{layer}." for layer in (4, 5, 6)} if kind == "E2B" else set()
            state |= {name.replace("layers.0.", layer): state[name].clone() for layer in unread}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_logits(models.load(tmp_path, dtype=torch.float32), model)


VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])  # its class does not read what is inside
@pytest.mark.parametrize("kind", ["Gemma4", "Gemma4Unified"])
@pytest.mark.filterwarnings("ignore")
def test_the_language_model_of_a_larger_one(kind: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, **SIZES, **SHARED, "sliding_window": 7}
    images = {"vision_config": VISION} if kind == "Gemma4" else {}
    if kind == "Gemma4Unified":
        sizes = {name: value for name, value in sizes.items() if "per_layer_input" not in name}
    config = getattr(transformers, f"{kind}Config")(text_config=sizes, tie_word_embeddings=tied, **images)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval().requires_grad_(False)
    for parameter in (*model.model.language_model.parameters(), model.lm_head.weight):
        parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    own: Any = models.load(tmp_path, dtype=torch.float32)
    check_logits(own, model)
    assert own.config.max_positions == 512 and own.end_tokens == (1,) and own.config.tied_head is tied


@pytest.mark.parametrize("inside", [{}, {"partial_rotary_factor": 0.25}])
@pytest.mark.filterwarnings("ignore")
def test_a_share_outside(inside: dict[str, float], tmp_path: Path) -> None:
    """It is for rules that have none."""
    folder_of("31B", tmp_path)
    rules = {F: {"rope_type": "proportional", "rope_theta": 1000.0, **inside}, S: {"rope_type": "default", "rope_theta": 100.0}}  # fmt: skip
    changed(tmp_path, rope_parameters=rules, partial_rotary_factor=0.5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False)
    check_logits(models.load(tmp_path, dtype=torch.float32), model)


@pytest.mark.parametrize("stated", [{}, None])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_heads_of_one_size(shared: bool, stated: dict[str, Any] | None, tmp_path: Path) -> None:
    """transformers then writes that no layer differs, and reads a null as that."""
    alike = {"global_head_dim": 16, "num_global_key_value_heads": None, "attention_k_eq_v": shared}
    model = folder_of("31B", tmp_path, **alike)
    assert json.loads((tmp_path / "config.json").read_text())["per_layer_config"] == {}
    changed(tmp_path, per_layer_config=stated)
    check_logits(models.load(tmp_path, dtype=torch.float32), model)
    check_logits(
        models.load(tmp_path, dtype=torch.float32),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False),
    )


@pytest.mark.filterwarnings("ignore")
def test_defaults_of_both_classes(tmp_path: Path) -> None:
    for name in ("gemma4_text", "gemma4_unified_text"):
        config = transformers.AutoConfig.for_model(name)
        given = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
        fields = {"model_type": name, **{field: getattr(config, field) for field in given}}
        own, whole = from_gemma4_config(fields), from_gemma4_config(json.loads(config.to_json_string()))
        assert own == whole and own.layer_input_size == getattr(config, "hidden_size_per_layer_input", 0)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"sliding_window": 0}, ValueError, "sliding_window must be .* got 0"),
        ({"sliding_window": -5}, ValueError, "sliding_window must be .* got -5"),
        ({"layer_types": [S, F]}, ValueError, "layer_types must name 7 layers"),
        ({"layer_types": [S] * 7}, NotImplementedError, "layer_types must end with full_attention"),
        ({"num_kv_shared_layers": 7}, ValueError, "reading_layers must be below layers \\(7\\), got 7"),
        ({"num_kv_shared_layers": 6}, ValueError, "reading_layers must leave a layer of each kind"),
        ({"vocab_size_per_layer_input": 63}, NotImplementedError, "vocab_size_per_layer_input must be vocab_size"),
        ({"use_bidirectional_attention": "all"}, NotImplementedError, "use_bidirectional_attention must be null or"),
        ({"hidden_activation": "silu"}, NotImplementedError, "hidden_activation must be 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, NotImplementedError, "attention_bias must be false"),
        ({"final_logit_softcapping": 0}, ValueError, "final_logit_softcapping must be a number above 0"),
        ({"head_dim": 12}, ValueError, "head_dim must be a multiple of 8"),
        ({"per_layer_config": None}, ValueError, "must have shape"),  # then all heads have one size
        ({"per_layer_config": {"1": {"head_dim": 32}}}, NotImplementedError, "per_layer_config must name the layers"),
        ({"per_layer_config": {"1": {"head_dim": 32}, "6": {"head_dim": 16}}}, NotImplementedError, "in the same way"),
        ({"per_layer_config": {"1": {"x": 1}, "6": {"x": 1}}}, NotImplementedError, "per_layer_config: 'x' must be absent"),
        ({"per_layer_config": {"1": 3, "6": 3}}, ValueError, "per_layer_config: 1 must hold an object"),
        ({"rope_parameters": {"rope_theta": 5.0}}, NotImplementedError, "'rope_theta' must be inside the rule"),
        ({"rope_parameters": {F: {"rope_theta": 5.0}}}, ValueError, "rope_parameters must hold 'sliding_attention'"),
        ({"rope_parameters": {F: {"rope_type": "yarn"}, S: {}}}, NotImplementedError, "rope_type must be default or prop"),
        ({"enable_moe_block": True}, ValueError, "num_experts must be"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8}, ValueError, "per_token must be at most count"),
        ({"hidden_size_per_layer_input": 16}, ValueError, "must have shape"),
        ({"use_double_wide_mlp": False}, ValueError, "must have shape"),
        ({"num_kv_shared_layers": 0, "use_double_wide_mlp": False}, ValueError, "must hold every tensor|must have shape"),
        ({"attention_k_eq_v": True}, ValueError, "hold only tensors of its config.json"),
        ({"attn_logit_softcapping": 50.0}, NotImplementedError, "attn_logit_softcapping must be null, got 50.0"),
        ({"is_causal": False}, NotImplementedError, "is_causal must be true, got False"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    folder_of("E2B", tmp_path)
    changed(tmp_path, **changes)
    with pytest.raises(error, match=text):
        models.load(tmp_path)


A_CONFIG = models.Gemma4Config(
    vocab_size=64, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=32,
    windows=(models.Window(4), None), window_rope_theta=1e4, full_head_dim=32,
)  # fmt: skip


def test_what_other_parts_refuse() -> None:
    config = A_CONFIG
    with pytest.raises(ValueError, match="Gemma4Config: qk_norm must be True, got False"):
        replace(config, qk_norm=False)
    with pytest.raises(ValueError, match="Gemma4Config: window_rope_theta must be a number"):
        replace(config, window_rope_theta=None)
    with pytest.raises(ValueError, match="Gemma4Config: experts must be a softmax's in all layers"):
        replace(config, experts=models.ExpertsConfig(count=4, per_token=2, intermediate_size=8, first=1))
    model = models.Gemma4(config).requires_grad_(False)
    with pytest.raises(NotImplementedError, match="cannot compute rows anew"):
        model.recompute(torch.tensor([[1]]), model.new_cache(1, 4), torch.tensor([0]), visible=torch.tensor([1]))
    with pytest.raises(ValueError, match="cu_seqlens must come with a cache, for a model that packs_rows"):
        model(torch.tensor([[1]]), cache=model.new_cache(1, 4), cu_seqlens=torch.tensor([0, 1]))
    with pytest.raises(NotImplementedError, match="LLaDA, Dream"):
        models.save_gguf(model, "no.gguf")
    with pytest.raises(NotImplementedError, match="gpt-oss or Gemma"):
        models.to_hf_state_dict(model.state_dict(), config)
    for make in (partial(new_eagle_head, model, torch.arange(4)), partial(new_dflash_head, model, 4, mask_token=1)):
        with pytest.raises(NotImplementedError, match="model must have layers of one size, got a Gemma4"):
            make()


def test_a_drafting_adapter() -> None:
    """Layers have outputs of different widths."""
    model = models.Gemma4(A_CONFIG)
    attach_drafter_(model, 3)
    assert [layer.adapter_in.shape for layer in model.layers] == [(3, 32), (3, 64)]
    torch.nn.init.normal_(model.layers[1].adapter_out)
    tokens = torch.tensor([[1, 2, 3]])
    assert not torch.equal(model(tokens, adapted=True), model(tokens))
