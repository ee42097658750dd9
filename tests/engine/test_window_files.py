"""Files of families with windows through an engine: the tokens of transformers, past what their pages keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pdkernels as pd
from pdkernels import models
from pdkernels.cache import WindowedPool

transformers = pytest.importorskip("transformers", reason="builds models with transformers", minversion="5.20")
from tests.integrations.test_shadow import small  # noqa: E402
from tests.integrations.test_windows import NEW, theirs  # noqa: E402

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 40},
    "Ministral3": {"sliding_window": 40, "head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "Qwen2": {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 16},
    "Gemma3Text": {"sliding_window": 40, **MIXED, "head_dim": 16, "query_pre_attn_scalar": 16},
    "Olmo3": {"sliding_window": 40, **MIXED},
    "Olmo3, as it is published": {
        "sliding_window": 40,
        "num_hidden_layers": 4,
        "rope_scaling": {**YARN, "attention_factor": 1.2},
    },
    "GptOss": {"sliding_window": 40, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_files_of_families_with_windows(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkernels.engine.pages.PAGE", 8)
    for module in ("pdkernels.engine.pages", "pdkernels.cache.windowed_pool"):
        monkeypatch.setattr(f"{module}.PIECE", 64)
    model = small(family.split(",")[0], max_position_embeddings=768, eos_token_id=5, **FAMILIES[family]).requires_grad_(
        False
    )
    model.save_pretrained(tmp_path)
    own = models.load(tmp_path)
    text = [(7 * i) % 50 + 3 for i in range(450)]
    prompts = [text, [7], [*text[:400], 9]]
    with pd.Engine(own, max_running=2, max_prompt_tokens=700, max_new_tokens=NEW) as engine:
        pool = engine._memory.pages.pool
        assert isinstance(pool, WindowedPool) and [*pool.groups] == [40]
        handles = [engine.submit(prompt, max_new_tokens=NEW, end_tokens=()) for prompt in prompts]
        drafted = engine.submit(text, "jacobi", draft="lookup", max_new_tokens=NEW, end_tokens=())
        expected = [theirs(model, prompt) for prompt in prompts]
        assert [handle.result(120).tokens.tolist() for handle in handles] == expected
        assert drafted.result(120).tokens.tolist() == expected[0]
    assert pool.promised == {40: 0}
