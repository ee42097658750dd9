"""The ops as a kernel for Hugging Face's library `kernels`."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import hf_kernels
from tests.test_packaging import AS_BUILT, ROOT, run

# Runs where pdkernels is installed too: both have ops, and each has its own.
USE = """
import json, sys, torch, kernels
from pathlib import Path
alone = kernels.get_local_kernel(Path(sys.argv[1]))
assert "pdkernels" not in sys.modules and alone.has_native()
import pdkernels as pd
q, k, v = torch.randn(1, 24, 4, 32), *torch.randn(2, 1, 24, 2, 32)
plans = [package.masks.block_causal(24, 4).plan(16, 16) for package in (alone, pd)]
assert type(plans[0]) is not type(plans[1])
mine, theirs = (package.block_sparse_attention(q, k, v, plan) for package, plan in zip((alone, pd), plans))
assert torch.equal(mine, theirs)
caches = [package.cache.PagedKVCache(layers=1, batch=1, num_pages=4, page_size=16, kv_heads=2, head_dim=32) for package in (alone, pd)]
for cache in caches:
    cache.reserve_([20])
    cache.append_(0, k[:, :20], v[:, :20])
    cache.commit_(torch.tensor([20]))
assert torch.equal(caches[0].k, caches[1].k) and caches[0].lengths.item() == 20
numbers, x = torch.randn(2, 48, 64), torch.randn(5, 64)
for name in ("int8", "q4_0"):
    mine, theirs = (package.quantized_linear(x, package.quantize(numbers[0], name)) for package in (alone, pd))
    assert torch.equal(mine, theirs)
    stacks = [(package, package.quantize(numbers, name)) for package in (alone, pd)]
    mine, theirs = (package.grouped_linear(x, stack, torch.tensor([2, 5])) for package, stack in stacks)
    assert torch.equal(mine, theirs)
weight = torch.randn(48, 64)
mine = alone.linear(x, weight)
assert torch.equal(mine, pd.linear(x, weight)) and torch.equal(mine[3:4], alone.linear(x[3:4], weight))
torch.testing.assert_close(mine.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)
packed = alone.quantize(weight, "q8_0")
told, exact = alone.quantized_linear(x, packed), x.double() @ packed.dequantize().double().T
assert (told - exact).abs().max() < 0.02 * exact.abs().max()
told = alone.token_statistics(mine, top_k=3)
assert torch.equal(told.ids, mine.argmax(-1)) and torch.equal(told.top_ids, mine.topk(3).indices)
torch.testing.assert_close(told.probs, mine.softmax(-1).amax(-1))
rows, gates = 0.3 * torch.randn(3, 1, 6, 2, 8), torch.rand(2, 1, 6, 2)
settled = torch.zeros(1, dtype=torch.int64)
outputs = []
for package in (alone, pd):
    state, pending = torch.zeros(1, 2, 8, 8), [torch.zeros(1, 8, 2, 8), torch.zeros(1, 8, 2, 8), torch.zeros(1, 8, 2)]
    outputs.append(package.gated_delta_(state, settled.clone(), *pending, *rows, -gates[0], gates[1], settled, scale=1.0))
assert torch.equal(*outputs)
for head in range(2):  # the rule as it is written: forget, then move the value of the key
    memory = torch.zeros(8, 8, dtype=torch.float64)
    for row in range(6):
        query, key, value = rows[:, 0, row, head].double()
        memory *= (-gates[0, 0, row, head]).double().exp()
        memory += torch.outer(key, gates[1, 0, row, head].double() * (value - key @ memory))
        torch.testing.assert_close(outputs[0][0, row, head].double(), query @ memory, atol=1e-5, rtol=1e-4)
(loaded,) = kernels.get_loaded_kernels()
assert alone.__name__ == loaded.metadata.id and hasattr(getattr(torch.ops, alone.__name__), "unmask_")
print(json.dumps({"id": loaded.metadata.id, "license": loaded.metadata.license, "file": alone.__file__}))
"""


def test_no_absolute_import_is_left(tmp_path: Path) -> None:
    files = hf_kernels.sources()
    hf_kernels.write_sources(files, tmp_path)
    written = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*.py")}
    assert set(written) == {*files, Path("__init__.py")}
    for place, path in written.items():
        folders = place.parent.parts
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not [name for name in names if name.partition(".")[0] == "pdkernels"], place
            if not isinstance(node, ast.ImportFrom) or node.level == 0:
                continue
            assert node.level <= len(folders) + 1, place
            folder = tmp_path.joinpath(*folders[: len(folders) - node.level + 1])
            if node.module is not None and node.module != "_host":  # compiled
                module = folder.joinpath(*node.module.split("."))
                assert module.with_suffix(".py").is_file() or (module / "__init__.py").is_file(), (place, node.module)


def test_imports_that_cannot_be_made_relative_are_refused() -> None:
    with pytest.raises(ValueError, match="line 2 must import from pdkernels by `from`, got import pdkernels"):
        hf_kernels.relative("import torch\nimport pdkernels.ops", ())


def test_a_build_is_known_by_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = hf_kernels.sources()
    once = hf_kernels.identity(files)
    assert once == hf_kernels.identity(files) and len(once) == 8
    assert hf_kernels.identity(dict(list(files.items())[1:])) != once


@pytest.mark.slow
def test_the_kernel_loads_together_with_the_package(tmp_path: Path) -> None:
    if importlib.util.find_spec("kernels") is None:
        pytest.skip("the package `kernels` is not installed")
    run(sys.executable, "scripts/hf_kernels.py", "--to", tmp_path, cwd=ROOT, environment=AS_BUILT)
    (variant,) = (tmp_path / "build").iterdir()
    metadata = json.loads((variant / "metadata.json").read_text())
    assert variant.name.startswith("torch-stable-abi211-") and variant.name.endswith("-linux")
    if importlib.util.find_spec("kernel_abi_check") is not None:  # what `kernel-builder check-abi` runs
        abi = importlib.import_module("kernel_abi_check")
        assert abi.ObjectFile(variant / "_ops.so").check_python_abi("3.10") == []
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", USE, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told == {"id": metadata["id"], "license": "Apache-2.0", "file": str(variant / "__init__.py")}
