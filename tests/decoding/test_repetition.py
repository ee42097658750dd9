"""A repetition penalty and stop strings in every method: the law of the penalised model, and where a text ends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pdkernels.decoding import generate
from pdkernels.decoding.methods import METHODS
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.dream import dream
from pdkernels.reference.llada import llada
from pdkernels.reference.repetition import PenalisedModel
from tests.decoding import lossless_sweep
from tests.support.base import Plain, streams
from tests.support.drafters import with_drafters
from tests.support.masked import MASK, small_masked
from tests.support.plans import example
from tests.support.tri_mode import small_transformer

BATCH = [[3, 1, 4, 1, 5], [2], [7, 7, 7]]
SIZES: dict[str, dict[str, Any]] = {name: options[0] for name, options in lossless_sweep.METHODS.items()}
SIZES |= {"block_diffusion": {"block_size": 4}, "fast_dllm": {"block_size": 4}, "fast_dllm_v2": {"block_size": 4}}
SIZES["fast_dllm_v2"] |= {"small_block_size": 2}
NAMES = sorted(METHODS)


class Letters:
    """A letter for each id."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token) for token in tokens)


def with_text(method: str) -> Any:
    model = copy.copy(example(METHODS[method]))
    model.tokenizer = Letters()
    return model


@pytest.mark.covering
@pytest.mark.parametrize("penalty", [1.6, 0.7])
@pytest.mark.parametrize("method", sorted(lossless_sweep.METHODS))
def test_lossless_methods_give_the_tokens_of_the_penalised_model(method: str, penalty: float) -> None:
    model = small_transformer(4, 24, head_dim=16)
    plain = PenalisedModel(Plain(model), penalty, model.mask_token)
    if "drafter" in METHODS[method].requires:
        model = with_drafters(model)
    expected = [autoregressive(plain, prompt, 14).tokens for prompt in BATCH]
    options = {"max_new_tokens": 14, "repetition_penalty": penalty}
    for sizes in lossless_sweep.METHODS[method]:
        found = generate(model, BATCH, method, page_size=3 if penalty > 1 else None, **options, **sizes)
        assert [tokens.tolist() for tokens in found.tokens] == expected
    assert [tokens.tolist() for tokens in generate(model, BATCH, **options).tokens] == expected
    assert [tokens.tolist() for tokens in generate(model, BATCH, max_new_tokens=14).tokens] != expected


@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_a_row_of_a_canvas_is_penalised_for_all_of_the_canvas(guidance: float) -> None:
    model = small_masked(3)
    plain = PenalisedModel(Plain(model), 1.8, MASK)
    options = {"max_new_tokens": 6, "repetition_penalty": 1.8}
    found = generate(model, BATCH, "llada", steps=3, guidance=guidance, **options)
    other = generate(model, BATCH, "dream", steps=3, temperature=0.5, **options)
    for (prompt, own), ours, theirs in zip(streams(BATCH, {}), found.tokens, other.tokens, strict=True):
        settings = {"mask_token": MASK, "steps": 3, "seed": own["seed"]}
        assert ours.tolist() == llada(plain, prompt, 6, guidance=guidance, **settings).tokens
        assert theirs.tolist() == dream(plain, prompt, 6, temperature=0.5, **settings).tokens


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("method", NAMES)
def test_all_methods_alone_as_in_a_batch(method: str) -> None:
    model, options = example(METHODS[method]), SIZES.get(method, {}) | {"max_new_tokens": 8, "end_tokens": ()}
    told = generate(model, BATCH, METHODS[method], repetition_penalty=3.0, **options)
    for (prompt, own), tokens in zip(streams(BATCH, options), told.tokens, strict=True):
        alone = generate(model, prompt, METHODS[method], repetition_penalty=3.0, **own)
        assert torch.equal(alone.tokens, tokens)
    if not METHODS[method].fills_canvases:  # there one token is far ahead of all others
        free = generate(model, BATCH, METHODS[method], **options).tokens
        assert any(not torch.equal(ours, theirs) for ours, theirs in zip(told.tokens, free, strict=True))


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("method", [name for name in NAMES if METHODS[name].wing != "planned"])
def test_stop_strings_end_texts(method: str) -> None:
    """At the token that completes one, wherever in a draft or a block it is; alone, in a batch, and told as it comes."""
    model, options = with_text(method), SIZES.get(method, {}) | {"max_new_tokens": 8, "end_tokens": ()}
    whole = [tokens.tolist() for tokens in generate(model, BATCH, METHODS[method], **options).tokens]
    for sequence, at in ((1, 5),):
        stop = Letters().decode(whole[sequence][max(0, at - 1) : at + 1])
        expected = []
        for tokens in whole:
            found = Letters().decode(tokens).find(stop)
            expected.append(tokens if found < 0 else tokens[: found + len(stop)])
        heard: list[list[int]] = [[], [], []]
        listen = {"on_tokens": lambda n, ids, _, heard=heard: heard[n].extend(ids)}
        result = generate(model, BATCH, METHODS[method], stop_strings=[stop, "no such"], **listen, **options)
        assert [tokens.tolist() for tokens in result.tokens] == expected
        assert heard == expected
        (prompt, own) = streams(BATCH, options)[sequence]
        alone = generate(model, prompt, METHODS[method], stop_strings=stop, **own)
        assert alone.tokens.tolist() == expected[sequence]
        assert alone.stats.forwards <= generate(model, prompt, METHODS[method], **own).stats.forwards


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("repetition_penalty", 0.0, ValueError),
        ("repetition_penalty", "1", TypeError),
        ("stop_strings", [""], ValueError),
        ("stop_strings", [3], TypeError),
        ("stop_strings", ["a"], ValueError),
    ],
)
def test_what_is_refused(option: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=option):
        generate(small_transformer(4, 24, head_dim=16), [1, 2], **{option: value})
