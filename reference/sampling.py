"""Random draws of the reference decoders: noise that depends on the position in the text, not on the order of execution.

The token of position p is ``argmax over v of logits[v] - T * ln(-ln u[v])``: an exact draw from ``softmax(logits / T)``,
and the argmax itself at ``T = 0``. The uniform number is ``u[v] = (word(seed, step, p, v) + 0.5) / 2**32`` (philox.py):
its row is the position, its column the vocabulary id, and its step identifies what is drawn:

- step 0: the token drawn from the model's own distribution at p, whichever forward computes it;
- step f, at least 1: a guess for p, or the test of one, made by forward number f of this sequence (its prompt's is 1).

So a decoder that always emits its verifier's draw (sample and compare) writes, for each seed, exactly the tokens of
:func:`sampled_autoregressive`, regardless of its drafts, alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .autoregressive import AutoregressiveResult, Model
from .masks import causal
from .philox import random_words

# draft_model(tokens (1, T), positions (1, T), mask (T, T) bool, adapted (T,) bool) -> logits (1, T, V): adapters act only on the
# rows of `adapted`, since a cache holds the K and V of all other rows as the plain model computed them.
DraftModel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

OWN = 0  # step of the model's own tokens


def unadapted(model: Model) -> DraftModel:
    """`model` as a drafter without adapters."""
    return lambda tokens, positions, mask, adapted: model(tokens, positions, mask)


def uniforms(seed: int | Tensor, step: int | Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """fp64 in (0, 1), of the shape to which `seed`, `step`, `rows` and `columns` (int64) broadcast.

    >>> uniforms(0, 0, torch.tensor(0), torch.arange(2)).tolist() == [(w + 0.5) / 2**32 for w in (0x6627E8D5, 0xE169C58D)]
    True
    """
    return (random_words(seed, torch.as_tensor(step, device=columns.device), rows, columns).double() + 0.5) / 2**32


def draw(logits: Tensor, positions: Sequence[int], temperature: float, seed: int, step: int) -> list[int]:
    """One token for each row of `logits` ``(R, V)``, for position ``positions[row]``; ties go to the lowest id.

    >>> draw(torch.tensor([[1.0, 3.0, 3.0]]), [7], temperature=0.0, seed=0, step=OWN)
    [1]
    """
    scores = logits.double()
    if temperature > 0:
        rows, columns = torch.tensor(list(positions), dtype=torch.int64)[:, None], torch.arange(logits.shape[-1])
        scores = scores - temperature * torch.log(-torch.log(uniforms(seed, step, rows, columns)))
    return scores.argmax(-1).tolist()


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """fp64 ``(R, V)``: the probabilities that :func:`draw` draws from; all on the first maximum at temperature 0."""
    scores = logits.double()
    if temperature > 0:
        # The best score is at 0: divided by a tiny temperature, others would overflow.
        return torch.softmax((scores - scores.amax(-1, keepdim=True)) / temperature, -1)
    return torch.nn.functional.one_hot(scores.argmax(-1), logits.shape[-1]).double()


def filtered(
    logits: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Tensor:
    """fp64 ``(R, V)``: `logits` with -inf for the tokens that cannot be drawn, in the order of transformers: top-k keeps the logits that
    are at least the k-th largest, then top-p the tokens whose more probable ones have a mass below `top_p`, then min-p those with
    `min_p` times the largest probability. The largest logit always stays, and equals stay or go together. Then typical-p keeps the
    tokens for which all others whose surprise is closer to the entropy have a mass below `typical_p`.

    >>> rows = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    >>> filtered(rows, 1.0, top_k=3, top_p=0.75).isfinite().tolist()  # of 4/9, 3/9 and 2/9
    [[True, True, False, False]]
    """
    scores = logits.double()
    if temperature == 0:
        return scores
    if top_k is not None:
        smallest = scores.sort(dim=-1, descending=True).values[:, :top_k][:, -1:]
        scores = scores.masked_fill(scores < smallest, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    mass = distribution(scores, temperature)
    more = ((scores[:, None] > scores[:, :, None]) * mass[:, None]).sum(-1)  # of all more probable tokens
    if top_p < 1:
        scores = scores.masked_fill((more >= top_p) & (scores < largest), -torch.inf)
    scores = scores.masked_fill(mass < min_p * mass.amax(-1, keepdim=True), -torch.inf)
    if typical_p < 1:
        mass = distribution(scores, temperature)
        away = (-mass.log() - torch.special.entr(mass).sum(-1, keepdim=True)).abs()
        closer = ((away[:, None] < away[:, :, None]) * mass[:, None]).sum(-1)
        scores = scores.masked_fill(closer >= typical_p, -torch.inf)
    return scores


def without(logits: Tensor, token: int) -> Tensor:
    """A copy in which `token` is impossible. A guess is never the mask token, which would leave its slot masked."""
    logits = logits.clone()
    logits[..., token] = -torch.inf
    return logits


def never(model: Model, token: int) -> Model:
    """`model` with `token` made impossible in all rows."""
    return lambda tokens, positions, mask: without(model(tokens, positions, mask), token)


def causal_logits(model: Model, tokens: Sequence[int]) -> Tensor:
    """Logits ``(T, V)`` of all `tokens` under the causal mask: row i predicts position i + 1."""
    visible, positions = causal(len(tokens))
    return model(torch.tensor([list(tokens)], dtype=torch.int64), positions[None], visible)[0]


def predictions(model: Model, tokens: Sequence[int], temperature: float, seed: int) -> list[int]:
    """The model's own next token after each of `tokens`: what :func:`sampled_autoregressive` would draw there."""
    length = len(tokens)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    logits = model(torch.tensor([list(tokens)], dtype=torch.int64), torch.arange(length)[None], mask)[0]
    return draw(logits, range(1, length + 1), temperature, seed, OWN)


def sampled_autoregressive(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> AutoregressiveResult:
    """One draw per forward, from what `filtered` keeps; other arguments as in :func:`~pdkernels.reference.autoregressive.autoregressive`, which is T = 0.

    >>> from pdkernels.reference.autoregressive import autoregressive
    >>> model = lambda tokens, positions, mask: torch.eye(5, dtype=torch.float64)[(tokens * 2 + 1) % 5]
    >>> sampled_autoregressive(model, [3], 3, temperature=0.0).tokens == autoregressive(model, [3], 3).tokens
    True
    """
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in end_tokens):
        history = [*prompt, *tokens]
        logits = filtered(causal_logits(model, history)[-1:], temperature, top_k, top_p, min_p, typical_p)
        tokens += draw(logits, [len(history)], temperature, seed, OWN)
    return AutoregressiveResult(tokens, len(tokens))
