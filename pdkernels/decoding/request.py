"""From a caller's request to a session, and from a session to the result."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

from pdkernels._validation import check, check_choice, check_flag, check_type, message, refuse, sentence
from pdkernels.decoding.method import Method
from pdkernels.generation.logprobs import log_probs
from pdkernels.generation.params import MAX_POSITIONS, SamplingParams
from pdkernels.generation.prompts import Prompts, token_lists
from pdkernels.generation.replay import Source, special_names
from pdkernels.generation.result import DecodeResult, DecodeStats, LogProbs, OnTokens
from pdkernels.generation.session import Session, inference
from pdkernels.models.capabilities import rows_ahead
from pdkernels.models.checkpoints.request_adapters import checked_name
from pdkernels.models.protocols import lacking, missing

_OP = "decoding.generate"
_PAGE = "See docs/own_models.md."

Overflow = Literal["error", "warn"]


def check_model(model: Any, method: Method, paged: bool) -> None:
    """Raises TypeError for a model without a member that `method` needs, NotImplementedError for windows that it does
    not follow."""
    actual = type(model).__name__
    protocol = method.model_protocol
    if missing_member := missing(model, protocol):
        needed = f"have {missing_member} (pdkernels.models.{protocol.__name__}) for method {method.name!r}"
        raise TypeError(message(_OP, "model", needed, f"{actual} without it", _PAGE))
    if method.wing == "planned" and getattr(model.config, "windows", None):
        fault = f"method {method.name!r} does not follow windows, whose rows its chunks would count otherwise"
        raise NotImplementedError(sentence(_OP, fault, "Use a model without."))
    if paged and (missing_member := lacking(model, "new_cache", ("kind", "page_size"))):
        needed = f"have the argument `{missing_member}` of `new_cache` for a page_size"
        raise TypeError(message(_OP, "model", needed, f"{actual} without it", "Pass page_size=None."))


def open_session(
    model: Any,
    prompt: Prompts,
    params: SamplingParams,
    on_tokens: OnTokens | None = None,
    trace: bool = False,
    overflow: Overflow = "error",
    fill_in: int | None = None,
) -> tuple[Session, bool]:
    """A session for a request, and whether there was a single prompt, not a batch.

    `fill_in`: the mask token, if masks inside prompts are to be filled too.
    """
    check_choice(_OP, "overflow", overflow, get_args(Overflow))
    check_flag(_OP, "trace", trace)
    actual = type(on_tokens).__name__
    check_type(on_tokens is None or callable(on_tokens), _OP, "on_tokens", "be a function", actual)
    max_new_tokens, copies = params.max_new_tokens, params.n
    within = f"be at most max_new_tokens ({max_new_tokens})"
    check(params.min_new_tokens <= max_new_tokens, _OP, "min_new_tokens", within, params.min_new_tokens)
    vocabulary = model.config.vocab_size
    ends = tuple(model.end_tokens if params.end_tokens is None else params.end_tokens)
    for token in ends:
        check(0 <= token < vocabulary, _OP, "end_tokens", f"hold ids in 0 .. {vocabulary - 1}", token)
    prompts, single = token_lists(model, prompt, vocabulary)
    adapters = _adapters(model, params, len(prompts))
    prompts, single = [ids for ids in prompts for _ in range(copies)], single and copies == 1
    _check_length(model, max(map(len, prompts)), max_new_tokens, overflow)
    if fill_in is None:
        session = Session(model, prompts, max_new_tokens, ends, on_tokens, trace, params=params)
        session.adapters = adapters
        return session, single
    firsts = [ids.index(fill_in) if fill_in in ids else len(ids) for ids in prompts]
    unpredicted = min(firsts) == 0 and rows_ahead(model) > 0
    refuse(
        unpredicted,
        _OP,
        "the prompt starts with a mask, but rows of this model predict the next token, so none predicts the first",
    )
    heads, tails = zip(*((ids[:first], ids[first:]) for ids, first in zip(prompts, firsts, strict=True)), strict=True)
    session = Session(model, list(heads), max_new_tokens, ends, on_tokens, trace, tails, params)
    session.adapters = adapters
    return session, single


def _adapters(model: Any, params: SamplingParams, prompts: int) -> list[Any] | None:
    """The adapter of each text, None for the model alone; None: no text has any."""
    names = params.adapter
    if names is not None and not isinstance(names, str):
        check(len(names) == prompts, _OP, "adapter", f"have one entry for each of {prompts} prompts", len(names))
    each = [names] * prompts if names is None or isinstance(names, str) else names
    adapters = [None if name is None else checked_name(_OP, "adapter", model, name) for name in each]
    return [adapter for adapter in adapters for _ in range(params.n)] if any(adapters) else None


def _check_length(model: Any, longest: int, max_new_tokens: int, overflow: Overflow) -> None:
    """Checks that texts are no longer than the model was trained for, unless the caller allows it."""
    total, trained = longest + max_new_tokens, getattr(model.config, "max_positions", None)
    expectation = "leave room for max_new_tokens in {} positions"
    actual = f"{longest} tokens and {max_new_tokens} more"
    check(total <= MAX_POSITIONS, _OP, "prompt", expectation.format(MAX_POSITIONS), actual)
    if trained is None or total <= trained:
        return
    expectation = expectation.format(f"the model's {trained}")
    if overflow == "error":
        remedy = "Shorten the prompt, lower max_new_tokens, or pass overflow='warn'."
        raise ValueError(message(_OP, "prompt", expectation, actual, remedy))
    warnings.warn(message(_OP, "prompt", expectation, actual), stacklevel=5)


def score_texts(session: Session) -> list[LogProbs] | None:
    """The log-probabilities of texts, if they are asked for: in one more pass, unless the session has them."""
    if session.likely is not None:
        return session.likely.of(session.prompts, session.tokens)
    count, model = session.params.logprobs, getattr(session.model, "model_itself", session.model)
    if count is None:
        return None
    with inference():
        return log_probs(model, session.prompts, session.tokens, count, session.adapters)


def finished(
    session: Session,
    single: bool,
    method: str,
    decode: Callable[[], int | None],
    score: Callable[[Session], list[LogProbs] | None] = score_texts,
) -> DecodeResult[Any, Any]:
    """The result of `generate` from a session that `decode` fills, with its log-probabilities by `score`."""
    started = time.perf_counter()
    with inference():
        forwards = decode()
    seconds = time.perf_counter() - started - session.callback_seconds
    if session.grammar is not None:
        session.grammar.check_complete(session.tokens, session.stopped)

    tokens = sum(len(ids) for ids in session.tokens) - session.given
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
        plans=session.plans,
        forced=None if session.grammar is None else session.grammar.forced_counts(session.tokens),
    )
    texts = session.written
    ids = [torch.tensor(sequence, dtype=torch.int64, device="cpu") for sequence in texts]
    text = None
    if session.model.tokenizer is not None:
        decode_text = session.text_of or session.model.tokenizer.decode
        text = [decode_text(sequence) for sequence in texts]
    model = session.model
    source = Source(session.prompts, session.tokens, model.tokenizer, special_names(model)) if session.trace else None
    probabilities = score(session)
    if single:
        only = None if probabilities is None else probabilities[0]
        return DecodeResult(ids[0], None if text is None else text[0], stats, only, source)
    return DecodeResult(ids, text, stats, probabilities, source)
