"""Stop sequences, criteria, a time limit, several texts of a prompt and log-probabilities, in every method that follows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pdkernels.decoding import generate
from pdkernels.decoding._filter_options import no_logprobs
from pdkernels.decoding.methods import METHODS
from tests.support.plans import example
from tests.support.tri_mode import small_transformer

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from tests.decoding.test_filters import EXACT  # noqa: E402

BATCH = [[3, 1, 4, 1, 5], [2], [7, 7, 7]]
SIZES: dict[str, dict[str, Any]] = {"block_diffusion": {"block_size": 4}, "fast_dllm": {"block_size": 4}}
SIZES["fast_dllm_v2"] = {"block_size": 4, "small_block_size": 2}
TEXTS = [name for name in METHODS if METHODS[name].wing != "planned"]


def options_of(method: str) -> dict[str, Any]:
    return SIZES.get(method, {}) | {"max_new_tokens": 8, "end_tokens": ()}


def lists(tokens: Any) -> list[list[int]]:
    return [ids.tolist() for ids in tokens]


def cut(tokens: list[int], stop: list[int]) -> list[int]:
    ends = [n for n in range(1, len(tokens) + 1) if tokens[max(0, n - len(stop)) : n] == stop]
    return tokens[: ends[0]] if ends else tokens


@pytest.mark.parametrize("method", TEXTS)
def test_sequences_of_tokens_end_texts(method: str) -> None:
    """Wherever in a draft or a block they are complete."""
    model, options = example(METHODS[method]), options_of(method)
    whole = lists(generate(model, BATCH, METHODS[method], **options).tokens)
    for stop in (whole[0][1:3], whole[1][4:5], whole[2][5:8]):
        heard: list[list[int]] = [[], [], []]
        found = generate(
            model,
            BATCH,
            METHODS[method],
            stop_sequences=[stop, [0] * 20],
            on_tokens=lambda n, ids, _, heard=heard: heard[n].extend(ids),
            **options,
        )
        assert lists(found.tokens) == heard == [cut(tokens, stop) for tokens in whole]


class Third(transformers.StoppingCriteria):  # type: ignore[misc]
    """Ends a text with its third new token of an odd id, as transformers asks: once for every token."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts, self.asked = prompts, []

    def __call__(self, input_ids: Tensor, scores: Any, **rest: Any) -> Tensor:
        text = input_ids[0].tolist()
        prompt = max((p for p in self.prompts if text[: len(p)] == p), key=len)
        self.asked.append(tuple(text))
        return torch.tensor([sum(token % 2 for token in text[len(prompt) :]) >= 3])


@pytest.mark.parametrize("method", TEXTS)
def test_criteria_are_asked_about_every_token(method: str) -> None:
    model, options = example(METHODS[method]), options_of(method)
    whole = lists(generate(model, BATCH, METHODS[method], **options).tokens)
    rule = Third(BATCH)
    criteria = transformers.StoppingCriteriaList([rule])
    found = lists(generate(model, BATCH, METHODS[method], stopping_criteria=criteria, **options).tokens)
    for prompt, tokens, every in zip(BATCH, found, whole, strict=True):
        odd = [n + 1 for n, token in enumerate(every) if token % 2]
        assert tokens == every[: odd[2] if len(odd) > 2 else 8]
        assert {tuple(prompt + tokens[: n + 1]) for n in range(len(tokens))} <= set(rule.asked)
    assert lists(generate(model, BATCH, METHODS[method], stopping_criteria=Third(BATCH), **options).tokens) == found


@pytest.mark.parametrize("method", TEXTS)
def test_time_ends_texts(method: str) -> None:
    """With what the step under way made final."""
    model, options = example(METHODS[method]), options_of(method)
    whole = lists(generate(model, BATCH, METHODS[method], **options).tokens)
    cut_off = generate(model, BATCH, METHODS[method], max_time=0, **options)
    for tokens, every in zip(lists(cut_off.tokens), whole, strict=True):
        assert tokens == every[: len(tokens)]
    assert cut_off.stats.forwards <= 2 + METHODS[method].fills_canvases
    assert lists(generate(model, BATCH, METHODS[method], max_time=600, **options).tokens) == whole


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("page_size", [None, 3])
def test_several_texts_of_a_prompt(method: str, page_size: int | None) -> None:
    """Those of a batch in which the prompt is repeated."""
    model, options = example(METHODS[method]), options_of(method)
    if METHODS[method].wing == "planned":
        options |= {"max_new_tokens": 20}
        del options["end_tokens"]
    options |= {"temperature": 0.8, "seed": 5}
    if page_size and "page_size" in METHODS[method].options:
        options["page_size"] = page_size
    batch = [prompt for prompt in BATCH for _ in range(3)]
    expected = generate(model, batch, METHODS[method], **options)
    found = generate(model, BATCH, METHODS[method], n=3, **options)
    assert lists(found.tokens) == lists(expected.tokens) and found.stats.forwards == expected.stats.forwards
    single = generate(model, BATCH[0], METHODS[method], n=3, **options)
    assert lists(single.tokens) == lists(expected.tokens)[:3]


@pytest.mark.parametrize("form", ["autoregressive", *EXACT])
def test_a_prompt_is_computed_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, own = EXACT.get(form, ("autoregressive", {}))
    model, prompt = small_transformer(3), [5, 6, 7, 8, 1, 2, 3, 4]
    seen: list[int] = []
    forward = type(model).forward

    def spy(self: Any, tokens: Tensor, **options: Any) -> Tensor:
        seen.append(tokens.numel())
        return forward(self, tokens, **options)

    drawn = {"max_new_tokens": 6, "end_tokens": (), "temperature": 0.9, "seed": 2, "repetition_penalty": 1.2}
    expected = generate(model, [prompt] * 4, method, **own, **drawn)
    monkeypatch.setattr(type(model), "forward", spy)
    found = generate(model, prompt, method, n=4, **own, **drawn)
    assert lists(found.tokens) == lists(expected.tokens)
    if method != "quadratic_self_speculation":  # whose first forward has masks
        assert seen[0] == len(prompt) - 1 and seen[1] % 4 == 0 and seen[1] <= 4 * 6


@pytest.mark.parametrize("form", ["autoregressive", *EXACT])
@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_are_the_models_own(form: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before penalties, temperature and filters: those of one forward over the text."""
    monkeypatch.setattr("pdkernels.decoding._log_probs.CHUNK", 4)
    method, own = EXACT.get(form, ("autoregressive", {}))
    model = small_transformer(2)
    drawn = {"temperature": 1.3, "top_k": 9, "repetition_penalty": 1.7, "suppress_tokens": [2], "seed": 4}
    found = generate(model, BATCH, method, logprobs=count, max_new_tokens=11, end_tokens=(5,), **own, **drawn)
    plain = generate(model, BATCH, method, max_new_tokens=11, end_tokens=(5,), **own, **drawn)
    assert lists(found.tokens) == lists(plain.tokens) and plain.logprobs is None
    assert found.stats.forwards == plain.stats.forwards
    assert isinstance(found.logprobs, list) and len({len(ids) for ids in found.tokens}) > 1
    for prompt, ids, told in zip(BATCH, found.tokens, found.logprobs, strict=True):
        text = torch.tensor([prompt + ids.tolist()])
        every = torch.arange(text.shape[1])
        mask = torch.ones(len(every), len(every), dtype=torch.bool).tril()
        likely = model(text, positions=every[None], mask=mask)[0, len(prompt) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(told.tokens, likely.gather(-1, ids[:, None])[:, 0])
        top = likely.topk(count, -1)
        assert torch.equal(told.top_ids, top.indices)
        torch.testing.assert_close(told.top, top.values)
    single = generate(model, BATCH[0], method, logprobs=count, max_new_tokens=11, end_tokens=(5,), **own, **drawn)
    torch.testing.assert_close(single.logprobs.tokens, found.logprobs[0].tokens)


def test_no_tokens_have_no_log_probabilities() -> None:
    found = generate(small_transformer(2), BATCH, max_new_tokens=0, logprobs=2).logprobs
    assert [part.top.shape for part in found] == [(0, 2)] * 3


@pytest.mark.parametrize("method", [name for name in METHODS if no_logprobs(METHODS[name])])
def test_methods_without_log_probabilities_say_so(method: str) -> None:
    with pytest.raises(NotImplementedError, match=f"method '{method}' does not follow logprobs: "):
        generate(example(METHODS[method]), [1, 2], method, logprobs=1)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"stop_sequences": [[]]}, "stop_sequences must hold no empty list"),
        ({"stop_sequences": [3]}, "stop_sequences must be a sequence of ints, got int"),
        ({"stopping_criteria": 3}, "stopping_criteria must be a function or a list of functions, got int"),
        ({"max_time": -1}, "max_time must be finite and at least 0, got -1"),
        ({"logprobs": -1}, "logprobs must be in 0 "),
    ],
)
def test_bad_options_are_refused(option: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^pdkernels.decoding.generate: {words}"):
        generate(small_transformer(1), [1, 2], **option)
