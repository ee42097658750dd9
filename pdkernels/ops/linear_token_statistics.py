"""Statistics of a language-model head's logits, which are never materialized in full: product and reduction in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check, check_floats, fail
from pdkernels.backends import Backend
from pdkernels.ops.filter_logits import TENSORS, LogitFilters, check_ids
from pdkernels.ops.library import DEBUG_CHECKS, Draw, call, define
from pdkernels.ops.linear import linear_op
from pdkernels.ops.quantized_linear import quantized_linear
from pdkernels.ops.quantized_weight import QuantizedWeight
from pdkernels.ops.token_statistics import (
    OPTIONS,
    RESULTS,
    Options,
    TokenStatistics,
    check_grouped,
    check_options,
    chosen_rows,
    filter_options,
    merged_statistics,
    new_results,
    raw_options,
    reference_options,
    resolved_top_k,
    rows_shape,
    shard_record,
    token_statistics_op,
)
from pdkernels.ops.vocabulary import VocabularyShard, check_shard
from pdkernels.reference import linear_token_statistics as reference

__all__ = ["linear_token_statistics"]

OP = "linear_token_statistics"


# Maximum number of logits in memory when rows are processed in blocks: 64 MiB in float32.
BLOCK_LOGITS = 2**24


def linear_token_statistics(
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    *,
    temperature: float = 0.0,
    seed: int | Tensor = 0,
    step: int | Tensor = 0,
    positions: Tensor | None = None,
    row_index: Tensor | None = None,
    suppress: int | Sequence[int] = (),
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    distribution: str = "model",
    keep_top_k: int | None = None,
    typical_p: float = 1.0,
    filters: LogitFilters | None = None,
    group: Any = None,
    first_id: int = 0,
    backend: Backend = "auto",
) -> TokenStatistics:
    """`token_statistics` of the logits ``hidden @ weight^T``, which are never all in memory.

    Equivalent to ``token_statistics(F.linear(hidden, weight), ...)``, with memory that does not grow with rows times V.
    On CUDA the product stays in registers and each logit in float32 (plain PyTorch rounds it to the dtype first, so two
    may tie or swap); with filters of any kind, and on the CPU, rows are processed in blocks of at most 2**24 logits
    through a product (``F.linear`` on CUDA, `linear` on the CPU) and the kernel of `token_statistics`.

    Args:
        hidden: ``(..., E)`` float32, float16 or bfloat16, E at least 1: what the head is applied to. Any strides.
        weight: ``(V, E)`` of the same dtype, the weight of the head, V at least 1. Any strides; no bias. Or a
            `QuantizedWeight`: the logits are then those of `quantized_linear`, rounded to the dtype of `hidden`.
        temperature, seed, step, positions, suppress, top_k, top_p, min_p, distribution, keep_top_k, typical_p, filters:
            as in `token_statistics`.
        row_index: int tensor of any shape: the rows of ``hidden.flatten(0, -2)`` to look at, -1 for none; None: all of
            them. A sampler passes all hidden states and selects those it needs.
        group, first_id: as in `token_statistics`; `weight` holds this rank's rows of the head. Rows are processed in
            blocks on CUDA too, and under filters all logits of the rank's slice are held at once.
        backend: see `pdkernels.show_config`. The reference holds all logits, and takes float64 too.

    Returns:
        As `token_statistics`.

    Raises:
        ValueError: shapes that do not fit, options out of range; on the CPU a row number outside [-1, rows), or a
            position or step below 0 or above 2**32 - 1 that a draw would use, or an id of `filters` that is out of
            range. On CUDA such a row counts as no row, such an id as none, and of positions and steps the low 32 bits
            are taken, unless ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: dtypes that do not fit.
        NotImplementedError: `keep_top_k`, `typical_p` or `filters` with a group.

    No gradient flows, and a tangent (forward mode) is refused. Deterministic. A row's result does not depend on other
    rows, except on CUDA with filters, where the product is PyTorch's, whose last bits may depend on the number of rows.

    Source: as `token_statistics`; sums merged over parts of the vocabulary after Milakov and Gimelshein, "Online
    normalizer calculation for softmax" (2018).

    Example:
        >>> import torch, pdkernels as pd
        >>> head = torch.eye(3)
        >>> found = pd.linear_token_statistics(torch.tensor([[0.0, 2.0, 1.0]]), head, top_k=2)
        >>> found.ids, found.probs, found.top_ids
        (tensor([1]), tensor([0.6652]), tensor([[1, 2]]))
    """
    check_shard(OP, group, first_id)
    if isinstance(weight, QuantizedWeight):
        check(group is None, OP, "group", "be None with a QuantizedWeight", "a group")
        top_k = min(5, len(weight)) if top_k is None else top_k
    else:
        top_k = resolved_top_k(top_k, weight, 0, group)
    options = raw_options(
        OP, "hidden", hidden, temperature, seed, step, positions, row_index, suppress, top_k, top_p, min_p, distribution
    )
    options += filter_options(OP, keep_top_k, typical_p, filters, hidden, row_index)
    if isinstance(weight, QuantizedWeight):
        return TokenStatistics(*_quantized(hidden, weight, Options(*options), backend))
    if group is not None:
        check_grouped(OP, Options(*options))
        return _merged(hidden, weight, Options(*options), VocabularyShard(group, first_id, len(weight)), backend)
    return TokenStatistics(*call(linear_token_statistics_op, (hidden, weight, *options), hidden, backend))


def _merged(
    hidden: Tensor, weight: Tensor, options: Options, shard: VocabularyShard, backend: Backend
) -> TokenStatistics:
    """Makes records block by block, and exchanges all of them at once."""
    _check_product(hidden, weight)
    _check_values(hidden, options) if hidden.device.type == "cpu" else None
    shape = rows_shape(hidden, options.row_index)
    rows, index, options = chosen_rows(OP, hidden, len(weight), options)
    # Ranks exchange logits under filters, so all use a single block there.
    filtered = options.top_p < 1 or options.min_p > 0
    size = max(1, len(rows) if filtered else BLOCK_LOGITS // len(weight))
    records, existing = [], []
    for start in range(0, max(len(rows), 1), size):
        piece = slice(start, start + size)
        block = rows[piece]
        logits = torch.nn.functional.linear(block, weight) if backend == "reference" else _product(block, weight)
        columns = (None if x is None else x[piece] for x in (options.positions, options.steps, options.seeds))
        cut = options._replace(**dict(zip(("positions", "steps", "seeds"), columns)))  # type: ignore[arg-type]
        here = None if index is None else torch.where(index[piece] < 0, -1, index[piece] - start)
        record, exists = shard_record(logits, here, cut._replace(row_index=here), shard, backend)
        records.append(record)
        existing.append(exists)
    return merged_statistics(OP, hidden, torch.cat(records), torch.cat(existing), options, shard.group, shape)


def _check_values(hidden: Tensor, options: Options) -> None:
    """Checks the values of tensors. On a GPU this synchronizes."""
    rows = hidden.numel() // hidden.shape[-1]
    index = options.row_index
    if index is not None and ((index < -1) | (index >= rows)).any():
        wrong = index[(index < -1) | (index >= rows)][0].item()
        fail(OP, "row_index", f"be in [-1, {rows - 1}]", wrong)
    if options.temperature > 0:
        for name, values in (("positions", options.positions), ("step", options.steps)):
            if values is None:
                continue
            outside = (values < 0) | (values >= 2**32)
            if index is not None:
                outside &= index >= 0
            if outside.any():
                fail(OP, name, "be in [0, 2**32)", values[outside][0].item())


def _check_product(hidden: Tensor, weight: Tensor) -> None:
    check_floats(OP, "hidden", hidden)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        fail(OP, "hidden", "have shape (..., E), E at least 1", tuple(hidden.shape))
    check_floats(OP, "weight", weight, like=hidden)
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        fail(OP, "weight", f"have shape (V, {int(hidden.shape[-1])}), V at least 1", tuple(weight.shape))


def _fake(hidden: Tensor, weight: Tensor, *raw: Any) -> tuple[Tensor, ...]:
    _check_product(hidden, weight)
    options = Options(*raw)
    check_options(OP, hidden, weight.shape[0], options)
    return new_results(hidden, rows_shape(hidden, options.row_index), options.top_k)


def _reference(hidden: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, ...]:
    _check_values(hidden, Options(*options))
    check_ids(OP, len(weight), Options(*options).filters)
    results: tuple[Tensor, ...] = reference.linear_token_statistics(hidden, weight, *reference_options(options))
    return results


def _cpu(hidden: Tensor, weight: Tensor, *raw: Any) -> tuple[Tensor, ...]:
    options = Options(*raw)
    _check_values(hidden, options)
    check_ids(OP, len(weight), options.filters)
    return _by_blocks(hidden, weight, options)


def _quantized(hidden: Tensor, weight: QuantizedWeight, options: Options, backend: Backend) -> tuple[Tensor, ...]:
    """Composed in Python: the statistics of a row of logits do not depend on how many are made at a time."""
    check_floats(OP, "hidden", hidden)
    if hidden.dim() == 0 or hidden.shape[-1] != weight.width or weight.width == 0 or len(weight) == 0:
        fail(OP, "hidden", f"have shape (..., {weight.width}) for a weight {tuple(weight.shape)}", tuple(hidden.shape))
    check_options(OP, hidden, len(weight), options)
    hidden = hidden.detach()
    if backend == "reference":
        results: tuple[Tensor, ...] = call(
            token_statistics_op, (quantized_linear(hidden, weight, backend=backend), *options), hidden, backend
        )
        return results
    if hidden.device.type == "cpu":
        _check_values(hidden, options)
        check_ids(OP, len(weight), options.filters)
    return _by_blocks(hidden, weight, options)


def _product(hidden: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(hidden, weight)
    return linear_op(hidden, weight) if hidden.device.type == "cpu" else torch.nn.functional.linear(hidden, weight)


def _by_blocks(hidden: Tensor, weight: Tensor | QuantizedWeight, options: Options) -> tuple[Tensor, ...]:
    """Calls `token_statistics` on blocks of at most BLOCK_LOGITS logits, or on a single longer row."""
    if options.row_index is None and hidden.numel() // hidden.shape[-1] * weight.shape[0] <= BLOCK_LOGITS:
        results: tuple[Tensor, ...] = token_statistics_op(_product(hidden, weight), *options)
        return results
    shape = rows_shape(hidden, options.row_index)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    rows = len(hidden)
    number = None if options.row_index is None else options.row_index.reshape(-1).long()
    slots = rows if number is None else len(number)
    positions, steps, seeds = (
        None if x is None else x.reshape(-1) for x in (options.positions, options.steps, options.seeds)
    )
    if positions is None:
        positions = torch.arange(rows, device=hidden.device) if number is None else number
    size = max(1, BLOCK_LOGITS // weight.shape[0])
    blocks = []
    for start in range(0, max(slots, 1), size):
        piece = slice(start, start + size)
        index = None
        if number is None:
            block = hidden[piece]
        else:
            row_ids = number[piece]
            exists = (row_ids >= 0) & (row_ids < rows)
            chosen = torch.where(exists, row_ids, 0)
            block = hidden.index_select(0, chosen) if rows else hidden.new_zeros(len(row_ids), hidden.shape[1])
            index = torch.where(exists, torch.arange(len(row_ids), device=hidden.device), -1)
        placed = options._replace(
            **_of_rows(options.filters, start, min(start + size, slots), slots),
            row_index=index,
            positions=positions[piece],
            steps=None if steps is None else steps[piece],
            seeds=None if seeds is None else seeds[piece],
        )
        blocks.append(token_statistics_op(_product(block, weight), *placed))
    results = blocks[0] if len(blocks) == 1 else tuple(torch.cat(columns) for columns in zip(*blocks))
    return tuple(x.view((*shape, *x.shape[1:])) for x in results)


def _of_rows(filters: LogitFilters, start: int, end: int, rows: int) -> dict[str, Any]:
    """The tensors of filters for some of the rows, one row each unless all rows have the same."""
    tensors = {name: getattr(filters, name) for name in TENSORS if getattr(filters, name) is not None}
    shared = {name: len(tensor) for name, tensor in tensors.items() if len(tensor) > 1}
    for name, groups in shared.items():
        index = torch.arange(start, end, device=tensors[name].device) // (rows // groups)
        tensors[name] = tensors[name].index_select(0, index)
    return tensors


def _triton(hidden: Tensor, weight: Tensor, *raw: Any) -> tuple[Tensor, ...]:
    options = Options(*raw)
    if DEBUG_CHECKS:
        _check_values(hidden, options)
        check_ids(OP, len(weight), options.filters)
    if options.cuts or options.filters.changes:  # which tokens stay is known only from all logits
        return _by_blocks(hidden, weight, options)
    from pdkernels.triton.linear_token_statistics import forward

    shape = rows_shape(hidden, options.row_index)
    tensors = options.seeds, options.steps, options.positions, options.row_index
    seeds, steps, positions, row_index = (None if x is None else x.reshape(-1) for x in tensors)
    results = forward(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        options.temperature,
        options.seed,
        seeds,
        options.step,
        steps,
        positions,
        row_index,
        options.suppress,
        options.top_k,
        options.distribution,
    )
    return tuple(x.view((*shape, *x.shape[1:])) for x in results)


def _example(draw: Draw) -> dict[str, Any]:
    return {"hidden": draw.floats(3, 32), "weight": draw.floats(300, 32), "temperature": 0.7}


linear_token_statistics_op = define(
    f"{OP}(Tensor hidden, Tensor weight, {OPTIONS}) -> {RESULTS}",
    fake=_fake,
    reference=_reference,
    example=_example,
    cpu=_cpu,
    triton=_triton,
    gradients="cut",
)
