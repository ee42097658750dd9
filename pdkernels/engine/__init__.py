"""Continuous batching: one model serves many requests at a time, with any method whose sequences can join and leave a
batch."""

from pdkernels.engine.broken import BrokenModel
from pdkernels.engine.engine import Engine, EngineFull
from pdkernels.engine.generation import FinishReason, Generation
from pdkernels.engine.metrics import EngineMetrics

__all__ = ["BrokenModel", "Engine", "EngineFull", "EngineMetrics", "FinishReason", "Generation"]
