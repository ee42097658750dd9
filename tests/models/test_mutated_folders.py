"""Adapters and layers for multi-token prediction in damaged folders: a named refusal, or what the folder says; and values that a model must bear."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pdkernels as pd
from pdkernels import models
from pdkernels.models import HybridConfig, TransformerConfig, load_drafter
from pdkernels.models.checkpoints.lora_config import FOLLOWED, REFUSED, WITHOUT_EFFECT
from tests.models.test_adapters import ALL, TOKENS, lora, plain_merged, save
from tests.models.test_adapters import base as base  # a fixture
from tests.support.checkpoint_fuzz import JUNK
from tests.support.checkpoints import LLAMA, State, plain_logits

SENTENCE = r"^pdkernels\.models\.load: [^\n]*$"
DTYPES = (torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn)


def damaged(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """What takes the place of one tensor; all of it must be refused."""
    yield "missing", {}
    yield "renamed", {f"{name}.x": tensor}
    yield "a scalar", {name: tensor.flatten()[0].clone()}
    if tensor.dim() > 1:
        yield "flat", {name: tensor.flatten().clone()}
    yield "short", {name: tensor[:-1].clone()}
    yield "empty", {name: tensor[:0].clone()}
    yield "long", {name: torch.cat([tensor, tensor])}
    yield "of another dimension", {name: tensor[None].clone()}
    for dtype in DTYPES:
        yield str(dtype), {name: tensor.to(dtype)}


def cuts(path: Path, count: int) -> Iterator[None]:
    """The file, cut off at several places."""
    whole = path.read_bytes()
    for end in (0, 4, 8, *(len(whole) * step // count for step in range(1, count)), len(whole) - 1):
        path.write_bytes(whole[:end])
        yield
    path.write_bytes(whole)


def refused(load: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=SENTENCE):
        load()


# ---- adapters


def test_tensors_of_an_adapter(base: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = base
    tensors = lora(state, ALL)
    adapter = save(tmp_path / "lora", tensors)
    path = adapter / "adapter_model.safetensors"
    for name in list(tensors)[:4]:
        for _, others in damaged(name, tensors[name]):
            save_file({key: value for key, value in tensors.items() if key != name} | others, path)
            refused(lambda: models.load(folder, adapter=adapter))
    save_file(tensors, path)
    for _ in cuts(path, 6):
        refused(lambda: models.load(folder, adapter=adapter))


def expected_scale(fields: dict[str, Any]) -> float:
    """PEFT's, for the same rank in every module."""
    alpha, rank = fields.get("lora_alpha", 8), fields.get("r", 8)
    return float(alpha) / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def scale_of(alpha: float, module: str) -> float:
    return (alpha if module.endswith("q_proj") else 6) / 3


CASES = [(name, value) for name in sorted(FOLLOWED | WITHOUT_EFFECT | REFUSED | {"another"}) for value in JUNK]
RANKS = [0, -1, -3, 1, 2, 10**9, 2**63, 3.0, None]


@pytest.mark.parametrize("part", [0.1, pytest.param(1.0, marks=pytest.mark.slow)])
def test_fields_of_an_adapter(part: float, base: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = base
    tensors, loaded = lora(state, ALL), 0
    adapter = save(tmp_path / "lora", tensors)
    fields = json.loads((adapter / "adapter_config.json").read_text())
    chosen = random.Random(0).sample(CASES, int(part * len(CASES)))
    chosen += [("r", rank) for rank in RANKS]
    chosen += [(name, {"q_proj": rank}) for name in ("rank_pattern", "alpha_pattern") for rank in RANKS]
    for name, value in chosen:
        changed = {**fields, name: value}
        (adapter / "adapter_config.json").write_text(json.dumps(changed))
        try:
            found = models.load(folder, dtype=torch.float64, adapter=adapter)(torch.tensor([TOKENS]))[0]
        except (ValueError, NotImplementedError) as error:
            assert str(error).startswith("pdkernels.models.load: adapter_") and len(str(error)) < 700, error
            continue
        loaded += 1
        scale: Any = expected_scale(changed)
        if name == "alpha_pattern" and value:
            scale = partial(scale_of, value["q_proj"])
        expected = plain_logits(plain_merged(state, tensors, scale), LLAMA, TOKENS)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True, msg=str((name, value)))
    assert loaded > len(chosen) / 4


# ---- layers for multi-token prediction


@pytest.fixture(scope="module", params=["mimo", "qwen3_5_text"])
def published(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder, its model, the drafting layers, and their names."""
    pytest.importorskip("transformers")
    from tests.models.test_mtp_folders import Published

    made = Published(request.param)
    folder = made.save(tmp_path_factory.mktemp("published"))
    model = models.load(folder)
    return folder, model, load_drafter(folder, model), list(made.tensors())


def test_tensors_of_drafting_layers(published: Any) -> None:
    folder, model, _, names = published
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    state = load_file(path)
    try:
        for name in names:
            for _, others in damaged(name, state[name]):
                save_file({key: value for key, value in state.items() if key != name} | others, path)
                refused(lambda: load_drafter(folder, model))
        path.write_bytes(whole)
        for _ in cuts(path, 6):
            refused(lambda: load_drafter(folder, model))
    finally:
        path.write_bytes(whole)


RECURRENT = {"conv_kernel_dim": "conv_width", "num_key_heads": "key_heads", "num_value_heads": "value_heads"}
RECURRENT |= {"key_head_dim": "key_dim", "value_head_dim": "value_dim"}
FOLLOWS = {
    # What may change of a head that loads, by the field that was changed.
    "rms_norm_eps": {"norm_eps"},
    "rope_theta": {"rope_theta"},
    "rope_parameters": {"rope_theta", "rope_scaling", "max_positions", "rotary_dim"},
    "rope_scaling": {"rope_theta", "rope_scaling", "max_positions", "rotary_dim"},
    "max_position_embeddings": {"max_positions"},
    "tie_word_embeddings": {"tied_head"},
    "layer_types": {"mixers"},
    # Of recurrent layers: the layer that drafts has attention.
    **{f"linear_{name}": {field} for name, field in RECURRENT.items()},
}


@pytest.mark.parametrize("part", [0.1, pytest.param(1.0, marks=pytest.mark.slow)])
def test_fields_of_drafting_layers(part: float, published: Any) -> None:
    folder, model, head, names = published
    path = folder / "config.json"
    text = path.read_text()
    fields, usual, state = json.loads(text), asdict(head.config.body), head.state_dict()
    cases = [(name, value) for name in sorted(fields) for value in JUNK]
    loaded = 0
    try:
        for name, value in random.Random(1).sample(cases, int(part * len(cases))):
            path.write_text(json.dumps({**copy.deepcopy(fields), name: value}))
            try:
                found = load_drafter(folder, model)
            except (ValueError, NotImplementedError, TypeError) as error:
                assert str(error).startswith("pdkernels.models.load: ") and len(str(error)) < 1200, error
                continue
            loaded += 1
            body = asdict(found.config.body)
            changed = {field for field in usual if body[field] != usual[field]}
            assert changed <= FOLLOWS.get(name, set()), (name, value, changed)
            assert all(torch.equal(tensor, state[key]) for key, tensor in found.state_dict().items())
    finally:
        path.write_text(text)
    assert loaded > 10


# ---- values


SIZES: dict[str, Any] = dict(vocab_size=40, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate_size=48)  # fmt: skip
BAD = 39


def random_model(kind: str) -> Any:
    """A model whose embedding of one token is NaN; it never emits that token."""
    torch.manual_seed(1)
    hybrid = {"mixers": ("delta", "attention"), "key_heads": 2, "value_heads": 4}
    made: Any = (
        models.Hybrid(HybridConfig(**SIZES, tied_head=False, **hybrid))
        if kind == "hybrid"
        else models.Transformer(TransformerConfig(**SIZES, tied_head=False))
    )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
        made.embedding[BAD] = math.nan
    made = made.requires_grad_(False).eval()
    if kind == "int8":
        made = pd.quantize(made, "int8", skip="embedding")
    if kind == "int8 cache":
        made.cache_dtype = torch.int8
    return made.bfloat16() if kind == "bfloat16" else made


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "hybrid", "int8", "int8 cache"])
@pytest.mark.parametrize("method", ["autoregressive", "jacobi"])
def test_a_row_of_nan_changes_no_other(method: str, kind: str) -> None:
    """Neither in its batch nor after it, when its pages of K and V have other owners."""
    model, options = random_model(kind), {"max_new_tokens": 10, "end_tokens": ()}
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5]]
    alone = [pd.decoding.generate(model, prompt, method, **options).tokens.tolist() for prompt in prompts]
    pages = {} if kind == "hybrid" else {"cache_tokens": 128}
    with pd.Engine(model, max_running=4, **pages) as engine:
        for _ in range(2):
            bad = [engine.submit([7, BAD, 8], method, **options) for _ in range(2)]
            good = [engine.submit(prompt, method, **options) for prompt in prompts]
            assert [one.result(timeout=60).tokens.tolist() for one in good] == alone
            for one in bad:
                with pytest.raises(ValueError, match="the model's logits leave no token to choose"):
                    one.result(timeout=60)


@pytest.mark.parametrize("where", ["q", "k", "v", "all"])
def test_biases_of_a_hundred_thousand(where: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=40, intermediate_size=48, attention_bias=True, **sizes)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in theirs.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3)
        elif name.endswith("bias") and where in (name.split(".")[-2][0], "all"):
            parameter.normal_(std=1e5)
    theirs.save_pretrained(tmp_path)
    ours, tokens = models.load(tmp_path, dtype=torch.float32), torch.tensor([TOKENS])
    expected = theirs(tokens).logits
    cache, found = ours.new_cache(batch=1, capacity=16), []
    for chunk in tokens.split(2, 1):
        found.append(ours(chunk, cache=cache))
        cache.commit_(torch.tensor([chunk.shape[1]]))
    for logits in (ours(tokens), torch.cat(found, 1)):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
