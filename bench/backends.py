"""Authors' samplers before and after the patches of examples/backends, on small random models: the same tokens, in how much less time.

    python -m bench.backends CHECKOUTS [--names fast_dllm raven ...] [--to bench/results/backends.json]

CHECKOUTS is a folder with checkouts of the authors' code under the names of their repositories. Each case runs in a process of its own,
because a patch changes modules. Times are CPU time of one thread, of the fastest of several runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from bench.gpu_report import table
from bench.records import write
from pdkernels.evaluation.machine import processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/backends.json"


class Case(NamedTuple):
    """`run` generates, and returns the tokens; `patch` puts our kernels under it."""

    run: Callable[[], torch.Tensor]
    patch: Callable[[], None]


def module(folder: Path, name: str) -> ModuleType:
    """A module of a checkout."""
    assert folder.is_dir(), folder
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def llada_model(checkouts: Path, vocabulary: int) -> tuple[ModuleType, Any]:
    """LLaDA's modelling code as Fast-dLLM has it, with a small random model."""
    modeling = module(checkouts / "Fast-dLLM/llada", "model.modeling_llada")
    config = modeling.LLaDAConfig(
        d_model=256, n_heads=8, n_kv_heads=8, n_layers=4, mlp_hidden_size=768, vocab_size=vocabulary, embedding_size=vocabulary,
        max_sequence_length=512, block_type="llama", activation_type="silu", layer_norm_type="rms", rope=True, weight_tying=False,
        include_bias=False, include_qkv_bias=False, flash_attention=False, attention_dropout=0.0, residual_dropout=0.0,
        embedding_dropout=0.0, init_device="cpu", mask_token_id=vocabulary - 1, init_std=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    return modeling, modeling.LLaDAModelLM(config, init_params=True).eval()


def fast_dllm(checkouts: Path) -> Case:
    """Its dual cache, with a large vocabulary, as LLaDA has."""
    from examples.backends import fast_dllm, llada

    vocabulary = 32768
    modeling, model = llada_model(checkouts, vocabulary)
    generate = importlib.import_module("generate")
    prompt = torch.randint(1000, (1, 64), generator=torch.Generator().manual_seed(1))
    options = {"steps": 16, "gen_length": 16, "block_length": 8, "mask_id": vocabulary - 1}

    def patch() -> None:
        llada.patch(modeling, model)
        fast_dllm.patch(generate)

    return Case(lambda: generate.generate_with_dual_cache(model, prompt, **options)[0], patch)


def dllm_cache(checkouts: Path) -> Case:
    """Its hooks, under its own sampler."""
    from examples.backends import llada

    vocabulary = 2048
    modeling, model = llada_model(checkouts, vocabulary)
    folder = checkouts / "dLLM-cache"
    cache, hooks = module(folder, "dllm_cache.cache"), module(folder, "dllm_cache.hooks")
    sampler = module(folder / "utils", "generate_function")
    prompt = torch.randint(1000, (1, 64), generator=torch.Generator().manual_seed(1))
    cache.dLLMCache.new_instance(prompt_interval_steps=20, gen_interval_steps=5, transfer_ratio=0.25)
    hooks.register_cache_LLaDA(model, "model.transformer.blocks")
    for block in model.model.transformer.blocks:  # the hooks do not know an argument that Fast-dLLM has added
        block.forward = lambda x, hooked=block.forward, replace_position=None, **options: hooked(x, **options)

    def run() -> torch.Tensor:
        cache.dLLMCache().reset_cache(prompt.shape[1])
        mask = torch.ones_like(prompt)
        options = {"steps": 16, "gen_length": 16, "block_length": 8, "mask_id": vocabulary - 1}
        found: torch.Tensor = sampler.generate(input_ids=prompt, attention_mask=mask, model=model, **options)
        return found

    return Case(run, lambda: llada.patch(modeling, model))


def slow_fast(checkouts: Path) -> Case:
    """Its sampler, without a cache."""
    from examples.backends import llada

    vocabulary = 2048
    modeling, model = llada_model(checkouts, vocabulary)
    stand_in("dllm_cache", FeatureCache=lambda: stand_in("cache", reset_cache=lambda *_, **__: None))
    for name in ("accelerate", "matplotlib", "matplotlib.pyplot", "seaborn"):
        stand_in(name)
    sampler = module(checkouts / "Slow-Fast-Sampling/slow-fast-sampling", "sampling_utils.generate_slow_fast_sampling")
    prompt = torch.randint(1000, (1, 64), generator=torch.Generator().manual_seed(1))

    def run() -> torch.Tensor:
        found = sampler.generate_slow_fast_sampling(
            prompt, None, model, gen_length=16, block_length=8, mask_id=vocabulary - 1
        )
        return found[0] if isinstance(found, tuple) else found

    return Case(run, lambda: llada.patch(modeling, model))


def raven(checkouts: Path) -> Case:
    """Decoding token by token with eight recurrences and its own cache."""
    from examples.backends import raven

    package = stand_in("recpre")  # whose own __init__ imports what training needs
    package.__path__ = [str(checkouts / "recurrent-pretraining/recpre")]
    modeling = importlib.import_module("recpre.raven_modeling_minimal")
    settings = importlib.import_module("recpre.raven_config_minimal")
    config = settings.RavenConfig(
        n_embd=256, n_heads=8, n_layers=8, block_size=512, vocab_size=2048, padded_vocab_size=2048, intermediate_size=768,
        n_layers_in_recurrent_block=4, n_layers_in_prelude=2, n_layers_in_coda=2, mean_recurrence=8, tie_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = modeling.RavenForCausalLM(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.04)
    prompt = torch.randint(2000, (1, 32), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def run() -> torch.Tensor:
        torch.manual_seed(2)  # of the initial states
        cache, tokens, text = modeling.HuginnDynamicCache(), prompt, prompt
        for _ in range(8):
            at = torch.arange(text.shape[1] - tokens.shape[1], text.shape[1])
            logits = model(
                tokens, past_key_values=cache, cache_position=at, num_steps=torch.tensor([8, 0]), use_cache=True
            ).logits
            tokens = logits[:, -1:].argmax(-1)
            text = torch.cat([text, tokens], 1)
        return text

    return Case(run, lambda: raven.patch(modeling, model))


def sdar(checkouts: Path) -> Case:
    """Blocks of four tokens. Without our kernels, flash-attn's functions are those of PyTorch."""
    from examples.backends import sdar

    folder = checkouts / "SDAR/training/model/SDAR-4B-Chat"
    sdar.stand_in()
    stand_in("sdar_model").__path__ = [str(folder)]
    modeling = importlib.import_module("sdar_model.modeling_sdar")
    settings = importlib.import_module("sdar_model.configuration_sdar")

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale, enable_gqa=True)
        return found.transpose(1, 2)

    modeling.SDARRMSNorm.forward, modeling.flash_attn_func = norm, plain
    config = settings.SDARConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, max_position_embeddings=512, initializer_range=0.1, fuse_cross_entropy=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = modeling.SDARForCausalLM(config).eval()
    sampler = module(checkouts / "SDAR", "generate")
    prompt = torch.randint(2000, (1, 64), generator=torch.Generator().manual_seed(1))

    def run() -> torch.Tensor:
        options = {"gen_length": 16, "block_length": 4, "denoising_steps": 4, "top_k": 1}
        found: torch.Tensor = sampler.block_diffusion_generate(model, {"input_ids": prompt}, 2047, **options)
        return found

    return Case(run, lambda: sdar.patch(modeling, model))


def jacobi_forcing(checkouts: Path) -> Case:
    """Its greedy Jacobi decoding, from drafts of prompt tokens. Without our kernels, flash-attn's attention is PyTorch's: with
    transformers' own masks for PyTorch a draft would not see the keys after its own number, since the mask that it brings is as long as itself."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.models.qwen2 import modeling_qwen2 as modeling

    from examples.backends import jacobi_forcing

    def plain(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, **options: Any) -> Any:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, attn_mask=seen, scale=options["scaling"], enable_gqa=True).transpose(1, 2), None

    AttentionInterface.register("plain_causal", plain)
    AttentionMaskInterface.register("plain_causal", lambda *_, **__: None)
    decoder = module(checkouts / "JacobiForcing/modeling", "cllm2_qwen2_modeling_kv_terminate_on_eos_improved")
    config = modeling.Qwen2Config(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=512, initializer_range=0.1, tie_word_embeddings=False, attn_implementation="plain_causal",
    )  # fmt: skip
    torch.manual_seed(0)
    model = modeling.Qwen2ForCausalLM(config).eval()
    prompt = torch.randint(2000, (1, 64), generator=torch.Generator().manual_seed(1))

    def run() -> torch.Tensor:
        options = {"use_cache": True, "n_token_seq_len": 16, "eos_token_id": 2047}
        given = torch.cat([prompt, prompt[:, :16]], 1)
        cache, token, draft, _ = decoder.jacobi_forward_greedy(model, given, prefill_phase=True, **options)
        text = prompt
        for _ in range(2):
            cache, token, new, _ = decoder.jacobi_forward_greedy(model, draft, past_key_values=cache, **options)
            text = torch.cat([text, new], 1)
            draft = torch.cat([token.view(1, 1), prompt[:, :15]], 1)
        return text

    return Case(run, lambda: jacobi_forcing.patch(modeling, model))


def planned_diffusion(checkouts: Path) -> Case:
    """A prompt that ends with the plan of three blocks; the model goes on with the token that ends a plan."""
    from examples.backends import planned_diffusion

    modeling = module(checkouts / "planned-diffusion", "dream.modeling_dream")
    settings, tags = (importlib.import_module(f"dream.{name}") for name in ("configuration_dream", "control_tags"))
    config = settings.DreamConfig(
        vocab_size=tags.PAD_TOKEN_ID + 1, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1, use_cache=True, tie_word_embeddings=False,
        sliding_window=None, mask_token_id=tags.MASK_TOKEN_ID, pad_token_id=tags.PAD_TOKEN_ID, eos_token_id=tags.EOS_TOKEN_ID, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = modeling.DreamModel(config).eval()
    words = torch.randint(1000, (1, 48), generator=torch.Generator().manual_seed(1))
    digits = [17, 18, 17]  # of 2, 3 and 2
    plan = [token for digit in digits for token in (tags.PROMISE_START, 999, digit, tags.PROMISE_END)]
    prompt = torch.cat([words, torch.tensor([plan])], 1)

    def ended(step: int, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Logits of a plan, of one row, say that it ends; those of blocks, of all rows, say no control tag."""
        if logits.dim() == 2:
            return torch.zeros_like(logits).index_fill_(1, torch.tensor([tags.EOS_TOKEN_ID]), 1.0)
        logits[..., tags.EOS_TOKEN_ID :] = -torch.inf
        return logits

    def run() -> torch.Tensor:
        found: torch.Tensor = model.planned_diffusion_generate(
            prompt, max_new_tokens=64, alg="pd_entropy", length_scale=4, steps_ratio=0.5, temperature=0.0,
            mask_token_id=tags.MASK_TOKEN_ID, generation_logits_hook_func=ended,
        )  # fmt: skip
        return found

    return Case(run, lambda: planned_diffusion.patch(modeling, model))


def stand_in(name: str, **members: Any) -> ModuleType:
    """A module of that name, for what is imported and not used."""
    made = ModuleType(name)
    made.__dict__.update(members)
    if "." in name or name not in sys.modules:
        sys.modules.setdefault(name, made)
    return made


CASES: dict[str, Callable[[Path], Case]] = {
    "fast_dllm": fast_dllm,
    "dllm_cache": dllm_cache,
    "slow_fast": slow_fast,
    "raven": raven,
    "sdar": sdar,
    "jacobi_forcing": jacobi_forcing,
    "planned_diffusion": planned_diffusion,
}
TITLES = {
    "fast_dllm": "Fast-dLLM, dual cache, vocabulary of 32,768",
    "dllm_cache": "dLLM-Cache",
    "slow_fast": "Slow-Fast sampling",
    "raven": "recurrent-pretraining, 8 recurrences",
    "sdar": "SDAR, blocks of 4",
    "jacobi_forcing": "JacobiForcing, blocks of 16",
    "planned_diffusion": "planned diffusion, three blocks",
}


def compared(name: str, checkouts: Path, rounds: int) -> dict[str, Any]:
    """The seconds of a case before and after, and whether its tokens are the same."""
    torch.set_num_threads(1)
    case = CASES[name](checkouts)

    def timed() -> tuple[float, list[int]]:
        least, tokens = float("inf"), list[int]()
        for _ in range(rounds + 1):
            start = time.process_time()
            tokens = case.run().flatten().tolist()
            least = min(least, time.process_time() - start)
        return least, tokens

    before, expected = timed()
    case.patch()
    after, tokens = timed()
    return {"before": before, "after": after, "same": tokens == expected, "tokens": tokens, "torch": torch.__version__}


def in_a_process(name: str, checkouts: Path, rounds: int, python: str = sys.executable) -> dict[str, Any]:
    """`compared`, in a process of its own."""
    command = [python, "-m", "bench.backends", str(checkouts), "--one", name, "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def backends_table(path: Path) -> str:
    """A line for each sampler."""
    if not path.exists():
        return "not measured"
    found = json.loads(path.read_text())
    lines = [
        [TITLES[name], f"{one['before']:.2f}", f"{one['after']:.2f}", f"{one['before'] / one['after']:.1f}x"]
        for name, one in found["figures"].items()
    ]
    head = ["published sampler, random model", "seconds before", "after", "faster"]
    facts = f"CPU time, one thread, fastest of at least {found['rounds'] + 1} runs, the same tokens; {found['machine']}, torch {found['torch']}"
    return f"{table(head, lines)}\n\n{facts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--python", default=sys.executable, help="one with the versions that the authors' code needs")
    parser.add_argument("--names", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=list(CASES), help="only this, in this process, as JSON")
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    checkouts = chosen.checkouts.resolve()
    if chosen.one:
        print(json.dumps(compared(chosen.one, checkouts, chosen.rounds)))
        return
    figures, version = {}, torch.__version__
    for name in chosen.names:
        one = in_a_process(name, checkouts, chosen.rounds, chosen.python)
        if not one.pop("same"):
            raise SystemExit(f"{name}: the tokens differ")
        del one["tokens"]
        version = one.pop("torch")  # of the Python that ran it
        figures[name] = one
        print(name, one)
    facts = {"machine": processor(), "torch": version, "rounds": chosen.rounds}
    write(chosen.to, facts | {"figures": figures})


if __name__ == "__main__":
    main()
