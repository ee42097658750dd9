"""A step of a long generation takes the memory of the first ones, and never a copy of the cache or unread logits."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdkernels import backends
from pdkernels.decoding import generate
from pdkernels.models import Transformer, TransformerConfig
from tests.ops.test_block_sparse_attention_memory import peak_can_be_reset
from tests.support.base import KeepsCache

VOCABULARY = 211
DRAFT = 4  # tokens of a draft
needs_kernel = pytest.mark.skipif(
    ("native", "cpu") not in backends.CHOICES.get("speculative_attention", {}), reason="no compiled kernel for the CPU"
)
needs_peaks = pytest.mark.skipif(
    not peak_can_be_reset(), reason="the system does not let a process forget its peak of memory"
)

METHODS = {"quadratic_self_speculation": {"block_size": DRAFT}, "linear_self_speculation": {"block_size": DRAFT}}


def random_model(heads: int, kv_heads: int, head_dim: int) -> Transformer:
    """Fills masks at random: nearly every draft is rejected, so that a token takes a step."""
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=48,
    )
    return Transformer(config, mask_token=VOCABULARY - 1).requires_grad_(False)


class Allocations(TorchDispatchMode):
    """What ops return in newly allocated memory: `(op, shape, bytes)` each.

    Tracing is many times slower than what it traces, so it covers only some forwards, and what follows them up to the next one.
    """

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self.watched = watched
        self.forwards = 0
        self.kinds: list[tuple[int, bool]] = []  # for each traced forward: its width, and whether it is causal
        self.made: list[list[tuple[str, tuple[int, ...], int]]] = []

    def begin(self, kind: tuple[int, bool]) -> None:
        """The next forward."""
        if self.forwards in self.watched:
            self.__exit__(None, None, None)
        self.forwards += 1
        if self.forwards in self.watched:
            self.kinds.append(kind)
            self.made.append([])
            self.__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # decomposed into its ops
            result = op.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = op(*args, **kwargs)
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self.made[-1].append((str(op), tuple(leaf.shape), leaf.untyped_storage().nbytes()))
        return result


class LongPast(KeepsCache):
    """A model whose caches start with `past` rows, as after a long conversation. It reports its forwards to `log`."""

    def __init__(self, model: Transformer, past: int, log: Allocations | None = None) -> None:
        super().__init__(model)
        self.past, self.log = past, log

    def new_cache(self, batch: int, capacity: int, **options: Any) -> Any:
        cache = super().new_cache(batch, self.past + capacity, **options)
        if cache.block_table is not None:
            cache.reserve_([self.past + capacity] * batch)
        for rows in (cache.k, cache.v):
            rows.normal_(generator=torch.Generator().manual_seed(1))
        return cache

    def __call__(self, tokens: Tensor, **options: Any) -> Tensor:
        self._begin(tokens, options)
        return self.model(tokens, **options)

    def hidden(self, tokens: Tensor, **options: Any) -> Tensor:
        self._begin(tokens, options)
        return self.model.hidden(tokens, **options)

    def _begin(self, tokens: Tensor, options: dict[str, Any]) -> None:
        if not self.cache.lengths.any():  # the prompt: a decoder may have emptied the cache before it
            self.cache.commit_(torch.full_like(self.cache.lengths, self.past))
        if self.log is not None:
            self.log.begin((tokens.shape[1], options.get("mask") is None))


def watch(
    model: Transformer, past: int, method: str, limit: int, forwards: list[int], page_size: int | None = None
) -> tuple[Allocations, int]:
    """What the given forwards (the prompt's is number 1) allocate, and the bytes of K in the cache."""
    log = Allocations(set(forwards))
    watched = LongPast(model, past, log)
    result = generate(watched, [3, 1, 4], method, max_new_tokens=limit, page_size=page_size, **METHODS[method])
    assert result.stats.forwards == log.forwards > max(forwards)
    return log, watched.cache.k.nbytes


@pytest.mark.covering
@needs_kernel
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_step_500_takes_the_memory_of_step_5(method: str, page_size: int | None) -> None:
    per_step = 1 if method == "quadratic_self_speculation" else 2  # a draft pass and a verify pass
    forwards = [step * per_step + i for step in (5, 50, 250, 500) for i in range(2 * per_step)]
    log, layer = watch(random_model(4, 2, 16), 1500, method, 620, forwards, page_size)
    assert len(set(log.kinds)) == per_step
    for kind, made in zip(log.kinds, log.made, strict=True):
        assert made == log.made[log.kinds.index(kind)]
    nbytes, op, shape = max((nbytes, op, shape) for made in log.made for op, shape, nbytes in made)
    assert nbytes < layer / 8, (op, shape)
    assert all(0 < sum(nbytes for *_, nbytes in made) < layer for made in log.made)


@pytest.mark.parametrize("page_size", [None, 16])
def test_the_measurement_sees_copies(page_size: int | None) -> None:
    """In fp64 no kernel applies: a forward copies its prefix, and more of it every time."""
    log, layer = watch(random_model(4, 2, 16).double(), 300, "quadratic_self_speculation", 60, [3, 4, 20], page_size)
    assert max(nbytes for made in log.made for *_, nbytes in made) > layer / 2
    sizes = [sum(nbytes for *_, nbytes in made) for made in log.made]
    assert sizes == sorted(set(sizes))


def went_through_the_head(op: str, shape: tuple[int, ...], nbytes: int) -> bool:
    """Logits, or the top ids (k = 1, int64) of an op that takes hidden states and stores no logits."""
    stored = shape[-1:] == (VOCABULARY,)
    return stored or ("linear_token_statistics" in op and shape[-1:] == (1,) and nbytes == 8 * math.prod(shape))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_logits_of_rows_that_are_read(method: str) -> None:
    """Of L (L + 1) rows in a quadratic step 2 L - 1: the draft's L, then the L - 1 of one group."""
    log, _ = watch(random_model(4, 2, 16), 0, method, 60, list(range(3, 13)))
    rows = [[entry[1][-2] for entry in made if went_through_the_head(*entry)] for made in log.made]
    if method == "quadratic_self_speculation":
        assert set(log.kinds) == {(DRAFT * (DRAFT + 1), False)}
        assert rows == [[DRAFT, DRAFT - 1]] * 10
    else:
        assert set(log.kinds) == {(DRAFT, False), (DRAFT, True)}
        assert rows == [[DRAFT if causal else DRAFT - 1] for _, causal in log.kinds]


# Compiled code may allocate outside of ops: here the peak memory of a process is measured.
PROGRAM = """
import sys
import torch
from pdkernels.decoding import generate
from tests.decoding.test_memory import METHODS, LongPast, random_model

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

def reset(*_):
    if len(seen) == 20:  # code is loaded, plans are made
        start.append(status("VmRSS"))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    seen.append(0)

seen, start = [], []
method, page_size, double = sys.argv[1], int(sys.argv[2]) or None, sys.argv[3] == "double"
torch.set_num_threads(1)
model = random_model(2, 2, 128)
watched = LongPast(model.double() if double else model, 4096)
limit = 60 if double else 520
result = generate(watched, [3, 1, 4], method, max_new_tokens=limit, page_size=page_size, on_tokens=reset, **METHODS[method])
print([status("VmHWM") - start[0], watched.cache.k.nbytes, result.stats.forwards])
"""


def resident_growth(method: str, page_size: int | None, dtype: str) -> list[int]:
    """Peak bytes of a generation beyond what it holds after a few steps; bytes of K in its cache; forwards."""
    # Freed blocks go back to the system at once: new tensors must not reuse memory that is already counted as resident.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    arguments = [sys.executable, "-c", PROGRAM, method, str(page_size or 0), dtype]
    answer = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.slow
@needs_peaks
@needs_kernel
@pytest.mark.parametrize(
    ("method", "page_size"),
    [pytest.param("quadratic_self_speculation", None, marks=pytest.mark.slow), ("linear_self_speculation", 16)],
)
def test_resident_memory_does_not_grow(method: str, page_size: int | None) -> None:
    growth, layer, forwards = resident_growth(method, page_size, "single")
    print(
        f"{method}: {growth / 2**20:.2f} MiB more in {forwards} forwards, K of the layer takes {layer / 2**20:.2f} MiB"
    )
    assert forwards >= 500 and growth < layer / 4


@pytest.mark.slow
@needs_peaks
def test_resident_memory_sees_copies() -> None:
    growth, layer, _ = resident_growth("quadratic_self_speculation", None, "double")
    assert growth > layer
