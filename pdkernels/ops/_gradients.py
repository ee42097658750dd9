"""Gradients of ops whose backward pass is an op too."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from pdkernels._validation import message, refuse_tangents, sentence
from pdkernels.ops.library import LIBRARY, NAMESPACE


def refuse_second_derivative(op: str) -> None:
    """Refuses the second derivative of an op, as its backward pass has none."""

    def refuse(ctx: Any, *gradients: Tensor) -> NoReturn:
        remedy = "Pass backend='reference', which PyTorch differentiates any number of times."
        raise NotImplementedError(
            message(op, "its gradient", "not be differentiated again", "a second derivative", remedy)
        )

    torch.library.register_autograd(f"{NAMESPACE}::{op}_backward", refuse, lib=LIBRARY)


def refuse_transforms(op: str, inputs: str) -> NoReturn:
    remedy = "Call .backward() or torch.autograd.grad, or pass backend='reference'."
    raise NotImplementedError(sentence(op, f"torch.func cannot differentiate {inputs}", remedy))


def refuse_inference(op: str, arguments: tuple[Any, ...]) -> None:
    """Autograd keeps the inputs of a forward, which tensors from inference mode do not allow."""
    for tensor in arguments:
        if isinstance(tensor, Tensor) and tensor.is_inference():
            reason = f"the input of shape {tuple(tensor.shape)} was made in inference mode, so autograd cannot keep it"
            raise ValueError(sentence(op, reason, "Clone it outside of torch.inference_mode()."))


def register_gradients(op: torch._ops.OpOverload, function: type[torch.autograd.Function]) -> None:
    """`function` takes all arguments of the schema and runs where autograd records; elsewhere the op runs alone."""
    name = op._opname
    defaults = tuple(argument.default_value for argument in op._schema.arguments)

    def run(*positional: Any) -> Any:
        arguments = positional + defaults[len(positional) :]  # those that are left out do not arrive
        refuse_tangents(name, arguments)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            if torch._C._are_functorch_transforms_active():
                refuse_transforms(name, "its inputs")
            refuse_inference(name, arguments)
            return function.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)

    LIBRARY.impl(name, run, "Autograd")
    refuse_second_derivative(name)
