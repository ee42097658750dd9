"""Quantised checkpoints in folders: AWQ, GPTQ and compressed-tensors, number for number as they are published."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pdkernels as pd
from pdkernels import models
from pdkernels.decoding import generate
from tests.support.checkpoints import plain_logits
from tests.support.quantized_files import FAMILIES, KINDS, LLAMA, QWEN2, QWEN3_MOE, quantised, write_folder

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def largest(model: Any) -> list[pd.QuantizedWeight]:
    return [module for module in model.modules() if isinstance(module, pd.QuantizedWeight)]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_published_ones(kind: str, tmp_path: Path) -> None:
    held = write_folder(tmp_path, LLAMA, KINDS[kind])
    model = models.load(tmp_path)
    assert len(largest(model)) == 2 * 4
    for index, layer in enumerate(model.layers):
        for ours, theirs in (
            (layer.qkv, [f"self_attn.{part}_proj" for part in "qkv"]),
            (layer.output, ["self_attn.o_proj"]),
            (layer.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.down, ["mlp.down_proj"]),
        ):
            expected = torch.cat([held[f"model.layers.{index}.{name}.weight"] for name in theirs])
            assert torch.equal(ours.dequantize(KINDS[kind].dtype), expected)
    # As numbers they are rounded to the dtype of the scales, as the published code does.
    numbers = models.load(tmp_path, packed=False)
    expected = models.from_hf_state_dict({name: tensor.float() for name, tensor in held.items()}, numbers.config)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in numbers.state_dict().items())


@pytest.mark.covering
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["awq 32", "gptq 4 of rows", "packed 4 of 32, zeros", "int8"])
def test_logits_are_close_to_those_of_the_numbers(family: str, kind: str, tmp_path: Path) -> None:
    held = write_folder(tmp_path, FAMILIES[family], KINDS[kind])
    model = models.load(tmp_path, packed=True)
    expected = plain_logits(held, FAMILIES[family], TOKENS)
    found = model(torch.tensor([TOKENS]))[0].double()
    assert (found - expected).norm() < 0.08 * expected.norm()  # activations have 8 bits
    exact = models.load(tmp_path, dtype=torch.float64)
    assert largest(exact) == []
    torch.testing.assert_close(exact(torch.tensor([TOKENS]))[0], expected, rtol=1e-9, atol=1e-9)
    greedy = generate(model, TOKENS, max_new_tokens=12, end_tokens=())
    for draft in ("model", "lookup"):
        ours = generate(model, TOKENS, "jacobi", draft=draft, max_new_tokens=12, end_tokens=())
        assert ours.tokens.tolist() == greedy.tokens.tolist()


FEW = ("awq 32", "gptq 4 of rows", "packed 4 of 32, zeros", "int8")  # one of each library, and one of 8 bits


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in FEW else pytest.mark.slow) for kind in KINDS])
def test_experts_stay_packed(kind: str, tmp_path: Path) -> None:
    held = write_folder(tmp_path, QWEN3_MOE, KINDS[kind])
    model, numbers = models.load(tmp_path, packed=True), models.load(tmp_path, packed=False)
    expected = models.from_hf_state_dict({name: tensor.float() for name, tensor in held.items()}, numbers.config)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in numbers.state_dict().items())
    for index, layer in enumerate(model.layers):
        for name in ("experts_gate_up", "experts_down"):
            packed = getattr(layer, name)
            assert packed.shape == expected[f"layers.{index}.{name}"].shape and packed.matrices == 4
            assert torch.equal(packed.dequantize(KINDS[kind].dtype).float(), expected[f"layers.{index}.{name}"])
        assert isinstance(layer.router, torch.nn.Parameter)
    greedy = generate(model, TOKENS, max_new_tokens=12, end_tokens=())
    assert generate(model, TOKENS, "jacobi", max_new_tokens=12, end_tokens=()).tokens.tolist() == greedy.tokens.tolist()


OTHERS = ("gemma4_text", "gemma2", "gemma3_text", "olmo2", "olmo3", "gpt_oss", "mixtral", "olmoe", "ministral3")


@pytest.mark.parametrize(
    "kind", [kind if kind == OTHERS[0] else pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS]
)
@pytest.mark.parametrize("form", ["packed 4 of 32, zeros", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_every_matrix_of_a_family(form: str, kind: str, tmp_path: Path) -> None:
    """Logits are those of transformers with the numbers that the codes stand for; matrices of other widths hold numbers."""
    from tests.models import test_config_fields

    transformers, stored, chosen = test_config_fields.transformers, dict[str, torch.Tensor](), KINDS[form]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    fields = {**test_config_fields.base(kind), **sizes}
    assert test_config_fields.written(fields, tmp_path) is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    held, plain = load_file(tmp_path / "model.safetensors"), ["lm_head"]
    for name, matrix in dict(held).items():
        module = name.removesuffix(".weight")
        quantised_too = module in linear or (".experts." in name and matrix.dim() == 2)
        if module == name or not quantised_too:
            stored[name] = matrix
        elif matrix.shape[1] % 32:
            stored[name], plain = matrix, [*plain, module]
        else:
            codes = quantised(matrix, chosen.bits, chosen.group, symmetric=chosen.symmetric, dtype=chosen.dtype)
            stored |= {f"{module}.{part}": value for part, value in chosen.pack(codes).items()}
            held[name] = codes.numbers().float()
    save_file(held, tmp_path / "model.safetensors")
    tokens = test_config_fields.TOKENS
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(tokens, return_dict=True).logits
    rewrite(tmp_path, stored, {**chosen.config, "ignore": plain})
    torch.testing.assert_close(models.load(tmp_path, packed=False)(tokens), expected, rtol=1e-4, atol=2e-4)
    packed = models.load(tmp_path)
    assert len(largest(packed)) >= 2 * len(packed.layers) and packed(tokens).isfinite().all()


LLADA = {
    "model_type": "llada", "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 96, "vocab_size": 48,
    "weight_tying": False, "rope": True, "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu",
    "max_sequence_length": 64, "mask_token_id": 47, "eos_token_id": 5, "torch_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("kind", FEW)
def test_blocks_of_llada(kind: str, tmp_path: Path) -> None:
    """Its embedding, whose name is no usual one, holds numbers."""
    config, form = models.from_llada_config(LLADA), copy.deepcopy(KINDS[kind].config)
    state = models.to_llada_state_dict(models.Transformer(config).state_dict(), config)
    held = {name: tensor.clone() for name, tensor in state.items()}
    stored = {**held}
    for name in [name for name, tensor in state.items() if ".blocks." in name and tensor.dim() == 2]:
        matrix = quantised(stored.pop(name), KINDS[kind].bits, KINDS[kind].group, symmetric=KINDS[kind].symmetric, dtype=KINDS[kind].dtype)  # fmt: skip
        module, held[name] = name.removesuffix(".weight"), matrix.numbers().float()
        stored |= {f"{module}.{part}": value for part, value in KINDS[kind].pack(matrix).items()}
    if "ignore" in form:
        form["ignore"] = ["model.transformer.ff_out"]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**LLADA, "quantization_config": form}))
    packed, numbers = models.load(tmp_path), models.load(tmp_path, packed=False)
    expected = models.from_llada_state_dict(held, config)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in numbers.state_dict().items())
    assert len(largest(packed)) == 2 * 4 and torch.equal(packed.embedding, expected["embedding"])


def test_experts_of_several_formats_are_refused(tmp_path: Path) -> None:
    kind = KINDS["packed 4 of 32"]
    write_folder(tmp_path, QWEN3_MOE, kind)
    other = KINDS["packed 8 of rows, zeros, fp32"]
    state = load_file(tmp_path / "model.safetensors")
    module = "model.layers.1.mlp.experts.2.up_proj"
    matrix = quantised(torch.randn(128, 64), 8, 0, symmetric=False, dtype=torch.float32)
    state = {name: value for name, value in state.items() if not name.startswith(module)}
    state |= {f"{module}.{part}": value for part, value in other.pack(matrix).items()}
    save_file(state, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"]) | {"targets": [f"re:.*{module}$"]}
    groups["group_1"]["weights"] |= {"num_bits": 8, "symmetric": False, "strategy": "channel"}
    groups["group_1"]["weights"].pop("group_size")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match=r"must have the format of the other experts, got another one"):
        models.load(tmp_path)
    assert models.load(tmp_path, packed=False).config.experts is not None


@pytest.mark.parametrize("rows", [48, 8])  # whose zeros are one word
@pytest.mark.parametrize("kind", ["gptq 4 of 32", "packed 8 of rows, zeros, fp32", "packed 4 of 32, zeros"])
def test_a_quantised_head(kind: str, rows: int, tmp_path: Path) -> None:
    config = copy.deepcopy(KINDS[kind].config)
    config |= {"lm_head": True} if "gptq" in kind else {"ignore": []}
    held = write_folder(tmp_path, {**LLAMA, "vocab_size": rows}, KINDS[kind]._replace(config=config), head=True)
    model = models.load(tmp_path)
    assert torch.equal(model.head.dequantize(KINDS[kind].dtype), held["lm_head.weight"])
    assert model(torch.tensor([TOKENS]) % rows).isfinite().all()


def test_matrices_that_stay_numbers(tmp_path: Path) -> None:
    """Excluded matrices are read as they are; parts of a joined one are then numbers together."""
    held = write_folder(tmp_path, LLAMA, KINDS["packed 4 of 32"])
    state = load_file(tmp_path / "model.safetensors")
    plain = "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"
    for module in plain:
        state = {name: tensor for name, tensor in state.items() if not name.startswith(module)}
        state[f"{module}.weight"] = held[f"{module}.weight"]
    config = copy.deepcopy(KINDS["packed 4 of 32"].config)
    config["ignore"] = ["re:.*lm_head", plain[0], "re:.*layers\\.1\\.mlp\\.down"]
    rewrite(tmp_path, state, config)
    model = models.load(tmp_path)
    assert isinstance(model.layers[0].qkv, torch.nn.Parameter) and isinstance(model.layers[1].down, torch.nn.Parameter)
    assert isinstance(model.layers[1].qkv, pd.QuantizedWeight)
    expected = torch.cat([held[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(model.layers[0].qkv, expected.float())
    with pytest.raises(NotImplementedError, match=r"0.self_attn.k_proj.weight must be quantised like .*q_proj.weight"):
        models.load(tmp_path, packed=True)


def test_modules_not_to_convert(tmp_path: Path) -> None:
    held = write_folder(tmp_path, LLAMA, KINDS["awq 32"])
    state = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        module = f"model.layers.{layer}.mlp.down_proj"
        state = {name: tensor for name, tensor in state.items() if not name.startswith(module)}
        state[f"{module}.weight"] = held[f"{module}.weight"]
    for config in (
        {**KINDS["awq 32"].config, "modules_to_not_convert": ["down_proj"]},
        {**KINDS["awq 32"].config, "modules_to_not_convert": ["model.layers.*.mlp.down"]},
    ):
        rewrite(tmp_path, state, config)
        model = models.load(tmp_path)
        assert [isinstance(layer.down, torch.nn.Parameter) for layer in model.layers] == [True, True]
    rewrite(tmp_path, state, KINDS["awq 32"].config)
    with pytest.raises(ValueError, match=r"must hold model.layers.0.mlp.down_proj.qweight, .*as quantization_config"):
        models.load(tmp_path)


def test_zeros_of_gptq_are_those_of_its_writer(tmp_path: Path) -> None:
    """A zero of 0 is stored as -1 in a word: it borrows from the next zero, which reading gives back."""
    write_folder(tmp_path, LLAMA, KINDS["gptq 4 of 32"])
    state, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj"
    stored, expected = state[f"{name}.qzeros"], [0, 5, 15, 0, 0, 1, 8, 0]
    stored[:, 0] = (sum(zero << (4 * i) for i, zero in enumerate(expected)) - 0x11111111 + 2**31) % 2**32 - 2**31
    rewrite(tmp_path, state)
    down = models.load(tmp_path).layers[0].down
    fields = pd.reference.quantized_linear.unpack(
        pd.reference.quantized_linear.Layout.of(down.layouts[0]), down.data[0], *down.shape
    ).fields
    assert fields["zero"][:8, 0, 0].tolist() == expected


def test_biases_that_a_model_does_not_have_must_be_zeros(tmp_path: Path) -> None:
    bias = {"model.layers.1.self_attn.o_proj.bias": torch.zeros(64)}
    write_folder(tmp_path, QWEN2, KINDS["gptq 4 of 32"], more=bias)
    assert models.load(tmp_path).config.output_bias is False
    write_folder(tmp_path, QWEN2, KINDS["gptq 4 of 32"], more={name: x + 1 for name, x in bias.items()})
    with pytest.raises(ValueError, match=r"o_proj.bias must be zeros, since the model has no such bias"):
        models.load(tmp_path)


def rewrite(folder: Path, state: Any = None, config: Any = None, **fields: Any) -> None:
    if state is not None:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    known = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps(known if config is None else {**known, "quantization_config": config}))


# ---- what is refused

UNKNOWN = [
    (
        {"quant_method": method},
        f"quantization_config: quant_method must be one of gptq, awq, compressed-tensors, got '{method}'",
    )
    for method in ("bitsandbytes", "fp8", "hqq", "aqlm", "mxfp4", "quark", "auto-round", "torchao")
]
REFUSED = [
    *[("gptq 4 of 32", change, words) for change, words in UNKNOWN],
    ("awq 32", {"version": "gemv"}, "version must be gemm, got 'gemv'"),
    ("awq 32", {"version": "marlin"}, "version must be gemm, got 'marlin'"),
    ("awq 32", {"bits": 8}, "bits must be 4, got 8"),
    ("awq 32", {"group_size": 16}, "group_size must be -1 or a multiple of 32, got 16"),
    ("awq 32", {"backend": "llm-awq"}, "backend must be another than llm-awq"),
    ("gptq 4 of 32", {"bits": 3}, "bits must be 4 or 8, got 3"),
    ("gptq 4 of 32", {"bits": True}, "bits must be 4 or 8, got True"),
    ("gptq 4 of 32", {"checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2, got 'marlin'"),
    ("gptq 4 of 32", {"is_marlin_format": True}, "is_marlin_format must be False, got True"),
    ("gptq 4 of 32", {"dynamic": {"-:mlp": {}}}, "dynamic must be absent"),
    ("gptq 4 of 32", {"pack_dtype": "int16"}, "pack_dtype must be int32, got 'int16'"),
    ("gptq 4 of 32", {"rotation": "hadamard"}, "'rotation' must be absent, got 'hadamard'. It may go if"),
    (
        "gptq 4 of 32",
        {"modules_to_not_convert": ["(?i:a)"]},
        "modules_to_not_convert must hold other patterns than '(?i:a)'",
    ),
    ("int8", {"format": "float-quantized"}, "format must be pack-quantized, int-quantized, naive-quantized"),
    ("int8", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme must be absent"),
    ("int8", {"transform_config": {"config_groups": {"v": {}}}}, "transform_config must be empty"),
    ("int8", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config: format must be dense, got 'sparse-24'"),
    ("int8", {"ignore": ["re:(a)\\1"]}, "ignore must hold other patterns than"),
]
GROUP_REFUSED = [
    ("int8", "weights", {"num_bits": 4}, "num_bits must be 8, got 4"),
    ("int8", "weights", {"type": "float"}, "type must be int, got 'float'"),
    ("int8", "weights", {"strategy": "block"}, "strategy must be channel, group or tensor, got 'block'"),
    ("int8", "weights", {"actorder": "group"}, "actorder must be weight, static or absent, got 'group'"),
    ("int8", "weights", {"dynamic": True}, "dynamic must be false, got True"),
    (
        "int8",
        "input_activations",
        {"dynamic": False},
        "input_activations: dynamic must be True, got False. Quantise its",
    ),
    ("int8", "input_activations", {"strategy": "tensor"}, "strategy must be token, got 'tensor'"),
    ("int8", "input_activations", {"num_bits": 4}, "num_bits must be 8, got 4"),
    ("int8", "input_activations", {"symmetric": False}, "symmetric must be True, got False"),
    ("packed 4 of 32", "weights", {"num_bits": 2}, "num_bits must be 4 or 8, got 2"),
    ("packed 4 of 32", "weights", {"group_size": 48}, "group_size must be -1 or a multiple of 32, got 48"),
]


def refusal(folder: Path, kind: type[Exception] = NotImplementedError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        models.load(folder, **options)
    assert str(caught.value).startswith("pdkernels.models.load: ") and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("folder")
            write_folder(made[kind], LLAMA, KINDS[kind])
        return made[kind]

    return of


@pytest.mark.parametrize(("kind", "change", "words"), REFUSED)
def test_options_that_are_not_followed(kind: str, change: dict[str, Any], words: str, folders: Any) -> None:
    rewrite(folders(kind), config={**KINDS[kind].config, **change})
    assert words in refusal(folders(kind))


@pytest.mark.parametrize(("kind", "part", "change", "words"), GROUP_REFUSED)
def test_options_of_a_group(kind: str, part: str, change: dict[str, Any], words: str, folders: Any) -> None:
    config = copy.deepcopy(KINDS[kind].config)
    config["config_groups"]["group_0"][part] |= change
    rewrite(folders(kind), config=config)
    assert words in refusal(folders(kind))


def broken(state: Any, module: str, name: str, value: Any) -> Any:
    key = f"{module}.{name}"
    if value is None:
        return {other: tensor for other, tensor in state.items() if other != key}
    return {**state, key: value(state[key].clone())}


def one_nan(scales: torch.Tensor) -> torch.Tensor:
    scales[0, 0] = float("nan")
    return scales


WRONG = [
    ("gptq 4 of 32", "qweight", None, ValueError, "must hold model.layers.0.mlp.down_proj.qweight, as quantization_config says, got none."),
    ("gptq 4 of 32", "qweight", lambda x: x[:-1], ValueError, "down_proj.qweight must have shape (24, 64), got (23, 64)."),
    ("gptq 4 of 32", "qzeros", lambda x: x[:0], ValueError, "down_proj.qzeros must have shape (6, 8), got (0, 8)."),
    ("gptq 4 of 32", "scales", one_nan, ValueError, "model.layers.0.mlp.down_proj: scales must be finite, got 1 others."),
    ("gptq 4 of 32", "scales", lambda x: x.int(), NotImplementedError, "down_proj.scales must be float16, bfloat16, float32, got I32."),
    ("gptq 4 of 32", "qweight", lambda x: x.long(), NotImplementedError, "down_proj.qweight must be I32, got I64."),
    ("gptq 4 of 32", "g_idx", lambda x: x.flip(0), NotImplementedError, "down_proj: g_idx must number the groups of inputs in their order, got another order (act-order). Quantise"),
    ("awq 32", "scales", lambda x: x * float("inf"), ValueError, "scales must be finite"),
    ("packed 4 of 32", "weight_shape", lambda x: x + 1, ValueError, "down_proj: weight_shape must be [64, 192], got [65, 193]."),
    ("packed 4 of 32, zeros", "weight_zero_point", None, ValueError, "must hold model.layers.0.mlp.down_proj.weight_zero_point"),
    ("int8", "weight", lambda x: x.float(), NotImplementedError, "down_proj.weight must be I8, got float32."),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value", "error", "words"), WRONG)
def test_tensors_that_do_not_fit(kind: str, name: str, value: Any, error: Any, words: str, tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA, KINDS[kind])
    state = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, broken(state, "model.layers.0.mlp.down_proj", name, value))
    assert words in refusal(tmp_path, error)


def test_more_of_what_does_not_fit(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA, KINDS["awq 64"])
    rewrite(tmp_path, config={**KINDS["awq 64"].config, "group_size": 128})
    words = "q_proj: width must be a multiple of group_size (128) in the format of AWQ, got 64."
    assert words in refusal(tmp_path, ValueError)
    rewrite(tmp_path, config=KINDS["awq 64"].config, num_hidden_layers=10**9)
    assert "must hold every tensor of its config.json, got " in refusal(tmp_path, ValueError)
    rewrite(tmp_path, num_hidden_layers=1)
    assert "must hold only tensors of its config.json, got also model.layers.1" in refusal(tmp_path, ValueError)
    rewrite(tmp_path, num_hidden_layers=2, compression_config=KINDS["int8"].config)
    assert "config.json must describe quantised matrices once" in refusal(tmp_path, ValueError)
    known = json.loads((tmp_path / "config.json").read_text())
    del known["compression_config"], known["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(known))
    assert "packed must not be True for" in refusal(tmp_path, ValueError, packed=True)


def test_an_older_name_of_the_field_is_not_ignored(tmp_path: Path) -> None:
    held = write_folder(tmp_path, LLAMA, KINDS["int8"])
    known = json.loads((tmp_path / "config.json").read_text())
    known["compression_config"] = known.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(known))
    found = models.load(tmp_path).layers[0].down
    assert torch.equal(found.dequantize(torch.bfloat16), held["model.layers.0.mlp.down_proj.weight"])


# ---- the published code


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("packed", "int8"))])
def test_compressed_tensors_decompresses_to_the_same(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compares with compressed-tensors where it is installed")
    transformers = pytest.importorskip("transformers")
    from transformers.utils.quantization_config import CompressedTensorsConfig

    write_folder(tmp_path, LLAMA, KINDS[kind])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    ).eval()
    ours = models.load(tmp_path, packed=False)
    expected = models.from_hf_state_dict(
        {n: x for n, x in theirs.state_dict().items() if "_scale" not in n and "_zero" not in n}, ours.config
    )
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in ours.state_dict().items())
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits.float(), rtol=1e-4, atol=1e-4)
