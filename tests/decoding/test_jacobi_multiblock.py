"""Multi-block Jacobi decoding: the tokens of greedy decoding, the forwards, rows and acceptances of the plain reference."""

from __future__ import annotations

from itertools import compress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels import models
from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.decoding import DecodeResult, generate, method_options
from pdkernels.decoding.causal import jacobi_multiblock
from pdkernels.decoding.causal._multiblock import Limits, Progress, PseudoBlock
from pdkernels.models.architectures.transformer import Transformer
from pdkernels.reference import jacobi_multiblock as reference
from pdkernels.reference.autoregressive import Model, autoregressive
from tests.decoding.test_jacobi import small_transformer
from tests.harness.sessions import error_of
from tests.reference.test_reference_jacobi_multiblock import ALL_SCRIPTS
from tests.support.base import streams
from tests.support.causal import SCRIPTS, VOCABULARY, FakeModel, Script, from_list
from tests.support.errors import kind_of

METHOD = "jacobi_multiblock"
token = st.integers(0, VOCABULARY - 1)
prompts = st.lists(st.lists(token, min_size=1, max_size=8), min_size=1, max_size=3)
seeds = st.integers(0, 2**64 - 1)
options = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 8),
        "blocks": st.integers(1, 4),
        "spawn_ratio": st.sampled_from([0, 0.3, 0.85, 1.0]),
        "pool_size": st.integers(0, 6),
        "verification_size": st.integers(1, 5),
        "seed": seeds,
    }
)
page_sizes = st.sampled_from([None, None, 1, 3, 16])


def scripted(script: Script) -> Model:
    """A model for the reference: every row must see a whole text up to its own position, and gets the script's prediction."""

    def model(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ids, answers = tokens[0].tolist(), []
        for position, seen in zip(positions[0].tolist(), mask.tolist(), strict=True):
            history = list(compress(ids, seen))
            assert len(history) == position + 1
            answers.append(script(history))
        return torch.nn.functional.one_hot(torch.tensor(answers), VOCABULARY)[None]

    return model


def expected_of(
    model: Model, batch: list[list[int]], limit: int, ends: list[int], chosen: dict[str, Any]
) -> list[reference.JacobiMultiblockResult]:
    return [
        reference.jacobi_multiblock(model, prompt, limit, end_tokens=ends, **chosen)
        for prompt, chosen in streams(batch, chosen)
    ]


def assert_same(result: DecodeResult, expected: list[reference.JacobiMultiblockResult], limit: int) -> None:
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    stats = result.stats
    assert stats.forwards == max(one.forwards for one in expected)
    assert stats.accepted == [[step.accepted for step in one.trace] for one in expected]
    assert [[tuple(step) for step in steps] for steps in stats.trace] == [
        [(step.rows[step.row], step.predictions, step.accepted) for step in one.trace] for one in expected
    ]
    if limit:
        forwards = sum(one.forwards for one in expected)
        assert stats.tokens_per_forward == sum(len(one.tokens) for one in expected) / forwards


@settings(max_examples=60, deadline=None)
@given(
    script=st.sampled_from(sorted(ALL_SCRIPTS)),
    ties=st.booleans(),
    batch=prompts,
    limit=st.integers(0, 24),
    chosen=options,
    ends=st.lists(token, max_size=3),
    page_size=page_sizes,
)
def test_equals_greedy_and_the_reference(script, ties, batch, limit, chosen, ends, page_size) -> None:
    model = FakeModel(ALL_SCRIPTS[script], ties=ties)
    result = generate(
        model, batch, METHOD, max_new_tokens=limit, end_tokens=ends, trace=True, page_size=page_size, **chosen
    )
    for tokens, prompt in zip(result.tokens, batch, strict=True):
        assert tokens.tolist() == autoregressive(scripted(ALL_SCRIPTS[script]), prompt, limit, end_tokens=ends).tokens
    expected = expected_of(scripted(ALL_SCRIPTS[script]), batch, limit, ends, chosen)
    assert_same(result, expected, limit)
    if limit:
        for sequence, (prompt, one) in enumerate(zip(batch, expected, strict=True)):
            committed = (prompt + one.tokens)[: len(prompt) + sum(step.accepted for step in one.trace)]
            assert model.cache.lengths[sequence] == len(committed)  # a finished sequence does not change
            for layer in range(model.cache.layers):
                k, v = (side[sequence, :, 0, 0].tolist() for side in model.cache.layer(layer, len(committed)))
                assert k == committed and v == list(range(len(committed)))


@pytest.mark.covering
@pytest.mark.parametrize("script", ["alternating", "history", "repeating", "sticky"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_long_texts_of_a_batch(script: str, blocks: int) -> None:
    """Long enough for full pools, ties between candidates and many block changes."""
    batch = [[3, 1, 4, 1], [5], [2, 7, 2, 7, 2]]
    chosen = {"block_size": 7, "blocks": blocks, "spawn_ratio": 0.4, "pool_size": 6, "verification_size": 3, "seed": 11}
    model = FakeModel(ALL_SCRIPTS[script])
    result = generate(model, batch, METHOD, max_new_tokens=60, trace=True, page_size=4, **chosen)
    assert_same(result, expected_of(scripted(ALL_SCRIPTS[script]), batch, 60, [], chosen), 60)


@settings(max_examples=30, deadline=None)
@given(
    script=st.sampled_from(sorted(SCRIPTS)),
    batch=prompts,
    limit=st.integers(0, 20),
    block_size=st.integers(1, 9),
    seed=seeds,
    no_candidates=st.sampled_from([{"verification_size": 1}, {"pool_size": 0}]),
)
def test_one_block_without_candidates_is_single_block_decoding(
    script: str, batch: list[list[int]], limit: int, block_size: int, seed: int, no_candidates: dict[str, int]
) -> None:
    model = FakeModel(SCRIPTS[script])
    shared = {"max_new_tokens": limit, "block_size": block_size, "seed": seed, "trace": True}
    single = generate(model, batch, "jacobi", **shared)
    single_rows = list(model.rows_seen)
    model.rows_seen.clear()
    multi = generate(model, batch, METHOD, blocks=1, **no_candidates, **shared)
    assert multi.stats.trace == single.stats.trace and multi.stats.forwards == single.stats.forwards
    assert [tokens.tolist() for tokens in multi.tokens] == [tokens.tolist() for tokens in single.tokens]
    assert model.rows_seen == single_rows


class Masks(FakeModel):
    """Records the forwards' widths and masks."""

    def __call__(self, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.seen = [*getattr(self, "seen", []), (tokens.shape, arguments.get("mask"))]
        return super().__call__(tokens, **arguments)


def test_candidates_share_one_prefix_and_few_plans() -> None:
    """Branches are rows of one forward, never of a larger batch; plans are reused; a single branch needs none."""
    model = Masks(ALL_SCRIPTS["repeating"])
    generate(model, [[3, 1, 4], [1, 5]], METHOD, max_new_tokens=90, block_size=12, spawn_ratio=0.5)
    (_, *steps) = model.seen
    plans = {id(mask) for _, mask in steps if mask is not None}
    assert any(mask is None for _, mask in steps) and len(plans) < sum(mask is not None for _, mask in steps) / 2
    for (batch, width), mask in steps:
        assert batch == 2
        if mask is None:
            assert width <= 24
        else:
            assert width == mask.q_len
            assert any(width % (count * jacobi_multiblock.BRANCH_STEP) == 0 for count in (2, 3, 4))


def in_progress(rows: list[list[int]], pseudo: list[PseudoBlock]) -> Progress:
    progress = Progress([9, 8], rows[0], 40, Limits(4, 3, 2, 4, 4))
    progress.rows, progress.pseudo = rows, pseudo
    return progress


def test_a_step_is_one_rectangle() -> None:
    """Two sequences and one that is finished. The requested rows are those of drafts, then those that pseudo blocks wait for."""
    long = in_progress([[1, 2, 3, 4]], [])
    short = in_progress([[5]], [PseudoBlock([6], [7, 8, 9])])
    step = jacobi_multiblock._packed([long, short, None], torch.device("cpu"))
    assert step.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0]]
    assert (step.branches, step.length, step.width) == (1, 4, 4)
    assert step.rows is not None and step.rows.tolist() == [[0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 2, 3], [0, 1, 2, 3, 0, 0]]
    assert step.draft_lengths.tolist() == [4, 1, 0] and step.counts is not None and step.counts.tolist() == [4, 4, 0]

    short.rows = [[5, 1], [5, 2]]
    step = jacobi_multiblock._packed([long, short], torch.device("cpu"))
    assert (step.branches, step.length, step.width, step.counts) == (2, 8, 4, None)
    # The sequence without candidates tries its draft twice.
    assert step.tokens.view(2, 2, 8).tolist() == [
        [[1, 2, 3, 4, 0, 0, 0, 0]] * 2,
        [[5, 1, 6, 7, 8, 0, 0, 0], [5, 2, 6, 7, 8, 0, 0, 0]],
    ]
    assert step.rows is not None and step.rows[1].tolist() == [0, 1, 2, 3, 3, 4, 8, 9, 10, 11, 11, 12]


def test_logits_only_for_requested_rows() -> None:
    """Accepted tokens of pseudo blocks are context. Rows after the last requested one do not run at all."""
    real = [[1, 2, 3]]
    assert in_progress(real, [PseudoBlock([4], [5, 6]), PseudoBlock([7, 7], [8])]).following() == ([4, 5], [4])
    assert in_progress(real, [PseudoBlock([4, 5, 6], []), PseudoBlock([], [7, 8, 9])]).following() == (
        [4, 5, 6, 7, 8],
        [6, 7],
    )
    assert in_progress(real, [PseudoBlock([4, 5], [6])]).following() == ([], [])


def test_a_candidate_wins() -> None:
    """Its rows move to the end of the cached prefix, which the model then reads."""
    written = [1, 2, 3, 1, 2, 3, 4, 5, 6]
    for page_size in (None, 1, 4):
        model = FakeModel(from_list(written, 2))
        result = generate(
            model, [9, 8], METHOD, max_new_tokens=9, block_size=8, blocks=1, trace=True, page_size=page_size
        )
        assert result.tokens.tolist() == written
        assert result.stats.accepted == [[1, 1, 1, 3, 1, 1]]
        assert result.stats.trace[0][3].draft == [1, 2, 3, 1, 0]


def test_blocks_and_candidates_save_forwards() -> None:
    def forwards(script: str, **chosen: int) -> int:
        model = FakeModel(ALL_SCRIPTS[script])
        return generate(
            model, [3, 1, 4, 1], METHOD, max_new_tokens=40, block_size=8, spawn_ratio=0.5, seed=1, **chosen
        ).stats.forwards

    assert forwards("alternating", blocks=1) > forwards("alternating", blocks=2) > forwards("alternating", blocks=3)
    assert forwards("repeating", pool_size=0) > forwards("repeating", pool_size=4)


END = 22


@pytest.mark.covering(2)
@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("script", ["parallel", "sequential"])
def test_an_end_token_at_every_position(at: int, blocks: int, script: str) -> None:
    """Inside an accepted slice, as the next token after a partial or a full acceptance, in a pseudo block."""
    written = [*range(1, 1 + at), END, 3, 3, 3]
    if script == "parallel":
        function = lambda history: written[min(len(history) - 2, len(written) - 1)]  # noqa: E731
    else:
        function = from_list(written, 2)
    chosen = {"block_size": 4, "blocks": blocks, "spawn_ratio": 0.5}
    for limit in (at, at + 1, at + 2, 12):
        result = generate(
            FakeModel(function), [[7, 7]], METHOD, max_new_tokens=limit, end_tokens=(END,), trace=True, **chosen
        )
        assert result.tokens[0].tolist() == written[: min(limit, at + 1)]
        assert_same(result, expected_of(scripted(function), [[7, 7]], limit, [END], chosen), limit)


def assert_cache_is_causal(
    cache: ContiguousKVCache | PagedKVCache, model: Transformer, sequences: list[list[int]]
) -> None:
    """K and V of every committed token equal those of one causal forward over the sequence."""
    for sequence, tokens in enumerate(sequences):
        assert cache.lengths[sequence] == len(tokens)
        fresh = model.new_cache(1, len(tokens))
        model(torch.tensor([tokens]), cache=fresh)
        for layer in range(cache.layers):
            for kept, made in zip(cache.layer(layer, len(tokens)), fresh.layer(layer, len(tokens)), strict=True):
                torch.testing.assert_close(kept[sequence], made[0], rtol=1e-10, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    weights=st.integers(0, 3),
    batch=prompts,
    limit=st.integers(1, 16),
    chosen=options,
    ends=st.lists(token, max_size=2),
    page_size=page_sizes,
)
def test_a_random_transformer(
    weights: int, batch: list[list[int]], limit: int, chosen: dict[str, Any], ends: list[int], page_size: int | None
) -> None:
    model = small_transformer(weights)
    caches: list[Any] = []
    new_cache = model.new_cache
    model.new_cache = lambda *sizes, **kind: caches.append(new_cache(*sizes, **kind)) or caches[-1]

    def plain(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(tokens, positions=positions, mask=mask)

    result = generate(
        model, batch, METHOD, max_new_tokens=limit, end_tokens=ends, trace=True, page_size=page_size, **chosen
    )
    model.new_cache = new_cache
    expected = expected_of(plain, batch, limit, ends, chosen)
    for one, prompt in zip(expected, batch, strict=True):
        assert one.tokens == autoregressive(plain, prompt, limit, end_tokens=ends).tokens
    assert_same(result, expected, limit)
    committed = [
        (prompt + one.tokens)[: len(prompt) + sum(step.accepted for step in one.trace)]
        for prompt, one in zip(batch, expected, strict=True)
    ]
    assert_cache_is_causal(caches[0], model, committed)


SNIPPETS = ["def read_csv(", "import os\n", "class Node:\n    def __init__(self", "for i in range(", "    return ", "x"]


@settings(max_examples=5, deadline=None)
@given(
    batch=st.lists(st.sampled_from(SNIPPETS), min_size=1, max_size=3),
    limit=st.integers(1, 32),
    chosen=options,
    page_size=st.sampled_from([None, None, 7]),
)
def test_tiny_code(batch: list[str], limit: int, chosen: dict[str, Any], page_size: int | None) -> None:
    model = models.load("tiny-code")
    greedy = generate(model, batch, max_new_tokens=limit)
    result = generate(model, batch, METHOD, max_new_tokens=limit, page_size=page_size, **chosen)
    assert result.text == greedy.text
    assert all(torch.equal(one, other) for one, other in zip(result.tokens, greedy.tokens, strict=True))
    assert result.stats.forwards <= greedy.stats.forwards


def test_tiny_code_takes_the_steps_of_the_reference() -> None:
    model = models.load("tiny-code", dtype=torch.float64)
    batch = [list(model.tokenizer.encode(text)) for text in SNIPPETS[:2]]

    def plain(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(tokens, positions=positions, mask=mask)

    result = generate(model, batch, METHOD, max_new_tokens=40, spawn_ratio=0.5, trace=True)
    assert_same(result, expected_of(plain, batch, 40, model.end_tokens, {"spawn_ratio": 0.5}), 40)


@pytest.mark.parametrize(
    "chosen, text",
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0."),
        ({"blocks": 0}, "blocks must be at least 1, got 0."),
        ({"pool_size": -1}, "pool_size must be at least 0, got -1."),
        ({"verification_size": 0}, "verification_size must be at least 1, got 0."),
        ({"blocks": 2.0}, "TypeError: blocks must be an int, got float."),
        ({"spawn_ratio": 1.5}, "spawn_ratio must be in [0, 1], got 1.5."),
        ({"spawn_ratio": "half"}, "TypeError: spawn_ratio must be a number, got str."),
        ({"seed": None}, "TypeError: seed must be an int or a list of ints, got NoneType."),
    ],
)
def test_errors(chosen: dict[str, Any], text: str) -> None:
    error, text = kind_of(text)
    for limit in (0, 4):
        with pytest.raises(error) as raised:
            generate(FakeModel(SCRIPTS["sticky"]), [1], METHOD, max_new_tokens=limit, **chosen)
        assert str(raised.value).startswith(error_of(METHOD, text))


def test_options() -> None:
    own = ("block_size", "blocks", "spawn_ratio", "pool_size", "verification_size", "allow_mask_token", "page_size")
    assert method_options(METHOD) == (*own, "temperature", "top_k", "top_p", "min_p", "typical_p", "seed")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_long_answers_of_packed_weights_are_the_greedy_ones(temperature: float) -> None:
    """Candidates included. Packed products round their other factor to 8 bits, so a last bit of attention would become another token."""
    try:
        model = pd.models.load("smollm2-135m-instruct")
    except ImportError as error:
        pytest.skip(str(error))
    questions = ("Explain list comprehensions in Python.", "Write a short story about a fox and a crow.")
    for seed, question in enumerate(questions * 2):
        chat = [{"role": "user", "content": question}]
        options: dict[str, Any] = {"max_new_tokens": 150, "seed": seed, "temperature": temperature}
        expected = pd.decoding.generate(model, chat, **options)
        assert torch.equal(pd.decoding.generate(model, chat, METHOD, **options).tokens, expected.tokens)
