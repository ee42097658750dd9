"""Penalties, biases, forbidden and forced tokens: transformers' processors for the prefix of every row, whatever was drafted."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.decoding import generate
from pdkernels.decoding.methods import METHODS
from pdkernels.generation.filters import Filters, unpacked
from pdkernels.generation.params import SamplingParams, names_of
from pdkernels.generation.prefixes import Prefixes
from pdkernels.reference import sampling as reference
from scripts.methods import follows
from tests.harness.sessions import FILTERS
from tests.harness.settings import EXAMPLES
from tests.support.base import page_sizes, seeds, streams
from tests.support.masked import small_masked
from tests.support.plans import example
from tests.support.tri_mode import small_transformer

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from tests.decoding.test_filters import EXACT, published  # noqa: E402

OFF: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "bad_words": (),
    "min_new_tokens": 0,
    "forced_tokens": None,
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "logits_processor": None,
}


def drawn_options(size: int) -> Any:
    """Settings over `size` ids."""
    ids = st.integers(0, size - 1)
    some = st.lists(ids, max_size=2, unique=True)
    return st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 1.3, 0.6, 3.0]),
            "presence_penalty": st.sampled_from([0.0, 0.7, -0.5]),
            "frequency_penalty": st.sampled_from([0.0, 0.4, -0.3]),
            "logit_bias": st.one_of(st.none(), st.dictionaries(ids, st.sampled_from([-2.0, 1.5, 0.0]), max_size=3)),
            "bad_words": st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3),
            "min_new_tokens": st.integers(0, 4),
            "forced_tokens": st.one_of(st.none(), st.dictionaries(st.integers(0, 3), ids, max_size=2)),
            "suppress_tokens": some,
            "begin_suppress_tokens": some,
        }
    )


def theirs(prompt: list[int], options: dict[str, Any], ends: list[int]) -> Any:
    """A row of logits after a prefix, by transformers' processors; what it lacks is written out: OpenAI's presence and frequency
    penalties, after the repetition penalty as in vLLM, and tokens forced at any place."""
    config = transformers.GenerationConfig(
        eos_token_id=ends or None,
        sequence_bias={(token,): bias for token, bias in (options["logit_bias"] or {}).items()} or None,
        repetition_penalty=options["repetition_penalty"],
        bad_words_ids=options["bad_words"] or None,
        min_new_tokens=options["min_new_tokens"] or None,
        suppress_tokens=options["suppress_tokens"] or None,
        begin_suppress_tokens=options["begin_suppress_tokens"] or None,
        max_length=10_000,
    )
    # A bad word that is an end token alone is dropped there.
    published._prepare_special_tokens(config)
    kept, config._eos_token_tensor = config._eos_token_tensor, None
    bad_words = published._get_logits_processor(config, input_ids_seq_length=len(prompt))
    config._eos_token_tensor = kept
    others = published._get_logits_processor(config, input_ids_seq_length=len(prompt))
    processors = [bad if type(bad).__name__ == "NoBadWordsLogitsProcessor" else None for bad in bad_words]
    word_filter = next((found for found in processors if found is not None), None)

    def row(text: list[int], logits: Tensor) -> Tensor:
        ids, logits = torch.tensor([text]), logits[None].clone()
        made = {type(item).__name__: item for item in others}
        counts = Counter(text[len(prompt) :])
        for name in ("SequenceBiasLogitsProcessor", "RepetitionPenaltyLogitsProcessor"):
            logits = made[name](ids, logits) if name in made else logits
        for token, count in counts.items():
            logits[0, token] -= options["presence_penalty"] + options["frequency_penalty"] * count
        if word_filter is not None:
            logits = word_filter(ids, logits)
        name = "MinNewTokensLengthLogitsProcessor"
        logits = made[name](ids, logits) if name in made else logits
        forced = (options["forced_tokens"] or {}).get(len(text) - len(prompt))
        if forced is not None:
            logits = torch.full_like(logits, -torch.inf).index_fill(-1, torch.tensor([forced]), 0.0)
        for name in ("SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor"):
            logits = made[name](ids, logits) if name in made else logits
        return logits[0]

    order = [type(item).__name__ for item in others]
    assert order == sorted(order, key=_ORDER.index)
    return row


_ORDER = [
    "SequenceBiasLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
]


def prefixes(texts: list[list[int]], prompts: list[int], drafts: list[list[int]], size: int) -> Prefixes:
    """Causal drafts after cached texts."""
    longest, width = max(map(len, texts)) + 2, len(drafts[0])
    text = torch.tensor([ids + [size - 1] * (longest - len(ids)) for ids in texts])
    length = torch.tensor([*map(len, texts)])
    slot, own = torch.arange(longest), torch.arange(width)
    start = torch.tensor(prompts)
    return Prefixes(
        text,
        slot < length[:, None],
        slot >= start[:, None],
        length,
        torch.tensor(drafts),
        (own <= own[:, None]).expand(len(texts), -1, -1),
        torch.ones(len(texts), dtype=torch.bool),
        (length - start)[:, None] + own + 1,
        torch.zeros(len(texts), width, dtype=torch.bool),
        size,
        None,
    )


def test_the_last_tokens_of_a_prefix_begin_with_its_first_one() -> None:
    rows = prefixes([[7], [1, 2, 3]], [1, 3], [[4, 5], [6, 0]], 8)
    assert rows.tail(3).tolist() == [[[-1, 7, 4], [7, 4, 5]], [[2, 3, 6], [3, 6, 0]]]


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    size=st.integers(3, 12),
    seed=st.integers(0, 2**32),
    levels=st.sampled_from([2, 5, 0]),
    width=st.sampled_from([1, 4, 70]),
    batch=st.integers(1, 3),
)
def test_a_row_is_filtered_for_its_own_prefix(
    data: Any, size: int, seed: int, levels: int, width: int, batch: int
) -> None:
    options = data.draw(drawn_options(size))
    ends = data.draw(st.lists(st.integers(0, size - 1), max_size=2, unique=True))
    choice = torch.Generator().manual_seed(seed)
    texts = [torch.randint(size, (3 + n,), generator=choice).tolist() for n in range(batch)]
    prompts = [1 + n for n in range(batch)]
    drafts = torch.randint(size, (batch, width), generator=choice).tolist()
    logits = torch.randn(batch, width, size, generator=choice, dtype=torch.float64)
    if levels:
        logits = torch.randint(-levels, levels, logits.shape, generator=choice).double() * 0.37
    filters = Filters.of(SamplingParams(**options), size, ends)
    before = logits.clone()
    found = filters.apply(logits, prefixes(texts, prompts, drafts, size))
    assert torch.equal(logits, before)
    for n, text in enumerate(texts):
        row = theirs(text[: prompts[n]], options, ends)
        for place in range(width):
            expected = row(text + drafts[n][: place + 1], logits[n, place])
            torch.testing.assert_close(found[n, place], expected, rtol=1e-13, atol=1e-13)
            assert filters.any or torch.equal(found, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_penalised_logits_are_as_exact_as_in_transformers(dtype: torch.dtype) -> None:
    """Of 16 bits as well: no ties that were none."""
    torch.manual_seed(0)
    logits, ids = (4 * torch.randn(64, 1, 500)).to(dtype), torch.randint(500, (64, 300))
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.1)(ids, logits[:, 0].float())
    rows = prefixes(ids[:, :-1].tolist(), [3] * 64, ids[:, -1:].tolist(), 500)
    assert torch.equal(Filters(repetition_penalty=1.1).apply(logits, rows)[:, 0], expected)


def test_words_of_bits_are_those_of_xgrammar() -> None:
    """Bit ``i % 32`` of word ``i // 32``, in signed words."""
    choice = torch.Generator().manual_seed(2)
    for size in (1, 31, 32, 33, 100):
        allowed = torch.rand(4, size, generator=choice) < 0.5
        words = [
            [sum(1 << n for n, on in enumerate(row[at : at + 32]) if on) for at in range(0, size, 32)]
            for row in allowed.tolist()
        ]
        signed = torch.tensor(words).where(torch.tensor(words) < 2**31, torch.tensor(words) - 2**32).int()
        assert torch.equal(unpacked(signed, size), allowed)


# ------------------------------------------------------------------------------------------------------------ generation

SIZE = 13
batches = st.lists(st.lists(st.integers(0, SIZE - 2), min_size=1, max_size=9), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(sorted(EXACT)),
    weights=st.integers(0, 3),
    batch=batches,
    limit=st.integers(1, 14),
    options=drawn_options(SIZE),
    ends=st.lists(st.integers(0, SIZE - 1), max_size=2),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=seeds,
    page_size=page_sizes,
)
def test_exact_methods_write_the_tokens_of_autoregressive(
    form: str,
    weights: int,
    batch: Any,
    limit: int,
    options: Any,
    ends: Any,
    temperature: float,
    seed: int,
    page_size: Any,
) -> None:
    method, own = EXACT[form]
    model = small_transformer(weights, adapter=weights % 2 == 1)
    given_options = {"max_new_tokens": limit, "seed": seed, "end_tokens": ends, "temperature": temperature, **options}
    possible = True
    try:
        one_by_one = generate(model, batch, page_size=page_size, **given_options)
    except ValueError as error:  # a token that is both forced and suppressed
        possible = False
        assert "leave no token to choose" in str(error)
    if not possible:
        with pytest.raises(ValueError, match="leave no token to choose"):
            generate(model, batch, method, page_size=page_size, **own, **given_options)
        return
    found = generate(model, batch, method, page_size=page_size, **own, **given_options)
    assert [ids.tolist() for ids in found.tokens] == [ids.tolist() for ids in one_by_one.tokens]
    for number, (prompt, alone) in enumerate(streams(batch, given_options)):
        assert torch.equal(generate(model, prompt, method, **own, **alone).tokens, found.tokens[number])


class Sees:
    """The processors of transformers, which also write down the prefixes that they are given."""

    def __init__(self, processors: Any) -> None:
        self.processors, self.prefixes = processors, set()

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        assert ids.shape[0] == 1 == logits.shape[0]
        self.prefixes.add(tuple(ids[0].tolist()))
        return self.processors(ids, logits)


@pytest.mark.covering
@pytest.mark.parametrize("form", ["autoregressive", *EXACT])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_hooks_are_given_the_prefix_of_each_row(form: str, temperature: float) -> None:
    """transformers' processors as hooks give the tokens of the same settings."""
    method, own = EXACT.get(form, ("autoregressive", {}))
    model, batch = small_transformer(2), [[5, 6, 7], [8]]
    drawn = {"max_new_tokens": 12, "end_tokens": (), "temperature": temperature, "seed": 3}
    config = transformers.GenerationConfig(repetition_penalty=1.4, bad_words_ids=[[3, 4], [5]], suppress_tokens=[2])
    published._prepare_special_tokens(config)
    hook = Sees(published._get_logits_processor(config, input_ids_seq_length=1))
    given_options = {"repetition_penalty": 1.4, "bad_words": [[3, 4], [5]], "suppress_tokens": [2]}
    expected = generate(model, batch, **drawn, **given_options)
    found = generate(model, batch, method, logits_processor=[hook], **own, **drawn)
    assert [ids.tolist() for ids in found.tokens] == [ids.tolist() for ids in expected.tokens]
    for prompt, ids in zip(batch, found.tokens, strict=True):
        assert {tuple(prompt + ids[:n].tolist()) for n in range(12)} <= hook.prefixes
    plain = generate(model, batch, **drawn)
    assert [ids.tolist() for ids in found.tokens] != [ids.tolist() for ids in plain.tokens]


@pytest.mark.parametrize("form", ["autoregressive", *EXACT])
def test_bits_of_allowed_tokens_hold_for_each_row(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that depends on the generated prefix: a token's parity is that of how many tokens came before it."""
    method, own = EXACT.get(form, ("autoregressive", {}))

    def allowed(rows: Prefixes) -> Tensor:
        even = sum(1 << n for n in range(0, SIZE, 2))
        lists = [[[even if len(ids) % 2 == 0 else even << 1] for ids in texts] for texts in rows.generated_ids()]
        words = torch.tensor(lists, dtype=torch.int32)
        return words.masked_fill(rows.guessing[..., None], -1)

    monkeypatch.setattr(Filters, "of", lambda *_: Filters(allowed=allowed))
    for temperature in (0.0, 1.0):
        drawn = {"max_new_tokens": 11, "end_tokens": (), "temperature": temperature, "seed": 5}
        expected = generate(small_transformer(1), [[5, 6, 7], [8]], **drawn)
        found = generate(small_transformer(1), [[5, 6, 7], [8]], method, **own, **drawn)
        assert [ids.tolist() for ids in found.tokens] == [ids.tolist() for ids in expected.tokens]
        for ids in found.tokens:
            assert [token % 2 for token in ids.tolist()] == [n % 2 for n in range(11)]


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
def test_texts_have_the_law_of_the_filtered_model(form: str) -> None:
    """Chi-square over all texts of three tokens, enumerated with transformers' processors."""
    method, own = LAWFUL[form]
    size, prompt, draws = 6, [1, 3, 0], 4000
    model = small_transformer(5, size)
    options = {
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.8,
        "logit_bias": {2: 1.5},
        "bad_words": [[1, 2], [4, 4]],
        "suppress_tokens": [3],
    }
    row = theirs(prompt, OFF | options, [])
    law = {}
    for text in product(range(size), repeat=3):
        chance = 1.0
        for place, token in enumerate(text):
            ids = [*prompt, *text[:place]]
            logits = reference.causal_logits(lambda t, positions, mask: model(t, positions=positions, mask=mask), ids)
            logits = row(ids, logits[-1].double())
            logits[size - 1] = -torch.inf  # the mask
            chance *= float((logits / 3.0).softmax(-1)[token])
        law[text] = chance
    assert abs(sum(law.values()) - 1) < 1e-9 and sum(p == 0 for p in law.values()) > 50
    drawn = {"max_new_tokens": 3, "end_tokens": (), "seed": 11, "temperature": 3.0, **own, **options}
    texts = [tuple(ids.tolist()) for ids in generate(model, [prompt] * draws, method, **drawn).tokens]
    seen = Counter(texts)
    assert all(law[text] > 0 for text in seen)
    likely = {text for text, chance in law.items() if draws * chance >= 5}
    rest = 1 - sum(law[text] for text in likely)
    pairs = [(seen.get(text, 0), draws * law[text]) for text in likely]
    pairs += [(draws - sum(count for count, _ in pairs), draws * rest)] if rest * draws > 1 else []
    statistic, freedom = sum((count - mean) ** 2 / mean for count, mean in pairs), len(pairs) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 and freedom > 8


# --------------------------------------------------------------------------------------------- canvases and other methods

PLAIN: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {3: 50.0}},
    "suppress_tokens": {"suppress_tokens": [3, 4]},
    "bad_words": {"bad_words": [[4], [3]]},
}


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_follows_bias_and_suppression(method: str) -> None:
    model, batch = example(METHODS[method]), [[3, 1, 4, 1, 5], [2]]
    if METHODS[method].wing == "planned":
        return  # a plan's tokens follow them as well
    options = {"max_new_tokens": 8, "end_tokens": ()}
    options |= {"block_size": 4} if "block_size" in METHODS[method].options else {}
    options |= {"small_block_size": 2} if method == "fast_dllm_v2" else {}
    free = [ids.tolist() for ids in generate(model, batch, METHODS[method], **options).tokens]
    common = Counter(token for ids in free for token in ids).most_common(1)[0][0]
    for name, value in (("suppress_tokens", [common]), ("bad_words", [[common]]), ("logit_bias", {common: -1e4})):
        found = generate(model, batch, METHODS[method], **{name: value}, **options).tokens
        assert all(common not in ids.tolist() for ids in found)
    biased = generate(model, batch, METHODS[method], logit_bias={common: 1e4}, **options).tokens
    assert all(set(ids.tolist()) == {common} for ids in biased)
    found = generate(model, batch, METHODS[method], forced_tokens={0: 3, 4: 2}, begin_suppress_tokens=[9], **options)
    assert all((ids[0], ids[4]) == (3, 2) for ids in found.tokens)


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].wing != "planned"])
def test_no_end_token_before_the_minimum(method: str) -> None:
    model, batch = example(METHODS[method]), [[3, 1, 4, 1, 5], [2]]
    options: dict[str, Any] = {"max_new_tokens": 8, "logit_bias": {6: 1e4}, "end_tokens": (6,)}
    options |= {"block_size": 4} if "block_size" in METHODS[method].options else {}
    options |= {"small_block_size": 2} if method == "fast_dllm_v2" else {}
    for minimum in (0, 1, 5):
        found = generate(model, batch, METHODS[method], min_new_tokens=minimum, **options)
        assert [len(ids) for ids in found.tokens] == [max(1, minimum + 1)] * 2


def test_guidance_keeps_impossible_tokens_impossible() -> None:
    options = {"max_new_tokens": 6, "guidance": 1.5, "steps": 3}
    free = generate(small_masked(3), [[3, 1, 4]], "llada", **options).tokens[0].tolist()
    found = generate(small_masked(3), [[3, 1, 4]], "llada", suppress_tokens=free[:1], **options).tokens[0].tolist()
    assert free[0] not in found


@pytest.mark.parametrize(
    ("method", "option", "words"),
    [
        ("llada", {"logits_processor": lambda ids, logits: logits}, "method 'llada' does not follow logits_processor"),
        ("block_diffusion", {"bad_words": [[1, 2]]}, "does not follow bad_words of several tokens: it writes"),
        ("fast_dllm_v2", {"logits_processor": [max]}, "does not follow logits_processor: it writes tokens in parallel"),
        ("planned", {"min_new_tokens": 3}, "method 'planned' does not follow min_new_tokens"),
    ],
)
def test_what_a_method_cannot_follow_is_refused_by_name(method: str, option: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        generate(example(METHODS[method]), [1, 2], method, max_new_tokens=4, **option)


# A value of each setting that a method would have to do something for. Ids are those of a small vocabulary.
IDS: dict[str, Any] = {
    "logit_bias": {3: 2.0},
    "bad_words": [[1, 2]],
    "forced_tokens": {0: 3},
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
}
ASKED = {name: IDS.get(name, EXAMPLES[name]) for name in (*names_of("draw"), *FILTERS, "logprobs")}


@pytest.mark.parametrize("one_by_one", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_the_table_of_methods_and_settings_is_true(method: str, one_by_one: bool) -> None:
    """A setting runs, or is refused by its name, as the table in the docs says."""
    model, run = example(METHODS[method]), dict[str, Any]()
    options = {"max_new_tokens": 4} | ({"block_size": 4} if "block_size" in METHODS[method].options else {})
    options |= {"small_block_size": 2} if method == "fast_dllm_v2" else {}
    for setting, value in ASKED.items():
        expected = follows(METHODS[method], setting)
        if expected != "yes":
            with pytest.raises((NotImplementedError, TypeError), match=setting):
                generate(model, [2, 1], METHODS[method], **{setting: value}, **options)
        if expected in ("yes", "single tokens"):
            run[setting] = value if expected == "yes" else [[1]]
    for settings_ in ({name: value} for name, value in run.items()) if one_by_one else (run,):
        generate(model, [2, 1], METHODS[method], **settings_, **options)
