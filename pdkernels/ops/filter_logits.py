"""Filters that change logits before a token is chosen: a bias, penalties by counts, impossible tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels._validation import INDEX_DTYPES, check_device, check_floats, check_number, check_type, fail
from pdkernels.backends import Backend
from pdkernels.ops.library import Draw, call, define, schema_of
from pdkernels.reference import filter_logits as reference

__all__ = ["LogitFilters", "filter_logits"]

OP = "filter_logits"
LARGEST = torch.finfo(torch.float32).max


class LogitFilters(NamedTuple):
    """Filters of logits, in the order in which they are applied: `bias`, the penalties, `banned` and `allowed`. Penalties
    are of the tokens in `counts` and `recent`: without both they change nothing.

    Tensors are ``(*rows, n)``, where `rows` is the beginning of the shape of the rows of logits: ``(n,)`` is for all
    rows, and for logits ``(batch, R, V)`` a tensor ``(batch, n)`` is for the R rows of a sequence.

    >>> LogitFilters(bias=torch.zeros(7)).changes, LogitFilters(repetition_penalty=1.1).changes
    (True, False)
    """

    bias: Tensor | None = None
    """(..., V) float32: added to the logits."""
    counts: Tensor | None = None
    """(..., V) int32: how often each token was generated; -1: it is in the prompt alone."""
    recent: Tensor | None = None
    """(..., n) int32 or int64: tokens that `counts` does not have yet, such as those of a draft before its row: ``id``
    for a generated one, ``-2 - id`` for one of the prompt, -1 for none. They are compared with each other, so they
    should be few."""
    banned: Tensor | None = None
    """(..., n) int32 or int64: impossible tokens; -1: none."""
    allowed: Tensor | None = None
    """(..., ceil(V / 32)) int32: bit ``i % 32`` of word ``i // 32`` says whether token i is possible, as in
    xgrammar."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the prompt or the generated text has, and multiplies negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of generated tokens."""
    frequency_penalty: float = 0.0
    """Subtracted from them as often as they were generated."""

    @property
    def changes(self) -> bool:
        """Whether there is something to filter."""
        tensors = self.bias, self.counts, self.recent, self.banned, self.allowed
        return any(tensor is not None for tensor in tensors)


TENSORS = LogitFilters._fields[:5]
SCHEMA = schema_of(LogitFilters)


def filter_logits(
    logits: Tensor,
    *,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    recent: Tensor | None = None,
    banned: Tensor | None = None,
    allowed: Tensor | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """Filtered `logits`: a float32 copy, since rounded to 16 bits penalised logits would tie.

    `token_statistics` and `linear_token_statistics` take the same filters, and do not store the logits.

    Args:
        logits: ``(..., V)`` float32, float16 or bfloat16, V at least 1. Other layouts than strided rows are copied.
        bias, counts, recent, banned, allowed, repetition_penalty, presence_penalty, frequency_penalty: see
            `LogitFilters`.
        backend: see `pdkernels.show_config`. The reference takes float64 too, and returns it.

    Returns:
        ``(..., V)`` float32; -inf for impossible tokens.

    Raises:
        ValueError: shapes that do not fit, penalties out of range; on the CPU an id out of range. On CUDA such an id
            counts as none.
        TypeError: dtypes that do not fit.

    No gradient flows, and a tangent (forward mode) is refused. Deterministic; a row's result does not depend on other
    rows.

    Source: the repetition penalty of Keskar et al., "CTRL", section 4.1, as transformers has it; presence and frequency
    penalties as OpenAI and vLLM define them.

    Example:
        >>> import torch, pdkernels as pd
        >>> counts = torch.tensor([0, 2, -1], dtype=torch.int32)
        >>> logits = torch.tensor([[1.0, 4.0, -1.0]])
        >>> pd.filter_logits(logits, counts=counts, repetition_penalty=2.0, frequency_penalty=0.5)
        tensor([[ 1.,  1., -2.]])
    """
    penalties = repetition_penalty, presence_penalty, frequency_penalty
    filters = LogitFilters(bias, counts, recent, banned, allowed, *penalties)
    check_type(isinstance(logits, Tensor), OP, "logits", "be a tensor", type(logits).__name__)
    raw = raw_filters(OP, filters, logits.shape[:-1])
    result: Tensor = call(filter_logits_op, (logits, *raw), logits, backend)
    return result


def raw_filters(op: str, filters: LogitFilters | None, shape: Sequence[int]) -> tuple[Any, ...]:
    """Filters for rows of that shape as the ops take them: tensors ``(m, n)``, a row for each of m equal groups of
    rows."""
    if filters is None:
        return NONE
    check_type(isinstance(filters, LogitFilters), op, "filters", "be LogitFilters", type(filters).__name__)
    if not filters.changes:
        return filters

    def flat(name: str, tensor: Any) -> Tensor | None:
        if tensor is None:
            return None
        check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
        lead = tensor.shape[:-1]
        if tensor.dim() == 0 or len(lead) > len(shape) or any(a != b for a, b in zip(lead, shape)):
            expectation = f"have the shape (*rows, n), whose rows are a beginning of {tuple(shape)}"
            fail(op, name, expectation, tuple(tensor.shape))
        flattened: Tensor = tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]
        return flattened

    return (*(flat(name, getattr(filters, name)) for name in TENSORS), *filters[len(TENSORS) :])


NONE = tuple(LogitFilters())


def check_filters(op: str, x: Tensor, rows: int, width: int, filters: LogitFilters) -> None:
    """Checks the filters, in the form of `raw_filters`, of so many rows of `width` logits; `x` is on their device."""
    sizes = {"bias": width, "counts": width, "recent": None, "banned": None, "allowed": (width + 31) // 32}
    for name, size in sizes.items():
        tensor = getattr(filters, name)
        if tensor is None:
            continue
        check_type(isinstance(tensor, Tensor), op, name, "be a tensor", type(tensor).__name__)
        dtypes = INDEX_DTYPES if size is None else (torch.float32,) if name == "bias" else (torch.int32,)
        expected = "be " + " or ".join(str(dtype) for dtype in dtypes)
        check_type(tensor.dtype in dtypes, op, name, expected, tensor.dtype, "Convert it with .to().")
        check_device(op, name, tensor, x.device)
        if tensor.dim() != 2 or (size is not None and tensor.shape[1] != size):
            fail(op, name, f"have {'any number of' if size is None else int(size)} columns", tuple(tensor.shape))
        if (tensor.shape[0] == 0 and rows != 0) or (tensor.shape[0] != 0 and rows % tensor.shape[0] != 0):
            fail(op, name, f"have a number of rows that divides {int(rows)}", int(tensor.shape[0]))
    penalty, expected = filters.repetition_penalty, "be finite and above 0 in float32"
    check_number(op, "repetition_penalty", penalty, 0, LARGEST, expected)
    if penalty <= 0:
        fail(op, "repetition_penalty", expected, penalty)
    for name in ("presence_penalty", "frequency_penalty"):
        check_number(op, name, getattr(filters, name), -LARGEST, LARGEST, "be finite in float32")


def check_ids(op: str, width: int, filters: LogitFilters) -> None:
    """Checks the values of ids. On a GPU this synchronizes."""
    for name, least in (("recent", -1 - width), ("banned", -1)):
        ids = getattr(filters, name)
        if ids is not None and (outside := (ids < least) | (ids >= width)).any():
            fail(op, name, f"hold ids in [{least}, {width - 1}]", ids[outside][0].item())


def _fake(logits: Tensor, *filters: Any) -> Tensor:
    check_floats(OP, "logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        fail(OP, "logits", "have shape (..., V), V at least 1", tuple(logits.shape))
    check_filters(OP, logits, math.prod(logits.shape[:-1]), logits.shape[-1], LogitFilters(*filters))
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)


def _reference(logits: Tensor, *filters: Any) -> Tensor:
    check_ids(OP, logits.shape[-1], LogitFilters(*filters))
    result: Tensor = reference.filter_logits(logits, *filters)
    return result


def _example(draw: Draw) -> dict[str, Any]:
    example = {"logits": draw.floats(3, 900), "counts": draw.ints(-1, 2, 3, 900).int(), "frequency_penalty": 0.3}
    return example | {"recent": draw.ints(-1, 899, 3, 2), "allowed": draw.ints(-(2**31), 2**31 - 1, 3, 29).int()}


filter_logits_op = define(
    f"{OP}(Tensor logits, {SCHEMA}) -> Tensor filtered",
    fake=_fake,
    reference=_reference,
    example=_example,
    gradients="cut",
)
