"""Canvases under a recursive grammar, by the plainest means: every leftmost derivation that is short enough.

``rules[n]`` has the alternatives of rule n, each a sequence of bytes and of the numbers of rules. Rule 0 is the whole grammar. A *form* is what is
still to be written: such a sequence. `DONE` is the form after an end token, where every token may follow. Masks in a canvas are -1.

Sources: Bar-Hillel, Perles and Shamir, "On formal properties of simple phrase structure grammars" (1961), for a grammar and a finite language at
once; Suresh et al., "DINGO: Constrained inference for diffusion LLMs" (arXiv 2505.23061), for the most probable completion of a canvas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

MASK = -1
Form = tuple["bytes | int", ...]
Rules = Sequence[Sequence[Form]]
DONE: Form = (-1,)


def shortest(rules: Rules) -> list[float]:
    """The fewest bytes of a text of each rule."""
    lengths = [math.inf] * len(rules)
    while True:
        new = [min((size(form, lengths) for form in alternatives), default=math.inf) for alternatives in rules]
        if new == lengths:
            return lengths
        lengths = new


def size(form: Form, lengths: Sequence[float]) -> float:
    """The fewest bytes that a form becomes."""
    return sum(len(part) if isinstance(part, bytes) else lengths[part] for part in form)


def opened(rules: Rules, lengths: Sequence[float], forms: Iterable[Form], room: float) -> set[Form]:
    """Forms that begin with a byte, and the empty one: rules at the beginning have been replaced by their alternatives. Those of more than `room`
    bytes are left out."""
    seen, queue = set[Form](), list(forms)
    for form in queue:
        if form in seen or size(form, lengths) > room:
            continue
        seen.add(form)
        if form and isinstance(form[0], int):
            queue += [(*alternative, *form[1:]) for alternative in rules[form[0]]]
        elif form and not form[0]:
            queue.append(form[1:])
    return {form for form in seen if not form or (isinstance(form[0], bytes) and form[0])}


def follow(
    rules: Rules, lengths: Sequence[float], forms: Iterable[Form], token: bytes | None, room: float
) -> set[Form]:
    """The forms after a token, of at most `room` bytes; None is the end token."""
    forms = set(forms)
    after = forms & {DONE}
    forms -= after
    if token is None:
        return after | ({DONE} if () in opened(rules, lengths, forms, 0) else set())
    if not token:
        return after
    for n in range(len(token)):
        found = set[Form]()
        for form in opened(rules, lengths, forms, room + len(token) - n):
            if form and isinstance(form[0], bytes) and form[0][0] == token[n]:
                found.add((form[0][1:], *form[1:]))
        forms = found
    return after | {form for form in forms if size(form, lengths) <= room}


def completable(
    rules: Rules, tokens: Sequence[bytes | None], canvas: Sequence[int], prefix: Sequence[int], budget: int
) -> bool:
    """Whether tokens in place of the masks, and at most `budget` after the canvas, make a text of the grammar that begins with `prefix`."""
    lengths, longest = shortest(rules), max(len(token or b"") for token in tokens)
    given = [*prefix, *canvas]
    forms: set[Form] = {(0,)}
    for at, token in enumerate([*given, *[MASK] * budget]):
        room = (len(given) + budget - at - 1) * longest
        if at >= len(given) and (DONE in forms or () in opened(rules, lengths, forms - {DONE}, 0)):
            return True
        several = range(len(tokens)) if token == MASK else [token]
        forms = {form for one in several for form in follow(rules, lengths, forms, tokens[one], room)}
    return DONE in forms or () in opened(rules, lengths, forms - {DONE}, 0)


def allowed(
    rules: Rules,
    tokens: Sequence[bytes | None],
    canvas: Sequence[int],
    position: int,
    prefix: Sequence[int],
    budget: int,
) -> list[int]:
    """The tokens that may stand at a masked position."""
    before, after = list(canvas[:position]), list(canvas[position + 1 :])
    return [
        token for token in range(len(tokens)) if completable(rules, tokens, [*before, token, *after], prefix, budget)
    ]


def best(
    rules: Rules,
    tokens: Sequence[bytes | None],
    canvas: Sequence[int],
    prefix: Sequence[int],
    budget: int,
    scores: Sequence[Sequence[float]],
) -> float:
    """The log-probability of the most probable completion; -inf if there is none. `scores` has a row for each mask."""
    if MASK not in canvas:
        return 0.0 if completable(rules, tokens, canvas, prefix, budget) else -math.inf
    position, row = canvas.index(MASK), scores[0]
    fitting = allowed(rules, tokens, canvas, position, prefix, budget)
    most = -math.inf
    for token in fitting:
        filled = [*canvas[:position], token, *canvas[position + 1 :]]
        most = max(most, row[token] + best(rules, tokens, filled, prefix, budget, scores[1:]))
    return most
