"""Statistics of rows whose vocabulary is split across ranks, merged from a few numbers per row.

A rank makes a record of each row from its own slice of the logits. The records of all ranks are exchanged once, and
every rank merges them in the same way. This is enough for sampling: noise is keyed by ids of the whole vocabulary, so
the sampled token of a row is the best of the ranks' winners. Only a nucleus (`top_p`) has to be searched for, among the
largest logits of each rank, of which more are exchanged until they suffice.

Source: sums merged over parts after Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels._philox import uniforms_at
from pdkernels._validation import check, check_type, fail
from pdkernels.ops.collectives import gathered

Results = tuple[Tensor, ...]
Run = Callable[..., Results]
"""Results of `token_statistics` for a rank's rows; keywords override options."""


class VocabularyShard(NamedTuple):
    """A rank's slice of the vocabulary."""

    group: Any
    first_id: int
    width: int


class SamplingRule(NamedTuple):
    """The keys of the random numbers of each row, and the distribution that is sampled from."""

    temperature: float
    seeds: Tensor | int
    steps: Tensor | int
    positions: Tensor
    top_p: float
    min_p: float
    distribution: str

    @property
    def softmax_temperature(self) -> float:
        return self.temperature if self.temperature > 0 else 1.0

    @property
    def inv_temperature(self) -> float:
        """Factor of the logits in the distribution of the statistics."""
        return 1 / self.softmax_temperature if self.distribution == "sampling" else 1.0

    @property
    def filtered(self) -> bool:
        return (self.top_p < 1 or self.min_p > 0) and (self.temperature > 0 or self.distribution == "sampling")


def check_shard(op: str, group: Any, first_id: int) -> None:
    """Raises ValueError or TypeError for an invalid start of the slice."""
    check_type(type(first_id) is int, op, "first_id", "be an int", type(first_id).__name__)
    if group is None:
        check(first_id == 0, op, "first_id", "be 0 without a group", first_id, "Pass the group of the ranks too.")
    check(0 <= first_id < 2**32, op, "first_id", "be in [0, 2**32)", first_id)
    check(first_id % 4 == 0, op, "first_id", "be a multiple of 4", first_id, "Random numbers come in fours.")


def local_tokens(tokens: Sequence[int], shard: VocabularyShard) -> list[int]:
    """The suppressed ids within the slice, relative to its start."""
    return [token - shard.first_id for token in tokens if 0 <= token - shard.first_id < shard.width]


def recorded(
    scores: Tensor, exists: Tensor, top_k: int, rule: SamplingRule, shard: VocabularyShard, run: Run
) -> Tensor:
    """The record for other ranks of the rows `scores` ``(rows, width)``: float64 ``(rows, 7 + 3 k)``, k =
    ``ranked(top_k)``.

    `exists` ``(rows,)``: which rows exist. `run` computes the statistics of `scores`, or of substitutes for them.
    """
    local_top_k = min(ranked(top_k), shard.width)
    if rule.filtered:
        filtered = scores.masked_fill(scores < _cut(scores, exists, rule, shard), -torch.inf)
        sampling = rule.distribution == "sampling"
        results = run(filtered, top_k=local_top_k) if sampling else run(scores, top_k=local_top_k, temperature=0.0)
        sampled_ids = results[0] if sampling else run(filtered, top_k=1)[0]
    else:
        results = run(scores, top_k=local_top_k)
        sampled_ids = results[0]
    _, _, top_ids, top_probs, _, entropy, total = results
    rows = torch.arange(len(scores), device=scores.device)
    exact = scores.double()
    first = torch.arange(local_top_k, device=scores.device)
    # A slice without possible tokens still has ids, which may be among the first of the row.
    top_ids = torch.where((top_ids < 0).all(-1, keepdim=True), first, top_ids)
    top_logits = exact[rows[:, None], top_ids]
    if rule.filtered and rule.distribution == "sampling":
        top_logits = torch.where(top_probs > 0, top_logits, torch.where(total.isnan()[:, None], top_logits, -torch.inf))
    # From the first token's probability: the float32 of a log-sum-exp would lose a digit.
    sharp = top_logits[:, 0] * rule.inv_temperature - top_probs[:, 0].double().log()
    total = torch.where(total.isfinite(), sharp, total.double())
    chosen = sampled_ids.clamp(min=0)
    logit = exact[rows, chosen]
    prob = (logit * rule.inv_temperature - total).exp()
    score = logit
    if rule.temperature > 0:
        uniform = uniforms_at(rule.seeds, rule.steps, rule.positions, shard.first_id + chosen)
        noise = torch.log(-torch.log(uniform))
        score = logit - rule.temperature * noise
    score = torch.where(sampled_ids < 0, -torch.inf, score)
    numbers = [shard.first_id + chosen, score, prob, entropy, total]
    numbers += [torch.full_like(total, shard.first_id), torch.full_like(total, shard.width)]
    spare = ranked(top_k) - local_top_k
    pad = torch.nn.functional.pad
    tops = (
        pad(shard.first_id + top_ids.double(), (0, spare), value=-1.0),
        pad(top_logits, (0, spare), value=-torch.inf),
        pad(top_probs.double(), (0, spare)),
    )
    return torch.cat((torch.stack([number.double() for number in numbers], -1), *tops), -1)


def ranked(top_k: int) -> int:
    """The number of top tokens that a rank reports; the margin needs two."""
    return max(top_k, 2)


def merged(
    op: str, record: Tensor, exists: Tensor, top_k: int, rule: SamplingRule, group: Any, dtype: torch.dtype
) -> Results:
    """The results of all rows, floats of `dtype`, with the same bits on every rank."""
    records = gathered(record, group)
    if record.device.type == "cpu" and len(exists):
        _check_slices(op, records[:, 0, 5:7])
    ids, scores, probs, entropies, totals, _, _ = records[..., :7].unbind(-1)
    undefined = totals.isnan().any(0)
    total = totals.logsumexp(0)
    no_token = ~exists | (total == -torch.inf)
    share = torch.where(totals == -torch.inf, 0.0, (totals - total).exp())
    count = ranked(top_k)
    top_ids, top_logits, top_probs = (
        block.transpose(0, 1).flatten(1) for block in (records[..., 7 + i * count :][..., :count] for i in range(3))
    )
    top_probs = top_probs * share.T.repeat_interleave(count, 1)
    # Stable: on ties the lower rank, which has the lower id, comes first; NaN first, padding (no token) last.
    order = torch.where(top_ids < 0, -torch.inf, top_logits).sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(1, (top_ids.gather(1, order) < 0).to(torch.int8).sort(dim=-1, stable=True).indices)[:, :count]
    top_ids, top_logits, top_probs = (block.gather(1, order) for block in (top_ids, top_logits, top_probs))
    winner = scores.argmax(0, keepdim=True)
    if rule.temperature > 0:
        chosen = torch.where(undefined, top_ids[:, 0], ids.gather(0, winner)[0])
        prob = (probs * share).gather(0, winner)[0]
    else:
        chosen, prob = top_ids[:, 0], top_probs[:, 0]
    gap = (top_logits[:, 1] - top_logits[:, 0]) * rule.inv_temperature
    margin = -torch.expm1(torch.where(gap.isnan(), -torch.inf, gap)) * top_probs[:, 0]
    entropy = torch.where(share > 0, share * (entropies + total - totals), 0.0).sum(0)

    def numbers(x: Tensor, of_none: float = 0.0) -> Tensor:
        rows = (-1, *[1] * (x.dim() - 1))
        x = torch.where(undefined.view(rows), torch.nan, x)
        return torch.where(no_token.view(rows), of_none, x)

    floats = prob, top_probs[:, :top_k], margin, entropy
    prob, top_probs, margin, entropy = (numbers(x) for x in floats)
    none = no_token[:, None]
    return (
        torch.where(no_token, -1, chosen).long(),
        prob.to(dtype),
        torch.where(none, -1, top_ids[:, :top_k]).long(),
        top_probs.to(dtype),
        margin.to(dtype),
        entropy.to(dtype),
        numbers(total, -torch.inf).to(dtype),
    )


def _check_slices(op: str, slices: Tensor) -> None:
    """Checks on the host, from values that all ranks know, so that all of them raise."""
    expected = 0
    for first, width in slices.tolist():
        if first != expected:
            expectation = "be the ids of the ranks before, in the order of the ranks"
            fail(op, "first_id", expectation, [int(first) for first, _ in slices.tolist()])
        expected += int(width)


def _cut(scores: Tensor, exists: Tensor, rule: SamplingRule, shard: VocabularyShard) -> Tensor:
    """The smallest logit of each row that passes the filters, ``(rows, 1)``; -inf where nothing is dropped."""
    exact = scores.double()
    not_finite = (exact.isnan() | (exact == torch.inf)).any(-1)
    exact = torch.where((not_finite | ~exists)[:, None], -torch.inf, exact)
    mass = (exact / rule.softmax_temperature).logsumexp(-1)
    row_stats = gathered(torch.stack((exact.amax(-1), mass, not_finite.double()), -1), shard.group)
    largest, total, finite = row_stats[..., 0].amax(0), row_stats[..., 1].logsumexp(0), ~(row_stats[..., 2] > 0).any(0)
    cut = torch.full_like(largest, -torch.inf)
    if rule.min_p > 0:
        cut = largest + rule.softmax_temperature * math.log(rule.min_p)
    if rule.top_p < 1:
        cut = torch.maximum(cut, _nucleus(exact, total, rule, shard))
    cut = torch.minimum(cut, largest)
    return torch.where(finite & (largest > -torch.inf), cut, -torch.inf).to(torch.float64)[:, None]


def _nucleus(exact: Tensor, total: Tensor, rule: SamplingRule, shard: VocabularyShard) -> Tensor:
    """The smallest logit with less than `top_p` of the mass above it, ``(rows,)``; ranks exchange logits until it is
    found."""
    count = 64
    while True:
        top_logits = exact.topk(min(count, shard.width), -1).values
        top_logits = torch.nn.functional.pad(top_logits, (0, count - top_logits.shape[1]), value=-torch.inf)
        tops = gathered(top_logits, shard.group)
        bound = tops[..., -1].amax(0)  # all larger logits are known
        values = tops.transpose(0, 1).flatten(1).sort(dim=-1, descending=True).values
        mass = torch.where(values == -torch.inf, 0.0, (values / rule.softmax_temperature - total[:, None]).exp())
        before = mass.cumsum(-1) - mass
        first = torch.ones_like(before, dtype=torch.bool)
        first[:, 1:] = values[:, 1:] < values[:, :-1]
        before = torch.where(first, before, 0.0).cummax(-1).values  # on ties, the mass before the first
        in_nucleus = (before < rule.top_p) & (values > -torch.inf)
        in_nucleus[:, 0] = True  # the first token always stays
        smallest = torch.where(in_nucleus, values, torch.inf).amin(-1)
        dropped = (~in_nucleus & (values >= bound[:, None]) & (values > -torch.inf)).any(-1)
        if bool((dropped | (bound == -torch.inf)).all()):
            return smallest
        count *= 8
