"""Pictures of masks and of whole runs."""

from __future__ import annotations

import pdkernels as pd
from pdkernels import masks as pdm
from pdkernels.evaluation import plot_canvas, plot_chunks, plot_wave
from pdkernels.training import chains
from scripts.pictures.parts import IMAGES


def masks() -> None:
    rounds = [pdm.Stage(5, (4, 6, 3)), pdm.Stage(3, (4, 4)), pdm.Stage(1, sync=False)]
    noise_aware = {"prompt_len": 6, "block_size": 4, "num_blocks": 4}
    packed = [pdm.causal(9), pdm.dual_stream(6, 3), pdm.candidates(2, 3)]
    pictures: dict[str, tuple[str, pdm.SegmentMask, int | None]] = {
        "causal": ("causal(8, 20)", pdm.causal(8, 20), None),
        "block_causal": ("block_causal(22, 6, prefix_len=5)", pdm.block_causal(22, 6, prefix_len=5), None),
        "noisy": ("noise_aware_causal(6, 4, 4)", pdm.noise_aware_causal(**noise_aware), None),
        "clean": ('conditioning="clean"', pdm.noise_aware_causal(**noise_aware, conditioning="clean"), None),
        "window": (
            'conditioning="window", window=2',
            pdm.noise_aware_causal(**noise_aware, conditioning="window", window=2),
            None,
        ),
        "interleaved": ('layout="interleaved"', pdm.noise_aware_causal(**noise_aware, layout="interleaved"), None),
        "tiles_streams": ("Streams in tiles", pdm.noise_aware_causal(512, 32, 64), 128),
        "tiles_interleaved": ("Interleaved in tiles", pdm.noise_aware_causal(512, 32, 64, layout="interleaved"), 128),
        "dual_stream": ("dual_stream(14, 4)", pdm.dual_stream(14, 4), None),
        "dual_stream_block": (
            'dual_stream(14, 4, clean="block", prefix_len=4)',
            pdm.dual_stream(14, 4, "block", prefix_len=4),
            None,
        ),
        "planned": ("planned(stages)", pdm.planned(rounds), None),
        "planned_sparse": ("planned(stages, sparse=True)", pdm.planned(rounds, sparse=True), None),
        "planned_streams": (
            "planned_streams(stages, sparse=True)",
            pdm.planned_streams(
                [pdm.Stage(4, (4, 5)), pdm.Stage(2, (4,), False), pdm.Stage(1, sync=False)], sparse=True
            ),
            None,
        ),
        "quadratic": ("quadratic(4)", pdm.quadratic(4), None),
        "quadratic_interleaved": (
            'quadratic(4, in_group="causal", layout="interleaved")',
            pdm.quadratic(4, in_group="causal", layout="interleaved"),
            None,
        ),
        "candidates": ("candidates(3, 6)", pdm.candidates(3, 6), None),
        "tree": ("tree([-1, 0, 1, 2, 1, 4, 0, 6, 6, -1, 9])", pdm.tree([-1, 0, 1, 2, 1, 4, 0, 6, 6, -1, 9]), None),
        "anchored": (
            "anchored([9, 7], [3, 6, 11, 14], 4, window=4)",
            pdm.anchored([9, 7], [3, 6, 11, 14], 4, window=4).queries,
            None,
        ),
        "anchored_rollouts": (
            'anchored([9, 7], anchors, sizes, "causal", inclusive=True, base="causal")',
            pdm.anchored([9, 7], [2, 6, 11], [4, 2, 3], "causal", inclusive=True, base="causal"),
            None,
        ),
        "width": ("width_scaling(7, 3)", pdm.width_scaling(7, 3), None),
        "width_kv_share": ("kv_share=True", pdm.width_scaling(7, 3, kv_share=True), None),
        "pack": ("pack([causal, dual_stream, candidates], length=32)", pdm.pack(packed, 32), None),
    }
    for name, (title, mask, tile) in pictures.items():
        mask.draw(IMAGES / f"mask_{name}.png", tile, title)


def gallery() -> None:
    """Masks of the size of a training step or a draft, in the tiles of a kernel."""
    rounds = [pdm.Stage(60, (90, 120, 70)), pdm.Stage(40, (110, 60)), pdm.Stage(1, sync=False)]
    anchors = list(range(40, 500, 46))
    pictures: dict[str, tuple[str, pdm.SegmentMask, int]] = {
        "causal": ("causal(512)", pdm.causal(512), 64),
        "block_causal": ("block_causal(512, 32, prefix_len=100)", pdm.block_causal(512, 32, prefix_len=100), 64),
        "dual_stream": ("dual_stream(384, 32)", pdm.dual_stream(384, 32), 64),
        "noise_aware": ("noise_aware_causal(128, 32, 10)", pdm.noise_aware_causal(128, 32, 10), 64),
        "planned": ("planned(stages, sparse=True)", pdm.planned(rounds, sparse=True), 64),
        "anchored": ("anchored([300, 212], anchors, 16).queries", pdm.anchored([300, 212], anchors, 16).queries, 32),
        "quadratic": ("quadratic(16)", pdm.quadratic(16), 32),
        "candidates": ("candidates(6, 32)", pdm.candidates(6, 32), 32),
        "pack": ("pack([...], length=512)", pdm.pack([pdm.dual_stream(n, 16) for n in (120, 70, 50)], 512), 64),
    }
    for name, (title, mask, tile) in pictures.items():
        mask.draw(IMAGES / f"gallery_{name}.png", tile, title)


def recurrent_wave() -> None:
    """Runs of the recurrent-depth sampler: on a sum, and on chains of 16 links, one for each recurrence."""
    model = pd.models.load("tiny-recurrent")
    result = pd.decoding.generate(
        model, "482 + 967 = ?\n", "recurrent_diffusion", inner_recurrence=1, max_new_tokens=44, trace=True
    )
    plot_wave(result.stats.trace[0], IMAGES / "recurrent_wave.png", tokenizer=model.tokenizer, threshold=0.03)
    asked = next(chains(0, held_out=True, hops=(16, 16)))
    model = pd.models.load("tiny-deep")
    result = pd.decoding.generate(model, asked.prompt, "recurrent_diffusion", max_new_tokens=48, trace=True)
    plot_wave(result.stats.trace[0], IMAGES / "recurrent_wave_deep.png", tokenizer=model.tokenizer, threshold=0.03)


def slowfast_canvas() -> None:
    """How SlowFast fills the canvas of a sum."""
    model = pd.models.load("tiny-masked")
    options = {"block_size": 16, "tau_min": 0.9, "tau_high": 0.97, "max_exploration": 1, "window": 1}
    result = pd.decoding.generate(model, "482 + 967 = ?\n", "slowfast", max_new_tokens=96, trace=True, **options)
    plot_canvas(
        result.stats.trace[0], IMAGES / "slowfast_canvas.png", tokenizer=model.tokenizer, mask_token=model.mask_token
    )


def planned_chunks() -> None:
    """How the chunks of two rounds are filled in: the second names lists of the digit that the first one picks."""
    model = pd.models.load("tiny-planned")
    options = {"steps_ratio": 0.25, "temperature": 1.0, "seed": 1, "max_new_tokens": 320}
    result = pd.decoding.generate(model, "*p;4x;3d;3q;pr;pw;\n", "planned", trace=True, **options)
    topics = [[model.tokenizer.decode(topic) for topic in each.topics] for each in result.stats.plans[0].rounds]
    path = IMAGES / "planned_chunks.png"
    plot_chunks(result.stats.trace[0], path, tokenizer=model.tokenizer, topics=topics)


PICTURES = ("masks", "gallery", "recurrent_wave", "slowfast_canvas", "planned_chunks")
