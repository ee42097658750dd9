"""Steps of block diffusion labelled by whether a guess is final, and the training of a `SamplerHead` on them.

Source: Nemotron-Labs-Diffusion, section 3.2 and appendix A. A guess is final if the same run ends with it at that
position (appendix A); section 3.2 uses only the confidence policy. Labels are about the best guess, and both policies
of the appendix commit best guesses or the text's own tokens: no tokens are sampled here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from pdkernels._validation import check, check_type, fail
from pdkernels.generation.noise import banned_tokens, checked_mask_token, greedy, statistics
from pdkernels.generation.prompts import token_lists
from pdkernels.masks import full
from pdkernels.models.architectures.sampler_head import SamplerHead, sampler_features

_OP = "training.collect_sampler_steps"
Policy = Literal["confidence", "hybrid"]


class SamplerSteps(NamedTuple):
    """Forwards of block diffusion over unfinished blocks, n in all."""

    features: Tensor
    """``(n, size, 16 + 4 * width)`` float32, not normalised."""
    final: Tensor
    """``(n, size)`` bool: whether the best guess is the token at the end of the run."""
    active: Tensor
    """``(n, size)`` bool: positions that could be filled and finally were; the others are ignored."""
    prompts: Tensor
    """``(n,)`` int64: the prompt of a step. Steps of a prompt share their final text, so split by prompts."""

    def of(self, chosen: Tensor) -> SamplerSteps:
        """The steps of some prompts, by their numbers."""
        rows = torch.isin(self.prompts, chosen)
        return SamplerSteps(*(field[rows] for field in self))

    def confidence(self) -> tuple[Tensor, Tensor]:
        """The confidence at all active positions, and whether their guesses are final."""
        return self.features[..., 0][self.active], self.final[self.active]


@torch.no_grad()
def collect_sampler_steps(
    model: Any,
    prompts: Sequence[Any],
    block_size: int,
    policy: Policy = "confidence",
    *,
    table: Tensor,
    texts: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int = 128,
) -> SamplerSteps:
    """Runs block diffusion and keeps every forward, all prompts in one batch.

    Args:
        model: with a mask token and a KV cache, such as "tiny-trimode".
        prompts: as `pdkernels.decoding.generate` takes a batch of them.
        block_size: tokens of a block, the first of which comes from the previous forward.
        policy: "confidence" fills the most confident position. "hybrid" fills all positions whose guess agrees with
            `texts`, or the most confident one if there are none.
        table: of the head to be trained, see `semantic_table`.
        texts: ids that should follow each prompt, for "hybrid".
        max_new_tokens: no block begins after this many, or after an end token.

    Raises:
        ValueError: an unknown policy, "hybrid" without texts for all prompts, a model without a mask token, sizes out
            of range.

    Example:
        >>> import pdkernels as pd
        >>> model = pd.models.load("tiny-trimode")
        >>> table = pd.models.semantic_table(model.embedding, 16)
        >>> steps = collect_sampler_steps(model, ["12 + 34 = ?\\n"], 8, table=table, max_new_tokens=16)
        >>> steps.features.shape, int(steps.active[0].sum()), int(steps.active[6].sum())
        (torch.Size([14, 8, 80]), 7, 1)
    """
    if policy not in get_args(Policy):
        fail(_OP, "policy", "be 'confidence' or 'hybrid'", repr(policy))
    check(block_size >= 2, _OP, "block_size", "be at least 2", block_size)
    check(max_new_tokens >= 1, _OP, "max_new_tokens", "be at least 1", max_new_tokens)
    check(len(prompts) > 0 and not isinstance(prompts, str), _OP, "prompts", "be a list of at least one", prompts)
    matching = texts is None if policy == "confidence" else texts is not None and len(texts) == len(prompts)
    check(
        matching,
        _OP,
        "texts",
        "be one for each prompt with 'hybrid', and None otherwise",
        None if texts is None else len(texts),
    )
    mask_token = checked_mask_token(_OP, model, None)
    lists, _ = token_lists(model, list(prompts), model.config.vocab_size)
    count, device, longest = len(lists), model.device, max(map(len, lists))
    ends = torch.tensor(model.end_tokens, dtype=torch.int64, device=device)
    length = max_new_tokens + block_size
    targets = torch.full((count, length), -1, device=device)
    for row, text in zip(targets, texts or ()):
        row[: min(len(text), length)] = torch.tensor(list(text[:length]), device=device)
    cache = model.new_cache(count, longest + length)
    everything = full(block_size).plan(64, 64, device)
    nothing = torch.zeros(count, dtype=torch.int64, device=device)
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in lists], device=device)
    counts = torch.tensor([len(ids) for ids in lists], device=device)
    going, generated, records = torch.ones(count, dtype=torch.bool, device=device), 0, []
    while bool(going.any()) and generated < max_new_tokens:
        logits = model(tokens, cache=cache, counts=counts, rows=(counts - 1).clamp(min=0)[:, None])
        cache.commit_(counts)
        block = torch.full((count, block_size), mask_token, device=device)
        truth = targets[:, generated : generated + block_size]
        first = greedy(logits, banned_tokens(_OP, model, False, mask_token))[:, 0]
        block[:, 0] = torch.where(truth[:, 0] >= 0, truth[:, 0], first)
        forwards = []
        while bool((able := _able(block, mask_token, ends) & going[:, None]).any()):
            hidden = model.hidden(block, cache=cache, counts=nothing, mask=everything)
            seen = statistics(model, hidden, top_k=min(5, model.config.vocab_size))
            # The network sees the probability of the mask; guesses and their confidence exclude it.
            guess, confidence, *_ = statistics(model, hidden, suppress=mask_token, top_k=1)
            forwards.append((sampler_features(seen, block, able, table.to(device)), guess, able))
            agreeing = able & (guess == truth)
            best = F.one_hot(confidence.masked_fill(~able, -1).argmax(1), block_size).bool() & able
            filled = torch.where(agreeing.any(1, keepdim=True), agreeing, best)
            block = torch.where(filled, guess, block)
        for features, guess, able in forwards:
            outcome = able & (block != mask_token)  # masks after an end token have no outcome
            chosen = outcome.any(1)
            records.append((features[chosen], (guess == block)[chosen], outcome[chosen], chosen.nonzero()[:, 0]))
        generated += block_size
        tokens, counts = block, torch.where(going, block_size, 0)
        going = going & ~torch.isin(block, ends).any(1)
    if not records:
        fail(_OP, "model", "leave positions to fill", "a text that ends with its first token, for all prompts")
    return SamplerSteps(*(torch.cat(fields).cpu() for fields in zip(*records)))


def _able(block: Tensor, mask_token: int, ends: Tensor) -> Tensor:
    """Masks without an end token before them."""
    return (block == mask_token) & (torch.isin(block, ends).long().cumsum(1) == 0)


def auc(scores: Tensor, labels: Tensor) -> float:
    """The probability that a positive example scores higher than a negative one; equal scores count half.

    Args:
        scores, labels: ``(n,)``, labels of both kinds.

    Example:
        >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
        0.75
    """
    labels = labels.bool()
    positive, negative = int(labels.sum()), int((~labels).sum())
    check(
        positive > 0 and negative > 0,
        "training.auc",
        "labels",
        "contain both kinds",
        f"{positive} true, {negative} false",
    )
    _, group, size = scores.double().unique(sorted=True, return_inverse=True, return_counts=True)
    last = size.cumsum(0).double()
    ranks = (last - (size.double() - 1) / 2)[group]  # the mean rank of ties, from 1
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))


@torch.no_grad()
def score_steps(head: SamplerHead, steps: SamplerSteps, batch_size: int = 512) -> tuple[Tensor, Tensor]:
    """Scores of all active positions, and whether their guesses are final."""
    logits = [head(head.normalised(features)).float() for features in steps.features.split(batch_size)]
    return torch.cat(logits)[steps.active].sigmoid(), steps.final[steps.active]


def train_sampler(
    head: SamplerHead,
    steps: SamplerSteps,
    held_out: SamplerSteps,
    *,
    epochs: int = 20,
    batch_size: int = 64,
    lr: float = 1e-3,
    patience: int = 3,
    seed: int = 0,
    progress: Callable[[int, float, float], None] = lambda epoch, loss, area: None,
) -> list[float]:
    """Trains a head, in place: binary cross-entropy of active positions, by AdamW, until the held-out AUC stops
    growing.

    Features are normalised by the mean and deviation of `steps`; the final weights are those of the best epoch.

    Args:
        head: in float32.
        steps, held_out: from different prompts.
        epochs: maximum number.
        batch_size: steps, that is blocks, per update.
        lr: learning rate.
        patience: epochs without a better AUC before training ends.
        seed: of the random order of steps.
        progress: called after each epoch with its number, its mean loss and the AUC.

    Returns:
        The AUC of held-out steps after each epoch.

    Raises:
        ValueError: held-out steps without final or without other guesses; features of another width.
        TypeError: a head in another dtype.
    """
    op = "training.train_sampler"
    check_type(head.dtype == torch.float32, op, "head", "be in float32", head.dtype)
    for name, data in (("steps", steps), ("held_out", held_out)):
        same_width = data.features.shape[-1] == head.config.features
        check(same_width, op, name, f"have {head.config.features} features", data.features.shape[-1])
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("patience", patience)):
        check(value >= 1, op, name, "be at least 1", value)
    rows = steps.features.flatten(
        0, 1
    )  # including filled positions, because some features are constant over the others
    head.mean.copy_(rows.mean(0))
    head.std.copy_(rows.std(0, correction=0))
    head.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(seed)
    areas: list[float] = []
    best = copy.deepcopy(head.state_dict())
    for epoch in range(epochs):
        total = 0.0
        batches = torch.randperm(len(steps.features), generator=generator, device="cpu").split(batch_size)
        with torch.enable_grad():
            for chosen in batches:
                active = steps.active[chosen]
                logits = head(head.normalised(steps.features[chosen]))[active]
                loss = F.binary_cross_entropy_with_logits(logits, steps.final[chosen][active].float())
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                total += loss.item() / len(batches)
        areas.append(auc(*score_steps(head, held_out)))
        progress(epoch, total, areas[-1])
        if areas[-1] == max(areas):
            best = copy.deepcopy(head.state_dict())
        elif epoch - areas.index(max(areas)) >= patience:
            break
    head.load_state_dict(best)
    head.requires_grad_(False).eval()
    return areas
