"""Training: samples packed in the layouts of the papers, noise and trajectories, losses, and small corpora."""

from pdkernels.training.corpora import Problem, arithmetic, as_ids, standard_library
from pdkernels.training.drafter import DrafterLoss, attach_drafter_, drafter_loss
from pdkernels.training.losses import (
    ConsistencyLoss,
    JointLoss,
    draw_masks,
    dual_stream_loss,
    dual_stream_terms,
    noise_aware_loss,
    noise_aware_terms,
)
from pdkernels.training.packing import (
    DualStreamBatch,
    DualStreamSample,
    NoiseAwareBatch,
    NoiseAwareSample,
    pack_dual_stream,
    pack_noise_aware,
)
from pdkernels.training.trajectories import (
    Trajectory,
    choose_record,
    collect_trajectories,
    noise_aware_sample,
    noise_ratios,
)

__all__ = [
    "ConsistencyLoss",
    "DrafterLoss",
    "DualStreamBatch",
    "DualStreamSample",
    "JointLoss",
    "NoiseAwareBatch",
    "NoiseAwareSample",
    "Problem",
    "Trajectory",
    "arithmetic",
    "as_ids",
    "attach_drafter_",
    "choose_record",
    "collect_trajectories",
    "drafter_loss",
    "draw_masks",
    "dual_stream_loss",
    "dual_stream_terms",
    "noise_aware_loss",
    "noise_aware_sample",
    "noise_aware_terms",
    "noise_ratios",
    "pack_dual_stream",
    "pack_noise_aware",
    "standard_library",
]
