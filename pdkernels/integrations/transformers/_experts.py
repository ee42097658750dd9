"""The function of ``experts_implementation="pdkernels"``: experts that are stacks of matrices, each used one read
once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pdkernels.models.architectures import fused
from pdkernels.models.architectures.experts import in_order, sorted_by_expert, weighted_sum
from pdkernels.ops.quantized_weight import QuantizedWeight

NAME = "pdkernels"
MATRICES = ("gate_up_proj", "up_proj", "down_proj")


def register_experts() -> None:
    """Registers the function with transformers, from 5.0 on."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # an older one, whose experts are linear layers
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def choose_(config: Any) -> None:
    """Names our function in a config of a model that looks experts up by name."""
    if getattr(config, "_experts_implementation", None) is not None and config._experts_implementation != NAME:
        config._experts_implementation = NAME


def stacks(module: nn.Module) -> list[str]:
    """The parameters of a module that are stacks of matrices as our function reads them; none for another module."""
    supported = hasattr(module, "_apply_gate") and getattr(module, "is_transposed", None) is False
    return [name for name in MATRICES if supported and isinstance(getattr(module, name, None), nn.Parameter)]


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of the outputs of each row's experts, as `pdkernels.models.architectures.experts` computes
    it."""
    first = self.gate_up_proj if self.has_gate else self.up_proj
    packed = isinstance(first, QuantizedWeight) or isinstance(self.down_proj, QuantizedWeight)
    stacked = not self.is_transposed and not getattr(self, "_is_expert_parallel", False)  # 5.23 has it
    if not (packed or (stacked and fused.enabled(hidden_states))):
        output: Tensor = type(self).forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)
        return output
    rows, per_token = top_k_index.shape
    order, ends = sorted_by_expert(top_k_index, len(first))
    biases = (f"{'gate_up' if self.has_gate else 'up'}_proj_bias", "down_proj_bias")
    of_first, of_second = (getattr(self, name) if self.has_bias else None for name in biases)
    inner = fused.grouped_linear(hidden_states[order // per_token], first, ends, of_first)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outputs = fused.grouped_linear(inner, self.down_proj, ends, of_second)
    if getattr(self, "has_post_expert_norm", False):
        outputs = self.post_expert_norm(outputs)
    return weighted_sum(in_order(outputs, order).view(rows, per_token, -1), top_k_weights).to(hidden_states.dtype)


def replace_(module: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Puts a quantised stack in the place of a parameter of this module alone: a copy of it may share the dict."""
    module.__dict__["_parameters"] = {
        parameter: value for parameter, value in module._parameters.items() if parameter != name
    }
    setattr(module, name, weight)
    choose_(module.config)
