"""Fast-dLLM v2: every forward recomputed from the versions of the rows that it may see, and its schedule step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdkernels.reference.fast_dllm_v2 import fast_dllm_v2
from pdkernels.reference.masked_model import MaskedTransformerReference, random_weights
from pdkernels.reference.masked_sampling import MaskedResult
from pdkernels.reference.sampling import uniforms

MODEL = MaskedTransformerReference(random_weights("qwen2", seed=5), heads=4, names="qwen2")
OWN = MaskedTransformerReference(random_weights("qwen2", seed=5), heads=4, names="qwen2", predicts="own")
MASK = 12


class Versions:
    """All rows that ever went through a model, side by side: each sees the newest version of every position.

    So the logits of every forward come from one dense forward of the model, in which nothing is kept or replaced.
    """

    def __init__(self, model: MaskedTransformerReference) -> None:
        self.model = model
        self.rows: list[tuple[int, int]] = []  # token, position
        self.sees: list[list[int]] = []
        self.newest: dict[int, int] = {}

    def forward(self, tokens: list[int], start: int, stop: int) -> Tensor:
        fresh = range(len(self.rows), len(self.rows) + stop - start)
        self.rows += [(tokens[p], p) for p in range(start, stop)]
        self.newest |= dict(zip(range(start, stop), fresh))
        self.sees += [list(self.newest.values())] * len(fresh)
        mask = torch.zeros(len(self.rows), len(self.rows), dtype=torch.bool)
        for row, columns in enumerate(self.sees):
            mask[row, columns] = True
        ids, positions = (torch.tensor([list(column)]) for column in zip(*self.rows))
        return self.model(ids, positions, mask)[0, list(fresh)]


def replay(
    model: MaskedTransformerReference,
    result: MaskedResult,
    prompt: list[int],
    limit: int,
    size: int,
    small: int,
    threshold: float,
    cached: bool,
    steps: int | None = None,
) -> list[int]:
    """Checks the trace; returns the number of rows of each forward."""
    versions, end, rows = Versions(model), len(prompt) + limit, []
    shift = 1 if model.predicts == "next" else 0
    trace = iter(result.trace)
    canvas = [*prompt, *[MASK] * limit]
    start = len(prompt) // size * size

    def check(logits: Tensor, first: int, window: tuple[int, int], share: int = 1) -> None:
        """`logits` row i is at position first + i."""
        step = next(trace)
        assert step.tokens == canvas and step.window == window
        open_places = [p for p in range(max(window[0], len(prompt)), window[1]) if canvas[p] == MASK]
        distributions = {p: logits[p - shift - first, :MASK].softmax(-1) for p in open_places}
        assert step.confidence == pytest.approx(
            {p: distribution.max().item() for p, distribution in distributions.items()}
        )
        best = sorted(open_places, key=lambda p: -step.confidence[p])
        sure = {p for p in open_places if step.confidence[p] > threshold}
        chosen = sure if len(sure) >= share else set(best[:share])
        assert step.committed == {p: distributions[p].argmax().item() for p in chosen}
        for p, token in step.committed.items():
            canvas[p] = token

    if start:
        for block in range(0, start, size):
            logits = versions.forward(canvas, block, block + size)
        check(logits, start - size, (len(prompt), len(prompt) + shift * (start == len(prompt))))
        rows.append(start)
    while True:
        stop, inside = min(start + size, end), False
        for low in range(start, stop, small):
            high = min(low + small, stop)
            number = 0
            while MASK in canvas[low:high]:
                share = 1 if steps is None else small // steps + (number < small % steps)
                whole = not cached or not inside or (shift == 1 and canvas[low] == MASK)
                first, last = (start, stop) if whole else (low, high)
                check(versions.forward(canvas, first, last), first, (low, high), share)
                number += 1
                rows.append(last - first)
                inside = True
        if stop == end:
            assert next(trace, None) is None
            return rows
        check(versions.forward(canvas, start, stop), start, (stop, stop + shift))
        rows.append(stop - start)
        start = stop


@pytest.mark.covering(2)
@pytest.mark.parametrize(("model", "steps"), [(MODEL, None), (OWN, None), (OWN, 2)], ids=["next", "own", "own, shared"])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("threshold", [0.3, 0.5, 1.0])
@pytest.mark.parametrize(
    ("prompt", "limit", "size", "small"),
    [
        ([3, 1, 4], 11, 8, 4),  # shorter than a block: no forward of its own
        ([3, 1, 4, 1, 5, 9, 2, 6], 9, 4, 2),  # two whole blocks: they give the next token
        ([3, 1, 4, 1, 5], 8, 4, 4),  # exactly one block
        ([3, 1, 4, 1, 5, 9], 7, 6, 4),  # the last small block of a block is shorter
        ([3, 1], 3, 1, 1),  # autoregressive
        ([3], 1, 8, 2),
    ],
)
def test_every_forward(prompt, limit, size, small, threshold, cached, steps, model) -> None:
    steps = steps and min(steps, small)
    result = fast_dllm_v2(
        model,
        prompt,
        limit,
        mask_token=MASK,
        block_size=size,
        small_block_size=small,
        threshold=threshold,
        steps=steps,
        block_cache=cached,
    )
    rows = replay(model, result, prompt, limit, size, small, threshold, cached, steps)
    assert result.forwards == len(result.trace) == len(rows) and len(result.tokens) == limit
    if cached and threshold == 1.0 and small > 2 and steps is None:
        assert small in rows


def test_blocks_of_one_are_autoregressive() -> None:
    result = fast_dllm_v2(MODEL, [3, 1, 4], 5, mask_token=MASK, block_size=1, small_block_size=1)
    text = [3, 1, 4]
    for _ in range(5):
        length = len(text)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        text.append(MODEL(torch.tensor([text]), torch.arange(length)[None], causal)[0, -1, :MASK].argmax().item())
    assert result.tokens == text[3:] and result.forwards == 5


def test_the_schedule_by_hand() -> None:
    """Prompt of 4, blocks of 4, small blocks of 2, one token a forward."""
    run = lambda **options: fast_dllm_v2(  # noqa: E731
        MODEL, [1, 2, 3, 4], 8, mask_token=MASK, block_size=4, small_block_size=2, threshold=1.0, **options
    )
    result = run()
    assert [(step.window, len(step.committed)) for step in result.trace] == [
        ((4, 5), 1),  # the prompt's
        ((4, 6), 1),
        ((6, 8), 1),
        ((6, 8), 1),
        ((8, 9), 1),  # the full block's
        ((8, 10), 1),
        ((10, 12), 1),
        ((10, 12), 1),  # and none for the last block
    ]
    ended = run(end_tokens=(result.tokens[4],))
    first = result.tokens.index(result.tokens[4])
    assert ended.tokens == result.tokens[: first + 1] and ended.forwards < 8
    assert run(end_tokens=(result.tokens[0],)).forwards == 1
    nothing = fast_dllm_v2(MODEL, [1, 2, 3, 4], 0, mask_token=MASK, block_size=4, small_block_size=2)
    assert nothing == ([], 0, [])


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_sampling_and_its_confidence(top_p: float) -> None:
    run = lambda seed, temperature: fast_dllm_v2(  # noqa: E731
        MODEL,
        [3, 1, 4],
        5,
        mask_token=MASK,
        block_size=8,
        small_block_size=8,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    assert len({tuple(run(seed, 1.2).tokens) for seed in range(8)}) > 4
    assert run(0, 0.0) == fast_dllm_v2(MODEL, [3, 1, 4], 5, mask_token=MASK, block_size=8, small_block_size=8)
    step = run(4, 1.2).trace[0]
    full = torch.ones(8, 8, dtype=torch.bool)
    logits = MODEL(torch.tensor([step.tokens]), torch.arange(8)[None], full)[0, :, :MASK]
    for position, token in step.committed.items():
        distribution = (logits[position - 1] / 1.2).softmax(-1)
        kept = torch.tensor([distribution[distribution > p].sum().item() < top_p for p in distribution.tolist()])
        noise = torch.log(-torch.log(uniforms(4, 1, torch.tensor(position), torch.arange(MASK))))
        assert token == (logits[position - 1] - 1.2 * noise).masked_fill(~kept, -torch.inf).argmax().item()
        assert step.confidence[position] == pytest.approx((distribution[token] / distribution[kept].sum()).item())


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"small_block_size must be in 1 \.\. block_size \(4\), got 8"):
        fast_dllm_v2(MODEL, [1], 3, mask_token=MASK, block_size=4)
