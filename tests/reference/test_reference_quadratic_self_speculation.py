"""Quadratic self-speculation against autoregressive decoding, its mask, and steps written out by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.reference import masks
from pdkernels.reference.autoregressive import autoregressive
from pdkernels.reference.quadratic_self_speculation import (
    QuadraticStep,
    quadratic_input,
    quadratic_self_speculation,
    verifier,
)
from pdkernels.reference.sampling import causal_logits, distribution, sampled_autoregressive
from tests.harness.error_budget import assert_within_budget
from tests.support.base import follows, sequence_distribution
from tests.support.causal import SCRIPTS, from_list
from tests.support.tri_mode import (
    MASK,
    SKILLS,
    ScriptedTriMode,
    Table,
    TinyTransformer,
    assert_clean_rows_see_no_noise,
    never,
    patchy,
)

token = st.integers(0, MASK - 1)


@settings(max_examples=60)
@given(
    script=st.sampled_from(sorted(SCRIPTS)),
    skill=st.sampled_from(sorted(SKILLS)),
    prompt=st.lists(token, min_size=1, max_size=5),
    limit=st.integers(0, 14),
    block_size=st.integers(1, 5),
    more=st.integers(0, 2),
    label_shift=st.integers(0, 1),
    in_group=st.sampled_from(["bidirectional", "causal"]),
    layout=st.sampled_from(["spec_first", "interleaved"]),
    ends=st.lists(token, max_size=2),
)
def test_greedy_equals_autoregressive(
    script, skill, prompt, limit, block_size, more, label_shift, in_group, layout, ends
) -> None:
    model = ScriptedTriMode(SCRIPTS[script], SKILLS[skill], label_shift)
    greedy = autoregressive(model, prompt, limit, end_tokens=ends)
    model.calls.clear()
    result = quadratic_self_speculation(
        model,
        prompt,
        limit,
        mask_token=MASK,
        block_size=block_size,
        masks_per_group=block_size - label_shift + more,
        label_shift=label_shift,
        in_group=in_group,
        layout=layout,
        end_tokens=ends,
        draft_model=model,
    )
    assert result.tokens == greedy.tokens
    assert result.forwards == len(model.calls) == len(result.trace) + (limit > 0) <= greedy.forwards
    assert all(1 <= step.accepted <= len(step.draft) == len(step.predictions) <= block_size for step in result.trace)
    assert_clean_rows_see_no_noise(model.calls, MASK)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    block_size=st.integers(1, 4),
    in_group=st.sampled_from(["bidirectional", "causal"]),
)
def test_greedy_on_a_transformer_in_both_layouts(seed: int, prompt: list[int], block_size: int, in_group: str) -> None:
    model = TinyTransformer(6, seed)
    greedy = autoregressive(model, prompt, 7)
    for drafter in (None, model):
        results = [
            quadratic_self_speculation(
                model,
                prompt,
                7,
                mask_token=5,
                block_size=block_size,
                in_group=in_group,
                layout=layout,
                draft_model=drafter,
                allow_mask_token=True,
            )
            for layout in ("spec_first", "interleaved")
        ]
        assert results[0] == results[1]
        assert results[0].tokens == greedy.tokens


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    block_size=st.integers(1, 4),
    ends=st.lists(st.integers(0, 3), max_size=1),
    limit=st.integers(0, 7),
)
def test_sampling_writes_the_sampled_tokens(
    seed: int, temperature: float, block_size: int, ends: list[int], limit: int
) -> None:
    model = Table(5)
    sampled = sampled_autoregressive(model, [2, 0], limit, temperature=temperature, end_tokens=ends, seed=seed)
    result = quadratic_self_speculation(
        model, [2, 0], limit, mask_token=4, block_size=block_size, temperature=temperature, end_tokens=ends, seed=seed
    )
    assert result.tokens == sampled.tokens


@pytest.mark.slow
def test_distribution_of_the_sampled_tokens() -> None:
    model = Table(4, seed=5)
    run = lambda seed: quadratic_self_speculation(  # noqa: E731
        model, [1], 3, mask_token=3, block_size=3, temperature=1.2, seed=seed
    )
    results = [run(seed) for seed in range(400)]
    counts = Counter(tuple(result.tokens) for result in results)
    assert follows(counts, sequence_distribution(model, [1], 3, 1.2))
    assert not follows(counts, sequence_distribution(model, [1], 3, 0.7))
    assert {step.accepted for result in results for step in result.trace} == {1, 2}


@pytest.mark.parametrize("layout", ["spec_first", "interleaved"])
@pytest.mark.parametrize("in_group", ["bidirectional", "causal"])
@pytest.mark.parametrize("label_shift", [0, 1])
def test_the_mask_of_every_forward(layout: str, in_group: str, label_shift: int) -> None:
    model = ScriptedTriMode(SCRIPTS["mixed"], patchy, label_shift)
    result = quadratic_self_speculation(
        model,
        [3, 1, 4],
        12,
        mask_token=MASK,
        block_size=4,
        label_shift=label_shift,
        in_group=in_group,
        layout=layout,
        draft_model=model,
    )
    count = 4 - label_shift
    # The prompt's forward is a group after the prompt's last token.
    starts, drafts = [2, 3], [[4], *(step.draft for step in result.trace)]
    for step in result.trace[:-1]:
        starts.append(starts[-1] + step.accepted)
    for call, start, draft in zip(model.calls, starts, drafts, strict=True):
        tail, relative = masks.quadratic(len(draft), count, in_group, layout)
        assert torch.equal(call.mask[start:, start:], tail)
        assert call.mask[start:, :start].all() and torch.equal(call.mask[:start, :start], masks.causal(start)[0])
        assert not call.mask[:start, start:].any()
        assert call.positions == [*range(start), *(start + relative).tolist()]
        assert call.adapted is not None and call.adapted.tolist() == [token == MASK for token in call.tokens]
        clean = [token for token in call.tokens if token != MASK]
        assert clean == [3, 1, 4, *result.tokens][:start] + draft
        if layout == "spec_first":
            assert call.tokens[start:] == draft + [MASK] * (count * len(draft))
        else:
            assert call.tokens[start :: 1 + count][: len(draft)] == draft


def test_the_layout_of_two_draft_tokens() -> None:
    """The example of two draft tokens with two masks each, after a prefix of three."""
    tokens, positions, mask, rank = quadratic_input([7, 8, 9], [1, 2], MASK, 2, "bidirectional", "interleaved")
    assert tokens == [7, 8, 9, 1, MASK, MASK, 2, MASK, MASK]
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6] and rank.tolist() == [0, 0, 0, 0, 1, 2, 0, 1, 2]
    rows = ["".join(str(int(x)) for x in row) for row in mask]
    assert rows == [
        "100000000",
        "110000000",
        "111000000",
        "111100000",
        "111111000",
        "111111000",
        "111100100",
        "111100111",
        "111100111",
    ]


def test_draft_rows_are_those_of_a_causal_model() -> None:
    model = TinyTransformer(40, seed=1)
    prefix, draft = list(range(6)), [7, 8, 9]
    own = causal_logits(model, prefix + draft)[6:]
    for layout in ("spec_first", "interleaved"):
        tokens, positions, mask, rank = quadratic_input(prefix, draft, 39, 3, "bidirectional", layout)
        logits = model(torch.tensor([tokens]), positions[None], mask, rank > 0)[0, 6:]
        assert_within_budget(logits[rank[6:] == 0].float(), own, own.float(), name=layout)


def test_a_walk_through() -> None:
    """Draft A B C D after ten tokens, verified as B C X: three are committed, and group 2 gives the next draft."""
    prompt, (a, b, c, x), wrong = list(range(10)), (11, 12, 13, 14), 15
    model = ScriptedTriMode(from_list([a, b, c, x, 16, 17, 18, 19, 20], 10), lambda history, position: position != 13)
    result = quadratic_self_speculation(model, prompt, 9, mask_token=MASK, block_size=4)
    first, second = result.trace[:2]
    assert first.draft == [a, b, c, wrong] and first.predictions[:3] == [b, c, x] and first.accepted == 3
    assert second.draft == [x, 16, 17, 18]  # masks 2, 3, 4 of group 2 at positions 14, 15, 16
    assert result.tokens == [a, b, c, x, 16, 17, 18, 19, 20] and result.forwards == 4


def test_nothing_accepted_and_all_accepted() -> None:
    written = [1, 2, 3, 4, 5, 6, 7, 8]
    result = quadratic_self_speculation(
        ScriptedTriMode(from_list(written, 2), never), [9, 8], 4, mask_token=MASK, block_size=3
    )
    assert result == (
        [1, 2, 3, 4],
        4,
        # Group 0 guesses after the anchor; a guess is the right token plus one. Off its track the script predicts 0.
        [QuadraticStep([1, 3, 4], [2, 0, 0], 1), QuadraticStep([2, 4], [3, 0], 1), QuadraticStep([3], [4], 1)],
    )
    result = quadratic_self_speculation(
        ScriptedTriMode(from_list(written, 2)), [9, 8], 8, mask_token=MASK, block_size=3
    )
    assert result == (
        written,
        4,
        [QuadraticStep([1, 2, 3], [2, 3, 4], 3), QuadraticStep([4, 5, 6], [5, 6, 7], 3), QuadraticStep([7], [8], 1)],
    )


@pytest.mark.parametrize(
    ("ends", "limit", "tokens", "accepted"),
    [
        ((1,), 9, [1], []),
        ((3,), 9, [1, 2, 3], [3]),
        ((4,), 9, [1, 2, 3, 4], [4]),
        ((5,), 9, [1, 2, 3, 4, 5], [4]),  # the token after the accepted ones: no further forward
        ((7,), 9, [1, 2, 3, 4, 5, 6, 7], [4, 3]),
        ((), 1, [1], []),
        ((), 2, [1, 2], [1]),
        ((), 4, [1, 2, 3, 4], [3]),
        ((), 5, [1, 2, 3, 4, 5], [4]),
        ((3,), 3, [1, 2, 3], [2]),
    ],
)
def test_where_it_stops(ends: tuple[int, ...], limit: int, tokens: list[int], accepted: list[int]) -> None:
    model = ScriptedTriMode(from_list([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 2))
    result = quadratic_self_speculation(model, [9, 8], limit, mask_token=MASK, block_size=4, end_tokens=ends)
    assert result.tokens == tokens and [step.accepted for step in result.trace] == accepted
    assert result.forwards == 1 + len(accepted)


def test_both_ensembles() -> None:
    own, diffusion = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([[9.0, -torch.inf, 0.0]])
    assert verifier(own, diffusion, 1.0, "probability") is own and verifier(own, diffusion, 1.0, "logit") is own
    assert verifier(own, diffusion, 0.25, "logit").tolist() == [[6.75, -torch.inf, 0.25]]
    mixed = verifier(own, diffusion, 0.25, "probability").exp()
    expected = 0.25 * own.double().softmax(-1) + 0.75 * diffusion.double().softmax(-1)
    assert_within_budget(mixed.float(), expected, expected.float(), name="ensemble")
    # Their verdicts differ: confident diffusion rows weigh more among logits.
    assert verifier(own, diffusion, 0.6, "logit").argmax() == 0
    assert verifier(own, diffusion, 0.6, "probability").argmax() == 0
    assert verifier(own, diffusion, 0.7, "logit").argmax() == 0
    assert verifier(own, diffusion, 0.7, "probability").argmax() == 1


@pytest.mark.parametrize("form", ["probability", "logit"])
def test_weight_zero_lets_the_masks_decide(form: str) -> None:
    """The diffusion rows are wrong by one everywhere. The prompt's own token still comes from the autoregressive row."""
    model = ScriptedTriMode(SCRIPTS["position"], never)
    result = quadratic_self_speculation(
        model, [3], 7, mask_token=MASK, block_size=3, ensemble_weight=0.0, ensemble=form
    )
    right = autoregressive(model, [3], 7).tokens
    assert result.tokens == right[:1] + [(token + 1) % MASK for token in right[1:]]
    assert [step.accepted for step in result.trace] == [3, 3]  # guesses and verifier agree


def test_the_ensemble_replaces_the_verifier_and_the_next_anchor() -> None:
    model = Table(3, seed=4)
    result = quadratic_self_speculation(model, [0, 1], 12, mask_token=2, block_size=3, ensemble_weight=0.4)
    start = 2
    for step, following in zip(result.trace, result.trace[1:]):
        tokens, positions, mask, rank = quadratic_input(
            [0, 1, *result.tokens][:start], step.draft, 2, 3, "bidirectional", "interleaved"
        )
        logits = model(torch.tensor([tokens]), positions[None], mask)[0, start:].unflatten(0, (-1, 4))[..., :2]
        own, first = distribution(logits[:, 0], 1.0), distribution(logits[:, 1], 1.0)
        assert step.predictions == (0.4 * own + 0.6 * first).argmax(-1).tolist()
        guesses = logits[step.accepted - 1, 2:].argmax(-1).tolist()
        assert following.draft == [step.predictions[step.accepted - 1], *guesses][: len(following.draft)]
        start += step.accepted
    assert {step.accepted for step in result.trace} >= {1, 2}


def test_refusals() -> None:
    run = lambda **options: quadratic_self_speculation(Table(4), [1], 3, mask_token=3, block_size=4, **options)  # noqa: E731
    with pytest.raises(ValueError, match="masks_per_group must be at least 4, got 3"):
        run(masks_per_group=3)
    with pytest.raises(ValueError, match="ensemble_weight must be 1 with label_shift=1, got 0.5"):
        run(label_shift=1, ensemble_weight=0.5)
    with pytest.raises(ValueError, match="ensemble must be 'probability' or 'logit', got 'both'"):
        run(ensemble="both")
