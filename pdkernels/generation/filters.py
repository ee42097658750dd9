"""Filters of logits that depend on tokens: penalties, biases, and what a row may not or must give.

They come before temperature, `top_k` and the filters after it, which `sampler.py` has, and in transformers' order:
bias, repetition penalty, presence and frequency penalties, bad words, `min_new_tokens`, allowed tokens, forced tokens,
suppressed tokens, hooks. Each row is filtered for its own prefix (`_prefixes.py`), in one pass over its logits. Nothing
but hooks, and what decides on allowed tokens, makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check, check_type
from pdkernels.backends import backend_of
from pdkernels.generation.params import SETTINGS, SamplingParams, tokens_of
from pdkernels.generation.prefixes import Prefixes
from pdkernels.ops.filter_logits import filter_logits

_OP = "decoding.generate"

Hook = Callable[[Tensor, Tensor], Tensor]
"""From a prefix ``(1, n)`` and its logits ``(1, V)`` to logits, as transformers' `LogitsProcessor`."""
Allowed = Callable[[Prefixes], Tensor]
"""From the prefixes of rows to an int32 tensor ``(batch, R, ceil(V / 32))``: bit ``i % 32`` of word ``i // 32`` allows
token i."""


@dataclass(frozen=True)
class Filters:
    """The filters of a request, and what a grammar allows."""

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

    @classmethod
    def of(cls, params: SamplingParams, vocabulary: int, end_tokens: tuple[int, ...]) -> Filters:
        """The filters of a request, for a vocabulary of this size. ValueError for a token outside it."""
        names = [field.name for field in fields(cls) if field.name in SETTINGS and field.name != "end_tokens"]
        settings = {name: getattr(params, name) for name in names}
        for name, value in settings.items():
            for token in tokens_of(value, SETTINGS[name].kind):
                check(token < vocabulary, _OP, name, f"hold ids in 0 .. {vocabulary - 1}", token)
        hooks: Any = params.logits_processor  # a tuple, as checked
        return cls(**settings, end_tokens=end_tokens, hooks=hooks)

    @property
    def any(self) -> bool:
        """Whether there is something to do."""
        names = "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "forced_tokens", "suppress_tokens"
        other_names = "begin_suppress_tokens", "allowed", "hooks"
        waits = self.min_new_tokens > 0 and bool(self.end_tokens)
        return (
            self.repetition_penalty != 1 or waits or any(bool(getattr(self, name)) for name in (*names, *other_names))
        )

    @cached_property
    def _biases(self) -> dict[tuple[int, torch.device], Tensor]:
        """The biases of all tokens, by the size of the vocabulary and the device: there may be many, and a forward is
        short."""
        return {}

    @cached_property
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
        """`logits` ``(batch, R, V)`` of rows, filtered: a copy, of at least float32, since rounded to 16 bits they
        would tie."""
        if hasattr(logits, "full_tensor"):  # a vocabulary in slices: the ids of a prefix are on all ranks
            logits = logits.full_tensor()
        bad_words, suppressed = self._bad_words(rows), self._suppressed(rows)
        penalises = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        counts, recent = rows.counted() if penalises else (None, None)
        logits = filter_logits(
            logits,
            bias=self._bias(logits) if self.logit_bias else None,
            counts=counts,
            recent=recent,
            banned=_listed(bad_words if self.forced_tokens else bad_words + suppressed),
            allowed=self.allowed(rows) if self.allowed is not None else None,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            backend=backend_of(logits.dtype),
        )
        if self.forced_tokens:  # even if it is one of those above
            self._force_(logits, rows)
            if suppressed:
                logits = filter_logits(logits, banned=_listed(suppressed), backend=backend_of(logits.dtype))
        return self._hooked(logits, rows) if self.hooks else logits

    def _bias(self, logits: Tensor) -> Tensor:
        assert self.logit_bias is not None
        key = logits.shape[-1], logits.device
        if key not in self._biases:
            row = torch.zeros(logits.shape[-1], dtype=torch.float32, device="cpu")
            row[list(self.logit_bias)] = torch.tensor(list(self.logit_bias.values()), dtype=torch.float32, device="cpu")
            self._biases[key] = row.to(logits.device)
        return self._biases[key]

    def _bad_words(self, rows: Prefixes) -> list[Tensor]:
        """Tokens ``(batch, R, n)`` that would complete bad words or come too early; -1: none."""
        banned = [_everywhere(self.bad_word_tokens, rows)] if self.bad_word_tokens else []
        longer = [word for word in self.bad_words if len(word) > 1]
        tail = rows.tail(max(map(len, longer)) - 1) if longer else None
        for word in longer:
            assert tail is not None
            matches = tail[..., 1 - len(word) :] == _ids(word[:-1], tail)
            banned.append(_where(word[-1:], matches.all(-1)))
        if self.min_new_tokens and self.end_tokens:
            banned.append(_where(self.end_tokens, rows.number < self.min_new_tokens))
        return banned

    def _suppressed(self, rows: Prefixes) -> list[Tensor]:
        """The same of the suppressed ones."""
        banned = [_everywhere(self.suppress_tokens, rows)] if self.suppress_tokens else []
        if self.begin_suppress_tokens:
            banned.append(_where(self.begin_suppress_tokens, rows.number <= 0))
        return banned

    @property
    def bad_word_tokens(self) -> tuple[int, ...]:
        """Bad words of one token."""
        return tuple(word[0] for word in self.bad_words if len(word) == 1)

    def _force_(self, logits: Tensor, rows: Prefixes) -> None:
        assert self.forced_tokens is not None
        target = torch.full_like(rows.number, -1)
        for number, token in self.forced_tokens.items():
            target = target.masked_fill(rows.number == number, token)
        target = target[..., None]
        is_other = torch.arange(logits.shape[-1], device=logits.device) != target
        logits.masked_fill_(is_other & (target >= 0), -torch.inf)
        logits.masked_fill_(~is_other, 0.0)

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
                        logits[place, row] = _answer(hook(prefix, logits[place, row][None].clone()), logits)
        return logits


def _answer(scores: Any, logits: Tensor) -> Tensor:
    """What a hook returns, whose row would also be filled by a single number."""
    expectation, width = "return a tensor of logits", logits.shape[-1]
    check_type(isinstance(scores, Tensor), _OP, "logits_processor", expectation, type(scores).__name__)
    check_type(scores.is_floating_point(), _OP, "logits_processor", expectation, scores.dtype)
    expectation = f"return the shape of its logits, (1, {width})"
    check(scores.shape == (1, width), _OP, "logits_processor", expectation, tuple(scores.shape))
    row: Tensor = scores[0]
    return row


def unpacked(packed: Tensor, vocabulary: int) -> Tensor:
    """The bits of `words` ``(..., ceil(V / 32))`` int32, the lowest first: bool ``(..., V)``.

    >>> unpacked(torch.tensor([[5]], dtype=torch.int32), 4)
    tensor([[ True, False,  True, False]])
    """
    # Bytes begin with the lowest bits on all machines that torch is built for.
    octets = packed.contiguous().view(torch.uint8)
    return _octets(packed.device).take(octets.long()).view(torch.bool)[..., :vocabulary]


@lru_cache
def _octets(device: torch.device) -> Tensor:
    """For each byte its 8 bits as bytes, in one int64."""
    bits = torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")
    return (bits & 1).to(torch.uint8).view(torch.int64).flatten().to(device)


def _ids(ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device="cpu").to(like.device, non_blocking=True)


def _where(tokens: Sequence[int], rows: Tensor) -> Tensor:
    """`tokens` in the rows that are true ``(batch, R)``, else -1: ``(batch, R, n)``."""
    return torch.where(rows[..., None], _ids(tokens, rows), -1)


def _everywhere(tokens: Sequence[int], rows: Prefixes) -> Tensor:
    """`tokens` in all rows: ``(batch, R, n)``."""
    return _ids(tokens, rows.number).expand(*rows.number.shape, -1)


def _listed(lists: list[Tensor]) -> Tensor | None:
    """Lists of ids ``(batch, R, n)`` as one; None if there is none."""
    return torch.cat(lists, -1) if lists else None
