"""Random small schemas of all keywords, against jsonschema in both directions: what a language has satisfies the schema,
and what satisfies it is in the language of all its texts, whatever the order of the schema's parts."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from pdkernels import _host
from pdkernels.decoding import Grammar
from tests.support.grammar_texts import drawn

pytest.importorskip("jsonschema", reason="jsonschema is not installed")

from tests.support.schema_fuzz import Writer, compare

BYTES = [bytes([byte]) for byte in range(256)] + [b""]
END = 256


@pytest.mark.parametrize("texts", ["usual", "all"])
def test_texts_and_canvases_have_the_same_language(texts: str) -> None:
    """Token by token, with the tokens of a canvas hidden, and as bytes: each view takes a text that the others take."""
    compared: Counter[bool] = Counter()
    for seed in range(40):
        writer = Writer(seed)
        try:
            grammar = Grammar.json_schema(writer.schema(), texts=texts, unknown="ignore")  # type: ignore[arg-type]
        except (NotImplementedError, ValueError):
            continue
        over = _host.TokenAutomaton(grammar.automaton, BYTES, [END], 10**8)
        words = np.zeros(9, dtype=np.int32)
        values = [json.dumps(writer.value(), ensure_ascii=False) for _ in range(6)]
        for text in [*drawn(grammar, 3, seed), *values]:
            tokens, taken = [*text.encode(), END], grammar.matches(text)
            compared[taken] += 1
            assert (over.follow(0, tokens) >= 0) == taken
            assert bool(over.places(tokens, [0], 0)) == taken
            if not taken:
                continue
            hidden = [-1 if writer.draw.random() < 0.4 else token for token in tokens]
            places = over.places(hidden, [0], 0)
            for at, token in enumerate(tokens):
                over.mask(over.follow(0, tokens[:at]), len(tokens) - at - 1, words)
                assert words[token // 32] >> token % 32 & 1
                if hidden[at] == -1:
                    over.allowed(places[at], places[at + 1], words)
                    assert words[token // 32] >> token % 32 & 1
    assert compared[True] > 100 and compared[False] > 50


def test_random_schemas() -> None:
    """Some of those of `python -m bench.schema_fuzz`."""
    tally: Counter[str] = Counter()
    for seed in range(120):
        compare(seed, "all", tally)
        compare(seed, "usual", Counter())
    assert tally["compiled"] >= 90 and tally["too large"] <= 3
    assert tally["missed"] <= 0.02 * tally["values"]


@pytest.mark.slow
def test_more_random_schemas() -> None:
    tally: Counter[str] = Counter()
    for seed in (*range(120, 600), 1283, 3293, 3811):
        compare(seed, "all", tally)
        compare(seed, "usual", Counter())
    assert tally["compiled"] >= 0.75 * 480
    assert tally["missed"] <= 0.02 * tally["values"]
