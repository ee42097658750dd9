"""What a canvas of 256 positions may hold under recursive grammars (`depth=None`), beside a forward of SmolLM2-135M over as many rows.

Called by `python -m bench.grammars --part canvases`. A canvas is a text of the grammar, cut or lengthened by its end token, of which all, three
quarters, half or a tenth of the positions are masked, drawn at random. Measured is what a step does: both passes, and the bits of all masks. Times
are of one thread, the least of several rounds. Every mask is checked: the token that the text has there is allowed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import pdkernels as pd
from pdkernels.decoding import Grammar
from pdkernels.grammar.canvases import MASK, filled

LENGTH, ROUNDS = 256, 5
SHARES = (1.0, 0.75, 0.5, 0.1)
TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "v": {"type": "integer"},
        "kids": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["name"],
}
SUMS = 'start: product ("+" product)*\nproduct: factor ("*" factor)*\nfactor: /[0-9]+/ | "(" start ")"'
NODE = '{"name": "a leaf", "v": 12, "kids": [%s]}'
GRAMMARS: dict[str, tuple[Callable[[], Grammar], str]] = {
    "a tree": (
        lambda: Grammar.json_schema(TREE, depth=None),
        NODE % ", ".join([NODE % (NODE % ""), NODE % "", NODE % ", ".join([NODE % ""] * 3)]),
    ),
    "sums and products": (lambda: Grammar.ebnf(SUMS, depth=None), "(12+3*(4+55))*(6+7)+" * 9 + "1"),
    "any JSON object": (
        lambda: Grammar.json_schema({"type": "object"}, depth=None),
        '{"a": [1, 2.5, {"b": null}], "text": "some words of a text", "more": {"c": [true, false, [[]]], "d": -1e3}, '
        '"list": [{"x": 1, "y": [2, 3]}, {"x": "z"}, 17, "end"]}',
    ),
    "the tree, unfolded to depth 3": (
        lambda: Grammar.json_schema(TREE),
        NODE % ", ".join([NODE % (NODE % ""), NODE % "", NODE % ", ".join([NODE % ""] * 3)]),
    ),
}


def least(body: Callable[[], Any]) -> float:
    """Milliseconds of the thread."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.thread_time()
        body()
        best = min(best, time.thread_time() - started)
    return best * 1e3


def step(automaton: Any, canvas: list[int], rows: torch.Tensor) -> Any:
    """Both passes over a canvas, and the bits of its masks."""
    found = filled(automaton, canvas, 0, 0)
    for at, token in enumerate(canvas):
        if token == MASK:
            found.allowed(at, rows[at].numpy())
    return found


def canvases() -> Iterator[dict[str, Any]]:
    """A record for each grammar; the first one has the forward."""
    torch.set_num_threads(1)
    model = pd.models.load("smollm2-135m-instruct")
    tokenizer, ends = model.tokenizer, tuple(model.end_tokens)
    assert tokenizer is not None
    rows = torch.zeros(LENGTH, (model.config.vocab_size + 31) // 32, dtype=torch.int32)

    def forward() -> None:
        with torch.inference_mode():
            model(torch.arange(LENGTH)[None], cache=model.new_cache(batch=1, capacity=LENGTH))

    for name, (make, text) in GRAMMARS.items():
        started = time.thread_time()
        automaton = make().for_model(model, ends)
        record = {"grammar": name, "ready_ms": (time.thread_time() - started) * 1e3}
        tokens = tokenizer.encode(text)
        assert len(tokens) < LENGTH and automaton.accepting(automaton.follow(0, tokens)), (name, len(tokens))
        known = tokens + [ends[0]] * (LENGTH - len(tokens))
        for share in SHARES:
            chosen = set(random.Random(1).sample(range(LENGTH), round(share * LENGTH)))
            canvas = [MASK if at in chosen else token for at, token in enumerate(known)]
            assert step(automaton, canvas, rows)
            for at in chosen:
                assert int(rows[at, known[at] // 32]) >> known[at] % 32 & 1, (name, share, at)
            record[f"masked_{share:g}_ms"] = least(partial(step, automaton, canvas, rows))
        record["completable_ms"] = least(partial(filled, automaton, [MASK] * LENGTH, 0, 0, with_tokens=False))
        yield record | {"forward_ms": least(forward)}
