"""Hidden states of named layers: those of transformers, and the bits of the same forward without taps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkernels import _native, quantize
from pdkernels.generation.filtered_model import FilteredModel
from pdkernels.generation.filters import Filters
from pdkernels.masks import causal, tree
from pdkernels.models import Transformer
from pdkernels.models.architectures.fused import rms_norm
from pdkernels.models.architectures.layer import Layer
from tests.models.test_row_invariance import CONFIG, DTYPES, a_model, configs, some_tokens
from tests.models.test_whole_step import count_runs

TREE = tree([-1, 0, 0, 1, 1, 2])


def on_a_cache(model: Any, taps: list[int] | None, page_size: int | None = None, ragged: bool = False) -> list[Any]:
    """Hidden rows of a prompt and of a tree after it, with the tapped features if `taps`; then all of the cache."""
    cache = model.new_cache(2, 32, **({} if page_size is None else {"kind": "paged", "page_size": page_size}))
    if page_size is not None:
        cache.reserve_([32, 32])
    tokens, counts = some_tokens(2, 7 + TREE.q_len), torch.tensor([7, 4 if ragged else 7])
    found: list[Any] = []
    plan = TREE.plan(16, 16)
    for part, options in (
        (tokens[:, :7], {"counts": counts}),
        (tokens[:, 7:], {"mask": plan, "positions": TREE.positions}),
    ):
        if taps is None:
            found.append(model.hidden(part, cache=cache, **options))
        else:
            found += [*model.tapped(part, taps, cache=cache, **options)]
        cache.commit_(counts if part.shape[1] == 7 else torch.full((2,), TREE.q_len))
    rows = [torch.arange(int(count))[None] for count in counts]
    for index in (0,) if taps is None else (0, 1):  # rows of padding are meaningless
        found[index] = [found[index][number, kept[0]] for number, kept in enumerate(rows)]
    return [*found, cache.k.clone(), cache.v.clone()]


def flat(found: list[Any]) -> list[torch.Tensor]:
    return [part for each in found for part in (each if isinstance(each, list) else [each])]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@settings(max_examples=40)
@given(
    config=configs(),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
    packed=st.sampled_from([None, None, "int8", "int4"]),
    page_size=st.sampled_from([None, 5]),
    ragged=st.booleans(),
)
def test_the_bits_of_a_forward_without_taps(
    config: Any, dtype: torch.dtype, data: st.DataObject, packed: str | None, page_size: int | None, ragged: bool
) -> None:
    """Its result and its cache; and features are those of the layers one by one."""
    model = a_model(config, dtype)
    if packed is not None:
        model = quantize(model, packed)
    taps = data.draw(st.lists(st.integers(0, config.layers), min_size=1, max_size=4))
    plain = flat(on_a_cache(model, None, page_size, ragged))
    first, first_features, second, second_features, k, v = on_a_cache(model, taps, page_size, ragged)
    assert same(flat([first, second, k, v]), plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDKERNELS_WHOLE_STEP", "0")
        expected = on_a_cache(model, taps, page_size, ragged)
    assert same(flat([first_features, second_features]), flat([expected[1], expected[3]]))
    assert second_features.shape == (2, TREE.q_len, len(taps), config.hidden_size)
    for place, tap in enumerate(taps):
        if tap == config.layers:
            assert torch.equal(second_features[:, :, place], second)


@pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")
def test_what_taps_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing: with and without them all layers are one op."""
    model, tokens = a_model(CONFIG, torch.float32), some_tokens(1, 5)
    runs, layers = count_runs(monkeypatch), []
    whole = Transformer._run_layers

    def counted(self: Transformer, x: Any, rows: Any, gate: Any, first: int, end: int) -> torch.Tensor:
        layers.extend(range(first, end))
        return whole(self, x, rows, gate, first, end)

    monkeypatch.setattr(Transformer, "_run_layers", counted)
    for taps in (None, [0], [1], [2, 1]):
        runs.clear(), layers.clear()
        cache = model.new_cache(1, 8)
        model.hidden(tokens, cache=cache) if taps is None else model.tapped(tokens, taps, cache=cache)
        assert (len(runs), layers) == (1, [])


def test_gradients_flow_through_taps() -> None:
    model = a_model(CONFIG, torch.float32).requires_grad_(True)
    model.tapped(some_tokens(1, 4), [1]).features.sum().backward()
    assert model.layers[0].qkv.grad is not None and model.layers[1].qkv.grad is None


def test_a_hooked_layer_is_followed() -> None:
    model, tokens = a_model(CONFIG, torch.float32), some_tokens(1, 4)
    seen: list[torch.Tensor] = []

    def hook(layer: Layer, given: tuple[Any, ...], found: Any) -> None:
        seen.append(given[0])

    with torch.no_grad():
        handle = model.layers[1].register_forward_hook(hook)
        features = model.tapped(tokens, [1], cache=model.new_cache(1, 8)).features
        handle.remove()
    assert len(seen) == 1 and torch.equal(seen[0], features[:, :, 0])


@torch.no_grad()
def test_filtered_models_have_taps() -> None:
    model, tokens = a_model(CONFIG, torch.float32), some_tokens(1, 6)
    penalised = FilteredModel(model, Filters(repetition_penalty=1.3))
    logits, features = penalised.tapped(tokens, [1], cache=penalised.new_cache(1, 8))
    assert torch.equal(logits, penalised(tokens, cache=penalised.new_cache(1, 8)))
    assert torch.equal(features, model.tapped(tokens, [1], cache=model.new_cache(1, 8)).features)


@pytest.mark.parametrize(
    ("taps", "kind", "words"),
    [
        ([], ValueError, "taps must name a layer"),
        ([3], ValueError, "taps must be in 0 .. 2, for a model of 2 layers, got 3"),
        ([-1], ValueError, "taps must be in 0 .. 2"),
        ([True], TypeError, "taps must be ints, got bool"),
        (1, TypeError, "taps must be a sequence of ints, got int"),
    ],
)
def test_what_taps_refuse(taps: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"pdkernels.Transformer.tapped: {words}"):
        a_model(CONFIG, torch.float32).tapped(some_tokens(1, 4), taps)


transformers = pytest.importorskip("transformers", reason="compares with transformers where it is installed")


def theirs(family: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "initializer_range": 0.3}
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes)).eval()


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_hidden_states_of_transformers(family: str, wrapped: bool) -> None:
    from pdkernels.integrations.transformers import from_transformers, wrap

    given, tokens = theirs(family), some_tokens(2, 9)
    with torch.no_grad():
        expected = given(tokens, output_hidden_states=True).hidden_states
        model: Any = wrap(given) if wrapped else from_transformers(given)
        taps = [0, 3, 1]
        wanted = torch.stack([expected[tap] for tap in taps], -2)
        hidden, features = model.tapped(tokens, taps)
        torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(hidden, model.hidden(tokens))
        cache = model.new_cache(2, 12)
        parts = []
        for part in tokens.split([5, 4], 1):
            hidden, features = model.tapped(part, taps, cache=cache, mask=causal(part.shape[1]).plan(64, 64))
            parts.append(features)
            cache.commit_(torch.full((2,), part.shape[1]))
        torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-4, atol=1e-4)
        # Of transformers this state is normed already.
        last = model.tapped(tokens, [4, 3]).features
        plain = from_transformers(given)
        torch.testing.assert_close(last, plain.tapped(tokens, [4, 3]).features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            rms_norm(last[:, :, 0], plain.norm, plain.config.norm_eps), expected[4], rtol=1e-4, atol=1e-4
        )
