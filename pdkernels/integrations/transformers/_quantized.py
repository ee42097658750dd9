"""Models of transformers whose linear layers have quantised matrices."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pdkernels._validation import check, check_type
from pdkernels.integrations.transformers._experts import register_experts, replace_, stacks
from pdkernels.models.architectures.packing import OP, quantize_named
from pdkernels.ops.quantized_linear import quantized_linear
from pdkernels.ops.quantized_weight import QuantizedWeight

Model = TypeVar("Model", bound=nn.Module)


class QuantizedLinear(nn.Module):
    """Takes the place of `torch.nn.Linear`: ``x @ weight^T + bias``, see `pdkernels.quantized_linear`.

    Args:
        weight: of shape ``(out_features, in_features)``.
        bias: ``(out_features,)``, or None.

    Example:
        >>> import torch, pdkernels as pd
        >>> from pdkernels.integrations.transformers import QuantizedLinear
        >>> layer = QuantizedLinear(pd.quantize(torch.eye(32), "q8_0"))
        >>> layer(torch.ones(1, 32))[0, :3]
        tensor([0.9999, 0.9999, 0.9999])
    """

    bias: nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        known = isinstance(weight, QuantizedWeight)
        check_type(known, "QuantizedLinear", "weight", "be a QuantizedWeight", type(weight).__name__)
        self.out_features, self.in_features = weight.shape
        if bias is not None:
            shape = (self.out_features,)
            check(bias.shape == shape, "QuantizedLinear", "bias", f"have shape {shape}", tuple(bias.shape))
        self.weight = weight
        held = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", held)

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantize_linears_(
    model: Model, format: str = "int8", *, group: int | None = None, skip: str | Collection[str] = ()
) -> Model:
    """Puts a `QuantizedLinear` in the place of every `torch.nn.Linear` of a model, whose numbers are then free.

    Experts that transformers holds as stacks of matrices are packed too, and run with
    ``experts_implementation="pdkernels"``; stacks of transposed matrices, such as those of gpt-oss, routers and the
    embedding stay numbers. The model is for inference: run it under ``torch.no_grad()``.

    Args:
        model: of transformers, or any other.
        format, group: as in `pdkernels.quantize`.
        skip: the last parts of the names of modules to leave as they are, such as "lm_head", "mlp.down_proj" or
            "mlp.experts".

    Returns:
        The model.

    Raises:
        ValueError: as `pdkernels.quantize`; a name in `skip` that no such layer has; no linear layer. The model is then
            unchanged.

    Example:
        >>> import torch, transformers
        >>> from pdkernels.integrations.transformers import quantize_linears_, wrap
        >>> config = transformers.LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        ...     num_key_value_heads=1, intermediate_size=64)
        >>> model = quantize_linears_(transformers.LlamaForCausalLM(config).eval(), "q8_0", skip="lm_head")
        >>> type(model.model.layers[0].mlp.down_proj).__name__, type(model.lm_head).__name__
        ('QuantizedLinear', 'Linear')
        >>> wrap(model)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 50])
    """
    check_type(isinstance(model, nn.Module), OP, "model", "be a module", type(model).__name__)
    ends = (skip,) if isinstance(skip, str) else tuple(skip)
    linears = {name: module for name, module in model.named_modules() if name and type(module) is nn.Linear}
    experts = {name: module for name, module in model.named_modules() if stacks(module)}
    check(bool(linears), OP, "model", "have linear layers in it", f"none in a {type(model).__name__}")
    for end in ends:
        known = any(_ends(name, end) for name in (*linears, *experts))
        check(known, OP, "skip", "hold the last parts of names of linear layers", repr(end))
    packed = [
        (module, stack, _packed(f"{name}.{stack}", getattr(module, stack), format, group))
        for name, module in experts.items()
        if not any(_ends(name, end) for end in ends)
        for stack in stacks(module)
    ]
    made = {
        name: _quantised(name, module, format, group)
        for name, module in linears.items()
        if not any(_ends(name, end) for end in ends)
    }
    for name, module in made.items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, module)
    if packed:
        register_experts()
    for module, stack, weight in packed:
        replace_(module, stack, weight)
    return model


def is_quantised(model: Any) -> bool:
    return any(isinstance(module, QuantizedWeight) for module in model.modules())


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _quantised(name: str, module: nn.Linear, format: str, group: int | None) -> QuantizedLinear:
    return QuantizedLinear(_packed(name, module.weight, format, group), module.bias).train(module.training)


def _packed(name: str, weight: Tensor, format: str, group: int | None) -> QuantizedWeight:
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    check_type(weight.dtype in kinds, OP, name, "be float32, float16 or bfloat16", weight.dtype)
    return quantize_named(name, weight, format, group).to(weight.device)
