"""Tables of the cost of methods."""

from __future__ import annotations

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from pdkernels import decoding, evaluation
from pdkernels.generation.result import DecodeResult


def generation_table(results: dict[str, DecodeResult[torch.Tensor, str]], same: dict[str, bool] | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", no_wrap=True)
    for heading in ("forwards", "tokens", "tokens/\nforward", "seconds", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    if same is not None:
        table.add_column("identical\nto greedy")
    for name, result in results.items():
        stats = result.stats
        row = [
            name,
            str(stats.forwards),
            str(stats.tokens),
            f"{stats.tokens_per_forward:.2f}",
            f"{stats.seconds:.3f}",
            f"{stats.tokens_per_second:.0f}",
        ]
        if same is not None:
            differs = "[bold red]no[/]" if decoding.is_lossless(name) else "promises nothing"
            row.append("is greedy" if name == "autoregressive" else "yes" if same[name] else differs)
        table.add_row(*row)
    return table


def evaluation_table(rows: list[evaluation.Row], width: int) -> Table:
    """The rows of one task. Accuracies have their interval if `width` columns leave room next to the longest name."""
    first, intervals = rows[0], width >= 96
    prompts = f"{first.problems} prompts, batch size {first.batch_size}, threads {torch.get_num_threads()}"
    table = Table(
        box=box.SIMPLE_HEAD, padding=0, title=f"{first.task}: {prompts}", title_justify="left", title_style="bold"
    )
    table.add_column("", overflow="fold")  # settings may be long
    judged = any(row.tokens_per_cycle is not None for row in rows) and first.extra_memory is None
    figures = {"tokens/\nforward": ("{:.2f}", "tokens_per_forward"), "tokens/\ncycle": ("{:.2f}", "tokens_per_cycle")}
    figures |= {"\ntokens/s": ("{:.0f}", "tokens_per_second"), "\nspeed": ("{:.2f}x", "speedup")}
    if not judged:
        del figures["tokens/\ncycle"]
    watched = ["peak\nMB"] if first.extra_memory is not None else []
    shares = ["exact\nmatch", *["95 %\ninterval"] * intervals] if first.right is not None else []
    for heading in (*shares, *figures, *watched, "identical\nto greedy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in dict.fromkeys(row.model for row in rows):
        table.add_row(Text(model, "bold"))
        method = None
        for row in (row for row in rows if row.model == model):
            cells = []
            if row.right is not None:
                low, high = evaluation.interval(row.right, row.problems)
                cells = [f"{row.right / row.problems:.0%}", *[f"{100 * low:.0f}-{high:.0%}"] * intervals]
            for form, name in figures.values():
                value = getattr(row, name)
                cells.append("-" if value is None else form.format(value))
            if watched:
                cells.append("-" if row.extra_memory is None else f"{row.extra_memory / 1e6:.2f}")
            label = row.label
            if row.settings and row.method == method:  # the method is in the line above
                label = " " + label.removeprefix(f"{method}, ")
            method = row.method
            table.add_row(f" {label}", *cells, Text(row.verdict, "bold red" if row.broken else ""))
    return table
