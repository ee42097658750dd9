"""Caches whose layers with windows keep their last rows alone: the same bits as one that keeps all, pages counted."""

from __future__ import annotations

import copy
import pickle
import random
from importlib import import_module
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.cache import ContiguousKVCache, PagedKVCache, WindowedCache
from pdkernels.cache.windowed import BLOCK, turns
from pdkernels.decoding import generate
from pdkernels.generation import session
from pdkernels.generation.logprobs import CHUNK
from pdkernels.masks import tree
from pdkernels.models import Transformer
from pdkernels.models.architectures.windows import Window
from tests.decoding.lossless_sweep import METHODS
from tests.decoding.test_windows import WINDOWS, model_with
from tests.support.drafters import dflash_head, with_drafters

GENERATE = import_module("pdkernels.decoding.generate")
PAGE = 7
TEXT, NEW = 420, 40  # longer than the pages that take turns


def caches(
    model: Transformer, batch: int, drafts: int, capacity: int = 700, *, contiguous: bool = False
) -> tuple[Any, Any]:
    """One that keeps all rows, and one that does not."""
    kind: dict[str, Any] = {} if contiguous else {"kind": "paged", "page_size": PAGE}
    pair: list[Any] = [model.new_cache(batch, capacity, drafts=n, **kind) for n in (None, drafts)]
    for cache in () if contiguous else pair:
        cache.reserve_(capacity)
    assert type(pair[0]) is (ContiguousKVCache if contiguous else PagedKVCache) and type(pair[1]) is WindowedCache
    return pair[0], pair[1]


class Texts:
    """Random forwards on both caches, drafts that are rejected, trees and cuts among them."""

    def __init__(
        self, model: Transformer, seed: int, batch: int = 3, drafts: int = 9, contiguous: bool = False
    ) -> None:
        self.model, self.draw, self.drafts = model, random.Random(seed), drafts
        self.whole, self.windowed = caches(model, batch, drafts, contiguous=contiguous)
        self.batch = batch

    def forward(self, rows: int, counts: list[int], **settings: Any) -> None:
        tokens = torch.tensor([[self.draw.randrange(39) for _ in range(rows)] for _ in range(self.batch)])
        stored = torch.tensor(counts)
        pair = [self.model(tokens, cache=cache, counts=stored, **settings) for cache in (self.whole, self.windowed)]
        for sequence, count in enumerate(counts):
            valid = rows if settings else count
            assert torch.equal(*(logits[sequence, :valid] for logits in pair))

    def commit(self, counts: list[int], source: list[list[int]] | None = None) -> None:
        for cache in (self.whole, self.windowed):
            cache.commit_(torch.tensor(counts), None if source is None else torch.tensor(source))
        assert torch.equal(self.whole.lengths, self.windowed.lengths)

    def prompts(self) -> None:
        counts = [self.draw.choice([1, 8, 200, 330]) for _ in range(self.batch)]
        self.forward(max(counts), counts)
        self.commit([max(count - self.draw.randrange(self.drafts), 1) for count in counts])

    def step(self) -> None:
        kind = self.draw.random()
        if kind < 0.6:
            rows = self.draw.randint(1, self.drafts)
            counts = [self.draw.randint(0, rows) for _ in range(self.batch)]
            self.forward(rows, counts)
            self.commit([self.draw.randint(0, count) for count in counts])
        elif kind < 0.9:
            parents = [self.draw.randrange(-1, row) for row in range(self.drafts)]
            depth: list[int] = []
            for parent in parents:
                depth.append(0 if parent < 0 else depth[parent] + 1)
            path = [self.draw.randrange(self.drafts)]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            settings = {"mask": tree(parents).plan(16, 16), "positions": torch.tensor(depth)}
            self.forward(self.drafts, [self.drafts] * self.batch, **settings)
            self.commit([len(path)] * self.batch, [path + [0] * (self.drafts - len(path))] * self.batch)
        else:
            lengths = [max(self.windowed.earliest(row), 1) for row in range(self.batch)]
            lengths = [min(length, int(self.whole.lengths[row])) for row, length in enumerate(lengths)]
            for cache in (self.whole, self.windowed):
                cache.trim_(lengths)
            for cache in (self.whole, self.windowed):
                if hasattr(cache, "reserve_"):
                    cache.reserve_(700)


@pytest.mark.covering(of=["window", "dtype"])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layers", ["both", "one", "different"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_row_has_the_same_bits(window: Window, layers: str, dtype: torch.dtype, contiguous: bool) -> None:
    other = {"both": window, "one": None, "different": Window(33)}[layers]
    model = model_with((window, other), dtype)
    texts = Texts(model, 1, contiguous=contiguous)
    texts.prompts()
    while int(texts.whole.lengths.max()) < 480:
        texts.step()


@pytest.mark.parametrize("contiguous", [False, True])
def test_rows_of_eight_bits(contiguous: bool) -> None:
    model = model_with((Window(16), None), torch.bfloat16)
    model.cache_dtype = torch.int8
    texts = Texts(model, 3, contiguous=contiguous)
    texts.prompts()
    while int(texts.whole.lengths.max()) < 480:
        texts.step()


def test_a_longer_forward_makes_room() -> None:
    """A text that goes on with more rows than a draft may have: any of them may be rejected."""
    texts = Texts(model_with((Window(16), None)), 4)
    texts.prompts()
    before = texts.windowed.turning[16].pages
    texts.forward(60, [60, 3, 41])
    texts.commit([2, 1, 41])
    for _ in range(30):
        texts.step()
    assert texts.windowed.drafts == 60 and texts.windowed.turning[16].pages == turns(16, 60, PAGE) > before


@pytest.fixture
def session_caches(monkeypatch: pytest.MonkeyPatch) -> list[WindowedCache]:
    """The caches that sessions make."""
    caches_of_sessions: list[WindowedCache] = []
    make = session.Session.new_cache

    def noting(*arguments: Any, **options: Any) -> Any:
        cache = make(*arguments, **options)
        caches_of_sessions.append(getattr(cache, "inner", cache))
        return cache

    monkeypatch.setattr(session.Session, "new_cache", noting)
    return caches_of_sessions


@pytest.mark.covering(of=["method"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_method(
    method: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    window: Window,
    session_caches: list[WindowedCache],
) -> None:
    """The tokens of decoding one by one with all rows, in a batch; pages of layers with a window do not grow."""
    model = with_drafters(model_with((window, None), dtype, adapter=True))
    model.cache_dtype = cache_dtype
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(39, (length,), generator=generator).tolist() for length in (TEXT, 1, 300)]
    greedy = greedy_with_all_rows(model, texts)
    assert [generate(model, text, max_new_tokens=NEW, end_tokens=()).tokens.tolist() for text in texts] == greedy
    for options, page_size in zip(
        METHODS[method] * 2, (PAGE, None, None, PAGE)[: max(2, len(METHODS[method]))], strict=False
    ):
        session_caches.clear()
        settings = options | {"page_size": page_size, "max_new_tokens": NEW, "end_tokens": ()}
        tokens = generate(model, texts, method, **settings).tokens
        assert [row.tolist() for row in tokens] == greedy
        (cache,) = session_caches
        (pages,) = cache.turning.values()
        most = window.size + 2 * cache.drafts + BLOCK + 2 * pages.page_size
        assert (
            cache.drafts <= (80 if method == "jacobi_multiblock" else 40)
            and pages.pages * pages.page_size <= most < TEXT
        )
        assert pages.k.shape[:2] == (1, len(texts) * pages.pages + 1) == (1, int(pages.block_table.max()) + 2)
        full = cache.full  # that of the layer that sees all holds the texts
        if page_size is None:
            room = 100 if method == "jacobi_multiblock" else 60  # that has several branches in a forward
            assert type(full) is ContiguousKVCache and TEXT + NEW <= full.capacity < TEXT + NEW + room
        else:
            assert isinstance(full, PagedKVCache)
            assert sum(len(full.pages(row)) for row in range(3)) * PAGE >= sum(map(len, texts)) + 3 * NEW


def greedy_with_all_rows(model: Transformer, texts: list[list[int]]) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GENERATE, "keeps_windows", lambda model: False)
        found = [generate(model, text, max_new_tokens=NEW, end_tokens=()) for text in texts]
    return [each.tokens.tolist() for each in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_draft_longer_than_the_window(
    window: Window, dtype: torch.dtype, session_caches: list[WindowedCache]
) -> None:
    model = model_with((window, None), dtype)
    texts = [torch.randint(39, (length,), generator=torch.Generator().manual_seed(6)).tolist() for length in (990, 7)]
    greedy = greedy_with_all_rows(model, texts)
    session_caches.clear()
    for options in ({"block_size": window.size + 20}, {"draft": "lookup", "block_size": window.size + 3}):
        found = generate(model, texts, "jacobi", max_new_tokens=NEW, end_tokens=(), **options).tokens
        assert [tokens.tolist() for tokens in found] == greedy
    assert all(type(cache) is WindowedCache for cache in session_caches) and len(session_caches) == 2


def test_several_texts_of_a_prompt_and_filters(
    session_caches: list[WindowedCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with((Window(16), None))
    text = torch.randint(39, (TEXT,), generator=torch.Generator().manual_seed(3)).tolist()
    settings: dict[str, Any] = {"n": 3, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": NEW, "end_tokens": ()}
    for method in ("autoregressive", "jacobi"):
        with monkeypatch.context() as patch:
            patch.setattr(GENERATE, "keeps_windows", lambda model: False)
            whole = generate(model, text, method, **settings)
        assert type(session_caches[-1]) is not WindowedCache
        for page_size in (None, PAGE):
            windowed = generate(model, text, method, page_size=page_size, **settings)
            assert type(session_caches[-1]) is WindowedCache
            assert all(map(torch.equal, whole.tokens, windowed.tokens))
    made = new_caches(model, monkeypatch)
    logprobs = generate(model, text, "jacobi", max_new_tokens=NEW, end_tokens=(), logprobs=2).logprobs
    assert type(made[-1]) is WindowedCache and made[-1].drafts == CHUNK
    monkeypatch.setattr("pdkernels.generation.logprobs.keeps_windows", lambda model: False)
    expected = generate(model, text, "jacobi", max_new_tokens=NEW, end_tokens=(), logprobs=2).logprobs
    assert type(made[-1]) is not WindowedCache
    assert all(map(torch.equal, logprobs, expected))


def new_caches(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The caches that a model makes from now on."""
    made: list[Any] = []
    make = Transformer.new_cache

    def noting(self: Transformer, *arguments: Any, **options: Any) -> Any:
        made.append(make(self, *arguments, **options))
        return made[-1]

    monkeypatch.setattr(Transformer, "new_cache", noting)
    return made


def test_a_text_shorter_than_the_window_takes_a_plain_cache(session_caches: list[WindowedCache]) -> None:
    model = model_with((Window(16), None))
    generate(model, [3, 5], "jacobi", max_new_tokens=100, page_size=PAGE)
    generate(model_with((Window(10**9), None)), [3] * TEXT, "jacobi", max_new_tokens=100, page_size=PAGE)
    assert [type(cache) for cache in session_caches] == [PagedKVCache, PagedKVCache]


@pytest.mark.parametrize("contiguous", [False, True])
def test_cuts_that_go_too_far_are_refused(contiguous: bool) -> None:
    model = model_with((Window(16), None))
    _, cache = caches(model, 2, 5, contiguous=contiguous)
    tokens = torch.randint(39, (2, 300))
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="commit_: counts must keep all but the last 5 rows of a text's first forward"):
        cache.commit_(torch.tensor([300, 294]))
    assert cache.lengths.tolist() == [0, 0]
    model(tokens, cache=cache)
    cache.commit_(torch.tensor([300, 296]))
    with pytest.raises(ValueError, match="trim_: new_lengths must be 0 or at least 295, since .*, got 290"):
        cache.trim_([300, 290])
    assert cache.lengths.tolist() == [300, 296] and cache.earliest(0) == 295
    cache.trim_([295, 296])
    with pytest.raises(ValueError, match="at least 295"):
        cache.trim_([294, 0])
    other = caches(model, 1, 5)[1]
    with pytest.raises(ValueError, match="copy_row_: length must be 0 or at least 295, got 290"):
        other.copy_row_(0, cache, 0, 290)
    with pytest.raises(NotImplementedError, match="have no more than their last rows"):
        cache.row(0, 10)
    with pytest.raises(ValueError, match="rewrite_: starts must be at most 5 before the furthest row of a text"):
        model.recompute(tokens[:, :3], cache, torch.tensor([0, 0]), visible=torch.tensor([3, 3]))
    cache.trim_([0, 295])
    assert cache.earliest(0) == 0
    cache.reset_()
    assert cache.lengths.tolist() == cache.furthest.tolist() == [0, 0]


@pytest.mark.parametrize("length", [295, 300])
@pytest.mark.parametrize("drafts", [3, 9])
@pytest.mark.parametrize("contiguous", [False, True])
def test_rows_that_move_to_another_cache(length: int, drafts: int, contiguous: bool) -> None:
    """From one that keeps all, and from one that does not, by other pages."""
    model = model_with((Window(16), Window(33)))
    _, target = caches(model, 2, drafts, contiguous=contiguous)
    model(torch.randint(39, (2, 310)), cache=target)
    target.commit_(torch.tensor([310, 310]))
    tokens = torch.randint(39, (1, 300))
    expected, sources = None, caches(model, 1, 5)
    for source in sources:
        model(tokens, cache=source)
        source.commit_(torch.tensor([300]))
    for source in sources:
        target.copy_row_(1, source, 0, length)
        back = 295 if isinstance(source, WindowedCache) else 0
        assert target.lengths.tolist() == [310, length] and target.earliest(1) == max(length - drafts, back)
        logits = model(torch.tensor([[5, 6], [7, 8]]), cache=target)[1]
        expected = logits if expected is None else expected
        assert torch.equal(logits, expected)
    whole = sources[0]
    whole.trim_(length)
    whole.reserve_(310)
    assert torch.equal(model(torch.tensor([[7, 8]]), cache=whole)[0], logits)
    target.idle_row_(1)
    assert target.lengths.tolist() == [310, 1]


@pytest.mark.parametrize("contiguous", [False, True])
def test_copies(contiguous: bool) -> None:
    model = model_with((Window(16), None))
    _, cache = caches(model, 1, 5, contiguous=contiguous)
    model(torch.randint(39, (1, 300)), cache=cache)
    cache.commit_(torch.tensor([300]))
    suffix = torch.tensor([[3, 4, 5]])
    expected = model(suffix, cache=cache)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(model(suffix, cache=other), expected)
        other.commit_(torch.tensor([3]))
        assert other.turning[16].lengths is other.lengths and other.lengths.tolist() == [303]
        last = model(suffix, cache=other)
    model(suffix, cache=cache)
    cache.commit_(torch.tensor([3]))
    assert torch.equal(model(suffix, cache=cache), last)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"windows": [0, None]}, ValueError, "windows must be 1 or more, got 0"),
        ({"windows": [-4, None]}, ValueError, "windows must be 1 or more, got -4"),
        ({"windows": [2.5]}, TypeError, "windows must be an int"),
        ({"windows": []}, ValueError, "windows must be 1 or more, got 0"),
        ({"drafts": 0}, ValueError, "drafts must be 1 or more, got 0"),
        ({"capacity": 0}, ValueError, "capacity must be 1 or more, got 0"),
        ({"page_size": 0}, ValueError, "page_size must be 1 or more, got 0"),
        ({"capacity": 2**60}, ValueError, "memory"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    sizes = {"windows": [4, None], "batch": 1, "capacity": 100, "page_size": 8, "kv_heads": 1, "head_dim": 16}
    with pytest.raises(error, match=text):
        WindowedCache(**{**sizes, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 7, 16, 128])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "draft_model"])
def test_drafters_with_windows(kind: str, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep few rows, and draft what they draft with all of them, alone, in a batch and in an engine."""
    model = model_with((None, None), dtype)
    method = "draft_model" if kind == "draft_model" else "dflash"
    if method == "dflash":
        drafter: Any = dflash_head(model, windows=(Window(size), None), kind=kind)
    else:
        drafter = model_with((Window(size), Window(size)), dtype)
        with torch.no_grad():
            for parameter, noise in zip(drafter.parameters(), model.parameters(), strict=True):
                parameter.copy_(noise + 0.02 * torch.randn_like(noise))
    generator = torch.Generator().manual_seed(8)
    texts = [torch.randint(39, (length,), generator=generator).tolist() for length in (TEXT, 2, 300)]
    made: list[Any] = []
    make = type(drafter).new_cache

    def noting(self: Any, *arguments: Any, **options: Any) -> Any:
        made.append(make(self, *arguments, **options))
        return made[-1]

    settings: dict[str, Any] = {"drafter": drafter, "max_new_tokens": NEW, "end_tokens": ()}
    with monkeypatch.context() as patch:
        patch.setattr(import_module("pdkernels.decoding.causal._drafter"), "keeps_windows", lambda model: False)
        expected = [generate(model, text, method, **settings) for text in texts]
    greedy = [generate(model, text, max_new_tokens=NEW, end_tokens=()).tokens.tolist() for text in texts]
    assert [each.tokens.tolist() for each in expected] == greedy
    monkeypatch.setattr(type(drafter), "new_cache", noting)
    for text, each in zip(texts, expected, strict=True):
        found = generate(model, text, method, **settings)
        assert found.tokens.tolist() == each.tokens.tolist() and found.stats.accepted == each.stats.accepted
    found = generate(model, texts, method, **settings)
    assert [tokens.tolist() for tokens in found.tokens] == greedy
    assert found.stats.accepted == [each.stats.accepted[0] for each in expected]
    cache = next(cache for cache in made[::-1] if isinstance(cache, WindowedCache))
    (pages,) = cache.turning.values()
    assert pages.pages * pages.page_size <= size + 2 * cache.drafts + BLOCK + 2 * pages.page_size < TEXT
    if size != 16:
        return
    with pd.Engine(model, max_running=3, max_prompt_tokens=TEXT, max_new_tokens=NEW) as engine:
        handles = [engine.submit(text, method, **settings) for text in (*texts, texts[0])]
        assert [handle.result().tokens.tolist() for handle in handles] == [*greedy, greedy[0]]


def test_a_drafter_that_has_not_read_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads at once has room; the rest it reads before."""
    model, drafter = model_with((None, None)), model_with((Window(7), Window(7)))
    text = torch.randint(39, (300,), generator=torch.Generator().manual_seed(9)).tolist()
    draft_model = import_module("pdkernels.decoding.causal.draft_model")
    step, steps = draft_model.DraftModelSteps.step, [0]

    def seldom(self: Any, width: int | None = None, ragged: bool = True) -> None:
        steps[0] += 1
        if steps[0] % 60:
            self.entry.pending.clamp_(max=1)
            width = 1
        step(self, width, ragged)

    monkeypatch.setattr(draft_model.DraftModelSteps, "step", seldom)
    results = []
    for windows in (False, True):
        monkeypatch.setattr(
            import_module("pdkernels.decoding.causal._drafter"), "keeps_windows", lambda model, windows=windows: windows
        )
        steps[0] = 0
        results.append(generate(model, text, "draft_model", drafter=drafter, max_new_tokens=130, end_tokens=()))
    assert (
        results[0].tokens.tolist() == results[1].tokens.tolist()
        and results[0].stats.accepted == results[1].stats.accepted
    )


@pytest.mark.parametrize("method", METHODS)
def test_steps_of_a_draft_read_no_lengths(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the host would wait for: room for drafts is made once, before the first forward."""
    expect, sizes, new = WindowedCache.expect_, list[tuple[int, int]](), []

    def watched(self: WindowedCache, rows: int, counts: torch.Tensor | None = None) -> None:
        begun = int(self.lengths.min()) > 0
        with monkeypatch.context() as patch:
            if begun:  # what it reads is a number of these rows
                patch.setattr(torch.Tensor, "max", None)
            expect(self, rows, counts)
        sizes.append((self.drafts, id(self.turning)))

    monkeypatch.setattr(WindowedCache, "expect_", watched)
    model = with_drafters(model_with((Window(7), None), adapter=True))
    texts = [torch.randint(39, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (400, 3)]
    for options in METHODS[method]:
        sizes.clear()
        new.append(generate(model, texts, method, max_new_tokens=60, end_tokens=(), **options).tokens)
        assert len(sizes) > 10 and len(set(sizes[1:])) == 1
    assert all(torch.equal(a, b) for found in new for a, b in zip(found, new[0], strict=True))
