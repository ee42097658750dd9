"""Models whose matrices are quantised: `pd.quantize` of a model, and what such a model can and cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models import Transformer, TransformerConfig
from pdkernels.models.checkpoints.zoo import save_tiny

FORMATS = ["int8", "int4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
MATRICES = ("qkv", "output", "gate_up", "down")


def made(**options: Any) -> Transformer:
    torch.manual_seed(0)
    config = {
        "vocab_size": 50,
        "hidden_size": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "tied_head": False,
    }
    model = Transformer(TransformerConfig(**{**config, "intermediate_size": 96, **options}), end_tokens=(3,))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def dequantised(model: Transformer) -> Transformer:
    """With the numbers that quantised matrices stand for."""
    state = {}
    for name, module in model.named_modules():
        if isinstance(module, pd.QuantizedWeight):
            state[name] = module.dequantize()
    state |= {name: x for name, x in model.state_dict().items() if x.dtype != torch.uint8}
    plain = Transformer(model.config)
    plain.load_state_dict(state)
    return plain.requires_grad_(False)


@pytest.mark.parametrize("options", [{}, {"tied_head": True, "qkv_bias": True, "mlp_bias": True, "qk_norm": True}])
@pytest.mark.parametrize("format", FORMATS)
def test_each_matrix_is_what_quantize_makes_of_it(format: str, options: Any) -> None:
    model, tokens = made(**options), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packed = pd.quantize(model, format)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters()) and model.training
    assert type(packed) is Transformer and packed.end_tokens == (3,) and not packed.training
    names = ["embedding", *([] if model.head is None else ["head"])]
    pairs = [(getattr(model, name), getattr(packed, name)) for name in names]
    pairs += [(getattr(a, n), getattr(b, n)) for a, b in zip(model.layers, packed.layers) for n in MATRICES]
    for numbers, quantised in pairs:
        assert torch.equal(quantised.dequantize(), pd.quantize(numbers, format).dequantize())
    assert all(parameter.dim() == 1 and not parameter.requires_grad for parameter in packed.parameters())
    assert packed.norm.data_ptr() == model.norm.data_ptr()
    found, expected = packed(tokens), dequantised(packed)(tokens)
    assert (found - expected).norm() < 0.05 * expected.norm()  # activations have 8 bits


def test_some_matrices_are_left() -> None:
    model = made()
    packed = pd.quantize(model, "int4", group=64, skip=("head", "down"))
    assert packed.head is not None and packed.head.data_ptr() == model.head.data_ptr()
    assert packed.layers[1].down.data_ptr() == model.layers[1].down.data_ptr()
    assert isinstance(packed.embedding, pd.QuantizedWeight) and packed.embedding.format == "int4"
    assert isinstance(pd.quantize(model, skip="head").head, torch.nn.Parameter)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_an_adapter(dtype: torch.dtype) -> None:
    model = made().to(dtype)
    pairs = [(torch.randn(4, 64) / 4, torch.randn(64, 4) / 4) for _ in range(2)]
    model.attach_adapter_(pairs)
    packed, tokens = pd.quantize(model, "q8_0"), torch.tensor([[3, 1, 4]])
    assert packed.has_adapter and packed.dtype == dtype
    plain, adapted = (packed(tokens, adapted=adapted) for adapted in (False, True))
    with torch.no_grad():
        expected = model(tokens, adapted=True)
    assert (adapted - expected).norm() < 0.05 * expected.norm() < 0.2 * (adapted - plain).norm()


def test_a_trained_model_still_writes_code() -> None:
    model = models.load("tiny-code")
    expected = generate(model, "def f(x):\n", max_new_tokens=48).text
    assert generate(pd.quantize(model, "q8_0"), "def f(x):\n", max_new_tokens=48).text == expected


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: pd.quantize(made(hidden_size=48), "q8_0"), ValueError, "quantize: embedding must have a width that is a multiple of 32 for q8_0, got 48. Name it in skip=."),
    (lambda: pd.quantize(made(), "q2_k"), ValueError, "format must be one of int8, int4, q8_0"),
    (lambda: pd.quantize(made(), skip="heads"), ValueError, "skip must hold names of embedding, head, qkv, output, gate_up, down, experts_gate_up, experts_down, shared_gate_up, shared_down, got 'heads'"),
    (lambda: pd.quantize(made(tied_head=True), skip="head"), ValueError, "skip must name the embedding, which is the head of this model"),
    (lambda: pd.quantize(made().double()), TypeError, "model must be float32, float16 or bfloat16, got torch.float64"),
    (lambda: pd.quantize(pd.quantize(made())), NotImplementedError, "model must have no packed matrices yet, got some. Load it with packed=False."),
    (lambda: pd.quantize(models.load("tiny-recurrent")), TypeError, "weight must be a matrix, a Transformer or a wrapped model, got RecurrentDepth"),
    (lambda: pd.quantize(torch.ones(2, 32), skip="head"), ValueError, "skip is for models"),
    (lambda: pd.quantize([[1.0]]), TypeError, "must be a matrix, a Transformer or a wrapped model, got list"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "error", "words"), ERRORS)
def test_errors(run: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        run()
    assert words in str(caught.value)


def test_packed_bytes_are_not_saved_as_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_tiny: model must hold numbers, got packed matrices"):
        save_tiny(pd.quantize(made()), tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()
