"""Ranks of one attempt find each other, whatever an earlier attempt left in the store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

import pdkernels.distributed
from pdkernels.distributed.launch import agreed_name

TIME = timedelta(seconds=20)


def names(store: dist.Store, ranks: int, late: int, timeout: timedelta = TIME) -> list[str]:
    """What each rank gets, of which one starts after the others."""
    found = [""] * ranks

    def start(rank: int) -> None:
        found[rank] = agreed_name(store, rank, ranks, timeout)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(ranks)]
    for thread in threads[:late] + threads[late + 1 :]:
        thread.start()
    time.sleep(0.6)  # longer than a rank keeps to one name
    threads[late].start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("late", [0, 1, 2])
def test_every_attempt_has_a_name_of_its_own(late: int) -> None:
    store = dist.HashStore()
    attempts = [names(store, 3, late) for _ in range(2)]
    for attempt in attempts:
        assert attempt[0] and attempt == attempt[:1] * 3
    assert attempts[0][0] != attempts[1][0]


def test_a_rank_alone_waits_for_nobody() -> None:
    assert agreed_name(dist.HashStore(), 0, 1, TIME)


def test_missing_ranks_are_named() -> None:
    short = timedelta(seconds=0.2)
    with pytest.raises(TimeoutError, match=r"ranks must all start within 0:00:00.2.*, got no sign of \[1, 2\]"):
        agreed_name(dist.HashStore(), 0, 3, short)
    with pytest.raises(TimeoutError, match="got no sign of all of them on the first one"):
        agreed_name(dist.HashStore(), 2, 3, short)


def test_the_timeout_is_a_timedelta() -> None:
    with pytest.raises(TypeError, match=r"timeout must be a datetime\.timedelta, got float"):
        pdkernels.distributed.init_process_group(timeout=5.0)  # type: ignore[arg-type]
