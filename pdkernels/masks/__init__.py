"""Segment masks, a builder for each paper's layout, and the tile plans that kernels read."""

from pdkernels.masks.anchored import AnchoredMask, anchored
from pdkernels.masks.basic import block_causal, causal, full, pack
from pdkernels.masks.dual_stream import dual_stream
from pdkernels.masks.jacobi import NoiseAwareMask, candidates, noise_aware_causal
from pdkernels.masks.planned import Stage, planned, planned_streams
from pdkernels.masks.segment_mask import Segment, SegmentMask
from pdkernels.masks.speculation import QuadraticMask, quadratic, tree
from pdkernels.masks.tile_plan import BlockLists, TilePlan
from pdkernels.masks.tree_plans import TreePlans
from pdkernels.masks.width import width_scaling

__all__ = [
    "AnchoredMask",
    "BlockLists",
    "NoiseAwareMask",
    "QuadraticMask",
    "Segment",
    "SegmentMask",
    "Stage",
    "TilePlan",
    "TreePlans",
    "anchored",
    "block_causal",
    "candidates",
    "causal",
    "dual_stream",
    "full",
    "noise_aware_causal",
    "pack",
    "planned",
    "planned_streams",
    "quadratic",
    "tree",
    "width_scaling",
]
