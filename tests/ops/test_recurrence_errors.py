"""What the recurrence ops refuse, and their messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pdkernels as pd
from pdkernels.ops import library as _library
from tests.ops.recurrence_cases import Wave, make_rows
from tests.support.errors import kind_of, refused

ROWS = make_rows(1, batch=2, rows=4, size=8)
ROWS.width.fill_(4), ROWS.advance.zero_(), ROWS.recurrences.fill_(4)
NAMES = ("state", "embedding", "previous_embedding", "recurrences", "cursor", "width", "advance", "steps")
INJECT = dict(zip(NAMES, ROWS.inject_arguments()))
EXIT = dict(zip(("x", "residual", "weight", "previous", "recurrences", "width", "advance"), ROWS.exit_arguments())) | {
    "threshold": 0.03
}
ADVANCE = Wave(
    torch.zeros(2, 5, dtype=torch.int64),
    torch.zeros(2, 4, dtype=torch.int64),
    torch.zeros(2, 4, dtype=torch.int64),
    torch.zeros(2, 4, dtype=torch.int64),
    *(torch.tensor([n, n]) for n in (3, 9, 0, 1, 50)),
)._asdict() | {"inner_recurrence": 4}
E = ROWS.embedding
CONVERGED = torch.zeros(2, 4, dtype=torch.bool)
LONG = torch.zeros(2, 9, dtype=torch.int64)


def two(first: int, second: int) -> torch.Tensor:
    return torch.tensor([first, second])


BAD_INJECT = [
    ({"embedding": E[0]}, r"inject: embedding must have shape \(any, any, any\), got \(4, 8\)"),
    ({"embedding": E.long()}, "TypeError: embedding must be float32, float16 or bfloat16, got torch.int64"),
    ({"state": E.half()}, "TypeError: state must be torch.float32 like the others, got torch.float16"),
    ({"state": E[:1]}, r"state must have shape \(2, any, 8\), got \(1, 4, 8\)"),
    ({"state": E.transpose(1, 2).contiguous().transpose(1, 2)}, "state must have a contiguous last dimension"),
    ({"previous_embedding": ROWS.older[:, :1]}, r"previous_embedding must have shape \(2, \d, 8\)"),
    ({"recurrences": ROWS.recurrences[:, :3]}, r"recurrences must have at least 4 columns, got \(2, 3\)"),
    ({"recurrences": E}, "TypeError: recurrences must be an int32 or int64 tensor, got torch.float32"),
    ({"width": two(4, 5)}, r"width must be in \[0, 4\], got 5 for sequence 1\. It counts"),
    ({"cursor": two(-1, 0)}, "cursor must not be negative, got -1 for sequence 0"),
    ({"advance": two(0, -1)}, "advance must not be negative, got -1 for sequence 1"),
    (
        {"advance": two(0, 9)},
        r"state must have the rows that recurrences counts, got \d rows, and row 0 of sequence 1 was row 9",
    ),
    ({"steps": torch.tensor(1)}, r"steps must have shape \(2\), got \(\)"),
    ({"steps": two(1, 2).to("meta")}, "steps must be on cpu, got meta"),
    ({"noise": -0.5}, "noise must be finite and not negative, got -0.5"),
    ({"noise": float("nan")}, "noise must be finite and not negative, got nan"),
    ({"momentum": 1.5}, r"momentum must be in \[0, 1\], got 1.5"),
    ({"init_std": float("inf")}, "init_std must be finite and not negative, got inf"),
    ({"horizon": 0}, "horizon must be at least 1, got 0"),
    ({"horizon": 1.5}, "TypeError: horizon must be an int, got float"),
    ({"damp_new": "x"}, "TypeError: damp_new must be a bool, got str"),
    ({"seed": "x"}, "TypeError: seed must be an int, got str"),
    ({"schedule": "cosine"}, "schedule must be one of 'constant', 'linear', 'harmonic', 'root', got 'cosine'"),
    ({"mixer": "cubic"}, "mixer must be one of 'linear', 'sqrt', got 'cubic'"),
    ({"new_state": None}, "new_state must be one of 'fresh', 'copied', got None"),
    ({"backend": "triton"}, "NotImplementedError: backend must be one of auto, native, reference on cpu"),
]
BAD_EXIT = [
    ({"x": E[..., None]}, r"exit: x must have shape \(any, any, any\), got \(2, 4, 8, 1\)"),
    ({"x": 3}, "TypeError: x must be a tensor, got int"),
    ({"residual": E[:, :3]}, r"residual must have shape \(2, 4, 8\), got \(2, 3, 8\)"),
    ({"weight": torch.ones(9)}, r"weight must have shape \(8\), got \(9,\)"),
    ({"weight": torch.ones(8).half()}, "TypeError: weight must be torch.float32 like the others"),
    ({"previous": E[:, :, :7]}, r"previous must have shape \(2, any, 8\)"),
    ({"older": E}, "exit: older is given without older_advance. A second difference"),
    ({"older": E, "previous": None}, "older is given without previous and older_advance"),
    ({"older_advance": two(0, 0)}, "older_advance is given without older"),
    ({"older": E, "older_advance": two(0, -2)}, "older_advance must not be negative, got -2 for sequence 1"),
    ({"width": two(-1, 4)}, r"width must be in \[0, 4\], got -1 for sequence 0"),
    ({"min_recurrences": 0}, "min_recurrences must be at least 1, got 0. A row that is new"),
    ({"min_recurrences": "x"}, "TypeError: min_recurrences must be an int, got str"),
    ({"eps": None}, "TypeError: eps must be a number, got NoneType"),
    ({"eps": -1e-6}, "eps must be at least 0, got -1e-06"),
    ({"eps": float("nan")}, "eps must be at least 0, got nan"),
    ({"threshold": None}, "TypeError: threshold must be a number, got NoneType"),
    ({"threshold": float("nan")}, "threshold must be a number, got nan"),
]
BAD_ADVANCE = [
    ({"tokens": LONG}, r"advance_: recurrences must have shape \(2, 8\), got \(2, 4\)"),
    ({"tokens": E}, "TypeError: tokens must be an int32 or int64 tensor"),
    ({"predictions": LONG}, r"predictions must have at most 4 columns, got \(2, 9\)"),
    ({"unchanged_steps": LONG}, r"unchanged_steps must have shape \(2, 4\)"),
    ({"converged": CONVERGED.long()}, "TypeError: converged must be a bool tensor, got torch.int64"),
    ({"converged": CONVERGED[:, :2]}, r"converged must have shape \(2, 4\) like predictions, got \(2, 2\)"),
    ({"width": two(3, 5)}, r"width must be in \[0, 4\], got 5 for sequence 1"),
    ({"max_wavefront": "x"}, "TypeError: max_wavefront must be an int, got str"),
    ({"headway": 1.5}, "TypeError: headway must be an int, got float"),
    ({"keep_changed": "x"}, "TypeError: keep_changed must be a bool, got str"),
    ({"max_wavefront": 2}, r"width must be in \[0, 2\], got 3 for sequence 0"),
    ({"remaining": two(3, -1)}, "remaining must not be negative, got -1 for sequence 1"),
    ({"max_wavefront": 0}, "max_wavefront must be at least 1, got 0. Pass None"),
    ({"max_wavefront": 5}, "max_wavefront must be at most the capacity of 4 rows, got 5"),
    ({"inner_recurrence": 0}, "inner_recurrence must be at least 1, got 0"),
    ({"headway": 0}, "headway must be at least 1, got 0"),
    ({"stability": -1}, "stability must be at least 0, got -1"),
    ({"headway": 3, "filler": LONG}, r"filler must have shape \(2, 2\), got \(2, 9\)"),
    ({"end_tokens": 7}, "TypeError: end_tokens must be an int32 or int64 tensor, got int"),
    ({"rule": "first"}, "rule must be one of 'prefix', 'last', got 'first'"),
]
BAD = [
    (op, good, *row)
    for op, good, rows in (
        (pd.recurrence_inject, INJECT, BAD_INJECT),
        (pd.recurrence_exit, EXIT, BAD_EXIT),
        (pd.recurrence_advance_, ADVANCE, BAD_ADVANCE),
    )
    for row in rows
]


@pytest.mark.parametrize(
    "op, good, change, text",
    BAD,
    ids=[f"{op.__name__}-{'-'.join(change)}-{i}" for i, (op, _, change, *_) in enumerate(BAD)],
)
def test_bad_call(op: Callable, good: dict, change: dict[str, object], text: str) -> None:
    call = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in good.items()}
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    with refused(text):
        op(**{**call, **change})
    assert all(torch.equal(call[name], x) for name, x in before.items()), "something was written"


@pytest.mark.parametrize(
    "op, good, change, text", [case for case in BAD if set(case[2]) <= {"width", "cursor", "advance", "remaining"}]
)
def test_the_reference_refuses_the_same_values(op: Callable, good: dict, change: dict[str, object], text: str) -> None:
    kind, text = kind_of(text)
    with pytest.raises(kind, match=text.split(r"\. It counts")[0]):
        op(**{**good, **change}, backend="reference")


@pytest.mark.parametrize("op, good", [(pd.recurrence_inject, INJECT), (pd.recurrence_exit, EXIT)])
def test_a_gradient_is_refused_where_one_is_recorded(op: Callable, good: dict) -> None:
    for name in [name for name, x in good.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]:
        call = {**good, name: good[name].clone().requires_grad_()}
        with pytest.raises(
            NotImplementedError,
            match=rf"{name} must not require a gradient, got a tensor that does\. Call it under torch\.no_grad",
        ):
            op(**call)
        with torch.no_grad():
            op(**call)


@pytest.mark.parametrize("op, good", [(pd.recurrence_inject, INJECT), (pd.recurrence_exit, EXIT)])
def test_float64_is_for_the_reference(op: Callable, good: dict) -> None:
    exact = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in good.items()
    }
    with pytest.raises(TypeError, match="for the kernels, got torch.float64. Pass backend='reference'"):
        op(**exact)
    op(**exact, backend="reference")


def test_wild_values_stay_inside_on_cuda(device_impl) -> None:
    """A width is taken as the nearest allowed one, a row without a state as new, one without a comparison as not converged."""
    rows = ROWS.to(device_impl.device)
    wild = rows._replace(
        width=two(2**40, -5).to(device_impl.device), advance=two(-(2**35), 2**35).to(device_impl.device)
    )
    result = device_impl.recurrence_inject(*wild.inject_arguments(), noise=0.5, momentum=0.1)
    new = device_impl.recurrence_inject(
        None, *wild._replace(width=two(4, 0).to(device_impl.device)).inject_arguments()[1:], noise=0.5
    )
    assert torch.equal(result, new)
    left = device_impl.recurrence_exit(*wild.exit_arguments(), threshold=1.0)
    assert left.distance.isinf().all() and (left.state[1] == 0).all() and (left.state[0] != 0).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_debug_checks_raise_on_cuda(monkeypatch) -> None:
    monkeypatch.setattr(_library, "DEBUG_CHECKS", True)
    cuda = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in ADVANCE.items()}
    with pytest.raises(ValueError, match="remaining must not be negative"):
        pd.recurrence_advance_(**{**cuda, "remaining": two(3, -1).cuda()})
