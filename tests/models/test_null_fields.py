"""A null in a JSON file means what it means to transformers: a default, that something is off, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from pdkernels import models
from pdkernels.models.files.fields import Fields
from tests.models.test_config_fields import BETA, LLAMA3, MIXTURES, TOKENS, YARN, base

transformers = pytest.importorskip("transformers")
if int(transformers.__version__.partition(".")[0]) < 5:
    pytest.skip("older classes neither check types nor read rope_parameters", allow_module_level=True)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "ministral3", "olmo2", "olmo3", *MIXTURES, "lfm2", "qwen3_5_text")
_FAST = ("mistral", "qwen3_moe", "qwen3_5_text")
_OF_NO_MATTER = {
    # Of training, caches or dropout, which are off: nothing here reads them.
    *("attention_dropout", "initializer_range", "use_cache", "router_aux_loss_coef", "router_jitter_noise"),
    "output_router_logits",
    # Version 5 refuses it, version 4 means no factor.
    "block_ffn_dim_multiplier",
}


def save(kind: str, folder: Path, **more: Any) -> dict[str, Any]:
    """A random checkpoint and the fields of its config.json."""
    if kind in ("lfm2", "qwen3_5_text"):
        from tests.models.test_hybrid import build

        build(kind, **more).save_pretrained(folder)
    else:
        torch.manual_seed(0)
        fields = {**base(kind), **more}
        (folder / "config.json").write_text(json.dumps(fields))
        config = transformers.AutoConfig.from_pretrained(folder)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    written: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return written


def theirs(folder: Path) -> torch.Tensor | None:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits: torch.Tensor = model(TOKENS, use_cache=False).logits
            return logits
    except Exception:
        return None


def ours(folder: Path) -> torch.Tensor | str:
    try:
        logits: torch.Tensor = models.load(folder, dtype=torch.float32)(TOKENS)
        return logits
    except (ValueError, NotImplementedError) as error:
        assert str(error).startswith("pdkernels.models.load: ")
        return str(error)


def same(fields: dict[str, Any], folder: Path, name: str) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    expected, found = theirs(folder), ours(folder)
    if expected is None:
        assert isinstance(found, str) and name in found, (name, found)
    else:
        assert not isinstance(found, str), (name, found)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=name)


def asked(monkeypatch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """The fields that loading reads."""
    names: set[str] = set()

    class Watched(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            names.add(str(name))
            return super().__contains__(name)

        def get(self, name: str, default: Any = None) -> Any:
            names.add(name)
            return super().get(name, default)

    made = Fields.__init__

    def watched(self: Any, values: Any, where: str = "config.json") -> None:
        made(self, values, where)
        if where == "config.json":
            self.values, self.given = Watched(self.values), Watched(self.given)

    with monkeypatch.context() as patch:
        patch.setattr(Fields, "__init__", watched)
        models.load(folder)
    return names


@pytest.mark.parametrize(
    "kind", [kind if kind in _FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES]
)
def test_every_field_of_a_config(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As many as a null means.
    fields = save(kind, tmp_path, num_key_value_heads=4)
    read = asked(monkeypatch, tmp_path)
    assert (len(read) > 20 and "sliding_window" in read) or kind in ("lfm2", "qwen3_5_text")
    for name in sorted((read | set(fields)) - {*_OF_NO_MATTER, "is_causal"}):
        if (kind, name) != ("lfm2", "layer_types"):  # then none has a convolution: a Transformer
            same({**fields, name: None}, tmp_path, name)
    if "is_causal" in read:  # no field of any class, and rows see later ones in transformers where it is null
        (tmp_path / "config.json").write_text(json.dumps({**fields, "is_causal": None}))
        assert str(ours(tmp_path)).endswith("config.json: is_causal must be true, got None.")


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("llama", YARN),
        ("llama", LLAMA3),
        ("llama", {"rope_type": "linear", "factor": 2.0}),
        ("ministral3", {**YARN, **BETA}),
    ],
)
def test_every_field_of_rope(kind: str, rule: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_theta": 100.0, **rule}
    fields = save(kind, tmp_path, rope_parameters=rope)
    more = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
    yarn = rule["rope_type"] == "yarn"
    for name in (*rope, *(more if yarn else ())):
        inner = {**rope, name: None}
        if not (yarn and name == "factor"):  # which is then a ratio of lengths; here it is required
            same({**fields, "rope_parameters": inner}, tmp_path, name)


@pytest.mark.parametrize("window", [None, 4, 64, "absent"])
@pytest.mark.parametrize("more", [{}, {"use_sliding_window": False}, {"use_sliding_window": True}])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "ministral3", "mixtral", "qwen3_moe"])
def test_windows(kind: str, more: dict[str, Any], window: Any, tmp_path: Path) -> None:
    """Never other logits; a window that Llama's layers do not have is refused by name."""
    fields = {
        name: value for name, value in save(kind, tmp_path).items() if name not in ("sliding_window", "layer_types")
    }
    fields |= more | ({} if window == "absent" else {"sliding_window": window})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    expected, found = theirs(tmp_path), ours(tmp_path)
    if isinstance(found, str):
        assert "sliding_window must be absent or cover all 64 positions" in found
        assert window == 4 and kind == "llama"
        return
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_numbers_and_flags() -> None:
    fields = Fields({"a": None, "b": 1})
    assert fields.get("a", 5) is None and fields.maybe_integer("a") is None and not fields.part("a")
    assert fields.integer("a", 3, null=7) == 7 and fields.integer("c", 3, null=7) == 3
    assert fields.flag("a", True, null=False) is False and fields.token("a", 10, 4) == 4
    for read in (fields.integer, fields.number):
        with pytest.raises(ValueError, match=r"config.json: a must be .*, got None\."):
            read("a", 3)
    with pytest.raises(ValueError, match=r"config.json: a must be true or false, got None\."):
        fields.flag("a", True)


def test_no_end_tokens(tmp_path: Path) -> None:
    save("llama", tmp_path, eos_token_id=5)
    for generation, ends in (({"eos_token_id": None}, ()), ({"eos_token_id": 3}, (3,)), (None, (5,))):
        path = tmp_path / "generation_config.json"
        path.write_text(json.dumps(generation)) if generation is not None else path.unlink()
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert models.load(tmp_path).end_tokens == ends
        assert model.generation_config.eos_token_id == (ends[0] if ends else None)


@pytest.mark.parametrize("named", ["LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer", None])
@pytest.mark.parametrize(
    "field", ["bos_token", "eos_token", "unk_token", "pad_token", "extra_special_tokens", "split_special_tokens", "clean_up_tokenization_spaces", "added_tokens_decoder"]
)  # fmt: skip
def test_every_field_of_a_tokenizer(named: str | None, field: str, tmp_path: Path) -> None:
    chats = pytest.importorskip("tests.models.test_chat_transformers")
    if named == "LlamaTokenizer" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("its class rebuilds the byte-level tokenizer of this test")
    chat, words = [{"role": "user", "content": "x"}], "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}"
    chats.write(tmp_path, {"tokenizer_class": named, "chat_template": words, field: None})
    try:
        expected = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tokenize=False)
    except (TypeError, AttributeError):
        with pytest.raises(ValueError, match=field):
            chats.read_tokenizer_files(tmp_path, "llama")
        return
    assert chats.both(tmp_path)[0].chat_template.render(chat) == expected
