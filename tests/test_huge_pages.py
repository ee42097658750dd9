"""Weights and caches in huge pages: tensors like any other, and a loader that holds nothing twice."""

from __future__ import annotations

import copy
import gc
import io
import json
import mmap
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import pdkernels as pd
from pdkernels import _memory, _native
from pdkernels.models.checkpoints import hf
from tests.support.checkpoints import random_checkpoint
from tests.support.forks import forked

MIB = 1 << 20
given = pytest.mark.skipif(not _memory.enabled(), reason="the system gives no huge pages")
FIELDS: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 1100,
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 400,
    "dtype": "bfloat16",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def filled(size: int = 8 * MIB) -> torch.Tensor:
    tensor = _memory.empty((size // 4096, 1024), torch.float32)
    torch.arange(tensor.numel(), out=tensor.view(-1))
    return tensor


def mappings(*tensors: torch.Tensor) -> list[dict[str, str]]:
    """What the system says of each mapping that holds one of the tensors. One look is slow in a process of many mappings."""
    spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    found, inside = list[dict[str, str]](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if "-" in name:
            low, high = (int(part, 16) for part in name.split("-"))
            inside = any(low < last and first < high for first, last in spans)
            found += [{}] if inside else []
        elif inside:
            found[-1][name] = value
    return found


def advised(*tensors: torch.Tensor) -> bool:
    """Whether the system was asked for huge pages in every mapping that holds one of the tensors."""
    flags = [mapping["VmFlags:"].split() for mapping in mappings(*tensors)]
    return bool(flags) and all("hg" in each for each in flags)


def in_huge_pages(*tensors: torch.Tensor) -> list[int]:
    """Bytes of each mapping that holds one of the tensors."""
    return [1024 * int(mapping["AnonHugePages:"].split()[0]) for mapping in mappings(*tensors)]


def plentiful(size: int = 64 * MIB) -> bool:
    """Whether an ordinary mapping gets huge pages now. A machine that has run for long has its free memory in small pieces."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as plain:
        plain.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(plain, dtype=torch.uint8).fill_(1)
        found = _memory.huge_bytes(tensor)
        del tensor
        return found >= size - 4 * MIB


@pytest.fixture
def unused() -> Iterator[None]:
    """Fills the mapping that small blocks share, so that the next one begins a new one: a part of the old one may be given back."""
    blocks, after, fresh = list[torch.Tensor](), 0, 0
    while fresh < 4:
        blocks.append(torch.frombuffer(_memory.HugePages(8 * MIB), dtype=torch.uint8))
        begins = blocks[-1].data_ptr() != after
        fresh = 1 if begins and len(blocks) > 1 else fresh + (fresh > 0)
        after = blocks[-1].data_ptr() + 8 * MIB
    yield


def written(folder: Path, state: dict[str, torch.Tensor], fields: dict[str, Any], files: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    names = sorted(state)
    for index in range(files):
        part = {name: state[name].contiguous() for name in names[index::files]}
        save_file(part, folder / ("model.safetensors" if files == 1 else f"part{index}.safetensors"))
    if files > 1:
        listed = {name: f"part{index}.safetensors" for index in range(files) for name in names[index::files]}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


@given
def test_the_memory_is_in_huge_pages_and_given_back() -> None:
    gc.collect()
    many = plentiful()
    before = resident()
    tensor = filled(64 * MIB)
    assert advised(tensor) and resident() - before >= 62 * MIB
    assert _memory.huge_bytes(tensor) >= 62 * MIB or not (many and plentiful())
    part = tensor[5:6].clone()
    del tensor
    assert resident() - before < 8 * MIB and part[0, 0] == 5 * 1024


@given
@pytest.mark.usefixtures("unused")
def test_small_blocks_are_neighbours_and_each_gives_its_own_pages_back() -> None:
    gc.collect()
    many = plentiful()
    before = resident()
    blocks = [filled(MIB) for _ in range(40)]
    assert advised(*blocks)
    assert max(in_huge_pages(*blocks)) >= 24 * MIB or not (many and plentiful())
    assert len({block.untyped_storage().data_ptr() for block in blocks}) == 40
    assert all(block.untyped_storage().nbytes() == MIB for block in blocks)
    del blocks[1::2]
    expected = filled(MIB)
    assert all(torch.equal(block, expected) for block in blocks)
    assert resident() - before < 28 * MIB
    blocks.clear()
    assert resident() - before < 8 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_fresh_memory_is_zero(dtype: torch.dtype) -> None:
    for _ in range(3):  # the second one follows memory that was written
        tensor = _memory.zeros((3, 1 << 18), dtype)
        assert not tensor.any()
        tensor.fill_(1)


def test_small_tensors_and_other_devices_are_ordinary() -> None:
    assert _memory._placed((8, 8), torch.float32) is None
    assert _memory.zeros((1 << 20,), torch.float32, "meta").device.type == "meta"
    assert _memory.empty((0, 5), torch.float32).shape == (0, 5)


def test_no_memory_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(_memory, "HugePages", refuse)
        assert not _memory.zeros((1 << 20,), torch.float32).any()
    with pytest.raises(MemoryError):
        _memory.HugePages(1 << 60)
    with pytest.raises(RuntimeError, match="allocate"):
        _memory.empty((1 << 48,), torch.float32)


def test_tensors_of_a_mode_are_of_its_kind() -> None:
    with FakeTensorMode():
        assert isinstance(_memory.zeros((1 << 20,), torch.float32), FakeTensor)
    with torch.inference_mode():
        assert _memory.empty((1 << 20,), torch.float32).is_inference()


def test_copies_pickles_and_shared_memory() -> None:
    tensor = filled()
    saved = io.BytesIO()
    torch.save(tensor, saved)
    assert saved.tell() < tensor.nbytes + 4096
    saved.seek(0)
    for other in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), torch.load(saved)):
        assert torch.equal(other, tensor) and other.data_ptr() != tensor.data_ptr()
    expected = tensor.clone()
    assert not tensor.is_shared() and tensor.share_memory_().is_shared() and torch.equal(tensor, expected)


def test_a_forked_child_has_a_copy_of_its_own() -> None:
    tensor = filled()
    expected = tensor.clone()
    child = os.fork()
    if child == 0:
        same = torch.equal(tensor, expected)
        tensor.zero_()
        own = filled()
        os._exit(0 if same and torch.equal(own, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(tensor, expected)


def test_touching_on_the_threads_of_kernels_leaves_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "_several_memories", lambda: True)
    before = resident()
    tensor = _memory.empty((16 * MIB + 5,), torch.uint8)
    if _native.has_native() and _memory.enabled():
        assert resident() - before >= 14 * MIB
        assert not tensor.any()


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_caches(kind: str) -> None:
    many = _memory.enabled() and plentiful()
    model = pd.models.load("tiny-code")
    cache = model.new_cache(batch=4, capacity=4096, kind=kind)
    assert not cache.k.any() and not cache.v.any()
    if _memory.enabled():
        assert advised(cache.k) and advised(cache.v)
        assert _memory.huge_bytes(cache.k.fill_(1)) >= cache.k.nbytes // 2 or not (many and plentiful())
    other = pickle.loads(pickle.dumps(cache))
    assert torch.equal(other.k, cache.k)


def test_the_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDKERNELS_HUGE_PAGES", "0")
    assert _memory._placed((1 << 20,), torch.float32) is None
    assert _memory.report()["huge pages"] == "off: PDKERNELS_HUGE_PAGES=0"
    monkeypatch.setenv("PDKERNELS_HUGE_PAGES", "no")
    with pytest.raises(ValueError, match=r"PDKERNELS_HUGE_PAGES must be 0 or 1, got 'no'"):
        _memory.empty((1 << 20,), torch.float32)


@given
def test_the_report_says_what_the_system_says() -> None:
    lines = _memory.report()
    assert lines["system"] == Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    assert lines["huge pages"] == "on" and lines["trial"].endswith("of 16 MiB are in huge pages")


def test_doctor_shows_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from pdkernels.cli import app

    monkeypatch.setenv("PDKERNELS_HUGE_PAGES", "0")
    lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    memory = lines[lines.index("memory") + 1 :]
    assert memory[0].split(maxsplit=2) == ["huge", "pages", "off: PDKERNELS_HUGE_PAGES=0"]
    assert memory[1].split()[0] == "system" and any("PDKERNELS_HUGE_PAGES" in line for line in lines)


@pytest.mark.parametrize("setting, expected", [("never", "off"), ("", "off: the system has none")])
def test_a_system_without_them(setting: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "setting", lambda: setting)
    assert _memory.report()["huge pages"] == expected and "trial" not in _memory.report()
    assert _memory._placed((1 << 20,), torch.float32) is None


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_loader_equals_safetensors_own(tied: bool, stored: torch.dtype, files: int, tmp_path: Path) -> None:
    fields = FIELDS | {"tie_word_embeddings": tied}
    state = random_checkpoint(fields, dtype=stored)
    state["model.norm.weight"] = state["model.norm.weight"].float()  # of another dtype than the rest
    folder = written(tmp_path / "checkpoint", state, fields, files)
    read = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    expected = hf.layout(hf.from_hf_config(fields)).gather(read)
    for dtype in DTYPES:
        model = pd.models.load(folder, dtype=dtype)
        loaded = model.state_dict()
        assert loaded.keys() == expected.keys() and (model.head is None) == tied
        for name, tensor in loaded.items():
            assert tensor.dtype == dtype and torch.equal(tensor, expected[name].to(dtype)), name


@given
@pytest.mark.usefixtures("unused")
def test_a_loaded_model_is_in_huge_pages_and_behaves_like_any_other(tmp_path: Path) -> None:
    fields = FIELDS | {"tie_word_embeddings": True}
    folder = written(tmp_path / "checkpoint", random_checkpoint(fields, dtype=torch.bfloat16), fields)
    many = plentiful()
    model = pd.models.load(folder)
    large = [p for p in model.parameters() if p.nbytes >= _memory._LEAST]
    assert large and advised(*large)
    assert all(size > 0 for size in in_huge_pages(*large)) or not (many and plentiful())
    save_file(model.state_dict(), tmp_path / "copy.safetensors")  # refuses tensors that share a storage
    tokens = torch.tensor([[1, 2, 3]])
    expected = model(tokens)
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), expected)
    wide = model.to(torch.float32)
    assert wide.embedding.dtype == torch.float32 and wide.head is None
    assert torch.equal(wide.to(torch.bfloat16)(tokens), expected)


LOAD = """
import sys, torch, pdkernels as pd
status = lambda name: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(name)) << 10
pd.models.load("tiny-code")(torch.tensor([[1]]))
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
model = pd.models.load(sys.argv[1], dtype=getattr(torch, sys.argv[2], None))
print(status("VmHWM") - before)
"""


def grown(file: Path, dtype: str, huge: str) -> int:
    """Bytes by which loading a model raises the peak of a process."""
    answer = forked(LOAD, file, dtype, environment={"PDKERNELS_HUGE_PAGES": huge})
    assert answer.returncode == 0, answer.stderr
    return int(answer.stdout)


@pytest.mark.parametrize(
    "stored, dtype", [pytest.param("bfloat16", "bfloat16", marks=pytest.mark.slow), ("float32", "bfloat16")]
)
def test_loading_holds_nothing_twice(stored: str, dtype: str, tmp_path: Path) -> None:
    fields = FIELDS | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 16384}
    state = random_checkpoint(fields, dtype=getattr(torch, stored))
    folder = written(tmp_path / "checkpoint", state, fields)
    size = sum(tensor.numel() for tensor in state.values()) * getattr(torch, dtype).itemsize
    for huge in ("1", "0"):
        found = grown(folder, dtype, huge)
        assert size * 0.9 < found < size * 1.15 + 16 * MIB, f"{found / size:.2f} of the weights"


def test_loading_a_packed_file_holds_nothing_twice(tmp_path: Path) -> None:
    files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 32768}
    path = tmp_path / "model.gguf"
    files.write_gguf(path, files.FAMILIES["llama"] | sizes, kind="Q8_0")
    size = path.stat().st_size
    for huge in ("1", "0"):
        found = grown(path, "as it is stored", huge)
        assert size * 0.9 < found < size * 1.15 + 16 * MIB, f"{found / size:.2f} of the file"
