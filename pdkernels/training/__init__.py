"""Batches for training: samples put side by side in the layouts of the papers, with the rows and labels of their losses."""

from pdkernels.training.corpora import Problem, arithmetic, as_ids, standard_library
from pdkernels.training.packing import (
    DualStreamBatch,
    DualStreamSample,
    NoiseAwareBatch,
    NoiseAwareSample,
    pack_dual_stream,
    pack_noise_aware,
)

__all__ = [
    "DualStreamBatch",
    "DualStreamSample",
    "NoiseAwareBatch",
    "NoiseAwareSample",
    "Problem",
    "arithmetic",
    "as_ids",
    "pack_dual_stream",
    "pack_noise_aware",
    "standard_library",
]
