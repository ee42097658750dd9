"""Slices, FlexAttention, pictures and errors."""

from __future__ import annotations

import copy
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import pdkernels.masks as masks
from pdkernels.integrations.flex_attention import from_block_mask, to_block_mask
from tests.harness.pretended_gpu import pretended_gpu, without_gpu
from tests.masks.brute_force import brute_force, listed
from tests.masks.strategies import Call, build, calls, random_masks
from tests.support.errors import refused


@settings(max_examples=60)
@given(random_masks(12), st.data())
def test_slices(mask: masks.SegmentMask, data: st.DataObject) -> None:
    edge = st.one_of(st.none(), st.integers(-30, 30))
    rows, columns = (slice(data.draw(edge), data.draw(edge)) for _ in range(2))
    part = mask[rows, columns]
    assert torch.equal(part.dense(), mask.dense()[rows, columns])
    assert torch.equal(part.positions, mask.positions[rows])
    assert torch.equal(part.kv_positions, mask.kv_positions[columns])
    assert torch.equal(part[1:, 1:].dense(), mask.dense()[rows, columns][1:, 1:])


@settings(max_examples=30)
@given(calls, st.data())
def test_copies_and_pickles(call: Call, data: st.DataObject) -> None:
    mask = build(call)
    part = mask[data.draw(st.integers(0, mask.q_len)) :]
    hash(mask), mask.relation  # another process hashes strings differently: cached values must not be pickled
    for form in (mask, part):
        for other in (copy.deepcopy(form), pickle.loads(pickle.dumps(form))):
            assert other == form and type(other) is type(form) and other.plan(16, 32) is form.plan(16, 32)
    assert len(pickle.dumps(mask)) == len(pickle.dumps(build(call)))


@settings(max_examples=40)
@given(st.one_of(random_masks(12), calls.map(build)))
def test_mask_mod(mask: masks.SegmentMask) -> None:
    if 0 in mask.shape:
        return
    assert torch.equal(create_mask(mask.mask_mod(), None, None, *mask.shape, device="cpu")[0, 0], mask.dense())


def assert_same_block_mask(ours, theirs) -> None:
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for prefix in ("kv", "full_kv", "q", "full_q"):
        counts, expected = getattr(ours, f"{prefix}_num_blocks"), getattr(theirs, f"{prefix}_num_blocks")
        assert torch.equal(counts, expected) and counts.dtype == expected.dtype
        listed = torch.arange(getattr(ours, f"{prefix}_indices").shape[-1]) < counts[..., None]
        assert torch.equal(getattr(ours, f"{prefix}_indices")[listed], getattr(theirs, f"{prefix}_indices")[listed])


@settings(max_examples=25)
@given(st.one_of(random_masks(60), calls.map(build)), st.sampled_from([16, 32, (16, 48)]))
def test_block_mask(mask: masks.SegmentMask, block_size: int | tuple[int, int]) -> None:
    if 0 in mask.shape:
        return
    ours = to_block_mask(mask, block_size)
    theirs = create_block_mask(mask.mask_mod(), None, None, *mask.shape, device="cpu", BLOCK_SIZE=block_size)
    assert_same_block_mask(ours, theirs)
    assert torch.equal(create_mask(ours.mask_mod, None, None, *mask.shape, device="cpu")[0, 0], mask.dense())
    block_q, block_k = ours.BLOCK_SIZE
    for block_mask in (ours, theirs):
        assert listed(from_block_mask(block_mask)) == brute_force(mask.dense(), block_q, block_k)


@pytest.mark.parametrize(
    "sentence, call",
    {
        r"TypeError: to_block_mask: mask must be a SegmentMask, got TilePlan\.": lambda: to_block_mask(
            masks.causal(8).plan()
        ),
        r"mask must have at least one row, .* got \(0, 0\)\.": lambda: to_block_mask(masks.causal(0)),
        r"TypeError: from_block_mask: block_mask must be a BlockMask, got SegmentMask\.": lambda: from_block_mask(
            masks.causal(8)
        ),
        r"BLOCK_SIZE must be multiples of 16 in \[16, 1024\], got \(20, 20\)\.": lambda: from_block_mask(tiles_of(20)),
        r"BLOCK_SIZE must be multiples of 16 in \[16, 1024\], got \(2048, 2048\)\.": lambda: from_block_mask(
            tiles_of(2048)
        ),
    }.items(),
)
def test_errors_of_flex_attention(call, sentence: str) -> None:
    with refused(sentence):
        call()


def tiles_of(size: int) -> BlockMask:
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu", BLOCK_SIZE=size)


def test_block_mask_of_a_batch() -> None:
    lengths = torch.tensor([20, 50])
    block_mask = create_block_mask(
        lambda b, h, q, k: (k <= q) & (k < lengths[b]), 2, None, 50, 50, device="cpu", BLOCK_SIZE=16
    )
    plan = from_block_mask(block_mask)
    assert plan.batch == 2
    dense = [masks.causal(50).dense() & (torch.arange(50) < length) for length in lengths]
    assert plan.visible_pairs == sum(int(part.sum()) for part in dense)
    for b, part in enumerate(dense):
        assert plan.visits(sample=b).tiles.tolist() == brute_force(part, 16, 16)["visits"][1]
    with pytest.raises(
        ValueError, match=r"from_block_mask: block_mask must have one head, got 2. Create it with H=None"
    ):
        from_block_mask(create_block_mask(lambda b, h, q, k: k <= q + h, None, 2, 32, 32, device="cpu", BLOCK_SIZE=16))
    with pytest.raises(TypeError, match="must be a BlockMask, got int"):
        from_block_mask(3)


def test_mask_mod_is_captured_by_compile() -> None:
    """One graph for all masks of a kind: the tables are inputs, not constants."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def evaluate(mask_mod, q, k):
        return mask_mod(None, None, q[:, None], k)

    compiled = torch.compile(evaluate, fullgraph=True, dynamic=True, backend=backend)
    for num_blocks in (2, 3, 5):
        mask = masks.noise_aware_causal(7, 4, num_blocks, "window", 2)
        rows = torch.arange(mask.q_len)
        assert torch.equal(compiled(mask.mask_mod(), rows, rows), mask.dense())
    assert len(graphs) <= 2


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:])


@pytest.mark.parametrize(
    "mask, tile",
    [
        (masks.noise_aware_causal(6, 4, 3), 16),
        (masks.pack([masks.quadratic(3), masks.planned([(3, (2, 2), True)])], length=24), None),
        (masks.noise_aware_causal(512, 32, 64), 128),
        (masks.causal(5, 40), (16, 32)),
        (masks.causal(0), None),
    ],
    ids=["small", "packed", "large", "slice", "empty"],
)
def test_draw(mask: masks.SegmentMask, tile: int | tuple[int, int] | None, tmp_path: Path) -> None:
    mask.draw(tmp_path / "mask.png", tile)
    width, height = png_size(tmp_path / "mask.png")
    assert 300 <= width <= 2000 and 200 <= height <= 2000


Segment = masks.Segment


@pytest.mark.parametrize(
    "sentence, make",
    {
        r"masks.causal: q_len must be 0 or more, got -1\.": lambda: masks.causal(-1),
        r"TypeError: masks.causal: q_len must be an integer, got float\.": lambda: masks.causal(2.5),
        r"TypeError: masks.full: q_len must be an integer, got bool\.": lambda: masks.full(True),
        r"masks.dual_stream: length must be less than 2\*\*31, got 1099511627776\.": lambda: masks.dual_stream(
            2**40, 32
        ),
        r"masks.block_causal: block_size must be 1 or more, got 0\.": lambda: masks.block_causal(4, 0),
        r"prefix_len must be at most length \(4\), got 5\.": lambda: masks.block_causal(4, 2, 5),
        r"conditioning must be one of 'noisy', 'clean', 'window', got 'dirty'": lambda: masks.noise_aware_causal(
            4, 2, 2, "dirty"
        ),
        r"layout must be one of 'streams', 'interleaved', got 'x'": lambda: masks.noise_aware_causal(
            4, 2, 2, layout="x"
        ),
        r'window must be given with conditioning="window", got None\.': lambda: masks.noise_aware_causal(
            4, 2, 2, "window"
        ),
        r"window must be None with conditioning='noisy', got 3\.": lambda: masks.noise_aware_causal(4, 2, 2, window=3),
        r"noisy_positions must ascend within \[0, 4\), got \[2, 1\]": lambda: masks.dual_stream(
            4, 2, noisy_positions=[2, 1]
        ),
        r"ascend within \[1, 4\), got \[0\]": lambda: masks.dual_stream(4, 2, noisy_positions=[0], prefix_len=1),
        r"TypeError: noisy_positions must be int32 or int64, got torch.float32\.": lambda: masks.dual_stream(
            4, 2, noisy_positions=[0.5, 2]
        ),
        r"TypeError: stages must hold stages \(plan, chunks, sync\), got 3\.": lambda: masks.planned([3]),
        r"TypeError: chunks must be a tuple of lengths, got 4\.": lambda: masks.planned([(3, 4)]),
        r"chunks must be 0 or more, got -4\.": lambda: masks.planned([(3, (-4,))]),
        r"TypeError: sync must be a bool, got str\.": lambda: masks.planned([(3, (4,), "no")]),
        r"TypeError: sparse must be a bool, got int\.": lambda: masks.planned([(3, (4,))], sparse=2),
        r"open_chunks must be one of 'hidden', 'visible', got 'seen'\.": lambda: masks.planned([], open_chunks="seen"),
        r"TypeError: anchor_group must be a bool, got str\.": lambda: masks.quadratic(2, anchor_group="no"),
        r"block_size must be 1 or more, got 0\.": lambda: masks.quadratic(0),
        r"come before their child, so be in \[-1, 0\] for token 1, got 1\.": lambda: masks.tree([-1, 1]),
        r"TypeError: masks.tree: parents must be an integer, got float\.": lambda: masks.tree([-1, 0.5]),
        r"TypeError: masks must be a list of masks, got one mask\. Write pack\(\[mask\]": lambda: masks.pack(
            masks.causal(3), 4
        ),
        r"length must be at least the 3 tokens of the masks, got 2\.": lambda: masks.pack([masks.causal(3)], 2),
        r"masks must be whole masks, got a slice of shape \(2, 3\)\. Pack first": lambda: masks.pack(
            [masks.causal(3)[1:]]
        ),
        r"TypeError: masks must be segment masks, got int\.": lambda: masks.pack([3]),
        r"rows must have step 1, got 2\.": lambda: masks.causal(3)[::2],
        r"TypeError: slices must be of rows and columns, got 3 slices\.": lambda: masks.causal(3)[:1, :1, :1],
        r"TypeError: rows must be a slice, got 1\. Write mask\[a:b\]": lambda: masks.causal(3)[1],
        r"masks.plan: block_q must be a multiple of 16 in \[16, 1024\], got 100\.": lambda: masks.causal(3).plan(
            100, 128
        ),
        r"TypeError: masks.plan: block_q must be an integer, got str\.": lambda: masks.causal(3).plan("cuda"),
        r"block_k must be a multiple of 16 in \[16, 1024\], got 2048\.": lambda: masks.causal(3).plan(128, 2048),
        r"segment 0 must have a length of 0 or more, got -1\.": lambda: masks.SegmentMask([Segment(-1, "full")]),
        r"TypeError: segments must be Segments with int lengths, got \(1, 'full'\)\.": lambda: masks.SegmentMask(
            [(1, "full")]
        ),
        r"TypeError: segments must be Segments with int lengths, got Segment\(length=1.5": lambda: masks.SegmentMask(
            [Segment(1.5, "full")]
        ),
        r"inside must be 'causal', 'full' or 'none', got 'some' in segment 0": lambda: masks.SegmentMask(
            [Segment(1, "some")]
        ),
        r"segment 1 must not be among the segments it sees, got range\(0, 2, 1\). What .* said by `inside`\.$": lambda: (
            masks.SegmentMask([Segment(2, "full"), Segment(1, "full", (range(2),))])
        ),
        r"segment 2 must see ascending ranges .* got range\(0, 1, 1\)": lambda: masks.SegmentMask(
            [Segment(1, "full"), Segment(1, "full"), Segment(1, "full", (range(1, 2), range(1)))]
        ),
        r"below 1, got range\(1, 3, 1\)": lambda: masks.SegmentMask([Segment(1, "full", (range(1, 3),))]),
        r"TypeError: sees must be a tuple of ranges, got <class 'tuple'> in segment 0": lambda: masks.SegmentMask(
            [Segment(1, "full", ((0, 1),))]
        ),
        r"positions must have shape \(2,\), got \(3,\)": lambda: masks.SegmentMask(
            [Segment(2, "full")], torch.zeros(3).long()
        ),
        r"TypeError: positions must be an int64 tensor, got": lambda: masks.SegmentMask(
            [Segment(1, "full")], torch.zeros(1)
        ),
        r"stack: plans must hold at least one plan, got none\.": lambda: masks.TilePlan.stack([]),
        r"agree in q_len \(3\), got 4\. Lengthen": lambda: masks.TilePlan.stack(
            [masks.causal(n).plan() for n in (3, 4)]
        ),
    }.items(),
)
def test_errors(make, sentence: str) -> None:
    with refused(sentence) as raised:
        make()
    assert str(raised.value).startswith("pdkernels.masks.")


def test_pack_takes_any_iterable() -> None:
    samples = [masks.causal(2), masks.full(3)]
    assert masks.pack(sample for sample in samples) == masks.pack(samples)


def test_masks_too_long_for_tiles() -> None:
    with pytest.raises(ValueError, match=r"segment 1 must end within 2\*\*31 - 1 tokens"):
        masks.SegmentMask([Segment(2**31 - 1, "causal"), Segment(1, "causal")])


@without_gpu
@pytest.mark.parametrize(
    "builder",
    [
        lambda: masks.causal(2, 9),
        lambda: masks.noise_aware_causal(3, 4, 3, layout="interleaved"),
        lambda: masks.dual_stream(20, 4, noisy_positions=[1, 5]),
        lambda: masks.quadratic(4),
        lambda: masks.tree([-1, 0, 0]),
        lambda: masks.planned([(2, (3,), True)]),
        lambda: masks.pack([masks.candidates(2, 3)], 9),
    ],
)
def test_masks_are_on_the_cpu_whatever_the_default_device(builder: Callable[[], masks.SegmentMask]) -> None:
    expected = builder()
    with pretended_gpu(), torch.device("cuda"):
        mask = builder()
        assert mask == expected and torch.equal(mask.dense(), expected.dense())
        assert torch.equal(mask.positions, expected.positions) and mask.density == expected.density
        if hasattr(mask, "from_interleaved"):
            assert torch.equal(mask.from_interleaved, expected.from_interleaved)
