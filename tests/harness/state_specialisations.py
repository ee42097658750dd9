"""The kinds of arguments of steps of layers with a state: see `tests.harness.specialisations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.harness.choices import ABSENT, DTYPES, INDEX, LAYOUTS, Choices, index, zeros

# Of a step of a layer with a state.
_STATE: Choices = {
    "dtype": DTYPES,
    "batch": (1, 2),
    "rows": (1, 5),
    "layout": LAYOUTS,
    "lengths": INDEX,
    "counts": index(("sequence",)),
    "cache_rows": index(("sequence",)),
    "pending_index": index(("row",)),
    # The rows that a step keeps: all, of which some may be in a tree, or none, or the last ones.
    "keep": (ABSENT, *(("tree", dtype) for dtype in INDEX), 0, 2),
}
_SCAN: Choices = {
    **_STATE,
    "heads": ((1, 1), (4, 2), (6, 1)),
    "keys": (1, 20, 128),
    "values": (1, 20, 128),
    "gates": DTYPES,
}
CHOICES: dict[str, Choices] = {
    "gated_delta_": {
        **_SCAN,
        "scale": (ABSENT, 0.5),
        "l2norm_eps": (ABSENT, 1e-6),
        "A": (ABSENT, *DTYPES),
        "dt_bias": (False, True),
        "sigmoid_beta": (False, True),
    },
    "selective_state_": {
        **_SCAN,
        "dt": (False, True),
        "D": (ABSENT, *DTYPES),
        "dt_bias": (False, True),
        "dt_softplus": (False, True),
        "dt_limit": ((0.0, float("inf")), (1e-3, 0.1)),
    },
    "short_conv_": {
        **_STATE,
        "channels": (1, 40, 300),
        "taps": (1, 3, 4),
        "bias": (False, True),
        "activation": ("none", "silu"),
    },
    "state_commit_": {
        "batch": (1, 2),
        "lengths": INDEX,
        "pending_index": INDEX,
        "state_lengths": (("layer", "int32"), ("layer", "int64"), ("stacked", "int32"), ("list", "int64")),
        "counts": INDEX,
        "source_index": index(("row",)),
        "advance": (False, True),
    },
    "state_trim_": {
        "batch": (1, 2),
        "lengths": INDEX,
        "new_lengths": INDEX,
        "state_lengths": (("layer", "int32"), ("layer", "int64"), ("stacked", "int32"), ("list", "int64")),
    },
}
OTHERS = {"weight", "state", "state_lengths", "pending", "parents", "g", "beta", "B", "C", "A"}
OTHERS |= {f"pending_{name}" for name in ("k", "update", "g", "x", "B", "dt")}


def _numbers(dtype: str, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def _step_options(given: dict[str, Any], size: int, most: int) -> dict[str, Any]:
    """What the steps of all layers with a state take: lengths and state_lengths, and options."""
    batch, rows, keep = given["batch"], given["rows"], given["keep"]
    options: dict[str, Any] = {"keep": None if isinstance(keep, tuple) else keep}
    shapes = {"counts": (batch,), "cache_rows": (batch,), "pending_index": (size, most)}
    options |= {name: _numbers(given[name][1], *shape) for name, shape in shapes.items() if given[name] is not None}
    if isinstance(keep, tuple):
        options["parents"] = _numbers(keep[1], batch, rows)
    return options


def _call_scan(function: Callable[..., Any], given: dict[str, Any]) -> None:
    (heads, key_heads), keys, values, layout = given["heads"], given["keys"], given["values"], given["layout"]
    batch, rows, dtype, most = given["batch"], given["rows"], given["dtype"], 6
    size = batch if given["cache_rows"] is None else batch + 1

    def rows_and_pending(*shape: int, dtype: str) -> list[Tensor]:
        return [zeros(layout, *one, *shape, dtype=dtype) for one in ((batch, rows), (size, most))]

    k, v = rows_and_pending(key_heads, keys, dtype=dtype), rows_and_pending(heads, values, dtype=dtype)
    gate, beta = rows_and_pending(heads, dtype=given["gates"]), zeros(layout, batch, rows, heads, dtype=given["gates"])
    q = zeros(layout, batch, rows, key_heads, keys, dtype=dtype)
    state, held = zeros(layout, size, heads, keys, values, dtype="float32"), _numbers(given["lengths"], size)
    lengths, options = _numbers(given["lengths"], size), _step_options(given, size, most)
    if "dt" not in given:
        options |= {name: given[name] for name in ("scale", "l2norm_eps", "sigmoid_beta")}
        if given["A"] is not None:
            options["A"] = _numbers(given["A"], heads)
            options["dt_bias"] = _numbers(dtype, heads) if given["dt_bias"] else None
        update = zeros(layout, size, most, heads, values, dtype="float32")
        function(state, held, k[1], update, gate[1], q, k[0], v[0], gate[0], beta, lengths, **options)
        return
    options["D"] = None if given["D"] is None else _numbers(given["D"], heads)
    if given["dt"]:
        options |= {"dt_softplus": given["dt_softplus"], "dt_limit": given["dt_limit"]}
        options["dt_bias"] = _numbers(dtype, heads) if given["dt_bias"] else None
    else:
        gate = [None, None]  # type: ignore[list-item]
    A = _numbers("float32", heads)
    function(state, held, v[1], k[1], gate[1], v[0], k[0], q, gate[0], A, lengths, **options)


def _call_conv(function: Callable[..., Any], given: dict[str, Any]) -> None:
    batch, channels, width, dtype, layout = (given[name] for name in ("batch", "channels", "taps", "dtype", "layout"))
    size, most = batch if given["cache_rows"] is None else batch + 1, 6
    state, held = zeros(layout, size, width - 1, channels, dtype=dtype), _numbers(given["lengths"], size)
    x, pending = (zeros(layout, *one, channels, dtype=dtype) for one in ((batch, given["rows"]), (size, most)))
    weight, bias = zeros(layout, channels, width, dtype=dtype), _numbers(dtype, channels) if given["bias"] else None
    options = {"bias": bias, "activation": given["activation"], **_step_options(given, size, most)}
    function(state, held, pending, x, weight, _numbers(given["lengths"], size), **options)


def _layer_lengths(given: dict[str, Any]) -> Tensor | list[Tensor]:
    kind, dtype = given["state_lengths"]
    layer, stacked = _numbers(dtype, given["batch"]), _numbers(dtype, 3, given["batch"])
    return {"layer": layer, "stacked": stacked, "list": [layer, stacked]}[kind]


def _call_commit(function: Callable[..., Any], given: dict[str, Any]) -> None:
    batch, source = given["batch"], given["source_index"]
    function(
        _numbers(given["lengths"], batch), _numbers(given["pending_index"], batch, 6), _layer_lengths(given),
        _numbers(given["counts"], batch), None if source is None else _numbers(source[1], batch, 4), advance=given["advance"],
    )  # fmt: skip


def _call_trim(function: Callable[..., Any], given: dict[str, Any]) -> None:
    batch = given["batch"]
    function(_numbers(given["lengths"], batch), _numbers(given["new_lengths"], batch), _layer_lengths(given))


CALLS: dict[str, Callable[[Callable[..., Any], dict[str, Any]], None]] = {
    "gated_delta_": _call_scan,
    "selective_state_": _call_scan,
    "short_conv_": _call_conv,
    "state_commit_": _call_commit,
    "state_trim_": _call_trim,
}
LARGE: dict[str, dict[str, Any]] = {key: {"batch": 70000} for key in CHOICES}
