"""Small random recurrent-depth models, each with its plain twin, and what the tests of their decoders share."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pdkernels.models.recurrent_depth import RecurrentDepth, RecurrentDepthConfig
from pdkernels.reference.recurrence import initial_state
from pdkernels.reference.recurrent_depth import RecurrentDepthReference, random_weights
from pdkernels.reference.recurrent_sampling import Init

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
    """The states that belong to positions, for the reference's samplers."""

    def init(step: int, positions: Tensor) -> Tensor:
        return initial_state(torch.tensor(step), positions, hidden, seed).double()

    return init


class HostReads(TorchFunctionMode):
    """Counts the reads of tensors by the host that decoding code makes; a model's own do not count."""

    NAMES = {
        "tolist",
        "item",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "cpu",
        "numpy",
        "nonzero",
        "equal",
        "is_nonzero",
    }

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES and "decoding" in Path(sys._getframe(1).f_code.co_filename).parts:
            self.count += 1
        return func(*args, **(kwargs or {}))
