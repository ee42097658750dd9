"""Trajectories against Jacobi's own equation and greedy decoding; the choice of records against a plain search."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models import Transformer, TransformerConfig
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.training import (
    Trajectory,
    choose_record,
    collect_trajectories,
    noise_aware_sample,
    noise_ratios,
    noiseless_sample,
    pack_noise_aware,
)
from tests.support.causal import SCRIPTS, VOCABULARY, FakeModel, from_list
from tests.support.errors import kind_of

PAD, NOISE = 99, 5000
token = st.integers(0, VOCABULARY - 1)


def check_trajectory(
    trajectory: Trajectory, prompt: list[int], text: list[int], block_size: int, script: Any, ends: list[int]
) -> None:
    """Record by record: the first is made of known tokens, every next one is Jacobi's equation, the last is its fixed point."""
    assert trajectory.prompt.tolist() == prompt and trajectory.prompt.dtype == torch.int64
    assert trajectory.fixed_points.flatten().tolist() == text + [PAD] * (-len(text) % block_size)
    for number, records in enumerate(trajectory.blocks):
        assert records.dtype == torch.int64 and records.shape[1] == block_size
        before = prompt + text[: number * block_size]
        fixed = text[number * block_size :][:block_size]

        def update(state: list[int], before: list[int] = before, size: int = len(fixed)) -> list[int]:
            """Equation 3; the first token is known. Padding follows the text."""
            return [state[0], *(script(before + state[:j]) for j in range(1, size))] + [PAD] * (block_size - size)

        states = records.tolist()
        assert len({tuple(state) for state in states}) == len(states)
        assert states[-1] == fixed + [PAD] * (block_size - len(fixed)) == update(states[-1])
        for state, following in zip(states, states[1:]):
            # An end token ends a block before it has converged.
            assert following == update(state) or (following == states[-1] and fixed[-1] in ends)
        if number:
            assert set(states[0][1 : len(fixed)]) <= set(before) or len(states) == 1
        noise = [(records[i] != records[-1]).any().item() for i in range(len(records))]
        assert noise == [True] * (len(records) - 1) + [False]


@settings(max_examples=80)
@given(
    script=st.sampled_from(sorted(SCRIPTS)),
    batch=st.lists(st.lists(token, min_size=1, max_size=6), min_size=0, max_size=4),
    block_size=st.integers(1, 7),
    limit=st.integers(1, 24),
    ends=st.lists(token, max_size=2),
    seed=st.integers(0, 2**64 - 1),
    batch_size=st.integers(1, 3),
)
def test_every_record_is_a_step_of_jacobi(
    script: str, batch: list[list[int]], block_size: int, limit: int, ends: list[int], seed: int, batch_size: int
) -> None:
    model = FakeModel(SCRIPTS[script])
    trajectories = collect_trajectories(
        model,
        batch,
        block_size=block_size,
        max_new_tokens=limit,
        end_tokens=ends,
        pad_token=PAD,
        seed=seed,
        batch_size=batch_size,
    )
    assert len(trajectories) == len(batch)
    length = -(-limit // block_size) * block_size
    for trajectory, prompt in zip(trajectories, batch, strict=True):
        text = autoregressive(model.plain, prompt, length, end_tokens=ends).tokens
        check_trajectory(trajectory, prompt, text, block_size, SCRIPTS[script], ends)


@pytest.mark.parametrize("position", range(9))
def test_an_end_token_at_every_position(position: int) -> None:
    """As the seed of a block, inside it, as its last token, and after the text."""
    written = [5 + i for i in range(12)]
    written[position] = 3
    script = from_list(written, 2)
    (trajectory,) = collect_trajectories(
        FakeModel(script), [[1, 2]], block_size=4, max_new_tokens=8, end_tokens=[3], pad_token=PAD
    )
    check_trajectory(trajectory, [1, 2], written[: min(position + 1, 8)], 4, script, [3])
    assert len(trajectory.blocks) == min(position // 4 + 1, 2)


def test_the_random_start_is_kept() -> None:
    """The released script loses it; a model that ignores its draft needs one forward to be right."""
    (trajectory,) = collect_trajectories(FakeModel(SCRIPTS["position"]), [[1, 2, 3]], block_size=6, max_new_tokens=18)
    assert [len(records) for records in trajectory.blocks] == [1, 2, 2]
    (trajectory,) = collect_trajectories(FakeModel(SCRIPTS["bigram"]), [[1, 2, 3]], block_size=6, max_new_tokens=18)
    assert all(3 <= len(records) <= 6 for records in trajectory.blocks)


def test_of_a_transformer_by_ids_and_by_text() -> None:
    torch.manual_seed(1)
    config = TransformerConfig(
        vocab_size=17, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=24
    )
    model = Transformer(config).double().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.4)
    prompts = [torch.tensor([1, 2, 3], dtype=torch.int32), torch.arange(8)]
    trajectories = collect_trajectories(model, prompts, block_size=5, max_new_tokens=20)
    greedy = generate(model, prompts, max_new_tokens=20)
    for trajectory, tokens, prompt in zip(trajectories, greedy.tokens, prompts, strict=True):
        assert torch.equal(trajectory.fixed_points.flatten(), tokens)
        assert trajectory.prompt.tolist() == prompt.tolist()
        assert trajectory.prompt.data_ptr() != prompt.data_ptr()

    trained = models.load("tiny-code")
    by_text = collect_trajectories(trained, ["def "], block_size=4, max_new_tokens=8)
    by_ids = collect_trajectories(trained, [trained.tokenizer.encode("def ")], block_size=4, max_new_tokens=8)
    assert all(torch.equal(one, other) for one, other in zip(by_text[0].blocks, by_ids[0].blocks, strict=True))
    assert torch.equal(by_text[0].fixed_points.flatten(), generate(trained, "def ", max_new_tokens=8).tokens)


def test_ratios_are_those_of_code_and_paper() -> None:
    for window in range(2, 40):
        code, paper = noise_ratios(window), noise_ratios(window, "paper")
        assert code == pytest.approx(torch.linspace(0, 1, window, dtype=torch.float64).tolist(), abs=1e-15)
        assert paper == [float(Fraction(step, window)) for step in range(window)]
        assert code[0] == paper[0] == 0 and code[-1] == 1 > paper[-1]
    assert noise_ratios(1) == noise_ratios(1, "paper") == [0.0]


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 10**6), st.integers(0, 8))
def test_the_nearest_record_is_chosen(block_size: int, count: int, seed: int, target: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    records = torch.randint(3, (count, block_size), generator=generator)
    records = torch.where(torch.rand(count, block_size, generator=generator) < 0.7, records[-1], records)
    noise = []
    for record in records.tolist():
        different = [i for i, (one, fixed) in enumerate(zip(record, records[-1].tolist())) if one != fixed]
        noise.append(block_size - different[0] if different else 0)
    distances = [abs(Fraction(n, block_size) - Fraction(target, 8)) for n in noise]
    chosen = choose_record(records, target / 8)
    # Ratios of sizes that are not powers of two are not exact floats: a tie may go either way there.
    if block_size in (1, 2, 4, 8):
        assert chosen == distances.index(min(distances))
    assert distances[chosen] == min(distances)
    assert noise[choose_record(records, 0.0)] == 0
    assert noise[choose_record(records, 1.0)] == max(noise)


def test_suffixes_count_and_not_tokens() -> None:
    """[9, 2, 3, 4] has one wrong token and four noisy ones."""
    records = torch.tensor([[9, 2, 3, 4], [1, 2, 9, 9], [1, 2, 3, 4]])
    assert [choose_record(records, ratio) for ratio in (1.0, 0.75, 0.6, 0.25, 0.2)] == [0, 0, 1, 1, 2]


def test_of_differing_tokens_the_nearest_number_is_chosen() -> None:
    """The paper's count, block by block: the record whose wrong tokens are closest to the ratio, the first on ties."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        blocks = [torch.randint(3, (5, 8), generator=generator) for _ in range(4)]
        chosen = noise_aware_sample(Trajectory(torch.tensor([7]), blocks), 4, schedule="paper", noise="differing").noisy
        for number, (records, row) in enumerate(zip(blocks, chosen)):
            wrong = [sum(a != b for a, b in zip(record, records.tolist()[-1])) for record in records.tolist()]
            distances = [abs(n - 2 * number) for n in wrong]  # of a ratio of number / 4 in 8 tokens
            assert row.tolist() == records[distances.index(min(distances))].tolist()


def sample_of(blocks: int, size: int = 4) -> Trajectory:
    """Block i converges by one token per step: record r has noise of ``size - r`` tokens."""
    fixed = torch.arange(blocks * size).view(blocks, size)
    converged = torch.arange(size + 1)[:, None] > torch.arange(size)
    return Trajectory(torch.tensor([7]), [torch.where(converged, row, NOISE) for row in fixed])


@pytest.mark.parametrize(("schedule", "noise"), [("code", [0, 2, 4, 0, 2, 4, 0]), ("paper", [0, 1, 3, 0, 1, 3, 0])])
def test_noise_grows_and_restarts(schedule: Any, noise: list[int]) -> None:
    sample = noise_aware_sample(sample_of(7), 3, schedule=schedule)
    assert sample.clean.flatten().tolist() == list(range(28)) and sample.prompt.tolist() == [7]
    assert (sample.noisy == NOISE).sum(1).tolist() == noise
    assert torch.equal(torch.where(sample.noisy == NOISE, sample.clean, sample.noisy), sample.clean)


def test_noise_may_shrink_instead() -> None:
    sample = noise_aware_sample(sample_of(7), 3, order="reverse")
    assert (sample.noisy == NOISE).sum(1).tolist() == [4, 2, 0, 4, 2, 0, 4]


def test_random_order_draws_from_the_same_ratios() -> None:
    draws = [
        noise_aware_sample(sample_of(300), 3, order="random", generator=torch.Generator().manual_seed(s))
        for s in (0, 0, 1)
    ]
    assert torch.equal(draws[0].noisy, draws[1].noisy) and not torch.equal(draws[0].noisy, draws[2].noisy)
    noise = (draws[0].noisy == NOISE).sum(1)
    assert set(noise.tolist()) == {0, 2, 4} and all(60 < int((noise == n).sum()) < 140 for n in (0, 2, 4))


@settings(max_examples=20)
@given(st.sampled_from(sorted(SCRIPTS)), st.integers(1, 5), st.integers(1, 4), st.integers(0, 22))
def test_samples_can_be_packed(script: str, block_size: int, window: int, end: int) -> None:
    trajectories = collect_trajectories(
        FakeModel(SCRIPTS[script]), [[1, 2], [4]], block_size=block_size, max_new_tokens=12, end_tokens=[end]
    )
    samples = [noise_aware_sample(trajectory, window) for trajectory in trajectories]
    batch = pack_noise_aware(samples, end_token=end)
    assert len(batch.tokens) == sum(len(s.prompt) + 2 * s.clean.numel() for s in samples)
    # The first block of every window is clean, and clean blocks have no students.
    first = sum(int((s.noisy[::window] != s.clean[::window]).sum()) for s in samples)
    assert first == 0 and (window > 1 or len(batch.student_rows) == 0)


@pytest.mark.parametrize(
    "text, call",
    {
        "noise_ratios: window must be at least 1, got 0": lambda: noise_ratios(0),
        "TypeError: window must be an int, got float": lambda: noise_ratios(2.0),
        "schedule must be 'code' or 'paper', got 'linear'": lambda: noise_ratios(2, "linear"),
        "noise must be 'suffix' or 'differing', got 'all'": lambda: choose_record(torch.zeros(1, 3), 0.5, "all"),
        "records must hold the fixed point": lambda: choose_record(torch.zeros(0, 3, dtype=torch.int64), 0.5),
        "records must have shape (any, any)": lambda: choose_record(torch.zeros(3, dtype=torch.int64), 0.5),
        "TypeError: records must be an int32 or int64 tensor": lambda: choose_record(torch.zeros(2, 3), 0.5),
        "order must be 'progressive', 'reverse' or": lambda: noise_aware_sample(sample_of(1), 2, order="backwards"),
        "block_size must be at least 1": lambda: collect_trajectories(None, [[1]], block_size=0, max_new_tokens=1),
        "max_new_tokens must be at least 1": lambda: collect_trajectories(None, [[1]], block_size=1, max_new_tokens=0),
        "TypeError: block_size must be an int": lambda: collect_trajectories(
            None, [[1]], block_size=1.5, max_new_tokens=1
        ),
        "prompts must be a list of prompts": lambda: collect_trajectories(None, "text", block_size=1, max_new_tokens=1),
        "list of prompts, got one. Put it": lambda: collect_trajectories(None, [3, 1], block_size=1, max_new_tokens=1),
    }.items(),
)
def test_errors(call: Any, text: str) -> None:
    error, text = kind_of(text)
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value) and str(caught.value).startswith("pdkernels.training.")


@given(st.lists(token, max_size=9), st.integers(1, 5))
def test_a_noiseless_sample_has_no_rows_to_learn_from_others(answer: list[int], block_size: int) -> None:
    sample = noiseless_sample(torch.tensor([1, 2]), torch.tensor(answer, dtype=torch.int64), block_size, pad_token=PAD)
    assert sample.clean.flatten().tolist() == answer + [PAD] * (-len(answer) % block_size)
    assert sample.clean.shape[1] == block_size and torch.equal(sample.clean, sample.noisy)
    batch = pack_noise_aware([sample])
    assert len(batch.student_rows) == 0
    assert batch.ar_labels.tolist() == [2, *sample.clean.flatten().tolist()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"block_size": 1.0}, "block_size must be an int"),
        ({"answer": torch.ones(2, 2, dtype=torch.int64)}, "answer must"),
        ({"prompt": torch.ones(2)}, "prompt must"),
    ],
)
def test_errors_of_a_noiseless_sample(arguments: dict[str, Any], said: str) -> None:
    given_ = {"prompt": torch.tensor([1]), "answer": torch.tensor([2]), "block_size": 2} | arguments
    with pytest.raises((ValueError, TypeError), match=said):
        noiseless_sample(**given_)
