"""The servers of `bench.server_load`: what each is started with, the settings that are tried, and files that it reads.

    python -m bench.load_servers FILE FOLDER

writes the weights of a GGUF file to a folder of Hugging Face's, dequantised: vLLM reads no packed file on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from bench.gguf_files import QWEN3_1_7B, random_weights, requantized
from pdkernels.models.checkpoints.packaged import packaged

LONGEST_CHAT = 2560
"""Tokens of a prompt with its template, and of its answer; what a request may take."""
_RANK, _ALPHA = 8, 16


class Shape(NamedTuple):
    """A model that is served.

    Attributes:
        shown: what it is called in tables.
        family: its name in GGUF files.
        layers, width, inner, kv_width: its sizes, for an adapter.
        rate: requests a second, more than a server of two cores answers.
        checked: greedy answers of a server of ours that are compared with those of `generate`.
    """

    shown: str
    family: str
    layers: int
    width: int
    inner: int
    kv_width: int
    rate: float
    checked: int


SHAPES = {
    "smollm2": Shape("SmolLM2-135M, Q4_0", "llama", 30, 576, 1536, 192, rate=4.0, checked=6),
    "qwen3-1.7b": Shape(
        "random weights in the shape of Qwen3-1.7B, Q4_0", "qwen3", QWEN3_1_7B["block_count"],
        QWEN3_1_7B["embedding_length"], QWEN3_1_7B["feed_forward_length"], 1024, rate=0.5, checked=2,
    ),
}  # fmt: skip
SETTINGS: dict[str, dict[str, str]] = {
    "pdkernels": {"16 rows": "--max-running 16", "8 rows": "--max-running 8", "32 rows": "--max-running 32"},
    "llama.cpp": {
        "16 slots": f"-np 16 -c {16 * LONGEST_CHAT}",
        "8 slots": f"-np 8 -c {8 * LONGEST_CHAT}",
        "32 slots": f"-np 32 -c {32 * LONGEST_CHAT}",
        "16 slots, one cache": f"-np 16 -c {16 * LONGEST_CHAT} --kv-unified",
        "16 slots, pieces of 128": f"-np 16 -c {16 * LONGEST_CHAT} -ub 128",
    },
    "vLLM": {
        "bfloat16, 16 rows": "--dtype bfloat16 --max-num-seqs 16",
        "bfloat16, 32 rows": "--dtype bfloat16 --max-num-seqs 32",
        "bfloat16, 16 rows, pieces of 512": "--dtype bfloat16 --max-num-seqs 16 --max-num-batched-tokens 512",
        "bfloat16, 16 rows, not compiled": "--dtype bfloat16 --max-num-seqs 16 --enforce-eager",
        "float32, 16 rows": "--dtype float32 --max-num-seqs 16",
    },
}
"""By engine: documented options that change its speed, by a name for tables. The first one is used where none is tried."""


class Server(NamedTuple):
    """One that is measured.

    Attributes:
        engine: a key of `SETTINGS`.
        command: without its port and its setting.
        environment: variables of its process.
        note: what it differs in from others of the engine.
    """

    engine: str
    command: list[str]
    environment: dict[str, str]
    note: str = ""

    def name(self, setting: str) -> str:
        """What it is called in tables."""
        return ", ".join(word for word in (self.engine, setting, self.note) if word)


def model_file(shape: str, folder: Path) -> Path:
    """The GGUF file of a shape, which is made once in a folder."""
    source = packaged("smollm2-135m-instruct")
    is_random = shape == "qwen3-1.7b"
    made = folder / (f"random-{SHAPES[shape].width}-Q4_0.gguf" if is_random else f"{source.stem}-Q4_0.gguf")
    if not made.exists():
        partial = folder / "partial"
        partial.mkdir(exist_ok=True)
        (random_weights if is_random else requantized)(source, "Q4_0", partial).replace(made)
        partial.rmdir()
    return made


def adapters(shape: Shape, folder: Path) -> tuple[Path, Path]:
    """One adapter of small random weights as PEFT's folder and as a GGUF file."""
    import gguf

    draw, tensors = torch.Generator().manual_seed(0), {}
    file, peft = folder / "style.gguf", folder / "style"
    writer = gguf.GGUFWriter(file, shape.family)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", _ALPHA)
    pairs = {
        "attn_v": ("self_attn.v_proj", shape.width, shape.kv_width),
        "ffn_down": ("mlp.down_proj", shape.inner, shape.width),
    }
    for layer in range(shape.layers):
        for name, (module, width, outputs) in pairs.items():
            for side, size in (("A", (_RANK, width)), ("B", (outputs, _RANK))):
                weight = torch.randn(size, generator=draw) * 0.02
                tensors[f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"] = weight
                writer.add_tensor(f"blk.{layer}.{name}.weight.lora_{side.lower()}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    peft.mkdir(exist_ok=True)
    save_file(tensors, peft / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _ALPHA,
        "target_modules": [module.split(".")[1] for module, _, _ in pairs.values()],
    }
    (peft / "adapter_config.json").write_text(json.dumps(config))
    return peft, file


def dequantized(file: Path, folder: Path) -> Path:
    """The folder with the weights of a GGUF file in bfloat16, which a process of its own writes."""
    target = folder / f"{file.stem}-bf16"
    if not (target / "tokenizer_config.json").exists():
        subprocess.run([sys.executable, "-m", "bench.load_servers", str(file), str(target)], check=True)
    return target


def servers(shape: str, folder: Path, given: argparse.Namespace, failed: dict[str, str]) -> list[Server]:
    """Those that are given, with what they read.

    Args:
        shape: of the model, a key of `SHAPES`.
        folder: where their files are.
        given: the command line of `bench.server_load`.
        failed: gets why those are left out whose files cannot be made, by their names.
    """
    file, found = model_file(shape, folder), list[Server]()
    peft, lora = adapters(SHAPES[shape], folder)
    if "pdkernels" in given.engines:
        found += _ours(file, peft, given)
    if "llama.cpp" in given.engines and given.llama_server is not None:
        found.append(_llama(file, lora, given))
    if "vLLM" in given.engines and given.vllm_python is not None:
        try:
            found.append(_vllm(dequantized(file, folder), peft, given))
        except Exception as error:
            failed[Server("vLLM", [], {}, given.vllm_options).name("")] = f"{type(error).__name__}: {error}"
    return found


def _ours(file: Path, peft: Path, given: argparse.Namespace) -> list[Server]:
    threads = str(given.threads)
    ours = [sys.executable, "-m", "pdkernels", "serve", "--model", str(file), "--name", "load"]
    ours += ["--adapter", f"style={peft}", "--threads", threads, "--max-new-tokens", "256"]
    ours += ["--method", "autoregressive"]
    found = list[Server]()
    for kind in given.caches:
        cache = [] if kind == "float32" else ["--cache-dtype", kind]
        found.append(Server("pdkernels", [*ours, *cache], {"OMP_NUM_THREADS": threads}, f"caches in {kind}"))
    return found


def _llama(file: Path, lora: Path, given: argparse.Namespace) -> Server:
    threads, options = str(given.threads), given.llama_options
    theirs = [str(given.llama_server), "-m", str(file), "--lora", str(lora), "--lora-init-without-apply"]
    theirs += ["-t", threads, "-tb", threads, "--no-webui", *shlex.split(options)]
    return Server("llama.cpp", theirs, {"OMP_NUM_THREADS": threads}, options)


def _vllm(plain: Path, peft: Path, given: argparse.Namespace) -> Server:
    theirs = [str(given.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(plain)]
    theirs += ["--served-model-name", "load", "--max-model-len", str(LONGEST_CHAT), "--enable-lora"]
    theirs += ["--lora-modules", f"style={peft}", "--max-lora-rank", str(_RANK), *shlex.split(given.vllm_options)]
    variables = {
        "OMP_NUM_THREADS": str(given.threads),
        "VLLM_CPU_KVCACHE_SPACE": str(given.vllm_gigabytes),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{given.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Server("vLLM", theirs, variables, given.vllm_options)


def _write_dequantized(file: Path, target: Path) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    whole = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.bfloat16, gguf_file=file.name, quantization_config=whole
    )
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    _write_dequantized(chosen.file, chosen.folder)
