"""Layers with windows in an engine: the tokens of `generate` alone, in memory that does not grow with the text."""

from __future__ import annotations

import random
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdkernels.cache import PooledWindowedCache, WindowedPool
from pdkernels.cache.hybrid import SavedStates
from pdkernels.cache.windowed_pool import SPARE, first_page, most_pages
from pdkernels.decoding import generate
from pdkernels.engine import Engine, Generation
from pdkernels.engine.pages import _sizes
from pdkernels.engine.tree import SHORTEST, PrefixTree
from pdkernels.models import Hybrid, HybridConfig, Transformer, TransformerConfig
from pdkernels.models.architectures.windows import Window
from tests.decoding.test_windows import model_with
from tests.support.drafters import with_drafters

PAGE, PIECE, NEW, LONGEST = 8, 32, 24, 900
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "autoregressive": ("autoregressive", {}),
    "lookup": ("jacobi", {"draft": "lookup"}),
    "jacobi": ("jacobi", {"block_size": 12}),
    "quadratic": ("quadratic_self_speculation", {"block_size": 5}),
    "trees": ("eagle", {"block_size": 5, "branches": 3, "nodes": 12}),
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkernels.engine.pages.PAGE", PAGE)
    for module in ("pdkernels.engine.pages", "pdkernels.cache.windowed_pool"):
        monkeypatch.setattr(f"{module}.PIECE", PIECE)
    monkeypatch.setattr("pdkernels.engine.tree.PrefixTree.every", 200)


def drawn(seed: int, count: int) -> list[int]:
    return torch.randint(39, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine(model: Any, **sizes: Any) -> Engine:
    return Engine(model, **{"max_running": 2, "max_prompt_tokens": LONGEST, "max_new_tokens": NEW, **sizes})


def asked(one: Engine, model: Any, text: list[int], method: Any = "autoregressive", **more: Any) -> Generation:
    """A request, which gets the tokens of `generate` alone."""
    options = {"max_new_tokens": NEW, "end_tokens": (), **more}
    handle = one.submit(text, method, **options)
    assert handle.result(120).tokens.equal(generate(model, text, method, **options).tokens)
    return handle


def pool_of(one: Engine) -> WindowedPool:
    pool = one._memory.pages.pool
    assert isinstance(pool, WindowedPool)
    return pool


def check_given_back(one: Engine) -> None:
    """Nobody holds a page but earlier texts, and nothing is promised."""
    tree, pool = one._memory.pages, pool_of(one)
    assert pool.num_pages - pool.available == len(tree._pages)
    for window, group in pool.groups.items():
        held = [page.windows[window] for page in tree._pages if window in page.windows]
        assert sorted(held) == [number for number in range(group.num_pages) if group.holders(number)]
        assert all(group.holders(number) == 1 for number in held) and pool.promised[window] == 0


def peaks(pool: WindowedPool, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The most pages of a row that its cache has had at a time, by window; filled in as an engine runs."""
    most, slide = dict.fromkeys(pool.groups, 0), PooledWindowedCache.slide_

    def watched(self: PooledWindowedCache, row: int, length: int, room: int) -> None:
        slide(self, row, length, room)
        for window, pages in self.window_pages(row).items():
            count = sum(page != pool.groups[window].scratch for page in pages)
            assert count <= self._needs[row][window]
            most[window] = max(most[window], count)

    monkeypatch.setattr(PooledWindowedCache, "slide_", watched)
    return most


@pytest.mark.covering
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layers", ["both", "one", "different"])
@pytest.mark.parametrize("window", [1, 7, 16, 128])
@pytest.mark.parametrize("kept", [0, 5000])
def test_requests_have_the_tokens_that_they_have_alone(
    method: str, numbers: str, layers: str, window: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They join and leave while others run; drafts are longer than the shorter windows."""
    other = {"both": Window(window), "one": None, "different": Window(33)}[layers]
    dtype = torch.float32 if numbers == "float32" else torch.bfloat16
    model = with_drafters(model_with((Window(window), other), dtype, adapter=True))
    model.cache_dtype = torch.int8 if numbers == "int8" else None
    long, name, options = drawn(1, 500), *METHODS[method]
    texts = [long, drawn(2, 3), [*long[:330], *drawn(3, 150)], drawn(4, 250), [*long[:330], *drawn(5, 9)]]
    with engine(model, kept_prompt_tokens=kept, cache_tokens=4000) as one:
        pool, chance = pool_of(one), random.Random(6)
        most = peaks(pool, monkeypatch)
        for group in pool.groups.values():  # a page that nothing may read
            group.k[:, group.scratch], group.v[:, group.scratch] = (1, 1) if numbers == "int8" else (nan, nan)
        limits = [chance.randint(5, NEW) for _ in texts]
        settings = [{"max_new_tokens": limit, "end_tokens": (), **options} for limit in limits]
        handles = [one.submit(text, name, **more) for text, more in zip(texts, settings)]
        for text, more, handle in zip(texts, settings, handles):
            assert handle.result(120).tokens.equal(generate(model, text, name, **more).tokens)
    check_given_back(one)
    assert set(most) == {window} | ({33} if layers == "different" else set())
    for size, count in most.items():
        assert 0 < count <= most_pages(size, 2 * PIECE, PAGE) < 500 // PAGE
    assert one.metrics().used_window_pages == 0 or kept


def test_what_a_request_holds_does_not_grow_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with((Window(16), Window(40)))
    counts = []
    for length in (400, LONGEST):
        with monkeypatch.context() as patch, engine(model, kept_prompt_tokens=0) as one:
            most = peaks(pool_of(one), patch)
            asked(one, model, drawn(1, length))
        counts.append(most)
    assert counts[0] == counts[1] and max(counts[0].values()) < 400 // PAGE


def test_a_prompt_that_runs_at_once_leaves_its_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that reads the whole prompt in one forward."""
    model = with_drafters(model_with((Window(16), None), adapter=True))
    with engine(model, kept_prompt_tokens=5000) as one:
        most = peaks(pool_of(one), monkeypatch)
        asked(one, model, drawn(1, 600), "quadratic_self_speculation", block_size=4)
    assert most[16] <= most_pages(16, 2 * PIECE, PAGE)
    check_given_back(one)


def test_beginnings_are_shared_where_their_windows_are_there() -> None:
    model, text = model_with((Window(16), None)), drawn(1, 500)
    with engine(model, kept_prompt_tokens=20000) as one:
        answer = asked(one, model, text).result().tokens.tolist()
        # The next turn of a chat, but for the last token of the answer, which has not run.
        assert asked(one, model, [*text, *answer, *drawn(2, 40)]).reused == 500 + NEW - 1
        # Between places where windows are kept: the nearest one before. Multiples of 200 are places.
        assert asked(one, model, [*text[:290], *drawn(3, 60)]).reused == 200
        # That one has kept the windows where it left.
        assert asked(one, model, [*text[:290], *drawn(4, 60)]).reused == 290
        # Pages in front of a place are there as far as its window and a block of attention.
        assert asked(one, model, [*text[:496], *drawn(5, 60)]).reused == 496
    check_given_back(one)


def test_earlier_texts_give_their_windows_to_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with((Window(16), None))
    need = most_pages(16, PIECE + 1, PAGE)
    monkeypatch.setattr("pdkernels.engine.pages._sizes", lambda *_: (1000, {16: need + SPARE}))
    with engine(model, kept_prompt_tokens=7000) as one:
        for seed in range(6):
            asked(one, model, drawn(seed, 300))
        tree = one._memory.pages
        assert tree.tokens == 6 * (300 + NEW - 1)  # the other layers have forgotten nothing
        assert asked(one, model, [*drawn(5, 300), 1]).reused == 300
        assert asked(one, model, [*drawn(0, 300), 1]).reused < 300
    check_given_back(one)


@pytest.mark.parametrize("pages", [124, 260])
def test_requests_wait_for_windows_and_give_up_pages(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few pages of one kind, or of the other."""
    model = model_with((Window(16), None))
    need = most_pages(16, 2 * PIECE, PAGE)
    monkeypatch.setattr(
        "pdkernels.engine.pages._sizes", lambda *_: (pages, {16: need + SPARE + (30 if pages == 124 else 3)})
    )
    with engine(model, max_running=4, kept_prompt_tokens=2000, max_prompt_tokens=940) as one:
        texts = [drawn(seed, length) for seed, length in enumerate((480, 470, 30, 500, 20, 460))]
        handles = [one.submit(text, max_new_tokens=NEW, end_tokens=()) for text in texts]
        for text, handle in zip(texts, handles):
            expected = generate(model, text, max_new_tokens=NEW, end_tokens=()).tokens
            assert handle.result(120).tokens.equal(expected)
    check_given_back(one)


def test_a_request_that_gives_up_its_pages_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with((Window(16), None))
    monkeypatch.setattr("pdkernels.engine.pages._sizes", lambda *_: (86, {16: 200}))
    with engine(model, kept_prompt_tokens=0, max_prompt_tokens=340, max_new_tokens=200) as one:
        texts = [drawn(seed, 320) for seed in range(2)]
        more: dict[str, Any] = {"max_new_tokens": 200, "end_tokens": ()}
        handles = [one.submit(text, **more) for text in texts]
        for text, handle in zip(texts, handles):
            assert handle.result(120).tokens.equal(generate(model, text, **more).tokens)
    assert one.metrics().preemptions > 0
    check_given_back(one)


def test_a_request_beyond_all_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with((Window(16), None))
    monkeypatch.setattr("pdkernels.engine.pages._sizes", lambda *_: (200, {16: 20}))
    with engine(model) as one, pytest.raises(MemoryError, match="needs 23 pages of 18 in the layers with window 16"):
        one.submit(drawn(1, 500), max_new_tokens=NEW).result(60)


def test_a_draft_beyond_all_windows_is_refused_with_what_helps() -> None:
    """Pages are counted for drafts of 64 rows; more requests at a time have room for a longer one."""
    model = model_with((Window(16), None))
    text, new = drawn(1, 600), 190
    sizes: dict[str, Any] = {"kept_prompt_tokens": 0, "max_new_tokens": new}
    with engine(model, max_running=1, **sizes) as one:
        fault = "needs 64 pages of 62 in the layers with window 16. Use shorter drafts, or raise max_running"
        with pytest.raises(MemoryError, match=fault):
            one.submit(text, "jacobi", block_size=180, max_new_tokens=new, end_tokens=()).result(60)
        asked(one, model, text, "jacobi", block_size=150, max_new_tokens=new)
    with engine(model, max_running=2, **sizes) as one:
        asked(one, model, text, "jacobi", block_size=180, max_new_tokens=new)
    check_given_back(one)


texts = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=300), st.integers(0, 40)), min_size=1, max_size=5).map(
    lambda pairs: [([0] * SHORTEST + end, first) for end, first in pairs]
)


@given(texts=texts, wanted=st.lists(st.integers(0, 1), max_size=300), given_back=st.integers(0, 60))
def test_the_longest_beginning_with_all_windows_is_found(
    texts: list[tuple[list[int], int]], wanted: list[int], given_back: int
) -> None:
    pool = WindowedPool([16, None, 3], 400, {16: 400, 3: 400}, PAGE, 1, 4)
    tree, text = PrefixTree(pool, 10**6, 10**9), [0] * SHORTEST + wanted
    for one, first in texts:
        count = -(-len(one) // PAGE)
        pages, first = pool.allocate(count), min(first, count - 1)
        windows = {w: [g.scratch] * first + g.allocate(count - first) for w, g in pool.groups.items()}
        tree.keep((), one, pages, windows=windows)
        pool.release(pages)
        tree.release_windows(windows)
    tree.forget_windows(16, min(400, pool.groups[16].available + given_back))
    path, partial, length = tree._walk((), text)
    nodes = [*path, *([partial] if partial else [])]

    def usable(end: int) -> bool:
        rows = {w: range(max(0, end - w + 1 - 127), end) for w in pool.groups}
        return all(w in nodes[row // PAGE].windows for w, seen in rows.items() for row in seen)

    best = max((end for end in range(SHORTEST, length + 1) if usable(end)), default=0)
    found = tree.find((), text)
    assert found.length == best
    for window, numbers in found.windows.items():
        first = first_page(best, window, PAGE)
        assert numbers == [pool.groups[window].scratch] * first + [
            node.windows[window] for node in nodes[first : -(-best // PAGE)]
        ]


def test_windows_of_a_folder(tmp_path: Path) -> None:
    model, text = model_with((Window(16), None)), drawn(0, 300)
    for turn in range(3):
        with engine(model, prefix_dir=tmp_path, kept_prompt_tokens=5000) as one:
            handle = asked(one, model, text)
            known = len(text) - 20 - 1 if turn else 0
            assert handle.reused == known and one.metrics().restored_tokens == known
        check_given_back(one)
        text = [*text, *handle.result().tokens.tolist(), *drawn(turn + 1, 20)]


def test_a_folder_without_some_windows_and_with_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is torn, or of layers with other windows, is not taken; tokens stay."""
    model, text = model_with((Window(16), None)), drawn(0, 300)
    with engine(model, prefix_dir=tmp_path) as one:
        asked(one, model, text)
        pieces = one._memory.folder.pieces((), text[: 300 + NEW - 1])  # type: ignore[union-attr]
    for piece in pieces[-20:]:
        path = tmp_path / f"{piece.of_windows}.safetensors"
        if path.exists():
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(data)
    with engine(model, prefix_dir=tmp_path) as one:
        assert asked(one, model, [*text, 3]).reused < 300
    assert "ignored" in caplog.text
    others = model_with((Window(24), None))
    others.load_state_dict(model.state_dict())
    with engine(others, prefix_dir=tmp_path) as one:
        assert asked(one, others, text).reused == 0


def test_adapters_share_no_windows(tmp_path: Path) -> None:
    tree = PrefixTree(WindowedPool([16, None], 99, {16: 99}, PAGE, 1, 4), 1000, 10**9)
    pages, windows = tree.pool.allocate(5), {16: tree.groups[16].allocate(5)}
    tree.keep(("one",), drawn(0, 40), pages, windows=windows)
    assert [tree.find((name,), drawn(0, 40)).length for name in ("one", "another")] == [40, 0]


def gemma(**more: Any) -> Transformer:
    """The shape of Gemma 3 270M, without weights."""
    windows = tuple(None if layer % 6 == 5 else Window(512) for layer in range(18))
    sizes: dict[str, Any] = {
        "layers": 18,
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 256,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    with torch.device("meta"):
        return Transformer(TransformerConfig(hidden_size=16, windows=windows, max_positions=32768, **sizes, **more))


def test_how_many_pages_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pdkernels.engine.pages", "pdkernels.cache.windowed_pool"):
        monkeypatch.setattr(f"{module}.PIECE", 256)
    monkeypatch.setattr("pdkernels.engine.pages.PAGE", 64)
    model, page, longest = gemma(), 64 * 18 * 1024, 65
    most = most_pages(512, 320, 64)
    everywhere = 10**15
    # Eight requests of 4,096 tokens and 16,384 of earlier texts, which was 768 pages of all layers.
    assert _sizes(model, page, 768, longest, 8, True, everywhere) == (768, {512: 18 * most + SPARE})
    assert _sizes(model, page, 512, longest, 8, False, everywhere) == (512, {512: 9 * most + SPARE})
    # Few pages: those that run come first; and where a request may be short, all layers are alike.
    assert _sizes(model, page, 200, longest, 8, True, everywhere) == (200, {512: 9 * most + SPARE})
    assert _sizes(model, page, 100, longest, 8, True, everywhere) == (100, {})
    # As much as there is memory for, and the longest request in any case.
    for room in (10**7, 10**8, 3 * 10**8, 5 * 10**8, 10**9):
        pages, windows = _sizes(model, page, 768, 513, 8, True, room)
        taken = page * pages if not windows else page // 18 * (3 * pages + 15 * windows[512])
        assert pages >= 513 and (taken <= room or (pages, windows) == (513, {}))
        assert room < 2 * 10**8 or windows
    same = gemma(rope_theta=2.0)
    object.__setattr__(same.config, "windows", ())
    assert _sizes(same, page, 768, longest, 8, True, everywhere) == (768, {})


def test_a_text_goes_back_as_far_as_its_windows() -> None:
    pool = WindowedPool([8, None], 100, {8: 100}, PAGE, 1, 16)
    cache = PooledWindowedCache(pool, 2, 600)
    assert cache.earliest(0) == 0
    cache.resize_row_(0, 400)
    cache.slide_(0, 0, 400)
    cache.lengths[0] = 400
    cache.slide_(0, 400, 408)
    least = cache.earliest(0)
    assert 400 - PAGE < least <= 400
    with pytest.raises(
        ValueError, match=rf"trim_: new_lengths must be 0 or at least {least}, since rows .* got {least - 1}"
    ):
        cache.trim_([least - 1, 0])
    assert cache.lengths.tolist() == [400, 0]
    with pytest.raises(ValueError, match="slide_: rows before the window of position 390 are gone. Empty the text"):
        cache.slide_(0, 390, 408)
    cache.slide_(0, least, 408)
    cache.trim_([least, 0])
    assert cache.lengths.tolist() == [least, 0]
    cache.trim_(0)
    assert pool.available == 100 and pool.groups[8].available == 100
    cache.slide_(0, 0, 8)
    assert cache.window_pages(0) == {8: [0]}


def test_what_is_refused() -> None:
    sizes: dict[str, Any] = {"page_size": 8, "kv_heads": 1, "head_dim": 16}
    for windows, pages, words in (
        ([0, None], {0: 3}, "windows must be 1 or more, got 0"),
        ([8, None], {7: 3}, r"window_pages must name the windows \[8\], got \[7\]"),
        ([8, None], {8: 0}, "num_pages must be 1 or more, got 0"),
        ([], {}, "windows must be 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            WindowedPool(windows, 5, pages, **sizes)
    pool = WindowedPool([8, None], 5, {8: 5}, **sizes)
    cache = PooledWindowedCache(pool, 1, 40)
    with pytest.raises(MemoryError, match="pages must fit those of window 8, got 4 beside 0 of 3"):
        cache.promise_row_(0, {8: 4})
    with pytest.raises(ValueError, match=r"room must be in \[0, 40\], got 41"):
        cache.slide_(0, 0, 41)
    with pytest.raises(NotImplementedError, match="sequences on a pool of pages move"):
        cache.copy_row_(0, cache, 0, 1)
    with pytest.raises(TypeError, match="pool must be a WindowedPool, got int"):
        PooledWindowedCache(3, 1, 1)  # type: ignore[arg-type]


def hybrid(window: Window, dtype: torch.dtype = torch.float32, **more: Any) -> Hybrid:
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 40}
    sizes |= {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16}
    mixers, windows = ("conv", "attention", "delta", "attention"), (None, window, None, None)
    torch.manual_seed(3)
    config = HybridConfig(hidden_size=64, layers=4, **{"mixers": mixers, "windows": windows, **sizes, **more})
    model = Hybrid(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(4)
    return model.to(dtype).requires_grad_(False).eval()


@pytest.mark.parametrize("method", ["autoregressive", "lookup", "jacobi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [1, 7, 16])
@pytest.mark.parametrize("kept", [0, 20000])
@pytest.mark.covering
def test_hybrid_models_keep_the_last_rows(
    method: str, dtype: torch.dtype, window: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside their states. A text goes on where both are there."""
    model, long, name, options = hybrid(Window(window), dtype), drawn(1, 500), *METHODS[method]
    texts = [long, drawn(2, 3), [*long[:330], *drawn(3, 150)], drawn(4, 250), [*long[:330], *drawn(5, 9)]]
    with engine(model, kept_prompt_tokens=kept, cache_tokens=4000) as one:
        pool = pool_of(one)
        most = peaks(pool, monkeypatch)
        for group in pool.groups.values():
            group.k[:, group.scratch], group.v[:, group.scratch] = nan, nan
        settings = [{"max_new_tokens": limit, "end_tokens": (), **options} for limit in (NEW, 9, 17, NEW, 5)]
        handles = [one.submit(text, name, **more) for text, more in zip(texts, settings)]
        for text, more, handle in zip(texts, settings, handles):
            assert handle.result(120).tokens.equal(generate(model, text, name, **more).tokens)
        reused = asked(one, model, [*long[:330], *drawn(6, 20)], name, **options).reused
        assert (reused >= 200) == bool(kept)
    check_given_back(one)
    assert 0 < most[window] <= most_pages(window, 2 * PIECE, PAGE) < 500 // PAGE


def test_a_hybrid_model_that_gives_up_its_pages_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid(Window(16))
    monkeypatch.setattr("pdkernels.engine.pages._sizes", lambda *_: (86, {16: 200}))
    with engine(model, kept_prompt_tokens=3000, max_prompt_tokens=340, max_new_tokens=200) as one:
        texts, more = [drawn(seed, 320) for seed in range(2)], {"max_new_tokens": 200, "end_tokens": ()}
        handles = [one.submit(text, **more) for text in texts]
        for text, handle in zip(texts, handles):
            assert handle.result(120).tokens.equal(generate(model, text, **more).tokens)
    assert one.metrics().preemptions > 0
    check_given_back(one)


def test_states_and_windows_of_a_folder(tmp_path: Path) -> None:
    model, text = hybrid(Window(16)), drawn(0, 300)
    for turn in range(3):
        with engine(model, prefix_dir=tmp_path, kept_prompt_tokens=20000) as one:
            handle = asked(one, model, text)
            assert (handle.reused >= 200) == bool(turn)
        check_given_back(one)
        text = [*text, *handle.result().tokens.tolist(), *drawn(turn + 1, 20)]


def test_a_text_goes_on_where_states_and_windows_are() -> None:
    pool = WindowedPool([16, None], 400, {16: 400}, PAGE, 1, 4)
    tree, text = PrefixTree(pool, 10**6, 10**9, state_rows=2), [0] * 240
    pages, windows = pool.allocate(30), {16: pool.groups[16].allocate(30)}
    for end, earliest in ((64, 60), (128, 128), (240, 230)):
        states = SavedStates(earliest, torch.zeros(1), [], 0)
        tree.keep((), text[:end], pages, states, windows if end != 240 else None)
    # Windows up to 128 alone, states back to 230, at 128, and from 60 to 64.
    found = [tree.find((), text[:length]) for length in (240, 200, 128, 127, 62, 59)]
    assert [each.length for each in found] == [128, 128, 128, 64, 62, 0]
    assert [None if each.states is None else each.states.earliest for each in found] == [128, 128, 128, 60, 60, None]
    assert [each.branch for each in found] == [240, 200, 0, 127, 0, 59]


def test_a_branch_of_a_tree_moves_in_all_layers() -> None:
    cache = PooledWindowedCache(WindowedPool([8, None, 16], 9, {8: 9, 16: 9}, PAGE, 1, 16), 1, 40)
    cache.resize_row_(0, 16)
    cache.slide_(0, 0, 16)
    rows = torch.arange(6.0)[None, :, None, None].expand(1, 6, 1, 16)
    for layer in range(3):
        cache.append_(layer, rows + 10 * layer, -rows)
    cache.commit_(torch.tensor([3]), torch.tensor([[0, 2, 5, 0, 0, 0]]))
    assert cache.lengths.tolist() == [3]
    for layer in range(3):
        k, v = cache.layer(layer, 3)
        assert (k[0, :, 0, 0] - 10 * layer).tolist() == [0, 2, 5] and v[0, :, 0, 0].tolist() == [0, -2, -5]
