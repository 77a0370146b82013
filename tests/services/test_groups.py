"""Draws that end before they are trained, groups that move between replicas, replicas that leave."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from desk import Desk, desk, sender
from structlog.testing import capture_logs

from relax.gate.stragglers import STRIKES
from relax.ledger.states import State
from relax.protocol.messages import Filtered, Generate, HandedBack, Lease, Leaving, Ready, Rejected, Shutdown
from relax.protocol.payload import Payload

TOKENS = Payload.inline({"response_tokens": np.arange(3, dtype=np.int32)})
ASYNC: dict[str, Any] = {"max_staleness": 1, "rollout_lead": 1, "use_tis": True}


def issued(it: Desk) -> dict[int, Lease]:
    it.turn()
    return {order.lease.group: order.lease for order in it.orders()}


def train(it: Desk, served_by: str = "rollout-0") -> None:
    """The committed batch, up to the publication that a replica serves."""
    b = it.gate.next_batch - 1
    it.started(b)
    it.trained(b)
    it.published(b + 1)
    it.serves(served_by, b + 1)


# --- reports that overtake one another -------------------------------------------------------------------------------


@pytest.mark.parametrize("ready", [1, 2], ids=["ready", "committed"])
def test_a_group_may_be_ready_before_its_replica_was_heard_to_serve_and_to_sample(tmp_path: Path, ready: int) -> None:
    it = desk(tmp_path, **ASYNC)
    leases = issued(it)
    for group in range(ready):
        it.groups.ready(Ready(leases[group], 0, 5), sender("advantages-0"))
    it.turn()
    it.serves("rollout-0", 0)
    for group in range(ready):
        it.sampled(leases[group])
    (replica,) = it.replicas
    assert set(replica.samples) == set(leases) - set(range(ready)) and set(replica.keeps) == set(range(ready))


# --- stragglers ------------------------------------------------------------------------------------------------------


def with_a_straggler(tmp_path: Path, **options: Any) -> tuple[Desk, Lease]:
    """Group 0 of version 0 runs at rollout-0 and is due in batch 1, for which two younger groups are ready."""
    it = desk(tmp_path, rollouts=2, **(ASYNC | options))
    it.serves("rollout-0", 0, credit=1)
    leases = issued(it)
    for group in (1, 2):
        it.ready(leases[group])
    it.groups.filtered(Filtered(leases[3], "too_few_rewards"), sender("advantages-0"))
    it.turn()
    # Whatever is issued meanwhile is of version 1.
    for order in it.orders():
        it.groups.filtered(Filtered(order.lease, "too_few_rewards"), sender("advantages-0"))
    train(it, served_by="rollout-1")
    for lease in list(issued(it).values())[:2]:
        it.ready(lease, oldest=1)
    it.released()
    return it, leases[0]


def test_a_group_that_blocks_a_commit_for_too_long_is_dropped_and_drawn_again(tmp_path: Path) -> None:
    it, lease = with_a_straggler(tmp_path, straggler_timeout=5.0)
    it.turn()
    assert it.committed()[-1].batch == 0
    it.turn(after=4.9)
    assert it.committed() == [] and 0 in it.book
    it.turn(after=0.2)
    assert [assemble.batch for assemble in it.committed()] == [1]
    assert it.released() == [lease], "the replica stops sampling it"
    (again,) = (order.lease for order in it.orders() if order.lease.group == 0)
    assert (again.attempt, again.fence) == (1, 2)
    assert it.pace.counts.values()["rollout/dropped/straggler"] == 1
    assert it.book.conservation().holds


def test_zero_drops_a_straggler_at_once(tmp_path: Path) -> None:
    it, _ = with_a_straggler(tmp_path, straggler_timeout=0.0)
    it.turn()
    assert [assemble.batch for assemble in it.committed()] == [0, 1]


def test_without_a_timeout_the_trainer_waits(tmp_path: Path) -> None:
    it, lease = with_a_straggler(tmp_path)
    it.turn(after=1e6)
    assert [assemble.batch for assemble in it.committed()] == [0]
    it.ready(lease)
    it.turn()
    assert [assemble.batch for assemble in it.committed()] == [1]


def test_three_times_a_straggler_is_set_aside(tmp_path: Path) -> None:
    """In lockstep the last group of a batch blocks it whichever draw it is."""
    it = desk(tmp_path, straggler_timeout=5.0)
    it.ready(issued(it)[1])
    with capture_logs() as logs:
        for attempt in range(STRIKES):
            assert it.book[0].attempt == attempt
            it.turn()
            it.turn(after=5.0)
            it.turn()
    (told,) = [record for record in logs if record["event"] == "prompt_set_aside"]
    assert (told["prompt_id"], told["reason"]) == (0, "straggler")
    assert "batch 0 waits for" in told["error"]
    counts = it.pace.counts.values()
    assert (counts["rollout/set_aside"], counts["rollout/dropped/straggler"]) == (1, STRIKES - 1)
    assert 0 not in it.book and it.book.in_state(State.ISSUED) == [2], "another prompt takes its place"


def test_a_rejected_draw_waits_for_another_replica_if_there_is_one(tmp_path: Path) -> None:
    """One that hangs is the emptiest as soon as its groups are dropped: the same prompt would come back to it."""
    it = desk(tmp_path, rollouts=2, max_staleness=2, rollout_batch_size=2)
    for name in ("rollout-0", "rollout-1"):
        it.serves(name, 0, credit=1)
    it.turn()
    held = {order.lease.group: it.book[order.lease.group].holder for order in it.orders()}
    assert held == {0: "rollout-0", 1: "rollout-1"}
    it.groups.rejected(Rejected(it.book.lease(0), "rollout", "bad_result", ""), sender("rollout-0"))
    it.turn()
    assert [(o.lease.group, it.book[o.lease.group].holder) for o in it.orders()] == [(2, "rollout-0")]
    it.sampled(it.book.lease(1))
    it.turn()
    assert [(o.lease.group, it.book[o.lease.group].holder) for o in it.orders()] == [(0, "rollout-1")]
    it.groups.rejected(Rejected(it.book.lease(0), "rollout", "bad_result", ""), sender("rollout-1"))
    it.member_leaves(Leaving("rollout-0"), sender("rollout-0"))
    it.turn()
    assert [(o.lease.group, it.book[o.lease.group].holder) for o in it.orders()] == [(0, "rollout-1")]


@pytest.mark.parametrize("one_is_sampled", [False, True])
def test_only_as_many_are_dropped_as_it_takes(tmp_path: Path, one_is_sampled: bool) -> None:
    """Of two groups of version 0 one may still be trained in time by the batch after the next. One that was sampled
    will be ready soon, and is waited for."""
    it = desk(
        tmp_path,
        rollout_batch_size=1,
        straggler_timeout=5.0,
        **(ASYNC | {"max_staleness": 2, "rollout_lead": 2}),
    )
    leases = issued(it)
    it.serves("rollout-0", 0, credit=1)
    it.register("rollout-1", "rollout")
    it.ready(leases[0])
    if one_is_sampled:
        it.sampled(leases[1])
    it.turn()
    train(it, served_by="rollout-1")
    (young,) = issued(it).values()
    it.ready(young, oldest=1)
    it.turn(after=1.0)
    assert [assemble.batch for assemble in it.committed()] == [0]
    assert set(it.gate.blocked().groups) == {1, 2} and it.gate.blocked().needed == 1
    it.turn(after=5.0)
    assert [assemble.batch for assemble in it.committed()] == ([] if one_is_sampled else [1])
    assert (it.book[1].attempt, it.book[2].attempt) == ((0, 0) if one_is_sampled else (1, 0))


def test_no_group_is_a_straggler_while_a_spare_one_may_be_in_time(tmp_path: Path) -> None:
    it = desk(tmp_path, rollout_batch_size=3, straggler_timeout=5.0, over_sampling_batch_size=4)
    leases = issued(it)
    it.turn(after=60)
    assert it.book.in_state(State.ISSUED) == sorted(leases)


def test_a_group_that_is_to_be_issued_anew_is_no_straggler(tmp_path: Path) -> None:
    it = desk(tmp_path, rollout_batch_size=1, straggler_timeout=5.0)
    (lease,) = issued(it).values()
    it.replicas.get("rollout-0").version = -1  # nobody is there to take it
    it.groups.handed_back(HandedBack(lease, None, None), sender("rollout-0"))
    it.turn()
    it.turn(after=60.0)
    assert it.book[0].attempt == 0


# --- spare groups ----------------------------------------------------------------------------------------------------


def test_the_first_ready_are_trained_and_the_prompts_of_the_others_come_first_in_the_next_batch(tmp_path: Path) -> None:
    it = desk(tmp_path, over_sampling_batch_size=4)
    it.turn()
    ((_, batch),) = it.take(Generate)
    assert batch.together and [order.lease.group for order in batch.orders] == [0, 1, 2, 3]
    leases = {order.lease.group: order.lease for order in batch.orders}
    it.ready(leases[3])
    it.sampled(leases[0])
    it.ready(leases[1])
    it.turn()
    (assemble,) = it.committed()
    assert [lease.group for lease in assemble.leases] == [1, 3]
    assert it.released() == [leases[0], leases[2]]
    assert it.orders() == [], "the next batch waits for its weights"
    counts = it.book.conservation()
    assert counts.holds and counts.dropped == {"surplus": 2}
    train(it)
    it.turn()
    ((_, batch),) = it.take(Generate)
    assert batch.together
    assert [(order.lease.group, order.prompt_id, order.lease.attempt) for order in batch.orders] == [
        (4, 0, 0),
        (5, 2, 0),
        (6, 4, 0),
        (7, 5, 0),
    ]


def test_surplus_keeps_the_attempt_of_its_draw(tmp_path: Path) -> None:
    it = desk(tmp_path, over_sampling_batch_size=3)
    it.groups.rejected(Rejected(issued(it)[0], "reward", "bad", ""), sender("reward-0"))
    assert issued(it)[0].attempt == 1
    for group in (1, 2):
        it.ready(it.book.lease(group))
    it.turn()
    assert (it.book[3].prompt_id, it.book[3].attempt, it.book[3].state) == (0, 1, State.PENDING)


def test_a_run_with_spares_trains_every_prompt_of_its_data_once(tmp_path: Path) -> None:
    it = desk(tmp_path, prompts=7, over_sampling_batch_size=4, num_rollout=None, num_epoch=1)
    trained = []
    while not it.spawned:
        it.turn()
        for order in reversed(it.orders()):
            it.ready(order.lease, oldest=it.gate.version)
        it.turn()
        for assemble in it.committed():
            trained.append([it.book[lease.group].prompt_id for lease in assemble.leases])
            train(it)
    assert sorted(prompt for batch in trained for prompt in batch) == list(range(7))
    assert [len(batch) for batch in trained] == [2, 2, 2, 1]
    assert "finish" in it.spawned


# --- groups that move ------------------------------------------------------------------------------------------------


def partial(tmp_path: Path, **options: Any) -> Desk:
    return desk(tmp_path, partial_rollout=True, rollouts=2, **(ASYNC | {"max_staleness": 2} | options))


def test_a_parked_group_goes_on_at_another_replica_with_its_tokens(tmp_path: Path) -> None:
    it = partial(tmp_path)
    lease = next(lease for lease in issued(it).values() if it.book[lease.group].holder == "rollout-0")
    it.replicas.leaves(it.replicas.get("rollout-0"))
    it.groups.handed_back(HandedBack(lease, 0, TOKENS), sender("rollout-0"))
    it.turn()
    ((to, batch),) = it.take(Generate)
    (order,) = batch.orders
    assert to == "inproc://rollout-1" and order.parked is TOKENS
    assert (order.lease.group, order.lease.attempt, order.lease.fence) == (lease.group, 0, lease.fence + 1)
    it.ready(order.lease, oldest=0)
    assert it.gate.deadline(lease.group) == 2


def test_without_tokens_a_group_that_was_handed_back_starts_anew(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=2, **ASYNC)
    lease = next(lease for lease in issued(it).values() if it.book[lease.group].holder == "rollout-0")
    it.replicas.leaves(it.replicas.get("rollout-0"))
    it.groups.handed_back(HandedBack(lease, None, None), sender("rollout-0"))
    assert it.gate.deadline(lease.group) is None
    it.turn()
    (order,) = it.orders()
    assert (order.lease.group, order.lease.attempt, order.parked) == (lease.group, 0, None)


def test_a_group_that_is_handed_back_under_an_old_lease_stays_where_it_is(tmp_path: Path) -> None:
    it = partial(tmp_path)
    lease = issued(it)[0]
    it.groups.rejected(Rejected(lease, "rollout", "bad_result", ""), sender(it.book[0].holder or ""))
    again = issued(it)[0]
    it.groups.handed_back(HandedBack(lease, 0, TOKENS), sender("rollout-0"))
    assert it.book.lease(0) == again and not it.draws.waiting


def test_a_parked_group_that_no_replica_may_take_holds_up_no_other(tmp_path: Path) -> None:
    """Groups of version 0 fill the batches that could train them in time. So one with tokens of version 1 may not go on
    at a replica of version 0; one behind it, which has the same tokens as that replica gives, may."""
    it = partial(tmp_path, rollout_batch_size=1, rollout_lead=2)
    it.serves("rollout-1", 0, credit=1)
    leases = issued(it)
    it.ready(leases[0])
    it.turn()
    train(it, served_by="rollout-1")
    assert it.book[1].holder == "rollout-1"
    it.serves("rollout-1", 1, credit=1)
    it.turn()
    assert [it.book[order.lease.group].holder for order in it.orders()] == ["rollout-0"]
    it.replicas.leaves(it.replicas.get("rollout-1"))
    it.groups.handed_back(HandedBack(leases[1], 1, TOKENS), sender("rollout-1"))
    it.groups.handed_back(HandedBack(leases[2], 0, TOKENS), sender("rollout-0"))
    it.turn()
    assert [order.lease.group for order in it.orders()] == [2]
    it.serves("rollout-0", 1)
    it.turn()
    assert [order.lease.group for order in it.orders()] == [1]


def test_groups_that_run_on_under_new_weights_keep_their_deadline(tmp_path: Path) -> None:
    it = desk(tmp_path, partial_rollout=True, **(ASYNC | {"max_staleness": 2}))
    leases = issued(it)
    for group in (0, 1):
        it.ready(leases[group])
    it.turn()
    it.started(0)
    it.trained(0)
    it.published(1)
    it.serves("rollout-0", 1, running=(leases[2],))
    assert (it.gate.deadline(2), it.gate.deadline(3)) == (2, 3)


# --- replicas that leave ---------------------------------------------------------------------------------------------


def test_a_replica_that_leaves_gets_no_more_and_goes_when_it_holds_nothing(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=2, rollout_batch_size=2, **ASYNC)
    leases = issued(it)
    mine = [lease for lease in leases.values() if it.book[lease.group].holder == "rollout-0"]
    it.member_leaves(Leaving("rollout-0"), sender("rollout-0"))
    it.ready(mine[0])
    it.groups.handed_back(HandedBack(mine[1], None, None), sender("rollout-0"))
    it.turn()
    assert [it.book[order.lease.group].holder for order in it.orders()] == ["rollout-1"]
    assert it.spawned == [], "its tensors are still needed"
    it.ready(leases[1])
    it.turn()
    it.started(0)
    it.trained(0)
    it.turn()
    assert it.spawned == ["parting from rollout-0"]
    it.turn()
    assert it.spawned == ["parting from rollout-0"]
    assert not it.replicas.all_leave


def test_a_lockstep_batch_does_not_wait_for_a_replica_that_leaves(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=2)
    it.register("rollout-2", "rollout")
    it.now = it.replicas.get("rollout-2").announced
    it.turn()
    assert it.orders() == [], "rollout-2 has time to load"
    it.member_leaves(Leaving("rollout-2"), sender("rollout-2"))
    it.turn()
    assert len(it.orders()) == 2


@pytest.mark.parametrize("gone", [False, True], ids=["leaving", "gone"])
def test_a_run_whose_replicas_all_leave_is_told_so(tmp_path: Path, gone: bool) -> None:
    it = desk(tmp_path)
    assert not it.replicas.all_leave
    it.member_leaves(Leaving("rollout-0"), sender("rollout-0"))
    if gone:
        it.turn()
    assert it.replicas.all_leave
    it.register("rollout-1", "rollout")
    assert not it.replicas.all_leave


# --- reports that come too late --------------------------------------------------------------------------------------


def test_advantages_is_told_to_let_go_of_a_group_whose_draw_has_ended(tmp_path: Path) -> None:
    it = desk(tmp_path)
    lease = issued(it)[0]
    it.groups.rejected(Rejected(lease, "reward", "bad", ""), sender("reward-0"))
    it.turn()
    it.sent.clear()
    it.groups.ready(Ready(lease, 0, 5), sender("advantages-0"))
    it.turn()
    assert it.released("advantages") == [lease]
    assert it.take(Shutdown) == []


def test_lengths_of_generated_trained_and_dropped_groups_are_told_apart(tmp_path: Path) -> None:
    it = desk(tmp_path)
    leases = issued(it)
    it.ready(leases[0], tokens=10)
    it.sampled(leases[1], tokens=40)
    it.groups.filtered(Filtered(leases[1], "too_few_rewards"), sender("advantages-0"))
    it.ready(issued(it)[2], tokens=20)
    it.turn()
    it.started(0)
    it.pace.counts, counts = type(it.pace.counts)(), it.pace.counts.values()
    assert counts["rollout/group_tokens/generated"] == pytest.approx(70 / 3)
    assert counts["rollout/group_tokens/dropped"] == 40
    it.trained(0)
    it.rows.report(0, "advantages", {})
    it.turn()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["rollout/group_tokens/trained"] == 15.0
    assert row["perf/response_tokens"] == 30.0, "what the ledger knows of the groups, whatever a trainer reports"
