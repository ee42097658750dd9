"""Temperature and filters of the causal methods: which tokens a row can give, and a draw among them.

The filters are those of transformers, in its order: the temperature, then `top_k`, `top_p`, `min_p` and `typical_p`, each over what the
one before has left. A token is drawn from the filtered distribution with the noise of its position (`_sampling.sample`), so a draft is
verified with the token that `autoregressive` draws there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from pdkernels._validation import check
from pdkernels.backends import backend_of
from pdkernels.decoding._sampling import checked_number, checked_size, greedy, noise, statistics, suppress_
from pdkernels.ops import TokenStatistics, token_statistics


class TokenSampler(NamedTuple):
    """The distribution that tokens are drawn from; the most probable token at temperature 0, which no filter drops.

    `top_k` keeps the logits that are at least the k-th largest. Of the distribution of what is left, `top_p` keeps a token if the more
    probable ones have less than this mass, and `min_p` one with at least this share of the largest probability. The most
    probable token always stays. Equal logits stay or go together, whereas transformers' top-p keeps some of the equals at its border.
    `typical_p` comes last: it keeps the tokens whose surprise is closest to the entropy, until they have this mass, which may drop the
    most probable one.

    >>> logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    >>> TokenSampler(1.0, top_k=2).filtered(logits).isfinite().tolist()
    [True, True, False, False]
    >>> TokenSampler(1.0, top_k=3, top_p=0.75).filtered(logits).isfinite().tolist()  # of 4/9, 3/9 and 2/9
    [True, True, False, False]
    """

    temperature: float
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    def sample(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        seeds: torch.Tensor,
        step: torch.Tensor | int,
        suppress: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """One token for each row of `logits` ``(batch, R, V)``, for `positions` ``(batch, R)``: int64 ``(batch, R)``."""
        if self.temperature == 0:
            return greedy(logits, suppress)
        draws = noise(self.temperature, seeds, step, positions)
        if self != TokenSampler(self.temperature):  # the statistics of what is left take less than those of all tokens
            draws |= {"distribution": "sampling"}
        return self._drawn(logits, suppress, draws).ids

    def draw(
        self,
        model: Any,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        seeds: torch.Tensor,
        step: torch.Tensor | int,
        suppress: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """`sample` for rows of `hidden`. Only `top_k` and `typical_p` need their logits as a tensor."""
        if self.cuts:
            return self.sample(model.logits(hidden), positions, seeds, step, suppress)
        return self.guess(model, hidden, positions, seeds, step, suppress)[0]

    def guess(
        self,
        model: Any,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        seeds: torch.Tensor,
        step: torch.Tensor | int,
        suppress: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the probability of each token in the distribution of the model, neither tempered nor filtered."""
        draws = noise(self.temperature, seeds, step, positions)
        if not self.cuts:
            if self.temperature > 0:
                draws |= {"top_p": self.top_p, "min_p": self.min_p}
            found = statistics(model, hidden, suppress=suppress, top_k=1, **draws)
            return found.ids, found.probs
        logits = model.logits(hidden)
        found = self._drawn(logits, suppress, draws)
        if type(logits) is torch.Tensor:
            return found.ids, found.probs
        whole = token_statistics(logits, suppress=suppress, top_k=1, backend=backend_of(logits.dtype))
        probs = found.probs * (found.logsumexp - whole.logsumexp).exp()
        return found.ids, probs.masked_fill(found.ids < 0, 0)

    def filtered(self, logits: torch.Tensor, suppress: tuple[int, ...] = ()) -> torch.Tensor:
        """`logits` ``(..., V)`` with -inf for the tokens that the filters drop, at a temperature above 0."""
        logits = self._top(_without(logits, suppress), ())
        if self.top_p == 1 and self.min_p == 0 and self.typical_p == 1:
            return logits
        few = logits.shape[-1] if self.top_k is None else self.top_k + _PART
        waits = type(logits) is not torch.Tensor or logits.device.type != "cpu"
        if not waits and 4 * few < logits.shape[-1] and bool(((logits > -torch.inf).sum(-1) <= few).all()):
            # Of a fixed width, so that a row is rounded alike in every batch; more tokens than that are rare ties.
            best = logits.topk(few, -1)
            kept = self._replace(top_k=None).filtered(best.values)
            return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, kept)
        scores = logits.double()
        below = (scores - scores.amax(-1, keepdim=True)) / self.temperature
        if self.top_p < 1:
            ordered = below.sort(dim=-1, descending=True).values
            mass = ordered.softmax(-1)
            count = (mass.cumsum(-1) - mass < self.top_p).sum(-1, keepdim=True)
            logits = logits.masked_fill(below < ordered.gather(-1, (count - 1).clamp(min=0)), -torch.inf)
        if self.min_p > 0:
            logits = logits.masked_fill(below < math.log(self.min_p), -torch.inf)
        if self.typical_p < 1:
            logits = logits.masked_fill(~typical(logits, self.temperature, self.typical_p), -torch.inf)
        return logits

    @property
    def cuts(self) -> bool:
        """Whether a draw needs the logits as a tensor."""
        return self.temperature > 0 and (self.top_k is not None or self.typical_p < 1)

    def _drawn(self, logits: torch.Tensor, suppress: tuple[int, ...], draws: dict[str, Any]) -> TokenStatistics:
        """Draws; of a vocabulary in slices the statistics are those of the tokens that `_cut` leaves."""
        kept: dict[str, Any] = {"top_p": self.top_p, "min_p": self.min_p}
        if type(logits) is torch.Tensor:
            kept |= {"keep_top_k": self.top_k, "typical_p": self.typical_p}
        else:
            logits, kept = self._cut(logits, suppress), kept if self.typical_p == 1 else {}
        return token_statistics(logits, suppress=suppress, top_k=1, backend=backend_of(logits.dtype), **kept, **draws)

    def _cut(self, logits: torch.Tensor, suppress: tuple[int, ...]) -> torch.Tensor:
        """`logits` with -inf for what the filters drop that `token_statistics` does not have for slices of a vocabulary."""
        return self._top(logits, suppress) if self.typical_p == 1 else self.filtered(logits, suppress)

    def _top(self, logits: torch.Tensor, suppress: tuple[int, ...]) -> torch.Tensor:
        """`logits` with -inf for what is below the `top_k`-th largest of those that `suppress` leaves."""
        if self.top_k is None or self.top_k >= logits.shape[-1]:
            return logits
        return largest(_without(logits, suppress), self.top_k)


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """`logits` ``(..., V)`` with -inf for what is below the largest but `count` - 1: equals of the last one stay.

    >>> largest(torch.tensor([3.0, 1.0, 2.0, 2.0]), 2)
    tensor([3., -inf, 2., 2.])
    """
    return logits.masked_fill(logits < kth_largest(logits, min(count, logits.shape[-1])), -torch.inf)


_PART = 64


def kth_largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The value of rank `count` of each row ``(..., V)``, ``(..., 1)``; NaN is the largest.

    The `count` largest logits lie in the `count` parts of 64 with the largest maxima, so a long row is read once and few are ordered.

    >>> kth_largest(torch.arange(1000.0), 3)
    tensor([997.])
    """
    size = logits.shape[-1]
    parts = size // _PART
    if type(logits) is not torch.Tensor or parts <= 4 * count:
        return logits.topk(count, -1).values[..., -1:]
    whole = logits[..., : parts * _PART].unflatten(-1, (parts, _PART))
    index = whole.amax(-1).topk(count, -1).indices
    chosen = whole.gather(-2, index[..., None].expand(*index.shape, _PART)).flatten(-2)
    return torch.cat([chosen, logits[..., parts * _PART :]], -1).topk(count, -1).values[..., -1:]


def typical(logits: torch.Tensor, temperature: float, mass: float) -> torch.Tensor:
    """Which of the tokens of ``softmax(logits / temperature)``, ``(..., V)``, are typical: bool ``(..., V)``. Equals stay or go together.

    Source: Meister et al., "Locally Typical Sampling".

    >>> typical(torch.tensor([0.5, 0.3, 0.2]).log(), 1.0, 0.4)  # an entropy of 1.03, surprises of 0.69, 1.2 and 1.61
    tensor([ True,  True, False])
    """
    scores = logits.double()
    likely = ((scores - scores.amax(-1, keepdim=True)) / temperature).log_softmax(-1)
    entropy = -(likely * likely.exp()).nansum(-1, keepdim=True)
    away = (-likely - entropy).abs()
    ordered, order = away.sort(-1)
    last = (likely.exp().gather(-1, order).cumsum(-1) < mass).sum(-1, keepdim=True)
    kept = away <= ordered.gather(-1, last.clamp(max=scores.shape[-1] - 1))
    return kept & (scores > -torch.inf)


def _without(logits: torch.Tensor, suppress: tuple[int, ...]) -> torch.Tensor:
    """`logits` with the tokens of `suppress` impossible; a copy if there are any."""
    if not suppress:
        return logits
    logits = logits.clone()
    for token in suppress:
        suppress_(logits, token)
    return logits


def checked_sampler(
    op: str,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    typical_p: float | None = None,
) -> TokenSampler:
    """The sampler of options whose temperature has been checked."""
    if top_k is not None:
        checked_size(op, "top_k", top_k)
    share = 1.0 if top_p is None else checked_number(op, "top_p", top_p, 1.0)
    minimum = 0.0 if min_p is None else checked_number(op, "min_p", min_p, 1.0)
    return TokenSampler(temperature, top_k, share, minimum, checked_typical(op, typical_p))


def checked_typical(op: str, typical_p: float | None) -> float:
    """The share of `typical_p`; 1 is off."""
    if typical_p is None:
        return 1.0
    checked_number(op, "typical_p", typical_p, 1.0)
    check(typical_p > 0, op, "typical_p", "be above 0", typical_p)
    return float(typical_p)
