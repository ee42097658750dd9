"""How many forwards short texts take, of every method that drafts: no more than decoding token by token, and none after the last token."""

from __future__ import annotations

from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding import available, find
from pdkernels.models import DFlashHead, EagleHead, MtpHead, RecurrentDepth, Transformer
from tests.harness.sessions import open_session, running_batch
from tests.support.causal import SCRIPTS, from_list
from tests.support.drafters import with_drafters
from tests.support.tri_mode import MASK, SKILLS, Cached, ScriptedTriMode

PROMPT = "12 + 34 = ?\n"
# The masked wing has a canvas of the requested length, and no drafts: a forward each fills at least a position of it.
DRAFTING = [name for name in available() if find(name).verifies_drafts or name in ("block_diffusion", "fast_dllm_v2")]
FORMS: dict[str, list[dict[str, Any]]] = {
    "jacobi": [{}, {"window": 6}, {"draft": "lookup"}, {"block_size": "auto"}],
    "linear_self_speculation": [{}, {"threshold": 0.9}, {"block_size": 2}, {"temperature": 0.8}],
    "quadratic_self_speculation": [{}, {"ensemble_weight": 0.6}],
    "eagle": [{"block_size": 5}, {"block_size": 5, "branches": 2}],
    "recurrent_self_speculation": [{"recurrences": 6}],
}
CASES = [(name, form) for name in DRAFTING for form in FORMS.get(name, [{}])]


def model_of(method: str) -> Any:
    name = find(method).example
    drafted = "drafter" in find(method).options
    return with_drafters(pd.models.load("tiny-code")) if drafted else pd.models.load(name)


class Forwards:
    """The rows of each forward of a model, and of its drafters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        self.rows: list[int] = []
        self.others: list[Any] = []
        monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")  # its forwards are an op, which nobody can count here
        for kind, names in ((Transformer, ("_forward", "recompute")), (RecurrentDepth, ("prelude",))):
            for name in names:
                monkeypatch.setattr(kind, name, self._counted(getattr(kind, name), model))
        for head, name in ((EagleHead, "forward"), (MtpHead, "forward"), (DFlashHead, "forward"), (DFlashHead, "read")):
            monkeypatch.setattr(head, name, self._counted(getattr(head, name), model))

    def _counted(self, function: Any, model: Any) -> Any:
        def counted(one: Any, tokens: Any, *others: Any, **options: Any) -> Any:
            self.rows.append(tokens.shape[1]) if one is model else self.others.append(one)
            return function(one, tokens, *others, **options)

        return counted


@pytest.mark.parametrize(("method", "form"), CASES, ids=[f"{name}-{form}" for name, form in CASES])
def test_of_the_first_three_tokens(method: str, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(method)
    forwards = Forwards(monkeypatch, model)
    for limit in (1, 2, 3):
        forwards.rows.clear(), forwards.others.clear()
        result = pd.decoding.generate(model, PROMPT, method, max_new_tokens=limit, end_tokens=(), **form)
        assert result.tokens.numel() == limit
        assert len(forwards.rows) == result.stats.forwards
        # A draft of one token is a bet: the verifying forward, with all recurrences, may take it or not.
        bet = method == "recurrent_self_speculation" and limit == 3
        assert result.stats.forwards <= limit + bet
        if limit <= 2:
            assert not forwards.others  # no drafter reads a prompt for nothing
            if find(method).verifies_drafts and form.get("ensemble_weight", 1) == 1:
                assert forwards.rows[1:] == [1] * (limit - 1)  # nothing is drafted that nobody can use


@pytest.mark.parametrize(("method", "form"), CASES, ids=[f"{name}-{form}" for name, form in CASES])
def test_none_after_the_last_token(method: str, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At an end token, and at the limit."""
    model = model_of(method)
    forwards, seen = Forwards(monkeypatch, model), 0

    def told(sequence: int, tokens: list[int], accepted: int) -> None:
        nonlocal seen
        seen = len(forwards.rows) + len(forwards.others)

    text = pd.decoding.generate(model, PROMPT, method, max_new_tokens=24, end_tokens=(), **form).tokens.tolist()
    ends = [token for token in text[6:] if token not in text[:6]][:1] or [text[0]]
    for options in ({"end_tokens": ends}, {"end_tokens": ()}):
        forwards.rows.clear(), forwards.others.clear()
        result = pd.decoding.generate(model, PROMPT, method, max_new_tokens=24, on_tokens=told, **options, **form)
        assert len(forwards.rows) == result.stats.forwards and seen == len(forwards.rows) + len(forwards.others)
        assert result.tokens.tolist() == text[: result.tokens.numel()]


STEPS = [
    (method, form)
    for method, form in CASES
    # Lengths that are chosen depend on the other requests, and their number of forwards with them.
    if find(method).steps is not None and form.get("ensemble_weight", 1) == 1 and form.get("block_size") != "auto"
]


@pytest.mark.parametrize(("method", "form"), STEPS, ids=[f"{name}-{form}" for name, form in STEPS])
def test_requests_in_a_running_batch_take_as_few(method: str, form: dict[str, Any]) -> None:
    model, steps = model_of(method), find(method).steps
    assert steps is not None
    limits = (1, 2, 3, 11) if steps.any_limit else (11,) * 4
    alone = [pd.decoding.generate(model, PROMPT, method, max_new_tokens=n, end_tokens=(), **form) for n in limits]
    largest = open_session(model, [[0] * 20] * len(limits), max(limits), ())[0]
    batch = running_batch(steps, largest, **form)
    sessions = [open_session(model, PROMPT, limit, ())[0] for limit in limits]
    for row, session in enumerate(sessions):
        batch.admit(row, session)
    taken_part = dict[int, int]()
    while batch.busy:
        taken_part |= {row: batch.retire(row) for row in batch.step()}
    assert [session.tokens[0] for session in sessions] == [result.tokens.tolist() for result in alone]
    assert [taken_part[row] for row in range(len(limits))] == [result.stats.forwards for result in alone]


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("skill", sorted(SKILLS))
def test_linear_self_speculation_never_needs_more_for_its_last_tokens(skill: str, limit: int) -> None:
    """A text that is longer by a token takes at most two forwards more, a draft and its verification; one of up to three tokens takes
    one for each."""
    model = Cached(ScriptedTriMode(SCRIPTS["history"], SKILLS[skill]), MASK + 1)
    short, long = (
        pd.decoding.generate(model, [3, 1], "linear_self_speculation", max_new_tokens=n, block_size=6).stats.forwards
        for n in (limit, limit + 1)
    )
    assert short <= long <= short + 2 and (limit > 3 or short == limit)


def test_draft_passes_stop_where_nothing_is_verified() -> None:
    """A threshold that no guess reaches fills a slot in each pass: five in a block of six, fewer once an end token is drafted, or where
    fewer tokens are wanted."""
    model = Cached(ScriptedTriMode(from_list([1, 2, 3, 4, 5, 6, 7, 8], 2)), MASK + 1)

    def first_step(limit: int, ends: tuple[int, ...]) -> Any:
        options: dict[str, Any] = {"block_size": 6, "threshold": 2.0, "end_tokens": ends, "max_new_tokens": limit}
        return pd.decoding.generate(model, [9, 9], "linear_self_speculation", trace=True, **options).stats.trace[0][0]

    whole, ended, limited = first_step(20, ()), first_step(20, (3,)), first_step(4, ())
    assert whole.forwards == 5 + 1 and MASK not in whole.draft
    assert ended.forwards < whole.forwards and ended.draft[:3] == [1, 2, 3] and MASK in ended.draft[3:]
    assert limited.forwards < whole.forwards and limited.draft == [1, 2, 3]
