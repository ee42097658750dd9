"""Filters of logits that depend on tokens: penalties, biases, and what a row may not or must give.

They come before temperature, `top_k` and the filters after it, which `_token_sampler.py` has, and in transformers' order: bias, repetition
penalty, presence and frequency penalties, bad words, `min_new_tokens`, allowed tokens, forced tokens, suppressed tokens, hooks.
Each row is filtered for its own prefix (`_prefixes.py`). Penalties read and write the logits of the prefix's tokens alone, so their
cost does not grow with the vocabulary. Nothing but hooks, and what decides on allowed tokens, makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from pdkernels.decoding._prefixes import Prefixes

Hook = Callable[[Tensor, Tensor], Tensor]
"""From a prefix ``(1, n)`` and its logits ``(1, V)`` to logits, as transformers' `LogitsProcessor`."""
Allowed = Callable[[Prefixes], Tensor]
"""From the prefixes of rows to an int32 tensor ``(batch, R, ceil(V / 32))``: bit ``i % 32`` of word ``i // 32`` allows token i."""


@dataclass(frozen=True)
class Filters:
    """The settings, checked (`_filter_options.py`)."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    end_tokens: tuple[int, ...] = ()
    forced_tokens: Mapping[int, int] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    allowed: Allowed | None = None
    hooks: tuple[Hook, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is something to do."""
        names = "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "forced_tokens", "suppress_tokens"
        more = "begin_suppress_tokens", "allowed", "hooks"
        waits = self.min_new_tokens > 0 and bool(self.end_tokens)
        return self.repetition_penalty != 1 or waits or any(bool(getattr(self, name)) for name in (*names, *more))

    @property
    def finite(self) -> Filters:
        """Those that make tokens less likely, but not impossible."""
        return Filters(self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.logit_bias)

    @property
    def exclusions(self) -> Filters:
        """The others."""
        return replace(self, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None)

    @property
    def needs_host(self) -> str:
        """The setting for which the host waits; empty if there is none."""
        return "logits_processor" if self.hooks else "allowed tokens" if self.allowed else ""

    def apply(self, logits: Tensor, rows: Prefixes) -> Tensor:
        """`logits` ``(batch, R, V)`` of rows, filtered: a copy, of at least float32, since rounded to 16 bits they would tie."""
        if hasattr(logits, "full_tensor"):  # a vocabulary in slices: the ids of a prefix are on all ranks
            logits = logits.full_tensor()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if self.logit_bias:
            ids = _ids(list(self.logit_bias), logits)
            logits.index_add_(-1, ids, logits.new_tensor(list(self.logit_bias.values())).expand(*logits.shape[:-1], -1))
        if self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty:
            self._penalise_(logits, rows)
        if self.bad_words:
            self._ban_words_(logits, rows)
        if self.min_new_tokens and self.end_tokens:
            _forbid_(logits, self.end_tokens, rows.number < self.min_new_tokens)
        if self.allowed is not None:
            logits.masked_fill_(~unpacked(self.allowed(rows), logits.shape[-1]), -torch.inf)
        if self.forced_tokens:
            self._force_(logits, rows)
        if self.suppress_tokens:
            logits.index_fill_(-1, _ids(self.suppress_tokens, logits), -torch.inf)
        if self.begin_suppress_tokens:
            _forbid_(logits, self.begin_suppress_tokens, rows.number <= 0)
        return self._hooked(logits, rows) if self.hooks else logits

    def _penalise_(self, logits: Tensor, rows: Prefixes) -> None:
        total, new = rows.counted()
        text = rows.text.clamp(0, rows.vocabulary - 1)
        parts = [(text, torch.zeros((), dtype=torch.int32, device=logits.device))]
        if rows.tokens.shape[1]:
            parts.append((rows.tokens.clamp(0, rows.vocabulary - 1), rows.own_counts()))
        changed = []
        for ids, more in parts:
            at = ids[:, None].expand(-1, logits.shape[1], -1)
            seen = total.gather(1, ids)[:, None] + more > 0
            count = new.gather(1, ids)[:, None] + more * rows.new[:, None, None]
            changed.append((at, self._penalised(logits.gather(-1, at), seen, count)))
        # A token that is both in the text and among the new ones is written twice: the second time counts all.
        for at, values in changed:
            logits.scatter_(-1, at, values)

    def _penalised(self, values: Tensor, seen: Tensor, count: Tensor) -> Tensor:
        penalty = self.repetition_penalty
        if penalty != 1:
            values = torch.where(seen, torch.where(values < 0, values * penalty, values / penalty), values)
        if self.presence_penalty:
            values = values - self.presence_penalty * (count > 0).to(values.dtype)
        if self.frequency_penalty:
            values = values - self.frequency_penalty * count.to(values.dtype)
        return values

    def _ban_words_(self, logits: Tensor, rows: Prefixes) -> None:
        alone = [word[0] for word in self.bad_words if len(word) == 1]
        if alone:
            logits.index_fill_(-1, _ids(alone, logits), -torch.inf)
        longer = [word for word in self.bad_words if len(word) > 1]
        if not longer:
            return
        tail = rows.tail(max(map(len, longer)) - 1)
        for word in longer:
            known = tail[..., 1 - len(word) :] == _ids(word[:-1], logits)
            _forbid_(logits, word[-1:], known.all(-1))

    def _force_(self, logits: Tensor, rows: Prefixes) -> None:
        assert self.forced_tokens is not None
        target = torch.full_like(rows.number, -1)
        for number, token in self.forced_tokens.items():
            target = target.masked_fill(rows.number == number, token)
        target = target[..., None]
        others = torch.arange(logits.shape[-1], device=logits.device) != target
        logits.masked_fill_(others & (target >= 0), -torch.inf)
        logits.masked_fill_(~others, 0.0)

    def _hooked(self, logits: Tensor, rows: Prefixes) -> Tensor:
        """Row by row: a hook may treat the rows of one call alike, and prefixes differ in length."""
        guessing = rows.guessing.tolist()
        numbers = range(len(guessing)) if rows.sequences is None else rows.sequences.tolist()
        for place, (sequence, texts) in enumerate(zip(numbers, rows.ids(), strict=True)):
            # A hook may have a form for each sequence.
            hooks = [getattr(hook, "for_sequence", lambda _, hook=hook: hook)(sequence) for hook in self.hooks]
            for row, ids in enumerate(texts):
                if not guessing[place][row]:  # a guess for a position whose prefix is not known yet
                    prefix = torch.tensor([ids], device=logits.device)
                    for hook in hooks:
                        logits[place, row] = hook(prefix, logits[place, row][None].clone())[0]
        return logits


def unpacked(words: Tensor, vocabulary: int) -> Tensor:
    """The bits of `words` ``(..., ceil(V / 32))`` int32, the lowest first: bool ``(..., V)``.

    >>> unpacked(torch.tensor([[5]], dtype=torch.int32), 4)
    tensor([[ True, False,  True, False]])
    """
    # Bytes begin with the lowest bits on all machines that torch is built for.
    octets = words.contiguous().view(torch.uint8)
    return _octets(words.device).take(octets.long()).view(torch.bool)[..., :vocabulary]


@lru_cache
def _octets(device: torch.device) -> Tensor:
    """For each byte its 8 bits as bytes, in one int64."""
    bits = torch.arange(256)[:, None] >> torch.arange(8)
    return (bits & 1).to(torch.uint8).view(torch.int64).flatten().to(device)


def _ids(ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64).to(like.device, non_blocking=True)


def _forbid_(logits: Tensor, tokens: Sequence[int], where: Tensor) -> None:
    """-inf for `tokens` in the rows of `where` ``(batch, R)``."""
    for token in tokens:
        logits[..., token].masked_fill_(where, -torch.inf)
