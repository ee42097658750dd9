"""Fakes for any mask: a row's logits depend on what it may see; with the interface of the reference decoders, and on a cache.

All record their calls, so that tests can check the masks that a decoder used. On a cache every forward rebuilds the whole input of
the uncached model from what the cache holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.decoding import DecodeResult
from pdkernels.masks import TilePlan
from pdkernels.models.architectures.transformer import Transformer
from pdkernels.reference.sampling import distribution, without
from tests.support.base import CachedFake, RandomRows, random_transformer
from tests.support.causal import VOCABULARY, Script

MASK = VOCABULARY  # the id after those that scripts write

Skill = Callable[[list[int], int], bool]  # (clean history, position): is the guess for it right?


def always(history: list[int], position: int) -> bool:
    return True


def never(history: list[int], position: int) -> bool:
    return False


def patchy(history: list[int], position: int) -> bool:
    """Right near the clean history, less so further on, without a repeating pattern."""
    return (sum(history) * 7 + position * position) % (position - len(history) + 3) < 2


SKILLS: dict[str, Skill] = {"always": always, "never": never, "patchy": patchy}


class Call(NamedTuple):
    tokens: list[int]
    positions: list[int]
    mask: Tensor  # (T, T)
    adapted: Tensor | None  # (T,)


class Recorded:
    """Records its calls. `adapter` is the same model with a drafter's interface."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor, adapted: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        assert tokens.shape == positions.shape == (1, length) and mask.shape == (length, length)
        assert mask.dtype == torch.bool
        assert adapted is None or (adapted.shape == (length,) and adapted.dtype == torch.bool)
        self.calls.append(Call(tokens[0].tolist(), positions[0].tolist(), mask, adapted))
        return self.logits(self.calls[-1])[None]

    def logits(self, call: Call) -> Tensor:
        raise NotImplementedError


class ScriptedTriMode(Recorded):
    """Clean rows predict the script, mask rows guess it as well as their skill allows.

    A clean row that does not see exactly the positions up to its own, once each, is NaN: a decoder must not use it. A mask
    row uses the clean tokens it sees from position 0 on without a gap, and continues the script from there. Its confidence
    takes one of three levels: 0.99, 0.70, 0.24.
    """

    def __init__(self, script: Script, skill: Skill = always, label_shift: int = 0) -> None:
        super().__init__()
        self.script, self.skill, self.label_shift = script, skill, label_shift

    def logits(self, call: Call) -> Tensor:
        out = torch.zeros(len(call.tokens), VOCABULARY + 1, dtype=torch.float64)
        for row, (token, position) in enumerate(zip(call.tokens, call.positions)):
            columns = call.mask[row].nonzero().flatten().tolist()
            seen = {call.positions[c]: call.tokens[c] for c in columns if call.tokens[c] != MASK}
            history = [seen[p] for p in itertools.takewhile(seen.__contains__, itertools.count())]
            if token != MASK:
                if len(columns) == len(history) == position + 1:
                    out[row, self.script(history)] = 8.0
                else:
                    out[row] = torch.nan
                continue
            played = list(history)
            while len(played) <= position + self.label_shift:
                played.append(self.script(played))
            guess = played[position + self.label_shift]
            if not self.skill(history, position + self.label_shift):
                guess = (guess + 1) % VOCABULARY
            out[row, guess] = (2.0, 4.0, 8.0)[(sum(history) + position * position) % 3]
        return out


class Table(Recorded, RandomRows):
    """Logits from a random table over everything that a row sees: as arbitrary as a model can be, with poor drafts.

    `size` ids, of which the last is the mask, which clean rows never predict.
    """

    def __init__(self, size: int, seed: int = 0, spread: float = 1.5) -> None:
        Recorded.__init__(self)
        RandomRows.__init__(self, size, seed, spread)

    def logits(self, call: Call) -> Tensor:
        rows = []
        for row, token in enumerate(call.tokens):
            columns = call.mask[row].nonzero().flatten().tolist()
            seen = tuple(sorted((call.positions[c], call.tokens[c]) for c in columns))
            rows.append(self.drawn((token, call.positions[row], seen), self.size).clone())
            if token != self.size - 1:
                rows[-1][-1] = -torch.inf
        return torch.stack(rows)


class TinyTransformer(Recorded):
    """Two layers of attention with RoPE and a tanh MLP, random, fp64; `adapted` rows get another output projection.

    The mask decides which rows see which, and `past` (K and V of each layer) may replace rows that are not fed.
    """

    HEADS, HEAD_DIM, LAYERS = 2, 4, 2

    def __init__(self, size: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        width = self.HEADS * self.HEAD_DIM
        weight = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[0])  # noqa: E731
        self.embedding, self.head = weight(size, width) * size**0.5, weight(width, size) * 3
        self.layers = [
            {name: weight(width, width) for name in ("q", "k", "v", "out", "adapter", "up", "down")}
            for _ in range(self.LAYERS)
        ]

    def logits(self, call: Call) -> Tensor:
        return self.run(torch.tensor(call.tokens), torch.tensor(call.positions), call.mask, call.adapted)[0]

    def apply_rope(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.HEAD_DIM // 2
        angle = positions[:, None, None] / 100.0 ** (torch.arange(half, dtype=torch.float64) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        adapted: Tensor | None,
        past: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits ``(T, V)``, and K and V ``(S + T, heads, head_dim)`` per layer, where `mask` is ``(T, S + T)``."""
        x = self.embedding[tokens]
        cache = []
        for index, layer in enumerate(self.layers):
            heads = lambda name: (x @ layer[name]).unflatten(-1, (self.HEADS, self.HEAD_DIM))  # noqa: B023, E731
            q, k, v = self.apply_rope(heads("q"), positions), self.apply_rope(heads("k"), positions), heads("v")
            if past:
                k, v = torch.cat([past[index][0], k]), torch.cat([past[index][1], v])
            cache.append((k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.HEAD_DIM)
            mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v).flatten(1)
            delta = mixed @ layer["out"]
            if adapted is not None:
                delta = delta + (mixed @ layer["adapter"]) * adapted[:, None]
            x = x + delta
            x = x + torch.tanh(x @ layer["up"]) @ layer["down"]
        return x @ self.head, cache


def assert_clean_rows_see_no_noise(calls: Sequence[Call], mask_token: int, end_tokens: Sequence[int] = ()) -> None:
    """Rows that no adapter may touch (all rows, if no drafter was used) are those of a causal model, or of masks. What
    follows one of `end_tokens` may be a mask that nobody has filled, and is never accepted."""
    for call in calls:
        noise = torch.tensor(call.tokens) == mask_token
        plain = ~noise if call.adapted is None else ~call.adapted
        if plain.any() and noise.any():
            first = call.tokens.index(mask_token)
            if set(call.tokens[:first]) & set(end_tokens):
                noise, plain = noise.clone(), plain.clone()
                noise[first:] = plain[first:] = False
        assert not noise[plain].any()
        assert not call.mask[plain][:, noise].any(), "a clean row sees a mask"
        positions = torch.tensor(call.positions)
        assert not (call.mask[plain] & (positions > positions[plain][:, None])).any(), (
            "a clean row sees what comes later"
        )
        assert (call.mask[plain].sum(1) == positions[plain] + 1).all(), "a clean row misses something"


def prompts(size: int) -> st.SearchStrategy[list[list[int]]]:
    """A batch, without the mask token."""
    return st.lists(st.lists(st.integers(0, size - 2), min_size=1, max_size=6), min_size=1, max_size=3)


class Cached(CachedFake):
    """`fake` on a cache. With `adapter` it is given the rows that are adapted."""

    def __init__(self, fake: Recorded, size: int, adapter: bool = False) -> None:
        self.fake, self.has_adapter = fake, adapter
        self.config = SimpleNamespace(vocab_size=size)
        self.mask_token, self.end_tokens = size - 1, ()
        self.head_rows: list[int] = []  # rows in each call of the head

    def __call__(self, tokens: Tensor, *, rows: Any = None, **options: Any) -> Tensor:
        out = self.hidden(tokens, **options)
        if isinstance(rows, slice):
            out = out[:, rows]
        elif rows is not None:
            out = out.gather(1, rows[..., None].expand(-1, -1, out.shape[-1]))
        return self.logits(out)

    def logits(self, hidden: Tensor) -> Tensor:
        self.head_rows.append(hidden.shape[1])
        return hidden.clone()

    def hidden(
        self,
        tokens: Tensor,
        *,
        cache: Any,
        counts: Tensor | None = None,
        mask: TilePlan | Tensor | None = None,
        positions: Tensor | None = None,
        adapted: bool | Tensor = False,
    ) -> Tensor:
        batch, width = tokens.shape
        assert self.has_adapter or adapted is False
        lengths = cache.lengths.tolist()
        valid = [width] * batch if counts is None else counts.tolist()
        tail = torch.ones(width, width, dtype=torch.bool).tril() if mask is None else mask
        tail = (tail.dense() if isinstance(tail, TilePlan) else tail).expand(batch, width, width)
        places = (torch.arange(width) if positions is None else positions).expand(batch, width) + cache.lengths[:, None]
        gate = (
            torch.full((), adapted).expand(batch, width) if isinstance(adapted, bool) else adapted.expand(batch, width)
        )
        k, v = cache.layer(0, max(lengths))
        out = torch.full((batch, width, self.config.vocab_size), torch.nan, dtype=torch.float64)
        for b, length in enumerate(lengths):
            assert v[b, :length].flatten().tolist() == list(range(length)), "a cache row is in the wrong slot"
            end = width if mask is not None else valid[b]
            visible = torch.ones(length + end, length + end, dtype=torch.bool).tril()
            visible[length:, length:] = tail[b, :end, :end]
            ids = [int(token) for token in k[b, :length].flatten().tolist()] + tokens[b, :end].tolist()
            rows = torch.cat([torch.zeros(length, dtype=torch.bool), gate[b, :end]])
            call = Call(ids, [*range(length), *places[b, :end].tolist()], visible, rows if self.has_adapter else None)
            out[b, :end] = self.fake.logits(call)[length:]
        cache.append_(0, tokens[..., None, None].float(), places[..., None, None].float(), counts)
        return out


def lowest_confidence() -> float:
    """For a `ScriptedTriMode`: the model's least confident guess, the mask token excluded."""
    row = torch.zeros(1, MASK + 1, dtype=torch.float64)
    row[0, 0] = 2.0
    return float(distribution(without(row, MASK), 1.0)[0, 0])


def small_transformer(
    seed: int, size: int = 13, adapter: bool = False, head_dim: int = 8, hidden_size: int = 16, **sizes: int
) -> Transformer:
    """As `random_transformer`, causal, with an adapter on demand."""
    model = random_transformer(seed, 0.4, vocab_size=size, head_dim=head_dim, hidden_size=hidden_size, **sizes)
    if adapter:
        model.attach_adapter_(
            [(torch.randn(3, 4 * head_dim), torch.randn(hidden_size, 3)) for _ in range(2)], scale=0.5
        )
    return model


def drafter(model: Transformer) -> Any:
    """The same with the adapter; None for a model without one."""
    if not model.has_adapter:
        return None
    return lambda tokens, positions, mask, adapted: model(tokens, positions=positions, mask=mask, adapted=adapted)


def assert_cache_is_causal(model: Transformer, cache: Any, sequences: list[list[int]]) -> None:
    """K and V of every committed token are those that a causal forward computes."""
    for index, sequence in enumerate(sequences):
        length = int(cache.lengths[index])
        assert length >= 1
        fresh = model.new_cache(1, length)
        model(torch.tensor([sequence[:length]]), cache=fresh)
        for layer in range(model.config.layers):
            for actual, expected in zip(cache.layer(layer, length), fresh.layer(layer, length), strict=True):
                torch.testing.assert_close(actual[index], expected[0], rtol=1e-10, atol=1e-10)


# ---- properties of all methods


def assert_same(
    result: DecodeResult,
    expected: list[Any],
    lockstep: bool,
    accepted: Callable[[Any], int] = lambda step: step.accepted,
) -> None:
    """A batch gives what the reference gives for each of its sequences.

    With `lockstep` all take part in the same forwards; else the number of passes depends on the model, and they wait for each
    other. `accepted` is the number of tokens of a step in the reference's trace.
    """
    assert [tokens.tolist() for tokens in result.tokens] == [one.tokens for one in expected]
    stats = result.stats
    assert stats.accepted == [[accepted(step) for step in one.trace] for one in expected]
    assert [[tuple(step) for step in steps] for steps in stats.trace] == [
        [tuple(step) for step in one.trace] for one in expected
    ]
    forwards = [one.forwards for one in expected]
    assert stats.forwards == max(forwards) if lockstep else max(forwards) <= stats.forwards <= sum(forwards)
    if sum(forwards):
        assert stats.tokens_per_forward == stats.tokens / sum(forwards)
