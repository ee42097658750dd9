"""`wrap` leaves a model as it is, also while other threads run it, and still sees what happens to the model."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch

import pdkernels as pd

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from pdkernels.integrations.transformers import generate, register, wrap  # noqa: E402
from pdkernels.integrations.transformers._shadow import Overlay, shadow  # noqa: E402
from tests.support.state import state_of  # noqa: E402

V = 61
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
PROMPT = [5, 9, 2, 33, 17]


def small(name: str = "Llama", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.2)
    return model.eval()


def theirs(model: Any, new: int = 10, prompt: list[int] = PROMPT) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, max_new_tokens=new, do_sample=False, **settings)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def ours(wrapped: Any, new: int = 10, prompt: list[int] = PROMPT) -> list[int]:
    tokens: list[int] = pd.decoding.generate(
        wrapped, prompt, "jacobi", max_new_tokens=new, end_tokens=()
    ).tokens.tolist()
    return tokens


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2", "Phi3", "Gemma3Text"])
def test_nothing_of_the_model_changes(name: str, training: bool) -> None:
    """Modules, attributes, configs, hooks, parameters, buffers, the random state: the same objects, the same values."""
    model = small(name)
    expected = theirs(model)
    model.train(training)
    before, drawn = state_of(model), torch.get_rng_state()
    wrapped = wrap(model)
    assert ours(wrapped) == expected
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), drawn)


def test_threads_wrap_and_generate_at_once() -> None:
    """Four threads decode through `wrap`, and one runs the model itself: its attention never is another."""
    model = small()
    expected = theirs(model)
    implementation = model.config._attn_implementation
    faults: list[BaseException | str] = []

    def decode() -> None:
        try:
            for _ in range(4):
                if ours(wrap(model)) != expected:
                    faults.append("other tokens")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    seen = {model.config._attn_implementation}
    while any(thread.is_alive() for thread in threads):
        seen.add(model.config._attn_implementation)
        assert theirs(model, 2) == expected[:2]
    for thread in threads:
        thread.join()
    assert not faults and seen == {implementation}


def test_weights_and_places_are_the_models() -> None:
    model = small()
    wrapped = wrap(model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-2)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    assert ours(wrapped) == theirs(model)
    model.to(torch.float64).to(torch.float32)
    assert ours(wrapped) == theirs(model)
    model.to(torch.bfloat16)
    assert wrapped.dtype == torch.bfloat16 and wrapped.model is model


def test_hooks_of_the_model_run() -> None:
    """Those that are there, and those that come or go later, with the module of the shadow."""
    model = small()
    handle = model.model.layers[1].register_forward_hook(lambda module, given, out: out * -0.5)
    wrapped = wrap(model)
    hooked = theirs(model)
    assert ours(wrapped) == hooked
    handle.remove()
    plain = theirs(model)
    assert plain != hooked and ours(wrapped) == plain
    model.lm_head.register_forward_pre_hook(lambda module, given: (given[0].flip(-1),))
    assert theirs(model) not in (plain, hooked) and ours(wrapped) == theirs(model)


def test_a_hook_that_changes_the_tokens_of_the_whole_model_is_refused() -> None:
    """Its body is called by itself, so that the hook would be passed over in silence, however late it came."""
    model = small()
    wrapped, settings = wrap(model), {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    ids = torch.tensor([PROMPT])
    assert torch.equal(model.generate(ids, custom_generate=generate, **settings), model.generate(ids, **settings))

    def shift(module: Any, given: Any, named: dict[str, Any]) -> Any:
        return given, {**named, "input_ids": (named["input_ids"] + 1) % V} if "input_ids" in named else named

    handle = model.register_forward_pre_hook(shift, with_kwargs=True)
    with pytest.raises(ValueError, match="Wrap it again"):
        ours(wrapped)
    for call in (lambda: wrap(model), lambda: model.generate(ids, custom_generate=generate, **settings)):
        with pytest.raises(NotImplementedError, match="compute the same with our attention as with its own"):
            call()
    handle.remove()
    assert ours(wrapped) == theirs(model)


def test_attributes_that_refer_to_modules() -> None:
    """Bound methods, partials, lists and weak references lead to modules of the shadow, as `_modules` do."""
    import weakref

    register()
    model = small()
    attention = model.model.layers[0].self_attn
    attention.old_forward = attention.forward
    attention.forward = functools.update_wrapper(
        functools.partial(lambda module, *a, **k: module.old_forward(*a, **k), attention), attention.old_forward
    )
    model.others, model.weak = [(model.model.norm,)], weakref.ref(model.model)
    made = shadow(model, "pdkernels")
    inner = made.model.layers[0].self_attn
    assert inner.old_forward.__self__ is inner and inner.forward.args == (inner,) and inner is not attention
    assert made.others[0][0] is made.model.norm and made.weak() is made.model
    assert made.config is made.model.config and made.config is inner.config and made.config is not model.config
    assert ours(wrap(model)) == theirs(model)


@pytest.mark.parametrize("way", ["module", "forward", "in place", "layer"])
def test_compiled_models(way: str) -> None:
    model = small()
    expected = theirs(model)
    if way == "module":
        model = torch.compile(model, backend="eager")
    elif way == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif way == "in place":
        model.compile(backend="eager")
    else:
        model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    assert ours(wrap(model)) == expected


def test_tied_modules_stay_tied() -> None:
    model = small(tie_word_embeddings=True)
    model.model.layers[1] = model.model.layers[0]
    made = shadow(model)
    assert made.model.layers[1] is made.model.layers[0]
    assert made.lm_head.weight is model.model.embed_tokens.weight


ROTARY: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 24,
        "factor": 2.0,
    },
    "a scale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 24,
        "short_mscale": 1.0,
        "long_mscale": 2.5,
    },
}


@pytest.mark.parametrize("rule", ROTARY)
def test_frequencies_that_follow_the_length(rule: str) -> None:
    """The model may be in the middle of a long text: neither sees the other's frequencies. Where rules change, texts end."""
    more = {"max_position_embeddings": 24 if rule == "dynamic" else 48, "rope_parameters": ROTARY[rule]}
    model = small("Phimoe" if rule == "a scale" else "Llama", **more)
    expected = theirs(model)
    long = torch.arange(40)[None] % V
    with torch.no_grad():
        after = model(long).logits
        wrapped = wrap(model)
        before = state_of(model)
        assert ours(wrapped) == expected
        assert state_of(model) == before
        torch.testing.assert_close(model(long).logits, after, atol=0, rtol=0)
    assert wrapped.config.max_positions == 24
    with pytest.raises(ValueError, match="24 positions"):
        ours(wrapped, new=20)


def test_an_overlay_reads_through_and_keeps_its_writes() -> None:
    below = {"a": 1, "b": 2}
    over = Overlay(below)
    assert over and not Overlay({})
    over["c"] = 3
    del over["a"]
    below["d"] = 4
    assert dict(over.items()) == {"b": 2, "c": 3, "d": 4} and len(over) == 3 and "a" not in over
    assert below == {"a": 1, "b": 2, "d": 4} and over.get("a") is None and over.pop("x", 7) == 7
    with pytest.raises(KeyError):
        over["a"]
    with pytest.raises(KeyError):
        del over["a"]
    over["a"] = 5
    assert over["a"] == 5 and copy.deepcopy(over) == {"a": 5, "b": 2, "c": 3, "d": 4}


def test_an_overlay_is_true_where_it_holds_something() -> None:
    below = {"a": 1}
    overlay = Overlay(below)
    assert overlay and not Overlay({})
    del overlay["a"]
    assert not overlay
    overlay["b"] = 2
    assert overlay
    del overlay["b"]
    assert not overlay
    below["c"] = 3
    assert overlay and len(overlay) == 1
