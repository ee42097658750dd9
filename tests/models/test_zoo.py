from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models import (
    ByteTokenizer,
    LinearScaling,
    Llama3Scaling,
    Transformer,
    TransformerConfig,
    YarnScaling,
    from_hf_config,
    from_hf_state_dict,
    to_hf_state_dict,
)
from pdkernels.models.checkpoints.hf import ARCHITECTURES
from pdkernels.models.checkpoints.zoo import WEIGHTS, save_tiny
from tests.support.checkpoints import (
    CHECKPOINTS,
    LINEAR,
    LLAMA,
    LLAMA31,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    plain_logits,
    random_checkpoint,
)

SNIPPET = '''\
class Counter:
    def __init__(self, start=0):
        self.value = start

    def increment(self, amount=1):
        """Add amount to the value and return it."""
        self.value += amount
        return self.value
'''


# ---- tiny models


def test_tiny_code_is_small() -> None:
    model = models.load("tiny-code")
    assert "tiny-code" in models.available()
    assert (WEIGHTS / "tiny-code.safetensors").stat().st_size <= 4_000_000
    assert 1.8e6 < sum(p.numel() for p in model.parameters()) < 2.2e6
    assert model.config.vocab_size == 257 and model.end_tokens == (256,)
    assert isinstance(model.tokenizer, ByteTokenizer)
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_tiny_code_knows_python() -> None:
    model = models.load("tiny-code")
    tokens = torch.tensor([model.tokenizer.encode(SNIPPET)])
    loss = torch.nn.functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
    assert loss.item() / math.log(2) < 2.0
    shuffled = tokens[:, torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0))]
    noise = torch.nn.functional.cross_entropy(model(shuffled)[0, :-1], shuffled[0, 1:])
    assert noise > 3 * loss


def test_stored_weights_are_the_loaded_ones() -> None:
    stored = load_file(WEIGHTS / "tiny-code.safetensors")
    for dtype in (None, torch.float64, torch.bfloat16):
        model = models.load("tiny-code", dtype=dtype)
        assert model.dtype == (dtype or torch.float32)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, stored[name].to(tensor.dtype))
    a, b = models.load("tiny-code"), models.load("tiny-code")
    with torch.no_grad():
        a.norm.zero_()
    assert b.norm.any()


@pytest.mark.parametrize("fields", [MINISTRAL3, LLAMA31, LINEAR, QWEN3])
def test_tiny_files_keep_every_field(fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdkernels.models.checkpoints import zoo

    config = replace(from_hf_config(fields), vocab_size=257, rope_style="interleaved")
    zoo.save_tiny(Transformer(config), tmp_path / "tiny-test.safetensors", bits=1.5)
    monkeypatch.setattr(zoo, "WEIGHTS", tmp_path)
    assert zoo.available() == ("tiny-test",)
    assert zoo.load("tiny-test").config == config


def test_tiny_files_from_when_yarn_was_the_only_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdkernels.models.checkpoints import zoo

    config = replace(from_hf_config(MINISTRAL3), vocab_size=257)
    fields = asdict(config)
    fields["yarn"] = fields.pop("rope_scaling")
    del fields["qk_norm"]
    save_file(
        Transformer(config).state_dict(), tmp_path / "tiny-test.safetensors", metadata={"config": json.dumps(fields)}
    )
    monkeypatch.setattr(zoo, "WEIGHTS", tmp_path)
    assert zoo.load("tiny-test").config == config


@pytest.mark.parametrize(("mask_token", "adapter"), [(None, False), (22, False), (None, True), (22, True), (0, True)])
def test_tiny_files_keep_mask_token_and_adapter(
    mask_token: int | None, adapter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdkernels.models.checkpoints import zoo

    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=258, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24
    )
    model = Transformer(config, mask_token=mask_token)
    if adapter:
        model.attach_adapter_([(torch.randn(3, 16), torch.randn(16, 3)) for _ in range(2)], scale=0.5)
    zoo.save_tiny(model, tmp_path / "tiny-test.safetensors", bits=1.5)
    monkeypatch.setattr(zoo, "WEIGHTS", tmp_path)
    for dtype in (None, torch.float64):
        loaded = zoo.load("tiny-test", dtype=dtype)
        assert loaded.mask_token == mask_token and loaded.has_adapter == adapter
        expected = {name: tensor.to(torch.bfloat16).to(loaded.dtype) for name, tensor in model.state_dict().items()}
        state = loaded.state_dict()
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
        assert not any(parameter.requires_grad or parameter.is_meta for parameter in loaded.parameters())
        # The scale is neither lost nor applied twice.
        model = model.to(torch.bfloat16).to(loaded.dtype)
        tokens = torch.tensor([[1, 200, 256, 257]])
        torch.testing.assert_close(loaded(tokens, adapted=adapter), model(tokens, adapted=adapter))


def test_a_tiny_file_without_mask_token_and_adapter_is_as_before() -> None:
    model = models.load("tiny-code")
    assert model.mask_token is None and not model.has_adapter
    with safe_open(WEIGHTS / "tiny-code.safetensors", framework="pt") as file:
        assert "mask_token" not in file.metadata()


# ---- checkpoints


def write(folder: Path, fields: dict[str, Any], state: dict[str, torch.Tensor], shards: int = 1) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    names = sorted(state)
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: state[name] for name in names[shard::shards]}, folder / file)
        weight_map.update(dict.fromkeys(names[shard::shards], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_folders_equal_the_plain_transcription(name: str, shards: int, tmp_path: Path) -> None:
    fields = CHECKPOINTS[name]
    state = random_checkpoint(fields, dtype=torch.float32)
    write(tmp_path, fields, state, shards)
    tokens = torch.randint(fields["vocab_size"], (1, 12), generator=torch.Generator().manual_seed(0))
    model = models.load(tmp_path, dtype=torch.float64)
    expected = plain_logits(state, fields, tokens[0].tolist())
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-11, atol=1e-11)
    assert model.tokenizer is None
    saved = to_hf_state_dict(models.load(str(tmp_path), dtype=torch.float32).state_dict(), model.config)
    assert saved.keys() == state.keys() and all(torch.equal(saved[key], state[key]) for key in state)


@cache
def plain_tokens(name: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    """A checkpoint, and a prompt of five tokens with the continuation of the plain transcription."""
    state, tokens = random_checkpoint(CHECKPOINTS[name], seed=1, dtype=torch.float32), [3, 1, 4, 1, 5]
    for _ in range(8):
        tokens = [*tokens, int(plain_logits(state, CHECKPOINTS[name], tokens)[-1].argmax())]
    return state, tokens


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_folders_decode_the_tokens_of_the_plain_transcription(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state, tokens = plain_tokens(name)
    write(tmp_path, {**CHECKPOINTS[name], "eos_token_id": None}, state)
    model = models.load(tmp_path, dtype=dtype)
    for method in ("autoregressive", "jacobi"):
        assert generate(model, tokens[:5], method=method, max_new_tokens=8).tokens.tolist() == tokens[5:]


def test_dtype_and_end_tokens_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, MINISTRAL3, random_checkpoint(MINISTRAL3, dtype=torch.bfloat16))
    model = models.load(tmp_path)
    assert model.dtype == torch.bfloat16 and model.end_tokens == (2, 11)
    assert models.load(tmp_path, dtype=torch.float16).dtype == torch.float16
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert models.load(tmp_path).end_tokens == (3,)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(
        json.dumps({**MINISTRAL3, "torch_dtype": "float32", "dtype": None, "eos_token_id": None})
    )
    assert models.load(tmp_path).dtype == torch.float32 and models.load(tmp_path).end_tokens == ()


def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write(tmp_path, QWEN2, random_checkpoint(QWEN2, dtype=torch.float32))
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    model = models.load(tmp_path)
    assert model.tokenizer.encode("b a c") == [1, 0, 2] and model.tokenizer.end_tokens == (5,)


def test_the_published_size_of_qwen3_8b() -> None:
    fields = {
        **QWEN3,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    }
    with torch.device("meta"):
        model = Transformer(from_hf_config(fields))
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_190_735_360


def test_configurations() -> None:
    config = from_hf_config(MINISTRAL3)
    assert config.rope_scaling == YarnScaling(4.0, 8, 1.0, 0.1, 1.0, 0.1) and config.rope_theta == 100.0
    config = from_hf_config(LLAMA31)
    assert config.rope_scaling == Llama3Scaling(8.0, 32, 1.0, 4.0) and config.rope_theta == 100.0
    assert from_hf_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}).rope_scaling == LinearScaling(2.0)
    config = from_hf_config(QWEN3)
    assert (config.qk_norm, config.qkv_bias, config.head_dim, config.rope_scaling) == (True, False, 8, None)
    # A window that is given but not used.
    assert (
        from_hf_config({**{k: v for k, v in QWEN3.items() if k != "use_sliding_window"}, "sliding_window": 8}) == config
    )
    assert asdict(from_hf_config(LLAMA))["qkv_bias"] is False and from_hf_config(LLAMA).head_dim == 8
    rope = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
    yarn = from_hf_config({**QWEN2, "rope_scaling": rope}).rope_scaling
    assert isinstance(yarn, YarnScaling) and math.isclose(yarn.attention_factor, 0.1 * math.log(16) + 1)
    assert from_hf_config({**QWEN2, "sliding_window": 8, "use_sliding_window": False}).tied_head


@pytest.mark.parametrize("fields", [QWEN2, QWEN3])
def test_state_dict_round_trip(fields: dict[str, Any]) -> None:
    state, config = random_checkpoint(fields), from_hf_config(fields)
    back = to_hf_state_dict(from_hf_state_dict(state, config), config)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    extra = {
        **state,
        "lm_head.weight": state["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    assert from_hf_state_dict(extra, config).keys() == from_hf_state_dict(state, config).keys()


# ---- errors


def test_unknown_name() -> None:
    with pytest.raises(ValueError) as caught:
        models.load("tiny-cod")
    assert str(caught.value) == (
        "pdkernels.models.load: name_or_path must name a model or a local folder, got 'tiny-cod'. Did you mean 'tiny-code'? "
        f"Models: {', '.join(models.available())}, smollm2-135m-instruct."
    )


def test_a_gguf_file_that_is_missing_or_inside_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a file that exists, got 'my\.gguf', which is missing\.$"):
        models.load("my.gguf")
    (tmp_path / "my.gguf").touch()
    with pytest.raises(
        ValueError, match=rf"must hold config\.json, got none in {tmp_path}\. Name the file: {tmp_path}/my\.gguf\.$"
    ):
        models.load(tmp_path)


def test_bad_dtype() -> None:
    with pytest.raises(TypeError, match="dtype must be one of float64, float32, bfloat16, float16, got torch.int64"):
        models.load("tiny-code", dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, f"model_type must be one of {', '.join(ARCHITECTURES)}, got 'gpt2'."),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'."),
        (
            {"model_type": "llama", "sliding_window": 8},
            "sliding_window must be absent or cover all 64 positions, got 8.",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic"}},
            "rope_type must be one of default, linear, llama3, yarn, got 'dynamic'.",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1, got 0.5."),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            "layer_types must be absent beside a sliding_window of 8, got one.",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta must be 0 without rope_type 'yarn', got 0.1.",
        ),
        (
            {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta must be 0 without rope_type 'yarn', got 0.1.",
        ),
    ],
)
def test_what_is_not_computed_is_not_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        from_hf_config({**QWEN2, **changes})
    assert str(caught.value) == f"pdkernels.models.load: config.json: {message}"


def test_missing_field() -> None:
    with pytest.raises(ValueError, match="config.json must hold 'hidden_size', got only"):
        from_hf_config({name: value for name, value in QWEN2.items() if name != "hidden_size"})
    without = {name: value for name, value in QWEN3.items() if name != "head_dim"}
    with pytest.raises(ValueError, match="config.json must hold 'head_dim', got only"):
        from_hf_config({**without, "model_type": "sdar"})
    assert from_hf_config(without).head_dim == 128  # as in transformers' class


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear"}, "must hold 'factor', got only rope_type."),
        ({"rope_type": "yarn", "beta_fast": 32}, "must hold 'factor', got only beta_fast, rope_type."),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "high_freq_factor": 4.0},
            "must hold 'low_freq_factor', got only factor, high_freq_factor, original_max_position_embeddings, rope_type.",
        ),
    ],
)
def test_missing_field_of_rope(where: str, rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_hf_config({**LLAMA, where: rope})
    assert str(caught.value) == f"pdkernels.models.load: config.json: {where} {message}"


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    state, config = random_checkpoint(QWEN2), from_hf_config(QWEN2)
    short = {name: tensor for name, tensor in state.items() if "layers.1.self_attn" not in name}
    with pytest.raises(ValueError, match=r"got none called model\.layers\.1\.self_attn\.q_proj\.weight.* and 3 more\."):
        from_hf_state_dict(short, config)
    with pytest.raises(ValueError, match=r"hold only tensors of its config\.json, got also model\.layers\.0\.q_norm\."):
        from_hf_state_dict({**state, "model.layers.0.q_norm": torch.ones(1)}, config)
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal the embedding of a tied model"):
        from_hf_state_dict({**state, "lm_head.weight": torch.ones(23, 24)}, config)
    write(tmp_path, QWEN2, {**state, "model.norm.weight": torch.ones(25)})
    with pytest.raises(
        ValueError, match=r"model\.safetensors: model\.norm\.weight must have shape \(24,\), got \(25,\)\."
    ):
        models.load(tmp_path)


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name_or_path must hold config\.json, got none in"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json must be JSON, got .*config\.json"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    with pytest.raises(ValueError, match=r"name_or_path must hold \*\.safetensors files, got none in"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN2, "dtype": "int8"}))
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got 'int8'. Pass dtype="):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"got none called model-00001-of-00002\.safetensors\."):
        models.load(tmp_path)


def test_a_file_of_a_training_script_is_loaded_by_its_path(tmp_path: Path) -> None:
    model = models.load("tiny-code")
    path = tmp_path / "mine.safetensors"
    save_tiny(model, path)
    for given in (path, str(path)):
        loaded = models.load(given)
        assert isinstance(loaded, Transformer) and loaded.config == model.config
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    with pytest.raises(ValueError, match="adapters are for checkpoints, and .* is the file of a single model"):
        models.load(path, adapter=tmp_path)


@pytest.mark.parametrize(
    "shapes", ["[1", "[1]", '{"x": 1}', '{"x": [-2]}', '{"x": [9]}', '{"x": [1, "a"]}', '{"x": [3]}']
)
def test_broken_planes_are_refused(tmp_path: Path, shapes: str) -> None:
    """A file as wheels have them, with shapes that its bytes do not fill, or with other tensors than planes."""
    path = tmp_path / "other.safetensors"
    metadata = {"config": json.dumps(asdict(models.load("tiny-code").config) | {"layers": 1}), "shapes": shapes}
    for planes in ({"exponents": 3, "fractions": 3}, {"exponents": 3, "fractions": 2}, {"exponents": 3}):
        tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in planes.items()}
        save_file(tensors, path, metadata=metadata)
        with pytest.raises((ValueError, TypeError), match=r"pdkernels.models.load: "):
            models.load(path)


@pytest.mark.parametrize("wrong", ["text", "no config", "broken config", "a million layers"])
def test_other_files_are_refused(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "other.safetensors"
    config = {"broken config": "[1", "a million layers": json.dumps({"layers": 10**6})}.get(wrong)
    if wrong == "text":
        path.write_text("hello")
    else:
        save_file({"x": torch.zeros(2)}, path, metadata=None if config is None else {"config": config})
    kinds = {"text": "be a whole safetensors file", "a million layers": "have no more layers than tensors"}
    words = kinds.get(wrong, "be a file that a training script")
    with pytest.raises(ValueError, match=f"pdkernels.models.load: .* must {words}"):
        models.load(path)
