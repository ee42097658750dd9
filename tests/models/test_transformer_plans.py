"""A full forward under a tile plan is one under the mask that the plan was made from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pdkernels as pd
from pdkernels.masks import SegmentMask, TilePlan
from pdkernels.models import Transformer
from tests.harness.error_budget import assert_within_budget
from tests.models.test_transformer import CONFIG, VARIANTS, build, random_tokens
from tests.support.errors import kind_of

# The kernels take heads of 16 and more.
CONFIGS = {name: replace(config, head_dim=16) for name, config in VARIANTS.items()}
MASK = pd.masks.pack([pd.masks.noise_aware_causal(5, 4, 3), pd.masks.dual_stream(11, 3)], length=57)
STRIPED = pd.masks.pack([pd.masks.block_causal(40, 7), pd.masks.causal(17)])


def logits_and_gradients(
    model: Transformer, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | TilePlan
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(tokens, positions=positions, mask=mask)
    gradients = torch.autograd.grad(logits.double().square().mean(), list(model.parameters()))
    return logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def check(config_name: str, masks: list[SegmentMask], plan: TilePlan) -> None:
    model = build(CONFIGS[config_name], torch.float32).requires_grad_(True)
    exact = build(CONFIGS[config_name], torch.float32).double().requires_grad_(True)
    tokens, positions = random_tokens(2, 57), torch.stack([mask.positions for mask in masks])
    dense = torch.stack([mask.dense() for mask in masks])
    actual = logits_and_gradients(model, tokens, positions, plan)
    pytorch = logits_and_gradients(model, tokens, positions, dense)
    oracle = logits_and_gradients(exact, tokens, positions, dense)
    for name, a, o, p in zip(("logits", "gradients"), actual, oracle, pytorch, strict=True):
        assert_within_budget(a, o, p, name=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_is_its_mask(name: str) -> None:
    check(name, [MASK, MASK], MASK.plan(16, 32))


def test_stacked_plans_are_the_masks_of_their_samples() -> None:
    check("gqa", [MASK, STRIPED], TilePlan.stack([MASK.plan(32, 32), STRIPED.plan(32, 32)]))


def test_half_precision() -> None:
    model = build(CONFIGS["gqa"], torch.bfloat16)
    exact = build(CONFIGS["gqa"], torch.bfloat16).double()
    tokens, dense = random_tokens(2, 57), MASK.dense()
    actual, pytorch = model(tokens, mask=MASK.plan()), model(tokens, mask=dense)
    assert_within_budget(actual, exact(tokens, mask=dense), pytorch, name="logits")


def test_forwards_under_plans_compile_to_one_graph() -> None:
    """Lengths, positions, plans and rows may all change without another graph, up to `max_positions`."""
    model = build(replace(CONFIGS["gqa"], max_positions=256), torch.float32)
    model(random_tokens(1, 1))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for number, (samples, rows) in enumerate([(2, 7), (3, 5), (5, 9)]):
        mask = pd.masks.pack([pd.masks.noise_aware_causal(6, 5, 2 + i) for i in range(samples)])
        arguments = {"positions": mask.positions, "mask": mask.plan(16, 16), "rows": torch.arange(rows) * 2}
        tokens = random_tokens(2, mask.q_len)
        # Sizes that happen to be equal in the first plan must not be specialised as equal.
        distinct_sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
        with distinct_sizes, torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            actual = compiled(tokens, **arguments)
        torch.testing.assert_close(actual, model(tokens, **arguments), rtol=1e-5, atol=1e-5)


def test_errors() -> None:
    model = build(replace(CONFIG, head_dim=16), torch.float32)
    tokens = random_tokens(2, 57)
    plan = MASK.plan(32, 32)
    wrong = [
        (tokens[:, :56], plan, "mask must be a plan of 56 x 56 tokens, got 57 x 57."),
        (tokens, MASK[:, :40].plan(32, 32), "mask must be a plan of 57 x 57 tokens, got 57 x 40."),
        (tokens, TilePlan.stack([plan] * 3), "mask must be one plan, or 2 stacked ones, got 3 stacked ones."),
        (tokens, plan.to("meta"), "mask must be on the model's device (cpu), got meta."),
        (
            tokens,
            MASK,
            "TypeError: mask must be a bool tensor or a TilePlan, got SegmentMask. A segment mask has both: "
            "mask.dense() and mask.plan().",
        ),
    ]
    for some, mask, sentence in wrong:
        error, message = kind_of(sentence)
        with pytest.raises(error) as caught:
            model(some, mask=mask)
        assert str(caught.value) == f"pdkernels.Transformer: {message}"
    for other in (build(CONFIG, torch.float32), build(replace(CONFIG, head_dim=16), torch.float64)):
        with pytest.raises(
            ValueError,
            match=r"Transformer: mask must be a bool tensor for a model in .* with heads of .* Pass mask\.dense\(\)\.",
        ):
            other(tokens, mask=plan)
        assert other(tokens, mask=plan.dense()).shape[:2] == tokens.shape
