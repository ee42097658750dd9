"""Log-likelihoods of texts against direct computation, and the bound of masked models against all ways of masking."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.integrations.likelihood import log_likelihood, masked_log_likelihood
from pdkernels.reference.likelihood import masked_log_likelihood as all_sets
from tests.support.masked import MASK, deep_masked, small_masked


class Whole:
    """A model for the reference, with the probabilities that it gives to its mask token."""

    def __init__(self, model: Any) -> None:
        self.model, self.predicts = model, model.config.predicts

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens, positions=positions, mask=mask)
        return logits


def directly(model: Any, prefix: list[int], text: list[int]) -> tuple[float, bool]:
    logits = model(torch.tensor([[*prefix, *text]]))[0, len(prefix) - 1 : -1].double()
    said = logits.log_softmax(-1)[range(len(text)), text].sum()
    return float(said), logits.argmax(-1).tolist() == text


def test_rows_that_predict_their_own_token_in_blocks_are_refused() -> None:
    model = deep_masked(0, "own", 8, "causal")
    with pytest.raises(TypeError, match="model must predict the next token, got one whose rows predict their own"):
        log_likelihood(model, [[1]], [[2]])
    with pytest.raises(TypeError, match="model must be causal or bidirectional, got a block-causal one"):
        masked_log_likelihood(model, [[1]], [[2]])


def test_likelihoods_of_a_causal_model() -> None:
    model = pd.models.load("tiny-code")
    prefixes = [list(b"import o"), list(b"for i in"), list(b"d"), list(b"return se"), list(b"x")]
    texts = [list(b"s\n"), list(b" range(10):"), [], list(b"lf"), list(b"yz = 1")]
    found = log_likelihood(model, prefixes, texts, batch_size=3)
    for likelihood, prefix, text in zip(found, prefixes, texts, strict=True):
        log_prob, greedy = directly(model, prefix, text) if text else (0.0, True)
        assert likelihood.log_prob == pytest.approx(log_prob, abs=2e-4)
        assert likelihood.greedy == greedy
    assert {likelihood.greedy for likelihood in found} == {True, False}


@pytest.mark.parametrize("predicts", ["own", "next"])
def test_the_bound_of_masked_models_by_all_sets(predicts: str) -> None:
    model = small_masked(1, predicts)
    prefixes, texts = [[1, 2, 3], [4], [5, 6]], [[7, 8, 9, 1], [2], []]
    found = masked_log_likelihood(model, prefixes, texts, samples=16, batch_size=4)
    for likelihood, prefix, text in zip(found, prefixes, texts, strict=True):
        assert likelihood.log_prob == pytest.approx(all_sets(Whole(model), prefix, text, MASK), abs=1e-4)


def test_the_bound_of_masked_models_by_draws() -> None:
    """The mean over seeds is correct, and draws depend on the seed alone."""
    model, prefix, text = small_masked(2), [1, 2, 3], [7, 8, 9, 1, 0, 5]
    exact = all_sets(Whole(model), prefix, text, MASK)
    drawn = [masked_log_likelihood(model, [prefix], [text], samples=32, seed=seed)[0].log_prob for seed in range(40)]
    error = statistics.stdev(drawn) / len(drawn) ** 0.5
    assert 0 < error < 0.05 * abs(exact)
    assert abs(statistics.mean(drawn) - exact) < 4 * error
    beside = masked_log_likelihood(
        model, [[3], prefix], [[2, 2, 2, 2, 2, 2, 2], text], samples=32, batch_size=5, seed=7
    )
    assert beside[1].log_prob == pytest.approx(drawn[7], abs=1e-4)


def test_what_likelihoods_refuse() -> None:
    for prefixes, texts, name in ((["1"], [[1]], "prefixes"), ([[1]], ["1"], "texts")):
        with pytest.raises(TypeError, match=f"{name} must hold token ids, got text. Encode it"):
            log_likelihood(pd.models.load("tiny-code"), prefixes, texts)
    with pytest.raises(ValueError, match="have at least 1 tokens"):
        log_likelihood(small_masked(0), [[]], [[1]])
    with pytest.raises(ValueError, match="be as many as texts"):
        log_likelihood(small_masked(0), [[1]], [])
    with pytest.raises(ValueError, match="have a mask token"):
        masked_log_likelihood(pd.models.load("tiny-code"), [[1]], [[1]])
