"""Tables of the papers in miniature: a description, the measurement, and the rows as plain values and as Markdown.

`python -m bench.papers` runs them. A result is a dict of JSON values with `rows`, a list of dicts with the same keys, and the
facts that they depend on, so that pages are built only from committed files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.papers import (
    fixed_acceptance,
    grid_search,
    modes,
    nemotron_ablations,
    planned_baselines,
    recurrent_ablations,
    runs,
    sampled_drafts,
    segments,
    strategies,
    trainings,
)
from bench.papers.runs import Progress
from pdkernels._validation import check
from pdkernels.evaluation.planned import interval

_OP = "papers"


class Figure(NamedTuple):
    """A table or figure of a paper."""

    paper: str
    name: str
    source: str
    """Its number in the paper."""
    shows: str
    """What the paper shows with it, in a sentence."""
    run: Callable[[int, Progress], dict[str, Any]] | None
    """Takes the number of problems and a progress callback; None: measured by code that is no longer here."""
    problems: int = 100
    """By default."""

    @property
    def command(self) -> str:
        return f"python -m bench.papers {self.paper} {self.name}"


PAPERS = {
    "jacobi": "Jacobi Forcing",
    "recurrent": "Efficient parallel samplers for recurrent-depth models",
    "nemotron": "Nemotron-Labs-Diffusion",
    "slowfast": "SlowFast Sampling",
    "planned-diffusion": "Planned Diffusion",
    "released": "Released code",
}


FIGURES = (
    Figure(
        "nemotron",
        "limits",
        "Table 4",
        "With an oracle, block diffusion fills 2.9 to 7.6 masks per forward in blocks of 4 to 32, about 1.37 times as many for each "
        "doubling of the block; a threshold fills about 3.",
        runs.limits,
        24,
    ),
    Figure(
        "nemotron",
        "modes",
        "Figures 1c and 9a",
        "One set of weights: self-speculation gives the most tokens a second at low concurrency; autoregressive decoding suits "
        "compute-bound high concurrency.",
        modes.modes,
        32,
    ),
    Figure(
        "recurrent",
        "prefill",
        "Theorem 4.2",
        "A prefill by depth costs no more FLOPs than one by width; width takes less time for short prompts.",
        runs.prefill,
    ),
    Figure(
        "recurrent",
        "decoding",
        "Theorem 4.4",
        "In the same number of block applications the sampler finishes up to r / r' times the tokens.",
        runs.decode,
    ),
    Figure(
        "recurrent",
        "static",
        "Table 1",
        "Accuracy grows with the number of recurrences, from 1.6 % at 4 to 41.8 % at 32.",
        runs.recurrent("static"),
        24,
    ),
    Figure(
        "recurrent",
        "cache",
        "Figure 3",
        "A cache that keeps the last recurrence alone is as accurate as one that keeps all, in r times less memory.",
        runs.recurrent("cache"),
        48,
    ),
    Figure(
        "recurrent",
        "grid",
        "Figures 5, 7, 11 and 12",
        "More inner recurrences are slower and more often right; with a noise of 0.2 both are better than without.",
        runs.recurrent("grid"),
        48,
    ),
    Figure(
        "recurrent",
        "threshold",
        "Figure 5, right",
        "The exit threshold trades speed for accuracy most directly.",
        runs.recurrent("threshold"),
        48,
    ),
    Figure(
        "recurrent",
        "momentum",
        "Figure 6, left",
        "Small momentum, but not none, is best.",
        runs.recurrent("momentum"),
        48,
    ),
    Figure(
        "recurrent",
        "noise",
        "Figure 9, left",
        "At four inner recurrences noise changes little.",
        runs.recurrent("noise"),
    ),
    Figure(
        "recurrent",
        "headway",
        "Figure 9, right",
        "A headway above 1 gains little speed and costs accuracy.",
        runs.recurrent("headway"),
        24,
    ),
    Figure(
        "recurrent",
        "init-scale",
        "Figure 10, left",
        "The scale of new states has a minor effect.",
        runs.recurrent("init-scale"),
        48,
    ),
    Figure(
        "recurrent",
        "continuous",
        "Figure 10, right",
        "States copied from the position before are less effective: they have had r' recurrences only.",
        runs.recurrent("continuous"),
        48,
    ),
    Figure(
        "recurrent",
        "wave",
        "Figures 6 and 8",
        "Throughput and the worst case of memory grow with the wave up to 64 or 128 positions; the median of memory hardly does.",
        runs.wave,
        24,
    ),
    Figure(
        "recurrent",
        "texts",
        "Table 3",
        "The sampler's texts overlap with those of static decoding, fewer are identical, and the model finds them as likely.",
        runs.same_texts,
        48,
    ),
    Figure(
        "recurrent",
        "variants",
        "Table 2",
        "Other weights of the same model have other accuracies, and the same defaults are 4 to 5 times as fast and within 0.5 to 1 % on each.",
        recurrent_ablations.variants,
        24,
    ),
    Figure(
        "recurrent",
        "robustness",
        "Figure 14",
        "On the fine-tuned model the options of the sampler act as on the published one.",
        recurrent_ablations.robustness,
        16,
    ),
    Figure(
        "recurrent",
        "schedules",
        "Section 3.4",
        "Noise that falls linearly with a position's steps is better than noise that falls with the square root of their number, or does not fall.",
        recurrent_ablations.schedules,
        24,
    ),
    Figure(
        "nemotron",
        "acceptance",
        "Figure 7",
        "Linear self-speculation accepts 6.82 tokens a draft on average over 11 categories, most in code and translations.",
        runs.acceptance,
        36,
    ),
    Figure(
        "nemotron",
        "adapter",
        "Tables 6 and 10",
        "An adapter raises the tokens per forward of linear self-speculation in every task, by 14 % to 33 % on average.",
        sampled_drafts.adapter,
        48,
    ),
    Figure(
        "nemotron",
        "sampled-drafts",
        "Section 3.3",
        "Adapters that are trained on drafts of which 90 % are sampled remain robust when the verifier samples.",
        sampled_drafts.sampled_drafts,
        48,
    ),
    Figure(
        "nemotron",
        "sampler",
        "Figure 8",
        "A trained sampler fills more tokens per forward than confidence thresholds at equal accuracy; attention over the block helps.",
        trainings.sampler,
        60,
    ),
    *(
        Figure("nemotron", name, source, shows, run, nemotron_ablations.PROBLEMS)
        for name, source, shows, run in (
            (
                "techniques",
                "Table 1",
                "Each technique adds to the accuracy of the diffusion mode: the global loss average 2.1 points, masking ratios that vary "
                "by rank 0.7, two stages 5.7, the autoregressive loss 7.5.",
                nemotron_ablations.techniques,
            ),
            (
                "alpha",
                "Table 2 and Figure 4",
                "Both modes are most accurate at alpha = 0.3 and rise and fall together; too small or too large an alpha raises the "
                "diffusion or the autoregressive loss.",
                nemotron_ablations.alphas,
            ),
            (
                "preserved",
                "Table 3",
                "The diffusion loss preserves the accuracy of the autoregressive mode: 72.5 % without and 72.6 % with it before "
                "fine-tuning, 63.2 % and 63.6 % after.",
                nemotron_ablations.preserved,
            ),
        )
    ),
    Figure("jacobi", "blocks", "Figure 5b", "Tokens a forward grow with the block up to 64.", runs.jacobi("blocks")),
    Figure(
        "jacobi",
        "windows",
        "Section 4.2",
        "A running window accepts more than blocks of its size.",
        runs.jacobi("windows"),
    ),
    Figure(
        "jacobi",
        "multiblock",
        "Figure 5b and section 4.3",
        "A second block and a verification size of 4 are best.",
        runs.jacobi("multiblock"),
    ),
    Figure(
        "jacobi",
        "forcings",
        "Tables 4 and 5",
        "Noise that grows from block to block teaches most, noise that shrinks least; masks under which noisy blocks see clean ones teach "
        "half as much.",
        trainings.forcings,
    ),
    *(
        Figure("slowfast", option.replace("_", "-"), source, f"{option}: {shows}", runs.knob(option), 48)
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
    Figure("slowfast", "loops", "Section 3.3", "The paper ends a span in two ways.", runs.loops, 96),
    *(
        Figure("planned-diffusion", name, source, shows, runs.planned(name), 96)
        for name, source, shows in (
            (
                "path",
                "Figure 2, left and middle",
                "Dense chunks are nearly as good as token by token on a critical path 2.3 times shorter, sparse ones somewhat worse.",
            ),
            ("lengths", "Figure 3, middle", "Quality peaks at the planned lengths; longer chunks take more steps."),
            ("steps", "Figure 3, right", "Fewer steps and lower thresholds trade quality for time smoothly."),
        )
    ),
    Figure(
        "planned-diffusion",
        "strategies",
        "Table 1, Figures 2 and 4",
        "Planned diffusion is 1.27 times (sparse 1.81 times) as fast as token by token at nearly its win rate; Skeleton-of-Thought is faster and "
        "worse, Pasta-SFT hardly faster and much worse, diffusion best and 25 times slower. Ratios of single answers vary widely: 3.08 on "
        "average, with a standard deviation of 4.10.",
        planned_baselines.run,
        32,
    ),
    Figure(
        "jacobi",
        "knee",
        "Figure 7",
        "A forward over up to 256 rows takes about as long as one over a single row on H200 and B200, up to 128 on A100.",
        runs.knee,
    ),
    Figure(
        "jacobi",
        "search",
        "Figure 8",
        "With two blocks and a spawn ratio of 0.85 a B200 is fastest near blocks of 64 with 4 sequences verified; smaller and much larger "
        "ones are slower.",
        grid_search.search,
        5,
    ),
    Figure(
        "jacobi",
        "ratios",
        "Section 4.3",
        "The next block is best begun when 85 % of a block of 64 are accepted.",
        runs.jacobi("ratios"),
        24,
    ),
    Figure(
        "jacobi",
        "fixed",
        "Figure 5a",
        "At 2 to 5 accepted tokens per forward, blocks of up to 64 are as fast as smaller ones on an H200, and 128 hardly slower.",
        fixed_acceptance.fixed,
    ),
    Figure(
        "jacobi",
        "segments",
        "Figure 4",
        "In drafts of a model after this training, tokens that are not accepted yet are right in place, or in runs that are at another place.",
        segments.count,
        24,
    ),
    Figure(
        "slowfast",
        "strategies",
        "Tables 2 and 3",
        "SlowFast is nearly twice as fast as left to right and as blocks from the left, and as often right as diffusion; a feature cache "
        "doubles its speed.",
        strategies.compare,
        24,
    ),
    Figure("released", "slowfast-loops", "SlowFast Sampling", "The loops of its code, at their own thresholds.", None),
    Figure(
        "released",
        "planned-schedule",
        "Planned Diffusion",
        "The schedule of its code, with our decoder otherwise.",
        None,
    ),
)


def find(paper: str | None = None, name: str | None = None) -> list[Figure]:
    """The figures of a paper, or one of them; without a paper all.

    Raises:
        ValueError: no such paper or figure.

    Example:
        >>> [figure.name for figure in find("jacobi")]
        ['blocks', 'windows', 'multiblock', 'forcings', 'knee', 'search', 'ratios', 'fixed', 'segments']
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
        lines = [f"**{figure.source}.** {figure.shows}", "", *([f"`{figure.command}`", ""] if figure.run else [])]
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            facts = ", ".join(
                f"{name} {value}"
                for name, value in result.items()
                if value is not None and not isinstance(value, (list, dict))
            )
            lines += [f"{facts}:", "", as_table(result)]
        else:
            lines.append("Not measured yet.")
        return match[1] + "\n".join(lines) + "\n"

    return re.sub(r"(<!-- figure: (\S+) (\S+) -->\n).*?(?=<!-- /figure -->)", filled, text, flags=re.DOTALL)
