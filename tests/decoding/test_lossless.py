"""Lossless in bfloat16 and with packed weights as in float32: a draft is verified with the bits that greedy decoding computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.decoding.lossless_sweep import FORMS, METHODS, NUMBERS, PACKED, differences, k_format

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_sweep_has_all_methods_that_promise_it() -> None:
    assert set(METHODS) >= set(FORMS) and "quadratic_self_speculation" in METHODS


# Packed in blocks with smallest values, and in rows; scales alone are among the caches below.
FAST = (*NUMBERS, "q4_1", "int4")
in_batches = pytest.mark.parametrize("size", [3, pytest.param(10, marks=pytest.mark.slow)])


@in_batches
@pytest.mark.parametrize(
    "weights", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in (*NUMBERS, *PACKED)]
)
def test_no_token_differs_from_greedy_decoding(weights: str, size: int) -> None:
    found = list(differences(2 * size, weights, seed=5000, size=size))
    assert len(found) == 2 * len(METHODS)
    assert [(method, wrong) for method, _, wrong in found if wrong] == []


@in_batches
@pytest.mark.parametrize("weights", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16", "q8_0"])
def test_nor_does_any_with_a_cache_of_8_bits(weights: str, size: int) -> None:
    found = list(differences(2 * size, weights, seed=7000, cache_dtype=torch.int8, size=size))
    assert len(found) == 2 * len(METHODS)
    assert [(method, wrong) for method, _, wrong in found if wrong] == []


@pytest.mark.parametrize("format", ["q4_k", "q5_k", "q6_k"])
def test_matrices_that_the_sweep_packs_are_those_it_was_given(format: str) -> None:
    values = torch.randn(24, 512, generator=torch.Generator().manual_seed(0))
    made = k_format(values, format)
    assert (made.dequantize() - values).norm() < {"q4_k": 0.09, "q5_k": 0.05, "q6_k": 0.03}[format] * values.norm()


def test_the_committed_sweep_has_every_format() -> None:
    found = json.loads((ROOT / "bench/results/lossless.json").read_text())["weights"]
    assert set(found) == {*NUMBERS, *PACKED}
    for weights, counts in found.items():
        # Branches are exact, so their method is not repeated in every packed format.
        branching = {"jacobi_multiblock"} if weights in PACKED else set()
        assert set(FORMS) - branching <= set(counts) <= set(METHODS)
        assert all((own["prompts"], own["differ"]) == (1000, 0) for own in counts.values())
    for weights in (*NUMBERS, "q8_0", "q4_0", "q4_k", "q6_k", "int8", "int4"):
        assert {"eagle", "draft_model"} <= set(found[weights])
        assert weights in NUMBERS or "dflash" in found[weights]
