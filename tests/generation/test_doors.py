"""Every setting reaches every door with the value that it has in `generate`, or is refused there by name, for a reason that stands in `REFUSED`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import find, generate
from pdkernels.generation.params import DEFAULTS, SETTINGS, SamplingParams
from tests.harness.settings import EXAMPLES, beside
from tests.support.lora import random_adapter

PROMPT = "import os"
DOORS = ("generate", "stream", "engine", "chat", "completions", "transformers", "lm_eval")
CODE = "code cannot be sent by HTTP"
REFUSED: dict[tuple[str, str], str] = {
    ("engine", "n"): "a request has one answer",
    **{(door, name): CODE for door in ("chat", "completions") for name in ("logits_processor", "stopping_criteria")},
    **{(door, "grammar"): "regex, choice and response_format ask for one" for door in ("chat", "completions")},
    ("transformers", "adapter"): "must be None for this model",
    ("transformers", "stop_strings"): "transformers drops the tokenizer that they need",
    **{("lm_eval", name): "The harness takes one text of a request" for name in ("n", "logprobs")},
}
"""By door and setting: part of what is said."""
OWN = {
    "generate": set[str](),
    "stream": set[str](),
    "engine": set[str](),
    "chat": {"seed", "max_new_tokens"},
    "completions": {"seed", "max_new_tokens"},
    "transformers": {"temperature", "seed", "max_new_tokens", "end_tokens"},
    "lm_eval": {"seed", "max_new_tokens"},
}
"""Settings that a door always has."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("fastapi")
    from tests.serve.test_server import Chatting

    made = pd.models.load("tiny-code")
    pd.models.load_adapter(made, "style", random_adapter(made, tmp_path_factory.mktemp("style"), 4, 0))
    made.tokenizer = Chatting(made.tokenizer)
    return made


@pytest.fixture(scope="module")
def client(model: Any) -> Iterator[Any]:
    from tests.serve.test_http_options import client_with

    with client_with(model) as made:
        yield made


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def byte_tokenizer() -> Any:
    """Of transformers, with the ids of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")  # number 256


@pytest.fixture
def arrived(monkeypatch: Any) -> list[SamplingParams]:
    """The settings with which sessions are opened."""
    module: Any = importlib.import_module("pdkernels.decoding.generate")
    opened, real = list[SamplingParams](), module.open_session

    def open_session(model: Any, prompt: Any, params: SamplingParams, *rest: Any) -> Any:
        opened.append(params)
        return real(model, prompt, params, *rest)

    monkeypatch.setattr(module, "open_session", open_session)
    return opened


def through_engine(model: Any, settings: dict[str, Any]) -> None:
    with pd.Engine(model, max_new_tokens=128) as engine:
        engine.submit(PROMPT, **settings).result()


def through_http(client: Any, route: str, settings: dict[str, Any]) -> None:
    """Raises with the error of an answer."""
    body = {SETTINGS[name].wire or name: value for name, value in settings.items()}
    body = {name: value if isinstance(value, (int, float, str, list, dict)) else "x" for name, value in body.items()}
    body |= {"model": "tiny"} | ({} if "max_tokens" in body else {"max_tokens": 8})
    if route == "completions":
        body["prompt"] = PROMPT
    else:
        body["messages"] = [{"role": "user", "content": PROMPT}]
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    answer = client.post("/v1/completions" if route == "completions" else "/v1/chat/completions", json=body)
    if answer.status_code != 200:
        error = answer.json()["error"]
        raise ValueError(f"{error['param']}: {error['message']}")


def through_transformers(model: Any, settings: dict[str, Any]) -> None:
    from pdkernels.integrations.transformers import generate as custom

    fields, options = dict[str, Any](), dict[str, Any]()
    for name, value in settings.items():
        setting = SETTINGS[name]
        if setting.kind == "functions":
            fields[name] = [value]
        elif setting.transformers:
            fields[setting.transformers] = value
        else:
            options[name] = value
    if "grammar" in options:
        options["tokenizer"] = byte_tokenizer()
    drawn = {"do_sample": True, "temperature": 0.75} if {"temperature", "n"} & settings.keys() else {}
    fields = {"max_new_tokens": 8, "top_k": 0, "eos_token_id": 256} | drawn | fields
    ids = torch.tensor([list(PROMPT.encode())])
    model.generate(ids, custom_generate=custom, method_options=options, return_dict_in_generate=True, **fields)


def through_lm_eval(model: Any, settings: dict[str, Any]) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from pdkernels.integrations.lm_eval import HarnessModel

    asked = {"max_gen_toks": 8} | settings
    if "max_new_tokens" in settings:
        del asked["max_gen_toks"]
    request = Instance(request_type="generate_until", doc={}, arguments=(PROMPT, asked), idx=0)
    HarnessModel(model).generate_until([request])


@pytest.fixture
def through(model: Any, client: Any, theirs: Any) -> Callable[[str, dict[str, Any]], None]:
    """Asks at a door for a text with some settings."""
    doors: dict[str, Callable[[dict[str, Any]], Any]] = {
        "generate": lambda settings: generate(model, PROMPT, **settings),
        "stream": lambda settings: list(pd.decoding.stream(model, PROMPT, **settings)),
        "engine": lambda settings: through_engine(model, settings),
        "chat": lambda settings: through_http(client, "chat", settings),
        "completions": lambda settings: through_http(client, "completions", settings),
        "transformers": lambda settings: through_transformers(theirs, settings),
        "lm_eval": lambda settings: through_lm_eval(model, settings),
    }
    return lambda door, settings: doors[door](settings)


def has_reached(door: str, name: str, expected: SamplingParams, arrived: list[SamplingParams]) -> bool:
    """Whether a setting has arrived."""
    wanted = getattr(expected, name)
    values = [getattr(params, name) for params in arrived]
    if name == "n" and door in ("chat", "completions"):  # requests of the engine with seeds of their own
        return values == [1] * wanted and len({params.seed for params in arrived}) == wanted
    if door == "transformers" and SETTINGS[name].kind == "functions":  # inside ours, for the padding of prompts
        return [len(value) for value in values] == [1]
    if name == "end_tokens" and door in ("chat", "completions"):  # beside those of the model
        return len(values) == 1 and set(wanted) < set(values[0])
    if name == "max_time" and door == "transformers":  # what is left of it
        return len(values) == 1 and wanted - 30 < values[0] <= wanted
    return values == [wanted]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("door", DOORS)
def test_a_setting_reaches_a_door(door: str, name: str, through: Any, arrived: list[SamplingParams]) -> None:
    settings = beside(name) | {name: EXAMPLES[name]}
    expected = SamplingParams(**settings)
    assert name in expected.asked
    if (door, name) in REFUSED:
        with pytest.raises((ValueError, NotImplementedError), match=REFUSED[door, name]) as refusal:
            through(door, settings)
        assert name in str(refusal.value) or (name == "n" and not arrived)
        return
    through(door, settings)
    assert has_reached(door, name, expected, arrived), arrived
    changed = {other for params in arrived for other in params.asked}
    assert changed <= expected.asked.keys() | OWN[door]


@pytest.mark.parametrize("door", DOORS)
def test_without_settings_they_are_the_defaults(door: str, through: Any, arrived: list[SamplingParams]) -> None:
    through(door, {})
    (params,) = arrived
    assert {name for name in SETTINGS if getattr(params, name) != getattr(DEFAULTS, name)} <= OWN[door]


@pytest.mark.parametrize(
    "alias", ["eos_token_id", "stop_token_ids", "bad_words_ids", "min_tokens", "max_tokens", "stop"]
)
def test_a_task_of_the_harness_may_use_any_name(alias: str, model: Any, arrived: list[SamplingParams]) -> None:
    from pdkernels.generation.params import ALIASES

    name = ALIASES[alias]
    through_lm_eval(model, {alias: EXAMPLES[name]} | ({"max_gen_toks": None} if alias == "max_tokens" else {}))
    assert getattr(arrived[0], name) == getattr(SamplingParams(**{name: EXAMPLES[name]}), name)


WORDS = r"method 'llada' does not follow {} of several tokens: it writes tokens in parallel, so a row has no prefix that is final"


def test_what_a_method_does_not_follow_is_refused_in_the_same_words() -> None:
    """With the field's name over HTTP."""
    pytest.importorskip("fastapi")
    from tests.serve.test_http_options import client_with

    masked, settings = pd.models.load("tiny-masked"), {"bad_words": [[49, 50]]}
    assert find("llada").refusals(SamplingParams(**settings)) == {"bad_words": WORDS.format("bad_words")}
    with pd.Engine(masked) as engine:
        doors: list[Callable[[], Any]] = [
            lambda: generate(masked, "1", "llada", **settings),
            lambda: list(pd.decoding.stream(masked, "1", "llada", **settings)),
            lambda: engine.submit("1", "llada", **settings),
        ]
        for door in doors:
            with pytest.raises(NotImplementedError) as refusal:
                door()
            assert str(refusal.value) == f"pdkernels.decoding.generate: {WORDS.format('bad_words')}."
    with client_with(masked, method="llada") as client:
        body = {"model": "tiny", "prompt": "1", "bad_words_ids": [[49, 50]]}
        error = client.post("/v1/completions", json=body).json()["error"]
        assert (error["message"], error["param"]) == (WORDS.format("bad_words_ids"), "bad_words_ids")


def test_lm_eval_refuses_in_the_same_words() -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from pdkernels.integrations.lm_eval import HarnessModel

    request = Instance(request_type="generate_until", doc={}, arguments=("1", {"bad_words": [[49, 50]]}), idx=0)
    with pytest.raises(NotImplementedError, match=WORDS.format("bad_words")):
        HarnessModel("tiny-masked", method="llada").generate_until([request])


@pytest.mark.parametrize(
    ("body", "parameter", "words"),
    [
        ({"min_tokens": -1}, "min_tokens", "min_tokens: Input should be greater than or equal to 0"),
        ({"typical_p": 0}, "typical_p", "typical_p must be above 0"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "stop_token_ids must hold ids in 0 .. 256"),
        ({"forced_tokens": {"-1": 5}}, "forced_tokens", "forced_tokens must have places in 0"),
        ({"suppress_tokens": [32] * 5000}, "suppress_tokens", "at most 4096 items"),
        ({"bad_words_ids": [[1]] * 5000}, "bad_words_ids", "at most 4096 items"),
        ({"logit_bias": {str(number): 1 for number in range(5000)}}, "logit_bias", "at most 4096 items"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens.0", "must be an integer"),
        ({"min_new_tokens": 3}, "min_new_tokens", "is not supported here: its field is min_tokens"),
        ({"eos_token_id": 3}, "eos_token_id", "is not supported here: its field is stop_token_ids"),
    ],
)
def test_errors_name_the_field(body: Any, parameter: str, words: str, client: Any) -> None:
    answer = client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 4, "temperature": 1} | body
    )
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == parameter and words in error["message"], error


@pytest.mark.parametrize("name", ["top_k", "bad_words", "max_new_tokens", "logits_processor"])
def test_method_options_hold_no_setting_of_transformers(name: str, theirs: Any) -> None:
    from pdkernels.integrations.transformers import generate as custom

    field = SETTINGS[name].transformers or name
    with pytest.raises((TypeError, ValueError), match=f"not hold '{name}'.*Pass .*{field} to the model's generate"):
        options = {name: EXAMPLES[name]}
        theirs.generate(torch.tensor([[1, 2]]), custom_generate=custom, max_new_tokens=2, method_options=options)


@pytest.mark.parametrize("door", [door for door in DOORS if door not in ("transformers", "lm_eval")])
def test_a_minimum_above_the_maximum_is_refused(door: str, through: Any) -> None:
    """As vLLM does it; transformers warns, and all tokens are without end tokens."""
    wire = door in ("chat", "completions")
    words = "min_tokens must be at most max_tokens" if wire else "min_new_tokens must be at most max_new_tokens"
    with pytest.raises(ValueError, match=rf"{words} \(4\), got 5"):
        through(door, {"min_new_tokens": 5, "max_new_tokens": 4})
    through(door, {"min_new_tokens": 4, "max_new_tokens": 4})


def test_a_minimum_above_the_maximum_through_transformers(theirs: Any) -> None:
    from pdkernels.integrations.transformers import generate as custom

    ids, ends = torch.tensor([list(PROMPT.encode())]), list(range(40, 240))
    asked = {"min_new_tokens": 9, "max_new_tokens": 4, "eos_token_id": ends, "do_sample": False}
    with pytest.warns(UserWarning, match="Unfeasible length constraints"):
        assert torch.equal(theirs.generate(ids, custom_generate=custom, **asked), theirs.generate(ids, **asked))
