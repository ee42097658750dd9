"""A token for each row of logits and the statistics that samplers use, in one read of the logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from pdkernels._validation import (
    check_floats,
    check_index,
    check_indices,
    check_int,
    check_number,
    check_type,
    fail,
    sentence,
)
from pdkernels.backends import Backend
from pdkernels.ops.filter_logits import NONE, SCHEMA, LogitFilters, check_filters, check_ids, raw_filters
from pdkernels.ops.library import Draw, call, define, keys, schema_of
from pdkernels.ops.vocabulary import SamplingRule, VocabularyShard, check_shard, local_tokens, merged, recorded
from pdkernels.reference import token_statistics as reference

__all__ = ["TokenStatistics", "token_statistics"]

OP = "token_statistics"
DISTRIBUTIONS = ("model", "sampling")
MAX_TOP_K = 16
MAX_SUPPRESSED = 16


class TokenStatistics(NamedTuple):
    """The result of `token_statistics`, one entry per row; ``...`` is the shape of the logits without their last
    dimension, or that of `row_index`."""

    ids: Tensor
    """(...) int64: the token, greedy or sampled; -1 where there is no row."""
    probs: Tensor
    """(...) float32: its probability."""
    top_ids: Tensor
    """(..., top_k) int64: the most probable tokens, the lowest id first on ties."""
    top_probs: Tensor
    """(..., top_k) float32: their probabilities."""
    margin: Tensor
    """(...) float32: the largest probability minus the second largest."""
    entropy: Tensor
    """(...) float32: ``-sum p ln p``, in nats."""
    logsumexp: Tensor
    """(...) float32: ``ln sum exp`` of the distribution's logits; -inf where there is no row."""


class Options(NamedTuple):
    """The arguments of these ops other than logits and their factors, in order and with defaults."""

    temperature: float = 0.0
    seed: int = 0
    seeds: Tensor | None = None
    step: int = 0
    steps: Tensor | None = None
    positions: Tensor | None = None
    row_index: Tensor | None = None
    suppress: Sequence[int] = ()
    top_k: int = 5
    top_p: float = 1.0
    min_p: float = 0.0
    distribution: str = "model"
    keep_top_k: int = 0
    typical_p: float = 1.0
    # Those of LogitFilters.
    bias: Tensor | None = None
    counts: Tensor | None = None
    recent: Tensor | None = None
    banned: Tensor | None = None
    allowed: Tensor | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def filters(self) -> LogitFilters:
        fields: tuple[Any, ...] = self[-len(NONE) :]
        return LogitFilters(*fields)

    @property
    def cuts(self) -> bool:
        """Whether a filter asks for all logits of a row before one of its tokens can be sampled."""
        return self.keep_top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1


# SymInt: otherwise what changes from step to step would pin a compiled graph to one step.
OPTIONS = (
    "float temperature=0.0, int seed=0, Tensor? seeds=None, SymInt step=0, Tensor? steps=None, Tensor? positions=None, "
    "Tensor? row_index=None, int[] suppress=[], int top_k=5, float top_p=1.0, float min_p=0.0, str distribution='model', "
    f"int keep_top_k=0, float typical_p=1.0, {SCHEMA}"
)
"""The options as arguments of a schema."""
RESULTS = f"({schema_of(TokenStatistics)})"


def token_statistics(
    logits: Tensor,
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
    """A token for each row of logits, its probability, the most probable tokens, margin, entropy and log-sum-exp.

    At temperature 0 the token is the first of the most probable ones; above, it is ``argmax(logit - T ln(-ln u))``, an
    exact sample from ``softmax(logits / T)``. The uniform numbers are keyed by (`seed`, `step`, position, token id), so
    a sequence gets the same tokens alone, in a batch, on every device and in the reference. ``-ln u`` is exact in both
    tails.

    `filters` change the logits first. Others drop tokens that could be sampled, in the order of transformers: of
    ``softmax(logits / T)`` (T = 0: 1) `keep_top_k` keeps the k largest; of the distribution of these, a token stays if
    the mass of all more probable tokens is below `top_p`, and its own at least `min_p` times the largest; of what is
    then left, `typical_p` keeps a token if all those whose surprise is closer to the entropy have less than this mass.
    Ties stay or go together, and the most probable token stays unless `typical_p` drops it. `distribution` is the
    distribution that the statistics refer to:

    - ``"model"``: ``softmax(logits)`` after `filters`, neither tempered nor cut (LLaDA, Fast-dLLM);
    - ``"sampling"``: the tempered and filtered distribution that the token is sampled from (Dream).

    A row in which every token is -inf or suppressed is treated as padding: its ids are -1, its log-sum-exp is -inf and
    the other numbers are 0. A row with a NaN or +inf has no distribution: its floats are NaN, `ids` is that of
    ``torch.argmax`` (the first NaN, else the first +inf), `top_ids` has NaN first as ``torch.topk`` does.

    Args:
        logits: ``(..., V)`` float32, float16 or bfloat16, V at least 1. Other layouts than strided rows are copied.
        temperature: T, 0 or in [1e-30, 1e30].
        seed: key of the random numbers, in [-2**63, 2**64); for a seed per sequence, an int tensor that
            broadcasts to the shape of the rows.
        step: counter of the random numbers, such as the number of a forward; 0 .. 2**32 - 1; an int or an int tensor
            that broadcasts to the shape of the rows.
        positions: int tensor of the shape of the rows, positions in the text; 0 .. 2**32 - 1; None: the row's number.
        row_index: int tensor of any shape: the rows of ``logits.flatten(0, -2)`` to read, -1: none; None: all.
        suppress: token ids, at most 16, that count as -inf everywhere.
        top_k: the number of most probable tokens to return, 1 .. min(V, 16). None: 5, or V if that is less.
        top_p, min_p: in [0, 1].
        distribution: ``"model"`` or ``"sampling"``.
        keep_top_k: at least 1; None: all.
        typical_p: in (0, 1].
        filters: bias, penalties and impossible tokens, for the rows of the results.
        group: a `torch.distributed.ProcessGroup` whose ranks hold slices of the vocabulary, in the order of the ranks;
            `logits` are those of this rank's slice. All ranks pass equal options, and all get the same results, bit for
            bit.
        first_id: the id of the first of these logits, a multiple of 4: the number of ids on the ranks before. Only with
            a group.
        backend: see `pdkernels.show_config`. The reference takes float64 too, and returns it.

    Raises:
        ValueError: shapes that do not fit, options out of range; on the CPU a row number outside [-1, rows), or a
            position or step below 0 or above 2**32 - 1 that a draw would use, or an id of `filters` that is out of
            range. On CUDA such a row counts as no row, such an id as none, and of positions and steps the low 32 bits
            are taken, unless ``PDKERNELS_DEBUG_CHECKS=1``.
        TypeError: dtypes that do not fit.
        NotImplementedError: `keep_top_k`, `typical_p` or `filters` with a group.

    With a `group` ids, `suppress` and `top_k` (None: 5) are of the whole vocabulary. No logits are exchanged, but one
    record of ``8 (7 + 3 max(top_k, 2))`` bytes per row, and under `top_p` or `min_p` the largest logits of each rank
    until the filters are settled, for which the host waits. Tokens are those of one device, draws included: noise
    belongs to ids, and scores are compared in double precision.

    No gradient flows, and a tangent (forward mode) is refused. Deterministic; a row's result does not depend on other
    rows. A draw does not read `positions` and `step` at temperature 0.

    Source: the samplers of Nie et al., "Large Language Diffusion Models", and Ye et al., "Dream 7B"; nucleus filter:
    Holtzman et al., "The Curious Case of Neural Text Degeneration", section 3.1.

    Example:
        >>> import torch, pdkernels as pd
        >>> found = pd.token_statistics(torch.tensor([[0.0, 2.0, 1.0]]), top_k=2)
        >>> found.ids, found.probs, found.top_ids
        (tensor([1]), tensor([0.6652]), tensor([[1, 2]]))
    """
    if has_torch_function_unary(logits):  # a vocabulary in slices, as tensor-parallel models return it
        kwargs: dict[str, Any] = dict(
            temperature=temperature, seed=seed, step=step, positions=positions, row_index=row_index
        )
        kwargs |= dict(suppress=suppress, top_k=top_k, top_p=top_p, min_p=min_p, distribution=distribution)
        kwargs |= dict(keep_top_k=keep_top_k, typical_p=typical_p, filters=filters)
        result: TokenStatistics = handle_torch_function(token_statistics, (logits,), logits, **kwargs, backend=backend)
        return result
    check_shard(OP, group, first_id)
    top_k = resolved_top_k(top_k, logits, -1, group)
    raw = raw_options(
        OP, "logits", logits, temperature, seed, step, positions, row_index, suppress, top_k, top_p, min_p, distribution
    )
    raw += filter_options(OP, keep_top_k, typical_p, filters, logits, row_index)
    if group is not None:
        check_grouped(OP, Options(*raw))
        options = Options(*raw)
        _check_logits(logits)
        rows, index, options = chosen_rows(OP, logits, logits.shape[-1], options)
        record, exists = shard_record(rows, index, options, VocabularyShard(group, first_id, logits.shape[-1]), backend)
        return merged_statistics(OP, logits, record, exists, options, group, rows_shape(logits, row_index))
    return TokenStatistics(*call(token_statistics_op, (logits, *raw), logits, backend))


def resolved_top_k(top_k: int | None, x: Tensor, dim: int, group: Any) -> int:
    """`top_k`, or the default for None; dimension `dim` of `x` is the vocabulary. Ranks must agree on it."""
    if top_k is None and group is not None:
        return 5
    if top_k is None:
        top_k = min(5, x.shape[dim]) if isinstance(x, Tensor) and x.dim() > 0 else 5
    return top_k


def rows_shape(x: Tensor, row_index: Tensor | None) -> torch.Size:
    """Shape of the results: that of the rows of `x`, or of `row_index`."""
    return x.shape[:-1] if row_index is None else row_index.shape


def raw_options(
    op: str,
    name: str,
    x: Tensor,
    temperature: float,
    seed: int | Tensor,
    step: int | Tensor,
    positions: Tensor | None,
    row_index: Tensor | None,
    suppress: int | Sequence[int],
    *distribution_options: Any,
) -> tuple[Any, ...]:
    """The arguments of the public functions in the form of the ops: a tensor of seeds or steps has one for each row of
    `x`, `suppress` is a list."""

    def for_rows(argument: str, value: Tensor) -> Tensor:
        check_floats(op, name, x)
        if row_index is not None:
            check_type(isinstance(row_index, Tensor), op, "row_index", "be a tensor", type(row_index).__name__)
        shape = rows_shape(x, row_index)
        if value.dim() > len(shape) or any(
            size not in (1, full) for size, full in zip(reversed(value.shape), reversed(shape))
        ):
            fail(op, argument, f"broadcast to the shape {tuple(shape)} of the rows", tuple(value.shape))
        return value.expand(shape)

    number, seeds = keys(op, seed)
    if seeds is not None:
        seeds = for_rows("seed", seeds)
    steps = for_rows("step", step) if type(step) is not int and isinstance(step, Tensor) else None
    if isinstance(suppress, int):
        suppress = [suppress]
    elif isinstance(suppress, (list, tuple)) or (
        isinstance(suppress, Iterable) and not isinstance(suppress, str) and getattr(suppress, "ndim", 1) > 0
    ):  # a tensor without dimensions says that it can be iterated, and cannot
        suppress = list(suppress)
    columns = (step if steps is None else 0, steps, positions, row_index)
    return (temperature, number, seeds, *columns, suppress, *distribution_options)


def filter_options(
    op: str, keep_top_k: int | None, typical_p: float, filters: LogitFilters | None, x: Tensor, row_index: Tensor | None
) -> tuple[Any, ...]:
    """The last of the options, in the form of the ops."""
    if keep_top_k is None:
        keep_top_k = 0
    elif type(keep_top_k) is int and keep_top_k < 1:
        fail(op, "keep_top_k", "be at least 1", keep_top_k, "Pass None to keep all tokens.")
    if filters is None:
        return keep_top_k, typical_p, *NONE
    check_type(isinstance(x, Tensor) and x.dim() > 0, op, "filters", "come with rows of logits", type(x).__name__)
    return keep_top_k, typical_p, *raw_filters(op, filters, rows_shape(x, row_index))


def check_grouped(op: str, options: Options) -> None:
    """Raises NotImplementedError for what is not computed from slices of a vocabulary."""
    for name, is_set in (
        ("keep_top_k", options.keep_top_k > 0),
        ("typical_p", options.typical_p < 1),
        ("filters", options.filters.changes),
    ):
        if is_set:
            remedy = "Gather the logits first."
            raise NotImplementedError(sentence(op, f"{name} is not supported with a group", remedy))


def check_options(op: str, x: Tensor, width: int, options: Options) -> None:
    """Checks everything but the logits, of which there are `width` for each row of `x`."""
    temperature, seed, seeds, step, steps, positions, row_index, suppress, top_k, top_p, min_p, distribution = options[
        :12
    ]
    check_number(op, "typical_p", options.typical_p, 0, 1, "be in (0, 1]")
    if options.typical_p == 0:
        fail(op, "typical_p", "be in (0, 1]", options.typical_p)
    check_int(op, "keep_top_k", options.keep_top_k, 0)
    check_number(op, "temperature", temperature, 0, 1e30, "be in [0, 1e30]")
    if 0 < temperature < 1e-30:
        fail(op, "temperature", "be 0 or at least 1e-30", temperature, "At 0 the most probable token is taken.")
    check_number(op, "top_p", top_p, 0, 1, "be in [0, 1]")
    check_number(op, "min_p", min_p, 0, 1, "be in [0, 1]")
    for name, number in (("seed", seed), ("step", step), ("top_k", top_k)):
        check_int(op, name, number)
    if not 0 <= step < 2**32:
        fail(op, "step", "be in [0, 2**32)", step)
    if not 1 <= top_k <= MAX_TOP_K or top_k > width:
        fail(op, "top_k", f"be in 1 .. min(V, {MAX_TOP_K}) = {min(MAX_TOP_K, int(width))}", top_k)
    if not isinstance(distribution, str) or distribution not in DISTRIBUTIONS:
        fail(op, "distribution", "be 'model' or 'sampling'", repr(distribution))
    _check_suppress(op, suppress, width)
    if row_index is not None:
        check_index(op, "row_index", row_index, tuple(getattr(row_index, "shape", ())), x.device)
    shape = rows_shape(x, row_index)
    check_indices(op, shape, x.device, seed=seeds, step=steps, positions=positions)
    check_filters(op, x, math.prod(shape), width, options.filters)


def _check_suppress(op: str, suppress: Sequence[int], width: int) -> None:
    is_list = isinstance(suppress, (list, tuple)) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in suppress
    )
    check_type(is_list, op, "suppress", "be an int or a sequence of ints", repr(suppress))
    if len(suppress) > MAX_SUPPRESSED:
        fail(op, "suppress", f"have at most {MAX_SUPPRESSED} ids", len(suppress))
    for token in suppress:
        if not 0 <= token < width:
            fail(op, "suppress", f"hold ids in [0, {int(width) - 1}]", token)


def chosen_rows(op: str, x: Tensor, width: int, options: Options) -> tuple[Tensor, Tensor | None, Options]:
    """The rows of `x` that a rank of a group looks at, which of them exist (not -1), and the options for those rows."""
    row_options = options._replace(suppress=(), top_k=1)
    check_options(op, x, width, row_options)
    check_int(op, "top_k", options.top_k)
    if not 1 <= options.top_k <= MAX_TOP_K:
        fail(op, "top_k", f"be in 1 .. {MAX_TOP_K}", options.top_k)
    _check_suppress(op, options.suppress, 2**32)
    rows = x.reshape(-1, x.shape[-1])
    positions, steps, seeds = (
        None if t is None else t.reshape(-1) for t in (options.positions, options.steps, options.seeds)
    )
    index = None
    if options.row_index is None:
        number = torch.arange(len(rows), device=x.device)
    else:
        number = options.row_index.reshape(-1).long()
        exists = (number >= 0) & (number < len(rows))
        if x.device.type == "cpu" and not bool((exists | (number == -1)).all()):
            fail(op, "row_index", f"be in [-1, {len(rows) - 1}]", number[~exists & (number != -1)][0].item())
        row_ids = torch.where(exists, number, 0)
        rows = rows.index_select(0, row_ids) if len(rows) else rows.new_zeros(len(row_ids), rows.shape[1])
        index = torch.where(exists, torch.arange(len(row_ids), device=x.device), -1)
    positions = number if positions is None else positions
    return rows, index, options._replace(row_index=index, positions=positions, steps=steps, seeds=seeds)


def shard_record(
    logits: Tensor, index: Tensor | None, options: Options, shard: VocabularyShard, backend: Backend
) -> tuple[Tensor, Tensor]:
    """The record that a rank makes of its `logits` ``(rows, width)``, and which rows exist."""
    if suppressed := local_tokens(options.suppress, shard):
        logits = logits.index_fill(-1, torch.tensor(suppressed, device=logits.device), -torch.inf)
    exists = torch.ones(len(logits), dtype=torch.bool, device=logits.device) if index is None else index >= 0

    def run(rows: Tensor, **changes: Any) -> tuple[Tensor, ...]:
        arguments = (rows, *options._replace(suppress=(), top_p=1.0, min_p=0.0, **changes), shard.first_id)
        results: tuple[Tensor, ...] = call(token_statistics_op, arguments, rows, backend)
        return results

    return recorded(logits, exists, options.top_k, _sampling_rule(options), shard, run), exists


def merged_statistics(
    op: str, x: Tensor, record: Tensor, exists: Tensor, options: Options, group: Any, shape: torch.Size
) -> TokenStatistics:
    """The results of rows of this `shape` from the records of all ranks."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    results = merged(op, record, exists, options.top_k, _sampling_rule(options), group, dtype)
    return TokenStatistics(*(t.view((*shape, *t.shape[1:])) for t in results))


def _sampling_rule(options: Options) -> SamplingRule:
    assert options.positions is not None
    seeds = options.seed if options.seeds is None else options.seeds
    steps = options.step if options.steps is None else options.steps
    positions = options.positions.long().clamp(min=0)
    return SamplingRule(
        options.temperature, seeds, steps, positions, options.top_p, options.min_p, options.distribution
    )


def _check_logits(logits: Tensor) -> None:
    check_floats(OP, "logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        fail(OP, "logits", "have shape (..., V), V at least 1", tuple(logits.shape))


def _fake(logits: Tensor, *raw: Any) -> tuple[Tensor, ...]:
    _check_logits(logits)
    count = len(Options._fields)
    options, first_id = Options(*raw[:count]), raw[count] if len(raw) > count else 0
    check_options(OP, logits, logits.shape[-1], options)
    check_int(OP, "first_id", first_id)
    if first_id < 0 or first_id % 4 or first_id + logits.shape[-1] > 2**32:
        fail(OP, "first_id", "be a multiple of 4 in [0, 2**32 - V]", first_id)
    return new_results(logits, rows_shape(logits, options.row_index), options.top_k)


def new_results(x: Tensor, shape: torch.Size, top_k: int) -> tuple[Tensor, ...]:
    """Empty results for rows of `x`."""
    ids, top_ids = (x.new_empty(size, dtype=torch.int64) for size in (shape, (*shape, top_k)))
    top_probs = x.new_empty((*shape, top_k), dtype=torch.float32)
    probs, margin, entropy, logsumexp = (x.new_empty(shape, dtype=torch.float32) for _ in range(4))
    return ids, probs, top_ids, top_probs, margin, entropy, logsumexp


def _reference(logits: Tensor, *options: Any) -> tuple[Tensor, ...]:
    count = len(Options._fields)
    check_ids(OP, logits.shape[-1], Options(*options[:count]).filters)
    results: tuple[Tensor, ...] = reference.token_statistics(
        logits, *reference_options(options[:count]), *options[count:]
    )
    return results


def reference_options(options: Sequence[Any]) -> tuple[Any, ...]:
    """Options for the references: a seed and a step, or one of each per row."""
    temperature, seed, seeds, step, steps, *unchanged = Options(*options)
    return (temperature, seed if seeds is None else seeds, step if steps is None else steps, *unchanged)


def _example(draw: Draw) -> dict[str, Any]:
    return {"logits": draw.floats(3, 900), "temperature": 0.7, "top_p": 0.9}


token_statistics_op = define(
    f"{OP}(Tensor logits, {OPTIONS}, int first_id=0) -> {RESULTS}",
    fake=_fake,
    reference=_reference,
    example=_example,
    gradients="cut",
)
