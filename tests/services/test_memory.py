"""The memory of a service: measured with its children, carried by heartbeats, written in the rows."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from desk import Desk, desk

from relax.protocol.messages import Assembled, Heartbeat
from relax.services.memory import resident_bytes

GROWN = 64_000_000
CHILD = f"import sys; held = bytearray({GROWN}); held[::4096] = b'x' * len(held[::4096]); print(flush=True); input()"


def test_the_memory_of_children_counts() -> None:
    before = resident_bytes()
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin and child.stdout
    try:
        child.stdout.readline()
        grown = resident_bytes() - before
    finally:
        child.communicate(b"\n", timeout=30)
    assert GROWN < grown < GROWN + 64_000_000
    assert abs(resident_bytes() - before) < GROWN / 2


def beat(it: Desk, rss: float) -> None:
    asyncio.run(it.on_heartbeat(Heartbeat("actor-0", "actor-0.1", "training", {}, {"rss_bytes": rss}), None))


def test_a_row_has_what_each_service_weighed_last(tmp_path: Path) -> None:
    it = desk(tmp_path, num_rollout=1)
    it.gauges["rss_bytes"] = 5e6
    for rss in (1e9, 2e9):
        beat(it, rss)
    it.turn()
    for order in it.orders():
        it.ready(order.lease)
    it.turn()
    it.started(0)
    it.batches.assembled(Assembled(0, {}), None)
    it.trained(0)
    it.turn()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["memory/actor-0/rss_mb"], row["memory/controller/rss_mb"]) == (2000.0, 5.0)
    assert "memory/reward-0/rss_mb" not in row, "it has not said"


def test_memory_that_changes_is_no_sign_of_progress(tmp_path: Path) -> None:
    it = desk(tmp_path)
    beat(it, 1e9)
    it._moved = moved = time.monotonic() - 100
    beat(it, 2e9)
    assert it._moved == moved
