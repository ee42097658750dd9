"""Engines of vLLM with the plugin, on small random models: `python vllm_engines.py FOLDER` writes FOLDER/found.json."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.plugins import load_general_plugins

NEW = 24
REPEATING = 96
WINDOW = 13  # of the Mistral model: shorter than each prompt


def saved(family: str, folder: Path, attention: float = 1.0) -> Any:
    """A random model of transformers, kept in `folder`. With little `attention` its texts soon run in loops."""
    torch.manual_seed(0)
    configs = {
        "qwen3": transformers.Qwen3Config,
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
    }
    config = configs[family](
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        **({"sliding_window": WINDOW} if family == "mistral" else {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= attention
    model.save_pretrained(folder)
    return model


def greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    with torch.no_grad():
        texts = [
            model.generate(
                torch.tensor([p]),
                attention_mask=torch.ones(1, len(p), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            for p in prompts
        ]
    return [text[0, len(p) :].tolist() for text, p in zip(texts, prompts)]


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        block_size=32,
        enable_prefix_caching=False,
        disable_log_stats=False,
        attention_backend="CUSTOM",
        **options,
    )


def answers(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    settings = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    given = llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in given]


def counted(llm: LLM, name: str) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == f"vllm:spec_decode_num_{name}")


def timed(llm: LLM, prompts: list[list[int]], forwards: list[int]) -> dict[str, Any]:
    """After a run that warms up, the figures of a second one."""
    answers(llm, prompts, REPEATING)
    names = {"accepted": "accepted_tokens", "drafted": "draft_tokens", "drafts": "drafts"}
    before = {name: counted(llm, metric) for name, metric in names.items()}
    steps, start = len(forwards), time.perf_counter()
    tokens = answers(llm, prompts, REPEATING)
    seconds = time.perf_counter() - start
    figures = {name: counted(llm, metric) - before[name] for name, metric in names.items()}
    rate = len(prompts) * REPEATING / seconds
    return {"tokens": tokens, "forwards": len(forwards) - steps, "tokens_per_second": rate, **figures}


def refusal() -> str:
    from pdkernels.integrations.vllm._attention import Attention

    try:
        Attention(4, 32, 1.0, 2, logits_soft_cap=30.0)
    except NotImplementedError as error:
        return str(error)
    return ""


def usual_backend() -> str:
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    return current_platform.get_attn_backend_cls(None, AttentionSelectorConfig(32, torch.float32, "auto", 32), 4)


def main(folder: Path) -> None:
    load_general_plugins()
    found: dict[str, Any] = {"entry_point": bool(entry_points(group="vllm.general_plugins", name="pdkernels"))}
    if not found["entry_point"]:  # a checkout that is on the path, but not installed
        from pdkernels.integrations.vllm import register

        register()

    from pdkernels.integrations.vllm import _attention

    forwards: list[int] = []
    build = _attention.Builder.build

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        forwards.append(1)
        return build(self, *args, **options)

    _attention.Builder.build = watched
    found["package"] = str(Path(_attention.__file__).parents[2])
    found["refused"], found["usual"] = refusal(), usual_backend()

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 500, (size,), generator=generator).tolist() for size in (40, 17, 33)]
    repeating = [prompt[:12] * 3 for prompt in prompts]
    for family, attention in (("qwen3", 1.0), ("llama", 0.003), ("mistral", 1.0)):
        model = saved(family, folder / family, attention)
        found[family] = {"transformers": greedy(model, prompts, NEW)}
        llm = engine(folder / family)
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        found[family]["backend"] = next(iter(layers.values())).impl.__module__
        found[family]["windows"] = sorted({layer.impl.window for layer in layers.values()}, key=str)
        found[family]["tokens"] = answers(llm, prompts, NEW)
        if family == "mistral":
            model.config.sliding_window = None
            found[family]["without_window"] = greedy(model, prompts, NEW)
        if family == "llama":
            found["repeating"] = {"transformers": greedy(model, repeating, REPEATING)}
            found["repeating"]["plain"] = timed(llm, repeating, forwards)
        # The next engine makes process groups of its own, which the end of this one would take down.
        llm.llm_engine.engine_core.shutdown()
        del llm, layers
        gc.collect()
    for kind in ("Lookup", "Suffix"):
        proposer = f"pdkernels.integrations.vllm.{kind}Proposer"
        drafts = {"method": "custom_class", "model": proposer, "num_speculative_tokens": 8}
        llm = engine(folder / "llama", speculative_config=drafts)
        found["repeating"][kind.lower()] = timed(llm, repeating, forwards)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
