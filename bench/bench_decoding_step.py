"""The cost of a masked-diffusion sampler's step outside the model: ours and the published loops, in plain PyTorch.

The model returns fixed logits, and its time is excluded. Tokens are compared before anything is timed. LLaDA fills one
position per forward in a block, by confidence in float64. SlowFast's loop is the paper's, written as its released code
writes another one: it guesses the whole canvas in every forward, and reads the device for each of its decisions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pdkernels as pd
from bench.timing import compare

PROMPT, NEW = 16, 32


class FixedLogits:
    """A model whose rows never change. `seconds` is the time spent in it."""

    dtype, device, tokenizer = torch.float32, torch.device("cpu"), None
    seconds = 0.0

    def __init__(self, vocabulary: int) -> None:
        self.config = SimpleNamespace(vocab_size=vocabulary, attention="bidirectional", predicts="own")
        self.mask_token, self.end_tokens = vocabulary - 1, (vocabulary - 2,)
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(PROMPT + NEW, vocabulary, generator=generator)
        # Every row has a most probable token, of probability 0.08 to 0.92, which is neither an end token nor the mask.
        chosen = torch.randint(0, vocabulary - 2, (PROMPT + NEW, 1), generator=generator)
        self.table.scatter_(1, chosen, torch.rand(PROMPT + NEW, 1, generator=generator) * 5 - 2 + math.log(vocabulary))
        self.table[:, -2:] = -30
        self.rows = torch.arange(PROMPT + NEW, dtype=torch.float32)[None, :, None]

    def new_cache(self, *sizes: int) -> None:
        return None

    def recompute(self, tokens: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return self.rows[:, : tokens.shape[1]]

    def logits(self, hidden: Tensor) -> Tensor:
        started = time.perf_counter()
        out = self.table[hidden[..., 0].long()]
        FixedLogits.seconds += time.perf_counter() - started
        return out

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.table[None, : tokens.shape[1]]


def outside() -> float:
    """A clock that is stopped inside the model."""
    return time.perf_counter() - FixedLogits.seconds


def guesses_of(model: FixedLogits, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and confidence of every position, as the released samplers find them; -inf where no mask is."""
    logits = model(x)
    x0 = logits.argmax(-1)
    p = F.softmax(logits.to(torch.float64), -1)
    x0_p = torch.gather(p, -1, x0[..., None])[..., 0]
    masked = x == model.mask_token
    return torch.where(masked, x0, x), torch.where(masked, x0_p, -torch.inf)


def canvas_of(model: FixedLogits) -> Tensor:
    x = torch.full((1, PROMPT + NEW), model.mask_token)
    x[:, :PROMPT] = torch.arange(PROMPT)
    return x


def llada(model: FixedLogits) -> tuple[Tensor, int]:
    x = canvas_of(model)
    for _ in range(NEW):
        x0, confidence = guesses_of(model, x)
        transfer = torch.zeros_like(x0, dtype=torch.bool)
        for j in range(len(x)):
            _, index = torch.topk(confidence[j], k=1)
            transfer[j, index] = True
        x[transfer] = x0[transfer]
    return x[0, PROMPT:], NEW


def slowfast(model: FixedLogits, exploration: int = 8, window: int = 2) -> tuple[Tensor, int]:
    x, start, forwards = canvas_of(model), PROMPT, 0
    while (x == model.mask_token).any():
        ends: list[int] = []
        end = 0
        while end == 0 and len(ends) < exploration and (x == model.mask_token).any():
            forwards += 1
            x0, confidence = guesses_of(model, x)
            confidence[:, :start] = -torch.inf
            clear = torch.where(confidence[0] > 0.1)[0]
            ends.append(int(clear[-1]) + 1 if len(clear) else start + 1)
            if len(ends) >= window and torch.tensor(ends[-window:]).double().var(correction=0) < 1.0:
                end = ends[-1]
            best = confidence.argmax(-1, keepdim=True)
            x.scatter_(1, best, x0.gather(1, best))
        end = end or int(sum(ends[-window:]) / len(ends[-window:]))
        cut = x
        while (x[:, start:end] == model.mask_token).any():
            forwards += 1
            x0, confidence = guesses_of(model, cut)
            confidence[:, :start] = confidence[:, end:] = -torch.inf
            fill(x[:, : cut.shape[1]], x0, confidence)
            cut = x[:, :end]
        start = end
    return x[0, PROMPT:], forwards


def fill(x: Tensor, x0: Tensor, confidence: Tensor) -> None:
    """All confident ones, or else the most confident one."""
    transfer = torch.zeros_like(x0, dtype=torch.bool)
    for j in range(len(x)):
        sure = torch.where(confidence[j] > 0.85)[0]
        if len(sure) >= 2:
            transfer[j, sure] = True
        else:
            transfer[j, torch.topk(confidence[j], k=1).indices] = True
    x[transfer] = x0[transfer]


PUBLISHED: dict[str, Callable[[FixedLogits], tuple[Tensor, int]]] = {"llada": llada, "slowfast": slowfast}


def ours(model: FixedLogits, method: str) -> tuple[Tensor, int]:
    result = pd.decoding.generate(model, list(range(PROMPT)), method, max_new_tokens=NEW)
    return result.tokens, result.stats.forwards


@pytest.mark.benchmark(timer=outside)
@pytest.mark.parametrize("vocabulary", [258, 126464])
@pytest.mark.parametrize("method", PUBLISHED)
def test_decoding_step(benchmark, method: str, vocabulary: int) -> None:
    benchmark.group = f"{method}, outside the model, vocabulary {vocabulary}"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = FixedLogits(vocabulary)
    (tokens, forwards), (expected, needed) = ours(model, method), PUBLISHED[method](model)
    assert torch.equal(tokens, expected) and forwards == needed
    compare(
        benchmark,
        partial(ours, model, method),
        baseline=partial(PUBLISHED[method], model),
        baseline_name="published loop",
        rounds=40 if vocabulary < 1000 else 3,
        warmup=1,
        op="decoding step",
        candidate="pdkernels",
        method=method,
        vocabulary=vocabulary,
        forwards=forwards,
    )
    torch.set_num_threads(threads)
    if benchmark.stats is not None:
        facts = benchmark.extra_info
        facts["us_per_step"] = round(facts["median_us"] / forwards, 1)
        facts["baseline_us_per_step"] = round(facts["baseline_median_us"] / forwards, 1)
