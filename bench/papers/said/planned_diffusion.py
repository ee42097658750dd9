"""What "Planned Diffusion" says, and where it is here."""

from __future__ import annotations

from bench.papers.said.row import Missing, Row

ROWS = (
    Row(
        "Eq. 2",
        "Each token is masked with probability t",
        ("pdkernels.training.draw_chunk_masks",),
        ("tests/training/test_planned.py::test_noise_has_its_stated_frequency_and_rounds_may_differ",),
    ),
    Row(
        "Eq. 6 and 7",
        "Random order, and order by entropy",
        ("pdkernels.unmask_", "method planned"),
        (
            "tests/ops/test_unmask.py::test_random_order_is_uniform",
            "tests/decoding/test_planned.py::test_equals_the_reference",
        ),
        differs="above temperature 0 the entropy is that of the distribution that is drawn from, filters included, as in Dream",
    ),
    Row(
        "Eq. 8 and 9, Algorithm 1",
        "A plan, then all chunks at once, one position of each in a step; rounds until the end token",
        ("method planned",),
        (
            "tests/decoding/test_planned.py::test_equals_the_reference",
            "tests/decoding/test_planned_loop.py::test_forwards_and_rows_by_formula",
            "tests/decoding/test_planned_parts.py::test_a_step_per_token_commits_one_each",
        ),
    ),
    Row(
        "4.2, control tags",
        "Topics and lengths, chunks, syncs; both spellings of annotated texts",
        ("pdkernels.training.plans.parse", "pdkernels.models.PlanTokens"),
        (
            "tests/training/test_plans.py::test_what_is_written_is_read",
            "tests/training/test_plans.py::test_chunks_with_attributes_are_the_same_rounds",
        ),
    ),
    Row(
        "4.2, appendix A",
        "The prompt for annotations, and a strict reader of the replies: at most 3 words a topic, at least 5 a chunk",
        ("pdkernels.training.annotation.ask", "pdkernels.training.annotation.read"),
        (
            "tests/training/test_annotation.py::test_the_messages_hold_the_texts_and_the_rules",
            "tests/training/test_annotation.py::test_replies_that_break_a_rule",
        ),
        differs="its own words; the paper prints a shortened prompt",
    ),
    Row(
        "Eq. 10",
        "Joint loss of plans and chunks",
        ("pdkernels.training.planned_loss",),
        ("tests/training/test_planned.py::test_the_loss_of_a_batch_is_that_of_its_texts",),
        differs="in a batch all tokens count equally; the paper averages each text first. With one text the same",
    ),
    Row(
        "4.2, Figures 5 and 6",
        "Masks: causal plans, chunks that see each other (dense) or not (sparse)",
        ("pdkernels.masks.planned", "pdkernels.masks.planned_streams"),
        ("tests/masks/test_builders.py::test_equals_the_rules", "tests/masks/test_builders.py::test_planned_rounds"),
    ),
    Row(
        "4.2, variable lengths",
        "Steps: the share r of the longest chunk's length, rounded up",
        ("method planned",),
        ("tests/decoding/test_planned_parts.py::test_the_schedule_equals_the_reference",),
        figures=("steps",),
    ),
    Row(
        "Appendix D",
        "Which keys and values may be kept",
        ("method planned",),
        ("tests/decoding/test_planned_cache.py::test_it_equals_a_full_forward_after_every_round",),
    ),
    Row(
        "5, Pasta-SFT",
        "Plans and chunks, each chunk token by token beside the others",
        ("method planned", "pdkernels.training.pack_pasta"),
        (
            "tests/decoding/test_planned_in_turn.py::test_chunks_are_those_of_a_plain_loop",
            "tests/training/test_pasta.py::test_the_loss_is_that_of_each_text_alone",
        ),
    ),
    Row(
        "5, Skeleton-of-Thought",
        "A skeleton, then all points by themselves",
        ("pdkernels.decoding.skeleton.skeleton_of_thought",),
        ("tests/decoding/test_skeleton.py::test_tokens_and_forwards_of_the_plain_loop",),
    ),
    Row(
        "Figure 2, left and middle",
        "Quality and critical path",
        ("pdkernels.evaluation.evaluate_planned",),
        ("tests/papers/test_tables.py::test_pages_are_the_committed_files",),
        differs="right answers of a task that can be checked; the paper's win rates need a judge",
        figures=("path",),
    ),
    Row(
        "Table 1, Figures 2 and 4",
        "All strategies beside each other, and the distribution of speed-ups",
        ("bench.papers.planned_baselines",),
        ("tests/papers/test_planned_baselines.py::test_all_strategies_answer_the_same_prompts",),
        differs="right answers in place of win rates",
        figures=("strategies",),
    ),
    Row(
        "Figure 3",
        "Plans without topics or syncs, lengths, steps and thresholds",
        ("bench.papers.runs", "examples/train_tiny_planned.py"),
        ("tests/training/test_train_tiny_planned.py::test_ablations",),
        figures=("lengths", "steps"),
    ),
)

MISSING = (
    Missing(
        "Figure 2, right",
        "Quality and latency by epochs of training",
        "eight trainings; the steps of one are [on a page](../training.md#a-tiny-model-that-plans)",
        "python examples/train_tiny_planned.py --tags-removed --look-every 100",
    ),
    Missing(
        "Tables 1 and 2, Figure 2",
        "Length-controlled win rates and latencies on AlpacaEval",
        "needs a model of 7B parameters, its annotated training data and a judge",
        "python -m pdkernels eval --family planned --model FOLDER --sweep steps_ratio=1,.5 --sweep threshold=.9",
    ),
)
