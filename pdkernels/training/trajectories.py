"""Training data of Jacobi Forcing: the intermediate states of blocks of greedy text under Jacobi decoding.

A model learns from its own trajectories: `collect_trajectories` decodes and keeps every state of every block,
`noise_aware_sample` picks one state per block by a noise schedule, `pack_noise_aware` packs samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from pdkernels._validation import check, check_index, check_type
from pdkernels.decoding import TraceStep, generate, sequence_seed
from pdkernels.training.packing import NoiseAwareSample

Schedule: TypeAlias = Literal["code", "paper"]
Order: TypeAlias = Literal["progressive", "reverse", "random"]
Noise: TypeAlias = Literal["suffix", "differing"]


class Trajectory(NamedTuple):
    """A prompt and the states of each block of its greedy continuation; int64 on the CPU."""

    prompt: Tensor
    """(P,) ids."""
    blocks: list[Tensor]
    """At least one, each (records, block_size) ids: states in order, no two of them equal, the fixed point last."""

    @property
    def fixed_points(self) -> Tensor:
        """``(num_blocks, block_size)`` ids: the greedy text, padded after its end token."""
        return torch.stack([records[-1] for records in self.blocks])


def collect_trajectories(
    model: Any,
    prompts: Sequence[str] | Sequence[Tensor] | Sequence[Sequence[int]],
    *,
    block_size: int,
    max_new_tokens: int,
    end_tokens: Sequence[int] | None = None,
    pad_token: int = 0,
    seed: int = 0,
    batch_size: int = 16,
) -> list[Trajectory]:
    """Decodes with ``jacobi`` of `pdkernels.decoding` and keeps the states of every block.

    Args:
        model, prompts, end_tokens: as in `pdkernels.decoding.generate`; a list of prompts.
        block_size: tokens of a block.
        max_new_tokens: maximum length of a continuation, rounded up to whole blocks.
        pad_token: fills the block after an end token, in all its records.
        seed: of the random tokens that fill new drafts.
        batch_size: prompts per batch; the result does not depend on it if logits do not.

    Returns:
        One trajectory per prompt. A record is the block before a forward: the accepted tokens and the draft after them.
        The first one is the seed token and random earlier tokens (in the first block: the predictions of the prompt's
        forward for them), which the released script drops; the last one is the fixed point. The concatenated fixed
        points are the text of greedy decoding; if that ends inside a block, `pad_token` fills the block.

    Raises:
        ValueError, TypeError: as `pdkernels.decoding.generate`.

    Source: Jacobi Forcing, section 2.1 and its released trajectory scripts.

    Example:
        >>> from pdkernels.models import Transformer, TransformerConfig
        >>> from pdkernels.training import collect_trajectories
        >>> model = Transformer(TransformerConfig(vocab_size=11, hidden_size=16, layers=2, heads=4, kv_heads=2,
        ...                                       head_dim=8, intermediate_size=24))
        >>> (trajectory,) = collect_trajectories(model, [[3, 1, 4]], block_size=4, max_new_tokens=8)
        >>> trajectory.prompt.tolist(), trajectory.fixed_points.shape
        ([3, 1, 4], torch.Size([2, 4]))
    """
    op = "training.collect_trajectories"
    for name, value in (("block_size", block_size), ("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        check_type(type(value) is int, op, name, "be an int", type(value).__name__)
        check(value >= 1, op, name, "be at least 1", value)
    items: Sequence[object] = prompts
    single = isinstance(prompts, (str, Tensor)) or any(type(item) is int for item in items)
    check(not single, op, "prompts", "be a list of prompts", "one", "Put it into a list.")
    length = -(-max_new_tokens // block_size) * block_size
    trajectories = []
    for start in range(0, len(prompts), batch_size):
        chosen: list[Any] = list(prompts[start : start + batch_size])
        # The last requested token is predicted and never drafted: request one more than is kept.
        result = generate(
            model, chosen, "jacobi", max_new_tokens=length + 1, end_tokens=end_tokens, trace=True,
            block_size=block_size, seed=[sequence_seed(seed, start + index) for index in range(len(chosen))],
        )  # fmt: skip
        trace = cast(list[list[TraceStep]], result.stats.trace)
        for prompt, tokens, steps in zip(chosen, result.tokens, trace, strict=True):
            ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            blocks = _blocks(tokens[:length].tolist(), steps, block_size, pad_token)
            trajectories.append(Trajectory(torch.as_tensor(ids, dtype=torch.int64).cpu().clone(), blocks))
    return trajectories


def noise_ratios(window: int, schedule: Schedule = "code") -> list[float]:
    """The fraction of a block to fill with noise, for each of the `window` blocks before the schedule restarts.

    Args:
        window: number of ratios.
        schedule: "code" rises evenly from 0 to 1 inclusive, as in the released script; "paper" is equation 7, which
            stops one step short of 1. A new block is all noise except its first token, which supports the code's
            version.

    Raises:
        ValueError: a window below 1, an unknown schedule.

    Example:
        >>> noise_ratios(5), noise_ratios(4, "paper")
        ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.25, 0.5, 0.75])
    """
    op = "training.noise_ratios"
    check_type(type(window) is int, op, "window", "be an int", type(window).__name__)
    check(window >= 1, op, "window", "be at least 1", window)
    check(schedule in ("code", "paper"), op, "schedule", "be 'code' or 'paper'", repr(schedule))
    steps = max(window - 1, 1) if schedule == "code" else window
    return [step / steps for step in range(window)]


def choose_record(records: Tensor, ratio: float, noise: Noise = "suffix") -> int:
    """The record whose fraction of noise is closest to `ratio`, the first on ties.

    Args:
        records: ``(n, block_size)`` int32 or int64, the fixed point last.
        ratio: the desired fraction.
        noise: "suffix", as in the released data script: noise runs from the first token that differs from the fixed
            point to the end of the block, whether later tokens are right or not. "differing", as in the paper's section
            3.1 and appendix C: the tokens that differ.

    Raises:
        ValueError: records that are not ``(n, block_size)`` with n at least 1; an unknown kind of noise.
        TypeError: records that are not int32 or int64.

    Source: Jacobi Forcing, appendix C, and its released data script.

    Example:
        >>> records = torch.tensor([[1, 7, 3, 7], [1, 2, 3, 7], [1, 2, 3, 4]])      # noise of 3, 1 and 0 tokens
        >>> choose_record(records, 1.0), choose_record(records, 0.4), choose_record(records, 0.0)
        (0, 1, 2)
        >>> choose_record(records, 0.5, "differing")  # two tokens differ, 7 and 7
        0
    """
    op = "training.choose_record"
    check(noise in ("suffix", "differing"), op, "noise", "be 'suffix' or 'differing'", repr(noise))
    check_index(op, "records", records, (None, None), None)
    check(len(records) >= 1, op, "records", "hold the fixed point at least", tuple(records.shape))
    different = records != records[-1]
    if noise == "suffix":  # all tokens after the first difference count
        different = different.cumsum(1).bool()
    return int((different.sum(1).double() / max(records.shape[1], 1) - ratio).abs().argmin())


def noise_aware_sample(
    trajectory: Trajectory,
    window: int,
    *,
    schedule: Schedule = "code",
    order: Order = "progressive",
    noise: Noise = "suffix",
    generator: torch.Generator | None = None,
) -> NoiseAwareSample:
    """One record per block, noise growing from block to block, for `pack_noise_aware`.

    Args:
        trajectory: of one prompt. Drop blocks at its end by ``trajectory._replace(blocks=trajectory.blocks[:n])``.
        window: blocks after which the noise restarts from 0.
        schedule: see `noise_ratios`.
        order: "progressive" takes the ratios in turn, "reverse" from the last to the first, "random" samples one for
            every block.
        noise: see `choose_record`.
        generator: the random generator, on the CPU; None: torch's default.

    Raises:
        ValueError: a window below 1, an unknown schedule, order or noise.

    Source: Jacobi Forcing, section 3.1, equation 7; table 4 compares the orders, and the reverse one is worst.

    Example:
        >>> blocks = [torch.tensor([[1, 9], [1, 2]]), torch.tensor([[9, 9], [3, 9], [3, 4]])]
        >>> noise_aware_sample(Trajectory(torch.tensor([7]), blocks), window=2).noisy.tolist()
        [[1, 2], [9, 9]]
    """
    op = "training.noise_aware_sample"
    ratios = noise_ratios(window, schedule)
    check(
        order in ("progressive", "reverse", "random"),
        op,
        "order",
        "be 'progressive', 'reverse' or 'random'",
        repr(order),
    )
    if order == "reverse":
        ratios.reverse()
    turns: Sequence[int] = range(len(trajectory.blocks))
    if order == "random":
        turns = torch.randint(window, (len(trajectory.blocks),), generator=generator, device="cpu").tolist()
    clean = trajectory.fixed_points
    noisy = torch.empty_like(clean)
    for row, records, turn in zip(noisy, trajectory.blocks, turns, strict=True):
        row.copy_(records[choose_record(records, ratios[turn % window], noise)])
    return NoiseAwareSample(trajectory.prompt, clean, noisy)


def noiseless_sample(prompt: Tensor, answer: Tensor, block_size: int, *, pad_token: int = 0) -> NoiseAwareSample:
    """A given answer in blocks that have converged. Has the autoregressive loss alone, against forgetting.

    Args:
        prompt: ``(P,)`` ids.
        answer: ``(n,)`` ids, including the end token.
        block_size: tokens of a block.
        pad_token: fills the last block.

    Raises:
        ValueError: a block size below 1, ids that are not one-dimensional.
        TypeError: ids that are not int32 or int64.

    Example:
        >>> noiseless_sample(torch.tensor([7]), torch.tensor([1, 2, 3]), 2).clean.tolist()
        [[1, 2], [3, 0]]
    """
    op = "training.noiseless_sample"
    check_type(type(block_size) is int, op, "block_size", "be an int", type(block_size).__name__)
    check(block_size >= 1, op, "block_size", "be at least 1", block_size)
    check_index(op, "prompt", prompt, (None,), None)
    check_index(op, "answer", answer, (None,), None)
    blocks = torch.nn.functional.pad(answer, (0, -len(answer) % block_size), value=pad_token).view(-1, block_size)
    return NoiseAwareSample(prompt, blocks, blocks)


def _blocks(text: list[int], steps: Sequence[TraceStep], block_size: int, pad_token: int) -> list[Tensor]:
    """Records of each block of `text`, which ends with an end token if it does not fill its last block."""
    records: list[list[list[int]]] = [[] for _ in range(-(-len(text) // block_size))]
    committed = 0
    for step in steps:
        first = committed - committed % block_size
        records[committed // block_size].append(text[first:committed] + list(step.draft))
        committed += step.accepted
    blocks = []
    for number, states in enumerate(records):
        fixed = text[number * block_size : (number + 1) * block_size]
        padding = [pad_token] * (block_size - len(fixed))
        distinct = dict.fromkeys((*state[: len(fixed)], *padding) for state in [*states, fixed])
        # A state may equal the fixed point before this is known.
        distinct.pop((*fixed, *padding))
        blocks.append(torch.tensor([*distinct, (*fixed, *padding)], device="cpu"))
    return blocks
