"""The plugin for SGLang, without its engine: the parts of it that the plugin meets, as it publishes them and as they were read.

SGLang's package requires a build of torch for CUDA. With PDKERNELS_SGLANG=its wheel (`pip download --no-deps sglang==0.5.23`) the registry of
hooks, the lookup of algorithms, their base and LowConfidence come from that; what these import of the rest is empty.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdkernels.integrations.sglang import LOOKUP, NAME, register

WHEEL = os.environ.get("PDKERNELS_SGLANG", "")
MASK, BLOCK, VOCABULARY = 5, 4, 32
# What the published modules import, and take nothing from at import time.
EMPTY = {
    "sglang.srt.arg_groups.overrides": ["resolving_view"],
    "sglang.srt.configs.model_config": ["ModelConfig"],
    "sglang.srt.environ": ["envs"],
    "sglang.srt.layers.logits_processor": ["LogitsProcessorOutput"],
    "sglang.srt.model_executor.forward_batch_info": ["ForwardBatch"],
    "sglang.srt.model_executor.model_runner": ["ModelRunner"],
    "sglang.srt.server_args": ["ServerArgs"],
    "sglang.srt.utils": ["is_npu"],
}


class Read:
    """`DllmAlgorithm` of 0.5.23 as far as the plugin needs it."""

    def __init__(self, config: Any) -> None:
        self.block_size, self.mask_id = config.block_size, config.mask_id


def as_read(modules: dict[str, ModuleType]) -> None:
    registry, lookup = modules["sglang.srt.plugins.hook_registry"], modules["sglang.srt.dllm.algorithm"]

    def get_algorithm_cls(name: str) -> Any:
        return {"LowConfidence": Read}[name]

    def apply(target: str, hook: Callable[..., Any], hook_type: str) -> None:
        assert (target, hook_type) == (LOOKUP, "around")
        lookup.get_algorithm_cls = lambda name: hook(get_algorithm_cls, name)  # type: ignore[attr-defined]

    registry.HookType = SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    registry.HookRegistry = SimpleNamespace(register=apply, apply_hooks=lambda: None)  # type: ignore[attr-defined]
    modules["sglang.srt.dllm.algorithm.base"].DllmAlgorithm = Read  # type: ignore[attr-defined]


@pytest.fixture(params=["as read", "published"])
def lookup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """`get_algorithm_cls` after the plugin was loaded."""
    published = request.param == "published"
    if published and not WHEEL:
        pytest.skip("PDKERNELS_SGLANG names no wheel of SGLang")
    for name in [name for name in sys.modules if name.startswith(("sglang", "pdkernels.integrations.sglang._"))]:
        monkeypatch.delitem(sys.modules, name)
    folders = ["sglang", "sglang.srt", "sglang.srt.dllm"]
    ours = ["sglang.srt.plugins", "sglang.srt.plugins.hook_registry"]
    ours += ["sglang.srt.dllm.algorithm", "sglang.srt.dllm.algorithm.base"]
    modules = {}
    for name in [*folders, *EMPTY] if published else [*folders, *ours]:
        modules[name] = ModuleType(name)
        modules[name].__path__ = [str(Path(WHEEL, *name.split(".")))]
        for member in EMPTY.get(name, []):
            setattr(modules[name], member, lambda *_: False)
        monkeypatch.setitem(sys.modules, name, modules[name])
    if not published:
        as_read(modules)
    register()
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.apply_hooks()
    algorithms = importlib.import_module("sglang.srt.dllm.algorithm")
    return lambda name: algorithms.get_algorithm_cls(name)


def config(**given: Any) -> SimpleNamespace:
    found = {"block_size": BLOCK, "mask_id": MASK, "first_done_first_out_mode": False, "algorithm": NAME}
    return SimpleNamespace(**found, algorithm_config=given)


def low_confidence(tokens: Tensor, logits: Tensor, prompt: Tensor, threshold: float) -> Tensor:
    """A step of the rule, place by place."""
    tokens = tokens.clone()
    for row in range(len(tokens)):
        masked = [p for p in range(BLOCK) if tokens[row, p] == MASK and not prompt[row, p]]
        sure, best = (found.tolist() for found in logits[row].double().softmax(-1).max(-1))
        passed = [p for p in masked if sure[p] > threshold] or sorted(masked, key=lambda p: -sure[p])[:1]
        for p in passed:
            tokens[row, p] = best[p]
    return tokens


def batch(tokens: Tensor, prompt: Tensor | None) -> SimpleNamespace:
    return SimpleNamespace(batch_size=len(tokens), input_ids=tokens.clone().view(-1), dllm_prompt_mask=prompt)


def drawn(sharp: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, logits in which the mask token is never the best, and a prompt in which it stands once."""
    tokens = torch.randint(6, VOCABULARY, (3, BLOCK))
    tokens[torch.rand(3, BLOCK) < 0.7] = MASK
    logits = torch.randn(3, BLOCK, VOCABULARY) * sharp
    logits[..., MASK] = -30
    prompt = torch.zeros(3, BLOCK, dtype=torch.bool)
    tokens[0, 0], prompt[0, 0] = MASK, True
    return tokens, logits, prompt


def test_the_entry_point_names_the_plugin() -> None:
    found = {entry.value for entry in entry_points(group="sglang.srt.plugins") if entry.name == "pdkernels"}
    assert found <= {"pdkernels.integrations.sglang:register"}
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert (
        '[project.entry-points."sglang.srt.plugins"]\npdkernels = "pdkernels.integrations.sglang:register"' in project
    )


def test_the_algorithm_is_found_by_its_name_and_others_stay(lookup: Callable[[str], Any]) -> None:
    assert lookup(NAME).__module__ == "pdkernels.integrations.sglang._fill"
    assert lookup("LowConfidence") is not lookup(NAME)
    with pytest.raises((KeyError, RuntimeError)):
        lookup("NoSuchAlgorithm")


@pytest.mark.parametrize("threshold", [0.3, 0.95])
def test_steps_are_those_of_low_confidence(lookup: Callable[[str], Any], threshold: float) -> None:
    """Place by place, and by the published class itself."""
    torch.manual_seed(0)
    algorithm = lookup(NAME)(config(threshold=threshold))
    filled = 0
    for sharp in (0.5, 2.0, 6.0) * 5:
        tokens, logits, prompt = drawn(sharp)
        ours = batch(tokens, prompt)
        done = algorithm.step(ours, logits.view(-1, VOCABULARY), [None] * 3)
        wanted = low_confidence(tokens, logits, prompt, threshold)
        assert ours.input_ids.view(3, BLOCK).equal(wanted)
        assert done == [not bool(((row == MASK) & ~seen).any()) for row, seen in zip(tokens, prompt, strict=True)]
        filled += int((wanted != tokens).sum())
        if WHEEL and hasattr(algorithm, "run"):
            theirs = batch(tokens, prompt)
            assert lookup("LowConfidence")(config(threshold=threshold)).step(theirs, logits.clone(), []) == done
            assert theirs.input_ids.equal(ours.input_ids)
    assert filled > 20


def test_a_block_is_filled_by_the_loop_of_the_base(lookup: Callable[[str], Any]) -> None:
    """Logits that do not change: the text is the best token of every place, and the last forward saw all of it."""
    torch.manual_seed(1)
    algorithm = lookup(NAME)(config())
    if not hasattr(algorithm, "run"):
        pytest.skip("the loop is in the published base")
    logits = torch.randn(2, BLOCK, VOCABULARY)
    logits[..., MASK] = -30
    given = batch(torch.tensor([[7, MASK, MASK, MASK], [MASK] * 4]), None)
    seen: list[Tensor] = []

    def forward(batch: Any, pp_proxy_tensors: Any) -> Any:
        seen.append(batch.input_ids.clone())
        output = SimpleNamespace(full_logits=logits.view(-1, VOCABULARY))
        return SimpleNamespace(logits_output=output, can_run_graph=False)

    _, texts, *_ = algorithm.run(SimpleNamespace(forward=forward), given)
    assert [text.tolist() for text in texts] == [logits.argmax(-1)[0, 1:].tolist(), logits.argmax(-1)[1].tolist()]
    assert len(seen) == 5 and seen[-1].equal(given.input_ids)


def test_a_factor_fills_more_the_surer_the_guesses(lookup: Callable[[str], Any]) -> None:
    """Fast-dLLM's rule: with all places nearly certain all are filled, with flat ones a single one."""
    algorithm = lookup(NAME)(config(factor=0.5))
    for sharp, filled in ((40.0, BLOCK), (0.01, 1)):
        given = batch(torch.full((1, BLOCK), MASK), None)
        logits = torch.zeros(BLOCK, VOCABULARY)
        logits[torch.arange(BLOCK), torch.arange(10, 10 + BLOCK)] = sharp
        algorithm.step(given, logits, [])
        assert int((given.input_ids != MASK).sum()) == filled


@pytest.mark.parametrize("given", [{"edit_threshold": 0.5}, {"threshold": 0.5, "factor": 1.0}])
def test_unknown_settings_are_refused(lookup: Callable[[str], Any], given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="algorithm_config"):
        lookup(NAME)(config(**given))
