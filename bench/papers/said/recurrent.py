"""What "Efficient parallel samplers for recurrent-depth models" says, and where it is here."""

from __future__ import annotations

from bench.papers.said.row import Missing, Row

ROWS = (
    Row(
        "3.1",
        "Prelude, recurrent core with input injection, coda",
        ("pdkernels.models.RecurrentDepth",),
        (
            "tests/models/test_recurrent_depth.py::test_equals_the_plain_model",
            "tests/reference/test_reference_recurrent_depth.py::test_against_an_independent_formulation",
        ),
    ),
    Row(
        "3.2, Figure 3",
        "Recurrences share their keys and values",
        ("pdkernels.models.RecurrentDepth.new_cache",),
        (
            "tests/models/test_recurrent_depth_cached.py::test_recurrences_overwrite_the_same_slots",
            "tests/reference/test_reference_recurrent_depth.py::test_recurrences_share_their_slots",
        ),
        figures=("cache",),
    ),
    Row(
        "Algorithm 1",
        "The sampler with a fixed number of recurrences",
        ("method recurrent_diffusion",),
        (
            "tests/decoding/test_recurrent_diffusion.py::test_all_recurrences_in_one_step_are_static_decoding",
            "tests/reference/test_reference_recurrent_diffusion.py::test_fixed_freezes_when_a_position_has_had_its_recurrences",
        ),
    ),
    Row(
        "Eq. 1",
        "Momentum of the input",
        ("pdkernels.recurrence_inject",),
        ("tests/ops/test_recurrence.py::test_inject_equals_reference",),
        figures=("momentum",),
    ),
    Row(
        "Eq. 2, Algorithms 1 and 2, line 7",
        "Noise is mixed into every state of the wave, new rows too; it falls linearly",
        ("pdkernels.recurrence_inject", "method recurrent_diffusion"),
        (
            "tests/ops/test_recurrence.py::test_line_7_of_both_algorithms_mixes_noise_into_new_rows",
            "tests/ops/test_recurrence.py::test_state_and_noise_of_a_new_row_are_independent",
            "tests/reference/test_reference_recurrent_diffusion.py::test_algorithm_1_literally",
        ),
    ),
    Row(
        "Eq. 3, Algorithm 2",
        "Exit by the relative distance of states; freezes up to the first that has not converged",
        ("pdkernels.recurrence_exit", "pdkernels.recurrence_advance_", "method recurrent_diffusion"),
        (
            "tests/ops/test_recurrence.py::test_what_counts_as_converged",
            "tests/decoding/test_recurrent_diffusion.py::test_the_prefix_rule_and_the_last_one_differ",
            "tests/decoding/test_recurrent_diffusion.py::test_equals_the_reference",
        ),
        differs="the paper's equation and algorithm disagree: `rule='prefix'`, the default, is the equation, `'last'` the algorithm",
    ),
    Row(
        "Remark 3.1",
        "A contraction converges to the autoregressive text",
        ("method recurrent_diffusion",),
        ("tests/decoding/test_recurrent_diffusion.py::test_a_contraction_gives_the_tokens_of_static_decoding",),
    ),
    Row(
        "Theorem 4.2, Remark 4.3, appendix B",
        "Depth or width while a prompt is read",
        (
            "bench.papers.theory.prefill_cost",
            "bench.papers.theory.width_advantage",
            "bench.papers.theory.depth_preferred",
        ),
        ("tests/papers/test_theory.py::test_prefill_costs_are_those_of_counting",),
        figures=("prefill",),
    ),
    Row(
        "4.2, width scaling",
        "Repeated tokens, with and without shared keys",
        ("pdkernels.masks.width_scaling",),
        (
            "tests/masks/test_builders.py::test_equals_the_rules",
            "tests/papers/test_theory.py::test_the_masks_of_width_scaling_have_the_pairs_of_the_theory",
        ),
    ),
    Row(
        "Theorem 4.4",
        "Tokens that the sampler finishes in a number of core applications",
        ("bench.papers.theory.decode_budget",),
        ("tests/papers/test_theory.py::test_decode_budgets_are_those_of_a_run",),
        figures=("decoding",),
    ),
    Row(
        "5, Table 1",
        "Static, adaptive and self-speculative baselines, and the sampler",
        ("method recurrent_static", "method recurrent_adaptive", "method recurrent_self_speculation"),
        (
            "tests/decoding/test_recurrent_static.py::test_equals_the_reference",
            "tests/decoding/test_recurrent_adaptive.py::test_equals_the_reference",
            "tests/decoding/test_recurrent_self_speculation.py::test_equals_the_reference",
        ),
        figures=("static",),
    ),
    Row(
        "5, settings",
        "Sampler: r' 4, threshold 0.03, momentum 0.1, a wave of 128. Self-speculation: 4 tokens of 4 recurrences",
        ("pdkernels.decoding.Method",),
        (
            "tests/decoding/test_recurrent_diffusion.py::test_the_defaults_are_those_of_section_5",
            "tests/decoding/test_paper_settings.py::test_the_page_lists_the_defaults_that_differ",
        ),
        differs="the same by default, except that temperature and top_p (0.2, 0.95) are greedy here",
    ),
    Row(
        "Figures 5, 7, 11 and 12",
        "Inner recurrences, noise and the exit threshold",
        ("bench.papers.runs",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        figures=("grid", "threshold"),
    ),
    Row(
        "Figures 6, 8 to 10",
        "Momentum, wave and its memory, noise, headway, scale of new states, copied states",
        ("bench.papers.runs",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        figures=("wave", "noise", "headway", "init-scale", "continuous"),
    ),
    Row(
        "Table 3",
        "Overlap of the sampler's texts with static ones",
        ("bench.papers.runs",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        differs="overlap and likelihood alone: a judge needs texts that are worth judging",
        figures=("texts",),
    ),
    Row(
        "Table 2",
        "The same defaults on other weights",
        ("bench.papers.recurrent_ablations",),
        ("tests/papers/test_recurrent_ablations.py::test_rows_of_both_tables",),
        differs="weights of one short fine-tuning, and their average",
        figures=("variants",),
    ),
    Row(
        "Figure 14",
        "The options of the sampler on a fine-tuned model",
        ("bench.papers.recurrent_ablations",),
        ("tests/papers/test_recurrent_ablations.py::test_rows_of_both_tables",),
        figures=("robustness",),
    ),
    Row(
        "3.4",
        "Schedules of noise: linear, by the root of the steps, constant, and the released code's",
        ("bench.papers.recurrent_ablations",),
        ("tests/papers/test_recurrent_ablations.py::test_every_schedule_has_rows",),
        figures=("schedules",),
    ),
    Row(
        "A.3",
        "Training with random unrolling, of a log-normal Poisson law, and truncated backpropagation",
        ("pdkernels.training.draw_recurrences", "pdkernels.training.unrolled_logits"),
        (
            "tests/training/test_unrolling.py::test_recurrences_have_their_law",
            "tests/training/test_unrolling.py::test_gradients_go_through_the_last_recurrences",
        ),
    ),
    Row(
        "Figures 4 and 13",
        "Tokens of a text as they change from step to step",
        ("pdkernels.evaluation.plot_wave",),
        ("tests/test_evaluation_recurrent.py::test_the_wave_shows_every_distance",),
    ),
    Row(
        "A.2",
        "Larger batches",
        ("method recurrent_diffusion",),
        ("tests/decoding/test_recurrent_diffusion.py::test_equals_the_reference",),
        differs="the paper and its code have one sequence; here each of a batch has a wave of its own",
    ),
)

MISSING = (
    Missing(
        "Tables 1 to 3 on GSM8K, MATH500, HumanEval and MBPP",
        "Accuracy and tokens per second of Huginn-0125",
        "needs its weights (3.5B parameters) and a GPU for the time; texts of Table 3 need a judge",
        "python -m pdkernels eval --family recurrent --model FOLDER --sweep recurrent_diffusion.inner_recurrence=2,4,8",
    ),
)
