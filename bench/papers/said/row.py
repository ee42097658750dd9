"""A line of the page "Paper by paper"."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Something that a paper says, and where it is in this project."""

    place: str
    """Equation, section, table or figure of the paper."""
    what: str
    here: tuple[str, ...]
    """Names that can be imported, files, or ``method NAME``."""
    tests: tuple[str, ...]
    """``file::test``, or a file."""
    differs: str = ""
    """How and why; empty: the same as in the paper."""
    figures: tuple[str, ...] = ()
    """Names of the paper's tables in `bench.papers.tables`."""


class Missing(NamedTuple):
    """Something that a paper has and this project has not."""

    place: str
    what: str
    why: str
    command: str
    """What a person with the weights or the GPU runs; empty: nothing in this project does it."""
