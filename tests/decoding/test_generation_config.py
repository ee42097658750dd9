"""The generation_config.json of a folder in every door, against transformers' own greedy generation from that folder."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.batch.ray import generate_files
from pdkernels.decoding import SamplingParams, generate
from pdkernels.generation.generation_config import FOLLOWED, OF_CALLERS, REFUSED
from pdkernels.generation.params import SETTINGS

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from pdkernels.integrations.transformers import from_transformers, wrap  # noqa: E402
from pdkernels.integrations.transformers import generate as custom  # noqa: E402

V, NEW = 23, 16
PROMPT = [3, 5, 7, 3, 5]
ENDS = [2, 11, 19]
FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "suppress_tokens": {"suppress_tokens": [1, 4, 6, 8, 9, 10, 15]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 17))},
    "bad_words_ids": {"bad_words_ids": [[6], [8, 9], [5, 1], [12, 12], [2]]},
    "min_new_tokens": {"min_new_tokens": 9},
    "more than there will be": {"min_new_tokens": 99},
    "sequence_bias": {"sequence_bias": [[[4], 2.5], [[17], 3.0], [[12], -4.0]]},
    "neutral": {"repetition_penalty": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": []},
    "ends": {"eos_token_id": [12, 14]},
    "no sampling": {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "renormalize_logits": True},
    "several": {
        "repetition_penalty": 1.3,
        "suppress_tokens": [4, 6],
        "min_new_tokens": 5,
        "begin_suppress_tokens": [14],
    },
}
VALUES: dict[str, Any] = {
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": [4, 1.5],
    "watermarking_config": {"greenlist_ratio": 0.25},
    "token_healing": True,
    "dola_layers": "high",
    "constraints": [1],
    "force_words_ids": [[3]],
    "is_assistant": True,
    "guidance_scale": 1.5,
}
"""Of refused fields; 3 of the others."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5, eos_token_id=ENDS
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def with_fields(folder: Path, fields: dict[str, Any]) -> str:
    values = {"eos_token_id": ENDS, "pad_token_id": 0} | fields
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize("name", FIELDS)
def test_every_door_has_the_tokens_of_transformers(name: str, published: Path) -> None:
    folder = with_fields(published, FIELDS[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = {"max_new_tokens": NEW, "do_sample": False}
    expected = theirs.generate(torch.tensor([PROMPT]), **asked)[0, len(PROMPT) :].tolist()
    model = pd.models.load(folder)
    for mine in (
        model,
        wrap(theirs),
        from_transformers(theirs),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        for method in ("autoregressive", "jacobi"):
            assert generate(mine, PROMPT, method, max_new_tokens=NEW).tokens.tolist() == expected, (type(mine), method)
    assert generate(model, PROMPT, params=SamplingParams(max_new_tokens=NEW)).tokens.tolist() == expected
    with pd.Engine(model, max_new_tokens=NEW) as engine:
        assert engine.submit(PROMPT, "jacobi", max_new_tokens=NEW).result().tokens.tolist() == expected
    ours = theirs.generate(torch.tensor([PROMPT]), custom_generate=custom, **asked)
    assert ours[0, len(PROMPT) :].tolist() == expected


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_followed_is_refused_by_name(field: str, published: Path) -> None:
    value = VALUES.get(field, 3)
    model = pd.models.load(with_fields(published, {field: value}))
    fault = rf"generation_config\.json: {field} must be off, got .+delete it from the file, or from model\.generation_config\."
    with pytest.raises(NotImplementedError, match=fault):
        generate(model, PROMPT, max_new_tokens=2)
    with pd.Engine(model) as engine, pytest.raises(NotImplementedError, match=rf"Engine\.submit: {fault}"):
        engine.submit(PROMPT, max_new_tokens=2)
    del model.generation_config[field]
    plain = pd.models.load(with_fields(published, {}))
    expected = generate(plain, PROMPT, max_new_tokens=4).tokens
    assert torch.equal(generate(model, PROMPT, max_new_tokens=4).tokens, expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be finite and above 0, got 0"),
        ({"repetition_penalty": "high"}, "repetition_penalty must be a number, got str"),
        ({"suppress_tokens": [-1]}, "suppress_tokens must hold ids from 0 on, got -1"),
        ({"begin_suppress_tokens": [V]}, "begin_suppress_tokens must hold ids in 0 .. 22, got 23"),
        ({"bad_words_ids": [[]]}, "bad_words_ids must hold no empty list, got one"),
        ({"bad_words_ids": 4}, "bad_words_ids must be a sequence of lists of ints, got int"),
        ({"sequence_bias": [[[1, 2], 0.5]]}, "sequence_bias must be of single tokens"),
        ({"sequence_bias": 0.5}, "sequence_bias must be of single tokens, got 0.5"),
        ({"stop_strings": ["x"]}, "stop_strings need a model with a tokenizer"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], words: str, published: Path) -> None:
    model = pd.models.load(with_fields(published, fields))
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
        generate(model, PROMPT, max_new_tokens=2)


def test_what_a_caller_passes_comes_first(published: Path) -> None:
    """Also what changes nothing, in every form."""
    plain = pd.models.load(with_fields(published, {}))
    expected = generate(plain, PROMPT, max_new_tokens=NEW).tokens.tolist()
    model = pd.models.load(with_fields(published, {"repetition_penalty": 1.7, "suppress_tokens": [4, 14]}))
    assert generate(model, PROMPT, max_new_tokens=NEW).tokens.tolist() != expected
    neutral: dict[str, Any] = {"repetition_penalty": 1.0, "suppress_tokens": ()}
    params = SamplingParams(**neutral)
    for same in (
        params,
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        SamplingParams().replace(**neutral),
    ):
        assert same == SamplingParams() and same.explicit == neutral.keys()
        assert generate(model, PROMPT, params=same, max_new_tokens=NEW).tokens.tolist() == expected
    assert generate(model, PROMPT, max_new_tokens=NEW, **neutral).tokens.tolist() == expected
    with pd.Engine(model) as engine:
        assert engine.submit(PROMPT, max_new_tokens=NEW, **neutral).result().tokens.tolist() == expected


def test_a_copy_of_settings_asks_for_nothing_more(published: Path) -> None:
    """`dataclasses.replace` passes every setting: those that change nothing were not asked for."""
    model = pd.models.load(with_fields(published, {"repetition_penalty": 1.7}))
    expected = generate(model, PROMPT, max_new_tokens=NEW).tokens.tolist()
    copied = dataclasses.replace(SamplingParams(max_new_tokens=NEW), seed=1)
    assert copied.explicit == {"max_new_tokens", "seed"}
    assert generate(model, PROMPT, params=copied).tokens.tolist() == expected
    model.generation_config = transformers.GenerationConfig(repetition_penalty=1.7)
    assert generate(model, PROMPT, max_new_tokens=NEW).tokens.tolist() == expected


def test_files_of_texts_follow_it_and_know_neutral_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pd.models.load("tiny-code")
    plain, penalised = (generate(model, "import os", max_new_tokens=16, repetition_penalty=p).text for p in (1.0, 1.6))
    model.generation_config = {"repetition_penalty": 1.6, "max_time": 0.0}
    monkeypatch.setattr(pd.models, "load", lambda *_, **__: model)
    (tmp_path / "prompts.txt").write_text("import os\nimport os\n")

    def texts(name: str, **settings: Any) -> list[str]:
        generate_files(tmp_path / "prompts.txt", tmp_path / name, "tiny-code", max_new_tokens=16, **settings)
        return [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()]

    def interrupt(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    neutral = SamplingParams(repetition_penalty=1.0)
    assert texts("neutral.jsonl", params=neutral) == [plain] * 2
    with pytest.raises(KeyboardInterrupt):
        texts("cut.jsonl", batch_size=1, progress=interrupt)
    with pytest.raises(ValueError, match="settings|run"):
        texts("cut.jsonl", params=neutral)
    assert texts("cut.jsonl") == [penalised] * 2


def test_a_method_that_cannot_follow_says_where_it_stands() -> None:
    model = pd.models.load("tiny-masked")
    model.generation_config = {"bad_words_ids": [[65, 66]]}
    words = r"does not follow bad_words of several tokens: .+ If generation_config\.json asks for it, pass bad_words=\(\), or delete it from the file\."
    with pytest.raises(NotImplementedError, match=words):
        generate(model, "a", "llada", max_new_tokens=8)
    model.generation_config = transformers.GenerationConfig(bad_words_ids=[[65, 66]])  # of a user's own class
    with pytest.raises(NotImplementedError, match=words):
        generate(model, "a", "llada", max_new_tokens=8)
    assert generate(model, "a", "llada", max_new_tokens=8, bad_words=()).stats.forwards == 8


def test_the_server_follows_it_unless_a_request_says_otherwise() -> None:
    pytest.importorskip("httpx")
    from tests.serve.test_http_options import client_with

    model = pd.models.load("tiny-code")
    plain, penalised = (generate(model, "import os", max_new_tokens=16, repetition_penalty=p).text for p in (1.0, 1.6))
    assert plain != penalised
    model.generation_config = {"repetition_penalty": 1.6, "top_k": 3}
    body = {"model": "tiny", "prompt": "import os", "max_tokens": 16, "temperature": 0}
    with client_with(model) as client:
        for more, text in (({}, penalised), ({"repetition_penalty": 1.0}, plain), ({"repetition_penalty": 1}, plain)):
            answer = client.post("/v1/completions", json=body | more).json()
            assert answer["choices"][0]["text"] == text, more
        model.generation_config = {"stop_strings": plain[4:7], "min_new_tokens": 99}
        assert (
            client.post("/v1/completions", json=body).json()["choices"][0]["text"] == plain[: plain.index(plain[4:7])]
        )
        model.generation_config = {"num_beams": 4}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 400 and "num_beams must be off, got 4" in answer.json()["error"]["message"]


UNREAD = {
    *("max_length", "max_new_tokens", "num_return_sequences", "eos_token_id"),  # the caller's, or the model's already
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("early_stopping", "length_penalty", "diversity_penalty", "low_memory"),  # read by what is refused
    *(
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "return_legacy_cache",
        "prefill_chunk_size",
    ),
    *("renormalize_logits", "remove_invalid_values"),  # order stays, and such logits are refused
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
    *(
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
    ),
    *("target_lookbehind", "max_matching_ngram_size", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
    *("assistant_ensemble_weight", "speculation_type"),  # of drafts
    *("compile_config", "disable_compile", "continuous_batching_config"),
}
"""Fields that are not read, and change no greedy token of a text of a given length."""


def test_every_field_of_transformers_is_known() -> None:
    from pdkernels.integrations.transformers._settings import METADATA

    known = {name for name in vars(transformers.GenerationConfig()) if name not in METADATA}
    assert known <= FOLLOWED.keys() | REFUSED.keys() | UNREAD
    assert not FOLLOWED.keys() & REFUSED.keys() and not UNREAD & (FOLLOWED.keys() | REFUSED.keys())
    assert {SETTINGS[name].transformers for name in OF_CALLERS} <= UNREAD
