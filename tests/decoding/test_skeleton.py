"""Skeleton-of-Thought: the plain loop on trained and on random weights, points, joins, the critical path, errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import skeleton_of_thought
from pdkernels.decoding.skeleton import POINT_TEMPLATE, POINTS, SKELETON_TEMPLATE
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig
from pdkernels.reference import skeleton as reference


def plain(model: Any) -> Any:
    return lambda tokens, positions, mask: model(tokens, positions=positions, mask=mask)


@pytest.mark.parametrize("method", ["autoregressive", "jacobi"])
@pytest.mark.parametrize("start", ["1.", "1. one\n2. two words\n3.", "nothing"])
def test_tokens_and_forwards_of_the_plain_loop(method: str, start: str) -> None:
    model: Any = pd.models.load("tiny-code").double()
    limits = {"max_skeleton_tokens": 9, "max_point_tokens": 12}
    skeleton, point = "def {question}:\n    # ", "# {question} {index}\n{skeleton}\n{point} ="
    found = skeleton_of_thought(
        model, "add(a, b)", method, skeleton_template=skeleton, point_template=point, start=start, **limits
    )
    tokenizer = model.tokenizer
    expected = reference.skeleton_of_thought(
        plain(model), tokenizer.encode, tokenizer.decode, skeleton.format(question="add(a, b)"),
        lambda text, index, words: point.format(question="add(a, b)", skeleton=text, index=index, point=words),
        start=start, end_tokens=model.end_tokens, **limits,
    )  # fmt: skip
    assert found.skeleton == expected.skeleton and [tuple(each) for each in found.points] == expected.points
    assert (
        (found.critical_path == expected.critical_path)
        if method == "autoregressive"
        else (found.critical_path <= expected.critical_path)
    )
    assert found.seconds > 0 and len(expected.points) in ((0, 1) if start != "1. one\n2. two words\n3." else (2, 3))


class Scripted:
    """The answers of a model by what its prompt ends with; a token is a byte, and rows predict what the script says."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers
        torch.manual_seed(0)
        config = TransformerConfig(258, 16, 1, 2, 1, 8, 24)
        self.inner = Transformer(config, tokenizer=ByteTokenizer(), end_tokens=(ByteTokenizer.end_token,))
        self.prompts: list[str] = []

    def generate(self, model: Any, prompt: Any, method: Any, *, max_new_tokens: int, **options: Any) -> Any:
        from types import SimpleNamespace

        prompts = [prompt] if isinstance(prompt, str) else prompt
        self.prompts += prompts
        texts = [next(text for end, text in self.answers.items() if asked.endswith(end)) for asked in prompts]
        stats = SimpleNamespace(forwards=max(map(len, texts)), seconds=1.0)
        return SimpleNamespace(text=texts[0] if isinstance(prompt, str) else texts, stats=stats)


def test_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point's prompt has the whole skeleton and ends with the beginning of its answer; its text is joined in their order."""
    answers = {"Outline:\n1.": " Rice.\n2. Soup.", "\n1. Rice.": " White or fried.", "\n2. Soup.": " Hot."}
    model = Scripted(answers)
    monkeypatch.setattr("pdkernels.decoding.skeleton.generate", model.generate)
    found = skeleton_of_thought(model.inner, "Which dishes?")
    assert found.text == "1. Rice. White or fried.\n2. Soup. Hot." and found.skeleton == "1. Rice.\n2. Soup."
    assert found.critical_path == len(" Rice.\n2. Soup.") + len(" White or fried.") and found.seconds == 2.0
    skeleton, first, second = model.prompts
    assert skeleton == SKELETON_TEMPLATE.format(question="Which dishes?") + "1."
    for index, (prompt, words) in enumerate(((first, "Rice."), (second, "Soup.")), 1):
        told = {"question": "Which dishes?", "skeleton": found.skeleton, "index": str(index), "point": words}
        assert prompt == POINT_TEMPLATE.format(**told) and "2. Soup.\n\nWrite out" in prompt
    told = skeleton_of_thought(model.inner, "?", piece="<{point}{expansion}>", joiner=" ")
    assert told.text == "<Rice. White or fried.> <Soup. Hot.>"


def test_a_skeleton_without_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the answer, and costs one generation."""
    model = Scripted({"begin": " at once"})
    monkeypatch.setattr("pdkernels.decoding.skeleton.generate", model.generate)
    found = skeleton_of_thought(model.inner, "?", start="begin")
    assert (found.text, found.points, found.stats[1], found.critical_path) == ("begin at once", (), None, 8)


def test_points() -> None:
    """Numbers of several digits; words up to the end of the line."""
    assert re.findall(POINTS, "1. one two\n2.three\n10. ten") == [("1", "one two"), ("2", "three"), ("10", "ten")]
    assert re.findall(POINTS, "no points") == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"question": 3}, TypeError, "question must be a str, got int."),
        (
            {"piece": "{other}"},
            ValueError,
            "piece must have no other fields than {index}, {point}, {expansion}, got '{other}'.",
        ),
        (
            {"skeleton_template": "{"},
            ValueError,
            "skeleton_template must have no other fields than {question}, got '{'.",
        ),
        (
            {"point_template": "{0}"},
            ValueError,
            "point_template must have no other fields than {question}, {skeleton}, ",
        ),
        ({"pattern": "x"}, ValueError, "pattern must have two groups, number and words, got 'x'."),
        ({"max_new_tokens": 3}, TypeError, "max_new_tokens must be left out, got one. It is max_skeleton_tokens and "),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], words: str) -> None:
    model = Scripted({}).inner
    with pytest.raises(error) as raised:
        skeleton_of_thought(model, **{"question": "?", **options})
    assert str(raised.value).startswith(f"pdkernels.decoding.skeleton_of_thought: {words}")
    model.tokenizer = None
    with pytest.raises(ValueError, match="model must have a tokenizer, got Transformer"):
        skeleton_of_thought(model, "?")
