"""Calls of rules inside expressions: a grammar of any depth is a list of expressions that call each other.

An automaton of bytes knows nothing of calls, so a call is written as three bytes that no text in UTF-8 has
(`_host.PushdownRules` reads them). Sequences, choices and repetitions of calls mean what they say. Products of
two languages do not: they are refused (`products.py`).
"""

from __future__ import annotations

from functools import lru_cache

from pdkernels._validation import refuse
from pdkernels.grammar.language import OP, Machine, machine

CALL = 0xFE
MAX_RULES = 4096


@lru_cache(maxsize=256)
def call(rule: int) -> Machine:
    """The texts of rule number `rule`."""
    refuse(rule >= MAX_RULES, OP, f"the grammar has more than {MAX_RULES} recursive rules")
    path = (CALL, rule // 256, rule % 256)
    return machine(4, [(state, byte, byte, state + 1) for state, byte in enumerate(path)], [3])
