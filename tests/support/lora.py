"""Adapters of random numbers, in folders as PEFT writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pdkernels.models.checkpoints import hf

MODULES = r"(q|k|v|o|gate|up|down)_proj"


def random_adapter(
    model: Any, folder: Path, rank: int, seed: int, *, modules: str = MODULES, size: float = 0.1, **config: Any
) -> Path:
    """Pairs for all modules whose last name matches, of the layers of a `Transformer` with Llama's names."""
    generator, pairs, names = torch.Generator().manual_seed(seed), dict[str, torch.Tensor](), set[str]()
    for _, sources in hf.layout(model.config).parts():
        for source, shape in sources.items():
            module = source.removesuffix(".weight")
            if re.fullmatch(modules, name := module.rpartition(".")[2]) and len(shape) == 2:
                names.add(name)
                for half, (rows, width) in {"A": (rank, shape[1]), "B": (shape[0], rank)}.items():
                    numbers = torch.randn(rows, width, generator=generator) * size
                    pairs[f"base_model.model.{module}.lora_{half}.weight"] = numbers
    folder.mkdir(parents=True, exist_ok=True)
    save_file(pairs, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(names), **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder
