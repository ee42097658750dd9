"""The papers in miniature: their tables on the tiny models, and the maximum gain of a method.

`python -m bench.papers` lists the tables and measures them. docs/papers, docs/theory.md and docs/scaling.md show the results.
"""

from bench.papers import scaling, theory
from bench.papers.block_search import SCHEMES, BlockLimit, limit_of_block
from bench.papers.plot_losses import plot_losses
from bench.papers.plot_theory import plot_theory
from bench.papers.row_times import RowTimes, fit_row_times, measure_row_times, plot_row_times
from bench.papers.speed_of_light import SpeedOfLight, speed_of_light

__all__ = [
    "SCHEMES",
    "BlockLimit",
    "RowTimes",
    "SpeedOfLight",
    "fit_row_times",
    "limit_of_block",
    "measure_row_times",
    "plot_losses",
    "plot_row_times",
    "plot_theory",
    "scaling",
    "speed_of_light",
    "theory",
]
