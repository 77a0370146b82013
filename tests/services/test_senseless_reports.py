"""A well-formed report that cannot be true ends the run with its sender's name; one of a member that has left is not
heard."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from desk import Desk, desk, sender

from relax.ledger.states import State
from relax.protocol.messages import Filtered, Lease, Published, Ready, Sampled, Serving, Started, Trained
from relax.protocol.payload import Payload
from relax.services.service import ServiceError
from relax.weights.manifest import Manifest, WeightTag, set_digest


def report(it: Desk, message: Any, name: str) -> None:
    """The report as it comes in, from the member of that name."""
    it.mailbox = SimpleNamespace(on=lambda *args, **kwargs: None)  # type: ignore[assignment]
    asyncio.run(it.handlers()[type(message)](message, sender(name)))


def manifest(version: int) -> bytes:
    return Manifest(WeightTag("r", 0, version, version, set_digest(()), 0, 0.0), ()).to_json()


NOBODY = Lease(0, 0, 0, 9)
KEPT = Payload("p", {}, None, "inproc://rollout-0")


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (Trained(0, {}), "rollout-0"),
        (Started(0, 0), "critic-0"),
        (Published(1, manifest(1)), "rollout-0"),
        (Serving(0, 1, ()), "actor-0"),
        (Ready(NOBODY, 0, 1), "rollout-0"),
        (Filtered(NOBODY, "mood"), "reward-0"),
        (Sampled(NOBODY, 0, 1, KEPT, ""), "actor-0"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_who_has_no_say_in_it_is_named(tmp_path: Path, message: Any, name: str) -> None:
    it = desk(tmp_path)
    it.register("critic-0", "critic")
    with pytest.raises(ServiceError, match=f"^{name} sends {type(message).__name__}, which only"):
        report(it, message, name)


@pytest.mark.parametrize(
    ("message", "name", "told"),
    [
        (Trained(7, {}), "actor-0", "batch 7"),
        (Started(7, 0), "actor-0", "batch 7 started"),
        (Published(1, b"no manifest"), "actor-0", "weight manifest from actor-0"),
        (Published(0, manifest(3)), "actor-0", "version 3"),
        (Serving(5, 1, ()), "rollout-0", "version 5"),
    ],
    ids=lambda value: type(value).__name__ if dataclasses.is_dataclass(value) else str(value),
)
def test_what_cannot_be_is_told_with_its_sender(tmp_path: Path, message: Any, name: str, told: str) -> None:
    it = desk(tmp_path)
    with pytest.raises(ServiceError, match=f"^{name} sends {type(message).__name__}, .*{told}"):
        report(it, message, name)


def test_a_member_of_a_committed_batch_cannot_be_filtered(tmp_path: Path) -> None:
    it = desk(tmp_path)
    it.turn()
    for order in it.orders():
        it.ready(order.lease)
    it.turn()
    (group, *_) = it.book.in_state(State.COMMITTED)
    with pytest.raises(ServiceError, match=r"^advantages-0 sends Filtered, .*group 0"):
        report(it, Filtered(it.book.lease(group), "late"), "advantages-0")


def test_who_has_left_is_not_heard(tmp_path: Path) -> None:
    it = desk(tmp_path)
    it.turn()
    lease = it.orders()[0].lease
    it.register("rollout-7", "rollout")
    it.registry.remove(it.members["rollout-7"], 0.0, died=False)
    report(it, Sampled(lease, 0, 5, KEPT, ""), "rollout-7")
    assert it.book[lease.group].state is State.ISSUED
    report(it, Sampled(lease, 0, 5, KEPT, ""), "rollout-0")
    assert it.book[lease.group].state is State.SAMPLED


@pytest.mark.parametrize("credit", [0, -1])
def test_a_replica_takes_at_least_one_group(credit: int) -> None:
    with pytest.raises(ValueError, match=f"credit = {credit}"):
        Serving(0, credit, ())
