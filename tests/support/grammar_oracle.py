"""Whether a text belongs to one of the grammars of `grammars`, by `jsonschema` and Python's `re`."""

from __future__ import annotations

import json
import re

import jsonschema

from tests.support.grammars import CHOICES, PATTERNS, RULES, SCHEMAS


def fault(name: str, text: str) -> str:
    """Why `text` is none of the grammar's; empty if it is one."""
    kind, _, key = name.partition(" ")
    if kind == "schema":
        try:
            value = json.loads(text)
            jsonschema.validate(value, SCHEMAS[key], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        except (ValueError, jsonschema.ValidationError) as error:
            return str(error)[:300]
        return ""
    if kind == "choice":
        return "" if text in CHOICES[int(key)] else "another text"
    pattern = PATTERNS[key] if kind == "pattern" else RULES[key][1]
    balanced = key not in ("sum", "brackets") or all(text.count(a) == text.count(b) for a, b in ("()", "[]"))
    return "" if re.fullmatch(pattern, text) and balanced else "no match"
