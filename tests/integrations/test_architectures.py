"""Every language model of transformers through `wrap`: the tokens of its own `generate`, or a refusal that says why."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the sweep is of transformers 5", minversion="5.20")
from scripts import architectures  # noqa: E402

RECORDED: dict[str, Any] = json.loads(architectures.RESULTS.read_text())
FOUND: dict[str, dict[str, str]] = RECORDED["types"]
# Decoded with wrong tokens from the second one on, before a model was tried first.
REFUSED = {
    "bart": "from cached keys and values as from the whole text",
    "bloom": "ValueError",
    "diffllama": "once each, got DiffLlamaForCausalLM with 8 calls",
    "gemma2": "a soft cap",
    "gemma4_text": "the same key and value heads in every layer",
    "jamba": "2 that do not, and keep the state of Mamba 1, which has a decay for every channel",
    "kimi_linear": "2 that do not, and keep the state of Kimi delta attention, which has a decay for every channel",
    "minimax_m3_vl_text": "a choice of key blocks",
    "mpt": "computes its own",
    "roberta": "with our attention as with its own",
    "rwkv": "computes its own",
    "zamba2": "once each, got Zamba2ForCausalLM with 2 calls",
    "udop": "be a decoder alone",
}
WORK = ["cohere", "deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "llava", "mistral", "qwen2_moe", "qwen3_5"]


def same(model_type: str) -> None:
    """What is found now is what the table says of its version."""
    if model_type not in architectures.named():
        pytest.skip("not a type of this transformers")
    found: Any = architectures.row(model_type)
    if transformers.__version__ == RECORDED["transformers"]:
        assert found["result"] == FOUND[model_type]["result"], found
    assert found["result"] in ("works", "refused", "not built")


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type: str) -> None:
    found = architectures.row(model_type)
    assert found["result"] == "refused"
    assert re.fullmatch(r"pdkernels\.wrap: model must .+, got .+\.", found["reason"])
    assert REFUSED[model_type] in found["reason"]
    assert FOUND[model_type] == found


@pytest.mark.parametrize("model_type", WORK)
def test_works(model_type: str) -> None:
    assert (
        architectures.row(model_type)
        == {"class": architectures.named()[model_type], "result": "works", "reason": ""}
        == FOUND[model_type]
    )


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(FOUND) - set(REFUSED) - set(WORK)))
def test_all(model_type: str) -> None:
    same(model_type)


def test_the_table_is_whole() -> None:
    """Every type of this version has a row, none failed, and the page shows what was found."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if transformers.__version__ == RECORDED["transformers"]:
        assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(FOUND) == set(architectures.named())
    assert {item["result"] for item in FOUND.values()} == {"works", "refused", "not built"}
    page = architectures.PAGE.read_text()
    shown = page[page.index(architectures.BEGIN) + len(architectures.BEGIN) : page.index(architectures.END)]
    assert shown.strip() == architectures.table(RECORDED).strip()
