"""All layers as one op: the bits of the layers one by one, wherever it serves, and the layers themselves everywhere else."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pdkernels import _native, backends
from pdkernels.cache import WindowedCache
from pdkernels.decoding import generate
from pdkernels.masks import TilePlan
from pdkernels.models import LinearScaling, Llama3Scaling, Transformer, TransformerConfig, YarnScaling
from pdkernels.models.architectures import greedy_steps, whole_step
from pdkernels.models.architectures.layer import Layer
from pdkernels.models.architectures.windows import Window
from pdkernels.ops.quantize import quantize
from pdkernels.ops.quantized_weight import QuantizedWeight
from tests.models.test_row_invariance import CONFIG, DTYPES, a_model, configs, some_tokens
from tests.models.test_transformer_cached_plans import MASKS

pytestmark = pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")

SCALINGS = [None, LinearScaling(2.0), Llama3Scaling(8.0, 16, 1.0, 2.0), YarnScaling(4.0, 4, 1.0, 0.1, 1.1)]
LEVELS = ["portable", "avx2", "avx512"]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every run of the op that succeeds."""
    return count_runs(monkeypatch)


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted, op, steps = [], whole_step._run, greedy_steps._run

    def run(*arguments: Any) -> Any:
        found = op(*arguments)
        counted.append(1)
        return found

    def run_steps(*arguments: Any) -> Any:
        entries = steps(*arguments)
        counted.extend([1] * len(entries))
        return entries

    monkeypatch.setattr(whole_step, "_run", run)
    monkeypatch.setattr(greedy_steps, "_run", run_steps)
    return counted


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def both(monkeypatch: pytest.MonkeyPatch, call: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """What a call gives with the op, after comparing it with what it gives without."""
    monkeypatch.delenv("PDKERNELS_WHOLE_STEP", raising=False)
    found = call()
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    expected = call()
    monkeypatch.delenv("PDKERNELS_WHOLE_STEP")
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(bits(a), bits(b)), f"result {number}"
    return found


def prompts_drafts_and_a_token(
    model: Transformer, batch: int, page_size: int | None, ragged: bool, plan: TilePlan | None, positions: Any
) -> list[torch.Tensor]:
    """Logits of a prompt, of the rows of a plan after it, and of a single row; and all of the cache after each."""
    rows = 5 if plan is None else plan.q_len
    capacity, found = 7 + rows + 3, []
    cache = (
        model.new_cache(batch, capacity)
        if page_size is None
        else model.new_cache(batch, capacity, kind="paged", page_size=page_size)
    )
    if page_size is not None:
        cache.reserve_([capacity] * batch)  # type: ignore[attr-defined]
    tokens = some_tokens(batch, 7 + rows + 1)

    def forward(first: int, last: int, kept: list[int], **options: Any) -> None:
        counts = torch.tensor(kept)
        found.append(model(tokens[:, first:last], cache=cache, counts=counts if ragged or options else None, **options))
        found.extend([cache.k.clone(), cache.v.clone()])
        cache.commit_(counts if ragged else torch.full((batch,), min(kept)))

    forward(0, 7, [7, 3, 1][:batch])
    options = {} if plan is None else {"mask": plan, "positions": positions}
    forward(7, 7 + rows, [min(2, rows), rows if plan is None else 0, 1][:batch], **options)
    forward(7 + rows, 8 + rows, [1, 1, 0][:batch])
    return found


@st.composite
def models(draw: st.DrawFn) -> Transformer:
    config = draw(configs())
    windows = st.sampled_from([None, Window(1), Window(3), Window(8), Window(4, chunked=True)])
    config = replace(
        config,
        windows=draw(st.sampled_from([(), tuple(draw(windows) for _ in range(config.layers))])),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        rope_scaling=draw(st.sampled_from(SCALINGS)),
        max_positions=32,
    )
    return a_model(config, draw(st.sampled_from(DTYPES)))


@settings(max_examples=120)
@given(
    model=models(),
    batch=st.sampled_from([1, 3]),
    page_size=st.sampled_from([None, None, 1, 5, 16]),
    ragged=st.booleans(),
    name=st.sampled_from([None, *sorted(MASKS)]),
    stacked=st.booleans(),
)
def test_has_the_bits_of_its_layers(
    model: Transformer, batch: int, page_size: int | None, ragged: bool, name: str | None, stacked: bool
) -> None:
    plan, positions = None, None
    if name is not None:
        plan, positions = MASKS[name].plan(16, 16), MASKS[name].positions
        plan = TilePlan.stack([plan] * batch) if stacked else plan
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs = count_runs(monkeypatch)
        both(monkeypatch, lambda: prompts_drafts_and_a_token(model, batch, page_size, ragged, plan, positions))
        assert len(runs) == 3


def quantise_(model: Transformer, formats: list[str | None]) -> None:
    """Replaces the matrices of all layers by quantised ones: `formats` in turn, None leaves one, two for two halves."""
    turn = itertools.cycle(formats)
    for layer in model.layers:
        for name in ("qkv", "output", "gate_up", "down"):
            given = next(turn)
            if given is None:
                continue
            halves = getattr(layer, name).float().chunk(2)
            parts = [quantize(half, format) for half, format in zip(halves, given.split()[:2] * 2)]
            delattr(layer, name)
            setattr(layer, name, QuantizedWeight.join(parts))


@settings(max_examples=25)
@given(
    config=configs(),
    dtype=st.sampled_from(DTYPES),
    formats=st.lists(st.sampled_from([None, "int8", "int4", "int8 int4"]), min_size=1, max_size=3),
    batch=st.sampled_from([1, 3]),
)
def test_quantised_matrices(
    config: TransformerConfig, dtype: torch.dtype, formats: list[str | None], batch: int
) -> None:
    config = replace(config, mlp_bias=config.qkv_bias, output_bias=config.tied_head)
    model = a_model(config, dtype)
    quantise_(model, formats)
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs = count_runs(monkeypatch)
        both(monkeypatch, lambda: prompts_drafts_and_a_token(model, batch, None, True, None, None))
        assert len(runs) == 3


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_formats_of_gguf(format: str, monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    model = a_model(replace(CONFIG, hidden_size=64, intermediate_size=96), torch.float32)
    quantise_(model, [format])
    both(monkeypatch, lambda: [decode(model)])
    assert len(runs) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_texts_on_threads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    """Norms of heads on several threads, and a cache of several splits."""
    model = a_model(replace(CONFIG, qk_norm=True, heads=9, kv_heads=3, head_dim=64), dtype)
    tokens, threads = some_tokens(1, 402), torch.get_num_threads()

    def call() -> list[torch.Tensor]:
        cache = model.new_cache(1, 9000)
        first = model(tokens[:, :400], cache=cache)
        cache.commit_(torch.tensor([400]))
        return [first, model(tokens[:, 400:], cache=cache), cache.k, cache.v]

    try:
        torch.set_num_threads(2)
        both(monkeypatch, call)
    finally:
        torch.set_num_threads(threads)
    assert len(runs) == 2


def test_numbers_that_are_not_finite(monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    model = a_model(CONFIG, torch.float32)
    model.embedding[1], model.embedding[2] = torch.nan, torch.inf
    tokens = torch.tensor([[3, 1, 4, 2, 5]])
    both(monkeypatch, lambda: [model(tokens, cache=model.new_cache(1, 8))])
    assert len(runs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_lower_levels(level: str) -> None:
    code = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "bits_of_its_layers or on_threads", __file__]
    environment = os.environ | {"PDKERNELS_CPU_ISA": level}
    result = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


# ---- decoders


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("autoregressive", {}),
        ("autoregressive", {"temperature": 0.9, "page_size": 3}),
        ("jacobi", {"block_size": 4}),
        ("jacobi_multiblock", {"block_size": 4, "page_size": 4}),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_tokens_of_decoders(
    method: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    model, prompts = a_model(CONFIG, dtype), [[5, 3, 8, 8], [1, 2]]

    def call() -> list[torch.Tensor]:
        found = generate(model, prompts, method, max_new_tokens=12, **options)
        return list(found.tokens)

    both(monkeypatch, call)
    assert len(runs) > 3


# ---- where the layers run one by one


def decode(model: Transformer, **options: Any) -> torch.Tensor:
    return model(some_tokens(2, 3), cache=model.new_cache(2, 8), **options)


def test_the_switch(monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    model = a_model(CONFIG, torch.float32)
    decode(model)
    assert len(runs) == 1
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    decode(model)
    assert len(runs) == 1
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "off")
    with pytest.raises(ValueError, match="PDKERNELS_WHOLE_STEP must be 0 or 1, got 'off'"):
        decode(model)


def in_place(model: Any) -> None:
    model.layers[1].qkv.mul_(2)


def of_a_norm(model: Any) -> None:
    model.norm.neg_()


def replaced(model: Any) -> None:
    layer = model.layers[1]
    layer.down = torch.nn.Parameter(-layer.down, requires_grad=False)


def replaced_in_the_dictionary(model: Any) -> None:
    """As `torch.func.functional_call` does."""
    layer = model.layers[1]
    layer._parameters["down"] = torch.nn.Parameter(-layer.down, requires_grad=False)


def replaced_norm(model: Any) -> None:
    model.norm = torch.nn.Parameter(-model.norm, requires_grad=False)


def replaced_embedding(model: Any) -> None:
    model.embedding = torch.nn.Parameter(model.embedding.flip(0).contiguous(), requires_grad=False)


def other_memory(model: Any) -> None:
    layer = model.layers[1]
    layer.gate_up.data = layer.gate_up.data.flip(0).contiguous()


def other_sizes_at_the_same_memory(model: Any) -> None:
    layer = model.layers[1]
    inner = layer.down.shape[1] // 2
    layer.gate_up.data, layer.down.data = layer.gate_up.data[: 2 * inner], layer.down.data[:, :inner].contiguous()


def swapped_layers(model: Any) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def removed_norms(model: Any) -> None:
    for layer in model.layers:
        layer.q_norm = layer.k_norm = None


def quantised(model: Any) -> None:
    quantise_(model, ["int8"])


def loaded(model: Any) -> None:
    model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()})


def assigned(model: Any) -> None:
    state = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def converted(model: Any) -> None:
    model.to(torch.float32 if model.dtype == torch.bfloat16 else torch.bfloat16)


CHANGES = [
    *(in_place, of_a_norm, replaced, replaced_in_the_dictionary, replaced_norm, replaced_embedding, other_memory),
    *(other_sizes_at_the_same_memory, swapped_layers, removed_norms, quantised, loaded, assigned, converted),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_parameters_may_change_in_every_way(
    dtype: torch.dtype, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    """The next forward sees it, and so does the next step of a generation."""
    model = a_model(replace(CONFIG, qk_norm=True), dtype)
    for layer in model.layers:  # or the layers would give nearly the same in any order
        layer.qkv.mul_(5)
    before, text = decode(model), generate(model, [3, 1, 4], max_new_tokens=12).tokens
    count = len(runs)
    change(model)
    model.requires_grad_(False)
    found, next_text = both(monkeypatch, lambda: [decode(model), generate(model, [3, 1, 4], max_new_tokens=12).tokens])
    assert not torch.equal(found.float(), before.float())
    assert len(next_text) == len(text) and len(runs) > count + 5


def test_quantised_bytes_may_be_replaced(monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    model = a_model(CONFIG, torch.float32)
    quantise_(model, ["int8"])
    before, weight = decode(model), model.layers[0].qkv
    assert isinstance(weight, QuantizedWeight)
    for change in (
        lambda part: weight.register_buffer("part0", part),
        lambda part: setattr(weight.part0, "data", part),
    ):
        change(quantize(torch.randn(len(weight) // 2, weight.width), "int8").data[0])
        found = both(monkeypatch, lambda: [decode(model)])[0]
        assert not torch.equal(found, before)
        before = found
    assert len(runs) == 3


def test_a_model_that_moves_leaves_nothing_behind() -> None:
    model = a_model(CONFIG, torch.float32)
    quantise_(model, ["int8"])
    decode(model)
    bytes_before = weakref.ref(model.layers[0].qkv.data[0])
    model._apply(lambda tensor: tensor.clone())
    assert bytes_before() is None


def test_a_model_is_freed_at_once() -> None:
    model = a_model(CONFIG, torch.float32)
    decode(model)
    parameter, bound = weakref.ref(model.layers[0].down), weakref.ref(model.binding.of(model))
    gc.disable()
    try:
        del model
        assert parameter() is None and bound() is None
    finally:
        gc.enable()


def test_a_copy_of_what_is_bound_is_refused() -> None:
    model = a_model(CONFIG, torch.float32)
    decode(model)
    binding: Any = model.binding
    seen, bound, config = binding._kept
    binding._kept = seen, bound.clone(), config
    runs: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "_mlp", lambda layer, x, own=Layer._mlp: (runs.append(1), own(layer, x))[1])
        decode(model)
    assert len(runs) == CONFIG.layers


def test_the_full_comparison_without_versions_of_dictionaries(monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    monkeypatch.setattr(whole_step, "dictionary_versions", lambda dictionaries: b"")
    model = a_model(CONFIG, torch.float32)
    before = decode(model)
    bound = model.binding.of(model)
    assert torch.equal(decode(model), before) and model.binding.of(model) is bound
    for change in (replaced, replaced_in_the_dictionary, swapped_layers):
        change(model)
        assert model.binding.of(model) is not bound
        bound = model.binding.of(model)


def test_ids_that_have_no_row_are_named(runs: list[int]) -> None:
    for model in (a_model(CONFIG, torch.float32), a_model(CONFIG, torch.bfloat16)):
        cache, wrong = model.new_cache(1, 8), torch.tensor([[1, CONFIG.vocab_size]])
        with pytest.raises(ValueError, match=rf"Transformer: tokens must hold ids in \[0, {CONFIG.vocab_size}\)"):
            model(wrong, cache=cache)
        assert not runs and not cache.k.any()


@pytest.mark.parametrize("where", ["layer", "all modules", "instance", "subclass", "method"])
def test_changed_layers_run(where: str, runs: list[int]) -> None:
    model, seen = a_model(CONFIG, torch.float32), []
    layer: Any = model.layers[1]

    class Other(Layer):
        def forward(self, *arguments: Any) -> Any:
            seen.append(1)
            return super().forward(*arguments)

    def hook(*arguments: Any) -> None:
        seen.append(1)

    handle = None
    if where == "layer":
        handle = layer.register_forward_hook(hook)
    elif where == "all modules":
        handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)
    elif where == "instance":
        own = layer.forward
        layer.forward = lambda *arguments: (hook(), own(*arguments))[1]
    elif where == "subclass":
        layer.__class__ = Other
    else:
        normed = layer._mlp
        layer._mlp = lambda x: (hook(), normed(x))[1]
    decode(model)
    assert seen and not runs
    del seen[:]
    generate(model, [1, 2], max_new_tokens=4)
    assert len(seen) >= 4 and not runs
    if handle is not None:
        handle.remove()
        decode(model)
        assert len(runs) == 1


@pytest.mark.parametrize("where", ["forward", "logits", "hook", "pre-hook", "class"])
def test_what_watches_the_model_is_called(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step of a generation."""
    model, seen = a_model(CONFIG, torch.float32), []
    expected = generate(model, [3, 1, 4], max_new_tokens=6).tokens
    watched: Any = model

    def hook(*arguments: Any) -> None:
        seen.append(1)

    if where == "hook":
        watched.register_forward_hook(hook)
    elif where == "pre-hook":
        watched.register_forward_pre_hook(hook)
    elif where == "class":
        own_forward = Transformer.forward
        monkeypatch.setattr(Transformer, "forward", lambda *a, **options: (hook(), own_forward(*a, **options))[1])
    else:
        own = getattr(watched, where)
        setattr(watched, where, lambda *a, **options: (hook(), own(*a, **options))[1])
    found = generate(model, [3, 1, 4], max_new_tokens=6).tokens
    assert torch.equal(found, expected) and len(seen) == 6


def test_adapted_rows(runs: list[int]) -> None:
    model = a_model(CONFIG, torch.float32)
    width = CONFIG.heads * CONFIG.head_dim
    plain = decode(model)
    model.attach_adapter_([(torch.randn(2, width), torch.randn(CONFIG.hidden_size, 2))] * CONFIG.layers)
    assert torch.equal(decode(model), plain) and len(runs) == 2
    assert not torch.equal(decode(model, adapted=True), plain) and len(runs) == 2


@pytest.mark.parametrize("why", ["fp64", "autocast", "bool mask", "scaled queries", "head_dim", "modes", "reference"])
def test_what_the_op_does_not_compute(why: str, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return op(*args, **kwargs or {})

    config, options = CONFIG, {}
    if why == "scaled queries":
        config = replace(CONFIG, rope_scaling=YarnScaling(4.0, 4, 1.0, 0.1, 1.1, query_beta=0.3))
    elif why == "head_dim":
        config = replace(CONFIG, head_dim=20)
    elif why == "bool mask":
        options["mask"] = torch.ones(3, 3, dtype=torch.bool)
    elif why == "reference":
        monkeypatch.setattr(backends, "DEFAULT", "reference")
    model = a_model(config, torch.float64 if why == "fp64" else torch.float32)
    if why == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="autocast changes it"):
            decode(model)  # its products have other dtypes than the cache
    elif why == "modes":
        with Mode():
            decode(model)
    else:
        decode(model, **options)
    assert not runs


def test_weights_that_would_be_copied(runs: list[int]) -> None:
    model = a_model(CONFIG, torch.float32)
    expected = decode(model)
    layer = model.layers[0]
    layer.qkv.data = layer.qkv.data.T.contiguous().T
    assert torch.equal(decode(model), expected) and len(runs) == 1


def test_compiled_forwards(runs: list[int]) -> None:
    model = a_model(CONFIG, torch.float32)
    cache = model.new_cache(2, 8)
    expected = model(some_tokens(2, 3), cache=cache)
    compiled = torch.compile(model, backend="eager")
    found = compiled(some_tokens(2, 3), cache=model.new_cache(2, 8))
    assert torch.equal(found, expected) and len(runs) == 1


@pytest.mark.parametrize("page_size", [None, 4])
def test_errors_are_those_of_the_layers(
    page_size: int | None, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    """Nothing is written then."""
    model = a_model(CONFIG, torch.float32)

    def wrong(**options: Any) -> list[str]:
        said = []
        for switch in ("1", "0"):
            monkeypatch.setenv("PDKERNELS_WHOLE_STEP", switch)
            kind = {} if page_size is None else {"kind": "paged", "page_size": page_size}
            cache = model.new_cache(2, 4, **kind)  # type: ignore[arg-type]
            if page_size is not None and "lengths" in options:
                cache.reserve_([4, 4])  # type: ignore[attr-defined]
            cache.lengths.copy_(torch.tensor(options.get("lengths", [0, 0])))
            with pytest.raises(ValueError) as error:
                model(some_tokens(2, 3), cache=cache, counts=options.get("counts"))
            said.append(str(error.value))
            assert not cache.k.any() and not cache.v.any()
        return said

    for options in ({"lengths": [1, 2]}, {"lengths": [0, 0], "counts": torch.tensor([2, 4])}):
        with_op, without = wrong(**options)
        assert with_op == without
    if page_size is not None:
        with_op, without = wrong()
        assert with_op == without and "block_table" in with_op
    assert not runs


@pytest.mark.parametrize("number", [0, 1])
def test_layers_that_differ(number: int, monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    """One may lack the norms of heads, or have a bias or another width that the others have not."""
    model = a_model(replace(CONFIG, qk_norm=True), torch.float32)
    layer = model.layers[number]
    layer.qkv_bias = torch.nn.Parameter(torch.randn(len(layer.qkv)), requires_grad=False)
    layer.gate_up.data, layer.down.data = layer.gate_up.data[:36], layer.down.data[:, :18].contiguous()
    both(monkeypatch, lambda: [decode(model)])
    assert len(runs) == 1
    layer.q_norm = layer.k_norm = None
    both(monkeypatch, lambda: [decode(model)])
    assert len(runs) == 1


def test_a_model_of_two_dtypes_is_refused_by_its_layers() -> None:
    model = a_model(CONFIG, torch.float32)
    model.layers[1].mlp_norm.data = model.layers[1].mlp_norm.data.bfloat16()
    cache = model.new_cache(1, 8)
    with pytest.raises(TypeError, match="next_weight must be torch.float32"):
        model(some_tokens(1, 3), cache=cache)


def test_a_copied_model() -> None:
    model = a_model(CONFIG, torch.float32)
    assert torch.equal(decode(copy.deepcopy(model)), decode(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("windows", [(7, None, 20, 7), (None, 7, 7, None), (16, 3, 3, 16)], ids=str)
def test_layers_with_several_page_tables(
    windows: tuple[int | None, ...], pooled: bool, dtype: torch.dtype, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that outgrow their windows, drafts of which a part stays, and taps between layers of different groups."""
    sizes: dict[str, Any] = {"layers": 4, "windows": tuple(size and Window(size) for size in windows)}
    model = Transformer(replace(CONFIG, **sizes)).requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    model = model.to(torch.float32 if dtype == torch.int8 else dtype)
    tokens = torch.randint(CONFIG.vocab_size, (2, 250), generator=torch.Generator().manual_seed(1))

    def call() -> list[torch.Tensor]:
        named: dict[str, Any] = {"dtype": dtype} if dtype == torch.int8 else {}
        if pooled:
            each = {size: 80 for size in windows if size is not None}
            monkeypatch.setattr(model, "cache_dtype", dtype if named else None)
            cache = model.new_cache(2, 288, pool=model.new_pool(80, 8, window_pages=each))
        else:
            cache = model.new_cache(2, 288, kind="paged", page_size=8, drafts=6, **named)
            cache.reserve_([288, 288])
        assert isinstance(cache, WindowedCache) and len(cache.parts) == len(set(windows))
        found, at = [], 0
        for count in (180, 5, 1, 6, 1, 5, 1):
            for row in range(2 if pooled else 0):
                cache.resize_row_(row, at + count)
                cache.slide_(row, at, at + count)
            rows, kept = tokens[:, at : at + count], count if count > 6 else (count + 1) // 2
            found.append(model(rows, cache=cache))
            found.extend(x.contiguous() for x in model.tapped(rows, [1, 3], cache=cache))
            cache.commit_(torch.full((2,), kept))
            at += kept
        return found

    found = both(monkeypatch, call)
    assert len(runs) == 7 * 2  # a forward, and one with taps
    assert len(found) == 7 * 3
