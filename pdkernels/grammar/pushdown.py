"""Grammars of any depth: rules that call each other, and what canvases and texts may hold under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from pdkernels import _host
from pdkernels._validation import check_choice, refuse, sentence
from pdkernels.grammar.budget import bounded
from pdkernels.grammar.grammar import MAX_WORK, Fill, Grammar, owner_of
from pdkernels.grammar.language import OP, TOO_LARGE, Expression, determinised

_FAR = 2**31 - 1


class PushdownGrammar(Grammar):
    """A grammar whose rules call each other. Its texts have no bound but the tokens that they may take.

    Args:
        rules: the whole grammar, and the rules that it calls by their numbers (`calls.call`).
        names: of the rules, for messages.
        source, fill: as of `Grammar`.
    """

    def __init__(self, rules: Sequence[Expression], names: Sequence[str], source: str, fill: Fill = "each") -> None:
        check_choice(OP, "fill", fill, ("each", "joint"))
        self.source, self.fill = source, fill
        with bounded():
            self._automata = [determinised(rule, source) for rule in rules]
        self.rules = _host.PushdownRules(self._automata)
        refuse(self.rules.empty, OP, f"no text satisfies {source}")
        if self.rules.looping >= 0:
            fault = f"{names[self.rules.looping]} begins with itself by way of other rules, or after what may be empty"
            raise NotImplementedError(sentence(OP, fault, "Pass a depth, or let it begin with something else."))
        self._bytes = _host.PushdownTokens(self.rules, [*(bytes([byte]) for byte in range(256)), b""], [256], MAX_WORK)
        self._over: WeakKeyDictionary[Any, dict[tuple[int, ...], _host.PushdownTokens]] = WeakKeyDictionary()

    def matches(self, text: str) -> bool:
        states = _host.PushdownText(self._bytes)
        state = states.follow(0, list(text.encode("utf-8", "surrogatepass")))
        return state >= 0 and states.accepting(state)

    def for_model(self, model: Any, end_tokens: Sequence[int]) -> Any:
        """A new numbering of the states of one text; what the tokens do is kept, as by `Grammar`."""
        key = (model.config.vocab_size, *end_tokens)
        known = self._over.setdefault(owner_of(model), {}) if model.tokenizer is not None else {}
        if key not in known:
            known[key] = self._compiled_tokens(model, end_tokens)
        return _host.PushdownText(known[key])

    def _compiled_tokens(self, model: Any, end_tokens: Sequence[int]) -> _host.PushdownTokens:
        vocabulary = self._checked_vocabulary(model, end_tokens)
        rules = self.rules
        if vocabulary.skips_space:
            rules = _host.PushdownRules([self._automata[0].skipping(32), *self._automata[1:]])
        try:
            tokens = _host.PushdownTokens(rules, vocabulary.tokens, list(end_tokens), MAX_WORK)
        except _host.TooLarge:
            fault = f"{self.source} has too many states for a vocabulary of {len(vocabulary.tokens)} tokens"
            raise ValueError(sentence(OP, fault, TOO_LARGE)) from None
        least = _host.PushdownText(tokens).distance(0)
        refuse(least == _FAR, OP, f"the tokens of the model write no text of {self.source}")
        return tokens
