"""The patches of examples/backends: what they share against PyTorch, and authors' samplers where a checkout of them is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import backends
from examples.backends import kernels

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples/backends"


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 40), (1, 9)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_is_that_of_pytorch(queries: int, keys: int, heads: tuple[int, int]) -> None:
    torch.manual_seed(queries)
    q = torch.randn(2, heads[0], queries, 16)
    k, v = torch.randn(2, 2, heads[1], keys, 16)
    for causal in (False, True):
        mask = torch.ones(queries, keys, dtype=torch.bool)
        mask = mask.tril(keys - queries) if causal else mask
        exact: Any = torch.nn.functional.scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(kernels.attention(q, k, v, causal, 0.3).double(), exact, rtol=0, atol=2e-6)


def test_products_and_norms_are_those_of_pytorch() -> None:
    torch.manual_seed(0)

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.randn(24)), 1e-5

    model = torch.nn.Sequential(torch.nn.Linear(24, 24), Norm(), torch.nn.Linear(24, 5, bias=False)).requires_grad_(
        False
    )
    kernels.use_norm(Norm)
    x = torch.randn(3, 24)
    normed = torch.nn.functional.rms_norm(model[0](x), (24,), model[1].weight, 1e-5)
    expected = torch.nn.functional.linear(normed, model[2].weight)
    kernels.use_linear(model)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)


def test_a_patch_is_short() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) > 5
    assert all(len(file.read_text().splitlines()) <= 40 for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(backends.CASES))
def test_an_authors_sampler_gives_the_same_tokens(name: str) -> None:
    """In a Python with the versions that the authors' code needs, if `PDKERNELS_CHECKOUTS_PYTHON` names one."""
    checkouts = os.environ.get("PDKERNELS_CHECKOUTS")
    if checkouts is None:
        pytest.skip("PDKERNELS_CHECKOUTS names no folder of checkouts")
    python = os.environ.get("PDKERNELS_CHECKOUTS_PYTHON")
    found = backends.in_a_process(name, Path(checkouts), 0, **({"python": python} if python else {}))
    assert found["same"] and len(set(found["tokens"])) > 4


def test_the_committed_figures_have_a_table() -> None:
    assert backends.backends_table(backends.RESULTS).count("x |") >= 1
