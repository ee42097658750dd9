"""OLMo 2, OLMo 3 and gpt-oss from folders: logits and tokens of transformers, past their windows; experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models.architectures.fused import grouped_linear
from pdkernels.models.checkpoints import mxfp4
from pdkernels.training import new_dflash_head, new_eagle_head
from tests.harness.error_budget import assert_within_budget

transformers = pytest.importorskip("transformers", reason="builds models with transformers", minversion="5.20")
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from pdkernels.integrations.transformers import from_transformers  # noqa: E402
from tests.integrations.test_shadow import small  # noqa: E402

KINDS = ["full_attention", "sliding_attention", "sliding_attention"]
SIZES = {"num_hidden_layers": 3, "max_position_embeddings": 256, "eos_token_id": 5}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.2}
GPT_OSS = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "layer_types": KINDS}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"layer_types": KINDS, "rope_scaling": YARN}),
    "olmo3, windows alone": ("Olmo3", {"layer_types": KINDS[1:] * 2, "num_hidden_layers": 4}),
    "olmo3, no windows": ("Olmo3", {"layer_types": KINDS[:1] * 3, "rope_scaling": YARN}),
    "gpt_oss": ("GptOss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 32}),
    "gpt_oss, no bias": ("GptOss", {**GPT_OSS, "attention_bias": False, "swiglu_limit": 0.5, "swiglu_alpha": 1.0}),
}
TOKENS = [(7 * i) % 50 + 3 for i in range(40)]
NEW = 24


def a_model(family: str, window: int = 7, **more: Any) -> Any:
    name, fields = FAMILIES[family]
    windowed = {} if name == "Olmo2" else {"sliding_window": window}
    model = small(name, **{**SIZES, **fields, **windowed, **more})
    if name == "GptOss":
        model.set_experts_implementation("eager")  # which also runs in float64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() != 2:
                parameter.normal_(std=0.5)
    return model.requires_grad_(False)


def theirs(model: Any, tokens: list[int] = TOKENS) -> list[int]:
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(torch.tensor([tokens]), max_new_tokens=NEW, **settings)
    found: list[int] = out[0, len(tokens) :].tolist()
    return found


@pytest.mark.covering(of=["family"])
@pytest.mark.parametrize("window", [2, 7, 128])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_a_folder(family: str, window: int, tmp_path: Path) -> None:
    model = a_model(family, window)
    model.save_pretrained(tmp_path)
    own, exact = (models.load(tmp_path, dtype=dtype) for dtype in (torch.float32, torch.float64))
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    assert_within_budget(own(tokens), exact(tokens), model(tokens).logits, name=family)
    # transformers computes RoPE in float32.
    torch.testing.assert_close(exact(tokens), model.double()(tokens).logits, rtol=1e-4, atol=1e-5)
    model.float()
    expected, short = theirs(model), theirs(model, TOKENS[:3])
    for method, options in {
        "autoregressive": {},
        "jacobi": {"block_size": 9},
        "jacobi_multiblock": {"block_size": 4, "blocks": 3},
    }.items():
        for page_size in (None, 7):
            more = {**options, "page_size": page_size}
            found = generate(own, [TOKENS, TOKENS[:3]], method, max_new_tokens=NEW, end_tokens=(), **more).tokens
            assert [own_tokens.tolist() for own_tokens in found] == [expected, short]
    own = own.to(torch.bfloat16)
    greedy = generate(own, TOKENS, max_new_tokens=NEW, end_tokens=()).tokens
    assert torch.equal(generate(own, TOKENS, "jacobi", block_size=9, max_new_tokens=NEW, end_tokens=()).tokens, greedy)


@pytest.mark.filterwarnings("ignore")
def test_attention_without_kernels(tmp_path: Path) -> None:
    """Sinks in float64, under a bool mask, with gradients, and beside a token whose numbers are not finite."""
    a_model("gpt_oss", 256).save_pretrained(tmp_path)
    exact, own = (models.load(tmp_path, dtype=dtype) for dtype in (torch.float64, torch.float32))
    tokens, cache = torch.tensor([TOKENS]), exact.new_cache(batch=1, capacity=64)
    seen = torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).tril()
    logits = exact(tokens)
    torch.testing.assert_close(exact(tokens, mask=seen), logits)
    torch.testing.assert_close(exact(tokens, cache=cache), logits)
    torch.testing.assert_close(own(tokens, mask=seen).double(), logits, rtol=1e-4, atol=1e-4)
    trained = own.requires_grad_(True)
    trained(tokens).square().sum().backward()
    by_hand = trained.layers[0].sinks.grad.clone()
    trained.zero_grad()
    trained(tokens, mask=seen).square().sum().backward()
    torch.testing.assert_close(trained.layers[0].sinks.grad, by_hand, rtol=1e-3, atol=1e-3)
    exact.requires_grad_(False).embedding[TOKENS[-1]] = torch.nan
    broken = exact(tokens)[:, :-1]
    same = torch.tensor([token != TOKENS[-1] for token in TOKENS[:-1]]).cumprod(0).bool()
    torch.testing.assert_close(broken[:, same], logits[:, :-1][:, same])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_a_converted_model(family: str) -> None:
    """Its logits, its tensors under their published names and back, and packed matrices, which decode losslessly."""
    model, tokens = a_model(family, hidden_size=64, head_dim=32), torch.tensor([TOKENS])
    own = from_transformers(model)
    torch.testing.assert_close(own(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
    packed = own.quantized("int8", group=32)
    greedy = generate(packed, TOKENS, max_new_tokens=NEW, end_tokens=()).tokens
    drafted = generate(packed, TOKENS, "jacobi", block_size=9, max_new_tokens=NEW, end_tokens=()).tokens
    assert torch.equal(drafted, greedy)
    if own.config.sinks:
        with pytest.raises(NotImplementedError, match="be one whose tensors are parts of ours, got gpt-oss or Gemma"):
            models.to_hf_state_dict(own.state_dict(), own.config)
        return
    published = models.to_hf_state_dict(own.state_dict(), own.config)
    assert published.keys() == model.state_dict().keys()
    back = models.from_hf_state_dict(published, own.config)
    assert all(torch.equal(back[name], tensor) for name, tensor in own.state_dict().items())


@pytest.mark.filterwarnings("ignore")
def test_packed_rows_have_sinks() -> None:
    own: Any = from_transformers(a_model("gpt_oss", layer_types=KINDS[:1] * 3))
    lengths = (5, 1, 9)
    tokens = torch.cat([torch.tensor(TOKENS[:length]) for length in lengths])[None]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    with torch.inference_mode():
        rows = own(tokens, cache=own.new_cache(batch=3, capacity=16), cu_seqlens=ends)
        alone = own(tokens[:, 6:], cache=own.new_cache(batch=1, capacity=16))
    assert own.packs_rows and torch.equal(rows[:, 6:], alone) and torch.equal(rows[:, :5], alone[:, :5])


@pytest.mark.parametrize("family", ["olmo3", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")
def test_drafters(family: str, tmp_path: Path) -> None:
    """New heads for such a target have the layers that drafters are stored with, and draft losslessly."""
    rule = {"rope_type": "default", "rope_theta": 500000.0}
    rules = rule if family == "gpt_oss" else {kind: dict(rule) for kind in KINDS}
    fields = {"num_hidden_layers": 4, "layer_types": [*KINDS, KINDS[1]], "rope_parameters": rules, "rope_scaling": None}
    a_model(family, **fields).save_pretrained(tmp_path / "target")
    own = models.load(tmp_path / "target", dtype=torch.float32)
    greedy = generate(own, TOKENS, max_new_tokens=NEW, end_tokens=()).tokens
    vocabulary = torch.arange(0, 61, 2)
    heads: dict[str, Any] = {
        "eagle": new_eagle_head(own, vocabulary),
        "dflash": new_dflash_head(own, 4, 60, layers=2, vocabulary=vocabulary),
    }
    for method, head in heads.items():
        models.save_drafter(head, tmp_path / method)
        found: Any = models.load_drafter(tmp_path / method, own)
        assert found.config.body.usual and found.config.body.activation == "silu"
        own.drafters = {method: found}
        assert torch.equal(generate(own, TOKENS, method, max_new_tokens=NEW, end_tokens=()).tokens, greedy)


def random_blocks(count: int, outputs: int, width: int, exponents: tuple[int, int]) -> tuple[Tensor, Tensor]:
    blocks = torch.randint(0, 256, (count, outputs, width // 32, 16), dtype=torch.uint8)
    scales = torch.randint(*exponents, (count, outputs, width // 32), dtype=torch.uint8)
    return blocks, scales


def in_mxfp4(folder: Path, exponents: tuple[int, int] = (118, 124)) -> Any:
    """A folder as gpt-oss is published; the model of transformers with the same numbers."""
    torch.manual_seed(3)
    model = a_model("gpt_oss")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, width, outputs = tensors.pop(name).shape
        blocks, scales = random_blocks(count, outputs, width, exponents)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(fields))
    return model


@pytest.mark.parametrize("exponents", [(104, 143), (0, 255)])
def test_numbers_of_mxfp4_are_kept(exponents: tuple[int, int]) -> None:
    """Exactly, in five bits where float16 holds their powers of two and in eight where it does not."""
    torch.manual_seed(0)
    blocks, scales = random_blocks(3, 20, 96, exponents)
    blocks[0, 0, 1] = 0x80
    scales[0, 0, 1] = 3  # zeros may have any exponent

    def matrix(number: int) -> mxfp4.Blocks:
        return mxfp4.Blocks(torch.stack((blocks[number] & 15, blocks[number] >> 4), -1).flatten(1), scales[number])

    weight = mxfp4.packed([lambda number=number: matrix(number) for number in range(3)])  # type: ignore[misc]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(weight.dequantize(), expected) and weight.shape == (3, 20, 96)
    assert [part.layout.bits for part in weight.parts()] == [5 if exponents[0] else 8]
    scales[1, 1, 1] = 255
    with pytest.raises(ValueError, match="scales must be finite, got 1 others"):
        mxfp4.packed([lambda: matrix(1)])


def check_products(packed: Any, numbers: Any) -> None:
    """Products with packed matrices round rows to 8 bits in blocks of 32, and their scales to 11 bits."""
    weight, bias = numbers.experts_gate_up.double(), numbers.experts_gate_up_bias.double()
    x, ends = torch.randn(9, weight.shape[2]), torch.tensor([2, 2, 5, 6, 8, 9])
    found = grouped_linear(x, packed.experts_gate_up, ends, packed.experts_gate_up_bias)
    blocks = x.abs().unflatten(1, (-1, 32)).amax(-1).repeat_interleave(32, 1)
    for row, expert in enumerate([0, 0, 2, 2, 2, 3, 4, 4, 5]):
        exact = weight[expert] @ x[row].double() + bias[expert]
        bound = weight[expert].abs() @ (blocks[row] / 254 + x[row].abs() * 2**-10).double() + 1e-5
        assert ((found[row] - exact).abs() <= bound).all()


@pytest.mark.filterwarnings("ignore")
def test_a_folder_in_mxfp4(tmp_path: Path) -> None:
    model = in_mxfp4(tmp_path)
    tokens = torch.tensor([TOKENS])
    numbers = models.load(tmp_path, dtype=torch.float32, packed=False)
    torch.testing.assert_close(numbers(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert generate(numbers, TOKENS, max_new_tokens=NEW, end_tokens=()).tokens.tolist() == theirs(model)
    own = models.load(tmp_path, dtype=torch.float32)
    for mine, other in zip(own.layers, numbers.layers, strict=True):
        for name in ("experts_gate_up", "experts_down"):
            assert torch.equal(getattr(mine, name).dequantize(), getattr(other, name))
    check_products(own.layers[1], numbers.layers[1])
    greedy = generate(own, TOKENS, max_new_tokens=NEW, end_tokens=()).tokens
    for page_size in (None, 7):
        drafted = generate(own, TOKENS, "jacobi", block_size=9, max_new_tokens=NEW, end_tokens=(), page_size=page_size)
        assert torch.equal(drafted.tokens, greedy)


@pytest.mark.parametrize(
    ("family", "changes", "error", "text"),
    [
        ("olmo3", {"sliding_window": 0}, ValueError, "sliding_window must be .* got 0"),
        ("olmo3", {"sliding_window": None}, ValueError, "sliding_window must be .* got None"),
        ("olmo3", {"layer_types": KINDS[:2]}, ValueError, "layer_types must name 3 layers"),
        ("olmo3", {"num_hidden_layers": 10**9, "layer_types": None}, ValueError, "num_hidden_layers must be at most"),
        ("olmo3", {"rope_parameters": {"rope_type": "linear"}}, NotImplementedError, "'rope_type' must be absent"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 1e4}, NotImplementedError, "rope_theta must be 500000.0 or"),
        (
            "olmo3",
            {"rope_scaling": {**YARN, "truncate": False}},
            NotImplementedError,
            "truncate must be true in rules of",
        ),
        ("gpt_oss", {"sliding_window": -1}, ValueError, "sliding_window must be .* got -1"),
        ("gpt_oss", {"num_local_experts": 2}, ValueError, "per_token must be at most count"),
        ("gpt_oss", {"swiglu_limit": -1.0}, ValueError, "clamp must not be negative"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, NotImplementedError, "quant_method must be one"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, ValueError, "hold .*gate_up_proj_blocks, as"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4", "rotation": 1}},
            NotImplementedError,
            "'rotation' must be absent",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused(
    family: str, changes: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    a_model(family).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(error, match=text):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("part", "changed", "error", "text"),
    [
        ("blocks", lambda x: x.float(), NotImplementedError, "gate_up_proj_blocks must be U8, got float32"),
        ("blocks", lambda x: x[..., :8].contiguous(), ValueError, "gate_up_proj_blocks must have shape"),
        ("scales", lambda x: torch.full_like(x, 255), ValueError, "gate_up_proj: scales must be finite"),
        ("scales", None, ValueError, "hold .*gate_up_proj_scales, as quantization_config says, got none"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_broken_blocks(part: str, changed: Any, error: type[Exception], text: str, tmp_path: Path) -> None:
    in_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.gate_up_proj_{part}"
    block = tensors.pop(name)
    if changed is not None:
        tensors[name] = changed(block)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(error, match=text):
        models.load(tmp_path)
