"""`PdCache` against transformers' own `DynamicCache`: what transformers calls on a cache gives the same, or is refused by name."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from transformers import cache_utils  # noqa: E402

from pdkernels.integrations.transformers import PdCache, register  # noqa: E402
from pdkernels.integrations.transformers._rows import PagedRows  # noqa: E402
from tests.support.transformers_names import CACHE  # noqa: E402

KINDS = ["contiguous", "paged"]
BATCH, HEADS, WIDTH, CAPACITY = 3, 2, 8, 40
END = 49
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
}
STATES = hasattr(cache_utils, "LinearAttentionLayer")
RECORDS = STATES and "record_past" in inspect.getsource(cache_utils.LinearAttentionLayer.__mro__[1])


def config_of(layers: int = 2, **more: Any) -> Any:
    return transformers.LlamaConfig(**SIZES, num_hidden_layers=layers, **more)


def pair(kind: Any, batch: int = BATCH) -> tuple[PdCache, Any]:
    config = config_of()
    return PdCache(config, batch, CAPACITY, kind=kind, page_size=4), transformers.DynamicCache(config=config)


def rows(count: int, batch: int = BATCH, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(batch, HEADS, count, width)


def filled(cache: Any, tokens: int, batch: int = BATCH) -> Any:
    for layer in range(2):
        cache.update(rows(tokens, batch), rows(tokens, batch), layer)
    return cache


def equal(ours: PdCache, theirs: Any) -> None:
    for layer in range(2):
        assert ours.get_seq_length(layer) == theirs.get_seq_length(layer)
        sizes = torch.arange(3) if "cache_position" in inspect.signature(theirs.get_mask_sizes).parameters else 3
        assert ours.get_mask_sizes(sizes, layer) == theirs.get_mask_sizes(sizes, layer)
        if theirs.get_seq_length(layer):
            for name in ("keys", "values"):
                assert torch.equal(getattr(ours.layers[layer], name), getattr(theirs.layers[layer], name))


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error)


# ---- methods


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [-20, -3, -1, 0, 1, 7, 19, 20, 25, torch.tensor(-4), torch.tensor(0)], ids=str)
def test_crop_means_what_it_means_in_this_version(kind: str, number: Any) -> None:
    ours, theirs = (filled(cache, 20) for cache in pair(kind))
    refused = outcome(lambda: theirs.crop(number))
    if refused is not None:
        with pytest.raises(refused):
            ours.crop(number)
    else:
        ours.crop(number)
    assert [ours.get_seq_length(layer) for layer in (0, 1)] == [theirs.get_seq_length(layer) for layer in (0, 1)]


def test_what_crop_refuses() -> None:
    ours = filled(pair("contiguous")[0], 20)
    with pytest.raises(ValueError, match="keep some of the 20 cached tokens, got -21"):
        ours.crop(-21)
    for wrong in (1.0, True, "3", None):
        with pytest.raises(TypeError, match="tokens_to_remove must be an integer"):
            ours.crop(wrong)  # type: ignore[arg-type]
    assert ours.get_seq_length() == 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls(kind: str, seed: int) -> None:
    """Layers may be written in any order, twice in a row, or by different numbers of rows."""
    draw, (ours, theirs) = random.Random(seed), pair(kind)
    torch.manual_seed(seed)
    for _ in range(25):
        action = draw.choice(["update", "update", "one layer", "crop", "reorder", "select", "copy"])
        longest = max(theirs.get_seq_length(layer) for layer in (0, 1))
        if action in ("update", "one layer") and longest < CAPACITY - 6:
            count = draw.randint(1, 6)
            for layer in draw.choice([(0, 1), (1, 0)]) if action == "update" else (draw.randrange(2),):
                k, v = rows(count), rows(count)
                for mine, their in zip(ours.update(k, v, layer), theirs.update(k, v, layer)):
                    assert mine.shape == their.shape and torch.equal(mine + 0, their)
        elif action == "crop" and (shortest := min(theirs.get_seq_length(layer) for layer in (0, 1))):
            back = draw.randint(1, shortest)
            ours.crop(-back)
            theirs.crop(-back)
        elif action in ("reorder", "select") and kind == "contiguous":
            order = torch.tensor([draw.randrange(BATCH) for _ in range(BATCH)])
            for cache in (ours, theirs):
                cache.reorder_cache(order) if action == "reorder" else cache.batch_select_indices(order)
        elif action == "copy":
            ours = copy.deepcopy(ours)
        equal(ours, theirs)


def test_every_public_name_is_there() -> None:
    ours = pair("contiguous")[0]
    old = {"to_legacy_cache", "from_legacy_cache"}  # of 4.57, for tuples
    assert not {name for name in dir(transformers.DynamicCache) if name[0] != "_" and not hasattr(ours, name)} - old


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_reads(kind: str) -> None:
    ours, theirs = pair(kind)
    names = ("is_compileable", "is_sliding", "is_linear", "is_dummy", "is_croppable", "is_initialized")
    present = [name for name in names if hasattr(theirs, name)]
    assert len(present) >= 3
    for step in range(3):
        for name in present:
            assert getattr(ours, name) == getattr(theirs, name), (name, step)
        assert len(ours) == len(theirs) and [len(entry) for entry in ours] == [len(entry) for entry in theirs]
        if hasattr(theirs, "get_query_offset"):
            assert ours.get_query_offset() == theirs.get_query_offset()
        ours, theirs = (filled(cache, 5) for cache in (ours, theirs))
    if hasattr(ours, "activate_past_recording"):
        ours.activate_past_recording()
        assert not ours.layers[0].__dict__.get("record_past")
    ours.reset()
    assert ours.get_seq_length() == 0 and ours.get_mask_sizes(*_asked(theirs)) == (3, 0)
    assert not ours.is_initialized and ours.layers[0].keys is None
    assert ours.layers[0].get_max_length() == ours.layers[0].get_max_cache_shape() == CAPACITY
    assert ours.layers[0].max_batch_size == BATCH and ours.layers[0].max_cache_len == CAPACITY


def _asked(theirs: Any) -> tuple[Any, int]:
    old = "cache_position" in inspect.signature(theirs.get_mask_sizes).parameters
    return (torch.arange(3) if old else 3), 0


def test_early_initialization_allocates() -> None:
    ours, theirs = pair("contiguous")
    for cache in (ours, theirs):
        cache.early_initialization(BATCH, HEADS, WIDTH, torch.float16, torch.device("cpu"))
    assert ours.storage is not None and ours.storage.k.shape == (2, BATCH, CAPACITY, HEADS, WIDTH)
    assert ours.layers[1].keys.dtype == theirs.layers[1].keys.dtype == torch.float16
    assert ours.is_initialized == theirs.is_initialized and ours.get_seq_length() == 0


def test_calls_that_are_refused_by_name() -> None:
    ours = filled(pair("contiguous")[0], 4)
    with pytest.raises(ValueError, match=r"count the repeated sequences from the start, got 3. Make it for 6"):
        ours.batch_repeat_interleave(2)
    for mask in (torch.tensor([True, False, False]), torch.tensor([0, 1]), slice(0, 1)):  # one row would fill all
        with pytest.raises(ValueError, match="batch must stay the same"):
            ours.batch_select_indices(mask)  # type: ignore[arg-type]
    for call in (lambda: ours.offload(0), ours.layers[0].prefetch):
        with pytest.raises(NotImplementedError, match="cannot be offloaded"):
            call()
    with pytest.raises(ValueError, match="same key and value heads in all layers"):
        ours.update(rows(1)[:, :1], rows(1)[:, :1], 1)
    with pytest.raises(ValueError, match="'contiguous' for beams"):
        filled(pair("paged")[0], 4).reorder_cache(torch.tensor([0, 0, 1]))
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="gradient"):
        ours.update(rows(1).requires_grad_(), rows(1), 0)


# ---- their loops


def model_of(seed: int, implementation: str = "pdkernels", **more: Any) -> Any:
    register()
    torch.manual_seed(seed)
    config = config_of(attn_implementation=implementation, **more)
    return transformers.LlamaForCausalLM(config).eval()


def written(model: Any, cache: Any, tokens: torch.Tensor, new: int = 16, **options: Any) -> Any:
    return model.generate(tokens, max_new_tokens=new, do_sample=False, **{CACHE: cache}, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["lookup", "assistant"])
@pytest.mark.parametrize("seed", [0, 2])
def test_assisted_generation(kind: Any, how: str, seed: int) -> None:
    """The tokens of greedy decoding, wherever transformers writes them on its own cache (5.15.0 fails with some assistants)."""
    model = model_of(seed, "sdpa")
    tokens = torch.randint(1, 12, (1, 20))
    more = {"prompt_lookup_num_tokens": 3}
    if how == "assistant":
        more = {"assistant_model": transformers.LlamaForCausalLM(model.config).eval()}
    theirs = outcome(lambda: written(model, transformers.DynamicCache(config=model.config), tokens, **more))
    ours = outcome(lambda: written(model, PdCache(model.config, 1, 64, kind=kind), tokens, **more))
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        assert torch.equal(ours, theirs) and torch.equal(ours, written(model, None, tokens))


def hybrid(name: str) -> Any:
    torch.manual_seed(0)
    kinds = ["linear_attention", "full_attention"]
    delta = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}  # fmt: skip
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
    options = {
        "Lfm2": {"block_ff_dim": 48, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
        "Qwen3Next": {**delta, **experts, "head_dim": 8, "layer_types": kinds},
        "FalconH1": {**mamba, "head_dim": 8},
    }
    config = getattr(transformers, f"{name}Config")(**SIZES, num_hidden_layers=2, **options[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.skipif(not RECORDS, reason="no convolution of this version records its past")
@pytest.mark.parametrize("length", [2, 20])
def test_convolutions_go_back(length: int) -> None:
    """LFM2 has no other state: its drafts are taken back, from the first rows on."""
    model = hybrid("Lfm2")
    tokens = torch.randint(1, 12, (1, length))
    for kind in KINDS:
        cache = PdCache(model.config, 1, 64, kind=kind)
        ours = written(model, cache, tokens, prompt_lookup_num_tokens=3)
        assert torch.equal(ours, written(model, None, tokens)) and cache.is_croppable


@torch.no_grad()
@pytest.mark.skipif(not RECORDS, reason="no convolution of this version records its past")
def test_convolutions_go_back_as_far_as_their_past() -> None:
    model = hybrid("Lfm2")
    tokens = torch.randint(1, 12, (1, 12))
    cache = PdCache(model.config, 1, 64)
    model(tokens[:, :8], **{CACHE: cache})
    cache.activate_past_recording()
    cache.crop(0)
    with pytest.raises(NotImplementedError, match="recurrent layers cannot go back"):
        cache.crop(-1)  # the convolutions dropped it before
    model(tokens[:, [3, 3, 3]], **{CACHE: cache})
    cache.crop(-3)
    assert cache.get_seq_length() == 8
    found = model(tokens[:, 8:], **{CACHE: cache}).logits
    torch.testing.assert_close(found, model(tokens, use_cache=False).logits[:, 8:], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.skipif(not STATES, reason="recurrent layers of this version keep other caches")
@pytest.mark.parametrize("name", ["Qwen3Next", "FalconH1"])
def test_recurrent_states_do_not_go_back(name: str) -> None:
    """transformers' own layers take back the convolutions and leave the states: other logits without a word."""
    model = hybrid(name)
    tokens = torch.randint(1, 12, (1, 12))
    whole = model(tokens, use_cache=False).logits[:, 8:]
    cache = PdCache(model.config, 1, 64)
    if RECORDS:
        cache.activate_past_recording()
    model(tokens[:, :8], **{CACHE: cache})
    assert not cache.is_croppable and cache.is_linear == transformers.DynamicCache(config=model.config).is_linear
    with pytest.raises(NotImplementedError, match="recurrent layers cannot go back"):
        cache.crop(-1)
    if RECORDS:
        cache.crop(0)
    assert cache.get_seq_length() == 8
    torch.testing.assert_close(model(tokens[:, 8:], **{CACHE: cache}).logits, whole, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.skipif(not STATES, reason="recurrent layers of this version keep other caches")
@pytest.mark.parametrize("call", ["reorder_cache", "batch_select_indices"])
def test_selected_sequences_take_their_states_along(call: str) -> None:
    """transformers' own `batch_select_indices` leaves the states of Falcon-H1 where they were: the whole text is the oracle."""
    model, tokens, order = hybrid("FalconH1"), torch.randint(1, 12, (3, 9)), torch.tensor([2, 0, 0])
    cache = PdCache(model.config, 3, 16)
    model(tokens[:, :7], **{CACHE: cache})
    getattr(cache, call)(order)
    whole = model(torch.cat([tokens[order, :7], tokens[:, 7:]], 1), use_cache=False).logits[:, 7:]
    torch.testing.assert_close(model(tokens[:, 7:], **{CACHE: cache}).logits, whole, atol=1e-4, rtol=0)


@pytest.mark.skipif(STATES, reason="this version keeps states in its caches")
def test_recurrent_layers_need_a_newer_version() -> None:
    for name in ("Lfm2", "Qwen3Next", "FalconH1"):
        with pytest.raises(NotImplementedError, match=r"need transformers 5\.6"):
            PdCache(hybrid(name).config, 1, 8)


def test_layers_that_keep_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(cache_utils.DynamicLayer):
        pass

    def init(self: Any, **_: Any) -> None:
        self.layers = [Other()]

    monkeypatch.setattr(transformers.DynamicCache, "__init__", init)
    with pytest.raises(NotImplementedError, match="layers of Other are not supported"):
        PdCache(config_of(), 1, 8)


@torch.no_grad()
def test_a_prompt_that_is_copied() -> None:
    """The cache of a common beginning, deep-copied for every text, as transformers' guide does."""
    model, tokens = model_of(1, head_dim=16), torch.randint(1, 12, (1, 20))
    for kind in KINDS:
        cache = PdCache(model.config, 1, 64, kind=kind)
        model(tokens[:, :12], **{CACHE: cache})
        for more in (14, 20):
            text = written(model, copy.deepcopy(cache), tokens[:, :more], 6)
            assert torch.equal(text, written(model, None, tokens[:, :more], 6))
        assert cache.get_seq_length() == 12


# ---- other attention on pages


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "pdkernels"])
def test_pages_under_any_attention(implementation: str) -> None:
    model, tokens = model_of(3, "sdpa", head_dim=16), torch.randint(1, 12, (2, 14))
    padding = {"attention_mask": (torch.arange(14) >= torch.tensor([[4], [0]])).long()}
    for options in [{}] if implementation == "pdkernels" else [{}, padding]:
        model.set_attn_implementation("sdpa")
        theirs = written(model, None, tokens, 8, **options)
        model.set_attn_implementation(implementation)
        cache = PdCache(model.config, 2, 32, kind="paged", page_size=4)
        assert torch.equal(written(model, cache, tokens, 8, **options), theirs)


def test_compiled_attention_gets_plain_tensors() -> None:
    """FlexAttention compiles its call, which takes no subclass."""
    ours, theirs = pair("paged")
    for implementation, kind in {"sdpa": PagedRows, "flex_attention": torch.Tensor}.items():
        ours._config._attn_implementation = implementation
        k, v = rows(5), rows(5)
        for mine, their in zip(ours.update(k, v, 0), theirs.update(k, v, 0)):
            assert type(mine) is kind and torch.equal(mine + 0, their)
            if kind is PagedRows:
                assert mine.stride() == mine.gathered().stride()
                assert mine.data_ptr() == mine.gathered().data_ptr()


@torch.no_grad()
def test_the_attention_may_change() -> None:
    """The cache follows what reads it, not what its config said."""
    model, tokens = model_of(4, "sdpa", head_dim=16), torch.randint(1, 12, (1, 20))
    whole = model(tokens, use_cache=False).logits
    cache = PdCache(model.config, 1, 32, kind="paged", page_size=4)
    for place, implementation in enumerate(["eager", "pdkernels", "sdpa", "pdkernels", "eager"]):
        model.set_attn_implementation(implementation)
        step = slice(4 * place, 4 * place + 4)
        found = model(tokens[:, step], **{CACHE: cache}).logits
        torch.testing.assert_close(found, whole[:, step], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "pdkernels"])
def test_rows_of_a_paged_cache_that_see_each_other(implementation: str) -> None:
    """Layers that are not causal (`is_causal=False`) read the whole cache."""
    register()
    attend = transformers.AttentionInterface()[implementation]
    cache = PdCache(config_of(1), 1, 16, kind="paged", page_size=4)
    module, k, v = torch.nn.Module(), rows(9, 1, 16), rows(9, 1, 16)
    module.num_key_value_groups, module.training = 2, False
    cache.update(k[:, :, :6], v[:, :, :6], 0)
    q = torch.randn(1, 4, 3, 16)
    found = attend(module, q, *cache.update(k[:, :, 6:], v[:, :, 6:], 0), None, is_causal=False)[0]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
