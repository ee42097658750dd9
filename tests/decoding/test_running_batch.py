"""Requests that join and leave a running batch, against each of them alone."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.cache import PagedKVCache
from pdkernels.decoding import find
from pdkernels.decoding.request import finished
from pdkernels.decoding.steps import RunningBatch
from pdkernels.generation.filtered_model import FilteredModel
from pdkernels.generation.filters import Filters
from pdkernels.generation.session import Session
from pdkernels.generation.stops import Stops
from tests.harness.pretended_gpu import pretended_gpu, waits, without_gpu
from tests.harness.sessions import open_session, running_batch, steps_of
from tests.integrations.test_steps import CASES, STARTS, SUMS
from tests.support.drafters import with_drafters

MORE = [
    ("tiny-trimode", "quadratic_self_speculation", {"block_size": 3, "ensemble_weight": 0.5}),
    ("tiny-trimode", "block_diffusion", {"block_size": 1}),
    ("tiny-trimode", "block_diffusion", {"block_size": 3, "threshold": None, "steps_per_block": 2}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 1}),
    ("tiny-code", "jacobi", {"draft": "lookup", "window": 5, "temperature": 0.9}),
    ("tiny-code", "draft_model", {"block_size": 4, "page_size": 5}),
    ("tiny-code", "draft_model", {"block_size": 2, "temperature": 0.8}),
    ("tiny-code", "eagle", {"block_size": 4, "temperature": 0.8}),
    ("tiny-code", "eagle", {"block_size": 3, "page_size": 4}),
    ("tiny-code", "dflash", {"page_size": 4}),
    ("tiny-code", "mtp", {"block_size": 4, "temperature": 0.8}),
    ("tiny-recurrent", "recurrent_diffusion", {"kept_recurrences": 2, "headway": 3, "new_state": "copied"}),
    ("tiny-masked", "fast_dllm", {"block_size": 3, "cache": "dual"}),
    ("tiny-masked", "slowfast", {}),
    ("tiny-masked", "slowfast", {"block_size": 4, "cycle": "mean", "tau_high": 0.4, "temperature": 0.7}),
    ("tiny-masked", "slowfast", {"prompt_interval": 4, "gen_interval": 2, "transfer_ratio": 0.5, "tau_high": 0.6}),
    ("tiny-masked", "dllm_cache", {"block_size": 3, "gen_interval": 2}),
    ("tiny-masked", "dllm_cache", {"guidance": 0.5, "prompt_interval": 3, "temperature": 0.7}),
    ("tiny-masked", "dllm_cache", {"guidance": 0.5, "guidance_interval": 3, "remasking": "random"}),
    ("tiny-trimode", "fast_dllm_v2", {"block_size": 4, "small_block_size": 2, "threshold": 0.4}),
    ("tiny-trimode", "fast_dllm_v2", {"block_size": 6, "small_block_size": 3, "steps": 2, "temperature": 0.7}),
    ("tiny-trimode", "fast_dllm_v2", {"block_size": 4, "small_block_size": 4, "threshold": 0.85, "speculate": 3}),
]
ALL = [
    (name, method, {key: value for key, value in options.items() if key != "seed"})
    for name, method, options in CASES + MORE
]
IDS = [f"{method}-{'-'.join(map(str, options.values()))}-{name}" for name, method, options in ALL]
in_all_cases = pytest.mark.parametrize(("name", "method", "options"), ALL, ids=IDS)


def loaded(name: str) -> Any:
    model = pd.models.load(name)
    if name == "tiny-recurrent":
        model.config = replace(model.config, mean_recurrence=5)
    return with_drafters(model) if name == "tiny-code" else model


def steps_kind(method: str) -> Any:
    return find(method).steps


class Request:
    """One request, what `generate` gives for it alone, and what it has been told."""

    def __init__(
        self,
        model: Any,
        method: str,
        prompt: str,
        limit: int,
        ends: tuple[int, ...] | None,
        stops: Any,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        self.seed, self.told, expected_told = seed, [], []
        self.session, _ = open_session(model, prompt, limit, ends, lambda *news: self.told.append(news), trace=True)
        self.session.stops = Stops(tuple(stops))
        self.expected = pd.decoding.generate(
            model, prompt, method, max_new_tokens=limit, end_tokens=ends, trace=True, stop_strings=stops, seed=seed,
            on_tokens=lambda *news: expected_told.append(news), **options,
        )  # fmt: skip
        self.expected_told = expected_told

    def compare(self, forwards: int) -> None:
        result, expected = finished(self.session, True, "running", lambda: forwards), self.expected
        assert result.tokens.tolist() == expected.tokens.tolist()
        for fact in ("accepted", "trace", "forwards", "tokens", "tokens_per_forward", "recurrences"):
            assert getattr(result.stats, fact) == getattr(expected.stats, fact), fact
        assert self.told == self.expected_told


def sizes(model: Any, batch: int, limit: int, ends: tuple[int, ...] | None, longest: int = 20) -> Session:
    return open_session(model, [[0] * longest] * batch, limit, ends)[0]


def tensors(batch: RunningBatch) -> list[torch.Tensor]:
    cache = batch.steps.cache
    table = [] if cache.block_table is None else [cache.block_table]
    # Feature caches are made with the first forward of a sequence.
    return [*batch.steps.state, *([cache.lengths, cache.k, cache.v] if hasattr(cache, "lengths") else []), *table]


def check_pages(batch: RunningBatch) -> None:
    """Pages have one owner each, and none is lost."""
    cache = batch.steps.cache
    if isinstance(cache, PagedKVCache):
        owned = cache.block_table[cache.block_table >= 0].tolist()
        assert len(set(owned)) == len(owned) == cache.num_pages - cache._pool.available


@pytest.mark.covering(of=["name", "method"])
@in_all_cases
def test_each_request_is_as_it_is_alone(name: str, method: str, options: dict[str, Any]) -> None:
    chance = random.Random(IDS[ALL.index((name, method, options))])
    run_requests(name, method, options, chance=chance, count=6)


@pytest.mark.slow
@in_all_cases
def test_each_of_many_requests_is_as_it_is_alone(name: str, method: str, options: dict[str, Any]) -> None:
    for seed in range(6):
        run_requests(name, method, options, chance=random.Random(seed), count=12)


def run_requests(name: str, method: str, options: dict[str, Any], chance: random.Random, count: int) -> None:
    model, masked, canvas = loaded(name), name == "tiny-masked", not steps_kind(method).any_limit
    most, rows = (6 if masked else 14), chance.randint(2, 3)
    if "page_size" in find(method).options:
        options = options | {"page_size": chance.choice([None, 1, 3, 16])}
    starts = SUMS if masked else STARTS
    ends = chance.choice([None, (), (chance.randrange(5, 90),)])
    queue = []
    for _ in range(count):
        limit = most if canvas else chance.choice([most, chance.randint(1, most)])
        stops = chance.choice([(), (), ("e", " = ")])
        queue.append(
            Request(model, method, chance.choice(starts), limit, ends, stops, chance.randrange(2**40), options)
        )

    batch = running_batch(find(method).steps, sizes(model, rows, most, ends), **options)
    pointers = [tensor.data_ptr() for tensor in tensors(batch)]
    running: dict[int, Request] = {}
    compared = 0
    while queue or batch.busy:
        for row in batch.free:
            if queue and batch.ready and chance.random() < 0.6:
                running[row] = queue.pop()
                batch.admit(row, running[row].session, running[row].seed)
                check_pages(batch)
        for row in batch.step():
            if chance.random() < 0.7:
                running.pop(row).compare(batch.retire(row))
                compared += 1
                check_pages(batch)
        if running and chance.random() < 0.05:  # a request that is withdrawn
            row = chance.choice(list(running))
            batch.retire(row)
            left = running.pop(row)
            assert left.expected.tokens.tolist()[: len(left.session.tokens[0])] == left.session.tokens[0]
    assert compared >= count // 3
    assert [tensor.data_ptr() for tensor in tensors(batch)] == pointers


CAUSAL = [case for case in ALL if not steps_kind(case[1]).keeps_pages and "recurrences" not in find(case[1]).options]


@pytest.mark.covering(of=["name", "method"])
@pytest.mark.parametrize(("name", "method", "options"), CAUSAL, ids=[IDS[ALL.index(case)] for case in CAUSAL])
def test_batches_of_other_sizes_take_requests_over(name: str, method: str, options: dict[str, Any]) -> None:
    model, chance = loaded(name), random.Random(method)
    kind = find(method).steps
    first = running_batch(kind, sizes(model, 1, 14, None), **options)
    others = [running_batch(kind, sizes(model, rows, 14, None), first.staging, **options) for rows in (2, 3)]
    batches, batch, running = [first, *others], first, {}
    queue = [
        Request(model, method, chance.choice(STARTS), chance.choice([14, 5]), None, (), number, options)
        for number in range(6)
    ]
    moves = pieces = 0
    while queue or batch.busy:
        if queue and batch.free:
            request = queue.pop()
            if first.staging.in_pieces:
                for _ in range(chance.randrange(3)):
                    first.staging.run(request.session.prompts[0], chance.randint(1, 5))
                    pieces += 1
            row = batch.free[0]
            batch.admit(row, request.session, request.seed)
            running[row] = request
        for row in batch.step():
            running.pop(row).compare(batch.retire(row))
        fitting = [other for other in batches if other is not batch and len(other.sessions) >= len(running)]
        if fitting and chance.random() < 0.5:
            other = chance.choice(fitting)
            other.take_over(batch)
            assert not batch.busy and len(batch.free) == len(batch.sessions)
            batch, running, moves = other, dict(enumerate(running[row] for row in sorted(running))), moves + 1
    assert moves > 1 and (pieces or not first.staging.in_pieces)


def test_a_prompt_begins_with_rows_of_another_text() -> None:
    model = pd.models.load("tiny-code")
    request = Request(model, "jacobi", "import os\nimport sys\n", 14, None, (), 1, {})
    prompt = request.session.prompts[0]
    batch = running_batch(find("jacobi").steps, sizes(model, 1, 14, None, longest=40))
    kept = model.new_cache(1, 12)
    model(torch.tensor([prompt[:12]]), cache=kept)
    kept.commit_(torch.tensor([12]))
    batch.staging.adopt(kept, 12)
    counted = []
    run = type(model).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(model), "forward", lambda self, tokens, **k: counted.append(tokens.shape[1]) or run(self, tokens, **k)
        )
        batch.admit(0, request.session, request.seed)
    assert counted == [len(prompt) - 12 + 12]  # the rest, and the 12 guesses of the first draft
    while not batch.step():
        pass
    request.compare(batch.retire(0))


def reachable(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """All tensors that steps hold, but for those of the model, of sessions, of options and of caches."""
    if isinstance(value, torch.Tensor):
        return [value]
    if id(value) in seen or isinstance(value, (Session, torch.nn.Module)):
        return []
    seen.add(id(value))
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in reachable(item, seen)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in reachable(item, seen)]
    if type(value).__module__.startswith("pdkernels.decoding"):
        return reachable(vars(value), seen)
    return []


@in_all_cases
def test_state_is_all_that_steps_change(name: str, method: str, options: dict[str, Any]) -> None:
    """A tensor that is missing in `state` stays that of the sequence before, which tokens need not show."""
    model, masked = loaded(name), name == "tiny-masked"
    with torch.inference_mode():
        steps = steps_of(method, sizes(model, 5, 12, None), **options)
        held = reachable(steps, set())
        before = [tensor.clone() for tensor in held]
        changed = set()
        for seed in (3, 4):
            steps.reseed(torch.arange(5) + seed)
            session, _ = open_session(model, (SUMS * 2 if masked else STARTS)[:5], 12, None)
            steps.start(session)
            for _ in range(3):
                for form in steps.forms:
                    steps.entry.rows()  # which a host that leads takes the texts from
                    getattr(steps, form)()
                changed |= {n for n, (old, new) in enumerate(zip(before, held, strict=True)) if not same(old, new)}
        declared = {tensor.untyped_storage().data_ptr() for tensor in steps.state}
        missing = [held[n].shape for n in changed if held[n].untyped_storage().data_ptr() not in declared]
        assert len(changed) > 3 and missing == []
        assert {len(tensor) for tensor in steps.state} == {5}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def test_penalised_models_and_functions_keep_texts_in_their_caches() -> None:
    code = pd.models.load("tiny-code")
    penalised = FilteredModel(code, Filters(repetition_penalty=1.7))
    function = pd.models.from_callable(lambda tokens: code(tokens), vocab_size=code.config.vocab_size)
    for model, penalty in ((penalised, 1.7), (function, 1.0)):
        plain = code if penalty > 1 else function
        requests = []
        for seed, prompt in enumerate(([5, 6, 7, 5, 6], [9], [8, 8, 4])):
            session, _ = open_session(model, prompt, 10, ())
            alone = pd.decoding.generate(
                plain, prompt, "jacobi", max_new_tokens=10, end_tokens=(), seed=seed, block_size=4,
                temperature=0.8, repetition_penalty=penalty,
            )  # fmt: skip
            requests.append((session, seed, alone))
        batch = running_batch(find("jacobi").steps, sizes(model, 2, 10, ()), block_size=4, temperature=0.8)
        for session, seed, _ in requests:
            while not batch.free:
                for row in batch.step():
                    batch.retire(row)
            batch.admit(batch.free[0], session, seed)
            batch.step()
        while batch.busy:
            for row in batch.step():
                batch.retire(row)
        for session, _, alone in requests:
            assert session.tokens[0] == alone.tokens.tolist() and session.accepted == alone.stats.accepted


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    code, steps = pd.models.load("tiny-code"), find("jacobi").steps
    batch = running_batch(steps, sizes(code, 2, 8, (3,), longest=6), page_size=2)

    def request(prompt: Any = (1, 2), limit: int = 8, ends: tuple[int, ...] = (3,), model: Any = code) -> Session:
        return open_session(model, [*prompt], limit, ends)[0]

    other = running_batch(steps, sizes(code, 2, 8, (3,), longest=6), page_size=2)
    before = [tensor.clone() for tensor in tensors(batch)]
    for session, words in (
        (request([1] * 7), "prompt must have at most 6 tokens, got 7"),
        (request(limit=9), r"max_new_tokens must be in 1 \.\. 8, got 9"),
        (request(limit=0), r"max_new_tokens must be in 1 \.\. 8, got 0"),
        (request(ends=()), r"end_tokens must be those of the batch, \(3,\), got \(\)"),
        (request([[1], [2]]), "session must have one prompt, got 2"),
        (
            request(model=FilteredModel(code, Filters(repetition_penalty=1.5))),
            "session must have the model of the batch",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            batch.admit(0, session)
    taken = batch.steps.cache._pool.allocate(batch.steps.cache._pool.available - 4)
    with pytest.raises(MemoryError, match="fit the pool"):
        batch.admit(0, request(limit=8, prompt=[1] * 6))
    assert all(torch.equal(old, new) for old, new in zip(before, tensors(batch), strict=True))
    batch.steps.cache._pool.release(taken)
    for one in (batch, other):  # the refused requests have left nothing behind
        one.admit(1, request())
    with pytest.raises(ValueError, match=r"row must be one of \[0\], got 1"):
        batch.admit(1, request())
    with pytest.raises(ValueError, match=r"row must hold a request; \[1\] do, got 0"):
        batch.retire(0)
    assert all(torch.equal(old, new) for old, new in zip(tensors(batch), tensors(other), strict=True))

    masked, canvas = pd.models.load("tiny-masked"), find("llada").steps
    with pytest.raises(NotImplementedError, match="let sequences join and leave, got a `revise` above 0"):
        running_batch(canvas, sizes(masked, 2, 4, ()), revise=0.2)
    with pytest.raises(ValueError, match="max_new_tokens must be 4, that of the batch"):
        running_batch(canvas, sizes(masked, 2, 4, ())).admit(0, request(limit=3, ends=(), model=masked))
    cached = running_batch(find("fast_dllm").steps, sizes(masked, 2, 4, ()), threshold=1.0)
    cached.admit(0, request(limit=4, ends=(), model=masked))
    cached.step()
    assert not cached.ready
    with pytest.raises(ValueError, match="when `ready`"):
        cached.admit(1, request(limit=4, ends=(), model=masked))


class NoCopyRow:
    """A cache of someone's own model, which cannot take over a sequence."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        if name == "copy_row_":
            raise AttributeError(name)
        return getattr(self._cache, name)


def test_a_cache_that_cannot_take_over_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    code = pd.models.load("tiny-code")
    made = type(code).new_cache
    monkeypatch.setattr(type(code), "new_cache", lambda self, *sizes, **kind: NoCopyRow(made(self, *sizes, **kind)))
    with pytest.raises(NotImplementedError, match="got one whose NoCopyRow has no copy_row_"):
        running_batch(find("autoregressive").steps, sizes(code, 1, 4, ()))


def test_a_request_that_fails_ends_alone() -> None:
    code = pd.models.load("tiny-code")

    def fails(sequence: int, ids: list[int], accepted: int) -> None:
        if len(failing.tokens[0]) > 3:
            raise OSError("closed")

    failing, _ = open_session(code, "import os\n", 12, (), fails)
    other, _ = open_session(code, "class Node:", 12, ())
    batch = running_batch(find("autoregressive").steps, sizes(code, 2, 12, ()))
    batch.admit(0, failing)
    batch.admit(1, other)
    assert [batch.step() for _ in range(11)] == [[], [], *[[0]] * 8, [0, 1]]
    with pytest.raises(OSError, match="closed"):
        batch.retire(0)
    batch.retire(1)
    assert (
        other.tokens[0] == pd.decoding.generate(code, "class Node:", max_new_tokens=12, end_tokens=()).tokens.tolist()
    )
    assert len(failing.tokens[0]) == 4


@without_gpu
@pytest.mark.covering(of=["method"])
@in_all_cases
def test_a_step_reads_the_device_once(name: str, method: str, options: dict[str, Any]) -> None:
    if "speculate" in options:  # which also reads guesses
        return
    with pretended_gpu():
        model = copy.deepcopy(loaded(name)).to("cuda")
        if name == "tiny-code":
            with_drafters(model)
        batch = running_batch(find(method).steps, sizes(model, 2, 6, ()), **options)
        for row, prompt in enumerate(("7 + 1", "10 + 4")):
            batch.admit(row, open_session(model, prompt, 6, ())[0])
        with waits() as log:
            steps = 0
            while batch.busy and not batch.step():
                steps += 1
        # The reference mixes distributions on the host; and cycles are led by what a step has left.
        reads = 2 if method == "slowfast" or options.get("ensemble_weight", 1) < 1 else 1
        assert steps > 0 and log.count("read") <= (steps + 1) * reads


@pytest.mark.parametrize("options", [{}, {"block_size": 4, "cycle": "mean", "tau_high": 0.4}])
def test_a_row_that_served_another_request_begins_anew(options: dict[str, Any]) -> None:
    """Cycles of `slowfast` are the host's: those of a request that has left say nothing of the next one."""
    model, prompts = pd.models.load("tiny-masked"), ["482 + 967 = ?", "7 + 5 = "]
    largest = open_session(model, [[0] * 20], 16, ())[0]
    batch = RunningBatch(find("slowfast").steps, largest, **options)
    for prompt in (*prompts, *prompts[::-1]):
        session = open_session(model, prompt, 16, ())[0]
        batch.admit(0, session)
        while not batch.step():
            pass
        batch.retire(0)
        alone = pd.decoding.generate(model, prompt, "slowfast", max_new_tokens=16, end_tokens=(), **options)
        assert session.tokens[0] == alone.tokens.tolist()
