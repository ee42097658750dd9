"""Tables and plots from benchmark JSON: `python -m bench.report [folder] [--write]`.

The README and the docs hold tables between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; ``--write`` updates them and the
plots in `docs/images`. Without it the tables are printed. No number is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import (
    backends,
    bench_adapters,
    bench_recurrent_state,
    cache_dtypes,
    cpu_engines_report,
    decoded_schemas,
    diffusion_step,
    drafters_report,
    engine_drafts,
    engine_load,
    gpu_report,
    grammars_report,
    load_report,
    long_drafts,
    long_texts,
    maskbench,
    plots,
    prefix_folder,
    same_tokens,
    schema_fuzz,
    server_soak,
    speculation,
    verified_tokens,
    windows,
)
from bench.gpu_report import table
from bench.peers_report import PEERS_SUMMARY, peers
from bench.planned_report import evaluation_planned, planned_round
from bench.rows import Row, best_settings, by_candidate, family, load, rows_of
from bench.sweep_report import SWEEPS, evaluation_sweep
from bench.tables import lines_relative_to_ours, machine, microseconds, ratio, relative_to_ours, share
from bench.transformers_report import anchored, transformers_speed, transformers_tests
from scripts import versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/cpu"
GPU_RESULTS = ROOT / "bench/results"
CPU_ENGINES = ROOT / "bench/results/cpu_engines.json"
CPU_ENGINES_AVX2 = ROOT / "bench/results/cpu_engines_avx2.json"
CPU_ENGINES_GEMMA3 = ROOT / "bench/results/cpu_engines_gemma3.json"
DRAFTERS = ROOT / "bench/results/drafters.json"
DRAFTERS_ANYTHING = ROOT / "bench/results/drafters_anything.json"
DRAFTERS_PEERS = ROOT / "bench/results/drafters_peers.json"
ENGINE_DRAFTS_AVX2 = ROOT / "bench/results/engine_drafts_avx2.json"
ENGINE_LOAD = ROOT / "bench/results/engine_load.json"
EVALUATION_HYBRID = ROOT / "bench/results/evaluation_hybrid.json"
GRAMMARS = ROOT / "bench/results/grammars.json"
TRANSFORMERS_TESTS = ROOT / "bench/results/transformers_tests.json"


def of_file(path: Path, markdown: Callable[[Any], str]) -> str:
    return markdown(json.loads(path.read_text())) if path.exists() else "not measured"


def kv_commit(rows: list[Row], batch: int = 1) -> str:
    rows = [row for row in rows if row["op"] == "kv_commit_" and row["batch"] == batch]
    cases = [(f"{a} of {d}", {"accepted": a, "drafted": d}) for a, d in [(5, 81), (16, 256), (32, 1024)]]
    header = ["µs, median (ratio to memcpy)", *(title for title, _ in cases)]
    lines = []
    for name, found in by_candidate(rows, cases):
        cells = [
            f"{microseconds(row['median_us'])} ({ratio(row['ratio_to_baseline'])})" if row else "-" for row in found
        ]
        lines.append([f"**{name}**" if name.startswith("pdkernels") else name, *cells])
    first = [next(row for row in rows if case.items() <= row.items()) for _, case in cases]
    lines.append(["memcpy of the same bytes, one thread", *(microseconds(row["baseline_median_us"]) for row in first)])
    moved = [row["bytes_moved"] / 1e6 for row in first]
    lines.append(["bytes to move", *(f"{mb:.2f} MB" for mb in moved)])
    return table(header, lines)


def verify_draft(rows: list[Row]) -> str:
    rows = [row for row in rows if row["op"] == "verify_draft"]
    cases = [(f"batch {b}, width {w}", {"batch": b, "width": w}) for b, w in [(1, 16), (1, 64), (32, 64)]]
    lines = [
        [name, *(microseconds(row["median_us"]) if row else "-" for row in found)]
        for name, found in by_candidate(rows, cases)
    ]
    return table(["µs, median", *(title for title, _ in cases)], lines)


def decoding(rows: list[Row]) -> str:
    lines = []
    for row in (row for row in rows if row["op"] == "decoding"):
        speed = row["tokens"] / row["median_us"] * 1e6
        lines.append(
            [
                row["candidate"],
                f"{row['tokens_per_forward']:.2f}",
                f"{speed:,.0f}",
                f"{1 / row['ratio_to_baseline']:.2f}x",
            ]
        )
    return table(
        ["tiny-code, eight prompts, 64 tokens each", "tokens per forward", "tokens/s", "speed vs greedy"], lines
    )


def evaluation(rows: list[Row], task: str) -> str:
    """From `python -m pdkernels eval --json`."""
    rows = [row for row in rows if row["op"] == "evaluation" and row["task"] == task and family(row) == "causal"]
    if not rows:
        return "not measured"
    forms = {
        "tokens_per_forward": "{:.2f}",
        "tokens_per_cycle": "{:.2f}",
        "accepted_per_cycle": "{:.2f}",
        "tokens_per_second": "{:,.0f}",
        "speedup": "{:.2f}x",
    }
    lines = []
    for row in rows:
        cells = ["-" if row[name] is None else form.format(row[name]) for name, form in forms.items()]
        right = [] if row["right"] is None else [share(row["right"], row["problems"])]
        lines.append([f"{row['model']}: {row['candidate']}", *right, *cells, row["verdict"]])
    header = [
        f"{rows[0]['problems']} prompts, batch size {rows[0]['batch_size']}",
        *(["exact match (95 % interval)"] if rows[0]["right"] is not None else []),
    ]
    header += [
        "tokens per forward",
        "tokens per cycle",
        "accepted per cycle",
        "tokens/s",
        "speed",
        "identical to greedy",
    ]
    return f"{table(header, lines)}\n\n{machine(rows)}"


def evaluation_of(rows: list[Row], name: str, step: str) -> str:
    """From `python -m pdkernels eval --family NAME --json`, whose forwards are called `step`."""
    rows = [row for row in rows if family(row) == name]
    if not rows:
        return "not measured"
    watched = rows[0]["extra_memory"] is not None
    lines = []
    for row in rows:
        cells = [
            share(row["right"], row["problems"]),
            f"{row['tokens_per_forward']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
        ]
        memory = ["-" if row["extra_memory"] is None else f"{row['extra_memory'] / 1e6:.2f}"] if watched else []
        lines.append(
            [
                row["candidate"],
                *cells,
                f"{row['speedup']:.2f}x",
                *memory,
                row["verdict"] if watched or not row["baseline"] else "-",
            ]
        )
    header = [
        f"{rows[0]['problems']} {rows[0]['task']}, batch size {rows[0]['batch_size']}",
        "exact match (95 % interval)",
        f"tokens per {step}",
        "tokens/s",
        "speed",
        *(["peak MB"] if watched else []),
        f"identical to {'greedy' if watched else 'the first'}",
    ]
    return f"{table(header, lines)}\n\n{machine(rows)}"


def smollm2(rows: list[Row]) -> str:
    """From bench_smollm2.py."""
    rows = [row for row in rows if row["op"] == "smollm2"]
    if not rows:
        return "not measured"
    lines, dtypes = [], list(dict.fromkeys(row["dtype"] for row in rows))
    for name, found in by_candidate(rows, [(dtype, {"dtype": dtype}) for dtype in dtypes]):
        line = [name]
        for row in found:
            line += ["-"] * 4 if row is None else [
                f"{row['tokens'] / row['forwards']:.2f}",
                f"{row['tokens'] / row['median_us'] * 1e6:.1f}",
                f"{1 / row['ratio_to_baseline']:.2f}x",
                f"{row['same']} of {row['prompts']}",
            ]  # fmt: skip
        lines.append(line)
    columns = ("tokens per forward", "tokens/s", "speed", "answers that are our greedy ones")
    header = ["prompt included", *(f"{dtype}, {column}" for dtype in dtypes for column in columns)]
    return f"{table(header, lines)}\n\n{machine(rows)}"


def evaluation_picture(rows: list[Row]) -> str:
    measured = any(family(row) == "causal" for row in rows)
    return "![Tokens per forward and speed by method](images/bench_evaluation.png)" if measured else "not measured"


def planner(rows: list[Row]) -> str:
    rows = [row for row in rows if row["op"] == "planner"]
    cases = [(f"{length:,} tokens", {"length": length}) for length in (1152, 4608, 16384, 1048576)]
    lines = []
    for name, found in by_candidate(rows, cases):
        cells = [microseconds(row["median_us"]) if row else "-" for row in found]
        first = max(row["first_call_ms"] for row in found if row)
        lines.append([f"**{name}**" if name.startswith("pdkernels") else name, *cells, microseconds(first)])
    header = ["µs, median", *(title for title, _ in cases), "first call, ms, the longest"]
    return f"{table(header, lines)}\n\n{machine(rows)}"


def block_sparse_attention(rows: list[Row], **wanted: Any) -> str:
    rows = best_settings(
        [row for row in rows if row["op"] == "block_sparse_attention" and wanted.items() <= row.items()]
    )
    if not rows:
        return "not measured"
    cases = [(name, {"case": name}) for name in dict.fromkeys(row["case"] for row in rows)]
    found = dict(by_candidate(rows, cases))
    ours = found["pdkernels"]
    lines = []
    for name, times in found.items():
        cells = []
        for row, own in zip(times, ours):
            setting = f", {row['setting']}" if row and row["setting"] else ""
            cells.append(
                f"{row['median_us'] / 1e3:.2f} ({relative_to_ours(row, own)}{setting})" if row and own else "-"
            )
        lines.append([f"**{name}**" if name == "pdkernels" else name, *cells])
    if wanted.get("backward") and "cuda" not in rows[0]["group"]:
        lines.append(["FlexAttention", *("no backward on the CPU" for _ in cases)])
    lines.append(["useful TFLOP/s of pdkernels", *(f"{row['useful_tflops']:.3g}" if row else "-" for row in ours)])
    lines.append(["visible pairs", *(f"{row['density']:.1%}" if row else "-" for row in ours)])
    lines.append(
        [f"tile efficiency, {rows[0]['tile']}", *(f"{row['tile_efficiency']:.1%}" if row else "-" for row in ours)]
    )
    return f"{table(['ms, median (times pdkernels)', *(title for title, _ in cases)], lines)}\n\n{machine(rows)}"


def speculative_attention(rows: list[Row]) -> str:
    growing = [row for row in rows if row["op"] == "speculative_attention growing"]
    rows = [row for row in rows if row["op"] == "speculative_attention"]
    if not rows:
        return "not measured"
    cases = [(f"{d}, prefix {p:,}", {"dtype": d, "prefix": p}) for d in ("fp32", "bf16") for p in (2048, 8192)]
    found = dict(by_candidate(rows, cases))
    lines = lines_relative_to_ours(found, lambda us: f"{us / 1e3:.2f}")
    lines.append(
        ["useful TFLOP/s of pdkernels", *(f"{row['useful_tflops']:.3g}" if row else "-" for row in found["pdkernels"])]
    )
    times = table(["ms, median (times pdkernels)", *(title for title, _ in cases)], lines)
    steps = [[row["candidate"], f"{row['median_us'] / 1e3:,.1f}", f"{row['max_us'] / 1e3:,.0f}"] for row in growing]
    return f"{times}\n\n{table(['bf16, the prefix growing from 512', 'ms a step, all it needs', 'the longest of five'], steps)}\n\n{machine(rows)}"


def by_rows(rows: list[Row], count: str = "rows", **wanted: Any) -> str:
    """All numbers of rows in bf16, then in fp32; below the times the bandwidth of pdkernels, where bytes were counted."""
    rows = [row for row in rows if wanted.items() <= row.items()]
    if not rows:
        return "not measured"
    counts = sorted({row[count] for row in rows})
    cases = [(f"{dtype}, {n}", {"dtype": dtype, count: n}) for dtype in ("bf16", "fp32") for n in counts]
    lines, ours = [], by_candidate(rows, cases)[0][1]
    for name, found in by_candidate(rows, cases):
        cells = [
            f"{microseconds(row['median_us'])} ({relative_to_ours(row, own)})" if row and own else "-"
            for row, own in zip(found, ours)
        ]
        lines.append([f"**{name}**" if name == "pdkernels" else name, *cells])
    if any(row and "gb_per_s" in row and "flops" not in row for row in ours):
        lines.append(
            ["GB/s of pdkernels, read and written", *(f"{row['gb_per_s']:.1f}" if row else "-" for row in ours)]
        )
    return f"{table(['µs, median (times pdkernels); rows', *(title for title, _ in cases)], lines)}\n\n{machine(rows)}"


def recurrent_step(rows: list[Row]) -> str:
    rows = [row for row in rows if row["op"] == "recurrent_step"]
    if not rows:
        return "not measured"
    cases = [(f"{n} rows", {"rows": n}) for n in sorted({row["rows"] for row in rows})]
    lines = [
        [name, *(f"{row['median_us'] / 1e3:.1f} ({row['between_products']:.1%})" if row else "-" for row in found)]
        for name, found in by_candidate(rows, cases)
    ]
    return (
        f"{table(['ms a step (share between the products)', *(title for title, _ in cases)], lines)}\n\n{machine(rows)}"
    )


def recurrence_advance(rows: list[Row]) -> str:
    rows = [row for row in rows if row["op"] == "recurrence_advance_"]
    if not rows:
        return "not measured"
    cases = [(f"batch {b}, {w} rows", {"batch": b, "width": w}) for b, w in [(1, 16), (1, 128), (8, 128)]]
    lines = [
        [name, *(microseconds(row["median_us"]) if row else "-" for row in found)]
        for name, found in by_candidate(rows, cases)
    ]
    return f"{table(['µs, median', *(title for title, _ in cases)], lines)}\n\n{machine(rows)}"


def unmask(rows: list[Row], rule: str) -> str:
    rows = [row for row in rows if row["op"] == "unmask_" and row["rule"] == rule]
    if not rows:
        return "not measured"
    cases = [
        (f"{b} x {w}", {"batch": b, "width": w}) for b, w in sorted({(row["batch"], row["width"]) for row in rows})
    ]
    lines = [
        [name, *(microseconds(row["median_us"]) if row else "-" for row in found)]
        for name, found in by_candidate(rows, cases)
    ]
    return f"{table(['µs, median; batch x candidates', *(title for title, _ in cases)], lines)}\n\n{machine(rows)}"


def by_sizes(rows: list[Row], title: str, op: str, sizes: dict[str, str]) -> str:
    """A column for all sizes that were measured, named and formatted by `sizes`. Empty without rows."""
    rows = [row for row in rows if row["op"] == op]
    if not rows:
        return ""
    cases = [
        (", ".join(form.format(n) for form, n in zip(sizes.values(), case)), dict(zip(sizes, case)))
        for case in sorted({tuple(row[size] for size in sizes) for row in rows})
    ]
    found = dict(by_candidate(rows, cases))
    lines = lines_relative_to_ours(found, microseconds)
    return f"{table([title, *(case for case, _ in cases)], lines)}\n\n{machine(rows)}"


TABLES = {
    "peers": peers,
    "peers summary": lambda rows: peers(rows, PEERS_SUMMARY),
    "kv_commit": lambda rows: kv_commit(rows, 1),
    "kv_commit batch 4": lambda rows: kv_commit(rows, 4),
    "verify_draft": verify_draft,
    "decoding": decoding,
    "smollm2": smollm2,
    "evaluation sums": lambda rows: evaluation(rows, "sums"),
    "evaluation hybrid": lambda rows: evaluation(rows_of(EVALUATION_HYBRID), "sums"),
    "evaluation source": lambda rows: evaluation(rows, "source"),
    "evaluation picture": evaluation_picture,
    "evaluation recurrent": lambda rows: evaluation_of(rows, "recurrent", "step"),
    **{f"evaluation {name}": lambda rows, path=path: evaluation_sweep(path) for name, path in SWEEPS.items()},
    "evaluation masked": lambda rows: evaluation_of(rows, "masked", "forward"),
    "evaluation planned": evaluation_planned,
    "planner": planner,
    "anchored": anchored,
    "transformers": transformers_speed,
    "block_sparse_attention": lambda rows: block_sparse_attention(rows, backward=False),
    "block_sparse_attention backward": lambda rows: block_sparse_attention(rows, backward=True),
    "block_sparse_attention short": lambda rows: block_sparse_attention(rows, length=1152, head_dim=128),
    "speculative_attention": speculative_attention,
    "planned round": planned_round,
    "speculative_attention_append_": lambda rows: by_sizes(
        rows,
        "bf16, a prefix of 512, µs, median (times pdkernels)",
        "speculative_attention_append_",
        {"rows": "{} rows stored"},
    ),
    "log_step_": lambda rows: by_sizes(
        rows, "µs, median (times pdkernels)", "log_step_", {"batch": "batch {}", "columns": "{} columns"}
    ),
    "recurrence_inject": lambda rows: by_rows(rows, "width", op="recurrence", case="inject"),
    "recurrence_inject with noise": lambda rows: by_rows(rows, "width", op="recurrence", case="inject with noise"),
    "recurrence_exit": lambda rows: by_rows(rows, "width", op="recurrence", case="exit"),
    "recurrent step": recurrent_step,
    "add_rms_norm": lambda rows: by_rows(rows, op="transformer_ops", kernel="add_rms_norm"),
    "silu_and_mul": lambda rows: by_rows(rows, op="transformer_ops", kernel="silu_and_mul"),
    **{
        f"{op} gradients": lambda rows, op=op: by_rows(rows, op="transformer_ops gradients", kernel=op)
        for op in ("add_rms_norm", "silu_and_mul")
    },
    "apply_rope_append_": lambda rows: by_rows(rows, op="transformer_ops", kernel="apply_rope_append_"),
    "apply_rope_": lambda rows: by_rows(rows, op="transformer_ops", kernel="apply_rope_"),
    **{
        f"linear {model}": lambda rows, model=model: by_rows(rows, op="linear", model=model)
        for model in ("SmolLM2-135M", "8B")
    },
    "linear_token_statistics": lambda rows: by_rows(rows, op="linear_token_statistics"),
    "filter_logits": lambda rows: by_rows(rows, op="filter_logits"),
    "logit_divergence": lambda rows: by_rows(rows, op="logit_divergence"),
    **{
        f"feature_cache {op}": lambda rows, op=op: by_rows(rows, op="feature_cache", kernel=op)
        for op in ("select_stale_rows_", "add_cached_rows_", "apply_rope_append_")
    },
    "token_statistics": lambda rows: by_rows(rows, op="token_statistics"),
    "token_statistics sampling": lambda rows: by_rows(rows, op="token_statistics sampling"),
    "recurrence_advance_": recurrence_advance,
    "unmask_ quota": lambda rows: unmask(rows, "quota"),
    "unmask_ threshold": lambda rows: unmask(rows, "threshold"),
    # Regardless of the argument.
    "transformers tests": lambda rows: transformers_tests(TRANSFORMERS_TESTS),
    "cpu_engines": lambda rows: cpu_engines_report.engines(CPU_ENGINES),
    "cpu_engines avx2": lambda rows: cpu_engines_report.engines(CPU_ENGINES_AVX2),
    "cpu_engines gemma3": lambda rows: cpu_engines_report.engines(CPU_ENGINES_GEMMA3),
    "backends": lambda rows: backends.backends_table(backends.RESULTS),
    "prefix_folder": lambda rows: prefix_folder.folder_table(prefix_folder.RESULTS),
    "server_load": lambda rows: load_report.load_table(load_report.RESULTS),
    "server_soak": lambda rows: server_soak.soak_table(server_soak.RESULTS),
    "engine_drafts": lambda rows: engine_drafts.drafts_table(engine_drafts.RESULTS),
    "engine_drafts avx2": lambda rows: engine_drafts.drafts_table(ENGINE_DRAFTS_AVX2),
    "engine_load": lambda rows: engine_load.load_table(ENGINE_LOAD),
    "drafters": lambda rows: drafters_report.methods(DRAFTERS),
    "drafters anything": lambda rows: drafters_report.methods(DRAFTERS_ANYTHING),
    "drafters peers": lambda rows: drafters_report.peers(DRAFTERS_PEERS),
    "cpu_engines real models": lambda rows: cpu_engines_report.real_models(CPU_ENGINES, DRAFTERS),
    "cpu_engines summary": lambda rows: cpu_engines_report.summary(CPU_ENGINES),
    "cache dtypes": lambda rows: of_file(cache_dtypes.RESULT, cache_dtypes.markdown),
    "cache halves": lambda rows: of_file(cache_dtypes.RESULT, cache_dtypes.packed_markdown),
    "versions": lambda rows: of_file(versions.RESULTS, versions.table_of),
    "diffusion-step": lambda rows: of_file(diffusion_step.RESULTS, diffusion_step.steps_table),
    "diffusion-parts": lambda rows: of_file(diffusion_step.RESULTS, diffusion_step.parts_table),
    "diffusion-methods": lambda rows: of_file(diffusion_step.RESULTS, diffusion_step.methods_table),
    "windows alone": lambda rows: of_file(windows.RESULTS, windows.alone_table),
    "windows contiguous": lambda rows: of_file(windows.RESULTS, windows.contiguous_table),
    "windows engine": lambda rows: of_file(windows.RESULTS, windows.engine_table),
    "windows steps": lambda rows: of_file(windows.RESULTS, windows.steps_table),
    "speculation": lambda rows: of_file(speculation.RESULTS, speculation.table_of),
    "speculation-thresholds": lambda rows: of_file(speculation.RESULTS, speculation.table_of_thresholds),
    "adapters": lambda rows: of_file(bench_adapters.RESULTS, bench_adapters.table_of),
    "same tokens": lambda rows: of_file(same_tokens.RESULTS, same_tokens.same_tokens),
    "same tokens gemma3": lambda rows: of_file(same_tokens.GEMMA3, same_tokens.same_tokens),
    "same tokens short": lambda rows: of_file(same_tokens.SHORT, same_tokens.same_tokens),
    "long drafts": lambda rows: of_file(long_drafts.RESULT, long_drafts.markdown),
    "long texts": lambda rows: of_file(long_texts.RESULT, long_texts.markdown),
    "recurrent state": lambda rows: of_file(bench_recurrent_state.RESULT, bench_recurrent_state.markdown),
    "grammars proof": lambda rows: grammars_report.proof(GRAMMARS),
    "grammars cost": lambda rows: grammars_report.cost(GRAMMARS),
    "grammars canvases": lambda rows: grammars_report.canvases(GRAMMARS),
    "grammars masks": lambda rows: grammars_report.masks(GRAMMARS),
    "maskbench": lambda rows: maskbench.counts(),
    "decoded schemas": lambda rows: of_file(decoded_schemas.RESULTS, decoded_schemas.report),
    "schema fuzz": lambda rows: schema_fuzz.counts(),
    "gpu": lambda rows: gpu_report.pages(GPU_RESULTS),
    "gpu verified": lambda rows: (
        of_file(verified_tokens.RESULTS, verified_tokens.verified_table)
        if verified_tokens.RESULTS.exists()
        else "Not measured yet."
    ),
    "gpu summary": lambda rows: gpu_report.summary(GPU_RESULTS),
    "machine": lambda rows: machine([row for row in rows if row["op"] == "kv_commit_"]),
    "machine verify_draft": lambda rows: machine([row for row in rows if row["op"] == "verify_draft"]),
    "machine decoding": lambda rows: machine([row for row in rows if row["op"] == "decoding"]),
}


def renew(path: Path, rows: list[Row]) -> None:
    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- bench:{name} -->\n{TABLES[name](rows)}\n<!-- /bench -->"

    text = path.read_text()
    path.write_text(re.sub(r"<!-- bench:(.+?) -->\n.*?<!-- /bench -->", fill, text, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="renew the tables in README.md and docs/, and the plots")
    arguments = parser.parse_args()
    rows = load(arguments.folder)
    if arguments.write:
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
            renew(path, rows)
        plots.kv_commit(rows, ROOT / "docs/images/bench_kv_commit.png")
        plots.block_sparse_attention(rows, ROOT / "docs/images/bench_block_sparse_attention.png")
        plots.evaluations(rows, ROOT / "docs/images")
        plots.headline(rows, ROOT / "docs/images/bench_headline.png")
        gpu_report.plot(GPU_RESULTS, ROOT / "docs/images")
    else:
        for name, make in TABLES.items():
            print(f"\n{name}\n{make(rows)}")


if __name__ == "__main__":
    main()
