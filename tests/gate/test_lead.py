"""Lead and bound are two knobs: the lead is how stale samples usually are, the bound what a slow one may use up."""

import pytest

from relax.gate import Batch, Blocked, Gate, Wait

P = 2


def filled(gate: Gate, group: int, slow: frozenset[int] = frozenset()) -> int:
    """Every slot is given to a group of the present version, and all but the slow ones are ready; the next id."""
    while gate.can_issue(gate.version):
        gate.issue(group, gate.version)
        if group not in slow:
            gate.ready(group, gate.version)
        group += 1
    return group


def train(gate: Gate, batch: Batch) -> None:
    gate.started(batch.index)
    gate.trained(batch.index)
    gate.published(batch.index + 1)


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_samples_that_come_in_time_are_as_stale_as_the_lead_and_not_as_the_bound(lead: int) -> None:
    gate, group, seen = Gate(P, 8, lead), 0, []
    gate.published(0)
    for _ in range(20):
        group = filled(gate, group)
        batch = gate.commit()
        assert isinstance(batch, Batch)
        seen.append(max(batch.staleness))
        train(gate, batch)
    assert seen == [min(b, lead) for b in range(20)]


@pytest.mark.parametrize("staleness", [2, 5])
def test_a_slow_group_is_waited_for_at_its_bound_and_not_before(staleness: int) -> None:
    """It is neither thrown away nor does it hold anybody up while there is time."""
    gate, group, slow = Gate(P, staleness, 2), 0, 0
    gate.published(0)
    for _ in range(staleness):
        group = filled(gate, group, frozenset({slow}))
        batch = gate.commit()
        assert isinstance(batch, Batch) and slow not in batch.groups
        train(gate, batch)
    filled(gate, group)
    blocked = gate.commit()
    assert isinstance(blocked, Blocked) and blocked.wait is Wait.DUE and blocked.groups == (slow,)
    gate.ready(slow, 0)
    last = gate.commit()
    assert isinstance(last, Batch) and last.index == staleness
    assert dict(zip(last.groups, last.staleness, strict=True))[slow] == staleness
