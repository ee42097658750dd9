"""Decoding methods behind one entry, `generate`. One file per method; `available()` lists them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from pdkernels._validation import check, check_type, message
from pdkernels.decoding import (
    autoregressive,
    block_diffusion,
    dllm_cache,
    dream,
    fast_dllm,
    fast_dllm_v2,
    jacobi,
    jacobi_multiblock,
    linear_self_speculation,
    llada,
    quadratic_self_speculation,
    recurrent_adaptive,
    recurrent_diffusion,
    recurrent_self_speculation,
    recurrent_static,
    slowfast,
)
from pdkernels.decoding._request import Prompts, finished, open_session
from pdkernels.decoding._steps import Steps
from pdkernels.decoding.result import (
    AdaptiveStep,
    DecodeResult,
    DecodeStats,
    DenoiseStep,
    LinearStep,
    MaskedStep,
    OnTokens,
    RecurrentStep,
    TraceStep,
)
from pdkernels.models.recurrent_depth import RecurrentDepth

__all__ = [
    "AdaptiveStep",
    "DecodeResult",
    "DecodeStats",
    "DenoiseStep",
    "LinearStep",
    "MaskedStep",
    "RecurrentStep",
    "TraceStep",
    "available",
    "default_option",
    "generate",
    "is_lossless",
    "method_options",
    "supports",
]

# A method fills a session; its keyword-only parameters are its options. One that spends more than a forward on a draft
# returns in how many its sequences took part, all together.
_METHODS: dict[str, Callable[..., int | None]] = {
    "autoregressive": autoregressive.decode,
    "jacobi": jacobi.decode,
    "jacobi_multiblock": jacobi_multiblock.decode,
    "linear_self_speculation": linear_self_speculation.decode,
    "quadratic_self_speculation": quadratic_self_speculation.decode,
    "block_diffusion": block_diffusion.decode,
    "recurrent_static": recurrent_static.decode,
    "recurrent_adaptive": recurrent_adaptive.decode,
    "recurrent_self_speculation": recurrent_self_speculation.decode,
    "recurrent_diffusion": recurrent_diffusion.decode,
    "llada": llada.decode,
    "dream": dream.decode,
    "slowfast": slowfast.decode,
    "dllm_cache": dllm_cache.decode,
    "fast_dllm": fast_dllm.decode,
    "fast_dllm_v2": fast_dllm_v2.decode,
}

# Methods with a step that needs no host: `pdkernels.integrations.device_loop` runs whole generations of them on the device.
STEPS: dict[str, type[Steps]] = {
    "autoregressive": autoregressive.AutoregressiveSteps,
    "jacobi": jacobi.JacobiSteps,
    "linear_self_speculation": linear_self_speculation.LinearSteps,
}

# Methods for masked-diffusion models: they fill in places that they see both sides of.
_MASKED = ("llada", "dream", "slowfast", "dllm_cache", "fast_dllm")

# Methods that ask of a model nothing but plain forwards behind its cache.
_PLAIN = ("autoregressive", "jacobi")

# Methods that write tokens of their own; all others keep the tokens and change what they cost.
_OWN_TOKENS = (
    "block_diffusion",
    "recurrent_adaptive",
    "recurrent_self_speculation",
    "recurrent_diffusion",
    "fast_dllm_v2",
    *_MASKED,
)

# Names of the other methods this library is about: asking for one is no typing error.
_NAMED = ("planned",)

_OP = "decoding.generate"


def available() -> tuple[str, ...]:
    """Names of the methods `generate` offers.

    >>> available()[:4]
    ('autoregressive', 'jacobi', 'jacobi_multiblock', 'linear_self_speculation')
    """
    return tuple(_METHODS)


def method_options(method: str) -> tuple[str, ...]:
    """Names of the options that `generate` takes for `method`.

    >>> method_options("jacobi")
    ('block_size', 'window', 'seed', 'page_size')
    """
    parameters = inspect.signature(_method(method)).parameters.values()
    return tuple(item.name for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY)


def is_lossless(method: str) -> bool:
    """Whether `method` promises the tokens of greedy decoding, with default options and at temperature 0.

    >>> is_lossless("jacobi"), is_lossless("block_diffusion"), is_lossless("llada")
    (True, False, False)
    """
    _method(method)
    return method not in _OWN_TOKENS


def default_option(method: str, option: str) -> Any:
    """What an option of `method` is if it is not given.

    >>> default_option("block_diffusion", "threshold")
    0.9
    """
    return inspect.signature(_method(method)).parameters[option].default


def supports(method: str, model: Any) -> bool:
    """Whether `method` is for models of this kind: some are for `RecurrentDepth`, some for Transformers that see both sides
    (``config.attention == "bidirectional"``), the others for Transformers that go from left to right; "autoregressive" and "jacobi"
    are for all of these and for `RecurrentDepth`.

    >>> supports("jacobi", object()), supports("llada", object())
    (True, False)
    """
    _method(method)
    for_recurrent = method.startswith("recurrent_")
    if isinstance(model, RecurrentDepth):
        return for_recurrent or method in _PLAIN
    if for_recurrent:
        return False
    return _sees_both_sides(model) == (method in _MASKED)


def _sees_both_sides(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "attention", "causal") == "bidirectional"


def generate(
    model: Any,
    prompt: Prompts,
    method: str = "autoregressive",
    *,
    max_new_tokens: int = 128,
    end_tokens: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
    trace: bool = False,
    **options: Any,
) -> DecodeResult:
    """Generate from `prompt`, with the decoding method called `method`.

    Args:
        model: a model with `new_cache`, `config.vocab_size`, `tokenizer` and `end_tokens`, called as
            ``model(tokens, cache=cache, counts=counts, rows=rows) -> logits`` (see `pdkernels.models`).
        prompt: text (for a model with a tokenizer), token ids as a 1-D integer tensor or a list of ints, or a list
            of any of these for a batch. Prompts of a batch may differ in length; none may be empty.
        method: one of `available()`.
        max_new_tokens: each sequence gets exactly this many new tokens, or fewer where an end token stops it.
        end_tokens: ids that end a sequence and are kept as its last token. None: those of the model; ``()``: none.
        on_tokens: called as ``on_tokens(sequence, ids, accepted)`` whenever a sequence of the batch has new tokens;
            the first `accepted` of `ids` were accepted drafts, the others the model gave itself.
        trace: keep every draft, its predictions and what was accepted in ``stats.trace``.
        **options: options of the method.

            - ``autoregressive``: `temperature` (0) and `seed` (0) of the draws, `page_size`.
            - ``jacobi``: `block_size` (16) decodes block after block, `window` keeps one running draft of that length
              instead; `seed` (0) of the tokens a draft starts from; `page_size`.
            - ``jacobi_multiblock``: up to `blocks` (2) blocks of `block_size` (16) under way, the next one opened when
              `spawn_ratio` (0.85) of the newest is accepted; up to `verification_size` (4) rows tried per forward, found
              in the last `pool_size` (4) rejected sequences; `seed` (0), `page_size`.
            - ``linear_self_speculation``: `block_size` (32), `threshold` (0), `verification` ("compare").
            - ``quadratic_self_speculation``: `block_size` (16), `masks_per_group`, `label_shift` (0), `in_group`
              ("bidirectional"), `ensemble_weight` (1) and `ensemble` ("probability").
            - ``block_diffusion``: `block_size` (32), `threshold` (0.9) or None and `steps_per_block`, `refresh` ("causal").

            These three take `mask_token` (the model's own by default), `temperature` (0) and `seed` (0) of the draws, `page_size`.

            - ``recurrent_static``: a fixed number of recurrences a token.
            - ``recurrent_adaptive``: `criterion` ("latent-diff"), `threshold`, `max_recurrences` (`recurrences`),
              `min_recurrences` (1), `check_every` (1).
            - ``recurrent_self_speculation``: `block_size` (8) tokens of `draft_recurrences` (4).
            - ``recurrent_diffusion``: `inner_recurrence` (4), `threshold` (0.03), `exit` ("latent-diff"), `noise` (0),
              `schedule`, `mixer`, `momentum` (0.1), `headway` (1), `max_wavefront` (128), `rule` ("prefix"), `new_state`
              ("fresh"), `guard` (True), `max_recurrences`, `stability`.

            These four, for recurrent-depth models, take `recurrences` (the model's mean), `temperature` (0), `top_p`, `min_p`,
            `top_k`, `seed` (0) of states and draws, `page_size`.

            - ``llada``: `block_size` (all), `steps` (one a token), `remasking` ("low_confidence"), `guidance` (0), `no_end` and
              `late_end` (False).
            - ``dream``: `steps` (one a token), `algorithm` ("entropy"), `eps` (1e-3), `top_p` (1), `top_k`, `order_temperature` (0).
            - ``slowfast``: `block_size` (all), `max_exploration` (8), `window` (2), `variance` (1), `tau_min` (0.1), `tau_high`
              (0.85), `k_slow` (1), `k_fast` (1), `cycle` ("last"), `drop_suffix` (True); `prompt_interval`, with which
              `gen_interval` (1) and `transfer_ratio` (0) go.
            - ``dllm_cache``: the options of ``llada``, and `prompt_interval` (25), `gen_interval` (5), `transfer_ratio` (0.25),
              `baseline` ("last"), `guidance_interval` (1), `page_size`.
            - ``fast_dllm``: `block_size` (32), `cache` ("dual"), `threshold` (0.9) or None and `factor` or `steps` (one a token),
              `page_size`.

            These, for masked-diffusion models, take `mask_token` (the model's own), `temperature` (0) and `seed` (0) of the draws.
            So does one for models that fill in blocks behind a prefix:

            - ``fast_dllm_v2``: `block_size` (32), `small_block_size` (8), `threshold` (0.9), `block_cache` (True), `top_p` (1),
              `page_size`.

            `page_size` is the number of rows per page of a paged KV cache; None, the default, keeps it contiguous.

    Returns:
        `DecodeResult` with the new tokens only, their text and the stats: a tensor and a string for a single prompt,
        lists of those for a batch.

    Raises:
        ValueError: an unknown method, an empty prompt, ids outside the vocabulary, an option out of range.
        TypeError: an unknown option or an argument of the wrong type.
        NotImplementedError: a method this version does not have yet.

    The forward over the prompt counts as a forward. Methods that are lossless (`is_lossless`) change only what tokens cost: at
    temperature 0 (and `ensemble_weight` 1) they give those of greedy autoregressive decoding, on logits that do not depend on
    how many rows a forward has. Above it they draw from the model's own distribution.

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
    decode = _method(method)
    kind = (
        "recurrent-depth models"
        if isinstance(model, RecurrentDepth)
        else "models that see both sides"
        if _sees_both_sides(model)
        else ""
    )
    if kind:  # the methods for other models say themselves what they want
        fitting = [name for name in _METHODS if supports(name, model)]
        check_type(
            method in fitting, _OP, "method", f"be for {kind}", repr(method), f"These are: {', '.join(fitting)}."
        )
    check_options(method, options)
    session, single = open_session(model, prompt, max_new_tokens, end_tokens, on_tokens, trace)
    return finished(session, single, method, lambda: decode(session, **options))


def _method(method: str) -> Callable[..., int | None]:
    check_type(isinstance(method, str), _OP, "method", "be a str", type(method).__name__)
    offered = ", ".join(available())
    if method in _NAMED:
        raise NotImplementedError(
            message(_OP, "method", "be one this version has", repr(method), f"Available: {offered}.")
        )
    check(method in _METHODS, _OP, "method", "name a decoding method", repr(method), f"Known: {offered}.")
    return _METHODS[method]


# Former options, and where what they did is now.
MOVED = {
    ("recurrent_diffusion", "published"): "The steps of the released code are pdkernels.reference.recurrent_published."
}


def check_options(method: str, options: dict[str, Any]) -> None:
    """TypeError or ValueError for options that `method` does not have."""
    accepted = method_options(method)
    for name in options:
        check_type(
            name in accepted,
            _OP,
            "options",
            f"be options of method {method!r}",
            repr(name),
            MOVED.get((method, name)) or f"It accepts: {', '.join(accepted)}.",
        )
    page_size = options.get("page_size")
    if page_size is not None:
        check_type(type(page_size) is int, _OP, "page_size", "be an int", type(page_size).__name__)
        check(page_size >= 1, _OP, "page_size", "be at least 1", page_size)
