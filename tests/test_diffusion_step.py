"""The measurement of a denoising step: its file of weights, its cells on a small model, and what its tables say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")

from bench import diffusion_step, gguf_files
from bench.workers.ours import Ours
from pdkernels import models


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small = {
        "embedding_length": 256,
        "feed_forward_length": 512,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
    }
    monkeypatch.setattr(gguf_files, "LLADA_8B", gguf_files.LLADA_8B | small | {"vocab_size": 300})
    monkeypatch.setattr(gguf_files, "LLADA_MASK", 299)
    return gguf_files.random_llada(3, "Q4_0", tmp_path)


def test_the_file_is_a_llada_with_a_head_of_its_own(file: Path) -> None:
    model = models.load(file)
    assert (model.mask_token, model.config.attention, model.config.predicts) == (299, "bidirectional", "own")
    assert (len(model.layers), model.head.format, model.embedding.format) == (3, "q6_k", "q4_0")
    weights = torch.cat([model.head.dequantize().flatten(), model.layers[0].down.dequantize().flatten()])
    assert 0.01 < float(weights.std()) < 0.03


def test_steps_fill_the_canvas_and_a_forward_sees_the_candidates_alone(file: Path, monkeypatch: Any) -> None:
    with torch.inference_mode():
        ours, rows = Ours({"threads": 1, "file": str(file)}), list[int]()
        statistics = ours.model.statistics
        monkeypatch.setattr(ours.model, "statistics", lambda x, **o: rows.append(x.shape[1]) or statistics(x, **o))
        took, tokens = ours.denoise([1, 2, 3], 8, 4, 299)
        assert took > 0 and len(tokens) == 8 and 299 not in tokens
        assert rows == [8, 6, 4, 2]  # the head runs on masks alone
        rows.clear()
        assert ours.canvas([1, 2, 299, 299], 2) > 0 and rows == [2]


def test_what_all_layers_take() -> None:
    assert diffusion_step.at_all_layers({"2": 10.0, "6": 14.0}) == 40.0
    kept = {"down": {"16": 2.0}}
    diffusion_step.take_minima(kept, {"down": {"16": 3.0, "32": 4.0}, "head": {"16": 1.0}})
    assert kept == {"down": {"16": 2.0, "32": 4.0}, "head": {"16": 1.0}}
