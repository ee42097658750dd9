"""Generations of `DeviceLoop` against those of `generate`: python -m tests.integrations.fake_driver.generations LIBCUDA all|some"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pdkernels as pd
from pdkernels.integrations import while_graph
from pdkernels.integrations.device_loop import DeviceLoop
from tests.integrations.fake_driver.stand_in import FakeDriver, install

CASES = [
    ("tiny-code", "autoregressive", {}),
    ("tiny-code", "autoregressive", {"page_size": 4}),
    ("tiny-code", "jacobi", {"block_size": 8}),
    ("tiny-code", "jacobi", {"window": 5, "seed": 3}),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 8}),
    (
        "tiny-trimode",
        "linear_self_speculation",
        {"block_size": 6, "temperature": 0.8, "verification": "rejection", "page_size": 3},
    ),
    ("tiny-trimode", "linear_self_speculation", {"block_size": 6, "threshold": 0.7}),
    ("tiny-trimode", "block_diffusion", {"block_size": 6}),
    ("tiny-recurrent", "autoregressive", {}),
    ("tiny-recurrent", "recurrent_diffusion", {"max_wavefront": 6, "page_size": 4}),
    ("tiny-masked", "llada", {"block_size": 8, "temperature": 0.8}),
    ("tiny-masked", "fast_dllm", {"block_size": 8, "cache": "none"}),
    ("tiny-masked", "fast_dllm", {"block_size": 6, "page_size": 3}),
]
SUMS = [["482 + 967 = ?", "7 + 12 = ?"], ["51 + 64 = ?", "8 + 8 = ?"]]
PROMPTS = [["class Node:", "import os\n"], ["a", "for i in range("]]


def check_case(driver: FakeDriver, name: str, method: str, options: dict[str, object], limit: int, whole: bool) -> None:
    model = pd.models.load(name)
    loop = DeviceLoop(model, method, batch=2, longest_prompt=40, max_new_tokens=limit, **options)
    rounds, forms = [0], loop._steps.forms
    assert loop.nodes == {form: {"kernel": 1} for form in forms}  # as this driver captures them

    def counted(form: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            rounds[0] += 1
            form()

        return run

    own = {loop._steps.step, *driver.captures[-len(forms) :]}
    driver.functions = [counted(function) if function in own else function for function in driver.functions]
    for prompts in (SUMS if name == "tiny-masked" else PROMPTS)[: 2 if whole else 1]:
        rounds[0] = 0
        result = loop.generate(prompts, trace=True)
        expected = pd.decoding.generate(model, prompts, method, max_new_tokens=limit, trace=True, **options)
        assert [ids.tolist() for ids in result.tokens] == [ids.tolist() for ids in expected.tokens]
        assert result.text == expected.text
        for fact in ("method", "forwards", "recurrences", "tokens", "tokens_per_forward", "accepted", "trace"):
            assert getattr(result.stats, fact) == getattr(expected.stats, fact), fact
        # One round for every draft of the slowest sequence, and none after the end.
        drafts = max(len(accepted) for accepted in expected.stats.accepted)
        assert rounds[0] == (drafts if len(forms) == 1 else expected.stats.forwards - (name != "tiny-masked"))
        heard: list[tuple[int, list[int], int]] = []
        streamed = loop.generate(prompts, trace=True, on_tokens=lambda *news, heard=heard: heard.append(news))
        assert streamed.text == result.text and streamed.stats.trace == result.stats.trace
        for sequence, ids in enumerate(result.tokens):
            assert [token for who, news, _ in heard if who == sequence for token in news] == ids.tolist()


def check_ends() -> None:
    """A token that ends one sequence at once, and the other later."""
    model = pd.models.load("tiny-code")
    greedy = pd.decoding.generate(model, PROMPTS[0], max_new_tokens=12, end_tokens=())
    for ends in ([greedy.tokens[0][0].item()], [greedy.tokens[0][0].item(), greedy.tokens[1][3].item()]):
        for method in ("autoregressive", "jacobi"):
            loop = DeviceLoop(model, method, batch=2, longest_prompt=16, max_new_tokens=12, end_tokens=ends)
            result = loop.generate(PROMPTS[0])
            expected = pd.decoding.generate(model, PROMPTS[0], method, max_new_tokens=12, end_tokens=ends)
            assert all(torch.equal(a, b) for a, b in zip(result.tokens, expected.tokens, strict=True))
            assert result.stats.forwards == expected.stats.forwards


def check_errors(driver: FakeDriver) -> None:
    model = pd.models.load("tiny-code")
    loop = DeviceLoop(model, longest_prompt=3, max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt must have at most 3 tokens, got 4"):
        loop.generate([1, 2, 3, 4])
    with pytest.raises(ValueError, match="prompt must hold 1 sequences, got 2"):
        loop.generate([[1], [2]])
    with pytest.raises(NotImplementedError, match="leave the host out of a step, got a `revise` above 0"):
        DeviceLoop(pd.models.load("tiny-masked"), "llada", longest_prompt=3, revise=0.1)
    with pytest.raises(
        RuntimeError,
        match=r"the driver must take the graph, got CUDA_ERROR_INVALID_VALUE \(refused by the fake driver\)",
    ):
        while_graph._call(while_graph.driver.cuGraphCreate(7))
    driver.library.fake_version(12040)
    with pytest.raises(NotImplementedError, match="the driver must be for CUDA 13.0 or newer, got 12040"):
        DeviceLoop(model, longest_prompt=3)
    driver.library.fake_version(13000)


def main() -> None:
    driver = FakeDriver(Path(sys.argv[1]))
    install(driver)
    whole = sys.argv[2] == "all"
    cases = CASES if whole else [*{case[:2]: case for case in CASES}.values()]  # one of each method and model
    for case in cases:
        for limit in (9,) if case[0] == "tiny-masked" else (2, 17) if whole else (17,):
            check_case(driver, *case, limit, whole)
    check_ends()
    check_errors(driver)
    gc.collect()  # releases graphs, through the driver
    print(f"{len(cases)} cases went well")


if __name__ == "__main__":
    main()
