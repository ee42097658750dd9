"""Sums are worked out correctly and held-out ones never appear in training; source files are split the same way everywhere."""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdkernels.models import ByteTokenizer
from pdkernels.training import Problem, arithmetic, as_ids, standard_library
from pdkernels.training.corpora import HELD_OUT_EVERY

PROBLEMS = list(islice(arithmetic(0), 1500))
HELD_OUT = list(islice(arithmetic(0, held_out=True), 200))


def evaluate(question: str) -> int:
    """From the left, as the lines do one by one."""
    numbers, signs = re.findall(r"\d+", question), re.findall(r"[-+*]", question)
    value = int(numbers[0])
    for sign, number in zip(signs, numbers[1:], strict=True):
        value = {"+": value + int(number), "-": value - int(number), "*": value * int(number)}[sign]
    return value


def test_problems_read_as_they_should() -> None:
    for problem in PROBLEMS + HELD_OUT:
        assert re.fullmatch(r"\d+( [-+*] \d+){1,2} = \?\n", problem.prompt)
        assert problem.steps.endswith(f"answer {problem.result}\n") and problem.is_solved_by(problem.steps)


LINE = re.compile(r"(\d+) ([-+*]) (\d+)( [-+] (\d+))?: (\d) ([-+*]) (\d)( [-+] \d+)? = (-?\d+) so (\d+)")


def test_every_line_of_every_problem_is_true() -> None:
    """Each line has the rest of two numbers, computes their last digits, and writes one more digit of the result."""
    for problem in PROBLEMS + HELD_OUT:
        question = problem.prompt.removesuffix(" = ?\n")
        assert problem.result == evaluate(question) >= 0, problem
        lines = iter(problem.steps.splitlines())
        numbers, signs = [int(n) for n in re.findall(r"\d+", question)], re.findall(r"[-+*]", question)
        value = numbers[0]
        for sign, other in zip(signs, numbers[1:], strict=True):
            carried, digits = 0, ""
            for digit in range(len(str(value)) if sign == "*" else max(len(str(value)), len(str(other)))):
                a, b = value // 10**digit, other if sign == "*" else other // 10**digit
                rest = f" {'-' if sign == '-' else '+'} {carried}" if carried else ""
                found = LINE.fullmatch(next(lines))
                assert found, problem
                assert (int(found[1]), found[2], int(found[3]), found[4] or "") == (a, sign, b, rest), problem
                assert (found[6], found[7], found[8], found[9] or "") == (str(a % 10), sign, str(b % 10), rest), problem
                total = int(found[10])
                assert total == evaluate(f"{a % 10} {sign} {b % 10}") + (-carried if sign == "-" else carried), problem
                digits, carried = str(total % 10) + digits, int(total < 0) if sign == "-" else total // 10
                assert found[11] == digits, problem
            value = evaluate(f"{value} {sign} {other}")
            assert int(f"{carried}{digits}") == value, problem
        assert list(lines) == [f"answer {value}"], problem


def test_streams_are_reproducible_and_differ() -> None:
    assert list(islice(arithmetic(0), 50)) == PROBLEMS[:50] != list(islice(arithmetic(1), 50))


def test_no_problem_is_on_both_sides() -> None:
    asked = {problem.prompt for problem in HELD_OUT}
    for seed in (0, 1, 2):
        assert asked.isdisjoint(problem.prompt for problem in islice(arithmetic(seed), 1500))


def test_all_kinds_of_problems_come() -> None:
    signs = [re.findall(r"[-+*]", problem.prompt) for problem in PROBLEMS]
    assert {len(found) for found in signs} == {1, 2}
    for sign in "+-*":
        assert 300 < sum(sign in found for found in signs) < 1200
    longest = max(len(number) for problem in PROBLEMS for number in re.findall(r"\d+", problem.prompt))
    assert longest == 4
    assert all(2 <= int(factor) <= 9 for problem in PROBLEMS for factor in re.findall(r"\* (\d+)", problem.prompt))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("answer 7\n", True),
        ("3 + 4 = 7\nanswer 7\n\n", True),
        ("answer 7", True),
        ("", False),
        ("answer 70\n", False),
        ("answer 7\nand more", False),
        ("the answer 7", False),
        ("\n\n", False),
    ],
)
def test_only_the_last_line_is_scored(text: str, right: bool) -> None:
    assert Problem("3 + 4 = ?\n", "", 7).is_solved_by(text) is right


def test_a_seed_is_an_int() -> None:
    with pytest.raises(TypeError, match="pdkernels.training.arithmetic: seed must be an int, got float"):
        next(arithmetic(0.0))


def test_the_standard_library_is_source_and_divided() -> None:
    files, held_out = standard_library()
    assert len(files) > 200 and len(held_out) == (len(files) + len(held_out) + HELD_OUT_EVERY // 2) // HELD_OUT_EVERY
    assert set(files).isdisjoint(text for text in held_out if len(text) > 200)
    ours = Path(sysconfig.get_path("stdlib"), "textwrap.py").read_bytes()
    assert (ours in files) != (ours in held_out)
    for text in held_out:
        ast.parse(text)
    assert standard_library() == (files, held_out)
    assert not any(b"import unittest" in text[:300] and b"test_" in text[:300] for text in held_out), sys.version


def test_an_interpreter_without_source_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "test").mkdir()
    (tmp_path / "test/test_it.py").write_text("pass")
    with pytest.raises(ValueError, match="the interpreter must have source files in"):
        standard_library()


def test_tests_and_tables_are_skipped_and_order_is_that_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for name in (
        "b.py",
        "a/c.py",
        "a.py",
        "encodings/d.py",
        "email/test/e.py",
        "config-3.11/f.py",
        "site-packages/g.py",
        "h.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert standard_library() == ([b"a.py", b"a/c.py", b"b.py"], [])


@given(st.lists(st.binary(max_size=9), max_size=4))
def test_ids_are_bytes_with_an_end_after_each_text(texts: list[bytes]) -> None:
    ids = as_ids(texts)
    assert ids.dtype == torch.int16 and ids.dim() == 1
    assert ids.tolist() == [value for text in texts if text for value in (*text, ByteTokenizer.end_token)]
