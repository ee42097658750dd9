"""Structured output: languages that texts must belong to, their automata, and the tokens that these allow in a
forward."""

from pdkernels.grammar.grammar import Grammar

__all__ = ["Grammar"]
