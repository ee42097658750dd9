"""transformers, also with torchao's weights, OpenVINO GenAI, onnxruntime-genai and vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.workers.engine import DRAFT, Clients, Engine, Tokens


def dequantized(spec: dict[str, Any]) -> Any:
    """The file's weights in a model of transformers."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    file, dtype = Path(spec["file"]), getattr(torch, spec.get("dtype", "bfloat16"))
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)


def padded(prompts: list[Tokens]) -> tuple[list[Tokens], list[Tokens]]:
    """Prompts of one length, with zeros before them, and where they are."""
    longest = max(map(len, prompts))
    zeros = [[0] * (longest - len(prompt)) for prompt in prompts]
    rows = [zero + prompt for zero, prompt in zip(zeros, prompts, strict=True)]
    return rows, [zero + [1] * len(prompt) for zero, prompt in zip(zeros, prompts, strict=True)]


class Transformers(Engine):
    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        import torch

        torch.set_num_threads(spec["threads"])
        torch.inference_mode().__enter__()
        self.torch, self.model = torch, dequantized(spec)

    def about(self) -> str:
        import transformers

        return f"{transformers.__version__}, torch {self.torch.__version__}, {self.torch.backends.cpu.get_cpu_capability()}"

    def choices(self, tokens: Tokens) -> Tokens:
        found: Tokens = self.model(self.torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        return found

    def begin(self, context: Tokens, batch: int) -> None:
        found = self.model(self.torch.tensor([context] * batch), use_cache=True)
        self.cache_name = "cache" if "cache" in found else "past_key_values"  # before transformers 5.24
        self.cache = found[self.cache_name]
        self.length, self.batch = len(context), batch
        if hasattr(self.cache, "activate_past_recording"):  # windows forget what `crop` needs, else
            self.cache.activate_past_recording()

    def forward(self, tokens: Tokens) -> float:
        def run() -> None:
            given = self.torch.tensor([tokens] * self.batch)
            self.model(given, use_cache=True, **{self.cache_name: self.cache}).logits.argmax(-1).tolist()

        took, _ = self.timed(run)
        self.cache.crop(self.length - self.cache.get_seq_length())
        return took

    def prompt(self, tokens: Tokens) -> tuple[float, int]:
        given = self.torch.tensor([tokens])
        return self.timed(lambda: int(self.model(given, use_cache=True, logits_to_keep=1).logits[0, -1].argmax()))

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        given = self.torch.tensor([prompt])
        options: dict[str, Any] = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        options |= {"prompt_lookup_num_tokens": DRAFT} if lookup else {}
        return self.generate(given, options)

    def generate(self, given: Any, options: dict[str, Any]) -> tuple[float, Tokens]:
        mask = self.torch.ones_like(given)
        took, found = self.timed(lambda: self.model.generate(given, attention_mask=mask, **options))
        return took, found[0, given.shape[1] :].tolist()

    def in_pieces(self, prompt: Tokens, new: int, piece: int) -> tuple[float, Tokens]:
        options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        return self.generate(self.torch.tensor([prompt]), options | {"prefill_chunk_size": piece})

    def clients(self, prompts: list[Tokens], new: int, lookup: bool) -> Clients:
        """A batch, padded on the left."""
        if lookup:
            raise NotImplementedError("its lookup is for one sequence")
        given, mask = map(self.torch.tensor, padded(prompts))
        options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        took, found = self.timed(lambda: self.model.generate(given, attention_mask=mask, **options))
        return took, [], found[:, given.shape[1] :].tolist()

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


class TorchAo(Transformers):
    """transformers' model with weights that torchao has quantised, layer by layer as transformers runs it; its setting: the
    name of torchao's configuration."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        import torchao

        configuration = getattr(torchao.quantization, self.setting["configuration"])
        torchao.quantization.quantize_(self.model, configuration(version=2))

    def about(self) -> str:
        import torchao

        return f"{torchao.__version__}, transformers {super().about()}"


class OpenVino(Engine):
    """Its pipelines read a prompt anew for every answer, so a token's time is taken between two calls of its streamer. Those of a batch
    have none: there it is the time of many tokens less that of one.

    Its setting: properties of the pipeline.
    """

    STEPS, BASES = 16, 3

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        import numpy
        import openvino
        import openvino_genai

        self.api, self.numpy, self.tensor, self.spec = openvino_genai, numpy, openvino.Tensor, spec
        self.plain = self.pipeline()
        self.others: dict[str, Any] = {}

    def about(self) -> str:
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
        version: str = self.api.get_version().split("-")[0]
        return version + (f", ONEDNN_MAX_CPU_ISA={limit}" if limit else "")

    def pipeline(self, step: int | None = None, **options: Any) -> Any:
        """Reads at most `step` tokens of prompts in a pass."""
        options |= self.setting | {"INFERENCE_NUM_THREADS": self.spec["threads"]}
        if options.get("ATTENTION_BACKEND") != "SDPA":
            scheduler = self.api.SchedulerConfig()
            scheduler.enable_prefix_caching = False  # or a prompt that was read before costs nothing
            scheduler.max_num_batched_tokens = step or scheduler.max_num_batched_tokens
            options["scheduler_config"] = scheduler
        return self.api.LLMPipeline(self.spec["file"], "CPU", **options)

    def choices(self, tokens: Tokens) -> Tokens:
        return [self.prompt(tokens[:end])[1] for end in range(1, len(tokens) + 1)]

    def generate(
        self,
        pipeline: Any,
        prompt: Tokens,
        batch: int,
        new: int,
        each: Callable[[], None] | None = None,
        **options: Any,
    ) -> tuple[float, Tokens]:
        """Calls each() after every token."""
        ids = self.numpy.array([prompt] * batch, dtype=self.numpy.int64)
        given = self.api.TokenizedInputs(self.tensor(ids), self.tensor(self.numpy.ones_like(ids)))
        config = self.api.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = new, False, True
        streamer = None if each is None else self.streamer(each)
        for name, value in options.items():
            setattr(config, name, value)
        took, found = self.timed(lambda: pipeline.generate(given, config, streamer))
        return took, found.tokens[0]

    def streamer(self, each: Callable[[], None]) -> Any:
        """Calls each() after every token."""

        class Streamer(self.api.StreamerBase):  # type: ignore[name-defined,misc]
            def write(_self, _token: int) -> Any:
                each()
                return self.api.StreamingStatus.RUNNING

            def end(_self) -> None: ...

        return Streamer()

    def begin(self, context: Tokens, batch: int) -> None:
        self.context, self.batch = context, batch
        self.generate(self.plain, context, batch, 2)
        self.base = 0.0

    def forward(self, tokens: Tokens) -> float:
        if len(tokens) > 1:
            raise NotImplementedError("its pipelines do not read several rows after a context")
        given = self.context + tokens
        if self.batch == 1:
            called: list[float] = []
            self.generate(self.plain, given, 1, 1 + self.STEPS, each=lambda: called.append(self.clock()))
            return 1e3 * (called[-1] - called[1]) / (len(called) - 2)
        # The least of several: what disturbs this one would make a token look cheaper.
        self.base = self.base or min(self.generate(self.plain, given, self.batch, 1)[0] for _ in range(self.BASES))
        many, _ = self.generate(self.plain, given, self.batch, 1 + self.STEPS)
        return (many - self.base) / self.STEPS

    def prompt(self, tokens: Tokens) -> tuple[float, int]:
        took, chosen = self.generate(self.plain, tokens, 1, 1)
        return took, chosen[0]

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        if not lookup:
            return self.generate(self.plain, prompt, 1, new)
        pipeline = self.other("lookup", prompt_lookup=True)
        return self.generate(pipeline, prompt, 1, new, num_assistant_tokens=DRAFT, max_ngram_size=2)

    def in_pieces(self, prompt: Tokens, new: int, piece: int) -> tuple[float, Tokens]:
        return self.generate(self.other("pieces", step=piece), prompt, 1, new)

    def other(self, name: str, **options: Any) -> Any:
        """A pipeline beside the plain one, made once."""
        if name not in self.others:
            self.others[name] = self.pipeline(**options)
        return self.others[name]

    def other_cache(self, prompt: Tokens, new: int) -> tuple[float, Tokens]:
        """Its cache is in pages, unless its attention is that for whole ones."""
        return self.generate(self.other("whole", ATTENTION_BACKEND="SDPA"), prompt, 1, new)

    def clients(self, prompts: list[Tokens], new: int, lookup: bool) -> Clients:
        """A batch: what pads it on the left is masked."""
        if lookup:
            raise NotImplementedError("its lookup is for one sequence here")
        rows, mask = (self.numpy.array(part, dtype=self.numpy.int64) for part in padded(prompts))
        given = self.api.TokenizedInputs(self.tensor(rows), self.tensor(mask))
        config = self.api.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = new, False, True
        took, found = self.timed(lambda: self.plain.generate(given, config))
        return took, [], [list(tokens) for tokens in found.tokens]


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
        self.padding = json.loads((Path(spec["file"]) / "genai_config.json").read_text())["model"]["pad_token_id"]

    def about(self) -> str:
        return str(self.api.__version__)

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

    def prompt(self, tokens: Tokens) -> tuple[float, int]:
        fresh = self.generator(len(tokens) + 1, 1)
        given = self.numpy.array([tokens], dtype=self.numpy.int32)
        took, _ = self.timed(lambda: (fresh.append_tokens(given), fresh.generate_next_token()))
        return took, int(fresh.get_sequence(0)[-1])

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

    def in_pieces(self, prompt: Tokens, new: int, piece: int) -> tuple[float, Tokens]:
        fresh = self.generator(len(prompt) + new, 1)
        parts = [prompt[begin : begin + piece] for begin in range(0, len(prompt), piece)]

        def run() -> None:
            for part in parts:
                fresh.append_tokens(self.numpy.array([part], dtype=self.numpy.int32))
            for _ in range(new):
                fresh.generate_next_token()

        took, _ = self.timed(run)
        return took, fresh.get_sequence(0)[len(prompt) :].tolist()

    def clients(self, prompts: list[Tokens], new: int, lookup: bool) -> Clients:
        """A batch, padded on the right with the token that its tokenizer pads with."""
        if lookup:
            raise NotImplementedError("it has no lookup of the prompt")
        longest = max(map(len, prompts))
        rows = [prompt + [self.padding] * (longest - len(prompt)) for prompt in prompts]
        fresh = self.generator(longest + new, len(prompts))

        def run() -> None:
            fresh.append_tokens(self.numpy.array(rows, dtype=self.numpy.int32))
            for _ in range(new):
                fresh.generate_next_token()

        took, _ = self.timed(run)
        return took, [], [fresh.get_sequence(row)[longest:].tolist() for row in range(len(prompts))]


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
        self.api, self.spec, self.running = vllm, spec, dict[tuple[Any, ...], Any]()
        model = dequantized(spec)
        model.hf_quantizer.remove_quantization_config(model)  # or it would not be saved
        model.save_pretrained(spec["folder"])
        self.engine("none")

    def about(self) -> str:
        return str(self.api.__version__)

    def engine(self, how: str, seats: int = 1, piece: int | None = None) -> Any:
        """The one with drafts of the kind `how`, for so many texts at once and so many tokens of a prompt in a step; kept."""
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
        name = (how, seats, piece)
        if name not in self.running:
            self.running[name] = self.api.LLM(
                self.spec["folder"],
                skip_tokenizer_init=True,
                dtype=self.spec.get("dtype", "bfloat16"),
                enforce_eager=True,
                enable_prefix_caching=False,  # or a prompt that was read before costs nothing
                max_model_len=1024,
                max_num_seqs=seats,
                kv_cache_memory_bytes=1 << 28,
                speculative_config=drafts[how],
                **({"max_num_batched_tokens": piece} if piece else {}),
            ).llm_engine
            # Kernels are registered once: a second time fails at the names of numba, which the lookup imports.
            type(self.api.platforms.current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
        return self.running[name]

    def answers(self, engine: Any, prompts: list[Tokens], new: int) -> tuple[list[Tokens], int]:
        """All at once, and the steps it took."""
        settings = self.api.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, settings)
        steps, found = 0, dict[str, Tokens]()
        while engine.has_unfinished_requests():
            found |= {one.request_id: list(one.outputs[0].token_ids) for one in engine.step()}
            steps += 1
        return [found[str(number)] for number in range(len(prompts))], steps

    def drafted(self, prompt: Tokens, new: int, how: str) -> tuple[float, Tokens, int | None]:
        engine = self.engine(how)
        took, ((tokens,), forwards) = self.timed(lambda: self.answers(engine, [prompt], new))
        return took, tokens, forwards

    def in_pieces(self, prompt: Tokens, new: int, piece: int) -> tuple[float, Tokens]:
        engine = self.engine("none", piece=piece)
        took, ((tokens,), _) = self.timed(lambda: self.answers(engine, [prompt], new))
        return took, tokens

    def clients(self, prompts: list[Tokens], new: int, lookup: bool) -> Clients:
        engine = self.engine("lookup" if lookup else "none", seats=len(prompts))
        took, (answers, _) = self.timed(lambda: self.answers(engine, prompts, new))
        return took, [], answers

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        took, tokens, _ = self.drafted(prompt, new, "lookup" if lookup else "none")
        return took, tokens
