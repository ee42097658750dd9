"""The reference model: its parts against each other, with a past and without, and against an independent formulation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.reference.recurrent_depth import RecurrentDepthReference, RecurrentPast, random_weights
from pdkernels.reference.recurrent_sampling import forward, refine, rows
from tests.support.recurrent import WIDE, init, tiny


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-11, atol=1e-11)


def logits_by_hand(model: RecurrentDepthReference, tokens: list[int], recurrences: int) -> Tensor:
    """The whole model once more, position by position and head by head, with complex rotations; no past."""
    w, heads, head_dim = model.weights, model.heads, model.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).sum() / len(x) + model.norm_eps).sqrt() * w[f"transformer.{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        turns = [position / model.rope_theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
        angles = torch.tensor(turns, dtype=torch.float64)
        pairs = torch.complex(x[0::2].contiguous(), x[1::2].contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten()

    def layer(name: str, xs: list[Tensor]) -> list[Tensor]:
        bias = w[f"transformer.{name}.attn.qk_bias"]
        keys: list[list[Tensor]] = [[] for _ in range(heads)]
        values: list[list[Tensor]] = [[] for _ in range(heads)]
        out = []
        for position, x in enumerate(xs):
            q, k, v = (w[f"transformer.{name}.attn.Wqkv.weight"] @ norm(x, f"{name}.norm_1")).split(WIDE)
            mixed = []
            for h in range(heads):
                part = slice(h * head_dim, (h + 1) * head_dim)
                keys[h].append(turned(k[part] + bias[1, 0, h], position))
                values[h].append(v[part])
                query = turned(q[part] + bias[0, 0, h], position)
                distribution = torch.stack([query @ key / head_dim**0.5 for key in keys[h]]).softmax(0)
                mixed.append(
                    sum((p * value for p, value in zip(distribution, values[h])), torch.zeros(head_dim).double())
                )
            y = norm(w[f"transformer.{name}.attn.proj.weight"] @ torch.cat(mixed) + x, f"{name}.norm_2")
            gate, up = (w[f"transformer.{name}.mlp.fc.weight"] @ norm(y, f"{name}.norm_3")).chunk(2)
            mlp = w[f"transformer.{name}.mlp.proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
            out.append(norm(mlp + y, f"{name}.norm_4"))
        return out

    e = layer("prelude.0", [w["transformer.wte.weight"][t] * WIDE**0.5 for t in tokens])
    states = list(init(0, torch.arange(len(tokens))))
    for _ in range(recurrences):
        adapter = w["transformer.adapter.weight"]
        states = [adapter[:, :WIDE] @ z + adapter[:, WIDE:] @ x for z, x in zip(states, e)]
        states = layer("core_block.1", layer("core_block.0", states))
    xs = layer("coda.0", [norm(z, "ln_f") for z in states])
    return torch.stack([w["transformer.wte.weight"] @ norm(x, "ln_f") for x in xs])


@pytest.mark.parametrize("recurrences", [0, 1, 3])
def test_against_an_independent_formulation(recurrences: int) -> None:
    model, tokens = tiny(seed=4), [3, 1, 4, 1, 5]
    assert close(
        forward(model, tokens, model.new_past(), recurrences, init), logits_by_hand(model, tokens, recurrences)
    )


def test_a_separate_lm_head_is_used() -> None:
    model = tiny()
    logits = model.coda(init(0, rows(0, 3)), 0)
    model.weights["lm_head.weight"] = 2 * model["wte.weight"]
    assert close(model.coda(init(0, rows(0, 3)), 0), 2 * logits)


@given(seed=st.integers(0, 5), length=st.integers(2, 9), data=st.data())
@settings(max_examples=20)
def test_a_past_replaces_the_rows_it_came_from(seed: int, length: int, data: st.DataObject) -> None:
    """With one recurrence a slot's rows are those of the whole text's forward, however it is cut."""
    model = tiny(seed)
    tokens = data.draw(st.lists(st.integers(0, 12), min_size=length, max_size=length))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=3)))
    whole = forward(model, tokens, model.new_past(), 1, init)
    past, pieces = model.new_past(), []
    for start, end in zip([0, *cuts], [*cuts, length]):
        pieces.append(forward(model, tokens[start:end], past, 1, init))
        past.freeze(end - start)
    assert close(torch.cat(pieces), whole) and past.length == length


def test_more_recurrences_read_the_last_rows_of_the_prefix() -> None:
    """Frozen rows are those of the last recurrence: one forward over the whole text differs, unless no state matters."""
    tokens = [3, 1, 4, 1, 5]
    for state_scale, equal in ((1.0, False), (0.0, True)):
        model = tiny(state_scale=state_scale)
        whole = forward(model, tokens, model.new_past(), 2, init)
        past = model.new_past()
        first = forward(model, tokens[:3], past, 2, init)
        past.freeze(3)
        second = forward(model, tokens[3:], past, 2, init)
        assert close(first, whole[:3])
        assert close(second, whole[3:]) == equal


def test_recurrences_share_their_slots() -> None:
    """After r recurrences a slot holds what the last one made of its input, and only that may be frozen."""
    pairs = lambda slots: torch.stack([torch.stack(slot) for slot in slots[1:3]])  # noqa: E731
    model, tokens = tiny(), torch.tensor([3, 1, 4])
    past = model.new_past()
    e = model.prelude(tokens, 0, past)
    early = refine(model, init(0, rows(0, 3)), e, 0, past, 4)
    state = model.core(early, e, 0, past)
    kept = pairs(past.fresh)
    alone = model.new_past()
    model.prelude(tokens, 0, alone)
    model.core(early, e, 0, alone)
    assert torch.equal(kept, pairs(alone.fresh))
    model.coda(state, 0, past)
    past.freeze(2)
    assert torch.equal(kept[:, :, :2], pairs(past.frozen))
    assert [len(slot[0]) for slot in past.frozen] == [2] * 4  # type: ignore[index]


@given(seed=st.integers(0, 5), changed=st.integers(0, 5), recurrences=st.integers(0, 3))
@settings(max_examples=15)
def test_causality(seed: int, changed: int, recurrences: int) -> None:
    model, tokens = tiny(seed), [3, 1, 4, 1, 5, 9]
    other = list(tokens)
    other[changed] = 7
    a, b = (forward(model, text, model.new_past(), recurrences, init) for text in (tokens, other))
    assert torch.equal(a[:changed], b[:changed])
    assert all((a[i] != b[i]).any() for i in range(changed, 6)) or recurrences == 0


def test_positions_matter_only_relatively_without_a_past() -> None:
    """RoPE: rows shifted by the same amount see each other as before."""
    model, tokens, state = tiny(), torch.tensor([3, 1, 4]), init(0, rows(0, 3))
    assert close(model.prelude(tokens, 0), model.prelude(tokens, 40))
    e = model.prelude(tokens, 0)
    assert close(model.core(state, e, 0), model.core(state, e, 17))
    assert not close(model.prelude(tokens, 0)[1:2], model.prelude(tokens[1:2], 1))


def test_a_small_state_weight_makes_a_contraction() -> None:
    model = tiny(state_scale=0.05)
    past = model.new_past()
    e = model.prelude(torch.tensor([3, 1, 4]), 0, past)
    a, b = init(0, rows(0, 3)), init(1, rows(0, 3))
    before = (a - b).norm().item()
    for _ in range(6):
        a, b = model.core(a, e, 0, past), model.core(b, e, 0, past)
        after = (a - b).norm().item()
        assert after < 0.5 * before
        before = after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_smaller_dtypes(dtype: torch.dtype) -> None:
    """Close to fp64 within the precision of the dtype, and all results have that dtype."""
    weights = random_weights(vocab_size=13, hidden_size=12, heads=2, intermediate_size=10, state_scale=0.1)
    small = RecurrentDepthReference({name: weight.to(dtype) for name, weight in weights.items()})
    exact = RecurrentDepthReference({name: weight.to(dtype).double() for name, weight in weights.items()})
    state = init(0, rows(0, 5)).to(dtype)
    outputs = []
    for model, z in ((small, state), (exact, state.double())):
        e = model.prelude(torch.tensor([3, 1, 4, 1, 5]), 0)
        outputs.append(model.coda(model.core(z, e, 0), 0))
    assert outputs[0].dtype == dtype
    error = (outputs[0].double() - outputs[1]).norm() / outputs[1].norm()
    assert error < 20 * torch.finfo(dtype).eps


def test_freezing_wants_rows_of_every_slot() -> None:
    model, past = tiny(), RecurrentPast(4)
    with pytest.raises(ValueError, match="slot 0 must hold 1 fresh rows"):
        past.freeze(1)
    model.prelude(torch.tensor([1, 2]), 0, past)
    with pytest.raises(ValueError, match="slot 1"):
        past.freeze(1)
    past = model.new_past()
    forward(model, [1, 2], past, 1, init)
    with pytest.raises(ValueError, match="slot 0 must hold 3 fresh rows"):
        past.freeze(3)
    past.freeze(0)
    assert past.length == 0


def test_cut_forgets_the_end() -> None:
    model, past = tiny(), tiny().new_past()
    forward(model, [1, 2, 3], past, 2, init)
    past.freeze(3)
    past.cut(1)
    short = model.new_past()
    forward(model, [1], short, 2, init)
    short.freeze(1)
    assert past.length == short.length == 1
    assert close(forward(model, [5], past, 2, init), forward(model, [5], short, 2, init))
