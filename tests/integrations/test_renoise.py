"""DiffusionGemma of transformers: its tokens with our attention, and with our sampler; the sampler in law with its own draws."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="5.13")
from pdkernels.integrations.transformers import register, renoise  # noqa: E402
from pdkernels.integrations.transformers._renoise import within_budget  # noqa: E402
from pdkernels.reference.renoise import accepted_positions  # noqa: E402
from pdkernels.reference.renoise import renoise as plainly  # noqa: E402

V, CANVAS, PROMPT, STEPS = 40, 8, 13, 6
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 8,  # shorter than the prompt
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
END, PAD = 5, 0
SETTINGS: dict[str, Any] = {
    "max_denoising_steps": STEPS,
    "entropy_bound": 2.0,
    "t_min": 0.04,
    "t_max": 0.2,
    "stability_threshold": 1,
    "confidence_threshold": 0.6,
}


@cache
def model_of(global_head_dim: int = 32) -> Any:
    torch.manual_seed(0)
    config = transformers.DiffusionGemmaConfig(
        text_config={**SIZES, "global_head_dim": global_head_dim},
        vision_config=VISION,
        canvas_length=CANVAS,
        image_token_id=V - 1,
        boi_token_id=V - 2,
        eoi_token_id=V - 3,
    )
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.08)  # larger ones make chaos: transformers' own eager and sdpa then differ
    register()
    return model


def prompts(rows: int = 2) -> torch.Tensor:
    return torch.randint(6, V - 3, (rows, PROMPT), generator=torch.Generator().manual_seed(1))


def padding() -> torch.Tensor:
    mask = torch.ones(2, PROMPT, dtype=torch.int64)
    mask[0, :4] = 0
    return mask


def theirs(model: Any, seed: int, new: int = 20, **options: Any) -> Any:
    """As transformers writes it, with the implementation of attention that is set."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    settings = dict(SETTINGS)
    settings["sampler_config"] = EntropyBoundSamplerConfig(entropy_bound=settings.pop("entropy_bound"))
    torch.manual_seed(seed)
    options = {"eos_token_id": END, "pad_token_id": PAD, **options}
    return model.generate(prompts(), max_new_tokens=new, **settings, **options)


class TheirDraws:
    """The global generator, asked as transformers asks it."""

    def noise(self, rows: int, length: int) -> torch.Tensor:
        return torch.randint(0, V, (rows, length))

    def tokens(self, probabilities: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(probabilities.view(-1, V), 1).view(probabilities.shape[:2])


@torch.no_grad()
@pytest.mark.parametrize("global_head_dim", [32, 264])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_of_canvases(global_head_dim: int, padded: bool) -> None:
    """The encoder's windows and the canvas' full tail over them; heads wider than the kernels' in the full layers."""
    model = model_of(global_head_dim)
    canvas = torch.randint(0, V, (2, CANVAS), generator=torch.Generator().manual_seed(2))
    mask = {"attention_mask": padding(), "decoder_attention_mask": torch.cat([padding(), torch.ones(2, CANVAS)], 1)}
    said = []
    for implementation in ("sdpa", "pdkernels"):
        model.set_attn_implementation(implementation)
        said.append(model(input_ids=prompts(), decoder_input_ids=canvas, **(mask if padded else {})).logits)
    torch.testing.assert_close(said[1], said[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 20))])
def test_tokens_of_their_sampler(seed: int) -> None:
    """With our attention, and with our sampler under their random numbers: end tokens, padding and stops included."""
    model = model_of()
    options: dict[str, Any] = {"attention_mask": padding()} if seed % 3 == 2 else {}
    ends = {} if seed % 2 else {"eos_token_id": None}
    model.set_attn_implementation("sdpa")
    expected = theirs(model, seed, **options, **ends)
    model.set_attn_implementation("pdkernels")
    assert torch.equal(theirs(model, seed, **options, **ends).sequences, expected.sequences)
    torch.manual_seed(seed)
    before = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends.get("eos_token_id", END), PAD
    try:
        ours = renoise(model, prompts(), max_new_tokens=20, draws=TheirDraws(), **options, **SETTINGS)
    finally:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = before
    assert torch.equal(ours.sequences, expected.sequences)
    torch.testing.assert_close(ours.tokens_per_forward, expected.tokens_per_forward)


class Shared:
    """One source of draws for the reference and for us."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def noise(self, rows: int, length: int) -> torch.Tensor:
        return torch.randint(0, V, (rows, length), generator=self.generator)

    def tokens(self, probabilities: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(probabilities.view(-1, V), 1, generator=self.generator).view(probabilities.shape[:2])


class Plain:
    """The same source as the reference asks it."""

    def __init__(self, seed: int) -> None:
        self.shared = Shared(seed)

    def noise(self, length: int) -> list[int]:
        return self.shared.noise(1, length)[0].tolist()

    def tokens(self, probabilities: torch.Tensor) -> list[int]:
        return self.shared.tokens(probabilities[None])[0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("stability", [0, 1, 2])
def test_tokens_of_the_reference(stability: int) -> None:
    """The plain loop without a cache, whose forward encodes the whole prefix again."""
    model = model_of()
    model.set_attn_implementation("sdpa")

    def forward(prefix: Any, canvas: Any, before: torch.Tensor | None) -> torch.Tensor:
        told = None if before is None else before[None]
        inputs = {"input_ids": torch.tensor([prefix]), "decoder_input_ids": torch.tensor([canvas])}
        logits: torch.Tensor = model(self_conditioning_logits=told, **inputs).logits[0]
        return logits

    names = {"entropy_bound": "entropy_budget", "max_denoising_steps": "steps", "confidence_threshold": "confidence"}
    settings = {**SETTINGS, "stability_threshold": stability}
    options = {names.get(name, name): value for name, value in settings.items() if name != "stability_threshold"}
    prompt = prompts(1)
    expected = plainly(
        forward, prompt[0].tolist(), 16, canvas_length=CANVAS, draws=Plain(3), stability=stability, **options
    )
    ours = renoise(model, prompt, max_new_tokens=16, draws=Shared(3), **settings)
    assert ours.sequences[0, PROMPT:].tolist() == expected.tokens
    assert ours.forwards.tolist() == [expected.forwards]


def test_canvases_end_early() -> None:
    """Each at a step of its own, or not at all."""
    result = renoise(
        model_of(),
        prompts(1).expand(16, -1),
        max_new_tokens=CANVAS,
        seed=1,
        **{**SETTINGS, "t_min": 0.01, "t_max": 0.05},
    )
    assert result.forwards.max() == STEPS and len(result.forwards.unique()) > 2


def test_our_draws_do_not_depend_on_the_batch() -> None:
    model, both = model_of(), prompts()
    together = renoise(model, both, max_new_tokens=16, seed=[4, 9], **SETTINGS)
    for i, seed in enumerate((4, 9)):
        alone = renoise(model, both[i : i + 1], max_new_tokens=16, seed=seed, **SETTINGS)
        assert torch.equal(alone.sequences[0], together.sequences[i])
        assert alone.forwards[0] == together.forwards[i]
    other = renoise(model, both, max_new_tokens=16, seed=5, **SETTINGS)
    assert not torch.equal(other.sequences, together.sequences)


def test_our_draws_have_the_law_of_theirs() -> None:
    """Tokens of the answers and forwards over many seeds: two samples of one law."""
    model, rows = model_of(), 200
    model.set_attn_implementation("pdkernels")
    prompt = prompts(1).expand(rows, -1)
    counts, forwards = [], []
    for draws in (None, Shared(0)):
        result = renoise(
            model, prompt, max_new_tokens=CANVAS, seed=7, draws=draws, **{**SETTINGS, "max_denoising_steps": 3}
        )
        counts.append(torch.nn.functional.one_hot(result.sequences[:, PROMPT:], V).double().mean(0))
        forwards.append(result.forwards.double())
    # 320 shares: the largest of as many deviations of a fair sample stays below 4.5 standard errors.
    share = (counts[0] + counts[1]) / 2
    error = (share * (1 - share) * 2 / rows).clamp(min=1 / rows**2).sqrt()
    assert ((counts[0] - counts[1]).abs() / error).max() < 4.5
    spread = (forwards[0].var() + forwards[1].var()).clamp(min=1e-3) / rows
    assert (forwards[0].mean() - forwards[1].mean()).abs() < 4 * spread.sqrt()


def test_budgets() -> None:
    entropy = torch.rand(50, 9, generator=torch.Generator().manual_seed(0))
    for budget in (0.05, 0.5, 2.0, 100.0):
        chosen = within_budget(entropy, budget)
        assert chosen.tolist() == [accepted_positions(row.tolist(), budget) for row in entropy]
    assert within_budget(entropy, 1e-9).sum(1).tolist() == [1] * 50


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"t_min": 0.5, "t_max": 0.5}, "t_max must be above t_min"),
        ({"entropy_bound": 0.0}, "entropy_bound must be above 0"),
        ({"max_denoising_steps": 0}, "max_denoising_steps"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask must have the shape"),
        ({"seed": [1]}, "seed"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        renoise(model_of(), prompts(), **options)


def test_other_models_are_refused() -> None:
    with pytest.raises(TypeError, match="DiffusionGemmaForBlockDiffusion"):
        renoise(torch.nn.Linear(2, 2), prompts())
