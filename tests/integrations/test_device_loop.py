"""Generations without a host against `generate`: on a GPU, and anywhere through a driver that comes with the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding.methods import METHODS
from pdkernels.integrations import while_graph
from pdkernels.integrations.device_loop import DeviceLoop, available
from tests.cudasim.build import ROOT, build_once, compiler, digest, digest_text, run_compiler
from tests.harness.budgets import find_nvcc
from tests.support.errors import refused
from tests.support.forks import forked

FAKE = ROOT / "tests/integrations/fake_driver"

# With a real driver the fake one would not be found, and is not needed.
GENERATIONS = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from tests.integrations.fake_driver.generations import main
main()
"""
has_bindings = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
needs_gpu = pytest.mark.skipif(not available(), reason="needs a GPU and cuda-python")


def fake_driver(cuda_include: Path) -> Path:
    source = FAKE / "libcuda.cpp"
    command = [
        compiler(),
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        "-fvisibility=hidden",
        f"-I{cuda_include}",
        "-Wl,-soname,libcuda.so.1",
        str(source),
    ]
    path = ROOT / "build/fake_driver" / f"libcuda-{digest_text(*command, digest([source]))}.so"
    return build_once(path, lambda target: run_compiler([*command, "-o", str(target)]))


@pytest.mark.skipif(not has_bindings, reason="needs cuda-python")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real driver")
@pytest.mark.parametrize(("cases", "count"), [("some", 8), pytest.param("all", 13, marks=pytest.mark.slow)])
def test_generations_through_cuda_python_and_a_fake_driver(cases: str, count: int) -> None:
    """In a separate process, which uses the fake driver as the machine's."""
    nvcc = find_nvcc()
    include = Path(nvcc).resolve().parent.parent / "include" if nvcc else Path("none")
    if not (include / "cuda.h").exists():
        pytest.skip("needs cuda.h of the CUDA toolkit")
    answer = forked(GENERATIONS, ROOT, fake_driver(include), cases, cwd=ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"{count} cases went well" in answer.stdout


# --- what a machine must have -------------------------------------------------------------------------------------------


def driver_of(version: int, bindings: int = 13000) -> SimpleNamespace:
    ok = object()
    return SimpleNamespace(
        CUDA_VERSION=bindings, CUresult=SimpleNamespace(CUDA_SUCCESS=ok), cuDriverGetVersion=lambda: (ok, version)
    )


@pytest.mark.parametrize(
    "driver, device, text",
    [
        (
            driver_of(13000),
            "cpu",
            "NotImplementedError: the model must be on a GPU, got cpu. Decode with pdkernels.decoding.generate there",
        ),
        (
            None,
            "cuda",
            r"ImportError: cuda-python must be installed, got no cuda.bindings. Install it with: pip install 'cuda-bindings",
        ),
        (
            driver_of(13000, 12090),
            "cuda",
            "NotImplementedError: cuda-python must be for CUDA 13, got 12090. Install it",
        ),
        (
            driver_of(12080),
            "cuda",
            "NotImplementedError: the driver must be for CUDA 13.0 or newer, got 12080. Update it",
        ),
    ],
)
def test_what_is_missing_is_named(driver: Any, device: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(while_graph, "driver", driver)
    with refused(text):
        while_graph.require("x", torch.device(device))


def test_enough_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(while_graph, "driver", driver_of(13010, 13020))
    while_graph.require("x", torch.device("cuda"))


@pytest.mark.parametrize(
    "text, changed",
    {
        "NotImplementedError: method must be one of autoregressive, jacobi, draft_model, eagle, dflash, mtp, linear_self_speculation, .*, got 'suffix'": {
            "method": "suffix"
        },
        "TypeError: method 'autoregressive' has no option 'window'": {"window": 3},
        "batch must be at least 1, got 0": {"batch": 0},
        "TypeError: longest_prompt must be an int, got float": {"longest_prompt": 1.5},
        "max_new_tokens must be at least 2, got 1": {"max_new_tokens": 1},
        "NotImplementedError: the model must be on a GPU, got cpu": {},
    }.items(),
)
def test_bad_call(changed: dict[str, Any], text: str) -> None:
    with refused(text):
        DeviceLoop(pd.models.load("tiny-code"), **{"longest_prompt": 4, **changed})


# --- models that cannot be captured -------------------------------------------------------------------------------------


def split_across_ranks() -> Any:
    """A part of a model, of a single rank."""
    from pdkernels.distributed import parallelize

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        return parallelize(pd.models.load("tiny-code"), mesh)
    finally:
        torch.distributed.destroy_process_group()


def wrapped() -> Any:
    transformers = pytest.importorskip("transformers")
    from pdkernels.integrations.transformers import wrap

    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    config = transformers.Qwen3Config(vocab_size=50, intermediate_size=48, **sizes)
    return wrap(transformers.Qwen3ForCausalLM(config).eval())


def of_a_function() -> Any:
    table = torch.eye(7)
    return pd.models.from_callable(lambda tokens: table[tokens], vocab_size=7)


def with_hook() -> Any:
    model = pd.models.load("tiny-code")
    model.layers[1].register_forward_hook(lambda *_: None)
    return model


def on_two_devices() -> Any:
    model = pd.models.load("tiny-code")
    model.layers[2].to("meta")
    return model


def from_another_library() -> Any:
    """A model of the protocol in docs/own_models.md, whose forward may do anything."""
    own = pd.models.load("tiny-code")
    return SimpleNamespace(config=own.config, device=own.device, tokenizer=None, end_tokens=(), new_cache=own.new_cache)


OTHER_MODELS = {
    split_across_ranks: "model must be whole on one GPU, got a ParallelTransformer, split across ranks. Use pdkernels",
    wrapped: "model must be one of .*, whose forward needs no host, got a WrappedModel. Use pdkernels",
    of_a_function: "model must be one of .*, whose forward needs no host, got a CallableModel. Use pdkernels",
    from_another_library: "model must be one of .*, whose forward needs no host, got a SimpleNamespace. Use pdkernels",
    with_hook: "model must have no forward hooks, got one at 'layers.1'. Use pdkernels",
    on_two_devices: "model must be whole on one GPU, got layers.2.* on meta and others on cpu. Use pdkernels",
}


@pytest.mark.parametrize(("make", "text"), OTHER_MODELS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_models_that_cannot_be_captured_are_refused(make: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine has: as on one with a recent driver."""
    monkeypatch.setattr(while_graph, "driver", driver_of(13000))
    with refused(f"NotImplementedError: {text}"):
        DeviceLoop(make(), "autoregressive", longest_prompt=4)


@pytest.mark.parametrize("name", ["tiny-code", "tiny-trimode", "tiny-masked", "tiny-recurrent"])
def test_every_method_is_taken_or_refused_by_name(name: str) -> None:
    """Up to the GPU, which no CPU is: for every model, method and option."""
    model = pd.models.load(name)
    for method, known in METHODS.items():
        text = "the model must be on a GPU"
        if known.steps is None:
            text = "method must be one of"
        elif not known.supports(model):
            text = "method must (be|fit)|model must"
        with pytest.raises((NotImplementedError, TypeError), match=text):
            DeviceLoop(model, method, longest_prompt=4)


# --- on a GPU -----------------------------------------------------------------------------------------------------------

CASES = [
    ("tiny-code", "autoregressive", {}),
    ("tiny-code", "autoregressive", {"temperature": 0.7, "seed": 2}),
    ("tiny-code", "jacobi", {"block_size": 8, "page_size": 4}),
    ("tiny-code", "jacobi", {"window": 5, "seed": 3}),
    ("tiny-code", "jacobi", {"draft": "lookup", "block_size": 6}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 8}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 6, "temperature": 0.8, "verification": "rejection"}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 6, "threshold": 0.7}),
    ("tiny-trimode", "block_diffusion", {"block_size": 6}),
    ("tiny-recurrent", "autoregressive", {}),
    ("tiny-recurrent", "recurrent_diffusion", {"max_wavefront": 6}),
]
MASKED = [
    ("tiny-masked", "llada", {"block_size": 8, "temperature": 0.8}),
    ("tiny-masked", "fast_dllm", {"block_size": 8, "cache": "none"}),
    ("tiny-masked", "fast_dllm", {"block_size": 6, "page_size": 3}),
]
SUMS = [["482 + 967 = ?", "7 + 12 = ?"], ["51 + 64 = ?", "8 + 8 = ?"]]
PROMPTS = [["class Node:", "import os\n"], ["def test_", "    return "], ["a", "for i in range("]]


def same(a: pd.decoding.DecodeResult, b: pd.decoding.DecodeResult) -> None:
    """The prompts' forward has other shapes in a loop, so cuBLAS may round otherwise: confidences and distances are not the same bits."""
    assert [ids.tolist() for ids in a.tokens] == [ids.tolist() for ids in b.tokens]
    for fact in ("forwards", "accepted", "tokens_per_forward"):
        assert getattr(a.stats, fact) == getattr(b.stats, fact), fact
    assert alike(a.stats.trace, b.stats.trace), "trace"


def alike(a: Any, b: Any) -> bool:
    """Equal, but for the last digits of floats.

    >>> alike([{1: 0.5}, (2, 3)], [{1: 0.500001}, (2, 3)]), alike([{1: 0.5}], [{1: 0.51}]), alike([1], [1, 2])
    (True, False, False)
    """
    if isinstance(a, float):
        return isinstance(b, float) and (a == b or abs(a - b) <= 1e-6 + 1e-3 * abs(b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(x, b[key]) for key, x in a.items())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b))
    return bool(a == b)


@needs_gpu
@pytest.mark.parametrize("limit", [2, 40])
@pytest.mark.parametrize("name, method, options", CASES + MASKED)
def test_captured_generations_are_those_of_generate(
    name: str, method: str, options: dict[str, Any], limit: int
) -> None:
    model = pd.models.load(name).cuda()
    loop = DeviceLoop(model, method, batch=2, longest_prompt=40, max_new_tokens=limit, **options)
    for prompts in SUMS if name == "tiny-masked" else PROMPTS:
        result = loop.generate(prompts, trace=True)
        same(result, pd.decoding.generate(model, prompts, method, max_new_tokens=limit, trace=True, **options))
        same(loop.generate(prompts, trace=True), result)
        # With a listener the host replays the captured step, one at a time.
        same(loop.generate(prompts, trace=True, on_tokens=lambda *news: None), result)


@needs_gpu
def test_captured_generation_ends_with_its_sequences() -> None:
    model = pd.models.load("tiny-code").cuda()
    greedy = pd.decoding.generate(model, PROMPTS[0], max_new_tokens=12, end_tokens=())
    for ends in ([greedy.tokens[0][0].item()], [greedy.tokens[0][0].item(), greedy.tokens[1][3].item()]):
        loop = DeviceLoop(model, "jacobi", batch=2, longest_prompt=16, max_new_tokens=12, end_tokens=ends)
        same(
            loop.generate(PROMPTS[0]),
            pd.decoding.generate(model, PROMPTS[0], "jacobi", max_new_tokens=12, end_tokens=ends),
        )


@needs_gpu
def test_captured_loops_coexist_and_outlive_other_work() -> None:
    """Tables for other lengths, freed memory, and another loop do not affect a captured step."""
    model = pd.models.load("tiny-code").cuda()
    loops = [DeviceLoop(model, "jacobi", longest_prompt=32, max_new_tokens=24, block_size=size) for size in (4, 8)]
    expected = pd.decoding.generate(model, "class Node:", max_new_tokens=24)
    pd.decoding.generate(model, [3] * 5000, max_new_tokens=2)
    for width in range(1, 200):
        model(torch.ones(1, width, dtype=torch.int64, device="cuda"), cache=model.new_cache(1, 256))
    torch.cuda.empty_cache()
    torch.full((2**26,), float("nan"), device="cuda")
    for loop in (*loops, *loops):
        assert torch.equal(loop.generate("class Node:").tokens, expected.tokens)


@needs_gpu
def test_captured_loop_of_a_half_precision_model_runs() -> None:
    model = pd.models.load("tiny-code").to(torch.bfloat16).cuda()
    result = DeviceLoop(model, longest_prompt=32, max_new_tokens=24).generate("class Node:")
    same(result, pd.decoding.generate(model, "class Node:", max_new_tokens=24))
