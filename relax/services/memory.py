"""What a service weighs."""

import contextlib

import psutil


def resident_bytes() -> int:
    """Resident memory of this process and of all that descend from it: engine cores, ranks, reward workers.

    Memory that several of them share (a mapped version of the weights, pages kept since a fork) counts in each.
    """
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # a child that has just ended
            total += process.memory_info().rss
    return total
