"""Small random recurrent-depth models, each with its plain counterpart, and what the tests of their decoders share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.models.architectures.recurrent_depth import RecurrentDepth, RecurrentDepthConfig
from pdkernels.reference.recurrence import initial_state
from pdkernels.reference.recurrent_depth import RecurrentDepthReference, RecurrentPast, random_weights
from pdkernels.reference.recurrent_sampling import Init, position_states
from tests.support.causal import VOCABULARY as SCRIPTED
from tests.support.causal import Script

VOCABULARY, HIDDEN, RECURRENCES = 13, 8, 6
_NAMES = {
    "attn.Wqkv.weight": "qkv",
    "attn.qk_bias": "qk_bias",
    "attn.proj.weight": "output",
    "mlp.fc.weight": "gate_up",
    "mlp.proj.weight": "down",
}

token = st.integers(0, VOCABULARY - 1)
prompts = st.lists(st.lists(token, min_size=1, max_size=5), min_size=1, max_size=3)
seeds = st.integers(-(2**63), 2**64 - 1)
page_sizes = st.sampled_from([None, None, 1, 3])
# temperature, top_p, min_p, top_k
draws = st.sampled_from(
    [
        (0.0, None, None, None),
        (0, 0.5, 0.5, 2),
        (0.7, None, None, None),
        (1.0, 0.8, None, None),
        (1.5, 0.9, 0.05, 50),
        (1.5, None, None, 3),
        (2.0, 0.9, 0.05, 4),
    ]
)


def _own_name(name: str) -> str:
    """The name in `RecurrentDepth` of a published one."""
    part, _, rest = name.removeprefix("transformer.").partition(".")
    if part not in ("prelude", "core_block", "coda"):
        return {"wte": "embedding", "adapter": "adapter", "ln_f": "norm"}[part]
    layer, _, rest = rest.partition(".")
    return f"{part.removesuffix('_block')}_layers.{layer}.{_NAMES.get(rest, rest.removesuffix('.weight'))}"


@cache
def models(
    seed: int, state_scale: float = 1.0, heads: int = 2, hidden: int = HIDDEN
) -> tuple[RecurrentDepth, RecurrentDepthReference]:
    """The same fp64 model twice. A small `state_scale` makes its core a contraction."""
    weights = random_weights(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        heads=heads,
        intermediate_size=12,
        layers=(1, 2, 1),
        state_scale=state_scale,
        seed=seed,
    )
    config = RecurrentDepthConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        heads=heads,
        head_dim=hidden // heads,
        intermediate_size=12,
        prelude_layers=1,
        core_layers=2,
        coda_layers=1,
        mean_recurrence=RECURRENCES,
    )
    model = RecurrentDepth(config).double().requires_grad_(False)
    own = {_own_name(name): value for name, value in weights.items()}
    model.load_state_dict({name: value.view_as(model.get_parameter(name)) for name, value in own.items()})
    return model, RecurrentDepthReference(weights)


def init_of(seed: int, hidden: int = HIDDEN) -> Init:
    """The initial states of positions, for the reference's samplers."""

    def init(step: int, positions: Tensor) -> Tensor:
        return initial_state(torch.tensor(step), positions, hidden, seed).double()

    return init


# ---- for the reference samplers

WIDE = 12
init = position_states(WIDE, seed=3)


def tiny(seed: int = 0, state_scale: float = 1.0, **sizes: Any) -> RecurrentDepthReference:
    """Two heads of six components, 1 + 2 + 1 layers, 13 ids. A small `state_scale` makes the core a contraction."""
    options = {"vocab_size": 13, "hidden_size": WIDE, "heads": 2, "intermediate_size": 10, **sizes}
    return RecurrentDepthReference(random_weights(**options, state_scale=state_scale, seed=seed))


def zeros(step: int, positions: Tensor) -> Tensor:
    """Initial states of a :class:`Scripted` model."""
    return torch.zeros(len(positions), 3, dtype=torch.float64)


def direction(position: int, turn: float = 0.0) -> Tensor:
    """The state to which a position converges: unit length, and different for nearby positions."""
    angle = 2.4 * position + turn
    return torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)


class Scripted:
    """The token after a row is the script's function of all tokens up to the row, whatever the state.

    The state of position p turns by one radian with every recurrence until recurrence ``settle(p)``, then stays as it is. Its
    third component counts the recurrences in units too small for any threshold. The history is read back from the past, whose K
    are token ids and V positions, so that a wrong freeze gives wrong tokens.
    """

    def __init__(self, script: Script, settle: Callable[[int], int] = lambda position: 0) -> None:
        self.script, self.settle = script, settle
        self.past: RecurrentPast | None = None  # the first one handed out
        self.widths: list[int] = []  # of the forwards with frozen rows before them

    def new_past(self) -> RecurrentPast:
        past = RecurrentPast(1)
        self.past = self.past or past
        return past

    def prelude(self, tokens: Tensor, start: int, past: RecurrentPast) -> Tensor:
        assert start == past.length and (start == 0 or len(past.frozen[0][0]) == start)  # type: ignore[index]
        past.seen(0, tokens[:, None, None].double(), torch.arange(start, start + len(tokens))[:, None, None].double())
        if start:
            self.widths.append(len(tokens))
        return torch.zeros(len(tokens), 3, dtype=torch.float64)

    def core(self, state: Tensor, e: Tensor, start: int, past: RecurrentPast) -> Tensor:
        out = []
        for i, row in enumerate(state):
            count = round(row[2].item() * 1e9) + 1
            turned = direction(start + i, 0.0 if count >= self.settle(start + i) else float(count))
            out.append(torch.cat([turned, torch.tensor([count * 1e-9], dtype=torch.float64)]))
        return torch.stack(out)

    def coda(self, state: Tensor, start: int, past: RecurrentPast) -> Tensor:
        tokens, positions = past.seen(0, *past.fresh[0])  # type: ignore[misc]
        history = tokens.flatten().long().tolist()
        assert positions.flatten().long().tolist() == list(range(start + len(state)))
        said = [self.script(history[: start + i + 1]) for i in range(len(state))]
        return torch.nn.functional.one_hot(torch.tensor(said), SCRIPTED).double()

    @property
    def stored(self) -> list[int]:
        """The tokens whose K and V are frozen."""
        return self.past.frozen[0][0].flatten().long().tolist()  # type: ignore[index, union-attr]


class CachedPast:
    """Frozen rows: those of a cache, or none at all. Rows of a forward come after them."""

    def __init__(self, model: RecurrentDepth, cache: Any) -> None:
        self.model, self.cache, self.length = model, cache, 0

    def freeze(self, rows: int) -> None:
        self.cache.commit_(torch.full_like(self.cache.lengths, rows))
        self.length += rows


class Parts:
    """A `RecurrentDepth` model with the interface of the reference's samplers: without batch."""

    def __init__(self, model: RecurrentDepth, capacity: int, page_size: int | None) -> None:
        self.model = model
        if page_size is None:
            self.caches = [model.new_cache(1, capacity)]
        else:
            self.caches = [model.new_cache(1, capacity, kind="paged", page_size=page_size)]
            self.caches[0].reserve_(capacity)

    def new_past(self) -> CachedPast:
        """The cache is the first one's; another is requested for a prelude that must not see it."""
        return CachedPast(self.model, self.caches.pop() if self.caches else None)

    def prelude(self, tokens: Tensor, start: int, past: CachedPast) -> Tensor:
        return self.model.prelude(tokens[None], self.model.context(len(tokens), past.cache))[0]

    def core(self, state: Tensor, e: Tensor, start: int, past: CachedPast) -> Tensor:
        context = self.model.context(len(state), past.cache)
        return self.model.core(state[None], self.model.embedding_term(e[None]), context)[0]

    def coda(self, state: Tensor, start: int, past: CachedPast) -> Tensor:
        return self.model.coda(state[None], self.model.context(len(state), past.cache))[0]
