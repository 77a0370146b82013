"""Lockstep: who samples a batch, which groups each replica gets, and in how many messages."""

from pathlib import Path

from desk import Desk, desk

from relax.protocol.messages import Generate, Rejected


def given(it: Desk) -> dict[str, list[int]]:
    """Replica -> groups of each of its messages, since it was last asked for; every message is queued whole."""
    taken: dict[str, list[int]] = {}
    for to, message in it.take(Generate):
        assert message.together
        name = to.removeprefix("inproc://")
        assert name not in taken, "a batch comes in one message"
        taken[name] = [order.lease.group for order in message.orders]
    return taken


def train(it: Desk, batch: int) -> None:
    for lease in [it.book.lease(group) for group in range(4 * batch, 4 * batch + 4)]:
        it.ready(lease, oldest=batch)
    it.turn()
    it.started(batch)
    it.trained(batch)
    it.published(batch + 1)
    it.now = max(replica.announced for replica in it.replicas)


def test_groups_go_round_the_replicas_in_one_message_each(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=3, rollout_batch_size=4)
    it.turn()
    assert given(it) == {"rollout-0": [0, 3], "rollout-1": [1], "rollout-2": [2]}
    train(it, 0)
    for name in ("rollout-2", "rollout-0", "rollout-1"):
        assert given(it) == {}, "a seat depends on who takes part, and that is not known before all have the weights"
        it.serves(name, 1)
        it.turn()
    assert given(it) == {"rollout-0": [6], "rollout-1": [4, 7], "rollout-2": [5]}


def test_a_replica_without_the_weights_is_waited_for_and_then_left_out_of_this_batch(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=2, rollout_batch_size=4, peer_timeout=60)
    it.turn()
    assert given(it) == {"rollout-0": [0, 2], "rollout-1": [1, 3]}
    train(it, 0)
    it.serves("rollout-1", 1)
    it.turn(after=59)
    assert given(it) == {}
    it.turn(after=1)
    assert given(it) == {"rollout-1": [4, 5, 6, 7]}
    it.serves("rollout-0", 1)
    it.turn()
    assert given(it) == {}, "it comes too late for this batch"
    train(it, 1)
    it.serves("rollout-0", 2)
    it.serves("rollout-1", 2)
    it.turn()
    assert given(it) == {"rollout-0": [8, 10], "rollout-1": [9, 11]}


def test_who_joins_is_waited_for_before_the_first_batch_alone(tmp_path: Path) -> None:
    """Later it takes part from the first batch that it has the weights for."""
    it = desk(tmp_path, rollouts=1, rollout_batch_size=4)
    it.register("rollout-1", "rollout")
    it.now = it.replicas.get("rollout-1").announced  # type: ignore[union-attr]
    it.turn()
    assert given(it) == {}
    it.serves("rollout-1", 0)
    it.turn()
    assert given(it) == {"rollout-0": [0, 2], "rollout-1": [1, 3]}
    it.register("rollout-2", "rollout")
    train(it, 0)
    it.serves("rollout-0", 1)
    it.serves("rollout-1", 1)
    it.turn()
    assert given(it) == {"rollout-0": [4, 6], "rollout-1": [5, 7]}
    train(it, 1)
    for name in ("rollout-0", "rollout-1", "rollout-2"):
        it.serves(name, 2)
    it.turn()
    assert given(it) == {"rollout-0": [9], "rollout-1": [10], "rollout-2": [8, 11]}


def test_a_batch_that_is_ready_before_the_weights_are_published_starts_nothing(tmp_path: Path) -> None:
    """Trained is not published: nobody samples until the replica has said that it serves the trainer's version."""
    it = desk(tmp_path, rollout_batch_size=4)
    it.turn()
    given(it)
    for group in range(4):
        it.ready(it.book.lease(group))
    it.turn()
    it.started(0)
    it.trained(0)
    it.turn()
    assert given(it) == {}
    it.published(1)
    it.turn()
    assert given(it) == {}
    it.serves("rollout-0", 0)  # a late word about the weights before
    it.turn()
    assert given(it) == {}
    it.serves("rollout-0", 1)
    it.turn()
    assert given(it) == {"rollout-0": [4, 5, 6, 7]}


def test_a_rejected_draw_is_drawn_again_within_its_batch(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=2, rollout_batch_size=4)
    it.turn()
    given(it)
    it.groups.rejected(Rejected(it.book.lease(1), "reward", "reward_timeout", "too slow"), None)
    it.turn()
    ((to, message),) = it.take(Generate)
    assert to == "inproc://rollout-0", "the next seat: what was wrong may have been the replica"
    assert [(o.lease.group, o.lease.attempt) for o in message.orders] == [(1, 1)]
    for group in range(4):
        it.ready(it.book.lease(group))
    it.turn()
    assert [lease.group for lease in it.committed()[0].leases] == [0, 1, 2, 3]
