"""Drafters in `custom_generate`: `drafter=`, transformers' `assistant_model` and prompt lookup, against greedy generate and single steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from pdkernels.integrations.transformers import from_transformers, generate, wrap  # noqa: E402
from pdkernels.models import save_drafter  # noqa: E402
from scripts.custom_generate import write  # noqa: E402
from tests.support.custom_generate import (  # noqa: E402
    BASE,
    FIVE,
    LATER,
    REFUSALS,
    SIZES,
    VERSION,
    V,
    an_end,
    model_of,
    ours,
    prompts,
    randomised,
    theirs,
)
from tests.support.drafters import dflash_head, eagle_head, mtp_head  # noqa: E402

DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.02}
TOLD = {"return_dict_in_generate": True}


@cache
def an_assistant(family: str = "Qwen3", vocabulary: int = V) -> Any:
    """A smaller model of another family."""
    sizes = {**SIZES, "num_hidden_layers": 1, "vocab_size": vocabulary}
    config = getattr(transformers, f"{family}Config")(**sizes, bos_token_id=1, eos_token_id=None)
    return randomised(getattr(transformers, f"{family}ForCausalLM")(config))


@cache
def a_drafter(kind: str) -> Any:
    """For the Llama of these tests."""
    target = wrap(model_of("Llama"))
    if kind == "a model of transformers":
        return an_assistant()
    if kind == "a wrapped model":
        return wrap(an_assistant())
    if kind == "our model":
        return from_transformers(an_assistant("Llama"))
    if kind == "mtp":
        return mtp_head(from_transformers(model_of("Llama")))
    made = eagle_head if kind == "eagle" else dflash_head
    return made(target, taps=(0, 1), **({"own_head": False, "draft_vocab_size": V} if kind == "dflash" else {}))


KINDS = ("a model of transformers", "a wrapped model", "our model", "eagle", "dflash", "mtp")


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_without_a_drafter(kind: str) -> None:
    """Of transformers when greedy, of single steps with the same seed when drawn: with padding, penalties, processors and ends."""
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, : 4 * LATER] = 0
    ids = prompts(3).masked_fill(mask == 0, 0)
    filters: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "eos_token_id": an_end()}
    for settings in ({}, filters):
        settings = {"attention_mask": mask, "max_new_tokens": 9, **settings}
        said = ours(ids, drafter=a_drafter(kind), **TOLD, **settings)
        assert torch.equal(said.sequences, theirs(ids, **settings))
        assert said.stats.method == (kind if kind in ("eagle", "dflash", "mtp") else "draft_model")
        drawn = {**settings, **DRAWN, "method_options": {"seed": 4}}
        expected = ours(ids, method="autoregressive", **drawn)
        assert torch.equal(ours(ids, drafter=a_drafter(kind), **drawn), expected)
        in_options = {**drawn, "method_options": {"seed": 4, "drafter": a_drafter(kind)}}
        assert torch.equal(ours(ids, **in_options), expected)


def test_the_assistant_of_transformers() -> None:
    """The same tokens as its own assisted generation, alone and in batches, which transformers does not have."""
    for assistant, settings, method in (
        (an_assistant(), {"repetition_penalty": 1.3}, None),
        (an_assistant("Llama"), {"eos_token_id": an_end()}, "draft_model"),
    ):
        said = ours(assistant_model=assistant, method=method, **TOLD, **settings)
        assert torch.equal(said.sequences, theirs(assistant_model=assistant, **settings))
        assert said.stats.method == "draft_model"
        assert torch.equal(ours(prompts(3), assistant_model=assistant, **settings), theirs(prompts(3), **settings))


def test_an_assistant_saves_forwards() -> None:
    """The model itself guesses right, `num_assistant_tokens` at a time."""
    model = model_of("Llama")
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    for count, forwards in ((None, 4), (2, 5), (5, 3), (19, 2)):  # transformers 4 has 20 where nothing is set
        other.generation_config.num_assistant_tokens = count
        said = ours(assistant_model=other, **TOLD)
        assert torch.equal(said.sequences, theirs()) and said.stats.forwards == forwards, count
    chosen = ours(assistant_model=other, method_options={"block_size": 2}, **TOLD)
    assert chosen.stats.forwards == 7
    other.generation_config.num_assistant_tokens = 0
    with pytest.raises(ValueError, match="num_assistant_tokens must be at least 1, got 0"):
        ours(assistant_model=other)


def test_scores_and_streams_of_drafted_texts() -> None:
    asked = {**TOLD, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    said, expected = ours(drafter=a_drafter("eagle"), **asked), theirs(**asked)
    for name in ("scores", "logits"):
        for mine, other in zip(said[name], expected[name], strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    heard: list[int] = []

    class Listener(transformers.generation.BaseStreamer):  # type: ignore[misc]
        def put(self, value: torch.Tensor) -> None:
            heard.extend(value.reshape(-1).tolist())

        def end(self) -> None: ...

    ours(assistant_model=an_assistant(), streamer=Listener())
    assert heard == theirs()[0].tolist()


def test_folders_of_drafters(tmp_path: Path) -> None:
    """Heads and models by their path, without the name of the method; and through the folder of the Hub."""
    save_drafter(a_drafter("eagle"), tmp_path / "eagle")
    save_drafter(a_drafter("dflash"), tmp_path / "dflash")
    an_assistant("Llama").save_pretrained(tmp_path / "model")
    write(tmp_path / "strategy")
    hub = {"custom_generate": str(tmp_path / "strategy"), "trust_remote_code": True}
    for name, method in (("eagle", "eagle"), ("dflash", "dflash"), ("model", "draft_model")):
        said = ours(drafter=tmp_path / name, **TOLD)
        assert torch.equal(said.sequences, theirs()) and said.stats.method == method
        again = model_of("Llama").generate(prompts(), drafter=str(tmp_path / name), **BASE, **TOLD, **hub)
        assert torch.equal(again.sequences, said.sequences) and again.stats.forwards == said.stats.forwards
    assisted = model_of("Llama").generate(prompts(), assistant_model=an_assistant(), **BASE, **TOLD, **hub)
    assert torch.equal(assisted.sequences, theirs()) and assisted.stats.method == "draft_model"


@pytest.mark.parametrize("kind", ["mimo", "qwen3_5_text"])
def test_layers_that_come_with_a_model(kind: str, tmp_path: Path) -> None:
    """transformers drops them when it loads a model; they draft as for a model of `pdkernels.models.load`."""
    if VERSION < (5, 20 if kind == "qwen3_5_text" else 15):
        pytest.skip("this transformers has no such layers to compare with")
    import pdkernels as pd
    from tests.models.test_mtp_folders import Published

    published = Published(kind, 1, vocab_size=7)  # so few tokens that random drafts are often right
    folder, model = published.save(tmp_path / "model"), published.model.float()
    native = pd.decoding.generate(
        pd.models.load(folder, dtype=torch.float32, drafter=folder),
        [3, 1, 4],
        "mtp",
        block_size=3,
        max_new_tokens=14,
        end_tokens=(),
    )
    options: dict[str, Any] = {"custom_generate": generate, "method_options": {"block_size": 3}, "eos_token_id": None}
    ids = torch.tensor([[3, 1, 4]])
    for named in ({"method": "mtp"}, {}):
        model.name_or_path = str(folder)
        said = model.generate(ids, drafter=folder, **named, **{**BASE, **TOLD, **options, "max_new_tokens": 14})
        assert said.sequences[0, 3:].tolist() == native.tokens.tolist()
        assert said.stats.method == "mtp" and said.stats.accepted == native.stats.accepted
    assert max(native.stats.accepted[0]) > 1


def test_prompt_lookup_is_followed() -> None:
    ids = prompts().repeat(1, 3)
    for count in (1, 3, 10):
        # transformers 4 fails in its own without an end token.
        settings = {"prompt_lookup_num_tokens": count, "max_matching_ngram_size": 2}
        expected = theirs(ids, **(settings if FIVE else {}))
        said = ours(ids, **settings, **TOLD)
        named = ours(ids, method="jacobi", method_options={"draft": "lookup", "block_size": count + 1}, **TOLD)
        assert torch.equal(said.sequences, expected) and said.stats.forwards == named.stats.forwards


def test_what_does_not_fit_is_refused_by_name() -> None:
    head, assistant, lookup = a_drafter("eagle"), an_assistant(), {"prompt_lookup_num_tokens": 3}
    for settings, words in (
        ({"assistant_model": an_assistant("Qwen3", 50)}, "assistant_model must have the model's vocabulary of 61"),
        ({"assistant_model": assistant, "method": "eagle"}, "assistant_model must be None for method 'eagle'"),
        ({"assistant_model": assistant, "drafter": head}, "drafter must be None beside an assistant_model"),
        ({"assistant_model": assistant, "method_options": {"drafter": head}}, "drafter must be None beside"),
        ({"drafter": head, "method_options": {"drafter": head}}, "method_options must not hold a drafter beside"),
        ({"drafter": head, "method": "jacobi"}, "drafter must be None for method 'jacobi'"),
        ({"drafter": assistant, "method": "eagle"}, "drafter must be a head for method 'eagle', got Qwen3ForCausalLM"),
        ({"drafter": head, "method": "dflash"}, "drafter must be a DFlashHead"),
        ({"drafter": 3}, "drafter must be a causal model, got a int"),
        ({"drafter": "no/such/folder"}, "no/such/folder"),
        ({"method": "draft_model"}, "'draft_model', which requires drafter"),
        ({**lookup, "method": "autoregressive"}, "prompt_lookup_num_tokens must be None for method 'autoregressive'"),
        ({**lookup, "drafter": head}, "prompt_lookup_num_tokens must be None beside a drafter"),
        ({**lookup, "method_options": {"window": 3}}, "prompt_lookup_num_tokens must be None beside window"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens must be at least 1, got 0"),
        (
            {"assistant_model": assistant, "assistant_ensemble_weight": 0.5},
            "assistant_ensemble_weight" + " must be off" * FIVE,
        ),
        ({"assistant_model": assistant, "is_assistant": True}, "is_assistant must be off"),
    ):
        with pytest.raises((*REFUSALS, TypeError), match=words):
            ours(**settings)
