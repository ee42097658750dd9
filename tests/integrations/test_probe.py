"""When `wrap` tries a model again, and how long it lets texts be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from pdkernels.integrations.transformers import wrap  # noqa: E402
from tests.integrations.test_shadow import ours, small, theirs  # noqa: E402
from tests.support.transformers_names import VERSION  # noqa: E402

COMPUTES_ITS_OWN = pytest.mark.skipif(VERSION < (5, 0), reason="transformers 4 has classes of attention for it")

# The masks of transformers 4 cannot be asked about longer texts than that of the trial, so windows end texts there.
READ = 64 if VERSION >= (5, 0) else 0


class Skips(torch.nn.Module):
    """Attention that hands on what it is given: no layer of ours is called."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_model_is_tried_once_and_again_when_it_changed() -> None:
    model = small()
    runs: list[int] = []
    model.model.layers[0].register_forward_hook(lambda module, given, out: runs.append(1))
    wrap(model)
    assert 3 < len(runs) < 12
    known = len(runs)
    wrap(model)
    assert len(runs) == known
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    wrap(model)
    assert len(runs) == known
    if hasattr(model.config, "rope_parameters"):
        model.config.rope_parameters["rope_theta"] = 5e5
    else:  # transformers 4
        model.config.rope_theta = 5e5
    wrap(model)
    assert len(runs) > known
    model.model.layers[1].self_attn = Skips()
    with pytest.raises(
        NotImplementedError, match="attention of its 2 layers from AttentionInterface, got .* with 1 that do not"
    ):
        wrap(model)


@pytest.mark.skipif(VERSION < (5, 0), reason="the BERT of transformers 4 takes no mask of four dimensions")
def test_what_is_asked_once_is_asked_for_each_use() -> None:
    """A model may be right for one kind of decoding and not for another."""
    model = small("Bert", is_decoder=False)
    with pytest.raises(NotImplementedError, match="with our attention as with its own"):
        wrap(model)
    assert wrap(model, attention="bidirectional", mask_token=60).config.predicts == "own"


@pytest.mark.parametrize(
    ("name", "more", "longest"),
    [
        ("Mistral", {"sliding_window": 24}, READ or 24),
        ("Cohere2", {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]}, READ or 20),
        ("Cohere2", {"sliding_window": 20, "layer_types": ["full_attention"] * 2}, 64),
        ("Gemma3Text", {"sliding_window": 20, "layer_types": ["full_attention"] * 2}, 64),
        (
            "Llama4Text",
            {"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]},
            READ or 16,
        ),
        ("Llama4Text", {"attention_chunk_size": 16, "layer_types": ["full_attention"] * 2, "floor_scale": 40}, 40),
        pytest.param("Qwen2Moe", {"num_experts": 4}, 64, marks=COMPUTES_ITS_OWN),
    ],
)
def test_texts_are_as_long_as_positions_are_unambiguous(name: str, more: dict[str, Any], longest: int) -> None:
    """What layers do, not what fields say: a window that no layer has is none, and others do not end a text."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "head_dim": 16}
    model = small(name, **({**experts, **more} if name == "Llama4Text" else more))
    wrapped = wrap(model)
    assert wrapped.config.max_positions == longest
    new = longest - 5
    assert ours(wrapped, new) == theirs(model, new)
    with pytest.raises(ValueError, match=f"leave room for max_new_tokens in the model's {longest} positions"):
        ours(wrapped, new + 1)
