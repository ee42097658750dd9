"""LoRA folders of PEFT: merged, or kept for drafting; Nemotron-Labs-Diffusion with its drafter; what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.models.checkpoints import packaged
from pdkernels.models.checkpoints.packaged import weight_folders
from tests.models.test_zoo import write
from tests.support import weights
from tests.support.checkpoints import BIASED, LLAMA, MINISTRAL3, QWEN2, State, plain_logits, random_checkpoint

TOKENS = [3, 1, 4, 1, 5, 9]
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}


def lora(state: State, modules: list[str], rank: int = 3, prefix: str = "base_model.model.") -> State:
    """Random pairs for these matrices of a checkpoint, with PEFT's names."""
    generator, made = torch.Generator().manual_seed(1), {}
    for name in modules:
        out, into = state[f"{name}.weight"].shape
        made[f"{prefix}{name}.lora_A.weight"] = torch.randn(rank, into, generator=generator) * 0.3
        made[f"{prefix}{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.3
    return made


def save(folder: Path, tensors: State, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name}
    config = {"target_modules": sorted(targets), **config}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def plain_merged(state: State, tensors: State, scale: Any) -> State:
    merged = dict(state)
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            target = module.removeprefix("base_model.model.")
            target = target if f"{target}.weight" in state else f"model.{target}"
            delta = tensors[f"{module}.lora_B.weight"].double() @ tensors[name].double()
            merged[f"{target}.weight"] = state[f"{target}.weight"] + delta * (
                scale(target) if callable(scale) else scale
            )
    return merged


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, State]:
    state = random_checkpoint(LLAMA, dtype=torch.float32)
    (tmp_path / "base").mkdir()
    write(tmp_path / "base", LLAMA, state)
    return tmp_path / "base", state


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return models.load(folder, dtype=torch.float64, **options)(torch.tensor([TOKENS]))[0]


ALL = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"] + [
    f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")
]


@pytest.mark.parametrize("modules", [ALL, ALL[:1], ALL[2:3], [*ALL[4:6], "lm_head"], ["model.embed_tokens"]])
def test_merged_into_every_kind_of_matrix(modules: list[str], base: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = base
    tensors = lora(state, modules)
    if modules == ["model.embed_tokens"]:  # these are stored as plain tensors, transposed
        (a, b) = tensors.values()
        start = "base_model.model.model.embed_tokens."
        stored = {f"{start}lora_embedding_A": b.T, f"{start}lora_embedding_B": a.T}
    else:
        stored = tensors
    adapter = save(tmp_path / "lora", stored)
    expected = plain_logits(plain_merged(state, tensors, 2.0), LLAMA, TOKENS)
    torch.testing.assert_close(logits(folder, adapter=adapter), expected, rtol=1e-9, atol=1e-9)
    assert (expected - plain_logits(state, LLAMA, TOKENS)).abs().max() > 1e-2
    rounded = models.load(folder, adapter=adapter, dtype=torch.bfloat16).state_dict()
    wide = models.load(folder, adapter=adapter, dtype=torch.float64).state_dict()
    assert all(torch.equal(tensor, wide[name].float().bfloat16()) for name, tensor in rounded.items())


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"use_rslora": True}, 6 / math.sqrt(3)),
        ({"lora_alpha": 7.5}, 2.5),
        ({"alpha_pattern": {"self_attn.k_proj": 12}}, lambda name: 4.0 if name.endswith("k_proj") else 2.0),
        ({"alpha_pattern": {"proj": 12, "q_proj": 3}}, lambda name: 1.0 if name.endswith("q_proj") else 2.0),
        (
            {"alpha_pattern": {r"^model.layers.\d.self_attn.(q|v)_proj": 3}},
            lambda name: 1.0 if name[-6] in "qv" else 2.0,
        ),
        ({"target_modules": "all-linear", "lora_dropout": 0.5, "rank_pattern": {"q_proj": 3}}, 2.0),
    ],
)
def test_scales(config: dict[str, Any], scale: Any, base: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = base
    tensors = lora(state, ALL)
    adapter = save(tmp_path / "lora", tensors, **config)
    expected = plain_logits(plain_merged(state, tensors, scale), LLAMA, TOKENS)
    torch.testing.assert_close(logits(folder, adapter=adapter), expected, rtol=1e-9, atol=1e-9)


def test_whole_tensors_biases_and_names_without_the_head(tmp_path: Path) -> None:
    state = random_checkpoint(BIASED, dtype=torch.float32)
    write(tmp_path, BIASED, state)
    tensors = lora(
        {name.removeprefix("model."): tensor for name, tensor in state.items()}, ["layers.0.self_attn.q_proj"]
    )
    whole = {
        "lm_head.weight": torch.randn_like(state["lm_head.weight"]),
        "model.embed_tokens.weight": torch.randn_like(state["model.embed_tokens.weight"]),
        "model.layers.0.self_attn.k_proj.bias": torch.randn(8),
    }
    stored = {f"base_model.model.{name}": tensor for name, tensor in whole.items()}
    adapter = save(tmp_path / "lora", {**tensors, **stored}, bias="all", modules_to_save=["lm_head"])
    expected = plain_logits({**plain_merged(state, tensors, 2.0), **whole}, BIASED, TOKENS)
    torch.testing.assert_close(logits(tmp_path, adapter=adapter), expected, rtol=1e-9, atol=1e-9)


# ---- drafters


def test_a_drafter_changes_adapted_rows_alone(base: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = base
    tensors = lora(state, ["model.layers.0.self_attn.o_proj"])
    model = models.load(folder, dtype=torch.float64, drafter=save(tmp_path / "lora", tensors))
    tokens = torch.tensor([TOKENS])
    assert torch.equal(model(tokens), models.load(folder, dtype=torch.float64)(tokens))
    expected = plain_logits(plain_merged(state, tensors, 2.0), LLAMA, TOKENS)
    torch.testing.assert_close(model(tokens, adapted=True)[0], expected, rtol=1e-9, atol=1e-9)
    other = save(tmp_path / "lora", lora(state, ALL))
    with pytest.raises(NotImplementedError, match=r"drafter lora must change attention's output projections alone"):
        models.load(folder, drafter=other)


NEMOTRON = {
    **MINISTRAL3,
    "model_type": "nemotron_labs_diffusion",
    "mask_token_id": 16,
    "block_size": 4,
    "dlm_paradigm": "block_diff",
    "dtype": "float32",
    "eos_token_id": 11,
}


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_nemotron_labs_diffusion(factor: float, tmp_path: Path) -> None:
    rope = {**MINISTRAL3["rope_parameters"], "factor": factor}
    fields = {**NEMOTRON, "rope_parameters": rope}
    state = random_checkpoint({**fields, "model_type": "ministral3"}, dtype=torch.float32)
    names = {name: name.replace("model.", "encoder.").replace("lm_head", "diffusion_head") for name in state}
    write(tmp_path, fields, {names[name]: tensor for name, tensor in state.items()})
    tensors = lora(state, [f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)])
    stored = {
        name.replace("base_model.model.model.", "base_model.model.encoder."): tensor for name, tensor in tensors.items()
    }
    drafter = save(tmp_path / "linear_spec_lora", stored, target_modules=["o_proj"])
    model = models.load(tmp_path, dtype=torch.float64, drafter=drafter)
    assert (model.mask_token, model.end_tokens, model.config.predicts) == (16, (11,), "next")
    tokens = [*TOKENS, *range(10)]  # beyond the original positions
    both = [model(torch.tensor([tokens]), adapted=adapted)[0] for adapted in (False, True)]
    plain = {**fields, "model_type": "ministral3"}
    torch.testing.assert_close(both[0], plain_logits(state, plain, tokens), rtol=1e-9, atol=1e-9)
    merged = plain_merged(state, tensors, 2.0)
    torch.testing.assert_close(both[1], plain_logits(merged, plain, tokens), rtol=1e-9, atol=1e-9)
    greedy = generate(model, TOKENS, max_new_tokens=12, end_tokens=())
    drafted = generate(model, TOKENS, "linear_self_speculation", max_new_tokens=12, end_tokens=(), block_size=4)
    assert torch.equal(greedy.tokens, drafted.tokens)
    with pytest.raises(ValueError, match=r"config.json must hold 'mask_token_id'"):
        models.from_hf_config({name: value for name, value in fields.items() if name != "mask_token_id"})


def test_a_drafter_in_a_snapshot_of_a_hub_cache(base: tuple[Path, State], tmp_path: Path) -> None:
    """A folder inside the snapshot, whose files are links to the blobs next to the snapshots; other links are not followed."""
    folder, state = base
    blobs, inside = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0123/linear_spec_lora"
    save(tmp_path / "lora", lora(state, ["model.layers.0.self_attn.o_proj"])).rename(blobs.parent.with_name("kept"))
    inside.mkdir(parents=True)
    blobs.mkdir()
    for file in (tmp_path / "kept").iterdir():
        file.rename(blobs / file.name)
        (inside / file.name).symlink_to(f"../../../blobs/{file.name}")
    assert models.load(folder, drafter=inside).has_adapter
    (blobs / "adapter_config.json").rename(tmp_path / "outside.json")
    (inside / "adapter_config.json").unlink()
    (inside / "adapter_config.json").symlink_to("../../../../outside.json")
    with pytest.raises(ValueError, match=r"adapter_config.json must be a file inside the folder, got a link to "):
        models.load(folder, drafter=inside)


def mask_token(folder: Path, **tensors: torch.Tensor) -> None:
    save_file(tensors, folder / "mask_token.safetensors")


@pytest.mark.parametrize("tied", [True, False])
def test_a_drafter_brings_a_mask_token(tied: bool, tmp_path: Path) -> None:
    fields = {**LLAMA, "tie_word_embeddings": tied}
    state = random_checkpoint(fields, dtype=torch.float32)
    write(tmp_path, fields, state)
    drafter = save(tmp_path / "lora", lora(state, ["model.layers.0.self_attn.o_proj"]))
    row = torch.randn(20, generator=torch.Generator().manual_seed(2))
    mask_token(drafter, embedding=row.bfloat16())
    base = models.load(tmp_path, dtype=torch.float64)
    model = models.load(tmp_path, dtype=torch.float64, drafter=drafter)
    assert (model.mask_token, model.config.vocab_size, base.mask_token) == (19, 20, None)
    assert torch.equal(model.embedding[19], row.bfloat16().double())
    tokens = torch.tensor([TOKENS])
    torch.testing.assert_close(model(tokens)[..., :19], base(tokens), rtol=1e-12, atol=1e-12)
    greedy = generate(base, TOKENS, max_new_tokens=20).tokens
    options = dict(block_size=3, label_shift=1, in_group="causal", max_new_tokens=20)
    assert generate(model, TOKENS, "quadratic_self_speculation", **options).tokens.equal(greedy)
    assert generate(model, TOKENS, max_new_tokens=20).tokens.equal(greedy)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"embedding": torch.zeros(21)}, "mask_token.safetensors: embedding must have shape (20,), got (21,)."),
        ({"embedding": torch.zeros(20, dtype=torch.int8)}, "mask_token.safetensors: embedding must be float64, "),
        ({"row": torch.zeros(20)}, "mask_token.safetensors must hold embedding alone, got row."),
    ],
)
def test_invalid_mask_tokens(
    tensors: dict[str, torch.Tensor], sentence: str, base: tuple[Path, State], tmp_path: Path
) -> None:
    folder, state = base
    drafter = save(tmp_path / "lora", lora(state, ["model.layers.0.self_attn.o_proj"]))
    mask_token(drafter, **tensors)
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        models.load(folder, drafter=drafter)
    assert str(caught.value).startswith(f"pdkernels.models.load: {sentence}")


def test_a_model_has_one_mask_token(base: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = base
    write(folder, {**LLAMA, "mask_token_id": 3}, state)
    drafter = save(tmp_path / "lora", lora(state, ["model.layers.0.self_attn.o_proj"]))
    mask_token(drafter, embedding=torch.zeros(20))
    with pytest.raises(ValueError, match="drafter lora must bring no mask token to a model that has one, got mask_tok"):
        models.load(folder, drafter=drafter)


def test_adapters_by_name(base: tuple[Path, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, state = base
    with monkeypatch.context() as bare:
        bare.setattr(packaged, "entry_points", lambda group: ())
        with pytest.raises(ValueError, match=r"exists, got 'mine'. Adapters that have names: none is installed."):
            models.load(folder, adapter="mine")
    before, installed = set(weight_folders("adapter_config.json")), weights.install(monkeypatch, tmp_path)
    save(installed / "mine", lora(state, ["model.layers.0.self_attn.o_proj"]))
    assert set(weight_folders("adapter_config.json")) == {*before, "mine"}
    assert models.load(folder, drafter="mine").has_adapter
    assert not torch.equal(logits(folder, adapter="mine"), logits(folder))
    # A path is that of a folder, whatever its name.
    with pytest.raises(ValueError, match="adapter must be a folder that exists, got 'mine'"):
        models.load(folder, drafter=Path("mine"))


# ---- what is refused


def refused(name: str, value: Any) -> tuple[dict[str, Any], str]:
    return {name: value}, f"adapter_config.json: {name} must be "


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        refused("peft_type", "LOHA"),
        refused("use_dora", True),
        refused("lora_bias", True),
        refused("alora_invocation_tokens", [1]),
        refused("target_parameters", ["experts"]),
        refused("layer_replication", [[0, 1]]),
        refused("trainable_token_indices", [1]),
        (
            {"alpha_pattern": {"(q": 2}},
            "alpha_pattern must hold regular expressions, got '(q': missing ) at position 12.",
        ),
        (
            {"rank_pattern": {r"(a)\1": 2}},
            "rank_pattern must hold patterns of names that can be matched in few steps, got an",
        ),
        ({"lora_alpha": "six"}, "lora_alpha must be a number, got 'six'."),
        ({"use_rslora": "yes"}, "use_rslora must be true or false, got 'yes'."),
    ],
)
def test_other_configurations(config: dict[str, Any], sentence: str, base: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = base
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        models.load(folder, adapter=save(tmp_path / "lora", lora(state, ALL), **config))
    assert str(caught.value).startswith("pdkernels.models.load: ") and sentence in str(caught.value)


START = "base_model.model.model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({f"{START}lora_A.weight": None}, "q_proj.weight must have both lora_A and lora_B, got only "),
        (
            {f"{START}lora_A.weight": torch.zeros(4, 20)},
            "must have pairs for a matrix (24, 20), got (4, 20) and (24, 3).",
        ),
        (
            {f"{START}lora_B.weight": torch.zeros(20, 3)},
            "must have pairs for a matrix (24, 20), got (3, 20) and (20, 3).",
        ),
        (
            {f"{START}lora_A.weight": torch.zeros(3, 20, dtype=torch.int8)},
            "must be float64, float32, bfloat16, float16, got I8.",
        ),
        ({f"{START}lora_magnitude_vector": torch.zeros(24)}, "must belong to a tensor of the checkpoint"),
        ({"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(3, 20)}, "must belong to a tensor"),
        ({"model.layers.0.self_attn.q_proj.weight": torch.zeros(24, 20)}, "must belong to a tensor of the checkpoint"),
        ({"base_model.model.lm_head.weight": torch.zeros(19, 21)}, "must have shape (19, 20), got (19, 21)."),
    ],
)
def test_other_tensors(changes: State, sentence: str, base: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = base
    tensors = {**lora(state, ALL[:1]), **changes}
    adapter = save(tmp_path / "lora", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        models.load(folder, adapter=adapter)
    assert str(caught.value).startswith("pdkernels.models.load: adapter_model.safetensors: ")
    assert sentence in str(caught.value)


def test_invalid_folders(base: tuple[Path, State], tmp_path: Path) -> None:
    folder, _ = base
    empty = tmp_path / "empty"
    empty.mkdir()
    for adapter, sentence in (
        (tmp_path / "missing", "adapter must be a folder that exists, got "),
        (empty, "adapter must hold adapter_config.json, got none in "),
    ):
        with pytest.raises(ValueError) as caught:
            models.load(folder, adapter=adapter)
        assert sentence in str(caught.value)
    (empty / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"adapter must hold adapter_model.safetensors, .* save it again with PEFT"):
        models.load(folder, adapter=empty)
    with pytest.raises(ValueError, match="adapters are for checkpoints, and tiny-code is a tiny model"):
        models.load("tiny-code", adapter=empty)


def test_a_tied_head_is_left_alone(tmp_path: Path) -> None:
    state = random_checkpoint(QWEN2, dtype=torch.float32)
    write(tmp_path, QWEN2, state)
    adapter = save(tmp_path / "lora", lora(state, ["model.embed_tokens"]))
    with pytest.raises(NotImplementedError, match="must leave a head that is tied to the embedding alone"):
        models.load(tmp_path, adapter=adapter)
