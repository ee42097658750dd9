"""Bounds on the work that a tokenizer.json causes in the library `tokenizers`, checked before the library reads the
file.

The library follows a file without limits: a few replacements in a row multiply text until memory runs out, and nested
repetitions in a pattern take time that grows exponentially. Published files stay far below these bounds.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

from pdkernels._validation import check, message
from pdkernels.models.files.fields import OP, shown

_GROWTH = 32.0  # characters that one character may become, by all replacements of a chain
_PARTS = 64  # normalizers, splits, decoders; pieces of a template
_ADDED = 1 << 17
_LETTERS = 4096  # characters of an added token, pattern or replacement
_SHORT = 256  # characters that are added before or after each part of a text
_REPEATS = 1000  # product of nested counted repetitions
_UNBOUNDED = 4  # unbounded repetitions in one alternative
_DEEP = 16


def check_bounds(values: Any, name: str) -> None:
    """Raises ValueError for a parsed tokenizer.json that exceeds the bounds, which published files stay far below."""
    check(isinstance(values, dict), OP, name, "hold an object", shown(values))
    for section in ("normalizer", "pre_tokenizer", "decoder"):
        growth = 1.0
        steps = list(_steps(values.get(section), f"{name}: {section}"))
        check(len(steps) <= _PARTS, OP, f"{name}: {section}", f"have at most {_PARTS} parts", len(steps))
        for step in steps:
            growth *= _growth(step, f"{name}: {section}")
        check(
            growth <= _GROWTH,
            OP,
            f"{name}: {section}",
            f"make at most {_GROWTH:.0f} characters of one",
            f"{growth:.0f}",
        )
    for step in _steps(values.get("post_processor"), f"{name}: post_processor"):
        _check_template(step, f"{name}: post_processor")
    _check_added(values.get("added_tokens"), f"{name}: added_tokens")
    _check_model(values.get("model"), f"{name}: model")


def _steps(step: Any, label: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The parts of a sequence, and of sequences in it."""
    check(depth <= _DEEP, OP, label, f"have sequences at most {_DEEP} deep", "more")
    if not isinstance(step, dict):
        return  # for the library to refuse
    lists = [
        value
        for name in ("normalizers", "pretokenizers", "decoders", "processors")
        if isinstance(value := step.get(name), list)
    ]
    if not lists:
        yield step
    for values in lists:
        check(len(values) <= _PARTS, OP, label, f"have at most {_PARTS} parts", len(values))
        for value in values:
            yield from _steps(value, label, depth + 1)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list)) else 0


def _growth(step: dict[str, Any], label: str) -> float:
    """The maximum number of characters that a step makes of one."""
    for name in ("content", "replacement", "prepend", "prefix", "suffix"):
        value = step.get(name)
        short = not isinstance(value, str) or len(value) <= _SHORT
        check(short, OP, f"{label}: {name}", f"have at most {_SHORT} characters", _size(value))
    _check_map(step.get("precompiled_charsmap"), f"{label}: precompiled_charsmap")
    pattern, content = step.get("pattern"), step.get("content")
    literal = pattern.get("String") if isinstance(pattern, dict) else pattern
    if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        check_pattern(pattern["Regex"], f"{label}: pattern")
    if isinstance(literal, str):
        check(len(literal) <= _LETTERS, OP, f"{label}: pattern", f"have at most {_LETTERS} characters", len(literal))
    if pattern is None or not isinstance(content, str):
        return 1.0
    # A pattern may match the empty string between any two characters, which are kept.
    return max(1.0, len(content) / len(literal) if isinstance(literal, str) and literal else len(content) + 1.0)


def _check_template(step: dict[str, Any], label: str) -> None:
    for name in ("single", "pair"):
        pieces = step.get(name)
        short = not isinstance(pieces, list) or len(pieces) <= _PARTS
        check(short, OP, f"{label}: {name}", f"have at most {_PARTS} pieces", _size(pieces))
    special = step.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else []:
        ids = token.get("ids") if isinstance(token, dict) else None
        short = not isinstance(ids, list) or len(ids) <= _PARTS
        check(short, OP, f"{label}: special_tokens", f"have at most {_PARTS} ids each", _size(ids))


def _check_added(tokens: Any, label: str) -> None:
    if not isinstance(tokens, list):
        return
    check(len(tokens) <= _ADDED, OP, label, f"be at most {_ADDED}", len(tokens))
    for token in tokens:
        content = token.get("content") if isinstance(token, dict) else None
        short = not isinstance(content, str) or len(content) <= _LETTERS
        check(short, OP, label, f"have at most {_LETTERS} characters each", _size(content))


def _check_model(model: Any, label: str) -> None:
    if not isinstance(model, dict):
        return
    if model.get("dropout"):
        fault = message(
            OP, f"{label}: dropout", "be 0, or a text would have other ids each time", shown(model["dropout"])
        )
        raise NotImplementedError(fault)
    for name, value in model.items():
        short = not isinstance(value, str) or len(value) <= _SHORT
        check(short, OP, f"{label}: {name}", f"have at most {_SHORT} characters", "more")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):
        vocabulary = [
            entry[0] for entry in vocabulary if isinstance(entry, list) and entry and isinstance(entry[0], str)
        ]
    if isinstance(vocabulary, (dict, list)):
        longest = max(map(len, vocabulary), default=0)
        check(longest <= _LETTERS, OP, f"{label}: vocab", f"have tokens of at most {_LETTERS} characters", longest)


def _check_map(encoded: Any, label: str) -> None:
    """The table of a Precompiled normalizer: the size of its trie, the trie, and texts with a zero byte after each."""
    if not isinstance(encoded, str):
        return
    try:
        table = base64.b64decode(encoded)
    except ValueError:
        return  # for the library to refuse
    longest = max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
    check(longest <= _SHORT, OP, label, f"make at most {_SHORT} bytes of a character", longest)


# ------------------------------------------------------------------------------------------------------ patterns

_TOKEN = re.compile(
    r"\\[pP]\{[^}]{0,64}\}|\\x\{[^}]{0,16}\}|\\.|\[|\]|\(\?[imxa-]*:|\(\?<?[=!]|\(\?>|\(\?[imxa-]*\)|\(\?|\(|\)|\||[*+?][+?]?|\{\d{0,9}(?:,\d{0,9})?\}\??|.",
    re.DOTALL,
)


def check_pattern(pattern: str, label: str) -> None:
    """Raises ValueError for an Oniguruma pattern with nested repetitions, whose search could take exponential time."""
    check(len(pattern) <= _LETTERS, OP, label, f"have at most {_LETTERS} characters", len(pattern))
    # For each open group: whether its length varies, the unbounded repetitions of this alternative, and its largest
    # count.
    open_groups: list[list[int]] = [[0, 0, 1]]
    last: list[int] | None = None  # of the item just read
    square = 0
    for match in _TOKEN.finditer(pattern):
        text = match.group()
        if square:
            square += (text == "[") - (text == "]")
            last = [0, 0, 1]
        elif text == "[":
            square, last = 1, [0, 0, 1]
        elif text.startswith("("):
            _refuse_if(
                text == "(?" or pattern.startswith("(*", match.start()), label, "no calls or conditions", pattern
            )
            if not text.endswith(")"):
                open_groups.append([0, 0, 1])
                _refuse_if(len(open_groups) > _DEEP, label, f"groups at most {_DEEP} deep", pattern)
        elif text == ")" and len(open_groups) > 1:
            last = open_groups.pop()
            open_groups[-1][1] += last[1]
            _refuse_if(
                open_groups[-1][1] > _UNBOUNDED, label, f"at most {_UNBOUNDED} unbounded repetitions in a row", pattern
            )
        elif text == "|":
            open_groups[-1][0], open_groups[-1][1] = 1, 0
        elif (text[0] in "*+?" or re.fullmatch(r"\{(\d+,?\d*|,\d+)\}\??", text)) and last is not None:
            minimum, maximum = _range(text)
            varies = minimum != maximum
            nested = last[0] and maximum > 1
            _refuse_if(bool(nested), label, "no repetitions of what varies", pattern)
            group = open_groups[-1]
            count = last[2] * (1 if maximum > 10**6 else maximum)
            group[2] = max(group[2], count)
            _refuse_if(count > _REPEATS, label, f"at most {_REPEATS} counted repetitions", pattern)
            if varies:
                group[0] = 1
            if maximum > 10**6:
                group[1] += 1
            _refuse_if(group[1] > _UNBOUNDED, label, f"at most {_UNBOUNDED} unbounded repetitions in a row", pattern)
            last = [int(varies), 0, count]
        else:
            _refuse_if(bool(re.fullmatch(r"\\[1-9kgKR]", text)), label, "no references or calls", pattern)
            last = [0, 0, 1]


def _range(text: str) -> tuple[int, int]:
    if text[0] != "{":
        return (1 if text[0] == "+" else 0), (1 if text[0] == "?" else 10**9)
    minimum, _, maximum = text.rstrip("?")[1:-1].partition(",")
    first = int(minimum or 0)
    return first, first if "," not in text else int(maximum) if maximum else 10**9


def _refuse_if(condition: bool, label: str, expectation: str, pattern: str) -> None:
    check(not condition, OP, label, f"have {expectation}", shown(pattern))
