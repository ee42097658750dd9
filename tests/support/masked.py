"""Masked-diffusion models for tests: random ones, ones with their plain form in parts, and scripted ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.models.architectures.transformer import Transformer
from pdkernels.reference.masked_model import LLADA, MaskedTransformerReference
from pdkernels.reference.philox import philox4x32
from tests.support.base import RandomRows, random_transformer

VOCABULARY, MASK = 13, 12

# A batch. A mask token inside a prompt is part of it; a canvas of mask tokens only would have identical rows.
prompt = st.tuples(st.integers(0, MASK - 1), st.lists(st.integers(0, MASK), max_size=5)).map(
    lambda ids: [ids[0], *ids[1]]
)
prompts = st.lists(prompt, min_size=1, max_size=3)

# What a scripted model predicts for every position of a text: the token and its probability.
Script = Callable[[list[int]], list[tuple[int, float]]]


@cache
def small_masked(seed: int, predicts: Any = "own", head_dim: int = 8) -> Transformer:
    """Bidirectional; the last id is the mask."""
    sizes = {"vocab_size": VOCABULARY, "head_dim": head_dim, "attention": "bidirectional", "predicts": predicts}
    return random_transformer(seed, 0.5, **sizes)


@cache
def deep_masked(
    seed: int, predicts: Any = "own", head_dim: int = 8, attention: Any = "bidirectional", qk_norm: bool = False
) -> Transformer:
    """With a layer after one that may be stale; the last id is the mask."""
    sizes = {"vocab_size": VOCABULARY, "layers": 3, "head_dim": head_dim, "attention": attention, "predicts": predicts}
    return random_transformer(seed, 0.4, vectors=True, qkv_bias=True, qk_norm=qk_norm, tied_head=False, **sizes)


class Scripted:
    """A scripted `Transformer`: rows that may not be read are poison, and every call is recorded.

    Attributes:
        visible: for each forward, how many positions of each sequence were visible. head_rows: for each call of the
        head, how many rows it ran.
    """

    tokenizer = None

    dtype = torch.float64
    keeps_rows = True  # if it is given all of them

    def __init__(self, script: Script, predicts: str = "own", end_tokens: tuple[int, ...] = ()) -> None:
        self.script, self.end_tokens, self.mask_token = script, end_tokens, MASK
        self.config = SimpleNamespace(vocab_size=VOCABULARY, attention="bidirectional", predicts=predicts)
        self.device = torch.device("cpu")
        self.visible: list[list[int]] = []
        self.head_rows: list[int] = []

    def new_cache(self, batch: int, capacity: int) -> Any:
        return SimpleNamespace(batch=batch, capacity=capacity)

    def rows(self, text: list[int]) -> Tensor:
        """Logits ``(len(text), V)``: all ids but the guess are equally likely, the mask impossible."""
        out = torch.full((len(text) + 1, VOCABULARY), torch.nan, dtype=self.dtype)
        for position, (token, sure) in enumerate(self.script(text)):
            out[position] = math.log(max(1 - sure, 1e-12) / (VOCABULARY - 2))
            out[position, token] = math.log(sure)
            out[position, MASK] = -1e4
        return out[1:] if self.config.predicts == "next" else out[:-1]

    def recompute(
        self,
        tokens: Tensor,
        cache: Any,
        starts: Tensor,
        *,
        visible: Tensor,
        slots: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        batch, width = tokens.shape
        assert (cache.batch, slots, starts.tolist()) == (batch, None, [0] * batch) and width <= cache.capacity
        shown = visible.tolist()
        assert (shown if counts is not None else [width] * batch) == shown
        out = torch.full((batch, width, VOCABULARY), torch.nan, dtype=self.dtype)
        for b, end in enumerate(shown):
            out[b, :end] = self.rows(tokens[b, :end].tolist())
        self.visible.append(shown)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        self.head_rows.append(hidden.shape[1])
        return hidden

    def __call__(self, tokens: Tensor, *, positions: Tensor, mask: Tensor) -> Tensor:
        assert mask.all() and positions.tolist() == [list(range(tokens.shape[1]))]
        return self.rows(tokens[0].tolist())[None]


def hashed(seed: int, sure: Callable[[float], float] = lambda u: 0.15 + 0.8 * u) -> Script:
    """Depends on every token of the text; `sure` maps a number in 0 .. 1 to a probability."""

    def script(text: list[int]) -> list[tuple[int, float]]:
        state = seed + 7
        for token in text:
            state = (state * 31 + token + 1) % 1000003
        said = []
        for position in range(len(text)):
            word = (state + 7919 * position) * 2654435761 % 2**32
            said.append((word % MASK, sure((word >> 8) / 2**24)))
        return said

    return script


class NormedHeads(MaskedTransformerReference):
    """With Qwen3's norms of the heads of q and k: their weights for each layer."""

    head_norms: list[dict[str, Tensor]]

    def qkv(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self._norm(x, "attention_norm", layer)
        q, k, v = (self._linear(x, name, layer).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + self.norm_eps).sqrt() * self.head_norms[layer][name]
            for name, y in (("q", q), ("k", k))
        )
        return self._rotate(q, positions), self._rotate(k, positions), v


@cache
def with_parts(model: Transformer) -> MaskedTransformerReference:
    """The same weights under LLaDA's names."""
    config = model.config
    sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
    weights = {f"{LLADA['embedding']}.weight": model.embedding, f"{LLADA['norm']}.weight": model.norm}
    weights[f"{LLADA['head']}.weight"] = model.embedding if model.head is None else model.head
    for index, layer in enumerate(model.layers):
        named = dict(zip("qkv", layer.qkv.split(sizes))) | dict(zip(("gate", "up"), layer.gate_up.chunk(2)))
        named |= {"attention_norm": layer.attention_norm, "out": layer.output}
        named |= {"feed_forward_norm": layer.mlp_norm, "down": layer.down}
        weights |= {f"{LLADA['layer']}{index}.{LLADA[name]}.weight": tensor for name, tensor in named.items()}
        if layer.qkv_bias is not None:
            biases = zip("qkv", layer.qkv_bias.split(sizes))
            weights |= {f"{LLADA['layer']}{index}.{LLADA[name]}.bias": tensor for name, tensor in biases}
    plain = (NormedHeads if config.qk_norm else MaskedTransformerReference)(
        weights,
        heads=config.heads,
        names="llada",
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
        predicts=config.predicts,
    )
    plain.head_norms = [{"q": layer.q_norm, "k": layer.k_norm} for layer in model.layers]
    return plain


class Remembering(Scripted):
    """Reads its text back from its cache, where a forward over some rows leaves the others as they are.

    Attributes:
        forwards: for each forward, first and last (exclusive) row of each sequence.
    """

    forwards: list[list[tuple[int, int]]]

    def new_cache(self, batch: int, capacity: int) -> Any:
        self.forwards = []
        return SimpleNamespace(batch=batch, capacity=capacity, texts=torch.full((batch, capacity), -1))

    def recompute(
        self,
        tokens: Tensor,
        cache: Any,
        starts: Tensor,
        *,
        visible: Tensor,
        slots: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        batch, width = tokens.shape
        assert slots is None
        ends = starts + (width if counts is None else counts)
        assert bool((ends <= visible).all()) and int(visible.max()) <= cache.capacity
        self.forwards.append(list(zip(starts.tolist(), ends.tolist())))
        out = torch.full((batch, width, VOCABULARY), torch.nan, dtype=self.dtype)
        for b, (first, last) in enumerate(self.forwards[-1]):
            cache.texts[b, first:last] = tokens[b, : last - first]
            text = cache.texts[b, : visible[b]].tolist()
            assert -1 not in text, "a row was never computed"
            out[b, : last - first] = self.rows(text)[first:last]
        return out


# ---- as the reference samplers call them

# rule(tokens, position) -> (token, its probability by the plain logits), for any position of the canvas `tokens`
Rule = Callable[[list[int], int], tuple[int, float]]


def word(position: int) -> int:
    """The token that the scripts below put at a position."""
    return (5 * position + 2) % MASK


def fixed(confidence: Sequence[float], start: int = 1) -> Rule:
    """`word` everywhere, ``confidence[i]`` at position ``start + i`` (the list starts over after its end)."""
    return lambda tokens, position: (word(position), confidence[(position - start) % len(confidence)])


def spreading(tokens: list[int], position: int) -> tuple[int, float]:
    """Confident next to known tokens, less and less away from them; the token depends on how much is known around it."""
    written = [p for p, token in enumerate(tokens) if token != MASK]
    distance = min(abs(position - p) for p in written)
    near = sum(tokens[p] for p in written if abs(position - p) <= 2)
    return (word(position) + near) % MASK, max(0.97 - 0.13 * distance + 0.004 * (position % 5), 0.12)


def moody(tokens: list[int], position: int) -> tuple[int, float]:
    """Token and confidence change with every commit, without a pattern, but are a function of the canvas."""
    state = 17
    for token in tokens:
        state = (31 * state + token + 1) % 10007
    state = (state * 37 + position * 101) % 10007
    return state % MASK, 0.12 + 0.87 * ((state // MASK) % 97) / 97


def chance(seed: int, step: int, places: Sequence[int]) -> dict[int, float]:
    """The uniform number of a position in a forward with a random order of commits."""
    key = torch.tensor([seed, 0])
    words = [philox4x32(torch.tensor([0, position, step, 2]), key)[0].item() for position in places]
    return {position: (word + 0.5) / 2**32 for position, word in zip(places, words)}


class ScriptedMasked:
    """A bidirectional model that follows a rule; keeps the canvases it was called with.

    Ids other than the rule's have equal shares of what is left, except the mask token, which has the logit `mask_logit`: it
    enters no confidence, however large it is. Rows that do not predict a mask are NaN.
    """

    def __init__(self, rule: Rule, predicts: str = "own", mask_logit: float = 50.0) -> None:
        self.rule, self.predicts, self.mask_logit = rule, predicts, mask_logit
        self.calls: list[list[int]] = []

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        length = tokens.shape[1]
        assert positions.tolist() == [list(range(length))] and mask.shape == (length, length) and bool(mask.all())
        canvas = tokens[0].tolist()
        self.calls.append(canvas)
        out = torch.full((1, length, VOCABULARY), torch.nan, dtype=torch.float64)
        for position, token in enumerate(canvas):
            row = position - (self.predicts == "next")
            if token == MASK and row >= 0:
                out[0, row] = self.logits(*self.rule(canvas, position))
        return out

    def logits(self, token: int, confidence: float) -> Tensor:
        assert confidence > 1 / MASK, "too low for a guess"
        others = math.log((1 - confidence) / (MASK - 1)) if confidence < 1 else -torch.inf
        row = torch.full((VOCABULARY,), others, dtype=torch.float64)
        row[token] = math.log(confidence)
        row[MASK] = self.mask_logit
        return row


class Tabled(RandomRows):
    """Random logits for every canvas and row."""

    def __init__(self, size: int, predicts: str = "own", seed: int = 0, spread: float = 2.0) -> None:
        super().__init__(size, seed, spread)
        self.predicts = predicts

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        return self.drawn(tuple(tokens[0].tolist()), tokens.shape[1], self.size)[None]
