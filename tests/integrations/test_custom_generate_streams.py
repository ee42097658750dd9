"""Streamers, inputs of models, threads and random settings through `custom_generate`, against transformers' own generate."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from pdkernels.integrations.transformers import generate  # noqa: E402
from pdkernels.integrations.transformers._cache_names import cache_argument, cache_in  # noqa: E402
from tests.support.custom_generate import (  # noqa: E402
    BASE,
    FIVE,
    NEW,
    REFUSALS,
    SIZES,
    V,
    an_end,
    model_of,
    ours,
    prompts,
    randomised,
    theirs,
)
from tests.support.transformers_names import CACHE  # noqa: E402


class Letters:
    """The least that a TextStreamer asks of a tokenizer."""

    def decode(self, ids: Any, **options: Any) -> str:
        said = "".join(chr(48 + int(token)) for token in ids)
        return said.replace("L", "").replace("A", " ") if options.get("skip_special_tokens") else said


class Written(transformers.TextStreamer):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__(Letters(), **options)
        self.text, self.ends = "", 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.ends += stream_end


@pytest.mark.covering
@pytest.mark.parametrize("skip_prompt", [True, False])
@pytest.mark.parametrize("argument", ["streamer", "token_streamer"])
@pytest.mark.parametrize("method", [None, "autoregressive", "jacobi"])
def test_a_text_streamer_says_what_it_says_of_transformers(
    method: str | None, argument: str, skip_prompt: bool
) -> None:
    for options in ({}, {"eos_token_id": an_end()}, {"skip_special_tokens": True}):
        decoding = {"skip_special_tokens": True} if "skip_special_tokens" in options else {}
        more = {} if decoding else options
        expected, said = (Written(skip_prompt=skip_prompt, **decoding) for _ in range(2))
        tokens = theirs(streamer=expected, **more)
        assert torch.equal(ours(method=method, **{argument: said}, **more), tokens)
        assert said.text == expected.text and said.text and said.ends == expected.ends == 1


def test_streamers_for_several_prompts_are_refused() -> None:
    class Counts(transformers.generation.BaseStreamer):  # type: ignore[misc]
        ended = 0

        def put(self, value: torch.Tensor) -> None: ...

        def end(self) -> None:
            self.ended += 1

    for argument in ("streamer", "token_streamer"):
        heard = Counts()
        with pytest.raises(ValueError, match="a streamer takes one prompt, got 2"):
            ours(prompts(2), **{argument: heard})
        assert heard.ended == 1
    with pytest.raises(ValueError, match="token_streamer must be None beside a streamer"):
        ours(streamer=Counts(), token_streamer=Counts())


def listened(model: Any, **options: Any) -> tuple[str, list[BaseException]]:
    """What a TextIteratorStreamer says of a generation in a thread, and the errors there. Its timeout ends a hang."""
    streamer, errors = transformers.TextIteratorStreamer(Letters(), skip_prompt=True, timeout=20.0), []

    def work() -> None:
        try:
            model.generate(prompts(), streamer=streamer, **(BASE | options))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text, errors


def test_a_text_iterator_never_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Llama")
    expected = listened(model)
    assert expected[0] and listened(model, custom_generate=generate) == expected
    text, errors = listened(model, custom_generate=generate, guidance_scale=1.5)  # refused
    assert text == "" and isinstance(errors[0], NotImplementedError)
    text, errors = listened(model, custom_generate=generate, method="jacoby")
    assert text == "" and isinstance(errors[0], ValueError)

    # Half-way: the sixth forward of the model fails.
    other, calls = randomised(type(model)(model.config)), 0

    def break_(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("the sixth")

    ours(method="autoregressive")  # what is done once for a model has no part in the count
    other.generate(prompts(), custom_generate=generate, **BASE)
    hook = other.model.layers[1].mlp.register_forward_pre_hook(break_)
    text, errors = listened(other, custom_generate=generate, method="autoregressive")
    hook.remove()
    assert [str(error) for error in errors] == ["the sixth"] and 0 < len(text) < NEW
    assert expected[0].startswith(text)


def test_an_error_of_the_streamer_reaches_the_caller() -> None:
    class Fails(Written):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ours(token_streamer=Fails(skip_prompt=True))


# ---------------------------------------------------------------------------------------------------- inputs of models


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inputs_embeds", torch.zeros(1, 9, 32)),
        ("position_ids", torch.arange(9)[None] + 3),
        (CACHE, "empty"),
        (CACHE, "with tokens"),
        ("labels", prompts()),
        ("output_router_logits", True),
    ],
)
def test_inputs_that_a_decoder_does_not_pass_on_are_refused(name: str, value: Any) -> None:
    ids, model = prompts(), model_of("Llama")
    if name == CACHE:
        cache = transformers.DynamicCache(config=model.config)
        if value == "with tokens":
            with torch.no_grad():
                model(ids[:, :4], **{CACHE: cache})
        value = cache
    with pytest.raises(REFUSALS, match=name):
        ours(ids, **{name: value})


def test_a_cache_has_the_name_of_its_model() -> None:
    def of_remote_code(input_ids: Any, past_key_values: Any = None) -> None: ...

    assert cache_argument(of_remote_code) == "past_key_values"
    assert cache_argument(model_of("Llama").forward) == CACHE
    states = "cache" if CACHE == "cache" else "cache_params"
    assert cache_argument(transformers.MambaForCausalLM.forward) == states
    made = model_of("Llama")(prompts(), use_cache=True)
    assert cache_in(made) == (CACHE, made[CACHE])
    assert cache_in({"cache": None, "cache_params": 3}) == ("cache_params", 3) and cache_in({}) == ("cache", None)


@pytest.mark.skipif(not FIVE, reason="transformers 4 gives every new token the last of the given positions")
def test_inputs_that_say_what_is_true_anyway_go_on() -> None:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, "logits_to_keep": 1, "use_cache": True}
    ids = prompts(2).masked_fill(mask == 0, 0)
    assert torch.equal(ours(ids, **inputs), theirs(ids, **inputs))
    inputs["attention_mask"] = mask.bool()
    assert torch.equal(ours(ids, **inputs), theirs(ids, **inputs))


def test_token_types_of_a_text_model_are_refused() -> None:
    """GPT-2 adds an embedding for each."""
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=None
    )
    model, ids = randomised(transformers.GPT2LMHeadModel(config)), prompts()
    with pytest.raises(REFUSALS):
        model.generate(ids, custom_generate=generate, token_type_ids=torch.zeros_like(ids), **BASE)


def encoder_decoder() -> Any:
    config = transformers.BartConfig(
        vocab_size=V, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    return randomised(transformers.BartForConditionalGeneration(config))


def test_encoder_decoder_models_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="model must be a decoder, got BartForConditionalGeneration"):
        encoder_decoder().generate(prompts(), custom_generate=generate, **BASE)


def vision(family: str) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """A small random model, a prompt with a picture, and the picture."""
    torch.manual_seed(0)
    if family == "llava":
        config = transformers.LlavaConfig(
            vision_config={"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32,
                           "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
                           "projection_dim": 16},
            text_config={"model_type": "llama", **SIZES, "eos_token_id": None},
            image_token_index=60, image_token_id=60,
        )  # fmt: skip
        model = transformers.LlavaForConditionalGeneration(config)
        pictures: dict[str, Any] = {"pixel_values": torch.randn(1, 3, 8, 8)}
    else:
        config = transformers.Qwen2_5_VLConfig(
            text_config={**SIZES, "eos_token_id": None, "bos_token_id": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                         "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
            vision_config={"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 4,
                           "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 16},
            image_token_id=60, video_token_id=59, vision_start_token_id=58, vision_end_token_id=57,
        )  # fmt: skip
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        pictures = {"pixel_values": torch.randn(16, 3 * 2 * 16), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    ids = torch.tensor([[3, 4, 58, 60, 60, 60, 60, 57, 9, 8]])
    if family != "llava":
        pictures["mm_token_type_ids"] = (ids == 60).long()
    return randomised(model), ids, pictures


@pytest.mark.skipif(not FIVE, reason="in transformers 4 the language model of these is elsewhere")
@pytest.mark.parametrize("family", ["llava", "qwen2.5-vl"])
def test_pictures_are_refused_and_texts_go_on(family: str) -> None:
    model, ids, pictures = vision(family)
    settings = BASE | {"eos_token_id": None}
    model.generate(ids, **pictures, **settings)  # transformers takes them
    with pytest.raises(NotImplementedError, match="pixel_values must be None"):
        model.generate(ids, custom_generate=generate, **pictures, **settings)
    text, mask = prompts(2).clamp(max=50), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    inputs: dict[str, Any] = {"attention_mask": mask}
    if family != "llava":
        inputs["mm_token_type_ids"] = torch.zeros_like(text)
    expected = model.generate(text, **inputs, **settings)
    assert torch.equal(model.generate(text, custom_generate=generate, **inputs, **settings), expected)


# -------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("calls", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_threads_share_a_model_that_never_changes(calls: int) -> None:
    """Four decode with our methods while a fifth decodes with transformers and watches the model's config."""
    model = model_of("Qwen3")
    model.set_attn_implementation("sdpa")
    rows = [prompts(1, tokens) for tokens in range(4, 14)]
    expected = [model.generate(ids, **BASE) for ids in rows]
    done, seen = threading.Event(), {model.config._attn_implementation}

    def watch() -> int:
        wrong = 0
        while not done.is_set():
            for ids, tokens in zip(rows, expected):
                seen.add(model.config._attn_implementation)
                wrong += not torch.equal(model.generate(ids, **BASE), tokens)
        return wrong

    def decode(call: int) -> bool:
        ids = rows[call % len(rows)]
        method = (None, "jacobi", "autoregressive")[call % 3]
        said = model.generate(ids, custom_generate=generate, method=method, **BASE)
        seen.add(model.config._attn_implementation)
        return torch.equal(said, expected[call % len(rows)])

    with ThreadPoolExecutor(1) as watcher, ThreadPoolExecutor(4) as workers:
        watched = watcher.submit(watch)
        try:
            right = list(workers.map(decode, range(calls)))
        finally:
            done.set()
        assert all(right) and watched.result() == 0
    assert seen == {"sdpa"}


# ------------------------------------------------------------------------------------------------------ random settings

CHOICES: dict[str, list[Any]] = {
    "method": [None, "autoregressive", "jacobi", "jacobi_multiblock"],
    "method_options": [None, {"block_size": 3}, {"window": 4}, {"blok_size": 8}],
    "max_new_tokens": [1, 2, 7, 12],
    "max_length": [None, 15],
    "repetition_penalty": [1.0, 1.2, 0.9],
    "eos_token_id": [None, 7, [13, 21, 30], -1, [V + 4]],
    "pad_token_id": [None, 0, 7, 60],
    "temperature": [1.0, 0.3],
    "top_k": [50, 0, 3],
    "return_dict_in_generate": [True],
    "output_scores": [False, True],
    "min_new_tokens": [None, 0, 3],
    "no_repeat_ngram_size": [0, 2],
    "num_beams": [1, 2],
    "prompt_lookup_num_tokens": [None, 3],
    "use_cache": [True, False],
    "cache_implementation": [None, "dynamic", *["static"] * FIVE],
    "suppress_tokens": [None, [4]],
    "typical_p": [1.0, 0.5],
    "num_assistant_tokens": [20, 3],
    "disable_compile": [None, True],
    "renormalize_logits": [None, True],
    "max_time": [None, 100.0],
    "bos_token_id": [1, 2],
}


def drawn(data: Any) -> tuple[str, torch.Tensor, dict[str, Any]]:
    family = data.draw(st.sampled_from(["Llama", "Qwen3"]))
    rows, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    ids = prompts(rows, tokens)
    names = data.draw(st.lists(st.sampled_from(sorted(CHOICES)), max_size=5, unique=True))
    chosen = {name: data.draw(st.sampled_from(CHOICES[name])) for name in names}
    if data.draw(st.booleans()):
        padding = data.draw(st.lists(st.integers(0, tokens - 1), min_size=rows, max_size=rows))
        mask = (torch.arange(tokens) >= torch.tensor(padding)[:, None]).long()
        chosen["attention_mask"] = mask
        ids = ids.masked_fill(mask == 0, 0)
    return family, ids, chosen


def compare(data: Any) -> None:
    family, ids, chosen = drawn(data)
    plain = {name: value for name, value in chosen.items() if not name.startswith("method")}
    try:
        said = ours(ids, family, **chosen)
    except (NotImplementedError, ValueError, TypeError) as error:
        if not str(error).startswith("pdkernels."):
            with pytest.raises(type(error)):  # transformers' own, before it calls us
                theirs(ids, family, **plain)
        return
    plain.pop("prompt_lookup_num_tokens", None)  # which transformers has for single prompts
    expected = theirs(ids, family, **plain)
    if chosen.get("return_dict_in_generate"):
        said, expected = said.sequences, expected.sequences
    assert torch.equal(said, expected) and said.dtype == expected.dtype


def test_fields_that_are_none() -> None:
    """As `generate` reads them as arguments; a cache that is neither on nor off makes transformers' own loop write other tokens."""
    same = 0
    for field in sorted(
        name for name in vars(transformers.GenerationConfig()) if name[0] != "_" and name != "transformers_version"
    ):
        chosen = {"max_new_tokens": 3, "pad_token_id": 0} | {field: None}
        chosen |= {"max_length": 12} if field == "max_new_tokens" else {}
        if field == "use_cache":
            with pytest.raises(NotImplementedError, match="use_cache must be True, got NoneType"):
                ours(prompts(1), **chosen)
            continue
        try:
            expected = theirs(prompts(1), **chosen)
        except (TypeError, ValueError) as error:  # most versions refuse some of them
            with pytest.raises(type(error)):
                ours(prompts(1), **chosen)
        else:
            assert torch.equal(ours(prompts(1), **chosen), expected), field
            same += 1
    assert same > 50


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_settings_are_followed_or_refused(data: Any) -> None:
    compare(data)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_random_settings_are_followed_or_refused(data: Any) -> None:
    compare(data)
