"""A small model as drafter: what it drafts, what its cache holds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdkernels.decoding import generate
from pdkernels.generation.noise import OWN
from pdkernels.generation.sampler import Sampler
from pdkernels.models import ByteTokenizer
from tests.support.causal import SCRIPTS, FakeModel
from tests.support.drafters import small_drafter
from tests.support.tri_mode import small_transformer

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]


def draws(model: Any, text: list[int], temperature: float, seed: int) -> int:
    """The token after a text, by a forward over all of it."""
    logits = model(torch.tensor([text]))[:, -1:]
    sampler, place = Sampler(temperature), torch.tensor([[len(text)]])
    return int(sampler.sample(logits, place, torch.tensor([seed]), OWN, (12,)))


def expected(model: Any, drafter: Any, prompt: list[int], limit: int, size: int, temperature: float, seed: int) -> Any:
    """Tokens and accepted counts as in the papers' algorithm, without a cache."""
    text, accepted = [*prompt, draws(model, prompt, temperature, seed)], []
    while (left := limit - (len(text) - len(prompt))) > 0:
        draft = list(text)
        for _ in range(min(size, left) - 1):
            draft.append(draws(drafter, draft, temperature, seed))
        known = len(text)
        while True:
            token = draws(model, text, temperature, seed)
            text.append(token)
            if len(text) > len(draft) or draft[len(text) - 1] != token:
                break
        accepted.append(len(text) - known)
    return text[len(prompt) :], accepted


@pytest.mark.covering
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_drafts_are_those_of_the_small_model(temperature: float, size: int) -> None:
    several = 0
    for seed in (0,):
        model = small_transformer(seed, head_dim=16)
        drafters = [small_drafter(model, seed), small_transformer(seed, head_dim=16), small_transformer(seed + 9)]
        for drafter in drafters:
            for prompt in PROMPTS:
                with torch.inference_mode():
                    tokens, accepted = expected(model, drafter, prompt, 12, size, temperature, seed)
                options = {"block_size": size, "temperature": temperature, "seed": seed, "end_tokens": ()}
                found = generate(model, prompt, "draft_model", max_new_tokens=12, drafter=drafter, **options)
                assert found.tokens.tolist() == tokens and found.stats.accepted[0] == accepted
                several += sum(count > 1 for count in accepted)
    assert (several > 5) == (size > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_drafts_for_itself_is_always_right(dtype: torch.dtype) -> None:
    """Also when it samples: both draw with the noise of the position."""
    model = small_transformer(1, head_dim=16).to(dtype)
    for drawn in ({}, {"temperature": 1.0, "seed": 4, "top_k": 7}):
        for page_size in (None, 3):
            options = {"block_size": 5, "drafter": model, "page_size": page_size, "end_tokens": (), **drawn}
            found = generate(model, PROMPTS, "draft_model", max_new_tokens=21, **options)
            plain = generate(model, PROMPTS, max_new_tokens=21, end_tokens=(), **drawn)
            assert all(map(torch.equal, found.tokens, plain.tokens))
            assert found.stats.accepted == [[5, 5, 5, 5]] * 3 and found.stats.forwards == 5


def test_scripts_draft_for_each_other() -> None:
    """Models that are no modules, with caches of their own."""
    for target in SCRIPTS:
        plain = generate(FakeModel(SCRIPTS[target]), PROMPTS[0], max_new_tokens=16, end_tokens=()).tokens
        for drafter in SCRIPTS:
            given = {"drafter": FakeModel(SCRIPTS[drafter]), "end_tokens": ()}
            found = generate(FakeModel(SCRIPTS[target]), PROMPTS[0], "draft_model", max_new_tokens=16, **given)
            assert torch.equal(found.tokens, plain)
            assert drafter != target or found.stats.accepted[0] == [5, 5, 5]


@pytest.mark.parametrize(
    ("drafter", "kind", "words"),
    [
        ("none", TypeError, "got 'draft_model', which requires drafter"),
        ("no model", TypeError, "drafter must be a causal model, got a int without the member `config`"),
        ("vocabulary", ValueError, "drafter must have the model's vocabulary of 13 tokens, got 40"),
    ],
)
def test_what_is_refused(drafter: str, kind: type[Exception], words: str) -> None:
    model = small_transformer(0)
    given: dict[str, Any] = {"none": None, "no model": 3, "vocabulary": small_transformer(0, 40)}
    with pytest.raises(kind, match=words):
        generate(model, [1], "draft_model", max_new_tokens=4, drafter=given[drafter])
    with pytest.raises(ValueError, match="the model has no drafter for this method. Pass drafter, or put one"):
        model.drafters = {"eagle": model}
        generate(model, [1], "draft_model", max_new_tokens=4)


class Shifted(ByteTokenizer):
    """Bytes in another order."""

    def encode(self, text: str) -> list[int]:
        return [(token + 1) % 256 for token in super().encode(text)]

    def decode(self, ids: Any) -> str:
        return super().decode([(token - 1) % 256 for token in ids])


def test_as_many_tokens_of_another_tokenizer_are_refused() -> None:
    """Its guesses would be other words: never wrong in the text, and never right."""
    model, drafter = small_transformer(0, 256), small_transformer(1, 256)
    model.tokenizer, drafter.tokenizer = ByteTokenizer(), Shifted()
    words = "decoding.draft_model: drafter must have the model's tokenizer, got another one, whose ids mean other words"
    with pytest.raises(ValueError, match=words):
        generate(model, [1], "draft_model", max_new_tokens=4, drafter=drafter)
    for tokenizer in (ByteTokenizer(), Words(), None):  # the same one, and such as cannot be compared
        drafter.tokenizer = tokenizer
        generate(model, [1], "draft_model", max_new_tokens=4, drafter=drafter)


class Words:
    """A tokenizer of 13 words."""

    end_tokens = ()

    def __init__(self, *changed: bytes) -> None:
        self.words = [*changed, *(bytes([97 + i]) for i in range(13))][:13]

    def token_bytes(self) -> list[bytes]:
        return self.words

    def decode(self, tokens: Any) -> str:
        return ""


@pytest.mark.parametrize(("size", "drafted"), [(13, 21), (21, 13), (21, 16)])
def test_vocabularies_may_be_padded_differently(size: int, drafted: int) -> None:
    """Checkpoints round their vocabularies up to a multiple of some number, each to its own."""
    model, drafter = small_transformer(0, size), small_transformer(0, drafted)
    common = min(size, drafted)
    with torch.no_grad():  # the same model, but for the padding
        for name, values in model.state_dict().items():
            mine = drafter.state_dict()[name]
            mine[:common].copy_(values[:common]) if values.shape != mine.shape else mine.copy_(values)
    with pytest.raises(ValueError, match=f"must have the model's vocabulary of {size} tokens, got {drafted}"):
        generate(model, PROMPTS, "draft_model", max_new_tokens=12, drafter=drafter)
    model.tokenizer, drafter.tokenizer = Words(), Words(b"another")
    with pytest.raises(ValueError, match=f"must have the model's vocabulary of {size} tokens, got {drafted}"):
        generate(model, PROMPTS, "draft_model", max_new_tokens=12, drafter=drafter)
    drafter.tokenizer = Words()
    for options in ({}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_k": 5, "seed": 4}):
        options |= {"end_tokens": (), "max_new_tokens": 24}
        plain = generate(model, PROMPTS, "autoregressive", **options)
        found = generate(model, PROMPTS, "draft_model", drafter=drafter, **options)
        assert [row.tolist() for row in found.tokens] == [row.tolist() for row in plain.tokens]
        assert found.stats.forwards < plain.stats.forwards
    if size > drafted:  # it draws padding too, which the drafter cannot read
        assert any(token >= drafted for row in plain.tokens for token in row.tolist())
