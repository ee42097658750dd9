"""The treatment of each setting of transformers by `generate`: a table for `GenerationConfig`, `generate` and model
inputs.

transformers prepares some settings and drops others before it calls a custom `generate`. A setting is followed, refused
by name, or listed here with the reason why it changes nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from pdkernels._validation import check, message
from pdkernels.generation.params import SETTINGS
from pdkernels.integrations.transformers._cache_names import NAMES, cache_in

OP = "generate"


class Rule(NamedTuple):
    """The treatment of a setting."""

    kind: Literal["followed", "refused", "unused"]
    words: str
    """How it is followed, the remedy if it is refused, or why it changes nothing."""
    off: tuple[Any, ...] = (None, False)
    """Values of a refused setting that change nothing; 0 and False are one."""
    draws: bool = False
    """Whether transformers reads it only with ``do_sample=True``."""
    expectation: str = "be off"

    def allows(self, value: Any) -> bool:
        return self.kind != "refused" or (not isinstance(value, Tensor) and value in self.off)


def _followed(how: str) -> Rule:
    return Rule("followed", how)


def _unused(why: str) -> Rule:
    return Rule("unused", why)


def _refused(remedy: str, *off: Any, draws: bool = False, expectation: str = "be off") -> Rule:
    return Rule("refused", remedy, (None, False, *off), draws, expectation)


def _absent(remedy: str) -> Rule:
    return _refused(remedy, expectation="be None")


_THEIRS = "transformers' own generate does this."
_BEAMS = "Beams are decoded by transformers' own generate."
_PROCESSED = "by the processor that transformers makes of it, or a filter of ours"
_LOGITS = "It is not a function of a row's logits and its prefix."
_OUTPUTS = "Decoding methods return tokens and stats, not what the forwards computed."
_ASSISTANT = "Pass assistant_model, a smaller model, or drafter."
_CACHES = "Decoding methods keep their own caches."
_IDS = "Decoding methods give a model token ids alone."
_COMPILED = "Decoding methods do not compile the model."
_LENGTHS = "it is about the lengths of drafts, which change no token; block_size='auto' chooses them"
_OTHER_TOKENIZER = "only assistants with another tokenizer read it, which are refused"
_WITH_BEAMS = "only beams read it, which are refused"

FIELDS: dict[str, Rule] = {
    setting.transformers: _followed(f"as {setting.name} of pdkernels.decoding.generate")
    for setting in SETTINGS.values()
    if setting.transformers
} | {
    # Lengths
    "max_length": _followed("the prompts' length and max_new_tokens are in it by then"),
    "max_new_tokens": _followed("by max_length"),
    "min_length": _followed(_PROCESSED),
    "early_stopping": _unused(_WITH_BEAMS),
    "stop_strings": _refused(
        "transformers drops the tokenizer that they need: pass them to generate, with method_options={'tokenizer': tokenizer}, or use the folder custom_generate."
    ),
    # Strategy
    "do_sample": _followed("the random numbers are ours"),
    "num_beams": _refused(_BEAMS, 1, expectation="be 1"),
    "num_beam_groups": _refused(_BEAMS, 1, expectation="be 1"),
    "use_mtp": _refused("Pass method='mtp' and drafter, the folder of the model."),
    "penalty_alpha": _refused(_THEIRS, 0.0),
    "low_memory": _unused("only contrastive search reads it, which penalty_alpha asks for"),
    "dola_layers": _refused(_THEIRS),
    "diversity_penalty": _unused(_WITH_BEAMS),
    "constraints": _refused(_BEAMS),
    "force_words_ids": _refused(_BEAMS),
    # Caches
    "use_cache": Rule("refused", _CACHES, (None, True), expectation="be True"),
    "cache_implementation": _refused(_CACHES, "dynamic", "hybrid"),  # the latter in the configs of Gemma
    "cache_config": _refused(_CACHES),
    "max_cache_len": _unused("only static caches read it, which cache_implementation asks for"),
    "return_legacy_cache": _refused(_CACHES),
    "prefill_chunk_size": _refused("The forward over the prompt is one forward."),
    # Draws
    "top_h": _followed(_PROCESSED),
    "epsilon_cutoff": _followed(_PROCESSED),
    "eta_cutoff": _followed(_PROCESSED),
    # Logits
    "encoder_repetition_penalty": _refused(_LOGITS, 1.0),
    "length_penalty": _unused(_WITH_BEAMS),
    "no_repeat_ngram_size": _followed(_PROCESSED),
    "encoder_no_repeat_ngram_size": _refused(_LOGITS),
    "renormalize_logits": _unused("the likeliest token and the law of draws stay the same"),
    "forced_bos_token_id": _followed(_PROCESSED),
    "forced_eos_token_id": _followed(_PROCESSED),
    "remove_invalid_values": _followed(_PROCESSED),
    "exponential_decay_length_penalty": _followed(_PROCESSED),
    "sequence_bias": _followed(_PROCESSED),
    "token_healing": _refused("transformers drops the tokenizer that it needs."),
    "guidance_scale": _refused(_LOGITS, 1),
    "watermarking_config": _followed(_PROCESSED),
    # Outputs
    "num_return_sequences": _followed("transformers repeats the prompts; each draws its own text"),
    "output_attentions": _refused(_OUTPUTS),
    "output_hidden_states": _refused(_OUTPUTS),
    "output_scores": _followed("by one more pass over the texts"),
    "output_logits": _followed("by one more pass over the texts"),
    "return_dict_in_generate": _followed("with `sequences`, `stats`, and `scores` and `logits` if asked"),
    # Tokens
    "pad_token_id": _followed("after a text that ended before others"),
    "bos_token_id": _followed("by transformers, which makes it the prompt where there is none"),
    "decoder_start_token_id": _unused("only encoder-decoder models read it, which are refused"),
    # Assistants
    "is_assistant": _refused(_ASSISTANT),
    "num_assistant_tokens": _followed(
        "in the config of the assistant, as block_size - 1; transformers reads it only there"
    ),
    "num_assistant_tokens_schedule": _unused(_LENGTHS),
    "assistant_confidence_threshold": _unused(_LENGTHS),
    "assistant_lookbehind": _unused(_OTHER_TOKENIZER),
    "target_lookbehind": _unused(_OTHER_TOKENIZER),
    "assistant_ensemble_weight": _refused("It changes what is written, and drafts do not change that here."),
    "max_matching_ngram_size": _unused("it is about which drafts are found, which changes no token"),
    "prompt_lookup_num_tokens": _followed("by method 'jacobi', as block_size - 1 with draft='lookup'"),
    "assistant_early_exit": _refused(_ASSISTANT),
    "speculation_type": _refused("Pass drafter, the folder of a DFlash head."),
    # Performance
    "compile_config": _refused(_COMPILED),
    "disable_compile": _unused("nothing is compiled"),
    "continuous_batching_config": _refused(_THEIRS),
}
"""Every field of `GenerationConfig`, from transformers 4.57 on. Those of draws count under ``do_sample=True``."""

METADATA = {
    "transformers_version",
    "_from_model_config",
    "_commit_hash",
    "_original_object_hash",
    "_mask_length",
    "_bos_token_tensor",
    "_eos_token_tensor",
    "_pad_token_tensor",
    "_decoder_start_token_tensor",
}
"""What a `GenerationConfig` holds besides its fields."""

ARGUMENTS: dict[str, Rule] = {
    "inputs": _followed("as the prompts"),
    "generation_config": _followed("field by field, as in FIELDS"),
    "logits_processor": _followed("row by row, each after its own prefix; they must depend on these two alone"),
    "stopping_criteria": _followed("text by text, for every new token"),
    "prefix_allowed_tokens_fn": _followed(_PROCESSED),
    "synced_gpus": _refused("The processes of a model in shards do not write in step."),
    "assistant_model": _followed("as the drafter of method 'draft_model'"),
    "streamer": _followed("token by token, for one prompt"),
    "negative_prompt_ids": _absent("guidance_scale is refused as well."),
    "negative_prompt_attention_mask": _absent("guidance_scale is refused as well."),
    "custom_generate": _followed("it is what calls us"),
    "tokenizer": _unused("stop_strings and token_healing read it, which are refused"),
    "assistant_tokenizer": _unused(_OTHER_TOKENIZER),
    "use_model_defaults": _followed("by transformers 4, which completes the config"),
    "trust_remote_code": _unused("only a custom_generate from the hub reads it"),
}
"""Every argument of transformers' `generate`, including those that it takes from its keyword arguments."""

INPUTS: dict[str, Rule] = {
    "input_ids": _followed("as the prompts"),
    "attention_mask": _followed("where it hides padding on the left"),
    "position_ids": _followed("where they count the tokens from 0"),
    **dict.fromkeys(NAMES, _followed("transformers makes an empty one; those of callers are refused")),
    "use_cache": FIELDS["use_cache"],
    "cache_position": _unused("transformers 4 adds it; caches are ours"),
    "logits_to_keep": _unused("decoding methods ask for the rows that they need"),
    "num_logits_to_keep": _unused("as logits_to_keep"),
    "return_dict": _unused("it concerns the forwards alone"),
    "token_type_ids": _followed("where a model with images marks none"),
    "mm_token_type_ids": _followed("where a model with images marks none"),
}
"""The inputs of models that `generate` knows; others are refused, since a decoder would not see them."""


def caller(model: Any) -> Mapping[str, Any]:
    """The variables of the `generate` of transformers that called us, which passes on neither streamers nor
    assistants."""
    from transformers import GenerationMixin

    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is model:
            return frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def refuse(name: str, value: Any, rule: Rule) -> NoReturn:
    shown = repr(value) if isinstance(value, (bool, int, float, str, list, tuple)) else ""
    shown = shown if 0 < len(shown) < 80 else type(value).__name__
    raise NotImplementedError(message(OP, name, rule.expectation, shown, rule.words))


def check_fields(config: Any) -> None:
    """Raises NotImplementedError for a field of a `GenerationConfig` that is not supported."""
    for name, rule in FIELDS.items():
        value = getattr(config, name, None)
        if not rule.allows(value) and (config.do_sample or not rule.draws):
            refuse(name, value, rule)
    fields = None
    for name, value in vars(config).items():
        if value is None or value is False or name in FIELDS or name in METADATA:
            continue
        # Entries of a file that are not fields change nothing in transformers either.
        fields = vars(type(config)()) if fields is None else fields
        if name in fields and value != getattr(config, "_get_default_generation_params", dict)().get(name):
            refuse(name, value, _refused("This version of pdkernels does not know the setting."))


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises NotImplementedError for arguments of transformers' `generate` that are not supported."""
    for name, rule in ARGUMENTS.items():
        value = given.get(name)
        if not isinstance(value, list) and not rule.allows(value):
            refuse(name, value, rule)


def check_inputs(model: Any, inputs: Mapping[str, Any], input_ids: Tensor, given: Mapping[str, Any]) -> Tensor:
    """The real tokens of `input_ids`, as a mask; raises for inputs of a model that a decoder would not see."""
    # First by the names that the caller gave: transformers makes encoder outputs of pictures.
    asked = {name: value for name, value in given.get("kwargs", {}).items() if name not in FIELDS | ARGUMENTS}
    for name, value in (asked | dict(inputs)).items():
        empty = isinstance(value, dict) and all(item is None for item in value.values())  # of encoders
        if value is None or value is False or empty:
            continue
        rule = INPUTS.get(name)
        if rule is None or not rule.allows(value):
            refuse(name, value, rule or _absent(_IDS))
    if (
        inputs.get("use_cache", True) is None
    ):  # transformers then gives the whole text in every step to a model that keeps a cache
        refuse("use_cache", None, FIELDS["use_cache"])
    cache_name, own = cache_in(given.get("kwargs", {}))  # of the caller: it would stay empty
    if own is not None:
        refuse(cache_name, own, _absent(_CACHES))
    cache_name, cache = cache_in(inputs)
    if getattr(cache, "get_seq_length", int)() > 0:
        refuse(cache_name, cache, _absent(_CACHES))
    for name in ("token_type_ids", "mm_token_type_ids"):
        types = inputs.get(name)
        if types is not None and (not hasattr(model.config, "vision_config") or bool(types.any())):
            refuse(name, types, _absent(_IDS))
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    if mask is not None:
        left = mask.shape == input_ids.shape and bool(
            (real == (mask == 1)).all() and (real[:, :-1] <= real[:, 1:]).all() and real[:, -1:].all()
        )
        check(left, OP, "attention_mask", "hide only padding on the left", "another mask")
    if positions is not None:
        counted = real.long().cumsum(-1) - 1
        fits = positions.shape[-1] == counted.shape[-1]
        same = fits and bool(((positions == counted) | ~real).all())  # models with images have several numbers a token
        check(same, OP, "position_ids", "count the tokens of a prompt from 0", "others", "Leave them out.")
    return real
