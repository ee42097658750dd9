"""Models with experts: the logits and the tokens of transformers, from folders and GGUF files, and rows that keep their bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels import models
from pdkernels.decoding import available, generate, supports
from pdkernels.masks import block_causal
from pdkernels.models import ExpertsConfig
from pdkernels.models.architectures import whole_step
from pdkernels.models.architectures.experts import mixture
from pdkernels.ops.quantized_weight import QuantizedWeight
from tests.harness.error_budget import assert_within_budget

transformers = pytest.importorskip(
    "transformers", reason="compares with the experts of transformers 5", minversion="5.15"
)

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
}
QWEN3 = {**SIZES, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": True}),
    "qwen3_moe, weights as they are": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": False}),
    "qwen3_moe, a dense layer": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": True, "mlp_only_layers": [1, 7]}),
    "qwen3_moe, every second layer": ("Qwen3Moe", {**QWEN3, "decoder_sparse_step": 2}),
    "qwen3_moe, all layers dense": ("Qwen3Moe", {**QWEN3, "decoder_sparse_step": 4}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}),
    "olmoe": ("Olmoe", {**SIZES, "num_experts": 8, "num_experts_per_tok": 3, "eos_token_id": 5}),
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
CAUSAL = ("autoregressive", "jacobi", "jacobi_lookup", "quadratic_self_speculation", "linear_self_speculation")


def made(kind: str, seed: int = 0) -> Any:
    """A random model of transformers, whose experts are computed in its plain loop."""
    torch.manual_seed(seed)
    name, fields = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**fields)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, experts_implementation="eager")
    for parameter in model.eval().requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.normal_(1, 0.2)
    return model


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    made("qwen3_moe").save_pretrained(folder)
    return folder


def edited(folder: Path, to: Path, **fields: Any) -> Path:
    """The same tensors with other fields; None leaves one out."""
    config = json.loads((folder / "config.json").read_text()) | fields
    to.mkdir(exist_ok=True)
    (to / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    (to / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return to


@pytest.mark.parametrize("kind", KINDS)
def test_folders(kind: str, tmp_path: Path) -> None:
    theirs = made(kind)
    theirs.save_pretrained(tmp_path)
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    ours = models.load(tmp_path, dtype=torch.float32)
    exact = models.load(tmp_path, dtype=torch.float64)
    assert (ours.config.experts is None) == (kind == "qwen3_moe, all layers dense")
    with torch.no_grad():
        plain = theirs(tokens).logits
        assert_within_budget(ours(tokens), exact(tokens), plain, name=kind)
        # transformers computes RoPE in float32.
        torch.testing.assert_close(exact(tokens), theirs.double()(tokens).logits, rtol=1e-4, atol=1e-5)
        theirs.float()
        expected = theirs.generate(tokens[:1], max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None)
    found = generate(ours, TOKENS, max_new_tokens=24, end_tokens=()).tokens
    assert found.tolist() == expected[0, len(TOKENS) :].tolist()


def test_a_state_dict_both_ways(qwen3: Path) -> None:
    ours = models.load(qwen3, dtype=torch.float32)
    theirs = models.to_hf_state_dict(ours.state_dict(), ours.config)
    assert theirs["model.layers.1.mlp.experts.7.up_proj.weight"].shape == (32, 32)
    back = models.from_hf_state_dict(theirs, ours.config)
    assert back.keys() == ours.state_dict().keys()
    assert all(torch.equal(back[name], value) for name, value in ours.state_dict().items())


def logits_by(model: models.Transformer, tokens: Tensor, widths: int) -> Tensor:
    """Logits of `tokens`, so many rows a forward, on one cache."""
    cache, found = model.new_cache(batch=len(tokens), capacity=64), []
    for chunk in tokens.split(widths, 1):
        found.append(model(chunk, cache=cache))
        cache.commit_(torch.full((len(tokens),), chunk.shape[1]))
    return torch.cat(found, 1)


def in_form(folder: Path, form: str) -> models.Transformer:
    """The model in a dtype, or quantised."""
    numbers = form in ("float32", "bfloat16", "float16")
    model = models.load(folder, dtype=getattr(torch, form) if numbers else torch.bfloat16)
    return model if numbers else pd.quantize(model, form)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "q4_0", "int8"])
def test_a_row_has_the_same_bits_in_any_batch(form: str, qwen3: Path) -> None:
    model = in_form(qwen3, form)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 48, (5, 33), generator=draw)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        whole = logits_by(model, tokens, 33)
        for width in (1, 2, 8, 11):
            assert torch.equal(logits_by(model, tokens[1:2], width), whole[1:2]), width
        try:
            torch.set_num_threads(2)
            assert torch.equal(logits_by(model, tokens, 33), whole)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("width", [8, 100, 2048])
@pytest.mark.parametrize("per_token", [1, 2, 8, 20])
def test_sums_of_experts_do_not_depend_on_other_rows(per_token: int, width: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, width, generator=draw)
    gate_up = torch.randn(24, 2 * 16, width, generator=draw)
    down = torch.randn(24, width, 16, generator=draw)
    weights, ids = torch.rand(40, 24, generator=draw).topk(per_token)
    with torch.inference_mode():
        whole = mixture(x, weights, ids, gate_up, down)
        for first, last in ((0, 1), (7, 9), (3, 35)):
            rows = slice(first, last)
            assert torch.equal(mixture(x[rows], weights[rows], ids[rows], gate_up, down), whole[rows])
        # The sum is that of the order of `ids`.
        total = torch.zeros(40, width)
        for rank in range(per_token):
            inner = torch.stack([pd.silu_and_mul(pd.linear(x[i], gate_up[ids[i, rank]])) for i in range(40)])
            outputs = torch.stack([pd.linear(inner[i], down[ids[i, rank]]) for i in range(40)])
            total = total + outputs * weights[:, rank, None]
        assert torch.equal(whole, total)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "q8_0", "int4"])
def test_every_causal_method_is_lossless(form: str, qwen3: Path) -> None:
    model = in_form(qwen3, form)
    model.mask_token = 47  # which nothing emits
    prompts = [TOKENS, TOKENS[3:7], [7, 7, 7, 7, 7]]
    expected = [generate(model, prompt, max_new_tokens=20, end_tokens=()).tokens for prompt in prompts]
    lossless = [name for name in available() if supports(name, model) and name.startswith(CAUSAL)]
    assert {"jacobi", "autoregressive"} <= {*lossless}
    for name in lossless:
        found = generate(model, prompts, name, max_new_tokens=20, end_tokens=()).tokens
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name


def test_the_whole_step_takes_experts(qwen3: Path) -> None:
    model, seen = models.load(qwen3, dtype=torch.float32), []
    run = whole_step.run_forward

    def recorded(*arguments: Any) -> Any:
        seen.append(run(*arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_step, "run_forward", recorded)
        generate(model, TOKENS, "jacobi", max_new_tokens=3)
    assert seen and all(one is not None for one in seen)


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe"])
def test_a_new_drafter_has_an_mlp_in_place_of_experts(kind: str, tmp_path: Path) -> None:
    from pdkernels.training import new_eagle_head

    made(kind).save_pretrained(tmp_path)
    model = models.load(tmp_path, dtype=torch.float32)
    head = new_eagle_head(model, torch.arange(0, 48, 2), taps=(0, 1, 2))
    assert head.layers[0].gate_up.shape == (2 * model.config.intermediate_size, 32)
    assert torch.equal(head.layers[0].output, model.layers[2].output)


def test_norms_over_all_heads_without_experts() -> None:
    """Rows one by one and together, on a cache; ranks of tensor parallelism refuse them."""
    from pdkernels.distributed.shards import Shards

    config = models.TransformerConfig(
        vocab_size=48, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate_size=40, qk_norm=True,
        whole_qk_norm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = models.Transformer(config).requires_grad_(False).eval()
    for layer in model.layers:
        for norm in (layer.q_norm, layer.k_norm):
            norm.normal_(1, 0.2)
    tokens = torch.tensor([TOKENS])
    with torch.inference_mode():
        assert torch.equal(logits_by(model, tokens, 1), logits_by(model, tokens, 12))
        torch.testing.assert_close(logits_by(model, tokens, 5), model(tokens), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="model must have the layers of Llama or Qwen3, got others"):
        Shards(config, 0, 2)
    with pytest.raises(ValueError, match="whole_qk_norm must be False without qk_norm"):
        replace(config, qk_norm=False)


def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = made("qwen3_moe, a dense layer").double()
    theirs.save_pretrained(tmp_path)
    ours = models.load(tmp_path, dtype=torch.float64).requires_grad_()
    tokens = torch.tensor([TOKENS])
    ours(tokens).logsumexp(-1).sum().backward()
    theirs.requires_grad_()
    theirs(tokens).logits.logsumexp(-1).sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        expected = getattr(theirs.model.layers[2].mlp.experts, name).grad
        found = getattr(ours.layers[2], {"gate_up_proj": "experts_gate_up", "down_proj": "experts_down"}[name]).grad
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    router = ours.layers[2].router.grad
    torch.testing.assert_close(router, theirs.model.layers[2].mlp.gate.weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "o_proj"]])
def test_adapters_are_those_of_peft(targets: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="compares with peft where it is installed")
    theirs = made("qwen3_moe, a dense layer")
    theirs.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(
        theirs, peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", target_modules=targets)
    )
    for name, parameter in adapted.eval().named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    adapted.save_pretrained(tmp_path / "lora")
    if targets == "all-linear":  # the stacks of experts too, which PEFT adapts as parameters
        with pytest.raises(NotImplementedError, match="target_parameters must be absent"):
            models.load(tmp_path / "base", adapter=tmp_path / "lora")
        return
    ours = models.load(tmp_path / "base", adapter=tmp_path / "lora", dtype=torch.float32)
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), adapted(tokens).logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_experts_is_merged_by_their_published_names(qwen3: Path, tmp_path: Path) -> None:
    """As versions of PEFT and transformers wrote it whose experts were linear layers."""
    from safetensors.torch import save_file

    name, draw = "model.layers.1.mlp.experts.5.up_proj", torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 32, generator=draw), torch.randn(32, 2, generator=draw)
    save_file(
        {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    plain = models.load(qwen3, dtype=torch.float32).layers[1].experts_gate_up
    merged = models.load(qwen3, dtype=torch.float32, adapter=tmp_path).layers[1].experts_gate_up
    expected = plain.clone()
    expected[5, 32:] += 2 * b @ a
    torch.testing.assert_close(merged, expected)


@pytest.mark.slow
def test_a_forward_is_one_graph(qwen3: Path) -> None:
    model = models.load(qwen3, dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for rows in (7, 12):
        tokens = torch.tensor([TOKENS[:rows]])
        with torch.no_grad():
            assert torch.equal(compiled(tokens), model(tokens))


# ---- diffusion models


def under(theirs: Any, tokens: list[int], visible: Tensor) -> Tensor:
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits: Tensor = theirs(torch.tensor([tokens]), attention_mask=mask).logits
    return logits


def test_sdar_has_the_logits_of_qwen3_under_its_mask(qwen3: Path, tmp_path: Path) -> None:
    fields = {"model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"], "mask_token_id": 40}
    ours = models.load(edited(qwen3, tmp_path, **fields), dtype=torch.float32)
    assert (ours.mask_token, ours.config.predicts, ours.config.attention) == (40, "own", "causal")
    assert [name for name in available() if supports(name, ours)] == ["fast_dllm_v2"]
    mask = block_causal(12, 4)
    theirs = made("qwen3_moe")
    with torch.no_grad():
        found = ours(torch.tensor([TOKENS]), mask=mask.plan())
    torch.testing.assert_close(found, under(theirs, TOKENS, mask.dense()), rtol=1e-4, atol=1e-4)
    filled = generate(
        ours, [TOKENS], "fast_dllm_v2", max_new_tokens=8, block_size=4, small_block_size=4, end_tokens=()
    ).tokens[0]
    assert len(filled) == 8 and 40 not in filled.tolist()


LLADA = {
    "model_type": "llada",
    "architectures": ["LLaDAMoEModelLM"],
    "dense_intermediate_size": 40,
    "expert_intermediate_size": 32,
    "qk_layernorm": True,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "routed_scaling_factor": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "mask_token_id": 41,
    "num_experts": 8,
    "num_local_experts": None,
    **dict.fromkeys(("head_dim", "intermediate_size", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers")),
}


def llada(tmp_path: Path, **fields: Any) -> tuple[Any, Path]:
    """A model of Qwen3-MoE with the sizes that LLaDA-MoE has, and its folder with LLaDA-MoE's config.json."""
    kind = ("Qwen3Moe", {**QWEN3, "head_dim": 8, "norm_topk_prob": False, "mlp_only_layers": [0]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "llada", kind)
        theirs = made("llada")
    theirs.save_pretrained(tmp_path / "theirs")
    fields = {**LLADA, "moe_layer_freq": [0, 1, 1], **fields}
    return theirs, edited(tmp_path / "theirs", tmp_path / "ours", **fields)


def test_llada_moe_has_the_logits_of_qwen3_without_a_mask(tmp_path: Path) -> None:
    theirs, folder = llada(tmp_path)
    ours = models.load(folder, dtype=torch.float32)
    config = ours.config
    assert (config.attention, config.predicts, config.qk_norm, ours.mask_token) == ("bidirectional", "own", True, 41)
    assert config.experts == ExpertsConfig(8, 3, 32, normalized=False, dense_layers=(0,))
    with torch.no_grad():
        found = ours(torch.tensor([TOKENS]))
    expected = under(theirs, TOKENS, torch.ones(12, 12, dtype=torch.bool))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    text = generate(ours, [TOKENS], "llada", max_new_tokens=8, block_size=8, end_tokens=()).tokens[0]
    assert len(text) == 8 and 41 not in text.tolist()
    with pytest.raises(ValueError, match=r"mask_token_id must be an id below vocab_size \(48\), got 156895"):
        models.load(edited(folder, tmp_path / "other", mask_token_id=None))


# ---- what a config.json says

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"shared_expert_intermediate_size": 64}, NotImplementedError, "shared_expert_intermediate_size must be 0, got 64"),
    ({"n_shared_experts": 1}, NotImplementedError, "n_shared_experts must be 0, got 1"),
    ({"n_group": 4}, NotImplementedError, "n_group must be 1, got 4"),
    ({"topk_group": 2}, NotImplementedError, "topk_group must be 1, got 2"),
    ({"routed_scaling_factor": 2.5}, NotImplementedError, "routed_scaling_factor must be 1, got 2.5"),
    ({"scoring_func": "sigmoid"}, NotImplementedError, "scoring_func must be 'softmax', got 'sigmoid'"),
    ({"router_bias": True}, NotImplementedError, "router_bias must be False, got True"),
    ({"clip_qkv": 8.0}, NotImplementedError, "clip_qkv must be null, got 8.0"),
    ({"num_experts": 7, "num_local_experts": 8}, ValueError, "num_experts must equal num_local_experts"),
    ({"num_experts_per_tok": 9}, ValueError, "config.json: per_token must be at most count (8), got 9"),
    ({"decoder_sparse_step": 0}, ValueError, "decoder_sparse_step must be an integer from 1"),
    ({"mlp_only_layers": [0.5]}, ValueError, "mlp_only_layers must be a list of numbers of layers, got [0.5]"),
    ({"mlp_only_layers": 3}, ValueError, "mlp_only_layers must be a list of numbers of layers, got 3"),
    ({"norm_topk_prob": "yes"}, ValueError, "norm_topk_prob must be true or false, got 'yes'"),
    ({"moe_intermediate_size": 16}, ValueError, "mlp.experts.0.gate_proj.weight must have shape (16, 32), got (32, 32)"),
    ({"num_experts": 9}, ValueError, "model.layers.0.mlp.gate.weight must have shape (9, 32), got (8, 32)"),
    ({"num_experts": 7}, ValueError, "model.layers.0.mlp.gate.weight must have shape (7, 32), got (8, 32)"),
    ({"num_experts": 2**30}, ValueError, f"for {2**30} experts"),
    ({"num_hidden_layers": 2**30, "decoder_sparse_step": 2}, ValueError, f"for {2**30} layers"),
    ({"mlp_only_layers": [1]}, ValueError, "got none called model.layers.1.mlp.gate_proj.weight"),
]  # fmt: skip


@pytest.mark.parametrize("fields, error, text", REFUSED, ids=str)
def test_what_is_not_followed_is_refused(
    fields: dict[str, Any], error: type[Exception], text: str, qwen3: Path, tmp_path: Path
) -> None:
    fields = {"num_local_experts": None, **fields} if "num_experts" in fields else fields
    with pytest.raises(error) as caught:
        models.load(edited(qwen3, tmp_path, **fields))
    assert text in str(caught.value) and type(caught.value) is error


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function must be 'softmax', got 'sigmoid'"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias must be False, got True"),
        ({"shared_expert_intermediate_size": 16}, "shared_expert_intermediate_size must be 0, got 16"),
        ({"norm_topk_prob": True}, "norm_topk_prob must be false, got True"),
        ({"router_num_group": 2}, "router_num_group must be 1, got 2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    ],
)
def test_what_llada_moe_does_not_follow_is_refused(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError) as caught:
        models.load(llada(tmp_path, **fields)[1])
    assert text in str(caught.value)
    with pytest.raises(ValueError, match="moe_layer_freq must be 3 numbers that are 0 or 1"):
        models.load(edited(tmp_path / "ours", tmp_path / "more", moe_layer_freq=[1, 2, 1], **dict.fromkeys(fields)))


def test_tensor_parallel_ranks_refuse_experts(qwen3: Path) -> None:
    from pdkernels.distributed.shards import Shards

    with pytest.raises(NotImplementedError, match="model must have no experts, got 8 a layer"):
        Shards(models.load(qwen3).config, 0, 2)


# ---- packed


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q5_1", "int8", "int4"])
def test_quantised_models(form: str, qwen3: Path) -> None:
    model = models.load(qwen3, dtype=torch.float32)
    packed = pd.quantize(model, form, skip="embedding")
    layer = packed.layers[1]
    assert isinstance(layer.experts_gate_up, QuantizedWeight) and layer.experts_gate_up.shape == (8, 64, 32)
    assert isinstance(layer.router, torch.nn.Parameter)
    # With the same numbers, the 8 bits of x are all that differs; the router is the same.
    same = models.load(qwen3, dtype=torch.float32).layers[1]
    same.experts_gate_up.copy_(layer.experts_gate_up.dequantize())
    same.experts_down.copy_(layer.experts_down.dequantize())
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        error = (layer.feed_forward(x) - same.feed_forward(x)).norm() / same.feed_forward(x).norm()
    assert 0 < error < 0.03
    kept = pd.quantize(model, form, skip=("experts_gate_up", "experts_down"))
    assert isinstance(kept.layers[0].experts_down, torch.nn.Parameter)


def test_a_tiny_model_with_experts_is_saved_and_loaded(tmp_path: Path) -> None:
    config = models.TransformerConfig(
        vocab_size=257, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24,
        experts=ExpertsConfig(4, 2, 16, dense_layers=(0,)),
    )  # fmt: skip
    model = models.Transformer(config).to(torch.bfloat16)
    models.checkpoints.zoo.save_tiny(model, tmp_path / "one.safetensors")
    back = models.load(tmp_path / "one.safetensors", dtype=torch.bfloat16)
    assert back.config == config
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.state_dict().items())


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_gguf_has_the_logits_of_the_same_folder(kind: str, tmp_path: Path) -> None:
    files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf")
    held = written(files, tmp_path, kind)
    ours = models.load(tmp_path / "m.gguf", packed=False)
    assert ours.dtype == {"BF16": torch.bfloat16}.get(kind, torch.float32)
    assert ours.config.experts == ExpertsConfig(6, 2, 32)
    config = transformers.Qwen3MoeConfig(**files.QWEN3MOE)
    theirs = transformers.Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager").eval()
    folder = tmp_path / "folder"
    theirs.save_pretrained(folder)
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in held.items()}, folder / "model.safetensors")
    theirs = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        found = models.load(tmp_path / "m.gguf", packed=False, dtype=torch.float32)(tokens)
        torch.testing.assert_close(found, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def written(files: Any, folder: Path, kind: str, sizes: Any = None, **options: Any) -> Any:
    """A GGUF file of a random model of Qwen3-MoE; what it holds, by published names."""
    fields = {**files.QWEN3MOE, **(sizes or {})}
    config = transformers.Qwen3MoeConfig(**fields)
    torch.manual_seed(1)
    model = transformers.Qwen3MoeForCausalLM(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=1 / parameter.shape[-1] ** 0.5) if parameter.dim() > 1 else parameter.normal_(1, 0.2)
    model.save_pretrained(folder / "random")
    from safetensors.torch import load_file

    return files.write_gguf(
        folder / "m.gguf", fields, load_file(folder / "random/model.safetensors"), kind=kind, **options
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_stays_packed(kind: str, tmp_path: Path) -> None:
    files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf")
    held = written(files, tmp_path, kind)
    packed = models.load(tmp_path / "m.gguf", packed=True)
    gate_up, down = packed.layers[1].experts_gate_up, packed.layers[1].experts_down
    assert isinstance(gate_up, QuantizedWeight) and gate_up.format == down.format == kind.lower()
    names = [f"model.layers.1.mlp.experts.5.{half}_proj.weight" for half in ("gate", "up")]
    assert torch.equal(gate_up.dequantize()[5], torch.cat([held[name] for name in names]))
    assert torch.equal(down.dequantize()[2], held["model.layers.1.mlp.experts.2.down_proj.weight"])
    numbers = models.load(tmp_path / "m.gguf", packed=False)
    assert torch.equal(numbers.layers[1].experts_gate_up, gate_up.dequantize())
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = numbers.layers[1].feed_forward(x)
        assert (packed.layers[1].feed_forward(x) - plain).norm() < 0.03 * plain.norm()
    alone = generate(packed, TOKENS, max_new_tokens=16, end_tokens=()).tokens
    drafted = generate(packed, TOKENS, "jacobi", max_new_tokens=16, end_tokens=()).tokens
    assert torch.equal(alone, drafted)


@pytest.mark.parametrize(
    "more, text",
    [
        ({"expert_shared_count": 1}, "qwen3moe.expert_shared_count must be 0, got 1"),
        ({"expert_weights_norm": False}, "qwen3moe.expert_weights_norm must be True, got False"),
        ({"expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale must be 1.0, got 2.5"),
        ({"expert_gating_func": 2}, "qwen3moe.expert_gating_func must be 1, got 2"),
        ({"leading_dense_block_count": 1}, "qwen3moe.leading_dense_block_count must be 0, got 1"),
    ],
)
def test_what_a_gguf_file_says_of_experts(more: dict[str, Any], text: str, tmp_path: Path) -> None:
    files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf")
    written(files, tmp_path, "F32", more=more)
    with pytest.raises(NotImplementedError) as caught:
        models.load(tmp_path / "m.gguf")
    assert text in str(caught.value)


def test_transformers_reads_the_same_gguf_file(tmp_path: Path) -> None:
    files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files where accelerate is installed")
    # It takes no other sizes from such a file.
    written(files, tmp_path, "Q8_0", {"head_dim": 128, "moe_intermediate_size": 768})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    theirs.set_experts_implementation("eager")
    # It does not read from the file that weights are normalised.
    for layer in theirs.model.layers:
        layer.mlp.gate.norm_topk_prob = True
    ours, tokens = models.load(tmp_path / "m.gguf", packed=False), torch.tensor([TOKENS])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
