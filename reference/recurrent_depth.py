"""A recurrent-depth model in its plainest form: one sequence, published tensor names, any dtype up to fp64.

    e = prelude(tokens);  state = random;  state = core(state, e), repeatedly;  logits = coda(state)

Source: Geiping et al., "Scaling up test-time compute with latent reasoning: a recurrent depth approach", section 3, and the names
of the tensors of Huginn-0125. It serves as an oracle for the models and decoders, so it shares no code with them.

Weights, by name; a linear layer is ``(out, in)`` and has no bias; E hidden, H heads, D = E / H, F of the MLP, V ids:

    transformer.wte.weight (V, E)              times sqrt(E); the head too, unless there is an lm_head.weight (V, E)
    transformer.{prelude,core_block,coda}.{i}  a layer with norms around its sublayers: norm_1 .. norm_4.weight (E,),
    attn.Wqkv.weight (3 E, E) with rows
                                               q, k, v, attn.qk_bias (2, 1, H, D), attn.proj.weight (E, E), mlp.fc.weight (2 F, E)
                                               with rows gate, up, mlp.proj.weight (E, F)
    transformer.adapter.weight (E, 2 E)        columns: state, e
    transformer.ln_f.weight (E,)               used before and after the coda

Layers number the *slots* of K and V: prelude, core, coda. A slot holds one row per position, regardless of the recurrences: each
recurrence attends to the frozen rows and to the fresh rows that it makes, and those of the last one may be frozen. A model
that *keeps* several recurrences has that many slots for each core layer: recurrence t writes and reads number ``t % kept``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

PARTS = ("prelude", "core_block", "coda")


class RecurrentPast:
    """K and V of each slot: the frozen rows, and those of the last call, which the next call recomputes.

    `length` rows are frozen in every slot; they are at positions 0 .. length - 1. `recurrence` counts those that began since the
    last prelude. Slots from `core` on, in groups of `count`, are the kept recurrences of `kept`; rows that stopped before they came
    to one have there what their last recurrence made ("latest-m4" of the published code).
    """

    def __init__(self, slots: int, core: int = 0, count: int = 0, kept: int = 1) -> None:
        self.length = 0
        self.recurrence = 0
        self.core, self.count, self.kept = core, count, kept
        self.frozen: list[tuple[Tensor, Tensor] | None] = [None] * slots  # each (length, H, D)
        self.fresh: list[tuple[Tensor, Tensor] | None] = [None] * slots  # each (T, H, D)

    def seen(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The K and V, ``(length + T, H, D)`` each, visible to rows `k`, `v` ``(T, H, D)`` of a slot; these become its fresh
        rows."""
        self.fresh[slot] = k, v
        old = self.frozen[slot]
        return (k, v) if old is None else (torch.cat([old[0], k]), torch.cat([old[1], v]))

    def freeze(self, rows: int) -> None:
        """Freezes the first `rows` fresh rows of every slot; the other fresh rows are dropped."""
        ran = max(1, min(self.recurrence, self.kept))
        for slot in range(self.core + self.count * ran, self.core + self.count * self.kept):
            self.fresh[slot] = self.fresh[slot - self.count]
        for slot, fresh in enumerate(self.fresh):
            if fresh is None or len(fresh[0]) < rows:
                raise ValueError(
                    f"pdkernels.RecurrentPast: slot {slot} must hold {rows} fresh rows. Run all parts first."
                )
        for slot, fresh in enumerate(self.fresh):
            assert fresh is not None
            self.frozen[slot] = self.seen(slot, fresh[0][:rows], fresh[1][:rows])
        self.fresh = [None] * len(self.fresh)
        self.length += rows

    def cut(self, length: int) -> None:
        """Drops the frozen rows from position `length` on."""
        self.frozen = [None if rows is None else (rows[0][:length], rows[1][:length]) for rows in self.frozen]
        self.length = length


class RecurrentDepthReference:
    """The model with the weights of a flat state dict; sizes are read from their shapes.

    Rows are at positions ``start, start + 1, ...``; with a `past`, ``start`` is its length. Every part attends causally to the
    frozen rows of its own slots and to the new rows.

    Args:
        weights: tensors by the names above, all of one floating dtype.
        rope_theta: base of the rotation's frequencies.
        norm_eps: added to the mean square.
        kept: recurrences whose K and V a past keeps apart: 1 is the published "compress-s" of one recurrence, as many as ever run
            "full".

    >>> model = RecurrentDepthReference(random_weights())
    >>> state = torch.zeros(3, 8, dtype=torch.float64)
    >>> e = model.prelude(torch.tensor([4, 2, 7]), 0, past := model.new_past())
    >>> model.coda(model.core(state, e, 0, past), 0, past).shape
    torch.Size([3, 11])
    >>> past.freeze(2)
    >>> past.length, past.frozen[0][0].shape
    (2, torch.Size([2, 2, 4]))
    """

    def __init__(
        self, weights: Mapping[str, Tensor], *, rope_theta: float = 50000.0, norm_eps: float = 1e-6, kept: int = 1
    ) -> None:
        self.weights, self.rope_theta, self.norm_eps, self.kept = dict(weights), rope_theta, norm_eps, kept
        self.layers = [
            sorted({int(name.split(".")[2]) for name in weights if name.startswith(f"transformer.{part}.")})
            for part in PARTS
        ]
        self.vocab_size, self.hidden_size = self["wte.weight"].shape
        self.heads, self.head_dim = self["core_block.0.attn.qk_bias"].shape[-2:]
        self.dtype = self["wte.weight"].dtype
        # Norms and rotations are computed in fp32, or in fp64 if the model is.
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[f"transformer.{name}"]

    def new_past(self) -> RecurrentPast:
        """A past without frozen rows."""
        prelude, core, coda = map(len, self.layers)
        return RecurrentPast(prelude + self.kept * core + coda, prelude, core, self.kept)

    def prelude(self, tokens: Tensor, start: int, past: RecurrentPast | None = None) -> Tensor:
        """e ``(T, E)`` of `tokens` ``(T,)``."""
        if past is not None:
            past.recurrence = 0
        return self._run(0, self["wte.weight"][tokens] * math.sqrt(self.hidden_size), start, past)

    def core(self, state: Tensor, e: Tensor, start: int, past: RecurrentPast | None = None) -> Tensor:
        """The state ``(T, E)`` after one more recurrence."""
        slot = len(self.layers[0])
        if past is not None:
            slot += past.recurrence % self.kept * len(self.layers[1])
            past.recurrence += 1
        return self._run(1, torch.cat([state, e], -1) @ self["adapter.weight"].T, start, past, slot)

    def renorm(self, state: Tensor) -> Tensor:
        """The norm that ends a recurrence, of something else."""
        return self._norm(state, f"core_block.{self.layers[1][-1]}.norm_4.weight")

    def coda(self, state: Tensor, start: int, past: RecurrentPast | None = None) -> Tensor:
        """Logits ``(T, V)``: row i predicts position ``start + i + 1``."""
        slot = len(self.layers[0]) + self.kept * len(self.layers[1])
        x = self._run(2, self._norm(state, "ln_f.weight"), start, past, slot)
        head = self.weights.get("lm_head.weight", self["wte.weight"])
        return self._norm(x, "ln_f.weight") @ head.T

    def _run(self, part: int, x: Tensor, start: int, past: RecurrentPast | None, slot: int = 0) -> Tensor:
        for layer in self.layers[part]:
            x = self._layer(f"{PARTS[part]}.{layer}.", x, start, past, slot + layer)
        return x

    def _layer(self, name: str, x: Tensor, start: int, past: RecurrentPast | None, slot: int) -> Tensor:
        attended = self._attention(name + "attn.", self._norm(x, name + "norm_1.weight"), start, past, slot)
        h = self._norm(attended + x, name + "norm_2.weight")
        gate, up = (self._norm(h, name + "norm_3.weight") @ self[name + "mlp.fc.weight"].T).chunk(2, -1)
        expanded = torch.nn.functional.silu(gate) * up
        return self._norm(expanded @ self[name + "mlp.proj.weight"].T + h, name + "norm_4.weight")

    def _attention(self, name: str, x: Tensor, start: int, past: RecurrentPast | None, slot: int) -> Tensor:
        q, k, v = (x @ self[name + "Wqkv.weight"].T).unflatten(-1, (3, self.heads, self.head_dim)).unbind(1)
        q_bias, k_bias = self[name + "qk_bias"]
        q, k = self._rotate(q + q_bias, start), self._rotate(k + k_bias, start)
        if past is not None:
            k, v = past.seen(slot, k, v)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head_dim)
        # Row i of T sees everything but the last T - 1 - i columns.
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        distribution = scores.masked_fill(~visible, -torch.inf).to(self.wide).softmax(-1).to(v.dtype)
        return torch.einsum("hqk,khd->qhd", distribution, v).flatten(1) @ self[name + "proj.weight"].T

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """Components 2 i and 2 i + 1 turn by ``position * theta ** (-2 i / D)``."""
        positions = torch.arange(start, start + len(x), dtype=torch.float64)
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64)
        angle = positions[:, None, None] * self.rope_theta ** (-pairs / self.head_dim)
        cos, sin = angle.cos().to(self.wide), angle.sin().to(self.wide)
        a, b = x[..., 0::2].to(self.wide), x[..., 1::2].to(self.wide)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """Rounded to the model's dtype before the weight, as in the published model."""
        wide = x.to(self.wide)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm_eps)).to(x.dtype) * self[name]


def random_weights(
    *,
    vocab_size: int = 11,
    hidden_size: int = 8,
    heads: int = 2,
    intermediate_size: int = 12,
    layers: tuple[int, int, int] = (1, 2, 1),
    state_scale: float = 1.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """An fp64 state dict with the published names: an untrained model in which every part affects the result.

    `layers` are those of prelude, core and coda. `state_scale` multiplies the adapter's weights of the state: small ones make the
    core a contraction, and with 0 the first recurrence is already at the fixed point.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * std

    def linear(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, std=columns**-0.5)

    width = hidden_size
    # Rows of equal norm, since the head is tied, and outputs twice as large as their residual: otherwise one id would win
    # everywhere.
    embedding = normal(vocab_size, width)
    weights = {
        "transformer.wte.weight": embedding / embedding.square().mean(-1, keepdim=True).sqrt(),
        "transformer.adapter.weight": torch.cat([linear(width, width) * state_scale, linear(width, width)], 1),
        "transformer.ln_f.weight": 1 + normal(width, std=0.2),
    }
    for part, count in zip(PARTS, layers):
        for i in range(count):
            name = f"transformer.{part}.{i}."
            weights |= {f"{name}norm_{n}.weight": 1 + normal(width, std=0.2) for n in (1, 2, 3, 4)}
            weights[name + "attn.Wqkv.weight"] = linear(3 * width, width)
            weights[name + "attn.qk_bias"] = normal(2, 1, heads, width // heads, std=0.5)
            weights[name + "attn.proj.weight"] = 2 * linear(width, width)
            weights[name + "mlp.fc.weight"] = linear(2 * intermediate_size, width)
            weights[name + "mlp.proj.weight"] = 4 * linear(width, intermediate_size)
    return weights
