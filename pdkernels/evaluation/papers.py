"""Tables of the papers in miniature: what each shows, how ours is measured, and its rows as plain values and as Markdown.

`python -m pdkernels reproduce` runs them. A result is a dict of JSON values with `rows`, a list of dicts with the same keys, and the
facts that they depend on, so that pages are built only from committed files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdkernels import decoding, models
from pdkernels._validation import check
from pdkernels.evaluation import theory
from pdkernels.evaluation.planned import interval
from pdkernels.evaluation.row_times import measure_row_times
from pdkernels.evaluation.speed_of_light import speed_of_light
from pdkernels.evaluation.sweep import parse_sweep, sweep, sweep_candidates
from pdkernels.evaluation.tasks import make_task

_OP = "evaluation.papers"
Progress = Callable[[str, float], None]


class Figure(NamedTuple):
    """A table or figure of a paper."""

    paper: str
    name: str
    source: str
    """Its number in the paper."""
    shows: str
    """What the paper shows with it, in a sentence."""
    run: Callable[[int, Progress], dict[str, Any]]
    """Takes the number of problems and a progress callback."""
    problems: int = 100
    """By default."""

    @property
    def command(self) -> str:
        return f"python -m pdkernels reproduce {self.paper} {self.name}"


PAPERS = {
    "jacobi": "Jacobi Forcing",
    "recurrent": "Efficient parallel samplers for recurrent-depth models",
    "nemotron": "Nemotron-Labs-Diffusion",
    "slowfast": "SlowFast Sampling",
}


# ---- Nemotron-Labs-Diffusion


def _limits(problems: int, progress: Progress) -> dict[str, Any]:
    """Masks per forward by block size, in the oracle's schemes and in methods that do not know the text."""
    model: Any = models.load("tiny-trimode")
    task = make_task("sums", problems)
    schemes, rows = ("greedy", "first_all", "exhaustive", "binary"), []
    for number, size in enumerate((4, 8, 16)):
        progress(f"blocks of {size}", number / 3)
        limits = speed_of_light(model, task.prompts, size, schemes=schemes, max_new_tokens=task.limit)
        serial = [
            model.tokenizer.decode([token for token in text if token not in model.end_tokens]) for text in limits.texts
        ]
        target = sum(problem.is_solved_by(text) for problem, text in zip(task.problems or (), serial))
        for scheme in schemes:
            exact = limits.exact(scheme)
            rows.append(
                {
                    "block size": size,
                    "": f"oracle, {scheme}",
                    "masks a forward": round(limits.acceptance(scheme), 2),
                    "tokens a forward": round(limits.tokens_per_forward(scheme), 2),
                    "exact blocks": f"{exact:.1%}",
                    "simulated forwards a block": round(limits.simulated(scheme), 1),
                    "right": target if exact == 1 else None,
                }
            )
        options: dict[str, Any] = {"max_new_tokens": task.limit, "block_size": size}
        others = {
            "block_diffusion": ("threshold 0.9", {"threshold": 0.9}),
            "linear_self_speculation": ("linear self-speculation", {}),
        }
        for method, (name, settings) in others.items():
            result = decoding.generate(model, task.prompts, decoding.find(method), **options, **settings)
            rows.append(
                {
                    "block size": size,
                    "": name,
                    "masks a forward": None,
                    "tokens a forward": round(result.stats.tokens_per_forward, 2),
                    "exact blocks": None,
                    "simulated forwards a block": None,
                    "right": sum(
                        problem.is_solved_by(text) for problem, text in zip(task.problems or (), result.text or ())
                    ),
                }
            )
    return {"model": "tiny-trimode", "task": "sums", "problems": problems, "rows": rows}


# ---- recurrent depth


def _prefill(problems: int, progress: Progress) -> dict[str, Any]:
    rows = []
    for length in (1, 64, 512, 4096):
        cost = theory.prefill_cost(length, 4, 1024)
        depth, shared, unshared = cost.flops
        advantage = float(theory.width_advantage(length, 4, 206))
        rows.append(
            {
                "prompt": length,
                "FLOPs of depth": float(depth),
                "shared K/V over depth": round(shared / depth, 6),
                "all copies over depth": round(unshared / depth, 4),
                "time of depth over width": round(advantage, 3),
            }
        )
    return {"hidden": 1024, "factor": 4, "knee": 206, "rows": rows}


def _decode(problems: int, progress: Progress) -> dict[str, Any]:
    rows = []
    for inner in (1, 2, 4, 8, 32):
        budget = theory.decode_budget(320, 32, inner)
        rows.append(
            {
                "inner recurrences": inner,
                "wavefront": budget.wave,
                "tokens, autoregressive": budget.tokens[0],
                "tokens, sampler": budget.tokens[1],
                "limit of the ratio": float(budget.limit),
                "products a token, over autoregressive": round(float(budget.products), 3),
            }
        )
    return {"recurrences": 32, "applications": 320, "rows": rows}


def _static(problems: int, progress: Progress) -> dict[str, Any]:
    return _swept("tiny-recurrent", "recurrent", ["recurrent_static.recurrences=1,2,4,8,16,32"], problems, progress)


def _grid(problems: int, progress: Progress) -> dict[str, Any]:
    swept = ["recurrent_diffusion.inner_recurrence=1,2,4", "recurrent_diffusion.noise=0.0,0.2"]
    return _swept("tiny-recurrent", "recurrent", swept, problems, progress)


# ---- SlowFast, Jacobi Forcing

_KNOBS = {
    "tau_min": "0.02,0.05,0.1,0.2,0.3,0.5",
    "tau_high": "0.6,0.7,0.8,0.85,0.9,0.95,0.99",
    "max_exploration": "1,2,4,6,8,12",
    "window": "1,2,3,4,6",
    "variance": "0.25,1.0,4.0,16.0",
}


def _knob(option: str) -> Callable[[int, Progress], dict[str, Any]]:
    def run(problems: int, progress: Progress) -> dict[str, Any]:
        return _swept("tiny-masked", "masked", [f"slowfast.{option}={_KNOBS[option]}"], problems, progress)

    return run


def _swept(name: str, family: str, swept: Sequence[str], problems: int, progress: Progress) -> dict[str, Any]:
    """Right answers and forwards of a sweep. Seconds depend on the machine and moment, and are left to the sweep command."""
    from pdkernels.evaluation.comparison import FAMILIES

    loaded, task = {name: models.load(name)}, make_task("sums", problems, canvas=FAMILIES[family].canvas)
    found = sweep(
        loaded, sweep_candidates(loaded, [parse_sweep(text) for text in swept]), task, batch_size=8, progress=progress
    )
    rows = [
        {
            "": row.label,
            "right": row.right,
            "forwards a prompt": round(row.forwards / row.problems, 2),
            "tokens a forward": round(row.tokens / row.forwards, 3),
        }
        for row in found
    ]
    return {"model": name, "task": "sums", "problems": problems, "rows": rows}


def _knee(problems: int, progress: Progress) -> dict[str, Any]:
    from pdkernels.evaluation.machine import processor

    times = measure_row_times(models.load("tiny-jacobi"))
    rows = [
        {"rows": count, "milliseconds": round(1e3 * seconds, 3), "over one row": round(seconds / times.seconds[0], 2)}
        for count, seconds in zip(times.rows, times.seconds)
    ]
    found = times.as_json()
    return {
        "model": "tiny-jacobi",
        "device": processor(),
        "knee": found["knee"],
        "budget": found["budget"],
        "rows": rows,
    }


FIGURES = (
    Figure(
        "nemotron",
        "limits",
        "Table 4",
        "With an oracle, block diffusion fills 2.9 to 7.6 masks a forward in blocks of 4 to 32, about 1.37 times as many for each "
        "doubling of the block; a threshold fills about 3.",
        _limits,
        24,
    ),
    Figure(
        "recurrent",
        "prefill",
        "Theorem 4.2",
        "A prefill by depth costs no more FLOPs than one by width; width takes less time for short prompts.",
        _prefill,
    ),
    Figure(
        "recurrent",
        "decoding",
        "Theorem 4.4",
        "In the same number of block applications the sampler finishes up to r / r' times the tokens.",
        _decode,
    ),
    Figure(
        "recurrent",
        "static",
        "Table 1",
        "Accuracy grows with the number of recurrences, from 1.6 % at 4 to 41.8 % at 32.",
        _static,
    ),
    Figure(
        "recurrent",
        "grid",
        "Figures 5 and 7",
        "More inner recurrences are slower and more often right; a noise of 0.2 dominates none.",
        _grid,
    ),
    *(
        Figure("slowfast", option.replace("_", "-"), source, f"{option}: {shows}", _knob(option), 48)
        for option, source, shows in (
            (
                "tau_min",
                "Figure 4",
                "0.1 is best; lower values take in unstable regions, higher ones make regions short and slow.",
            ),
            ("tau_high", "Figure 4", "a trade-off, higher is slower and better; 0.85 is near the best score."),
            ("max_exploration", "Figure 5", "8 steps are enough."),
            ("window", "Figure 5", "2 steps are best."),
            ("variance", "Figure 5", "the strict bound, 1, is best."),
        )
    ),
    Figure(
        "jacobi",
        "knee",
        "Figure 7",
        "A forward over up to 256 rows takes about as long as one over a single row on H200 and B200, up to 128 on A100.",
        _knee,
    ),
)


def find(paper: str | None = None, name: str | None = None) -> list[Figure]:
    """The figures of a paper, or one of them; without a paper all.

    Raises:
        ValueError: no such paper or figure.

    Example:
        >>> [figure.name for figure in find("recurrent")]
        ['prefill', 'decoding', 'static', 'grid']
    """
    known = ", ".join(PAPERS)
    check(paper is None or paper in PAPERS, _OP, "paper", f"be one of {known}", repr(paper))
    found = [figure for figure in FIGURES if paper in (None, figure.paper) and name in (None, figure.name)]
    names = ", ".join(figure.name for figure in FIGURES if paper in (None, figure.paper))
    check(bool(found), _OP, "figure", f"be one of {names}", repr(name))
    return found


def as_table(result: Mapping[str, Any]) -> str:
    """The rows of a result in Markdown; counts of right answers become shares with 95 % intervals.

    >>> print(as_table({"problems": 10, "rows": [{"": "jacobi", "right": 9, "x": 0.5}]}))
    |  | right | x |
    | --- | ---: | ---: |
    | jacobi | 90% (60%-98%) | 0.5 |
    """
    rows = result["rows"]
    check(bool(rows), _OP, "result", "have rows", "none")
    keys = list(rows[0])
    lines = [f"| {' | '.join(keys)} |", f"| --- | {' | '.join(['---:'] * (len(keys) - 1))} |"]
    for row in rows:
        cells = []
        for key in keys:
            value = row[key]
            if value is None:
                value = "-"
            elif key == "right":
                low, high = interval(value, result["problems"])
                value = f"{value / result['problems']:.0%} ({low:.0%}-{high:.0%})"
            elif isinstance(value, float):
                value = f"{value:.4g}" if abs(value) >= 1e5 else f"{value:g}"
            cells.append(str(value))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(text: str, results: Path) -> str:
    """A page with the parts between ``<!-- figure: PAPER NAME -->`` and ``<!-- /figure -->`` rebuilt from the files in a folder.

    Figures without a file are marked as not measured, with the command that measures them.
    """

    def filled(match: re.Match[str]) -> str:
        import json

        figure = find(match[2], match[3])[0]
        path = results / f"{figure.paper}_{figure.name}.json"
        lines = [f"**{figure.source}.** {figure.shows}", "", f"`{figure.command}`", ""]
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            facts = ", ".join(
                f"{name} {value}" for name, value in result.items() if name != "rows" and value is not None
            )
            lines += [f"{facts}:", "", as_table(result)]
        else:
            lines.append("Not measured yet.")
        return match[1] + "\n".join(lines) + "\n"

    return re.sub(r"(<!-- figure: (\S+) (\S+) -->\n).*?(?=<!-- /figure -->)", filled, text, flags=re.DOTALL)
