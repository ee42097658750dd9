"""The plain masked transformer against torch's own modules and against itself, fed in parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pdkernels.reference.masked_model import NAMES, MaskedTransformerReference, random_weights

TOKENS = torch.tensor([[3, 1, 12, 12, 5, 12, 0]])
FULL = torch.ones(7, 7, dtype=torch.bool)
POSITIONS = torch.arange(7)[None]


def built(names: str, **sizes: object) -> MaskedTransformerReference:
    return MaskedTransformerReference(random_weights(names, **sizes), heads=4, names=names)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", ["llada", "qwen2"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_against_torch(names: str, kv_heads: int) -> None:
    """Complex rotation, scaled_dot_product_attention, rms_norm: none of the reference's own code."""
    model = built(names, kv_heads=kv_heads, seed=kv_heads)
    w, n = model.weights, NAMES[names]
    x = F.embedding(TOKENS[0], w[n["embedding"] + ".weight"])
    angle = torch.outer(torch.arange(7, dtype=torch.float64), torch.tensor([1.0, 0.01], dtype=torch.float64))
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    turned = lambda y: torch.view_as_real(torch.complex(y[..., :2], y[..., 2:]) * turn).movedim(-1, -2).flatten(-2)  # noqa: E731
    for layer in range(2):
        weight = lambda part: w[f"{n['layer']}{layer}.{n[part]}.weight"]  # noqa: B023, E731
        bias = lambda part: w.get(f"{n['layer']}{layer}.{n[part]}.bias")  # noqa: B023, E731
        assert (bias("q") is not None) == (names == "qwen2")
        h = F.rms_norm(x, (16,), weight("attention_norm"), 1e-6)
        q, k, v = (F.linear(h, weight(p), bias(p)).view(7, -1, 4) for p in "qkv")
        mixed = F.scaled_dot_product_attention(
            turned(q).movedim(1, 0), turned(k).movedim(1, 0), v.movedim(1, 0), enable_gqa=True
        )
        x = x + F.linear(mixed.movedim(0, 1).flatten(1), weight("out"))
        h = F.rms_norm(x, (16,), weight("feed_forward_norm"), 1e-6)
        x = x + F.linear(F.silu(F.linear(h, weight("gate"))) * F.linear(h, weight("up")), weight("down"))
    expected = F.linear(F.rms_norm(x, (16,), w[n["norm"] + ".weight"], 1e-6), w[n["head"] + ".weight"])
    torch.testing.assert_close(model(TOKENS, POSITIONS, FULL)[0], expected, rtol=1e-12, atol=1e-12)


def test_the_two_namings_are_one_model() -> None:
    llada, qwen2 = random_weights("llada", seed=4), random_weights("qwen2", bias=False, seed=4)
    first = MaskedTransformerReference(llada, heads=4, names="llada")
    second = MaskedTransformerReference(qwen2, heads=4, names="qwen2")
    assert torch.equal(first(TOKENS, POSITIONS, FULL), second(TOKENS, POSITIONS, FULL))
    assert (first.predicts, second.predicts) == ("own", "next")
    assert MaskedTransformerReference(llada, heads=4, names="llada", predicts="next").predicts == "next"


def test_parts_over_kept_keys_and_values_give_the_rows_of_the_whole() -> None:
    model = built("qwen2")
    whole = model(TOKENS, POSITIONS, FULL)[0]
    x, chosen = model.embed(TOKENS[0]), torch.tensor([1, 4, 6])
    rows = x[chosen]
    for layer in range(model.layers):
        _, k, v = model.qkv(layer, x, POSITIONS[0])
        q, own_k, own_v = model.qkv(layer, rows, POSITIONS[0, chosen])
        torch.testing.assert_close(own_k, k[chosen], rtol=1e-12, atol=1e-12)
        assert torch.allclose(own_v, v[chosen], rtol=1e-12)
        rows = rows + model.attend(layer, q, k, v)
        rows = rows + model.feed_forward(layer, rows)
        q, k, v = model.qkv(layer, x, POSITIONS[0])
        x = x + model.attend(layer, q, k, v)
        x = x + model.feed_forward(layer, x)
    torch.testing.assert_close(model.logits(rows), whole[chosen], rtol=1e-11, atol=1e-11)


def test_masks_hide_and_every_part_matters() -> None:
    model = built("llada")
    whole = model(TOKENS, POSITIONS, FULL)
    blind = FULL.clone()
    blind[:, 3:] = False
    torch.testing.assert_close(
        model(TOKENS, POSITIONS, blind)[0, :3], model(TOKENS[:, :3], POSITIONS[:, :3], FULL[:3, :3])[0]
    )
    for name in model.weights:
        changed = dict(model.weights)
        changed[name] = changed[name] * 1.1
        other = MaskedTransformerReference(changed, heads=4, names="llada")(TOKENS, POSITIONS, FULL)
        assert not torch.allclose(other, whole), name
    tied = {name: value for name, value in model.weights.items() if "transformer.ff_out" not in name}
    tied_model = MaskedTransformerReference(tied, heads=4, names="llada")
    x, embedding = tied_model.embed(TOKENS[0]), tied["model.transformer.wte.weight"]
    expected = F.rms_norm(x, (16,), tied["model.transformer.ln_f.weight"], 1e-6) @ embedding.T
    torch.testing.assert_close(tied_model.logits(x), expected)


def test_low_precision_rounds_where_the_published_models_do() -> None:
    weights = {name: value.bfloat16() for name, value in random_weights("llada").items()}
    model = MaskedTransformerReference(weights, heads=4, names="llada")
    assert model(TOKENS, POSITIONS, FULL).dtype == torch.bfloat16 and model.wide == torch.float32
    q, k, v = model.qkv(0, model.embed(TOKENS[0]), POSITIONS[0])
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
