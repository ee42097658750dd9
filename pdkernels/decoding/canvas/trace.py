"""The trace of a masked-diffusion decoder, and what it is built from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pdkernels.generation.traces import MaskedStep


class Record(NamedTuple):
    """A commit as the trace needs it: the text before, the sequences taking part, positions, guesses and confidence."""

    tokens: torch.Tensor
    taking: list[bool]
    windows: torch.Tensor
    positions: torch.Tensor
    confidence: torch.Tensor

    def on_host(self) -> tuple[list[Any], ...]:
        tensors = self.tokens, self.windows, self.positions, self.confidence
        return self.taking, *(tensor.tolist() for tensor in tensors)


def masked_trace(records: Sequence[Record], tokens: torch.Tensor, totals: Sequence[int]) -> list[list[MaskedStep]]:
    """The steps of each sequence; `tokens` are the texts after the last commit, of `totals` positions."""
    trace: list[list[MaskedStep]] = [[] for _ in totals]
    after = [*(record.tokens for record in records), tokens][1:]
    for record, following in zip(records, after, strict=True):
        for sequence, columns in enumerate(zip(*record.on_host(), following.tolist(), strict=True)):
            taking, before, window, positions, confidence, now = columns
            if taking:
                guessed = {at: score for at, score in zip(positions, confidence, strict=True) if at >= 0}
                committed = {at: now[at] for at in guessed if before[at] != now[at]}
                trace[sequence].append(MaskedStep(before[: totals[sequence]], committed, guessed, tuple(window)))
    return trace
