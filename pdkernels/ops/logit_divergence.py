"""The change of the next token's distribution between two recurrences: the quantities of early-exit criteria."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from pdkernels._validation import check_floats, check_number, fail
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define, schema_of
from pdkernels.reference import logit_divergence as reference

__all__ = ["LogitDivergence", "logit_divergence"]

OP = "logit_divergence"


class LogitDivergence(NamedTuple):
    """The result of `logit_divergence`, one entry per row of logits."""

    argmax: Tensor
    """(...) int64: the first of the largest logits."""
    entropy: Tensor
    """(...) float32: ``-sum p log(p + 1e-10)`` of the distribution now."""
    kl: Tensor
    """(...) float32: ``sum p_then (log p_then - log p_now)``."""
    minp_kl: Tensor
    """(...) float32: the same after every p below ``min_p * max p`` was set to 1 / V and all rescaled."""


def logit_divergence(
    logits: Tensor, previous: Tensor | None = None, *, min_p: float = 0.1, backend: Backend = "auto"
) -> LogitDivergence:
    """Computes the quantities that indicate whether another recurrence would still change the next token.

    ``p`` is the softmax of a row. Everything is computed in float32 with two reads of the logits. A sampler stops when,
    for example, `kl` falls below 1e-3, or `entropy` changed by less than that since the last call. Before the first
    call the published sampler assumes a uniform distribution and an entropy of 100.

    A logit of -inf is a token of probability 0: it adds nothing to the entropy, nothing to `kl` where the earlier
    distribution has 0 too, and infinity where only the new distribution does. A row without a distribution (a NaN, an
    infinity, or nothing but -inf) gives NaN, which is below no threshold; its `argmax` is that of PyTorch: the first
    NaN, else the first of the largest.

    Args:
        logits: ``(..., V)`` float32, float16 or bfloat16, V at least 1. Other layouts than strided rows are copied.
        previous: those of the previous recurrence, same shape and dtype; None: a uniform distribution.
        min_p: in [0, 1].
        backend: see `pdkernels.show_config`. The reference takes float64 too.

    Raises:
        ValueError: shapes that do not fit; a `min_p` out of range.
        TypeError: dtypes that do not fit.

    No gradient flows, and a tangent (forward mode) is refused. Deterministic; a row's result does not depend on other
    rows. For the sharded logits of a tensor-parallel model, ten numbers per row are exchanged.

    Source: the exit criteria of Geiping et al., "Scaling up Test-Time Compute with Latent Reasoning", section 6.1.

    Example:
        >>> import torch, pdkernels as pd
        >>> divergence = pd.logit_divergence(torch.tensor([[2.0, 0.0, -4.0]]), torch.tensor([[0.0, 0.0, -4.0]]))
        >>> divergence.argmax, divergence.kl
        (tensor([0]), tensor([0.4359]))
    """
    if has_torch_function_unary(logits):  # sharded logits of a tensor-parallel model
        tensors = logits, previous
        result: LogitDivergence = handle_torch_function(
            logit_divergence, tensors, *tensors, min_p=min_p, backend=backend
        )
        return result
    return LogitDivergence(*call(logit_divergence_op, (logits, previous, min_p), logits, backend))


def _fake(logits: Tensor, previous: Tensor | None = None, min_p: float = 0.1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_floats(OP, "logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        fail(OP, "logits", "have shape (..., V), V at least 1", tuple(logits.shape))
    if previous is not None:
        check_floats(OP, "previous", previous, logits.shape, like=logits, whose=" like logits")
    check_number(OP, "min_p", min_p, 0, 1, "be in [0, 1]")
    rows = logits.shape[:-1]
    entropy, kl, minp_kl = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    return logits.new_empty(rows, dtype=torch.int64), entropy, kl, minp_kl


def _example(draw: Draw) -> dict[str, Any]:
    return {"logits": draw.floats(3, 900), "previous": draw.floats(3, 900)}


logit_divergence_op = define(
    f"logit_divergence(Tensor logits, Tensor? previous=None, float min_p=0.1) -> ({schema_of(LogitDivergence)})",
    fake=_fake,
    reference=reference.logit_divergence,
    example=_example,
    gradients="cut",
)
