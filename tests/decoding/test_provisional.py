"""What stands after the text of a request whose positions are filled in any order, against the trace of the generation."""

from __future__ import annotations

from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding import find
from tests.harness.sessions import open_session, running_batch

CANVASES = [
    ("llada", {}),
    ("llada", {"block_size": 3, "remasking": "random"}),
    ("fast_dllm", {"block_size": 3, "threshold": 0.5}),
]


class Watched:
    """A request that notes what stands after its text at each step, with the number of tokens that were told before."""

    def __init__(self, model: Any, method: str, prompt: str, limit: int, ends: Any, **options: Any) -> None:
        self.told: list[int] = []
        self.seen: list[tuple[int, list[int | None]]] = []
        self.session, _ = open_session(model, prompt, limit, ends, lambda _, ids, __: self.told.extend(ids), trace=True)
        self.session.on_provisional = lambda tokens: self.seen.append((len(self.told), tokens))
        largest, _ = open_session(model, [[0] * 20] * 2, limit, ends)
        batch = running_batch(find(method).steps, largest, **options)
        batch.admit(1, self.session, 3)
        while not batch.step():
            pass
        batch.retire(1)
        assert self.session.trace is not None
        self.trace = self.session.trace[0]


@pytest.mark.parametrize("ends", [(), None], ids=["no end", "end"])
@pytest.mark.parametrize(("method", "options"), CANVASES)
def test_a_canvas_shows_what_its_trace_has(method: str, options: dict[str, Any], ends: Any) -> None:
    model = pd.models.load("tiny-masked")
    one = Watched(model, method, "482 + 967 = ?", 12, ends, **options)
    prompt, stop = len(one.session.prompts[0]), set(one.session.end_tokens)
    assert one.seen[0] == (0, []) and len(one.seen) == len(one.trace) + 1
    several = 0
    for (known, tokens), step in zip(one.seen[1:], one.trace, strict=True):
        canvas = {**dict(enumerate(step.tokens)), **step.committed}
        written = [canvas[place] for place in sorted(canvas)][prompt:]
        assert written[:known] == one.told[:known]
        after = written[known:]
        after = after[: next((n for n, token in enumerate(after) if token in stop), len(after))]
        expected = [None if token == model.mask_token else token for token in after]
        assert tokens == expected[: len(tokens)] and not any(expected[len(tokens) :])
        several += len(tokens) > 1
    assert several or options.get("block_size")


@pytest.mark.parametrize(
    "options", [{"block_size": 4, "threshold": 0.8}, {"block_size": 5, "refresh": "bidirectional"}]
)
def test_a_block_shows_what_its_trace_has(options: dict[str, Any]) -> None:
    model = pd.models.load("tiny-trimode")
    one = Watched(model, "block_diffusion", "class Node:", 14, (), **options)
    shown = [tokens for _, tokens in one.seen if tokens]
    assert shown and any(None in tokens for tokens in shown)
    text = one.session.tokens[0]
    for known, tokens in one.seen:  # a filled position of a block is final
        assert all(token in (None, text[known + n]) for n, token in enumerate(tokens))
    blocks = [{**dict(enumerate(step.block)), **step.committed} for step in one.trace]
    first = 0 if options.get("refresh") else 1
    for tokens in shown:
        assert any(
            [None if block[n] == model.mask_token else block[n] for n in range(first, first + len(tokens))] == tokens
            for block in blocks
        )


def test_a_wave_shows_its_rows() -> None:
    model = pd.models.load("tiny-recurrent")
    one = Watched(model, "recurrent_diffusion", "class Node:", 14, (), headway=2)
    assert len(one.seen) == len(one.trace) + 1
    for (_, tokens), step in zip(one.seen[1:], one.trace, strict=True):
        assert tokens == step.predictions[step.frozen :]
    assert any(len(tokens) > 1 for _, tokens in one.seen)
