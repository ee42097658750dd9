"""Regular expressions from untrusted files, matched in bounded time.

`re` takes exponential time for some patterns, so it never sees a pattern from a file. Here all paths through a pattern
advance together, character by character (Thompson, "Regular Expression Search Algorithm"), and every step is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

_STATES, _DEPTH, _LENGTH = 2000, 30, 4000
_CLASSES = frozenset("dDwWsS")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_REPEAT = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")

Test = Callable[[str], bool]
Found = tuple[str, Any, int]
"""Kind, argument and next state."""


class UnsupportedPattern(ValueError):
    """A pattern with an unsupported construct."""


class InvalidPattern(UnsupportedPattern):
    """A pattern that `re` would also refuse."""


class Budget:
    """The number of steps that all patterns of a file may take together."""

    def __init__(self, steps: int = 2_000_000) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise UnsupportedPattern("patterns that take too many steps")


class Pattern:
    r"""Characters, ``.``, classes, groups, ``|``, repetition, anchors, ``\b`` and lookahead, with their meaning in
    `re`.

    >>> Pattern(r"(.*\.)?(layers\.[0-3]\.\w+)$", Budget()).matches("model.layers.2.mlp")
    True
    >>> Pattern("(|)" * 20 + "x", Budget()).matches("y")
    False
    """

    def __init__(self, text: str, budget: Budget) -> None:
        self._budget, self._text, self._at = budget, text, 0
        if len(text) > _LENGTH:
            raise UnsupportedPattern(f"a pattern of {len(text)} characters")
        self._states: list[Found] = []
        end = self._add("end", None, -1)
        self._start = self._alternatives(0)(end)
        if self._at < len(text):
            self._invalid("unbalanced parenthesis")

    def matches(self, text: str, to_end: bool = False) -> bool:
        """Whether the pattern matches at the beginning of `text`, up to its end if `to_end`."""
        return self._run(self._start, text, 0, to_end)

    # ---- matching

    def _run(self, start: int, text: str, at: int, to_end: bool = False) -> bool:
        waiting = {start}
        for position in range(at, len(text) + 1):
            reached, ended = self._reach(waiting, text, position)
            if ended and (not to_end or position == len(text)):
                return True
            if position == len(text) or not reached:
                return False
            letter = text[position]
            waiting = {following for test, following in reached if test(letter)}
        return False

    def _reach(self, states: set[int], text: str, position: int) -> tuple[list[tuple[Test, int]], bool]:
        """The tests of the next character that these states lead to, and whether one of them ends the pattern."""
        open_, seen, ended = list(states), set(states), False
        tests: list[tuple[Test, int]] = []
        while open_:
            self._budget.spend(1)
            kind, argument, following = self._states[open_.pop()]
            ways: tuple[int, ...] = ()
            if kind == "end":
                ended = True
            elif kind == "test":
                tests.append((argument, following))
            elif kind == "split":
                ways = argument
            elif self._holds(kind, argument, text, position):
                ways = (following,)
            for way in ways:
                if way not in seen:
                    seen.add(way)
                    open_.append(way)
        return tests, ended

    def _holds(self, kind: str, argument: Any, text: str, position: int) -> bool:
        if kind == "start":
            return position == 0
        if kind == "stop":
            return position == len(text) or (argument is None and text[position:] == "\n")
        if kind == "edge":
            sides = (text[position - 1 : position] if position else "", text[position : position + 1])
            before, after = (_word(side) for side in sides)
            return (before != after) is argument
        start, expected = argument
        return self._run(start, text, position) is expected

    # ---- building: every part is a function from the state that follows it to its own first state

    def _add(self, kind: str, argument: object, following: int) -> int:
        if len(self._states) >= _STATES:
            raise UnsupportedPattern("a pattern with too many parts")
        self._states.append((kind, argument, following))
        return len(self._states) - 1

    def _alternatives(self, depth: int) -> Callable[[int], int]:
        if depth > _DEPTH:
            raise UnsupportedPattern("a pattern with too many groups inside each other")
        choices = [self._sequence(depth)]
        while self._take("|"):
            choices.append(self._sequence(depth))
        if len(choices) == 1:
            return choices[0]
        return lambda following: self._add("split", tuple(choice(following) for choice in choices), -1)

    def _sequence(self, depth: int) -> Callable[[int], int]:
        items: list[Callable[[int], int]] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            first = self._at
            item = self._item(depth)
            anchor = self._text[first : self._at] in ("^", "$", r"\b", r"\B", r"\A", r"\Z")
            items.append(self._repeated(item, anchor))

        def build(following: int) -> int:
            for item in reversed(items):
                following = item(following)
            return following

        return build

    def _item(self, depth: int) -> Callable[[int], int]:
        letter = self._next()
        if letter == "(":
            return self._group(depth)
        if letter == "[":
            return self._class()
        if letter == "\\":
            return self._escape()
        if letter == ".":
            return partial(self._add, "test", lambda other: other != "\n")
        if letter in "^$":
            return partial(self._add, "start" if letter == "^" else "stop", None)
        if letter in "*+?":
            self._invalid("nothing to repeat")
        return partial(self._add, "test", letter.__eq__)

    def _group(self, depth: int) -> Callable[[int], int]:
        expected: bool | None = None
        if self._take("?"):
            kind = self._next()
            if kind not in ":=!":
                raise UnsupportedPattern(f"a group (?{kind}")
            expected = {"=": True, "!": False}.get(kind)
        body = self._alternatives(depth + 1)
        if not self._take(")"):
            self._invalid("missing )")
        if expected is None:
            return body
        start = body(self._add("end", None, -1))
        return partial(self._add, "ahead", (start, expected))

    def _class(self) -> Callable[[int], int]:
        first = self._at - 1
        self._take("^")
        self._take("]")
        while (letter := self._next()) != "]":
            if letter == "\\":
                self._next()
        class_text = self._text[first : self._at]
        if "[" in class_text[1:] or any(pair in class_text for pair in ("--", "&&", "~~", "||")):
            raise UnsupportedPattern(f"a class {class_text[:40]}")
        # A class matches a single character, so `re` takes bounded time.
        return self._single(class_text)

    def _escape(self) -> Callable[[int], int]:
        letter = self._next()
        if letter in _CLASSES:
            return self._single("\\" + letter)
        if letter in "bB":
            return partial(self._add, "edge", letter == "b")
        if letter == "A":
            return partial(self._add, "start", None)
        if letter == "Z":
            return partial(self._add, "stop", "the very end")
        if letter.isalnum() and letter not in _CONTROLS:
            raise UnsupportedPattern(f"a reference \\{letter}")
        return partial(self._add, "test", _CONTROLS.get(letter, letter).__eq__)

    def _single(self, class_text: str) -> Callable[[int], int]:
        try:
            compiled = re.compile(class_text)
        except (re.error, RecursionError, OverflowError) as error:
            self._invalid(str(error))
        return partial(self._add, "test", lambda letter: compiled.fullmatch(letter) is not None)

    def _repeated(self, item: Callable[[int], int], anchor: bool) -> Callable[[int], int]:
        bounds = self._bounds()
        if bounds is None:
            return item
        if anchor:
            self._invalid("nothing to repeat")
        minimum, maximum = bounds
        self._take("?")  # lazy: the same texts match
        if self._text[self._at : self._at + 1] in ("*", "+", "?") or _REPEAT.match(self._text, self._at):
            raise UnsupportedPattern("a repetition that is repeated")

        def build(following: int) -> int:
            if maximum is None:
                loop = self._add("split", (), -1)
                self._states[loop] = ("split", (item(loop), following), -1)
                following = loop
            else:
                end = following
                for _ in range(maximum - minimum):
                    self._budget.spend(1)
                    following = self._add("split", (item(following), end), -1)
            for _ in range(minimum):
                self._budget.spend(1)
                following = item(following)
            return following

        return build

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        match = _REPEAT.match(self._text, self._at)
        if match is None or match.group() == "{}":
            return None
        self._at = match.end()
        low, comma, high = match.groups()
        minimum = int(low or 0)
        maximum = None if comma and not high else int(high) if high else minimum
        if maximum is not None and maximum < minimum:
            self._invalid("min repeat greater than max repeat")
        return minimum, maximum

    # ---- reading

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._invalid("unexpected end of pattern")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, sign: str) -> bool:
        present = self._text.startswith(sign, self._at)
        self._at += len(sign) if present else 0
        return present

    def _invalid(self, why: str) -> NoReturn:
        raise InvalidPattern(f"{why} at position {self._at}")


def _word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


class NamePatterns:
    """PEFT's table from patterns of module names to values: the first match wins.

    >>> table = NamePatterns({"q_proj": 1, r"layers.[01].*": 2})
    >>> table.get("model.layers.0.self_attn.q_proj"), table.get("model.layers.0.mlp"), table.get("lm_head")
    (1, 2, None)
    """

    def __init__(self, values: Mapping[str, object], budget: Budget | None = None) -> None:
        self._values = values
        self._budget = budget or Budget()
        # Most patterns are plain names, sometimes thousands of them, which are compared as strings.
        self._plain = {key: re.fullmatch(r"[\w.-]+", key) is not None for key in values}
        self._patterns = {key: self._around(key) for key, is_plain in self._plain.items() if not is_plain}

    def _around(self, key: str) -> Pattern:
        try:
            return Pattern(rf"(.*\.)?({key})$", self._budget)
        except UnsupportedPattern as error:
            raise type(error)(f"{key[:60]!a}: {error}") from None

    def get(self, module: str) -> object:
        """The value of the first pattern that matches, None without one."""
        key = self.key(module)
        return None if key is None else self._values[key]

    def key(self, module: str) -> str | None:
        """The first pattern that matches."""
        starts = [0, *(at + 1 for at, letter in enumerate(module) if letter == ".")]
        ends = {len(module) - start: module[start:] for start in starts}
        for key, is_plain in self._plain.items():
            self._budget.spend(1)
            if not is_plain:
                matched = self._patterns[key].matches(module)
            else:
                end = ends.get(len(key))
                matched = end is not None and all(a in (b, ".") for a, b in zip(key, end))
            if matched:
                return key
        return None
