"""What "Jacobi Forcing" says, and where it is here."""

from __future__ import annotations

from bench.papers.said.row import Missing, Row

ROWS = (
    Row(
        "Eq. 1 to 4",
        "Jacobi decoding in blocks, until nothing changes",
        ("method jacobi",),
        (
            "tests/decoding/test_jacobi.py::test_equals_greedy_and_the_reference",
            "tests/reference/test_reference_jacobi.py::test_jacobi_equals_greedy",
        ),
        differs="a block shrinks by its accepted tokens, as in the released code: the fixed point is the same, and no settled row is computed again",
    ),
    Row(
        "Eq. 5",
        "Consistency distillation from records of trajectories",
        ("pdkernels.training.collect_trajectories", "pdkernels.training.noise_aware_loss"),
        (
            "tests/training/test_trajectories.py::test_every_record_is_a_step_of_jacobi",
            "tests/training/test_losses.py::test_noise_aware_is_the_equation",
        ),
    ),
    Row(
        "Eq. 7",
        "Noise that grows within a window",
        ("pdkernels.training.noise_ratios",),
        ("tests/training/test_trajectories.py::test_ratios_are_those_of_code_and_paper",),
        differs='by default to 1 inclusive, as in the released code; `schedule="paper"` is the equation',
    ),
    Row(
        "Appendix C, Figure 6",
        "The record whose noise is nearest to the schedule's",
        ("pdkernels.training.choose_record", "pdkernels.training.noise_aware_sample"),
        (
            "tests/training/test_trajectories.py::test_the_nearest_record_is_chosen",
            "tests/training/test_trajectories.py::test_suffixes_count_and_not_tokens",
            "tests/training/test_trajectories.py::test_of_differing_tokens_the_nearest_number_is_chosen",
        ),
        differs="by default noise is counted from the first wrong token to the end, as in the released code; `noise='differing'` counts wrong tokens, as the paper does",
    ),
    Row(
        "Eq. 8 and 9",
        "Progressive consistency loss and autoregressive loss",
        ("pdkernels.training.noise_aware_loss",),
        ("tests/training/test_losses.py::test_noise_aware_is_the_equation",),
        differs="a mean over rows; the paper sums the rows of a block and averages blocks",
    ),
    Row(
        "3.1, Figure 2",
        "Noise-aware causal masks: noise alone, clean blocks, clean windows",
        ("pdkernels.masks.noise_aware_causal", "pdkernels.training.pack_noise_aware"),
        (
            "tests/masks/test_builders.py::test_noise_aware_is_two_causal_streams",
            "tests/masks/test_builders.py::test_windows_of_one_block_and_of_all_blocks",
            "tests/masks/test_tile_plan.py::test_noise_aware_tiles",
        ),
    ),
    Row(
        "3.1",
        "A second round of training with larger blocks",
        ("examples/train_tiny_jacobi.py",),
        ("tests/training/test_training_runs.py::test_the_scripts_write_models_that_load",),
    ),
    Row(
        "3.2, Algorithm 1, Figure 3",
        "Several blocks at once, and recycling of rejected tokens",
        ("method jacobi_multiblock",),
        (
            "tests/decoding/test_jacobi_multiblock.py::test_equals_greedy_and_the_reference",
            "tests/decoding/test_jacobi_multiblock.py::test_a_candidate_wins",
            "tests/reference/test_reference_jacobi_multiblock.py::test_a_promoted_block_continues",
        ),
        differs="the promoted block goes on with its pool, as Figure 3 shows; [the released code](released.md) discards it",
    ),
    Row(
        "4.2, Table 3",
        "Running window",
        ("method jacobi",),
        ("tests/reference/test_reference_jacobi.py::test_the_window_is_refilled_after_every_forward",),
        figures=("windows",),
    ),
    Row(
        "4.1 to 4.3, settings",
        "Blocks of 128 alone; 64, 2 blocks, spawn ratio 0.85 and 4 sequences",
        ("pdkernels.decoding.Method",),
        (
            "tests/decoding/test_paper_settings.py::test_a_method_takes_them",
            "tests/decoding/test_paper_settings.py::test_the_page_lists_the_defaults_that_differ",
        ),
        differs="by name: `Method.paper_settings`. On a CPU few rows are free, and the defaults are blocks of 16 and 8 ([table](../decoding.md#settings-of-the-papers))",
    ),
    Row(
        "3.2, Figure 4",
        "Right tokens in drafts that are not accepted yet",
        ("bench.papers.segments",),
        ("tests/papers/test_searches.py::test_runs_of_a_draft_that_the_fixed_point_has",),
        figures=("segments",),
    ),
    Row(
        "Figure 5",
        "Tokens a forward by block size, verification size and number of blocks",
        ("bench.papers.runs",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        figures=("blocks", "multiblock"),
    ),
    Row(
        "Figure 5a",
        "Speed by block size at fixed acceptance",
        ("bench.papers.fixed_acceptance",),
        ("tests/papers/test_searches.py::test_small_tables_of_speed",),
        figures=("fixed",),
    ),
    Row(
        "Tables 4 and 5",
        "Orders of noise, and masks of training",
        ("bench.papers.trainings",),
        ("tests/papers/test_tables.py::test_forcings_train_a_copy_for_each_row",),
        figures=("forcings",),
    ),
    Row(
        "Appendix D, Figure 7",
        "Time of a forward by its number of rows, and the knee",
        ("pdkernels.generation.row_times.measure_row_times", "bench.papers.row_times"),
        ("tests/papers/test_theory.py::test_the_fit_finds_a_knee_that_is_known",),
        figures=("knee",),
    ),
    Row(
        "Appendix E, Figure 8",
        "Speed by block and verification size: a grid, and a smooth surface fitted to it",
        ("bench.papers.grid_search",),
        ("tests/papers/test_searches.py::test_a_hill_is_found", "tests/papers/test_searches.py::test_a_small_search"),
        figures=("search",),
    ),
    Row(
        "4.3, spawn ratio",
        "When the next block begins",
        ("bench.papers.runs",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        figures=("ratios",),
    ),
)

MISSING = (
    Missing(
        "Tables 1, 2 and 6",
        "HumanEval, MBPP, GSM8K and MATH beside diffusion models and drafters",
        "needs the released checkpoints of 7B parameters",
        "python -m pdkernels eval --model FOLDER --method jacobi --method jacobi_multiblock --width 64 --task source",
    ),
    Missing(
        "4.1",
        "Training of Qwen2.5-Coder-7B: 450,000 prompts, two rounds of 10,000 steps",
        "needs eight GPUs for days; the recipe runs on any causal model",
        "python examples/train_smollm2_jacobi.py --help",
    ),
)
