"""Requests with grammars of their own that share a batch: each gets the tokens that it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels import Engine, decoding
from pdkernels.decoding import Grammar

generate: Any = decoding.generate

PATTERNS = [
    "(yes|no), [0-9]{2}",
    "[a-z]{12}",
    "[0-9]+(\\.[0-9]+)?",
    "x = \\[([0-9], ){3}\\]",
    "a|bb|ccc",
    "[A-Z][a-z]*( [a-z]+){3}",
]
PROMPTS = ["def ", "import os\n" * 9, "x", "class Node:\n    def f(self):", "return ", "if a == b:"]


def asked() -> list[tuple[str, dict[str, Any]]]:
    """Prompts with grammars, limits, temperatures and seeds of their own."""
    return [
        (
            prompt,
            {
                "grammar": Grammar.regex(pattern),
                "max_new_tokens": 20 + number,
                "temperature": 1.0 * (number % 2),
                "seed": number,
            },
        )
        for number, (prompt, pattern) in enumerate(zip(PROMPTS, PATTERNS, strict=True))
    ]


@pytest.mark.parametrize("method", ["autoregressive", "jacobi"])
@pytest.mark.parametrize(
    "settings", [{}, {"prompt_tokens_per_step": 3}, {"max_prompt_tokens": 128, "cache_tokens": 256}]
)
def test_each_has_the_tokens_that_it_has_alone(method: str, settings: dict[str, Any]) -> None:
    """In pieces of prompts, and where pages run out, so that some give up their own and come back."""
    model = pd.models.load("tiny-code")
    with Engine(model, max_new_tokens=32, max_running=4, **settings) as engine:
        handles = [engine.submit(prompt, method, **options) for prompt, options in asked()]
        plain = engine.submit("import os\n", method, max_new_tokens=24)
        results = [handle.result(60) for handle in (*handles, plain)]
        metrics = engine.metrics()
    assert metrics.finished.get("error", 0) == 0
    for (prompt, options), result in zip(asked(), results, strict=False):
        assert result.tokens.equal(generate(model, prompt, method, **options).tokens)
        assert options["grammar"].matches(str(result.text))
    assert results[-1].tokens.equal(generate(model, "import os\n", method, max_new_tokens=24).tokens)


def test_they_share_steps() -> None:
    """Four answers of twelve tokens take about as many steps as one."""
    model = pd.models.load("tiny-code")
    options: dict[str, Any] = {"grammar": Grammar.regex("[a-z]{12}"), "max_new_tokens": 16}
    with Engine(model, max_new_tokens=16, max_running=4) as engine:
        for handle in [engine.submit(prompt, **options) for prompt in PROMPTS[:4]]:
            handle.result(60)
        assert engine.metrics().steps < 24


def test_more_of_them_than_batches_keep_nobody_waiting() -> None:
    """A plain request that comes after them is done before them."""
    model, order = pd.models.load("tiny-code"), list[str]()
    with Engine(model, max_new_tokens=64, max_running=8, max_batches=2) as engine:
        long = [engine.submit(prompt, grammar=Grammar.regex("[a-z]{60}"), max_new_tokens=64) for prompt in PROMPTS]
        short = engine.submit("import os\n", max_new_tokens=4, on_tokens=lambda *_: order.append("short"))
        short.result(60)
        assert not any(handle.done for handle in long)
        for handle in long:
            handle.result(60)


def test_what_fails_in_one_ends_it_alone(monkeypatch: Any) -> None:
    from pdkernels.generation.grammar_rows import GrammarRows

    draft, model = GrammarRows.draft, pd.models.load("tiny-code")

    def failing(self: GrammarRows, sequence: int, seen: Any, line: int, bits: torch.Tensor) -> None:
        text = self._texts[sequence]
        if (
            text is not None
            and text.limit == 22
            and len(seen.text[line])
            and seen.length[line] > seen.prompts[line] + 3
        ):
            raise OverflowError("too deep")
        draft(self, sequence, seen, line, bits)

    monkeypatch.setattr(GrammarRows, "draft", failing)
    with Engine(model, max_new_tokens=32, max_running=8) as engine:
        handles = [engine.submit(prompt, **options) for prompt, options in asked()]
        with pytest.raises(OverflowError, match="too deep"):
            handles[2].result(60)
        results = [None if number == 2 else handle.result(60) for number, handle in enumerate(handles)]
        assert engine.running
    monkeypatch.undo()
    for (prompt, options), result in zip(asked(), results, strict=True):
        assert result is None or result.tokens.equal(generate(model, prompt, **options).tokens)
