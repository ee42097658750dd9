from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.models import RecurrentDepth, RecurrentDepthConfig, from_huginn_state_dict, to_huginn_state_dict
from pdkernels.models.architectures import recurrent_depth
from pdkernels.models.architectures.fused import rms_norm
from pdkernels.reference.recurrence import initial_state
from pdkernels.reference.recurrent_depth import RecurrentDepthReference, random_weights
from pdkernels.reference.recurrent_sampling import forward, position_states
from tests.support.errors import kind_of, refused

CONFIG = RecurrentDepthConfig(
    vocab_size=19,
    hidden_size=24,
    heads=3,
    head_dim=8,
    intermediate_size=20,
    prelude_layers=1,
    core_layers=2,
    coda_layers=1,
    mean_recurrence=3,
    max_positions=16,
)
# The shape of the published model, made small: layers 2 + 4 + 2, an odd number of heads, head_dim 96.
PUBLISHED = replace(
    CONFIG, hidden_size=288, head_dim=96, intermediate_size=72, prelude_layers=2, core_layers=4, coda_layers=2
)

# For the kernels. Any deeper, and the rounding of bf16 would decide where a random model ends up.
WIDE = replace(CONFIG, hidden_size=96, head_dim=32, vocab_size=61)


def weights(config: RecurrentDepthConfig = CONFIG, seed: int = 0) -> dict[str, Tensor]:
    """Random ones in fp64, with the published names."""
    layers = (config.prelude_layers, config.core_layers, config.coda_layers)
    return random_weights(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        heads=config.heads,
        intermediate_size=config.intermediate_size,
        layers=layers,
        seed=seed,
    )


def build(config: RecurrentDepthConfig = CONFIG, dtype: torch.dtype = torch.float64, seed: int = 0) -> RecurrentDepth:
    model = RecurrentDepth(config)
    model.load_state_dict(from_huginn_state_dict(weights(config, seed), config))
    return model.to(dtype).requires_grad_(False)


def reference_of(model: RecurrentDepth, dtype: torch.dtype | None = None, **options: float) -> RecurrentDepthReference:
    """The plain model with the weights of `model`, computed in `dtype`."""
    theirs = to_huginn_state_dict(model.state_dict(), model.config)
    return RecurrentDepthReference(
        {name: tensor.to(dtype or model.dtype) for name, tensor in theirs.items()}, **options
    )


def random_tokens(batch: int, length: int, vocab: int = CONFIG.vocab_size, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain_logits(
    plain: RecurrentDepthReference, tokens: list[int], pieces: list[int], recurrences: int, seed: int = 0
) -> Tensor:
    """Logits of `tokens` fed in pieces, each frozen before the next."""
    past, init, out = plain.new_past(), position_states(plain.hidden_size, seed=seed, dtype=plain.dtype), []
    for count in pieces:
        out.append(forward(plain, tokens[past.length : past.length + count], past, recurrences, init))
        past.freeze(count)
    return torch.cat(out)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ---- the mathematics


@pytest.mark.parametrize(
    "config", [CONFIG, PUBLISHED, replace(CONFIG, coda_layers=0)], ids=["small", "published shape", "no coda"]
)
@pytest.mark.parametrize("recurrences", [1, 2, 5])
def test_equals_the_plain_model(config: RecurrentDepthConfig, recurrences: int) -> None:
    model, tokens = build(config), random_tokens(2, 11)
    logits = model(tokens, recurrences=recurrences, seed=7)
    for row in range(2):
        close(logits[row], plain_logits(reference_of(model), tokens[row].tolist(), [11], recurrences, seed=7))
    close(model(tokens.int(), recurrences=recurrences, seed=7), logits)


def test_rope_theta_and_norm_eps_matter() -> None:
    for changes in ({"rope_theta": 100.0}, {"norm_eps": 0.1}):
        model, tokens = build(replace(CONFIG, **changes)), random_tokens(1, 9)
        close(model(tokens)[0], plain_logits(reference_of(model, **changes), tokens[0].tolist(), [9], 3))
        assert not torch.allclose(model(tokens), build()(tokens))


def test_recurrences_default_to_the_trained_ones() -> None:
    model, tokens = build(), random_tokens(1, 5)
    assert torch.equal(model(tokens), model(tokens, recurrences=3))
    assert not torch.allclose(model(tokens), model(tokens, recurrences=4))


def test_nothing_flows_back_in_time() -> None:
    model, tokens = build(), random_tokens(1, 8)
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(other)
    close(after[:, :5], before[:, :5])
    assert (after[:, 5:] - before[:, 5:]).abs().amax(-1).min() > 1e-6


def test_a_forward_is_its_parts() -> None:
    model, tokens = build(), random_tokens(2, 6)
    context = model.context(6)
    embedding = model.prelude(tokens, context)
    state, term = model.begin(embedding, context, seed=3)
    close(term, embedding @ model.adapter[:, CONFIG.hidden_size :].T)
    for _ in range(3):
        x, residual = model.core_parts(state, term, context)
        state = model.core(state, term, context)
        close(rms_norm(x + residual, model.exit_weight, CONFIG.norm_eps), state)
    close(model.coda(state, context), model(tokens, seed=3))


def test_the_exit_op_ends_a_recurrence() -> None:
    model, tokens = build(dtype=torch.float32), random_tokens(2, 6)
    context = model.context(6)
    state, term = model.begin(model.prelude(tokens, context), context)
    zeros = torch.zeros(2, dtype=torch.int64)
    ended = pd.recurrence_exit(
        *model.core_parts(state, term, context),
        model.exit_weight,
        state,
        torch.ones(2, 6, dtype=torch.int64),
        zeros + 6,
        zeros,
        threshold=0.1,
        eps=CONFIG.norm_eps,
    )
    close(ended.state, model.core(state, term, context), 1e-5)


@pytest.mark.parametrize("config", [CONFIG, PUBLISHED], ids=["small", "published shape"])
def test_gradients_flow_through_the_parts(config: RecurrentDepthConfig) -> None:
    model, tokens = build(config).requires_grad_(True), random_tokens(2, 6)
    context = model.context(6)
    state, term = model.begin(model.prelude(tokens, context), context)
    for _ in range(2):
        state = model.core(state, term, context)
    logits = model.coda(state, context)
    close(logits, model(tokens, recurrences=2))
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert not model(tokens).requires_grad


def test_a_model_in_training_may_run_inference() -> None:
    model, tokens = build(dtype=torch.float32).requires_grad_(True), random_tokens(2, 6)
    logits = model(tokens)
    assert not logits.requires_grad
    close(logits, build()(tokens).float(), 2e-3)
    context = model.context(6)
    with torch.no_grad():
        state, term = model.begin(model.prelude(tokens, context), context)
        state = model.core(state, term, context)
    term = model.embedding_term(model.prelude(tokens, context))
    model.coda(model.core(state, term, context), context).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_initialization_keeps_states_apart_and_finite() -> None:
    torch.manual_seed(0)
    model = RecurrentDepth(replace(CONFIG, mean_recurrence=32)).requires_grad_(False)
    assert all(p.isfinite().all() for p in model.parameters())
    logits = model(random_tokens(2, 9))
    assert logits.isfinite().all() and logits.std() > 0.01


# ---- initial states


def test_initial_states_belong_to_positions() -> None:
    model, tokens = build(), random_tokens(3, 7)
    context = model.context(7)
    state, _ = model.begin(model.prelude(tokens, context), context, seed=11)
    expected = initial_state(torch.tensor(0), torch.arange(7), CONFIG.hidden_size, 11).double()
    assert torch.equal(state, expected.expand(3, -1, -1))
    assert not torch.equal(state, model.begin(model.prelude(tokens, context), context, seed=12)[0])

    cache = model.new_cache(3, 20)
    cache.lengths.copy_(torch.tensor([2, 0, 9]))
    context = model.context(7, cache, torch.tensor([7, 4, 0]))
    state, _ = model.begin(model.prelude(tokens, context), context, seed=11)
    longer = initial_state(torch.tensor(0), torch.arange(16), CONFIG.hidden_size, 11).double()
    assert torch.equal(state[0], longer[2:9]) and torch.equal(state[1, :4], longer[:4])


def test_init_scale() -> None:
    model, tokens = build(), random_tokens(1, 4)
    context = model.context(4)
    embedding = model.prelude(tokens, context)
    whole, half, none = (model.begin(embedding, context, 5, scale)[0] for scale in (1.0, 0.5, 0.0))
    close(half, whole / 2, 1e-6)
    assert not none.any() and whole.abs().max() <= 3 * recurrent_depth.STATE_STD + 1e-6
    assert torch.equal(model(tokens, init_scale=0.0, seed=1), model(tokens, init_scale=0.0, seed=2))


def test_a_sequence_is_the_same_alone_and_in_a_batch() -> None:
    model, tokens = build(), random_tokens(4, 10)
    together = model(tokens, seed=2)
    for row in range(4):
        close(model(tokens[row : row + 1], seed=2)[0], together[row])


# ---- rows


def test_rows_are_a_choice_of_all_rows() -> None:
    model, tokens = build(dtype=torch.float32), random_tokens(3, 7)
    logits = model(tokens)
    close(model(tokens, rows=slice(2, 5)), logits[:, 2:5], 1e-5)
    close(model(tokens, rows=[-1]), logits[:, -1:], 1e-5)
    close(model(tokens, rows=torch.tensor([0, 6])), logits[:, [0, 6]], 1e-5)
    last = torch.tensor([[6], [2], [0]])
    close(model(tokens, rows=last)[:, 0], logits[torch.arange(3), last[:, 0]], 1e-5)
    cache = model.new_cache(3, 7)
    counts = torch.tensor([7, 3, 1])
    close(model(tokens, cache=cache, counts=counts, rows=last)[:, 0], logits[torch.arange(3), last[:, 0]], 1e-4)


# ---- errors


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0."),
        ({"core_layers": 0}, "core_layers must be at least 1, got 0."),
        ({"heads": 2.0}, "TypeError: heads must be an int, got float."),
        ({"mean_recurrence": True}, "TypeError: mean_recurrence must be an int, got bool."),
        ({"head_dim": 7}, "head_dim must be even (RoPE rotates pairs), got 7."),
        ({"rope_theta": 0.0}, "rope_theta must be positive, got 0.0."),
        ({"norm_eps": -1.0}, "norm_eps must not be negative, got -1.0."),
    ],
)
def test_bad_configurations(changes: dict[str, Any], message: str) -> None:
    error, message = kind_of(message)
    with pytest.raises(error) as caught:
        replace(CONFIG, **changes)
    assert str(caught.value) == f"pdkernels.RecurrentDepthConfig: {message}"


def test_configuration_of_the_published_model() -> None:
    config = RecurrentDepthConfig(vocab_size=65536, hidden_size=5280, heads=55, head_dim=96, intermediate_size=17920)
    assert (config.layers, config.kv_heads, config.mean_recurrence, config.rope_theta) == (8, 55, 32, 50000.0)
    assert abs(config.embedding_scale - 72.66361) < 1e-5
    with torch.device("meta"):
        assert sum(p.numel() for p in RecurrentDepth(config).parameters()) == 3_564_976_800


def test_bad_calls() -> None:
    model, tokens = build(), random_tokens(2, 4)
    cache = model.new_cache(3, 8)
    cases = [
        (lambda: model(tokens[0]), r"RecurrentDepth: tokens must have shape \(batch, length\), got \(4,\)\."),
        (lambda: model([[1, 2]]), r"TypeError: tokens must be a tensor, got list\."),
        (lambda: model(tokens.float()), r"TypeError: tokens must be int64 or int32, got torch.float32\."),
        (lambda: model(tokens + 99), r"tokens must hold ids in \[0, 19\), got "),
        (lambda: model(tokens, recurrences=0), r"recurrences must be at least 1, got 0\."),
        (lambda: model(tokens, recurrences=2.5), r"TypeError: recurrences must be an int, got float\."),
        (lambda: model(tokens, init_scale=-1.0), r"init_scale must not be negative, got -1.0\."),
        (lambda: model(tokens, cache=cache), r"tokens must have the batch size of the cache \(3\), got 2\."),
        (lambda: model(tokens, counts=torch.tensor([1, 1])), r"counts must be None without a cache"),
        (lambda: model(random_tokens(3, 4), cache=cache, counts=torch.tensor([1, 1])), r"counts must have shape \(3\)"),
        (lambda: model(tokens, rows=[4]), r"rows must lie in \[-4, 4\), got 4\."),
        (lambda: model.context(0), r"RecurrentDepth.context: rows must be at least 1, got 0\."),
        (lambda: model.new_cache(1, 8, kind="ring"), r"RecurrentDepth.new_cache: kind must be 'contiguous' or 'paged'"),
        (lambda: RecurrentDepth(CONFIG, end_tokens=[19]), r"end_tokens must be ids below vocab_size \(19\), got 19\."),
        (lambda: RecurrentDepth({}), r"TypeError: RecurrentDepth: config must be a RecurrentDepthConfig, got dict\."),
    ]
    for call, sentence in cases:
        with refused(sentence):
            call()
