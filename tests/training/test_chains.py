"""Chains of links: what a prompt asks, worked out from its text alone, and prompts that no training sees."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from pdkernels.evaluation import make_task
from pdkernels.training import Chains, chains


def followed(prompt: str) -> tuple[str, list[int]]:
    """The answer to a prompt and the links on the way to each name."""
    listed, asked = prompt.removesuffix("=").split("?")
    links = dict(link for link in listed.split())
    answer, hops = "", []
    for name in asked:
        hops.append(0)
        while links[name] != name:
            name, hops[-1] = links[name], hops[-1] + 1
        answer += name
    return answer, hops


@pytest.mark.parametrize("hops", [(1, 1), (2, 30), (30, 30)])
def test_answers_follow_the_links(hops: tuple[int, int]) -> None:
    lengths = set()
    for one in islice(chains(5, hops=hops), 40):
        answer, found = followed(one.prompt)
        assert (
            one.is_solved_by(answer) and not one.is_solved_by(answer[:-1]) and not one.is_solved_by(answer[::-1] + "x")
        )
        assert found == [len(path) - 1 for path in one.paths] and one.hops == max(found)
        assert max(found) - 3 <= min(found) and hops[0] - 3 <= min(found) and max(found) <= hops[1]
        ends = {name for name in one.prompt.split("?")[0].split() if name[0] == name[1]}
        assert 2 <= len(ends) <= 4
        lengths.add(len(one.prompt))
    assert (len(lengths) > 10) == (hops == (2, 30))


def test_held_out_prompts_are_in_no_training_stream() -> None:
    def prompts(seed: int, held_out: bool) -> set[str]:
        # Short prompts, which repeat.
        stream = chains(seed, held_out=held_out, hops=(1, 1), count=(1, 1), queries=1)
        return {one.prompt for one in islice(stream, 4000)}

    train, test = prompts(0, False) | prompts(1, False), prompts(0, True)
    assert len(train) > 4000 and len(test) > 100 and not train & test
    assert [one.prompt for one in islice(chains(3), 5)] == [one.prompt for one in islice(chains(3), 5)]


def test_the_task_is_held_out() -> None:
    task = make_task("chains", 12, seed=2)
    assert [one.prompt for one in task.problems] == task.prompts and len(set(task.prompts) - set(task.warm_up)) == 12
    assert make_task("chains", 4, seed=2).prompts == task.prompts[:4] != make_task("chains", 4).prompts
    seen = {one.prompt for one in islice(chains(2), 300)}
    assert not seen & {*task.prompts, *task.warm_up}
    assert all(len(one.answer) < task.limit for one in task.problems)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hops": (0, 3)}, "pdkernels.training.chains: hops must be a range within 1 .. 30, got (0, 3)."),
        ({"hops": (2, 31)}, "pdkernels.training.chains: hops must be a range within 1 .. 30, got (2, 31)."),
        ({"count": (3, 2)}, "pdkernels.training.chains: count must be a range from 1 on, got (3, 2)."),
        ({"queries": 0}, "pdkernels.training.chains: queries must be at least 1, got 0."),
    ],
)
def test_ranges_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        next(chains(0, **options))
    assert str(caught.value) == message
    with pytest.raises(TypeError):
        next(chains(0.5))  # type: ignore[arg-type]


def test_right_answers_are_whole() -> None:
    assert Chains("ab bb ?a=", ("ab",)).is_solved_by("b") and not Chains("ab bb ?a=", ("ab",)).is_solved_by("bb")
