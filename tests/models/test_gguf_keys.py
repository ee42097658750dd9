"""Keys that a GGUF file lacks mean what they mean to llama.cpp: its b11549 read these very files, and gave the logits or the refusals below."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels import models
from pdkernels.models import LinearScaling
from pdkernels.models.files import gguf_keys
from tests.models import test_gemma3, test_gemma4_gguf, test_window_gguf
from tests.support import gguf_diffusion

files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf: pip install 'pdkernels[gguf]'")
transformers = pytest.importorskip("transformers", reason="builds hybrid models with transformers")
LLAMA, QWEN3, QWEN3MOE = files.LLAMA, files.QWEN3, files.QWEN3MOE
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
WORDS = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "chat_template": "x"}


def hybrid(path: Path, arch: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a hybrid model, with other values of some keys; None leaves one out."""
    from tests.models import test_hybrid

    plain, left = files.add, dict(changes)

    def add(writer: Any, name: str, value: Any) -> None:
        value = left.pop(name.removeprefix(f"{arch}."), value)
        if value is not None:
            plain(writer, name, value)
        if name == "tokenizer.ggml.eos_token_id":
            for other in list(left):
                add(writer, f"{arch}.{other}", None)

    with monkeypatch.context() as patch:
        patch.setattr(files, "add", add)
        patch.setitem(test_hybrid.QWEN, "linear_value_head_dim", 16)
        model, fields = (
            (test_hybrid.build("qwen3_5_text"), test_hybrid.QWEN)
            if arch == "qwen35"
            else (test_hybrid.build("lfm2"), test_hybrid.LFM2)
        )
        left = {"ssm.inner_size": 64, **left} if arch == "qwen35" else left
        test_hybrid.write(path, model, "F32", fields, arch)


def write(path: Path, arch: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    plain = {"llama": LLAMA, "qwen3": QWEN3, "qwen3moe": QWEN3MOE}
    if arch in plain:
        files.write_gguf(path, plain[arch], more=changes, **more)
    else:
        hybrid(path, arch, changes, monkeypatch)


SIZES = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
REFUSED = [
    *((arch, {key: None}) for arch in ("llama", "qwen35", "lfm2") for key in (*SIZES, "attention.layer_norm_rms_epsilon")),
    ("llama", {"attention.head_count_kv": None}),  # the file has two for four heads
    ("qwen3", {"attention.key_length": None}),
    ("qwen3", {"attention.value_length": None}),
    ("qwen35", {"attention.value_length": None}),
    ("qwen3moe", {"expert_count": None}),
    ("qwen3moe", {"expert_used_count": None}),
    ("qwen3moe", {"expert_feed_forward_length": None, "feed_forward_length": None}),
    *(("qwen35", {f"ssm.{key}": None}) for key in ("conv_kernel", "state_size", "group_count", "time_step_rank")),
    ("qwen35", {"rope.dimension_sections": None}),
    ("qwen35", {"rope.dimension_sections": [2, 1, 1]}),
    ("qwen35", {"rope.dimension_sections": [0, 0, 0, 0]}),
    ("lfm2", {"shortconv.l_cache": None}),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "changes"), REFUSED)
def test_what_llama_cpp_refuses(
    arch: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "m.gguf", arch, changes, monkeypatch)
    with pytest.raises((ValueError, NotImplementedError), match=r"^pdkernels\.models\.load: "):
        models.load(tmp_path / "m.gguf")


SAME = [
    ("llama", {"attention.key_length": None, "attention.value_length": None, "rope.dimension_count": None}, {}),
    ("llama", {"rope.freq_base": None}, {"rope.freq_base": 10000.0}),
    ("qwen3", {"rope.dimension_count": None}, {}),
    ("qwen3moe", {"expert_feed_forward_length": None}, {"expert_feed_forward_length": 64 // 2}),
    ("qwen3moe", {"feed_forward_length": None}, {"feed_forward_length": 32}),
    ("qwen35", {"full_attention_interval": None}, {"full_attention_interval": 4}),
    ("qwen35", {"rope.freq_base": None}, {"rope.freq_base": 10000.0}),
    ("qwen35", {"rope.dimension_sections": [1, 1, 0, 0]}, {}),  # coordinates of text are equal
    ("lfm2", {"rope.freq_base": None}, {"rope.freq_base": 10000.0}),
    ("lfm2", {"rope.dimension_count": None}, {}),
    # The type of scaling is linear where none is named, and a factor of 0 means 1.
    ("llama", {"rope.scaling.factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    ("llama", {"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, {"rope.scaling.factor": 4.0}),
    ("llama", {"rope.scaling.factor": 0.0}, {}),
    ("llama", {"rope.scaling.type": "linear"}, {}),
    ("lfm2", {"rope.scaling.factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
    (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scale_linear": 2.0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
    ),
]


@pytest.mark.parametrize(("arch", "changes", "stated"), SAME)
def test_absent_keys_have_the_values_of_llama_cpp(
    arch: str, changes: dict[str, Any], stated: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "absent.gguf", arch, changes, monkeypatch)
    write(tmp_path / "stated.gguf", arch, stated, monkeypatch)
    absent, present = (models.load(tmp_path / f"{name}.gguf") for name in ("absent", "stated"))
    assert absent.config == present.config
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(absent(tokens), present(tokens))


def test_a_scaling_factor_alone_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", "llama", {"rope.scaling.factor": 4.0}, monkeypatch)
    model = models.load(tmp_path / "m.gguf")
    assert model.config.rope_scaling == LinearScaling(4.0)
    plain = models.Transformer(dataclasses.replace(model.config, rope_scaling=None))
    plain.load_state_dict(model.state_dict())
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    plain.requires_grad_(False)
    assert float((plain(tokens) - model(tokens)).abs().max()) > 1


@pytest.mark.parametrize("stated", [1.0, 1.1386294, 0.8782489])
def test_a_factor_of_yarn_that_llama_cpp_does_not_read(
    stated: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its converter writes that of a rule, which in DeepSeek-R1-0528-Qwen3-8B is one by YaRN's own, and its own writer 1."""
    write(tmp_path / "m.gguf", "llama", {**YARN, "rope.scaling.yarn_attn_factor": stated}, monkeypatch)
    assert models.load(tmp_path / "m.gguf").config.rope_scaling.attention_factor == pytest.approx(1.1386294)


def test_yarn_below_one_leaves_queries_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", "llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.5}, monkeypatch)
    assert models.load(tmp_path / "m.gguf").config.rope_scaling.attention_factor == 1


@pytest.mark.parametrize(
    ("arch", "changes", "sentence"),
    [
        ("llama", {"rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor must be 1 without rope.scaling.type yarn"),
        ("llama", {**YARN, "rope.scaling.yarn_attn_factor": 1.3}, "rope.scaling.yarn_attn_factor must be 1, 1.13863 or 0.878249, got 1.3"),
        ("lfm2", {"attention.sliding_window": 4}, "lfm2.attention.sliding_window must be absent or cover all 256"),
        ("qwen35", {"rope.dimension_sections": [2, 2, 0, 0]}, "rope.dimension_sections must give every pair one of"),
    ],
)  # fmt: skip
def test_what_llama_cpp_computes_otherwise_is_refused(
    arch: str, changes: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "m.gguf", arch, changes, monkeypatch)
    with pytest.raises(NotImplementedError) as caught:
        models.load(tmp_path / "m.gguf")
    assert sentence in str(caught.value)


def test_the_table_has_the_keys_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"general.alignment", "split.count"}  # read before there are `Keys`

    class Watched(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            asked.add(str(name))
            return super().__contains__(name)

    made = gguf_keys.Keys.__init__

    def watched(self: Any, *given: Any) -> None:
        made(self, *given)
        self.values = Watched(self.values)

    monkeypatch.setattr(gguf_keys.Keys, "__init__", watched)
    for arch in ("llama", "qwen3moe", "qwen35", "lfm2"):
        scaled = {"rope.scaling.type": "yarn"}
        write(tmp_path / "m.gguf", arch, scaled, monkeypatch, **({"tokens": WORDS} if arch == "llama" else {}))
        models.load(tmp_path / "m.gguf")
    test_gemma3.written(tmp_path / "m.gguf")
    models.load(tmp_path / "m.gguf")
    test_gemma4_gguf.written(tmp_path / "m.gguf", "26B")
    models.load(tmp_path / "m.gguf")
    test_window_gguf.written(tmp_path / "m.gguf", "gpt_oss")
    models.load(tmp_path / "m.gguf")
    models.load(gguf_diffusion.write_both(tmp_path, "llada2"))
    assert asked == set(gguf_keys.ABSENT)


# ---- every key that the package gguf knows, beside llama.cpp b11549

IGNORED = set(
    """
    activation_sparsity_scale altup.active_idx altup.num_inputs attention.decay_lora_rank attention.gate_lora_rank attention.group_norm_epsilon attention.group_norm_groups
    attention.iclr_lora_rank attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k attention.key_length_mla attention.kv_lora_rank
    attention.layer_norm_epsilon attention.output_scale attention.q_lora_rank attention.relative_buckets_count attention.shared_kv_layers attention.sliding_window_pattern
    attention.temperature_length attention.value_length_mla attention.value_residual_mix_lora_rank attn_logit_softcapping classifier.output_labels convnext.block_count
    convnext.embedding_length decoder_block_count decoder_start_token_id embedding_length_out embedding_length_per_layer_input expert_chunk_feed_forward_length
    expert_feed_forward_length expert_group_scale expert_group_used_count experts_per_group features_length final_logit_softcapping full_attention_interval kda.head_dim
    moe_every_n_layers moe_latent_size n_deepstack_layers pooling_type posnet.block_count posnet.embedding_length rescale_every_n_layers rope.dimension_sections
    rope.freq_base_swa rope.scaling.alpha rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    router_logit_softcapping shortconv.l_cache ssm.conv_kernel ssm.dt_b_c_rms ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank swiglu_clamp_exp
    swiglu_clamp_shexp swin_norm tensor_data_layout time_decay_extra_dim time_mix_extra_dim token_shift_count vocab_size wkv.head_size {dense}_feat_in {dense}_feat_out
    """.split()
)
"""Keys that change no logits, here and in llama.cpp: they are for other architectures, or for a scaling that the file does not name. It refuses
values of another type."""


def known_keys() -> list[str]:
    """Those of an architecture, without its name."""
    keys: set[str] = set(gguf_keys.UNSUPPORTED)
    holders: list[Any] = [files.gguf.constants.Keys]
    for holder in holders:
        for name, value in vars(holder).items():
            if isinstance(value, type):
                holders.append(value)
            elif not name.startswith("_") and isinstance(value, str) and "{arch}." in value:
                keys.add(value.removeprefix("{arch}."))
    return sorted(keys)


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2", "qwen3moe"))])  # fmt: skip
def test_every_key_is_followed_or_refused_by_name_unless_llama_cpp_ignores_it(family: str, tmp_path: Path) -> None:
    """A gguf with a new key fails here until someone has looked what llama.cpp does with it."""
    fields, tokens = {**files.FAMILIES, "qwen3moe": QWEN3MOE}[family], torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    state = files.random_checkpoint(fields, dtype=torch.float32)
    files.write_gguf(tmp_path / "m.gguf", fields, state)
    plain, ignored = models.load(tmp_path / "m.gguf", packed=False)(tokens), set[str]()
    for key in known_keys():
        seen = []
        for value in (3, 0.5):
            files.write_gguf(tmp_path / "m.gguf", fields, state, more={key: value})
            try:
                logits = models.load(tmp_path / "m.gguf", packed=False)(tokens)
            except (ValueError, NotImplementedError) as error:
                sizes = ("block_count", "length", "count", "dimension")
                assert key.rpartition(".")[2] in str(error) or any(name in key for name in sizes), error
                continue
            seen.append(torch.equal(logits, plain))
        ignored |= {key} if seen == [True, True] else set()
    assert ignored == IGNORED - ({"expert_feed_forward_length"} if family == "qwen3moe" else set())


@pytest.mark.parametrize("key", ["expert_count", "expert_used_count"])
def test_experts_of_an_architecture_without(key: str, tmp_path: Path) -> None:
    """llama.cpp ends there; Gemma's files, and hybrid ones, were read as if they had none."""
    test_gemma3.written(tmp_path / "m.gguf", keys={key: 3})
    with pytest.raises(NotImplementedError, match=rf"gemma3\.{key} must be 0, got 3"):
        models.load(tmp_path / "m.gguf")
