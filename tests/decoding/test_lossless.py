"""Lossless in bfloat16 as in float32: a draft is verified with the bits that greedy decoding computes."""

from __future__ import annotations

import pytest
import torch

from tests.decoding.lossless_sweep import FORMS, METHODS, differences


def test_the_sweep_has_all_methods_that_promise_it() -> None:
    assert set(METHODS) >= set(FORMS) and "quadratic_self_speculation" in METHODS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_token_differs_from_greedy_decoding(dtype: torch.dtype) -> None:
    found = list(differences(20, dtype, seed=5000))
    assert len(found) == 2 * len(METHODS)
    assert [(method, wrong) for method, _, wrong in found if wrong] == []
