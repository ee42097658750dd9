"""Experts of transformers on our ops: its logits, rows that keep their bits, stacks that are packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.ops.quantized_weight import QuantizedWeight

transformers = pytest.importorskip("transformers", reason="needs transformers")
moe = pytest.importorskip(
    "transformers.integrations.moe", reason="needs a transformers whose experts are looked up by name"
)

from pdkernels.integrations.transformers import from_transformers, quantize_linears_, register, wrap  # noqa: E402

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3},
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 5},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


def made(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, initializer_range=0.3, max_position_embeddings=128, **(FAMILIES.get(name, {}) | more),
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


def theirs(model: Any) -> list[int]:
    tokens = torch.tensor([PROMPT])
    found = model.generate(tokens, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    return found[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def ours(model: Any, method: str = "autoregressive") -> list[int]:
    return generate(model, PROMPT, method, max_new_tokens=16, end_tokens=()).tokens.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrapped_model_runs_our_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    register()
    own, calls = model.config._experts_implementation, []
    function = moe.ALL_EXPERTS_FUNCTIONS["pdkernels"]
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "pdkernels", lambda *given: calls.append(1) or function(*given))
    wrapped = wrap(model)
    assert ours(wrapped) == ours(wrapped, "jacobi") == theirs(model)
    assert calls and model.config._experts_implementation == own
    count = len(calls)
    theirs(model)
    assert len(calls) == count  # the model itself is as it was


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_function_equals_the_plain_loop(name: str, dtype: torch.dtype) -> None:
    model = made(name).to(dtype)
    register()
    module = model.model.layers[1].mlp.experts
    count, per_token = len(module.down_proj), 2
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(21, 64, generator=draw).to(dtype)
    weights, ids = torch.rand(21, count, generator=draw).topk(per_token)
    found = {}
    with torch.no_grad():
        for implementation in ("eager", "pdkernels"):
            model.set_experts_implementation(implementation)
            found[implementation] = module(x, ids, weights.to(dtype))
        alone = torch.cat([module(x[i : i + 1], ids[i : i + 1], weights[i : i + 1].to(dtype)) for i in range(21)])
    bound = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found["pdkernels"], found["eager"], **bound)
    assert torch.equal(found["pdkernels"], alone)


def test_gradients_take_the_plain_loop() -> None:
    model = made("Qwen3Moe")
    register()
    model.set_experts_implementation("pdkernels")
    module, x = model.model.layers[0].mlp.experts, torch.randn(5, 64, requires_grad=True)
    weights, ids = torch.rand(5, 8).topk(3)
    module(x, ids, weights).sum().backward()
    (found,) = (x.grad.clone(),)
    x.grad = None
    model.set_experts_implementation("eager")
    module(x, ids, weights).sum().backward()
    assert torch.equal(found, x.grad) and found.abs().sum() > 0
    exact = module.double()(x.double(), ids, weights.double())
    model.set_experts_implementation("pdkernels")
    with torch.no_grad():
        assert torch.equal(module(x.double(), ids, weights.double()), exact)


@pytest.mark.parametrize("name", FAMILIES)
def test_stacks_are_packed(name: str) -> None:
    model = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    packed = pd.quantize(wrap(model), "q8_0", skip="lm_head")
    module = packed.model.model.layers[0].mlp.experts
    assert (
        isinstance(module.gate_up_proj, QuantizedWeight)
        and module.gate_up_proj.shape == model.model.layers[0].mlp.experts.gate_up_proj.shape
    )
    assert torch.equal(
        module.down_proj[1].part0, pd.quantize(before["model.layers.0.mlp.experts.down_proj"][1], "q8_0").part0
    )
    assert ours(packed) == ours(packed, "jacobi")
    assert model.state_dict().keys() == before.keys()  # what was wrapped is as it was
    assert model.config._experts_implementation != "pdkernels"
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        plain = model(tokens).logits
        errors = (packed(tokens) - plain).norm(dim=-1) / plain.norm(dim=-1)
        assert 0 < errors.median() < 0.1  # another expert may be chosen for a row
    assert quantize_linears_(model, "q4_0") is model
    assert not any(".experts." in name for name, _ in model.named_parameters())
    assert theirs(model) == ours(wrap(model))


def test_experts_may_be_skipped_and_transposed_ones_stay() -> None:
    model = quantize_linears_(made("Qwen3Moe"), "q8_0", skip=("lm_head", "mlp.experts"))
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, torch.nn.Parameter)
    with pytest.raises(ValueError, match="skip must hold the last parts of names of linear layers, got 'mlp.expert'"):
        quantize_linears_(made("Qwen3Moe"), skip="mlp.expert")
    gpt = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                                  head_dim=16, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    ).eval()  # fmt: skip
    with torch.no_grad():
        expected = gpt.model.layers[0].mlp.experts(torch.ones(3, 64), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
        gpt = quantize_linears_(gpt, "q8_0")
        assert isinstance(gpt.model.layers[0].mlp.experts.down_proj, torch.nn.Parameter)
        register()
        gpt.set_experts_implementation("pdkernels")  # which leaves transposed ones to its loop
        found = gpt.model.layers[0].mlp.experts(torch.ones(3, 64), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "Olmoe"])
def test_a_converted_model(name: str) -> None:
    model = made(name)
    converted = from_transformers(model)
    assert converted.config.experts is not None
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert ours(converted) == theirs(model)
