"""Users' models: functions of tokens, protocols whose missing members are named, and prompts in all forms."""

from __future__ import annotations

import re
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pdkernels as pd
from pdkernels.decoding import available, find, generate, supports
from pdkernels.decoding.methods import METHODS
from pdkernels.models import from_callable
from pdkernels.models.capabilities import CAPABILITIES
from pdkernels.models.protocols import missing, requirements
from tests.support.causal import SCRIPTS, FakeModel
from tests.support.masked import MASK, VOCABULARY, small_masked
from tests.support.plans import example
from tests.support.tri_mode import small_transformer

PROMPTS = [[1, 2, 3], [4], [5, 6]]


class Tiny(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.causal = causal

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + (x.cumsum(1) if self.causal else x.sum(1, keepdim=True)) * torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(x.sin())


@pytest.mark.parametrize("method", ["llada", "dream", "slowfast", "autoregressive", "jacobi"])
def test_ten_lines_are_a_model(method: str) -> None:
    causal = method in ("autoregressive", "jacobi")
    model = from_callable(Tiny(causal), vocab_size=12, mask_token=None if causal else 11)
    together = generate(model, PROMPTS, method, max_new_tokens=7)
    for prompt, tokens in zip(PROMPTS, together.tokens, strict=True):
        assert torch.equal(generate(model, prompt, method, max_new_tokens=7).tokens, tokens)
    assert len({tuple(tokens.tolist()) for tokens in together.tokens}) == 3
    if method == "jacobi":
        assert torch.equal(together.tokens[0], generate(model, PROMPTS[0], max_new_tokens=7).tokens)


@pytest.mark.parametrize("predicts", ["own", "next"])
@pytest.mark.parametrize("method", ["llada", "dream", "slowfast", "fast_dllm"])
def test_a_function_gives_what_the_model_gives(method: str, predicts: Any) -> None:
    whole = small_masked(1, predicts)
    calls: list[tuple[int, ...]] = []

    def f(tokens: Tensor) -> Any:
        calls.append(tuple(tokens.shape))
        return SimpleNamespace(logits=whole(tokens))

    model = from_callable(f, vocab_size=VOCABULARY, mask_token=MASK, predicts=predicts, dtype=torch.float64)
    options: dict[str, Any] = {"cache": "none"} if method == "fast_dllm" else {}
    for prompts in ([1, 2, 3], PROMPTS, [[1, 2], [3, 4]]):
        calls.clear()
        ours, its = (generate(m, prompts, method, max_new_tokens=6, end_tokens=(), **options) for m in (model, whole))
        assert [ids.tolist() for ids in ours.tokens] == [ids.tolist() for ids in its.tokens]
        assert ours.stats.forwards == its.stats.forwards and ours.stats.accepted == its.stats.accepted
        if prompts == [1, 2, 3]:
            assert len(calls) == ours.stats.forwards


@pytest.mark.parametrize("options", [{}, {"block_size": 3}, {"window": 4, "end_tokens": (0, 5)}])
def test_a_causal_function(options: dict[str, Any]) -> None:
    whole = small_transformer(2)
    model = from_callable(lambda t: whole(t), vocab_size=whole.config.vocab_size, dtype=torch.float64)
    for prompt, tokens in zip(PROMPTS, generate(model, PROMPTS, "jacobi", max_new_tokens=9, **options).tokens):
        ends = options.get("end_tokens", ())
        greedy = generate(whole, prompt, max_new_tokens=9, end_tokens=ends, allow_mask_token=True)
        assert torch.equal(tokens, greedy.tokens)


def test_options_that_need_a_cache_are_refused() -> None:
    model = from_callable(Tiny(False), vocab_size=12, mask_token=11)
    with pytest.raises(TypeError, match=r"keeps_rows = True .* got CallableModel without it. Pass cache='none'"):
        generate(model, [1], "fast_dllm")
    with pytest.raises(
        TypeError,
        match=r"method must fit the model \(bidirectional, own_prediction\), got 'jacobi', which requires causal",
    ):
        generate(model, [1], "jacobi")
    causal = from_callable(Tiny(True), vocab_size=12)
    with pytest.raises(TypeError, match=r"argument `kind` of `new_cache` for a page_size, got CallableModel"):
        generate(causal, [1], "jacobi", page_size=4)
    with pytest.raises(
        TypeError, match=r"got 'jacobi_multiblock', which requires block_causal. These fit: autoregressive"
    ):
        generate(causal, [1], "jacobi_multiblock")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"f": 3}, TypeError, "f must be a function of tokens, got int."),
        ({"vocab_size": 0}, ValueError, "vocab_size must be 1 or more, got 0."),
        ({"vocab_size": 2.5}, TypeError, "vocab_size must be an integer, got float."),
        ({"mask_token": 12}, ValueError, "mask_token must be below vocab_size (12), got 12."),
        ({"end_tokens": [1, -1]}, ValueError, "end_tokens must be 0 or more, got -1."),
        ({"predicts": "both"}, ValueError, "predicts must be one of 'next', 'own', got 'both'."),
        ({"dtype": torch.int64}, TypeError, "dtype must be a floating-point dtype, got torch.int64."),
    ],
)
def test_errors_of_from_callable(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        from_callable(**{"f": Tiny(True), "vocab_size": 12, **arguments})
    assert str(raised.value) == f"pdkernels.models.from_callable: {text}"


@pytest.mark.parametrize(
    ("f", "error", "text"),
    [
        (lambda t: t, TypeError, "return logits, or an object with `.logits`, got torch.int64."),
        (lambda t: None, TypeError, "return logits, or an object with `.logits`, got NoneType."),
        (lambda t: torch.zeros(*t.shape, 5), ValueError, "return logits of shape (1, 2, 12), got (1, 2, 5)."),
    ],
)
def test_what_a_function_returns_is_checked(f: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        generate(from_callable(f, vocab_size=12), [1, 2], max_new_tokens=4)
    assert str(raised.value) == f"pdkernels.models.from_callable: f must {text}"


# ---- protocols


class Without:
    """A model without one member."""

    def __init__(self, model: Any, path: tuple[str, ...]) -> None:
        self._model, self._path = model, path

    def __getattr__(self, name: str) -> Any:
        first, *rest = self._path
        if name == first and not rest:
            raise AttributeError(name)
        value = getattr(self._model, name)
        return Without(value, tuple(rest)) if name == first else value


class Called(Without):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("the check comes first")


@pytest.mark.parametrize("method", available())
def test_every_missing_member_is_named(method: str) -> None:
    known = METHODS[method]
    model = example(known)
    assert missing(model, known.model_protocol) == ""
    for path, keywords in requirements(known.model_protocol):
        stated = {("config", "mean_recurrence"), ("config", "attention"), ("config", "predicts"), ("plan_tokens",)}
        if path in stated | {("config",)}:
            continue  # without them it has other capabilities
        lame = (Without if path == ("__call__",) else Called)(model, path)
        with pytest.raises(TypeError) as raised:
            generate(lame, [1, 2], known, max_new_tokens=2)
        assert (
            f"model must have the member `{'.'.join(path)}` (pdkernels.models.{known.model_protocol.__name__})"
            in str(raised.value)
        )
        assert str(raised.value).endswith("without it. See docs/own_models.md.")
        for keyword in keywords:
            lame = Called(model, ("nothing",))
            vars(lame)[path[0]] = eval(
                f"lambda tokens, *, {', '.join(k for k in keywords if k != keyword) or '_'}: None"
            )
            if path != ("__call__",):
                with pytest.raises(TypeError, match=f"the argument `{keyword}` of `{path[0]}`"):
                    generate(lame, [1, 2], known, max_new_tokens=2)


def test_differences_of_families_are_named_too() -> None:
    bare = SimpleNamespace(config=SimpleNamespace(vocab_size=5), tokenizer=None, end_tokens=(), new_cache=None)
    assert missing(bare, pd.models.BidirectionalModel) == "the member `config.attention`"
    assert missing(bare, pd.models.RecurrentModel) == "the member `config.mean_recurrence`"
    assert missing(bare, pd.models.CausalModel) == "the member `__call__`"
    with pytest.raises(TypeError, match=r"model must be a model, got str. Load one with pdkernels.models.load"):
        generate("tiny-code", [1])


class NoCache:
    """Bidirectional, but computes rows from the given tokens alone, wherever they are."""

    tokenizer, end_tokens, mask_token, dtype, device = None, (), MASK, torch.float64, torch.device("cpu")
    config = small_masked(0).config

    def new_cache(self, batch: int, capacity: int) -> Any:
        return None

    def recompute(
        self, tokens: Tensor, cache: Any, starts: Tensor, *, counts: Tensor | None = None, visible: Tensor
    ) -> Tensor:
        return small_masked(0)(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def test_a_model_declares_whether_it_keeps_rows() -> None:
    model = NoCache()
    assert len(generate(model, [1, 2], "llada", max_new_tokens=4).tokens) == 4
    assert len(generate(model, [1, 2], "fast_dllm", max_new_tokens=4, cache="none").tokens) == 4
    for cache in ("dual", "prefix"):
        with pytest.raises(TypeError, match="keeps_rows = True .* got NoCache without it"):
            generate(model, [1, 2], "fast_dllm", max_new_tokens=4, cache=cache)
    assert len(generate(small_masked(0), [1, 2], "fast_dllm", max_new_tokens=4).tokens) == 4


# ---- prompts

SINGLE = [
    torch.tensor([[1, 2, 3]]),
    np.array([1, 2, 3]),
    np.array([[1, 2, 3]], dtype=np.int32),
    [np.int64(1), np.uint8(2), 3],
    {"input_ids": [1, 2, 3]},
    {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)},
    UserDict(input_ids=[0, 1, 2, 3, 9], attention_mask=[0, 1, 1, 1, 0]),
]


@pytest.mark.parametrize("prompt", SINGLE, ids=range(len(SINGLE)))
def test_forms_of_a_single_prompt(prompt: Any) -> None:
    model = FakeModel(SCRIPTS["history"])
    assert torch.equal(
        generate(model, prompt, max_new_tokens=5).tokens, generate(model, [1, 2, 3], max_new_tokens=5).tokens
    )


BATCHES = [
    [torch.tensor([[1, 2, 3]]), np.array([4, 5])],
    {"input_ids": [[1, 2, 3], [4, 5]]},
    {"input_ids": torch.tensor([[1, 2, 3], [0, 4, 5]]), "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])},
    {"input_ids": np.array([[1, 2, 3], [4, 5, 0]]), "attention_mask": np.array([[1, 1, 1], [1, 1, 0]])},
    {"input_ids": torch.tensor([[1, 2, 3], [0, 4, 5]]), "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]).bool()},
    {"input_ids": np.array([[1, 2, 3], [4, 5, 0]]), "attention_mask": np.array([[1, 1, 1], [1, 1, 0]]) > 0},
]


@pytest.mark.parametrize("prompt", BATCHES, ids=range(len(BATCHES)))
def test_forms_of_a_batch(prompt: Any) -> None:
    model = FakeModel(SCRIPTS["history"])
    expected = generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=5).tokens
    assert [*map(list, generate(model, prompt, max_new_tokens=5).tokens)] == [*map(list, expected)]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (np.zeros((2, 3), dtype=np.int64), "prompt must be a 1-D tensor, got shape (2, 3)."),
        (np.zeros(3), "prompt must be an integer tensor, got float64."),
        ([True, False], "prompt must be text, a 1-D tensor, a list of ints or messages, got bool."),
        ({"ids": [1]}, "prompt must have `input_ids`, got a mapping with ids."),
        ({"input_ids": torch.ones(2, 3).long()}, "prompt must have an `attention_mask` with several rows"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "have ones in `attention_mask` and zeros around them"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1]}, "have an `attention_mask` of the shape of `input_ids`"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "prompt must hold at least one token, got an empty prompt."),
        ({"input_ids": []}, "prompt must hold at least one token, got an empty prompt."),
        (b"ab", "prompt must be text, token ids, messages or a list of these, got bytes."),
    ],
)
def test_prompts_that_mean_nothing(prompt: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        generate(FakeModel(SCRIPTS["history"]), prompt, find("jacobi"))
    assert text in str(raised.value)


def test_a_model_states_its_capabilities() -> None:
    model = pd.models.load("tiny-code")

    class Stated:
        capabilities = frozenset({"causal"})

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return model(*arguments, **options)

    stated: Any = Stated()
    assert [name for name in available() if supports(name, stated)] == ["autoregressive", "jacobi", "suffix"]
    assert generate(stated, [1, 2], "jacobi", max_new_tokens=4).tokens.tolist() == (
        generate(model, [1, 2], max_new_tokens=4).tokens.tolist()
    )
    with pytest.raises(
        TypeError, match=r"got 'block_diffusion', which requires block_causal. These fit: autoregressive"
    ):
        generate(stated, [1, 2], "block_diffusion")
    Stated.capabilities = frozenset({"causal", "magic"})
    with pytest.raises(ValueError, match=r"model.capabilities must be of causal, .*, got magic"):
        supports("jacobi", stated)


def test_the_page_lists_all_capabilities() -> None:
    page = (Path(__file__).resolve().parent.parent.parent / "docs/own_models.md").read_text()
    table = page.split("## Capabilities", 1)[1].split("## ", 1)[0]
    assert re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE) == list(CAPABILITIES.items())


def test_a_model_of_transformers_is_refused_at_once_with_what_to_do() -> None:
    transformers = pytest.importorskip("transformers", minversion="4.57")
    sizes = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    raw = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))
    words = r"or wrapped, got Llama\w+\. Pass pdkernels\.integrations\.transformers\.wrap\("
    target = pd.models.load("tiny-code")
    doors: list[Any] = [
        lambda model: generate(model, [1, 2]),
        lambda model: generate(model, [1, 2], "llada"),
        lambda model: next(pd.decoding.stream(model, [1, 2])),
        pd.Engine,
        pd.quantize,
        lambda model: generate(target, "a", "draft_model", drafter=model),
    ]
    for model in (raw, raw.model, torch.compile(raw)):
        for door in doors:
            with pytest.raises(TypeError, match=words):
                door(model)
    with pytest.raises(
        TypeError, match="pdkernels.Engine: model must have the member `tokenizer`, got SimpleNamespace"
    ):
        pd.Engine(SimpleNamespace(config=target.config))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("tiny-code", r"be a model, got str\. Load one with pdkernels\.models\.load\."),
        (None, r"be a model, got NoneType\."),
        (torch.sin, r"be a model, got .+ make one of a function with pdkernels\.models\.from_callable\."),
        (torch.nn.Linear(2, 2), r"be a model, got Linear\."),
    ],
)
def test_what_is_no_model_is_refused_at_every_door(given: Any, words: str) -> None:
    doors: list[Any] = [pd.Engine, lambda model: generate(model, [1, 2])]
    for door in doors:
        with pytest.raises(TypeError, match=f"model must {words}"):
            door(given)
