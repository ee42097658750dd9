"""dLLM-Cache: which rows are computed when, what the others return, and that most of what is cached of a prompt is never used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.reference.dllm_cache import FeatureCache, dllm_cache, least_similar
from pdkernels.reference.llada import llada
from pdkernels.reference.masked_model import MaskedTransformerReference, random_weights

LAYERS = 3
MODELS = {
    "own": MaskedTransformerReference(random_weights("llada", layers=LAYERS, seed=6), heads=4, names="llada"),
    "next": MaskedTransformerReference(random_weights("qwen2", layers=LAYERS, seed=7), heads=4, names="qwen2"),
}
PROMPT = [3, 1, 4, 1, 5]
INTERVALS = [(1, 1), (3, 2), (2, 5), (4, 4), (100, 3), (100, 100)]


def canvases(count: int, new: int = 8, seed: int = 0) -> list[list[int]]:
    """Masks that are filled in one at a time, in any order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(new, generator=generator).tolist()
    canvas, out = [12] * new, []
    for step in range(count):
        out.append(PROMPT + list(canvas))
        canvas[order[step % new]] = int(torch.randint(12, (), generator=generator))
    return out


def whole(model: MaskedTransformerReference, tokens: list[int]) -> Tensor:
    length = len(tokens)
    return model(torch.tensor([tokens]), torch.arange(length)[None], torch.ones(length, length, dtype=torch.bool))[0]


class LeanCache:
    """The same without what is never read: of a prompt only K and V, and what was added to its last row if that is requested.

    Takes the two parts of a canvas one by one, as the published table does. `first_layer`: the current revision's rule.
    """

    def __init__(
        self,
        model: MaskedTransformerReference,
        intervals: tuple[int, int],
        ratio: float,
        baseline: str = "last",
        first_layer: bool = True,
    ) -> None:
        self.model, self.intervals, self.ratio, self.baseline, self.first_layer = (
            model,
            intervals,
            ratio,
            baseline,
            first_layer,
        )
        self.step = 0
        self.prompt: dict[int, tuple[Tensor, Tensor]] = {}
        self.new: dict[int, tuple[Tensor, Tensor]] = {}
        self.added: dict[int, tuple[Tensor, Tensor]] = {}
        self.last_row: dict[int, Tensor] = {}

    def run(self, layer: int, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (torch.cat(pair) for pair in zip(self.prompt[layer], self.new[layer]))
        attended = self.model.attend(layer, q, k, v)
        return attended, self.model.feed_forward(layer, x + attended)

    def __call__(self, tokens: list[int]) -> Tensor:
        """Logits of the new positions."""
        model, start = self.model, len(PROMPT)
        prompt_due, new_due = (self.step % interval == 0 for interval in self.intervals)
        self.step += 1
        old, x = model.embed(torch.tensor(tokens[:start])), model.embed(torch.tensor(tokens[start:]))
        last = old[-1:]
        old_at, at = torch.arange(start), torch.arange(start, len(tokens))
        for layer in range(model.layers):
            if prompt_due:
                old_q, *self.prompt[layer] = model.qkv(layer, old, old_at)  # type: ignore[assignment]
            all_new = new_due or (layer == 0 and self.first_layer)
            q, k, v = model.qkv(layer, x, at)
            if all_new:
                chosen = torch.arange(len(x))
            elif self.ratio:
                similarity = F.cosine_similarity(v.flatten(1), self.new[layer][1].flatten(1), dim=-1)
                chosen = similarity.topk(int(len(x) * self.ratio), largest=False).indices.sort().values
            else:
                chosen = torch.arange(0)
            if all_new:
                self.new[layer] = (k.clone(), v.clone())
                self.added[layer] = tuple(torch.zeros_like(x) for _ in range(2))  # type: ignore[assignment]
            elif self.ratio:
                cached_k, cached_v = self.new[layer]
                cached_k[chosen] = k[chosen]
                if self.baseline == "last":
                    cached_v.copy_(v)
                else:
                    cached_v[chosen] = v[chosen]
            attention, feed_forward = self.added[layer]
            attended, _ = self.run(layer, x[chosen], q[chosen])
            attention[chosen] = attended
            feed_forward[chosen] = model.feed_forward(layer, (x + attention)[chosen])
            if prompt_due:
                attended, fed = self.run(layer, old, old_q)
                old = old + attended + fed
                self.last_row[layer] = (attended + fed)[-1:]
            elif layer == 0 and self.first_layer:
                last_q = model.qkv(0, last, old_at[-1:])[0]
                self.last_row[0] = sum(self.run(0, last, last_q))  # type: ignore[arg-type]
            last = last + self.last_row[layer]
            x = x + attention + feed_forward
        logits = model.logits(torch.cat([last, x]))
        return logits[1:] if model.predicts == "own" else logits[:-1]


@pytest.mark.covering
@pytest.mark.parametrize("predicts", ["own", "next"])
@pytest.mark.parametrize("intervals", INTERVALS)
@pytest.mark.parametrize(
    "ratio, baseline", [(0.0, "last"), (0.1, "last"), (0.3, "last"), (0.3, "recomputed"), (1.0, "last")]
)
def test_prompts_need_their_keys_and_values_alone(
    predicts: str, intervals: tuple[int, int], ratio: float, baseline: str
) -> None:
    model = MODELS[predicts]
    cache = FeatureCache(
        model, 5, prompt_interval=intervals[0], gen_interval=intervals[1], transfer_ratio=ratio, baseline=baseline
    )
    lean = LeanCache(model, intervals, ratio, baseline)
    approximate = False
    for step, canvas in enumerate(canvases(9)):
        logits = cache(canvas)[5:]
        torch.testing.assert_close(logits, lean(canvas), rtol=1e-11, atol=1e-11)
        exact = whole(model, canvas)[5 - (predicts == "next") : len(canvas) - (predicts == "next")]
        close = torch.allclose(logits, exact, rtol=1e-11, atol=1e-11)
        assert close or step % intervals[0] or step % intervals[1], "a refresh of everything is a plain forward"
        approximate |= not close
        new = list(range(5, len(canvas)))
        for layer, rows in enumerate(cache.computed):
            assert rows == sorted(set(rows))
            assert [r for r in rows if r < 5] == (list(range(5)) if layer == 0 or step % intervals[0] == 0 else [])
            if layer == 0 or step % intervals[1] == 0:
                assert [r for r in rows if r >= 5] == new
            else:
                assert len([r for r in rows if r >= 5]) == int(8 * ratio)
    assert approximate == (intervals != (1, 1))


def test_the_first_layer_of_a_prompt_is_dead_work_but_that_of_the_new_rows_is_not() -> None:
    model = MODELS["own"]
    current, older = (LeanCache(model, (4, 3), 0.25, first_layer=rule) for rule in (True, False))
    cache = FeatureCache(model, 5, prompt_interval=4, gen_interval=3, transfer_ratio=0.25)
    same = []
    for canvas in canvases(6):
        logits = cache(canvas)[5:]
        torch.testing.assert_close(
            logits, current(canvas), rtol=1e-11, atol=1e-11
        )  # never touches the prompt's first layer
        same.append(torch.allclose(logits, older(canvas), rtol=1e-9))
    assert same == [True, False, False, True, False, False]  # new rows are due in every third forward


def test_intervals_of_one_are_llada() -> None:
    variants = (
        {},
        {"block_size": 4, "steps": 4},
        {"temperature": 1.0, "seed": 3},
        {"remasking": "random"},
        {"guidance": 0.7},
    )
    for model in MODELS.values():
        for options in variants:
            plain = llada(model, PROMPT, 8, mask_token=12, **options)  # type: ignore[arg-type]
            cached = dllm_cache(model, PROMPT, 8, mask_token=12, prompt_interval=1, gen_interval=1, **options)  # type: ignore[arg-type]
            assert cached.tokens == plain.tokens and cached.forwards == plain.forwards
            for a, b in zip(cached.trace, plain.trace):
                assert a.committed == b.committed and a.confidence == pytest.approx(b.confidence)


@settings(max_examples=15)
@given(
    predicts=st.sampled_from(["own", "next"]),
    intervals=st.sampled_from(INTERVALS),
    ratio=st.sampled_from([0.0, 0.25, 0.6]),
    limit=st.integers(0, 8),
    block_size=st.one_of(st.none(), st.integers(1, 4)),
    ends=st.lists(st.integers(0, 11), max_size=2),
)
def test_a_run_is_lladas_loop_over_the_caches_logits(
    predicts: str, intervals: tuple[int, int], ratio: float, limit: int, block_size: int | None, ends: list[int]
) -> None:
    model = MODELS[predicts]
    options = {"prompt_interval": intervals[0], "gen_interval": intervals[1], "transfer_ratio": ratio}
    result = dllm_cache(model, PROMPT, limit, mask_token=12, block_size=block_size, end_tokens=ends, **options)  # type: ignore[arg-type]
    lean = LeanCache(model, intervals, ratio)
    assert result.forwards == len(result.trace)
    for step in result.trace:
        logits = lean(step.tokens)[:, :12]
        masks = [p for p in range(*step.window) if step.tokens[p] == 12]
        distribution = logits[[p - 5 for p in masks]].softmax(-1)
        assert step.confidence == pytest.approx(dict(zip(masks, distribution.amax(-1).tolist())))
        best = max(masks, key=lambda p: step.confidence[p])
        assert step.committed == {best: distribution[masks.index(best)].argmax().item()}
    if not ends:
        assert result.forwards == len(result.tokens) == limit


def test_guidance_compares_two_caches() -> None:
    intervals = (4, 3)
    result = dllm_cache(
        MODELS["own"], PROMPT, 8, mask_token=12, prompt_interval=4, gen_interval=3, transfer_ratio=0.25, guidance=0.7
    )
    given, free = LeanCache(MODELS["own"], intervals, 0.25), LeanCache(MODELS["own"], intervals, 0.25)
    for step in result.trace:
        c, u = given(step.tokens), free([12] * 5 + step.tokens[5:])
        distribution = (u + 1.7 * (c - u))[:, :12].softmax(-1)
        assert step.confidence == pytest.approx({p: distribution[p - 5].max().item() for p in step.confidence})


def test_a_shorter_forward_leaves_the_rows_after_it_as_they_were() -> None:
    model = MODELS["own"]
    for due in (1, 4):  # rows due in every forward, or in every fourth
        cache = FeatureCache(model, 5, prompt_interval=due, gen_interval=due, transfer_ratio=0.5)
        steps = canvases(4)
        cache(steps[0])
        features = [layer for kind in (cache.k, cache.v, cache.attention, cache.feed_forward) for layer in kind]
        kept = [layer[10:].clone() for layer in features]
        for canvas in steps[1:]:
            logits = cache(canvas[:10])
            assert logits.shape[0] == 10
            assert all(max(rows) < 10 for rows in cache.computed)
            if due == 1:
                torch.testing.assert_close(logits, whole(model, canvas[:10]), rtol=1e-11, atol=1e-11)
            else:
                assert [len(rows) for rows in cache.computed] == [10, 2, 2]  # half of five, rounded down
        assert all(torch.equal(before, layer[10:]) for before, layer in zip(kept, features))


def test_which_rows_are_least_similar() -> None:
    cached = torch.tensor([[[1.0, 0.0]]] * 6)
    v = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[3.0, 0.1]], [[0.0, 1.0]], [[float("nan"), 1.0]], [[0.0, 0.0]]])
    assert [least_similar(v, cached, count) for count in range(7)] == [
        [],
        [4],
        [1, 4],
        [1, 3, 4],
        [1, 3, 4, 5],
        [1, 2, 3, 4, 5],
        list(range(6)),
    ]


def test_the_baseline_of_the_last_forward_forgets_a_slow_drift() -> None:
    """Row 6 keeps changing a little less than row 7 does at once, between refreshes."""
    runs = {}
    for baseline in ("last", "recomputed"):
        cache = FeatureCache(
            MODELS["own"], 5, prompt_interval=100, gen_interval=100, transfer_ratio=0.25, baseline=baseline
        )
        runs[baseline] = []
        for canvas in canvases(8, seed=1):
            cache(canvas)
            runs[baseline].append([rows for rows in cache.computed])
    assert runs["last"][:2] == runs["recomputed"][:2]  # nothing was recomputed except by the forward before
    assert runs["last"] != runs["recomputed"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_interval": 0}, "prompt_interval must be at least 1, got 0"),
        ({"gen_interval": 0}, "gen_interval must be at least 1, got 0"),
        ({"transfer_ratio": 1.5}, r"transfer_ratio must be in 0 \.\. 1, got 1.5"),
        ({"baseline": "first"}, "baseline must be 'last' or 'recomputed', got 'first'"),
        ({"steps": 3, "block_size": 2}, r"dllm_cache: steps must be a multiple of the number of blocks \(2\), got 3"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dllm_cache(MODELS["own"], PROMPT, 4, mask_token=12, **options)  # type: ignore[arg-type]
