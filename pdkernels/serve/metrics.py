"""An engine's counters as Prometheus reads them.

Source: prometheus.io/docs/instrumenting/exposition_formats, "Text-based format".
"""

from __future__ import annotations

from typing import get_args

from pdkernels.engine import EngineMetrics
from pdkernels.engine.generation import FinishReason

_GAUGES = {
    "waiting": "Requests that have not joined a batch.",
    "running": "Requests in a batch, and those whose log-probabilities are computed.",
    "batches": "Allocated batches.",
    "pages": "Pages that all requests share; 0 for a model without pages.",
    "used_pages": "Pages of requests and of earlier texts.",
    "shared_pages": "Pages of several of them.",
    "window_pages": "Pages of layers with windows; 0 if the pages are of all layers.",
    "used_window_pages": "Those of requests and of earlier texts.",
    "cache_bytes": "Bytes of all pages.",
    "kept_tokens": "Tokens of earlier texts whose K and V are kept.",
    "folder_bytes": "Bytes of the folder for earlier texts.",
    "kept_states": "Recurrent states of earlier texts that are kept.",
}
_COUNTERS = {
    "submitted": "Requests.",
    "prompt_tokens": "Tokens of prompts.",
    "reused_tokens": "Tokens of prompts whose K and V were known.",
    "forgotten_tokens": "Tokens of earlier texts whose K and V are no longer kept.",
    "restored_tokens": "Tokens of earlier texts whose K and V came from the folder for them.",
    "written_tokens": "Tokens whose K and V were written there.",
    "preemptions": "Times that a request gave its pages to an older one.",
    "recomputed_tokens": "Tokens whose K and V were computed once more after that.",
    "new_tokens": "Tokens of finished answers.",
    "accepted_tokens": "Those of them that were drafted and accepted.",
    "forwards": "Forwards that finished requests took part in.",
    "steps": "Steps of all batches.",
    "waited": "Seconds that finished requests waited before they joined.",
    "to_first_token": "Seconds from the request to the first token of finished requests.",
    "total": "Seconds from the request to the last token of finished requests.",
}


def prometheus(metrics: EngineMetrics) -> str:
    """The text of `/metrics`.

    >>> print(prometheus(EngineMetrics(waiting=2)).splitlines()[2])
    pdkernels_waiting 2
    """
    lines = []
    for kind, table in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for name, help_text in table.items():
            full = f"pdkernels_{name}" + ("_total" if kind == "counter" else "")
            if name in ("waited", "to_first_token", "total"):
                full = f"pdkernels_request_{name}_seconds_total"
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}", f"{full} {getattr(metrics, name)}"]
    lines += ["# HELP pdkernels_finished_total Finished requests.", "# TYPE pdkernels_finished_total counter"]
    counts = {**dict.fromkeys((*get_args(FinishReason), "error"), 0), **metrics.finished}
    lines += [f'pdkernels_finished_total{{reason="{reason}"}} {count}' for reason, count in sorted(counts.items())]
    return "\n".join(lines) + "\n"
