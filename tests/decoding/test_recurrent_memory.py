"""What a step of the diffusion-forcing sampler allocates: a fixed amount per row of its wave, whatever the past and the recurrences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdkernels import backends
from pdkernels.decoding import generate
from pdkernels.decoding.recurrent import recurrent_diffusion
from pdkernels.decoding.recurrent._wave import Wave
from pdkernels.models.architectures.recurrent_depth import RecurrentDepth, RecurrentDepthConfig
from tests.decoding.test_memory import Allocations

pytestmark = pytest.mark.skipif(
    any(("native", "cpu") not in backends.CHOICES.get(op, {}) for op in ("speculative_attention", "recurrence_inject")),
    reason="no compiled kernels for the CPU",
)
VOCABULARY = 61
STEPS = range(6, 12)


def random_model() -> RecurrentDepth:
    torch.manual_seed(0)
    config = RecurrentDepthConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        heads=2,
        head_dim=16,
        intermediate_size=48,
        prelude_layers=1,
        core_layers=2,
        coda_layers=1,
        mean_recurrence=4,
    )
    return RecurrentDepth(config).requires_grad_(False)


def watch(past: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Allocations, list[int], int]:
    """What some steps allocate, the widths of these steps, and the bytes of K in the cache."""
    log, widths, caches = Allocations(set(STEPS)), [], []
    original = RecurrentDepth.new_cache

    def long_cache(self: RecurrentDepth, batch: int, capacity: int, **kinds: Any) -> Any:
        """As after a long conversation."""
        cache = original(self, batch, past + capacity, **kinds)
        for rows in (cache.k, cache.v):
            rows.normal_(generator=torch.Generator().manual_seed(1))
        cache.commit_(torch.full((batch,), past))
        caches.append(cache)
        return cache

    class Logged(Wave):
        def step(self, rows: int, full: bool) -> Any:
            log.begin((rows, full))
            widths.append(rows)
            return super().step(rows, full)

    with monkeypatch.context() as patch:
        patch.setattr(RecurrentDepth, "new_cache", long_cache)
        patch.setattr(recurrent_diffusion, "Wave", Logged)
        try:
            # Nothing settles within the measured steps: the wave has its full width.
            generate(random_model(), [3, 1, 4], "recurrent_diffusion", max_new_tokens=24, threshold=0.0, **options)
        finally:
            log.watched = set()
            log.begin((0, True))
    return log, [widths[step - 1] for step in STEPS], caches[0].k.nbytes


def totals(log: Allocations) -> list[int]:
    return [sum(nbytes for *_, nbytes in made) for made in log.made]


def test_steps_of_a_width_take_the_same_memory_whatever_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    log, widths, layer = watch(3000, monkeypatch, max_wavefront=4, max_recurrences=60)
    other, _, _ = watch(0, monkeypatch, max_wavefront=4, max_recurrences=60)
    assert widths == [4] * len(STEPS)
    assert all(made == log.made[0] for made in log.made)  # also from step to step
    assert [[entry for entry in made if entry[2] > 65536] for made in log.made] == [[]] * len(STEPS)
    assert max(totals(log)) < layer / 4
    # A long past may cost attention some memory for partial results, far less than the past itself takes.
    assert max(totals(log)) - max(totals(other)) < layer / 16


def test_the_wavefront_bounds_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {}
    for limit in (2, 4, 8):
        log, widths, _ = watch(64, monkeypatch, max_wavefront=limit, max_recurrences=60)
        assert max(widths) == limit or limit == 8
        most[limit] = max(totals(log))
    assert most[2] < most[4] < most[8] < 5 * most[2]


def test_recurrences_take_no_extra_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has a slot for each layer, and the largest tensor of a step does not grow with its recurrences."""
    largest, slots = [], []
    for inner in (1, 4):
        log, _, layer = watch(64, monkeypatch, max_wavefront=4, max_recurrences=60, inner_recurrence=inner)
        largest.append(max(nbytes for made in log.made for *_, nbytes in made))
        slots.append(layer)
    assert largest[0] == largest[1] and slots[0] == slots[1]
