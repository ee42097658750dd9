"""What an op writes shares no memory with its other arguments; tensors that only interleave are allowed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pdkernels as pd
from pdkernels import _aliasing
from pdkernels.backends import ON_CUDA
from pdkernels.ops.library import OPS
from tests.ops.examples import Arguments, example, raw_arguments, run, tensors_in
from tests.ops.implementations import implementation

WRITERS = [name for name, spec in OPS.items() if spec.mutated]
# Every tensor that an op writes, with every other argument.
PAIRS = [
    (op, written, other)
    for op in WRITERS
    for written, other in itertools.product(OPS[op].mutated, example(op))
    if isinstance(example(op)[other], Tensor) and written != other
]
PLAN = pd.masks.causal(4).plan(16, 16)


def sharing(op: str, written: str, other: str, entries: int) -> tuple[Arguments, Tensor]:
    """The example with `other` right after the memory of `written`, or starting in its last entries; and the memory."""
    arguments = example(op)
    w, o = arguments[written], arguments[other]
    aligned = max(w.element_size(), o.element_size())
    offset = -(-w.nbytes // aligned) * aligned - entries * aligned
    memory = torch.zeros(max(offset, 0) + w.nbytes + o.nbytes + 64, dtype=torch.uint8)
    for name, at in ((written, 0), (other, max(offset, 0))):
        tensor = arguments[name]
        arguments[name] = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        arguments[name].copy_(tensor)
    return arguments, memory


@pytest.mark.parametrize("op, written, other", PAIRS)
def test_shared_memory_is_refused_and_left_alone(op: str, written: str, other: str) -> None:
    both = other in OPS[op].mutated
    pattern = "must not overlap the memory of " + ("" if both else rf"{written}, .*\.clone\(\), of {other}\.")
    for backend in ("auto", "reference"):
        arguments, memory = sharing(op, written, other, 1)
        before = memory.clone()
        with pytest.raises(ValueError, match=rf"pdkernels\.{op}: .*{pattern}"):
            run(op, arguments, backend=backend)
        assert torch.equal(memory, before)
    if ON_CUDA[op] == "triton":
        return
    arguments, memory = sharing(op, written, other, 1)
    before = memory.clone()
    with pytest.raises(RuntimeError, match="overlap"):
        getattr(implementation("cudasim"), op)(**arguments)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("op", WRITERS)
def test_neighbours_are_accepted(op: str) -> None:
    for written, other in {(w, o) for name, w, o in PAIRS if name == op}:
        arguments, expected = sharing(op, written, other, 0)[0], example(op)
        found, wanted = tensors_in(run(op, arguments)), tensors_in(run(op, expected))
        pairs = [*zip(found, wanted), *((arguments[name], expected[name]) for name in OPS[op].mutated)]
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("op", [op for op in WRITERS if op not in ("log_step_", "kv_trim_")])
def test_a_tensor_that_overlaps_itself_is_refused(op: str) -> None:
    for name in OPS[op].mutated:
        for backend in ("auto", "reference"):
            arguments = example(op)
            tensor = arguments[name]
            if tensor.dim() < 2:
                continue
            strides = (tensor.stride(1), *tensor.stride()[1:])  # one row of a batch starts at row 1 of the one before
            arguments[name] = tensor.clone().as_strided(tensor.shape, strides)
            with pytest.raises(ValueError, match=f"{name} must have a place in memory for each entry"):
                run(op, arguments, backend=backend)


def test_new_rows_inside_the_cache() -> None:
    k = torch.arange(8.0).view(1, 1, 8, 1, 1)
    v, before, lengths = k.clone(), k.clone(), torch.tensor([2])
    with pytest.raises(ValueError, match="k_new must not overlap the memory of k_cache, got tensors that share bytes"):
        pd.kv_append_(k, v, k[:, :, :4], v[:, :, :4].clone(), lengths)
    assert torch.equal(k, before) and torch.equal(v, before)
    pd.kv_append_(k, v, k[:, :, :4].clone(), v[:, :, :4].clone(), lengths)
    assert k.flatten().tolist() == [0, 1, 0, 1, 2, 3, 6, 7]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_layers_and_sides(backend: str) -> None:
    lengths, counts = torch.tensor([1]), torch.tensor([2])

    def layer() -> Tensor:
        return torch.randn(1, 6, 1, 2)

    one = layer()
    with pytest.raises(ValueError, match=r"k_cache\[1\] must not overlap the memory of k_cache\[0\].* its own memory"):
        pd.kv_commit_([one, one], [layer(), layer()], lengths, counts, backend=backend)
    with pytest.raises(ValueError, match=r"v_cache must not overlap the memory of k_cache"):
        pd.kv_commit_(one, one, lengths, counts, backend=backend)
    assert lengths.item() == 1
    # The rows that a commit moves are in the cache itself, which is not another tensor.
    pd.kv_commit_(one, layer(), lengths, counts, torch.tensor([[2, 3]]), backend=backend)
    assert lengths.item() == 3


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_interleaved_views_are_accepted(backend: str) -> None:
    """K and V of one buffer, state vectors as columns of one table."""
    buffers, expected = torch.randn(2, 8, 2, 2, 16), torch.randn(2, 8, 2, 2, 16)
    expected.copy_(buffers)
    new, lengths = (torch.randn(2, 4, 2, 16) for _ in range(3)), torch.tensor([1, 3])
    q, k, v = new
    out = pd.speculative_attention_append_(q, k, v, buffers[:, :, 0], buffers[:, :, 1], lengths, PLAN, backend=backend)
    apart = [expected[:, :, i].contiguous() for i in (0, 1)]
    assert torch.equal(
        out, pd.speculative_attention_append_(q, k, v, *apart, lengths, PLAN, backend=backend)
    ) and torch.equal(buffers, torch.stack(apart, 2))
    table = torch.tensor([[5, 2], [7, 3]])
    pd.kv_trim_(table[:, 0], table[:, 1], backend=backend)
    assert table.tolist() == [[2, 2], [3, 3]]


def test_a_compiled_graph_and_fake_tensors() -> None:
    def step(cache: Tensor, new: Tensor, lengths: Tensor) -> Tensor:
        pd.kv_append_(cache, cache + 1, new, new, lengths)
        return cache

    cache, lengths = torch.zeros(1, 8, 1, 2), torch.tensor([2])
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    compiled(cache, torch.ones(1, 2, 1, 2), lengths)
    assert cache[0, :, 0, 0].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    with pytest.raises(RuntimeError, match="overlap"):
        compiled(cache, cache[:, 1:3], lengths)
    with FakeTensorMode() as mode:
        arguments, options = raw_arguments("kv_trim_")
        OPS["kv_trim_"].overload(*(mode.from_tensor(x.clone()) for x in arguments), **options)


def test_the_search_is_exact() -> None:
    """Against all addresses of random layouts; `kv_trim_` asks the compiled code."""
    rng = random.Random(0)
    for _ in range(300):
        memory = torch.zeros(900, dtype=torch.uint8)
        views = []
        for _ in range(2):
            dtype = rng.choice([torch.uint8, torch.int32, torch.int64])
            sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
            strides = [rng.choice([1, 2, 3, 4, 5, 6, 8, 12]) for _ in sizes]
            start = rng.randint(0, 10)
            views.append(memory[: 900 // 8 * 8].view(dtype).as_strided(sizes, strides, start))
        (a, b) = views
        at = [_addresses(x, memory) for x in views]
        assert _aliasing.overlap(a, b) == bool(set(itertools.chain(*at[0])) & set(itertools.chain(*at[1])))
        if a.dim() == b.dim() == 1 and a.dtype == b.dtype == torch.int64 and a.shape == b.shape:
            refused = _aliasing.overlap(a, b) or _aliasing.overlaps_itself(a)
            assert _refused(a, b) == refused
        flat = list(itertools.chain(*at[0]))
        assert _aliasing.overlaps_itself(a) == (len(set(flat)) < len(flat))


def _refused(a: Tensor, b: Tensor) -> bool:
    try:
        torch.ops.pdkernels.kv_trim_(a, b)
    except RuntimeError as error:
        return "overlap" in str(error)
    return False


def _addresses(x: Tensor, memory: Tensor) -> list[list[int]]:
    """The bytes of each entry."""
    item, start = x.element_size(), x.data_ptr() - memory.data_ptr()
    offsets = [0]
    for size, stride in zip(x.shape, x.stride()):
        offsets = [at + i * stride for at in offsets for i in range(size)]
    return [[start + at * item + byte for byte in range(item)] for at in offsets]
