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


def test_a_result_equals_itself_alone() -> None:
    first, second = (generate(model(), [0, 1], max_new_tokens=5, logprobs=2) for _ in range(2))
    assert first == first and first != second and len({first, second, first}) == 2
    batch = generate(model(), [[0, 1], [2]], max_new_tokens=5)
    assert batch in [first, batch] and batch != first


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
    (
        {"prompt": "text"},
        ValueError,
        GENERATE
        + "prompt must be token ids (the model has no tokenizer), got a str. Encode it, or give the model "
        + "its tokenizer: tokenizer.json, in a folder.",
    ),
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
        GENERATE
        + "method 'autoregressive' has no option 'block_size'. It accepts: allow_mask_token, page_size, temperature, "
        "top_k, top_p, min_p, typical_p, seed.",
    ),
    (
        {"blocksize": 4},
        TypeError,
        GENERATE + "method 'jacobi' has no option 'blocksize'. "
        "Did you mean 'block_size'? It accepts: block_size, window, draft, allow_mask_token, page_size, temperature, top_k, top_p, min_p, typical_p, seed.",
    ),
    ({"page_size": 0}, ValueError, GENERATE + "page_size must be at least 1, got 0."),
    ({"page_size": "big"}, TypeError, GENERATE + "page_size must be an int, got str."),
    ({"block_size": 0}, ValueError, JACOBI + "block_size must be at least 1, got 0."),
    ({"window": 0}, ValueError, JACOBI + "window must be at least 1, got 0."),
    ({"window": 2.0}, TypeError, JACOBI + "window must be an int, got float."),
    ({"seed": "x"}, TypeError, "pdkernels.decoding.generate: seed must be an int or a list of ints, got str."),
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


@pytest.mark.parametrize(
    "prompt", [torch.ones(3, dtype=torch.int64, device="meta"), torch.eye(3).long().to_sparse()[0]]
)
def test_a_prompt_without_numbers_is_refused(prompt: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="prompt must be a dense tensor with numbers, got one "):
        generate(model(), prompt)


def test_options_are_checked_even_when_no_token_is_asked_for() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        generate(model(), [1], "jacobi", max_new_tokens=0, block_size=0)


def test_lossless_methods() -> None:
    assert is_lossless("autoregressive") and is_lossless("quadratic_self_speculation")
    assert not is_lossless("block_diffusion")
    with pytest.raises(ValueError, match="method must name a decoding method, got 'greedy'"):
        is_lossless("greedy")


def test_method_options() -> None:
    draws = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
    assert method_options("autoregressive") == ("allow_mask_token", "page_size", *draws)
    assert method_options("jacobi") == ("block_size", "window", "draft", "allow_mask_token", "page_size", *draws)


def test_autocast_around_the_call_changes_nothing() -> None:
    transformer, prompt = small_transformer(0, head_dim=16).float(), [1, 2, 3]
    expected = generate(transformer, prompt, max_new_tokens=6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(generate(transformer, prompt, max_new_tokens=6).tokens, expected.tokens)
