"""The folder that `make custom-generate` writes, loaded by transformers as code of the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from pdkernels.integrations.transformers import generate as decode  # noqa: E402
from scripts.custom_generate import write  # noqa: E402
from tests.support.custom_generate import BASE, VERSION, an_end, model_of, prompts, theirs  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Written, with a cache for the code that transformers copies."""
    import transformers.dynamic_module_utils as modules

    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    write(tmp_path / "strategy")
    return str(tmp_path / "strategy")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "autoregressive"},
        {"method": "jacobi", "method_options": {"block_size": 4}},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    ],
    ids=str,
)
def test_it_gives_the_tokens_of_transformers(folder: str, settings: dict[str, Any]) -> None:
    model = model_of("Llama")
    plain = {name: value for name, value in settings.items() if not name.startswith("method")}
    given = {**BASE, "eos_token_id": an_end(), "custom_generate": folder, "trust_remote_code": True}
    said = model.generate(prompts(2), **given, **settings)
    assert torch.equal(said, theirs(prompts(2), eos_token_id=an_end(), **plain))
    told = model.generate(prompts(), return_dict_in_generate=True, **given, **settings)
    assert told.stats.method == settings.get("method", "jacobi")


@pytest.mark.skipif(VERSION < (5, 0), reason="transformers 4 trusts every local folder")
def test_it_is_not_trusted_by_itself(folder: str) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        model_of("Llama").generate(prompts(), custom_generate=folder, trust_remote_code=False, **BASE)


def test_draws_and_stop_strings(folder: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    letters = {chr(48 + number): number for number in range(61)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="0")
    model = model_of("Llama")
    whole = theirs()[0, 9:].tolist()
    stop = "".join(chr(48 + token) for token in whole[3:5])
    given = {**BASE, "custom_generate": folder, "trust_remote_code": True, "tokenizer": tokenizer}
    for where in ({"stop_strings": [stop]}, {"generation_config": transformers.GenerationConfig(stop_strings=[stop])}):
        said = model.generate(prompts(), **given, **where)
        expected = model.generate(prompts(), tokenizer=tokenizer, **BASE, **where)
        assert torch.equal(said, expected) and said.shape[1] == 14
    own = {**BASE, "custom_generate": decode, "stop_strings": [stop], "method_options": {"tokenizer": tokenizer}}
    for method in (None, "autoregressive"):  # without the folder
        assert torch.equal(model.generate(prompts(), method=method, **own), expected)
    del given["tokenizer"]
    with pytest.raises(ValueError, match="stop_strings and grammars need the tokenizer"):
        model.generate(prompts(), stop_strings=[stop], **given)
    drawn = model.generate(prompts(), **given | {"do_sample": True, "num_return_sequences": 3})
    assert drawn.shape[0] == 3 and len({tuple(row) for row in drawn.tolist()}) == 3
