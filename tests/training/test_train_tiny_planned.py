"""The script that trains tiny-planned, on a model too small to learn anything, and what the shipped model has learnt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import pdkernels as pd
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig
from pdkernels.training import orders

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", autouse=True)
def examples_on_path() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture
def small() -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=258, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=48
    )
    return Transformer(config, tokenizer=ByteTokenizer(), end_tokens=ByteTokenizer.end_tokens, mask_token=257)


def test_the_control_tokens_are_six_more_ids(small: Transformer) -> None:
    import train_tiny_planned as script

    wider = script.with_plan_tokens(small)
    tokens = torch.tensor([[72, 101, 256, 257]])
    assert wider.plan_tokens.control == tuple(range(258, 264)) and wider.mask_token == 257
    torch.testing.assert_close(wider(tokens)[..., :258], small(tokens), rtol=0, atol=0)
    assert len(wider.embedding[258:].unique(dim=0)) == 6
    again = script.with_plan_tokens(wider)
    torch.testing.assert_close(again.embedding, wider.embedding, rtol=0, atol=0)


def test_a_step_trains_every_weight_and_batches_repeat(small: Transformer) -> None:
    import train_tiny_planned as script

    model = script.with_plan_tokens(small)
    batch = script.batch_of(7, 0.9, 400, 0)
    assert torch.equal(batch.tokens, script.batch_of(7, 0.9, 400, 0).tokens)
    assert not torch.equal(batch.tokens[:50], script.batch_of(8, 0.9, 400, 0).tokens[:50])
    loss, facts = script.step_loss(model, batch, 3.0)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())
    assert loss.item() == pytest.approx(3 * facts["plans"] + facts["chunks"], rel=1e-5)


def test_attention_alternates_and_the_baseline_has_no_chunks() -> None:
    import train_tiny_planned as script

    pairs = {
        way: script.batch_of(3, 0.9, 400, 0, attention=way).mask.plan().visible_pairs for way in ("dense", "sparse")
    }
    assert pairs["sparse"] < pairs["dense"]
    for step, way in ((2, "sparse"), (3, "dense")):
        both = script.batch_of(step, 0.9, 400, 0)
        assert (
            both.mask.plan().visible_pairs
            == script.batch_of(step, 0.9, 400, 0, attention=way).mask.plan().visible_pairs
        )
    plain = script.batch_of(3, 0.9, 400, 0, tags_removed=True)
    assert len(plain.masked_rows) == 0 and int(plain.tokens.max()) == ByteTokenizer.end_token


def test_ablations() -> None:
    import train_tiny_planned as script

    problem = next(problem for problem in orders(0) if len(problem.rounds) == 2)
    whole = script.sample_of(problem)
    blind, at_once = (script.sample_of(problem, ablate=lack) for lack in ("topic", "sync"))
    assert {tuple(item.topic) for items in blind.rounds for item in items} == {(ord("_"),)}
    assert [len(items) for items in at_once.rounds] == [sum(len(items) for items in whole.rounds)]
    contents = [[item.content for items in sample.rounds for item in items] for sample in (whole, blind, at_once)]
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize(
    "option",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["--tags-removed"],
        pytest.param(["--ablate", "sync"], marks=pytest.mark.slow),
    ],
)
def test_command_line(option: list[str], small: Transformer, tmp_path: Path) -> None:
    import train_tiny_planned as script
    import typer

    start, output = tmp_path / "start.safetensors", tmp_path / "made.safetensors"
    pd.models.checkpoints.zoo.save_tiny(small, start)
    app = typer.Typer()
    app.command()(script.main)
    sizes = ["--steps", "2", "--tokens", "200", "--look-every", "1", "--scored", "2"]
    answer = CliRunner().invoke(app, ["--start", str(start), "--output", str(output), *sizes, *option])
    assert answer.exit_code == 0, answer.output
    words = " ".join(answer.output.split())
    assert "orders right" in words and "held out" in words
    model = pd.models.checkpoints.zoo._load_tiny(output, None, "cpu")
    assert model.plan_tokens == (None if "--tags-removed" in option else script.PLAN_TOKENS)
    assert model.mask_token == 257


def test_what_is_scored(small: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers written by hand count as right, and plans that name an order twice, or too early, as invalid."""
    from types import SimpleNamespace

    from pdkernels.evaluation import held_out_orders, interval, planned, score_orders
    from pdkernels.generation.result import PlanReport, PlanRound

    problems = held_out_orders(6, seed=2)
    broken = {problems[0].prompt: "twice", problems[1].prompt: "empty"}
    assert {len(problem.rounds) for problem in problems} == {1, 2}
    by_prompt = {problem.prompt: problem for problem in problems}

    def generate(model: object, prompts: list[str], method: object, **options: object) -> SimpleNamespace:
        texts, reports = [], []
        for prompt in prompts:
            problem, lack = by_prompt[prompt], broken.get(prompt)
            topics = [[list(topic.encode()) for topic, _ in items] for items in problem.rounds]
            if lack == "twice":
                topics[0][0] = topics[0][1]
            texts.append("" if lack == "empty" else problem.text)
            rounds = [PlanRound([], items, [], 1, "end") for items in topics]
            reports.append(PlanReport(rounds, "end", {"plan": 10, "chunks": 5, "refresh": 1}, {}))
        stats = SimpleNamespace(plans=reports, tokens=40, seconds=0.5, tokens_per_forward=2.0)
        return SimpleNamespace(text=texts, stats=stats)

    monkeypatch.setattr(planned.decoding, "generate", generate)
    done: list[int] = []
    score = score_orders(small, problems, batch_size=4, advance=done.append)
    asked = sum(len(items) for problem in problems for items in problem.rounds)
    missing = sum(len(items) for items in problems[1].rounds)
    assert score.items == (asked - missing, asked) and done == [4, 2]
    assert score.valid_plans == 5 and score.critical_path == 16 and score.reasons == {"end": 6}
    low, high = interval(*score.items)
    assert low < score.items[0] / asked < high and f"{low:.1%} to {high:.1%}" in str(score)


def test_held_out_orders_are_different_and_repeat() -> None:
    from pdkernels.evaluation import held_out_orders

    trained = {problem.prompt for problem in islice(orders(0), 500)}
    problems = held_out_orders(30)
    assert problems == held_out_orders(30) and not trained & {problem.prompt for problem in problems}


def test_topics_decide_which_chunk_is_which() -> None:
    """The shipped model, dense and sparse: other topics at the same positions of a plan give other chunks."""
    import train_tiny_planned as script

    from pdkernels.training import NoisyPlan, PlanItem, PlannedSample, lay_out, pack_planned
    from pdkernels.training.lists import written_out

    model = pd.models.load("tiny-planned")
    topics = ["3w", "2u", "5m"]
    contents = {topic: f"{topic}:{written_out(topic[1], int(topic[0]))};" for topic in topics}
    prompt = list(("".join(f"{topic};" for topic in topics) + "\n").encode())
    for sparse in (False, True):
        for turn in range(3):
            turned = topics[turn:] + topics[:turn]
            items = [PlanItem(list(topic.encode()), list(contents[topic].encode())) for topic in turned]
            layout = lay_out(PlannedSample(prompt, [items]), script.PLAN_TOKENS, ByteTokenizer.end_token)
            noisy = NoisyPlan(layout, layout.content, torch.ones(len(layout.tokens)))
            batch = pack_planned([noisy], script.PLAN_TOKENS, script.MASK_TOKEN, sparse=sparse)
            hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan())[0]
            guesses = model.logits(hidden[batch.masked_rows]).argmax(-1)
            assert (guesses == batch.masked_labels).float().mean() > 0.9, (sparse, turned)


@pytest.mark.slow
def test_the_shipped_model_plans() -> None:
    """And reads what an earlier round has picked, also if the pick is drawn."""
    from pdkernels.evaluation import held_out_orders, score_orders

    model, problems = pd.models.load("tiny-planned"), held_out_orders(16, seed=5)
    for options in ({}, {"sparse": True, "threshold": 0.9}):
        score = score_orders(model, problems, batch_size=16, **options)
        right, asked = score.items
        assert right >= 0.8 * asked and score.valid_plans >= 12 and score.reasons["end"] >= 15
    drawn = score_orders(model, problems, batch_size=16, sparse=True, threshold=0.9, temperature=1.0)
    right, asked = drawn.right["lists of picks"]
    assert asked >= 8 and right >= 0.5 * asked
