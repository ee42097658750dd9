"""SmolLM2 under grammars: whole texts, as quick as without one."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import Grammar, generate
from pdkernels.generation.filters import Filters
from tests.support.grammars import all_grammars

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
    },
    "required": ["name", "age", "tags", "city"],
}
QUESTION = [{"role": "user", "content": "Describe a person called Ann as JSON with name, age, tags and city."}]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    try:
        return pd.models.load("smollm2-135m-instruct", dtype=torch.bfloat16)
    except ImportError as error:
        pytest.skip(str(error))


def test_tokens_write_what_decoding_gives(smollm2: Any) -> None:
    tokenizer = smollm2.tokenizer
    tokens = tokenizer.token_bytes()
    text = 'naïve {"a": [1, 2]}\n\tdef f(x): 東京 🙂 — ok'
    ids = tokenizer.encode(text)
    assert b"".join(tokens[one] for one in ids).decode() == text == tokenizer.decode(ids)
    for token in range(0, len(tokens), 7):
        assert tokenizer.decode([token]) == tokens[token].decode("utf-8", "replace")


def test_all_grammars(smollm2: Any) -> None:
    oracle = pytest.importorskip("tests.support.grammar_oracle", exc_type=ImportError)
    for name, grammar in all_grammars().items():
        expected = generate(smollm2, QUESTION, grammar=grammar, max_new_tokens=48)
        drafted = generate(smollm2, QUESTION, "jacobi", draft="lookup", grammar=grammar, max_new_tokens=48)
        assert oracle.fault(name, expected.text) == "", (name, expected.text)
        assert drafted.tokens.tolist() == expected.tokens.tolist(), name
        assert drafted.stats.forwards <= expected.stats.forwards


def test_forced_tokens_save_forwards(smollm2: Any) -> None:
    grammar = Grammar.json_schema(SCHEMA)
    slow = generate(smollm2, QUESTION, grammar=grammar, max_new_tokens=100)
    quick = generate(smollm2, QUESTION, "jacobi", draft="lookup", grammar=grammar, max_new_tokens=100)
    value = json.loads(slow.text)
    assert quick.text == slow.text and value["name"] == "Ann"
    assert quick.stats.forced[0] >= 8 and quick.stats.forwards < 0.8 * slow.stats.forwards


def test_cost_of_a_step(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks, and their use, take less than a tenth of a forward's CPU time."""
    grammar, spent, apply = Grammar.json_schema(SCHEMA), list[float](), Filters.apply

    def timed(self: Filters, *given: Any) -> Any:
        started = time.thread_time()
        made = apply(self, *given)
        spent.append(time.thread_time() - started)
        return made

    monkeypatch.setattr(Filters, "apply", timed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shares = []
        for _ in range(3):
            spent.clear()
            started = time.thread_time()
            result = generate(smollm2, QUESTION, grammar=grammar, max_new_tokens=100)
            whole = time.thread_time() - started
            forwards = len(spent) - 1
            # The prompt's forward is longer.
            per_step = sorted(spent[1:])[forwards // 2]
            shares.append(per_step * result.stats.forwards / (whole - sum(spent)))
        assert min(shares) < 0.1, shares
    finally:
        torch.set_num_threads(threads)
