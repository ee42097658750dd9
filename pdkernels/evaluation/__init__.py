"""Accuracy and speed of decoding methods side by side: the measurements and the plot of `python -m pdkernels eval`."""

from pdkernels.evaluation.contest import DEFAULT_METHODS, Contender, Row, as_json, contenders, evaluate
from pdkernels.evaluation.plot import plot
from pdkernels.evaluation.tasks import TASKS, Task, make_task

__all__ = [
    "DEFAULT_METHODS",
    "TASKS",
    "Contender",
    "Row",
    "Task",
    "as_json",
    "contenders",
    "evaluate",
    "make_task",
    "plot",
]
