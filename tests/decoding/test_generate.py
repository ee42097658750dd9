"""The entry point of all decoding methods: inputs, results, streaming, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import available, generate, is_lossless, method_options, supports
from tests.support.causal import SCRIPTS, VOCABULARY, FakeModel
from tests.support.tri_mode import small_transformer


class Letters:
    """A tokenizer of the letters a .. w."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token + ord("a")) for token in ids)


# Methods without special requirements on the model; the others have these tests in their own files.
ANY_MODEL = [method for method in available() if supports(method, None)]
METHODS = [method for method in ANY_MODEL if "mask_token" not in method_options(method)]


def model(**options: Any) -> FakeModel:
    return FakeModel(SCRIPTS["sticky"], **options)


def test_every_form_of_a_prompt() -> None:
    lettered = model(tokenizer=Letters())
    ids = [2, 0, 1]
    expected = generate(lettered, ids, max_new_tokens=5)
    for prompt in (tuple(ids), "cab", torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)):
        result = generate(lettered, prompt, max_new_tokens=5)
        assert torch.equal(result.tokens, expected.tokens) and result.text == expected.text
    batch = generate(lettered, [ids, "cab", torch.tensor(ids)], max_new_tokens=5)
    assert isinstance(batch.tokens, list) and batch.text == [expected.text] * 3
    assert all(torch.equal(tokens, expected.tokens) for tokens in batch.tokens)
    one = generate(lettered, ["cab"], max_new_tokens=5)
    assert isinstance(one.tokens, list) and one.text == [expected.text]


def test_result_of_a_single_prompt() -> None:
    result = generate(model(), [1, 2], "jacobi", max_new_tokens=5)
    assert result.tokens.dtype == torch.int64 and result.tokens.shape == (5,)
    assert result.text is None
    stats = result.stats
    assert stats.method == "jacobi" and stats.tokens == 5 and stats.seconds > 0 and stats.trace is None
    assert stats.tokens_per_second == stats.tokens / stats.seconds
    assert len(stats.accepted) == 1 and len(stats.accepted[0]) == stats.forwards - 1


@pytest.mark.parametrize("method", METHODS)
def test_no_tokens_need_no_forward(method: str) -> None:
    fake = model()
    result = generate(fake, [[1], [2, 3]], method, max_new_tokens=0, trace=True)
    assert [tokens.tolist() for tokens in result.tokens] == [[], []]
    assert result.stats.forwards == 0 and result.stats.tokens_per_forward == 0.0
    assert result.stats.tokens_per_second == 0.0 and result.stats.accepted == [[], []]
    assert fake.rows_seen == []


@pytest.mark.parametrize("method", METHODS)
def test_end_tokens_default_to_those_of_the_model(method: str) -> None:
    fake = FakeModel(SCRIPTS["position"], end_tokens=(4,))
    stopped = generate(fake, [3], method, max_new_tokens=40).tokens.tolist()
    assert stopped[-1] == 4 and 4 not in stopped[:-1] and len(stopped) < 40
    assert len(generate(fake, [3], method, max_new_tokens=40, end_tokens=()).tokens) == 40


# Methods that accept no draft on the prompts below.
WITHOUT_DRAFTS = ("autoregressive",)


@pytest.mark.parametrize("method", METHODS)
def test_streaming_gives_every_token_once_and_marks_drafts(method: str) -> None:
    heard: list[list[int]] = [[], []]
    drafts = [0, 0]

    def listen(sequence: int, ids: list[int], accepted: int) -> None:
        assert 0 <= len(ids) - accepted <= 1  # at most one token a step is the model's own
        heard[sequence] += ids
        drafts[sequence] += accepted
        ids.clear()  # the list belongs to the listener

    result = generate(model(), [[1, 2], [5]], method, max_new_tokens=30, on_tokens=listen)
    assert heard == [tokens.tolist() for tokens in result.tokens]
    for sequence, accepted in enumerate(result.stats.accepted):
        assert drafts[sequence] == sum(accepted) - len(accepted)
    assert (sum(drafts) > 0) == (method not in WITHOUT_DRAFTS)


def test_time_spent_listening_does_not_count() -> None:
    import time

    result = generate(model(), [1], max_new_tokens=4, on_tokens=lambda *_: time.sleep(0.1))
    assert result.stats.seconds < 0.3


def test_reachable_from_the_package() -> None:
    assert pd.decoding.generate is generate


NAMES = f"Known: {', '.join(available())}."
GENERATE, JACOBI = "pdkernels.decoding.generate: ", "pdkernels.decoding.jacobi: "

ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt": []}, ValueError, GENERATE + "prompt must hold at least one token, got an empty list."),
    ({"prompt": [[1], []]}, ValueError, GENERATE + "prompt must hold at least one token, got an empty prompt."),
    ({"prompt": torch.zeros(0, dtype=torch.int64)}, ValueError, "prompt must hold at least one token"),
    ({"prompt": [1, VOCABULARY]}, ValueError, GENERATE + "prompt must hold ids in 0 .. 22, got 1 .. 23."),
    ({"prompt": [-1, 4]}, ValueError, GENERATE + "prompt must hold ids in 0 .. 22, got -1 .. 4."),
    ({"prompt": "text"}, ValueError, GENERATE + "prompt must be token ids (the model has no tokenizer), got a str."),
    ({"prompt": 5}, TypeError, GENERATE + "prompt must be text, token ids, messages or a list of these, got int."),
    (
        {"prompt": [[1, 2.5]]},
        TypeError,
        GENERATE + "prompt must be text, a 1-D tensor, a list of ints or messages, got list.",
    ),
    ({"prompt": torch.zeros(3)}, TypeError, GENERATE + "prompt must be an integer tensor, got torch.float32."),
    (
        {"prompt": torch.zeros(2, 3, dtype=torch.int64)},
        ValueError,
        GENERATE + "prompt must be a 1-D tensor, got shape (2, 3). Give a batch as a list of 1-D tensors.",
    ),
    ({"max_new_tokens": -1}, ValueError, GENERATE + "max_new_tokens must be at least 0, got -1."),
    ({"max_new_tokens": 1.0}, TypeError, GENERATE + "max_new_tokens must be an int, got float."),
    ({"end_tokens": [99]}, ValueError, GENERATE + "end_tokens must hold ids in 0 .. 22, got 99."),
    ({"end_tokens": 4}, TypeError, GENERATE + "end_tokens must be a sequence of ints, got int."),
    (
        {"model": "tiny-code"},
        TypeError,
        GENERATE + "model must be a model, got str. Load one with pdkernels.models.load.",
    ),
    ({"end_tokens": ["x"]}, TypeError, GENERATE + "end_tokens must hold ints, got str."),
    ({"method": 3}, TypeError, GENERATE + "method must be a str, got int."),
    (
        {"method": "jacoby"},
        ValueError,
        GENERATE + "method must name a decoding method, got 'jacoby'. Did you mean 'jacobi'? " + NAMES,
    ),
    (
        {"method": "autoregressive", "block_size": 4},
        TypeError,
        GENERATE + "method 'autoregressive' has no option 'block_size'. It accepts: temperature, allow_mask_token, "
        "seed, page_size.",
    ),
    (
        {"blocksize": 4},
        TypeError,
        GENERATE + "method 'jacobi' has no option 'blocksize'. "
        "Did you mean 'block_size'? It accepts: block_size, window, draft, temperature, allow_mask_token, seed, page_size.",
    ),
    ({"page_size": 0}, ValueError, GENERATE + "page_size must be at least 1, got 0."),
    ({"page_size": "big"}, TypeError, GENERATE + "page_size must be an int, got str."),
    ({"block_size": 0}, ValueError, JACOBI + "block_size must be at least 1, got 0."),
    ({"window": 0}, ValueError, JACOBI + "window must be at least 1, got 0."),
    ({"window": 2.0}, TypeError, JACOBI + "window must be an int, got float."),
    ({"seed": "x"}, TypeError, JACOBI + "seed must be an int or a list of ints, got str."),
    (
        {"window": 4, "block_size": 4},
        ValueError,
        JACOBI + "block_size=4 and window=4 exclude each other. "
        "Give block_size to decode block by block, or window to keep one running draft.",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "text"), ERRORS)
def test_errors(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        generate(**{"model": model(), "prompt": [1], "method": "jacobi", "max_new_tokens": 4, **arguments})
    assert text in str(raised.value)


def test_options_are_checked_even_when_no_token_is_asked_for() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        generate(model(), [1], "jacobi", max_new_tokens=0, block_size=0)


@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("method", ANY_MODEL)
def test_kernels_and_dense_masks_give_the_same_tokens(method: str, page_size: int | None) -> None:
    """Caches in float32 are read by kernels, in fp64 by PyTorch; a sequence gets its tokens alone and in a batch."""
    prompts, options = [[1, 2, 3, 4, 5, 6, 7], [5], [9, 9]], {"max_new_tokens": 24, "page_size": page_size}
    exact, model = small_transformer(4, head_dim=16), small_transformer(4, head_dim=16).float()
    together = generate(model, prompts, method, **options).tokens
    for prompt, tokens in zip(prompts, together, strict=True):
        assert torch.equal(tokens, generate(exact, prompt, method, **options).tokens)
        assert torch.equal(tokens, generate(model, prompt, method, **options).tokens)
        if is_lossless(method):
            assert torch.equal(tokens, generate(exact, prompt, max_new_tokens=24).tokens)


def test_lossless_methods() -> None:
    assert is_lossless("autoregressive") and is_lossless("quadratic_self_speculation")
    assert not is_lossless("block_diffusion")
    with pytest.raises(ValueError, match="method must name a decoding method, got 'greedy'"):
        is_lossless("greedy")


def test_method_options() -> None:
    assert method_options("autoregressive") == ("temperature", "allow_mask_token", "seed", "page_size")
    jacobi = ("block_size", "window", "draft", "temperature", "allow_mask_token", "seed", "page_size")
    assert method_options("jacobi") == jacobi


def test_autocast_around_the_call_changes_nothing() -> None:
    transformer, prompt = small_transformer(0, head_dim=16).float(), [1, 2, 3]
    expected = generate(transformer, prompt, max_new_tokens=6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(generate(transformer, prompt, max_new_tokens=6).tokens, expected.tokens)
