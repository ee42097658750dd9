"""Calls of rules inside expressions: a grammar of any depth is a list of expressions that call each other.

An automaton of bytes knows nothing of calls, so a call is written as three bytes that no text in UTF-8 has
(`_host.PushdownRules` reads them). Sequences, choices and repetitions of calls mean what they say. Products of
two languages do not: they are refused (`language.product`).
"""

from __future__ import annotations

from functools import lru_cache

from pdkernels._validation import refuse
from pdkernels.grammar.budget import current
from pdkernels.grammar.language import CALL, OP, Machine, machine

MAX_RULES = 4096


def call(rule: int) -> Machine:
    """The texts of rule number `rule`."""
    refuse(rule >= MAX_RULES, OP, f"the grammar has more than {MAX_RULES} recursive rules")
    current().memo[CALL] = True
    return _written(rule)


@lru_cache(maxsize=256)
def _written(rule: int) -> Machine:
    path = (CALL, rule // 256, rule % 256)
    return machine(4, [(state, byte, byte, state + 1) for state, byte in enumerate(path)], [3])
