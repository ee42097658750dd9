"""The contract between the device, which runs steps, and the host, which records them."""

from pdkernels.decoding.steps.contract import Steps, decoder, run, with_defaults
from pdkernels.decoding.steps.drafts import DraftSteps, record_first
from pdkernels.decoding.steps.entry import Entry, Row, Rows, float_of, unfinished
from pdkernels.decoding.steps.running import Preempted, RunningBatch
from pdkernels.decoding.steps.staging import Staging

__all__ = [
    "DraftSteps",
    "Entry",
    "Preempted",
    "Row",
    "Rows",
    "RunningBatch",
    "Staging",
    "Steps",
    "decoder",
    "float_of",
    "record_first",
    "run",
    "unfinished",
    "with_defaults",
]
