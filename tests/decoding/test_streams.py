"""A stream of random numbers for each sequence of a batch, in all methods; and the mask token, which no row of a text may predict."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pdkernels.decoding import available, find, generate, is_lossless, method_options, sequence_seed, supports
from pdkernels.models.architectures.recurrent_depth import RecurrentDepth
from pdkernels.reference.block_diffusion import block_diffusion
from pdkernels.reference.linear_self_speculation import linear_self_speculation
from pdkernels.reference.quadratic_self_speculation import quadratic_self_speculation
from tests.support.drafters import with_drafters
from tests.support.masked import small_masked
from tests.support.plans import planning_model
from tests.support.recurrent import models
from tests.support.tri_mode import Cached, Call, Table, small_transformer

PROMPT, LIMIT = [3, 1, 4], 10
DRAWS: dict[str, dict[str, Any]] = {
    "llada": {"remasking": "random", "temperature": 1.5},
    "dream": {"algorithm": "origin", "temperature": 1.5},
    "jacobi": {},
    "jacobi_multiblock": {},
    "recurrent_diffusion": {"noise": 0.4, "headway": 2, "temperature": 1.5, "max_recurrences": 12},
}


@cache
def model_for(method: str) -> Any:
    if find(method).wing == "planned":
        return planning_model(1)
    causal = with_drafters(small_transformer(1))
    if supports(method, causal):
        return causal
    masked = small_masked(1)
    return masked if supports(method, masked) else models(2)[0]


def run(method: str, prompt: Any, **options: Any) -> Any:
    options = DRAWS.get(method, {"temperature": 1.5}) | options
    return generate(model_for(method), prompt, method, max_new_tokens=LIMIT, end_tokens=(), **options)


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("method", available())
def test_every_sequence_has_its_own_stream(method: str) -> None:
    together = run(method, [PROMPT] * 4, seed=7)
    if DRAWS.get(method, True):
        assert len({tuple(tokens.tolist()) for tokens in together.tokens}) == 4
    for n in (0, 3):
        alone = run(method, PROMPT, seed=sequence_seed(7, n))
        assert torch.equal(alone.tokens, together.tokens[n]) and alone.stats.accepted[0] == together.stats.accepted[n]
    listed = run(method, [PROMPT] * 3, seed=[sequence_seed(7, n) for n in (2, 0, 2)])
    for tokens, accepted, n in zip(listed.tokens, listed.stats.accepted, (2, 0, 2), strict=True):
        assert torch.equal(tokens, together.tokens[n]) and accepted == together.stats.accepted[n]


def test_equal_prompts_draw_from_the_distribution() -> None:
    """As often as independent draws do: a chi-squared test over 500 first tokens of one prompt."""
    model = small_transformer(1)
    tokens = torch.cat(generate(model, [PROMPT] * 500, max_new_tokens=1, temperature=1.0).tokens)
    logits = model(torch.tensor([PROMPT]))[0, -1].clone()
    logits[model.mask_token] = -torch.inf
    expected = 500 * logits.softmax(-1)
    common = expected > 4
    seen = torch.bincount(tokens, minlength=len(expected))
    deviation = ((seen - expected) ** 2 / expected)[common].sum()
    assert deviation < 5 * common.sum(), (seen, expected)


def test_streams_of_small_seeds_never_meet() -> None:
    seeds = {sequence_seed(seed, n) for seed in range(100) for n in range(100)}
    assert len(seeds) == 10_000 and sequence_seed(-1, 0) == 2**64 - 1 and sequence_seed(5, 0) == 5


@pytest.mark.parametrize("method", ["jacobi", "autoregressive"])
def test_initial_states_are_those_of_the_seed(method: str) -> None:
    """For a recurrent-depth model, also in the methods without recurrences: they are lossless at any seed."""
    model, batch = models(2)[0], [PROMPT, PROMPT, [5]]
    assert isinstance(model, RecurrentDepth)
    static = generate(model, batch, "recurrent_static", max_new_tokens=LIMIT, seed=9).tokens
    assert all(map(torch.equal, generate(model, batch, method, max_new_tokens=LIMIT, seed=9).tokens, static))


@pytest.mark.parametrize("method", available())
@pytest.mark.parametrize(
    "seed, error, text",
    [
        ([1], ValueError, "seed must have one number for each of the 2 sequences, got 1."),
        ([1, 2.5], TypeError, "seed must be an int or a list of ints, got list."),
        (None, TypeError, "seed must be an int or a list of ints, got NoneType."),
        (True, TypeError, "seed must be an int or a list of ints, got bool."),
    ],
)
def test_seeds_are_checked(method: str, seed: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        run(method, [PROMPT, PROMPT], seed=seed)
    assert str(caught.value) == f"pdkernels.decoding.generate: {text}"


# ---- the mask token


class Loud(Table):
    """Rows of text would predict the mask token."""

    def logits(self, call: Call) -> Tensor:
        out = super().logits(call)
        out[torch.tensor(call.tokens) != MASK_ID, MASK_ID] = 9.0
        return out


MASK_ID = 6
# Fakes have no hidden states for drafters to read: tests/decoding/test_eagle.py, test_dflash.py, test_mtp.py.
VERIFIED = [
    name
    for name in available()
    if "allow_mask_token" in method_options(name) and name not in ("eagle", "dflash", "mtp")
]
REFERENCES = {
    "linear_self_speculation": linear_self_speculation,
    "quadratic_self_speculation": quadratic_self_speculation,
    "block_diffusion": block_diffusion,
}
SMALL: dict[str, dict[str, Any]] = {name: {"block_size": 4} for name in VERIFIED if name != "autoregressive"}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("method", VERIFIED)
def test_no_row_predicts_the_mask_token_unless_allowed(method: str, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": LIMIT, "end_tokens": (), **SMALL.get(method, {})}
    if "temperature" in method_options(method):
        options["temperature"] = temperature
    for allowed in (False, True):
        fake = Loud(MASK_ID + 1)
        model = Cached(fake, MASK_ID + 1)
        if method == "draft_model":
            options["drafter"] = model
        written = generate(model, PROMPT, method, allow_mask_token=allowed, **options).tokens.tolist()
        assert len(written) == LIMIT and (MASK_ID in written) == allowed
        if method in REFERENCES:
            plain = {"mask_token": MASK_ID, "allow_mask_token": allowed, **options}
            assert REFERENCES[method](fake, PROMPT, plain.pop("max_new_tokens"), **plain).tokens == written
        if is_lossless(method):
            greedy = {"max_new_tokens": LIMIT, "end_tokens": (), "temperature": options.get("temperature", 0.0)}
            assert generate(model, PROMPT, allow_mask_token=allowed, **greedy).tokens.tolist() == written


def test_rejection_and_ensembles_leave_it_out_too() -> None:
    model, options = (
        Cached(Loud(MASK_ID + 1), MASK_ID + 1),
        {"max_new_tokens": LIMIT, "end_tokens": (), "block_size": 4},
    )
    for seed in range(3):
        drawn = {"temperature": 0.7, "seed": seed, **options}
        rejected = generate(model, PROMPT, "linear_self_speculation", verification="rejection", **drawn)
        for ensemble in ("probability", "logit"):
            mixed = generate(
                model, PROMPT, "quadratic_self_speculation", ensemble_weight=0.5, ensemble=ensemble, **drawn
            )
            assert MASK_ID not in mixed.tokens
        assert MASK_ID not in rejected.tokens


def test_a_given_mask_token_is_banned_and_a_flag_is_a_flag() -> None:
    model = Cached(Loud(MASK_ID + 1), MASK_ID + 1)
    model.mask_token = None
    options = {"max_new_tokens": LIMIT, "end_tokens": (), "block_size": 4}
    assert MASK_ID in generate(model, PROMPT, "jacobi", **options).tokens
    assert MASK_ID not in generate(model, PROMPT, "linear_self_speculation", mask_token=MASK_ID, **options).tokens
    with pytest.raises(TypeError, match="decoding.jacobi: allow_mask_token must be a bool, got int"):
        generate(model, PROMPT, "jacobi", allow_mask_token=1)
