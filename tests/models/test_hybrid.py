"""Hybrid models in folders and GGUF files, against transformers; training, against the ops of inference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import pdkernels as pd
from pdkernels.models.architectures import tree_scan
from pdkernels.models.architectures.hybrid import Hybrid, HybridConfig
from pdkernels.models.checkpoints.hybrid_hf import from_hybrid_config

transformers = pytest.importorskip("transformers", reason="the models are of transformers 5", minversion="5.20")
V = 61
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
QWEN: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "max_position_embeddings": 256, "eos_token_id": 5,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
LFM2: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "block_multiple_of": 32, "max_position_embeddings": 256, "eos_token_id": 5, "rope_parameters": ROPE,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}  # fmt: skip


def random_model(made: Any) -> Any:
    model = made.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.dim() >= 2 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def build(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    if kind == "lfm2":
        return random_model(transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**LFM2 | more)))
    text = QWEN | more
    if kind == "qwen3_5_text":
        return random_model(transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**text)))
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 8,
    }
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    return random_model(transformers.Qwen3_5ForConditionalGeneration(config))


def tokens_of(rows: int = 40) -> torch.Tensor:
    return torch.randint(0, V, (2, rows), generator=torch.Generator().manual_seed(1))


def theirs_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


def close(ours: torch.Tensor, theirs: torch.Tensor, budget: float) -> bool:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm()) < budget


FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("qwen3_5_text", {}),
    "qwen, tied": ("qwen3_5_text", {"tie_word_embeddings": True}),
    "qwen, equal heads": ("qwen3_5_text", {"linear_num_key_heads": 4}),
    "qwen, other layers": ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention"] * 2}),
    "qwen with images": ("qwen3_5", {}),
    "lfm2": ("lfm2", {}),
    "lfm2, untied": ("lfm2", {"tie_word_embeddings": False}),
    "lfm2, plain sizes": ("lfm2", {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4}),
}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind, more = FOLDERS[name]
    model = build(kind, **more).to(dtype)
    model.save_pretrained(tmp_path)
    ours, tokens = pd.models.load(tmp_path), tokens_of()
    assert isinstance(ours, Hybrid) and ours.dtype == dtype and ours.end_tokens == (5,)
    theirs = theirs_of(model, tokens)
    exact, budget = (theirs, 2e-4) if dtype == torch.float32 else (theirs_of(model.float(), tokens), 0.0)
    if dtype == torch.bfloat16:  # no further from the exact logits than transformers' own
        budget = 1.5 * float((theirs.float() - exact).norm() / exact.norm())
    assert close(ours(tokens), exact, budget)
    cache, found = ours.new_cache(2, 64, kind="paged", page_size=5), []
    cache.reserve_(40)
    for part in tokens.split([1, 1, 17, 1, 20], 1):
        found.append(ours(part, cache=cache))
        cache.commit_(torch.full((2,), part.shape[1]))
    assert close(torch.cat(found, 1), exact, budget)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
def test_the_tokens_of_generate(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    model.save_pretrained(tmp_path)
    ours = pd.models.load(tmp_path)
    ours.mask_token = V - 1
    texts = [[3, 4, 5], [7], [8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
    theirs = [
        model.generate(torch.tensor([text]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0, suppress_tokens=[V - 1])[0, len(text) :].tolist()
        for text in texts
    ]  # fmt: skip
    for method, options in (
        ("autoregressive", {}),
        ("jacobi", {"draft": "lookup"}),
        ("linear_self_speculation", {"block_size": 4}),
        ("quadratic_self_speculation", {"block_size": 4}),
    ):
        found = pd.decoding.generate(ours, texts, method, max_new_tokens=12, end_tokens=(), **options).tokens
        assert [tokens.tolist() for tokens in found] == theirs, method


def test_a_converted_model(tmp_path: Path) -> None:
    from pdkernels.integrations.transformers import from_transformers

    model, tokens = build("lfm2"), tokens_of()
    assert close(from_transformers(model)(tokens), theirs_of(model, tokens), 1e-4)


def tiled(tensor: np.ndarray, keys: int, ratio: int, dim: int, axis: int = 0) -> np.ndarray:
    """The order of value heads in llama.cpp's converter, from conversion/qwen.py: those of all key heads take turns."""
    shape = list(tensor.shape)
    split = tensor.reshape(*shape[:axis], keys, ratio, dim, *shape[axis + 1 :])
    return np.ascontiguousarray(split.swapaxes(axis, axis + 1)).reshape(shape)


def converted(name: str, array: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    """A tensor as the converter stores it."""
    if "conv" in name and array.ndim == 3:
        array = array[:, 0]
    if "linear_attn" in name:
        keys, values, dim = (
            fields[f"linear_{part}"] for part in ("num_key_heads", "num_value_heads", "value_head_dim")
        )
        ratio, before = values // keys, 2 * keys * fields["linear_key_head_dim"]
        if "in_proj_qkv" in name or "conv1d" in name:
            array = np.concatenate([array[:before], tiled(array[before:], keys, ratio, dim)])
        elif "in_proj_z" in name:
            array = tiled(array, keys, ratio, dim)
        elif "out_proj" in name:
            array = tiled(array, keys, ratio, dim, axis=1)
        elif "norm" not in name:
            array = tiled(array, keys, ratio, 1)
        return -np.exp(array) if name.endswith("A_log") else array
    return array + 1 if "linear_num_key_heads" in fields and name.endswith("norm.weight") else array


def write(path: Path, model: Any, kind: str, fields: dict[str, Any], arch: str) -> dict[str, torch.Tensor]:
    """A GGUF file with matrices of a kind. Returns the published tensors that it then holds."""
    gguf = pytest.importorskip("gguf")
    from tests.support.gguf_files import add

    writer, config = gguf.GGUFWriter(path, arch), model.config
    own = {
        "block_count": 4, "context_length": 256, "embedding_length": config.hidden_size,
        "feed_forward_length": (model.model.layers[0].mlp.gate_proj if arch == "qwen35" else model.model.layers[0].feed_forward.w1).out_features,
        "attention.head_count": 4, "rope.freq_base": 5000.0, "vocab_size": V,
    }  # fmt: skip
    if arch == "qwen35":
        own |= {
            "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 8,
            "attention.layer_norm_rms_epsilon": 1e-6, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2,
            "ssm.time_step_rank": 4, "ssm.inner_size": 128, "full_attention_interval": 4, "rope.dimension_sections": [2, 1, 1, 0],
        }  # fmt: skip
    else:
        own |= {"attention.layer_norm_rms_epsilon": 1e-5, "shortconv.l_cache": 3, "rope.dimension_count": 16}
        writer.add_head_count_kv([0, 2, 0, 0])
    for name, value in own.items():
        add(writer, f"{arch}.{name}", value)
    add(writer, "tokenizer.ggml.eos_token_id", 5)
    names, held = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 4), {}
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = tensor.float().numpy()
        exact = array.ndim != 2
        as_kind = gguf.GGMLQuantizationType["F32" if exact else kind]
        given = name.replace(".dt_bias", ".dt_proj.bias")
        data = gguf.quants.quantize(np.ascontiguousarray(converted(name, array, fields)), as_kind)
        writer.add_tensor(names.get_name(given, try_suffixes=(".weight", ".bias")), data, raw_dtype=as_kind)
        rounded = gguf.quants.dequantize(gguf.quants.quantize(array, as_kind), as_kind) if not exact else array
        held[name] = torch.from_numpy(np.array(rounded, np.float32)).view(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("arch", ["qwen35", "lfm2"])
def test_gguf_files(arch: str, kind: str, tmp_path: Path) -> None:
    model, fields = (build("qwen3_5_text"), QWEN) if arch == "qwen35" else (build("lfm2"), LFM2)
    held = write(tmp_path / "model.gguf", model, kind, fields, arch)
    model.load_state_dict(held, strict=False)
    tokens = tokens_of()
    theirs = theirs_of(model, tokens)
    ours = pd.models.load(tmp_path / "model.gguf", packed=False, dtype=torch.float32)
    assert isinstance(ours, Hybrid) and ours.end_tokens == (5,)
    assert close(ours(tokens), theirs, 5e-4)
    usual = pd.models.load(tmp_path / "model.gguf")
    assert usual.dtype == (torch.bfloat16 if kind == "BF16" else torch.float32)
    assert close(usual(tokens), theirs, 5e-4 if kind == "F32" else 0.25)


@pytest.mark.parametrize("arch", ["qwen35", "lfm2"])
def test_an_adapter_of_a_gguf_file(arch: str, tmp_path: Path) -> None:
    """Files of Qwen3.5 have the heads of values in another order than adapters, and norms plus 1."""
    model, fields = (build("qwen3_5_text"), QWEN) if arch == "qwen35" else (build("lfm2"), LFM2)
    write(tmp_path / "model.gguf", model, "F32", fields, arch)
    model.save_pretrained(tmp_path / "base")
    name = "layers.0.linear_attn.in_proj_z" if arch == "qwen35" else "layers.1.self_attn.q_proj"
    outputs, width = model.get_submodule(f"model.{name}").weight.shape
    halves = {"A": torch.randn(2, width), "B": torch.randn(outputs, 2)}
    (tmp_path / "lora").mkdir()
    pair = {f"base_model.model.model.{name}.lora_{half}.weight": numbers for half, numbers in halves.items()}
    save_file(pair, tmp_path / "lora" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [name.rpartition(".")[2]]}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(settings))
    expected = pd.models.load(tmp_path / "base", adapter=tmp_path / "lora")(tokens_of())
    if arch == "qwen35":
        with pytest.raises(NotImplementedError, match="the same order here, got one that changes .*in_proj_z"):
            pd.models.load(tmp_path / "model.gguf", adapter=tmp_path / "lora")
        return
    assert close(pd.models.load(tmp_path / "model.gguf", adapter=tmp_path / "lora")(tokens_of()), expected, 5e-4)


SHARES: dict[str, dict[str, Any]] = {
    "a rule in place of another": {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    "with one of its own": {"rope_scaling": {**ROPE, "partial_rotary_factor": 0.75}},
    "beside both rules": {"rope_scaling": ROPE, "partial_rotary_factor": 1.0},
    "an empty rule": {"rope_scaling": {}},
    "no share": {"rope_parameters": ROPE},
    "null": {"rope_parameters": ROPE, "partial_rotary_factor": None},
    "outside": {"rope_parameters": ROPE, "partial_rotary_factor": 0.5},
    "in both places": {"partial_rotary_factor": 1.0},
}


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.filterwarnings("ignore")
def test_the_share_of_a_head_that_turns(name: str, tmp_path: Path) -> None:
    build("qwen3_5_text").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **SHARES[name]}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert close(pd.models.load(tmp_path)(tokens_of()), theirs_of(model, tokens_of()), 2e-4)


def test_what_the_language_model_says_alone(tmp_path: Path) -> None:
    """Published folders name dtype and end tokens inside; whether the head is tied counts outside."""
    build("qwen3_5").to(torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    fields = {name: value for name, value in fields.items() if name not in ("dtype", "eos_token_id")}
    inner = {**fields["text_config"], "dtype": "bfloat16", "eos_token_id": [5, 7], "tie_word_embeddings": True}
    file.write_text(json.dumps({**fields, "text_config": inner, "tie_word_embeddings": False}))
    ours = pd.models.load(tmp_path)
    assert ours.dtype == torch.bfloat16 and ours.end_tokens == (5, 7) and not ours.config.tied_head
    file.write_text(json.dumps({**fields, "text_config": inner, "eos_token_id": 3, "dtype": "float32", "tie_word_embeddings": False}))  # fmt: skip
    ours = pd.models.load(tmp_path)
    assert ours.dtype == torch.float32 and ours.end_tokens == (3,)
    file.write_text(json.dumps({**inner, "model_type": "qwen3_5"}))
    with pytest.raises(ValueError, match="config.json must hold 'text_config'"):
        pd.models.load(tmp_path)


def test_quantised(tmp_path: Path) -> None:
    model = build("lfm2")
    model.save_pretrained(tmp_path)
    ours, tokens = pd.models.load(tmp_path), tokens_of()
    packed = pd.quantize(ours, "q8_0")
    assert close(packed(tokens), ours(tokens), 0.15) and not torch.equal(packed(tokens), ours(tokens))


REFUSED: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "bias": (NotImplementedError, {"attention_bias": True}, "attention_bias must be False"),
    "later rows": (NotImplementedError, {"is_causal": None}, "is_causal must be true, got None"),
    "gate": (NotImplementedError, {"attn_output_gate": False}, "attn_output_gate must be True"),
    "activation": (NotImplementedError, {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    "layers": (
        NotImplementedError,
        {"layer_types": ["mamba"] * 4},
        "layer_types must be of full_attention, linear_attention",
    ),
    "count": (ValueError, {"layer_types": ["full_attention"]}, "layer_types must name one for each of 4 layers"),
    "no attention": (ValueError, {"layer_types": ["linear_attention"] * 4}, "mixers must have a layer with attention"),
    "heads": (ValueError, {"linear_num_value_heads": 3}, "value_heads must be a multiple of key_heads"),
    "rope": (NotImplementedError, {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type must be one of"),
    "a layer of its own": (
        NotImplementedError,
        {"per_layer_config": {"1": {"rms_norm_eps": 0.1}}},
        "per_layer_config must be absent, got an object of 1 fields",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_are_refused(name: str) -> None:
    kind, more, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        from_hybrid_config({"model_type": "qwen3_5_text", **QWEN, **more})


def small(**more: Any) -> Hybrid:
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=258, hidden_size=32, layers=4, heads=2, kv_heads=1, head_dim=16, intermediate_size=48,
        mixers=("delta", "conv", "attention", "delta"), key_heads=2, value_heads=4, key_dim=8, value_dim=8, qk_norm=True, **more,
    )  # fmt: skip
    model = Hybrid(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize(
    "more", [{}, {"gated_attention": True, "centred_norms": True, "rotary_dim": 8, "tiled_values": True}]
)
def test_training_computes_what_inference_does(more: dict[str, Any]) -> None:
    """Whole texts, and the two streams of tri-mode training, whose noisy blocks go on from the state before them."""
    model, tokens = small(**more), tokens_of(30)
    trained = model(tokens)
    mask = pd.masks.dual_stream(30, 4)
    both, places = torch.cat([tokens, tokens], 1)[:1], mask.positions
    streams = model(both, mask=mask.plan(64, 64), positions=places)
    with torch.no_grad():
        assert torch.allclose(trained, model(tokens), atol=2e-3, rtol=1e-3)
        assert torch.allclose(streams, model(both, mask=mask.plan(64, 64), positions=places), atol=2e-3, rtol=1e-3)
        # A block of the noisy stream is a draft after the text before it.
        cache = model.new_cache(1, 64)
        model(tokens[:1, :8], cache=cache)
        cache.commit_(torch.tensor([8]))
        draft = model(tokens[:1, 8:12], cache=cache, mask=pd.masks.full(4).plan(64, 64), counts=torch.tensor([0]))
    assert torch.allclose(streams[:, 8:12], draft, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-code"])
def test_a_forward_on_a_cache_has_no_gradient_rather_than_a_part_of_it(name: str) -> None:
    model = pd.models.load(name).requires_grad_()
    tokens = torch.arange(5)[None]
    assert model(tokens).requires_grad
    for rows in (None, [4]):
        assert not model(tokens, cache=model.new_cache(1, 8), rows=rows).requires_grad


def test_gradients_of_a_scan() -> None:
    """Against differences, on a tree with branches and short and long pieces."""
    parents = [-1, 0, 1, 2, 0, 4, 3, 6, -1, 8, 9, 5]
    pieces = tree_scan.pieces_of(parents, 3)
    drawn = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(len(parents), *shape, dtype=torch.float64, generator=drawn)

    q, k, v, g, beta = random(2, 4), random(2, 4), random(2, 3), -random(2).abs(), random(2).sigmoid()
    given = [x.requires_grad_() for x in (q, k, v, g, beta)]
    assert torch.autograd.gradcheck(lambda *x: tree_scan.gated_delta(*x, pieces, 1e-6), given)
    x, weight = random(3).requires_grad_(), torch.randn(3, 4, dtype=torch.float64, generator=drawn).requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: tree_scan.convolved(*x, None, pieces), (x, weight))


def test_a_tiny_file(tmp_path: Path) -> None:
    from pdkernels.models.checkpoints import zoo

    model = small().to(torch.bfloat16)
    zoo.save_tiny(model, tmp_path / "own.safetensors")
    with torch.no_grad():
        again = pd.models.load(tmp_path / "own.safetensors", dtype=torch.bfloat16)
        assert torch.equal(again(tokens_of()), model(tokens_of()))


def test_the_trained_model() -> None:
    """Its drafts change no token, and its tokens are those of a forward over the whole text in the form of training."""
    model = pd.models.load("tiny-hybrid")
    assert isinstance(model, Hybrid) and model.config.mixers.count("delta") == 3
    prompts = ["482 + 967 = ?\n", "9120 - 88 = ?\n", "7 * 6 = ?\n"]
    greedy = pd.decoding.generate(model, prompts, max_new_tokens=60)
    for method in ("linear_self_speculation", "quadratic_self_speculation"):
        drafted = pd.decoding.generate(model, prompts, method, max_new_tokens=60, block_size=8)
        assert [found.tolist() for found in drafted.tokens] == [found.tolist() for found in greedy.tokens]
        assert drafted.stats.tokens_per_forward > 1.5
    for prompt, tokens in zip(prompts, greedy.tokens):
        text = torch.cat([torch.tensor(list(prompt.encode())), tokens])
        with torch.no_grad():
            rows = model(text[None])[0, len(prompt) - 1 : -1]
        chosen = rows.gather(1, tokens[:, None])[:, 0]
        assert torch.all(rows.amax(1) - chosen < 1e-2)


def test_what_a_hybrid_refuses(tmp_path: Path) -> None:
    model, tokens = small().requires_grad_(False), tokens_of(4)
    with pytest.raises(ValueError, match="adapted must be False"):
        model(tokens, adapted=True)
    with pytest.raises(TypeError, match="mask must be a TilePlan"):
        model(tokens, mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match="cache must be one of `new_cache`"):
        model(tokens, cache=pd.cache.ContiguousKVCache(1, 2, 8, 1, 16))
    with pytest.raises(ValueError, match=r"tokens must hold ids in \[0, 258\)"):
        model(tokens + 257)
    for method in ("llada", "fast_dllm_v2"):
        with pytest.raises((ValueError, TypeError, NotImplementedError)):
            pd.decoding.generate(model, [1, 2], method, max_new_tokens=4)
    build("lfm2").save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="drafter"):
        pd.models.load(tmp_path, drafter=tmp_path)


@pytest.mark.parametrize("length", [5, 70])
@pytest.mark.parametrize("grad", [True, False])
def test_a_graph_of_the_whole_model(grad: bool, length: int) -> None:
    """`torch.export`, and torch.compile without a break; longer texts are in several pieces."""
    model, tokens = small().requires_grad_(grad).eval(), tokens_of(length)
    with torch.set_grad_enabled(grad):
        expected = model(tokens)
        exported = torch.export.export(model, (tokens,), strict=False).module()(tokens)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")(tokens)
    torch._dynamo.reset()
    tolerance = (
        {"rtol": 0.0, "atol": 0.0} if grad else {"rtol": 1e-3, "atol": 2e-3}
    )  # without gradients ops scan row by row
    assert all(torch.allclose(logits, expected, **tolerance) for logits in (exported, compiled))
