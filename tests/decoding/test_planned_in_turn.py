"""Chunks written token by token (Pasta): the tokens of a plain loop over each chunk, the critical path, what ends a chunk, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.masks import Stage, planned
from pdkernels.training import PlanItem, PlannedSample, lay_out
from tests.harness.sessions import error_of
from tests.support.plans import END, MASK, SYNC, TAGS, Scripted, assert_same, planning_model, references

BEGIN, STOP, PAD = TAGS.chunk_open, TAGS.chunk_close, TAGS.pad
PROMPTS = [[END], [10, END], [11, 3, END], [12, 12, 12, END], [18, 10, 3, END], [5, 20, 11, 7]]


def written_alone(model: Any, before: list[int], start: int, length: int, mask: torch.Tensor | None) -> list[int]:
    """A chunk, by a loop over the text before its round and itself alone: greedy, from the whole text each time.

    Args:
        before: the text up to the round's chunks, and `mask` how it sees itself; None: causally.
        start: of the chunk's tokens behind it; other chunks may lie between.
    """
    content: list[int] = []
    size = len(before)
    while len(content) < length:
        ids = [*before, BEGIN, *content]
        positions = torch.tensor([*range(size), *range(size + start, size + start + 1 + len(content))])
        sees = torch.ones(len(ids), len(ids)).tril().bool()
        if mask is not None:
            sees[:size, :size] = mask
        logits = model(torch.tensor([ids]), positions=positions, mask=sees)[0, -1].clone()
        logits[[MASK, END, TAGS.topic_open, TAGS.topic_close, SYNC, BEGIN]] = -torch.inf
        token = int(logits.argmax())
        if token in (PAD, STOP):
            break
        content.append(token)
    return content + [PAD] * (length - len(content))


def test_chunks_are_those_of_a_plain_loop() -> None:
    """Over all rounds; later rounds see the finished chunks causally."""
    seen = 0
    for weights in range(4):
        model = planning_model(weights)
        for prompt in PROMPTS:
            result = generate(model, prompt, "planned", max_new_tokens=60, chunks="autoregressive")
            text, stages, first = list(prompt), list[Stage](), 0
            report = result.stats.plans[0]
            for each in report.rounds:
                text += each.plan
                mask = planned([*stages, Stage(len(text) - first, (), False)], True, inside="causal").dense()
                contents, start = [], 0
                for length in each.lengths:
                    contents.append(written_alone(model, text, start, length, mask))
                    start += length + 2
                    seen += 1
                lengths = tuple(length + 2 for length in each.lengths)
                stages.append(Stage(len(text) - first, lengths, True))
                text += [token for content in contents for token in (BEGIN, *content, STOP)]
                if each.stop != "length":
                    text.append(SYNC if each.stop == "sync" else END)
                first = len(text)
            assert text[len(prompt) :] == result.tokens.tolist()
    assert seen > 20


def test_batches_take_the_path_of_the_reference() -> None:
    """Rows of finished chunks are taken over by later ones; some texts plan while others write."""
    for seed, weights in ((0, 0), (1, 1), (2, 1)):
        model = planning_model(weights)
        options: dict[str, Any] = {"chunks": "autoregressive", "temperature": 0.7, "seed": seed}
        given = {"max_new_tokens": 64, "trace": True, "page_size": (None, 3, 16)[seed]}
        result = generate(model, PROMPTS[:4], "planned", **given, **options)
        assert_same(result, references(model, PROMPTS[:4], 64, **options))


def written(script: Sequence[int], guesses: Sequence[int], **options: Any) -> tuple[list[int], Any]:
    """Plans from `script`; in chunks, `guesses` by what was fed."""

    class Writer(Scripted):
        def hidden(self, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
            if given.get("positions") is None:
                return super().hidden(tokens, **given)
            self.fed.append(tokens[:, 0].tolist())
            out = torch.zeros(*tokens.shape, 23)
            for row, token in enumerate(tokens[:, 0].tolist()):
                out[row, 0, guesses[0] if token == BEGIN else guesses[min(token - 9, len(guesses) - 1)]] = 9.0
            return out

    model = Writer(list(script))
    result = generate(model, [11], "planned", max_new_tokens=60, chunks="autoregressive", **options)
    return result.tokens.tolist(), result.stats.plans[0]


def item(number: int) -> list[int]:
    return [TAGS.topic_open, 12, number, TAGS.topic_close]


@pytest.mark.parametrize(
    ("guesses", "content", "steps"),
    [
        ([10, 11, 12, 13], [10, 11, 12, 13], 4),  # full: nothing is left to end it
        ([10, 11, PAD], [10, 11, PAD, PAD], 3),
        ([10, STOP], [10, PAD, PAD, PAD], 2),
        ([PAD], [PAD] * 4, 1),
    ],
)
def test_what_ends_a_chunk(guesses: list[int], content: list[int], steps: int) -> None:
    """Filler or the closing tag, which costs a forward, or the number of its plan."""
    tokens, report = written([*item(4), END], guesses)
    assert tokens == [*item(4), BEGIN, *content, STOP, END]
    assert report.forwards == {"plan": 5, "chunks": steps, "refresh": 0}


def test_the_critical_path() -> None:
    """Plans and stops, and in each round the longest chunk; a row for each open chunk."""
    script = [*item(4), *item(2), *item(0), SYNC, *item(3), END]
    _, report = written(script, [10, 11, 12, 13])
    assert report.forwards == {"plan": 12 + 1 + 4, "chunks": 4 + 3, "refresh": 1}
    assert report.critical_path == 25 and report.rows["chunks"] == (4 + 2) + 3
    assert [each.steps for each in report.rounds] == [4, 3]
    _, early = written(script, [10, PAD])
    assert [each.steps for each in early.rounds] == [2, 2] and early.rounds[0].lengths == [4, 2, 0]


def test_a_model_that_is_trained_for_it() -> None:
    """A few steps on one text teach it to write that text: chunks of training and of decoding are the same rows."""
    from pdkernels.training import pack_pasta, planned_loss

    loaded: Any = pd.models.load("tiny-planned")
    rounds = [
        [PlanItem(list(b"a "), list(b"first;")), PlanItem(list(b"b "), list(b"2nd one"))],
        [PlanItem(list(b"c "), list(b"then"))],
    ]
    layout = lay_out(PlannedSample(list(b"say:"), rounds), loaded.plan_tokens, loaded.end_tokens[0])
    batch = pack_pasta([layout], loaded.plan_tokens)
    loaded.requires_grad_(True)
    optimizer = torch.optim.Adam(loaded.parameters(), lr=2e-3)
    for _ in range(25):
        hidden = loaded.hidden(batch.tokens[None], mask=batch.mask.plan(64, 64))[0]
        loss = planned_loss(loaded.logits(hidden[batch.ar_rows]), loaded.logits(hidden[batch.masked_rows]), batch).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loaded.requires_grad_(False)
    result = generate(loaded, "say:", "planned", max_new_tokens=80, chunks="autoregressive")
    assert result.tokens.tolist() == layout.tokens[layout.prompt_len :].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"sparse": True},
        {"steps_ratio": 0.5},
        {"order": "margin"},
        {"threshold": 0.9},
        {"sparse": True, "cache": "drop_finished"},
    ],
)
def test_options_of_diffusion_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as raised:
        generate(Scripted([END]), [1], "planned", max_new_tokens=4, chunks="autoregressive", **options)
    words = "chunks must be 'diffusion' with options of its steps, got 'autoregressive'."
    assert str(raised.value).startswith(error_of("planned", words))
