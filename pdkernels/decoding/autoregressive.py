"""Autoregressive decoding: one token per forward, on the KV cache. The baseline of every other method."""

from __future__ import annotations

import torch

from pdkernels.decoding._sampling import OWN, Seed, banned_tokens, checked_sampling, draw, latents
from pdkernels.decoding._session import Session, is_end, without_choice
from pdkernels.decoding._steps import Rows, Steps, decoder, record_first

_OP = "decoding.autoregressive"


class AutoregressiveSteps(Steps):
    """An entry: 1 while a sequence continues, 1 for the row it had, its newest token."""

    def __init__(
        self,
        sizes: Session,
        *,
        temperature: float = 0.0,
        allow_mask_token: bool = False,
        seed: Seed = 0,
        page_size: int | None = None,
    ) -> None:
        seeds = checked_sampling(_OP, temperature, seed, sizes.batch)
        self.model, self.limit, self.temperature = sizes.model, sizes.max_new_tokens, temperature
        self.banned = banned_tokens(_OP, self.model, allow_mask_token)
        self.cache = sizes.new_cache(page_size)
        self.seeds = seeds.to(self.cache.device)
        self.latents = latents(self.model, self.seeds)
        self.ends = sizes.ends_on(self.cache.device)
        self.entry = self.cache.lengths.new_zeros(sizes.batch, 3)
        self.active, self.accepted, self.token = self.entry[:, 0], self.entry[:, 1], self.entry[:, 2:]
        self.remaining = torch.zeros_like(self.cache.lengths)  # tokens left; 0 once a sequence is done

    def start(self, session: Session) -> None:
        prompts, prompt_lengths = session.packed_prompts(session.longest, self.cache.device)
        self.cache.lengths.zero_()
        last = (prompt_lengths - 1)[:, None]
        logits = self.model(prompts, cache=self.cache, counts=session.ragged(prompt_lengths), rows=last, **self.latents)
        first = self._draw(logits, prompt_lengths)
        self.cache.commit_(prompt_lengths)
        self.remaining.fill_(self.limit - 1)
        self.active.fill_(1)
        self._write(first, logits)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        # A finished sequence goes through the model too, but its row is never committed: its cache does not change.
        logits = self.model(self.token, cache=self.cache, **self.latents)
        following = self._draw(logits, self.cache.lengths + 1)
        self.cache.commit_(self.active)
        self.remaining -= self.active
        self._write(following, logits)

    def _draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return draw(logits, positions[:, None], self.temperature, self.seeds, OWN, self.banned)

    def _write(self, token: torch.Tensor, logits: torch.Tensor) -> None:
        # No row of a finished sequence counts, whatever its logits are.
        broken = without_choice(logits, token)[:, 0] & (self.active > 0)
        self.accepted.fill_(1).masked_fill_(broken, -1)
        self.remaining.masked_fill_(broken, 0)
        self.token.copy_(token.clamp(min=0))
        if self.ends is not None:
            self.remaining.masked_fill_(is_end(token[:, 0], self.ends), 0)
        self.active.copy_(self.remaining.clamp(max=1))

    def opened(self, session: Session, rows: Rows) -> int:
        return record_first(session, rows, 2)

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        session.forwards += 1
        for sequence, ((active, _, known), (_, _, token)) in enumerate(zip(before, rows)):
            if active:
                session.log_step(sequence, [known], [token], accepted=1, next_token=token)
        return sum(active for active, *_ in before)


decode = decoder(AutoregressiveSteps)
