"""A decoder's step as a graph would hold it: full width, ragged, and without reading the device."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import pdkernels as pd
from pdkernels import backends
from pdkernels.decoding import find
from pdkernels.decoding.request import finished
from pdkernels.models.architectures.attention import _causal_plan
from tests.harness.sessions import open_session, steps_of

SUMS = ["482 + 967 = ?", "7 + 12 = ?", "51 + 64 = ?"]
STARTS = ["class Node:", "import os\n", "def test_", "    return ", "a", "for i in range("]
CASES = [
    ("tiny-code", "autoregressive", {}),
    ("tiny-code", "autoregressive", {"temperature": 0.7, "seed": 2}),
    ("tiny-code", "jacobi", {"block_size": 6}),
    ("tiny-code", "jacobi", {"window": 4, "seed": 1}),
    ("tiny-code", "jacobi", {"draft": "lookup"}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 7}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 5, "temperature": 0.7, "verification": "rejection"}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 2, "threshold": 0.9}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 5, "threshold": 0.7}),
    ("tiny-trimode", "block_diffusion", {"block_size": 5}),
    (
        "tiny-trimode",
        "block_diffusion",
        {"block_size": 4, "threshold": None, "temperature": 0.7, "refresh": "bidirectional"},
    ),
    ("tiny-trimode", "quadratic_self_speculation", {"block_size": 5}),
    ("tiny-trimode", "quadratic_self_speculation", {"block_size": 4, "temperature": 0.7, "seed": 3}),
    ("tiny-recurrent", "autoregressive", {}),
    ("tiny-recurrent", "recurrent_diffusion", {"max_wavefront": 4}),
    (
        "tiny-recurrent",
        "recurrent_diffusion",
        {"exit": "latent-acceleration", "headway": 2, "noise": 0.1, "temperature": 0.7},
    ),
    ("tiny-masked", "llada", {"steps": 3, "temperature": 0.7, "seed": 4}),
    ("tiny-masked", "llada", {"block_size": 3, "remasking": "random", "no_end": True}),
    ("tiny-masked", "llada", {"late_end": True, "guidance": 0.5}),
    ("tiny-masked", "dream", {"steps": 4}),
    ("tiny-masked", "dream", {"algorithm": "origin", "temperature": 0.7, "seed": 2}),
    ("tiny-masked", "dream", {"algorithm": "confidence_threshold", "threshold": 0.6, "steps": 3}),
    ("tiny-masked", "dream", {"algorithm": "topk_margin", "order_temperature": 0.5, "steps": 12}),
    ("tiny-masked", "fast_dllm", {"block_size": 4, "cache": "none"}),
    ("tiny-masked", "fast_dllm", {"block_size": 32, "threshold": None, "steps": 3, "cache": "prefix"}),
    ("tiny-masked", "fast_dllm", {"block_size": 4, "threshold": None, "factor": 0.5, "temperature": 0.7}),
]
IDS = [f"{method}-{'-'.join(map(str, options.values()))}-{name}" for name, method, options in CASES]


def by_the_log(
    model: Any, steps: Any, prompts: list[str], limit: int, ends: tuple[int, ...] | None
) -> pd.decoding.DecodeResult:
    """A generation that reads only `more` from the device; the session gets everything from the log, at the end."""
    session, single = open_session(model, prompts, limit, ends, trace=True)
    entry = steps.entry.table
    log, count = entry.new_zeros(steps.max_entries, *entry.shape), entry.new_zeros(1)
    more = torch.ones(1, dtype=torch.bool)
    forms = [getattr(steps, name) for name in steps.forms]

    def decode() -> int:
        steps.start(session)
        pd.log_step_(log, count, more, entry)
        while more:
            forms[int(steps.entry.form[0]) if len(forms) > 1 else 0]()
            pd.log_step_(log, count, more, entry)
        return steps.recorded(session, log[: int(count)].tolist())

    return finished(session, single, "by the log", decode)


@pytest.mark.covering(of=["name", "method"])
@pytest.mark.parametrize(("name", "method", "options"), CASES, ids=IDS)
@given(data=st.data())
@settings(max_examples=3)
def test_log_of_full_width_steps_is_the_generation(
    name: str, method: str, options: dict[str, Any], data: st.DataObject
) -> None:
    model = pd.models.load(name)
    starts = SUMS if name == "tiny-masked" else STARTS
    prompts = data.draw(st.lists(st.sampled_from(starts), min_size=1, max_size=3))
    limit = data.draw(st.integers(2, 10 if name == "tiny-masked" else 14))
    if "page_size" in find(method).options:
        options = options | {"page_size": data.draw(st.sampled_from([None, 1, 3, 16]))}
    free = pd.decoding.generate(model, prompts, method, max_new_tokens=limit, end_tokens=(), **options)
    ends = data.draw(st.sampled_from([None, (), *{(ids[len(ids) // 2].item(),) for ids in free.tokens}]))

    # The same steps serve several sessions, of which the first was the largest.
    largest, _ = open_session(model, [[1] * 20] * len(prompts), limit, ends)
    steps = steps_of(method, largest, **options)
    for batch in (prompts, prompts[::-1]):
        result = by_the_log(model, steps, batch, limit, ends)
        expected = pd.decoding.generate(
            model, batch, method, max_new_tokens=limit, end_tokens=ends, trace=True, **options
        )
        assert [ids.tolist() for ids in result.tokens] == [ids.tolist() for ids in expected.tokens]
        for fact in ("forwards", "tokens", "tokens_per_forward", "accepted", "trace"):
            assert getattr(result.stats, fact) == getattr(expected.stats, fact), fact


class NoCopies(TorchDispatchMode):
    """Refuses ops between the host and the device, which has no memory here."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor) and value.dim() > 0]
        assert {tensor.device.type for tensor in tensors} <= {"meta"}, f"{op} touches the host"
        return result


@pytest.fixture
def a_device_without_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops take meta tensors, as `torch.compile` would trace them: reading the values of one is an error."""
    for choices in backends.CHOICES.values():
        monkeypatch.setitem(choices, ("auto", "meta"), "native")
    yield


@pytest.mark.covering
@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("page_size", [None, 4])
def test_step_neither_reads_the_device_nor_sends_it_anything(
    case: tuple[str, str, dict[str, Any]],
    page_size: int | None,
    a_device_without_memory: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, method, options = case
    model = copy.deepcopy(pd.models.load(name)).to("meta")
    session, _ = open_session(model, [[1, 2, 3], [1]], 12, None)
    with torch.inference_mode():
        if "page_size" in find(method).options:
            options = options | {"page_size": page_size}
        steps = steps_of(method, session, **options)
        assert steps.entry.table.device.type == "meta"
        steps.start(session)
        forms = [getattr(steps, name) for name in steps.forms]
        for form in forms:
            form()
        # Nor does a step make tensors from numbers on the host, except filled ones.
        for maker in ("tensor", "as_tensor", "from_numpy"):
            monkeypatch.setattr(torch, maker, None)
        with NoCopies():
            for form in forms:
                form()


def test_options_that_need_the_host() -> None:
    session, _ = open_session(pd.models.load("tiny-masked"), [[1]], 4, None)
    assert not steps_of("llada", session).needs_host
    assert steps_of("llada", session, revise=0.1).needs_host == "a `revise` above 0"
    session, _ = open_session(pd.models.load("tiny-trimode"), [[1]], 4, None)
    assert not steps_of("quadratic_self_speculation", session).needs_host
    assert steps_of("quadratic_self_speculation", session, ensemble_weight=0.5).needs_host
    session, _ = open_session(pd.models.load("tiny-recurrent"), [[1]], 4, None)
    assert not steps_of("recurrent_diffusion", session).needs_host
    assert steps_of("recurrent_diffusion", session, max_recurrences=0).needs_host


def test_what_a_graph_may_have_captured_is_never_freed() -> None:
    device, model = torch.device("cpu"), pd.models.load("tiny-code")
    table = weakref.ref(model._rope(8).cos)
    plan = weakref.ref(_causal_plan(8, device))
    for rows in range(1, 600):
        _causal_plan(rows, device)
    model._rope(2 * len(table()))
    gc.collect()
    assert plan() is _causal_plan(8, device)
    assert table() is not None and len(model._rope(8).cos) > len(table())
