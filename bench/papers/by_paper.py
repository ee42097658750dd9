"""The page "Paper by paper": what each paper says, where it is here, what differs and why, and what was not done.

`bench/papers/said/` is its only source. The tests hold every name, test and table there against the code.
"""

from __future__ import annotations

import re

from bench.papers.said import jacobi, nemotron, planned_diffusion, recurrent, slowfast
from bench.papers.said.row import Missing, Row

ROWS: dict[str, tuple[Row, ...]] = {
    "nemotron": nemotron.ROWS,
    "jacobi": jacobi.ROWS,
    "recurrent": recurrent.ROWS,
    "slowfast": slowfast.ROWS,
    "planned-diffusion": planned_diffusion.ROWS,
}
MISSING: dict[str, tuple[Missing, ...]] = {
    "nemotron": nemotron.MISSING,
    "jacobi": jacobi.MISSING,
    "recurrent": recurrent.MISSING,
    "slowfast": slowfast.MISSING,
    "planned-diffusion": planned_diffusion.MISSING,
}


def fill(text: str) -> str:
    """A page with the parts between ``<!-- papers: NAME -->`` and ``<!-- /papers -->`` rebuilt: the rows of a paper, or
    those of all papers that are ``missing``."""

    def table(match: re.Match[str]) -> str:
        if match[2] == "missing":
            lines = ["| paper | what | why not | with it |", "| --- | --- | --- | --- |"]
            lines += [_missing(paper, one) for paper, found in MISSING.items() for one in found]
        else:
            lines = ["| in the paper | what | here | differs | tests |", "| --- | --- | --- | --- | --- |"]
            lines += [_row(match[2], row) for row in ROWS[match[2]]]
        return match[1] + "\n".join(lines) + "\n"

    return re.sub(r"(<!-- papers: (\S+) -->\n).*?(?=<!-- /papers -->)", table, text, flags=re.DOTALL)


def _row(paper: str, row: Row) -> str:
    here = [f"`{name.removeprefix('method ')}`" for name in row.here]
    here += [f"[table {name}]({paper}.md)" for name in row.figures]
    tests = [_test(*name.partition("::")[::2]) for name in row.tests]
    differs = row.differs or ("same, in miniature" if row.figures else "same")
    return f"| {row.place} | {row.what} | {', '.join(here)} | {differs} | {', '.join(tests)} |"


def _test(path: str, test: str) -> str:
    return f"[{test or path.removeprefix('tests/')}](../../{path})"


def _missing(paper: str, one: Missing) -> str:
    command = f"`{one.command}`" if one.command else "-"
    return f"| [{paper}]({paper}.md) | {one.place}: {one.what} | {one.why} | {command} |"
