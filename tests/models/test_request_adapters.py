"""Adapters that requests name: a mixed batch beside PEFT, the bits of single rows, what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.models import load_adapter, unload_adapter
from tests.support.lora import MODULES, random_adapter

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from tests.models.test_peft_folders import SIZES, TOKENS, changed, reopened, saved  # noqa: E402

RANKS = {"small": 4, "middle": 16, "wide": 256}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with biases, as a folder."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that PEFT has written."""
    folder, configs = tmp_path_factory.mktemp("adapters"), dict[str, dict[str, Any]]()
    configs["small"] = {"r": 4}
    configs["middle"] = {"r": 16, "target_modules": "all-linear", "use_rslora": True}
    configs["wide"] = {"r": 256, "target_modules": ["o_proj", "up_proj"], "rank_pattern": {"o_proj": 5}}
    return {name: saved(base, folder / name, **config) for name, config in configs.items()}


def logits(model: Any, names: list[str | None], tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Of the same tokens in each sequence, in two forwards."""
    cache = model.new_cache(len(names), tokens.shape[1] + 1)
    cache.adapt_([None if name is None else model.adapters[name] for name in names])
    rows, found = tokens.expand(len(names), -1), []
    with torch.inference_mode():
        for part in rows.split([3, tokens.shape[1] - 3], 1):
            found.append(model(part, cache=cache))
            cache.commit_(torch.full((len(names),), part.shape[1]))
    return torch.cat(found, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_of_several_is_each_ones_of_peft(base: Path, adapters: dict[str, Path], dtype: torch.dtype) -> None:
    model, names = pd.models.load(base, dtype=dtype), ["wide", None, "small", "middle", "small"]
    for name, folder in adapters.items():
        load_adapter(model, name, folder)
    found = logits(model, names)
    for row, name in zip(found, names, strict=True):
        expected = reopened(base, None if name is None else adapters[name])[0]
        torch.testing.assert_close(row.float(), expected, rtol=1e-4, atol=1e-4)
    assert (found[0] - found[1]).abs().max() > 1e-2


def test_greedy_texts_are_those_of_peft(base: Path, adapters: dict[str, Path]) -> None:
    model, names = pd.models.load(base, dtype=torch.float32), [None, *adapters]
    for name, folder in adapters.items():
        load_adapter(model, name, folder)
    ours = generate(model, [TOKENS[0]] * 4, "jacobi", adapter=names, max_new_tokens=12, end_tokens=(), block_size=4)
    for text, name in zip(ours.tokens, names, strict=True):
        theirs = transformers.LlamaForCausalLM.from_pretrained(base).eval()
        theirs = theirs if name is None else peft.PeftModel.from_pretrained(theirs, adapters[name]).eval()
        expected = theirs.generate(input_ids=TOKENS, max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert text.tolist() == expected[0, TOKENS.shape[1] :].tolist()


BASES = ["float32", "bfloat16", "q4_0", "int8"]


@pytest.fixture(scope="module", params=BASES)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with adapters of all ranks."""
    dtype = torch.bfloat16 if request.param == "bfloat16" else torch.float32
    made = pd.models.load("tiny-code", dtype=dtype)
    made = made if "float" in request.param else pd.quantize(made, request.param)
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate(RANKS.items()):
        load_adapter(made, name, random_adapter(made, folder / name, rank, seed))
    return made


def test_a_row_has_the_same_bits_in_any_batch(model: Any) -> None:
    names, tokens = ["wide", None, "small", "small", None, "middle"], torch.tensor([list(b"def add(a, b):")])
    mixed = logits(model, names, tokens)
    for row, name in zip(mixed, names, strict=True):
        assert torch.equal(row, logits(model, [name], tokens)[0])
    cache = model.new_cache(1, 20)
    with torch.inference_mode():
        assert torch.equal(mixed[1], model(tokens, cache=cache)[0])  # those of the model alone
    assert len({row.sum().item() for row in mixed}) == 4


def test_the_op_of_all_layers_computes_what_the_layers_do(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names, tokens = ["wide", None, "small", "middle", "wide", "small"], torch.tensor([list(b"def add(a, b):")])
    found = logits(model, names, tokens)
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    assert torch.equal(found, logits(model, names, tokens))


@pytest.mark.parametrize("kind", ["windows", "experts"])
def test_other_layers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts, the matrices of attention."""
    others: dict[str, Any] = {"windows": (pd.models.Window(3), None)}
    if kind == "experts":
        others = {"experts": pd.models.ExpertsConfig(count=4, per_token=2, intermediate_size=32)}
    sizes: dict[str, int] = {"vocab_size": 99, "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    config = pd.models.TransformerConfig(**sizes, head_dim=16, intermediate_size=48, **others)
    torch.manual_seed(0)
    model = pd.models.Transformer(config).requires_grad_(False)
    modules = MODULES if kind == "windows" else "(q|v|o)_proj"
    for seed, name in enumerate(("a", "b")):
        load_adapter(model, name, random_adapter(model, tmp_path / name, 4, seed, modules=modules, size=0.5))
    names: list[str | None] = ["a", None, "b", "a"]
    mixed = logits(model, names)
    for row, name in zip(mixed, names, strict=True):
        assert torch.equal(row, logits(model, [name])[0])
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    assert torch.equal(mixed, logits(model, names)) and not torch.equal(mixed[0], mixed[1])


def test_packed_rows_have_the_bits_of_padded_ones(model: Any) -> None:
    names, lengths = ["wide", None, "small"], [3, 5, 4]
    texts = [list(b"import os")[:length] for length in lengths]
    cache = model.new_cache(3, 8)
    cache.adapt_([None if name is None else model.adapters[name] for name in names])
    with torch.inference_mode():
        begins = torch.tensor([0, *lengths]).cumsum(0)
        packed = model(torch.tensor([[*texts[0], *texts[1], *texts[2]]]), cache=cache, cu_seqlens=begins)[0].split(
            lengths
        )
    for rows, name, text in zip(packed, names, texts, strict=True):
        cache = model.new_cache(1, 8)
        cache.adapt_([None if name is None else model.adapters[name]])
        with torch.inference_mode():
            assert torch.equal(rows, model(torch.tensor([text]), cache=cache)[0])


def test_equal_adapters_have_equal_digests(tmp_path: Path) -> None:
    """Prefixes are kept by it: under another name the same tensors, under the same name others, in another dtype others."""
    model = pd.models.load("tiny-code")
    for name, seed in (("a", 1), ("same", 1), ("other", 2)):
        load_adapter(model, name, random_adapter(model, tmp_path / name, 4, seed))
    digests = {name: adapter.digest for name, adapter in model.adapters.items()}
    assert digests["a"] == digests["same"] != digests["other"]
    unload_adapter(model, "same")
    load_adapter(model, "same", tmp_path / "other")
    assert model.adapters["same"].digest == digests["other"]
    model.to(torch.bfloat16)
    assert model.adapters["a"].digest != digests["a"]


def test_moving_a_model_moves_its_adapters(tmp_path: Path) -> None:
    model = pd.models.load("tiny-code")
    load_adapter(model, "mine", random_adapter(model, tmp_path / "mine", 4, 0))
    tokens = torch.tensor([[1, 2, 3, 4]])
    wide = logits(model.double(), ["mine"], tokens)
    torch.testing.assert_close(wide.float(), logits(model.float(), ["mine"], tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [4, 6])
def test_a_file_of_16_bits_stays_one_under_float32(tmp_path: Path, rank: int) -> None:
    """Unless its scale does not fit. The file may be written again."""
    from safetensors.torch import load_file, save_file

    model = pd.models.load("tiny-code")
    folder = random_adapter(model, tmp_path / "short", rank, 0, lora_alpha=2 * rank if rank == 4 else 18 / 7)
    path = folder / "adapter_model.safetensors"
    short = {name: x.bfloat16() for name, x in load_file(path).items()}
    save_file(short, path)
    load_adapter(model, "short", folder)
    (first, *_) = model.adapters["short"].layers[0]["qkv"]
    assert first.a.dtype == (torch.bfloat16 if rank == 4 else torch.float32)
    save_file({name: x.float() for name, x in short.items()}, path)
    load_adapter(model, "long", folder)
    torch.testing.assert_close(*logits(model, ["short", "long"]), rtol=1e-5, atol=1e-5)


# ---- what is refused


def test_names(tmp_path: Path) -> None:
    model = pd.models.load("tiny-code")
    folder = random_adapter(model, tmp_path / "mine", 4, 0)
    load_adapter(model, "mine", folder)
    with pytest.raises(ValueError, match="name must not be that of another adapter, got 'mine'"):
        load_adapter(model, "mine", folder)
    with pytest.raises(TypeError, match="name must be a string, got int"):
        load_adapter(model, 3, folder)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"adapter must name a loaded adapter \('mine'\), got 'mime'.*Did you mean"):
        generate(model, "a", adapter="mime")
    with pytest.raises(ValueError, match="adapter must have one entry for each of 2 prompts, got 1"):
        generate(model, ["a", "b"], adapter=["mine"])
    with pytest.raises(TypeError, match="adapter must hold names, got int"):
        generate(model, ["a", "b"], adapter=["mine", 1])  # type: ignore[list-item]
    unload_adapter(model, "mine")
    with pytest.raises(ValueError, match="name must name a loaded adapter"):
        unload_adapter(model, "mine")
    with pytest.raises(NotImplementedError, match="adapter must be None for this model"):
        generate(pd.models.load("tiny-recurrent"), "a", adapter="mine")
    with pytest.raises(NotImplementedError, match="model must be a Transformer"):
        load_adapter(pd.models.load("tiny-recurrent"), "mine", folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights must leave the model's own weights alone"),
        (
            {"modules_to_save": ["lm_head"]},
            "must hold pairs for the matrices of attention and of dense MLPs alone, got also lm_head.weight",
        ),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "got also model.embed_tokens.weight. Merge it"),
        ({"target_modules": ["q_proj", "lm_head"]}, "got also lm_head.weight. Merge it"),
    ],
)
def test_adapters_of_other_tensors(base: Path, tmp_path: Path, config: dict[str, Any], words: str) -> None:
    model = pd.models.load(base, dtype=torch.float32)
    folder = saved(base, tmp_path / "mine", **{name: value for name, value in config.items() if name[:4] != "init"})
    if "init_lora_weights" in config:
        changed(folder, **config)
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        load_adapter(model, "mine", folder)
    assert not model.adapters


def test_an_adapter_of_another_base(base: Path, tmp_path: Path) -> None:
    other = random_adapter(pd.models.load("tiny-code"), tmp_path / "other", 4, 0)
    with pytest.raises(NotImplementedError, match="layers.3.*must belong to a tensor of the checkpoint"):
        load_adapter(pd.models.load(base), "other", other)
    narrow = random_adapter(pd.models.load("tiny-code"), tmp_path / "narrow", 4, 0, modules="q_proj")
    deep = pd.models.Transformer(
        pd.models.TransformerConfig(
            vocab_size=9, hidden_size=128, layers=4, heads=4, kv_heads=2, head_dim=64, intermediate_size=32
        )
    )
    with pytest.raises(ValueError, match=r"have pairs for a matrix \(256, 128\)"):
        load_adapter(deep, "narrow", narrow)
