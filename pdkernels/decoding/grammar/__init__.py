"""Structured output: languages that texts must belong to, their automata, and the tokens that these allow in a forward."""

from pdkernels.decoding.grammar.grammar import Grammar
from pdkernels.decoding.grammar.rows import GrammarRows, opened

__all__ = ["Grammar", "GrammarRows", "opened"]
