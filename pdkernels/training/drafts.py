"""Drafts of blocks for the training of a drafter: their rows in one packed forward, their tokens, and how many of them
the verifier accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdkernels._validation import check, check_index, check_number, fail, integer, message
from pdkernels.generation.noise import OWN, sample
from pdkernels.masks import SegmentMask
from pdkernels.training.packing import DualStreamSample, pack_dual_stream


class DraftBatch(NamedTuple):
    """Result of `pack_drafts`: one sequence of N tokens that drafts and verifies B blocks."""

    tokens: Tensor
    """(N,) ids; each text twice, first its blocks of a known token and masks, then the whole text."""
    positions: Tensor
    """(N,) position ids; a block and its text share theirs."""
    mask: SegmentMask
    """(N, N); pass its ``plan()`` to attention."""
    drafting: Tensor
    """(N,) bool, True in the rows of blocks: what the adapter acts on."""
    draft_rows: Tensor
    """(B, block_size - 1) rows of masks, which predict their own token."""
    verifier_rows: Tensor
    """(B, block_size - 1) rows of the text before them, which predict the same tokens."""


def pack_drafts(texts: Sequence[tuple[Tensor, int]], block_size: int, mask_token: int) -> DraftBatch:
    """Packs texts that a model wrote so that one forward drafts all of their blocks and verifies them.

    Args:
        texts: ids ``(tokens,)``, and how many of them were given: the prompt's.
        block_size: tokens of a block, the known one included. Blocks begin at multiples of it.
        mask_token: what stands for the tokens to be drafted.

    Returns:
        Rows of the blocks that are whole and begin after the prompt. A block sees the text before it and itself, as a
        draft pass does; the text's rows are causal. Rows of a block up to the first draft that the verifier rejects
        equal those of a verification of the draft itself, if the text is the verifier's own greedy one: up to there
        the draft is the text.

    Raises:
        ValueError: a block of fewer than 2 tokens, a negative mask token, a prompt longer than its text.
        TypeError: ids that are not a tensor of int32 or int64, sizes that are not ints.

    Source: Nemotron-Labs-Diffusion, section 3.3 and figure 11.

    Example:
        >>> import torch
        >>> from pdkernels.training import pack_drafts
        >>> batch = pack_drafts([(torch.tensor([5, 6, 7, 8, 1, 2]), 2)], block_size=2, mask_token=9)
        >>> batch.tokens.tolist(), batch.positions.tolist()
        ([7, 9, 1, 9, 5, 6, 7, 8, 1, 2], [2, 3, 4, 5, 0, 1, 2, 3, 4, 5])
        >>> batch.draft_rows.tolist(), batch.verifier_rows.tolist()
        ([[1], [3]], [[6], [8]])
    """
    op = "training.pack_drafts"
    integer(op, "block_size", block_size, 2)
    samples, drafts, verifiers, drafting, first = [], [], [], [], 0
    ahead = torch.arange(block_size - 1, device="cpu")
    for ids, prompt_len in texts:
        check_index(op, "texts", ids, (None,), None)
        check(0 <= prompt_len <= len(ids), op, "texts", f"have a prompt of 0 .. {len(ids)} tokens", prompt_len)
        positions = torch.arange(len(ids), device="cpu")
        begins = positions // block_size * block_size  # the start of a token's block
        inside = (begins >= prompt_len) & (begins + block_size <= len(ids))
        starts = positions[inside][::block_size]
        samples.append(DualStreamSample(ids, inside & (positions % block_size != 0), 1.0, inside))
        noisy = len(starts) * block_size
        drafts.append(first + torch.arange(len(starts), device="cpu")[:, None] * block_size + 1 + ahead)
        verifiers.append(first + noisy + starts[:, None] + ahead)
        drafting += [
            torch.ones(noisy, dtype=torch.bool, device="cpu"),
            torch.zeros(len(ids), dtype=torch.bool, device="cpu"),
        ]
        first += noisy + len(ids)
    packed = pack_dual_stream(samples, block_size, mask_token)
    none = torch.empty(0, block_size - 1, dtype=torch.int64, device="cpu")
    flags = torch.cat([torch.empty(0, dtype=torch.bool, device="cpu"), *drafting])
    rows = (torch.cat([none, *part]) for part in (drafts, verifiers))
    return DraftBatch(packed.tokens, packed.positions, packed.mask, flags, *rows)


@torch.no_grad()
def draw_drafts(
    draft_logits: Tensor,
    generator: torch.Generator | None = None,
    *,
    sampled_share: float = 0.9,
    temperature: float = 1.0,
) -> Tensor:
    """Tokens of drafts: sampled in most blocks, the best ones in the others.

    Args:
        draft_logits: ``(blocks, k, vocab)``; row j of a block is about draft token j. Tokens at -inf are never drawn.
        generator: on the CPU; None: torch's default. The same state gives the same tokens on every device.
        sampled_share: the probability with which a block is sampled, all of its tokens, independently of the others. 0:
            all drafts are greedy.
        temperature: of sampled blocks: exact samples of ``softmax(draft_logits / temperature)``, independent in each
            row, since a draft pass fills all of its masks at once.

    Returns:
        ``(blocks, k)`` int64, without a gradient; -1 in a row whose logits are all -inf, which no verifier accepts.

    Raises:
        ValueError: another shape, a share outside 0 .. 1, a temperature that is not positive.
        TypeError: logits that are not floating, numbers of another type.

    Source: Nemotron-Labs-Diffusion, section 3.3: 90 % of the slots of the inner batch sample at temperature 1, the rest
    stay greedy. It does not say how slots are chosen; here each is drawn on its own, so that a batch of one block has
    the same share.

    What is drawn decides by `count_accepted` which rows `drafter_loss` reads, and nothing else: the rows of a draft
    pass do not read its tokens, and up to the first rejected token the verifier reads its own. So a block is read past
    a position where the best guess is wrong as often as the right token is sampled, and ends at a right guess as often
    as another token is.

    Example:
        >>> import torch
        >>> from pdkernels.training import draw_drafts
        >>> logits = torch.tensor([0.6, 0.3, 0.1]).log().expand(2000, 1, 3)
        >>> drafts = draw_drafts(logits, torch.Generator().manual_seed(0))
        >>> [round((drafts == token).float().mean().item(), 1) for token in range(3)]   # 0.1 + 0.9 * 0.6 = 0.64
        [0.6, 0.3, 0.1]
        >>> draw_drafts(logits, sampled_share=0).unique().tolist()
        [0]
    """
    op = "training.draw_drafts"
    _check_logits(op, "draft_logits", draft_logits)
    check_number(op, "sampled_share", sampled_share, 0, 1, "be in 0 .. 1")
    check_number(op, "temperature", temperature, 1e-30, 1e30, "be in [1e-30, 1e30]")
    blocks, width, _ = draft_logits.shape
    sampled = torch.rand(blocks, dtype=torch.float64, generator=generator, device="cpu") < sampled_share
    seeds = torch.randint(-(2**63), 2**63 - 1, (blocks,), generator=generator, device="cpu")
    positions = torch.arange(width, device=draft_logits.device).expand(blocks, width)
    sampled, seeds = sampled.to(draft_logits.device), seeds.to(draft_logits.device)
    greedy, drawn = (sample(draft_logits, positions, heat, seeds, OWN) for heat in (0.0, float(temperature)))
    return torch.where(sampled[:, None], drawn, greedy)


def count_accepted(drafts: Tensor, verifier_logits: Tensor) -> Tensor:
    """The draft tokens before the first that differs from the verifier's best token, as `drafter_loss` takes them.

    Args:
        drafts: ``(blocks, k)`` int64, such as `draw_drafts`.
        verifier_logits: ``(blocks, k, vocab)``; row j predicts draft token j: it is the causal row of the token before.

    Returns:
        ``(blocks,)`` int64 in 0 .. k. The loss reads one row more, that of the first rejected token, unless all are
        accepted.

    Raises:
        ValueError: shapes that do not fit each other.
        TypeError: ids that are not int32 or int64, logits that are not floating.

    Source: Nemotron-Labs-Diffusion, section 3.3: the first mismatch is the smallest j at which the draft token differs
    from the verifier's prediction. The verifier stays greedy when drafts are sampled; the paper samples drafts only.

    Example:
        >>> import torch
        >>> from pdkernels.training import count_accepted
        >>> verifier = torch.eye(5)[torch.tensor([[1, 2, 3], [1, 2, 3]])]
        >>> count_accepted(torch.tensor([[1, 0, 3], [1, 2, 3]]), verifier).tolist()
        [1, 3]
    """
    op = "training.count_accepted"
    _check_logits(op, "verifier_logits", verifier_logits)
    check_index(op, "drafts", drafts, tuple(verifier_logits.shape[:2]), verifier_logits.device)
    return (drafts == verifier_logits.argmax(-1)).long().cumprod(-1).sum(-1)


def _check_logits(op: str, name: str, logits: Tensor) -> None:
    if not logits.is_floating_point():
        raise TypeError(message(op, name, "be floating", logits.dtype))
    if logits.dim() != 3 or logits.shape[2] == 0:
        fail(op, name, "have shape (blocks, k, vocab)", tuple(logits.shape))
