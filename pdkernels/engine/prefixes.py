"""K and V of earlier prompts, for later ones that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from pdkernels.decoding._session import inference

_SHORTEST = 16  # tokens that are cheaper to run than to look up


class Prefixes:
    """Least recently used prompts, at most `limit` tokens of them. Each has a cache of its own, so taking one over is a copy, and it
    costs what a read of its rows costs; a row of a running batch never shares memory with another."""

    def __init__(self, limit: int) -> None:
        self.limit, self.tokens = limit, 0
        self._kept: OrderedDict[int, tuple[Any, Tensor, Any]] = OrderedDict()  # by number: model, tokens, cache
        self._number = 0

    def find(self, model: Any, prompt: list[int]) -> tuple[Any, int]:
        """The cache with the longest common beginning, and its length; the last token of a prompt is never part of it."""
        tokens = torch.tensor(prompt[:-1], dtype=torch.int64)
        best: tuple[int, int] | None = None
        for number, (owner, known, cache) in self._kept.items():
            if owner is model:
                shorter = min(len(known), len(tokens))
                same = (known[:shorter] == tokens[:shorter]).cumprod(0)
                length = int(same.sum())
                # Recurrent states do not go back further than their last rows.
                if not hasattr(cache, "earliest") or length >= cache.earliest(0):
                    best = max(best or (0, 0), (length, number))
        if best is None or best[0] < _SHORTEST:
            return None, 0
        self._kept.move_to_end(best[1])
        return self._kept[best[1]][2], best[0]

    @inference()
    def keep(self, model: Any, prompt: list[int], cache: Any) -> None:
        """Copies the rows of a prompt, the first sequence of `cache`."""
        if not _SHORTEST <= len(prompt) <= self.limit:
            return
        tokens = torch.tensor(prompt, dtype=torch.int64)
        for number, (owner, known, _) in list(self._kept.items()):
            if owner is not model:
                continue
            if len(known) >= len(tokens) and torch.equal(known[: len(tokens)], tokens):
                self._kept.move_to_end(number)
                return
            if len(known) <= len(tokens) and torch.equal(tokens[: len(known)], known):
                self._drop(number)
        while self.tokens + len(tokens) > self.limit:
            self._drop(next(iter(self._kept)))
        copy = model.new_cache(1, len(tokens))
        copy.copy_row_(0, cache, 0, len(tokens))
        self._kept[self._number] = model, tokens, copy
        self._number += 1
        self.tokens += len(tokens)

    def _drop(self, number: int) -> None:
        self.tokens -= len(self._kept.pop(number)[1])
