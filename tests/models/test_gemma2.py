"""Gemma 2 from folders and GGUF files: logits and tokens of transformers, past its windows, with its caps in force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models.checkpoints import gemma2, gemma3
from pdkernels.models.files.gguf_keys import Keys

transformers = pytest.importorskip("transformers", reason="builds models with transformers", minversion="5.20")
from tests.models.test_gemma3 import NEW, TOKENS, theirs  # noqa: E402

from tests.integrations.test_shadow import small  # noqa: E402  isort: skip

SIZES = {"num_hidden_layers": 3, "head_dim": 16, "max_position_embeddings": 256}
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}


def a_model(window: int = 7, **more: Any) -> Any:
    """Scores and logits are several times their caps."""
    sizes = {**SIZES, "sliding_window": window, "query_pre_attn_scalar": 16, "attn_implementation": "eager"}
    model = small("Gemma2", **{**sizes, **CAPS, **more})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(std=0.3)
    return model.requires_grad_(False)


@pytest.mark.parametrize("window", [2, 7, 16, 512])
@pytest.mark.parametrize("caps", [CAPS, dict.fromkeys(CAPS), {**CAPS, "query_pre_attn_scalar": 24}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_folder(window: int, caps: dict[str, Any], tmp_path: Path) -> None:
    model = a_model(window, **caps)
    model.save_pretrained(tmp_path)
    own: Any = models.load(tmp_path, dtype=torch.float32)
    logits = model(torch.tensor([TOKENS])).logits
    torch.testing.assert_close(own(torch.tensor([TOKENS])), logits, rtol=1e-4, atol=1e-4)
    cache = own.new_cache(1, 64)
    with torch.inference_mode():
        torch.testing.assert_close(own(torch.tensor([TOKENS]), cache=cache), logits, rtol=1e-4, atol=1e-4)
    expected = theirs(model)
    methods: dict[str, dict[str, Any]] = {"autoregressive": {}, "jacobi": {"block_size": 9}}
    for method, options in methods.items():
        for page_size in (None, 7):
            found = generate(
                own, [TOKENS, TOKENS[:3]], method, max_new_tokens=NEW, end_tokens=(), page_size=page_size, **options
            ).tokens
            assert found[0].tolist() == expected and found[1].tolist() == theirs(model, TOKENS[:3])


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.filterwarnings("ignore")
def test_drafts_do_not_change_the_tokens(temperature: float, cache_dtype: Any, tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path)
    own: Any = models.load(tmp_path, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "end_tokens": (), "temperature": temperature, "seed": 5}
    alone = generate(own, TOKENS, **settings).tokens
    methods: dict[str, dict[str, Any]] = {"jacobi": {"block_size": 9}, "suffix": {"block_size": 8}}
    for method, options in methods.items():
        for page_size in (None, 16):
            assert torch.equal(generate(own, TOKENS, method, page_size=page_size, **options, **settings).tokens, alone)
    with pd.Engine(own, max_prompt_tokens=64, max_new_tokens=NEW) as engine:
        requests = [engine.submit(TOKENS, method, **settings) for method in ("autoregressive", "jacobi")]
        assert all(torch.equal(request.result().tokens, alone) for request in requests)


@pytest.mark.filterwarnings("ignore")
def test_probabilities_are_those_of_capped_logits(tmp_path: Path) -> None:
    model = a_model()
    model.save_pretrained(tmp_path)
    own: Any = models.load(tmp_path, dtype=torch.float32)
    found: Any = generate(own, TOKENS, max_new_tokens=4, end_tokens=(), logprobs=0)
    text = torch.tensor([[*TOKENS, *found.tokens.tolist()]])
    exact = model(text).logits[0, len(TOKENS) - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(
        found.logprobs.tokens, exact.gather(1, found.tokens[:, None])[:, 0], rtol=1e-4, atol=1e-4
    )


@pytest.mark.filterwarnings("ignore")
def test_statistics_are_those_of_capped_logits(tmp_path: Path) -> None:
    """Probabilities, draws, and the second best of each row, which decoders read without logits."""
    model = a_model()
    model.save_pretrained(tmp_path)
    own: Any = models.load(tmp_path, dtype=torch.float32)
    logits, hidden = model(torch.tensor([TOKENS])).logits, own.hidden(torch.tensor([TOKENS]))
    found = own.statistics(hidden, top_k=2)
    exact = logits.softmax(-1).topk(2)
    torch.testing.assert_close(found.top_probs, exact.values, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.top_ids.long(), exact.indices)
    torch.testing.assert_close(found.logsumexp.float(), logits.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_transformers_4(tmp_path: Path) -> None:
    """The published ones: a base outside of any rule, every second layer, caps by default."""
    model = a_model(rope_parameters={"rope_type": "default", "rope_theta": 300.0}, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)  # fmt: skip
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    for name in ("rope_parameters", "layer_types", *CAPS):
        del fields[name]
    file.write_text(json.dumps({**fields, "rope_theta": 300.0, "hidden_act": "gelu_pytorch_tanh"}))
    own: Any = models.load(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(own(torch.tensor([TOKENS])), model(torch.tensor([TOKENS])).logits, rtol=1e-4, atol=1e-4)
    assert [window and window.size for window in own.config.windows] == [7, None, 7]
    assert (own.config.attention_softcap, own.config.logits_softcap) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"attn_logit_softcapping": 0}, ValueError, "attn_logit_softcapping must be a number above 0, got 0"),
        ({"final_logit_softcapping": -3.0}, ValueError, "final_logit_softcapping must be a number above 0, got -3.0"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be .* got 0"),
        ({"use_bidirectional_attention": True}, NotImplementedError, "use_bidirectional_attention must be false"),
        ({"is_causal": False}, NotImplementedError, "is_causal must be true, got False"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(error, match=text):
        models.load(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stated", [False, True])
def test_a_gguf_file(stated: bool, tmp_path: Path) -> None:
    """As llama.cpp's converter writes it, 1 added to the weights of norms; without keys its loader has defaults."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
    files = pytest.importorskip("tests.support.gguf_files", reason="needs the package gguf")
    caps: dict[str, Any] = (
        {**CAPS, "sliding_window": 7, "layer_types": [*["sliding_attention"] * 2, "full_attention"]}
        if stated
        else {"sliding_window": 4096, **dict(zip(CAPS, (50.0, 30.0)))}
    )
    model = a_model(**caps, query_pre_attn_scalar=16)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    known = {
        "context_length": 256, "embedding_length": 32, "block_count": 3, "feed_forward_length": 48,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16,
        "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    said = {**CAPS, "attention.sliding_window": 7, "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 10000.0}
    for name, value in {**known, **(said if stated else {})}.items():
        files.add(writer, f"gemma2.{name}", value)
    state = model.state_dict()
    own = gemma2.from_gemma2_config(json.loads(model.config.to_json_string()))
    for (name, published), (_, stored) in zip(
        gemma3._parts(own, gemma3._PUBLISHED), gemma3._parts(own, gemma3._GGUF), strict=True
    ):
        norm = name.rpartition(".")[2] in gemma3._NORMS
        for theirs_name, in_file in zip(published, stored, strict=True):
            writer.add_tensor(in_file, (state[theirs_name] + norm).numpy())
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    loaded: Any = models.load(tmp_path / "m.gguf")
    torch.testing.assert_close(
        loaded(torch.tensor([TOKENS])), model(torch.tensor([TOKENS])).logits, rtol=1e-4, atol=1e-4
    )
    found = generate(loaded, TOKENS, "jacobi", block_size=9, max_new_tokens=NEW, end_tokens=()).tokens
    assert found.tolist() == theirs(model)


def test_a_base_of_windows_alone_is_refused() -> None:
    keys = {"block_count": 2, "rope.freq_base": 10000.0, "rope.freq_base_swa": 500.0}
    with pytest.raises(
        NotImplementedError, match=r"gemma2.rope.freq_base_swa must be rope.freq_base \(10000.0\), got 500.0"
    ):
        gemma2.from_keys(Keys(keys, "m.gguf: gemma2"), 8, None, True)


@pytest.mark.filterwarnings("ignore")
def test_rows_are_not_computed_anew(tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path)
    own: Any = models.load(tmp_path)
    with pytest.raises(NotImplementedError, match="layers with sinks, with a cap"):
        own.recompute(torch.tensor([[1]]), own.new_cache(1, 4), torch.tensor([0]), visible=torch.tensor([1]))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("llama4", "config.json: llama4 has layers without positions"),
        (
            "llama4_text",
            "config.json: llama4_text has layers without positions, .*, and experts whose input is weighted",
        ),
    ],
)
def test_families_that_are_missing(kind: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(NotImplementedError, match=text):
        models.load(tmp_path)


def test_families_that_are_missing_in_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama4")
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    with pytest.raises(NotImplementedError, match="m.gguf: llama4 has layers without positions"):
        models.load(tmp_path / "m.gguf")
