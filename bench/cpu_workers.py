"""An engine in a process of its own, told by a line of JSON each what to do: what bench/cpu_engines.py starts.

    PYTHON bench/cpu_workers.py '{"engine": "llama.cpp", "file": "FILE.gguf", "threads": 1}'

It runs in any Python that has the engine, and imports nothing else. Answers are lines of JSON: `{"found": ...}` or `{"error": ...}`.
Times are in ms: CPU time with one thread, which other work on the machine disturbs little, wall-clock time with several.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Tokens = list[int]
Clients = tuple[float, list[float], list[Tokens]]
"""The time until all have their `new` tokens, in ms, that to the first token of each, and the tokens."""
DRAFT = 10  # tokens that an engine's own lookup proposes


class Engine:
    """What engines have in common. A method that an engine lacks stays NotImplementedError."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.clock = time.process_time if spec["threads"] == 1 else time.perf_counter

    def timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        start = self.clock()
        found = run()
        return 1e3 * (self.clock() - start), found

    def choices(self, tokens: Tokens) -> Tokens:
        """The greedy choice after each of the tokens, from an empty cache."""
        raise NotImplementedError("it gives no choices within a prompt")

    def begin(self, context: Tokens, batch: int) -> None:
        """Reads the context into the cache of each of `batch` sequences."""
        raise NotImplementedError

    def forward(self, tokens: Tokens) -> float:
        """The time to read the tokens after the context in each sequence and to choose after each; they are forgotten then."""
        raise NotImplementedError

    def prompt(self, tokens: Tokens) -> float:
        """The time to read a prompt into an empty cache and to choose."""
        self.begin(tokens[:1], 1)
        return self.forward(tokens[1:])

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        """The time to continue a prompt by `new` tokens, and the tokens."""
        raise NotImplementedError

    def drafted(self, prompt: Tokens, new: int, how: str) -> tuple[float, Tokens, int | None]:
        """As `answer`, with drafts of the kind `how`, "none" and "lookup" among them; and the model's forwards, where they are known."""
        if how not in ("none", "lookup"):
            raise NotImplementedError(f"it has no drafts of the kind {how!r}")
        return *self.answer(prompt, new, how == "lookup"), None

    def clients(self, prompts: list[Tokens], new: int, lookup: bool) -> Clients:
        """A client for each prompt, all at once, greedy."""
        raise NotImplementedError("it has no clients here")

    def memory(self) -> float:
        """Peak of this process in MB."""
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6


class Ours(Engine):
    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        import torch

        import pdkernels as pd

        torch.set_num_threads(spec["threads"])
        torch.inference_mode().__enter__()
        self.torch, self.pd = torch, pd
        options = {"packed": False, "dtype": torch.bfloat16} if spec.get("dtype") == "bf16" else {}
        self.model = pd.models.load(spec["file"], **options)
        self.heads: dict[str, Any] = {}

    def choices(self, tokens: Tokens) -> Tokens:
        rows = self.model.hidden(self.torch.tensor([tokens]))
        found: Tokens = self.model.statistics(rows).ids[0].tolist()
        return found

    def begin(self, context: Tokens, batch: int) -> None:
        one = self.model.new_cache(1, len(context))
        self.model.hidden(self.torch.tensor([context]), cache=one)
        self.cache, self.batch = self.model.new_cache(batch, len(context) + 1024 // batch), batch
        self.cache.k[:, :, : len(context)] = one.k[:, :, : len(context)]
        self.cache.v[:, :, : len(context)] = one.v[:, :, : len(context)]
        self.cache.commit_(self.torch.full((batch,), len(context)))

    def forward(self, tokens: Tokens) -> float:
        def run() -> None:
            rows = self.model.hidden(self.torch.tensor([tokens] * self.batch), cache=self.cache)
            self.model.statistics(rows).ids.tolist()

        return self.timed(run)[0]

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        options: dict[str, Any] = {"method": "jacobi", "draft": "lookup"} if lookup else {}
        run = self.pd.decoding.generate
        took, found = self.timed(lambda: run(self.model, prompt, max_new_tokens=new, end_tokens=(), **options))
        return took, found.tokens.tolist()

    def drafted(self, prompt: Tokens, new: int, how: str) -> tuple[float, Tokens, int | None]:
        kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "none": ("autoregressive", {}),
            "lookup": ("jacobi", {"draft": "lookup", "block_size": 1 + DRAFT}),
            "lookup, auto": ("jacobi", {"draft": "lookup", "block_size": "auto"}),
            "suffix, auto": ("suffix", {"block_size": "auto"}),
            "eagle, auto": ("eagle", {"block_size": "auto"}),
            "dflash, auto": ("dflash", {"block_size": "auto"}),
        }
        method, options = kinds[how]
        if method in ("eagle", "dflash"):
            if method not in self.heads:
                self.heads[method] = self.pd.models.load_drafter(f"smollm2-{method}", self.model)
            options["drafter"] = self.heads[method]
        run = self.pd.decoding.generate
        took, found = self.timed(lambda: run(self.model, prompt, method, max_new_tokens=new, end_tokens=(), **options))
        return took, found.tokens.tolist(), found.stats.forwards

    def clients(self, prompts: list[Tokens], new: int, lookup: bool) -> Clients:
        method = ("jacobi", {"draft": "lookup"}) if lookup else ("autoregressive", {})
        if not hasattr(self, "server"):
            self.server = self.pd.Engine(self.model, max_running=8, max_new_tokens=new, kept_prompt_tokens=0)
        first: dict[int, float] = {}
        start = self.clock()

        def client(number: int) -> Any:
            def told(_sequence: int, _ids: Tokens, _accepted: int) -> None:
                first.setdefault(number, 1e3 * (self.clock() - start))

            name, options = method
            return self.server.submit(
                prompts[number], name, max_new_tokens=new, end_tokens=(), on_tokens=told, **options
            )

        took, answers = self.timed(lambda: [one.result() for one in [client(n) for n in range(len(prompts))]])
        return took, [first[number] for number in range(len(prompts))], [one.tokens.tolist() for one in answers]


class LlamaCpp(Engine):
    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        import ctypes

        import llama_cpp
        import numpy

        self.api, self.numpy, self.threads = llama_cpp, numpy, spec["threads"]
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p())
        self.model = llama_cpp.llama_model_load_from_file(spec["file"].encode(), llama_cpp.llama_model_default_params())
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.context: Any = None
        self.shape = (0, 0)

    def open(self, length: int, batch: int) -> None:
        """A context for `batch` sequences of `length` tokens, empty."""
        if self.shape[0] < length or self.shape[1] != batch:
            if self.context is not None:
                self.api.llama_free(self.context)
                self.api.llama_batch_free(self.rows)
            self.shape = (length, batch)
            given = self.api.llama_context_default_params()
            given.n_ctx, given.n_seq_max, given.n_ubatch = length * batch, batch, 512
            given.n_batch = max(length, batch)
            given.n_threads = given.n_threads_batch = self.threads
            given.kv_unified = False  # each sequence has a cache of its own, as the others' have
            self.context = self.api.llama_init_from_model(self.model, given)
            self.rows = self.api.llama_batch_init(max(length, batch), 0, 1)
            self.kept = self.api.llama_get_memory(self.context)
        self.api.llama_memory_clear(self.kept, True)

    def decode(self, tokens: Tokens, first: int, batch: int = 1) -> Any:
        """Reads the tokens after `first` others in each of `batch` sequences. The choices after each."""
        rows = self.rows
        rows.n_tokens = len(tokens) * batch
        for i in range(rows.n_tokens):
            sequence, at = divmod(i, len(tokens))
            rows.token[i], rows.pos[i], rows.logits[i] = tokens[at], first + at, 1
            rows.n_seq_id[i], rows.seq_id[i][0] = 1, sequence
        if self.api.llama_decode(self.context, rows):
            raise RuntimeError("llama_decode failed")
        logits = self.api.llama_get_logits(self.context)
        return self.numpy.ctypeslib.as_array(logits, shape=(rows.n_tokens, self.vocabulary)).argmax(1).tolist()

    def choices(self, tokens: Tokens) -> Tokens:
        self.open(len(tokens), 1)
        found: Tokens = self.decode(tokens, 0)
        return found

    def begin(self, context: Tokens, batch: int) -> None:
        self.open(len(context) + 1024 // batch, batch)
        self.decode(context, 0)
        for sequence in range(1, batch):
            self.api.llama_memory_seq_cp(self.kept, 0, sequence, -1, -1)
        self.length, self.batch = len(context), batch

    def forward(self, tokens: Tokens) -> float:
        took, _ = self.timed(lambda: self.decode(tokens, self.length, self.batch))
        for sequence in range(self.batch):
            self.api.llama_memory_seq_rm(self.kept, sequence, self.length, -1)
        return took

    def clients(self, prompts: list[Tokens], new: int, lookup: bool) -> Clients:
        """As its own server batches them: all prompts in one pass, then a token of each sequence in every pass."""
        if lookup:
            raise NotImplementedError("its lookup is for one sequence")
        total = sum(map(len, prompts))
        self.open(max(total, max(map(len, prompts)) + new), len(prompts))
        rows, first, texts = self.rows, [0.0], [list[int]() for _ in prompts]

        def passed(news: list[Tokens]) -> None:
            """Reads new tokens of each sequence, and chooses one after the last of them."""
            at = 0
            for sequence, tokens in enumerate(news):
                begin = len(prompts[sequence]) + len(texts[sequence]) - len(tokens)
                for i, token in enumerate(tokens):
                    rows.token[at], rows.pos[at], rows.logits[at] = token, begin + i, i + 1 == len(tokens)
                    rows.n_seq_id[at], rows.seq_id[at][0], at = 1, sequence, at + 1
            rows.n_tokens = at
            if self.api.llama_decode(self.context, rows):
                raise RuntimeError("llama_decode failed")
            logits = self.api.llama_get_logits(self.context)
            chosen = self.numpy.ctypeslib.as_array(logits, shape=(len(news), self.vocabulary)).argmax(1).tolist()
            for text, token in zip(texts, chosen, strict=True):
                text.append(token)

        def run() -> None:
            start = self.clock()
            passed(prompts)
            first[0] = 1e3 * (self.clock() - start)
            while len(texts[0]) < new:
                passed([text[-1:] for text in texts])

        took, _ = self.timed(run)
        return took, first * len(prompts), texts

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        propose = LlamaPromptLookupDecoding(num_pred_tokens=DRAFT)
        self.open(len(prompt) + new + DRAFT, 1)

        self.steps = 0

        def run() -> Tokens:
            text = [*prompt, self.decode(prompt, 0)[-1]]
            while len(text) < len(prompt) + new:
                self.steps += 1
                draft = propose(self.numpy.array(text)).tolist() if lookup else []
                chosen = self.decode([text[-1], *draft], len(text) - 1)
                right = next((i for i, (a, b) in enumerate(zip(draft, chosen)) if a != b), len(draft))
                text += chosen[: right + 1]
                self.api.llama_memory_seq_rm(self.kept, 0, len(text) - 1, -1)
            return text[len(prompt) : len(prompt) + new]

        return self.timed(run)

    def drafted(self, prompt: Tokens, new: int, how: str) -> tuple[float, Tokens, int | None]:
        took, tokens, _ = super().drafted(prompt, new, how)
        return took, tokens, 1 + self.steps


def dequantized(spec: dict[str, Any]) -> Any:
    """The file's weights in a model of transformers."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    file, dtype = Path(spec["file"]), getattr(torch, spec.get("dtype", "bfloat16"))
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)


class Transformers(Engine):
    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        import torch

        torch.set_num_threads(spec["threads"])
        torch.inference_mode().__enter__()
        self.torch, self.model = torch, dequantized(spec)

    def choices(self, tokens: Tokens) -> Tokens:
        found: Tokens = self.model(self.torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        return found

    def begin(self, context: Tokens, batch: int) -> None:
        found = self.model(self.torch.tensor([context] * batch), use_cache=True)
        self.cache_name = "cache" if "cache" in found else "past_key_values"  # before transformers 5.24
        self.cache = found[self.cache_name]
        self.length, self.batch = len(context), batch

    def forward(self, tokens: Tokens) -> float:
        def run() -> None:
            given = self.torch.tensor([tokens] * self.batch)
            self.model(given, use_cache=True, **{self.cache_name: self.cache}).logits.argmax(-1).tolist()

        took, _ = self.timed(run)
        self.cache.crop(self.length - self.cache.get_seq_length())
        return took

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        given = self.torch.tensor([prompt])
        options: dict[str, Any] = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        options |= {"prompt_lookup_num_tokens": DRAFT} if lookup else {}
        return self.generate(given, options)

    def generate(self, given: Any, options: dict[str, Any]) -> tuple[float, Tokens]:
        mask = self.torch.ones_like(given)
        took, found = self.timed(lambda: self.model.generate(given, attention_mask=mask, **options))
        return took, found[0, given.shape[1] :].tolist()

    def drafted(self, prompt: Tokens, new: int, how: str) -> tuple[float, Tokens, int | None]:
        """ "early exit": assisted by the model's own first layers."""
        kinds = {
            "none": {},
            "lookup": {"prompt_lookup_num_tokens": DRAFT},
            "early exit": {"assistant_early_exit": self.model.config.num_hidden_layers // 3},
        }
        options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0, **kinds[how]}
        seen: list[int] = []
        watch = self.model.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
        try:
            took, tokens = self.generate(self.torch.tensor([prompt]), options)
        finally:
            watch.remove()
        return took, tokens, None if how == "early exit" else len(seen)  # its own drafts use the head too


class OpenVino(Engine):
    """Its pipelines read a prompt anew for every answer, so a token's time is that of many less that of one."""

    STEPS = 16

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        import numpy
        import openvino
        import openvino_genai

        self.api, self.numpy, self.tensor, self.spec = openvino_genai, numpy, openvino.Tensor, spec
        self.plain = self.pipeline()
        self.looking: Any = None

    def pipeline(self, **options: Any) -> Any:
        scheduler = self.api.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # or a prompt that was read before costs nothing
        options |= {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": self.spec["threads"]}
        return self.api.LLMPipeline(self.spec["file"], "CPU", **options)

    def generate(self, pipeline: Any, prompt: Tokens, batch: int, new: int, **options: Any) -> tuple[float, Tokens]:
        ids = self.numpy.array([prompt] * batch, dtype=self.numpy.int64)
        given = self.api.TokenizedInputs(self.tensor(ids), self.tensor(self.numpy.ones_like(ids)))
        config = self.api.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = new, False, True
        for name, value in options.items():
            setattr(config, name, value)
        took, found = self.timed(lambda: pipeline.generate(given, config))
        return took, found.tokens[0]

    def begin(self, context: Tokens, batch: int) -> None:
        self.context, self.batch = context, batch
        self.generate(self.plain, context, batch, 2)

    def forward(self, tokens: Tokens) -> float:
        if len(tokens) > 1:
            raise NotImplementedError("its pipelines do not read several rows after a context")
        given = self.context + tokens
        one, _ = self.generate(self.plain, given, self.batch, 1)
        many, _ = self.generate(self.plain, given, self.batch, 1 + self.STEPS)
        return (many - one) / self.STEPS

    def prompt(self, tokens: Tokens) -> float:
        return self.generate(self.plain, tokens, 1, 1)[0]

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        if not lookup:
            return self.generate(self.plain, prompt, 1, new)
        self.looking = self.looking or self.pipeline(prompt_lookup=True)
        return self.generate(self.looking, prompt, 1, new, num_assistant_tokens=DRAFT, max_ngram_size=2)


class OnnxRuntime(Engine):
    """A folder that onnxruntime_genai's builder has made."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        import numpy
        import onnxruntime_genai

        self.api, self.numpy = onnxruntime_genai, numpy
        config = onnxruntime_genai.Config(spec["file"])
        config.overlay(
            json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": spec["threads"]}}}})
        )
        self.model = onnxruntime_genai.Model(config)

    def generator(self, length: int, batch: int) -> Any:
        given = self.api.GeneratorParams(self.model)
        given.set_search_options(max_length=length, min_length=length, batch_size=batch, do_sample=False)
        return self.api.Generator(self.model, given)

    def begin(self, context: Tokens, batch: int) -> None:
        self.running = self.generator(len(context) + 512, batch)
        self.running.append_tokens(self.numpy.array([context] * batch, dtype=self.numpy.int32))
        self.running.generate_next_token()
        self.length = len(context) + 1

    def forward(self, tokens: Tokens) -> float:
        if len(tokens) > 1:
            raise NotImplementedError("it chooses after the last of several rows only")
        took, _ = self.timed(self.running.generate_next_token)
        return took

    def prompt(self, tokens: Tokens) -> float:
        fresh = self.generator(len(tokens) + 1, 1)
        given = self.numpy.array([tokens], dtype=self.numpy.int32)
        return self.timed(lambda: (fresh.append_tokens(given), fresh.generate_next_token()))[0]

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        if lookup:
            raise NotImplementedError("it has no lookup of the prompt")
        fresh = self.generator(len(prompt) + new, 1)
        given = self.numpy.array([prompt], dtype=self.numpy.int32)

        def run() -> None:
            fresh.append_tokens(given)
            for _ in range(new):
                fresh.generate_next_token()

        took, _ = self.timed(run)
        return took, fresh.get_sequence(0)[len(prompt) :].tolist()


class Vllm(Engine):
    """Of its CPU build. It reads no GGUF file, so that transformers dequantises the weights for it, to `spec["folder"]`."""

    CHAIN = 3  # tokens that the head in `spec["head"]` drafts

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS counts
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or another process computes, whose CPU time is not seen here
            "VLLM_NO_USAGE_STATS": "1",
        }
        import torch
        import vllm

        torch.set_num_threads(spec["threads"])
        self.api, self.spec, self.running = vllm, spec, dict[str, Any]()
        model = dequantized(spec)
        model.hf_quantizer.remove_quantization_config(model)  # or it would not be saved
        model.save_pretrained(spec["folder"])
        self.engine("none")

    def engine(self, how: str) -> Any:
        """The one with drafts of the kind `how`, kept."""
        drafts: dict[str, dict[str, Any] | None] = {
            "none": None,
            "lookup": {
                "method": "ngram",
                "num_speculative_tokens": DRAFT,
                "prompt_lookup_max": 2,
                "prompt_lookup_min": 1,
            },
            "eagle": {"method": "eagle3", "model": self.spec.get("head"), "num_speculative_tokens": self.CHAIN},
        }
        if how not in drafts:
            raise NotImplementedError(f"it has no drafts of the kind {how!r}")
        if how not in self.running:
            self.running[how] = self.api.LLM(
                self.spec["folder"],
                skip_tokenizer_init=True,
                dtype=self.spec.get("dtype", "bfloat16"),
                enforce_eager=True,
                enable_prefix_caching=False,  # or a prompt that was read before costs nothing
                max_model_len=1024,
                max_num_seqs=1,
                kv_cache_memory_bytes=1 << 28,
                speculative_config=drafts[how],
            ).llm_engine
            # Kernels are registered once: a second time fails at the names of numba, which the lookup imports.
            type(self.api.platforms.current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
        return self.running[how]

    def drafted(self, prompt: Tokens, new: int, how: str) -> tuple[float, Tokens, int | None]:
        engine = self.engine(how)
        settings = self.api.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)

        def run() -> tuple[Tokens, int]:
            engine.add_request("0", {"prompt_token_ids": prompt}, settings)
            steps, found = 0, []
            while engine.has_unfinished_requests():
                found, steps = engine.step(), steps + 1
            return list(found[0].outputs[0].token_ids), steps

        took, (tokens, forwards) = self.timed(run)
        return took, tokens, forwards

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        took, tokens, _ = self.drafted(prompt, new, "lookup" if lookup else "none")
        return took, tokens


ENGINES: dict[str, type[Engine]] = {
    "pdkernels": Ours,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
    "OpenVINO": OpenVino,
    "onnxruntime": OnnxRuntime,
    "vLLM": Vllm,
}
METHODS = ("choices", "begin", "forward", "prompt", "answer", "drafted", "clients", "memory")


def main() -> None:
    spec = json.loads(sys.argv[1])
    # Engines print. What they print goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Engine | None = None

    def said(run: Callable[[], Any]) -> None:
        try:
            answers.write(json.dumps({"found": run()}) + "\n")
        except Exception as error:  # of any library
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}".split("\n")[0]}) + "\n")
        answers.flush()

    def started() -> None:
        nonlocal engine
        engine = ENGINES[spec["engine"]](spec)

    said(started)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name not in METHODS:
            raise SystemExit(f"no method {name}")
        said(partial(getattr(engine, name), *arguments))


if __name__ == "__main__":
    main()
