"""Settings that `custom_generate` follows, against the generate of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")

from pdkernels.integrations.transformers import generate  # noqa: E402
from pdkernels.integrations.transformers._model import WrappedModel  # noqa: E402
from tests.support.custom_generate import BASE, LATER, NEW, V, an_end, model_of, ours, prompts, theirs  # noqa: E402


@pytest.mark.covering
@pytest.mark.parametrize("penalty", [1.3, 0.8, 3.0])
@pytest.mark.parametrize("method", [None, "autoregressive", "jacobi", "jacobi_multiblock"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_the_repetition_penalty_counts_the_prompt(family: str, method: str | None, penalty: float) -> None:
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, : 4 * LATER] = 0  # earlier versions also make the padding less likely, which is refused
    ids = prompts(3).masked_fill(mask == 0, 0)
    settings: dict[str, Any] = {"repetition_penalty": penalty, "attention_mask": mask}
    expected = theirs(ids, family, **settings)
    assert torch.equal(ours(ids, family, method=method, **settings), expected)
    assert not torch.equal(expected, theirs(ids, family, attention_mask=mask))


@pytest.mark.skipif(LATER, reason="this transformers leaves the padding out")
def test_a_penalty_of_padding_is_refused() -> None:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    with pytest.raises(ValueError, match="repetition_penalty must be 1 for padded prompts"):
        ours(prompts(2), repetition_penalty=1.3, attention_mask=mask)


ENDS: dict[str, Any] = {
    "none": lambda: None,
    "one": an_end,
    "a list": lambda: [an_end(), an_end(2)],
    "outside the vocabulary": lambda: [V + 5, an_end()],
    "negative": lambda: -1,
    "empty": lambda: [],
}


@pytest.mark.covering
@pytest.mark.parametrize("pad", [None, 0, "end", 77])
@pytest.mark.parametrize("ends", ENDS)
def test_ends_and_padding(ends: str, pad: Any) -> None:
    """Left padding, texts that end early, end tokens inside the prompt and as padding: the same tensor."""
    end = ENDS[ends]()
    first = end[0] if isinstance(end, list) and end else end
    if pad == "end":
        pad = first if isinstance(first, int) and 0 <= first < V else 0
    ids = prompts(3)
    ids[2] = prompts(1)[0]  # this one ends early
    ids[1, 3] = an_end()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    settings: dict[str, Any] = {"eos_token_id": end, "pad_token_id": pad, "attention_mask": mask}
    try:
        expected = theirs(ids, **settings)
    except (IndexError, RuntimeError, TypeError, ValueError):
        pytest.skip("transformers refuses it")
    said = ours(ids, **settings)
    assert torch.equal(said, expected) and said.dtype == expected.dtype


def test_padding_without_a_mask() -> None:
    """transformers infers the mask where the pad token is not an end token."""
    ids = prompts(2)
    ids[0, :3] = 0
    for settings in ({}, {"eos_token_id": 0}, {"eos_token_id": 7}):
        assert torch.equal(ours(ids, **settings), theirs(ids, **settings))
    ids[1, -2:] = 0
    with pytest.raises(ValueError, match="attention_mask must hide only padding on the left"):
        ours(ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_result_has_the_dtype_of_transformers(dtype: torch.dtype) -> None:
    ids = prompts(2).to(dtype)
    said, expected = ours(ids), theirs(ids)
    assert said.dtype == expected.dtype and torch.equal(said, expected)


@pytest.mark.parametrize(
    "lengths", [{}, {"max_length": 14}, {"max_new_tokens": 1}, {"max_length": 10, "max_new_tokens": 4}]
)
def test_lengths(lengths: dict[str, Any]) -> None:
    settings = {"do_sample": False, "pad_token_id": 0, **lengths}
    model, ids = model_of("Llama"), prompts(2)
    assert torch.equal(model.generate(ids, custom_generate=generate, **settings), model.generate(ids, **settings))


def test_no_prompt_is_the_first_token() -> None:
    model = model_of("Llama")
    expected = model.generate(bos_token_id=1, **BASE)
    assert torch.equal(model.generate(bos_token_id=1, custom_generate=generate, **BASE), expected)
    with pytest.raises(ValueError, match="input_ids must hold at least one token"):
        ours(torch.zeros(1, 0, dtype=torch.int64))


@pytest.mark.parametrize("mask", [[1] * 5 + [0] * 4, [1, 0] * 4 + [1], [0] * 9, [2] * 9, [0, 2] + [1] * 7])
def test_masks_other_than_left_padding_are_refused(mask: list[int]) -> None:
    with pytest.raises(ValueError, match="attention_mask must hide only padding on the left"):
        ours(attention_mask=torch.tensor([mask]))


def test_several_draws_of_a_prompt() -> None:
    torch.manual_seed(1)
    said = ours(prompts(2), do_sample=True, num_return_sequences=3)
    assert said.shape == (6, 9 + NEW) and torch.equal(said[:, :9], prompts(2).repeat_interleave(3, 0))
    assert len({tuple(row) for row in said.tolist()}) == 6
    seeded = [ours(do_sample=True, method_options={"seed": 5}) for _ in range(2)]
    assert torch.equal(*seeded)


def test_draws_of_a_prompt_share_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a batch in which the prompt is there several times, from one forward over it."""
    options: dict[str, Any] = {"do_sample": True, "method_options": {"seed": 5}, "repetition_penalty": 1.2}
    expected = ours(prompts(2).repeat_interleave(3, 0), **options)
    widths, hidden = list[int](), WrappedModel._hidden

    def noted(self: Any, tokens: torch.Tensor, *given: Any) -> Any:
        widths.append(len(tokens))
        return hidden(self, tokens, *given)

    monkeypatch.setattr(WrappedModel, "_hidden", noted)
    assert torch.equal(ours(prompts(2), num_return_sequences=3, **options), expected)
    assert widths[0] == 2 and widths[1] == 6


LAWS: list[dict[str, Any]] = [
    {"top_k": 0, "temperature": 0.7},
    {"temperature": 2.0},  # with top_k=50, of 61 tokens
    {"temperature": 2.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 3.0, "top_k": 0, "min_p": 0.2, "repetition_penalty": 1.3},
    {"temperature": 3.0, "top_k": 30, "typical_p": 0.6},
    pytest.param(
        {"temperature": 2.0, "top_k": 0, "epsilon_cutoff": 0.02, "suppress_tokens": [5]}, marks=pytest.mark.slow
    ),
    pytest.param({"temperature": 2.0, "top_k": 0, "eta_cutoff": 0.05}, marks=pytest.mark.slow),
]


@pytest.mark.covering
@pytest.mark.parametrize("method", [None, "autoregressive"])
@pytest.mark.parametrize("drawn", LAWS, ids=str)
def test_the_law_of_draws(drawn: dict[str, Any], method: str | None) -> None:
    """The first two tokens' frequencies against the distributions after transformers' own processors."""
    ids, draws = prompts(), 4000
    said = ours(ids, do_sample=True, max_new_tokens=2, num_return_sequences=draws, method=method, **drawn)
    common = said[:, -2].mode().values
    after = torch.cat([ids, common[None, None]], -1)
    for text, tokens in ((ids, said[:, -2]), (after, said[said[:, -2] == common, -1])):
        scores = theirs(
            text, do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True, **drawn
        )
        law = scores.scores[0][0].double().softmax(-1)
        seen = torch.bincount(tokens, minlength=V).double() / len(tokens)
        assert len(tokens) > 100 and (seen[law == 0] == 0).all()
        assert (seen - law).abs().sum() < 3 * (law * (1 - law) / len(tokens)).sqrt().sum()
    assert (law == 0).any() == (drawn.get("top_k") != 0 or len(drawn) > 2)
