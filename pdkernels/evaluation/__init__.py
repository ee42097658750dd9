"""Accuracy and speed of decoding methods side by side: the measurements and the plot of `python -m pdkernels eval`."""

from pdkernels.evaluation import scaling, theory
from pdkernels.evaluation.block_search import SCHEMES, BlockLimit, limit_of_block
from pdkernels.evaluation.candidate import Candidate
from pdkernels.evaluation.comparison import DEFAULT_METHODS, FAMILIES, Row, as_json, candidates, evaluate
from pdkernels.evaluation.frontier import Comparison, compare, fronts, paired_difference, pareto, plot_frontier
from pdkernels.evaluation.masked import plot_canvas, plot_masked
from pdkernels.evaluation.planned import (
    PlannedScore,
    evaluate_planned,
    held_out_orders,
    interval,
    planned_json,
    score_orders,
)
from pdkernels.evaluation.plot import plot
from pdkernels.evaluation.plot_chunks import plot_chunks
from pdkernels.evaluation.plot_planned import plot_planned
from pdkernels.evaluation.plot_theory import plot_theory
from pdkernels.evaluation.ranks import is_first, launched_group
from pdkernels.evaluation.recurrent import extra_memory, plot_recurrent, plot_wave
from pdkernels.evaluation.row_times import RowTimes, fit_row_times, measure_row_times, plot_row_times
from pdkernels.evaluation.speed_of_light import SpeedOfLight, speed_of_light
from pdkernels.evaluation.sweep import (
    SweepRow,
    Swept,
    parse_sweep,
    planned_settings,
    sweep,
    sweep_candidates,
    without_many_rows,
)
from pdkernels.evaluation.tasks import TASKS, Task, make_task

__all__ = [
    "DEFAULT_METHODS",
    "FAMILIES",
    "SCHEMES",
    "TASKS",
    "BlockLimit",
    "Candidate",
    "Comparison",
    "PlannedScore",
    "Row",
    "RowTimes",
    "SpeedOfLight",
    "SweepRow",
    "Swept",
    "Task",
    "as_json",
    "candidates",
    "compare",
    "evaluate",
    "evaluate_planned",
    "extra_memory",
    "fit_row_times",
    "fronts",
    "held_out_orders",
    "interval",
    "is_first",
    "launched_group",
    "limit_of_block",
    "make_task",
    "measure_row_times",
    "paired_difference",
    "pareto",
    "parse_sweep",
    "planned_json",
    "planned_settings",
    "plot",
    "plot_canvas",
    "plot_chunks",
    "plot_frontier",
    "plot_masked",
    "plot_planned",
    "plot_recurrent",
    "plot_row_times",
    "plot_theory",
    "plot_wave",
    "scaling",
    "score_orders",
    "speed_of_light",
    "sweep",
    "sweep_candidates",
    "theory",
    "without_many_rows",
]
