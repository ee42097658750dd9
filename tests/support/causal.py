"""Scripted language models with the interface of `pdkernels.models.architectures.transformer.Transformer`, cache included.

The next token is a plain function of the whole token history. The history is not passed in: it is read back from the KV
cache, whose K rows are token ids and whose V rows are positions, so that a wrong commit gives wrong tokens (and a row
in the wrong slot fails at once). Two layers store it, and must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from types import SimpleNamespace
from typing import Any

import torch

from pdkernels.masks import TilePlan
from tests.support.base import CachedFake

VOCABULARY = 23

Script = Callable[[list[int]], int]


def by_position(history: list[int]) -> int:
    """Right at once, whatever the draft holds: every draft is accepted after one pass."""
    return (5 * len(history) + 2) % VOCABULARY


def by_bigram(history: list[int]) -> int:
    """Depends on the last token only, with a long orbit: a wrong draft is repaired one token per pass."""
    return (3 * history[-1] + 1) % VOCABULARY


def by_history(history: list[int]) -> int:
    """Depends on every earlier token."""
    value = 7
    for token in history:
        value = (value * 31 + token + 1) % 10007
    return value % VOCABULARY


def sticky(history: list[int]) -> int:
    """Long runs of one token whose ends depend on the position: partial acceptance of every length."""
    if len(history) % 7 == 3 or len(history) % 11 == 5:
        return (history[-1] + len(history)) % VOCABULARY
    return history[-1]


def mixed(history: list[int]) -> int:
    """Mostly the position, sometimes the last two tokens."""
    if len(history) % 4 == 1:
        return (history[-1] + 2 * history[-2] + len(history)) % VOCABULARY if len(history) > 1 else 3
    return (len(history) * len(history)) % VOCABULARY


SCRIPTS: dict[str, Script] = dict(
    position=by_position, bigram=by_bigram, history=by_history, sticky=sticky, mixed=mixed
)


def from_list(tokens: list[int], prompt_length: int) -> Script:
    """A model that writes `tokens` after a prompt of `prompt_length` when it has written them so far, and 0 else."""

    def script(history: list[int]) -> int:
        written = history[prompt_length:]
        return tokens[len(written)] if written == tokens[: len(written)] and len(written) < len(tokens) else 0

    return script


@dataclass
class FakeModel(CachedFake):
    """`ties` gives every logit row a second maximum at a higher id, which a decoder must not choose."""

    LAYERS = 2

    script: Script
    ties: bool = False
    end_tokens: tuple[int, ...] = ()
    tokenizer: Any = None
    config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(vocab_size=VOCABULARY))
    rows_seen: list[int] = field(default_factory=list)  # logit rows per forward

    def logits(self, ids: list[int], first: int) -> torch.Tensor:
        """Rows ``(len(ids) - first, vocabulary)``: what follows ``ids[: first + 1]``, ``ids[: first + 2]``, ..."""
        rows = []
        for end in range(first + 1, len(ids) + 1):
            token = self.script(ids[:end])
            row = [0.0] * VOCABULARY
            row[token] = 1.0
            if self.ties and token + 1 < VOCABULARY:
                row[token + 1 + sum(ids[:end]) % (VOCABULARY - token - 1)] = 1.0
            rows.append(row)
        return torch.tensor(rows).reshape(-1, VOCABULARY)

    def _under_a_mask(
        self, out: torch.Tensor, prefix: list[int], tokens: list[int], offsets: list[int], mask: torch.Tensor
    ) -> None:
        """A row gets logits if it sees the new tokens at every offset up to its own, once each; else it stays poison."""
        for row, seen in enumerate(mask.tolist()):
            new = sorted(zip(compress(offsets, seen), compress(tokens, seen)))
            if [offset for offset, _ in new] == list(range(offsets[row] + 1)):
                history = prefix + [token for _, token in new]
                out[row] = self.logits(history, len(history) - 1)[0]

    def plain(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The interface of the reference decoders."""
        length = tokens.shape[1]
        assert tokens.shape == (1, length) and positions.tolist() == [list(range(length))]
        assert torch.equal(mask, torch.ones(length, length, dtype=torch.bool).tril())
        return self.logits(tokens[0].tolist(), 0)[None]

    def __call__(
        self,
        tokens: torch.Tensor,
        *,
        cache: Any,
        counts: torch.Tensor | None = None,
        mask: TilePlan | torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, width = tokens.shape
        lengths = cache.lengths.tolist()
        valid = [width] * batch if counts is None else counts.tolist()
        tail = mask.dense() if isinstance(mask, TilePlan) else mask
        offsets = (torch.arange(width) if positions is None else positions).expand(batch, width)
        positions = cache.lengths[:, None] + offsets
        for layer in range(self.LAYERS):
            k = tokens.reshape(batch, width, 1, 1).float()
            v = positions.reshape(batch, width, 1, 1).float()
            cache.append_(layer, k, v, counts)

        longest = max(length + count for length, count in zip(lengths, valid, strict=True))
        read = [cache.layer(layer, longest) for layer in range(self.LAYERS)]
        out = torch.full((batch, width, VOCABULARY), float("nan"))  # rows that do not count are poison
        for b in range(batch):
            end = lengths[b] + valid[b]
            ordered = end if tail is None else lengths[b]  # under a mask the new tokens need not be in order
            for k, v in read:
                assert v[b, :ordered].flatten().tolist() == list(range(ordered)), "a cache row is in the wrong slot"
                assert torch.equal(k[b, :end], read[0][0][b, :end]), "the layers disagree"
            ids = [int(token) for token in read[0][0][b, :ordered].flatten().tolist()]
            if tail is None:
                out[b, : valid[b]] = self.logits(ids, lengths[b])
            else:
                self._under_a_mask(
                    out[b], ids, tokens[b].tolist(), offsets[b].tolist(), tail.expand(batch, width, width)[b]
                )
        if rows is not None:
            out = out.gather(1, rows[..., None].expand(-1, -1, VOCABULARY))
        self.rows_seen.append(out.shape[1])
        return out
