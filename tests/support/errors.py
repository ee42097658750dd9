"""Tables of refused calls name the kind of an error in its sentence: "TypeError: q must be ..."; a ValueError needs no name."""

from __future__ import annotations

import builtins
from typing import Any

import pytest


def kind_of(sentence: str) -> tuple[type[Exception], str]:
    """The kind of the error and its text."""
    name, _, text = sentence.rpartition("Error: ")
    return (getattr(builtins, f"{name}Error") if name else ValueError), text


def refused(sentence: str) -> Any:
    """As `pytest.raises`, for a regular expression after the kind."""
    kind, text = kind_of(sentence)
    return pytest.raises(kind, match=text)


OF_AN_OP = (ValueError, RuntimeError)
"""What an op raises that is called by itself: torch 2.15 makes no ValueError of std::invalid_argument."""
