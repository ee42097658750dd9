"""The forward of a `Hybrid` on a cache as one op of the CPU, as `whole_step` runs that of a `Transformer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pdkernels.cache import HybridCache
from pdkernels.masks import TilePlan
from pdkernels.models.architectures import fused, whole_step
from pdkernels.models.architectures.attention import check_mask, check_positions, plan_of
from pdkernels.models.architectures.states import parents_of
from pdkernels.models.architectures.whole_step import MixerArguments, Names, Parts, StatesArguments, StateStepArguments

_BEGIN: Names = ("mixer_norm",)
_END: Names = ("output", None, None, "mlp_norm", None, "gate_up", None, "down", None)
NAMES: dict[str, Names] = {
    "attention": (*_BEGIN, "qkv", None, "q_norm", "k_norm", None, *_END),
    "conv": (*_BEGIN, "inputs", None, "conv", *_END),
    "delta": (*_BEGIN, "inputs", None, "conv", "decay", "decay_bias", "value_norm", *_END),
}
"""The parameters of a layer by its mixer, in the order of `ParameterReader` in
python_bindings/transformer_parameters.h; None: what such a layer has not. Mixers are in the order of `MixerKind` in
state_mixer.h there."""


class HybridBinding(whole_step.Binding):
    """The parameters of a `Hybrid`."""

    def parts(self, model: Any) -> Parts:
        config = model.config
        mixers = [[*NAMES].index(mixer) for mixer in config.mixers]
        sizes = config.key_heads, config.value_heads, config.key_dim, config.value_dim, config.rotary_width
        variants = config.gated_attention, config.centred_norms, config.tiled_values, config.plain_decay
        return super().parts(model)._replace(mixer=MixerArguments(mixers, *sizes, *variants, model.l2norm_eps))


def run_forward(
    model: Any,
    tokens: Tensor,
    cache: HybridCache,
    counts: Tensor | None,
    positions: Tensor | None,
    mask: TilePlan | None,
    with_logits: bool,
    taps: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor] | None:
    """As that of `whole_step`, for a `Hybrid`, with `positions` after the cached rows."""
    config = model.config
    if type(cache) is not HybridCache or type(cache.k) is not Tensor or config.windows:
        return None
    if type(tokens) is not Tensor or tokens.dim() != 2 or len(tokens) != cache.batch or not fused.enabled(model.norm):
        return None
    batch, rows = tokens.shape
    plan, table = plan_of(cache, rows, mask), model.rotation_table(cache.capacity + rows)  # type: ignore[arg-type]
    if plan is None or not whole_step.serves(tokens, cache, table) or model.binding.of(model) is None:  # type: ignore[arg-type]
        return None
    check_mask("Hybrid", mask, batch, rows, tokens.device)
    rotation = table
    if positions is not None:
        places = cache.lengths[:, None] + positions
        check_positions("Hybrid", places, positions, cache.capacity + rows)
        rotation = table.kept_for(places)
    parents = None if mask is None else parents_of(mask)
    step = cache.begin_(rows, counts, parents=parents, compute_all=mask is not None)
    every = cache.states.values()
    states = StatesArguments(
        [slots.state for slots in every],
        [rows for slots in every for rows in slots.pending],
        cache.state_lengths,
        StateStepArguments(step.pending_index, step.parents, step.counts, step.keep),
    )
    span = None, [*taps], 0, config.layers, with_logits
    return whole_step.results_of(model, tokens, span, cache, (counts, None), (rotation, None), [], plan, None, states)  # type: ignore[arg-type]
