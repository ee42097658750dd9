"""`model.generate(..., custom_generate=pdkernels.integrations.transformers.generate)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import check, check_type, message, sentence
from pdkernels.decoding import DecodeResult, Method, find
from pdkernels.decoding import generate as decode
from pdkernels.decoding.options import check_options
from pdkernels.generation.params import SETTINGS, names_of
from pdkernels.integrations.transformers._drafters import method_of
from pdkernels.integrations.transformers._drafters import options_of as drafter_options
from pdkernels.integrations.transformers._given import ids_of, in_vocabulary
from pdkernels.integrations.transformers._lists import PaddedCriterion, PaddedHook, plain_logits
from pdkernels.integrations.transformers._lists import options as list_options
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

# Options of `pdkernels.decoding.generate` that belong to no method and have no name in transformers.
_SHARED = (
    *(name for name, setting in SETTINGS.items() if not setting.transformers and setting.kind != "functions"),
    *("overflow", "tokenizer", "trace"),
)


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    streamer: Any = None,
    method: str | None = None,
    method_options: Mapping[str, Any] | None = None,
    drafter: Any = None,
    grammar: Any = None,
    token_streamer: Any = None,
    stop_strings: Any = None,
    token_healing: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Decodes with one of our methods instead of transformers' token-by-token decoding.

    Call it through transformers: ``model.generate(**inputs, custom_generate=generate)``. Greedy settings give the
    tokens of transformers. With ``do_sample=True`` texts have the law of transformers' `temperature` and filters, but
    the random numbers are ours. Every other setting and input of transformers is followed, refused by name, or changes
    no token. Processors and stopping criteria that have no option of ours run on one row or text at a time, which is
    slow; they must depend on their arguments alone.

    Args:
        method: one of `pdkernels.decoding.available()`; None: that of the drafter, or "jacobi" with prompt-lookup
            drafts, for any model.
        method_options: options of the method, such as ``{"block_size": 16}``; settings that have no name in
            transformers, such as `seed`, `presence_penalty` or `logprobs`; `trace`, `overflow` and the `tokenizer`.
        drafter: for "eagle", "dflash" and "mtp" a head, or the name or folder of one (`pdkernels.models.load_drafter`);
            for "draft_model" a causal model, of transformers or ours, or the name or path of one
            (`pdkernels.models.load`). transformers' own `assistant_model` is the same as a drafter for "draft_model".
        token_streamer: the same as `streamer`.
        grammar: a `pdkernels.decoding.Grammar` that the new text belongs to, or one (or None) for each prompt. It needs
            `tokenizer` in `method_options`, as below.
        stop_strings: need `tokenizer` in `method_options`, because transformers does not pass its own on.
            `token_healing` is refused.

    Returns:
        ``(batch, prompt + new)`` int64 ids, padded with the pad token; with ``return_dict_in_generate=True`` an object
        with `sequences`, `stats` of `pdkernels.decoding.generate`, and if asked its `logprobs`, and `scores` and
        `logits` as transformers has them.

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
    call = caller(model)
    caller_streamer = call.get("streamer") if streamer is None else streamer  # which already has the prompt
    listener = token_streamer if caller_streamer is None else caller_streamer
    try:
        check(
            caller_streamer is None or token_streamer is None,
            OP,
            "token_streamer",
            "be None beside a streamer",
            type(token_streamer).__name__,
        )
        if not call:
            call = {
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
        check_fields(generation_config)
        check_arguments(call)
        assistant, lookup = call.get("assistant_model"), generation_config.prompt_lookup_num_tokens
        if not FIELDS["token_healing"].allows(token_healing):
            refuse("token_healing", token_healing, FIELDS["token_healing"])
        chosen, options = _method(method, method_options, model, drafter, assistant, lookup)
        if grammar is not None:
            check("grammar" not in options, OP, "method_options", "not hold a grammar beside another one", "one")
            options["grammar"] = grammar
        if not FIELDS["stop_strings"].allows(stop_strings):
            stopping_criteria = [*(stopping_criteria or ()), _stop_strings(stop_strings, options.get("tokenizer"))]
        if getattr(model.config, "is_encoder_decoder", False):
            raise NotImplementedError(message(OP, "model", "be a decoder", f"{type(model).__name__} with an encoder"))
        real = check_inputs(model, model_kwargs, input_ids, call)
        remedy = "Start from a beginning-of-text token if the model has one."
        check(input_ids.shape[-1] > 0, OP, "input_ids", "hold at least one token", tuple(input_ids.shape), remedy)
        prompts = [ids[seen] for ids, seen in zip(input_ids, real)]
        lengths = [len(prompt) for prompt in prompts]
        callers = call.get("logits_processor") or ()
        filters, by_hooks = list_options(generation_config, logits_processor, callers, input_ids, lengths)
        if "logits_processor" not in filters:
            filters["repetition_penalty"] = _penalty(generation_config, logits_processor, bool(real.all()))
        options = _draw(generation_config, by_hooks) | filters | options
        expectation = "be None without return_dict_in_generate=True"
        returned = generation_config.return_dict_in_generate or options.get("logprobs") is None
        check(returned, OP, "logprobs", expectation, options.get("logprobs"))
        options |= _stops(stopping_criteria, call.get("stopping_criteria") or (), input_ids, real)
        if listener is not None:
            if len(prompts) > 1:
                raise ValueError(sentence(OP, f"a streamer takes one prompt, got {len(prompts)}"))
            if caller_streamer is None:
                listener.put(input_ids.cpu())
            options["on_tokens"] = _told(listener)
        stated = ids_of(generation_config.eos_token_id)
        ends = in_vocabulary(model, stated)
        length = input_ids.shape[1]
        new = generation_config.max_length - length
        if "min_new_tokens" in options:  # transformers warns of more than there will be, and has the same tokens
            options["min_new_tokens"] = min(options["min_new_tokens"], new)
        tokenizer = options.pop("tokenizer", None)
        if tokenizer is None and options.get("grammar") is not None:
            expectation = "a grammar needs the tokenizer of the model"
            raise ValueError(sentence(OP, expectation, "Pass method_options={'tokenizer': tokenizer}."))
        wrapped = wrap(model, tokenizer)
        wrapped.generation_config = {}  # transformers has put it into the settings of this call
        options |= drafter_options(chosen.name, model, drafter, assistant, options)
        copies = generation_config.num_return_sequences or 1  # transformers has repeated the prompts
        result = decode(wrapped, prompts[::copies], chosen, max_new_tokens=new, end_tokens=ends, n=copies, **options)
    except BaseException:
        if listener is not None:
            with suppress(Exception):
                listener.end()  # otherwise the reader of its queue would wait forever
        raise
    if listener is not None:
        listener.end()
    pad = generation_config.pad_token_id
    pad = next(iter(stated), 0) if pad is None else int(pad)
    sequences = _sequences(result, input_ids, pad)
    if not generation_config.return_dict_in_generate:
        return sequences
    hook = PaddedHook(list(logits_processor or ()), input_ids, lengths)
    return _output(result, sequences, generation_config, wrapped, prompts, hook)


def _method(
    name: str | None, given: Mapping[str, Any] | None, model: Any, drafter: Any, assistant: Any, lookup: int | None
) -> tuple[Method, dict[str, Any]]:
    """The method and its options, without those that have a setting in transformers."""
    check_type(given is None or isinstance(given, Mapping), OP, "method_options", "be a dict", type(given).__name__)
    options = dict(given or {})
    drafter = options.get("drafter") if drafter is None else drafter
    chosen = find(method_of(name, model, drafter, assistant, lookup))
    for option in (SETTINGS.keys() & options.keys()) - {*_SHARED}:
        setting = SETTINGS[option]
        drawn = setting.effect == "draw"
        remedy = f"Pass {'do_sample=True and ' * drawn}{setting.transformers or option} to the model's generate."
        (check if drawn else check_type)(False, OP, "method_options", f"not hold {option!r}", options[option], remedy)
    check_options(chosen, {option: value for option, value in options.items() if option not in _SHARED}, _SHARED)
    if lookup is not None:
        conflicting = sorted({"block_size", "window", "draft"} & options.keys())
        check(not conflicting, OP, "prompt_lookup_num_tokens", f"be None beside {', '.join(conflicting)}", lookup)
        options["block_size"] = lookup + 1
    if chosen.name == "jacobi" and (name is None or lookup is not None):
        options.setdefault("draft", "lookup")
    return chosen, options


def _draw(config: Any, by_hooks: bool) -> dict[str, Any]:
    """The settings of a draw that `config` has; `by_hooks`: temperature and filters are among the hooks."""
    if not config.do_sample:
        return {}
    seed = int(torch.randint(2**31, (), device="cpu").item())  # as in transformers: a new one in each call
    settings: dict[str, Any] = {"temperature": 1.0, "seed": seed}
    for name in () if by_hooks else names_of("draw"):
        field, neutral = SETTINGS[name].transformers, SETTINGS[name].neutral
        value = getattr(config, field) if field else None
        if value is not None and not (1 in neutral and value >= 1):  # a mass of 1 or more keeps all tokens
            settings[name] = value
    return {name: value for name, value in settings.items() if SETTINGS[name].changes(value)}


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
            streamer.put(torch.tensor([token], device="cpu"))

    return put


def _stops(criteria: Any, callers: Any, input_ids: Tensor, real: Tensor) -> dict[str, Any]:
    """Options for stopping criteria; `callers` are those that transformers did not make. Length and end tokens have
    options already."""
    options: dict[str, Any] = {}
    remaining = []
    for item in criteria or ():
        name = "" if any(item is caller_item for caller_item in callers) else type(item).__name__
        if name == "MaxTimeCriteria":
            options["max_time"] = max(0.0, item.initial_timestamp + item.max_time - time.time())
        elif name not in ("MaxLengthCriteria", "EosTokenCriteria"):
            remaining.append(PaddedCriterion(item, input_ids, real))
    return options | ({"stopping_criteria": remaining} if remaining else {})


def _stop_strings(strings: Any, tokenizer: Any) -> Any:
    """transformers' criterion for them."""
    from transformers import StopStringCriteria

    if tokenizer is None:
        refuse("stop_strings", strings, FIELDS["stop_strings"])
    return StopStringCriteria(tokenizer, strings)


def _sequences(result: DecodeResult[Any, Any], input_ids: Tensor, pad: int) -> Tensor:
    batch, length = input_ids.shape
    width = max(len(ids) for ids in result.tokens)
    out = torch.full((batch, length + width), pad, dtype=torch.int64, device=input_ids.device)
    out[:, :length] = input_ids
    for row, ids in zip(out, result.tokens):
        row[length : length + len(ids)] = ids.to(out)
    return out


def _output(
    result: DecodeResult[Any, Any], sequences: Tensor, config: Any, model: Any, prompts: list[Tensor], hook: PaddedHook
) -> Any:
    """transformers' object, with `scores` and `logits` of every new token if the config asks for them; those of a text
    that has ended are 0."""
    from transformers.generation import GenerateDecoderOnlyOutput

    output = GenerateDecoderOnlyOutput(sequences=sequences)
    output["stats"] = result.stats
    if result.logprobs is not None:
        output["logprobs"] = result.logprobs
    if config.output_scores or config.output_logits:
        texts = [ids.tolist() for ids in result.tokens]
        logits = plain_logits(model, [prompt.tolist() for prompt in prompts], texts)
        if config.output_logits:
            output["logits"] = tuple(logits)
        if config.output_scores:
            output["scores"] = tuple(_processed(logits, prompts, texts, hook))
    return output


def _processed(logits: list[Tensor], prompts: list[Tensor], texts: list[list[int]], hook: PaddedHook) -> list[Tensor]:
    """The same after transformers' processors."""
    scores = [rows.clone() for rows in logits]
    for sequence, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        processor = hook.for_sequence(sequence)
        for place in range(len(text)):
            ids = torch.cat([prompt, prompt.new_tensor(text[:place])])[None]
            scores[place][sequence] = processor(ids, scores[place][sequence][None])[0]
    return scores
