"""What engines may be told that changes their speed, and the instructions that all engines may use."""

from __future__ import annotations

import os
from typing import Any

from bench.cpu_processes import Refused
from pdkernels._host import cpu_isa

FLASH = {"flash attention": {"flash_attention": True}, "no flash attention": {"flash_attention": False}}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "pdkernels": {"float32 caches": {}, "float16 caches": {"cache_dtype": "float16"}},
    "llama.cpp": FLASH,
    "ik_llama.cpp": {
        f"{name}{repacked}": {**setting, **packing}
        for name, setting in FLASH.items()
        for repacked, packing in (("", {}), (", repacked", {"repack_tensors": True}))
    },
    "OpenVINO": {
        "its defaults": {},
        "f32": {"INFERENCE_PRECISION_HINT": "f32"},
        "SDPA": {"ATTENTION_BACKEND": "SDPA"},
        "SDPA, f32": {"ATTENTION_BACKEND": "SDPA", "INFERENCE_PRECISION_HINT": "f32"},
    },
    "torchao": {
        "weights in 8 bits": {"configuration": "Int8WeightOnlyConfig"},
        "weights and rows in 8 bits": {"configuration": "Int8DynamicActivationInt8WeightConfig"},
    },
}
"""By engine and name; a worker of bench/workers is told the entries. The first is what the engine does by itself."""


def avx512() -> bool:
    """Whether pdkernels may use AVX-512 here, and so its peers."""
    return cpu_isa().startswith(("avx512", "amx"))


def hold_to_level() -> None:
    """Holds the libraries of the processes that are started to AVX2 if pdkernels is held to it."""
    if cpu_isa() == "avx2":
        os.environ |= {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def of_level(engine: str, about: str) -> None:
    """Raises Refused if an engine is built for other instructions than ours are."""
    if engine in ("llama.cpp", "ik_llama.cpp") and ("AVX512 = 1" in about) != avx512():
        raise Refused(f"pdkernels has the level {cpu_isa()}, but this build {about}")
