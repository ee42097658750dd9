"""GGUF files whose matrices stay packed: every format's logits, decoding without loss, drafters, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pdkernels as pd
from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models.checkpoints.packaged import packaged
from tests.models.test_adapters import lora, save
from tests.support.checkpoints import random_checkpoint

files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf: pip install gguf")
gguf = files.gguf
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [3, 1, 4, 3, 1, 4, 3, 1]]
# K formats have blocks of 256.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 256,
}
FAMILIES = {**files.FAMILIES, "qwen3moe": files.QWEN3MOE}
SIMPLE, SUPER = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"], ["Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture
def super_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package writes no K formats: random codes, with scales that give numbers of the usual size."""
    plain = gguf.quants.quantize
    chance = np.random.default_rng(0)

    def quantize(data: Any, kind: Any) -> Any:
        if kind.name not in SUPER:
            return plain(data, kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = chance.integers(0, 256, (*data.shape[:-1], data.shape[-1] // block, size), dtype=np.uint8)
        scales, spread = {"Q6_K": ([208], 1e-4), "Q4_K": ([0, 2], 5e-4), "Q5_K": ([0, 2], 2e-4)}[kind.name]
        for at in scales:
            half = (spread * (1 + chance.random((*raw.shape[:-1], 1)))).astype(np.float16)
            raw[..., at : at + 2] = half.view(np.uint8)
        return raw.reshape(*data.shape[:-1], -1)

    monkeypatch.setattr(gguf.quants, "quantize", quantize)


def written(path: Path, kind: str, family: str = "llama") -> models.Transformer:
    fields = {**FAMILIES[family], **(WIDE if kind in SUPER else {})}
    files.write_gguf(path, fields, kind=kind)
    model = models.load(path, packed=True)
    held = [module for module in model.modules() if isinstance(module, pd.QuantizedWeight)]
    assert len(held) == 2 * 4 + 1 + (not model.config.tied_head) and {one.format for one in held} == {kind.lower()}
    return model


@pytest.mark.covering
@pytest.mark.usefixtures("super_blocks")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [*SIMPLE, *SUPER])
def test_logits_and_decoders(kind: str, family: str, tmp_path: Path) -> None:
    model = written(tmp_path / "m.gguf", kind, family)
    tokens = torch.tensor([PROMPTS[0]])
    found, expected = model(tokens), models.load(tmp_path / "m.gguf", packed=False)(tokens)
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Activations have 8 bits; a router may choose another expert for a row.
    assert 0 < (errors.median() if family == "qwen3moe" else errors.max()) < 0.1
    greedy = generate(model, PROMPTS, max_new_tokens=16, end_tokens=())
    assert [len(row) for row in greedy.tokens] == [16] * 3
    alone = generate(model, PROMPTS[0], max_new_tokens=16, end_tokens=(), page_size=4)
    assert alone.tokens.tolist() == greedy.tokens[0].tolist()
    for draft, page_size in (("model", None), ("lookup", None), ("lookup", 4)):
        more = {} if page_size is None else {"page_size": page_size}
        other = generate(model, PROMPTS, "jacobi", draft=draft, max_new_tokens=16, end_tokens=(), **more)
        assert [row.tolist() for row in other.tokens] == [row.tolist() for row in greedy.tokens]


def test_the_default_and_what_needs_numbers(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    state = files.write_gguf(path, files.LLAMA, kind="Q8_0")

    def packed(**options: Any) -> bool:
        return any(isinstance(module, pd.QuantizedWeight) for module in models.load(path, **options).modules())

    adapter = save(tmp_path / "lora", lora(state, ["model.layers.0.self_attn.q_proj"]))
    assert packed() and packed(dtype=torch.bfloat16) and packed(dtype=torch.float16)
    assert not packed(packed=False) and not packed(dtype=torch.float64) and not packed(adapter=adapter)
    with pytest.raises(ValueError, match="an adapter cannot be merged into packed matrices"):
        models.load(path, adapter=adapter, packed=True)
    files.write_gguf(path, files.LLAMA, kind="F16")
    assert not packed()
    with pytest.raises(NotImplementedError, match=r"must be of one of the types Q8_0, .* to stay packed, got 'F16'"):
        models.load(path, packed=True)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_drafter_with_a_mask_token(kind: str, tmp_path: Path) -> None:
    """Its row joins the packed embedding; texts without masks do not change, and drafts lose nothing."""
    from safetensors.torch import save_file

    state = random_checkpoint(files.LLAMA, dtype=torch.float32)
    files.write_gguf(tmp_path / "m.gguf", files.LLAMA, state, kind=kind)
    targets = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)]
    drafter = save(tmp_path / "drafter", lora(state, targets))
    row = torch.randn(1, 32)
    save_file({"embedding": row[0]}, drafter / "mask_token.safetensors")
    plain, model = models.load(tmp_path / "m.gguf"), models.load(tmp_path / "m.gguf", drafter=drafter)
    assert model.mask_token == 40 and model.embedding.shape == (41, 32) == model.head.shape
    assert torch.equal(model.embedding.dequantize()[:40], plain.embedding.dequantize())
    assert (model.embedding.dequantize()[40] - row[0]).abs().max() <= row.abs().max() / 250
    tokens = torch.tensor([PROMPTS[0]])
    assert torch.equal(model(tokens)[..., :40], plain(tokens))
    greedy = generate(model, PROMPTS, max_new_tokens=16, end_tokens=())
    for more in ({}, {"page_size": 4}):
        other = generate(model, PROMPTS, "linear_self_speculation", max_new_tokens=16, end_tokens=(), **more)
        assert [row.tolist() for row in other.tokens] == [row.tolist() for row in greedy.tokens]


@pytest.mark.slow
def test_smollm2_drafts_lose_nothing() -> None:
    try:
        packaged("smollm2-135m-instruct")
    except ImportError as error:
        pytest.skip(str(error))
    model = models.load("smollm2-135m-instruct", drafter="smollm2-drafter")
    assert isinstance(model.embedding, pd.QuantizedWeight)
    chats = [
        [{"role": "user", "content": text}]
        for text in ("What is the capital of France?", "Write a haiku about rain.", "Name three colours.")
    ]
    greedy = generate(model, chats, max_new_tokens=24)
    for method, options in (("linear_self_speculation", {}), ("jacobi", {"draft": "lookup"})):
        other = generate(model, chats, method, max_new_tokens=24, **options)
        assert [row.tolist() for row in other.tokens] == [row.tolist() for row in greedy.tokens]
    alone = generate(model, chats[1], "linear_self_speculation", max_new_tokens=24)
    assert alone.tokens.tolist() == greedy.tokens[1].tolist()


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        (
            "tiny-code",
            {"packed": True},
            ValueError,
            "packed must not be True for 'tiny-code', whose matrices are not quantised",
        ),
        ("tiny-code", {"packed": 1}, TypeError, "packed must be a bool or None, got int"),
        ("tiny-code", {"packed": True, "dtype": torch.float64}, ValueError, "packed matrices have no product in fp64"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    name: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        models.load(name, **options)
