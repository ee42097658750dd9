"""Drafts of a batch are priced by the step of the whole batch: one method decodes token by token where drafts do not pay, and
the tokens are always the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate
from tests.decoding.test_lengths import Times
from tests.support.errors import refused
from tests.support.tri_mode import small_transformer

FREE = [1.0] * 8 + [1.0 + 0.01 * n for n in range(8)]
DEAR = [1.0 + n for n in range(16)]


def priced(monkeypatch: pytest.MonkeyPatch, costs: list[float]) -> None:
    for module in ("costs", "causal.linear_self_speculation"):
        monkeypatch.setattr(f"pdkernels.decoding.{module}.kept_row_times", lambda model: Times(costs))


def widths(result: Any, sequence: int = 0) -> list[int]:
    return [len(step.draft) for step in result.stats.trace[sequence]]


@pytest.fixture(scope="module")
def trained() -> Any:
    return pd.models.load("tiny-trimode")


SUMS = ["482 + 967 = ?\n", "7 + 12 = ?\n", "51 + 64 = ?\n", "903 - 417 = ?\n"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("costs", [FREE, DEAR, [1 + 0.1 * n for n in range(16)]], ids=["free", "dear", "some"])
def test_self_speculation_of_chosen_lengths_changes_no_token(
    trained: Any, costs: list[float], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced(monkeypatch, costs)
    drawn = {"temperature": temperature, "seed": 3, "max_new_tokens": 40}
    expected = generate(trained, SUMS, **drawn)
    found = generate(trained, SUMS, "linear_self_speculation", block_size="auto", trace=True, **drawn)
    assert all(map(torch.equal, found.tokens, expected.tokens))
    longest = max(max(widths(found, n)) for n in range(4))
    assert costs is not DEAR or longest == 1
    assert costs is not FREE or longest > 3


def test_the_mode_follows_the_number_of_clients(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows are free, and all others cost: one sequence drafts, and eight decode token by token."""
    priced(monkeypatch, [1.0] * 8 + [1.0 + n for n in range(1, 9)])
    options: dict[str, Any] = {"block_size": "auto", "max_new_tokens": 32, "trace": True, "end_tokens": ()}
    alone = generate(trained, SUMS[0], "linear_self_speculation", **options)
    assert max(widths(alone)) >= 4 and alone.stats.forwards < 24
    many = generate(trained, SUMS * 2, "linear_self_speculation", **options)
    assert all(max(widths(many, n)) == 1 for n in range(8)) and many.stats.forwards == 32
    assert torch.equal(many.tokens[0], alone.tokens)


def test_what_would_change_tokens_is_refused(trained: Any) -> None:
    for option in ({"threshold": 0.5}, {"verification": "rejection", "temperature": 1.0}):
        with refused("block_size='auto' chooses by the time of one draft pass"):
            generate(trained, SUMS[0], "linear_self_speculation", block_size="auto", max_new_tokens=8, **option)


@pytest.mark.parametrize("method, options", [("jacobi", {"draft": "lookup"}), ("suffix", {}), ("jacobi", {})])
@pytest.mark.parametrize("page_size", [None, 5])
def test_packed_drafts_give_the_tokens_of_padded_ones(
    method: str, options: dict[str, Any], page_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_transformer(1, 40, head_dim=16).float()
    prompts = [[3, 1, 4, 1, 5, 3, 1], [9], [2, 6, 2, 6, 2]]
    call = {"block_size": 6, "max_new_tokens": 60, "end_tokens": (), "trace": True, "page_size": page_size, **options}
    assert model.packs_rows
    packed = generate(model, prompts, method, temperature=0.7, seed=4, **call)
    ragged = [set(step) for step in zip(*(widths(packed, n) for n in range(3)), strict=False)]
    assert any(len(step) > 1 for step in ragged)
    monkeypatch.setattr(type(model), "packs_rows", property(lambda self: False))
    padded = generate(model, prompts, method, temperature=0.7, seed=4, **call)
    assert all(map(torch.equal, packed.tokens, padded.tokens)) and packed.stats.trace == padded.stats.trace


def test_an_engine_with_drafts_that_do_not_pay_runs_a_row_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that repeat themselves, whose guesses are right, but every row costs as much as a forward."""
    priced(monkeypatch, DEAR)
    model = pd.models.load("tiny-code")
    prompts = [f"x{n} = 1\nx{n} = 1\nx{n} = " for n in range(4)]
    with pd.Engine(model, max_running=4, max_new_tokens=24) as engine:
        both = [
            [engine.submit(prompt, method, max_new_tokens=24, end_tokens=(), **options) for prompt in prompts]
            for method, options in (("autoregressive", {}), ("jacobi", {"draft": "lookup", "block_size": "auto"}))
        ]
        plain, looked_up = ([handle.result() for handle in handles] for handles in both)
    assert [one.tokens.tolist() for one in plain] == [one.tokens.tolist() for one in looked_up]
    assert all(result.stats.forwards == 24 for result in looked_up)


def test_rows_with_samplers_of_their_own_are_packed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    priced(monkeypatch, FREE)
    model = pd.models.load("tiny-code")
    prompts = [f"x{n} = 1\nx{n} = 1\nx{n} = " for n in range(3)]
    options = {"draft": "lookup", "block_size": 6, "max_new_tokens": 24, "end_tokens": ()}
    drawn = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "top_k": 4, "seed": 6}]
    with pd.Engine(model, max_running=4, max_new_tokens=24) as engine:
        handles = [engine.submit(p, "jacobi", **options, **own) for p, own in zip(prompts, drawn, strict=True)]
        found = [handle.result().tokens.tolist() for handle in handles]
    alone = [generate(model, p, "jacobi", **options, **own) for p, own in zip(prompts, drawn, strict=True)]
    assert found == [result.tokens.tolist() for result in alone]


@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.parametrize(("free", "size"), [(1, 1), (20, 4), (72, 8)])
def test_quadratic_drafts_are_as_long_as_pays(
    trained: Any, free: int, size: int, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of four tokens with four masks for each takes 20 rows."""
    priced(monkeypatch, [1.0] * free + [1.0 + n for n in range(1, 60)])
    options: dict[str, Any] = {"max_new_tokens": 24, "trace": True}
    expected = generate(trained, SUMS[:clients], max_new_tokens=24)
    found = generate(trained, SUMS[:clients], "quadratic_self_speculation", block_size="auto", **options)
    assert all(map(torch.equal, found.tokens, expected.tokens))
    assert max(max(widths(found, n)) for n in range(clients)) == size


@pytest.mark.parametrize(("free", "size"), [(4, 4), (8, 8), (16, 16), (64, 32)])
def test_blocks_are_as_long_as_pays(trained: Any, free: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    priced(monkeypatch, [1.0] * free + [1.0 + n for n in range(1, 64)])
    found = generate(trained, SUMS[0], "block_diffusion", block_size="auto", max_new_tokens=24)
    assert torch.equal(
        found.tokens, generate(trained, SUMS[0], "block_diffusion", block_size=size, max_new_tokens=24).tokens
    )
    both = generate(trained, SUMS[:2], "block_diffusion", block_size="auto", max_new_tokens=24)
    assert torch.equal(both.tokens[0], found.tokens), "a text does not depend on its batch"


def test_what_else_a_chosen_size_decides(trained: Any) -> None:
    said = "block_size='auto' chooses the masks of a group too. Leave masks_per_group out, or give a number"
    with refused(said):
        generate(trained, SUMS[0], "quadratic_self_speculation", block_size="auto", masks_per_group=8)
    with pytest.raises(ValueError, match="block_size must be an int or 'auto', got 'most'"):
        generate(trained, SUMS[0], "block_diffusion", block_size="most")


@pytest.mark.parametrize("method", ["quadratic_self_speculation", "block_diffusion"])
def test_requests_of_a_chosen_size_join_a_batch(trained: Any, method: str) -> None:
    alone = [generate(trained, prompt, method, block_size="auto", max_new_tokens=12).tokens.tolist() for prompt in SUMS]
    with pd.Engine(trained) as engine:
        handles = [engine.submit(prompt, method, block_size="auto", max_new_tokens=12) for prompt in SUMS]
        assert [handle.result().tokens.tolist() for handle in handles] == alone
