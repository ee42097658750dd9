"""A grammar that takes long to compile: the requests that are there go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pdkernels as pd
from pdkernels.decoding import Grammar


def test_others_are_answered_while_a_grammar_is_compiled() -> None:
    """By the order of events: the compile ends after a request that was running, and one that came later, are done."""
    begun, others_done = threading.Event(), threading.Event()
    grammar = Grammar.regex("[0-9]{4}")
    compile_ = grammar.for_model

    def slow(model: Any, end_tokens: Sequence[int]) -> Any:
        begun.set()
        assert others_done.wait(20)
        return compile_(model, end_tokens)

    grammar.for_model = slow  # type: ignore[method-assign]
    model, events = pd.models.load("tiny-code"), list[str]()
    with pd.Engine(model, max_new_tokens=32) as engine:
        running = engine.submit("import os", max_new_tokens=32)
        made = list[Any]()
        asks = threading.Thread(target=lambda: made.append(engine.submit("x = ", grammar=grammar, max_new_tokens=8)))
        asks.start()
        try:
            assert begun.wait(60)
            for name, handle in (("running", running), ("later", engine.submit("def ", max_new_tokens=16))):
                assert handle.result(10).tokens.numel()
                events.append(name)
            assert not made
        finally:
            others_done.set()
            asks.join(60)
        text = made[0].result(60).text
        events.append("grammar")
    assert events == ["running", "later", "grammar"] and grammar.matches(text)
