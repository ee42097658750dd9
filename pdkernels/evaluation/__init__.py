"""Accuracy and speed of decoding methods side by side: the measurements and the plot of `python -m pdkernels eval`."""

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
from pdkernels.evaluation.ranks import is_first, launched_group
from pdkernels.evaluation.recurrent import extra_memory, plot_recurrent, plot_wave
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
    "TASKS",
    "Candidate",
    "Comparison",
    "PlannedScore",
    "Row",
    "SweepRow",
    "Swept",
    "Task",
    "as_json",
    "candidates",
    "compare",
    "evaluate",
    "evaluate_planned",
    "extra_memory",
    "fronts",
    "held_out_orders",
    "interval",
    "is_first",
    "launched_group",
    "make_task",
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
    "plot_wave",
    "score_orders",
    "sweep",
    "sweep_candidates",
    "without_many_rows",
]
