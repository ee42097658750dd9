"""Masks of one row, and of a draft of eight, over a vocabulary of 131,072 tokens: ours, llguidance's and xgrammar's.

Called by `python -m bench.grammars --part masks`. The vocabulary is Mistral's tekken, a file in the package mistral-common
(`pip install --no-deps mistral-common`); llguidance and xgrammar are measured where they are installed. Each engine reads the same texts of
the same schemas, in the longest tokens that fit, and writes the mask of each place into a row of bits. A row is the median over the places of a
text, and so is a draft: the masks of eight places one after another, and the way back to the first (ours: one call for all). Times are of one thread, the least of
several rounds, the engines in turn. A row is written again in the same place, of which llguidance keeps the mask; those of a draft are new.

Every mask is checked: the token that comes next in the text is allowed; of ours each fifth is compared with the bytes of all tokens, one by one.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pdkernels import _host
from pdkernels.decoding import Grammar
from tests.support.grammars import SCHEMAS

SPECIAL, SIZE, END = 1000, 131_072, 2
DRAFT, ROUNDS = 8, 7
VALUES: dict[str, Any] = {
    "person": {"name": "annabel", "age": 42, "email": "a@bc.org"},
    "calendar": {"startDate": "2024-02-29", "summary": "dinner", "location": "rome"},
    "number": -1234.5678,
    "map": {"apples": 3, "ripe pears": 12, "plums": 99},
    "words": {"text": "The quick brown fox jumps over the lazy dog, twice.", "tags": ["animals", "wild life", "speed"]},
}
OF_WORDS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["text", "tags"],
    "additionalProperties": False,
}
"""Strings without a bound: nearly all tokens are allowed in them."""


def vocabulary() -> list[bytes]:
    """The bytes of each token; none of the special ones, which come first."""
    found = find_spec("mistral_common")
    assert found is not None and found.origin is not None, "pip install --no-deps mistral-common"
    file = Path(found.origin).parent / "data/tekken_240911.json"
    entries = json.loads(file.read_text())["vocab"][: SIZE - SPECIAL]
    return [b""] * SPECIAL + [base64.b64decode(entry["token_bytes"]) for entry in entries]


def tokens_of(text: bytes, ids: dict[bytes, int]) -> list[int]:
    """A text in the longest tokens that fit."""
    tokens = list[int]()
    while text:
        length = next(n for n in range(min(len(text), 32), 0, -1) if text[:n] in ids)
        tokens.append(ids[text[:length]])
        text = text[length:]
    return tokens


class Ours:
    """Our automaton, from a state to the next."""

    def __init__(self, schema: Any, tokens: list[bytes]) -> None:
        self.bytes = Grammar.json_schema(schema).automaton
        self.automaton = _host.TokenAutomaton(self.bytes, tokens, [END], 1 << 30)
        self._states = [0]

    def mask(self, row: Tensor) -> None:
        self.automaton.mask(self._states[-1], 1 << 20, row.numpy())

    def draft(self, tokens: Sequence[int], rows: Tensor) -> None:
        drafted = [(row, 1 << 20, tokens[:row]) for row in range(len(tokens))]
        self.automaton.masks(self._states[-1], drafted, rows.numpy())

    def take(self, token: int) -> None:
        self._states.append(self.automaton.next(self._states[-1], token))

    def back(self, count: int) -> None:
        del self._states[len(self._states) - count :]


class Llguidance:
    """llguidance's matcher."""

    def __init__(self, schema: Any, tokens: list[bytes]) -> None:
        import llguidance as library

        class Tokens:
            bos_token_id, eos_token_id, special_token_ids = None, END, [*range(SPECIAL)]
            tokens: Any = None

            def __call__(self, text: str | bytes) -> list[int]:
                return tokens_of(text.encode() if isinstance(text, str) else text, ids)

        Tokens.tokens = [token or b"\xff" for token in tokens]
        ids = {token: number for number, token in reversed([*enumerate(tokens)]) if token}
        if not hasattr(Llguidance, "tokenizer"):
            Llguidance.tokenizer = library.LLTokenizer(library.TokenizerWrapper(Tokens()))  # type: ignore[attr-defined]
        rules = library.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        self._matcher = library.LLMatcher(Llguidance.tokenizer, rules, log_level=0)  # type: ignore[attr-defined]
        assert not self._matcher.is_error()

    def mask(self, row: Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), 4 * row.numel())

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)

    def back(self, count: int) -> None:
        self._matcher.rollback(count)


class Xgrammar:
    """xgrammar's matcher."""

    def __init__(self, schema: Any, tokens: list[bytes]) -> None:
        import xgrammar as library  # type: ignore[import-not-found]

        if not hasattr(Xgrammar, "compiler"):
            names = [token or f"<special{n}>".encode() for n, token in enumerate(tokens)]
            known = library.TokenizerInfo(names, vocab_size=len(tokens), stop_token_ids=[END])
            Xgrammar.compiler = library.GrammarCompiler(known, max_threads=1, cache_enabled=False)  # type: ignore[attr-defined]
        made = Xgrammar.compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=False)  # type: ignore[attr-defined]
        self._matcher = library.GrammarMatcher(made)

    def mask(self, row: Tensor) -> None:
        if not self._matcher.fill_next_token_bitmask(row[None], 0):
            row.fill_(-1)

    def take(self, token: int) -> None:
        assert self._matcher.accept_token(token)

    def back(self, count: int) -> None:
        self._matcher.rollback(count)


ENGINES: dict[str, Callable[[Any, list[bytes]], Any]] = {
    "pdkernels": Ours,
    "llguidance": Llguidance,
    "xgrammar": Xgrammar,
}


def allows(row: Tensor, token: int) -> bool:
    return bool(int(row[token // 32]) >> token % 32 & 1)


def count(row: Tensor) -> int:
    """How many tokens a mask allows."""
    return sum((word & 0xFFFFFFFF).bit_count() for word in row.tolist())


def check_ours(engine: Ours, tokens: list[bytes], row: Tensor, prefix: bytes) -> None:
    """Compares a mask with the bytes of all tokens, by the automaton over bytes."""
    table, accepting = engine.bytes.table, engine.bytes.accepting
    here = 0
    for byte in prefix:
        here = table[here][byte]
    for number, token in enumerate(tokens):
        state = here
        for byte in token:
            state = table[state][byte]
            if state < 0:
                break
        expected = state >= 0 if token else number == END and accepting[here]
        assert allows(row, number) == expected, (prefix, token)


def _least(body: Callable[[], Any], rounds: int) -> float:
    """Microseconds."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter_ns()
        body()
        best = min(best, time.perf_counter_ns() - started)
    return best / 1e3


def measured(name: str, engine: Any, ids: Sequence[int], tokens: list[bytes], check: bool) -> dict[str, float]:
    """Of one text: microseconds of a row and of a draft, and how many tokens a mask allows."""
    row, rows = torch.zeros(SIZE // 32, dtype=torch.int32), torch.zeros(DRAFT, SIZE // 32, dtype=torch.int32)
    single, drafts, sizes = list[float](), list[float](), list[int]()
    for at, token in enumerate(ids):
        single.append(_least(lambda: engine.mask(row), ROUNDS))
        assert allows(row, token), (name, at)
        sizes.append(count(row))
        if check and at % 5 == 0:
            check_ours(engine, tokens, row, b"".join(tokens[one] for one in ids[:at]))
        if at + DRAFT <= len(ids):

            def draft(at: int = at) -> None:
                if isinstance(engine, Ours):
                    return engine.draft(ids[at : at + DRAFT], rows)
                for number in range(DRAFT):
                    engine.mask(rows[number])
                    engine.take(ids[at + number])
                engine.back(DRAFT)
                return None

            drafts.append(_least(draft, ROUNDS))
            assert torch.equal(rows[0], row) and allows(rows[-1], ids[at + DRAFT - 1]), (name, at)
        engine.take(token)
    result = {"row_us": median(single), "longest_us": max(single), "allowed": median(sizes)}
    return result | ({"draft_us": median(drafts)} if drafts else {})


def masks(check: bool = True) -> Iterator[dict[str, Any]]:
    """A record for each engine and each text."""
    torch.set_num_threads(1)
    tokens = vocabulary()
    ids = {token: number for number, token in reversed([*enumerate(tokens)]) if token}
    for schema_name, value in VALUES.items():
        schema, text = SCHEMAS.get(schema_name, OF_WORDS), tokens_of(json.dumps(value).encode(), ids)
        for name, make in ENGINES.items():
            if find_spec(name) is not None:
                started = time.process_time()
                engine = make(schema, tokens)
                ready = (time.process_time() - started) * 1e3
                times = measured(name, engine, text, tokens, check and isinstance(engine, Ours))
                yield {
                    "schema": schema_name,
                    "engine": name,
                    "version": version(name),
                    "tokens": len(text),
                    "ready_ms": ready,
                    **times,
                }
