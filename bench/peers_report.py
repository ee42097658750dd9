"""The table of peers: for each op, the fastest alternative of each case relative to ours."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench import gpu_report
from bench.gpu_report import table
from bench.rows import Row
from bench.tables import machine

# One line of the table of peers: which rows, and the op's name for readers.
PEERS: list[tuple[str, dict[str, Any]]] = [
    ("`block_sparse_attention`, forward", {"op": "block_sparse_attention", "backward": False}),
    ("`block_sparse_attention`, forward and backward", {"op": "block_sparse_attention", "backward": True}),
    ("`speculative_attention`", {"op": "speculative_attention"}),
    ("`token_statistics`, argmax", {"op": "token_statistics"}),
    ("`token_statistics`, drawing", {"op": "token_statistics sampling"}),
    *((f"`linear`, {model}", {"op": "linear", "model": model}) for model in ("SmolLM2-135M", "8B")),
    ("`linear_token_statistics`", {"op": "linear_token_statistics"}),
    ("`logit_divergence`", {"op": "logit_divergence"}),
    ("`unmask_` by quota", {"op": "unmask_", "rule": "quota"}),
    ("`unmask_` by threshold", {"op": "unmask_", "rule": "threshold"}),
    ("`verify_draft`", {"op": "verify_draft"}),
    ("`kv_commit_`", {"op": "kv_commit_"}),
    *((f"`{name}`", {"op": "transformer_ops", "kernel": name}) for name in ("apply_rope_", "apply_rope_append_")),
    *((f"`{name}`", {"op": "transformer_ops", "kernel": name}) for name in ("add_rms_norm", "silu_and_mul")),
    *(
        (f"`{name}`, forward and backward", {"op": "transformer_ops gradients", "kernel": name})
        for name in ("add_rms_norm", "silu_and_mul")
    ),
    *((f"`{name}`", {"op": "feature_cache", "kernel": name}) for name in ("select_stale_rows_", "add_cached_rows_")),
    ("`recurrence_inject`", {"op": "recurrence", "case": "inject"}),
    ("`recurrence_inject`, peers given its noise", {"op": "recurrence", "case": "inject with noise"}),
    ("`recurrence_exit`", {"op": "recurrence", "case": "exit"}),
    ("`recurrence_advance_`", {"op": "recurrence_advance_"}),
]
# The lines that the README shows, wins and losses.
PEERS_SUMMARY = (
    "`block_sparse_attention`, forward and backward",
    "`speculative_attention`",
    "`token_statistics`, drawing",
    "`linear`, SmolLM2-135M",
    "`verify_draft`",
    "`kv_commit_`",
    "`apply_rope_append_`",
    "`recurrence_inject`, peers given its noise",
)
# Not peers: a copy does less than the op, and a candidate may be made of our own ops.
NO_PEERS = ("pdkernels", "a copy of", "a block of", "a read of")


def peers(rows: list[Row], titles: tuple[str, ...] = tuple(title for title, _ in PEERS)) -> str:
    """For each op the fastest peer of each case relative to ours: which peers, the median, the range."""
    lines, used = [], []
    machines = dict[str, int]()
    for title, wanted in [(title, wanted) for title, wanted in PEERS if title in titles]:
        winners, times, numbers = [], [], set[int]()
        for case in gpu_report.by_case([row for row in rows if wanted.items() <= row.items()]).values():
            own = gpu_report.ours(case)
            others = [
                row for row in case if not row["candidate"].startswith(NO_PEERS) and "pd." not in row["candidate"]
            ]
            if own and others:
                best = min(others, key=lambda row: row["ratio_to_baseline"])
                winners.append(best["candidate"].split(", blocks")[0])
                times.append(gpu_report.times_ours(best, own))
                used.append(own)
                numbers.add(machines.setdefault(own["device"], len(machines) + 1))
        if times:
            span = f"{min(times):.2f}x to {max(times):.2f}x"
            names = "; ".join(dict.fromkeys(sorted(winners, key=winners.count, reverse=True)))
            lines.append([title, names, f"**{median(times):.1f}x**", span, str(len(times)), by_number(numbers)])
    if not lines:
        return "not measured"
    devices = "; ".join(f"({number}) {device}" for device, number in machines.items())
    where = machine([{**used[0], "device": devices}])
    return f"{table(['', 'fastest peer', 'median', 'over all cases', 'cases', 'machine'], lines)}\n\n{where}"


def by_number(numbers: set[int]) -> str:
    """The machines of a line, as in the caption.

    >>> by_number({3, 1})
    '(1) (3)'
    """
    return " ".join(f"({number})" for number in sorted(numbers))
