"""Layers with a state on one cache, and random rows for them: what the tests of `pdkernels.ops.recurrent_state` share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.reference import recurrent_state as reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Run = Callable[..., Any]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


class Layer:
    """A kind of layer, its sizes and its weights. Rows are `inputs`: those that are kept, in the op's order, then the others."""

    op: str

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def shapes(self) -> list[tuple[int, ...]]:
        """Of a row of each input that is kept, or from which what is kept is computed."""
        raise NotImplementedError

    def exact(self) -> torch.dtype:
        """Of a state that is a matrix, and of updates."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def kept(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Of what is pending of a row."""
        return [(shape, self.dtype) for shape in self.shapes()]

    def state_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def rows(self, batch: int, count: int) -> list[Tensor]:
        raise NotImplementedError

    def arguments(self, cache: Cache, rows: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The op's arguments and options that are not those of a step."""
        raise NotImplementedError

    def double(self) -> Layer:
        """The same layer in float64."""
        made = type(self).__new__(type(self))
        made.__dict__ = {name: x.double() if isinstance(x, Tensor) else x for name, x in self.__dict__.items()}
        made.dtype = torch.float64
        return made


class Delta(Layer):
    op = "gated_delta_"

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, heads: int = 4, key_heads: int = 2,
                 keys: int = 20, values: int = 37, gates: bool = True, norm: bool = True) -> None:  # fmt: skip
        super().__init__(seed, dtype)
        self.heads, self.key_heads, self.keys, self.values = heads, key_heads, keys, values
        self.gates, self.norm = gates, norm
        self.A, self.dt_bias = -self.floats(heads, dtype=torch.float32).exp(), self.floats(heads)

    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.key_heads, self.keys), (self.heads, self.values), (self.heads,), (self.heads,)]

    def kept(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        k, update, g, _ = self.shapes()
        return [(k, self.dtype), (update, self.exact()), (g, self.dtype)]

    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.keys, self.values

    def rows(self, batch: int, count: int) -> list[Tensor]:
        k, v, g, beta = (self.floats(batch, count, *shape) for shape in self.shapes())
        if not self.gates:
            g, beta = -g.abs(), beta.sigmoid()
        if not self.norm:  # with longer ones a state grows without bounds
            k = k * self.keys**-0.5 / 2
        return [k, v, g, beta, self.floats(batch, count, self.key_heads, self.keys)]

    def arguments(self, cache: Cache, rows: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        k, v, g, beta, q = rows
        gates = {"A": self.A, "dt_bias": self.dt_bias, "sigmoid_beta": True} if self.gates else {}
        return [q, k, v, g, beta], {**gates, "l2norm_eps": 1e-6 if self.norm else None}


class Selective(Layer):
    op = "selective_state_"

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, heads: int = 4, key_heads: int = 2,
                 keys: int = 20, values: int = 37, constant: bool = False) -> None:  # fmt: skip
        super().__init__(seed, dtype)
        self.heads, self.key_heads, self.keys, self.values, self.constant = heads, key_heads, keys, values, constant
        self.A = -self.floats(heads, dtype=torch.float32).exp()
        self.D, self.dt_bias = self.floats(heads), self.floats(heads)

    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.heads, self.values), (self.key_heads, self.keys), *([] if self.constant else [(self.heads,)])]

    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.keys, self.values

    def rows(self, batch: int, count: int) -> list[Tensor]:
        shapes = [*self.shapes(), (self.key_heads, self.keys)]
        return [self.floats(batch, count, *shape) for shape in shapes]

    def arguments(self, cache: Cache, rows: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        x, B, *dt, C = rows
        options = {} if self.constant else {"D": self.D, "dt_bias": self.dt_bias, "dt_softplus": True}
        return [x, B, C, *(dt or [None]), self.A], options


class Conv(Layer):
    op = "short_conv_"

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, channels: int = 277, width: int = 4,
                 activation: str = "silu") -> None:  # fmt: skip
        super().__init__(seed, dtype)
        self.channels, self.width, self.activation = channels, width, activation
        self.weight, self.bias = self.floats(channels, width), self.floats(channels)

    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.channels,)]

    def state_shape(self) -> tuple[int, ...]:
        return self.width - 1, self.channels

    def rows(self, batch: int, count: int) -> list[Tensor]:
        return [self.floats(batch, count, self.channels)]

    def arguments(self, cache: Cache, rows: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        return [*rows, self.weight], {"bias": self.bias, "activation": self.activation}


LAYERS: dict[str, Callable[..., Layer]] = {
    "delta": Delta,
    "delta, plain": lambda *given, **sizes: Delta(*given, **{"gates": False, "norm": False, **sizes}),
    "mamba": Selective,
    "lightning": lambda *given, **sizes: Selective(*given, **{"constant": True, **sizes}),
    "conv": Conv,
}
SMALL = {"heads": 2, "key_heads": 1, "keys": 3, "values": 5}


def small(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Layer:
    return LAYERS[name](seed, dtype, **({"channels": 5} if name == "conv" else SMALL))


class Cache:
    """The memory of one layer. What was never written is NaN."""

    def __init__(self, layer: Layer, size: int, max_pending: int, device: str | torch.device = "cpu") -> None:
        nan, own = float("nan"), layer.dtype if layer.op == "short_conv_" else layer.exact()
        self.layer, self.device = layer, device
        self.state = torch.full((size, *layer.state_shape()), nan, dtype=own, device=device)
        self.pending = [
            torch.full((size, max_pending, *shape), nan, dtype=dtype, device=device) for shape, dtype in layer.kept()
        ]
        self.state_lengths, self.lengths = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        self.pending_index = torch.full((size, max_pending), -1, device=device)

    def step(self, rows: list[Tensor], run: Any = pd, **options: Any) -> Tensor:
        """`run`: what has the ops, `pdkernels` or a module with their Triton or reference form."""
        given, fixed = self.layer.arguments(self, rows)
        given = [x.to(self.device) if isinstance(x, Tensor) else x for x in given]
        fixed = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in fixed.items()}
        pending = [*self.pending, *([None] if isinstance(self.layer, Selective) and self.layer.constant else [])]
        options = {"pending_index": self.pending_index, **options, **fixed}
        return getattr(run, self.layer.op)(
            self.state, self.state_lengths, *pending, *given, self.lengths, **{k: x for k, x in options.items() if x is not None}
        )  # fmt: skip

    def commit(self, counts: list[int], source: list[list[int]] | None = None) -> None:
        index = None if source is None else torch.tensor(source, device=self.device)
        counted = torch.tensor(counts, device=self.device)
        pd.state_commit_(self.lengths, self.pending_index, self.state_lengths, counted, index)

    def to(self, device: str) -> None:
        """Moves this cache and its layer."""
        for one in (self, self.layer):
            for name, x in vars(one).items():
                if isinstance(x, Tensor):
                    setattr(one, name, x.to(device))
        self.pending, self.device = [x.to(device) for x in self.pending], device

    def tensors(self) -> list[Tensor]:
        return [self.state, *self.pending, self.state_lengths]

    def copy(self, double: bool = False) -> Cache:
        made = Cache.__new__(Cache)
        made.layer, made.device = self.layer.double() if double else self.layer, self.device

        def of(x: Tensor) -> Tensor:
            return x.double() if double and x.is_floating_point() else x.clone()

        made.state, made.pending = of(self.state), [of(x) for x in self.pending]
        made.state_lengths, made.lengths = self.state_lengths.clone(), self.lengths.clone()
        made.pending_index = self.pending_index.clone()
        return made


def part(rows: list[Tensor], begin: int, end: int) -> list[Tensor]:
    return [x[:, begin:end] for x in rows]


def random_tree(rng: random.Random, count: int, path: int = 0) -> list[int]:
    """Mostly paths; the first `path` rows are one, which the others follow."""
    return [i - 1 if i < path or rng.random() < 0.6 else rng.randrange(min(i, path) - 1, i) for i in range(count)]


def path_to(parents: list[int], row: int) -> list[int]:
    found: list[int] = []
    while row >= 0:
        found.append(row)
        row = parents[row]
    return found[::-1]


def random_step(seed: int, name: str, dtype: torch.dtype, most: int = 40) -> tuple[Cache, list[Tensor], dict[str, Any]]:
    """A cache with rows in all situations, and the arguments of a step of up to `most` rows on it."""
    rng = random.Random(seed)
    sizes: dict[str, int] = {}
    if name == "conv":
        sizes = {"channels": rng.choice([1, 16, 40, 300]), "width": rng.choice([1, 2, 3, 4, 4])}
    else:
        key_heads = rng.choice([1, 2])
        sizes = {"heads": key_heads * rng.choice([1, 2, 3]), "key_heads": key_heads}
        sizes |= {"keys": rng.choice([1, 16, 20, 64]), "values": rng.choice([1, 16, 37, 64, 128, 150])}
    layer = LAYERS[name](seed, dtype, **sizes)
    size, max_pending, rows = rng.randint(1, 3), rng.choice([2, 5, most]), rng.choice([1, 3, 9, most])
    cache = Cache(layer, size, max_pending)
    before = layer.rows(size, rng.choice([1, 7]))
    for pending, given in zip(cache.pending, layer.rows(size, max_pending)):
        pending.copy_(given)
    cache.step(before, reference, keep=0)
    cache.lengths.copy_(cache.state_lengths)
    for r in range(size):
        if rng.random() < 0.3:
            cache.state_lengths[r] = cache.lengths[r] = 0
            cache.state[r] = float("nan")
        cache.lengths[r] += rng.choice([0, rng.randint(0, max_pending)])
        cache.pending_index[r] = torch.tensor([rng.randrange(max_pending) for _ in range(max_pending)])
    batch = rng.randint(1, size)
    options: dict[str, Any] = {"keep": rng.choice([None, 0, rng.randint(0, max_pending)])}
    limit = rows if options["keep"] is not None else min(rows, max_pending)
    if rng.random() < 0.7 or limit < rows:
        options["counts"] = torch.tensor([rng.choice([0, limit, rng.randint(0, limit)]) for _ in range(batch)])
    if batch < size or rng.random() < 0.5:
        options["cache_rows"] = torch.tensor(
            rng.sample(range(size), batch), dtype=rng.choice([torch.int32, torch.int64])
        )
    if rng.random() < 0.6:
        counted = options.get("counts", torch.full((batch,), rows)).tolist()
        settled = [0 if options["keep"] is None else max(count - options["keep"], 0) for count in counted]
        options["parents"] = torch.tensor([random_tree(rng, rows, path) for path in settled])
    return cache, layer.rows(batch, rows), options
