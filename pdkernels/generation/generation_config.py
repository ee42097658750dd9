"""What a checkpoint's generation_config.json asks of every text, as transformers' `generate` follows it.

Filters and stops are part of how its authors decode a model, greedily too. Draws, lengths and the number of texts are
the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkernels._validation import check, message, plain
from pdkernels.generation.params import SETTINGS, SamplingParams, tokens_of

FILE = "generation_config.json"
OF_CALLERS = ("max_new_tokens", "end_tokens")
"""Stops that are not taken from the file here: a length is chosen, and the model has its end tokens."""
FOLLOWED = {
    setting.transformers: setting.name
    for setting in SETTINGS.values()
    if setting.transformers and setting.effect in ("filter", "stop") and setting.name not in OF_CALLERS
} | {"sequence_bias": "logit_bias"}
"""Fields, and the settings that they are."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "is_assistant": (),
}
"""Fields that change greedy tokens and are not followed, with the values besides null and false that change nothing."""
_FORGET = "To decode without it, delete it from the file, or from model.generation_config."


def completed(op: str, params: SamplingParams, model: Any) -> SamplingParams:
    """`params` with the filters and stops of the model's `generation_config` where they are silent.

    Raises:
        ValueError, TypeError: a field that is no such setting.
        NotImplementedError: a field that would change tokens and is not followed.

    >>> import pdkernels as pd
    >>> model = pd.models.load("tiny-code")
    >>> model.generation_config = {"repetition_penalty": 1.05, "temperature": 0.7, "num_beams": 1}
    >>> completed("generate", SamplingParams(top_k=2), model).asked
    {'top_k': 2, 'repetition_penalty': 1.05}
    >>> completed("generate", SamplingParams(repetition_penalty=1.0), model).asked
    {}
    """
    config = fields_of(model)
    if not config:
        return params
    op = f"{op}: {FILE}"
    for field, off in REFUSED.items():
        value = config.get(field)
        if value is not None and value is not False and value not in off:
            raise NotImplementedError(message(op, field, "be off", _shown(value), _FORGET))
    settings: dict[str, Any] = {}
    size = model.config.vocab_size
    for field, name in FOLLOWED.items():
        value = config.get(field)
        if value is None or name in params.explicit:
            continue
        setting = SETTINGS[name]
        value = setting.check(op, field, plain(_biases(op, value) if field == "sequence_bias" else value))
        for token in tokens_of(value, setting.kind):
            check(token < size, op, field, f"hold ids in 0 .. {size - 1}", token)
        settings[name] = value
    if "bad_words" in settings:  # of which transformers leaves out end tokens
        ends = model.end_tokens if params.end_tokens is None else params.end_tokens
        settings["bad_words"] = [ids for ids in settings["bad_words"] if ids not in [(end,) for end in ends]]
    if "min_new_tokens" in settings:  # of more than there will be, all are without end tokens
        settings["min_new_tokens"] = min(settings["min_new_tokens"], params.max_new_tokens)
    return params.replace(op, **settings)


def fields_of(model: Any) -> Mapping[str, Any]:
    """Those of the model's `generation_config`: a mapping, or an object of transformers with attributes.

    >>> from types import SimpleNamespace
    >>> fields_of(SimpleNamespace(generation_config=SimpleNamespace(max_time=2.0, min_length=None)))
    {'max_time': 2.0}
    >>> fields_of(SimpleNamespace(generation_config="greedy"))  # a name of a user's own
    {}
    """
    config = getattr(model, "generation_config", None) or {}
    if isinstance(config, Mapping):
        return config
    return {name: value for name, value in getattr(config, "__dict__", {}).items() if value is not None}


def remedy_of(model: Any, name: str) -> str:
    """What to do about a setting that is not followed and that the model's `generation_config` may have; "" if it has
    none."""
    config = fields_of(model)
    if not any(config.get(field) is not None for field, setting in FOLLOWED.items() if setting == name):
        return ""
    return f"If {FILE} asks for it, pass {name}={SETTINGS[name].default!r}, or delete it from the file."


def _biases(op: str, value: Any) -> dict[int, Any]:
    """Biases of single tokens. A file has pairs of a list and a number, a `GenerationConfig` a dict of tuples."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    lists = (list, tuple)
    single = isinstance(pairs, lists) and all(
        isinstance(pair, lists) and len(pair) == 2 and isinstance(pair[0], lists) and len(pair[0]) == 1
        for pair in pairs
    )
    if not single:
        raise NotImplementedError(message(op, "sequence_bias", "be of single tokens", _shown(value), _FORGET))
    return {plain(ids[0]): bias for ids, bias in pairs}


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
