"""Decoding methods with one entry point, `generate`: a folder for each kind of model, a file for each method."""

from pdkernels.decoding.default_method import default_method
from pdkernels.decoding.generate import (
    available,
    default_option,
    find,
    generate,
    is_lossless,
    method_options,
    stream,
    supports,
)
from pdkernels.decoding.method import Method
from pdkernels.decoding.planned.lanes import chunk_lanes
from pdkernels.decoding.planned.outline import BAD_PLANS, BadPlan
from pdkernels.decoding.recurrent.recurrent_adaptive import ExitCheck
from pdkernels.decoding.skeleton import SkeletonResult, skeleton_of_thought
from pdkernels.decoding.suffixes import SuffixPool
from pdkernels.generation.noise import sequence_seed
from pdkernels.generation.params import SamplingParams
from pdkernels.generation.result import (
    ChunkTokens,
    DecodeResult,
    DecodeStats,
    LogProbs,
    OnTokens,
    PlanReport,
    PlanRound,
)
from pdkernels.generation.stream import Piece, Stream
from pdkernels.generation.traces import (
    AdaptiveStep,
    ChunkStep,
    DenoiseStep,
    LinearStep,
    MaskedStep,
    RecurrentStep,
    TraceStep,
)
from pdkernels.grammar import Grammar

__all__ = [
    "BAD_PLANS",
    "AdaptiveStep",
    "BadPlan",
    "ChunkStep",
    "ChunkTokens",
    "DecodeResult",
    "DecodeStats",
    "DenoiseStep",
    "ExitCheck",
    "Grammar",
    "LinearStep",
    "LogProbs",
    "MaskedStep",
    "Method",
    "OnTokens",
    "Piece",
    "PlanReport",
    "PlanRound",
    "RecurrentStep",
    "SamplingParams",
    "SkeletonResult",
    "Stream",
    "SuffixPool",
    "TraceStep",
    "available",
    "chunk_lanes",
    "default_method",
    "default_option",
    "find",
    "generate",
    "is_lossless",
    "method_options",
    "sequence_seed",
    "skeleton_of_thought",
    "stream",
    "supports",
]
