"""Executes Gluon kernels on the CPU, from their source.

    simulator = Simulator()
    kernels = simulator.load("pdkernels.gluon.launch")        # the module, with its launchers, in the simulator
    with simulator.schedule(seed=3):
        out, lse = kernels.forward(arguments)

Partitions of a program are threads of which one runs at a time. Which one, and when copies, products and stores end, a seed decides.
What a GPU leaves undefined raises a `Fault`: see `memory`. Layouts are checked where Gluon checks them (`language`).

Programs run one after the other, or as many at once as `Simulator.resident` says, where they share memory: see `world`.

It does not model the weak ordering of plain memory accesses, nor the time that anything takes.
"""

from tests.gluonsim.loader import Edit, Simulator
from tests.gluonsim.scheduler import Fault

__all__ = ["Edit", "Fault", "Simulator"]
