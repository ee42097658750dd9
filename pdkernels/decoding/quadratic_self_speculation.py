"""Quadratic self-speculation: one forward verifies a draft and drafts the next one for every position where it may be rejected.

Source: "Nemotron-Labs-Diffusion", appendix C. The plain form is reference/quadratic_self_speculation.py; both take the
same forwards, draw the same tokens and accept the same part of every draft.

Draft tokens come first and the groups of masks after them, so the cache keeps only draft tokens and accepting them is a
change of its lengths. The language model head runs twice, over the draft tokens and then over the group that continues: it
never sees the masks of other groups.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding._sampling import (
    OWN,
    Seed,
    banned_tokens,
    checked_mask_token,
    checked_sampling,
    checked_size,
    distribution,
    draw,
    noise,
    statistics,
    without_,
)
from pdkernels.decoding._session import Session, is_end, judged_by_nan, marked
from pdkernels.masks import TilePlan, block_causal, causal, pack, quadratic
from pdkernels.masks.speculation import InGroup
from pdkernels.ops import verify_draft

_OP = "decoding.quadratic_self_speculation"

_MOST_ROWS = 2**20

Ensemble = Literal["probability", "logit"]


def decode(
    session: Session,
    *,
    block_size: int = 16,
    masks_per_group: int | None = None,
    label_shift: int = 0,
    in_group: InGroup = "bidirectional",
    ensemble_weight: float = 1.0,
    ensemble: Ensemble = "probability",
    temperature: float = 0.0,
    mask_token: int | None = None,
    allow_mask_token: bool = False,
    seed: Seed = 0,
    page_size: int | None = None,
) -> None:
    """Fills `session` with the verifier's tokens, several per forward where drafts are accepted.

    Args:
        block_size: tokens of a draft, the known first one included; 1 is autoregressive decoding.
        masks_per_group: at least ``block_size - label_shift``, which is the default.
        label_shift: 0 if a mask's row predicts its own position, 1 if it predicts the next.
        in_group: "bidirectional" or "causal" attention among the masks of a group.
        ensemble_weight: weight of the autoregressive rows in the verifier, 0 .. 1; the rest is that of the first masks.
        ensemble: "probability" or "logit", what is averaged.
        temperature: of guesses and verifier; 0 is greedy.
    """
    block_size = session.block(checked_size(_OP, "block_size", block_size))
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
    check(ensemble in get_args(Ensemble), _OP, "ensemble", "be 'probability' or 'logit'", repr(ensemble))
    seeds = checked_sampling(_OP, temperature, seed, session.batch)
    model = session.model
    mask_token = checked_mask_token(_OP, model, mask_token)
    banned = banned_tokens(_OP, model, allow_mask_token, mask_token)
    limit = session.max_new_tokens
    if limit == 0:
        return
    # The last requested token needs no forward, so no draft is longer than limit - 1.
    slots = max(1, min(block_size, limit - 1))
    rows_per_step = max(session.longest + masks, slots * (1 + masks))
    check(rows_per_step <= _MOST_ROWS, _OP, "block_size", f"keep a step within {_MOST_ROWS} rows", rows_per_step)

    cache = session.new_cache(page_size)
    lengths = cache.lengths  # grows in place with every commit
    device = lengths.device
    seeds = seeds.to(device)
    ends = session.ends_on(device)
    slot = torch.arange(slots, device=device)
    guessing = 1 - label_shift + slot[:-1]  # masks of a group whose rows predict the next draft

    # The prompt and one group after its last token, whose masks are already at their positions.
    width = session.longest + masks
    tokens, prompt_lengths = session.packed_prompts(width, device)
    positions = prompt_lengths[:, None] + torch.arange(masks, device=device)
    tokens.scatter_(1, positions, mask_token)
    rows = torch.cat([(prompt_lengths - 1)[:, None], prompt_lengths[:, None] + guessing], 1)
    adapted = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, positions, True) if model.has_adapter else False
    plan = _prompt_plan([len(prompt) for prompt in session.prompts], masks, in_group, device)
    logits = model(tokens, cache=cache, counts=prompt_lengths, mask=plan, rows=rows, adapted=adapted)
    session.forwards += 1
    first = draw(logits[:, :1], prompt_lengths[:, None], temperature, seeds, OWN, banned)
    positions = prompt_lengths[:, None] + 1 + slot[:-1]
    draft = torch.cat([first, draw(logits[:, 1:], positions, temperature, seeds, 1, suppress=(mask_token,))], 1)
    cache.commit_(prompt_lengths)

    remaining = torch.full_like(prompt_lengths, limit - 1)  # tokens left; 0 once a sequence is done
    if ends is not None:
        remaining.masked_fill_(is_end(first[:, 0], ends), 0)
    draft_lengths = remaining.clamp(max=slots)

    host_draft = marked(logits[:, :1], draft).tolist()
    host_lengths = [0 if row[0] in session.end_tokens else min(slots, limit - 1) for row in host_draft]
    for sequence, row in enumerate(host_draft):
        session.record_first(sequence, row[0])

    while (width := max(host_lengths)) > 0:
        # A shorter draft of another sequence is followed by rows that it does not see.
        plan, offsets = _layout(width, masks, in_group, device)
        tokens = torch.full((session.batch, len(offsets)), mask_token, device=device)
        tokens[:, :width] = draft[:, :width]
        hidden = model.hidden(
            tokens,
            cache=cache,
            counts=draft_lengths,
            mask=plan,
            positions=offsets,
            adapted=torch.arange(len(offsets), device=device) >= width if model.has_adapter else False,
        )
        session.forwards += 1
        judge, unmixed = model.logits(hidden[:, :width]), banned
        if ensemble_weight < 1:
            diffusion = without_(model.logits(hidden[:, width::masks]), mask_token)
            for token in banned:
                without_(judge, token)
            unmixed = ()  # a mixture excludes such tokens too
            judge = _mixed(judge, diffusion, ensemble_weight, ensemble)
        predictions = draw(judge, lengths[:, None] + 1 + slot[:width], temperature, seeds, OWN, unmixed)
        verdict = verify_draft(draft[:, :width], predictions, draft_lengths=draft_lengths, end_tokens=ends)
        cache.commit_(verdict.accepted)

        group = (verdict.accepted - 1).clamp_(min=0)
        rows = width + group[:, None] * masks + guessing
        hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        draws = noise(temperature, seeds, session.forwards, lengths[:, None] + 1 + slot[:-1])
        guesses = statistics(model, hidden, suppress=mask_token, top_k=1, **draws).ids
        # -1 in a finished sequence is not an id.
        draft = torch.cat([verdict.next_token.clamp(min=0)[:, None], guesses], 1)
        remaining = (remaining - verdict.accepted).masked_fill_(verdict.ended, 0)
        draft_lengths = remaining.clamp(max=slots)

        # The one read of the device in a step.
        accepted = verdict.accepted.masked_fill(judged_by_nan(judge, predictions, verdict.accepted), -1)
        columns = [accepted[:, None], draft_lengths[:, None], draft]
        if session.trace is not None:
            columns.append(predictions)
        poll = torch.cat(columns, 1).tolist()
        for sequence, row in enumerate(poll):
            if (length := host_lengths[sequence]) > 0:
                session.log_step(
                    sequence,
                    host_draft[sequence][:length],
                    row[2 + slots :][:length] if session.trace is not None else None,
                    accepted=row[0],
                    next_token=row[2],
                )
        host_draft = [row[2 : 2 + slots] for row in poll]
        host_lengths = [row[1] for row in poll]


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


def _mixed(own: torch.Tensor, diffusion: torch.Tensor, weight: float, form: Ensemble) -> torch.Tensor:
    """Logits of the verifier from those of the draft tokens and of the first masks after them, fp64: the sum of two distributions
    over the whole vocabulary, which no op computes."""
    if weight == 0:
        return diffusion.double()  # 0 times the -inf of an impossible token is NaN
    if form == "logit":
        return weight * own.double() + (1 - weight) * diffusion.double()
    return (weight * distribution(own, 1.0) + (1 - weight) * distribution(diffusion, 1.0)).log()


def _checked_masks(block_size: int, masks_per_group: int | None, label_shift: int, in_group: InGroup) -> int:
    """Masks of a group."""
    checked_size(_OP, "block_size", block_size)
    check(type(label_shift) is int and label_shift in (0, 1), _OP, "label_shift", "be 0 or 1", label_shift)
    check(in_group in get_args(InGroup), _OP, "in_group", "be 'bidirectional' or 'causal'", repr(in_group))
    least = block_size - label_shift
    if masks_per_group is None:
        return least
    check_type(type(masks_per_group) is int, _OP, "masks_per_group", "be an int", type(masks_per_group).__name__)
    check(
        masks_per_group >= least,
        _OP,
        "masks_per_group",
        f"be at least {least}",
        masks_per_group,
        "Every draft token after the first comes from a mask.",
    )
    return masks_per_group
