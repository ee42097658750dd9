"""The lengths of the drafts of a batch that pay, in plain Python: from what its step costs, and from what was accepted so far.

Source: Liu et al., "Optimizing speculative decoding for serving large language models using goodput" (arXiv 2406.14066): the lengths
with the most expected tokens of the batch for the time of its step. Here it is also bounded what they may lose.
"""

from __future__ import annotations

from torch import Tensor

WEIGHT = 1.0  # of imagined drafts, which are all that is known at first


def draft_lengths_(
    lengths: Tensor,
    accepted: Tensor,
    remaining: Tensor,
    acceptance_counts: Tensor,
    budget: Tensor,
    ready: Tensor,
    costs: Tensor,
    warmup_cost: float = 0.0,
    sequence_cost: float = 0.0,
    guess_cost: float = 0.0,
    decay: float = 0.97,
    prior: float = 0.75,
    max_slowdown: float = 0.005,
    padded: bool = False,
) -> None:
    """Shapes as in ``pdkernels.draft_lengths_``."""
    plain, drafting = costs.tolist()
    batch, _, slots = acceptance_counts.shape
    for name, each in (("lengths", lengths), ("accepted", accepted)):
        for b, value in enumerate(each.tolist()):
            most = slots if name == "lengths" else int(lengths[b])
            if not 0 <= value <= most:
                raise ValueError(
                    f"pdkernels.draft_lengths_: {name} must be in [0, {most}], got {value} for sequence {b}."
                )

    def seconds(sequences: int, guesses: int) -> float:
        """The cost of a step of so many sequences with so many guesses, all together."""
        step = drafting[sequences + guesses - 1] + guess_cost * guesses if guesses else plain[sequences - 1]
        return step + sequence_cost * (sequences - 1)

    def token(sequences: int) -> float:
        """What a token more saves: its share of a step where all advance alike, by drafts of one length; else between
        that and what the step takes less without its sequence, if the others go on."""
        share = seconds(sequences, 0) / sequences
        alone = share if sequences == 1 or padded else seconds(sequences, 0) - seconds(sequences - 1, 0)
        return (share + min(share, max(0.0, alone))) / 2

    def extra(sequences: int, guesses: int) -> float:
        """What the guesses of a step cost, in tokens."""
        return (seconds(sequences, guesses) - seconds(sequences, 0)) / token(sequences)

    # What the last drafts have cost, and what is known by them.
    own = [int(length) for length in lengths]
    ran, guesses = [b for b in range(batch) if own[b] > 0], sum(max(0, length - 1) for length in own)
    if padded:
        guesses = len(ran) * max(0, max(own, default=0) - 1)
    pool = 0.0 - (extra(len(ran), guesses) if guesses else 0.0)
    for b, length in enumerate(own):
        correct = int(accepted[b])
        counts, reached = ([decay * value for value in row] for row in acceptance_counts[b].tolist())
        for place in range(length):
            counts[place] += place < correct
            reached[place] += place <= correct
        acceptance_counts[b] = acceptance_counts.new_tensor([counts, reached])
        if length > 0:
            woken = warmup_cost if length == 1 and ready[b] else 0.0
            pool += float(budget[b]) + correct * (1 + max_slowdown) - 1 - woken
    for b in ran:
        budget[b] = pool / len(ran)

    live = [b for b in range(batch) if remaining[b] > 0]
    n, spare = len(live), 0.0
    chances: dict[int, list[float]] = {}  # of each place that all guesses up to it are accepted
    for b in live:
        spare += float(budget[b]) + max_slowdown - (0.0 if ready[b] else warmup_cost)
        (counts, reached), chance, chances[b] = acceptance_counts[b].tolist(), 1.0, []
        for place in range(slots):
            chance *= (counts[place] + (prior if place else 1.0) * WEIGHT) / (reached[place] + WEIGHT)
            chances[b].append(chance)
    rooms = {b: min(slots, int(remaining[b])) - 1 for b in live}
    rows = sorted((-chances[b][place], place, b) for b in live for place in range(1, rooms[b] + 1))
    if padded:  # all have rows up to the longest draft
        widths = range(1, max(rooms.values(), default=0) + 1)
        splits = [([row for row in rows if row[1] <= width], n * width) for width in widths]
    else:
        splits = [(rows[:total], total) for total in range(1, len(rows) + 1)]
    worth, chosen = 1.0, []  # tokens over the cost of the step, in tokens
    for split, total in splits:
        cost, tokens = extra(n, total), n - sum(row[0] for row in split)
        if cost <= spare and tokens / (n + cost) > worth:
            worth, chosen = tokens / (n + cost), split
    for b in range(batch):
        lengths[b] = 1 + sum(row[2] == b for row in chosen) if remaining[b] > 0 else 0
