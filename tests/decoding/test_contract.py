"""What every decoding method promises, on every kind of model that it accepts. A registered method takes part by being registered.

`FORMS` adds forms whose steps take another path through a decoder. What sets a method apart is in the file of its name; NaN, seeds,
stop strings and penalties have suites of their own.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from pdkernels.decoding import DecodeResult, available, find, generate, is_lossless, supports
from pdkernels.engine import Engine
from pdkernels.models import RecurrentDepth
from tests.support.base import reads_of_the_device, streams
from tests.support.causal import SCRIPTS, FakeModel
from tests.support.drafters import with_drafters
from tests.support.masked import deep_masked, small_masked
from tests.support.plans import END, planning_model
from tests.support.recurrent import RECURRENCES, models
from tests.support.tri_mode import small_transformer


def recurrent() -> RecurrentDepth:
    return models(2, 0.3, hidden=32)[0]


# In fp64, so that nothing depends on the order of sums; heads of 16 can be read by kernels in fp32.
KINDS: dict[str, Callable[[], Any]] = {
    "scripted": lambda: FakeModel(SCRIPTS["sticky"]),
    "causal": lambda: with_drafters(small_transformer(1, head_dim=16)),
    "block causal": lambda: deep_masked(0, "own", 16, "causal"),
    "masked": lambda: small_masked(1, head_dim=16),
    "masked, next": lambda: small_masked(1, "next", 16),
    "recurrent": recurrent,
    "planning": lambda: planning_model(1, "own", 16),
    "planning, next": lambda: planning_model(1, "next", 16),
}


@cache
def exact(kind: str) -> Any:
    return KINDS[kind]()


def accepted_kinds(method: str) -> list[str]:
    known = find(method)
    if known.wing == "recurrent":
        return ["recurrent"]
    fitting = [kind for kind in KINDS if supports(method, exact(kind))]
    if known.needs_mask_token:
        fitting = [kind for kind in fitting if kind != "scripted"]
    # A planning model is a causal one with tags, and recurrences change what a draft's rows read.
    others = () if known.wing == "planned" else ("planning", "planning, next")
    return [kind for kind in fitting if kind not in (*others, "recurrent")]


INTERVALS: dict[str, Any] = {"prompt_interval": 4, "gen_interval": 2, "transfer_ratio": 0.5}
# Filters that depend on tokens, which every method follows.
ROWS: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
ROWS |= {"logit_bias": {3: 1.5, 4: -2.0}, "suppress_tokens": [5], "bad_words": [[6]]}
# LLaDA2.2's, whose last two ids are guessed like others.
EDITS: dict[str, Any] = {"edit_threshold": 0.15, "max_edits": 4, "delete_token": 5, "split_token": 6}
FORMS: dict[str, list[dict[str, Any]]] = {
    "autoregressive": [{"top_k": 5, "top_p": 0.8, "min_p": 0.05, "typical_p": 0.9}],
    "jacobi": [{"block_size": 1}, {"block_size": 4}, {"window": 5}, {"draft": "lookup"}],
    "suffix": [{"block_size": 1}, {"block_size": 4}],
    "draft_model": [{"block_size": 1}, {"block_size": 2}, {"block_size": 9}],
    "eagle": [
        {"block_size": 1},
        {"block_size": 2},
        {"block_size": 9},
        {"block_size": 4, "branches": 2},
        {"branches": 3, "nodes": 10},
    ],
    "dflash": [{"block_size": 1}, {"block_size": 2}, {}],
    "mtp": [{"block_size": 1}, {}, {"block_size": 5}],
    "jacobi_multiblock": [
        {"block_size": 4},
        {"block_size": 3, "blocks": 4, "spawn_ratio": 0.3, "pool_size": 6, "verification_size": 5},
        {"block_size": 6, "blocks": 1, "pool_size": 0, "verification_size": 1},
        {"block_size": 2, "blocks": 3, "spawn_ratio": 0},
    ],
    "linear_self_speculation": [
        {"block_size": 4, "threshold": 0.0},
        {"block_size": 4, "threshold": 0.3},
        {"block_size": 4, "threshold": 1.5},
        {"block_size": 4, "verification": "rejection", "threshold": 0.0},
    ],
    "quadratic_self_speculation": [
        {"block_size": 1},
        {"block_size": 4, "label_shift": 1, "in_group": "causal"},
        {"block_size": 5, "masks_per_group": 6, "label_shift": 1},
        {"block_size": 3, "masks_per_group": 3, "ensemble_weight": 0.6},
        {"block_size": 4, "in_group": "causal", "ensemble_weight": 0.0, "ensemble": "logit"},
    ],
    "block_diffusion": [
        *({"block_size": 4, "threshold": threshold} for threshold in (0.9, 0.24, 0.0, 2.0)),
        *({"block_size": 4, "threshold": None, "steps_per_block": steps} for steps in (None, 1, 3)),
        {"block_size": 4, "refresh": "bidirectional"},
        {"block_size": 4, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
        {"block_size": 4, "threshold": 0.24, "speculate": 3},
    ],
    "fast_dllm_v2": [
        {"block_size": 4, "small_block_size": 2, "threshold": 0.4},
        {"block_size": 6, "small_block_size": 2, "steps": 2},
        {"block_size": 4, "small_block_size": 2, "threshold": 0.4, "block_cache": False},
        {"block_size": 4, "small_block_size": 2, "top_k": 5, "min_p": 0.05},
        {"block_size": 4, "small_block_size": 4, "threshold": 0.4, "speculate": 3},
        {"block_size": 4, "small_block_size": 4, "threshold": 0.4, "edit_threshold": 0.2, "temperature": 0.0},
        {"block_size": 4, "small_block_size": 4, "threshold": 0.4, "temperature": 0.0, **EDITS},
    ],
    "llada": [
        {"block_size": 4, "steps": 6},
        {"remasking": "random"},
        {"guidance": 1.5},
        {"late_end": True, "top_k": 5},
        {"block_size": 4, "speculate": 3},
    ],
    "dream": [
        *({"algorithm": name} for name in ("origin", "maskgit_plus", "topk_margin", "confidence_threshold")),
        {"order_temperature": 0.5, "top_p": 0.8},
    ],
    "dllm_cache": [
        {"block_size": 4, "gen_interval": 2},
        {"transfer_ratio": 0.0},
        {"guidance": 1.5},
        {"guidance": 1.5, "guidance_interval": 3},
    ],
    "fast_dllm": [
        {"block_size": 4, "cache": kind, **rule}
        for kind in ("none", "prefix", "dual")
        for rule in (
            {"threshold": 0.4},
            {"threshold": None, "factor": 1.0},
            {"threshold": None},
            {"threshold": None, "steps": 6},
        )
    ],
    "slowfast": [{"cycle": "mean", "max_exploration": 3}, {"block_size": 4, "tau_high": 0.4}, INTERVALS],
    "recurrent_diffusion": [{"headway": 2}, {"exit": "fixed"}, {"rule": "last", "noise": 0.1}],
    "recurrent_adaptive": [{"criterion": "kl"}, {"adaptive_prompt": True}],
    "recurrent_self_speculation": [{"block_size": 2}],
    "planned": [
        {"sparse": True},
        {"sparse": True, "cache": "drop_finished"},
        {"threshold": 0.3},
        {"steps_ratio": 0.5},
        {"order": "uniform"},
        {"chunks": "autoregressive"},
        {"chunks": "autoregressive", **ROWS},
    ],
}
SMALL = {"fast_dllm": {"block_size": 4}, "fast_dllm_v2": {"block_size": 4, "small_block_size": 2}}


def label(value: Any) -> str:
    return ", ".join(f"{name} {it}" for name, it in value.items()) or "plain" if isinstance(value, dict) else str(value)


METHODS_AND_KINDS = [(method, kind) for method in available() for kind in accepted_kinds(method)]
CASES = [
    (method, kind, form)
    for method, kind in METHODS_AND_KINDS
    for form in (SMALL.get(method, {}), *FORMS.get(method, []), SMALL.get(method, {}) | ROWS)
    if "edit_threshold" not in form or kind == "block causal"  # rows that predict their own tokens
]


def on_every_kind(test: Callable[..., None]) -> Any:
    """Fast tests have every method, and every kind of model."""
    return pytest.mark.covering(pytest.mark.parametrize(("method", "kind"), METHODS_AND_KINDS, ids=label)(test))


def is_usual(method: str, form: dict[str, Any]) -> bool:
    return form == SMALL.get(method, {})


def marked(method: str, kind: str, form: dict[str, Any], *more: Any, fast: bool = True) -> Any:
    """Other forms than the usual one are slow on all kinds but the first."""
    fast &= is_usual(method, form) or kind == accepted_kinds(method)[0]
    return pytest.param(method, kind, form, *more, marks=() if fast else pytest.mark.slow)


def in_every_form(test: Callable[..., None]) -> Any:
    every = [marked(*case, fast=is_usual(case[0], case[2])) for case in CASES]
    return pytest.mark.covering(pytest.mark.parametrize(("method", "kind", "form"), every, ids=label)(test))


def drawn(method: str, kind: str, number: int) -> tuple[list[list[int]], dict[str, Any]]:
    """A batch of prompts, and options that it is decoded with."""
    choice = random.Random(f"{method}, {kind}, {number}")
    words = exact(kind).config.vocab_size - 1  # the last one is the mask
    batch = [choice.choices(range(words), k=choice.randint(1, 6)) for _ in range(choice.randint(2, 4))]
    limit, ends = choice.randint(2, 12), tuple(choice.choices(range(words), k=choice.randint(0, 2)))
    if kind.startswith("planning"):
        batch, limit, ends = [[*choice.choices(range(10, 15), k=n), END] for n in (0, 2)], 24, (END,)
    elif number == 0:
        batch, limit, ends = [[3, 1, 4, 1, 5], [9], [2, 6]], 9, (2,)
    options = {"max_new_tokens": limit, "end_tokens": ends, "seed": choice.getrandbits(64), "trace": True}
    if "temperature" in find(method).options:
        options["temperature"] = 0.7 * (number % 3 != 1)
    return batch, options


def close(one: Any, other: Any) -> bool:
    """Equal, but for floats, which are rounded differently in batches."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isnan(one) == math.isnan(other) and (math.isnan(one) or one == pytest.approx(other, 1e-9, 1e-12))
    if isinstance(one, torch.Tensor):
        return close(one.tolist(), other.tolist())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(close, one, other))
    return bool(one == other)


def of(result: DecodeResult[Any, Any], index: int) -> list[Any]:
    """All that a result says of one sequence."""
    stats, tokens = result.stats, result.tokens if isinstance(result.tokens, list) else [result.tokens]
    plan = stats.plans[index] if stats.plans else None
    return [tokens[index].tolist(), stats.accepted[index], (stats.trace or [[]])[index], plan]


BATCHES = [
    marked(*case, number, fast=number == (0 if case[1] == "masked" else place % 3))
    for place, case in enumerate(CASES)
    for number in range(6)
]


@pytest.mark.covering(of=["method", "kind"])
@pytest.mark.parametrize(("method", "kind", "form", "number"), BATCHES, ids=label)
def test_a_sequence_takes_the_same_path_alone_and_in_a_batch(method: str, kind: str, form: Any, number: int) -> None:
    """Tokens, what each step accepted, every step of the trace; on pages too."""
    batch, options = drawn(method, kind, number)
    options |= form
    together = generate(exact(kind), batch, find(method), **options)
    for index, (prompt, own) in enumerate(streams(batch, options)):
        alone = generate(exact(kind), prompt, find(method), **own)
        assert close(of(alone, 0), of(together, index))
    if "page_size" in find(method).options:
        paged = generate(exact(kind), batch, find(method), **options, page_size=(3, 1, 16)[number % 3])
        assert all(close(of(paged, index), of(together, index)) for index in range(len(batch)))
        assert paged.stats.forwards == together.stats.forwards


ENGINES = [
    marked(*case, fast=is_usual(case[0], case[2]) or find(case[0]).fills_canvases)
    for case in CASES
    if find(case[0]).steps is not None and case[1] != "scripted"
]


@pytest.mark.covering(of=["method"])
@pytest.mark.parametrize(("method", "kind", "form"), ENGINES, ids=label)
def test_a_request_takes_the_same_path_alone_and_in_an_engine(method: str, kind: str, form: Any) -> None:
    """Among others of all lengths, of which some wait for one to leave."""
    batch, options = drawn(method, kind, 0)
    options |= {"max_new_tokens": 9, **form}
    requests = [(prompt, own | {"end_tokens": end}) for prompt, own in streams(batch, options) for end in ((), (2,))]
    with Engine(exact(kind), max_running=3, max_canvases=3, max_new_tokens=9, max_prompt_tokens=9) as engine:
        handles = [engine.submit(prompt, find(method), **own) for prompt, own in requests]
        for handle, (prompt, own) in zip(handles, requests, strict=True):
            found, alone = handle.result(120), generate(exact(kind), prompt, find(method), **own)
            assert close(of(found, 0), of(alone, 0)) and found.stats.forwards == alone.stats.forwards


@on_every_kind
def test_results(method: str, kind: str) -> None:
    """Types and sums; a trace only if asked for, with a step for every entry of `accepted`."""
    batch, options = drawn(method, kind, 0)
    del options["end_tokens"]
    if not kind.startswith("planning"):
        options["end_tokens"] = ()
    plain = generate(exact(kind), batch, find(method), **(options | {"trace": False}))
    result, single = (generate(exact(kind), prompts, find(method), **options) for prompts in (batch, batch[0]))
    stats = result.stats
    assert isinstance(result.tokens, list) and result.text is None and isinstance(single.tokens, torch.Tensor)
    for tokens in (*result.tokens, single.tokens):
        assert tokens.dtype == torch.int64 and tokens.dim() == 1 and tokens.device == torch.device("cpu")
        if find(method).wing != "planned":
            assert len(tokens) == options["max_new_tokens"]
    assert all(map(torch.equal, result.tokens, plain.tokens)) and plain.stats.accepted == stats.accepted
    assert plain.stats.trace is None and plain.stats.forwards == stats.forwards
    assert stats.method == method and stats.tokens == sum(map(len, result.tokens))
    assert stats.seconds > 0 and stats.tokens_per_second == stats.tokens / stats.seconds
    assert stats.trace is not None and 0 < stats.tokens_per_forward
    assert find(method).wing == "planned" or [*map(len, stats.trace)] == [*map(len, stats.accepted)]
    assert (stats.recurrences is not None) == (kind == "recurrent")
    assert (stats.plans is not None) == (find(method).wing == "planned")


@on_every_kind
def test_few_tokens(method: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None needs no forward; one or two are exact."""
    for limit in (1, 2):
        result = generate(exact(kind), [[1], [2, 3]], find(method), max_new_tokens=limit, end_tokens=())
        assert [len(tokens) for tokens in result.tokens] == [limit, limit] and result.stats.forwards >= 1
        if kind == "recurrent":
            assert result.stats.forwards >= limit and result.stats.recurrences >= RECURRENCES

    def forward(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a forward")

    for name in ("__call__", "forward", "hidden", "recompute", "logits", "statistics"):
        if hasattr(type(exact(kind)), name):
            monkeypatch.setattr(type(exact(kind)), name, forward)
    result = generate(exact(kind), [[1], [2, 3]], find(method), max_new_tokens=0, trace=True)
    stats = result.stats
    assert [tokens.tolist() for tokens in result.tokens] == [[], []]
    assert (stats.forwards, stats.accepted, stats.trace) == (0, [[], []], [[], []])
    assert stats.tokens_per_forward == stats.tokens_per_second == 0.0


@in_every_form
def test_end_tokens(method: str, kind: str, form: Any) -> None:
    """A text ends with the first one, and is what it is without it up to there. They are the model's by default."""
    batch, options = drawn(method, kind, 1)
    options |= {"max_new_tokens": 9, **form, "end_tokens": ()}
    if find(method).wing == "planned":  # there they end a plan, and are no guess in a chunk
        return
    whole = [tokens.tolist() for tokens in generate(exact(kind), batch, find(method), **options).tokens]
    assert [len(tokens) for tokens in whole] == [9] * len(batch)
    ends = [*dict.fromkeys(whole[0])]
    for end in ends[:2] if is_usual(method, form) else ends[len(ends) // 2 :][:1]:
        given = generate(exact(kind), batch, find(method), **options | {"end_tokens": (end,)})
        for tokens, every in zip(given.tokens, whole, strict=True):
            written = tokens.tolist()
            assert end not in written[:-1] and (len(written) == 9 or written[-1] == end)
            if not form.get("late_end"):  # there an end token is not confident
                assert written == every[: (*every, end).index(end) + 1]
    model = copy.copy(exact(kind))
    model.end_tokens = (end,)
    assert [tokens.tolist() for tokens in generate(model, batch, find(method), **options).tokens] == whole
    del options["end_tokens"]
    default = generate(model, batch, find(method), **options)
    assert all(map(torch.equal, default.tokens, given.tokens)) and default.stats.accepted == given.stats.accepted


@on_every_kind
def test_every_token_is_reported_once(method: str, kind: str) -> None:
    """And which of them were accepted drafts."""
    known, (batch, options) = find(method), drawn(method, kind, 0)
    heard: list[list[int]] = [[] for _ in batch]
    drafts, calls = [0] * len(batch), 0

    def listen(sequence: int, ids: list[int], accepted: int) -> None:
        nonlocal calls
        calls += 1
        assert 0 <= accepted <= len(ids) > 0
        heard[sequence] += ids
        drafts[sequence] += accepted
        if known.verifies_drafts:
            assert len(ids) - accepted <= 1  # at most one token of a step is the verifier's own
        elif known.wing not in ("recurrent", "planned"):
            assert accepted in (0, len(ids))
        if known.fills_canvases:
            assert accepted == len(ids)
        ids.clear()  # the list belongs to the listener

    options |= {"max_new_tokens": max(30, options["max_new_tokens"]), **SMALL.get(method, {})}
    options |= {} if known.wing == "planned" else {"end_tokens": ()}
    result = generate(exact(kind), batch, known, on_tokens=listen, **options)
    written = [tokens.tolist() for tokens in result.tokens]
    if known.wing == "planned":  # chunks are told in the order of completion
        heard, written = [*map(sorted, heard)], [*map(sorted, written)]
    assert heard == written and calls > 2
    if known.verifies_drafts:
        assert drafts == [sum(accepted) - len(accepted) for accepted in result.stats.accepted]
        assert sum(drafts) > 0 or method == "suffix"  # a text without repetitions has none
    assert method != "autoregressive" or not any(drafts)


def has_cache(method: str, form: dict[str, Any]) -> bool:
    return is_usual(method, form) or form == INTERVALS or (method == "fast_dllm" and form.get("threshold") == 0.4)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind", "form"), CASES, ids=label)
def test_one_read_of_the_device_per_step(method: str, kind: str, form: Any) -> None:
    """A canvas also reads its trace; a cycle of a draft and its verification is one step. Speculation reads twice a step,
    whether or not that has a forward. tests/decoding/test_waits.py is the fast
    form, with copies to the device as well."""
    known, (batch, options) = find(method), drawn(method, kind, 0)
    if {"guidance_interval", "speculate", "edit_threshold"} & {*form} or not (
        known.fills_canvases or is_usual(method, form)
    ):
        return
    options |= {"trace": False, **form}
    if method == "linear_self_speculation":
        options["threshold"] = 0.0  # else a draft's passes are read too
    stats = generate(exact(kind), batch, known, **options).stats
    reads = reads_of_the_device(exact(kind), batch, known, **options)
    if method in ("linear_self_speculation", "recurrent_self_speculation"):
        assert reads == 1 + max(map(len, stats.accepted))
    elif method == "planned":
        assert stats.plans is not None and reads == max(plan.critical_path for plan in stats.plans)
    elif method not in ("recurrent_adaptive", "jacobi_multiblock"):  # the latter also reads tables of the host
        assert reads == stats.forwards + known.fills_canvases


@pytest.mark.covering
@pytest.mark.parametrize(
    ("method", "kind", "form"), [marked(*case, fast=has_cache(case[0], case[2])) for case in CASES], ids=label
)
def test_kernels_give_the_tokens_of_plain_torch(method: str, kind: str, form: Any) -> None:
    """In float32 caches are read by kernels, in fp64 by PyTorch; greedy tokens are those of greedy decoding if a method promises that."""
    if kind == "scripted":
        return
    known, plain = find(method), exact(kind)
    fast = copy.deepcopy(plain).float()
    for drafter in getattr(fast, "drafters", {}).values():
        drafter.float()
    batch = [[1, 2, 3, 4, 5, 6, 7], [5], [9, 9]]
    options = {"max_new_tokens": 12, "end_tokens": (), "trace": True, "seed": 2**64 - 1, **form}
    for drawing in ({}, {"temperature": 0.7}) if known.fills_canvases and is_usual(method, form) else ({},):
        expected, found = (generate(model, batch, known, **options, **drawing) for model in (plain, fast))
        for index in range(3):
            (ours, accepted, steps, _), (theirs, as_many, others, _) = of(found, index), of(expected, index)
            assert (ours, accepted) == (theirs, as_many)
            for step, other in zip(steps, others, strict=True) if known.fills_canvases else ():
                assert (step.committed, step.window) == (other.committed, other.window)
                assert step.confidence == pytest.approx(other.confidence, rel=1e-3, abs=1e-4)
    for index, (prompt, own) in enumerate(streams(batch, options) if is_usual(method, form) else ()):
        assert torch.equal(generate(fast, prompt, known, **own, **drawing).tokens, found.tokens[index])
    if "page_size" in known.options:
        paged = generate(fast, batch, known, page_size=3, **options, **drawing)
        assert all(map(torch.equal, paged.tokens, found.tokens))
    if is_lossless(method) and not form.keys() & {"ensemble_weight", "label_shift"}:
        filters = {name: value for name, value in form.items() if name in ROWS}
        # The seed is that of the initial states of recurrences.
        greedy = generate(plain, batch, max_new_tokens=12, end_tokens=(), seed=options["seed"], **filters)
        assert all(map(torch.equal, greedy.tokens, found.tokens))
    if known.fills_canvases:
        half = generate(copy.deepcopy(plain).bfloat16(), batch, known, **options)
        assert [len(tokens) for tokens in half.tokens] == [12] * 3
        assert plain.mask_token not in torch.cat(half.tokens)


@on_every_kind
def test_a_shorter_text_is_the_beginning_of_a_longer_one(method: str, kind: str) -> None:
    """Of causal methods: the others fill the text that is asked for."""
    if find(method).fills_canvases or method in ("block_diffusion", "planned"):
        return
    check_beginnings(method, kind, {}, [{}, {"temperature": 0.9}])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind", "form"), [case for case in CASES if find(case[0]).wing == "causal" and case[2]], ids=label
)
def test_a_shorter_text_is_the_beginning_of_a_longer_one_in_every_form(method: str, kind: str, form: Any) -> None:
    if method != "block_diffusion":  # a limit cuts its last block
        check_beginnings(method, kind, form, [{"temperature": 0.9}])


def check_beginnings(method: str, kind: str, form: dict[str, Any], drawings: list[dict[str, Any]]) -> None:
    given: dict[str, Any] = {"seed": 3, "end_tokens": (), **form}
    for drawing in drawings if "temperature" in find(method).options else [{}]:
        short, long = (
            generate(exact(kind), [1, 2], find(method), max_new_tokens=n, **given, **drawing).tokens for n in (5, 12)
        )
        # A limit cuts a block of fast_dllm_v2, which is filled otherwise: blocks before it are the same.
        size = form.get("block_size") if method == "fast_dllm_v2" else None
        same = 5 if size is None else (2 + 5) // size * size - 2
        assert len(short) == 5 and same > 0 and torch.equal(short[:same], long[:same])


REFUSED = [(method, kind) for method in available() for kind in KINDS if not supports(method, exact(kind))]


@pytest.mark.parametrize(("method", "kind"), REFUSED, ids=label)
def test_other_models_are_refused(method: str, kind: str) -> None:
    with pytest.raises(TypeError) as raised:
        generate(exact(kind), [1], find(method), max_new_tokens=2)
    words = str(raised.value)
    assert words.startswith("pdkernels.decoding.generate: method must fit the model (")
    assert f"got {method!r}, which requires " in words
    fitting = [name for name in available() if supports(name, exact(kind))]
    assert words.endswith(f"These fit: {', '.join(fitting) or 'none'}.")


@pytest.mark.parametrize("method", [name for name in available() if find(name).needs_mask_token])
def test_a_model_without_a_mask_token(method: str) -> None:
    model = copy.copy(exact(accepted_kinds(method)[0]))
    mask, model.mask_token = model.mask_token, None
    with pytest.raises(ValueError) as raised:
        generate(model, [1], find(method), max_new_tokens=4)
    words = "the model has no mask token. Pass mask_token, the id that it was trained to fill in."
    assert str(raised.value) == f"pdkernels.decoding.{method}: {words}"
    given = generate(
        model, [1], find(method), max_new_tokens=4, mask_token=mask, end_tokens=(), **SMALL.get(method, {})
    )
    assert len(given.tokens) == 4


def test_every_method_takes_part() -> None:
    assert {method for method, _ in METHODS_AND_KINDS} == set(available()) >= set(FORMS)
