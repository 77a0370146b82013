"""What the controller keeps of a replica belongs to one life of it; and a run without any goes on while it can."""

import asyncio
import time
from pathlib import Path

import pytest
from desk import desk, sender

from relax.protocol.messages import Lease, Leaving, Member
from relax.services import controller
from relax.services.control.replicas import Replicas
from relax.services.service import ServiceError


def member(incarnation: str) -> Member:
    return Member("rollout-0", "rollout", "inproc://rollout-0", incarnation)


def test_a_new_life_starts_empty_and_serves_nothing() -> None:
    replicas = Replicas()
    first = replicas.joined(member("1"))
    replicas.serves(first, 0, credit=2)
    for group in range(2):
        replicas.takes(first, Lease(group, 0, 0, 1))
    assert replicas.choose(lambda version: True) is None, "it is full"
    second = replicas.joined(member("2"))
    replicas.sampled("rollout-0", Lease(0, 0, 0, 1))  # a late word of the first life
    assert replicas.choose(lambda version: True) is None, "it has no weights"
    replicas.serves(second, 1, credit=2)
    for group in range(2, 4):
        assert replicas.choose(lambda version: True) is second
        replicas.takes(second, Lease(group, 0, 0, 1))
    assert replicas.choose(lambda version: True) is None


def test_the_end_of_a_life_says_nothing_of_the_next_one() -> None:
    replicas = Replicas()
    replicas.joined(member("1"))
    second = replicas.joined(member("2"))
    assert replicas.died(member("1")) is None and replicas.get("rollout-0") is second
    assert replicas.died(member("2")) is second and replicas.get("rollout-0") is None


def test_the_last_replicas_may_leave_once_there_is_nothing_left_to_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "CHECK_SECONDS", 0.01)
    it = desk(tmp_path, num_rollout=1)
    it.now = time.monotonic()
    it.turn()
    leases = [order.lease for order in it.orders()]
    for lease in leases:
        it.ready(lease)
    it.member_leaves(Leaving("rollout-0"), sender("rollout-0"))

    async def watch() -> None:
        await asyncio.wait_for(it._watch_over(), 0.2)

    with pytest.raises(ServiceError, match="every rollout replica has left"):
        asyncio.run(watch())
    it.turn()
    assert it.gate.finished
    with pytest.raises(TimeoutError):
        asyncio.run(watch())
