"""Gemma 3 from folders and GGUF files: logits and tokens of transformers, past its windows; its tokenizer in GGUF."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models.checkpoints import gemma3

transformers = pytest.importorskip("transformers", reason="builds models with transformers", minversion="5.20")
from tests.integrations.test_shadow import small  # noqa: E402
from tests.support.lora import random_adapter  # noqa: E402

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = {"num_hidden_layers": 3, "layer_types": KINDS, "head_dim": 16, "max_position_embeddings": 256}
TOKENS = [(7 * i) % 50 + 3 for i in range(40)]
NEW = 30


def a_model(window: int = 7, **more: Any) -> Any:
    model = small("Gemma3Text", **{**SIZES, "sliding_window": window, "query_pre_attn_scalar": 16, **more})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(std=0.3)
    return model.requires_grad_(False)


def theirs(model: Any, tokens: list[int] = TOKENS) -> list[int]:
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found: list[int] = model.generate(torch.tensor([tokens]), max_new_tokens=NEW, **settings)[0, len(tokens) :].tolist()
    return found


@pytest.mark.parametrize("window", [2, 7, 16, 512])
@pytest.mark.parametrize("scalar", [16, 24])
@pytest.mark.filterwarnings("ignore")
def test_a_folder(window: int, scalar: int, tmp_path: Path) -> None:
    model = a_model(window, query_pre_attn_scalar=scalar)
    model.save_pretrained(tmp_path)
    own = models.load(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(own(torch.tensor([TOKENS])), model(torch.tensor([TOKENS])).logits, rtol=1e-4, atol=1e-4)
    expected = theirs(model)
    for method, options in {
        "autoregressive": {},
        "jacobi": {"block_size": 9},
        "jacobi_multiblock": {"block_size": 4, "blocks": 3},
    }.items():
        for page_size in (None, 7):
            more = {**options, "page_size": page_size}
            found = generate(own, [TOKENS, TOKENS[:3]], method, max_new_tokens=NEW, end_tokens=(), **more).tokens
            assert found[0].tolist() == expected and found[1].tolist() == theirs(model, TOKENS[:3])
    own = own.to(torch.bfloat16)
    greedy = generate(own, TOKENS, max_new_tokens=NEW, end_tokens=()).tokens
    assert torch.equal(generate(own, TOKENS, "jacobi", block_size=9, max_new_tokens=NEW, end_tokens=()).tokens, greedy)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_transformers_4(tmp_path: Path) -> None:
    """The published ones: a base for each kind of layer outside of any rule, and a pattern or names of layers."""
    rules = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    }
    model = a_model(rope_parameters=rules)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    new = models.load(tmp_path, dtype=torch.float32)
    del fields["rope_parameters"]
    fields |= {
        "rope_theta": 5000.0,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    file.write_text(json.dumps(fields))
    old = models.load(tmp_path, dtype=torch.float32)
    assert old.config == new.config and old.config.window_rope_theta == 300.0
    expected = model(torch.tensor([TOKENS])).logits
    torch.testing.assert_close(old(torch.tensor([TOKENS])), expected, rtol=1e-4, atol=1e-4)
    sizes = {name: fields[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
    config = gemma3.from_gemma3_config(
        {**sizes, "num_key_value_heads": 1, "num_hidden_layers": 6, "sliding_window_pattern": 3}
    )
    assert [window is None for window in config.windows] == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"sliding_window": 0}, ValueError, "sliding_window must be .* got 0"),
        ({"sliding_window": -5}, ValueError, "sliding_window must be .* got -5"),
        ({"layer_types": KINDS[:2]}, ValueError, "layer_types must name 3 layers"),
        ({"use_bidirectional_attention": True}, NotImplementedError, "use_bidirectional_attention must be false"),
        ({"is_causal": False}, NotImplementedError, "is_causal must be true, got False"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            NotImplementedError,
            "'rope_type' must be inside the rule",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            NotImplementedError,
            "config.json: rope_scaling: type must be called rope_type",
        ),
        (
            {
                "rope_parameters": {
                    kind: {"type": "linear", "factor": 2.0} for kind in ("sliding_attention", "full_attention")
                }
            },
            NotImplementedError,
            "sliding_attention: type must be called rope_type",
        ),
        ({"attn_logit_softcapping": 50.0}, NotImplementedError, "attn_logit_softcapping must be null, got 50.0"),
        ({"hidden_activation": "silu"}, NotImplementedError, "hidden_activation must be 'gelu_pytorch_tanh'"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(error, match=text):
        models.load(tmp_path)


PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += [
    "\n\n",
    "   ",
    *"\u2581abcde",
    "ab",
    "abc",
    "\u2581a",
    "cd",
    "\u2581ab",
    "de",
    "cde",
    "\u2581abc",
    "bc",
    "<turn>",
]
TYPES = [3, 3, 3, 2, *[6] * 256, 4, 4, *[1] * (len(PIECES) - 263), 3]


def written(path: Path, window: int = 7, every: int = 6, keys: dict[str, Any] | None = None, **words: Any) -> Any:
    """A GGUF file as llama.cpp's converter writes it, 1 added to the weights of norms; the model of transformers, in
    which each layer of the number `every` sees the whole text. `keys` that are None are left out."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
    files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf")
    kinds = [KINDS[(layer + 1) % every == 0] for layer in range(6)]
    model = a_model(window, vocab_size=len(PIECES), num_hidden_layers=6, layer_types=kinds)
    writer = gguf.GGUFWriter(path, "gemma3")
    known = {
        "context_length": 256, "embedding_length": 32, "block_count": 6, "feed_forward_length": 48,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16,
        "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": window,
        "rope.freq_base": 1e6,
    }  # fmt: skip
    for name, value in {**known, **(keys or {})}.items():
        if value is not None:
            files.add(writer, f"gemma3.{name}", value)
    ranks = [-float(index) for index in range(len(PIECES))]
    said = {"model": "llama", "pre": "default", "tokens": PIECES, "scores": ranks, "token_type": TYPES}
    said |= {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "add_space_prefix": False}
    for name, value in {**said, "add_bos_token": True, **words}.items():
        if value is not None:
            files.add(writer, f"tokenizer.ggml.{name}", value)
    state = model.state_dict()
    own = gemma3.from_gemma3_config(json.loads(model.config.to_json_string()))
    for (name, published), (_, stored) in zip(
        gemma3._parts(own, gemma3._PUBLISHED), gemma3._parts(own, gemma3._GGUF), strict=True
    ):
        norm = name.rpartition(".")[2] in gemma3._NORMS
        for theirs_name, in_file in zip(published, stored, strict=True):
            writer.add_tensor(in_file, (state[theirs_name] + norm).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.filterwarnings("ignore")
def test_a_gguf_file(tmp_path: Path) -> None:
    model = written(tmp_path / "m.gguf")
    own = models.load(tmp_path / "m.gguf")
    torch.testing.assert_close(own(torch.tensor([TOKENS])), model(torch.tensor([TOKENS])).logits, rtol=1e-4, atol=1e-4)
    found = generate(own, TOKENS, "jacobi", block_size=9, max_new_tokens=NEW, end_tokens=()).tokens
    assert found.tolist() == theirs(model)


@pytest.mark.filterwarnings("ignore")
def test_fields_outside_of_rules_and_layers(tmp_path: Path) -> None:
    """Without names of layers `_sliding_window_pattern`, which transformers writes, is not read; a share outside is for
    rules that have none."""
    a_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "layer_types": None, "_sliding_window_pattern": 2}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False)
    own = models.load(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(own(torch.tensor([TOKENS])), model(torch.tensor([TOKENS])).logits, rtol=1e-4, atol=1e-4)
    rules = {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}}
    file.write_text(json.dumps({**fields, "rope_parameters": rules, "partial_rotary_factor": 0.5}))
    with pytest.raises(NotImplementedError, match="partial_rotary_factor must be 1, got 0.5"):
        models.load(tmp_path)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
PERIODS: dict[str, tuple[int, dict[str, Any]]] = {
    "a number": (3, {"attention.sliding_window_pattern": 3}),
    "a list": (6, {"attention.sliding_window_pattern": [True] * 5 + [False]}),
    "no layer": (1, {"attention.sliding_window_pattern": 1}),
    "no window": (1, {"attention.sliding_window": None}),
}


@pytest.mark.parametrize("name", PERIODS)
@pytest.mark.filterwarnings("ignore")
def test_the_layers_with_a_window_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    every, keys = PERIODS[name]
    model = written(tmp_path / "m.gguf", every=every, keys=keys)
    own = models.load(tmp_path / "m.gguf")
    torch.testing.assert_close(own(torch.tensor([TOKENS])), model(torch.tensor([TOKENS])).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"attention.sliding_window_pattern": [False] * 6}, "sliding_window_pattern must give a window to all layers but every 6th"),
        ({"attention.key_length_swa": 8}, r"gemma3.attention.key_length_swa must be attention.key_length \(16\), got 8"),
        ({"rope.dimension_count_swa": 8}, "rope.dimension_count_swa must be rope.dimension_count"),
        ({"nextn_predict_layers": 1}, "gemma3.nextn_predict_layers must be 0, got 1"),
        ({**YARN, "rope.scaling.attn_factor": 1.3}, "gemma3.rope.scaling.attn_factor must be 1 beside windows, got 1.3"),
        ({**YARN, "rope.scaling.factor": 0.5}, "gemma3.rope.scaling.factor must be at least 1 beside windows, got 0.5"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_keys_that_are_refused(keys: dict[str, Any], text: str, tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", keys=keys)
    with pytest.raises(NotImplementedError, match=text):
        models.load(tmp_path / "m.gguf")


@pytest.mark.parametrize("saved", [None, ["norm", "input_layernorm"]])
@pytest.mark.filterwarnings("ignore")
def test_adapters(saved: list[str] | None, tmp_path: Path) -> None:
    """Merged, norms too, which a file holds less 1; and of requests."""
    peft = pytest.importorskip("peft", reason="compares with peft where it is installed")
    model = a_model()
    model.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], modules_to_save=saved)
    adapted = peft.get_peft_model(model, settings).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(tmp_path / "lora")
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        expected = adapted(tokens).logits
    own: Any = models.load(tmp_path / "base", dtype=torch.float32, adapter=tmp_path / "lora")
    torch.testing.assert_close(own(tokens), expected, rtol=1e-4, atol=1e-4)
    plain: Any = models.load(tmp_path / "base", dtype=torch.float32)
    if saved is not None:
        with pytest.raises(NotImplementedError, match="hold pairs for the matrices of attention"):
            models.load_adapter(plain, "a", tmp_path / "lora")
        return
    models.load_adapter(plain, "a", tmp_path / "lora")
    cache = plain.new_cache(1, 64)
    cache.adapt_([plain.adapters["a"]])
    with torch.inference_mode():
        torch.testing.assert_close(plain(tokens, cache=cache), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_norms_beside_an_adapter_are_rounded_once(tmp_path: Path) -> None:
    """1 is added in the model's dtype, not in the file's."""
    a_model().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    plain: Any = models.load(tmp_path / "base", dtype=torch.float32)
    adapter = random_adapter(plain, tmp_path / "lora", 4, 0)
    own: Any = models.load(tmp_path / "base", dtype=torch.float32, adapter=adapter)
    assert not torch.equal(own.layers[0].qkv, plain.layers[0].qkv) and torch.equal(own.norm, plain.norm)


def by_scores(text: str) -> list[int]:
    """llama.cpp's rule, written down: the neighbours whose piece has the best score become one, the leftmost first."""
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [(PIECES.index(a + b), at) for at, (a, b) in enumerate(zip(symbols, symbols[1:])) if a + b in PIECES]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        known = symbol in PIECES
        ids += [PIECES.index(symbol)] if known else [4 + byte for byte in symbol.encode()]
    return ids


@pytest.mark.filterwarnings("ignore")
def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    written(tmp_path / "m.gguf")
    tokenizer = models.load(tmp_path / "m.gguf").tokenizer
    for text in ("abcde", "abc abcd cdeab", " ab", "bcde a b", "ab\u00e9c\U0001f600", "xyz abc", "ababab  cdcd"):
        ids = list(tokenizer.encode(text))
        assert ids == [2, *by_scores(text)], text
        assert tokenizer.decode(ids) == text
    assert list(tokenizer.encode("ab\n\nc   d"))[1:] == [*by_scores("ab"), 260, *by_scores("c"), 261, *by_scores("d")]
    assert list(tokenizer.encode("<turn>ab"))[1:] == [len(PIECES) - 1, *by_scores("ab")]


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"scores": [0.0] * 3}, ValueError, "scores must be a number for each of"),
        ({"scores": None}, ValueError, "must hold 'tokenizer.ggml.scores'"),
        ({"add_space_prefix": True}, NotImplementedError, "add_space_prefix must be false, got True"),
        ({"add_space_prefix": None}, NotImplementedError, "add_space_prefix must be false, got True"),
        ({"tokens": [*PIECES[:-1], "x" * 300]}, ValueError, "tokens must have at most 256 characters, got 300"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tokenizers_that_are_refused(words: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", **words)
    with pytest.raises(error, match=text):
        models.load(tmp_path / "m.gguf")


@pytest.mark.parametrize("has_nulls", [False, True])
def test_a_rule_beside_rules_of_kinds_is_that_of_full_layers(has_nulls: bool) -> None:
    """As transformers reads it; bases outside are those of rules without one."""
    rules = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
        "full_attention": {"rope_type": "default", "rope_theta": 7.0},
    }
    fields = {**SIZES, "model_type": "gemma3_text", "num_attention_heads": 4, "vocab_size": 9, "hidden_size": 32}
    fields |= {"rope_theta": None, "rope_local_base_freq": None} if has_nulls else {}
    fields |= {"intermediate_size": 8, "rope_parameters": rules, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}
    full = transformers.Gemma3TextConfig(**copy.deepcopy(fields)).rope_parameters["full_attention"]
    config = gemma3.from_gemma3_config(fields)
    assert isinstance(config.rope_scaling, models.LinearScaling) and full["rope_type"] == "linear"
    assert (config.rope_scaling.factor, config.rope_theta) == (full["factor"], full["rope_theta"]) == (3.0, 7.0)
