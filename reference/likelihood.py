"""The likelihood of a text under a model that fills in masks, by summing over all ways of masking it.

Source: "Large Language Diffusion Models" (LLaDA), appendix on likelihoods: the bound with a fixed number of masks,

    E_l E_S [ L / l * sum_{i in S} log p(x_i | prompt, x without S) ],  l uniform in 1 .. L,  S uniform among the sets of l
    positions.

It is also the mean over all orders in which the L tokens can be written of the sum of their log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from .autoregressive import Model
from .masked_sampling import bidirectional


def masked_log_likelihood(model: Model, prefix: Sequence[int], text: Sequence[int], mask_token: int) -> float:
    """The bound itself, with ``2^L - 1`` forwards of a model whose row i predicts token i."""
    forward = bidirectional(model)
    length, total = len(text), 0.0
    for count in range(1, length + 1):
        sets = list(combinations(range(length), count))
        for hidden in sets:
            shown = [mask_token if position in hidden else token for position, token in enumerate(text)]
            logits = forward([*prefix, *shown]).double()
            said = torch.log_softmax(logits, -1)
            inside = sum(float(said[len(prefix) + position, text[position]]) for position in hidden)
            total += inside / (count * len(sets))
    return total
