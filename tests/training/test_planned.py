"""Planned batches against the text written token by token: layout, noise, labels, and the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels.masks import Stage
from pdkernels.models import PlanTokens, Transformer, TransformerConfig
from pdkernels.reference import planned_training as plain
from pdkernels.training import (
    NoisyPlan,
    PlanItem,
    PlannedLayout,
    PlannedSample,
    draw_chunk_masks,
    lay_out,
    pack_planned,
    planned_loss,
)
from tests.support.errors import kind_of

OPEN, CLOSE, TOPIC, END_TOPIC, SYNC, PAD = range(10, 16)
END, MASK, VOCAB = 16, 17, 30
TOKENS = {
    predicts: PlanTokens(OPEN, CLOSE, TOPIC, END_TOPIC, SYNC, PAD, digits=range(10), unit=2, predicts=predicts)
    for predicts in ("own", "next")
}
OWN = TOKENS["own"]
EXAMPLE = PlannedSample(
    [20, 21, 22, 23], [[PlanItem([24], [25, 26]), PlanItem([27], [28])], [PlanItem([29], [18, 19])]]
)
# Four tokens of prompt, two chunks, a sync, a chunk.
THIRTY = [
    *(20, 21, 22, 23),
    *(TOPIC, 24, 1, END_TOPIC, TOPIC, 27, 1, END_TOPIC),
    *(OPEN, 25, 26, CLOSE, OPEN, 28, PAD, CLOSE),
    *(SYNC, TOPIC, 29, 1, END_TOPIC, OPEN, 18, 19, CLOSE, END),
]
CONTENT = [13, 14, 17, 18, 26, 27]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def everything_masked(layout: PlannedLayout, p_mask: float = 1.0) -> NoisyPlan:
    return NoisyPlan(layout, layout.content.clone(), torch.full((len(layout.tokens),), p_mask))


def text_of(layout: PlannedLayout) -> plain.Text:
    """The tables of a layout, derived from its tokens."""
    tokens, chunk, number, tag, inside, count, current = layout.tokens.tolist(), [], [], [], False, 0, 0
    for token in tokens:
        count += token == OPEN
        inside = inside or token == OPEN
        current += token == SYNC
        chunk.append(count if inside else 0)
        number.append(current)
        tag.append(token in (OPEN, CLOSE))
        inside = inside and token != CLOSE
    return plain.Text(tokens, chunk, number, tag, layout.prompt_len)


def small_model() -> Transformer:
    torch.manual_seed(3)
    config = TransformerConfig(
        vocab_size=VOCAB, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate_size=24
    )
    model = Transformer(config, mask_token=MASK).double()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 12  # far from uniform
    return model


def loss_of(model: Transformer, batch: Any) -> Any:
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.dense())[0]
    return planned_loss(model.logits(hidden[batch.ar_rows]), model.logits(hidden[batch.masked_rows]), batch)


@st.composite
def samples(draw: st.DrawFn) -> PlannedSample:
    ids = st.lists(st.integers(18, VOCAB - 1), max_size=5)
    item = st.tuples(st.lists(st.integers(18, VOCAB - 1), min_size=1, max_size=2), ids).map(lambda two: PlanItem(*two))
    rounds = draw(st.lists(st.lists(item, min_size=1, max_size=3), max_size=3))
    return PlannedSample(draw(ids.filter(bool)), rounds, draw(ids))


# ---- layout


def test_the_layout_of_thirty_tokens() -> None:
    layout = lay_out(EXAMPLE, OWN, END)
    assert layout.tokens.tolist() == THIRTY and layout.prompt_len == 4
    assert layout.stages == (Stage(12, (4, 4), True), Stage(4, (4,), False), Stage(1, (), False))
    assert layout.content.nonzero()[:, 0].tolist() == CONTENT
    assert layout.rounds.tolist() == [-1] * 12 + [0] * 8 + [-1] * 5 + [1] * 4 + [-1]


@settings(max_examples=40)
@given(samples(), st.integers(0, 5), st.integers(0, 99))
def test_numbers_tell_the_length_of_their_chunks(sample: PlannedSample, max_pads: int, seed: int) -> None:
    layout = lay_out(sample, OWN, END, max_pads=max_pads, generator=generator(seed))
    text = text_of(layout)
    assert sum(stage.plan + sum(stage.chunks) + stage.sync for stage in layout.stages) == len(text.tokens)
    assert layout.content.tolist() == [chunk > 0 and not tag for chunk, tag in zip(text.chunk, text.tag)]
    items = [item for items in sample.rounds for item in items]
    numbers = [text.tokens[i - 1] for i, token in enumerate(text.tokens) if token == END_TOPIC]
    assert len(numbers) == len(items) == max(text.chunk)
    for index, (number, item) in enumerate(zip(numbers, items), start=1):
        inside = [t for t, chunk, tag in zip(text.tokens, text.chunk, text.tag) if chunk == index and not tag]
        assert len(inside) == number * OWN.unit and inside[: len(item.content)] == item.content
        assert set(inside[len(item.content) :]) <= {PAD}
        assert len(item.content) <= len(inside) < max(1, len(item.content) + max_pads) + OWN.unit


def test_numbers_that_are_given_stay() -> None:
    layout = lay_out(PlannedSample([20], [[PlanItem([24], [25, PAD, PAD], 12)]]), OWN, END)
    assert layout.tokens.tolist() == [20, TOPIC, 24, 1, 2, END_TOPIC, OPEN, 25, PAD, PAD, CLOSE, END]


# ---- noise


@pytest.mark.parametrize("tags", [False, True])
def test_tags_are_masked_only_if_asked(tags: bool) -> None:
    layout = lay_out(EXAMPLE, OWN, END)
    noisy = draw_chunk_masks(layout, generator(0), min_p_mask=1.0, tags=tags)
    assert torch.equal(noisy.masked, layout.rounds >= 0 if tags else layout.content)


def test_noise_has_its_stated_frequency_and_rounds_may_differ() -> None:
    item = PlanItem([24], [25] * 180)
    layout = lay_out(PlannedSample([20], [[item, item], [item, item]]), OWN, END)
    random, apart = generator(1), []
    for noise in ["text", "round"] * 30:
        _, masked, p_mask = draw_chunk_masks(layout, random, noise=noise)
        shares = [p_mask[layout.rounds == number].unique().item() for number in (0, 1)]
        for number, share in enumerate(shares):
            chunk_positions = layout.content & (layout.rounds == number)
            count = int(chunk_positions.sum())
            assert (
                abs(int(masked[chunk_positions].sum()) - count * share)
                <= 5 * (count * share * (1 - share)) ** 0.5 + 1e-3
            )
        assert not masked[~layout.content].any()
        if noise == "text":
            assert len(p_mask.unique()) == 1
        else:
            assert bool((p_mask[layout.rounds < 0] == 1).all())
            apart.append(abs(shares[0] - shares[1]))
    assert min(apart) > 0 and max(apart) > 0.5
    again = [draw_chunk_masks(layout, generator(5)).masked for _ in range(2)]
    assert torch.equal(*again)


def test_one_round_is_noisy_and_its_weights_make_up_for_the_others() -> None:
    layout = lay_out(EXAMPLE, OWN, END)
    random, weights = generator(4), torch.zeros(30)
    for _ in range(2000):
        _, masked, p_mask = draw_chunk_masks(layout, random, noise="one", min_p_mask=0.5)
        assert len(set(layout.rounds[masked].tolist())) <= 1
        assert bool((p_mask[layout.content] <= 0.5).all()) and bool((p_mask[layout.content] >= 0.25).all())
        weights += masked / p_mask
    # Five standard deviations of a mean of at most 1 / 0.25 each.
    assert bool(((weights / 2000 - 1)[layout.content].abs() < 5 * (3 / 2000) ** 0.5).all())


# ---- labels


@pytest.mark.parametrize("predicts", ["own", "next"])
def test_labels_of_thirty_tokens(predicts: str) -> None:
    """By hand: plan rows skip chunks, the row before each sync and end predicts it, chunks predict what is masked in them."""
    batch = pack_planned([everything_masked(lay_out(EXAMPLE, OWN, END), 0.5)], TOKENS[predicts], MASK)
    assert batch.tokens.tolist() == [MASK if i in CONTENT else token for i, token in enumerate(THIRTY)]
    table = {3: TOPIC, 4: 24, 5: 1, 6: END_TOPIC, 7: TOPIC, 8: 27, 9: 1, 10: END_TOPIC, 11: SYNC}
    table |= {20: TOPIC, 21: 29, 22: 1, 23: END_TOPIC, 24: END}
    assert dict(zip(batch.ar_rows.tolist(), batch.ar_labels.tolist(), strict=True)) == table
    content = [25, 26, 28, PAD, 18, 19]
    rows = CONTENT if predicts == "own" else [position - 1 for position in CONTENT]
    assert list(zip(batch.masked_rows.tolist(), batch.masked_labels.tolist())) == list(zip(rows, content))
    assert batch.ar_weights.tolist() == [1.0] * 14 and batch.masked_weights.tolist() == [2.0] * 6
    assert batch.normaliser == 26


# ---- loss


@settings(max_examples=25)
@given(
    st.lists(samples(), min_size=1, max_size=3),
    st.integers(0, 99),
    st.booleans(),
    st.sampled_from(["own", "next"]),
    st.sampled_from(["noisy", "clean", "clean_plans"]),
    st.integers(0, 5),
)
def test_the_loss_of_a_batch_is_that_of_its_texts(
    texts: list[PlannedSample], seed: int, sparse: bool, predicts: str, past: str, padding: int
) -> None:
    model, random = small_model(), generator(seed)
    noisy = [draw_chunk_masks(lay_out(text, OWN, END), random, noise="round", min_p_mask=0.1) for text in texts]
    used = len(pack_planned(noisy, TOKENS[predicts], MASK, sparse=sparse, past=past).tokens)
    batch = pack_planned(noisy, TOKENS[predicts], MASK, used + padding, sparse=sparse, past=past)
    ours = loss_of(model, batch)
    plans = chunks = responses = 0
    for layout, masked, p_mask in noisy:
        parts = plain.loss(
            lambda ids, see: model(ids[None], mask=see)[0],
            text_of(layout),
            masked.tolist(),
            p_mask.tolist(),
            MASK,
            sparse=sparse,
            predicts=predicts,
            past=past,
        )
        plans, chunks, responses = plans + parts[0], chunks + parts[1], responses + parts[2]
    torch.testing.assert_close(ours.autoregressive, plans / responses, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(ours.masked, chunks / responses, rtol=1e-6, atol=1e-9)
    assert ours.total == ours.autoregressive + ours.masked


def test_a_text_without_chunks_has_the_autoregressive_loss() -> None:
    model, text = small_model(), [20, 21, 22, 23, 24, 25, 26]
    layout = lay_out(PlannedSample(text[:3], (), text[3:]), OWN, END)
    loss = loss_of(model, pack_planned([draw_chunk_masks(layout, generator(0))], OWN, MASK))
    logits = model(torch.tensor([text]))[0, 2:]
    plain_loss = torch.nn.functional.cross_entropy(logits, torch.tensor([*text[3:], END]))
    torch.testing.assert_close(loss.total, plain_loss, rtol=1e-6, atol=0)
    assert loss.masked == 0


def test_only_masked_content_and_plans_have_gradients() -> None:
    """And the batch's rows are exactly those whose logits the loss depends on."""
    noisy = draw_chunk_masks(lay_out(EXAMPLE, OWN, END), generator(2), min_p_mask=0.4)
    batch = pack_planned([noisy], OWN, MASK)
    logits = torch.randn(30, VOCAB, generator=generator(0), requires_grad=True)
    planned_loss(logits[batch.ar_rows], logits[batch.masked_rows], batch).total.backward()
    touched = logits.grad.abs().sum(1).nonzero()[:, 0].tolist()
    hidden = noisy.masked.nonzero()[:, 0].tolist()
    assert 0 < len(hidden) < 6 and set(hidden) <= set(CONTENT)
    assert touched == sorted([*range(3, 12), *range(20, 25), *hidden])


def test_weights_stay_finite_and_are_right_on_average() -> None:
    random, total, least = generator(3), 0.0, 1e-3
    layout = lay_out(EXAMPLE, OWN, END)
    for _ in range(4000):
        noisy = draw_chunk_masks(layout, random, min_p_mask=least)
        batch = pack_planned([noisy], OWN, MASK)
        assert bool((batch.masked_weights <= 1 / least * (1 + 1e-6)).all())
        total += float(batch.masked_weights.sum())
    # The standard deviation of one draw is below sqrt(6 * E[1 / p] + ...), about 9.
    assert abs(total / 4000 - 6) < 0.8


def test_losses_of_parts_add_up_with_a_common_normaliser() -> None:
    model = small_model()
    noisy = [draw_chunk_masks(lay_out(EXAMPLE, OWN, END), generator(seed)) for seed in range(2)]
    whole = pack_planned(noisy, OWN, MASK)
    parts = [pack_planned([one], OWN, MASK) for one in noisy]
    total = 0
    for part in parts:
        hidden = model.hidden(part.tokens[None], positions=part.positions, mask=part.mask.dense())[0]
        logits = model.logits(hidden[part.ar_rows]), model.logits(hidden[part.masked_rows])
        total = total + planned_loss(*logits, part, normaliser=whole.normaliser).total
    torch.testing.assert_close(total, loss_of(model, whole).total, rtol=1e-6, atol=0)


# ---- errors

LAYOUT = lay_out(EXAMPLE, OWN, END)
NOISY = everything_masked(LAYOUT)


@pytest.mark.parametrize(
    "text, call",
    {
        "lay_out: rounds must hold items, got an empty round.": lambda: lay_out(PlannedSample([20], [[]]), OWN, END),
        "lay_out: topic must be ids that do not end with a digit, got [24, 3]. Put a space before the number.": lambda: (
            lay_out(PlannedSample([20], [[PlanItem([24, 3], [25])]]), OWN, END)
        ),
        "lay_out: content must hold ids without control tokens, got 14.": lambda: lay_out(
            PlannedSample([20], [[PlanItem([24], [25, SYNC])]]), OWN, END
        ),
        "lay_out: number must have at most two digits, got 100.": lambda: lay_out(
            PlannedSample([20], [[PlanItem([24], [25] * 200)]]), OWN, END
        ),
        "lay_out: generator must be given with max_pads, got None.": lambda: lay_out(EXAMPLE, OWN, END, max_pads=3),
        "TypeError: lay_out: sample must be a PlannedSample, got list.": lambda: lay_out([], OWN, END),
        "TypeError: lay_out: prompt must hold ids, got str.": lambda: lay_out(PlannedSample("ab"), OWN, END),
        "draw_chunk_masks: min_p_mask must lie in (0, 1], got 0.0.": lambda: draw_chunk_masks(
            LAYOUT, generator(0), min_p_mask=0.0
        ),
        "draw_chunk_masks: noise must be one of 'text', 'round', 'one', got 'chunk'.": lambda: draw_chunk_masks(
            LAYOUT, generator(0), noise="chunk"
        ),
        "TypeError: draw_chunk_masks: generator must be a torch.Generator, got NoneType.": lambda: draw_chunk_masks(
            LAYOUT, None
        ),
        "pack_planned: masked must be True inside the tags of chunks alone, got True at [12].": lambda: pack_planned(
            [NOISY._replace(masked=LAYOUT.rounds >= 0)], OWN, MASK
        ),
        "pack_planned: length must be at least the 30 tokens of the samples, got 29.": lambda: pack_planned(
            [NOISY], OWN, MASK, 29
        ),
        "pack_planned: p_mask must lie in (0, 1], got others.": lambda: pack_planned(
            [NOISY._replace(p_mask=torch.zeros(30))], OWN, MASK
        ),
        "TypeError: pack_planned: masked must be a bool tensor, got torch.int64.": lambda: pack_planned(
            [NOISY._replace(masked=torch.zeros(30, dtype=torch.int64))], OWN, MASK
        ),
        "planned_loss: ar_logits must have shape (14, vocab), got (13, 3). It takes the listed rows only.": lambda: (
            planned_loss(torch.zeros(13, 3), torch.zeros(6, 3), pack_planned([NOISY], OWN, MASK))
        ),
    }.items(),
)
def test_errors(text: str, call: Any) -> None:
    error, text = kind_of(text)
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value) and str(caught.value).startswith("pdkernels.training.")
