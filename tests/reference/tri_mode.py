"""Fake models with the interface of the reference decoders, for any mask: what a row says depends on what it may see.

All write down their calls, so that tests can look at the masks that a decoder used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdkernels.reference.autoregressive import Model
from pdkernels.reference.sampling import causal_logits, distribution
from tests.decoding.fake_models import VOCABULARY, Script

MASK = VOCABULARY  # the id behind those that scripts write

Skill = Callable[[list[int], int], bool]  # (clean history, position): is the guess for it right?


def always(history: list[int], position: int) -> bool:
    return True


def never(history: list[int], position: int) -> bool:
    return False


def patchy(history: list[int], position: int) -> bool:
    """Right near the clean history, less so further on, and never in a pattern that repeats."""
    return (sum(history) * 7 + position * position) % (position - len(history) + 3) < 2


SKILLS: dict[str, Skill] = {"always": always, "never": never, "patchy": patchy}


class Call(NamedTuple):
    tokens: list[int]
    positions: list[int]
    mask: Tensor  # (T, T)
    adapted: Tensor | None  # (T,)


class Recorded:
    """Keeps its calls. `adapter` is the same model as a drafter is called."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor, adapted: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        assert (
            tokens.shape == positions.shape == (1, length)
            and mask.shape == (length, length)
            and mask.dtype == torch.bool
        )
        assert adapted is None or (adapted.shape == (length,) and adapted.dtype == torch.bool)
        self.calls.append(Call(tokens[0].tolist(), positions[0].tolist(), mask, adapted))
        return self.logits(self.calls[-1])[None]

    def logits(self, call: Call) -> Tensor:
        raise NotImplementedError


class ScriptedTriMode(Recorded):
    """Clean rows say what the script says, mask rows guess it as well as their skill lets them.

    A clean row that does not see exactly the positions up to its own, once each, says NaN: a decoder must not use it.
    A mask row counts on the clean tokens it sees from position 0 on without a gap, and plays the script on from there. Its
    confidence takes one of three levels: 0.99, 0.70, 0.24.
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


class Table(Recorded):
    """Logits out of a random table over all that a row sees: as arbitrary as a model can be, and drafts worth little.

    `size` ids, of which the last is the mask, which clean rows never say.
    """

    def __init__(self, size: int, seed: int = 0, spread: float = 1.5) -> None:
        super().__init__()
        self.size, self.seed, self.spread = size, seed, spread
        self.rows: dict[tuple[object, ...], Tensor] = {}

    def logits(self, call: Call) -> Tensor:
        rows = []
        for row, token in enumerate(call.tokens):
            columns = call.mask[row].nonzero().flatten().tolist()
            seen = tuple(sorted((call.positions[c], call.tokens[c]) for c in columns))
            key = (token, call.positions[row], seen)
            if key not in self.rows:
                generator = torch.Generator().manual_seed(hash((self.seed, key)) % 2**63)
                self.rows[key] = torch.randn(self.size, generator=generator, dtype=torch.float64) * self.spread
                if token != self.size - 1:
                    self.rows[key][-1] = -torch.inf
            rows.append(self.rows[key])
        return torch.stack(rows)


class TinyTransformer(Recorded):
    """Two layers of attention with RoPE and a tanh MLP, random, fp64; `adapted` rows get another output projection.

    The mask decides who sees whom, and `past` (K and V of each layer) may stand in for rows that are not fed.
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


def assert_clean_rows_see_no_noise(calls: Sequence[Call], mask_token: int) -> None:
    """Rows that no adapter may touch (all rows, where no drafter was asked) are those of a causal model, or of masks."""
    for call in calls:
        noise = torch.tensor(call.tokens) == mask_token
        plain = ~noise if call.adapted is None else ~call.adapted
        assert not noise[plain].any()
        assert not call.mask[plain][:, noise].any(), "a clean row sees a mask"
        positions = torch.tensor(call.positions)
        assert not (call.mask[plain] & (positions > positions[plain][:, None])).any(), (
            "a clean row sees what comes later"
        )
        assert (call.mask[plain].sum(1) == positions[plain] + 1).all(), "a clean row misses something"


def sequence_distribution(
    model: Model, prompt: Sequence[int], length: int, temperature: float
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `length` tokens under autoregressive sampling, by enumeration."""
    distributions = {(): 1.0}
    for _ in range(length):
        distributions = {
            (*tokens, token): probability * p
            for tokens, probability in distributions.items()
            for token, p in enumerate(
                distribution(causal_logits(model, [*prompt, *tokens])[-1:], temperature)[0].tolist()
            )
            if p > 0
        }
    return distributions


def follows(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> bool:
    """Pearson's chi-square test, four standard deviations above its mean; outcomes too rare for it are lumped together."""
    assert set(counts) <= set(expected)
    total = sum(counts.values())
    common = [outcome for outcome, p in expected.items() if p * total >= 5]
    cells = [(counts.get(outcome, 0), expected[outcome] * total) for outcome in common]
    rest = total - sum(e for _, e in cells)
    if rest >= 5:
        cells.append((total - sum(c for c, _ in cells), rest))
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    return statistic < freedom + 4 * math.sqrt(2 * freedom)
