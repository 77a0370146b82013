"""Who has held a commit up for too long: nobody before P others are ready, unless nothing else could fill the batch."""

from relax.gate import Gate
from relax.gate.stragglers import Stragglers


def gate_with(ready: int, running: int, *, batch_size: int = 2, max_staleness: int = 1) -> Gate:
    """Groups 0, 1, ... of version 0; the last `ready` of them are ready."""
    gate = Gate(batch_size, max_staleness, max_staleness)
    gate.published(0)
    for group in range(running + ready):
        gate.issue(group, 0)
    for group in range(running, running + ready):
        gate.ready(group, 0)
    return gate


def due_gate() -> Gate:
    """Group 0 is due in batch 1, for which two groups of a newer version are ready."""
    gate = gate_with(ready=2, running=1)
    gate.commit()
    gate.started(0)
    gate.trained(0)
    gate.published(1)
    for group in (3, 4):
        gate.issue(group, 1)
        gate.ready(group, 1)
    return gate


def test_a_due_group_is_overdue_once_it_has_blocked_for_the_timeout() -> None:
    gate, stragglers = due_gate(), Stragglers(5.0)
    assert stragglers.overdue(gate.blocked(), 100.0) == ()
    assert stragglers.overdue(gate.blocked(), 104.9) == ()
    assert stragglers.overdue(gate.blocked(), 105.0) == (0,)
    gate.drop(0, again=True)
    assert gate.can_commit()


def test_a_timeout_of_zero_drops_what_is_due_at_once() -> None:
    assert Stragglers(0.0).overdue(due_gate().blocked(), 1.0) == (0,)


def test_nobody_blocks_while_others_could_fill_the_batch() -> None:
    """At the start of a run all groups are due, and none is slow."""
    gate, stragglers = gate_with(ready=0, running=4), Stragglers(1.0)
    for now in (0.0, 10.0, 20.0):
        assert stragglers.overdue(gate.blocked(), now) == ()


def test_in_lockstep_all_groups_on_their_way_block() -> None:
    gate, stragglers = gate_with(ready=1, running=1, max_staleness=0), Stragglers(3.0)
    assert stragglers.overdue(gate.blocked(), 0.0) == ()
    assert stragglers.overdue(gate.blocked(), 3.0) == (0,)


def test_a_timeout_of_zero_drops_nothing_that_nothing_else_could_replace() -> None:
    gate = gate_with(ready=1, running=1, max_staleness=0)
    assert Stragglers(0.0).overdue(gate.blocked(), 9.0) == ()


def test_time_starts_anew_when_a_group_has_stopped_blocking() -> None:
    gate, stragglers = due_gate(), Stragglers(5.0)
    stragglers.overdue(gate.blocked(), 0.0)
    gate.drop(4)  # too few are ready now, and a slot is free
    assert stragglers.overdue(gate.blocked(), 6.0) == ()
    gate.issue(5, 1)
    gate.ready(5, 1)
    assert stragglers.overdue(gate.blocked(), 7.0) == ()
    assert stragglers.overdue(gate.blocked(), 12.0) == (0,)


def test_the_new_draw_of_a_dropped_group_has_the_whole_timeout() -> None:
    gate, stragglers = gate_with(ready=1, running=1, max_staleness=0), Stragglers(3.0)
    stragglers.overdue(gate.blocked(), 0.0)
    assert stragglers.overdue(gate.blocked(), 3.0) == (0,)
    gate.drop(0, again=True)
    gate.issue(0, 0)
    assert stragglers.overdue(gate.blocked(), 3.0) == ()
    assert stragglers.overdue(gate.blocked(), 5.9) == ()
    assert stragglers.overdue(gate.blocked(), 6.0) == (0,)


def test_in_the_last_batch_nobody_else_can_come_however_many_slots_are_free() -> None:
    gate = Gate(2, 2, 1, last_batch=1)
    gate.published(0)
    for group in range(4):
        gate.issue(group, 0)
    for group in (0, 1):
        gate.ready(group, 0)
    gate.commit()
    gate.started(0)
    gate.trained(0)
    gate.published(1)
    assert gate.free_slots == 2 and not gate.can_issue(1)
    blocked, stragglers = gate.blocked(), Stragglers(5.0)
    assert (blocked.missing, blocked.needed, blocked.groups) == (2, 2, (2, 3))
    stragglers.overdue(blocked, 0.0)
    assert stragglers.overdue(blocked, 5.0) == (2, 3)
