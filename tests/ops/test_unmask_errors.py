"""What unmask_ refuses, its messages, and that nothing is written then."""

from __future__ import annotations

import pytest
import torch

import pdkernels as pd
from pdkernels.ops import library as _library
from tests.ops.unmask_cases import MASK, Case, expected, run
from tests.support.errors import refused

T, IDS, C = torch.full((2, 4), MASK), torch.full((2, 4), 3), torch.rand(2, 4)
P = torch.tensor([[0, 1, 2, 3], [3, 2, -1, 0]])
SEGMENTS = torch.tensor([[[0, 1], [2, 4]]] * 2)

BAD = {
    "TypeError: unmask_: tokens must be an int32 or int64 tensor, got list": {"tokens": [1]},
    r"tokens must have shape \(any, any\), got \(4,\)": {"tokens": T[0]},
    "TypeError: tokens must be an int32 or int64 tensor, got torch.float32": {"tokens": T.float()},
    r"ids must have shape \(2, any\), got \(1, 4\)": {"ids": IDS[:1]},
    "TypeError: ids must be torch.int64 like tokens, got torch.int32": {"ids": IDS.int()},
    "ids must be on cpu, got meta": {"ids": IDS.to("meta")},
    "positions are missing: there are 3 candidates for 4 tokens. Without positions": {
        "ids": IDS[:, :3],
        "confidence": C[:, :3],
    },
    r"positions must have shape \(2, 4\), got \(2, 3\)": {"positions": P[:, :3]},
    "TypeError: positions must be an int32 or int64 tensor, got torch.float32": {"positions": P.float()},
    r"positions must be in \[-1, 3\], got -2 for sequence 1. -1 means no candidate": {"positions": P - 1},
    r"positions must be in \[-1, 3\], got 4 for sequence 0": {"positions": P + 1},
    "positions must be distinct in a sequence, got 0 twice for sequence 1. A token takes": {
        "positions": P.clamp(min=0)
    },
    "TypeError: confidence must be a tensor, got float": {"confidence": 0.5},
    r"TypeError: confidence must be float32, got torch.float16. Convert it with .float\(\)": {"confidence": C.half()},
    "TypeError: confidence must be float32 for the kernels, got torch.float64. Convert it": {"confidence": C.double()},
    r"confidence must have shape \(2, 4\) like ids, got \(2, 3\)": {"confidence": C[:, :3]},
    r"confidence must be on cpu, got meta. Move it with .to\('cpu'\)": {"confidence": C.to("meta")},
    r"windows must have shape \(2, 2\), got \(2,\)": {"windows": SEGMENTS[0, 0]},
    r"windows must have shape \(2, any, 2\), got \(1, 2, 2\)": {"windows": SEGMENTS[:1]},
    "TypeError: windows must be an int32 or int64 tensor, got tuple": {"windows": (0, 4)},
    r"windows must lie in \[0, 4\] and not end before they start, got \[3, 5\] for sequence 0. A window is": {
        "windows": SEGMENTS[:, 1] + 1
    },
    r"windows must lie in \[0, 4\] and not end before they start, got \[-1, 0\] for sequence 0": {
        "windows": SEGMENTS - 1
    },
    r"windows must lie in \[0, 4\] and not end before they start, got \[1, 0\]": {"windows": SEGMENTS.flip(2)},
    r"windows must not overlap, got \[1, 3\] and \[2, 4\] for sequence 1": {
        "windows": torch.tensor([[[0, 2], [2, 4]], [[1, 3], [2, 4]]])
    },
    "quota must not be negative, got -1": {"quota": -1},
    "TypeError: quota must be an int or a tensor, got float": {"quota": 1.5},
    "quota must not be negative, got -2 for sequence 1": {"quota": torch.tensor([1, -2])},
    r"quota must have shape \(2\), got \(1,\)": {"quota": torch.tensor([1])},
    r"quota must have shape \(2, 2\), got \(2,\)": {"quota": torch.tensor([1, 2]), "windows": SEGMENTS},
    "TypeError: quota must be an int32 or int64 tensor, got torch.float32": {"quota": torch.tensor([0.5, 0.5])},
    "min_count must not be negative, got -1": {"min_count": -1},
    "min_count must not be negative, got -3 for sequence 0": {"min_count": torch.tensor([-3, 0])},
    "threshold and factor are two rules. Pass one": {"threshold": 0.5, "factor": 1.0},
    "threshold must be a number, got nan": {"threshold": float("nan")},
    "factor must be finite and not negative, got -1.0": {"factor": -1.0},
    "factor must be finite and not negative, got inf": {"factor": float("inf")},
    "strict needs a threshold. It says": {"strict": True},
    "TypeError: threshold must be a number, got str": {"threshold": "high"},
    "TypeError: factor must be a number, got str": {"factor": "high"},
    "TypeError: mask_token must be an int, got float": {"mask_token": 0.0},
    "TypeError: step must be an int or a tensor, got float": {"step": 1.0},
    "TypeError: unmask_: seed must be an int, got str": {"seed": "x"},
    "TypeError: unmask_: seed must be an int, got float": {"seed": 0.5},
    "mask_token must not be negative, got -1": {"mask_token": -1},
    r"step must be in \[0, 2\*\*32\), got -1": {"step": -1},
    r"step must be in \[0, 2\*\*32\), got 4294967296": {"step": 2**32},
    r"step must have shape \(2\), got \(\)": {"step": torch.tensor(1)},
    "NotImplementedError: backend must be one of auto, native, reference on cpu, got 'triton'": {"backend": "triton"},
}


@pytest.mark.parametrize("text, call", BAD.items())
def test_bad_call(call: dict[str, object], text: str) -> None:
    tokens = T.clone()
    with refused(text):
        pd.unmask_(**{"tokens": tokens, "ids": IDS, "confidence": C, "mask_token": MASK, **call})
    assert torch.equal(tokens, T)


VALUES = [
    {"windows": SEGMENTS + torch.tensor([0, 1])[:, None, None]},
    {"windows": SEGMENTS - torch.tensor([0, 1])[:, None, None]},
    {"windows": torch.stack([SEGMENTS[0], torch.tensor([[3, 1], [3, 4]])])},
    {"windows": torch.tensor([[[0, 2], [2, 4]], [[1, 3], [2, 4]]])},
    {"windows": torch.tensor([[0, 4], [-(2**62), 2**62]])},
    {"positions": P - torch.tensor([[0], [1]])},
    {"positions": torch.where(P == 3, torch.tensor([[3], [2**40]]), P)},
    {"quota": torch.tensor([2, -1])},
    {"threshold": 0.5, "min_count": torch.tensor([0, -1])},
]


@pytest.mark.parametrize("options", VALUES)
def test_the_reference_refuses_the_same_values(options: dict[str, object]) -> None:
    for backend in ("native", "reference"):
        tokens = T.clone()
        with pytest.raises(ValueError, match="for sequence 1"):
            pd.unmask_(tokens, IDS, C, mask_token=MASK, backend=backend, **options)
        assert torch.equal(tokens, T)


@pytest.mark.parametrize("options", VALUES)
def test_cuda_leaves_a_bad_sequence_alone(device_impl, options: dict[str, object]) -> None:
    case = Case(T, IDS, C, {"mask_token": MASK, "quota": 2, **options})
    after = run(device_impl, case)
    good = expected(case.sequence(0))
    assert all(torch.equal(x[:1], y) for x, y in zip(after, good))
    assert torch.equal(after.tokens[1], T[1]) and not after.committed[1].any()
    for (start, end), left in zip(case.windows(1), after.remaining[1].flatten().tolist()):
        assert left == max(0, min(end, 4) - max(start, 0))


def test_float64_confidence_is_for_the_reference() -> None:
    """It distinguishes values that float32 does not."""
    tokens = torch.full((1, 2), MASK)
    pd.unmask_(
        tokens,
        tokens * 0,
        torch.tensor([[0.5, 0.5 + 1e-12]], dtype=torch.float64),
        mask_token=MASK,
        backend="reference",
    )
    assert tokens.tolist() == [[MASK, 0]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_debug_checks_raise_on_cuda(monkeypatch) -> None:
    monkeypatch.setattr(_library, "DEBUG_CHECKS", True)
    with pytest.raises(ValueError, match="positions must be distinct"):
        pd.unmask_(T.cuda(), IDS.cuda(), C.cuda(), mask_token=MASK, positions=P.clamp(min=0).cuda())
