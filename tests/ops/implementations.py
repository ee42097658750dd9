"""Every way to run an op, behind one interface, so that a test body is written once.

``cpu``      the compiled CPU kernels through the public functions
``cuda``     the compiled CUDA kernels through the public functions, where a GPU is at hand
``cudasim``  the very same CUDA sources and bindings, executed on the CPU by tests/cudasim

`emulated_ops` are the CPU kernels of every vector unit, on any processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import cpp_extension

import pdkernels as pd
from pdkernels.ops._library import SCHEMAS
from pdkernels.ops.log_step import signed
from tests.cudasim.build import ROOT, SCHEDULES, build_library, schedule


class Public:
    """The public functions on one device."""

    def __init__(self, device: str) -> None:
        self.name, self.device = device, torch.device(device)
        # On the CPU bad values raise; on CUDA the sequence they belong to is left alone.
        self.raises = device == "cpu"
        self.kv_append_, self.kv_commit_, self.kv_trim_ = pd.kv_append_, pd.kv_commit_, pd.kv_trim_
        self.verify_draft = pd.verify_draft
        self.log_step_ = pd.log_step_
        self.recurrence_inject, self.recurrence_exit = pd.recurrence_inject, pd.recurrence_exit
        self.recurrence_advance_ = pd.recurrence_advance_
        self.add_rms_norm, self.silu_and_mul, self.apply_rope_append_ = (
            pd.add_rms_norm,
            pd.silu_and_mul,
            pd.apply_rope_append_,
        )
        self.apply_rope_ = pd.apply_rope_
        self.logit_divergence = pd.logit_divergence
        self.unmask_ = pd.unmask_
        self.select_stale_rows_, self.gather_rows, self.add_cached_rows_ = (
            pd.select_stale_rows_,
            pd.gather_rows,
            pd.add_cached_rows_,
        )
        self.token_statistics = pd.token_statistics


class Simulated:
    """The CUDA kernels on the CPU runtime; arguments as in the public functions."""

    name, device, raises = "cudasim", torch.device("cpu"), False

    def __init__(self) -> None:
        self.library, self.ops = simulated_ops()

    def kv_append_(self, k, v, k_new, v_new, lengths, *, counts=None, block_table=None) -> None:
        self.ops.kv_append_(as_list(k), as_list(v), as_list(k_new), as_list(v_new), lengths, counts, block_table)

    def kv_commit_(self, k, v, lengths, counts, source_index=None, *, block_table=None) -> None:
        self.ops.kv_commit_(as_list(k), as_list(v), lengths, counts, source_index, block_table)

    def kv_trim_(self, lengths, new_lengths) -> None:
        self.ops.kv_trim_(lengths, new_lengths)

    def verify_draft(self, draft, predictions, *, draft_lengths=None, end_tokens=None, refill=None) -> pd.DraftVerdict:
        return pd.DraftVerdict(*self.ops.verify_draft(draft, predictions, draft_lengths, end_tokens, refill))

    def log_step_(self, log, count, more, entry, *, handle=None) -> None:
        self.ops.log_step_(log, count, more, entry, signed(handle))

    def recurrence_inject(
        self,
        state,
        embedding,
        previous_embedding,
        recurrences,
        cursor,
        width,
        advance,
        steps,
        *,
        seed=0,
        noise=0.0,
        schedule="linear",
        horizon=32,
        mixer="linear",
        momentum=0.0,
        init_std=0.4**0.5,
        new_state="fresh",
        damp_new=False,
    ) -> Tensor:
        tensors = (state, embedding, previous_embedding, recurrences, cursor, width, advance, steps)
        return self.ops.recurrence_inject(
            *tensors, seed, noise, schedule, horizon, mixer, momentum, init_std, new_state, damp_new
        )

    def recurrence_exit(
        self, *tensors, threshold, older=None, older_advance=None, min_recurrences=1, eps=1e-6
    ) -> pd.RecurrenceExit:
        return pd.RecurrenceExit(
            *self.ops.recurrence_exit(*tensors, threshold, older, older_advance, min_recurrences, eps)
        )

    def recurrence_advance_(
        self,
        *tensors,
        settled=None,
        inner_recurrence,
        max_wavefront=None,
        max_recurrences=0,
        stability=0,
        rule="prefix",
        headway=1,
        filler=None,
        end_tokens=None,
        guard=True,
        keep_last=False,
    ) -> None:
        limits = (inner_recurrence, max_wavefront or 0, max_recurrences, stability, rule, headway)
        self.ops.recurrence_advance_(*tensors, settled, *limits, filler, end_tokens, guard, keep_last)

    def add_rms_norm(self, x, residual, weight, *, next_weight=None, eps=1e-6) -> tuple[Tensor, Tensor | None]:
        y, following = self.ops.add_rms_norm(x, residual, weight, next_weight, eps)
        return y, None if next_weight is None else following

    def silu_and_mul(self, x) -> Tensor:
        return self.ops.silu_and_mul(x)

    def apply_rope_append_(
        self, qkv, bias, cos, sin, k, v, lengths, *, counts=None, block_table=None, style="interleaved", slots=None
    ) -> None:
        self.ops.apply_rope_append_(
            qkv, bias, cos, sin, k, v, lengths, counts, block_table, style == "interleaved", slots
        )

    def apply_rope_(self, x, cos, sin, positions, *, style="half") -> None:
        self.ops.apply_rope_(x, cos, sin, positions, style == "interleaved")

    def logit_divergence(self, logits, previous=None, *, min_p=0.1) -> pd.LogitDivergence:
        return pd.LogitDivergence(*self.ops.logit_divergence(logits, previous, min_p))

    def unmask_(
        self,
        tokens,
        ids,
        confidence=None,
        *,
        mask_token,
        positions=None,
        windows=None,
        quota=1,
        threshold=None,
        need=1,
        factor=None,
        strict=False,
        seed=0,
        step=0,
    ) -> pd.Unmasked:
        (quota, quotas), (need, needs), (step, steps) = (number_or_tensor(value) for value in (quota, need, step))
        rule = (quota, quotas, threshold, need, needs, factor, strict)
        return pd.Unmasked(
            *self.ops.unmask_(tokens, ids, confidence, mask_token, positions, windows, *rule, seed, step, steps)
        )

    def select_stale_rows_(
        self, v, v_cache, starts, *, count, wanted=None, counts=None, update="all", block_table=None
    ) -> Tensor:
        return self.ops.select_stale_rows_(v, v_cache, starts, count, wanted, counts, update, block_table)

    def gather_rows(self, x, index) -> Tensor:
        return self.ops.gather_rows(x, index)

    def add_cached_rows_(self, x, cached, rows=None, index=None) -> Tensor:
        return self.ops.add_cached_rows_(x, cached, rows, index)

    def token_statistics(
        self,
        logits,
        *,
        temperature=0.0,
        seed=0,
        step=0,
        positions=None,
        row_index=None,
        suppress=(),
        top_k=5,
        top_p=1.0,
        min_p=0.0,
        distribution="model",
    ) -> pd.TokenStatistics:
        steps = (
            step.expand(logits.shape[:-1] if row_index is None else row_index.shape)
            if isinstance(step, Tensor)
            else None
        )
        draw = (temperature, seed, 0 if steps is not None else step, steps, positions, row_index)
        return pd.TokenStatistics(
            *self.ops.token_statistics(logits, *draw, list(suppress), top_k, top_p, min_p, distribution)
        )

    def schedules(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        """Orders in which threads and blocks may run: a missing barrier shows as different results."""
        return (schedule(self.library, order) for order in SCHEDULES)


def number_or_tensor(value: int | Tensor) -> tuple[int, Tensor | None]:
    return (0, value) if isinstance(value, Tensor) else (value, None)


def as_list(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


@cache
def simulated_ops() -> tuple[ctypes.CDLL, object]:
    """Builds the CUDA half of the library against the CPU runtime and registers it beside the real ops."""
    path = build_library(
        "pdkernels_cudasim",
        [*sorted((ROOT / "csrc/cuda").glob("*.cu")), ROOT / "python_bindings/ops.cpp"],
        include_dirs=[ROOT / "csrc/include", ROOT / "csrc/cuda", ROOT / "python_bindings"],
        system_include_dirs=[Path(include) for include in cpp_extension.include_paths()],
        defines=[
            "TORCH_TARGET_VERSION=0x020b000000000000",
            "PDKERNELS_DEVICE_CUDA",
            "PDKERNELS_OPS_NAMESPACE=pdkernels_cudasim",
            "PDKERNELS_OPS_KEY=CPU",
        ],
        link_flags=[f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu"],
    )
    library = torch.library.Library("pdkernels_cudasim", "DEF")
    for text in SCHEMAS.values():
        library.define(text)
    torch.ops.load_library(str(path))
    simulated_ops.keep_alive = library
    return ctypes.CDLL(str(path)), torch.ops.pdkernels_cudasim


@cache
def emulated_ops() -> object:
    """All CPU ops once more beside the real ones; PDKERNELS_CPU_ISA names the level of each call."""
    environment = os.environ | {"PDKERNELS_EMULATE_ISA": "1"}
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    library = torch.library.Library("pdkernels_emulated", "DEF")
    for schema in SCHEMAS.values():
        library.define(schema)
    torch.ops.load_library(str(ROOT / "build/native-emulate/_ops.so"))
    emulated_ops.keep_alive = library
    return torch.ops.pdkernels_emulated


@cache
def implementation(name: str) -> Public | Simulated:
    return Simulated() if name == "cudasim" else Public(name)


LEVELS = ["portable", "avx2", "avx512", "amx"]
NAMES = ["cpu", "cudasim", *(["cuda"] if torch.cuda.is_available() else [])]
