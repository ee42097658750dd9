"""The measurement of adapters: what is counted, what stays equal between trainings, and that both tables can be made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdkernels as pd
from bench.papers import sampled_drafts as script
from bench.papers import tables
from pdkernels import training
from pdkernels.evaluation.tasks import make_task


def quiet(what: str, share: float) -> None:
    pass


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 3, "SEEDS": (0,), "TEXTS": 2, "TEXTS_PER_STEP": 1, "RESAMPLES": 40}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "make_task", lambda *given: make_task(*given)._replace(limit=14))


def test_counts_are_those_of_the_decoder() -> None:
    model: Any = pd.models.load("tiny-trimode")
    task = make_task("source", 2)._replace(limit=20)
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "verification": "rejection"}):
        for prompt in task.prompts:
            ((drafts, accepted, tokens, forwards),) = script.counts_of(model, task, 8, [prompt], **options).tolist()
            given = {"max_new_tokens": 20, "block_size": 8, "end_tokens": (), **options}
            found = pd.decoding.generate(model, prompt, "linear_self_speculation", **given)
            alone = forwards - 1 - 2 * drafts  # the last tokens have a forward each and no draft
            assert (tokens, forwards) == (20, found.stats.forwards) and 0 <= alone <= 2
            assert tokens == 1 + accepted + drafts + alone, (
                "the prompt's token, and one of the verifier after each draft"
            )


def test_a_bare_copy_drafts_without_the_adapter() -> None:
    model: Any = pd.models.load("tiny-trimode")
    bare, tokens = script.without_adapter(model), torch.arange(9)[None]
    assert model.has_adapter and not bare.has_adapter and not any("adapter" in name for name in bare.state_dict())
    assert torch.equal(model(tokens), bare(tokens)) and not torch.equal(model(tokens, adapted=True), bare(tokens))


def test_trainings_differ_in_their_drafts_alone(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = script.without_adapter(pd.models.load("tiny-trimode"))
    texts = [[(torch.randint(256, (60,), generator=torch.Generator().manual_seed(i)), 9)] * 3 for i in (0, 1)]
    seen: list[Any] = []
    pack, draw = training.pack_drafts, training.draw_drafts
    monkeypatch.setattr(training, "pack_drafts", lambda *given: seen.append(given) or pack(*given))
    monkeypatch.setattr(training, "draw_drafts", lambda *given, **more: seen.append(more) or draw(*given, **more))
    found = [script.trained(bare, texts, share, 5, lambda done: None)[0] for share in (0.0, 0.9)]
    packed, drawn = seen[::2], seen[1::2]
    assert drawn == [{"sampled_share": 0.0}] * 3 + [{"sampled_share": 0.9}] * 3
    for one, other in zip(packed[:3], packed[3:], strict=True):
        assert one[1:] == other[1:] and all(torch.equal(a[0], b[0]) for a, b in zip(one[0], other[0], strict=True))
    for model in found:
        assert model.has_adapter and not any(parameter.requires_grad for parameter in model.parameters())
        state = model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in bare.state_dict().items())
    assert not bare.has_adapter


def test_intervals_are_of_ratios_over_prompts() -> None:
    counts = torch.tensor([[2.0, 4, 7, 5], [4, 4, 9, 9]], dtype=torch.float64)
    values = script.resampled(counts, "accepted per draft")
    assert values[0] == 8 / 6 and set(values[1:].tolist()) == {2.0, 8 / 6, 1.0}
    assert torch.equal(values, script.resampled(counts, "accepted per draft")), "the same prompts for every adapter"
    assert script.resampled(counts, "tokens per forward")[0] == 16 / 14


def test_both_tables(small: None) -> None:
    result = tables.find("nemotron", "sampled-drafts")[0].run(2, quiet)
    names = [
        "none",
        "shipped",
        *script.SHARES,
        *(f"{name} - none" for name in script.SHARES),
        "sampled - greedy, seed 0",
    ]
    assert [row["adapter"] for row in result["rows"]] == names * 4
    assert all(set(script.CONDITIONS) < row.keys() for row in result["rows"])
    assert "rows that the loss read" in result and "% with greedy drafts" in result["rows that the loss read"]

    result = tables.find("nemotron", "adapter")[0].run(2, quiet)
    assert [row["adapter"] for row in result["rows"]] == ["without", "with", "with - without"] * 4
    for without, with_one, gain in zip(*(result["rows"][start::3] for start in range(3)), strict=True):
        for kind in ("additions", "products", "source", "mean"):
            assert float(gain[kind].split()[0]) == pytest.approx(with_one[kind] - without[kind], abs=0.011)
    assert "2 source" in result["prompts"]
