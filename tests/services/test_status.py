"""What the controller writes to status.json: who was seen, in which life, and what the next batch waits for."""

import asyncio
import time
from pathlib import Path

import pytest
import structlog.testing
from desk import Desk, desk

from relax.protocol.messages import Heartbeat
from relax.status.snapshot import Seen, Snapshot


def seen(it: Desk, name: str) -> Seen:
    (one,) = [one for one in it._status(code=None).services if one.name == name]
    return one


@pytest.fixture
def it(tmp_path: Path) -> Desk:
    it = desk(tmp_path, rollouts=2)
    it.num_batches = 9
    return it


def test_it_tells_what_the_next_batch_waits_for_and_what_replicas_hold(it: Desk) -> None:
    it.turn()
    status = it._status(code=None)
    assert status.services[0].name == "controller" and status.waits == "batch 0 waits for 2 more ready groups: 0, 1"
    held = {one.name: one.sampling for one in status.services if one.role == "rollout"}
    assert sum(n or 0 for n in held.values()) == status.in_flight == status.slots - status.free_slots > 0
    assert all(one.version == 0 for one in status.services if one.role == "rollout")


def test_a_beat_is_in_the_next_status(it: Desk) -> None:
    asyncio.run(it.on_heartbeat(Heartbeat("actor-0", "actor-0.1", "training batch 3", {}, {"rss_bytes": 5.0}), None))
    one = seen(it, "actor-0")
    assert one.activity == "training batch 3" and one.rss_bytes == 5.0 and abs(one.heard - time.time()) < 1


def test_another_life_is_a_restart_and_who_left_stays_in_the_list(it: Desk) -> None:
    first = seen(it, "reward-0")
    it.register("reward-0", "reward", life=2)
    again = seen(it, "reward-0")
    assert (first.lives, again.lives, again.incarnation, again.gone) == (1, 2, "reward-0.2", False)
    it.registry.remove(it.registry.entries["reward-0"].member, 0.0, died=True)
    assert seen(it, "reward-0").gone and seen(it, "reward-0").lives == 2


def test_an_older_status_does_not_replace_the_last_one(it: Desk, tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    older = it._status(code=None)
    it.status.write(it._status(code=0))
    it.status.write(older)
    written = Snapshot.read(file)
    assert written is not None and written.code == 0


def test_a_status_that_cannot_be_written_is_said_once_and_ends_nothing(it: Desk, tmp_path: Path) -> None:
    (tmp_path / ".status.json").mkdir()
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            it.status.write(it._status(code=None))
    assert [line["event"] for line in logs] == ["status_not_written"]
    (tmp_path / ".status.json").rmdir()
    it.status.write(it._status(code=None))
    assert Snapshot.read(tmp_path / "status.json") is not None
