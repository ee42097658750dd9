"""The sampler published with SDAR and LLaDA2, as plainly as it can be written: whole texts under a block-causal mask, no cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Logits (T, V) of T tokens, where row i sees column j if ``visible[i, j]``.
Forward = Callable[[list[int], Tensor], Tensor]


class Written(NamedTuple):
    tokens: list[int]  # after the prompt, up to the end of a block
    forwards: int  # that fill


def block_sampler(
    forward: Forward, prompt: list[int], new: int, mask: int, block: int, steps: int, threshold: float
) -> Written:
    """Greedy. Blocks begin at multiples of `block`, and the end of the prompt lies in the first one that is filled.

    A step fills what is more probable than `threshold`, or its share of a block if that is more. Other than in the published code the
    mask token is never a guess.
    """
    length = -(-(len(prompt) + new) // block) * block
    text = [*prompt, *[mask] * (length - len(prompt))]
    number = torch.arange(length) // block
    visible = number[:, None] >= number
    forwards = 0
    for first in range(len(prompt) // block * block, length, block):
        end = first + block
        for step in range(steps):
            masked = [p for p in range(max(first, len(prompt)), end) if text[p] == mask]
            if not masked:
                break
            logits = forward(text[:end], visible[:end, :end]).double().index_fill(-1, torch.tensor([mask]), -torch.inf)
            forwards += 1
            sure, tokens = (found.tolist() for found in logits.softmax(-1).max(-1))
            share = block // steps + (step < block % steps)
            chosen = [p for p in masked if sure[p] > threshold]
            if len(chosen) < share:
                chosen = sorted(masked, key=lambda p: -sure[p])[:share]
            for p in chosen:
                text[p] = tokens[p]
    return Written(text[len(prompt) :], forwards)


class Edited(NamedTuple):
    tokens: list[int]
    edits: int  # tokens that were replaced


def joint_threshold(
    forward: Forward,
    prompt: list[int],
    new: int,
    mask: int,
    block: int,
    threshold: float,
    edit_threshold: float,
    most: int,
) -> Edited:
    """The loop of JointThreshold in SGLang (python/sglang/srt/dllm/algorithm/joint_threshold.py), without its penalty.

    Other than there the mask token is never a guess.
    """
    text, edits = [*prompt, *[mask] * new], 0
    number = torch.arange(len(text)) // block
    visible = number[:, None] >= number
    for first in range(len(prompt) // block * block, len(text), block):
        end, posts = first + block, 0
        for _ in range(block + most):
            logits = forward(text[:end], visible[:end, :end]).double().index_fill(-1, torch.tensor([mask]), -torch.inf)
            sure, tokens = (found.tolist() for found in logits.softmax(-1).max(-1))
            masked = [p for p in range(first, end) if text[p] == mask]
            fills = [p for p in masked if sure[p] > threshold] or sorted(masked, key=lambda p: -sure[p])[:1]
            posts += not masked
            if posts > most:
                break
            inside = range(max(first, len(prompt)), end)
            others = [p for p in inside if p not in masked and sure[p] > edit_threshold and tokens[p] != text[p]]
            for p in fills + others:
                text[p] = tokens[p]
            edits += len(others)
            if not fills + others:
                break
    return Edited(text[len(prompt) :], edits)


class Rewritten(NamedTuple):
    tokens: list[int]
    deleted: int
    inserted: int
    escapes: int  # states that came again
    cut: int  # blocks that the last update has ended


def joint_threshold_indel(
    forward: Forward,
    prompt: list[int],
    new: int,
    mask: int,
    delete: int,
    split: int,
    block: int,
    threshold: float,
    edit_threshold: float,
    most: int,
) -> Rewritten:
    """The loop of JointThresholdInDel in SGLang (python/sglang/srt/dllm/algorithm/joint_threshold_indel.py), on tensors of a block as there.

    Other than there the mask token is never a guess, so that no mask is written over a mask.
    """
    length = len(prompt) + new
    text = torch.tensor([*prompt, *[mask] * new])
    number = torch.arange(length) // block
    visible = number[:, None] >= number
    facts = [0, 0, 0, 0]
    for first in range(len(prompt) // block * block, length, block):
        end = first + block
        is_prompt = torch.arange(first, end) < len(prompt)
        is_orig_mask = ~is_prompt & (text[first:end] == mask)
        post_edit_steps, num_update_steps, finished = 0, 0, False
        seen: set[tuple[int, ...]] = set()
        sampled: dict[int, set[int]] = {}
        while not finished:
            current = text[first:end].clone()
            logits = forward(text[:end].tolist(), visible[:end, :end])[first:end].double()
            logits[:, mask] = -torch.inf
            p, x = logits.softmax(-1).max(-1)
            mask_index = ~is_prompt & (current == mask)
            original = is_orig_mask & mask_index
            introduced = int(mask_index.sum() - original.sum())
            num_update_steps += 1
            post_edit_steps += not original.any()
            is_final = post_edit_steps >= most or num_update_steps > block + most
            transfer = mask_index.clone()
            if not is_final and original.any():
                transfer = (p > threshold) & mask_index
                if transfer.sum() < 1 + introduced:
                    order = torch.where(mask_index, p, -torch.inf).sort(descending=True, stable=True).indices
                    transfer = torch.zeros_like(mask_index)
                    transfer[order[: 1 + introduced]] = True
            transfer |= (p > edit_threshold) & (current != x) & ~mask_index & ~is_prompt
            if not transfer.any():
                break
            if is_final:
                for place in transfer.nonzero()[:, 0].tolist():
                    x[place] = logits[place].index_fill(0, torch.tensor([mask, delete, split]), -torch.inf).argmax()
            key = tuple(current.tolist())
            changing = (transfer & (x != current)).nonzero()[:, 0]
            if key in seen and not is_final and len(changing):
                place = int(changing[p[changing].argmin()])
                tried = torch.tensor([mask, *sampled.get(place, ())])
                x[place] = logits[place].index_fill(0, tried, -torch.inf).argmax()
                facts[2] += 1
            seen.add(key)
            tokens, marks = [], []
            for place in range(block):
                token = int(x[place]) if transfer[place] else int(current[place])
                if transfer[place]:
                    sampled.setdefault(place, set()).add(token)
                if transfer[place] and token == delete:
                    facts[0] += 1
                elif transfer[place] and token == split:
                    facts[1] += 1
                    tokens += [mask, int(current[place])]
                    marks += [False, bool(is_orig_mask[place])]
                else:
                    tokens.append(token)
                    marks.append(bool(is_orig_mask[place]))
            tokens, marks = [*tokens, *[mask] * block][:block], [*marks, *[False] * block][:block]
            text[first:end], is_orig_mask = torch.tensor(tokens), torch.tensor(marks)
            facts[3] += is_final
            finished = is_final
    return Rewritten(text[len(prompt) :].tolist(), *facts)
