"""DFlash: the drafts and the steps of its plain form, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdkernels.decoding import generate
from pdkernels.engine import Engine
from pdkernels.generation.noise import OWN
from pdkernels.generation.sampler import Sampler
from pdkernels.models import Transformer
from pdkernels.models.architectures.windows import Window
from tests.decoding.test_eagle import LIMIT, PROMPTS, VOCABULARY, a_model
from tests.support.drafters import dflash_head, eagle_head

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "from the anchor": {"sample_from_anchor": True, "own_embedding": True},
    "windows": {"windows": (Window(4), None)},
    "windows, whole blocks": {"windows": (Window(2), Window(2)), "whole_blocks": True},
    "the target's head": {"own_head": False, "draft_vocab_size": VOCABULARY},
    "DSpark": {"kind": "dspark"},
    "DSpark, gated, from the anchor": {"kind": "dspark", "markov_kind": "gated", "sample_from_anchor": True},
    "DSpark, rnn": {"kind": "dspark", "markov_kind": "rnn"},
    "DSpark without a bias": {"kind": "dspark", "markov_rank": 0, "confidence": False},
    "DFlash 2": {"kind": "dflash2"},
    "XPress": {"kind": "xpress"},
    "XPress, windows, from the anchor": {"kind": "xpress", "windows": (Window(3), None), "sample_from_anchor": True},
    "DFlash 2, windows": {"kind": "dflash2", "windows": (Window(3), None), "own_head": False, "conv_taps": 3},
}
IN_ORDER = [name for name, changes in VARIANTS.items() if "kind" in changes]


def a_head(model: Any, seed: int = 0, **changes: Any) -> Any:
    return dflash_head(model, seed, (1, 2, 4), **changes)


@torch.inference_mode()
def plain(model: Any, head: Any, prompt: list[int], size: int, temperature: float, seed: int) -> tuple[list[int], Any]:
    """Tokens, and the draft and what was accepted of every step, by forwards over whole texts."""
    config, sampler, seeds = head.config, Sampler(temperature), torch.tensor([seed])

    def draw(row: torch.Tensor, position: int) -> int:
        return int(sampler.sample(row[None, None], torch.tensor([[position]]), seeds, OWN, ()))

    def targets(text: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([text]))[0]
        return logits

    text, steps = [*prompt], []
    text.append(draw(targets(text)[-1], len(text)))
    while len(text) < len(prompt) + LIMIT:
        width = min(size, len(prompt) + LIMIT - len(text))
        known = torch.tensor([text[:-1]])
        features = head.fused(model.tapped(known, config.taps).features)
        cache = head.new_cache(1, len(text) + config.block_size)
        head.read(features, cache=cache)
        cache.commit_(torch.tensor([len(text) - 1]))
        block = torch.tensor([[text[-1], *[config.mask_token] * (config.block_size - 1)]])
        embed = model.embed if head.embedding is None else head.embed
        shared = model.embedding if model.head is None else model.head
        hidden, draft = head(embed(block), cache=cache), [text[-1]]
        logits = head.logits(hidden, shared)[0, 0 if config.sample_from_anchor else 1 :]
        walk = head.walk(hidden, block[:, :1], shared, torch.tensor([text[-2:-1]])) if head.in_order else None
        for n in range(width - 1):
            row = logits[n] if walk is None else walk(n, torch.tensor([draft[-1:]]))[0, 0]
            whole = row.new_full((model.config.vocab_size,), -torch.inf)
            whole[head.vocabulary] = row
            draft.append(draw(whole, len(text) + n))
        rows = targets([*text[:-1], *draft])[len(text) - 1 :]
        drawn = [draw(row, len(text) + n) for n, row in enumerate(rows)]
        accepted = 1
        while accepted < width and draft[accepted] == drawn[accepted - 1]:
            accepted += 1
        steps.append((draft, accepted))
        text += drawn[:accepted]
    return text[len(prompt) :], steps


@pytest.mark.covering
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_steps_of_the_plain_form(variant: str, temperature: float) -> None:
    several = 0
    for seed, size in ((0, None), (1, 3)):
        model = a_model(seed)
        head = a_head(model, seed, **VARIANTS[variant])
        whole = head.config.block_size + head.config.sample_from_anchor
        options = {"block_size": size, "temperature": temperature, "end_tokens": (), "drafter": head, "trace": True}
        options |= {"max_new_tokens": LIMIT}
        together = generate(model, PROMPTS, "dflash", **options, seed=[seed] * len(PROMPTS))
        for number, prompt in enumerate(PROMPTS):
            tokens, steps = plain(model, head, prompt, size or whole, temperature, seed)
            found = generate(model, prompt, "dflash", seed=seed, **options)
            assert found.tokens.tolist() == together.tokens[number].tolist() == tokens
            assert found.stats.accepted[0] == together.stats.accepted[number]
            assert [(list(step.draft), step.accepted) for step in found.stats.trace[0]] == steps
            several += sum(accepted > 1 for _, accepted in steps)
    assert several


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2", "xpress"])
def test_lossless_in_every_dtype(kind: str, dtype: torch.dtype, page_size: int | None) -> None:
    for seed in range(2):
        model = a_model(seed).to(dtype)
        head = a_head(model, seed, kind=kind, windows=(None, Window(3)) if seed else ())
        for drawn in ({}, {"temperature": 0.9, "seed": seed, "top_k": 6, "top_p": 0.9}):
            expected = generate(model, PROMPTS, max_new_tokens=20, end_tokens=(), **drawn).tokens
            for size in (2, None):
                options = {"block_size": size, "drafter": head, "page_size": page_size, **drawn}
                found = generate(model, PROMPTS, "dflash", max_new_tokens=20, end_tokens=(), **options).tokens
                assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", IN_ORDER)
def test_in_an_engine(variant: str, dtype: torch.dtype) -> None:
    """Requests that join and leave one batch, beside others, on shared pages: the tokens of greedy decoding and of draws,
    and drafts that are those of the head alone."""
    model: Any = a_model(1).to(dtype)
    head = a_head(model, 1, **VARIANTS[variant])
    model.drafters = {head.method: head}
    prompts = [PROMPTS[0] * 30, *PROMPTS, PROMPTS[1] * 25]
    drawn: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3, "top_k": 6}]
    with Engine(model, max_running=3, max_prompt_tokens=160, max_new_tokens=40) as engine:
        handles = [
            engine.submit(prompt, method, max_new_tokens=limit, end_tokens=(), **more)
            for method, limit in (("dflash", 40), ("autoregressive", 20), ("dflash", 12))
            for prompt in prompts
            for more in drawn
        ]
        found = [handle.result(120) for handle in handles]
    alone = (
        (generate(model, prompt, max_new_tokens=limit, end_tokens=(), **more), prompt, limit, more, method)
        for method, limit in (("dflash", 40), ("autoregressive", 20), ("dflash", 12))
        for prompt in prompts
        for more in drawn
    )
    several = 0
    for result, (expected, prompt, limit, more, method) in zip(found, alone, strict=True):
        assert torch.equal(result.tokens, expected.tokens)
        if method == "dflash":
            own = generate(model, prompt, "dflash", max_new_tokens=limit, end_tokens=(), **more)
            assert result.stats.accepted == own.stats.accepted
            several += sum(count > 1 for count in own.stats.accepted[0])
    assert several


def test_the_context_holds_accepted_rows_alone() -> None:
    """The head's cache after many steps is that of one reading of the text, and a block leaves nothing in it."""
    from pdkernels.decoding.causal.dflash import DFlashSteps
    from pdkernels.decoding.steps.contract import next_entry
    from pdkernels.generation.session import Session, inference

    model = a_model()
    head = a_head(model)
    text = generate(model, PROMPTS[0], max_new_tokens=40, end_tokens=()).tokens.tolist()
    with inference():
        session = Session(model, [PROMPTS[0]], 40, (), None, False)
        steps = DFlashSteps(session, drafter=head)
        steps.start(session)
        for _ in range(6):
            next_entry(steps, steps.entry.rows())
        steps._read()
        length = int(steps.drafted.lengths)
        assert length == int(steps.cache.lengths) > len(PROMPTS[0]) + 5
        known = torch.tensor([[*PROMPTS[0], *text][:length]])
        whole = head.new_cache(1, length)
        head.read(head.fused(model.tapped(known, head.config.taps).features), cache=whole)
        for ours, theirs in zip(steps.drafted.row(0, length), whole.row(0, length), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("drafter", "kind", "words"),
    [
        ("none", TypeError, "got 'dflash', which requires drafter"),
        ("another head", TypeError, "pdkernels.decoding.dflash: drafter must be a DFlashHead, got EagleHead"),
        ("layers", ValueError, r"drafter must read layers in 0 .. 4, the model's, got 6"),
    ],
)
def test_what_is_refused(drafter: str, kind: type[Exception], words: str) -> None:
    model = a_model()
    given: dict[str, Any] = {"none": None, "another head": eagle_head(model), "layers": dflash_head(a_model(layers=6))}
    with pytest.raises(kind, match=words):
        generate(model, [1], "dflash", max_new_tokens=4, drafter=given[drafter])


def test_blocks_are_at_most_those_of_the_drafter() -> None:
    model: Transformer = a_model()
    with pytest.raises(ValueError, match="block_size must be at most 5, the tokens of the drafter's blocks, got 6"):
        generate(model, [1], "dflash", max_new_tokens=9, drafter=a_head(model), block_size=6)
    with pytest.raises(ValueError, match="block_size must be at most 6"):
        head = a_head(model, sample_from_anchor=True)
        generate(model, [1], "dflash", max_new_tokens=9, drafter=head, block_size=7)
