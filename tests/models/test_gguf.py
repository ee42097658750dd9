"""GGUF files: weights of every type, configuration, and files that are broken or need something else."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models import FactorScaling, LinearScaling, YarnScaling
from pdkernels.models.checkpoints import gguf as checkpoint_gguf
from pdkernels.models.files import gguf_file
from pdkernels.models.files.layout import Stored
from tests.models.test_adapters import lora, plain_merged, save
from tests.support.checkpoints import LLAMA31, frequency, plain_logits, random_checkpoint

files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf: pip install gguf")
gguf = files.gguf
FAMILIES, LLAMA, QWEN2, QWEN3 = files.FAMILIES, files.LLAMA, files.QWEN2, files.QWEN3
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def largest_difference(path: Path, state: Any, fields: dict[str, Any]) -> float:
    model = models.load(path, dtype=torch.float64)
    return float((model(torch.tensor([TOKENS]))[0] - plain_logits(state, fields, TOKENS)).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_published_maths(family: str, tmp_path: Path) -> None:
    fields = FAMILIES[family]
    state = files.write_gguf(tmp_path / "m.gguf", fields)
    assert largest_difference(tmp_path / "m.gguf", state, fields) < 1e-9
    model = models.load(str(tmp_path / "m.gguf"))
    assert model.dtype == torch.float32 and model.end_tokens == (5,) and model.tokenizer is None
    assert model.config.norm_eps == fields["rms_norm_eps"]  # as it was before it was stored in fp32
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_matrices(kind: str, tmp_path: Path) -> None:
    # The converter permutes rows and then quantises, which goes row by row.
    state = files.write_gguf(tmp_path / "m.gguf", LLAMA, kind=kind)
    model = models.load(tmp_path / "m.gguf")
    assert model.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    expected = models.from_hf_state_dict(state, model.config)
    wide = models.load(tmp_path / "m.gguf", dtype=torch.float32, packed=False)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in wide.state_dict().items())


def test_every_type_that_the_package_dequantises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_CHUNK", 512)  # so that a tensor is read in parts
    writer, expected = gguf.GGUFWriter(tmp_path / "m.gguf", "llama"), {}
    chance = np.random.default_rng(0)
    for kind in gguf.quants._type_traits:
        block, width = gguf.GGML_QUANT_SIZES[kind]
        data = chance.integers(0, 256, (5, 256 // block * width), dtype=np.uint8)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        with np.errstate(all="ignore"):
            expected[kind.name] = gguf.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf_file.GgufFile(tmp_path / "m.gguf")
    assert len(expected) > 20 and file.tensors.keys() == expected.keys()
    for name, numbers in expected.items():
        target = torch.empty(file.tensors[name].shape)
        with np.errstate(all="ignore"):
            file.read_into_(target, file.tensors[name])
        np.testing.assert_array_equal(target.numpy(), numbers, name)


# ---- configuration


def test_rope_factors_of_llama31(tmp_path: Path) -> None:
    fields = {**LLAMA, "head_dim": 16, "rope_theta": 100.0}
    scaled = {**fields, "rope_scaling": LLAMA31["rope_scaling"]}
    pairs = range(8)
    factors = np.array([frequency(pair, 16, fields) / frequency(pair, 16, scaled) for pair in pairs])
    assert factors.min() == 1 and factors.max() > 7.9
    state = files.write_gguf(tmp_path / "m.gguf", fields, factors=factors)
    assert largest_difference(tmp_path / "m.gguf", state, scaled) < 1e-4  # the factors are fp32
    assert largest_difference(tmp_path / "m.gguf", state, fields) > 1e-2
    assert isinstance(models.load(tmp_path / "m.gguf").config.rope_scaling, FactorScaling)


def test_factors_beside_a_scale_of_queries(tmp_path: Path) -> None:
    more = {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.5}
    files.write_gguf(tmp_path / "m.gguf", LLAMA, more=more, factors=np.ones(4))
    with pytest.raises(NotImplementedError, match="attn_factor must be 1 with rope_freqs.weight, got 1.5"):
        models.load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}, LinearScaling(2.5)),
        ({"rope.scale_linear": 2.0}, LinearScaling(2.0)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
            YarnScaling(4.0, 16, attention_factor=1 + 0.1 * float(np.log(4.0))),
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_beta_fast": 16.0}
            | {"rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.attn_factor": 1.5},
            YarnScaling(2.0, 64, 16.0, 2.0, 1.5 * (1 + 0.1 * float(np.log(2.0)))),
        ),
    ],
)
def test_rope_scaling(more: dict[str, Any], scaling: Any, tmp_path: Path) -> None:
    files.write_gguf(tmp_path / "m.gguf", LLAMA, more=more)
    assert models.load(tmp_path / "m.gguf").config.rope_scaling == scaling


def test_biases_are_read_where_there_are_any(tmp_path: Path) -> None:
    state = random_checkpoint(LLAMA, dtype=torch.float32)
    widths = {"q": 32, "k": 16, "v": 16, "o": 32}
    for layer in range(2):
        for name, width in widths.items():
            state[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.randn(width)
    files.write_gguf(tmp_path / "m.gguf", LLAMA, state)
    model = models.load(tmp_path / "m.gguf")
    assert model.config.qkv_bias and model.config.output_bias and not model.config.mlp_bias
    expected = models.from_hf_state_dict(state, model.config)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_adapters_know_the_published_names_and_order(tmp_path: Path) -> None:
    state = files.write_gguf(tmp_path / "m.gguf", LLAMA)
    tensors = lora(state, [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qo"])
    adapter = save(tmp_path / "lora", tensors)
    merged = models.load(tmp_path / "m.gguf", dtype=torch.float64, adapter=adapter)(torch.tensor([TOKENS]))[0]
    expected = plain_logits(plain_merged(state, tensors, 2.0), LLAMA, TOKENS)
    torch.testing.assert_close(merged, expected, rtol=1e-9, atol=1e-9)


REFUSED = [
    ({"expert_count": 8}, "llama.expert_count must be 0, got 8."),
    ({"rope.scaling.type": "longrope"}, "rope.scaling.type must be none, linear or yarn, got 'longrope'."),
    ({"rope.dimension_count": 4}, "llama.rope.dimension_count must be the size of a head (8), got 4."),
    ({"attention.value_length": 16}, "llama.attention.value_length must be the size of a head (8), got 16."),
    (
        {"attention.sliding_window": 16},
        "llama.attention.sliding_window must be absent or cover all 64 positions, got 16.",
    ),
    ({"attention.causal": False}, "llama.attention.causal must be True, got False."),
    ({"logit_scale": 2.0}, "llama.logit_scale must be 1.0, got 2.0."),
]
WRONG = [
    ({"embedding_length": None}, "m.gguf: llama must hold 'embedding_length', got only "),
    (
        {"block_count": 10**9},
        "m.gguf must hold every tensor that its keys describe, got 21 for 1000000000 layers. It may be incomplete, or of another "
        "architecture.",
    ),
    (
        {"block_count": 3},
        "m.gguf must hold every tensor that its keys describe, got none called blk.2.attn_q.weight, blk.2.attn_k.weight, "
        "blk.2.attn_v.weight, blk.2.attn_output.weight and 5 more. It may be incomplete, or of another architecture.",
    ),
    ({"block_count": 1}, "m.gguf must hold only tensors that its keys describe, got also blk.1.attn_k.weight, "),
    ({"feed_forward_length": [64, 32]}, "m.gguf: llama: feed_forward_length must be an integer from 1 to "),
    ({"feed_forward_length": 32}, "blk.0.ffn_gate.weight must have shape (32, 32), got (64, 32)."),
    ({"attention.head_count_kv": 3}, "m.gguf: kv_heads must divide heads (4), got 3."),
    ({"rope.freq_base": -1.0}, "m.gguf: llama: rope.freq_base must be a number above 0, got -1.0."),
]


@pytest.mark.parametrize(("more", "sentence"), [*REFUSED, *WRONG])
def test_other_computations_and_wrong_fields(more: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    files.write_gguf(tmp_path / "m.gguf", LLAMA, more=more)
    kind = NotImplementedError if (more, sentence) in REFUSED else ValueError
    with pytest.raises(kind) as caught:
        models.load(tmp_path / "m.gguf")
    assert str(caught.value).startswith("pdkernels.models.load: ") and sentence in str(caught.value)


def test_tensors_of_another_architecture() -> None:
    """Some lie in the places of those that are missing."""
    config = models.TransformerConfig(
        vocab_size=9, hidden_size=8, layers=1, heads=1, kv_heads=1, head_dim=8, intermediate_size=8
    )
    layout = checkpoint_gguf.layout_of(config, "llama", "m.gguf")
    stored = {name: Stored(shape, "float32", "m.gguf") for _, parts in layout.parts() for name, shape in parts.items()}
    stored["blk.0.ffn_gate_up.weight"] = stored.pop("blk.0.ffn_gate.weight")
    words = (
        r"none called blk\.0\.ffn_gate\.weight\. It also holds blk\.0\.ffn_gate_up\.weight: it may be of another archi"
    )
    with pytest.raises(ValueError, match=r"m\.gguf must hold every tensor that its keys describe, got " + words):
        layout.stored(stored)


def test_other_architectures_and_parts(tmp_path: Path) -> None:
    for field, value, sentence in (
        (
            "general.architecture",
            "mamba",
            "m.gguf: general.architecture must be one of llama, qwen2, qwen3, qwen3moe, olmo2, gpt-oss, llada, dream, llada-moe, llada2, qwen35, lfm2, gemma2, gemma3, gemma4, got 'mamba'.",
        ),
        ("split.count", 3, "m.gguf must be a whole model, got one of 3 parts. Join its parts with"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba" if "arch" in field else "llama")
        if "arch" not in field:
            writer.add_uint16(field, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(NotImplementedError) as caught:
            models.load(tmp_path / "m.gguf")
        assert sentence in str(caught.value)


# ---- broken and hostile files


def header(tensors: int = 0, keys: int = 0, rest: bytes = b"", *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(*dims: int, kind: int = 0, offset: int = 0, name: bytes = b"x") -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HOSTILE = {
    "empty": (b"", "be a whole GGUF file, got 0 bytes."),
    "not gguf": (b"GGML" * 10, "be a GGUF file, got one that begins with "),
    "version": (header(version=7), "have version 2 or 3, little-endian, got 7."),
    "tensors": (header(tensors=2**40), "have at most 65536 tensors, got 1099511627776."),
    "fields": (header(keys=2**60), "have at most 65536 fields, got "),
    "a long name": (header(keys=1, rest=text(b"a", 2**62)), "continue for a string in 'the name of a field', got "),
    "a negative length": (header(keys=1, rest=text(b"a", 2**64 - 1)), "continue for a string"),
    "a kind": (header(keys=1, rest=text(b"a") + struct.pack("<I", 99)), "have a known type of 'a', got 99."),
    "a list": (
        header(keys=1, rest=text(b"a") + struct.pack("<IIQ", 9, 4, 2**60)),
        "'a' must hold at most 16777216 values",
    ),
    "strings": (
        header(keys=1, rest=text(b"a") + struct.pack("<IIQ", 9, 8, 2**20)),
        "continue for 8388608 bytes with 'a'",
    ),
    "numbers": (
        header(keys=1, rest=text(b"a") + struct.pack("<IIQ", 9, 4, 2**20)),
        "continue for 4194304 bytes with 'a'",
    ),
    "lists": (
        header(keys=1, rest=text(b"a") + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 99),
        "be a list of numbers or strings",
    ),
    "not utf-8": (header(keys=1, rest=text(b"\xff\xfe") + b"\0" * 9), "hold UTF-8 text"),
    "twice": (
        header(keys=2, rest=2 * (text(b"a") + struct.pack("<IB", 0, 1))),
        "name every field once, got 'a' twice.",
    ),
    "dimensions": (header(1, rest=text(b"x") + struct.pack("<I", 2**31) + b"\0" * 64), "have 1 to 4 dimensions, got "),
    "a size": (header(1, rest=tensor(2**62, 2**62) + b"\0" * 64), "lie inside the file (129 bytes), got shape ("),
    "no size": (header(1, rest=tensor(0, 4) + b"\0" * 64), "have no empty dimension"),
    "a block": (header(1, rest=tensor(33, kind=8) + b"\0" * 64), "have rows of whole blocks of 32, got rows of 33."),
    "a type": (
        header(1, rest=tensor(32, kind=77) + b"\0" * 64),
        "types that the installed gguf knows, got type 77 of 'x'.",
    ),
    "an offset": (header(1, rest=tensor(4, offset=2**63) + b"\0" * 64), "lie inside the file"),
    "between": (header(1, rest=tensor(4, offset=8) + b"\0" * 64), "begin at a multiple of 32, got 8."),
    "overlap": (header(2, rest=tensor(16) + tensor(16, name=b"y") + b"\0" * 90), "hold each tensor's bytes for itself"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str, tmp_path: Path) -> None:
    content, sentence = HOSTILE[name]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        gguf_file.GgufFile(tmp_path / "m.gguf")
    assert str(caught.value).startswith("pdkernels.models.load: m.gguf") and sentence in str(caught.value)


def test_truncated_and_corrupted_files(tmp_path: Path) -> None:
    """Whatever happens to a file, it loads or ends in one of our errors."""
    path, chance = tmp_path / "m.gguf", random.Random(0)
    files.write_gguf(path, QWEN3, kind="Q8_0")
    whole = path.read_bytes()
    size = len(whole) - gguf_file.GgufFile(path).tensors["output_norm.weight"].bytes
    cuts = [whole[:cut] for cut in range(0, size, size // 60)]
    for _ in range(150):
        at = chance.randrange(1500)
        cuts.append(whole[:at] + bytes([chance.randrange(256)]) + whole[at + 1 :])
    failed = 0
    for content in cuts:
        path.write_bytes(content)
        try:
            models.load(path)
        except (ValueError, TypeError, NotImplementedError) as error:
            assert str(error).startswith("pdkernels.models.load: "), error
            assert len(str(error)) < 700 and "\n" not in str(error)
            failed += 1
    assert 60 < failed < len(cuts)


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    with pytest.raises(ValueError, match="pdkernels.models.load: name_or_path must be a file that exists"):
        models.load(tmp_path / "none.gguf")
    files.write_gguf(tmp_path / "m.gguf", LLAMA)
    for module in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"m.gguf needs the optional library `gguf` .*`pip install gguf"):
        models.load(tmp_path / "m.gguf")


# ---- the published implementation


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_same(family: str, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers where it is installed")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files where accelerate is installed")
    # It uses heads of 128 for Qwen3, regardless of the file.
    fields = {**FAMILIES[family], "head_dim": 128} if family == "qwen3" else FAMILIES[family]
    files.write_gguf(tmp_path / "m.gguf", fields, kind=kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    ours = models.load(tmp_path / "m.gguf", packed=False)
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        expected = theirs.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = generate(ours, TOKENS, max_new_tokens=12, end_tokens=()).tokens
    assert ids.tolist() == expected[0, len(TOKENS) :].tolist()
