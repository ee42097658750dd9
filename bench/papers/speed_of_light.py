"""Speed of light of block diffusion: the smallest number of forwards that gives the text of filling one position per forward.

No sampler that ends in that text can be faster, because the searches know the text in advance. They say nothing about schemes with
another target, such as self-speculation, which ends in the text of autoregressive decoding.

Source: Nemotron-Labs-Diffusion, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bench.papers.block_search import Asking, Block, BlockLimit, Guesses, checked_schemes, searching
from pdkernels._validation import check
from pdkernels.generation.noise import banned_tokens, checked_mask_token, greedy, statistics
from pdkernels.generation.prompts import token_lists
from pdkernels.masks import full

_OP = "papers.speed_of_light"


@dataclass(frozen=True)
class SpeedOfLight:
    """The blocks of some texts, and the forwards they needed.

    Attributes:
        texts: for each prompt the ids that serial denoising wrote, up to the first end token.
        blocks: of each text.
        masks: masks of a block: all of its tokens, or all but the first if that comes from the previous forward.
    """

    texts: list[list[int]]
    blocks: list[list[BlockLimit]]
    masks: int

    def _fillings(self, scheme: str) -> list[tuple[int, int, bool, int, int]]:
        found = [(block, block.fillings[scheme]) for blocks in self.blocks for block in blocks]
        return [(self.masks, one.iterations, one.exact, one.simulated, one.unsafe) for _, one in found]

    def acceptance(self, scheme: str) -> float:
        """Masks filled per forward, mean over blocks: the paper's acceptance rate, which leaves out a forward per block for K
        and V."""
        rates = [masks / iterations for masks, iterations, *_ in self._fillings(scheme)]
        return sum(rates) / len(rates)

    def tokens_per_forward(self, scheme: str) -> float:
        """Tokens of the blocks over all forwards, the refresh of each block included."""
        found = self._fillings(scheme)
        size = len(self.blocks[0][0].target)
        return size * len(found) / sum(iterations + 1 for _, iterations, *_ in found)

    def exact(self, scheme: str) -> float:
        """Share of blocks that end as serial denoising ends."""
        found = self._fillings(scheme)
        return sum(exact for _, _, exact, *_ in found) / len(found)

    def simulated(self, scheme: str) -> float:
        """Forwards per block used only by the search, repeated ones counted once."""
        found = self._fillings(scheme)
        return sum(simulated for *_, simulated, _ in found) / len(found)

    def unsafe(self, scheme: str) -> int:
        """Iterations without budget left to simulate, over all blocks."""
        return sum(unsafe for *_, unsafe in self._fillings(scheme))


@torch.no_grad()
def speed_of_light(
    model: Any,
    prompts: Sequence[Any],
    block_size: int = 16,
    *,
    schemes: Sequence[str] = ("greedy", "first_all"),
    max_new_tokens: int = 128,
    refresh: Literal["causal", "bidirectional"] = "causal",
    end_tokens: Sequence[int] | None = None,
    budget: int = 5000,
) -> SpeedOfLight:
    """Fills blocks serially, and finds how few forwards the schemes need for the same text.

    All prompts are processed in one batch: a forward answers one query of every active search.

    Args:
        model: with a mask token and a KV cache, such as "tiny-trimode".
        prompts: as `pdkernels.decoding.generate` takes a batch of them.
        block_size: tokens of a block. Blocks are always filled to their end.
        schemes: names from `bench.papers.SCHEMES`.
        max_new_tokens: no block begins after this many.
        refresh: as in `block_diffusion`: "causal" also gives the first token of every block.
        end_tokens: a text ends with the block that holds one. None: those of the model.
        budget: simulated forwards per block and scheme; the paper's 5000.

    Raises:
        ValueError: a model without a mask token, an unknown scheme, a number out of range.

    Example:
        >>> import pdkernels as pd
        >>> model = pd.models.load("tiny-trimode")
        >>> limits = speed_of_light(model, ["12 + 34 = ?\\n"], 8, schemes=("serial", "first_all"), max_new_tokens=24)
        >>> limits.acceptance("serial"), limits.exact("first_all"), limits.acceptance("first_all") >= 1
        (1.0, 1.0, True)
    """
    checked_schemes(_OP, schemes, budget)
    check(len(prompts) > 0 and not isinstance(prompts, str), _OP, "prompts", "be a list of at least one", prompts)
    known = 1 if refresh == "causal" else 0
    check(refresh in ("causal", "bidirectional"), _OP, "refresh", "be 'causal' or 'bidirectional'", repr(refresh))
    check(block_size > known, _OP, "block_size", f"be at least {known + 1}", block_size)
    check(max_new_tokens >= 1, _OP, "max_new_tokens", "be at least 1", max_new_tokens)
    mask_token = checked_mask_token(_OP, model, None)
    ends = tuple(model.end_tokens if end_tokens is None else end_tokens)
    banned = banned_tokens(_OP, model, False, mask_token)
    lists, _ = token_lists(model, list(prompts), model.config.vocab_size)
    count, device, longest = len(lists), model.device, max(map(len, lists))
    cache = model.new_cache(count, longest + max_new_tokens + block_size)
    everything = full(block_size).plan(64, 64, device)
    nothing = torch.zeros(count, dtype=torch.int64, device=device)
    texts: list[list[int]] = [[] for _ in lists]
    blocks: list[list[BlockLimit]] = [[] for _ in lists]
    going = [True] * count

    def shorten(block: Block) -> int:
        return next((index + 1 for index, token in enumerate(block) if token in ends), len(block))

    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in lists], device=device)
    counts = torch.tensor([len(ids) for ids in lists], device=device)
    plan = None
    while any(going):
        logits = model(tokens, cache=cache, counts=counts, mask=plan, rows=(counts - 1).clamp(min=0)[:, None])
        cache.commit_(counts)
        firsts = greedy(logits, banned)[:, 0].tolist()
        searches: dict[int, Asking] = {}
        for sequence in range(count):
            if going[sequence]:
                block = tuple(firsts[sequence : sequence + 1][:known]) + (mask_token,) * (block_size - known)
                searches[sequence] = searching(block, mask_token, schemes, budget, shorten)
        asked = {sequence: next(search) for sequence, search in searches.items()}
        current = [(mask_token,) * block_size] * count
        while asked:
            for sequence, block in asked.items():
                current[sequence] = block
            hidden = model.hidden(torch.tensor(current, device=device), cache=cache, counts=nothing, mask=everything)
            guesses = statistics(model, hidden, suppress=mask_token, top_k=1)
            ids, probs = guesses.ids.tolist(), guesses.probs.tolist()
            for sequence in list(asked):
                try:
                    asked[sequence] = searches[sequence].send(Guesses(ids[sequence], probs[sequence]))
                except StopIteration as stop:
                    del asked[sequence]
                    limit: BlockLimit = stop.value
                    blocks[sequence].append(limit)
                    texts[sequence] += limit.target[: limit.length]
                    ended = any(token in ends for token in limit.target)
                    going[sequence] = not ended and len(texts[sequence]) < max_new_tokens
        filled = [list(own[-1].target) for own in blocks]
        tokens = torch.tensor(filled, device=device)
        counts = torch.tensor([on * block_size for on in going], device=device)
        plan = None if refresh == "causal" else everything
    return SpeedOfLight(texts, blocks, block_size - known)
