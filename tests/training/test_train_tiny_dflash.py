"""The script that trains a DFlash head, on a model too small to learn anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file

import pdkernels as pd
from pdkernels.models import ByteTokenizer, DFlashHead, Transformer, TransformerConfig
from pdkernels.models.checkpoints.zoo import save_tiny
from tests.training.test_training_runs import EXAMPLES, SIZES, interrupt


@pytest.fixture(autouse=True)
def examples_on_path() -> Iterator[None]:
    sys.path.insert(0, EXAMPLES)
    yield
    sys.path.remove(EXAMPLES)


def test_a_resumed_training_is_one_that_was_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_tiny_dflash as script

    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=257, layers=4, kv_heads=1, **SIZES)
    model = Transformer(config, tokenizer=ByteTokenizer(), end_tokens=ByteTokenizer.end_tokens)
    save_tiny(model, tmp_path / "start.safetensors")
    options: dict[str, Any] = {"start": str(tmp_path / "start.safetensors"), "steps": 4, "sums": 5, "count": 2}
    options |= {"held_out": 2, "longest": 12, "anchors": 6, "block_size": 4, "look_every": 3}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    script.main(output=whole, **options)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("2 of 2 answers are those of greedy decoding") == 3 and "head 3: loss" in printed

    with monkeypatch.context() as patched:
        interrupt(patched, 2)
        with pytest.raises(typer.Exit) as stopped:
            script.main(output=parts, **options, score=False)
    assert stopped.value.exit_code == 130 and not parts.exists()
    torch.manual_seed(99)
    script.main(output=parts, **options, resume=True, score=False)
    assert not list(tmp_path.glob("*resume*"))
    resumed, expected = (load_file(folder / "model.safetensors") for folder in (parts, whole))
    assert resumed.keys() == expected.keys() and all(resumed[key].equal(expected[key]) for key in expected)

    start: Any = pd.models.load(options["start"])
    head = pd.models.load_drafter(parts, start)
    assert isinstance(head, DFlashHead) and head.config.block_size == 4 and head.head is None
