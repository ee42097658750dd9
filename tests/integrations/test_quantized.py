"""Models of transformers with quantised linear layers: in place, in a copy, and in our decoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate

transformers = pytest.importorskip("transformers", reason="needs transformers")

from pdkernels.integrations.transformers import QuantizedLinear, from_transformers, quantize_linears_, wrap  # noqa: E402

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
# Of models without near ties on a text: the two best logits are always 0.24 apart. Rounding x to 8 bits turns differences of 1e-7, which
# processors have, into 0.05.
SEEDS = {"Qwen2": 35, "Llama": 5, "Qwen3": 28, "Mistral": 5}


def made(kind: str = "Qwen2", **options: Any) -> Any:
    torch.manual_seed(SEEDS[kind])
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, initializer_range=0.3, max_position_embeddings=128, **options,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "Qwen3", "Mistral"])
def test_layers_in_place(kind: str, dtype: torch.dtype) -> None:
    model = made(kind).to(dtype)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert quantize_linears_(model, "q8_0", skip="mlp.down_proj") is model
    for name, module in model.named_modules():
        if name in linears and not name.endswith("down_proj"):
            assert isinstance(module, QuantizedLinear)
            assert (module.in_features, module.out_features) == (linears[name].in_features, linears[name].out_features)
            x = torch.randn(3, module.in_features).to(dtype)
            assert torch.equal(
                module(x), pd.quantized_linear(x, pd.quantize(linears[name].weight, "q8_0"), linears[name].bias)
            )
        elif name in linears:
            assert module is linears[name]
    # transformers' own loop and our decoders run the same model.
    theirs = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    wrapped = wrap(model)
    ours = [
        generate(wrapped, PROMPT, method, max_new_tokens=16, end_tokens=()).tokens
        for method in ("autoregressive", "jacobi")
    ]
    assert torch.equal(*ours)
    if dtype == torch.float32:
        assert ours[0].tolist() == theirs[0, len(PROMPT) :].tolist()


def test_a_copy_of_a_wrapped_model() -> None:
    model = made(tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits
    wrapped = wrap(model, mask_token=7)
    packed = pd.quantize(wrapped, "int8", skip=("lm_head", "down_proj"))
    assert packed.mask_token == 7 and packed.config == wrapped.config
    with torch.no_grad():  # the model and what was wrapped of it are as they were
        assert torch.equal(model(torch.tensor([PROMPT])).logits, expected)
    assert {name: type(module) for name, module in model.named_modules()}["lm_head"] is torch.nn.Linear
    assert model.state_dict().keys() == before.keys()
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    kinds = {name: type(module) for name, module in packed.model.named_modules()}
    assert kinds["model.layers.0.self_attn.q_proj"] is QuantizedLinear and kinds["lm_head"] is torch.nn.Linear
    assert packed.model.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    found = packed(torch.tensor([PROMPT]))
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()
    greedy = generate(packed, [PROMPT, PROMPT[:3], [9]], max_new_tokens=24, end_tokens=())
    for options in ({"draft": "lookup"}, {"draft": "model"}, {"cache": "paged"}):
        kind = options.pop("cache", None)
        more = {} if kind is None else {"page_size": 4}
        other = generate(
            packed, [PROMPT, PROMPT[:3], [9]], "jacobi", max_new_tokens=24, end_tokens=(), **options, **more
        )
        assert [row.tolist() for row in other.tokens] == [row.tolist() for row in greedy.tokens]


def test_the_same_numbers_as_the_converted_model() -> None:
    """Two roads to one result: convert and quantise, or quantise the layers."""
    model = made("Llama")
    ours, theirs = pd.quantize(from_transformers(model), "q4_0", skip="embedding"), pd.quantize(wrap(model), "q4_0")
    tokens = torch.tensor([PROMPT])
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=0.02, atol=0.02)
    assert generate(ours, PROMPT, max_new_tokens=16, end_tokens=()).tokens.equal(
        generate(theirs, PROMPT, max_new_tokens=16, end_tokens=()).tokens
    )


def test_errors() -> None:
    model = made()
    before = {name: type(module) for name, module in model.named_modules()}
    for run, error, words in (
        (lambda: quantize_linears_(model, "q2_k"), ValueError, "format must be one of int8, int4, q8_0"),
        (lambda: quantize_linears_(model, skip="lm_heads"), ValueError, "skip must hold the last parts of names of linear layers, got 'lm_heads'"),
        (lambda: quantize_linears_(torch.nn.ReLU()), ValueError, "model must have linear layers in it, got none in a ReLU"),
        (lambda: quantize_linears_([1]), TypeError, "model must be a module, got list"),  # type: ignore[type-var]
        (lambda: quantize_linears_(torch.nn.Sequential(torch.nn.Linear(30, 4)), "q4_0"), ValueError, "quantize: 0 must have a width that is a multiple of 32 for q4_0, got 30"),
        (lambda: quantize_linears_(made().double()), TypeError, "q_proj must be float32, float16 or bfloat16, got torch.float64"),
        (lambda: QuantizedLinear(torch.ones(2, 32)), TypeError, "weight must be a QuantizedWeight, got Tensor"),  # type: ignore[arg-type]
        (lambda: QuantizedLinear(pd.quantize(torch.ones(2, 32)), torch.ones(3)), ValueError, "bias must have shape (2,), got (3,)"),
        (lambda: from_transformers(quantize_linears_(made())), NotImplementedError, "model must hold numbers, got quantised matrices. Convert it first"),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            run()
        assert words in str(caught.value)
    assert {name: type(module) for name, module in model.named_modules()} == before
