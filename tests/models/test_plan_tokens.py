"""Control tokens of planned texts: their checks, in a tiny model's file, and in a folder of the released format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from pdkernels import models
from pdkernels.models import PlanTokens, Transformer, TransformerConfig, to_hf_state_dict
from pdkernels.models.checkpoints.plan_folder import NAMES
from pdkernels.models.plan_tokens import PUBLISHED

CONFIG = TransformerConfig(
    vocab_size=40, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=24, qkv_bias=True
)
TOKENS = PlanTokens(31, 32, 33, 34, 35, 36, digits=range(20, 30), unit=2)
DREAM: dict[str, Any] = {
    "model_type": "Dream",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "tie_word_embeddings": True,
    "mask_token_id": 30,
    "eos_token_id": 29,
}
ADDED = dict(zip(NAMES, range(31, 37)), **{"<|mask|>": 30, "<|im_end|>": 28})


def test_control_tokens() -> None:
    assert TOKENS.control == (31, 32, 33, 34, 35, 36) and TOKENS.digits == tuple(range(20, 30))
    assert PUBLISHED.control == (151667, 151668, 151669, 151670, 151671, 151672) and PUBLISHED.predicts == "next"
    assert replace(TOKENS, digits=list(range(20, 30))) == TOKENS


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"sync": -1}, ValueError, "sync must be at least 0, got -1"),
        ({"sync": True}, TypeError, "sync must be an int, got bool"),
        ({"sync": 31}, ValueError, "ids must differ from each other"),
        ({"digits": range(9)}, ValueError, "digits must be ten ids, got 9"),
        ({"digits": "0123456789"}, TypeError, "digits must be an int, got str"),
        ({"digits": 3}, TypeError, "digits must be ten ids, got int"),
        ({"unit": 0}, ValueError, "unit must be at least 1, got 0"),
        ({"predicts": "both"}, ValueError, "predicts must be one of 'own', 'next', got 'both'"),
    ],
)
def test_bad_control_tokens(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        replace(TOKENS, **change)


@pytest.mark.parametrize(
    ("tokens", "mask", "error", "words"),
    [
        (replace(TOKENS, pad=40), None, ValueError, r"plan_tokens must be ids below vocab_size \(40\), got 40"),
        (TOKENS, 36, ValueError, "plan_tokens must differ from the mask token, got 36"),
        ((31, 32), None, TypeError, "plan_tokens must be PlanTokens or None, got tuple"),
    ],
)
def test_control_tokens_that_do_not_fit_a_model(tokens: Any, mask: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Transformer(CONFIG, plan_tokens=tokens, mask_token=mask)


@pytest.mark.parametrize("tokens", [None, TOKENS, replace(TOKENS, predicts="next", digits=(1, 3, *range(8, 16)))])
def test_tiny_files_keep_them(tokens: PlanTokens | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdkernels.models.checkpoints import zoo

    bytes_and_more = replace(CONFIG, vocab_size=257)
    zoo.save_tiny(Transformer(bytes_and_more, mask_token=30, plan_tokens=tokens), tmp_path / "tiny-test.safetensors")
    monkeypatch.setattr(zoo, "WEIGHTS", tmp_path)
    assert zoo.load("tiny-test").plan_tokens == tokens


def folder(path: Path, added: dict[str, Any] | None, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**DREAM, **changes}))
    save_file(to_hf_state_dict(Transformer(CONFIG).state_dict(), CONFIG), path / "model.safetensors")
    if added is not None:
        (path / "added_tokens.json").write_text(json.dumps(added))
    return path


def test_a_folder_of_the_released_format(tmp_path: Path) -> None:
    model = models.load(folder(tmp_path, ADDED))
    assert model.plan_tokens == PlanTokens(*range(31, 37), digits=PUBLISHED.digits, predicts="next")
    assert model.mask_token == 30 and model.end_tokens == (29, 28)


def test_a_folder_whose_tokenizer_names_them(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"?": 0} | {str(digit): 1 + digit for digit in range(10)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    made.add_special_tokens(list(NAMES))
    made.save(str(folder(tmp_path, None) / "tokenizer.json"))
    ids = [made.token_to_id(name) for name in NAMES]
    loaded = models.load(tmp_path)
    assert loaded.plan_tokens == PlanTokens(*ids, digits=range(1, 11), predicts="next")
    assert loaded.end_tokens == (29,)


@pytest.mark.parametrize(
    ("added", "changes"), [(None, {}), ({**ADDED, "[PAD]": None}, {}), (ADDED, {"model_type": "qwen2"})]
)
def test_other_folders_have_none(added: dict[str, Any] | None, changes: dict[str, Any], tmp_path: Path) -> None:
    model = models.load(folder(tmp_path, added, **changes))
    assert model.plan_tokens is None and model.end_tokens == (29,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"<sync/>": 40}, r"added_tokens\.json: <sync/> must be an id below vocab_size \(40\), got 40\."),
        ({"<sync/>": "35"}, r"added_tokens\.json: <sync/> must be an id below vocab_size \(40\), got '35'\."),
        ({"<sync/>": 31}, r"added_tokens\.json: .*ids must differ from each other"),
        ({"<sync/>": 30}, r"plan_tokens must differ from the mask token, got 30"),
    ],
)
def test_broken_names_in_a_folder(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        models.load(folder(tmp_path, {**ADDED, **change}))
