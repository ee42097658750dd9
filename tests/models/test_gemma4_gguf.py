"""Gemma 4 in GGUF files, as llama.cpp's converter writes them: logits and tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels import models
from pdkernels.decoding import generate

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
transformers = pytest.importorskip("transformers", reason="builds models with transformers", minversion="5.24")
from tests.models.test_gemma3 import NEW, TOKENS, theirs  # noqa: E402
from tests.models.test_gemma4 import F, S, a_model  # noqa: E402
from tests.support import gguf_files as files  # noqa: E402

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm", "layer_scalar": "layer_output_scale.weight",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight", "embed_tokens": "token_embd", "norm": "output_norm",
    "embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip


def stored_name(published: str) -> str:
    """By the map of the package gguf, but for what the converter names itself."""
    prefix, inside = "", published.removeprefix("model.")
    if inside.startswith("layers."):
        _, index, inside = inside.split(".", 2)
        prefix = f"blk.{index}."
    own = NAMES.get(inside) or f"{NAMES[inside.removesuffix('.weight')]}.weight"
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 9).get_name(published, try_suffixes=(".weight",))
    if known is not None:
        assert known.removesuffix(".weight") == f"{prefix}{own}".removesuffix(".weight")
    return f"{prefix}{own}"


def written(
    path: Path, kind: str, split: bool = False, changes: dict[str, Any] | None = None, words: Any = None, **more: Any
) -> Any:
    """A file, and the model of transformers; `changes` of its keys, None: without one. `split`: experts' gates apart."""
    ends = {"layer_types": [S, S, S, F, S, S, F]} if kind == "E2B" else {}
    model = a_model(kind, **{**ends, **more})
    config, layers = model.config, model.config.num_hidden_layers
    slides = [name == "sliding_attention" for name in config.layer_types]
    own = layers - config.num_kv_shared_layers
    inner = [64 if layer < own or not config.use_double_wide_mlp else 128 for layer in range(layers)]
    keys: dict[str, Any] = {
        "context_length": 512, "embedding_length": 32, "block_count": layers, "attention.head_count": 4,
        "attention.head_count_kv": [config.per_layer_config[layer].num_key_value_heads for layer in range(layers)],
        "feed_forward_length": inner if config.use_double_wide_mlp else 64, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16, "attention.value_length_swa": 16,
        "attention.sliding_window": 7, "attention.sliding_window_pattern": slides, "attention.shared_kv_layers": layers - own,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
    }  # fmt: skip
    cap = config.final_logit_softcapping
    keys["final_logit_softcapping"] = float(cap or 0.0)
    if config.enable_moe_block:
        keys |= {"expert_count": 6, "expert_used_count": config.top_k_experts, "expert_feed_forward_length": 32}
    writer = gguf.GGUFWriter(path, "gemma4")
    for name, value in {**keys, **(changes or {})}.items():
        if value is not None:
            files.add(writer, f"gemma4.{name}", value)
    for name, value in (words or {}).items():
        files.add(writer, f"tokenizer.ggml.{name}", value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stored = stored_name(name)
        if split and "gate_up_exps" in stored:
            for half, part in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                writer.add_tensor(stored.replace("gate_up", half), part.contiguous().numpy())
        else:
            writer.add_tensor(stored, tensor.numpy())
    for layer in range(own, layers):  # which published models have, and nobody reads
        rows = config.per_layer_config[layer].num_key_value_heads * config.per_layer_config[layer].head_dim
        writer.add_tensor(f"blk.{layer}.attn_k.weight", torch.ones(rows, 32).numpy())
    writer.add_tensor("rope_freqs.weight", torch.tensor([1.0] * 4 + [1e30] * 12).numpy())
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return model


@pytest.mark.parametrize(("kind", "split"), [("31B", False), ("E2B", False), ("26B", True), ("all", False)])
@pytest.mark.filterwarnings("ignore")
def test_a_gguf_file(kind: str, split: bool, tmp_path: Path) -> None:
    model = written(tmp_path / "m.gguf", kind, split)
    own: Any = models.load(tmp_path / "m.gguf")
    tokens = torch.tensor([TOKENS])
    torch.testing.assert_close(own(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
    found = generate(own, TOKENS, "jacobi", block_size=9, max_new_tokens=NEW, end_tokens=()).tokens
    assert found.tolist() == theirs(model)


@pytest.mark.filterwarnings("ignore")
def test_what_is_meant_without_a_key(tmp_path: Path) -> None:
    """The cap is llama.cpp's 30."""
    model = written(tmp_path / "m.gguf", "31B", changes={"final_logit_softcapping": None, "attention.shared_kv_layers": None, "rope.dimension_count_swa": None}, final_logit_softcapping=30.0)  # fmt: skip
    own: Any = models.load(tmp_path / "m.gguf")
    torch.testing.assert_close(own(torch.tensor([TOKENS])), model(torch.tensor([TOKENS])).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"attention.sliding_window": 0}, ValueError, "attention.sliding_window must be .* got 0"),
        ({"attention.sliding_window_pattern": [True]}, ValueError, "sliding_window_pattern must be a flag, or one for each of 7"),
        ({"attention.sliding_window_pattern": [3] * 7}, ValueError, "sliding_window_pattern must be a flag"),
        ({"attention.head_count_kv": [1, 1, 2, 1, 1, 1, 1]}, NotImplementedError, "head_count_kv must be the same in all layers of a kind"),
        ({"attention.head_count_kv": [1, 1]}, ValueError, "head_count_kv must be a number, or one for each of 7 layers"),
        ({"feed_forward_length": [64, 128] + [64] * 5}, ValueError, "feed_forward_length must be one size, or twice it"),
        ({"attention.key_length_swa": None}, ValueError, "must hold 'attention.key_length_swa'"),
        ({"attention.value_length": 16}, ValueError, "attention.value_length must be the size of a head \\(32\\)"),
        ({"rope.dimension_count_swa": 8}, ValueError, "rope.dimension_count_swa must be the size of a head \\(16\\)"),
        ({"attention.shared_kv_layers": 7, "feed_forward_length": 64}, ValueError, "reading_layers must be below layers"),
        ({"attention.sliding_window_pattern": [False, False, True, True, True, True, False], "attention.layer_norm_rms_epsilon": None}, NotImplementedError, "sliding_window_pattern must end with a window and none"),
        ({"attention.shared_kv_layers": 9}, ValueError, "shared_kv_layers must be at most block_count"),
        ({"attention.shared_kv_layers": 2**31 - 1}, ValueError, "shared_kv_layers must be at most block_count"),
        ({"embedding_length_per_layer_input": None}, ValueError, "must hold 'embedding_length_per_layer_input'"),
        ({"block_count": 10**6}, ValueError, "block_count must be at most"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", "E2B", changes=changes)
    with pytest.raises(error, match=text):
        models.load(tmp_path / "m.gguf")


PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += [
    "\n",
    "\n\n",
    *"\u2581abcde",
    "ab",
    "bc",
    "abc",
    "\u2581a",
    "\u2581abc",
    "cd",
    "\u2581\u2581",
    "<turn|>",
    "<|tool>",
]
TYPES = [3, 3, 3, 2, *[6] * 256, *[1] * (len(PIECES) - 262), 3, 4]
MERGES = ["b c", "a b", "a bc", "\u2581 a", "\u2581 abc", "c d", "\u2581 \u2581", "ab c"]


def by_ranks(line: str) -> list[int]:
    """llama.cpp's rule, written down: of neighbours the pair that is earliest among the merges becomes one, the leftmost first."""
    symbols = list(line.replace(" ", "\u2581"))
    while True:
        pairs = [
            (MERGES.index(f"{a} {b}"), at)
            for at, (a, b) in enumerate(zip(symbols, symbols[1:]))
            if f"{a} {b}" in MERGES
        ]
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
def test_the_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    words = {"model": "gemma4", "tokens": PIECES, "scores": [0.0] * len(PIECES), "token_type": TYPES, "merges": MERGES}
    words |= {"bos_token_id": 2, "eos_token_id": 1, "add_space_prefix": False}
    written(tmp_path / "m.gguf", "31B", words=words, vocab_size=len(PIECES), vocab_size_per_layer_input=len(PIECES))
    model: Any = models.load(tmp_path / "m.gguf")
    tokenizer, newlines = model.tokenizer, PIECES.index("\n")
    for text in ("abcd", "abc abcd cdab", " ab", "bcde  a b", "ab\u00e9c\U0001f600", "xyz abc", "ababab  cdcd"):
        ids = list(tokenizer.encode(text))
        assert ids == [2, *by_ranks(text)], text
        assert tokenizer.decode(ids) == text
    expected = [*by_ranks("ab"), newlines + 1, *by_ranks(" c"), newlines, *by_ranks("d")]
    assert list(tokenizer.encode("ab\n\n c\nd"))[1:] == expected
    assert list(tokenizer.encode("<|tool>ab<turn|>"))[1:] == [len(PIECES) - 1, *by_ranks("ab"), len(PIECES) - 2]
    assert model.end_tokens == (1, len(PIECES) - 2)
    assert tokenizer.decode([len(PIECES) - 1, len(PIECES) - 2]) == "<|tool>"
