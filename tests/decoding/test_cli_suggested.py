"""What a generation_config.json suggests on the command line, against transformers' reading of the same file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdkernels import cli, models
from pdkernels.cli._suggested import advice, suggested

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

# Published files, but for their token ids.
FILES: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3": (
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        "--temperature 0.6 --top-k 20 --top-p 0.95",
    ),
    "Llama 3": ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, "--temperature 0.6 --top-k 50 --top-p 0.9"),
    "Gemma 3": ({"do_sample": True, "top_k": 64, "top_p": 0.95}, "--temperature 1 --top-k 64 --top-p 0.95"),
    "SmolLM2": ({"bos_token_id": 1}, ""),
    "greedy": ({"do_sample": False, "temperature": 0.6}, ""),
    "others": (
        {"do_sample": True, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.05},
        "--temperature 1 --min-p 0.1",
    ),
}
PROCESSORS = {
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top-k", "top_k"),
    "TopPLogitsWarper": ("top-p", "top_p"),
    "MinPLogitsWarper": ("min-p", "min_p"),
}


def folder(path: Path, fields: dict[str, Any]) -> str:
    (path / "generation_config.json").write_text(json.dumps(fields))
    return str(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_suggests_what_transformers_does_with_it(name: str, tmp_path: Path) -> None:
    fields, options = FILES[name]
    assert suggested(folder(tmp_path, fields)) == options
    sizes = {"vocab_size": 60, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    config, _ = model._prepare_generation_config(None)
    made = model._get_logits_processor(config, input_ids_seq_length=1)
    theirs = {}
    for processor in made:
        if "Penalty" in type(processor).__name__:  # which is followed without being chosen
            continue
        option, attribute = PROCESSORS[type(processor).__name__]
        theirs[option] = f"{float(getattr(processor, attribute)):g}"
    ours = dict(re.findall(r"--(\S+) (\S+)", options))
    if ours.get("temperature") == "1":  # which needs no processor
        del ours["temperature"]
    assert ours == theirs


def test_nothing_is_suggested_to_who_has_chosen(tmp_path: Path) -> None:
    named = folder(tmp_path, FILES["Qwen3"][0])
    assert "suggest --temperature 0.6 --top-k 20 --top-p 0.95;" in advice(named, None)
    assert advice(named, 0.0) == advice("tiny-code", None) == advice(str(tmp_path / "none"), None) == ""


@pytest.mark.parametrize(("field", "value"), [("temperature", "hot"), ("top_k", 2.5), ("do_sample", 1), ("top_p", -1)])
def test_a_broken_file_is_named(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"generation_config.json: {field} must be"):
        suggested(folder(tmp_path, {"do_sample": True, field: value}))


def test_generate_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, load = folder(tmp_path, FILES["Qwen3"][0]), models.load
    monkeypatch.setattr(models, "load", lambda name, **_: load("tiny-code"))
    arguments = ["generate", "--prompt", "x", "--model", named, "--max-new-tokens", "4"]
    shown = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120"})
    assert shown.exit_code == 0 and "suggest --temperature 0.6 --top-k 20 --top-p 0.95;" in shown.stdout
    chosen = CliRunner().invoke(cli.app, [*arguments, *"--temperature 0.6 --top-k 20 --top-p 0.95".split()])
    assert chosen.exit_code == 0 and "suggest" not in chosen.stdout
