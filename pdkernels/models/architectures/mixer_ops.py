"""What the mixers of a hybrid model compute between other ops: gates, decays, and norms that multiply by 1 plus their
weight.

On the CPU inference runs each as one op, whose kernel is the one that the whole forward as an op calls
(`whole_step`), so that both have the same bits. Everything else takes plain PyTorch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from pdkernels.backends import resolve
from pdkernels.models.architectures import fused
from pdkernels.ops.library import LIBRARY, NAMESPACE, schema_of

GATE, DECAY, NORM = "gated_rows", "decay_factors", "centred_rms_norm"
GateForm = Literal["none", "sigmoid", "silu"]


class GateArguments(NamedTuple):
    """The arguments of `GATE`; `GateInputs` in python_bindings/state_mixer.h."""

    x: Tensor
    """``(rows, groups, width)``."""
    gate: Tensor
    form: str


class NormArguments(NamedTuple):
    """The arguments of `NORM`; `CentredNormInputs` in python_bindings/state_mixer.h."""

    x: Tensor
    weight: Tensor
    eps: float


# Not among the public ops: they serve the models on the CPU, and their reference is what is beside them here.
LIBRARY.define(f"{GATE}({schema_of(GateArguments)}) -> Tensor out")
LIBRARY.define(f"{DECAY}(Tensor decay) -> Tensor out")
LIBRARY.define(f"{NORM}({schema_of(NormArguments)}) -> Tensor y")
_TYPES = (Tensor, nn.Parameter)
_gate, _decay, _norm = (getattr(getattr(torch.ops, NAMESPACE), name).default for name in (GATE, DECAY, NORM))


def enabled(x: Tensor) -> bool:
    """Whether the ops replace plain PyTorch."""
    if torch.compiler.is_compiling() or type(x) not in _TYPES or x.device.type != "cpu" or not fused.enabled(x):
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return resolve("linear", "auto", x.device) == "native"


def gated_by(x: Tensor, gate: Tensor, form: GateForm = "none") -> Tensor:
    """``x * form(gate)`` of ``(batch, rows, ..)`` each, rounded once by the op.

    >>> gated_by(torch.full((1, 1, 2), 3.0), torch.zeros(1, 1, 2), "sigmoid")
    tensor([[[1.5000, 1.5000]]])
    """
    if enabled(x) and gate.dtype == x.dtype:
        rows, groups = x.shape[0] * x.shape[1], x.shape[2:-1].numel()
        flat = (t.reshape(rows, groups, t.shape[-1]) for t in (x, gate))
        out: Tensor = _gate(*flat, form)
        return out.view(x.shape)
    if form == "silu":
        return (x * F.silu(gate.to(torch.promote_types(gate.dtype, torch.float32)))).to(x.dtype)
    return x * (gate if form == "none" else gate.sigmoid())


def decay_factors(decay: Tensor) -> Tensor:
    """``-exp(decay)`` in float32, or float64.

    >>> decay_factors(torch.zeros(2))
    tensor([-1., -1.])
    """
    if enabled(decay) and decay.is_contiguous():
        factors: Tensor = _decay(decay)
        return factors
    return -decay.to(torch.promote_types(decay.dtype, torch.float32)).exp()


def centred_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The root-mean-square norm of x, times 1 plus the weight, in float32 (fp64 for fp64) and rounded once.

    >>> centred_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([0.0, 1.0]), 0.0)
    tensor([[1., 2.]])
    """
    if enabled(x) and weight.is_contiguous() and weight.dtype == x.dtype:
        y: Tensor = _norm(x, weight, eps)
        return y
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1 + weight.to(wide.dtype))).to(x.dtype)
