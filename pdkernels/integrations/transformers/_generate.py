"""`model.generate(..., custom_generate=pdkernels.integrations.transformers.generate)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check, check_type, fail, message, sentence
from pdkernels.decoding import DecodeResult, Method, check_options, find
from pdkernels.decoding import generate as decode
from pdkernels.integrations.transformers._model import wrap
from pdkernels.integrations.transformers._settings import (
    FIELDS,
    OP,
    caller,
    check_arguments,
    check_fields,
    check_inputs,
    refuse,
)

# Of a draw. transformers applies them in this order.
_FILTERS: dict[str, Callable[[Any], bool]] = {
    "top_k": lambda value: value in (None, 0),
    "top_p": lambda value: value is None or value >= 1,
    "min_p": lambda value: value in (None, 0),
}
# Options of `pdkernels.decoding.generate` that belong to no method and have no setting in transformers.
_SHARED = ("overflow", "trace")


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    streamer: Any = None,
    method: str | None = None,
    method_options: Mapping[str, Any] | None = None,
    token_streamer: Any = None,
    stop_strings: Any = None,
    token_healing: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Decodes with one of our methods instead of transformers' token-by-token decoding.

    Call it through transformers: ``model.generate(**inputs, custom_generate=generate)``. Greedy settings give the tokens of
    transformers. With ``do_sample=True`` texts have the law of transformers' `temperature`, `top_k`, `top_p` and `min_p`, but the random
    numbers are ours. Every other setting and input of transformers is followed, refused by name, or changes no token.

    Args:
        method: one of `pdkernels.decoding.available()`; None: "jacobi" with prompt-lookup drafts, for any model.
        method_options: options of the method, such as ``{"block_size": 16}``, and `trace` and `overflow`.
        token_streamer: the same as `streamer`.
        stop_strings: refused, like `token_healing`; both need a tokenizer, which transformers does not pass on.

    Returns:
        ``(batch, prompt + new)`` int64 ids, padded with the pad token; with ``return_dict_in_generate=True`` an object with
        `sequences`, and `stats` of `pdkernels.decoding.generate`.

    Raises:
        NotImplementedError: settings, inputs, logits processors or stopping criteria that our methods do not support.
        ValueError, TypeError: as in `pdkernels.decoding.generate`.

    Example:
        >>> import torch, transformers
        >>> from pdkernels.integrations.transformers import generate
        >>> config = transformers.Qwen3Config(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        ...     num_key_value_heads=1, head_dim=16, intermediate_size=48)
        >>> model = transformers.Qwen3ForCausalLM(config).eval()
        >>> prompt = torch.tensor([[1, 2, 3]])
        >>> ours = model.generate(prompt, max_new_tokens=5, custom_generate=generate)
        >>> torch.equal(ours, model.generate(prompt, max_new_tokens=5))
        True
    """
    given = caller(model)
    theirs = given.get("streamer") if streamer is None else streamer  # which already has the prompt
    listener = token_streamer if theirs is None else theirs
    try:
        check(
            theirs is None or token_streamer is None,
            OP,
            "token_streamer",
            "be None beside a streamer",
            type(token_streamer).__name__,
        )
        if not given:
            given = {
                "logits_processor": list(logits_processor or ()),
                "stopping_criteria": list(stopping_criteria or ()),
                "synced_gpus": synced_gpus,
            }
        check_type(
            generation_config is not None,
            OP,
            "generation_config",
            "be a GenerationConfig",
            "None",
            "Call model.generate(..., custom_generate=generate).",
        )
        for name, value in (("stop_strings", stop_strings), ("token_healing", token_healing)):
            if not FIELDS[name].allows(value):
                refuse(name, value, FIELDS[name])
        check_fields(generation_config)
        check_arguments(given, logits_processor, stopping_criteria)
        chosen, options = _method(method, method_options)
        options = _sampling_options(generation_config, chosen) | options
        if getattr(model.config, "is_encoder_decoder", False):
            raise NotImplementedError(message(OP, "model", "be a decoder", f"{type(model).__name__} with an encoder"))
        remedy = "Start from a beginning-of-text token if the model has one."
        check(input_ids.shape[-1] > 0, OP, "input_ids", "hold at least one token", tuple(input_ids.shape), remedy)
        real = check_inputs(model, model_kwargs, input_ids, given)
        options["repetition_penalty"] = _penalty(generation_config, logits_processor, bool(real.all()))
        prompts = [ids[seen] for ids, seen in zip(input_ids, real)]
        if listener is not None:
            if len(prompts) > 1:
                raise ValueError(sentence(OP, f"a streamer takes one prompt, got {len(prompts)}"))
            if theirs is None:
                listener.put(input_ids.cpu())
            options["on_tokens"] = _told(listener)
        stated = _ids(generation_config.eos_token_id)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        ends = tuple(token for token in stated if 0 <= token < vocabulary)  # others never end a text
        length = input_ids.shape[1]
        new = generation_config.max_length - length
        result = decode(wrap(model), prompts, chosen, max_new_tokens=new, end_tokens=ends, **options)
    except BaseException:
        if listener is not None:
            with suppress(Exception):
                listener.end()  # otherwise the reader of its queue would wait forever
        raise
    if listener is not None:
        listener.end()
    pad = generation_config.pad_token_id
    pad = next(iter(stated), 0) if pad is None else int(pad)
    return _returned(result, input_ids, pad, bool(generation_config.return_dict_in_generate))


def _method(name: str | None, given: Mapping[str, Any] | None) -> tuple[Method, dict[str, Any]]:
    """The method and its options, without those that have a setting in transformers."""
    check_type(given is None or isinstance(given, Mapping), OP, "method_options", "be a dict", type(given).__name__)
    chosen, options = find("jacobi" if name is None else name), dict(given or {})
    check_options(chosen, {option: value for option, value in options.items() if option not in _SHARED})
    for option in ("temperature", *_FILTERS):
        remedy = f"Pass do_sample=True and {option} to the model's generate."
        check(option not in options, OP, "method_options", f"not hold {option!r}", options.get(option), remedy)
    if name is None:
        options.setdefault("draft", "lookup")
    return chosen, options


def _sampling_options(config: Any, method: Method) -> dict[str, Any]:
    """The sampling options of a method that `config` sets."""
    if not config.do_sample:
        return {}
    if "temperature" not in method.options:
        fail(OP, "do_sample", f"be False for method {method.name!r}, which does not sample", True)
    options: dict[str, Any] = {"temperature": 1.0 if config.temperature is None else float(config.temperature)}
    options["seed"] = int(torch.randint(2**31, ()).item())  # as in transformers: a new one in each call
    for option, is_off in _FILTERS.items():
        value = getattr(config, option)
        if is_off(value):
            continue
        if option not in method.options:
            remedy = "transformers sets top_k=50 by default: pass top_k=0." if option == "top_k" and value == 50 else ""
            fail(OP, option, f"be off for method {method.name!r}, which does not have it", value, remedy)
        options[option] = value
    return options


def _penalty(config: Any, processors: Any, unpadded: bool) -> float:
    penalty = config.repetition_penalty
    if penalty in (None, 1):
        return 1.0
    for processor in processors or ():
        if type(processor).__name__ == "RepetitionPenaltyLogitsProcessor":
            # transformers 4 also makes the padding less likely.
            skips = unpadded or getattr(processor, "prompt_ignore_length", None) is not None
            remedy = "Decode these prompts one by one."
            check(skips, OP, "repetition_penalty", "be 1 for padded prompts with this transformers", penalty, remedy)
    return float(penalty)


def _told(streamer: Any) -> Callable[[int, list[int], int], None]:
    def put(sequence: int, ids: list[int], accepted: int) -> None:
        for token in ids:
            streamer.put(torch.tensor([token]))

    return put


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        value = value.tolist()
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _returned(result: DecodeResult[Any, Any], input_ids: Tensor, pad: int, whole: bool) -> Any:
    batch, length = input_ids.shape
    width = max(len(ids) for ids in result.tokens)
    out = torch.full((batch, length + width), pad, dtype=torch.int64, device=input_ids.device)
    out[:, :length] = input_ids
    for row, ids in zip(out, result.tokens):
        row[length : length + len(ids)] = ids.to(out)
    if not whole:
        return out
    from transformers.generation import GenerateDecoderOnlyOutput

    found = GenerateDecoderOnlyOutput(sequences=out)
    found["stats"] = result.stats
    return found
