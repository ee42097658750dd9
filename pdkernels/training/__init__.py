"""Training: samples packed in the layouts of the papers, noise and trajectories, losses, and small corpora."""

from pdkernels.training import annotation, plans
from pdkernels.training.corpora import Problem, arithmetic, as_ids, standard_library
from pdkernels.training.dflash import DFlashLoss, dflash_loss, draw_anchors, new_dflash_head
from pdkernels.training.drafter import DrafterLoss, attach_drafter_, drafter_loss
from pdkernels.training.drafts import DraftBatch, count_accepted, draw_drafts, pack_drafts
from pdkernels.training.eagle import EagleLoss, eagle_loss, new_eagle_head, usual_taps
from pdkernels.training.links import Chains, chains
from pdkernels.training.lists import Orders, orders
from pdkernels.training.losses import (
    ConsistencyLoss,
    JointLoss,
    draw_masks,
    dual_stream_loss,
    dual_stream_terms,
    noise_aware_loss,
    noise_aware_terms,
    noise_level,
)
from pdkernels.training.packing import (
    DualStreamBatch,
    DualStreamSample,
    NoiseAwareBatch,
    NoiseAwareSample,
    pack_dual_stream,
    pack_noise_aware,
)
from pdkernels.training.pasta import pack_pasta
from pdkernels.training.planned import (
    NoisyPlan,
    PlanItem,
    PlannedBatch,
    PlannedLayout,
    PlannedSample,
    draw_chunk_masks,
    lay_out,
    pack_planned,
    planned_loss,
    planned_terms,
)
from pdkernels.training.sampler import SamplerSteps, auc, collect_sampler_steps, score_steps, train_sampler
from pdkernels.training.trajectories import (
    Trajectory,
    choose_record,
    collect_trajectories,
    noise_aware_sample,
    noise_ratios,
    noiseless_sample,
)
from pdkernels.training.unrolling import draw_recurrences, unrolled_logits

__all__ = [
    "Chains",
    "ConsistencyLoss",
    "DFlashLoss",
    "DraftBatch",
    "DrafterLoss",
    "DualStreamBatch",
    "DualStreamSample",
    "EagleLoss",
    "JointLoss",
    "NoiseAwareBatch",
    "NoiseAwareSample",
    "NoisyPlan",
    "Orders",
    "PlanItem",
    "PlannedBatch",
    "PlannedLayout",
    "PlannedSample",
    "Problem",
    "SamplerSteps",
    "Trajectory",
    "annotation",
    "arithmetic",
    "as_ids",
    "attach_drafter_",
    "auc",
    "chains",
    "choose_record",
    "collect_sampler_steps",
    "collect_trajectories",
    "count_accepted",
    "dflash_loss",
    "drafter_loss",
    "draw_anchors",
    "draw_chunk_masks",
    "draw_drafts",
    "draw_masks",
    "draw_recurrences",
    "dual_stream_loss",
    "dual_stream_terms",
    "eagle_loss",
    "lay_out",
    "new_dflash_head",
    "new_eagle_head",
    "noise_aware_loss",
    "noise_aware_sample",
    "noise_aware_terms",
    "noise_level",
    "noise_ratios",
    "noiseless_sample",
    "orders",
    "pack_drafts",
    "pack_dual_stream",
    "pack_noise_aware",
    "pack_pasta",
    "pack_planned",
    "planned_loss",
    "planned_terms",
    "plans",
    "score_steps",
    "standard_library",
    "train_sampler",
    "unrolled_logits",
    "usual_taps",
]
