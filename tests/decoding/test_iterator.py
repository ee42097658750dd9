"""`pdkernels.decoding.stream`: the pieces of `generate`, while it runs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate, stream
from pdkernels.decoding.methods import METHODS
from tests.support.plans import example
from tests.support.tri_mode import small_transformer


class Pairs:
    """Two tokens make a character; the first one alone decodes to U+FFFD."""

    def decode(self, tokens: list[int]) -> str:
        whole = "".join(chr(97 + a + b) for a, b in zip(tokens[::2], tokens[1::2], strict=False))
        return whole + "\ufffd" * (len(tokens) % 2)


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("method", METHODS)
def test_the_pieces_are_the_result(method: str) -> None:
    model = example(METHODS[method])
    options: dict[str, Any] = {"max_new_tokens": 12}
    options |= {"block_size": 4} if "block_size" in METHODS[method].options else {}
    options |= {"small_block_size": 2} if method == "fast_dllm_v2" else {}
    batch = [[52, 43, 49], [12, 7]]
    expected = generate(model, batch, METHODS[method], **options)
    pieces = stream(model, batch, METHODS[method], **options)
    ids: list[list[int]] = [[], []]
    for piece in pieces:
        ids[piece.sequence] += piece.ids
    assert (
        ids == [tokens.tolist() for tokens in expected.tokens] == [tokens.tolist() for tokens in pieces.result.tokens]
    )


@pytest.mark.parametrize("limit", [7, 8])
def test_text_comes_in_whole_characters(limit: int) -> None:
    model = small_transformer(3)
    model.tokenizer = Pairs()
    for method in ("autoregressive", "jacobi"):
        pieces = stream(model, [5, 6], method, max_new_tokens=limit, end_tokens=())
        texts = [piece.text for piece in pieces]
        assert "".join(texts) == pieces.result.text and not any("\ufffd" in text for text in texts[:-1])
        assert texts[-1].endswith("\ufffd") == bool(limit % 2)


def test_pieces_come_while_the_model_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model, forwards = small_transformer(1), []
    forward = type(model).forward

    def slow(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        forwards.append(None)
        time.sleep(0.01)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(type(model), "forward", slow)
    with stream(model, [1, 2], max_new_tokens=200, end_tokens=()) as pieces:
        for piece in pieces:
            assert len(piece.ids) == 1 and len(forwards) < 50
            break
    before = len(forwards)
    time.sleep(0.05)
    assert len(forwards) == before < 60 and pieces.result is None


def test_a_stream_that_is_dropped_ends() -> None:
    threads = threading.active_count()
    pieces = stream(small_transformer(1), [1, 2], max_new_tokens=2000, end_tokens=())
    next(pieces)
    del pieces
    for _ in range(200):
        if threading.active_count() == threads:
            return
        time.sleep(0.02)
    raise AssertionError("the thread still runs")


def test_errors_are_raised_in_the_loop() -> None:
    with pytest.raises(ValueError, match="temperature must be finite"):
        list(stream(small_transformer(1), [1], temperature=-1.0))
    with pytest.raises(TypeError, match="on_tokens must be left out"):
        pd.decoding.stream(small_transformer(1), [1], on_tokens=print)
