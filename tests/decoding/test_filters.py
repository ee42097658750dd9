"""`top_k`, `top_p` and `min_p` of the causal methods: transformers' filters, and the same draws whatever was drafted."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.decoding import generate, sequence_seed
from pdkernels.decoding.methods import METHODS
from pdkernels.generation.sampler import Sampler, kth_largest
from pdkernels.reference import sampling as reference
from pdkernels.reference.block_diffusion import block_diffusion
from pdkernels.reference.linear_self_speculation import linear_self_speculation
from pdkernels.reference.quadratic_self_speculation import quadratic_self_speculation
from tests.support.base import page_sizes, seeds, streams
from tests.support.masked import small_masked
from tests.support.plans import example
from tests.support.tri_mode import small_transformer

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

SIZE = 13
MASK = SIZE - 1
# Methods that write the tokens of autoregressive sampling.
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "jacobi": ("jacobi", {"block_size": 5}),
    "window": ("jacobi", {"window": 4}),
    "lookup": ("jacobi", {"draft": "lookup", "block_size": 4}),
    "multiblock": ("jacobi_multiblock", {"block_size": 4, "spawn_ratio": 0.5}),
    "linear": ("linear_self_speculation", {"block_size": 4}),
    "linear by confidence": ("linear_self_speculation", {"block_size": 4, "threshold": 0.2}),
    "quadratic": ("quadratic_self_speculation", {"block_size": 3}),
    "quadratic, shifted": ("quadratic_self_speculation", {"block_size": 3, "label_shift": 1, "in_group": "causal"}),
}
# Qwen3's, transformers' own, Gemma 3's and Llama 3's.
CONFIGS: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    {"temperature": 0.6, "top_p": 0.9},
]
samplers = st.builds(
    Sampler,
    temperature=st.sampled_from([0.3, 0.6, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 2, 3, 5, 20]),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.03, 0.2, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.1]),
    top_p_rule=st.just("crossing"),
)
published = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
)


def processed(logits: Tensor, sampler: Sampler) -> Tensor:
    """`logits` after the processors that transformers makes of the same settings."""
    given = {name: value for name, value in options_of(sampler).items() if value is not None}
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **given})
    processors = published._get_logits_processor(config, input_ids_seq_length=1)
    named = {"TopKLogitsWarper": sampler.top_k, "TopPLogitsWarper": sampler.top_p < 1}
    made = [type(processor).__name__ for processor in processors]
    assert [name for name in named if named[name]] == [name for name in made if name in named]
    result: Tensor = processors(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone())
    return result


def options_of(sampler: Sampler) -> dict[str, Any]:
    settings = sampler._asdict()
    del settings["top_p_rule"]  # the method's
    return settings


def at_a_border(logits: Tensor, sampler: Sampler) -> bool:
    """Whether rounding decides about a token: the mass before it is `top_p`, or its share is `min_p`."""
    rows = reference.filtered(logits, sampler.temperature, sampler.top_k)
    mass = reference.distribution(rows, sampler.temperature)
    more = ((rows[:, None] > rows[:, :, None]) * mass[:, None]).sum(-1)
    share = mass / mass.amax(-1, keepdim=True)
    near = (more - sampler.top_p).abs() < 1e-9
    near |= ((share - sampler.min_p).abs() < 1e-9) & (share < 1)
    if sampler.typical_p < 1:
        left = reference.filtered(logits, *sampler[:4])
        mass = reference.distribution(left, sampler.temperature)
        away = (-mass.log() - torch.special.entr(mass).sum(-1, keepdim=True)).abs()
        apart = away[:, None] - away[:, :, None]
        closer = ((apart < 0) * mass[:, None]).sum(-1)
        # Unequal tokens may be equally typical, but for rounding.
        twins = (apart.abs() < 1e-9) & (left[:, None] != left[:, :, None]) & left[:, None].isfinite()
        near |= ((closer - sampler.typical_p).abs() < 1e-9) | twins.any(-1)
    return bool((near & rows.isfinite()).any())


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 30), levels=st.sampled_from([2, 5, 40, 0]), sampler=samplers)
def test_they_keep_what_transformers_keeps(seed: int, size: int, levels: int, sampler: Sampler) -> None:
    """Where logits tie at the border of top-p, transformers keeps some of the equals and we keep all."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, size, generator=generator, dtype=torch.float64) * 2
    if levels:
        logits = torch.randint(levels, (4, size), generator=generator).double() * 0.37
    assume(not at_a_border(logits, sampler))
    ours, theirs = sampler.filtered(logits), processed(logits, sampler)
    kept, expected = ours.isfinite(), theirs.isfinite()
    smallest = logits.masked_fill(~expected, torch.inf).amin(-1, keepdim=True)
    if sampler.typical_p == 1:
        assert (kept >= expected).all()
        assert (logits == smallest)[kept & ~expected].all()
    if sampler.top_p == 1 or levels == 0:
        assert torch.equal(kept, expected)
    assert torch.equal(ours[kept], logits[kept])
    plain = reference.filtered(logits, *sampler[:5])
    assert torch.equal(plain, ours)


@settings(max_examples=150, deadline=None)
@given(
    seed=seeds,
    size=st.integers(2, 40),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    banned=st.sampled_from([(), (1,), (0, 1)]),
    sampler=samplers,
)
def test_a_draw_is_one_of_the_filtered_distribution(
    seed: int, size: int, dtype: torch.dtype, banned: tuple[int, ...], sampler: Sampler
) -> None:
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed % 2**32)).mul(2).to(dtype)
    if size == len(banned):
        banned = ()
    before, positions = logits.clone(), torch.arange(6).view(2, 3)
    numbers = torch.tensor([(sequence_seed(seed, n) + 2**63) % 2**64 - 2**63 for n in range(2)])
    rows = logits.double().clone()
    rows[..., list(banned)] = -torch.inf
    assume(not at_a_border(rows.view(6, -1), sampler))
    found = sampler.sample(logits, positions, numbers, 3, banned)
    for n in range(2):
        law = reference.filtered(rows[n], *sampler[:5])
        assert torch.equal(sampler.filtered(logits[n], banned).isfinite(), law.isfinite())
        assert found[n].tolist() == reference.draw(
            law, positions[n].tolist(), sampler.temperature, sequence_seed(seed, n), 3
        )
    assert torch.equal(logits, before)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 63, 64, 700, 5000, 5003]),
    levels=st.sampled_from([3, 40, 0]),
    count=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_kth_largest_of_long_rows(seed: int, size: int, levels: int, count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 2, size, generator=generator)
    if levels:
        logits = (logits * levels).round() / levels
    logits[0, 0, : size // 2] = -torch.inf
    logits[1, 1, size // 3] = torch.inf
    logits = logits.to(dtype)
    expected = logits.sort(-1, descending=True).values[..., min(count, size) - 1 :][..., :1]
    assert torch.equal(kth_largest(logits, min(count, size)), expected)
    logits[2, 0, size // 2] = torch.nan
    theirs = logits.topk(min(count, size), -1).values[..., -1:]
    torch.testing.assert_close(kth_largest(logits, min(count, size)), theirs, equal_nan=True, rtol=0, atol=0)


def test_typical_tokens_of_long_rows_are_those_of_transformers() -> None:
    """Where few tokens are left by top-k, only those are ordered."""
    generator = torch.Generator().manual_seed(5)
    for top_k, typical_p in ((None, 0.6), (7, 0.6), (50, 0.9)):
        logits = torch.randn(3, 4000, generator=generator, dtype=torch.float64) * 3
        sampler = Sampler(0.8, top_k=top_k, typical_p=typical_p)
        assert torch.equal(sampler.filtered(logits).isfinite(), processed(logits, sampler).isfinite())
        tied = logits.round()  # far more than top_k
        assert torch.equal(sampler.filtered(tied).isfinite(), processed(tied, sampler).isfinite())


class Head:
    """Its logits are its hidden rows."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize(("top_k", "typical_p"), [(None, 1.0), (3, 1.0), (None, 0.4)])
def test_confidences_know_no_filter(top_k: int | None, typical_p: float) -> None:
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(1)) * 3
    logits[1, 4] = -torch.inf
    sampler = Sampler(0.7, top_k, 0.8, 0.05, typical_p)
    positions, numbers = torch.arange(10).view(2, 5), torch.tensor([4, 5])
    ids, sure = sampler.guess(Head(), logits, positions, numbers, 2, (3,))
    assert torch.equal(ids, sampler.draw(Head(), logits, positions, numbers, 2, (3,)))
    assert ids[1, 4] == -1 and sure[1, 4] == 0
    logits[..., 3] = -torch.inf
    expected = logits.softmax(-1).gather(-1, ids.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(sure.flatten()[:9], expected.flatten()[:9])


def test_broken_rows_stay_broken() -> None:
    logits = torch.zeros(1, 3, 6)
    logits[0, 0, 4], logits[0, 1, 5] = torch.nan, torch.inf
    sampler, positions, numbers = Sampler(1.0, 2, 0.9, 0.1), torch.arange(3)[None], torch.tensor([1])
    ids, sure = sampler.guess(Head(), logits, positions, numbers, 0)
    assert ids[0, :2].tolist() == [4, 5] and sure[0, :2].isnan().all() and 0 < sure[0, 2] < 1


# ------------------------------------------------------------------------------------------------------------ generation

batches = st.lists(st.lists(st.integers(0, MASK - 1), min_size=1, max_size=9), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(sorted(EXACT)),
    weights=st.integers(0, 3),
    batch=batches,
    limit=st.integers(1, 14),
    sampler=samplers,
    ends=st.lists(st.integers(0, MASK), max_size=2),
    seed=seeds,
    page_size=page_sizes,
)
def test_every_exact_method_writes_the_tokens_of_autoregressive(
    form: str, weights: int, batch: Any, limit: int, sampler: Sampler, ends: list[int], seed: int, page_size: int | None
) -> None:
    method, own = EXACT[form]
    model = small_transformer(weights, adapter=weights % 2 == 1)
    drawn = {"max_new_tokens": limit, "seed": seed, "end_tokens": ends, **options_of(sampler)}
    one_by_one = generate(model, batch, page_size=page_size, **drawn)
    found = generate(model, batch, method, page_size=page_size, **own, **drawn)
    assert [ids.tolist() for ids in found.tokens] == [ids.tolist() for ids in one_by_one.tokens]
    for number, (prompt, alone) in enumerate(streams(batch, drawn)):
        assert torch.equal(generate(model, prompt, method, **own, **alone).tokens, found.tokens[number])


def plain(model: Any) -> Any:
    """The interface of the references; no row gives the mask token, as in the decoders."""
    return lambda tokens, positions, mask, adapted=None: reference.without(
        model(tokens, positions=positions, mask=mask), MASK
    )


def filtering(model: Any, sampler: Sampler) -> Any:
    def forward(*arguments: Any) -> Tensor:
        (rows,) = plain(model)(*arguments)
        return reference.filtered(rows, *sampler[:5])[None]

    return forward


@settings(max_examples=25, deadline=None)
@given(weights=st.integers(0, 3), batch=batches, limit=st.integers(1, 8), sampler=samplers, seed=seeds)
def test_autoregressive_is_the_reference(weights: int, batch: Any, limit: int, sampler: Sampler, seed: int) -> None:
    model, drawn = small_transformer(weights), {"seed": seed, **options_of(sampler)}
    found = generate(model, batch, max_new_tokens=limit, end_tokens=(), **drawn)
    for ids, (prompt, alone) in zip(found.tokens, streams(batch, drawn), strict=True):
        assert ids.tolist() == reference.sampled_autoregressive(plain(model), prompt, limit, **alone).tokens


# Drafts from the filtered distribution too: with one pass per block, or all slots in one, confidences decide nothing.
DRAFTED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "linear": ("linear_self_speculation", linear_self_speculation, {"block_size": 4}),
    "rejection": ("linear_self_speculation", linear_self_speculation, {"block_size": 4, "verification": "rejection"}),
    "quadratic": ("quadratic_self_speculation", quadratic_self_speculation, {"block_size": 3}),
    "blocks": ("block_diffusion", block_diffusion, {"block_size": 4, "threshold": 0.0}),
}


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(sorted(DRAFTED)),
    weights=st.integers(0, 3),
    batch=batches,
    limit=st.integers(1, 10),
    sampler=samplers,
    seed=seeds,
)
def test_drafts_are_filtered_as_well(
    form: str, weights: int, batch: Any, limit: int, sampler: Sampler, seed: int
) -> None:
    method, decode, own = DRAFTED[form]
    model, drawn = small_transformer(weights), {"seed": seed, "temperature": sampler.temperature}
    found = generate(
        model,
        batch,
        method,
        max_new_tokens=limit,
        end_tokens=(),
        mask_token=MASK,
        **own,
        **options_of(sampler),
        seed=seed,
    )
    for number, (prompt, alone) in enumerate(streams(batch, drawn)):
        expected = decode(filtering(model, sampler), prompt, limit, mask_token=MASK, **own, **alone)
        assert found.tokens[number].tolist() == expected.tokens


# ------------------------------------------------------------------------------------------------------------------ laws

LAWFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("autoregressive", {}),
    "jacobi": ("jacobi", {"block_size": 3}),
    "rejection": ("linear_self_speculation", {"block_size": 3, "verification": "rejection"}),
    "quadratic": ("quadratic_self_speculation", {"block_size": 2}),
}


# The draws of the slow ones are, token for token, those of autoregressive.
@pytest.mark.parametrize(
    "form",
    ["autoregressive", "rejection", *(pytest.param(form, marks=pytest.mark.slow) for form in ("jacobi", "quadratic"))],
)
def test_texts_have_the_law_of_transformers_processors(form: str) -> None:
    """Chi-square over all texts of three tokens, enumerated with transformers' processors."""
    method, own = LAWFUL[form]
    size, prompt, draws = 6, [1, 3, 0], 4000
    sampler, model = Sampler(4.0, top_k=5, top_p=0.95, min_p=0.1, typical_p=0.8), small_transformer(5, size)
    law = dict.fromkeys(product(range(size), repeat=3), 0.0)
    for start in product(range(size), repeat=2):
        chance = torch.ones((), dtype=torch.float64)
        for place, token in enumerate([*start, None]):
            text = torch.tensor([[*prompt, *start[:place]]])
            logits = reference.without(
                reference.causal_logits(plain_of(model), text[0].tolist())[-1:].double(), size - 1
            )
            row = processed(logits, sampler)[0].softmax(-1)
            if token is None:
                for last in range(size):
                    law[(*start, last)] = float(chance * row[last])
            else:
                chance = chance * row[token]
    assert abs(sum(law.values()) - 1) < 1e-9 and sum(p == 0 for p in law.values()) > 50
    given_options = {"max_new_tokens": 3, "end_tokens": (), "seed": 11, **own, **options_of(sampler)}
    if method != "autoregressive" and "mask_token" in METHODS[method].options:
        given_options["mask_token"] = size - 1
    texts = [tuple(ids.tolist()) for ids in generate(model, [prompt] * draws, method, **given_options).tokens]
    seen = {text: texts.count(text) for text in set(texts)}
    assert all(law[text] > 0 for text in seen)
    likely = {text for text, chance in law.items() if draws * chance >= 5}
    rest = 1 - sum(law[text] for text in likely)
    pairs = [(seen.get(text, 0), draws * law[text]) for text in likely]
    pairs += [(draws - sum(count for count, _ in pairs), draws * rest)] if rest * draws > 1 else []
    statistic = sum((count - expected) ** 2 / expected for count, expected in pairs)
    freedom = len(pairs) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 and freedom > 8


def plain_of(model: Any) -> Any:
    return lambda tokens, positions, mask: model(tokens, positions=positions, mask=mask)


@pytest.mark.parametrize(
    "config", [*CONFIGS[:2], *(pytest.param(config, marks=pytest.mark.slow) for config in CONFIGS[2:])], ids=str
)
def test_settings_of_model_cards_run_in_every_causal_method(config: dict[str, Any]) -> None:
    model = small_transformer(2, 80)
    drawn = {"max_new_tokens": 12, "end_tokens": (), "seed": 4, **config}
    expected = generate(model, [[5, 6, 7], [8]], **drawn)
    for method, own in EXACT.values():
        found = generate(model, [[5, 6, 7], [8]], method, **own, **drawn)
        assert [ids.tolist() for ids in found.tokens] == [ids.tolist() for ids in expected.tokens]
    free = generate(model, [[5, 6, 7], [8]], **drawn | {"top_k": None, "top_p": None})
    told_apart = [ids.tolist() for ids in free.tokens] != [ids.tolist() for ids in expected.tokens]
    assert told_apart or "top_p" not in config
    assert len(generate(model, [5, 6, 7], "block_diffusion", block_size=4, **drawn).tokens) == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_in_low_precision_as_well(dtype: torch.dtype) -> None:
    """In bfloat16 many logits tie, at the borders of filters too."""
    model = small_transformer(3, 40, head_dim=16).to(dtype)
    drawn = {"max_new_tokens": 24, "end_tokens": (), "seed": 8, "temperature": 1.2, "top_k": 12, "top_p": 0.9}
    batch = [[5, 6, 7], [8], [1, 2, 1, 2, 1, 2, 1]]
    for page_size in (None, 7):
        expected = generate(model, batch, page_size=page_size, **drawn, min_p=0.02)
        for method, own in EXACT.values():
            found = generate(model, batch, method, page_size=page_size, **own, **drawn, min_p=0.02)
            assert [ids.tolist() for ids in found.tokens] == [ids.tolist() for ids in expected.tokens], method


def test_filters_do_not_change_greedy_decoding() -> None:
    model, drawn = small_transformer(1), {"max_new_tokens": 9, "end_tokens": ()}
    filters = {"top_k": 2, "top_p": 0.1, "min_p": 0.5, "typical_p": 0.2}
    for method in ("autoregressive", "block_diffusion", *{method for method, _ in EXACT.values()}):
        plain_tokens = generate(model, [3, 1, 4], method, **drawn).tokens
        assert torch.equal(generate(model, [3, 1, 4], method, **filters, **drawn).tokens, plain_tokens)


@pytest.mark.parametrize(
    "method", ["autoregressive", "block_diffusion", *dict.fromkeys(method for method, _ in EXACT.values())]
)
@pytest.mark.parametrize(
    ("name", "value", "words", "error"),
    [
        ("top_k", 0, "top_k must be at least 1, got 0", ValueError),
        ("top_k", 2.0, "top_k must be an int, got float", TypeError),
        ("top_p", 1.5, r"top_p must be in 0 \.\. 1, got 1.5", ValueError),
        ("min_p", -0.1, r"min_p must be in 0 \.\. 1, got -0.1", ValueError),
        ("min_p", "0.1", "min_p must be a number, got str", TypeError),
        ("typical_p", 0.0, "typical_p must be above 0, got 0.0", ValueError),
    ],
)
def test_bad_filters_are_refused(method: str, name: str, value: Any, words: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^pdkernels.decoding.generate: {words}"):
        generate(small_transformer(0), [1], method, temperature=1.0, **{name: value})


# -------------------------------------------------------------------------------------------------------------- canvases

MASKED: dict[str, dict[str, Any]] = {"llada": {}, "slowfast": {}, "dllm_cache": {}, "fast_dllm": {"block_size": 4}}
FILTERS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"typical_p": 0.4},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.7},
]


@pytest.mark.parametrize("method", [*MASKED, "dream"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_masked_position_is_drawn_from_the_filtered_distribution(method: str, filters: dict[str, Any]) -> None:
    """With one position to fill, the token is the reference's; with several, the confidence that orders them knows no filter."""
    model = small_masked(3)
    size, mask = model.config.vocab_size, model.mask_token
    sampler = Sampler(1.5, **filters)
    for seed in range(12):
        prompt = [seed % 7, 3, 1 + seed % 5]
        found = generate(
            model, prompt, method, max_new_tokens=1, temperature=1.5, seed=seed, **MASKED.get(method, {}), **filters
        )
        text = torch.tensor([[*prompt, mask]])
        rows = plain_of(model)(text, torch.arange(4)[None], torch.ones(4, 4, dtype=torch.bool))[0, -1:]
        law = reference.without(rows, mask)
        if method == "dream":  # its top-p is of all tokens, whatever top-k leaves
            drops = [reference.filtered(law, 1.5, sampler.top_k), reference.filtered(law, 1.5, None, sampler.top_p)]
            law = torch.where(drops[0].isfinite() & drops[1].isfinite(), law, -torch.inf)
            law = reference.filtered(law, 1.5, None, 1.0, sampler.min_p, sampler.typical_p)
        else:
            law = reference.filtered(law, *sampler[:5])
        assert found.tokens.tolist() == reference.draw(law, [3], 1.5, seed, 1)
        assert size > int(law.isfinite().sum())


def test_one_token_to_draw_from_is_greedy_decoding() -> None:
    """Confidences are those of the model, so positions are filled in the order of temperature 0."""
    model = small_masked(4)
    for method, own in MASKED.items():
        options = {"max_new_tokens": 9, "trace": True, **own}
        greedy = generate(model, [3, 1, 4], method, **options)
        found = generate(model, [3, 1, 4], method, temperature=0.8, top_k=1, **options)
        assert torch.equal(found.tokens, greedy.tokens) and found.stats.accepted == greedy.stats.accepted
        for one, other in zip(found.stats.trace[0], greedy.stats.trace[0], strict=True):
            assert one.confidence == pytest.approx(other.confidence, 1e-6)


@pytest.mark.parametrize("method", ["dream", "planned"])
def test_min_p_of_methods_with_filters_of_their_own(method: str) -> None:
    """Everything but the likeliest token is below the largest share: greedy decoding."""
    model = example(METHODS[method])
    options = {"max_new_tokens": 8, "seed": 3}
    greedy = generate(model, [3, 1, 4], METHODS[method], **options)
    assert torch.equal(
        generate(model, [3, 1, 4], METHODS[method], temperature=0.7, min_p=1.0, **options).tokens, greedy.tokens
    )
