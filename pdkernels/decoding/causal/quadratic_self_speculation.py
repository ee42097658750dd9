"""Quadratic self-speculation: one forward verifies a draft and drafts the next one for every position where it may be
rejected.

Source: "Nemotron-Labs-Diffusion", appendix C. The plain form is reference/quadratic_self_speculation.py; both take the
same forwards, sample the same tokens and accept the same prefix of every draft.

Draft tokens come first and the groups of masks after them, so the cache keeps only draft tokens and accepting them is a
change of its lengths. The language model head runs twice, over the draft tokens and then over the group that continues:
it never sees the masks of other groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from pdkernels._validation import check, check_type, refuse
from pdkernels.decoding.costs import BlockSize, checked_block_size, step_costs
from pdkernels.decoding.steps import DraftSteps, decoder
from pdkernels.generation.noise import (
    OWN,
    banned_tokens,
    checked_mask_token,
    checked_name,
    checked_size,
    distribution,
    drafted,
    suppress_,
)
from pdkernels.generation.session import Session, has_no_choice
from pdkernels.masks import TilePlan, block_causal, causal, pack, quadratic
from pdkernels.masks.speculation import InGroup
from pdkernels.ops import DraftVerdict, verify_draft

_OP = "decoding.quadratic_self_speculation"

_MAX_ROWS = 2**20
_LONGEST = 16  # of drafts whose size is chosen
_HOPE = 0.9  # share of guesses that are accepted, of a model that was trained for it

Ensemble = Literal["probability", "logit"]


class QuadraticSteps(DraftSteps):
    """One forward verifies a draft and drafts the next one for every place where it may be rejected.

    Args:
        block_size: tokens per draft, including the known first one; 1 is autoregressive decoding. "auto" takes the size
            with the most expected tokens for the measured time of a sequence's step, whose rows grow with its square.
        masks_per_group: number of masks in each group, at least ``block_size - label_shift``, which is the default.
        label_shift: 0 if a mask's row predicts its own position, 1 if it predicts the next.
        in_group: "bidirectional" or "causal" attention among the masks of a group.
        ensemble_weight: weight of the autoregressive rows in the verifier, 0 .. 1; the first masks of the groups have
            the rest.
        ensemble: what is averaged, "probability" or "logit".
        temperature: sampling temperature of drafter and verifier; 0 is greedy. The filters too are those of both.
    """

    resumes = True
    continues = False  # the rows of the first masks see the whole prompt

    def __init__(
        self,
        session: Session,
        *,
        block_size: BlockSize = 16,
        masks_per_group: int | None = None,
        label_shift: int = 0,
        in_group: InGroup = "bidirectional",
        ensemble_weight: float = 1.0,
        ensemble: Ensemble = "probability",
        mask_token: int | None = None,
        allow_mask_token: bool = False,
        page_size: int | None = None,
    ) -> None:
        size, chosen = checked_block_size(_OP, block_size, _LONGEST)
        fault = "block_size='auto' chooses the masks of a group too"
        refuse(chosen and masks_per_group is not None, _OP, fault, "Leave masks_per_group out, or give a number.")
        checked_name(_OP, "in_group", in_group, get_args(InGroup))
        block_size = session.block(_paying_size(session.model, size) if chosen else size)
        masks = _checked_masks(block_size, masks_per_group, label_shift, in_group)
        check_type(
            type(ensemble_weight) in (int, float), _OP, "ensemble_weight", "be a number", type(ensemble_weight).__name__
        )
        check(0 <= ensemble_weight <= 1, _OP, "ensemble_weight", "be in [0, 1]", ensemble_weight)
        check(
            label_shift == 0 or ensemble_weight == 1,
            _OP,
            "ensemble_weight",
            "be 1 with label_shift=1",
            ensemble_weight,
            "No mask is about the verifier's position.",
        )
        checked_name(_OP, "ensemble", ensemble, get_args(Ensemble))
        self.sampler = session.sampler
        self.masks, self.in_group = masks, in_group
        self.ensemble_weight, self.ensemble = ensemble_weight, ensemble
        # Mixtures are sampled in float64 by the reference.
        self.needs_host = "an ensemble_weight below 1" if ensemble_weight < 1 else ""
        self.mask_token = checked_mask_token(_OP, session.model, mask_token)
        self.banned = banned_tokens(_OP, session.model, allow_mask_token, self.mask_token)
        # The last requested token needs no forward, so no draft is longer than limit - 1.
        slots = max(1, min(block_size, session.max_new_tokens - 1))
        if slots == 1 and ensemble_weight == 1:
            self.masks = masks = 0  # nothing is drafted
        rows_per_step = max(session.longest + masks, slots * (1 + masks))
        check(rows_per_step <= _MAX_ROWS, _OP, "block_size", f"keep a step within {_MAX_ROWS} rows", rows_per_step)

        self.allocate(session, slots, page_size)
        self.guessing = 1 - label_shift + self.slot[:-1]  # masks of a group whose rows predict the next draft
        self.whole = _layout(slots, masks, in_group, self.cache.device)  # kept here for a graph
        self.forward = torch.zeros_like(self.cache.lengths)  # number of the last forward

    @classmethod
    def draws_by_row(cls, options: Mapping[str, Any]) -> bool:
        return True

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.forward

    def start(self, session: Session) -> None:
        """The prompt and one group after its last token, whose masks are already at their positions."""
        cache, masks, device = self.cache, self.masks, self.cache.device
        tokens, prompt_lengths = session.packed_prompts(session.longest + masks, device)
        positions = prompt_lengths[:, None] + torch.arange(masks, device=device)
        tokens.scatter_(1, positions, self.mask_token)
        rows = torch.cat([(prompt_lengths - 1)[:, None], prompt_lengths[:, None] + self.guessing], 1)
        adapted: torch.Tensor | bool = False
        if self.model.has_adapter:
            adapted = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, positions, True)
        plan = _prompt_plan([len(prompt) for prompt in session.prompts], masks, self.in_group, device)
        cache.lengths.zero_()
        logits = self.model(tokens, cache=cache, counts=prompt_lengths, mask=plan, rows=rows, adapted=adapted)
        first = self.sampler.sample(logits[:, :1], prompt_lengths[:, None], self.seeds, OWN, self.banned)
        positions = prompt_lengths[:, None] + 1 + self.slot[:-1]
        guesses = self.sampler.sample(logits[:, 1:], positions, self.seeds, 1, (self.mask_token,))
        cache.commit_(prompt_lengths)
        self.begin(session, first, logits[:, :1])
        self.entry.draft[:, :1] = first.clamp(min=0)
        self.entry.draft[:, 1:] = drafted(guesses, self.mask_token)
        self.forward.fill_(1)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        width = width or self.slots
        verdict, hidden = self.verify(width)
        self.entry.draft[:, 0] = verdict.next_token.clamp(min=0)  # -1 in a finished sequence is not an id
        if width > 1:  # else this was the last token of all
            self.draft(verdict, hidden, width)

    def verify(self, width: int) -> tuple[DraftVerdict, torch.Tensor]:
        """Verifies and commits the first `width` tokens of each draft. Returns the verdict, and the hidden rows of
        draft and masks."""
        entry, lengths = self.entry, self.cache.lengths
        masks = 0 if width == 1 and self.ensemble_weight == 1 else self.masks
        # A shorter draft of another sequence is followed by rows that it does not see.
        plan, offsets = self.whole if width == self.slots else _layout(width, masks, self.in_group, self.cache.device)
        tokens = entry.draft.new_full((len(entry.draft), len(offsets)), self.mask_token)
        tokens[:, :width] = entry.draft[:, :width]
        adapted: torch.Tensor | bool = False
        if self.model.has_adapter:
            adapted = torch.arange(len(offsets), device=tokens.device) >= width
        hidden = self.model.hidden(
            tokens, cache=self.cache, counts=entry.pending, mask=plan, positions=offsets, adapted=adapted
        )
        self.forward += 1
        logits, unmixed = self.model.logits(hidden[:, :width]), self.banned
        if self.ensemble_weight < 1:
            diffusion = suppress_(self.model.logits(hidden[:, width::masks]), self.mask_token)
            for token in self.banned:
                suppress_(logits, token)
            unmixed = ()  # a mixture excludes such tokens too
            logits = _mixed(logits, diffusion, self.ensemble_weight, self.ensemble)
        positions = lengths[:, None] + 1 + self.slot[:width]
        predictions = self.sampler.sample(logits, positions, self.seeds, OWN, unmixed)
        verdict = verify_draft(entry.draft[:, :width], predictions, draft_lengths=entry.pending, end_tokens=self.ends)
        self.cache.commit_(verdict.accepted)
        self.judge(verdict, has_no_choice(logits, predictions))
        entry.predictions[:, :width] = predictions
        return verdict, hidden

    def draft(self, verdict: DraftVerdict, hidden: torch.Tensor, width: int) -> None:
        """Guesses from the group of masks after the last accepted token."""
        group = (verdict.accepted - 1).clamp_(min=0)
        rows = width + group[:, None] * self.masks + self.guessing
        hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        positions = self.cache.lengths[:, None] + 1 + self.slot[:-1]
        numbers, masked = self.forward[:, None], (self.mask_token,)
        guesses = self.sampler.draw(self.model, hidden, positions, self.seeds, numbers, masked)
        self.entry.draft[:, 1:] = drafted(guesses, self.mask_token)


decode = decoder(QuadraticSteps)


@lru_cache(maxsize=64)
def _layout(width: int, masks: int, in_group: InGroup, device: torch.device) -> tuple[TilePlan, torch.Tensor]:
    """Plan and positions of a step; they do not depend on the prefix, so they serve all steps of their width."""
    mask = quadratic(width, masks, in_group)
    return mask.plan(64, 64, device), mask.positions.to(device)


def _prompt_plan(lengths: list[int], masks: int, in_group: InGroup, device: torch.device) -> TilePlan | None:
    """Each prompt causal, a group of masks after it that sees it all, then padding that none of them sees."""
    if masks == 0:
        return None
    width = max(lengths) + masks
    if in_group == "causal":
        return causal(width).plan(64, 64, device)
    layouts = {n: pack([block_causal(n + masks, masks, n), causal(width - n - masks)]) for n in set(lengths)}
    if len(layouts) == 1:
        return layouts[width - masks].plan(64, 64, device)
    # Stacked on the host: plans on the device would be read back part by part.
    plans = {n: layout.plan(64, 64) for n, layout in layouts.items()}
    return TilePlan.stack([plans[n] for n in lengths]).to(device)


def _mixed(causal: torch.Tensor, diffusion: torch.Tensor, weight: float, form: Ensemble) -> torch.Tensor:
    """Logits of the verifier from those of the draft tokens and of the first masks after them, fp64: the sum of two
    distributions over the whole vocabulary, which no op computes."""
    if weight == 0:
        return diffusion.double()  # 0 times the -inf of an impossible token is NaN
    if form == "logit":
        return weight * causal.double() + (1 - weight) * diffusion.double()
    return (weight * distribution(causal, 1.0) + (1 - weight) * distribution(diffusion, 1.0)).log()


def _paying_size(model: Any, longest: int) -> int:
    """The size of drafts with the most expected tokens for the time of a step, in which a draft of n tokens takes n
    rows and n masks after each of them. It must not depend on the batch, which sequences join."""
    costs = step_costs(model, longest * (1 + longest), 1)
    assert costs is not None

    def tokens_per_second(size: int) -> float:
        rows = 1 if size == 1 else size * (1 + size)
        expected = sum(_HOPE**place for place in range(size))
        return expected / costs.plain[rows - 1]

    return max(range(1, longest + 1), key=tokens_per_second)


def _checked_masks(block_size: int, masks_per_group: int | None, label_shift: int, in_group: InGroup) -> int:
    """Masks of a group."""
    checked_size(_OP, "block_size", block_size)
    check(type(label_shift) is int and label_shift in (0, 1), _OP, "label_shift", "be 0 or 1", label_shift)
    checked_name(_OP, "in_group", in_group, get_args(InGroup))
    minimum = block_size - label_shift
    if masks_per_group is None:
        return minimum
    check_type(type(masks_per_group) is int, _OP, "masks_per_group", "be an int", type(masks_per_group).__name__)
    check(
        masks_per_group >= minimum,
        _OP,
        "masks_per_group",
        f"be at least {minimum}",
        masks_per_group,
        "Every draft token after the first comes from a mask.",
    )
    return masks_per_group
