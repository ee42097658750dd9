"""What "SlowFast Sampling" says, and where it is here."""

from __future__ import annotations

from bench.papers.said.row import Missing, Row

ROWS = (
    Row(
        "Eq. 1 to 4",
        "A canvas of masks, greedy guesses, steps that fill some",
        ("method llada",),
        ("tests/decoding/test_llada.py::test_equals_the_reference",),
    ),
    Row(
        "3.1, random remasking",
        "A mask stays with probability (k - 1) / k",
        ("method llada",),
        ("tests/reference/test_reference_llada.py::test_random_order_is_that_of_the_positions_and_forwards",),
        differs="as in LLaDA's code, a step fills a fixed number of random positions: the paper's number is random, with this expectation",
    ),
    Row(
        "Eq. 5",
        "Filling by confidence",
        ("method llada", "pdkernels.unmask_"),
        ("tests/ops/test_unmask.py::test_equals_sorting",),
    ),
    Row(
        "Eq. 6",
        "Tokens to be filled by step: the floor of L (1 - (k - 1) / N)",
        ("method llada",),
        (
            "tests/decoding/test_llada.py::test_a_spread_remainder_is_equation_6",
            "tests/reference/test_reference_llada.py::test_spread_quotas_are_equation_6",
        ),
        differs="by default the first steps have the remainder of an uneven share, as in LLaDA's code; `remainder='spread'` is the equation",
    ),
    Row(
        "3.1, semi-autoregressive",
        "Blocks from left to right",
        ("method llada",),
        ("tests/reference/test_reference_llada.py::test_two_blocks_by_hand",),
    ),
    Row(
        "3.3, Eq. 7 to 9",
        "Exploring: cautious steps, the end of the stable span, variance within a window, at most K steps",
        ("method slowfast",),
        (
            "tests/decoding/test_slowfast.py::test_equals_the_reference",
            "tests/reference/test_reference_slowfast.py::test_the_papers_loop",
            "tests/reference/test_reference_slowfast.py::test_notes_before_the_window_are_forgotten_and_the_paper_wants_more_than_tau_min",
        ),
    ),
    Row(
        "3.3, Eq. 10",
        "Accelerating: all confident positions of the span, or the most confident ones",
        ("method slowfast",),
        ("tests/decoding/test_slowfast.py::test_a_cycle_by_hand",),
        figures=("loops",),
    ),
    Row(
        "Tables 2 and 3",
        "Beside left to right, blocks, diffusion and the feature cache",
        ("bench.papers.strategies",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        differs="on sums of a tiny model",
        figures=("strategies",),
    ),
    Row(
        "3.3, out-of-span caching; Table 2",
        "Feature cache of prompts and answers (dLLM-Cache)",
        ("method dllm_cache", "pdkernels.select_stale_rows_"),
        (
            "tests/decoding/test_dllm_cache.py",
            "tests/decoding/test_slowfast.py::test_on_a_feature_cache_equals_the_reference",
        ),
    ),
    Row(
        "Figures 4 and 5",
        "tau_min 0.1, tau_high 0.85, at most 8 steps, windows of 2, variance below 1",
        ("method slowfast",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        figures=("tau-min", "tau-high", "max-exploration", "window", "variance"),
    ),
)

MISSING = (
    Missing(
        "Tables 1 to 4, Figure 2",
        "Scores and tokens per second of LLaDA-8B and Dream-7B on eight benchmarks",
        "needs their weights (8B and 7B parameters) and a GPU for the time",
        "python -m pdkernels eval --family masked --model FOLDER --sweep slowfast.tau_high=.7,.85,.95",
    ),
)
