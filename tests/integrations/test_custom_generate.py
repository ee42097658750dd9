"""`custom_generate`: every setting, argument and input of transformers is followed or refused by name, against its own generate."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from transformers import GenerationConfig, GenerationMixin  # noqa: E402

from pdkernels.decoding.methods import METHODS  # noqa: E402
from pdkernels.integrations.transformers import generate  # noqa: E402
from pdkernels.integrations.transformers._model import WrappedModel  # noqa: E402
from pdkernels.integrations.transformers._settings import ARGUMENTS, FIELDS, INPUTS, METADATA  # noqa: E402
from tests.support.transformers_names import VERSION  # noqa: E402

FIVE, LATER = VERSION >= (5, 0), VERSION >= (5, 20)  # and between 5.15 and 5.23
V, NEW = 61, 12
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
REFUSALS = (NotImplementedError, ValueError)


def randomised(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.3)
    return model.eval()


@cache
def model_of(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**SIZES, bos_token_id=1, eos_token_id=None, pad_token_id=None)
    return randomised(getattr(transformers, f"{family}ForCausalLM")(config))


def prompts(rows: int = 1, tokens: int = 9) -> torch.Tensor:
    return torch.randint(3, V, (rows, tokens), generator=torch.Generator().manual_seed(1))


BASE: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def theirs(ids: torch.Tensor | None = None, family: str = "Llama", **settings: Any) -> Any:
    return model_of(family).generate(prompts() if ids is None else ids, **(BASE | settings))


def ours(ids: torch.Tensor | None = None, family: str = "Llama", **settings: Any) -> Any:
    return theirs(ids, family, custom_generate=generate, **settings)


def an_end(step: int = 5) -> int:
    """A token that the model writes at this step, not before."""
    new = theirs()[0, 9:].tolist()
    return next(token for at, token in enumerate(new) if at >= step and token not in new[:at])


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


class Nothing(transformers.LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class Never(transformers.StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Parity(transformers.LogitsProcessor):  # type: ignore[misc]
    """Depends on the padded prefix: its length and its last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, input_ids.shape[1] % 2 :: 2] -= 3.0
        scores[torch.arange(len(scores)), input_ids[:, -1]] = -torch.inf
        return scores


class AfterSix(transformers.StoppingCriteria):  # type: ignore[misc]
    """Ends a text whose padded length is at least 15 with an even token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 2 == 0) & (input_ids.shape[1] >= 15)


PROCESSORS: list[Any] = [
    [Nothing()],
    [Parity()],
    [transformers.TemperatureLogitsWarper(2.0), Parity()],
    [transformers.RepetitionPenaltyLogitsProcessor(1.5)],
    [transformers.RepetitionPenaltyLogitsProcessor(1.5, **({"prompt_ignore_length": 9} if FIVE else {}))],
]


@pytest.mark.covering
@pytest.mark.parametrize("number", range(len(PROCESSORS)))
@pytest.mark.parametrize("method", [None, "autoregressive", "jacobi", "jacobi_multiblock"])
def test_processors_of_callers_are_applied_to_every_row(method: str | None, number: int) -> None:
    """Beside those that transformers makes, in its order, and with the padding of a batch."""
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, :4] = 0
    ids = prompts(3).masked_fill(mask == 0, 0)
    processors = transformers.LogitsProcessorList(PROCESSORS[number])
    more: dict[str, Any] = {"suppress_tokens": [7], "no_repeat_ngram_size": 3, "attention_mask": mask}
    for settings in (more, more | ({"repetition_penalty": 1.2} if FIVE and number < 3 else {})):
        expected = theirs(ids, logits_processor=processors, **settings)
        assert torch.equal(ours(ids, method=method, logits_processor=processors, **settings), expected)
    if number > 0:
        assert not torch.equal(expected, theirs(ids, **settings))


@pytest.mark.parametrize("method", [None, "jacobi_multiblock"])
def test_processors_of_settings_see_the_padding(method: str | None) -> None:
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, :4] = 0
    ids = prompts(3).masked_fill(mask == 0, 0)
    settings: dict[str, Any] = {
        "attention_mask": mask,
        "eos_token_id": an_end(),
        "min_length": 14,
        "forced_eos_token_id": 5,
    }
    settings |= {"bad_words_ids": [[5, 6], [9]], "sequence_bias": [[[4], 2.0], [[3, 8], 5.0]]}
    settings |= {"exponential_decay_length_penalty": (2, 1.5), "begin_suppress_tokens": [11]}
    if not LATER:  # where the penalty of an end token that is not allowed yet is NaN
        with pytest.raises(ValueError, match="leave no token to choose"):
            ours(ids, method=method, **settings)
        del settings["min_length"]
    assert torch.equal(ours(ids, method=method, **settings), theirs(ids, **settings))


def test_allowed_tokens_of_each_text() -> None:
    """`prefix_allowed_tokens_fn` is asked with the number of the text."""
    settings = {"prefix_allowed_tokens_fn": lambda batch, ids: [3 + batch, 10 + len(ids) % 4, 20]}
    for method in (None, "jacobi_multiblock"):
        assert torch.equal(ours(prompts(3), method=method, **settings), theirs(prompts(3), **settings))


def test_allowed_tokens_of_copies_and_of_texts_that_have_none_left() -> None:
    """From 5.24 on, copies of a prompt have one number. Allowed tokens that others dropped come back, but not in early versions."""
    copies = {"do_sample": True, "num_return_sequences": 2, "prefix_allowed_tokens_fn": lambda batch, ids: [3 + batch]}
    assert torch.equal(ours(prompts(2), **copies), theirs(prompts(2), **copies))
    dropped = {"bad_words_ids": [[5], [6]], "prefix_allowed_tokens_fn": lambda batch, ids: torch.tensor([6, 5])}
    if VERSION >= (5, 23):
        assert torch.equal(ours(prompts(2), **dropped), theirs(prompts(2), **dropped))
    with pytest.raises(ValueError, match="empty list"):
        ours(prefix_allowed_tokens_fn=lambda batch, ids: [])


@pytest.mark.parametrize("method", [None, "autoregressive", "jacobi_multiblock"])
def test_stopping_criteria_of_callers(method: str | None) -> None:
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, :4] = 0
    ids = prompts(3).masked_fill(mask == 0, 0)
    for made in ([Never()], [AfterSix()], [transformers.MaxLengthCriteria(12)], [AfterSix(), Never()]):
        criteria = transformers.StoppingCriteriaList(made)
        # Without an end token transformers goes on with texts that a criterion has ended, until it has ended all.
        settings = {"attention_mask": mask, "stopping_criteria": criteria, "eos_token_id": V - 1}
        assert torch.equal(ours(ids, method=method, **settings), theirs(ids, **settings))


def test_time_is_up() -> None:
    assert ours(max_time=1e-9).shape[1] < 9 + NEW
    assert torch.equal(ours(max_time=100.0), theirs())


@pytest.mark.parametrize("drawn", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 5}])
def test_scores_and_logits_are_those_of_the_texts(drawn: dict[str, Any]) -> None:
    """Recomputed with transformers from what was written; of texts that have ended they are 0."""
    ids, end = prompts(3), an_end()
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    settings = {"eos_token_id": end, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, **drawn}
    said = ours(ids, **asked, **settings)
    new = said.sequences[:, 9:]
    assert len(said.scores) == len(said.logits) == new.shape[1]
    for place in range(new.shape[1]):
        step = theirs(said.sequences[:, : 9 + place], **asked, **settings | {"max_new_tokens": 1})
        for row in range(3):
            if end in new[row, :place].tolist():
                assert not said.logits[place][row].any() and not said.scores[place][row].any()
                continue
            torch.testing.assert_close(said.logits[place][row], step.logits[0][row], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(said.scores[place][row], step.scores[0][row], atol=1e-4, rtol=1e-4)
            assert said.scores[place][row, new[row, place]] > -torch.inf


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


# ---------------------------------------------------------------------------------------------------- followed settings


@pytest.mark.covering
@pytest.mark.parametrize("penalty", [1.3, 0.8, 3.0])
@pytest.mark.parametrize("method", [None, "autoregressive", "jacobi", "jacobi_multiblock"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_the_repetition_penalty_counts_the_prompt(family: str, method: str | None, penalty: float) -> None:
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, : 4 * LATER] = 0  # earlier versions also make the padding less likely, which is refused
    ids = prompts(3).masked_fill(mask == 0, 0)
    settings: dict[str, Any] = {"repetition_penalty": penalty, "attention_mask": mask}
    expected = theirs(ids, family, **settings)
    assert torch.equal(ours(ids, family, method=method, **settings), expected)
    assert not torch.equal(expected, theirs(ids, family, attention_mask=mask))


@pytest.mark.skipif(LATER, reason="this transformers leaves the padding out")
def test_a_penalty_of_padding_is_refused() -> None:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    with pytest.raises(ValueError, match="repetition_penalty must be 1 for padded prompts"):
        ours(prompts(2), repetition_penalty=1.3, attention_mask=mask)


ENDS: dict[str, Any] = {
    "none": lambda: None,
    "one": an_end,
    "a list": lambda: [an_end(), an_end(2)],
    "outside the vocabulary": lambda: [V + 5, an_end()],
    "negative": lambda: -1,
    "empty": lambda: [],
}


@pytest.mark.covering
@pytest.mark.parametrize("pad", [None, 0, "end", 77])
@pytest.mark.parametrize("ends", ENDS)
def test_ends_and_padding(ends: str, pad: Any) -> None:
    """Left padding, texts that end early, end tokens inside the prompt and as padding: the same tensor."""
    end = ENDS[ends]()
    first = end[0] if isinstance(end, list) and end else end
    if pad == "end":
        pad = first if isinstance(first, int) and 0 <= first < V else 0
    ids = prompts(3)
    ids[2] = prompts(1)[0]  # this one ends early
    ids[1, 3] = an_end()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    settings: dict[str, Any] = {"eos_token_id": end, "pad_token_id": pad, "attention_mask": mask}
    try:
        expected = theirs(ids, **settings)
    except (IndexError, RuntimeError, TypeError, ValueError):
        pytest.skip("transformers refuses it")
    said = ours(ids, **settings)
    assert torch.equal(said, expected) and said.dtype == expected.dtype


def test_padding_without_a_mask() -> None:
    """transformers infers the mask where the pad token is not an end token."""
    ids = prompts(2)
    ids[0, :3] = 0
    for settings in ({}, {"eos_token_id": 0}, {"eos_token_id": 7}):
        assert torch.equal(ours(ids, **settings), theirs(ids, **settings))
    ids[1, -2:] = 0
    with pytest.raises(ValueError, match="attention_mask must hide only padding on the left"):
        ours(ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_result_has_the_dtype_of_transformers(dtype: torch.dtype) -> None:
    ids = prompts(2).to(dtype)
    said, expected = ours(ids), theirs(ids)
    assert said.dtype == expected.dtype and torch.equal(said, expected)


@pytest.mark.parametrize(
    "lengths", [{}, {"max_length": 14}, {"max_new_tokens": 1}, {"max_length": 10, "max_new_tokens": 4}]
)
def test_lengths(lengths: dict[str, Any]) -> None:
    settings = {"do_sample": False, "pad_token_id": 0, **lengths}
    model, ids = model_of("Llama"), prompts(2)
    assert torch.equal(model.generate(ids, custom_generate=generate, **settings), model.generate(ids, **settings))


def test_no_prompt_is_the_first_token() -> None:
    model = model_of("Llama")
    expected = model.generate(bos_token_id=1, **BASE)
    assert torch.equal(model.generate(bos_token_id=1, custom_generate=generate, **BASE), expected)
    with pytest.raises(ValueError, match="input_ids must hold at least one token"):
        ours(torch.zeros(1, 0, dtype=torch.int64))


@pytest.mark.parametrize("mask", [[1] * 5 + [0] * 4, [1, 0] * 4 + [1], [0] * 9, [2] * 9, [0, 2] + [1] * 7])
def test_masks_other_than_left_padding_are_refused(mask: list[int]) -> None:
    with pytest.raises(ValueError, match="attention_mask must hide only padding on the left"):
        ours(attention_mask=torch.tensor([mask]))


def test_several_draws_of_a_prompt() -> None:
    torch.manual_seed(1)
    said = ours(prompts(2), do_sample=True, num_return_sequences=3)
    assert said.shape == (6, 9 + NEW) and torch.equal(said[:, :9], prompts(2).repeat_interleave(3, 0))
    assert len({tuple(row) for row in said.tolist()}) == 6
    seeded = [ours(do_sample=True, method_options={"seed": 5}) for _ in range(2)]
    assert torch.equal(*seeded)


def test_draws_of_a_prompt_share_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a batch in which the prompt is there several times, from one forward over it."""
    options: dict[str, Any] = {"do_sample": True, "method_options": {"seed": 5}, "repetition_penalty": 1.2}
    expected = ours(prompts(2).repeat_interleave(3, 0), **options)
    widths, hidden = list[int](), WrappedModel._hidden

    def noted(self: Any, tokens: torch.Tensor, *given: Any) -> Any:
        widths.append(len(tokens))
        return hidden(self, tokens, *given)

    monkeypatch.setattr(WrappedModel, "_hidden", noted)
    assert torch.equal(ours(prompts(2), num_return_sequences=3, **options), expected)
    assert widths[0] == 2 and widths[1] == 6


LAWS: list[dict[str, Any]] = [
    {"top_k": 0, "temperature": 0.7},
    {"temperature": 2.0},  # with top_k=50, of 61 tokens
    {"temperature": 2.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 3.0, "top_k": 0, "min_p": 0.2, "repetition_penalty": 1.3},
    {"temperature": 3.0, "top_k": 30, "typical_p": 0.6},
    pytest.param(
        {"temperature": 2.0, "top_k": 0, "epsilon_cutoff": 0.02, "suppress_tokens": [5]}, marks=pytest.mark.slow
    ),
    pytest.param({"temperature": 2.0, "top_k": 0, "eta_cutoff": 0.05}, marks=pytest.mark.slow),
]


@pytest.mark.covering
@pytest.mark.parametrize("method", [None, "autoregressive"])
@pytest.mark.parametrize("drawn", LAWS, ids=str)
def test_the_law_of_draws(drawn: dict[str, Any], method: str | None) -> None:
    """The first two tokens' frequencies against the distributions after transformers' own processors."""
    ids, draws = prompts(), 4000
    said = ours(ids, do_sample=True, max_new_tokens=2, num_return_sequences=draws, method=method, **drawn)
    common = said[:, -2].mode().values
    after = torch.cat([ids, common[None, None]], -1)
    for text, tokens in ((ids, said[:, -2]), (after, said[said[:, -2] == common, -1])):
        scores = theirs(
            text, do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True, **drawn
        )
        law = scores.scores[0][0].double().softmax(-1)
        seen = torch.bincount(tokens, minlength=V).double() / len(tokens)
        assert len(tokens) > 100 and (seen[law == 0] == 0).all()
        assert (seen - law).abs().sum() < 3 * (law * (1 - law) / len(tokens)).sqrt().sum()
    assert (law == 0).any() == (drawn.get("top_k") != 0 or len(drawn) > 2)


# ----------------------------------------------------------------------------------------------------- methods, options


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
