"""The loss of DFlash heads: its terms against blocks on a cache, and against the speculators library; and that heads learn to draft."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pdkernels.decoding import generate
from pdkernels.models import save_drafter
from pdkernels.models.architectures.config import ExpertsConfig
from pdkernels.models.architectures.windows import Window
from pdkernels.models.drafters.parts import window_config
from pdkernels.training import dflash_loss, draw_anchors, new_dflash_head
from tests.models.test_eagle_folders import without_data
from tests.support.drafters import dflash_head
from tests.training.test_eagle import a_model

TAPS = (1, 2, 4)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "from the anchor": {"sample_from_anchor": True, "own_embedding": True},
    "windows": {"windows": (Window(3), None)},
    "windows, whole blocks": {"windows": (Window(1), Window(3)), "whole_blocks": True},
    "the target's head": {"own_head": False, "draft_vocab_size": 12},
}


def read(model: Any, head: Any, texts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, features and targets of texts, each read by itself."""
    features, targets = [], []
    for text in texts:
        hidden, found = model.tapped(text[None], head.config.taps)
        features.append(found)
        targets.append(model.logits(hidden)[..., head.vocabulary])
    return torch.cat(texts)[None], torch.cat(features, 1), torch.cat(targets, 1)


def sources(model: Any, head: Any) -> dict[str, Any]:
    own = {"embedding": None if head.embedding is not None else model.embedding}
    return own | {"shared": None if head.head is not None else model.embedding}


@torch.no_grad()
def block_logits(model: Any, head: Any, text: Tensor, features: Tensor, anchor: int) -> Tensor:
    """The logits of a block at an anchor, on a cache that holds the features before it, as a decoder has them."""
    config = head.config
    cache = head.new_cache(1, anchor + config.block_size)
    head.read(head.fused(features[:, :anchor]), cache=cache)
    cache.commit_(torch.tensor([anchor]))
    block = torch.tensor([[int(text[anchor]), *[config.mask_token] * (config.block_size - 1)]])
    embed = model.embed if head.embedding is None else head.embed
    logits: Tensor = head.logits(head(embed(block), cache=cache), model.embedding)[0]
    return logits


@pytest.mark.parametrize("labels", ["distribution", "text"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_term_is_that_of_a_block_on_a_cache(variant: str, labels: Any) -> None:
    """Two packed texts, anchors in both, one of them so late that its block goes past the end of its text."""
    model = a_model()
    head = dflash_head(model, 1, TAPS, **VARIANTS[variant])
    config, gamma = head.config, 3.0
    first = 0 if config.sample_from_anchor else 1
    texts = [torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3]), torch.tensor([2, 7, 1, 8, 2, 8, 1])]
    begins, answers, anchors = [0, 10], [4, 2], [(0, 4), (0, 8), (1, 3), (1, 5)]
    tokens, features, targets = read(model, head, texts)
    scored = torch.cat([torch.arange(len(text)) >= answer for text, answer in zip(texts, answers)])[None]
    starts = torch.tensor([begins[text] + at for text, at in anchors])
    options = {"labels": labels, "gamma": gamma, "documents": [10, 7], **sources(model, head)}
    found = dflash_loss(head, tokens, features, targets, scored, starts, **options)

    places, total, weights = config.block_size - first, 0.0, 0.0
    right, counted = torch.zeros(places), torch.zeros(places)
    for number, at in anchors:
        text, begin = texts[number], begins[number]
        own = features[:, begin : begin + len(text)]
        logits, agrees = block_logits(model, head, text, own, at), True
        for guess in range(places):
            row = at + guess
            if row + (labels == "text") >= len(text) or row < answers[number]:
                break
            wanted, given = targets[0, begin + row].log_softmax(-1), logits[first + guess].log_softmax(-1)
            term = float((wanted.exp() * (wanted - given)).sum())
            counts = True
            if labels == "text":
                known = (head.vocabulary == text[row + 1]).nonzero()
                counts = len(known) > 0
                term = -float(given[known[0, 0]]) if counts else 0.0
            agrees &= counts and bool(given.argmax() == wanted.argmax())
            total, weights = (
                total + term * math.exp(-guess / gamma) * counts,
                weights + math.exp(-guess / gamma) * counts,
            )
            right[guess] += agrees
            counted[guess] += counts
    assert counted.min() > 0 and counted[-1] < len(anchors), "some blocks go past the end of their text"
    assert found.total.item() == pytest.approx(total / weights, rel=1e-4)
    torch.testing.assert_close(found.agreed, right / counted)


@pytest.mark.parametrize("windows", [(), (Window(4), None)], ids=str)
def test_the_loss_of_speculators(windows: tuple[Window | None, ...], tmp_path: Path) -> None:
    """The same head in their code, with the anchors that it draws: the same loss, up to the divisor, and the same gradients."""
    transformers = pytest.importorskip("transformers", reason="speculators needs it")
    with without_data():
        library = pytest.importorskip(
            "speculators.models.dflash", reason="compares with speculators where it is installed"
        )
        from speculators.losses import resolve_loss_config
    model = a_model(vocab_size=40)
    head = dflash_head(model, 1, TAPS, own_head=False, draft_vocab_size=40, windows=windows).requires_grad_(True)
    config, body = head.config, head.config.body
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": body.layers, "num_attention_heads": body.heads}
    sizes |= {"num_key_value_heads": body.kv_heads, "head_dim": body.head_dim, "intermediate_size": 24}
    layer = transformers.Qwen3Config(
        **sizes, rms_norm_eps=body.norm_eps, tie_word_embeddings=False, **window_config(body)
    )
    layer._attn_implementation = "eager"
    made = library.DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=40,
        block_size=config.block_size,
        aux_hidden_state_layer_ids=list(config.taps),
        mask_token_id=config.mask_token,
    )
    theirs = library.DFlashDraftModel(made)
    save_drafter(head, tmp_path / "head")
    state = load_file(tmp_path / "head" / "model.safetensors")
    shared = {"embed_tokens.weight": model.embedding, "lm_head.weight": model.embedding}
    shared |= {"verifier_lm_head.weight": model.embedding, "verifier_norm.weight": model.norm}
    theirs.load_state_dict({**state, **shared}, strict=False)

    ids = torch.randint(40, (1, 30), generator=torch.Generator().manual_seed(3))
    hidden, features = model.tapped(ids, config.taps)
    targets = model.logits(hidden)
    answer = torch.arange(30)[None] >= 8  # tokens, where ours are rows
    torch.manual_seed(0)
    given = (features.flatten(-2), ids, answer, hidden, torch.zeros_like(ids))
    losses = resolve_loss_config("kl_div", "eager")
    _, expected, metrics = theirs(*given, max_anchors=6, gamma=4.0, loss_config=losses)
    torch.manual_seed(0)
    *_, places = theirs._backbone_forward(*given, max_anchors=6)
    anchors = places[:: config.block_size]
    found = dflash_loss(
        head, ids, features, targets, answer.roll(-1, 1), anchors, embedding=model.embedding, shared=model.embedding
    )
    weights = torch.exp(-torch.arange(config.block_size - 1) / 4.0)
    torch.testing.assert_close(found.total * weights.mean(), expected, rtol=1e-4, atol=1e-5)
    assert 1 + found.agreed.sum().item() == pytest.approx((metrics["eal_sum"] / metrics["eal_total"]).item())

    expected.backward()
    (found.total * weights.mean()).backward()
    torch.testing.assert_close(head.fc.grad, theirs.fc.weight.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        head.layers[0].qkv.grad[:32], theirs.layers[0].self_attn.q_proj.weight.grad, rtol=1e-3, atol=1e-5
    )


def test_a_head_learns_to_draft() -> None:
    """A few passes over the model's own texts: the loss falls, and the decoder accepts more."""
    model = a_model()
    head = new_dflash_head(model, 4, mask_token=0, layers=2, taps=TAPS)
    prompts = torch.randint(12, (12, 4), generator=torch.Generator().manual_seed(0)).tolist()
    answers = generate(model, prompts, max_new_tokens=24, end_tokens=()).tokens
    texts = [torch.cat([torch.tensor(prompt), answer]) for prompt, answer in zip(prompts, answers)]
    scored = (torch.arange(28) >= 3).repeat(6)[None]
    known = [read(model, head, texts[first : first + 6]) for first in (0, 6)]

    def forwards() -> int:
        drafted = {"drafter": head.eval(), "max_new_tokens": 24, "end_tokens": ()}
        accepted = generate(model, prompts, "dflash", **drafted).stats.accepted
        return sum(1 + len(steps) for steps in accepted)  # the prompt's, then one for each step

    before, optimizer = forwards(), torch.optim.AdamW(head.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(60):
        anchors = draw_anchors(scored, 48, generator)
        loss = dflash_loss(
            head,
            *known[step % 2],
            scored,
            anchors,
            documents=[28] * 6,
            embedding=model.embedding,
            shared=model.embedding,
        )
        loss.total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.total.item())
    least = 7 * len(prompts)  # the prompt, then 23 tokens, at most 4 at a time
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    assert forwards() - least < 0.5 * (before - least)


def test_a_new_head_starts_from_its_target() -> None:
    for changes in ({}, {"qkv_bias": True, "qk_norm": True}, {"experts": ExpertsConfig(3, 2, intermediate_size=8)}):
        model = a_model(**changes)
        model.norm.data += 0.5
        head: Any = new_dflash_head(model, 4, 11, layers=2, vocabulary=torch.tensor([1, 5, 7]))
        assert head.config.taps == (1, 2, 1) and head.config.body.qk_norm and head.config.body.experts is None
        assert torch.equal(head.head, model.embedding[torch.tensor([1, 5, 7])]) and torch.equal(head.norm, model.norm)
        assert all(torch.equal(own.qkv, theirs.qkv) for own, theirs in zip(head.layers, model.layers[2:]))
        assert torch.isfinite(head.fc).all()
    assert new_dflash_head(a_model(), 4, 11).head is None
    packed = a_model(hidden_size=64).quantized("int8", group=32)
    with pytest.raises(ValueError, match="new_dflash_head: model must hold numbers, got packed matrices"):
        new_dflash_head(packed, 4, 0)
    with pytest.raises(ValueError, match=r"layers must be in 1 .. 4, the target's, got 5"):
        new_dflash_head(a_model(), 4, 0, layers=5)


def test_anchors_are_drawn_from_answers() -> None:
    """All of them in the end, ascending, each once; never an answer's last token, of which nothing is left to guess."""
    scored = torch.tensor([[False] * 3 + [True] * 5 + [False] * 2 + [True] * 4])
    drawn = [draw_anchors(scored, 4, torch.Generator().manual_seed(seed)) for seed in range(40)]
    assert all(len(one) == 4 and (one.diff() > 0).all() for one in drawn)
    assert set(torch.cat(drawn).tolist()) == {4, 5, 6, 7, 11, 12, 13}
    assert torch.equal(draw_anchors(scored, 99), torch.tensor([4, 5, 6, 7, 11, 12, 13]))
    assert len(draw_anchors(scored, 0)) == len(draw_anchors(scored[:, :4], 9)) == 0
    with pytest.raises(ValueError, match="count must be 0 or more, got -1"):
        draw_anchors(scored, -1)
    with pytest.raises(TypeError, match="scored must be bool, got torch.int64"):
        draw_anchors(scored.long(), 1)


def test_what_is_refused() -> None:
    model = a_model()
    head = dflash_head(model, 0, TAPS)
    given, scored = read(model, head, [torch.arange(6)]), torch.ones(1, 6, dtype=torch.bool)
    anchors, own = torch.tensor([2]), {"embedding": model.embedding}
    tokens, features, targets = given
    refused: dict[str, tuple[Any, ...]] = {
        r"features must have shape \(1, 6, ..\), got \(1, 5\)": (tokens, features[:, 1:], targets, scored, anchors),
        "targets must have 10 columns, the tokens that the head can draft, got 9": (
            tokens,
            features,
            targets[..., 1:],
            scored,
            anchors,
        ),
        r"anchors must lie in \[0, 6\), got 6": (*given, scored, anchors + 4),
    }
    for words, arguments in refused.items():
        with pytest.raises(ValueError, match=words):
            dflash_loss(head, *arguments, **own)
    for words, more in {
        "documents must add up to the 6 tokens, got 5": {"documents": [2, 3]},
        "gamma must be positive, got 0": {"gamma": 0},
        "labels must be one of 'distribution', 'text', got 'tokens'": {"labels": "tokens"},
    }.items():
        with pytest.raises(ValueError, match=words):
            dflash_loss(head, *given, scored, anchors, **own, **more)
    with pytest.raises(ValueError, match="own_embedding must be True, got False"):
        dflash_loss(head, *given, scored, anchors)
    nothing = dflash_loss(head, *given, scored & False, anchors, **own)
    assert nothing.total.item() == 0 and nothing.agreed.tolist() == [0] * 4
