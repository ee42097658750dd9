"""Every option that methods share, on every kind of model: the tokens of the package's own model, or a refusal by name.

The kinds have the same weights: a `Transformer`, a model of transformers that `wrap` takes, and a function from `from_callable`.
Models on two ranks are compared in tests/distributed, greedy decoding with transformers' own `generate` below.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from pdkernels.decoding import generate
from pdkernels.decoding.methods import METHODS
from pdkernels.models import from_callable
from tests.harness.sessions import FILTERS
from tests.support.masked import small_masked
from tests.support.plans import example

transformers = pytest.importorskip("transformers")
from pdkernels.integrations.transformers import from_transformers, wrap  # noqa: E402

MASK, END = 29, 7
PROMPTS = [[3, 1, 4, 1, 5], [2, 6], [9]]


class Letters:
    """A letter for each id."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token) for token in tokens)


@lru_cache
def published() -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def causal(kind: str) -> Any:
    if kind == "wrapped":
        return wrap(published(), Letters())
    if kind == "function":
        model = published()
        return from_callable(lambda tokens: model(tokens).logits, vocab_size=30, tokenizer=Letters())
    return from_transformers(published(), Letters())


def masked(kind: str) -> Any:
    model = small_masked(3)
    if kind == "function":

        def whole(tokens: torch.Tensor) -> torch.Tensor:
            cache = model.new_cache(*tokens.shape)
            seen = torch.full((len(tokens),), tokens.shape[1])
            return model.logits(model.recompute(tokens, cache, torch.zeros_like(seen), visible=seen))

        vocabulary = model.config.vocab_size
        return from_callable(
            whole, vocab_size=vocabulary, mask_token=model.mask_token, tokenizer=Letters(), dtype=torch.float64
        )
    model.tokenizer = Letters()
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.8},
    "seed": {"temperature": 0.8, "seed": 2**63 + 5},
    "seeds": {"temperature": 1.3, "seed": [3, 4, 2**62]},
    "top_p": {"temperature": 0.8, "top_p": 0.7},
    "top_k": {"temperature": 0.8, "top_k": 3},
    "allow_mask_token": {"allow_mask_token": True},
    "mask_token": {"mask_token": 5},
    "page_size": {"page_size": 3},
    "end_tokens": {"end_tokens": range(5, 12)},
    "stop_strings": {"stop_strings": ["e", "h", "k"]},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "penalty and draws": {"repetition_penalty": 0.6, "temperature": 0.9, "end_tokens": (END,)},
    "penalty and pages": {"repetition_penalty": 1.7, "page_size": 4},
    "presence and frequency": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "temperature": 0.7},
    "bias and bans": {"logit_bias": {4: 3.0}, "suppress_tokens": [5], "bad_words": [[6]], "begin_suppress_tokens": [7]},
    "minimum": {"min_new_tokens": 4, "end_tokens": range(0, 9)},
    "forced": {"forced_tokens": {0: 3, 5: 4}},
    "typical_p": {"temperature": 0.8, "typical_p": 0.6},
    "stop_sequences": {"stop_sequences": [[4], [6, 7]]},
    "trace": {"trace": True},
    "overflow": {"overflow": "warn"},
}
# What a method has to have, and methods of functions: those without rows kept in a cache.
OF_FUNCTIONS = ("autoregressive", "jacobi", "llada", "dream", "slowfast", "fast_dllm")
SIZES: dict[str, dict[str, Any]] = {"fast_dllm": {"block_size": 4, "cache": "none"}}
CAUSAL = ("autoregressive", "jacobi", "jacobi_multiblock")
MASKED = ("llada", "dream", "slowfast", "fast_dllm")


def answer(model: Any, prompts: Any, method: str, options: dict[str, Any]) -> tuple[Any, ...]:
    heard: list[tuple[int, list[int]]] = []
    options = {"max_new_tokens": 12, "end_tokens": (), **SIZES.get(method, {}), **options}
    found = generate(model, prompts, method, on_tokens=lambda n, ids, _: heard.append((n, ids)), **options)
    tokens = [ids.tolist() for ids in found.tokens]
    for sequence, ids in enumerate(tokens):
        assert [token for n, part in heard if n == sequence for token in part] == ids
    return tokens, found.text, found.stats.accepted, found.stats.forwards, found.stats.trace


def known(method: str, options: dict[str, Any]) -> bool:
    shared = {"end_tokens", "stop_strings", "stop_sequences", "trace", "overflow", *FILTERS}
    return all(name in METHODS[method].options for name in options.keys() - shared)


def runs(method: str, kind: str, name: str) -> bool:
    options = OPTIONS[name]
    return known(method, options) and (kind != "function" or (method in OF_FUNCTIONS and "page_size" not in options))


# Models of transformers that fill masks: tests/integrations/test_transformers.py.
KINDS = [(method, "wrapped", name) for method in CAUSAL for name in OPTIONS]
KINDS += [(method, "function", name) for method in (*CAUSAL, *MASKED) for name in OPTIONS]


@pytest.mark.covering(share=3)
@pytest.mark.parametrize(("method", "kind", "name"), [case for case in KINDS if runs(*case)])
def test_kinds_of_models_give_the_same(method: str, kind: str, name: str) -> None:
    options, make = OPTIONS[name], causal if method in CAUSAL else masked
    expected, found = (answer(make(kind), PROMPTS, method, options) for kind in ("own", kind))
    if method in MASKED and options.get("trace"):  # confidences are rounded differently
        expected, found = expected[:-1], found[:-1]
    assert found == expected
    plain = answer(make(kind), PROMPTS, method, {})
    told_apart = name not in ("plain", "page_size", "trace", "overflow", "allow_mask_token")
    assert (found[0] != plain[0]) == told_apart or name == "mask_token"


@pytest.mark.parametrize(("method", "kind", "name"), [case for case in KINDS if not runs(*case)])
def test_what_a_method_or_a_kind_cannot_do_is_refused(method: str, kind: str, name: str) -> None:
    options, make = OPTIONS[name], causal if method in CAUSAL else masked
    if not known(method, options):
        with pytest.raises(TypeError, match="has no option|which requires"):
            answer(make(kind), PROMPTS, method, options)
        return
    if kind == "function" and method not in OF_FUNCTIONS:
        with pytest.raises(TypeError, match=f"got .{method}., which requires block_causal"):
            answer(make(kind), PROMPTS, method, options)
        return
    text = "pdkernels.decoding.generate: model must have the argument `kind` of `new_cache` for a page_size"
    with pytest.raises(TypeError, match=text):
        answer(make(kind), PROMPTS, method, options)


@pytest.mark.parametrize(
    "kind", ["own", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("wrapped", "function"))]
)
def test_the_penalty_is_that_of_transformers(kind: str) -> None:
    for penalty in (1.0, 1.4, 2.5):
        for prompt in PROMPTS:
            given = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": penalty}
            theirs = published().generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist()
            for method in ("autoregressive", "jacobi"):
                assert answer(causal(kind), [prompt], method, {"repetition_penalty": penalty})[0] == [theirs]


@pytest.mark.parametrize("method", ["recurrent_static"])  # others read rows after fewer recurrences
def test_recurrent_models_give_one_law(method: str) -> None:
    """Where the tokens are those of one law, each method draws them with every option."""
    model = example(METHODS[method])
    for name, options in OPTIONS.items():
        if name in ("mask_token", "allow_mask_token", "top_p", "top_k"):
            continue
        prompts = [[52, 43, 49], [12, 7], [30]]
        given = {"max_new_tokens": 5, "end_tokens": (), **options}
        one = generate(model, prompts, "autoregressive", **given)
        other = generate(model, prompts, method, **given)
        assert [x.tolist() for x in other.tokens] == [x.tolist() for x in one.tokens], name


class Least:
    """A causal model with the members of its protocol and no others, whose cache has no more than decoders may ask for."""

    class Cache:
        def __init__(self, batch: int) -> None:
            self.lengths = torch.zeros(batch, dtype=torch.int64)
            self.device = torch.device("cpu")
            self.texts: list[list[int]] = [[] for _ in range(batch)]
            self.new = torch.zeros(batch, 0, dtype=torch.int64)

        def commit_(self, counts: torch.Tensor) -> None:
            for text, tokens, count in zip(self.texts, self.new.tolist(), counts.tolist(), strict=True):
                text += tokens[:count]
            self.lengths += counts

    tokenizer, end_tokens, dtype, device = Letters(), (), torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        self.inner = published()
        self.config = type("Config", (), {"vocab_size": 30})()

    def new_cache(self, batch: int, capacity: int) -> Cache:
        return self.Cache(batch)

    def __call__(self, tokens: torch.Tensor, *, cache: Cache, counts: Any = None, rows: Any = None) -> torch.Tensor:
        cache.new = tokens.clone()
        out = []
        for text, new in zip(cache.texts, tokens.tolist(), strict=True):
            out.append(self.inner(torch.tensor([text + new])).logits[0, len(text) :])
        logits = torch.stack(out)
        return logits if rows is None else logits.gather(1, rows[..., None].expand(-1, -1, 30))


@pytest.mark.covering
@pytest.mark.parametrize("method", ["autoregressive", "jacobi"])
@pytest.mark.parametrize("name", [name for name, given in OPTIONS.items() if "page_size" not in given])
def test_a_model_with_no_more_than_its_protocol(method: str, name: str) -> None:
    if known(method, OPTIONS[name]):
        assert answer(Least(), PROMPTS, method, OPTIONS[name]) == answer(causal("own"), PROMPTS, method, OPTIONS[name])
