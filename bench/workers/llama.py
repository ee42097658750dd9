"""llama.cpp, through llama-cpp-python."""

from __future__ import annotations

import ctypes
from typing import Any

from bench.workers.engine import DRAFT, Clients, Engine, Tokens


class LlamaCpp(Engine):
    """Its settings: `flash_attention`, on or off."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        import numpy

        self.spec, self.numpy, self.threads = spec, numpy, spec["threads"]
        self.api = self.library()
        self.quiet = self.api.llama_log_callback(lambda *_: None)
        self.api.llama_log_set(self.quiet, ctypes.c_void_p())
        self.model = self.api.llama_model_load_from_file(spec["file"].encode(), self.of_model())
        if not self.model:
            raise RuntimeError(f"{spec['file']} could not be loaded")
        self.vocabulary = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.context: Any = None
        self.shape = (0, 0, 0)

    def library(self) -> Any:
        import llama_cpp

        return llama_cpp

    def about(self) -> str:
        return f"{self.api.__version__}, {self.api.llama_print_system_info().decode().strip()}"

    def of_model(self) -> Any:
        return self.api.llama_model_default_params()

    def of_context(self) -> Any:
        given = self.api.llama_context_default_params()
        given.kv_unified = False  # each sequence has a cache of its own, as the others' have
        given.flash_attn_type = int(self.setting.get("flash_attention", True))
        return given

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def forget(self, sequence: int, first: int) -> None:
        """The tokens of a sequence from `first` on."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), sequence, first, -1)

    def copy(self, batch: int) -> None:
        """The cache of the first sequence to the others."""
        for sequence in range(1, batch):
            self.api.llama_memory_seq_cp(self.api.llama_get_memory(self.context), 0, sequence, -1, -1)

    def open(self, length: int, batch: int, rows: int) -> None:
        """A context for `batch` sequences of `length` tokens, empty, and forwards of up to `rows`."""
        if self.shape[0] < length or self.shape[1] != batch or self.shape[2] < rows:
            if self.context is not None:
                self.api.llama_free(self.context)
                self.api.llama_batch_free(self.rows)
            self.shape = (length, batch, rows)
            given = self.of_context()
            given.n_ctx, given.n_seq_max, given.n_ubatch, given.n_batch = length * batch, batch, 512, rows
            given.n_threads = given.n_threads_batch = self.threads
            self.context = self.api.llama_init_from_model(self.model, given)
            if not self.context:
                raise RuntimeError("no context could be made")
            self.rows = self.api.llama_batch_init(rows, 0, 1)
        self.clear()

    def put(self, at: int, token: int, position: int, sequence: int, chosen: bool) -> None:
        """A row of the next forward."""
        rows = self.rows
        rows.token[at], rows.pos[at], rows.logits[at] = token, position, chosen
        rows.n_seq_id[at], rows.seq_id[at][0] = 1, sequence

    def chosen(self, rows: int, choices: int) -> Tokens:
        """Of a forward over the rows that were put."""
        self.rows.n_tokens = rows
        if self.api.llama_decode(self.context, self.rows):
            raise RuntimeError("llama_decode failed")
        logits = self.api.llama_get_logits(self.context)
        found: Tokens = self.numpy.ctypeslib.as_array(logits, shape=(choices, self.vocabulary)).argmax(1).tolist()
        return found

    def decode(self, tokens: Tokens, first: int, batch: int = 1, last: bool = False) -> Tokens:
        """Reads the tokens after `first` others in each of `batch` sequences. The choices after each, or after the last."""
        for sequence in range(batch):
            for i, token in enumerate(tokens):
                self.put(sequence * len(tokens) + i, token, first + i, sequence, not last or i + 1 == len(tokens))
        return self.chosen(len(tokens) * batch, batch if last else len(tokens) * batch)

    def choices(self, tokens: Tokens) -> Tokens:
        self.open(len(tokens), 1, len(tokens))
        return self.decode(tokens, 0)

    def begin(self, context: Tokens, batch: int) -> None:
        self.open(len(context) + 1024 // batch, batch, max(len(context), batch))
        self.decode(context, 0, last=True)
        self.copy(batch)
        self.length, self.batch = len(context), batch

    def forward(self, tokens: Tokens) -> float:
        took, _ = self.timed(lambda: self.decode(tokens, self.length, self.batch))
        for sequence in range(self.batch):
            self.forget(sequence, self.length)
        return took

    def prompt(self, tokens: Tokens) -> tuple[float, int]:
        self.open(len(tokens), 1, len(tokens))
        return self.timed(lambda: self.decode(tokens, 0, last=True)[0])

    def in_pieces(self, prompt: Tokens, new: int, piece: int) -> tuple[float, Tokens]:
        self.open(len(prompt) + new, 1, piece)

        def run() -> Tokens:
            for begin in range(0, len(prompt), piece):
                chosen = self.decode(prompt[begin : begin + piece], begin, last=True)
            text = [*prompt, *chosen]
            while len(text) < len(prompt) + new:
                text += self.decode(text[-1:], len(text) - 1)
            return text[len(prompt) :]

        return self.timed(run)

    def clients(self, prompts: list[Tokens], new: int, lookup: bool) -> Clients:
        """As its own server batches them: all prompts in one pass, then a token of each sequence in every pass."""
        if lookup:
            raise NotImplementedError("its lookup is for one sequence")
        self.open(max(map(len, prompts)) + new, len(prompts), sum(map(len, prompts)))
        first, texts = [0.0], [list[int]() for _ in prompts]

        def passed(news: list[Tokens]) -> None:
            """Reads new tokens of each sequence, and chooses one after the last of them."""
            at = 0
            for sequence, tokens in enumerate(news):
                begin = len(prompts[sequence]) + len(texts[sequence]) - len(tokens)
                for i, token in enumerate(tokens):
                    self.put(at, token, begin + i, sequence, i + 1 == len(tokens))
                    at += 1
            for text, token in zip(texts, self.chosen(at, len(news)), strict=True):
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
        propose = self.proposer() if lookup else lambda text: []
        self.open(len(prompt) + new + DRAFT, 1, max(len(prompt), 1 + DRAFT))
        self.steps = 0

        def run() -> Tokens:
            text = [*prompt, *self.decode(prompt, 0, last=True)]
            while len(text) < len(prompt) + new:
                self.steps += 1
                draft = propose(text)
                chosen = self.decode([text[-1], *draft], len(text) - 1)
                right = next((i for i, (a, b) in enumerate(zip(draft, chosen)) if a != b), len(draft))
                text += chosen[: right + 1]
                self.forget(0, len(text) - 1)
            return text[len(prompt) : len(prompt) + new]

        return self.timed(run)

    def proposer(self) -> Any:
        """Its own lookup: from a text to tokens that may follow."""
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        proposing = LlamaPromptLookupDecoding(num_pred_tokens=DRAFT)
        return lambda text: proposing(self.numpy.array(text)).tolist()

    def drafted(self, prompt: Tokens, new: int, how: str) -> tuple[float, Tokens, int | None]:
        took, tokens, _ = super().drafted(prompt, new, how)
        return took, tokens, 1 + self.steps
