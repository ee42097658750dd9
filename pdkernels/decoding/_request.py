"""From what a caller asks for to a session, and from a session to what the caller gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from pdkernels._validation import check, check_type, fail
from pdkernels.decoding._session import Session
from pdkernels.decoding.result import DecodeResult, DecodeStats, OnTokens

_OP = "decoding.generate"

Prompt = str | torch.Tensor | Sequence[int] | Sequence[Mapping[str, Any]]
Batch = Sequence[Prompt]
Prompts = Prompt | Batch


def open_session(
    model: Any,
    prompt: Prompts,
    max_new_tokens: int,
    end_tokens: Sequence[int] | None,
    on_tokens: OnTokens | None = None,
    trace: bool = False,
) -> tuple[Session, bool]:
    """A session for checked arguments of `generate`, and whether there was a single prompt instead of a batch."""
    check_type(_is_int(max_new_tokens), _OP, "max_new_tokens", "be an int", type(max_new_tokens).__name__)
    check(max_new_tokens >= 0, _OP, "max_new_tokens", "be at least 0", max_new_tokens)
    check_type(
        hasattr(model, "config"),
        _OP,
        "model",
        "be a model",
        type(model).__name__,
        "Load one with pdkernels.models.load.",
    )
    vocabulary = model.config.vocab_size
    given = model.end_tokens if end_tokens is None else end_tokens
    check_type(isinstance(given, Collection), _OP, "end_tokens", "be a sequence of ints", type(given).__name__)
    ends = tuple(given)
    for token in ends:
        check_type(_is_int(token), _OP, "end_tokens", "hold ints", type(token).__name__)
        check(0 <= token < vocabulary, _OP, "end_tokens", f"hold ids in 0 .. {vocabulary - 1}", token)
    prompts, single = _token_lists(model, prompt, vocabulary)

    return Session(model, prompts, max_new_tokens, ends, on_tokens, trace), single


def finished(session: Session, single: bool, method: str, decode: Callable[[], int | None]) -> DecodeResult[Any, Any]:
    """What `generate` returns of a session that `decode` fills."""
    started = time.perf_counter()
    # Caches have the model's dtype, whatever autocast around the call would make of K and V.
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        forwards = decode()
    seconds = time.perf_counter() - started - session.callback_seconds

    tokens = sum(len(ids) for ids in session.tokens)
    # By default a sequence takes part in the prompt's forward and in one per verified draft.
    taken_part = forwards or sum(1 + len(accepted) for accepted in session.accepted)
    stats = DecodeStats(
        method=method,
        forwards=session.forwards,
        tokens=tokens,
        tokens_per_forward=tokens / taken_part,
        seconds=seconds,
        accepted=session.accepted,
        trace=session.trace,
        recurrences=session.recurrences if session.counts_recurrences else None,
    )
    ids = [torch.tensor(sequence, dtype=torch.int64) for sequence in session.tokens]
    text = None
    if session.model.tokenizer is not None:
        text = [session.model.tokenizer.decode(sequence) for sequence in session.tokens]
    if single:
        return DecodeResult(ids[0], None if text is None else text[0], stats)
    return DecodeResult(ids, text, stats)


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(item, Mapping) for item in prompt)


def _token_lists(model: Any, prompt: Any, vocabulary: int) -> tuple[list[list[int]], bool]:
    """Each prompt as a list of ids, and whether there was a single one instead of a batch."""
    single = isinstance(prompt, (str, torch.Tensor)) or (
        isinstance(prompt, Sequence) and len(prompt) > 0 and (all(_is_int(item) for item in prompt) or _is_chat(prompt))
    )
    if not single:
        check_type(
            isinstance(prompt, Sequence),
            _OP,
            "prompt",
            "be text, token ids, messages or a list of these",
            type(prompt).__name__,
        )
        check(len(prompt) > 0, _OP, "prompt", "hold at least one token", "an empty list")
    prompts = [_token_list(model, item) for item in ([prompt] if single else prompt)]
    for ids in prompts:
        check(
            len(ids) > 0,
            _OP,
            "prompt",
            "hold at least one token",
            "an empty prompt",
            "Start from a beginning-of-text token if the model has one.",
        )
        low, high = min(ids), max(ids)
        check(low >= 0 and high < vocabulary, _OP, "prompt", f"hold ids in 0 .. {vocabulary - 1}", f"{low} .. {high}")
    return prompts, single


def _token_list(model: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        check(model.tokenizer is not None, _OP, "prompt", "be token ids (the model has no tokenizer)", "a str")
        return list(model.tokenizer.encode(prompt))
    if _is_chat(prompt):
        encode = getattr(model.tokenizer, "encode_chat", None)
        remedy = "Write the prompt as text."
        if encode is None:
            fail(_OP, "prompt", "be no messages (the model has no chat template)", "a chat", remedy)
        return list(encode(prompt))
    if isinstance(prompt, torch.Tensor):
        integral = not (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool)
        check_type(integral, _OP, "prompt", "be an integer tensor", prompt.dtype)
        check(
            prompt.dim() == 1,
            _OP,
            "prompt",
            "be a 1-D tensor",
            f"shape {tuple(prompt.shape)}",
            "Give a batch as a list of 1-D tensors.",
        )
        return prompt.tolist()
    integers = isinstance(prompt, Sequence) and all(_is_int(item) for item in prompt)
    check_type(integers, _OP, "prompt", "be text, a 1-D tensor, a list of ints or messages", type(prompt).__name__)
    return list(prompt)
