"""Files that are taken for others are refused by what they are, with what helps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from pdkernels import models

pytest.importorskip("gguf")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
OTHERS = {
    "pointer": (POINTER, "a pointer of Git LFS. `git lfs pull` in its folder fetches the file."),
    "page": (b"<!DOCTYPE html>\n<html>not found</html>", "a web page. Download the file itself."),
    "gguf": (b"GGUF\3\0\0\0" + bytes(40), "a GGUF file. Give it a name that ends in .gguf."),
    "torch": (b"PK\3\4" + bytes(40), "a file of torch.save or a zip archive, which can run code. Load it with"),
    "safetensors": (
        save({"x": torch.zeros(4)}),
        "a safetensors file. Name the folder that holds it and its config.json.",
    ),
}
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
CONFIG = json.dumps(SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 64})


def refused(name: Path, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        models.load(name)


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "gguf"])
def test_in_place_of_gguf(tmp_path: Path, kind: str) -> None:
    content, words = OTHERS[kind]
    (tmp_path / "my.gguf").write_bytes(content)
    refused(tmp_path / "my.gguf", f"pdkernels.models.load: my.gguf must be a GGUF file, got {words}")


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "safetensors"])
def test_in_place_of_safetensors(tmp_path: Path, kind: str) -> None:
    """Named itself, and as the weights of a folder."""
    content, words = OTHERS[kind]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    refused(file, f"name_or_path must be a safetensors file, got {words}")
    (tmp_path / "config.json").write_text(CONFIG)
    refused(tmp_path, f"pdkernels.models.load: model.safetensors must be a safetensors file, got {words}")


def test_a_config_that_is_a_pointer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(POINTER)
    refused(tmp_path, f"config.json must be JSON, got {OTHERS['pointer'][1]}")


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    """It is not said to be of no training script of ours."""
    file = tmp_path / "my.safetensors"
    save_file({"x": torch.zeros(64)}, file, metadata={"config": "{}"})
    file.write_bytes(file.read_bytes()[:-8])
    refused(file, "name_or_path must be a whole safetensors file, got ")


def test_a_missing_file_is_no_misspelt_model(tmp_path: Path) -> None:
    refused(Path("my.safetensors"), "name_or_path must be a file that exists, got 'my.safetensors', which is missing.")


def test_the_file_of_an_adapter(tmp_path: Path) -> None:
    """Its folder is asked for, and the file is there."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=64, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    adapter = tmp_path / "adapter_model.safetensors"
    adapter.write_bytes(OTHERS["safetensors"][0])
    words = r"adapter must be a folder, got the file '.*'?\. Name the folder with its adapter_config\.json\."
    with pytest.raises(ValueError, match=words):
        models.load(tmp_path, adapter=adapter)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch built with CUDA")
def test_a_torch_without_cuda() -> None:
    with pytest.raises(NotImplementedError, match="There are 0 CUDA devices and a torch built without CUDA; use 'cpu'"):
        models.load("tiny-code", device="cuda")


def test_weights_of_torch_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "pytorch_model.bin").write_bytes(OTHERS["torch"][0])
    words = f"got none in {tmp_path}, only pytorch_model.bin. Load it with torch.load(weights_only=True) and write it"
    refused(tmp_path, f"name_or_path must hold *.safetensors files, {words}")
