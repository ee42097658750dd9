"""Decoding methods with one entry point, `generate`: a folder for each kind of model, a file for each method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from pdkernels._validation import check, check_flag, check_type, did_you_mean, message, sentence
from pdkernels.decoding._filter_options import checked_filters, checked_sequences, no_logprobs, writes_logprobs
from pdkernels.decoding._filtered_model import FilteredModel
from pdkernels.decoding._log_probs import WrittenLogProbs
from pdkernels.decoding._method import SHARED, Method
from pdkernels.decoding._options import check_options
from pdkernels.decoding._prompts import Prompts
from pdkernels.decoding._request import Overflow, check_model, checked_stops, finished, open_session
from pdkernels.decoding._sampling import checked_mask_token, checked_size, sequence_seed
from pdkernels.decoding._session import MAX_POSITIONS, Session
from pdkernels.decoding._shared_prompts import SharedPrompts
from pdkernels.decoding._stops import Stops, checked_criteria, checked_time
from pdkernels.decoding._stream import Piece, Stream
from pdkernels.decoding._usual import default_method
from pdkernels.decoding.grammar import Grammar, opened
from pdkernels.decoding.methods import METHODS
from pdkernels.decoding.planned._lanes import chunk_lanes
from pdkernels.decoding.planned._outline import BAD_PLANS, BadPlan
from pdkernels.decoding.recurrent.recurrent_adaptive import ExitCheck
from pdkernels.decoding.result import ChunkTokens, DecodeResult, DecodeStats, LogProbs, OnTokens, PlanReport, PlanRound
from pdkernels.decoding.signatures import Generate, Request
from pdkernels.decoding.suffixes import SuffixPool
from pdkernels.decoding.traces import (
    AdaptiveStep,
    ChunkStep,
    DenoiseStep,
    LinearStep,
    MaskedStep,
    RecurrentStep,
    TraceStep,
)
from pdkernels.models.capabilities import capabilities

__all__ = [
    "BAD_PLANS",
    "AdaptiveStep",
    "BadPlan",
    "ChunkStep",
    "ChunkTokens",
    "DecodeResult",
    "DecodeStats",
    "DenoiseStep",
    "ExitCheck",
    "Grammar",
    "LinearStep",
    "LogProbs",
    "MaskedStep",
    "Method",
    "OnTokens",
    "Piece",
    "PlanReport",
    "PlanRound",
    "RecurrentStep",
    "Stream",
    "SuffixPool",
    "TraceStep",
    "available",
    "chunk_lanes",
    "default_method",
    "default_option",
    "find",
    "generate",
    "is_lossless",
    "method_options",
    "sequence_seed",
    "stream",
    "supports",
]

_OP = "decoding.generate"


def available() -> tuple[str, ...]:
    """Names of the methods `generate` offers.

    >>> available()[:2]
    ('autoregressive', 'jacobi')
    """
    return tuple(METHODS)


def find(method: str) -> Method:
    """The facts about a method. `generate` also takes it, for names known only at run time: type checkers then allow any options.

    >>> find("jacobi").options["window"].help
    'keep a draft of this many tokens instead, refilled after every forward. Excludes `block_size`.'
    """
    check_type(isinstance(method, str), _OP, "method", "be a str", type(method).__name__)
    remedy = "" if method in METHODS else f"{did_you_mean(method, METHODS)}Known: {', '.join(METHODS)}."
    check(method in METHODS, _OP, "method", "name a decoding method", repr(method), remedy)
    return METHODS[method]


def method_options(method: str) -> tuple[str, ...]:
    """Names of the options that `generate` takes for `method`.

    >>> method_options("jacobi")
    ('block_size', 'window', 'draft', 'temperature', 'top_k', 'top_p', 'min_p', 'typical_p', 'allow_mask_token', 'seed', 'page_size')
    """
    return tuple(find(method).options)


def is_lossless(method: str) -> bool:
    """Whether `method` promises the tokens of greedy decoding, with default options and at temperature 0.

    >>> is_lossless("jacobi"), is_lossless("block_diffusion"), is_lossless("llada")
    (True, False, False)
    """
    return find(method).lossless


def default_option(method: str, option: str) -> Any:
    """The default of an option of `method`.

    >>> default_option("block_diffusion", "threshold")
    0.9
    """
    found = find(method)
    check_options(found, {option: None})
    return found.options[option].default


def supports(method: str, model: Any) -> bool:
    """Whether a model has the capabilities that `method` requires: see `pdkernels.models.capabilities`.

    >>> supports("jacobi", object()), supports("llada", object())
    (True, False)
    """
    return find(method).supports(model)


def _documented(function: Callable[..., DecodeResult[Any, Any]]) -> Generate:
    """`generate`, typed, with a docstring that ends with all methods and options."""
    if function.__doc__:
        lines = ["Methods and their options:"]
        for method in METHODS.values():
            lines.append(f"    {method.name}: {method.summary}")
            lines += [f"        {option}: {option.help}" for option in method.options.values() if not option.shared]
            shared = [str(option) for option in method.options.values() if option.shared]
            lines += [f"        And {', '.join(shared)}.", ""]
        lines += ["    Options with the same meaning in all methods:"]
        lines += [f"        {name}: {text}" for name, text in SHARED.items()]
        function.__doc__ += "\n" + "".join(f"    {line}\n" if line else "\n" for line in lines) + "    "
    return cast(Generate, function)


@_documented
def generate(
    model: Any,
    prompt: Prompts,
    method: str | Method = "autoregressive",
    *,
    max_new_tokens: int = 128,
    end_tokens: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
    trace: bool = False,
    overflow: Overflow = "error",
    infill: bool = False,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    min_new_tokens: int = 0,
    forced_tokens: Mapping[int, int] | None = None,
    suppress_tokens: Sequence[int] = (),
    begin_suppress_tokens: Sequence[int] = (),
    logits_processor: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    stop_strings: Sequence[str] = (),
    stop_sequences: Sequence[Sequence[int]] = (),
    stopping_criteria: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    max_time: float | None = None,
    n: int = 1,
    logprobs: int | None = None,
    grammar: Grammar | Sequence[Grammar | None] | None = None,
    **options: Any,
) -> DecodeResult[Any, Any]:
    """Generate from `prompt`, with the decoding method called `method`.

    Args:
        model: one of `pdkernels.models`, or your own model with the members that the method's protocol names
            (docs/own_models.md); `pdkernels.models.from_callable` makes one from a function.
        prompt: text (for a model with a tokenizer), token ids as an integer tensor or NumPy array of shape ``(n,)`` or ``(1, n)``,
            or a list of ints; a list of any of these is a batch. Or messages, each with a "role" and a "content", for the
            checkpoint's chat template. Or the output of a tokenizer: a mapping with `input_ids` and optionally
            `attention_mask`, one row of which is a single prompt. Prompts of a batch may differ in length; none may be empty.
        method: one of `available()`, or a `Method` returned by `find`.
        max_new_tokens: each sequence gets exactly this many new tokens, or fewer if an end token stops it.
        end_tokens: ids that end a sequence and are kept as its last token. None: those of the model; ``()``: none.
        on_tokens: called as ``on_tokens(sequence, ids, accepted)`` whenever a sequence of the batch has new tokens;
            the first `accepted` of `ids` were accepted drafts, the others are the model's own. Method "planned" also passes chunks,
            as `ChunkTokens`, in the order of completion.
        trace: record every draft, its predictions and what was accepted in ``stats.trace``.
        overflow: "error" refuses a prompt that with `max_new_tokens` exceeds the model's ``config.max_positions``, "warn"
            continues.
        infill: also fill mask tokens inside prompts, for methods on bidirectional models. The result then is the whole
            text, the prompt included, and end tokens count only after the prompt; `max_new_tokens` may be 0.
        repetition_penalty: above 1, tokens that a row sees become less likely: their positive logits are divided by this, negative ones
            multiplied. For this and the filters below, every method decodes the model with the filtered logits, so lossless methods
            stay lossless: each row of a draft is filtered for its own prefix. They need the logits of all rows of a forward.
        presence_penalty: is subtracted from the logits of the tokens generated so far, those of the prompt excepted.
        frequency_penalty: the same, times the number of times that a token was generated.
        logit_bias: maps tokens to numbers that are added to their logits.
        bad_words: lists of tokens that a text must not contain; the prompt may begin one.
        min_new_tokens: end tokens are impossible before this many new tokens.
        forced_tokens: maps places in the new text, from 0, to the tokens that must be there.
        suppress_tokens: tokens that are impossible.
        begin_suppress_tokens: tokens that are impossible as the first new one.
        logits_processor: a function, or a list of them, from a prefix ``(1, n)`` and its logits ``(1, V)`` to other logits, such
            as transformers' `LogitsProcessorList`: after all filters above. It is called for each row of a draft, with the row's own
            prefix, so it must depend on these arguments alone. That is slow: the host waits for every forward.
        stop_strings: a sequence ends with the token that completes one of these in its new text; they are kept in it, as end tokens are.
            They are searched for in special tokens too, although `text` leaves those out.
        stop_sequences: the same for lists of tokens.
        stopping_criteria: a function, or a list of them, from a text ``(1, n)``, prompt included, and None to whether it ends, such as
            transformers' `StoppingCriteriaList`. It is asked about every new token.
        max_time: seconds after which texts end, with the tokens that the step under way makes final.
        n: texts of each prompt. The result has them one after another, each with the seed of its place in this batch; causal methods
            compute the prompt's rows once.
        logprobs: also return the log-probabilities of the new tokens and of this many most probable ones at each place: of the model's own
            distribution, before penalties, temperature and filters, as vLLM does by default. One more pass over the text
            computes them, which the stats do not count. In methods that fill masks and in those that choose recurrences they are of the
            forward that wrote the token.
        grammar: a `Grammar` that every text belongs to, or one (or None) for each prompt. A sequence ends with its end token, or with the last
            of its `max_new_tokens`, and is a whole text of the grammar then. With `infill` the grammar is that of the whole result,
            in method "planned" that of each chunk.
        **options: options of the method, see below; `method_options` lists their names.

    Returns:
        `DecodeResult` with the new tokens only (but see `infill`), their text and the stats: a tensor and a string for a single prompt,
        lists of those for a batch.

    Raises:
        ValueError: an unknown method; a prompt that is empty or too long; ids outside the vocabulary; an option out of range;
            logits that are NaN, +inf or leave no possible token.
        TypeError: an unknown option; an argument of the wrong type; a model without a member that the method needs.

    The forward over the prompt counts as a forward. Lossless methods (`is_lossless`) change only the cost of tokens: at
    temperature 0 (and `ensemble_weight` 1) they emit the tokens of greedy autoregressive decoding, if logits do not depend on
    the number of rows in a forward. Above it they sample from the model's own distribution.

    Example:
        >>> import torch
        >>> from pdkernels.models.transformer import Transformer, TransformerConfig
        >>> model = Transformer(TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=4, kv_heads=2,
        ...                                       head_dim=8, intermediate_size=24))
        >>> greedy = generate(model, [3, 1, 4], max_new_tokens=8)
        >>> jacobi = generate(model, [3, 1, 4], "jacobi", max_new_tokens=8, block_size=4)
        >>> torch.equal(greedy.tokens, jacobi.tokens), jacobi.stats.forwards <= greedy.stats.forwards
        (True, True)
    """
    prepared = prepare(
        model,
        prompt,
        method,
        options,
        max_new_tokens=max_new_tokens,
        end_tokens=end_tokens,
        on_tokens=on_tokens,
        trace=trace,
        overflow=overflow,
        infill=infill,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        bad_words=bad_words,
        min_new_tokens=min_new_tokens,
        forced_tokens=forced_tokens,
        suppress_tokens=suppress_tokens,
        begin_suppress_tokens=begin_suppress_tokens,
        logits_processor=logits_processor,
        stop_strings=stop_strings,
        stop_sequences=stop_sequences,
        stopping_criteria=stopping_criteria,
        max_time=max_time,
        n=n,
        logprobs=logprobs,
        grammar=grammar,
    )
    session, decode = prepared.session, prepared.method.decode
    return finished(session, prepared.single, prepared.method.name, lambda: decode(session, **options), logprobs)


class Prepared(NamedTuple):
    """A call of `generate`, checked, before its first forward."""

    method: Method
    session: Session
    single: bool
    """Whether there was a single prompt, not a batch."""


def prepare(
    model: Any,
    prompt: Prompts,
    method: str | Method,
    options: dict[str, Any],
    *,
    max_new_tokens: int,
    end_tokens: Sequence[int] | None,
    on_tokens: OnTokens | None,
    trace: bool,
    overflow: Overflow,
    infill: bool,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: Mapping[int, float] | None,
    bad_words: Sequence[Sequence[int]],
    min_new_tokens: int,
    forced_tokens: Mapping[int, int] | None,
    suppress_tokens: Sequence[int],
    begin_suppress_tokens: Sequence[int],
    logits_processor: Callable[..., Any] | Sequence[Callable[..., Any]] | None,
    stop_strings: Sequence[str],
    stop_sequences: Sequence[Sequence[int]],
    stopping_criteria: Callable[..., Any] | Sequence[Callable[..., Any]] | None,
    max_time: float | None,
    n: int,
    logprobs: int | None,
    grammar: Grammar | Sequence[Grammar | None] | None,
) -> Prepared:
    """Checks the arguments of `generate`, whose `options` are those of the method."""
    chosen = method if isinstance(method, Method) else find(method)
    check_capabilities(chosen, model, options)
    check_options(chosen, options, Request.__annotations__)
    check_model(model, chosen, options.get("page_size") is not None)
    check_flag(_OP, "infill", infill)
    fill_in = None
    if infill:
        remedy = f"These can: {', '.join(name for name, known in METHODS.items() if known.fills_prompts)}."
        check(chosen.fills_prompts, _OP, "infill", f"be False for method {chosen.name!r}", infill, remedy)
        fill_in = checked_mask_token(_OP, model, options.get("mask_token"))
    stops = Stops(
        checked_stops(model, stop_strings),
        checked_sequences(stop_sequences, model.config.vocab_size),
        checked_criteria(stopping_criteria),
        checked_time(max_time),
    )
    checked_size(_OP, "n", n)
    if logprobs is not None:
        check_logprobs(chosen, logprobs)
    session, single = open_session(model, prompt, max_new_tokens, end_tokens, on_tokens, trace, overflow, fill_in, n)
    session.stops = stops
    filters = checked_filters(
        chosen,
        model.config.vocab_size,
        session.end_tokens,
        {
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": logit_bias,
            "bad_words": bad_words,
            "min_new_tokens": min_new_tokens,
            "forced_tokens": forced_tokens,
            "suppress_tokens": suppress_tokens,
            "begin_suppress_tokens": begin_suppress_tokens,
            "logits_processor": logits_processor,
        },
    )
    session.grammar = opened(grammar, chosen, session, n, options)
    if session.grammar is not None and session.grammar.whole:
        filters = replace(filters, allowed=session.grammar.words)
    session.filters = filters
    if n > 1 and chosen.wing == "causal" and not chosen.fills_canvases:
        session.model = SharedPrompts(model, session.prompts[::n], n)
    if filters.any and not chosen.fills_canvases:
        session.model = FilteredModel(session.model, filters)
    if logprobs is not None and writes_logprobs(chosen):
        length = session.longest + session.max_new_tokens
        session.likely = WrittenLogProbs(logprobs, session.batch, length, model.config.vocab_size, session.model.device)
        if isinstance(session.model, FilteredModel):
            session.model.keeps_plain = True
    return Prepared(chosen, session, single)


def stream(model: Any, prompt: Prompts, method: str | Method = "autoregressive", **options: Any) -> Stream:
    """`generate` as an iterator over pieces of text, each as soon as its tokens are final; for loops without a callback.

    Args:
        model, prompt, method, options: as for `generate`, without `on_tokens`.

    Returns:
        An iterator of `Piece`. Its `result` is that of `generate`, after the last piece; `close`, or the end of a ``with`` block, ends the
        generation early. Errors of `generate` are raised by the loop.

    Example:
        >>> import pdkernels as pd
        >>> pieces = pd.decoding.stream(pd.models.load("tiny-code"), "def add(a, b):", "jacobi", max_new_tokens=16)
        >>> text = "".join(piece.text for piece in pieces)
        >>> text == pieces.result.text
        True
    """
    remedy = "The seed of one sequence of a batch is sequence_seed(seed, number)."
    check_type(not isinstance(model, int), "decoding.stream", "model", "be a model", type(model).__name__, remedy)
    check_type("on_tokens" not in options, "decoding.stream", "on_tokens", "be left out", "one")
    return Stream(generate, model, prompt, method, options)


def check_logprobs(method: Method, logprobs: int) -> None:
    """Raises for a count that is none, and for methods whose tokens have no distribution after their prefix alone."""
    check_type(type(logprobs) is int, _OP, "logprobs", "be an int", type(logprobs).__name__)
    check(0 <= logprobs <= MAX_POSITIONS, _OP, "logprobs", f"be in 0 .. {MAX_POSITIONS}", logprobs)
    if reason := no_logprobs(method):
        raise NotImplementedError(sentence(_OP, f"method {method.name!r} does not follow logprobs: {reason}"))


def check_capabilities(method: Method, model: Any, options: Mapping[str, Any]) -> None:
    """TypeError for a model that lacks a capability that `method` requires."""
    offered = capabilities(model)
    if options.get("drafter") is not None:
        offered |= {"drafter"}
    absent = sorted(method.requires - offered)
    if absent:
        words = f"fit the model ({', '.join(sorted(offered)) or 'no capabilities'})"
        fitting = [name for name in METHODS if METHODS[name].supports(model)]
        actual = f"{method.name!r}, which requires {', '.join(absent)}"
        raise TypeError(message(_OP, "method", words, actual, f"These fit: {', '.join(fitting) or 'none'}."))
