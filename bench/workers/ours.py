"""pdkernels."""

from __future__ import annotations

from typing import Any

from bench.workers.engine import DRAFT, Clients, Engine, Tokens


class Ours(Engine):
    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        import torch

        import pdkernels as pd

        torch.set_num_threads(spec["threads"])
        torch.inference_mode().__enter__()
        self.torch, self.pd = torch, pd
        options = {"packed": False, "dtype": torch.bfloat16} if spec.get("dtype") == "bf16" else {}
        if (cache_dtype := self.setting.get("cache_dtype")) is not None:
            options["cache_dtype"] = getattr(torch, cache_dtype)
        self.model = pd.models.load(spec["file"], **options)
        self.heads: dict[str, Any] = {}

    def about(self) -> str:
        from pdkernels.evaluation.machine import processor

        return f"{self.pd.__version__}, {processor()}"

    def choices(self, tokens: Tokens) -> Tokens:
        rows = self.model.hidden(self.torch.tensor([tokens]), cache=self.model.new_cache(1, len(tokens)))
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

    def prompt(self, tokens: Tokens) -> tuple[float, int]:
        cache = self.model.new_cache(1, len(tokens))

        def run() -> int:
            rows = self.model.hidden(self.torch.tensor([tokens]), cache=cache)
            return int(self.model.statistics(rows[:, -1:]).ids)

        return self.timed(run)

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        options: dict[str, Any] = {"method": "jacobi", "draft": "lookup"} if lookup else {}
        run = self.pd.decoding.generate
        took, found = self.timed(lambda: run(self.model, prompt, max_new_tokens=new, end_tokens=(), **options))
        return took, found.tokens.tolist()

    def canvas(self, tokens: Tokens, candidates: int) -> float:
        torch, given = self.torch, self.torch.tensor([tokens])
        cache, start = self.model.new_cache(1, len(tokens)), torch.zeros(1, dtype=torch.long)

        def run() -> None:
            rows = self.model.recompute(given, cache, start, visible=start + len(tokens))
            self.model.statistics(rows[:, len(tokens) - candidates :]).ids.tolist()

        return self.timed(run)[0]

    def denoise(self, prompt: Tokens, new: int, steps: int, mask: int) -> tuple[float, Tokens]:
        options = {"max_new_tokens": new, "end_tokens": (), "mask_token": mask}
        took, found = self.timed(lambda: self.pd.decoding.generate(self.model, prompt, "llada", steps=steps, **options))
        return took / steps, found.tokens.tolist()

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

    def in_pieces(self, prompt: Tokens, new: int, piece: int) -> tuple[float, Tokens]:
        with self.pd.Engine(self.model, prompt_tokens_per_step=piece, kept_prompt_tokens=0) as engine:
            submit = engine.submit
            took, found = self.timed(
                lambda: submit(prompt, "autoregressive", max_new_tokens=new, end_tokens=()).result()
            )
        return took, found.tokens.tolist()

    def other_cache(self, prompt: Tokens, new: int) -> tuple[float, Tokens]:
        run = self.pd.decoding.generate
        options: dict[str, Any] = {"max_new_tokens": new, "end_tokens": (), "page_size": 16}
        took, found = self.timed(lambda: run(self.model, prompt, "autoregressive", **options))
        return took, found.tokens.tolist()

    def clients(self, prompts: list[Tokens], new: int, lookup: bool) -> Clients:
        method = ("jacobi", {"draft": "lookup", "block_size": "auto"}) if lookup else ("autoregressive", {})
        if not hasattr(self, "server"):
            self.server = self.pd.Engine(self.model, max_running=32, max_new_tokens=new, kept_prompt_tokens=0)
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
