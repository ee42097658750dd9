"""Temperature and filters of the causal methods: which tokens a row can give, and a draw among them.

The filters are those of transformers, in its order: the temperature, then `top_k`, `top_p` and `min_p`, each over what the one before
has left. A token is drawn from the filtered distribution with the noise of its position (`_sampling.sample`), so a draft is
verified with the token that `autoregressive` draws there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from pdkernels.backends import backend_of
from pdkernels.decoding._sampling import checked_number, checked_size, greedy, noise, statistics, suppress_
from pdkernels.ops import TokenStatistics, token_statistics


class TokenSampler(NamedTuple):
    """The distribution that tokens are drawn from; the most probable token at temperature 0, which no filter drops.

    `top_k` keeps the logits that are at least the k-th largest. Of the distribution of what is left, `top_p` keeps a token if the more
    probable ones have less than this mass, and `min_p` one with at least this share of the largest probability. The most
    probable token always stays. Equal logits stay or go together, whereas transformers' top-p keeps some of the equals at its border.

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
        return self._drawn(self._top(logits, suppress), suppress, noise(self.temperature, seeds, step, positions)).ids

    def draw(
        self,
        model: Any,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        seeds: torch.Tensor,
        step: torch.Tensor | int,
        suppress: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """`sample` for rows of `hidden`. Only `top_k` needs their logits as a tensor."""
        if self._cuts:
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
        if not self._cuts:
            if self.temperature > 0:
                draws |= {"top_p": self.top_p, "min_p": self.min_p}
            found = statistics(model, hidden, suppress=suppress, top_k=1, **draws)
            return found.ids, found.probs
        logits = model.logits(hidden)
        whole = token_statistics(logits, suppress=suppress, top_k=1, backend=backend_of(logits.dtype))
        found = self._drawn(self._top(logits, suppress), suppress, draws)
        probs = found.probs * (found.logsumexp - whole.logsumexp).exp()
        return found.ids, probs.masked_fill(found.ids < 0, 0)

    def filtered(self, logits: torch.Tensor, suppress: tuple[int, ...] = ()) -> torch.Tensor:
        """`logits` ``(..., V)`` with -inf for the tokens that the filters drop, at a temperature above 0."""
        logits = self._top(_without(logits, suppress), ())
        if self.top_p == 1 and self.min_p == 0:
            return logits
        scores = logits.double()
        below = (scores - scores.amax(-1, keepdim=True)) / self.temperature
        if self.top_p < 1:
            ordered = below.sort(dim=-1, descending=True).values
            mass = ordered.softmax(-1)
            count = (mass.cumsum(-1) - mass < self.top_p).sum(-1, keepdim=True)
            logits = logits.masked_fill(below < ordered.gather(-1, (count - 1).clamp(min=0)), -torch.inf)
        if self.min_p > 0:
            logits = logits.masked_fill(below < math.log(self.min_p), -torch.inf)
        return logits

    @property
    def _cuts(self) -> bool:
        return self.temperature > 0 and self.top_k is not None

    def _drawn(self, logits: torch.Tensor, suppress: tuple[int, ...], draws: dict[str, Any]) -> TokenStatistics:
        """Draws from logits that `_top` has cut."""
        kept: dict[str, Any] = {"top_p": self.top_p, "min_p": self.min_p}
        return token_statistics(logits, suppress=suppress, top_k=1, backend=backend_of(logits.dtype), **kept, **draws)

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
    return logits.masked_fill(logits < logits.topk(min(count, logits.shape[-1]), -1).values[..., -1:], -torch.inf)


def _without(logits: torch.Tensor, suppress: tuple[int, ...]) -> torch.Tensor:
    """`logits` with the tokens of `suppress` impossible; a copy if there are any."""
    if not suppress:
        return logits
    logits = logits.clone()
    for token in suppress:
        suppress_(logits, token)
    return logits


def checked_sampler(
    op: str, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> TokenSampler:
    """The sampler of options whose temperature has been checked."""
    if top_k is not None:
        checked_size(op, "top_k", top_k)
    share = 1.0 if top_p is None else checked_number(op, "top_p", top_p, 1.0)
    minimum = 0.0 if min_p is None else checked_number(op, "min_p", min_p, 1.0)
    return TokenSampler(temperature, top_k, share, minimum)
