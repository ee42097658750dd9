"""What "Nemotron-Labs-Diffusion" says, and where it is here."""

from __future__ import annotations

from bench.papers.said.row import Missing, Row

ROWS = (
    Row(
        "Eq. 1",
        "Autoregressive loss",
        ("pdkernels.training.dual_stream_loss",),
        ("tests/training/test_losses.py::test_dual_stream_is_the_equation",),
    ),
    Row(
        "Eq. 2",
        "Loss of masked tokens in blocks, weighted by 1 / t",
        ("pdkernels.training.dual_stream_loss", "pdkernels.training.draw_masks"),
        (
            "tests/training/test_losses.py::test_dual_stream_is_the_equation",
            "tests/training/test_losses.py::test_masks_have_their_stated_frequency",
            "tests/training/test_losses.py::test_masks_estimate_the_sum_over_all_tokens",
        ),
        differs="t is bounded below, as in the released code: p = (1 - eps) t + eps, so that no weight is infinite",
    ),
    Row(
        "Eq. 3",
        "Joint loss, alpha = 0.3",
        ("pdkernels.training.dual_stream_loss",),
        ("tests/training/test_losses.py::test_dual_stream_is_the_equation",),
    ),
    Row(
        "Eq. 4 and 5",
        "Averages over sequences, and over all tokens of the batch",
        ("pdkernels.training.dual_stream_loss",),
        (
            "tests/training/test_losses.py::test_parts_of_a_batch_add_up_to_the_whole",
            "tests/training/test_losses.py::test_the_average_over_sequences_is_the_equation",
            "tests/training/test_losses.py::test_a_few_masked_tokens_have_little_weight",
        ),
    ),
    Row(
        "2.3",
        "Masking ratios that vary by data-parallel rank",
        ("pdkernels.training.noise_level", "pdkernels.training.draw_masks"),
        (
            "tests/training/test_losses.py::test_levels_of_ranks_are_uniform_and_their_own",
            "tests/training/test_losses.py::test_ranks_with_levels_of_their_own_average_over_all_tokens",
            "tests/distributed/test_training.py::test_ranks_have_masking_ratios_of_their_own",
        ),
        differs="the paper says no more than that levels differ between ranks: here they are drawn, uniform and apart",
    ),
    Row(
        "Table 1",
        "What each technique of training adds",
        ("bench.papers.nemotron_ablations",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        differs="one process: ranks are simulated",
        figures=("techniques",),
    ),
    Row(
        "Table 2, Figure 4",
        "Both modes by alpha, and their losses over the steps",
        ("bench.papers.nemotron_ablations",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        figures=("alpha",),
    ),
    Row(
        "Table 3",
        "The autoregressive mode with and without the diffusion loss",
        ("bench.papers.nemotron_ablations",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        figures=("preserved",),
    ),
    Row(
        "2.2, Figure 3",
        "Mask of a noisy and a strictly causal clean stream",
        ("pdkernels.masks.dual_stream", "pdkernels.training.pack_dual_stream"),
        (
            "tests/masks/test_builders.py::test_equals_the_rules",
            "tests/masks/test_builders.py::test_no_clean_row_sees_noise",
            "tests/masks/test_builders.py::test_dual_stream_trains_what_inference_does",
        ),
    ),
    Row("3.1", "Mode 1: token by token", ("method autoregressive",), ("tests/decoding/test_lossless.py",)),
    Row(
        "3.2",
        "Mode 2: blocks filled by confidence, the cache refreshed after each",
        ("method block_diffusion",),
        (
            "tests/decoding/test_block_diffusion.py::test_equals_the_reference_on_scripts",
            "tests/decoding/test_block_diffusion.py::test_a_confidence_that_equals_the_threshold_reaches_it",
        ),
    ),
    Row(
        "3.2, appendix A, Figure 10",
        "A trained sampler: features, network, policies of the training data",
        (
            "pdkernels.models.SamplerHead",
            "pdkernels.training.collect_sampler_steps",
            "pdkernels.training.train_sampler",
        ),
        (
            "tests/training/test_sampler.py::test_the_confidence_policy_is_block_diffusion_one_by_one",
            "tests/training/test_sampler.py::test_the_hybrid_policy_follows_the_text",
            "tests/decoding/test_block_diffusion_sampler.py::test_equals_the_reference",
        ),
        differs="positions without an outcome, after an end token, are left out of the training data",
        figures=("sampler",),
    ),
    Row(
        "3.3",
        "Mode 3: linear self-speculation, a draft pass and a verifying pass",
        ("method linear_self_speculation",),
        (
            "tests/decoding/test_linear_self_speculation.py::test_equals_the_reference_on_scripts",
            "tests/decoding/test_lossless.py",
        ),
    ),
    Row(
        "3.3, Eq. 6 to 9, Figure 11",
        "Low-rank drafter: top 200 of both sides, temperature 3, KL and total variation with eta 0.5, cross-entropy, the accepted rows and one more",
        ("pdkernels.training.drafter_loss", "pdkernels.training.attach_drafter_"),
        (
            "tests/training/test_drafter.py::test_equations",
            "tests/training/test_drafter.py::test_rows_after_the_first_rejected_token_are_not_read",
            "tests/training/test_drafter.py::test_a_label_outside_the_support_does_not_count",
        ),
    ),
    Row(
        "3.3, training-time sampling",
        "90 % of the drafts are sampled at temperature 1, the others greedy",
        ("pdkernels.training.draw_drafts", "pdkernels.training.pack_drafts", "pdkernels.training.count_accepted"),
        (
            "tests/training/test_drafts.py::test_a_literal_loop",
            "tests/training/test_drafts.py::test_samples_have_the_law_of_the_drafter",
            "tests/training/test_drafts.py::test_one_packed_forward_is_the_two_passes_of_the_paper",
        ),
        figures=("sampled-drafts",),
    ),
    Row(
        "3.4, appendix C, Figure 12",
        "Quadratic self-speculation, its mask, and the ensemble of both modes",
        ("method quadratic_self_speculation", "pdkernels.masks.quadratic"),
        (
            "tests/decoding/test_quadratic_self_speculation.py::test_equals_the_reference_on_scripts",
            "tests/masks/test_builders.py::test_quadratic_drafts_verify_causally_and_masks_follow_a_draft_pass",
            "tests/reference/test_reference_quadratic_self_speculation.py::test_both_ensembles",
        ),
    ),
    Row(
        "1 and 3, Figures 1c and 9a",
        "Modes by concurrency: self-speculation for few clients, autoregressive decoding for many",
        ("method linear_self_speculation", "method quadratic_self_speculation", "method block_diffusion"),
        (
            "tests/decoding/test_modes.py::test_the_mode_follows_the_number_of_clients",
            "tests/decoding/test_modes.py::test_self_speculation_of_chosen_lengths_changes_no_token",
        ),
        differs="`block_size='auto'` chooses between two of the modes in every step, with the same tokens; block diffusion is only for requests that name it",
        figures=("modes",),
    ),
    Row(
        "4.1, Figure 6",
        "Speed of light: serial target, greedy acceptance, recursive compaction within 5,000 forwards",
        ("bench.papers.speed_of_light",),
        (
            "tests/papers/test_speed_of_light.py::test_searches_are_the_plain_form",
            "tests/papers/test_speed_of_light.py::test_no_scheme_beats_trying_everything",
            "tests/papers/test_speed_of_light.py::test_what_a_budget_cannot_check_is_unsafe_and_the_search_goes_on",
        ),
        figures=("limits",),
    ),
    Row(
        "5.2",
        "Fine-tuning: prompts are never masked, and the loss is of answers alone",
        ("pdkernels.training.draw_masks", "pdkernels.training.pack_dual_stream"),
        (
            "tests/training/test_losses.py::test_masks_spare_the_prompt_and_are_reproducible",
            "tests/training/test_asymmetric_streams.py::test_the_loss_is_of_answers_alone",
        ),
    ),
    Row(
        "5.3",
        "Asymmetric streams: tokens that are never masked, such as those of images, have no noisy row",
        ("pdkernels.training.pack_dual_stream",),
        (
            "tests/training/test_asymmetric_streams.py::test_whole_blocks_leave_without_a_trace",
            "tests/training/test_asymmetric_streams.py::test_any_rows_leave_the_mask_of_the_others",
        ),
    ),
    Row(
        "Table 4",
        "Oracle acceptance by block size",
        ("bench.papers.speed_of_light",),
        ("tests/papers/test_tables.py::test_limits_of_one_sum",),
        figures=("limits",),
    ),
    Row(
        "Figure 7, Table 10",
        "Acceptance by kind of text",
        ("bench.papers.runs",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        differs="kinds of sums, whose texts are alike; the paper's eleven categories differ by a factor of three",
        figures=("acceptance",),
    ),
    Row(
        "Figure 8",
        "Accuracy against tokens per forward, with and without the sampler",
        ("bench.papers.trainings",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        figures=("sampler",),
    ),
    Row(
        "Tables 6 and 10",
        "Linear self-speculation with and without the adapter, by task",
        ("bench.papers.sampled_drafts",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        differs="on kinds of sums and source, with one tiny model; the drafters beside it in Table 10 have other targets",
        figures=("adapter",),
    ),
)

MISSING = (
    Missing(
        "Tables 5, 7 and 8",
        "Benchmarks of the instruct and base models of 3B, 8B and 14B",
        "needs the released weights, and a GPU for the time",
        "python -m pdkernels eval --model FOLDER --method linear_self_speculation --task source",
    ),
    Missing(
        "Table 9, 6.4",
        "Vision-language models",
        "no model here reads images; the asymmetric streams that they are trained with are here",
        "",
    ),
    Missing(
        "Figures 1 and 9, 6.5",
        "Throughput by concurrency on three GPUs",
        "needs a GPU and the released weights",
        "python -m bench.engine_load --help",
    ),
)
