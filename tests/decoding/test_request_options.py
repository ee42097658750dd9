"""Stop sequences, criteria, a time limit, several texts of a prompt and log-probabilities, in every method that follows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pdkernels.decoding import generate
from pdkernels.decoding.methods import METHODS
from pdkernels.generation.shared_prompts import SharedPrompts
from pdkernels.models import load
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


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("method", TEXTS)
def test_sequences_of_tokens_end_texts(method: str) -> None:
    """Wherever in a draft or a block they are complete."""
    model, options = example(METHODS[method]), options_of(method)
    whole = lists(generate(model, BATCH, METHODS[method], **options).tokens)
    for stop in (whole[0][1:3], whole[2][5:8]):
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


@pytest.mark.covering(share=3)
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


@pytest.mark.covering(share=3)
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


@pytest.mark.covering(share=3)
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
    batch = [prompt for prompt in BATCH for _ in range(2)]
    expected = generate(model, batch, METHODS[method], **options)
    found = generate(model, BATCH, METHODS[method], n=2, **options)
    assert lists(found.tokens) == lists(expected.tokens) and found.stats.forwards == expected.stats.forwards
    single = generate(model, BATCH[0], METHODS[method], n=2, **options)
    assert lists(single.tokens) == lists(expected.tokens)[:2]


def test_texts_of_a_prompt_continue_from_their_own_prompt() -> None:
    """In logits, since tokens of small models hide what a row reads."""
    model, prompts = small_transformer(3), [[3, 1, 4, 1, 5], [7, 2, 6], [8]]
    shared = SharedPrompts(model, prompts, 2)
    counts = torch.tensor([len(prompt) for prompt in prompts for _ in range(2)])
    tokens = torch.tensor([prompt + [0] * (5 - len(prompt)) for prompt in prompts for _ in range(2)])
    found, expected = (
        one(tokens, cache=one.new_cache(6, 8), counts=counts, rows=(counts - 1)[:, None]) for one in (shared, model)
    )
    torch.testing.assert_close(found, expected)


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


@pytest.mark.covering
@pytest.mark.parametrize("form", ["autoregressive", *EXACT])
@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_are_the_models_own(form: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before penalties, temperature and filters: those of one forward over the text."""
    monkeypatch.setattr("pdkernels.generation.logprobs.CHUNK", 4)
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


WRITERS = [name for name in METHODS if METHODS[name].writes_logprobs and not METHODS[name].refusal("logprobs", 1)]


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "drawn", [{}, {"temperature": 1.3, "repetition_penalty": 1.7, "suppress_tokens": [2], "seed": 4}]
)
@pytest.mark.parametrize("method", WRITERS)
def test_log_probabilities_of_the_forward_that_wrote_a_token(
    method: str, drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is in a row that the model gave, before filters; nothing else changes, and a text has the same ones alone."""
    model, rows, own = example(METHODS[method]), list[Tensor](), options_of(method) | {"end_tokens": (5,)}
    plain = generate(model, BATCH, method, **own, **drawn)
    for name in ("coda", "logits", "forward"):
        if hasattr(type(model), name):
            monkeypatch.setattr(type(model), name, spied(getattr(type(model), name), rows))
    found = generate(model, BATCH, method, logprobs=3, **own, **drawn)
    assert lists(found.tokens) == lists(plain.tokens) and found.stats.forwards == plain.stats.forwards
    every = torch.cat([part.reshape(-1, part.shape[-1]) for part in rows]).float().log_softmax(-1)
    tops = every.topk(3, -1)
    for ids, told in zip(found.tokens, found.logprobs, strict=True):
        assert told.tokens.shape == ids.shape and told.top.shape == (*ids.shape, 3)
        for token, own_value, top_ids, top in zip(ids.tolist(), told.tokens, told.top_ids, told.top, strict=True):
            same = (every[:, token] - own_value).abs() < 1e-5
            assert bool((same & (tops.indices == top_ids).all(-1) & ((tops.values - top).abs() < 1e-5).all(-1)).any())
    alone = generate(model, BATCH[0], method, logprobs=3, **own, **drawn)
    torch.testing.assert_close(alone.logprobs.tokens, found.logprobs[0].tokens)


def spied(function: Any, rows: list[Tensor]) -> Any:
    def spy(*given: Any, **options: Any) -> Any:
        made = function(*given, **options)
        rows.append(made.detach().clone())
        return made

    return spy


def test_log_probabilities_of_a_canvas_filled_at_once() -> None:
    """With one step they are those of a forward over nothing but masks."""
    model, ids = load("tiny-masked"), [100, 101, 102, 32]
    found = generate(model, ids, "llada", steps=1, max_new_tokens=6, logprobs=2, end_tokens=())
    canvas = torch.tensor([ids + [model.mask_token] * 6])
    cache, start = model.new_cache(1, canvas.shape[1]), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        hidden = model.recompute(canvas, cache, start, counts=None, visible=torch.tensor([canvas.shape[1]]))
        likely = model.logits(hidden)[0, len(ids) :].log_softmax(-1)
    torch.testing.assert_close(found.logprobs.tokens, likely.gather(-1, found.tokens[:, None])[:, 0])
    assert torch.equal(found.logprobs.top_ids, likely.topk(2, -1).indices)


def test_log_probabilities_of_fixed_recurrences() -> None:
    """With one recurrence a row is that of a forward over the whole text."""
    model, prompt = load("tiny-recurrent"), [100, 101, 102]
    options = {"recurrences": 1, "init_scale": 0.0, "max_new_tokens": 7, "logprobs": 2, "end_tokens": ()}
    found = generate(model, prompt, "recurrent_static", **options)
    text = torch.tensor([prompt + found.tokens.tolist()])
    with torch.inference_mode():
        cache = model.new_cache(1, text.shape[1])
        likely = model(text, cache=cache, recurrences=1, seed=0, init_scale=0.0)[0, len(prompt) - 1 : -1].log_softmax(
            -1
        )
    torch.testing.assert_close(found.logprobs.tokens, likely.gather(-1, found.tokens[:, None])[:, 0])
    assert torch.equal(found.logprobs.top_ids, likely.topk(2, -1).indices)


def test_tokens_of_a_prompt_have_no_log_probability() -> None:
    model = load("tiny-masked")
    prompt = [100, model.mask_token, 102, model.mask_token]
    told = generate(model, prompt, "llada", infill=True, max_new_tokens=2, logprobs=1, end_tokens=()).logprobs
    assert told.tokens.isnan().tolist() == [False, True, False, False, False]


def test_no_tokens_have_no_log_probabilities() -> None:
    found = generate(small_transformer(2), BATCH, max_new_tokens=0, logprobs=2).logprobs
    assert [part.top.shape for part in found] == [(0, 2)] * 3


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].refusal("logprobs", 1)])
def test_methods_without_log_probabilities_say_so(method: str) -> None:
    with pytest.raises(NotImplementedError, match=f"method '{method}' does not follow logprobs: "):
        generate(example(METHODS[method]), [1, 2], method, logprobs=1)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"stop_sequences": [[]]}, "stop_sequences must hold no empty list"),
        ({"stop_sequences": [3]}, "stop_sequences must be a sequence of lists of ints, got int"),
        ({"stopping_criteria": 3}, "stopping_criteria must be a function or a list of functions, got int"),
        ({"max_time": -1}, "max_time must be finite and at least 0, got -1"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
    ],
)
def test_bad_options_are_refused(option: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^pdkernels.decoding.generate: {words}"):
        generate(small_transformer(1), [1, 2], **option)
