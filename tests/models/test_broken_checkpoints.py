"""Checkpoints that are broken, hostile or mistaken end in one sentence with the file's name, before memory is taken or a file outside is opened."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from pdkernels import models
from pdkernels.cli import app
from pdkernels.models import RecurrentDepthConfig, TransformerConfig, from_hf_state_dict
from pdkernels.models.architectures.config import YarnScaling
from tests.models.test_llada_checkpoints import LLADA, weights
from tests.models.test_recurrent_depth_checkpoints import SMALL as HUGINN
from tests.models.test_recurrent_depth_checkpoints import tensors
from tests.models.test_zoo import write
from tests.support.checkpoints import LLAMA, QWEN2, random_checkpoint

INDEX = "model.safetensors.index.json"
CASES: dict[str, tuple[Callable[[Path], Any], str]] = {}


def case(sentence: str) -> Callable[[Callable[[Path], Any]], None]:
    """What is changed in a folder that loads, and the resulting sentence after "pdkernels.models.load: "."""

    def keep(spoil: Callable[[Path], Any]) -> None:
        CASES[spoil.__name__] = (spoil, sentence)

    return keep


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return random_checkpoint(QWEN2, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    write(tmp_path, QWEN2, state)
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**QWEN2, **fields}))


def index(folder: Path, content: Any) -> None:
    (folder / INDEX).write_text(json.dumps(content))


def index_to(folder: Path, file: str) -> None:
    index(folder, {"weight_map": {"model.norm.weight": file}})


# ---- the files


@case("config.json must hold an object, got ['qwen2'].")
def list_for_config(folder: Path) -> None:
    (folder / "config.json").write_text('["qwen2"]')


@case("config.json must be UTF-8 text, got .*config.json (.*invalid start byte).")
def other_encoding(folder: Path) -> None:
    (folder / "config.json").write_bytes('{"model_type": "größe"}'.encode("latin-1"))


@case("config.json must be a regular file, got a folder.")
def folder_for_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


@case("config.json must be JSON, got too many brackets inside each other.")
def deep_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": ' + "[" * 200_000)


@case("config.json must have at most 4194304 bytes, got more.")
def long_config(folder: Path) -> None:
    (folder / "config.json").write_text(" " * (1 << 22) + "{}")


@case("config.json must be JSON, got .* (Exceeds the limit .*).")
def many_digits(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": ' + "9" * 10_000 + "}")


@case("config.json must be a regular file, got a pipe.")
def pipe_for_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


@case("model.safetensors must be a whole safetensors file, got .*")
def truncated_weights(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


@case("model.safetensors must be a whole safetensors file, got .*")
def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


@case("model.safetensors must have a header of at most 16777216 bytes, got .*. Is it a whole safetensors file?")
def long_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")


@case("model.safetensors must be a regular file, got a pipe.")
def pipe_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


@case(
    "copy.safetensors must hold no tensor that .* holds too, got .*. Leave one of them out.|model.safetensors must hold no tensor .*"
)
def weights_twice(folder: Path) -> None:
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())


@case("tokenizer.json must be what the library `tokenizers` reads, got .*")
def no_tokenizer(folder: Path) -> None:
    pytest.importorskip("tokenizers")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


@case("generation_config.json must hold an object, got 5.")
def number_for_generation(folder: Path) -> None:
    (folder / "generation_config.json").write_text("5")


@case("generation_config.json: eos_token_id must be ids below vocab_size (23), got '</s>'.")
def text_for_end_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, "</s>"]}')


# ---- the index


@case(f"{INDEX}: '../model.safetensors' must be the name of a file inside the folder, got a path that leads elsewhere.")
def index_above(folder: Path) -> None:
    index_to(folder, "../model.safetensors")


@case(f"{INDEX}: '/etc/passwd' must be the name of a file inside the folder, got a path that leads elsewhere.")
def index_of_an_absolute_path(folder: Path) -> None:
    index_to(folder, "/etc/passwd")


@case(f"{INDEX}: 'link.safetensors' must be a file inside the folder, got a link to .*. Put the file itself there.")
def index_of_a_link(folder: Path) -> None:
    outside = folder.parent / f"{folder.name}-outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "link.safetensors").symlink_to(outside)
    index_to(folder, "link.safetensors")


@case(f"{INDEX}: 'sub/model.safetensors' must be a file inside the folder, got a link to .*")
def index_of_a_linked_folder(folder: Path) -> None:
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    (folder / "model.safetensors").rename(outside / "model.safetensors")
    (folder / "sub").symlink_to(outside)
    index_to(folder, "sub/model.safetensors")


@case(f"{INDEX}: 'pipe' must be a regular file, got a pipe.")
def index_of_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    index_to(folder, "pipe")


@case("model.safetensors must be a file inside the folder, got a link to '/dev/zero'. Put the file itself there.")
def link_to_a_device(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")


@case(f"{INDEX} must hold 'weight_map', got only metadata.")
def index_without_map(folder: Path) -> None:
    index(folder, {"metadata": {}})


@case(f"{INDEX}: weight_map must name the file of each tensor, got an object of 1 fields.")
def index_with_numbers(folder: Path) -> None:
    index(folder, {"weight_map": {"model.norm.weight": 3}})


@case("model.safetensors must hold what model.safetensors.index.json says, got no tensor called lm_head.weight.")
def index_of_a_tensor_that_is_not_there(folder: Path) -> None:
    index(folder, {"weight_map": {"lm_head.weight": "model.safetensors"}})


# ---- fields

POSITIVE = "must be an integer from 1 to 2147483647, got"


@case("checkpoint must hold every tensor of its config.json, got 26 for 1000000000 layers.")
def a_billion_layers(folder: Path) -> None:
    change(folder, num_hidden_layers=10**9)


@case("model.safetensors: model.embed_tokens.weight must have shape (1000000000, 24), got (23, 24).")
def a_billion_tokens(folder: Path) -> None:
    change(folder, vocab_size=10**9)


@case(f"config.json: hidden_size {POSITIVE} 10000000000000000000000000000000000000000.")
def sizes_beyond_all(folder: Path) -> None:
    change(folder, hidden_size=10**40)


@case(f"config.json: hidden_size {POSITIVE} 0.")
def zero_width(folder: Path) -> None:
    change(folder, hidden_size=0)


@case(f"config.json: num_attention_heads {POSITIVE} '4'.")
def text_for_heads(folder: Path) -> None:
    change(folder, num_attention_heads="4")


@case(f"config.json: head_dim {POSITIVE} 0.")
def zero_head_dim(folder: Path) -> None:
    change(folder, head_dim=0)


@case(f"config.json: sliding_window {POSITIVE} '8'.")
def text_for_window(folder: Path) -> None:
    change(folder, use_sliding_window=True, sliding_window="8")


@case("config.json: kv_heads must divide heads (4), got 3.")
def heads_that_do_not_divide(folder: Path) -> None:
    change(folder, num_key_value_heads=3)


@case("config.json: tie_word_embeddings must be true or false, got 'false'.")
def text_for_flag(folder: Path) -> None:
    change(folder, tie_word_embeddings="false")


@case("config.json: rms_norm_eps must be a number of at least 0, got nan.")
def eps_that_is_no_number(folder: Path) -> None:
    change(folder, rms_norm_eps=float("nan"))


@case("config.json: rope_scaling must hold an object, got 'linear'.")
def text_for_rope(folder: Path) -> None:
    change(folder, rope_scaling="linear")


@case("config.json: rope_scaling: factor must be a number of at least 1, got '2'.")
def text_for_factor(folder: Path) -> None:
    change(folder, rope_scaling={"rope_type": "linear", "factor": "2"})


@case("config.json: high_freq_factor must be more than low_freq_factor (4.0) > 0, got 1.0.")
def factors_in_reverse(folder: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    change(folder, rope_scaling={**rope, "low_freq_factor": 4.0, "high_freq_factor": 1.0})


@case("config.json: rope_theta must be more than 1 with a YarnScaling, got 1.0.")
def pairs_that_all_turn_alike(folder: Path) -> None:
    change(folder, rope_theta=1, rope_scaling={"rope_type": "yarn", "factor": 2.0})


@case("config.json: eos_token_id must be ids below vocab_size (23), got -1.")
def end_token_below_zero(folder: Path) -> None:
    change(folder, eos_token_id=-1)


@case("config.json: mask_token_id must be an id below vocab_size (23), got True.")
def flag_for_mask_token(folder: Path) -> None:
    change(folder, mask_token_id=True)


@case("config.json: dtype must be one of float64, float32, bfloat16, float16, got ['float32']. Pass dtype=.")
def list_for_dtype(folder: Path) -> None:
    change(folder, dtype=["float32"])


@case("config.json: model_type must be one of .*, got an object of 0 fields.")
def object_for_model_type(folder: Path) -> None:
    change(folder, model_type={})


@case(
    "config.json: quantization_config: quant_method must be one of gptq, awq, compressed-tensors, got None."
    " Load a GGUF file or a checkpoint of numbers, which pd.quantize packs."
)
def quantized(folder: Path) -> None:
    change(folder, quantization_config={"bits": 4})


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_in_python_and_on_the_command_line(name: str, folder: Path) -> None:
    spoil, sentence = CASES[name]
    models.load(folder)
    spoil(folder)
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        models.load(folder)
    printed = str(caught.value)
    assert "\n" not in printed and len(printed) < 600
    words = "|".join(_pattern(part) for part in sentence.split("|"))
    assert re.fullmatch(f"pdkernels\\.models\\.load: ({words})", printed), printed
    answer = CliRunner().invoke(app, ["generate", "--prompt", "a", "--model", str(folder)])
    assert answer.exit_code == 2 and printed in " ".join(answer.stderr.split()), answer.output


def _pattern(sentence: str) -> str:
    return ".*".join(re.escape(part) for part in sentence.split(".*"))


# ---- tensors


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_numbers_that_need_scales_are_refused(dtype: torch.dtype, folder: Path, state: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    spoilt = {**state, name: torch.ones(state[name].shape).to(dtype)}
    try:
        save_file(spoilt, folder / "model.safetensors")
    except KeyError:
        pytest.skip("this safetensors does not write such numbers")
    sentence = rf"model\.safetensors: {name} must be float64, float32, bfloat16, float16, got .*\. Our models do not read quantized"
    with pytest.raises(NotImplementedError, match=sentence):
        models.load(folder)
    with pytest.raises(NotImplementedError, match=rf"load: {name} must be float64"):
        from_hf_state_dict(spoilt, models.from_hf_config(QWEN2))


def test_parts_of_the_right_sum_and_wrong_sizes_are_refused(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """q, k and v are one matrix, whose size does not determine theirs."""
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    save_file({**state, q: state[k].clone(), k: state[q].clone()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj\.weight must have shape \(24, 24\), got \(12, 24\)\."):
        models.load(folder)


@pytest.mark.parametrize(
    ("fields", "field"), [(LLADA, "n_layers"), (HUGINN, "n_layers_in_coda"), (LLAMA, "num_hidden_layers")]
)
def test_layers_are_counted_before_they_are_made(fields: dict[str, Any], field: str, tmp_path: Path) -> None:
    made = {"n_layers": lambda: weights("llada"), "n_layers_in_coda": tensors}
    state = made.get(field, lambda: random_checkpoint(LLAMA, dtype=torch.float32))()
    write(tmp_path, {**fields, field: 2**31 - 1, **({"n_layers": None} if fields is HUGINN else {})}, state)
    start = time.process_time()
    with pytest.raises(ValueError, match=r"must hold every tensor of its config\.json, got \d+ for \d{10} layers"):
        models.load(tmp_path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "fields", [{"model_type": "mistral"}, {"model_type": "gemma3_text", "query_pre_attn_scalar": 16}]
)
def test_windows_are_not_listed_for_layers_that_no_file_holds(fields: dict[str, Any], tmp_path: Path) -> None:
    short = {"sliding_window": 4, "num_hidden_layers": 2**31 - 1}
    write(tmp_path, {**LLAMA, **fields, **short}, random_checkpoint(LLAMA, dtype=torch.float32))
    start = time.process_time()
    with pytest.raises(ValueError, match=r"num_hidden_layers must be at most 16384"):
        models.load(tmp_path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"init_values": None, "n_heads": 0}, f"n_heads {POSITIVE} 0"),
        ({"init_values": [1]}, r"init_values must hold an object, got \[1\]"),
        ({"init_values": {"embed_scale": "17"}}, "init_values: embed_scale must be a number, got '17'"),
        ({"architectures": 3, "model_type": None}, "model_type must be one of .*, got None"),
        ({"mean_recurrence": 2.5}, f"mean_recurrence {POSITIVE} 2.5"),
    ],
)
def test_fields_of_huginn(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    write(tmp_path, {**HUGINN, **changes}, tensors())
    with pytest.raises((ValueError, NotImplementedError), match=f"config.json: {sentence}"):
        models.load(tmp_path)


# ---- arguments of load


@pytest.mark.parametrize(
    ("given", "options", "kind", "sentence"),
    [
        (None, {}, TypeError, "name_or_path must be a name or a path, got NoneType."),
        (5, {}, TypeError, "name_or_path must be a name or a path, got int."),
        (b"tiny-code", {}, TypeError, "name_or_path must be a name or a path, got bytes."),
        ("/no/such/folder", {}, ValueError, "name_or_path must be a folder that exists, got '/no/such/folder', which is missing."),
        (Path("nowhere"), {}, ValueError, "name_or_path must be a folder that exists, got 'nowhere', which is missing."),
        (__file__, {}, ValueError, f"name_or_path must be a folder, got the file {__file__!r}. Name the folder that holds it."),
        ("a\0b", {}, ValueError, "name_or_path must name a model or a local folder, got 'a\\x00b'."),
        ("x" * 5000, {}, ValueError, "name_or_path must name a model or a local folder, got 'xxx"),
        ("tiny-code", {"device": "gpu"}, ValueError, "device must be a device of torch, such as 'cpu' or 'cuda:0', got 'gpu'."),
        ("tiny-code", {"device": "cuda:99"}, NotImplementedError, "device must be one that torch finds, got 'cuda:99'. There are"),
    ],
)  # fmt: skip
def test_arguments_of_load(given: Any, options: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        models.load(given, **options)
    assert str(caught.value).startswith(f"pdkernels.models.load: {sentence[:150]}")


def test_the_links_of_a_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(blobs / f"hash-of-{name}")
        (snapshot / name).symlink_to(f"../../blobs/hash-of-{name}")
    assert models.load(snapshot).config.vocab_size == 23
    os.mkfifo(blobs / "pipe")
    (snapshot / "generation_config.json").symlink_to("../../blobs/pipe")
    with pytest.raises(ValueError, match=r"generation_config\.json must be a regular file, got a pipe\."):
        models.load(snapshot)


def test_a_tokenizer_neither_cuts_nor_pads_a_prompt(folder: Path) -> None:
    """A fixed padding would fill memory, a truncation lose text."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=10**6)
    made.save(str(folder / "tokenizer.json"))
    tokenizer = models.load(folder).tokenizer
    assert tokenizer.encode("a b a") == [0, 1, 0]
    with pytest.raises(ValueError, match=r"models\.load: tokenizer\.json must encode the text, got WordLevel"):
        tokenizer.encode("c")


# ---- configurations made by hand


@pytest.mark.parametrize("kind", [TransformerConfig, RecurrentDepthConfig])
@pytest.mark.parametrize(
    ("field", "value"), [("rope_theta", "1e4"), ("rope_theta", float("inf")), ("norm_eps", None), ("norm_eps", float("nan"))]
)  # fmt: skip
def test_numbers_of_a_configuration(kind: type, field: str, value: Any) -> None:
    sizes = dict(vocab_size=9, hidden_size=8, heads=2, head_dim=4, intermediate_size=8)
    more = dict(layers=1, kv_heads=1) if kind is TransformerConfig else {}
    with pytest.raises((ValueError, TypeError), match=f"pdkernels.{kind.__name__}: {field} must"):
        kind(**sizes, **more, **{field: value})


@pytest.mark.parametrize(
    "fields", [{"factor": float("inf")}, {"original_positions": "8"}, {"beta_fast": "32"}, {"attention_factor": None}]
)
def test_numbers_of_a_scaling(fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"pdkernels.YarnScaling: {next(iter(fields))} must"):
        YarnScaling(**{"factor": 2.0, "original_positions": 8, **fields})
