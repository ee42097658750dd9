"""Decoding methods with one entry point, `generate`: a folder for each kind of model, a file for each method."""

from pdkernels.decoding._method import Method
from pdkernels.decoding._sampling import sequence_seed
from pdkernels.decoding._stream import Piece, Stream
from pdkernels.decoding._usual import default_method
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
from pdkernels.decoding.grammar import Grammar
from pdkernels.decoding.planned._lanes import chunk_lanes
from pdkernels.decoding.planned._outline import BAD_PLANS, BadPlan
from pdkernels.decoding.recurrent.recurrent_adaptive import ExitCheck
from pdkernels.decoding.result import ChunkTokens, DecodeResult, DecodeStats, LogProbs, OnTokens, PlanReport, PlanRound
from pdkernels.decoding.suffixes import SuffixPool
from pdkernels.decoding.traces import (
    AdaptiveStep,
    ChunkStep,
    DenoiseStep,
    LinearStep,
    MaskedStep,
    RecurrentStep,
    TraceStep,
)
from pdkernels.generation.params import SamplingParams

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
    "stream",
    "supports",
]
