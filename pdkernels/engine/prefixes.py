"""K, V and states of earlier prompts, for later ones that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels.generation.session import inference

_SHORTEST = 16  # tokens that are cheaper to run than to look up


class PrefixHit(NamedTuple):
    """The cache of an earlier prompt that a prompt begins with."""

    cache: Any
    length: int
    """The longest common beginning of the prompt and the rows of `cache`; 0: there is none."""
    branch: int
    """Where another prompt leaves this one whose states cannot go back as far, worth keeping when this one gets there;
    0: nowhere."""


class Prefixes:
    """Least recently used prompts, at most `limit` tokens of them. Each has a cache of its own, so taking one over is a
    copy, and it costs what a read of its rows costs; a row of a running batch never shares memory with another.

    A recurrent state goes back to its last rows alone. So a kept prompt serves those that begin with all of it; and
    where two prompts branch, the second one's state is kept as well, for a third (`PrefixHit.branch`)."""

    def __init__(self, limit: int) -> None:
        self.limit, self.tokens = limit, 0
        self._kept: OrderedDict[int, tuple[tuple[Any, ...], Tensor, Any]] = (
            OrderedDict()
        )  # by number: owner, tokens, cache
        self._number = 0

    def find(self, owner: tuple[Any, ...], prompt: list[int]) -> PrefixHit:
        """The cache with the longest common beginning; the last token of a prompt is never part of it. An `owner` is a
        model, and what else rows depend on."""
        tokens = torch.tensor(prompt[:-1], dtype=torch.int64, device="cpu")
        best, branch = (0, -1), 0
        for number, (other, cached, cache) in self._kept.items():
            if other == owner:
                shorter = min(len(cached), len(tokens))
                same = (cached[:shorter] == tokens[:shorter]).cumprod(0)
                length = int(same.sum())
                if _goes_back(cache, length):
                    best = max(best, (length, number))
                else:
                    branch = max(branch, length)
        length, number = best if best[0] >= _SHORTEST else (0, -1)
        branch = branch if branch >= length + _SHORTEST else 0
        if not length:
            return PrefixHit(None, 0, branch)
        self._kept.move_to_end(number)
        return PrefixHit(self._kept[number][2], length, branch)

    @inference()
    def keep(self, owner: tuple[Any, ...], prompt: list[int], cache: Any) -> None:
        """Copies the rows of a prompt, the first sequence of `cache`."""
        if not _SHORTEST <= len(prompt) <= self.limit:
            return
        tokens, shorter = torch.tensor(prompt, dtype=torch.int64, device="cpu"), list[int]()
        for number, (other, cached, owned) in list(self._kept.items()):
            if other != owner:
                continue
            if (
                len(cached) >= len(tokens)
                and torch.equal(cached[: len(tokens)], tokens)
                and _goes_back(owned, len(tokens))
            ):
                self._kept.move_to_end(number)
                return
            if len(cached) <= len(tokens) and torch.equal(tokens[: len(cached)], cached):
                shorter.append(number)
        # One of layers with windows has no more than their last rows, however short the text is.
        copy = (getattr(cache, "another", None) or owner[0].new_cache)(1, len(tokens))
        copy.copy_row_(0, cache, 0, len(tokens))
        for number in shorter:
            if _goes_back(copy, len(self._kept[number][1])):
                self._drop(number)
        while self.tokens + len(tokens) > self.limit:
            self._drop(next(iter(self._kept)))
        self._kept[self._number] = owner, tokens, copy
        self._number += 1
        self.tokens += len(tokens)

    def _drop(self, number: int) -> None:
        self.tokens -= len(self._kept.pop(number)[1])


def _goes_back(cache: Any, length: int) -> bool:
    """Whether the first sequence of a cache can be cut to `length` tokens."""
    return not hasattr(cache, "earliest") or length >= cache.earliest(0)
