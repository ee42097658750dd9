"""The script that trains a sampler, on a few sums."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import pdkernels as pd

EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture(scope="module", autouse=True)
def examples_on_path() -> Iterator[None]:
    sys.path.insert(0, EXAMPLES)
    yield
    sys.path.remove(EXAMPLES)


def test_the_script_writes_samplers_that_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import train_tiny_sampler as script

    script.main(tmp_path / "sampler", block_size=6, problems=5, epochs=1)
    output = " ".join(capsys.readouterr().out.split())
    assert "confidence: AUC 0." in output and "attention, " in output and "pointwise, " in output
    head = pd.models.load_sampler(tmp_path / "sampler")
    assert (
        head.config.kind == "attention"
        and pd.models.load_sampler(tmp_path / "sampler/pointwise").config.kind == "pointwise"
    )
    model = pd.models.load("tiny-trimode")
    prompt = "12 + 34 = ?\n"
    result = pd.decoding.generate(model, prompt, "block_diffusion", block_size=6, sampler=head, max_new_tokens=20)
    assert len(result.tokens) == 20


def test_a_model_without_masks_is_refused() -> None:
    import train_tiny_sampler as script

    with pytest.raises(typer.Exit):
        script.main(start="tiny-code")
