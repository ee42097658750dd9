"""Models of transformers with recurrent layers in our decoders: the tokens of their own `generate`, and the same bits in any forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdkernels as pd

transformers = pytest.importorskip("transformers", reason="the models are of transformers 5", minversion="5.20")
from pdkernels.integrations.transformers import wrap  # noqa: E402
from scripts import architectures  # noqa: E402
from tests.harness.sessions import running_batch  # noqa: E402
from tests.support.transformers_names import CACHE  # noqa: E402

FAMILIES = [
    "lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "minimax",
]  # fmt: skip
MASK, NEW = 127, 12
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("autoregressive", {}),
    "jacobi": ("jacobi", {"block_size": 5}),
    "window": ("jacobi", {"window": 4}),
    "lookup": ("jacobi", {"draft": "lookup"}),
    "suffix": ("suffix", {}),
    "multiblock": ("jacobi_multiblock", {"block_size": 4}),
    "linear": ("linear_self_speculation", {"block_size": 5, "mask_token": MASK}),
    "linear in passes": ("linear_self_speculation", {"block_size": 4, "threshold": 0.02, "mask_token": MASK}),
    "quadratic": ("quadratic_self_speculation", {"block_size": 4, "mask_token": MASK}),
}
# One of each kind of recurrent layer: short convolutions, the gated delta rule (with experts), state spaces, linear attention.
FAST = ("lfm2", "qwen3_5_moe_text", "falcon_h1", "minimax")
QUICK = ["autoregressive", "lookup", "suffix", "multiblock", "linear", "quadratic"]
# The other families of a kind are in the slow tests, and tried by `wrap` in tests/integrations/test_architectures.py.
ONE_OF_EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]


def prompts(seed: int) -> list[list[int]]:
    """Five of unequal lengths, one of them a single token and one that repeats itself."""
    drawn = torch.randint(3, MASK, (4, 40), generator=torch.Generator().manual_seed(seed)).tolist()
    return [drawn[0][:7], drawn[1][:1], drawn[2][:23], drawn[3][:3] * 4, drawn[0][7:12]]


def model_of(family: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    # MiniMax keeps its states in bfloat16 where the model is: large weights make its own logits differ from the exact ones.
    model = architectures.build(family, 0.2 if family == "minimax" else 0.4, seed)
    for module in model.modules():
        # Whole forwards of transformers have a minimum of the time step that its single steps do not have.
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model.to(dtype)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The tokens of transformers' own loop and cache."""
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, suppress_tokens=[MASK]
    )  # fmt: skip
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def ours(wrapped: Any, texts: list[list[int]], form: str, page_size: int | None) -> list[list[int]]:
    method, options = METHODS[form]
    result = pd.decoding.generate(
        wrapped, texts, method, max_new_tokens=NEW, end_tokens=(), page_size=page_size, **options
    )
    return [tokens.tolist() for tokens in result.tokens]


def compare(family: str, seed: int, forms: list[str]) -> None:
    model, texts = model_of(family, seed), prompts(seed)
    wrapped = wrap(model, mask_token=MASK)
    theirs = [greedy(model, prompt) for prompt in texts]
    assert len({token for text in theirs for token in text}) > 10
    for number, form in enumerate(forms):
        for batch, page_size in ((5, (None, 3)[number % 2]), (1, (3, None)[number % 2])):
            assert ours(wrapped, texts[:batch], form, page_size) == theirs[:batch], (form, batch, page_size)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_the_tokens_of_generate(family: str) -> None:
    compare(family, 1, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_generate_often(family: str, seed: int) -> None:
    compare(family, 100 + seed, list(METHODS))


def agree(family: str, seed: int, forms: list[str]) -> None:
    """Of all methods, alone and in a batch: a row has the same bits however it is computed."""
    model, texts = model_of(family, seed, torch.bfloat16), prompts(seed)
    try:
        wrapped = wrap(model, mask_token=MASK)
    except NotImplementedError as refused:
        if family == "minimax" and "whose logits differ by" in str(refused):
            pytest.skip("rounds its own states so much that wrap cannot tell whether its logits are ours")
        raise
    expected = ours(wrapped, texts, "autoregressive", None)
    for form in forms[1:]:
        assert ours(wrapped, texts, form, 3) == expected, form
        assert ours(wrapped, texts[2:3], form, None) == expected[2:3], form


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_the_same_tokens_in_low_precision(family: str) -> None:
    agree(family, 2, ["autoregressive", "lookup", "multiblock", "quadratic"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_in_low_precision_often(family: str, seed: int) -> None:
    agree(family, 200 + seed, list(METHODS))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_any_forward(family: str) -> None:
    wrapped = wrap(model_of(family, 3, torch.bfloat16))
    tokens = torch.tensor([prompts(3)[2], prompts(4)[2]])

    def logits(given: torch.Tensor, widths: list[int]) -> torch.Tensor:
        cache, found = wrapped.new_cache(len(given), 32), []
        for part in given.split(widths, 1):
            found.append(wrapped(part, cache=cache))
            cache.commit_(torch.full((len(given),), part.shape[1]))
        return torch.cat(found, 1)

    whole = logits(tokens, [23])
    assert torch.equal(logits(tokens, [1] * 23), whole)
    assert torch.equal(logits(tokens[1:], [7, 7, 7, 2]), whole[1:])


def test_drafts_may_be_long() -> None:
    """Longer than what a cache keeps of a draft at first, in the prompt's forward as well."""
    model = model_of("lfm2", 4)
    wrapped, prompt = wrap(model, mask_token=MASK), prompts(4)[2]
    result = pd.decoding.generate(wrapped, prompt, "jacobi", max_new_tokens=100, block_size=90, end_tokens=())
    assert result.tokens.tolist()[:NEW] == greedy(model, prompt)


@pytest.mark.parametrize("family", ["falcon_h1", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_requests_join_a_running_batch(family: str) -> None:
    from pdkernels.decoding import find
    from pdkernels.generation.session import Session

    model = model_of(family, 5)
    wrapped, texts = wrap(model, mask_token=MASK), prompts(5)
    theirs = [greedy(model, text) for text in texts]
    for form, page_size in (("lookup", None), ("linear", 3), ("quadratic", None)):
        method, options = METHODS[form]
        steps = find(method).steps
        assert steps is not None
        batch = running_batch(
            steps, Session(wrapped, [[0] * 23] * 2, NEW, (), None, False), page_size=page_size, **options
        )
        sessions = [Session(wrapped, [text], NEW, (), None, False) for text in texts]
        waiting = list(sessions)
        while waiting or batch.busy:
            if batch.free and waiting and batch.ready:
                batch.admit(batch.free[0], waiting.pop(0))
            for row in batch.step():
                batch.retire(row)
        assert [session.tokens[0] for session in sessions] == theirs


@pytest.mark.parametrize("form", ["autoregressive", "jacobi", "lookup", "linear"])
def test_a_repetition_penalty(form: str) -> None:
    model = model_of("bamba", 6)
    wrapped, texts = wrap(model, mask_token=MASK), prompts(6)[:3]
    method, options = METHODS[form]
    found = pd.decoding.generate(
        wrapped, texts, method, max_new_tokens=NEW, end_tokens=(), repetition_penalty=1.4, **options
    )
    for text, tokens in zip(texts, found.tokens):
        theirs = model.generate(
            torch.tensor([text]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
            suppress_tokens=[MASK], repetition_penalty=1.4,
        )  # fmt: skip
        assert tokens.tolist() == theirs[0, len(text) :].tolist()


def test_time_steps_have_a_minimum_in_every_forward() -> None:
    """Whole forwards of Nemotron-H clamp the time step, and transformers' own single steps do not: ours do. The tokens are those of
    whole forwards."""
    model = architectures.build("nemotron_h", 0.4, 0)
    assert next(module.time_step_limit[0] for module in model.modules() if hasattr(module, "time_step_limit")) > 0
    for prompt in prompts(7):
        text = list(prompt)
        with torch.no_grad():
            for _ in range(NEW):
                text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        found = pd.decoding.generate(wrap(model), prompt, "jacobi", max_new_tokens=NEW, end_tokens=())
        assert prompt + found.tokens.tolist() == text


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_their_generate_with_our_attention(family: str) -> None:
    """`attn_implementation="pdkernels"` in transformers' own loop, with padding on the left."""
    model, texts = model_of(family, 8), prompts(8)
    theirs = [greedy(model, text) for text in texts]
    pd.integrations.transformers.register()
    model.set_attn_implementation("pdkernels")
    width = max(map(len, texts))
    tokens = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    found = model.generate(
        tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, suppress_tokens=[MASK]
    )  # fmt: skip
    assert found[:, width:].tolist() == theirs


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_our_decoders_in_their_generate(family: str) -> None:
    from pdkernels.integrations.transformers import generate

    model, texts = model_of(family, 9), prompts(9)
    width = max(map(len, texts))
    tokens = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(tokens, attention_mask=mask, custom_generate=generate, **settings)
    for text, row in zip(texts, found[:, width:].tolist()):
        theirs = model.generate(torch.tensor([text]), **settings)
        assert row == theirs[0, len(text) :].tolist()


def test_what_recurrent_layers_cannot_do_is_refused() -> None:
    model = model_of("lfm2", 10)
    for options in ({"attention": "bidirectional"}, {"predicts": "own"}):
        with pytest.raises(NotImplementedError, match="be without recurrent layers"):
            wrap(model, mask_token=MASK, **options)  # type: ignore[arg-type]
    wrapped = wrap(model, mask_token=MASK)
    cache = wrapped.new_cache(1, 8)
    with pytest.raises(NotImplementedError, match="have rows that can be computed anew"):
        wrapped.recompute(torch.tensor([[1]]), cache, torch.tensor([0]), visible=torch.tensor([1]))
    with pytest.raises(ValueError, match="cache must be one of `new_cache`"):
        wrapped(torch.tensor([[1]]), cache=cache.kv)


def test_the_model_stays_as_it_is() -> None:
    """Its layers run their own scans, and new weights are followed."""
    model, prompt = model_of("qwen3_5_text", 11), prompts(11)[0]
    before = greedy(model, prompt)
    wrapped = wrap(model, mask_token=MASK)
    assert greedy(model, prompt) == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    result = pd.decoding.generate(wrapped, prompt, "jacobi", max_new_tokens=NEW, end_tokens=())
    assert result.tokens.tolist() == greedy(model, prompt)


@pytest.mark.covering
@pytest.mark.parametrize("family", ONE_OF_EACH[:-1])  # MiniMax takes no other cache than its own
@pytest.mark.parametrize("implementation", ["sdpa", "pdkernels"])
def test_a_cache_in_their_generate(family: str, implementation: str) -> None:
    """`PdCache` in transformers' own loop, with padding, and again after a reset; paged without."""
    from pdkernels.integrations.transformers import PdCache, register

    register()
    model, texts = model_of(family, 12), prompts(12)
    theirs = [greedy(model, text) for text in texts]
    model.set_attn_implementation(implementation)
    width = max(map(len, texts))
    tokens = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    settings = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "suppress_tokens": [MASK],
    }
    cache = PdCache(model.config, 5, width + NEW)
    for _ in range(2):
        found = model.generate(tokens, attention_mask=mask, **{CACHE: cache}, **settings)
        assert found[:, width:].tolist() == theirs
        with pytest.raises(NotImplementedError, match="recurrent layers cannot go back"):
            cache.crop(-1)
        cache.reset()
    if implementation == "pdkernels":
        paged = PdCache(model.config, 1, len(texts[2]) + NEW, kind="paged", page_size=4)
        found = model.generate(torch.tensor(texts[2:3]), **{CACHE: paged}, **settings)
        assert found[0, len(texts[2]) :].tolist() == theirs[2]


def test_a_cache_follows_beams() -> None:
    from pdkernels.integrations.transformers import PdCache

    for family in ("lfm2", "falcon_h1", "qwen3_next"):
        model, text = model_of(family, 13), torch.tensor(prompts(13)[:1])
        settings = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        cache = PdCache(model.config, 3, text.shape[1] + NEW)
        found = model.generate(text, **{CACHE: cache}, **settings)
        assert torch.equal(found, model.generate(text, **settings)), family


def test_a_quantised_model() -> None:
    """Its linear layers are exchanged for quantised ones, and decoding stays lossless."""
    for family in ("qwen3_5_text", "bamba"):
        packed, texts = pd.quantize(wrap(model_of(family, 14), mask_token=MASK), "q8_0"), prompts(14)
        expected = ours(packed, texts, "autoregressive", None)
        for form in ("lookup", "linear", "quadratic"):
            assert ours(packed, texts, form, 3) == expected, (family, form)


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_an_engine(family: str) -> None:
    """Prompts in pieces, and beginnings of earlier prompts, as far back as the states go."""
    model = model_of(family, 3)
    wrapped, base = wrap(model, mask_token=MASK), [*prompts(3)[2], *prompts(4)[2], *prompts(5)[2], *prompts(6)[2]]
    texts = [base, [*base, 4, 4], base[:20], [*base[:20], 5, 6, 7], [*base[:12], 9, 9], prompts(4)[0], base[:-1]]
    theirs = [greedy(model, text) for text in texts]
    with pd.Engine(wrapped, prompt_tokens_per_step=7, max_prompt_tokens=100, max_new_tokens=NEW) as engine:
        for method, options in (("autoregressive", {}), ("jacobi", {"draft": "lookup"})):
            for text, expected in zip(texts, theirs):
                found = engine.submit(text, method, max_new_tokens=NEW, end_tokens=(), **options).result()
                assert found.tokens.tolist() == expected, (method, text)
        assert engine.metrics().reused_tokens > 100


def test_hidden_states_of_all_layers() -> None:
    """A drafter may read the input of any layer, recurrent or not."""
    model, tokens = model_of("qwen3_5_text", 15), torch.tensor([prompts(15)[0]])
    wrapped = wrap(model)
    cache = wrapped.new_cache(1, 16)
    assert cache.layers < wrapped.config.layers == model.config.num_hidden_layers
    tapped = wrapped.tapped(tokens, taps=(1, 3), cache=cache)
    with torch.no_grad():
        states = model.model(tokens, output_hidden_states=True).hidden_states
    wanted = torch.stack([states[1], states[3]], -2)
    assert torch.allclose(tapped.features, wanted, atol=1e-4 * float(wanted.abs().max()))
