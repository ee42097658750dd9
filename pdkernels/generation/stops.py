"""What ends a text besides end tokens and its length: strings, sequences of tokens, functions, and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pdkernels._validation import check, refuse
from pdkernels.generation.params import SamplingParams, tokens_of

_OP = "decoding.generate"

Criterion = Callable[[torch.Tensor, Any], Any]
"""From a text ``(1, n)``, prompt included, and None to whether it ends here, as transformers' `StoppingCriteria`."""


def first_stop(
    tokens: list[int], checked: int, stops: Sequence[str], tokenizer: Any, text_of: Callable[..., str] | None = None
) -> int | None:
    """How many of `tokens` it takes for their text to hold one of `stops`, where the first `checked` do not; None: it
    does not.

    Special tokens are part of that text, although decoded texts leave them out: a stop string may be or contain one.
    `text_of` is the session's, of tokens that are not all text.

    >>> class Letters:
    ...     def decode(self, tokens):
    ...         return "".join(map(chr, tokens))
    >>> first_stop(list(b"one, two, six"), 4, [", s", "wo"], Letters()), first_stop([65, 66], 1, ["AA"], Letters())
    (8, None)
    """
    if not stops or checked == len(tokens):
        return None
    # Most texts have no stop string, which is visible from their end: the new tokens, and as many characters as a stop
    # string has.
    longest, first = max(map(len, stops)) + 8, checked
    decode = getattr(tokenizer, "decode_all", tokenizer.decode)
    if text_of is not None:
        decode, first = partial(text_of, decode=decode), 0  # what is text depends on all tokens before
    while first > 0 and len(decode(tokens[first:checked])) < longest:
        first = max(0, first - longest)
    suffix = decode(tokens[first:])
    if not any(stop in suffix for stop in stops):
        return None
    ends = range(checked + 1, len(tokens) + 1)
    return next((end for end in ends if any(stop in decode(tokens[:end]) for stop in stops)), None)


@dataclass
class Stops:
    """What ends the texts of a session.

    >>> Stops(sequences=((3, 4),)).first([], [1, 3, 4, 5], 1, None)
    3
    """

    strings: tuple[str, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()
    criteria: tuple[Criterion, ...] = ()
    max_time: float | None = None
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, params: SamplingParams, model: Any) -> Stops:
        """What ends the texts of a request. ValueError for tokens that the model does not have, and for strings if it
        has no tokenizer."""
        vocabulary, tokenizer = model.config.vocab_size, model.tokenizer
        for token in tokens_of(params.stop_sequences, "sequences"):
            check(token < vocabulary, _OP, "stop_sequences", f"hold ids in 0 .. {vocabulary - 1}", token)
        unnamed = bool(params.stop_strings) and tokenizer is None
        refuse(unnamed, _OP, "stop_strings need a model with a tokenizer", "Pass end_tokens instead.")
        checked: Any = params  # its sequences are tuples
        return cls(checked.stop_strings, checked.stop_sequences, checked.stopping_criteria, checked.max_time)

    @property
    def any(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self.strings or self.sequences or self.criteria) or self.max_time is not None

    @property
    def time_is_up(self) -> bool:
        return self.max_time is not None and time.perf_counter() - self.started > self.max_time

    def first(
        self,
        prompt: list[int],
        tokens: list[int],
        checked: int,
        tokenizer: Any,
        text_of: Callable[..., str] | None = None,
    ) -> int | None:
        """How many of `tokens` a text has when it ends, where the first `checked` did not end it; None: they do not end
        it."""
        string_end = first_stop(tokens, checked, self.strings, tokenizer, text_of)
        ends = [] if string_end is None else [string_end]
        for end in range(checked + 1, len(tokens) + 1) if self.sequences else ():
            if any(tuple(tokens[max(0, end - len(stop)) : end]) == stop for stop in self.sequences):
                ends.append(end)
                break
        for end in range(checked + 1, min([*ends, len(tokens)]) + 1) if self.criteria else ():
            text = torch.tensor([prompt + tokens[:end]], device="cpu")
            if any(_holds(criterion(text, None)) for criterion in self.criteria):
                ends.append(end)
                break
        if not ends and self.time_is_up:
            return len(tokens)
        return min(ends, default=None)


def _holds(answer: Any) -> bool:
    return bool(answer.any()) if isinstance(answer, torch.Tensor) else bool(answer)
