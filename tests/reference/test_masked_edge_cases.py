"""Edge cases of the masked-diffusion samplers: where the published ones fail or are undefined, and what happens here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pdkernels.reference import masked_sampling as shared
from pdkernels.reference.dllm_cache import FeatureCache, dllm_cache
from pdkernels.reference.dream import dream
from pdkernels.reference.fast_dllm import fast_dllm
from pdkernels.reference.fast_dllm_v2 import fast_dllm_v2
from pdkernels.reference.llada import llada
from pdkernels.reference.masked_model import MaskedTransformerReference, random_weights
from pdkernels.reference.masked_sampling import Canvas, Guesses, MaskedResult
from pdkernels.reference.slowfast import slowfast
from tests.support.masked import MASK, ScriptedMasked, fixed, moody, word

OWN = MaskedTransformerReference(random_weights("llada", seed=1), heads=4, names="llada")
NEXT = MaskedTransformerReference(random_weights("qwen2", seed=1), heads=4, names="qwen2")

# All samplers with the model's parts, by name, in small blocks if they have any.
SAMPLERS: dict[str, Callable[..., MaskedResult]] = {
    "llada": llada,
    "llada, blocks": lambda *args, **options: llada(*args, block_size=3, **options),
    "llada, random": lambda *args, **options: llada(*args, remasking="random", **options),
    "dream": dream,
    "dream, origin": lambda *args, **options: dream(*args, algorithm="origin", **options),
    "slowfast": slowfast,
    "slowfast, cached": lambda *args, **options: slowfast(*args, prompt_interval=3, gen_interval=2, **options),
    "dllm_cache": dllm_cache,
    "fast_dllm": lambda *args, **options: fast_dllm(*args, block_size=3, threshold=0.4, **options),
    "fast_dllm, prefix": lambda *args, **options: fast_dllm(*args, block_size=3, cache="prefix", **options),
    "fast_dllm, factor": lambda *args, **options: fast_dllm(*args, threshold=None, factor=1.0, cache="none", **options),
}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
V2 = {"block_size": 4, "small_block_size": 2}


def flat(token: int, level: float = 3.0) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Equal rows everywhere: every confidence is a tie, to the last bit."""

    def model(tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        row = torch.zeros(MASK + 1, dtype=torch.float64)
        row[token] = level
        return row.expand(1, tokens.shape[1], -1)

    return model


def order(result: MaskedResult) -> list[list[int]]:
    return [list(step.committed) for step in result.trace]


@every_sampler
@pytest.mark.parametrize("model", [OWN, NEXT], ids=["own", "next"])
def test_no_new_tokens_and_one_new_token(sampler: Callable[..., MaskedResult], model: Any) -> None:
    assert sampler(model, [3, 1], 0, mask_token=12) == ([], 0, [])
    one = sampler(model, [3], 1, mask_token=12)
    assert len(one.tokens) == one.forwards == 1 and list(one.trace[-1].committed) == [1]


@every_sampler
def test_what_ends_a_sequence(sampler: Callable[..., MaskedResult]) -> None:
    """An end token counts once no mask is before it. One in the prompt does not, and one that is never predicted ends nothing."""
    options = {"mask_token": 12}
    whole = sampler(OWN, [3, 5, 1], 8, **options)
    assert len(whole.tokens) == 8
    for end in set(whole.tokens):
        cut = sampler(OWN, [3, 5, 1], 8, end_tokens=(end,), **options)
        assert cut.tokens == whole.tokens[: whole.tokens.index(end) + 1] and cut.trace == whole.trace[: cut.forwards]
        before_last, last = cut.trace[-1].tokens[3:], whole.tokens.index(end)
        assert 12 in before_last[: last + 1], "it could have stopped a forward earlier"
    absent = next(token for token in range(12) if token not in whole.tokens)
    assert sampler(OWN, [3, 5, 1], 8, end_tokens=(absent,), **options) == whole
    assert sampler(OWN, [absent, 5, 1], 8, end_tokens=(absent,), **options).forwards > 0


def test_an_end_token_after_a_mask_does_not_stop() -> None:
    model = ScriptedMasked(fixed([0.3, 0.9, 0.5, 0.8]))
    result = llada(model, [3], 4, mask_token=MASK, end_tokens=(word(2),))
    assert order(result) == [[2], [4], [3], [1]] and result.tokens == [word(1), word(2)]
    result = llada(model, [3], 4, mask_token=MASK, end_tokens=(word(1),))
    assert result.tokens == [word(1)] and result.forwards == 4
    result = llada(model, [3], 4, mask_token=MASK, block_size=2, end_tokens=(word(1),))
    assert result.tokens == [word(1)] and result.forwards == 2  # with the second block all open


@every_sampler
def test_the_mask_token_is_never_a_guess(sampler: Callable[..., MaskedResult]) -> None:
    name, plain = "model.transformer.ff_out.weight", sampler(OWN, [3, 1], 7, mask_token=12)
    won = []
    for sign in (50, -50):  # with one of the two the mask token wins at every position
        head = OWN.weights[name].clone()
        head[12] = sign * head.abs().sum(0)
        model = MaskedTransformerReference({**OWN.weights, name: head}, heads=4, names="llada")
        assert sampler(model, [3, 1], 7, mask_token=12) == plain
        won.append((shared.bidirectional(model)(plain.trace[0].tokens).argmax(-1) == 12).tolist())
    assert all(first or second for first, second in zip(*won))


def test_the_mask_tokens_probability_enters_no_confidence() -> None:
    for logit in (-50.0, 50.0):
        model = ScriptedMasked(fixed([0.4, 0.7]), mask_logit=logit)
        for result in (
            llada(model, [3], 2, mask_token=MASK),
            dream(model, [3], 2, mask_token=MASK, algorithm="maskgit_plus"),
        ):
            assert result.trace[0].confidence == pytest.approx({1: 0.4, 2: 0.7})


def test_ties_go_to_the_lowest_position_and_the_lowest_id() -> None:
    def twins(tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        row = torch.zeros(MASK + 1, dtype=torch.float64)
        row[[4, 7]] = 3.0
        return row.expand(1, tokens.shape[1], -1)

    for model, token in ((flat(6), 6), (twins, 4)):
        assert order(llada(model, [3], 4, mask_token=MASK, steps=2)) == [[1, 2], [3, 4]]
        assert order(slowfast(model, [3], 3, mask_token=MASK, tau_high=1.1)) == [[1], [2], [3]]
        assert order(fast_dllm(model, [3], 3, mask_token=MASK, cache="none", threshold=1.1)) == [[1], [2], [3]]
        assert order(dream(model, [3], 3, mask_token=MASK)) == [[], [1], [2, 3]]
        assert llada(model, [3], 4, mask_token=MASK).tokens == [token] * 4


def test_certain_guesses_tie_at_one() -> None:
    """In half precision everything above 0.998 is 1; in fp64 it takes a distribution with all its mass on one token."""
    certain = flat(6, level=math.inf)

    def model(tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        return (
            certain(tokens, positions, mask).masked_fill(torch.arange(MASK + 1) != 6, -torch.inf).nan_to_num(posinf=4.0)
        )

    result = fast_dllm(model, [3], 4, mask_token=MASK, cache="none", threshold=1.0)
    assert result.trace[0].confidence == dict.fromkeys(range(1, 5), 1.0) and order(result) == [[1, 2, 3, 4]]
    assert dream(model, [3], 2, mask_token=MASK, steps=1).trace[0].confidence == {
        1: 0.0,
        2: 0.0,
    }  # entropy: no NaN from 0 ln 0
    assert order(slowfast(model, [3], 4, mask_token=MASK, tau_high=1.0)) == [[1], [2], [3], [4]]  # nothing exceeds 1


def test_more_steps_than_masks() -> None:
    model = ScriptedMasked(moody)
    assert shared.quotas(3, 8) == [1, 1, 1, 0, 0, 0, 0, 0]
    assert llada(model, [3], 3, mask_token=MASK, steps=8) == llada(model, [3], 3, mask_token=MASK, steps=3)
    two = llada(model, [3], 5, mask_token=MASK, block_size=3, steps=10)  # five steps for three masks, then for two
    assert two.forwards == 5 and two == llada(model, [3], 5, mask_token=MASK, block_size=3)
    assert [len(places) for places in order(dream(model, [3], 2, mask_token=MASK, steps=5))] == [0, 0, 0, 0, 2]


def test_a_length_that_blocks_do_not_divide() -> None:
    model = ScriptedMasked(moody)
    windows = [(1, 5), (5, 9), (9, 11)]
    assert shared.blocks(Canvas([3], 10, MASK), 4) == windows and shared.blocks(Canvas([3], 0, MASK), 4) == []
    result = llada(model, [3], 10, mask_token=MASK, block_size=4, steps=6)
    assert [len(places) for places in order(result)] == [2, 2, 2, 2, 1, 1]
    assert sorted({step.window for step in result.trace}) == windows
    assert llada(model, [3], 3, mask_token=MASK, block_size=100) == llada(model, [3], 3, mask_token=MASK)
    with pytest.raises(ValueError, match=r"multiple of the number of blocks \(3\), got 10"):
        llada(model, [3], 10, mask_token=MASK, block_size=4, steps=10)


def test_masks_inside_the_prompt_stay() -> None:
    model = ScriptedMasked(fixed([0.9, 0.9, 0.5, 0.4]))
    for sampler in (llada, dream, slowfast):
        result = sampler(model, [3, MASK, 5], 2, mask_token=MASK)
        assert len(result.tokens) == 2 and all(step.tokens[:3] == [3, MASK, 5] for step in result.trace)
        assert all(set(step.confidence) <= {3, 4} for step in result.trace)
    for cache in ("none", "prefix", "dual"):
        result = fast_dllm(OWN, [3, 12, 5], 4, mask_token=12, cache=cache, block_size=2)
        assert len(result.tokens) == 4 and all(step.tokens[:3] == [3, 12, 5] for step in result.trace)
    result = fast_dllm_v2(NEXT, [3, 1, 4, 1, 12, 5], 4, mask_token=12, **V2)
    assert len(result.tokens) == 4 and all(step.tokens[4] == 12 for step in result.trace)


def test_no_exploration_and_exploration_that_commits_nothing() -> None:
    model = ScriptedMasked(moody)
    result = slowfast(model, [3], 6, mask_token=MASK, k_slow=0, max_exploration=3)
    assert len(result.tokens) == 6 and result.trace[0].committed == {}
    assert slowfast(model, [3], 6, mask_token=MASK, max_exploration=0).trace[0].window == (1, 7)
    # A single candidate is a window of one, whose variance is 0: the span is decided by one forward.
    once = slowfast(ScriptedMasked(fixed([0.5, 0.4, 0.3, 0.095])), [3], 4, mask_token=MASK, window=1)
    assert [step.window for step in once.trace][:2] == [(1, 5), (1, 4)]


def test_a_cycle_whose_span_slow_forwards_have_filled() -> None:
    """Nothing is confident: the span is one position, and the slow phase filled it first."""
    model = ScriptedMasked(fixed([0.099, 0.098, 0.097, 0.096]))
    result = slowfast(model, [3], 4, mask_token=MASK)
    assert [step.window for step in result.trace] == [(1, 5), (1, 5), (2, 5), (2, 5)]
    assert result.forwards == 4


def test_factor_failures() -> None:
    """The code's loop exits at the last rank as it does if nothing failed."""
    by = lambda *confidence, factor: shared.surest(dict(enumerate(confidence)), factor=factor)  # noqa: E731
    assert by(0.99, 0.01, factor=1.0) == [0, 1] and by(0.01, factor=0.1) == [0]
    assert by(0.99, 0.01, 0.01, factor=1.0) == [0] and by(0.99, 0.99, 0.01, factor=1.0) == [0, 1, 2]
    assert by(0.01, 0.99, factor=0.1) == [1, 0] and shared.surest({}, factor=1.0) == []
    assert by(0.9, math.nan, 0.8, 0.7, factor=0.1) == [0] and by(0.99, 0.99, math.nan, math.nan, factor=1.0) == [0, 1]


def test_a_ratio_that_rounds_to_no_row() -> None:
    """int(3 * 0.25) is 0: no row is computed after the first layer, but their V is replaced; with a ratio of 0 it is not."""
    caches = {
        ratio: FeatureCache(OWN, 2, prompt_interval=9, gen_interval=9, transfer_ratio=ratio) for ratio in (0.0, 0.25)
    }
    for cache in caches.values():
        cache([3, 1, 12, 12, 12])
        before = [v.clone() for v in cache.v]
        logits = cache([3, 1, 12, 7, 12])
        assert cache.computed[1] == [] and logits.isfinite().all()
        assert torch.equal(before[1], cache.v[1]) == (cache is caches[0.0])
    assert len(dllm_cache(OWN, [3, 1], 3, mask_token=12).tokens) == 3


def test_a_prompt_shorter_than_a_block_and_one_of_whole_blocks() -> None:
    short = fast_dllm_v2(NEXT, [3], 5, mask_token=12, **V2)
    assert short.trace[0].window == (0, 2) and short.trace[0].committed.keys() == {1}  # no forward for the prompt
    whole = fast_dllm_v2(NEXT, [3, 1, 4, 1], 5, mask_token=12, **V2)
    assert whole.trace[0].window == (4, 5) and list(whole.trace[0].committed) == [4]
    tail = fast_dllm_v2(NEXT, [3, 1, 4, 1, 5], 5, mask_token=12, **V2)
    assert (
        tail.trace[0].window == (5, 5) and tail.trace[0].committed == {}
    )  # the prompt's first block; nothing follows from it


def test_a_block_that_is_complete_on_entry() -> None:
    """Nothing is left to do after the entry, or after the token that a full block gave."""
    result = fast_dllm(OWN, [3, 1], 6, mask_token=12, block_size=3, threshold=0.0)
    assert result.forwards == 2
    result = fast_dllm(NEXT, [3, 1], 3, mask_token=12, block_size=1)
    assert result.forwards == 3 and order(result) == [[2], [3], [4]]
    result = fast_dllm_v2(NEXT, [3, 1], 3, mask_token=12, block_size=1, small_block_size=1)
    assert [step.window for step in result.trace] == [(2, 3), (3, 4), (4, 5)]


def test_the_first_row_of_a_window_does_not_predict_its_position() -> None:
    """Dream's first row of a block: its position is committed on entry, by the row before it, however low its confidence."""
    result = fast_dllm(NEXT, [3, 1, 4], 8, mask_token=12, block_size=4, threshold=0.01)
    assert [(step.window, list(step.committed)) for step in result.trace] == [
        ((3, 4), [3]),
        ((3, 7), [4, 5, 6]),
        ((7, 8), [7]),
        ((7, 11), [8, 9, 10]),
    ]
    full = torch.ones(11, 11, dtype=torch.bool)
    logits = NEXT(torch.tensor([result.trace[2].tokens]), torch.arange(11)[None], full)[0]
    assert result.trace[2].committed == {7: logits[6, :12].argmax().item()}
    # Without a cache there is no window: the same threshold takes all at once.
    assert fast_dllm(NEXT, [3, 1, 4], 8, mask_token=12, block_size=4, threshold=0.01, cache="none").forwards == 2
    # In v2 the small block's rows alone never predict its first position.
    for step in fast_dllm_v2(NEXT, [3, 1, 4], 12, mask_token=12, threshold=1.0, block_size=8, small_block_size=4).trace:
        assert not any(math.isnan(confidence) for confidence in step.confidence.values())


def test_not_a_number() -> None:
    assert shared.surest({1: math.nan, 2: 0.1, 3: math.nan}, quota=3) == [2, 1, 3]
    assert shared.surest({1: math.nan, 2: 0.1}, threshold=0.0) == [2]
    assert shared.surest({1: math.nan}, threshold=0.0) == [1]
    canvas = Canvas([3], 2, MASK)
    logits = torch.zeros(3, MASK + 1, dtype=torch.float64)
    logits[1, 5] = math.nan
    guesses = shared.guess(canvas, logits, (1, 3))
    assert guesses.tokens == {1: 5, 2: 0} and math.isnan(guesses.confidence[1])


def test_the_canvas() -> None:
    canvas = Canvas([5, 7], 3, MASK, (7,))
    assert not canvas.done and canvas.result() == ([], 0, [])
    assert canvas.masks((0, 99)) == [2, 3, 4] and canvas.masks((3, 3)) == []
    canvas.commit(Guesses({3: 7, 4: 1}, {3: 0.1, 4: 0.2}), [3, 4], (2, 5))
    assert not canvas.done and canvas.result().tokens == []
    canvas.commit(Guesses({2: 6}, {2: 0.1}), [2], (2, 5))
    assert canvas.done and canvas.result().tokens == [6, 7]
    assert shared.guess(canvas, torch.zeros(5, MASK + 1), (2, 5)) == ({}, {})
