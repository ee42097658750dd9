"""Orders: right answers are right, wrong ones are wrong, and what is held out is never trained on."""

from __future__ import annotations

from itertools import islice

import pytest

from pdkernels.training import orders


def test_answers_are_right_in_any_sequence_and_rounds_are_needed() -> None:
    seen = set()
    for problem in islice(orders(3), 300):
        pieces = [content for items in problem.rounds for _, content in items]
        assert all(problem.right("".join(reversed(pieces))).values())
        asked = problem.prompt.strip().split(";")[:-1]
        topics = [[topic for topic, _ in items] for items in problem.rounds]
        assert sorted(asked) == sorted(topic for items in topics for topic in items) and 3 <= len(topics[0]) <= 4
        assert all(len(content) <= 32 for content in pieces)
        if len(topics) == 2:
            assert "*p" in topics[0] and all(topic[0] == "p" for topic in topics[1])
        else:
            assert "*p" not in topics[0]
        seen.update((len(topics), topics[0][0][1]))
    assert {1, 2, *"xudmwlqrp"} <= seen


def test_each_order_counts_by_itself() -> None:
    problem = next(problem for problem in orders(0) if len(problem.rounds) == 2)
    first, *rest = [content for items in problem.rounds for _, content in items]
    for spoilt in ("", first + first, first[:-2] + ";", first[:-1]):
        wrong = problem.right("".join(rest) + spoilt)
        assert not wrong[first[:2]]
    pick = next(content for topic, content in problem.rounds[0] if topic == "*p")
    other = pick[:-2] + ("1" if pick[-2] != "1" else "2") + ";"
    judged = problem.right(problem.text.replace(pick, other))
    assert judged["*p"] and not any(judged[topic] for topic, _ in problem.rounds[1])


def test_held_out_prompts_are_never_trained_on() -> None:
    trained = {problem.prompt for problem in islice(orders(0, items=(1, 2)), 2000)}
    held_out = {problem.prompt for problem in islice(orders(1, items=(1, 2), held_out=True), 200)}
    assert not trained & held_out and len(trained) > 500


def test_errors() -> None:
    for words, options in {
        "items must be a range within 1 .. 8, got (0, 3)": {"items": (0, 3)},
        "picks must lie in [0, 1], got 2": {"picks": 2},
    }.items():
        with pytest.raises(ValueError) as caught:
            next(orders(0, **options))
        assert words in str(caught.value)
    with pytest.raises(TypeError, match="seed must be an int"):
        next(orders("a"))
