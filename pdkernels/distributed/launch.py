"""Joins the processes of torchrun, including those that it restarted.

torchrun keeps one store for all attempts of a run, and a backend writes the addresses of its ranks under the same keys
each time. After a restart a quick rank may read the address of a dead process: it fails, or waits for the whole timeout
(https://github.com/pytorch/pytorch/issues/135712). The number of restarts that torchrun passes to its processes tells
attempts apart on one machine, but not on several, where each machine has its own count. Here the ranks first agree on a
name for each attempt.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pdkernels._validation import check_type, message

OP = "distributed.init_process_group"
PATIENCE = timedelta(seconds=0.5)
"""How long a rank assumes that the first rank belongs to the same attempt."""


def init_process_group(backend: str | None = None, *, timeout: timedelta = timedelta(minutes=10)) -> None:
    """`torch.distributed.init_process_group` for a process of torchrun that also works after a restart
    (``--max-restarts``).

    Other launchers, and processes that were given RANK and MASTER_ADDR, use PyTorch's own function.

    Args:
        backend: "gloo", "nccl", ...; by default "nccl" where there is a GPU, else "gloo".
        timeout: How long ranks wait for each other, here and in each exchange.

    Raises:
        TimeoutError: If not all ranks started within `timeout`.

    >>> from datetime import timedelta
    >>> def main() -> None:
    ...     pd.distributed.init_process_group("gloo", timeout=timedelta(minutes=2))
    """
    check_type(isinstance(timeout, timedelta), OP, "timeout", "be a datetime.timedelta", type(timeout).__name__)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if not dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    attempt_store = dist.PrefixStore(agreed_name(store, rank, ranks, timeout), store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=attempt_store, rank=rank, world_size=ranks, timeout=timeout)


def agreed_name(store: Any, rank: int, ranks: int, timeout: timedelta) -> str:
    """A name for this attempt that all its ranks share, and that no earlier attempt had.

    The first rank makes it. The others answer under it with names of their own, and wait until the first rank has seen
    these. A dead process never will.
    """
    token, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set("attempt", token)
        answers = [f"{token}/{other}" for other in range(1, ranks)]
        if answers and not _there(store, answers, timeout):
            silent_ranks = [other for other, answer in enumerate(answers, 1) if not store.check([answer])]
            raise TimeoutError(message(OP, "ranks", f"all start within {timeout}", f"no sign of {silent_ranks}"))
        for answer in answers:
            store.set(f"{token}/{store.get(answer).decode()}", "seen")
        return token
    while time.monotonic() < end:
        if _there(store, ["attempt"], PATIENCE):
            name = store.get("attempt").decode()
            store.set(f"{name}/{rank}", token)
            if _there(store, [f"{name}/{token}"], PATIENCE):
                return str(name)
    raise TimeoutError(message(OP, "ranks", f"all start within {timeout}", "no sign of all of them on the first one"))


def _there(store: Any, keys: list[str], timeout: timedelta) -> bool:
    """Whether all keys exist before the deadline."""
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        return False
    return True
