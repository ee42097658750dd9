"""The registry of decoding methods. Each folder of decoders lists its own; a baseline comes first."""

from __future__ import annotations

from pdkernels.decoding import causal, masked, planned, recurrent
from pdkernels.decoding.method import Method

METHODS: dict[str, Method] = {
    method.name: method for folder in (causal, planned, recurrent, masked) for method in folder.METHODS
}
