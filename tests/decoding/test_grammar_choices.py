"""Lists of texts: the smallest automaton of them, alone and among other alternatives, against all short texts."""

from __future__ import annotations

import re
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from pdkernels import _host
from pdkernels.decoding import Grammar
from reference import token_automaton as reference


def words(count: int, length: int, letters: str, seed: int = 0) -> list[str]:
    draw = Random(seed)
    return ["".join(draw.choice(letters) for _ in range(draw.randint(0, length))) for _ in range(count)]


def short_texts(letters: str, longest: int) -> list[str]:
    return ["".join(text) for length in range(longest + 1) for text in product(letters, repeat=length)]


def fewest_states(texts: set[bytes]) -> int:
    """Beginnings of texts that are told apart by how they may end (Myhill and Nerode)."""
    beginnings = {text[:at] for text in texts for at in range(len(text) + 1)}
    return len({frozenset(t[len(b) :] for t in texts if t.startswith(b)) for b in beginnings})


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_automaton_accepts_the_texts_and_no_others(seed: int) -> None:
    texts = words(1 + 3 * seed, 5, "ab" if seed % 2 else "aé", seed)
    written = {text.encode() for text in texts}
    made = _host.ByteAutomaton.of_texts([text.encode() for text in texts], 10_000)
    for text in short_texts("ab" if seed % 2 else "aé", 6):
        assert made.accepts(text.encode()) == (text.encode() in written)
        assert not made.accepts(text.encode() + b"\xc3")
    assert made.states == fewest_states(written) and made.work <= sum(map(len, written))
    with pytest.raises(_host.TooLarge):
        _host.ByteAutomaton.of_texts([*written], made.states - 1)


def test_no_texts() -> None:
    assert _host.ByteAutomaton.of_texts([], 10).states == 0


@pytest.mark.parametrize("seed", range(6))
def test_choices_and_alternatives(seed: int) -> None:
    """Many texts have an automaton of their own; texts around them and other alternatives stay as they are."""
    texts = words(30, 4, "abc", seed)
    choice = Grammar.choice(texts)
    pattern = f"a?({'|'.join(texts)}|b+c|)c?"
    regex = Grammar.regex(pattern)
    for text in short_texts("abc", 6):
        assert choice.matches(text) == (text in texts)
        assert regex.matches(text) == bool(re.fullmatch(pattern, text))
    schema = Grammar.json_schema({"enum": [*texts, 7, None]})
    assert all(schema.matches(f'"{text}"') for text in texts) and schema.matches("7") and schema.matches("null")
    assert not schema.matches('"abcabc"') and not schema.matches(texts[-1] + "!")


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_texts_equal_the_reference(seed: int) -> None:
    """Tokens that occur twice, that begin others, and that no text has."""
    draw = Random(seed)
    texts = [text.encode() for text in words(20, 5, "abc", seed)]
    made = _host.ByteAutomaton.of_texts(texts, 10_000)
    tokens: list[bytes | None] = [text.encode() for text in words(20, 3, "abcd", seed + 100)]
    tokens += [b"a", b"ab", b"a", None, b"", b"b", b"c", None]
    ends = [n for n, token in enumerate(tokens) if token is None]
    over = _host.TokenAutomaton(made, [token or b"" for token in tokens], ends, 10**6)
    language = made.table, made.accepting, [token if token is None or token else b"" for token in tokens]
    bits: Any = np.zeros(1, dtype=np.int32)
    for _ in range(20):
        path = [draw.randrange(len(tokens)) for _ in range(draw.randint(0, 3))]
        there: int | None = 0
        for token in path:
            there = None if there is None else reference.follow(*language[:2], tokens[token], there)
        state = over.follow(0, path)
        assert (state == -1) == (there is None)
        if there is not None:
            over.mask(state, 2, bits)
            assert [n for n in range(len(tokens)) if bits[0] >> n & 1] == [
                n
                for n, token in enumerate(tokens)
                if (to := reference.follow(*language[:2], token, there)) is not None
                and reference.distance(*language, to) <= 2
            ]


def test_thousands_of_words() -> None:
    draw = Random(0)
    texts = ["".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(12)) for _ in range(3000)]
    grammar = Grammar.choice(texts)
    assert all(grammar.matches(text) for text in texts[::100]) and not grammar.matches(texts[0][:-1])
    assert grammar.automaton.states > 20_000
    with pytest.raises(ValueError, match="the automaton of the choice .* has more than 65536 states"):
        Grammar.choice([f"{draw.getrandbits(92):023x}" for _ in range(4_000)])
