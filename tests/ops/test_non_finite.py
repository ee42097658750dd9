from __future__ import annotations
import pytest, torch
from pdkernels.ops._library import OPS
from tests.ops import non_finite
from tests.ops.attention_cases import DTYPES
from tests.ops.examples import floats_of
FLOATS = [op for op in OPS if floats_of(op) and op not in non_finite.RANKED]

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", FLOATS)
def test_cpu(op, dtype):
    assert non_finite.check(OPS[op].overload, op, dtype)

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", FLOATS)
def test_reference(op, dtype):
    assert non_finite.check(OPS[op].reference, op, dtype)

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", FLOATS)
def test_cpu_inf(op, dtype):
    non_finite.check_infinities(OPS[op].overload, op, dtype)

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", FLOATS)
def test_reference_inf(op, dtype):
    non_finite.check_infinities(OPS[op].reference, op, dtype)
