"""What all model fakes share: a cache of token ids, random weights and rows, and how often a decoder reads the device."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pdkernels.cache import ContiguousKVCache, PagedKVCache
from pdkernels.decoding import generate, sequence_seed
from pdkernels.models.architectures.transformer import Transformer, TransformerConfig
from pdkernels.reference.autoregressive import Model
from pdkernels.reference.sampling import causal_logits, distribution, without

seeds = st.integers(0, 2**64 - 1)
page_sizes = st.sampled_from([None, None, 1, 3, 16])


def streams(batch: list[Any], options: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The prompts of a batch, each with the options that it has alone."""
    return [(prompt, options | {"seed": sequence_seed(options.get("seed", 0), n)}) for n, prompt in enumerate(batch)]


class CachedFake:
    """A cache row holds a token id (K) and its position (V), so that a wrong commit gives wrong tokens."""

    LAYERS = 1
    tokenizer: Any = None
    cache: Any = None  # the last one made

    def new_cache(self, batch: int, capacity: int, *, kind: str = "contiguous", page_size: int = 16) -> Any:
        if kind == "contiguous":
            self.cache = ContiguousKVCache(self.LAYERS, batch, capacity, 1, 1)
        else:
            pages = -(-capacity // page_size)
            self.cache = PagedKVCache(self.LAYERS, batch, batch * pages, page_size, 1, 1, max_pages_per_sequence=pages)
        return self.cache


class RandomRows:
    """Random logits for every key, from a table filled on demand: as arbitrary as a model can be."""

    def __init__(self, size: int, seed: int, spread: float) -> None:
        self.size, self.seed, self.spread = size, seed, spread
        self.rows: dict[Hashable, Tensor] = {}

    def drawn(self, key: Hashable, *shape: int) -> Tensor:
        if key not in self.rows:
            generator = torch.Generator().manual_seed(hash((self.seed, key)) % 2**63)
            self.rows[key] = torch.randn(*shape, generator=generator, dtype=torch.float64) * self.spread
        return self.rows[key]


def random_transformer(seed: int, std: float, vectors: bool = False, **sizes: Any) -> Transformer:
    """Random fp64 weights, large enough that tokens depend on the whole context; the last id is the mask."""
    torch.manual_seed(seed)
    small = {"hidden_size": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate_size": 24}
    config = TransformerConfig(**(small | sizes))
    model = Transformer(config, mask_token=config.vocab_size - 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 or vectors:
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, std)
    return model.requires_grad_(False)


class Plain:
    """The interface of the reference samplers: a forward over everything, without a cache. No row predicts the mask token."""

    def __init__(self, model: Any) -> None:
        self.predicts = model.config.predicts
        self._model = model

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        logits = self._model(tokens, positions=positions, mask=mask)
        return logits if self._model.mask_token is None else without(logits, self._model.mask_token)


class KeepsCache:
    """Remembers the cache that a generation made."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        return self.model(*arguments, **options)

    def new_cache(self, *arguments: Any, **options: Any) -> Any:
        self.cache = self.model.new_cache(*arguments, **options)
        return self.cache


class HostReads(TorchFunctionMode):
    """Counts the reads of tensors by the host that decoding code makes; a model's own do not count."""

    NAMES = {"tolist", "item", "cpu", "numpy", "nonzero", "equal", "is_nonzero"}
    NAMES |= {f"__{kind}__" for kind in ("bool", "int", "float", "index")}

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.NAMES:
            self.count += "pdkernels/decoding" in sys._getframe(1).f_code.co_filename
        return func(*args, **(kwargs or {}))


def reads_of_the_device(*arguments: Any, **options: Any) -> int:
    """How often a decoding loop reads the device while it generates."""
    with HostReads() as reads:
        generate(*arguments, **options)
    return reads.count


def sequence_distribution(
    model: Model, prompt: Sequence[int], length: int, temperature: float
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `length` tokens under autoregressive sampling, by enumeration."""
    distributions = {(): 1.0}
    for _ in range(length):
        distributions = {
            (*tokens, token): probability * p
            for tokens, probability in distributions.items()
            for token, p in enumerate(
                distribution(causal_logits(model, [*prompt, *tokens])[-1:], temperature)[0].tolist()
            )
            if p > 0
        }
    return distributions


def follows(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> bool:
    """Pearson's chi-square test, four standard deviations above its mean; outcomes too rare for it are merged."""
    assert set(counts) <= set(expected)
    total = sum(counts.values())
    common = [outcome for outcome, p in expected.items() if p * total >= 5]
    cells = [(counts.get(outcome, 0), expected[outcome] * total) for outcome in common]
    rest = total - sum(e for _, e in cells)
    if rest >= 5:
        cells.append((total - sum(c for c, _ in cells), rest))
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    return statistic < freedom + 4 * math.sqrt(2 * freedom)
