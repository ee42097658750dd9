"""The script that trains tiny-masked, on a model too small to learn anything, and the model that it made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pdkernels as pd
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig
from pdkernels.models.checkpoints.zoo import WEIGHTS
from pdkernels.training import arithmetic

END, MASK = 256, 257


@pytest.fixture(scope="module", autouse=True)
def examples_on_path() -> Iterator[None]:
    folder = str(Path(__file__).parents[2] / "examples")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture
def causal() -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=258, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=48
    )
    model = Transformer(config, tokenizer=ByteTokenizer(), end_tokens=(END,), mask_token=MASK)
    model.attach_adapter_([(torch.randn(2, 32), torch.randn(32, 2)) for _ in model.layers])
    return model


def test_the_same_weights_see_all_and_have_no_adapter(causal: Transformer) -> None:
    import train_tiny_masked as script

    model, tokens = script.bidirectional(causal), torch.tensor([[72, MASK, END, 5]])
    assert not model.has_adapter and model.mask_token == MASK and model.end_tokens == (END,)
    assert (model.config.attention, model.config.predicts) == ("bidirectional", "own")
    everything = torch.ones(4, 4, dtype=torch.bool)
    torch.testing.assert_close(model(tokens), causal(tokens, mask=everything))
    torch.testing.assert_close(model(tokens, mask=everything.tril()), causal(tokens))


def test_canvases_end_in_end_tokens() -> None:
    import train_tiny_masked as script

    rows, spans = script.rows_of_sums(arithmetic(1), 20, 100)
    assert rows.shape == (20, 100) and spans.shape == (20, 2)
    fitting = (problem for problem in arithmetic(1) if len(problem.prompt + problem.steps) < 100)
    for row, (start, end), problem in zip(rows.tolist(), spans.tolist(), fitting, strict=False):
        assert bytes(row[:start]).decode() == problem.prompt and bytes(row[start:end]).decode() == problem.steps
        assert end < 100 and set(row[end:]) == {END}


def test_what_is_hidden_and_what_it_counts() -> None:
    import train_tiny_masked as script

    generator, count, length = torch.Generator().manual_seed(0), 300, 120
    tokens, spans = script.rows_of_sums(arithmetic(2), count, length)
    rows = script.hide(tokens, spans, generator)
    positions, (starts, ends) = torch.arange(length), spans.T[..., None]
    answers = positions >= starts
    assert rows.tokens.equal(tokens) and not rows.hidden[~answers].any()
    alike = torch.arange(count) % 3 == 0

    # One probability per row, spread evenly over the batch, and its inverse is the weight of a byte's share of the row.
    levels = 1 / (rows.weights * (length - starts))[alike]
    assert (levels == levels[:, :1]).all()
    torch.testing.assert_close(levels[:, 0].sort().values.diff(), torch.full((99,), 0.98 / 100), atol=1e-5, rtol=0)
    shares = (rows.hidden & answers).sum(1)[alike] / answers.sum(1)[alike]
    assert (shares - levels[:, 0]).abs().max() < 0.25 and (shares - levels[:, 0]).mean().abs() < 0.02

    # More and more is masked from left to right, from some position of the solution on, and the nearest counts most.
    hidden, weights = rows.hidden[~alike], rows.weights[~alike] * (length - starts[~alike])
    assert (weights.diff(dim=1) <= 1e-6).all() and weights.min() > 0.19 and weights.max() < 1.21
    first, last = (hidden.float().argmax(1), (~hidden).float().cumsum(1).argmax(1))
    assert (first >= starts[~alike][:, 0]).all() and (first <= ends[~alike][:, 0] + length // 4).all()
    assert ((last - first)[hidden.any(1)] <= length / 4 + 1).all() and len(set(first.tolist())) > 40
    furthest = weights < 0.2 + 1e-5
    assert furthest.any() and (hidden | ~answers[~alike])[furthest].all()


def test_the_loss_is_the_weighted_one_of_what_is_hidden(causal: Transformer) -> None:
    import train_tiny_masked as script

    model = script.bidirectional(causal)
    rows = next(script.batches(6, 0))
    assert script.SHORTEST_ROW < rows.tokens.shape[1] <= script.CANVAS + script.LONGEST_PROMPT
    loss, sure = script.loss_of(model, rows)
    distribution = model(torch.where(rows.hidden, MASK, rows.tokens)).log_softmax(-1)
    expected = -(distribution.gather(-1, rows.tokens[..., None])[..., 0] * rows.weights * rows.hidden).sum() / 6
    torch.testing.assert_close(loss, expected)
    probability = distribution.exp().amax(-1) * rows.hidden
    torch.testing.assert_close(sure, probability)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_later_all_confident_guesses_are_known() -> None:
    import train_tiny_masked as script

    rows, generator = next(script.batches(300, 0)), torch.Generator().manual_seed(1)
    sure = torch.rand(rows.tokens.shape, generator=generator)
    after = script.later(rows, sure, generator)
    chosen = torch.arange(300) % 3 != 0
    assert after.tokens.equal(rows.tokens[chosen]) and after.weights.equal(rows.weights[chosen])
    was, sure = rows.hidden[chosen], sure[chosen]
    assert not after.hidden[~was].any() and after.hidden[was & (sure < 0.5)].all()
    least = sure.masked_fill(after.hidden | ~was, 1).amin(1)
    most = sure.masked_fill(~after.hidden, 0).amax(1)
    assert (least > most).all() and 0.55 < most.quantile(0.3) < most.quantile(0.7) < 0.95


class Sure(torch.nn.Module):
    """Predicts the letter of each position, with more confidence further right; would predict a mask anywhere."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1])
        logits = torch.zeros(*tokens.shape, 258)
        logits[:, positions, 65 + positions] = 4.0 + positions
        logits[..., MASK] = 100.0
        return logits


def test_the_most_confident_is_filled_in_first() -> None:
    import train_tiny_masked as script

    canvases = torch.tensor([[1, MASK, MASK, MASK], [2, 3, MASK, MASK]])
    expected = torch.tensor([[1, 66, 67, 68], [2, 3, 67, 68]])
    filled, forwards = script.fill(Sure(), canvases)
    assert filled.equal(expected) and forwards == 3 and canvases[0, 1] == MASK
    # Of 258 ids the right one has 0.37, 0.61 and 0.81 at positions 1 to 3.
    for threshold, wanted in ((0.3, 1), (0.5, 2), (0.7, 3), (0.99, 3)):
        filled, forwards = script.fill(Sure(), canvases, threshold)
        assert filled.equal(expected) and forwards == wanted


def test_looks_score_the_answers(causal: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    import train_tiny_masked as script

    problems = script.held_out_sums(6)
    assert all(len(problem.steps) < script.CANVAS for problem in problems)
    by_prompt = {problem.prompt: problem for problem in problems}

    def fill(model: Transformer, canvases: torch.Tensor, threshold: float | None) -> tuple[torch.Tensor, int]:
        assert (canvases == MASK).sum(1).tolist() == [script.CANVAS] * len(canvases)
        for row in canvases:
            problem = by_prompt[bytes(row[: len(row) - script.CANVAS].tolist()).decode()]
            text = problem.steps if problem is not problems[0] else "answer 1\n"
            written = torch.tensor([*text.encode(), *[END] * script.CANVAS])[: script.CANVAS]
            row[len(problem.prompt) :] = written
        return canvases, 7

    monkeypatch.setattr(script, "fill", fill)
    solved, forwards = script.look(causal, problems)
    assert solved == pytest.approx(5 / 6) and forwards == 7


@pytest.mark.slow
def test_the_shipped_model_adds_several_bytes_a_forward() -> None:
    """Block by block; on a whole canvas one byte per forward, since with more it answers before it has worked out the sum."""
    import train_tiny_masked as script

    assert (WEIGHTS / "tiny-masked.safetensors").stat().st_size <= 4_000_000
    model = pd.models.load("tiny-masked")
    assert (model.config.attention, model.config.predicts, model.mask_token) == ("bidirectional", "own", MASK)
    problems = script.held_out_sums(12)
    solved, forwards = script.look(model, problems[:6])
    assert solved >= 0.5 and forwards == script.CANVAS
    assert script.look(model, problems, 0.9)[1] < 40
    result = pd.decoding.generate(
        model,
        [problem.prompt for problem in problems],
        "fast_dllm",
        max_new_tokens=script.CANVAS,
        block_size=8,
        threshold=0.9,
    )
    right = sum(problem.is_solved_by(text) for problem, text in zip(problems, result.text, strict=True))
    assert right >= 10 and result.stats.tokens_per_forward > 5
