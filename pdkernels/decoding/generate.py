"""`generate`, and what there is to know of its methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pdkernels._validation import check, check_flag, check_type, did_you_mean, message
from pdkernels.decoding.method import SHARED, Method
from pdkernels.decoding.methods import METHODS
from pdkernels.decoding.options import check_options, refuse_settings
from pdkernels.decoding.request import Overflow, check_model, finished, open_session
from pdkernels.decoding.session_grammars import opened
from pdkernels.generation.filtered_model import FilteredModel
from pdkernels.generation.filters import Filters
from pdkernels.generation.generation_config import completed
from pdkernels.generation.logprobs import WrittenLogProbs
from pdkernels.generation.noise import checked_mask_token
from pdkernels.generation.params import SETTINGS, SamplingParams, take_params
from pdkernels.generation.prompts import Prompts
from pdkernels.generation.result import DecodeResult, OnTokens
from pdkernels.generation.session import Session
from pdkernels.generation.shared_prompts import SharedPrompts
from pdkernels.generation.stops import Stops
from pdkernels.generation.stream import Stream
from pdkernels.models.capabilities import capabilities
from pdkernels.models.protocols import check_language_model, keeps_windows

if TYPE_CHECKING:
    from pdkernels.decoding.signatures import Generate

_OP = "decoding.generate"
_NAMED = "Write max_new_tokens=5, not 5."
ARGUMENTS = ("params", "on_tokens", "trace", "overflow", "infill")
"""Arguments of `generate` that are neither settings nor options of a method."""


def available() -> tuple[str, ...]:
    """Names of the methods `generate` offers.

    >>> available()[:2]
    ('autoregressive', 'jacobi')
    """
    return tuple(METHODS)


def find(method: str) -> Method:
    """The facts about a method. `generate` also takes it, for names known only at run time: type checkers then allow
    any options.

    >>> find("jacobi").options["window"].help
    'keep a draft of this many tokens instead, refilled after every forward. Excludes `block_size`.'
    """
    check_type(isinstance(method, str), _OP, "method", "be a str", type(method).__name__)
    remedy = "" if method in METHODS else f"{did_you_mean(method, METHODS)}Known: {', '.join(METHODS)}."
    check(method in METHODS, _OP, "method", "name a decoding method", repr(method), remedy)
    return METHODS[method]


def method_options(method: str) -> tuple[str, ...]:
    """Names of the options that `generate` takes for `method`.

    >>> method_options("jacobi")[:5]
    ('block_size', 'window', 'draft', 'allow_mask_token', 'page_size')
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
    entry = find(method)
    check_options(entry, {option: None})
    return entry.options[option].default


def supports(method: str, model: Any) -> bool:
    """Whether a model has the capabilities that `method` requires: see `pdkernels.models.capabilities`.

    >>> supports("jacobi", object()), supports("llada", object())
    (True, False)
    """
    return find(method).supports(model)


def _documented(function: Callable[..., DecodeResult[Any, Any]]) -> Generate:
    """`generate`, typed, with the settings in its signature, and a docstring that ends with settings, methods and
    options."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    settings = [inspect.Parameter(name, keyword, default=setting.default) for name, setting in SETTINGS.items()]
    *arguments, options = inspect.signature(function).parameters.values()
    arguments = [argument for argument in arguments if argument.name != "unnamed"]  # it is there to be refused
    function.__signature__ = inspect.Signature([*arguments, *settings, options])  # type: ignore[attr-defined]
    if function.__doc__:
        lines = ["Settings:"]
        lines += [f"    {name}: {setting.help}" for name, setting in SETTINGS.items()]
        lines += ["", "Methods and their options:"]
        for method in METHODS.values():
            lines.append(f"    {method.name}: {method.summary}")
            lines += [f"        {option}: {option.help}" for option in method.options.values() if not option.shared]
            shared = [option for option in method.options.values() if option.shared and option.name not in SETTINGS]
            lines += [f"        And {', '.join(map(str, shared))}." * bool(shared), ""]
        lines += ["    Options with the same meaning in all methods:"]
        lines += [f"        {name}: {text}" for name, text in SHARED.items() if name not in SETTINGS]
        function.__doc__ += "\n" + "".join(f"    {line}\n" if line else "\n" for line in lines) + "    "
    return cast("Generate", function)


@_documented
def generate(
    model: Any,
    prompt: Prompts,
    method: str | Method = "autoregressive",
    *unnamed: Any,
    params: SamplingParams | None = None,
    on_tokens: OnTokens | None = None,
    trace: bool = False,
    overflow: Overflow = "error",
    infill: bool = False,
    **options: Any,
) -> DecodeResult[Any, Any]:
    """Generate from `prompt`, with the decoding method called `method`.

    Args:
        model: one of `pdkernels.models`, or your own model with the members that the method's protocol names
            (docs/own_models.md); `pdkernels.models.from_callable` makes one from a function.
        prompt: text (for a model with a tokenizer), token ids as an integer tensor or NumPy array of shape ``(n,)`` or
            ``(1, n)``, or a list of ints; a list of any of these is a batch. Or messages, each with a "role" and a
            "content", for the checkpoint's chat template. Or the output of a tokenizer: a mapping with `input_ids` and
            optionally `attention_mask`, one row of which is a single prompt. Prompts of a batch may differ in length;
            none may be empty.
        method: one of `available()`, or a `Method` returned by `find`.
        on_tokens: called as ``on_tokens(sequence, ids, accepted)`` whenever a sequence of the batch has new tokens;
            the first `accepted` of `ids` were accepted drafts, the others are the model's own. Method "planned" also
            passes chunks, as `ChunkTokens`, in the order of completion.
        trace: record every draft, its predictions and what was accepted in ``stats.trace``.
        overflow: "error" refuses a prompt that with `max_new_tokens` exceeds the model's ``config.max_positions``,
            "warn" continues.
        infill: also fill mask tokens inside prompts, for methods on bidirectional models. The result then is the whole
            text, the prompt included, and end tokens count only after the prompt; `max_new_tokens` may be 0.
        params: `SamplingParams` to start from; settings among the `options` come before its own.
        **options: settings (the fields of `SamplingParams`) and options of the method, both below; `method_options`
            lists the latter's names.

    Returns:
        `DecodeResult` with the new tokens only (but see `infill`), their text and the stats: a tensor and a string for
        a single prompt, lists of those for a batch.

    Raises:
        ValueError: an unknown method; a prompt that is empty or too long; ids outside the vocabulary; an option out of
            range; logits that are NaN, +inf or leave no possible token.
        TypeError: an unknown option; an argument of the wrong type; a model without a member that the method needs.
        NotImplementedError: a setting that the method does not follow.

    The forward over the prompt counts as a forward. Lossless methods (`is_lossless`) change only the cost of tokens: at
    temperature 0 (and `ensemble_weight` 1) they emit the tokens of greedy autoregressive decoding, if logits do not
    depend on the number of rows in a forward. Above it they sample from the model's own distribution.

    Example:
        >>> import torch
        >>> from pdkernels.models import Transformer, TransformerConfig
        >>> model = Transformer(TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=4, kv_heads=2,
        ...                                       head_dim=8, intermediate_size=24))
        >>> greedy = generate(model, [3, 1, 4], max_new_tokens=8)
        >>> jacobi = generate(model, [3, 1, 4], "jacobi", max_new_tokens=8, block_size=4)
        >>> torch.equal(greedy.tokens, jacobi.tokens), jacobi.stats.forwards <= greedy.stats.forwards
        (True, True)
    """
    chosen = method if isinstance(method, Method) else find(method)
    check_type(not unnamed, _OP, "options", "be named", f"{len(unnamed)} after the method", _NAMED)
    check_language_model(_OP, model)
    params = completed(_OP, take_params(_OP, params, options), model)
    prepared = prepare(model, prompt, chosen, params, options, on_tokens, trace, overflow, infill)
    session = prepared.session
    return finished(session, prepared.single, chosen.name, lambda: chosen.decode(session, **options))


class Prepared(NamedTuple):
    """A call of `generate`, checked, before its first forward."""

    session: Session
    single: bool
    """Whether there was a single prompt, not a batch."""


def prepare(
    model: Any,
    prompt: Prompts,
    method: Method,
    params: SamplingParams,
    options: dict[str, Any],
    on_tokens: OnTokens | None = None,
    trace: bool = False,
    overflow: Overflow = "error",
    infill: bool = False,
) -> Prepared:
    """Checks a request against a model and a method, whose `options` it has. Raises as `generate`."""
    check_capabilities(method, model, options)
    check_options(method, options, (*SETTINGS, *ARGUMENTS))
    refuse_settings(method, params, model)
    check_model(model, method, options.get("page_size") is not None)
    check_flag(_OP, "infill", infill)
    fill_in = None
    if infill:
        remedy = f"These can: {', '.join(name for name, other in METHODS.items() if other.fills_prompts)}."
        check(method.fills_prompts, _OP, "infill", f"be False for method {method.name!r}", infill, remedy)
        fill_in = checked_mask_token(_OP, model, options.get("mask_token"))
    stops = Stops.of(params, model)
    session, single = open_session(model, prompt, params, on_tokens, trace, overflow, fill_in)
    session.stops, copies, vocabulary = stops, params.n, model.config.vocab_size
    session.keeps_windows = keeps_windows(model)
    filters = Filters.of(params, vocabulary, session.end_tokens)
    session.grammar = opened(params.grammar, method, session, copies, options)
    if session.grammar is not None and session.grammar.whole:
        filters = replace(filters, allowed=session.grammar.words)
    session.filters = filters
    if copies > 1 and method.wing == "causal" and not method.fills_canvases:
        session.model = SharedPrompts(model, session.prompts[::copies], copies)
    if filters.any and not method.fills_canvases:
        session.model = FilteredModel(session.model, filters)
    if params.logprobs is not None and method.writes_logprobs:
        length = session.longest + session.max_new_tokens
        session.likely = WrittenLogProbs(params.logprobs, session.batch, length, vocabulary, session.model.device)
        if isinstance(session.model, FilteredModel):
            session.model.keeps_plain = True
    return Prepared(session, single)


def stream(model: Any, prompt: Prompts, method: str | Method = "autoregressive", **options: Any) -> Stream:
    """`generate` as an iterator over pieces of text, each as soon as its tokens are final; for loops without a
    callback.

    Args:
        model, prompt, method, options: as for `generate`, without `on_tokens`.

    Returns:
        An iterator of `Piece`. Its `result` is that of `generate`, after the last piece; `close`, or the end of a
        ``with`` block, ends the generation early. Errors of `generate` are raised by the loop.

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


def check_capabilities(method: Method, model: Any, options: Mapping[str, Any]) -> None:
    """TypeError for a model that lacks a capability that `method` requires."""
    offered = capabilities(model)
    if options.get("drafter") is not None:
        offered |= {"drafter"}
    unmet = sorted(method.requires - offered)
    if unmet:
        expectation = f"fit the model ({', '.join(sorted(offered)) or 'no capabilities'})"
        fitting = [name for name in METHODS if METHODS[name].supports(model)]
        actual = f"{method.name!r}, which requires {', '.join(unmet)}"
        raise TypeError(message(_OP, "method", expectation, actual, f"These fit: {', '.join(fitting) or 'none'}."))
