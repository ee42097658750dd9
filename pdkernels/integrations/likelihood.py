"""Log-likelihoods of texts, for causal and for masked-diffusion models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels._validation import check, check_type, integer
from pdkernels.generation.session import inference
from pdkernels.models.capabilities import capabilities, rows_ahead

OP = "log_likelihood"


class Likelihood(NamedTuple):
    """The log-likelihood of one text."""

    log_prob: float
    greedy: bool
    """Whether every token is the most probable one at its position; always False for `masked_log_likelihood`."""


@inference()
def log_likelihood(
    model: Any, prefixes: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], *, batch_size: int = 8
) -> list[Likelihood]:
    """``sum_i log p(text_i | prefix, text_<i)``, in nats, under a causal model whose row i predicts token i + 1.

    Args:
        model: a causal model of `pdkernels.models`, or a wrapped one.
        prefixes: token ids, at least one each.
        texts: token ids; an empty text has log-probability 0.
        batch_size: texts per forward; those of similar length are grouped.

    Raises:
        ValueError: a prefix without tokens, different numbers of prefixes and texts, a batch size below 1.
        TypeError: a model whose rows predict their own token.

    Example:
        >>> import pdkernels as pd
        >>> from pdkernels.integrations.likelihood import log_likelihood
        >>> model = pd.models.load("tiny-code")
        >>> right, wrong = log_likelihood(model, [b"impor"] * 2, [b"t os", b"t xq"])
        >>> right.log_prob > wrong.log_prob
        True
    """
    _check_pairs(prefixes, texts)
    predicts_own = getattr(model.config, "predicts", "next") == "own"
    check_type(not predicts_own, OP, "model", "predict the next token", "one whose rows predict their own")
    size = integer(OP, "batch_size", batch_size, 1)
    likelihoods: list[Likelihood | None] = [None] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(prefixes[i]) + len(texts[i]))
    for first in range(0, len(order), size):
        chunk = order[first : first + size]
        # The last token is only predicted, never read, so it does not have to fit into the model's positions.
        rows = [[*prefixes[i], *texts[i][:-1]] for i in chunk]
        tokens = torch.zeros(len(chunk), max(map(len, rows)), dtype=torch.int64, device="cpu")
        for line, row in zip(tokens, rows):
            line[: len(row)] = torch.tensor(row, device="cpu")
        # A row for every token of the longest text; rows past a shorter one are not read.
        longest = max(len(texts[i]) for i in chunk)
        starts = torch.tensor([len(prefixes[i]) - 1 for i in chunk], device="cpu")
        read_rows = (starts[:, None] + torch.arange(longest, device="cpu")).clamp(max=tokens.shape[1] - 1)
        logits = model(tokens.to(model.device), rows=read_rows.to(model.device)).float()
        log_probs, best = logits.log_softmax(-1).cpu(), logits.argmax(-1).cpu()
        for j, i in enumerate(chunk):
            text = torch.tensor(list(texts[i]), dtype=torch.int64, device="cpu")
            length = len(text)
            log_prob = log_probs[j, torch.arange(length, device="cpu"), text].double().sum().item()
            likelihoods[i] = Likelihood(log_prob, bool((best[j, :length] == text).all()))
    return [likelihood for likelihood in likelihoods if likelihood is not None]


@inference()
def masked_log_likelihood(
    model: Any,
    prefixes: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    *,
    samples: int = 128,
    batch_size: int = 8,
    seed: int = 0,
) -> list[Likelihood]:
    """LLaDA's bound on the log-likelihood of texts, in nats, under a model that fills in masks.

    The bound is a mean over l, uniform in 1 .. L, and over the sets of l of the text's L tokens: ``L / l`` times the
    log-probability of these tokens, masked, given all others. It is also the mean over all orders in which the text can
    be written. If a text has at most `samples` sets, all of them are used and the result is exact. Otherwise `samples`
    sets are drawn at random: l goes through 1 .. L evenly from a random start, as in the published code.

    Source: "Large Language Diffusion Models" (LLaDA), the appendix on likelihoods, and the evaluation published with
        it.

    Args:
        model: a bidirectional model of `pdkernels.models` with a mask token, or a wrapped one.
        prefixes: token ids; at least one each if a row of the model predicts the next token.
        texts: token ids.
        samples: rows of forwards per text.
        batch_size: rows per forward.
        seed: of the random sets. The sets of a text do not depend on the other texts of the call.

    Raises:
        ValueError: a model without mask token, sizes below 1, a missing prefix.
        TypeError: a block-causal model, whose rows would need their blocks.

    Example:
        >>> import pdkernels as pd
        >>> from pdkernels.integrations.likelihood import masked_log_likelihood
        >>> model = pd.models.load("tiny-masked")
        >>> right, wrong = masked_log_likelihood(model, [b"2 + 3 = ?\\n"] * 2, [b"5", b"7"])
        >>> right.log_prob > wrong.log_prob
        True
    """
    _check_pairs(prefixes, texts, rows_ahead(model))
    check(model.mask_token is not None, OP, "model", "have a mask token", "one without")
    check_type(
        bool(capabilities(model) & {"causal", "bidirectional"}),
        OP,
        "model",
        "be causal or bidirectional",
        "a block-causal one",
    )
    samples, size = integer(OP, "samples", samples, 1), integer(OP, "batch_size", batch_size, 1)
    likelihoods = []
    for prefix, text in zip(prefixes, texts):
        hidden = _masks(len(text), samples, seed)
        total = sum(_weighted(model, prefix, text, hidden[i : i + size]) for i in range(0, len(hidden), size))
        likelihoods.append(Likelihood(total, False))
    return likelihoods


def _masks(length: int, samples: int, seed: int) -> Tensor:
    """Weights ``(n, length)`` of all sets or of random ones: their probability times L / l, and 0 where a token is not
    masked."""
    sets = 2**length - 1
    if sets <= samples:
        weights = torch.zeros(sets, length, dtype=torch.float64, device="cpu")
        chosen = [s for count in range(1, length + 1) for s in combinations(range(length), count)]
        for row, hidden in zip(weights, chosen):
            row[list(hidden)] = 1 / (len(hidden) * math.comb(length, len(hidden)))
        return weights
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(1, length + 1, (), generator=generator, device="cpu")
    spread = (start + torch.arange(samples, dtype=torch.float64, device="cpu") * (length / samples)).round().long()
    counts = (spread - 1) % length + 1
    ranks = torch.rand(samples, length, generator=generator, dtype=torch.float64, device="cpu").argsort(1).argsort(1)
    return (ranks < counts[:, None]) * (length / counts[:, None].double() / samples)


def _weighted(model: Any, prefix: Sequence[int], text: Sequence[int], weights: Tensor) -> float:
    """The sum over rows and masked tokens of weight times log-probability."""
    count, length = weights.shape
    shown = torch.tensor(list(text), dtype=torch.int64, device="cpu").repeat(count, 1)
    masked = torch.where(weights > 0, model.mask_token, shown)
    tokens = torch.cat([torch.tensor(list(prefix), dtype=torch.int64, device="cpu").repeat(count, 1), masked], 1).to(
        model.device
    )
    first = len(prefix) - rows_ahead(model)
    logits = model(tokens, rows=slice(first, first + length)).float()
    log_probs = logits.log_softmax(-1).cpu().gather(-1, shown[..., None])[..., 0]
    return float((log_probs.double() * weights).sum())


def _check_pairs(prefixes: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], minimum: int = 1) -> None:
    check(len(prefixes) == len(texts), OP, "prefixes", f"be as many as texts ({len(texts)})", len(prefixes))
    for name, sequences in (("prefixes", prefixes), ("texts", texts)):
        for ids in sequences:
            check_type(not isinstance(ids, str), OP, name, "hold token ids", "text", "Encode it with model.tokenizer.")
    short = min(map(len, prefixes), default=minimum)
    check(short >= minimum, OP, "prefixes", f"have at least {minimum} tokens", f"one with {short}")
