"""Grammars in Lark's EBNF, as expressions of `language`: recursion is unfolded down to a depth, or becomes calls."""

from __future__ import annotations

import ast
import re
from typing import Any, NoReturn

from pdkernels._validation import check_text, check_type, did_you_mean, fail, refuse, sentence
from pdkernels.grammar.budget import spend
from pdkernels.grammar.calls import call
from pdkernels.grammar.language import (
    MAX_STATES,
    NOTHING,
    OP,
    Alt,
    Chars,
    Expression,
    Repeat,
    Seq,
    complement,
    is_nothing,
    optional,
    text,
)
from pdkernels.grammar.recursion import cycles
from pdkernels.grammar.regex import MAX_LENGTH, parsed

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"i?)|(?P<pattern>/(?:[^/\\\n]|\\.)+/[a-z]*)"""
    r"""|(?P<rule>[?!]*[a-zA-Z_]\w*(?:\.-?\d+)?\s*:(?!:))|(?P<name>[a-zA-Z_]\w*)|(?P<range>\.\.)|(?P<number>\d+)|(?P<alias>->\s*\w+)"""
    r"""|(?P<sign>[()\[\]|?*+~])|(?P<directive>%\w+)"""
)
Piece = tuple[str, str]


def parsed_ebnf(rules: str, start: str, depth: int | None) -> tuple[list[Expression], list[str]]:
    """The texts of rule `start`, and without a depth the recursive rules that it calls; what errors call them.

    Raises:
        ValueError: not a grammar.
        NotImplementedError: a directive, a flag of a pattern, templates.
    """
    check_text(OP, rules, "rules")
    check_type(isinstance(start, str), OP, "start", "be a str", type(start).__name__)
    refuse(len(rules) > MAX_LENGTH, OP, f"the grammar has more than {MAX_LENGTH} characters")
    definitions = _rules(pieces(rules))
    if start not in definitions:
        remedy = f"{did_you_mean(start, definitions)}It has {', '.join(definitions) or 'no rules'}."
        fail(OP, "start", "name a rule of the grammar", repr(start), remedy)
    try:
        unfolder = _Unfolder(definitions, depth)
        unfolder.rules[0] = unfolder.rule(start)
    except RecursionError:
        raise ValueError(sentence(OP, "the grammar has too many levels", "Lower the depth.")) from None
    return unfolder.rules, ["the grammar", *(f"rule {name!r}" for name in unfolder.numbers)]


def pieces(rules: str, directives: bool = False) -> list[Piece]:
    """The words of a grammar; with `directives`, also those of Lark that are not followed here, and what is not
    known."""
    lexemes, at = [], 0
    while at < len(rules):
        match = _TOKEN.match(rules, at)
        if match is None and directives:
            at += 1
            continue
        if match is None:
            fail(OP, "rules", "be a grammar in Lark's EBNF", repr(rules[at : at + 20]))
        kind, at = str(match.lastgroup), match.end()
        if kind == "directive" and not directives:
            fault = f"the directive {match[0]} of a grammar is not supported"
            raise NotImplementedError(sentence(OP, fault, "Write white space where it may be."))
        if kind not in ("space", "alias"):
            lexemes.append((kind, match[0]))
    return lexemes


def _rules(pieces: list[Piece]) -> dict[str, list[Piece]]:
    definitions: dict[str, list[Piece]] = {}
    name = None
    for kind, lexeme in pieces:
        if kind == "rule":
            name = re.sub(r"[?!\s:]|\..*", "", lexeme)
            if name in definitions:
                fail(OP, "rules", "define each rule once", repr(name))
            definitions[name] = []
        elif name is None:
            fail(OP, "rules", "begin with a rule", repr(lexeme))
        else:
            definitions[name].append((kind, lexeme))
    return definitions


class _Unfolder:
    def __init__(self, rules: dict[str, list[Piece]], depth: int | None) -> None:
        self._rules, self._depth = rules, depth
        self.rules: list[Expression] = [NOTHING]
        self.numbers: dict[str, int] = {}
        """Of the rules that are called."""
        self._open: dict[str, int] = {}
        self._parts = 0
        self._trees = {name: _Reader(pieces, name).whole() for name, pieces in rules.items()}
        self._cycles = cycles(
            {
                name: [lexeme for kind, lexeme in pieces if kind == "name" and lexeme in rules]
                for name, pieces in rules.items()
            }
        )
        self._made: dict[tuple[str, tuple[int, ...]], Expression] = {}

    def rule(self, name: str) -> Expression:
        if name not in self._rules:
            fail(OP, "rules", "define what they name", repr(name), did_you_mean(name, self._rules))
        if self._depth is None and self._cycles[name]:
            if name not in self.numbers:
                self.numbers[name] = len(self.rules)
                self.rules.append(NOTHING)
                self.rules[self.numbers[name]] = self.unfolded(self._trees[name])
            return call(self.numbers[name])
        level = self._open.get(name, 0)
        if self._depth is not None and level > self._depth:
            return NOTHING
        key = name, tuple(self._open.get(member, 0) for member in self._cycles[name])
        if key not in self._made:
            self._open[name] = level + 1
            self._made[key] = self.unfolded(self._trees[name])
            self._open[name] = level
        return self._made[key]

    def unfolded(self, tree: Any) -> Expression:
        self._parts += 1
        spend()
        refuse(self._parts > MAX_STATES, OP, f"the grammar unfolds to more than {MAX_STATES} parts", "Lower the depth.")
        if isinstance(tree, str):
            return self.rule(tree)
        if isinstance(tree, Chars):
            return tree
        if isinstance(tree, Repeat):
            return tree._replace(item=self.unfolded(tree.item))
        items = tuple(self.unfolded(item) for item in tree.items)
        if isinstance(tree, Seq):
            return NOTHING if any(map(is_nothing, items)) else Seq(items)
        return Alt(tuple(item for item in items if not is_nothing(item)))


class _Reader:
    """The tree of one rule: an expression in which names are strings."""

    def __init__(self, pieces: list[Piece], rule: str) -> None:
        self._pieces, self._rule, self._at = pieces, rule, 0

    def whole(self) -> Any:
        try:
            tree = self._either()
        except RecursionError:
            self._fail("fewer groups inside each other")
        if self._at < len(self._pieces):
            self._fail(repr(self._pieces[self._at][1]))
        return tree

    def _fail(self, actual: str) -> NoReturn:
        fail(OP, f"rule {self._rule!r}", "be an expansion in Lark's EBNF", actual)

    def _next(self, *signs: str) -> bool:
        """Whether the next piece is one of these, which it steps over."""
        there = self._at < len(self._pieces) and self._pieces[self._at][1] in signs
        there = there and self._pieces[self._at][0] in ("sign", "range")
        self._at += there
        return there

    def _either(self) -> Any:
        branches = [self._sequence()]
        while self._next("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Alt(tuple(branches))

    def _sequence(self) -> Any:
        items = []
        while self._at < len(self._pieces) and self._pieces[self._at][1] not in ("|", ")", "]"):
            items.append(self._repeated())
        return Seq(tuple(items))

    def _repeated(self) -> Any:
        item = self._atom()
        while True:
            if self._next("?"):
                item = optional(item)
            elif self._next("*"):
                item = Repeat(item, 0, None)
            elif self._next("+"):
                item = Repeat(item, 1, None)
            elif self._next("~"):
                minimum = self._number()
                item = Repeat(item, minimum, self._number() if self._next("..") else minimum)
            else:
                return item

    def _number(self) -> int:
        kind, digits = self._pieces[self._at] if self._at < len(self._pieces) else ("", "the end")
        if kind != "number" or len(digits) > 9:
            self._fail(digits)
        self._at += 1
        return int(digits)

    def _atom(self) -> Any:
        kind, lexeme = self._pieces[self._at]
        self._at += 1
        if kind == "name":
            return lexeme
        if kind == "string":
            if lexeme.endswith("i"):
                fault = f"the string {lexeme} of a grammar is not supported: it ignores case"
                raise NotImplementedError(sentence(OP, fault))
            first = text(_unquoted(lexeme, self._rule))
            if not self._next(".."):
                return first
            kind, last = self._pieces[self._at] if self._at < len(self._pieces) else ("", "")
            ends = _unquoted(lexeme, self._rule), _unquoted(last, self._rule) if kind == "string" else ""
            if any(len(end) != 1 for end in ends) or ends[0] > ends[1]:
                self._fail(f"{lexeme}..{last}")
            self._at += 1
            check_text(OP, "".join(ends), f"rule {self._rule!r}")
            return Chars(complement(complement(((ord(ends[0]), ord(ends[1])),))))
        if kind == "pattern":
            end = lexeme.rindex("/")
            if lexeme[end + 1 :]:
                fault = f"the flags {lexeme[end + 1 :]!r} of a pattern are not supported"
                raise NotImplementedError(sentence(OP, fault))
            return parsed(lexeme[1:end].replace("\\/", "/"))
        if lexeme == "(" or lexeme == "[":
            group = self._either()
            if not self._next(")" if lexeme == "(" else "]"):
                self._fail(f"no end of {lexeme!r}")
            return group if lexeme == "(" else optional(group)
        self._fail(repr(lexeme))


def _unquoted(literal: str, rule: str) -> str:
    try:
        return str(ast.literal_eval(literal))
    except (ValueError, SyntaxError):
        fail(OP, f"rule {rule!r}", "hold strings with valid escapes", literal)
