"""The released decoder of planned diffusion: the plain form on random options, and the released loop with a cache that is
overwritten in place. Tokens, rounds and steps are those of the method `PLANNED`.

In that loop keys and values of all positions are in one buffer; a step computes the rows of all chunks that still have masks and
writes theirs; nothing is refreshed when a chunk is complete. Shifted logits, entropy of the distribution, one clock for all chunks.
Two of its faults are left out: it may guess control tokens, and rows of an empty chunk are never computed.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.papers.released.plain_planned import released_planned
from bench.papers.released.planned import PLANNED
from pdkernels.decoding import generate
from tests.decoding.test_planned import draws, prompt_lists, rules
from tests.support.base import page_sizes, seeds
from tests.support.plans import CLOSE, END, MASK, OPEN, assert_same, planning_model, references

PROMPTS = [[END], [11, 3, END], [12, 12, 12, END], [10, END], [14, 2, END], [13, 13, 4, END]]
BATCH = [[END], [11, 3, END], [12, 12, 12, END], [10, END]]
LIMIT, ROUNDS = 200, 3
ways = st.sampled_from(["released", "released", "ours"])


@settings(max_examples=20)
@given(
    weights=st.integers(0, 2),
    predicts=st.sampled_from(["own", "next"]),
    batch=prompt_lists,
    limit=st.integers(0, 48),
    sparse=st.booleans(),
    steps_ratio=st.sampled_from([1.0, 1.0, 0.75, 0.5, 0.25, 0.01]),
    way_of=st.fixed_dictionaries({part: ways for part in ("rule", "schedule", "keeping", "parser")}),
    limits=rules,
    distribution=draws,
    sizes=st.sampled_from([{}, {"unit": 1}, {"length_scale": 1.5}, {"length_scale": 0.5}, {"length_scale": 0.0}]),
    max_rounds=st.sampled_from([None, None, 1, 2]),
    seed=seeds,
    page_size=page_sizes,
)
def test_equals_the_plain_form(
    weights, predicts, batch, limit, way_of, limits, distribution, sizes, page_size, **options
) -> None:
    options |= way_of | limits | distribution | sizes
    model = planning_model(weights, predicts)
    result = generate(model, batch, PLANNED, max_new_tokens=limit, trace=True, page_size=page_size, **options)
    assert_same(result, references(model, batch, limit, released_planned, **options))


@pytest.mark.parametrize("sparse", [False, True])
def test_released_rows_are_those_from_before_the_last_tokens(sparse: bool) -> None:
    """Later rounds see masks in finished chunks, and write other tokens because of it. Dense chunks of the same round see them too."""
    model = planning_model(0)
    options: dict[str, Any] = {"temperature": 0.7, "seed": 1, "sparse": sparse, "steps_ratio": 0.5}
    stale, exact = (
        generate(model, BATCH[:2], PLANNED, max_new_tokens=56, keeping=keeping, **options)
        for keeping in ("released", "ours")
    )
    assert any(not torch.equal(a, b) for a, b in zip(stale.tokens, exact.tokens, strict=True))
    assert stale.stats.plans is not None and exact.stats.plans is not None
    for a, b in zip(stale.stats.plans, exact.stats.plans, strict=True):
        assert a.rounds[0] == b.rounds[0]  # nothing is cached yet
    assert_same(stale, references(model, BATCH[:2], 56, released_planned, **options))


class Buffers:
    """A model with the same weights that keeps the most recently computed keys and values of each position."""

    def __init__(self, model: Any, size: int) -> None:
        self.model, self.config = model, model.config
        shape = (self.config.layers, size, self.config.kv_heads, self.config.head_dim)
        self.k, self.v = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)

    def rows(self, tokens: list[int], positions: list[int], visible: Tensor) -> Tensor:
        """Logits; `visible` ``(rows, size)``."""
        config, x = self.config, self.model.embedding[tokens]
        for number, layer in enumerate(self.model.layers):
            heads = (self.norm(x, layer.attention_norm) @ layer.qkv.T).unflatten(-1, (-1, config.head_dim))
            q, k, v = heads.split([config.heads, config.kv_heads, config.kv_heads], 1)
            q, self.k[number][positions], self.v[number][positions] = (
                self.turn(q, positions),
                self.turn(k, positions),
                v,
            )
            group = config.heads // config.kv_heads
            keys, values = (both[number].repeat_interleave(group, 1) for both in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(config.head_dim)
            weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
            x = x + torch.einsum("hqk,khd->qhd", weights, values).flatten(1) @ layer.output.T
            gate, up = (self.norm(x, layer.mlp_norm) @ layer.gate_up.T).chunk(2, -1)
            x = x + (gate * gate.sigmoid() * up) @ layer.down.T
        return self.norm(x, self.model.norm) @ self.model.head.T

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * weight

    def turn(self, x: Tensor, positions: list[int]) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.tensor(positions)[:, None] * frequencies)[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


def released_loop(model: Any, prompt: list[int], sparse: bool, ratio: float) -> tuple[list[int], list[int], int]:
    """New tokens, the steps of each round, and how many chunks became complete while others were not."""
    tags, size = model.plan_tokens, len(prompt) + LIMIT
    buffers = Buffers(model, size)
    text, fed, steps_of_rounds, early = list(prompt), 0, list[int](), 0
    while True:
        while True:
            rows = range(fed, len(text))
            visible = torch.arange(size)[None] <= torch.tensor(list(rows))[:, None]
            logits = buffers.rows(text[fed:], list(rows), visible)[-1]
            logits[MASK] = -math.inf
            fed, token = len(text), int(logits.argmax())
            if token in (tags.sync, END):
                break
            text.append(token)
        begin = len(text) - next(
            (back for back, past in enumerate(reversed(text)) if past == tags.sync), len(text) - len(prompt)
        )
        lengths, number = list[int](), -1
        for now in text[begin:]:
            if now == tags.topic_open:
                number = 0
            elif now in tags.digits:
                number = 10 * number + list(tags.digits).index(now)
            elif now == tags.topic_close:
                lengths.append(number * tags.unit)
        starts = [len(text) + sum(n + 2 for n in lengths[:i]) for i in range(len(lengths))]
        for n in lengths:
            text += [tags.chunk_open, *[MASK] * n, tags.chunk_close]
        steps = int(max(lengths, default=0) * ratio)
        times = [1 + (1e-3 - 1) * i / steps for i in range(steps + 1)] if steps else []
        for step in range(steps):
            masks = {
                c: [p for p in range(s, s + n + 2) if text[p] == MASK] for c, (s, n) in enumerate(zip(starts, lengths))
            }
            open_chunks = [c for c, open_positions in masks.items() if open_positions]
            if not open_chunks:
                break
            early += 0 < len(open_chunks) < len(lengths)
            rows_of = {c: range(starts[c], starts[c] + lengths[c] + 2) for c in open_chunks}
            positions = [p for c in open_chunks for p in rows_of[c]]
            visible = torch.zeros(len(positions), size, dtype=torch.bool)
            visible[:, : starts[0]] = True
            for row, p in enumerate(positions):
                own = next(c for c in open_chunks if p in rows_of[c])
                visible[row, starts[own] if sparse else starts[0] : rows_of[own].stop if sparse else len(text)] = True
            logits = buffers.rows([text[p] for p in positions], positions, visible)
            logits[:, [MASK, *(set(tags.control) - {tags.pad}), END]] = -math.inf
            for c in open_chunks:
                open_positions = masks[c]
                left = len(open_positions)
                best = logits[[positions.index(p - 1) for p in open_positions]].softmax(-1)
                certain = (best * torch.log(best + 1e-30)).sum(-1)
                share = max(1, int(left * (1 - times[step + 1] / times[step])))
                for i in certain.topk(left if step == steps - 1 else min(left, share)).indices.tolist():
                    text[open_positions[i]] = int(best[i].argmax())
        steps_of_rounds.append(step + (1 if open_chunks else 0) if steps else 0)
        text.append(token)
        if token == END or len(steps_of_rounds) == ROUNDS:
            return text[len(prompt) :], steps_of_rounds, early
        fed = len(text) - 1


@pytest.mark.covering
@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("sparse", [False, True])
def test_it_writes_what_the_released_loop_writes(sparse: bool, ratio: float) -> None:
    model, compared, early = deepcopy(planning_model(0, "next")), 0, 0
    model.head[OPEN, CLOSE] += 0.25  # plans of several chunks
    options: dict[str, Any] = {"sparse": sparse, "steps_ratio": ratio, "max_rounds": ROUNDS, "max_new_tokens": LIMIT}
    result = generate(model, PROMPTS, PLANNED, parser="ours", **options)
    assert result.stats.plans is not None
    for prompt, tokens, report in zip(PROMPTS, result.tokens, result.stats.plans, strict=True):
        if report.reason not in ("end", "rounds"):
            continue
        expected, steps, finished = released_loop(model, prompt, sparse, ratio)
        assert tokens.tolist() == expected
        assert [each.steps for each in report.rounds] == steps
        compared += len(steps)
        early += finished
    exact = generate(model, PROMPTS, "planned", **options)
    assert any(not torch.equal(a, b) for a, b in zip(exact.tokens, result.tokens, strict=True))
    assert compared > 8 and (early > 0 or ratio < 1)
