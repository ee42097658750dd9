"""Layers with windows: every method has the tokens and the bits of decoding one by one, and a row those of a plain mask."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from pdkernels.cache import WindowedCache
from pdkernels.decoding import find, generate, supports
from pdkernels.masks import TilePlan, causal, tree
from pdkernels.models import Hybrid, HybridConfig, Transformer, TransformerConfig
from pdkernels.models.architectures.windows import Window, first_seen, windowed_plan
from tests.decoding.lossless_sweep import METHODS
from tests.support.drafters import with_drafters
from tests.support.plans import planning_model
from tests.support.tri_mode import small_transformer

WINDOWS = [Window(1), Window(7), Window(16), Window(128), Window(16, chunked=True)]
NEW = 24


def model_with(windows: tuple[Window | None, ...], dtype: torch.dtype = torch.float32, **more: Any) -> Transformer:
    sizes = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96}
    return small_transformer(3, 40, more.pop("adapter", False), windows=windows, **sizes, **more).to(dtype)


def plain(model: Transformer, tokens: list[int], window: Window) -> torch.Tensor:
    """The logits under a mask that is written down, in float64, of a model without windows."""
    config = TransformerConfig(**{**vars(model.config), "windows": ()})
    copied = Transformer(config).double().requires_grad_(False)
    copied.load_state_dict(model.double().state_dict())
    rows = range(len(tokens))
    begin = (lambda r: r // window.size * window.size) if window.chunked else (lambda r: r + 1 - window.size)
    seen = torch.tensor([[begin(r) <= c <= r for c in rows] for r in rows])
    return copied(torch.tensor([tokens]), mask=seen)[0]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_decoding_has_the_tokens_of_a_mask(window: Window) -> None:
    model = model_with((window, window))
    text = torch.randint(39, (140 if window.size == 128 else 30,), generator=torch.Generator().manual_seed(1)).tolist()
    found = generate(model, text, max_new_tokens=NEW, end_tokens=()).tokens.tolist()
    logits = plain(model, text + found, window)[len(text) - 1 : -1]
    assert logits[..., :-1].argmax(-1).tolist() == found  # the last id is a mask, which is never written


@pytest.mark.covering(of=["method"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_method_has_the_tokens_of_one_by_one(
    method: str, dtype: torch.dtype, cache_dtype: torch.dtype | None, window: Window
) -> None:
    """Drafts are longer than the shorter windows; pages and a batch beside single texts."""
    model = with_drafters(model_with((window, None), dtype, adapter=True))
    model.cache_dtype = cache_dtype
    generator = torch.Generator().manual_seed(2)
    lengths = (5, 1, 130 if window.size == 128 else 20)
    texts = [torch.randint(39, (length,), generator=generator).tolist() for length in lengths]
    greedy = [generate(model, text, max_new_tokens=NEW, end_tokens=()).tokens.tolist() for text in texts]
    for page_size, options in zip((7, None), METHODS[method], strict=False):
        more = options | {"page_size": page_size}
        found = generate(model, texts, method, max_new_tokens=NEW, end_tokens=(), **more).tokens
        assert [tokens.tolist() for tokens in found] == greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_row_has_the_same_bits_however_a_text_is_split(window: Window, dtype: torch.dtype) -> None:
    model = model_with((window, None), dtype)
    tokens = torch.randint(39, (2, 150), generator=torch.Generator().manual_seed(4))

    def feed(parts: list[int], **kind: Any) -> torch.Tensor:
        cache, at, found = model.new_cache(2, 160, **kind), 0, []
        if kind:
            cache.reserve_(150)  # type: ignore[attr-defined]
        for count in parts:
            found.append(model(tokens[:, at : at + count], cache=cache))
            cache.commit_(torch.tensor([count, count]))
            at += count
        return torch.cat(found, 1)

    one_by_one = feed([1] * 150)
    assert torch.equal(feed([150]), one_by_one)
    assert torch.equal(feed([13, 1, 120, 16], kind="paged", page_size=7), one_by_one)


@pytest.mark.parametrize("window", [Window(1), Window(2), Window(3), Window(2, chunked=True), Window(20)], ids=str)
def test_a_row_of_a_tree_has_the_bits_of_its_chain(window: Window) -> None:
    model = model_with((window, window), torch.bfloat16)
    parents = [-1, 0, 0, 1, 2, 3, 5, 4]
    depth = [0, 1, 1, 2, 2, 3, 4, 3]
    text = torch.tensor([[3, 5, 8, 1, 9]])
    nodes = torch.tensor([[7, 12, 30, 4, 11, 22, 6, 17]])
    cache = model.new_cache(1, 20)
    model(text, cache=cache)
    cache.commit_(torch.tensor([5]))
    plan = tree(parents).plan(16, 16)
    logits = model(nodes, cache=cache, mask=plan, positions=torch.tensor(depth), counts=torch.tensor([0]))
    for node in range(8):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        again = model.new_cache(1, 20)
        chain = model(torch.cat([text, nodes[:, path]], 1), cache=again)
        assert torch.equal(chain[0, -1], logits[0, node])


@pytest.mark.parametrize("window", [Window(1), Window(5), Window(64), Window(70), Window(9, chunked=True)], ids=str)
@pytest.mark.parametrize("rows", [1, 63, 130, 200])
def test_the_plan_of_a_whole_text(window: Window, rows: int) -> None:
    at = torch.arange(rows)
    expected = (at <= at[:, None]) & (at >= window.first(at)[:, None])
    device = torch.device("cpu")
    assert torch.equal(windowed_plan(window, rows, device, None, None).dense(), expected)
    assert torch.equal(windowed_plan(window, rows, device, causal(rows).plan(), None).dense(), expected)
    shifted = at // 2  # two rows at each position
    stacked = windowed_plan(window, rows, device, TilePlan.stack([causal(rows).plan()] * 2), shifted)
    seen = (at <= at[:, None]) & (shifted >= window.first(shifted)[:, None])
    assert torch.equal(stacked.dense(), seen.expand(2, -1, -1))


def test_the_first_row_seen() -> None:
    lengths, plan = torch.tensor([5, 0]), tree([-1, 0, 0, 2]).plan(16, 16)
    found = first_seen([Window(2), None], lengths, 4, torch.tensor([0, 1, 1, 2]), plan)
    assert {window.size: starts.tolist() for window, starts in found.items()} == {2: [[4, 5, 5, 6], [0, 0, 0, 1]]}
    assert first_seen([None], lengths, 4) == {}


@pytest.mark.parametrize(
    ("windows", "error", "text"),
    [
        (lambda: (Window(0), None), ValueError, "Window: size must be at least 1, got 0"),
        (lambda: (Window(-3), None), ValueError, "Window: size must be at least 1, got -3"),
        (lambda: (Window(2.0), None), TypeError, "Window: size must be an int, got float"),  # type: ignore[arg-type]
        (lambda: (4, None), TypeError, "windows must hold a Window or None for each layer, got int"),
        (lambda: (None,), ValueError, "windows must be one for each of 2 layers, or none, got 1"),
    ],
)
def test_what_is_no_window(windows: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        model_with(windows())


def test_a_window_longer_than_the_text_changes_no_bit() -> None:
    model, same = (model_with(windows) for windows in ((), (Window(10**9), Window(64))))
    tokens = torch.randint(39, (1, 60), generator=torch.Generator().manual_seed(5))
    found = [each(tokens, cache=each.new_cache(1, 60)) for each in (model, same)]
    assert torch.equal(*found)


def test_what_windows_are_not_for() -> None:
    with pytest.raises(ValueError, match="windows must be None where rows see what comes after them"):
        model_with((Window(4), None), attention="bidirectional")
    sizes = {"vocab_size": 40, "hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}
    config = TransformerConfig(**sizes, intermediate_size=24, windows=(Window(4), None))
    planning = planning_model(1, "own", 16)
    assert supports("planned", planning)
    planning.config = TransformerConfig(**{**vars(planning.config), "windows": config.windows})
    with pytest.raises(NotImplementedError, match="method .planned. does not follow windows"):
        generate(planning, [3, 5], find("planned"), max_new_tokens=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 7, 16, 128])
def test_a_hybrid_with_local_attention(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of one that keeps all rows, with and without a cache; layers with a window keep few."""
    torch.manual_seed(0)
    mixers = ("conv", "attention", "attention")
    sizes = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 48}
    config = HybridConfig(vocab_size=40, layers=3, mixers=mixers, windows=(None, Window(size), None), **sizes)
    model = Hybrid(config).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.3)
    model, made, make = model.to(dtype), list[Any](), Hybrid.new_cache

    def noting(self: Hybrid, *arguments: Any, **options: Any) -> Any:
        made.append(make(self, *arguments, **options))
        return made[-1]

    monkeypatch.setattr(Hybrid, "new_cache", noting)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "end_tokens": ()}
    long = torch.randint(39, (560,), generator=torch.Generator().manual_seed(7)).tolist()
    for texts in ([[3, 9, 1, 30, 22, 7, 8, 12], [5]], [long, [5], long[:300]]):
        with monkeypatch.context() as patch:
            patch.setattr(import_module("pdkernels.decoding.generate"), "keeps_windows", lambda model: False)
            greedy = [generate(model, text, **settings).tokens.tolist() for text in texts]
        made.clear()
        assert generate(model, texts[0], **settings).tokens.tolist() == greedy[0]
        for method, options in (("jacobi", {"block_size": size + 9}), ("suffix", {})):
            for page_size in (None, 7):
                found = generate(model, texts, method, page_size=page_size, **settings, **options)
                assert [tokens.tolist() for tokens in found.tokens] == greedy
        if len(texts) == 3:
            assert all(isinstance(cache.kv, WindowedCache) for cache in made) and len(made) == 5
        if dtype == torch.float32 and len(texts) == 2:
            for text, new in zip(texts, greedy, strict=True):
                logits = model(torch.tensor([text + new]))[0, len(text) - 1 : -1]
                assert logits.argmax(-1).tolist() == new


def test_cuts_of_a_hybrid_with_windows() -> None:
    """To where both the states and the windows can go back; what is refused changes nothing."""
    sizes = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 48}
    config = HybridConfig(40, layers=2, mixers=("conv", "attention"), windows=(None, Window(7)), **sizes)
    model = Hybrid(config).requires_grad_(False)
    cache, whole = model.new_cache(1, 400, drafts=3), model.new_cache(1, 400)
    tokens = torch.randint(39, (1, 330))
    for each in (cache, whole):
        model(tokens[:, :320], cache=each)
    with pytest.raises(ValueError, match="commit_: counts must keep all but the last 3 rows of a text's first forward"):
        cache.commit_(torch.tensor([300]))
    for each in (cache, whole):
        each.commit_(torch.tensor([320]))
    assert (cache.earliest(0), whole.earliest(0)) == (317, 256)
    with pytest.raises(ValueError, match="trim_: new_lengths must be 0 or at least 317"):
        cache.trim_(310)
    for each in (cache, whole):
        each.trim_(318)
    assert torch.equal(model(tokens[:, 318:], cache=cache), model(tokens[:, 318:], cache=whole))
    cache.reset_()
    assert cache.earliest(0) == 0
