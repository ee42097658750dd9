"""Rows of logits from which no token can be chosen: one sentence from every method, whichever forward gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.decoding import available, generate
from pdkernels.decoding.methods import METHODS
from tests.support.plans import example

MOST_FORWARDS = 300
PROMPTS = [[52, 43, 49], [12, 7], [30]]


def _filled(value: float) -> Callable[[Tensor, int], Tensor]:
    return lambda logits, mask: torch.full_like(logits, value)


def _at(value: float, rest: float | None = None) -> Callable[[Tensor, int], Tensor]:
    def spoil(logits: Tensor, mask: int) -> Tensor:
        logits = logits.clone() if rest is None else torch.full_like(logits, rest)
        logits[..., (mask + 3) % logits.shape[-1]] = value
        return logits

    return spoil


def _only_the_mask(logits: Tensor, mask: int) -> Tensor:
    left = torch.full_like(logits, -torch.inf)
    left[..., mask] = 1.0
    return left


KINDS = {
    "-inf": _filled(-torch.inf),
    "+inf": _filled(torch.inf),
    "one +inf": _at(torch.inf),
    "one NaN": _at(torch.nan),
    "NaN among -inf": _at(torch.nan, -torch.inf),
    "+inf among -inf": _at(torch.inf, -torch.inf),
    "only the mask": _only_the_mask,
}


class Spoiled:
    """A model whose logits of one sequence (None: of all) are spoiled from forward number `first` on.

    Bigger batches than that of the prompts hold copies of it; smaller ones, groups of a planning method, are spoiled whole.
    """

    def __init__(self, model: Any, kind: str, first: int = 0, sequence: int | None = None, batch: int = 1) -> None:
        self._model, self._kind, self._first, self._sequence, self._batch = model, KINDS[kind], first, sequence, batch
        self.forwards = 0

    def __getattr__(self, name: str) -> Any:
        if name == "statistics":  # they are taken of logits
            raise AttributeError(name)
        return getattr(self._model, name)

    def _spoil(self, logits: Tensor) -> Tensor:
        self.forwards += 1
        assert self.forwards < MOST_FORWARDS, "the decoder does not end"
        if self.forwards <= self._first:
            return logits
        mask = 0 if self._model.mask_token is None else self._model.mask_token
        spoiled = self._kind(logits, mask)
        if self._sequence is None or len(logits) % self._batch:
            return spoiled
        out = logits.clone()
        out[self._sequence :: self._batch] = spoiled[self._sequence :: self._batch]
        return out

    def __call__(self, tokens: Tensor, **options: Any) -> Tensor:
        return self._spoil(self._model(tokens, **options))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._spoil(self._model.logits(hidden))

    def coda(self, state: Tensor, context: Any, *rows: Any) -> Tensor:
        return self._spoil(self._model.coda(state, context, *rows))


def fault(sequence: int) -> str:
    return (
        r"pdkernels.decoding.generate: the model's logits leave no token to choose: NaN, \+inf or only -inf in "
        rf"sequence {sequence}, after \d+ new tokens\. Look for NaN in its weights, for overflow in fp16, or for a mask or hook "
        "that forbids every token"
    )


def forms(method: str) -> list[dict[str, Any]]:
    """Options that take other paths through a decoder."""
    known, found = METHODS[method].options, [dict[str, Any]()]
    if "temperature" in known:
        found += [{"temperature": 0.7}]
    if "page_size" in known:
        found += [{"page_size": 3}]
    own: dict[str, list[dict[str, Any]]] = {
        "jacobi": [{"draft": "lookup"}, {"window": 5}],
        "linear_self_speculation": [{"threshold": 0.0}, {"temperature": 0.7, "verification": "rejection"}],
        "quadratic_self_speculation": [{"ensemble_weight": 0.5}],
        "block_diffusion": [{"refresh": "bidirectional"}, {"threshold": None}],
        "fast_dllm": [{"cache": "none"}, {"cache": "prefix"}, {"threshold": None, "factor": 1.0}],
        "llada": [{"remasking": "random"}, {"guidance": 0.5}, {"late_end": True}],
        "dream": [{"algorithm": name} for name in ("origin", "maskgit_plus", "topk_margin", "confidence_threshold")]
        + [{"top_k": 3}],
        "slowfast": [{"cycle": "mean"}, {"k_slow": 0}, {"prompt_interval": 3}],
        "recurrent_diffusion": [{"headway": 2}, {"exit": "fixed"}, {"max_recurrences": 0}],
        "recurrent_adaptive": [{"criterion": "kl"}, {"adaptive_prompt": True}],
        "planned": [{"order": "confidence"}, {"chunks": "autoregressive"}],
    }
    return found + own.get(method, [])


def spoiled(method: str, options: dict[str, Any], kind: str, *place: int) -> Any:
    """The example of a method, spoiled."""
    model = example(METHODS[method])
    proxy = Spoiled(model, kind, *place)
    if method != "dllm_cache" and "prompt_interval" not in options:
        return proxy
    changed = copy.copy(model)  # feature caches are for Transformers alone
    changed.logits = proxy.logits
    changed.statistics = lambda hidden, **given: pd.token_statistics(proxy.logits(hidden), **given)
    return changed


CASES = [pytest.param(method, options, id=f"{method}-{options}") for method in available() for options in forms(method)]


FAST = ("-inf", "only the mask")


@pytest.mark.covering(of=["method", "kind"], share=3)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in FAST else pytest.mark.slow) for k in KINDS])
@pytest.mark.parametrize(("method", "options"), CASES)
def test_rows_without_a_choice_are_an_error(method: str, options: dict[str, Any], kind: str) -> None:
    model = example(METHODS[method])
    for first in (0, 1, 4):
        given = {"max_new_tokens": 12, "end_tokens": (), **options}
        if kind == "only the mask" and model.mask_token is None:
            return  # it is a token like others
        with pytest.raises(ValueError, match=fault(0)):
            generate(spoiled(method, options, kind, first), PROMPTS[0], method, **given)


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("kind", ["-inf", "one NaN", "one +inf"])
@pytest.mark.parametrize("method", available())
def test_a_batch_names_the_sequence(method: str, kind: str) -> None:
    slow = {"threshold": 2.0} if method == "fast_dllm" else {}  # one token per forward
    for first in (0, 1):
        model = spoiled(method, {}, kind, first, 1, 3)
        # Groups of a planning method are smaller than the batch.
        sequence = "[012]" if method == "planned" else 1
        with pytest.raises(ValueError, match=fault(sequence)):  # type: ignore[arg-type]
            generate(model, PROMPTS, method, max_new_tokens=12, end_tokens=(), **slow)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["autoregressive", "jacobi", "llada", "dream", "slowfast", "fast_dllm"])
def test_models_of_functions(method: str, kind: str) -> None:
    fills = METHODS[method].fills_canvases
    options: dict[str, Any] = {"cache": "none"} if method == "fast_dllm" else {}

    def says(tokens: Tensor) -> Tensor:
        logits = torch.eye(9)[(tokens + 1) % 8]
        return KINDS[kind](logits, 8) if tokens.shape[1] > 4 else logits

    model = pd.models.from_callable(says, vocab_size=9, mask_token=8, predicts="own" if fills else "next")
    with pytest.raises(ValueError, match=fault(0)):
        generate(model, [1, 2, 3], method, max_new_tokens=6, **options)


@pytest.mark.parametrize("algorithm", ["entropy", "confidence_threshold"])
def test_a_hook_that_forbids_everything(algorithm: str) -> None:
    def forbid(step: int, texts: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        return torch.full_like(logits, -torch.inf) if step == 2 else logits

    model = example(METHODS["dream"])
    with pytest.raises(ValueError, match=fault(0)):
        generate(
            model, PROMPTS, "dream", max_new_tokens=8, end_tokens=(), algorithm=algorithm, logits_hook=forbid, steps=6
        )
