"""Context-free grammars of any depth, by the optional library llguidance: the mask of the next token after a prefix,
and no more.

The library knows neither the tokens that it takes to complete a text nor what may stand between known ones, so these
grammars are for methods that write token after token, and a text that is not whole at the end is an error.
"""

from __future__ import annotations

import ctypes
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

from pdkernels._validation import check_text, refuse, sentence
from pdkernels.grammar.ebnf import pieces
from pdkernels.grammar.language import OP, check_unfolded
from pdkernels.grammar.regex import MAX_LENGTH, parsed

_END = b"\xff"  # the library asks for some bytes of its end token


def library() -> Any:
    """The module llguidance."""
    try:
        import llguidance
    except ImportError as error:
        fault = "grammars of any depth need the optional library `llguidance`"
        remedy = "Install it with `pip install llguidance`, or use Grammar.ebnf, which bounds the depth."
        raise ImportError(sentence(OP, fault, remedy)) from error
    return llguidance


class _Vocabulary:
    """A tokenizer as the library wraps one."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens = [token or _END for token in tokens]
        self.special_token_ids = [n for n, token in enumerate(tokens) if not token]
        self.eos_token_id = end
        self._of = {token: n for n, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._of[bytes([byte])] for byte in data if bytes([byte]) in self._of]


def checked_rules(rules: str) -> str:
    """The grammar in the form of the library, once it has been read.

    Raises:
        ValueError: not a grammar, or one with a pattern that is too large.
        ImportError: the library is not installed.
    """
    check_text(OP, rules, "rules")
    refuse(len(rules) > MAX_LENGTH, OP, f"the grammar has more than {MAX_LENGTH} characters")
    for kind, lexeme in pieces(rules, directives=True):
        if kind == "pattern":
            try:
                check_unfolded(parsed(lexeme[1 : lexeme.rindex("/")]), f"the pattern {lexeme[:60]}")
            except NotImplementedError:
                continue
    _check_schemas(rules)
    grammar: str = library().LLMatcher.grammar_from_lark(rules)
    fault = library().LLMatcher.validate_grammar(grammar)
    refuse(bool(fault), OP, f"rules must be a grammar of llguidance: {' '.join(str(fault).split())[:300]}")
    return grammar


def _check_schemas(rules: str) -> None:
    """What llguidance 1.9.1 gets wrong in the schemas of `%json`: refused where it excludes right values, else named in
    a warning."""
    for match in re.finditer(r"%json\s*", rules):
        try:
            schema, _ = json.JSONDecoder().raw_decode(rules, match.end())
        except (ValueError, RecursionError):
            continue  # the library says what is wrong
        queue, admits_others = [schema], False
        for value in queue:
            large = type(value) is int and abs(value) > 2**53
            fault = f"llguidance rounds {str(value)[:40]} in a schema of %json to a double of 53 bits"
            refuse(large, OP, fault, "Use Grammar.json_schema, which is exact.")
            if isinstance(value, dict):
                admits_others = admits_others or bool(
                    value.get("properties") and value.get("additionalProperties") is not False
                )
                queue += value.values()
            elif isinstance(value, list):
                queue += value
        if admits_others:
            fault = "in an object of %json that may have other properties, llguidance takes a named one with any value if its name has an escape"
            warnings.warn(sentence(OP, fault, "Set additionalProperties to false."), stacklevel=7)


class PrefixAutomaton:
    """The interface of `_host.TokenAutomaton` for prefixes of one text. A state is a prefix, in the order in which they
    were reached."""

    done = 2**30

    def __init__(self, tokenizer: Any, rules: str, ends: Sequence[int]) -> None:
        self._matcher = library().LLMatcher(tokenizer, rules)
        fault = self._matcher.get_error()
        refuse(bool(fault), OP, f"no text satisfies the grammar: {' '.join(fault.split())[:200]}")
        self._ends, self._vocabulary = list(ends), tokenizer.vocab_size
        self._prefixes: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self._here: tuple[int, ...] = ()

    def _go(self, prefix: tuple[int, ...]) -> bool:
        """Moves to a prefix; False if the grammar has no text that begins with it."""
        shared = 0
        while shared < min(len(prefix), len(self._here)) and prefix[shared] == self._here[shared]:
            shared += 1
        if shared < len(self._here):
            self._matcher.rollback(len(self._here) - shared)
        self._here = prefix[:shared]
        suffix = list(prefix[shared:])
        if self._matcher.validate_tokens(suffix) < len(suffix):  # after an error it could not go on
            return False
        self._matcher.consume_tokens(suffix)
        self._here = prefix
        return True

    def follow(self, state: int, tokens: Sequence[int]) -> int:
        for token in tokens:
            if state < 0 or state == self.done:
                return state
            if token in self._ends:
                return self.done if self.accepting(state) else -1
            prefix = (*self._prefixes[state], token)
            if prefix not in self._numbers:
                if not self._go(prefix):
                    return -1
                self._numbers[prefix] = len(self._prefixes)
                self._prefixes.append(prefix)
            state = self._numbers[prefix]
        return state

    def next(self, state: int, token: int) -> int:
        return self.follow(state, [token])

    def accepting(self, state: int) -> bool:
        return state == self.done or (self._go(self._prefixes[state]) and bool(self._matcher.is_accepting()))

    def distance(self, state: int) -> int:
        """A bound that is always right."""
        return 0

    def mask(self, state: int, budget: int, bits: Any) -> tuple[int, int]:
        """The budget is not followed."""
        if state == self.done or not self._go(self._prefixes[state]):
            return 0, -1
        bits[:] = [0] * len(bits)
        self._matcher.unsafe_compute_mask_ptr(_address(bits), 4 * len(bits))
        mask_words = [word & 0xFFFFFFFF for word in bits]
        if self._matcher.is_accepting():
            for end in self._ends:
                mask_words[end // 32] |= 1 << end % 32
        bits[:] = [word - (word >> 31 << 32) for word in mask_words]
        last = next((n for n in reversed(range(len(mask_words))) if mask_words[n]), None)
        if last is None:
            return 0, -1
        return sum(word.bit_count() for word in mask_words), 32 * last + mask_words[last].bit_length() - 1

    def masks(self, state: int, rows: Sequence[tuple[int, int, Sequence[int]]], bits: Any) -> None:
        """As of `_host.TokenAutomaton`."""
        words = (self._vocabulary + 31) // 32
        for row, budget, tokens in rows:
            here = self.follow(state, tokens)
            if here >= 0:
                self.mask(here, budget, (ctypes.c_int32 * words).from_buffer(bits, 4 * words * row))

    def forced(self, state: int) -> list[int]:
        if state == self.done or not self._go(self._prefixes[state]):
            return []
        return list(self._matcher.compute_ff_bytes())

    def places(self, canvas: Sequence[int], starts: Sequence[int], budget: int) -> list[list[int]]:
        """Nothing is known of masks."""
        return []

    def allowed(self, before: Sequence[int], after: Sequence[int], bits: Any) -> tuple[int, int]:
        return 0, -1

    def best(self, canvas: Sequence[int], starts: Sequence[int], budget: int, scores: Any) -> list[int]:
        return []


def tokenizer_of(tokens: Sequence[bytes], ends: Sequence[int]) -> Any:
    """The library's view of a vocabulary."""
    return library().LLTokenizer(library().TokenizerWrapper(_Vocabulary(tokens, ends[0])))


def _address(bits: Any) -> int:
    return ctypes.addressof(bits)
