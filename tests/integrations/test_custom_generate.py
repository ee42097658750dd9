"""`custom_generate`: every setting, argument and input of transformers is followed or refused by name, against its own generate."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from transformers import GenerationConfig, GenerationMixin  # noqa: E402

from pdkernels.decoding.methods import METHODS  # noqa: E402
from pdkernels.integrations.transformers import generate  # noqa: E402
from pdkernels.integrations.transformers._settings import ARGUMENTS, FIELDS, INPUTS, METADATA  # noqa: E402
from tests.support.custom_generate import BASE, FIVE, NEW, REFUSALS, an_end, model_of, ours, prompts, theirs  # noqa: E402

# A value of every field that is not its default.
VALUES: dict[str, Any] = {
    "max_length": 17,
    "max_new_tokens": 5,
    "min_length": 18,
    "min_new_tokens": 4,
    "early_stopping": True,
    "max_time": 10.0,
    "stop_strings": ["a"],
    "do_sample": True,
    "num_beams": 2,
    "num_beam_groups": 2,
    "use_mtp": True,
    "penalty_alpha": 0.5,
    "low_memory": True,
    "dola_layers": "low",
    "diversity_penalty": 0.5,
    "constraints": [1],
    "force_words_ids": [[3]],
    "use_cache": False,
    "cache_implementation": "static" if FIVE else "offloaded",
    "cache_config": {"nbits": 4},
    "max_cache_len": 50,
    "return_legacy_cache": True,
    "prefill_chunk_size": 4,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.1,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "repetition_penalty": 1.5,
    "encoder_repetition_penalty": 1.5,
    "length_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[5]],
    "renormalize_logits": True,
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 4,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.5),
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "sequence_bias": [[[5], 3.0]],
    "token_healing": True,
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.5},
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
    "pad_token_id": 7,
    "bos_token_id": 2,
    "eos_token_id": [7, 8],
    "decoder_start_token_id": 3,
    "is_assistant": True,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "max_matching_ngram_size": 3,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "speculation_type": "dflash",
    "compile_config": {"mode": "default"},
    "disable_compile": True,
    "continuous_batching_config": {"block_size": 16},
}
FILTERS = ("top_k", "top_p", "min_p", "typical_p")
OTHERS = ("top_h", "epsilon_cutoff", "eta_cutoff")
# What transformers refuses itself, before it calls us.
REFUSED_BEFORE = {"num_return_sequences": "num_return_sequences"}


def fields() -> set[str]:
    return set(vars(GenerationConfig())) - METADATA


def test_every_field_and_argument_is_decided() -> None:
    assert fields() <= set(FIELDS), "fields of this transformers without a rule"
    assert set(VALUES) == set(FIELDS)
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert arguments <= set(ARGUMENTS)
    assert all(rule.words for rule in [*FIELDS.values(), *ARGUMENTS.values(), *INPUTS.values()])


def fitting(field: str) -> dict[str, Any]:
    value = VALUES[field]
    if field == "compile_config":
        value = transformers.CompileConfig(mode="default")
    if field == "watermarking_config":
        value = transformers.WatermarkingConfig(bias=2.5)
    settings: dict[str, Any] = {"eos_token_id": an_end(), field: value}
    if field == "max_length":
        settings["max_new_tokens"] = None
    if field.startswith("output_"):
        settings["return_dict_in_generate"] = True
    return settings


@pytest.mark.covering
@pytest.mark.parametrize("method", [None, "autoregressive"])
@pytest.mark.parametrize("field", sorted(fields()))
def test_a_field_is_followed_or_refused_by_name(field: str, method: str | None) -> None:
    """Greedy: the same tokens as without us, or its name."""
    settings, rule = fitting(field), FIELDS[field]
    before = REFUSED_BEFORE.get(field)
    if field == "prompt_lookup_num_tokens" and method is not None:  # another method than the one that it is about
        before = field
    if (rule.kind == "refused" and not rule.draws) or before:
        with pytest.raises(REFUSALS, match=before or rf"^pdkernels\.generate: {field} must "):
            ours(method=method, **settings)
        return
    torch.manual_seed(1)  # draws that end no text
    said = ours(method=method, **settings)
    if field == "do_sample":
        assert said.shape == (1, 9 + NEW)
    elif settings.get("return_dict_in_generate"):
        expected = theirs(**settings)
        assert torch.equal(said.sequences, expected.sequences)
        for name in ("scores", "logits"):
            assert (name in said) == (name in expected)
            for ours_, theirs_ in zip(said.get(name) or (), expected.get(name) or (), strict=True):
                torch.testing.assert_close(ours_, theirs_, atol=1e-4, rtol=1e-4)
    else:
        assert torch.equal(said, theirs(**settings))


@pytest.mark.parametrize("field", sorted(fields() & {*FILTERS}))
def test_a_filter_of_draws_is_refused_by_name(field: str) -> None:
    """The filters that causal methods have, by a method that has none."""
    settings: dict[str, Any] = {"do_sample": True, "top_k": 0, field: VALUES[field], "method": "dream"}
    if field in METHODS["dream"].options:
        return
    with pytest.raises(REFUSALS, match=rf"^pdkernels\.generate: {field} must be off"):
        ours(**settings)


@pytest.mark.parametrize("field", ["bad_words_ids", "no_repeat_ngram_size", "repetition_penalty", "use_cache"])
def test_fields_of_a_config_count_as_well(field: str) -> None:
    config = GenerationConfig(**BASE, **fitting(field))
    model, ids = model_of("Llama"), prompts()
    if FIELDS[field].kind == "refused":
        with pytest.raises(NotImplementedError, match=field):
            model.generate(ids, generation_config=config, custom_generate=generate)
    else:
        expected = model.generate(ids, generation_config=config)
        assert torch.equal(model.generate(ids, generation_config=config, custom_generate=generate), expected)
        assert not torch.equal(expected, theirs())


def test_fields_of_a_newer_transformers_are_refused() -> None:
    class Newer(GenerationConfig):  # type: ignore[misc]
        def __init__(self, **kwargs: Any) -> None:
            self.dream_depth = kwargs.pop("dream_depth", None)
            super().__init__(**kwargs)

    settings = {"generation_config": Newer(**BASE), "custom_generate": generate}
    assert torch.equal(model_of("Llama").generate(prompts(), **settings), theirs())
    with pytest.raises(NotImplementedError, match="dream_depth must be off, got 3"):
        model_of("Llama").generate(prompts(), custom_generate=generate, generation_config=Newer(dream_depth=3, **BASE))


@pytest.mark.parametrize(
    ("argument", "value"),
    [("synced_gpus", True), ("negative_prompt_ids", prompts()), ("negative_prompt_attention_mask", torch.ones(1, 9))],
)
def test_an_argument_that_is_dropped_on_the_way_is_refused_by_name(argument: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=rf"^pdkernels\.generate: {argument} must be"):
        ours(**{argument: value})


@pytest.mark.parametrize("argument", ["tokenizer", "assistant_tokenizer", "trust_remote_code"])
def test_an_argument_without_a_use_changes_nothing(argument: str) -> None:
    assert torch.equal(ours(**{argument: object() if "token" in argument else True}), theirs())


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"method": "jacoby"}, ValueError, "method must name a decoding method, got 'jacoby'. Did you mean 'jacobi'"),
        ({"method": 3}, TypeError, "method must be a str"),
        ({"method_options": {"blok_size": 8}}, TypeError, "'blok_size'. Did you mean 'block_size'"),
        ({"method_options": {"max_new_tokens": 8}}, TypeError, "'max_new_tokens'"),
        ({"method_options": {"temperature": 0.5}}, ValueError, "method_options must not hold 'temperature'"),
        ({"method_options": [("block_size", 8)]}, TypeError, "method_options must be a dict"),
        ({"method": "llada"}, (TypeError, ValueError), "got 'llada', which requires bidirectional"),
        ({"metod": "jacobi"}, ValueError, "metod"),
    ],
)
def test_mistyped_methods_and_options(settings: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        ours(**settings)


def test_the_default_looks_drafts_up() -> None:
    """An ordinary model was not trained to jump ahead: without a match a forward has one row, as in transformers."""
    said = ours(return_dict_in_generate=True)
    named = ours(return_dict_in_generate=True, method="jacobi", method_options={"draft": "lookup"})
    assert said.stats.forwards == named.stats.forwards
    assert torch.equal(said.sequences, theirs()) and torch.equal(named.sequences, theirs())


def test_calls_without_transformers_are_refused() -> None:
    with pytest.raises(TypeError, match="generation_config must be a GenerationConfig"):
        generate(model_of("Llama"), prompts())
