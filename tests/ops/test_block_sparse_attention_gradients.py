"""Float32 gradients within the error budget, in many small cases: the error of a rounded log-sum-exp shows in the worst entry of
one case in a hundred. Short rows of few keys are the hard ones, so small masks test more than large ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch

from pdkernels import masks
from pdkernels.masks import SegmentMask, TilePlan
from tests.harness.error_budget import assert_within_budget, measured
from tests.ops.attention_cases import Inputs, Results, kernels, run, run_dense
from tests.ops.test_block_sparse_attention_levels import run as run_level

__all__ = ["kernels"]  # a fixture

MASKS: dict[str, SegmentMask] = {
    "noise aware": masks.noise_aware_causal(37, 8, 7),
    "noise aware, interleaved": masks.noise_aware_causal(20, 8, 5, layout="interleaved"),
    "dual stream": masks.dual_stream(75, 16),
    "quadratic": masks.quadratic(11),
    "causal": masks.causal(150),
    "full": masks.full(70, 129),
    "block causal": masks.block_causal(130, 24, prefix_len=11),
    "tree": masks.tree([max(-1, i - 1 - (i * i) % 7) for i in range(90)]),
}
HEAD_DIMS = [16, 24, 128]
HEADS = [(2, 2), (4, 2), (7, 1)]
TILES = [(16, 16), (48, 80), (128, 128)]
GRADIENTS = ("dq", "dk", "dv")
# Times 8 masks, 3 head dimensions, with and without a gradient of the log-sum-exp: 192 cases, and 768.
SEEDS = [4, pytest.param(16, marks=pytest.mark.slow)]


def cases(kind: str, seeds: int) -> Iterator[tuple[Inputs, TilePlan]]:
    """Heads and tiles cycle independently."""
    mask, turn = MASKS[kind], list(MASKS).index(kind)
    for seed in range(seeds):
        for j, head_dim in enumerate(HEAD_DIMS):
            (heads, kv_heads), tiles = HEADS[(turn + j + seed) % 3], TILES[(turn + 2 * j + seed) % 3]
            generator = torch.Generator().manual_seed(1000 * seed + 10 * turn + j)
            rows, columns = (1, mask.q_len, heads, head_dim), (1, mask.kv_len, kv_heads, head_dim)
            tensors = (
                torch.randn(shape, generator=generator)
                for shape in (rows, columns, columns, rows, (1, heads, mask.q_len))
            )
            yield Inputs(*tensors), mask.plan(*tiles)


def check_gradients(kind: str, seeds: int, run_kernels: Callable[[Inputs, TilePlan], Results]) -> None:
    dense = MASKS[kind].dense()
    alike = defaultdict(list)
    for inputs, plan in cases(kind, seeds):
        for through_lse in (True, False):
            inputs = inputs._replace(grad_lse=inputs.grad_lse * through_lse)
            results = (
                run_kernels(inputs, plan),
                *(run_dense(inputs, dense, dtype) for dtype in (torch.float64, torch.float32)),
            )
            for gradient in GRADIENTS:
                tensors = [getattr(result, gradient).flatten() for result in results]
                name = f"{gradient} of {kind}, heads of {inputs.q.shape[-1]}"
                found = measured(*tensors, name=name)
                assert found.kernel_rms <= found.allowed_rms, (name, found)
                alike[name].append(tensors)
    # Largest errors over all cases: PyTorch's error in a single case may happen to be small, which depends on the
    # processor.
    for name, every in alike.items():
        assert_within_budget(*(torch.cat(parts) for parts in zip(*every)), name=name)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("kind", MASKS)
def test_float32_gradients(kernels: str, kind: str, seeds: int) -> None:
    check_gradients(kind, seeds, lambda inputs, plan: run(kernels, inputs, plan))


@pytest.mark.covering
@pytest.mark.parametrize("kind", MASKS)
def test_float32_gradients_of_every_level(level_ops: object, kind: str) -> None:
    check_gradients(kind, 1, lambda inputs, plan: run_level(level_ops, inputs, plan))
