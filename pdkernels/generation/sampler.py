"""Temperature and filters: which tokens a row can give, and a draw among them.

The filters are those of transformers, in its order: the temperature, then `top_k`, `top_p`, `min_p` and `typical_p`,
each over what the one before has left. A token is drawn from the filtered distribution with the noise of its position
(`noise.py`), so a draft is verified with the token that `autoregressive` draws there.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch.overrides import has_torch_function_unary

from pdkernels.backends import backend_of
from pdkernels.generation.noise import greedy, likeliest, noise, statistics, suppress_
from pdkernels.generation.params import SamplingParams
from pdkernels.ops import TokenStatistics, token_statistics

TopP = Literal["crossing", "within", "joint"]


class Sampler(NamedTuple):
    """The distribution that tokens are drawn from; the most probable token at temperature 0, which no filter drops.

    `top_k` keeps the logits that are at least the k-th largest. Of the distribution of what is left, `top_p` keeps a
    token if the more probable ones have less than this mass, and `min_p` one with at least this share of the largest
    probability. The most probable token always stays. Equal logits stay or go together, whereas transformers' top-p
    keeps some of the equals at its border. `typical_p` comes last: it keeps the tokens whose surprise is closest to the
    entropy, until they have this mass, which may drop the most probable one.

    `top_p_rule` has two published exceptions. "joint" (Dream): the masses are those of all tokens, whatever `top_k`
    leaves. "within" (the recurrent-depth model): so are they there, and in descending order, ties by id, every token
    goes whose cumulative mass, its own included, exceeds `top_p`, except the first.

    >>> logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    >>> Sampler(1.0, top_k=2).filtered(logits).isfinite().tolist()
    [True, True, False, False]
    >>> Sampler(1.0, top_k=3, top_p=0.75).filtered(logits).isfinite().tolist()  # of 4/9, 3/9 and 2/9
    [True, True, False, False]
    >>> Sampler(1.0, top_p=0.65, top_p_rule="within").filtered(logits).isfinite().tolist()
    [True, False, False, False]
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_p_rule: TopP = "crossing"

    @classmethod
    def of(cls, params: SamplingParams, top_p_rule: TopP = "crossing") -> Sampler:
        """The sampler of a request."""
        top_p, min_p, typical_p = params.top_p, params.min_p, params.typical_p
        return cls(
            params.temperature,
            params.top_k,
            1.0 if top_p is None else top_p,
            min_p or 0.0,
            1.0 if typical_p is None else typical_p,
            top_p_rule,
        )

    @property
    def greedy(self) -> bool:
        """Whether it takes the most probable token of every row."""
        return self.temperature == 0

    @property
    def when_drawing(self) -> Sampler:
        """Itself at a temperature above 0; else without filters, none of which drops the most probable token."""
        return self if self.temperature > 0 else Sampler()

    def sample(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        seeds: torch.Tensor,
        step: torch.Tensor | int,
        suppress: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """One token for each row of `logits` ``(batch, R, V)``, for `positions` ``(batch, R)``: int64 ``(batch,
        R)``."""
        if self.temperature == 0:
            return greedy(logits, suppress)
        keyed = noise(self.temperature, seeds, step, positions)
        if self.drops:  # the statistics of what is left take less than those of all tokens
            keyed |= {"distribution": "sampling"}
        return self._drawn(logits, suppress, keyed).ids

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
        if self.needs_logits:
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
        """`draw`, and the probability of each token in the distribution of the model, neither tempered nor filtered."""
        keyed = noise(self.temperature, seeds, step, positions)
        if not self.needs_logits:
            if self.temperature > 0:
                keyed |= {"top_p": self.top_p, "min_p": self.min_p}
            drawn = statistics(model, hidden, suppress=suppress, top_k=1, **keyed)
            return drawn.ids, drawn.probs
        logits = model.logits(hidden)
        drawn = self._drawn(logits, suppress, keyed)
        if type(logits) is torch.Tensor:
            return drawn.ids, drawn.probs
        unfiltered = token_statistics(logits, suppress=suppress, top_k=1, backend=backend_of(logits.dtype))
        probs = drawn.probs * (drawn.logsumexp - unfiltered.logsumexp).exp()
        return drawn.ids, probs.masked_fill(drawn.ids < 0, 0)

    def filtered(self, logits: torch.Tensor, suppress: tuple[int, ...] = ()) -> torch.Tensor:
        """`logits` ``(..., V)`` with -inf for the tokens that the filters drop."""
        logits = _without(logits, suppress)
        if self.top_p_rule == "crossing":
            return self._crossing(logits)
        logits, remaining = self.cut(logits)
        return Sampler(self.temperature, **remaining)._crossing(logits)

    @property
    def drops(self) -> bool:
        """Whether there is a filter."""
        return self[1:5] != Sampler()[1:5]

    @property
    def cuts(self) -> bool:
        """Whether a filter is not among those that need no logits as a tensor, `top_p` and `min_p`."""
        return self.top_k is not None or self.typical_p < 1 or (self.top_p_rule == "within" and self.top_p < 1)

    @property
    def needs_logits(self) -> bool:
        """Whether a draw needs the logits as a tensor."""
        return self.temperature > 0 and self.cuts

    def cut(self, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """`logits` ``(..., V)`` with -inf for what `top_k` and `typical_p` drop, and the filters that are left, as
        options of `token_statistics`."""
        within = self.top_p_rule == "within" and self.top_p < 1
        if self.typical_p < 1 and (self.top_p_rule == "crossing" or self.top_k is None) and not within:
            return self._crossing(logits), {}
        remaining: dict[str, Any] = {"top_p": self.top_p, "min_p": self.min_p}
        if self.top_p_rule == "joint" and self.top_k is not None:
            top = likeliest(logits, self.top_k, self.temperature, remaining.pop("top_p"))
        else:
            top = logits if self.top_k is None else largest(logits, self.top_k)
        if within:
            top = _top_p_within(logits, top, self.temperature, remaining.pop("top_p"))
        if self.typical_p < 1:
            return Sampler(self.temperature, typical_p=self.typical_p, **remaining)._crossing(top), {}
        return top, remaining

    def _crossing(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` after all filters, by the rules of transformers."""
        if self.top_k is not None:
            logits = largest(logits, self.top_k)
        if self.top_p == 1 and self.min_p == 0 and self.typical_p == 1:
            return logits
        few = logits.shape[-1] if self.top_k is None else self.top_k + _BLOCK
        waits = type(logits) is not torch.Tensor or logits.device.type != "cpu"
        if not waits and 4 * few < logits.shape[-1] and bool(((logits > -torch.inf).sum(-1) <= few).all()):
            # Of a fixed width, so that a row is rounded alike in every batch; more tokens than that are rare ties.
            best = logits.topk(few, -1)
            filtered = self._replace(top_k=None)._crossing(best.values)
            return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, filtered)
        scores, temperature = logits.double(), self.temperature or 1.0
        below = (scores - scores.amax(-1, keepdim=True)) / temperature
        if self.top_p < 1:
            ordered = below.sort(dim=-1, descending=True).values
            mass = ordered.softmax(-1)
            count = (mass.cumsum(-1) - mass < self.top_p).sum(-1, keepdim=True)
            logits = logits.masked_fill(below < ordered.gather(-1, (count - 1).clamp(min=0)), -torch.inf)
        if self.min_p > 0:
            logits = logits.masked_fill(below < math.log(self.min_p), -torch.inf)
        if self.typical_p < 1:
            logits = logits.masked_fill(~typical(logits, temperature, self.typical_p), -torch.inf)
        return logits

    def _drawn(self, logits: torch.Tensor, suppress: tuple[int, ...], keyed: dict[str, Any]) -> TokenStatistics:
        """Statistics with a draw; of a vocabulary in slices they are those of the tokens that `cut` leaves."""
        filters: dict[str, Any]
        if self.top_p_rule != "crossing":
            logits, filters = self.filtered(logits, suppress), {}
        elif type(logits) is torch.Tensor:
            filters = {"top_p": self.top_p, "min_p": self.min_p, "keep_top_k": self.top_k, "typical_p": self.typical_p}
        else:
            logits, filters = self.cut(_without(logits, suppress)) if self.cuts else (logits, self.cut(logits)[1])
        return token_statistics(
            logits, suppress=suppress, top_k=1, backend=backend_of(logits.dtype), **filters, **keyed
        )


def _top_p_within(logits: torch.Tensor, top: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """`top`, what `top_k` leaves of `logits`, with -inf for the tokens that the rule "within" drops."""
    distribution = torch.softmax(logits.double() / temperature, -1).masked_fill(top == -torch.inf, 0)
    beyond = _beyond_first if has_torch_function_unary(distribution) else _beyond
    return top.masked_fill(beyond(distribution, top_p), -torch.inf)


def _beyond(distribution: torch.Tensor, top_p: float) -> torch.Tensor:
    """The tokens that the rule "within" drops, from the whole sorted vocabulary."""
    ordered, ids = distribution.sort(dim=-1, descending=True, stable=True)
    dropped = ordered.cumsum(-1) > top_p
    dropped[..., 0] = False
    return torch.zeros_like(dropped).scatter(-1, ids, dropped)


def _beyond_first(distribution: torch.Tensor, top_p: float) -> torch.Tensor:
    """`_beyond` from as many of the most probable tokens as it takes, for which the host waits: of a vocabulary in
    slices, whose order would take an exchange of all."""
    size = distribution.shape[-1]
    count = min(_BLOCK, size)
    while True:
        first = distribution.topk(count, -1).values
        within = ~(first.cumsum(-1) > top_p)
        within[..., 0] = True
        stay = within.sum(-1, keepdim=True)
        if count == size or bool((stay < count).all()):
            break
        count = min(8 * count, size)
    last = first.gather(-1, stay - 1)
    equals = distribution == last
    # On ties the lowest ids stay.
    spare = stay - (first > last).sum(-1, keepdim=True)
    return (distribution < last) | (equals & (equals.cumsum(-1) > spare))


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """`logits` ``(..., V)`` with -inf for what is below the largest but `count` - 1: equals of the last one stay.

    >>> largest(torch.tensor([3.0, 1.0, 2.0, 2.0]), 2)
    tensor([3., -inf, 2., 2.])
    """
    return logits.masked_fill(logits < kth_largest(logits, min(count, logits.shape[-1])), -torch.inf)


_BLOCK = 64


def kth_largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The value of rank `count` of each row ``(..., V)``, ``(..., 1)``; NaN is the largest.

    The `count` largest logits lie in the `count` blocks of 64 with the largest maxima, so a long row is read once and
    few are ordered.

    >>> kth_largest(torch.arange(1000.0), 3)
    tensor([997.])
    """
    size = logits.shape[-1]
    blocks = size // _BLOCK
    if type(logits) is not torch.Tensor or blocks <= 4 * count:
        return logits.topk(count, -1).values[..., -1:]
    blocked = logits[..., : blocks * _BLOCK].unflatten(-1, (blocks, _BLOCK))
    index = blocked.amax(-1).topk(count, -1).indices
    chosen = blocked.gather(-2, index[..., None].expand(*index.shape, _BLOCK)).flatten(-2)
    return torch.cat([chosen, logits[..., blocks * _BLOCK :]], -1).topk(count, -1).values[..., -1:]


def typical(logits: torch.Tensor, temperature: float, mass: float) -> torch.Tensor:
    """Which of the tokens of ``softmax(logits / temperature)``, ``(..., V)``, are typical: bool ``(..., V)``. Equals
    stay or go together.

    Source: Meister et al., "Locally Typical Sampling".

    >>> typical(torch.tensor([0.5, 0.3, 0.2]).log(), 1.0, 0.4)  # an entropy of 1.03, surprises of 0.69, 1.2 and 1.61
    tensor([ True,  True, False])
    """
    scores = logits.double()
    log_probs = ((scores - scores.amax(-1, keepdim=True)) / temperature).log_softmax(-1)
    entropy = -(log_probs * log_probs.exp()).nansum(-1, keepdim=True)
    away = (-log_probs - entropy).abs()
    ordered, order = away.sort(-1)
    last = (log_probs.exp().gather(-1, order).cumsum(-1) < mass).sum(-1, keepdim=True)
    near = away <= ordered.gather(-1, last.clamp(max=scores.shape[-1] - 1))
    return near & (scores > -torch.inf)


def _without(logits: torch.Tensor, suppress: tuple[int, ...]) -> torch.Tensor:
    """`logits` with the tokens of `suppress` impossible; a copy if there are any."""
    if not suppress:
        return logits
    logits = logits.clone()
    for token in suppress:
        suppress_(logits, token)
    return logits
