"""What the controller keeps of a replica belongs to one life of it."""

from relax.protocol.messages import Lease, Member
from relax.services.control.replicas import Replicas


def member(incarnation: str) -> Member:
    return Member("rollout-0", "rollout", "inproc://rollout-0", incarnation)


def test_a_new_life_starts_empty_and_serves_nothing() -> None:
    replicas = Replicas()
    first = replicas.joined(member("1"))
    replicas.serves(first, 0, capacity=2)
    for group in range(2):
        replicas.takes(first, Lease(group, 0, 0, 1))
    assert replicas.choose(lambda version: True) is None, "it is full"
    second = replicas.joined(member("2"))
    replicas.sampled("rollout-0", Lease(0, 0, 0, 1))  # a late word of the first life
    assert replicas.choose(lambda version: True) is None, "it has no weights"
    replicas.serves(second, 1, capacity=2)
    for group in range(2, 4):
        assert replicas.choose(lambda version: True) is second
        replicas.takes(second, Lease(group, 0, 0, 1))
    assert replicas.choose(lambda version: True) is None
