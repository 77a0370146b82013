"""A death at each state of a group and of a batch: what comes again and from where, nothing lost and nothing twice."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from desk import Desk, desk, sender

from relax.ledger.states import State
from relax.protocol.messages import (
    GroupOrder,
    HandedBack,
    Lease,
    Leaving,
    Ready,
    Release,
    RewardDone,
    Sampled,
    Shutdown,
    Withdraw,
)
from relax.protocol.payload import Payload
from relax.services.service import ServiceError

ASYNC: dict[str, Any] = {"max_staleness": 1, "rollout_lead": 1, "use_tis": True}
STATES = (State.ISSUED, State.SAMPLED, State.SCORED, State.READY)


def issued(it: Desk) -> dict[int, GroupOrder]:
    it.turn()
    return {order.lease.group: order for order in it.orders()}


def bring(it: Desk, lease: Lease, state: State) -> None:
    """The group gets as far as `state`."""
    if state >= State.SAMPLED:
        it.sampled(lease)
    if state >= State.SCORED:
        advantages = it.of_role("advantages")[0].incarnation
        it.groups.reward_done(RewardDone(lease, advantages), sender("reward-0"))
    if state >= State.READY:
        it.groups.ready(Ready(lease, 0, 5), sender("advantages-0"))


def dies(it: Desk, name: str) -> None:
    it._ended_life(it.registry.entries[name], "was killed", 0.0)


def is_well(it: Desk) -> None:
    """Every issued draw is accounted for, and the gate counts what the book does."""
    assert it.book.conservation().holds
    waiting = {draw.group for draw in it.draws.again()}
    pending = set(it.book.in_state(State.PENDING))
    assert waiting == pending
    open_groups = set(it.book.in_state(*STATES)) | pending
    assert it.gate.in_flight == len(open_groups)
    for replica in it.replicas:
        for group, fence in replica.samples.items():
            assert (it.book[group].state, it.book[group].fence) == (State.ISSUED, fence)


def kept_at(order: GroupOrder) -> str:
    assert order.parked is not None and order.parked.arrays is None
    return order.parked.producer


# --- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.word)
def test_groups_of_a_rollout_that_dies_are_sampled_anew_unless_advantages_has_them(
    tmp_path: Path, state: State
) -> None:
    it = desk(tmp_path, rollouts=2, **ASYNC)
    orders = issued(it)
    mine = [o.lease for o in orders.values() if it.book[o.lease.group].holder == "rollout-0"]
    for lease in mine:
        bring(it, lease, state)
    dies(it, "rollout-0")
    is_well(it)
    again = issued(it)
    if state is State.READY:
        assert again == {} and all(it.book[lease.group].state >= State.READY for lease in mine)
    else:
        assert [o.lease for o in again.values()] == [Lease(lease.group, 0, 0, lease.fence + 1) for lease in mine], (
            "the same draw, under a new fence"
        )
        assert all(o.parked is None for o in again.values())
        assert {it.book[group].holder for group in again} == {"rollout-1"}
    is_well(it)


@pytest.mark.parametrize(
    ("role", "states"),
    [("reward-0", (State.SAMPLED,)), ("advantages-0", (State.SCORED, State.READY)), ("reference-0", ())],
)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.word)
def test_groups_of_a_later_stage_that_dies_go_on_from_the_tensors_that_the_replica_keeps(
    tmp_path: Path, role: str, states: tuple[State, ...], state: State
) -> None:
    it = desk(tmp_path, use_kl_loss=True, kl_loss_coef=0.1, ref_load="r", **ASYNC)
    lease = issued(it)[0].lease
    bring(it, lease, state)
    dies(it, role)
    is_well(it)
    if state not in states:
        assert it.book[0].state is state and not it.draws.waiting
        return
    assert it.gate.deadline(0) == 1, "it has tokens of version 0"
    order = issued(it)[0]
    assert kept_at(order) == "inproc://rollout-0" and order.lease == Lease(0, 0, 0, lease.fence + 1)
    is_well(it)
    bring(it, order.lease, State.SAMPLED)
    assert it.pace.counts.values()["rollout/group_tokens/generated"] == 5, "nothing was generated for it"
    it.turn()
    assert it.released() == [lease], "what was kept under the old lease"


def test_a_report_about_a_group_that_was_sent_to_a_dead_service_makes_it_come_again(tmp_path: Path) -> None:
    it = desk(tmp_path, **ASYNC)
    orders = issued(it)
    reward, advantages = it.of_role("reward")[0].incarnation, it.of_role("advantages")[0].incarnation
    dies(it, "reward-0")
    dies(it, "advantages-0")
    it.register("reward-0", "reward", life=2)
    it.register("advantages-0", "advantages", life=2)
    payload = Payload("p", {}, None, "inproc://rollout-0")
    it.groups.sampled(Sampled(orders[0].lease, 0, 5, payload, reward), sender("rollout-0"))
    it.groups.sampled(Sampled(orders[1].lease, 0, 5, payload, "reward-0.2"), sender("rollout-0"))
    it.groups.reward_done(RewardDone(orders[1].lease, advantages), sender("reward-0", 2))
    is_well(it)
    assert {group: kept_at(order) for group, order in issued(it).items()} == {
        0: "inproc://rollout-0",
        1: "inproc://rollout-0",
    }
    is_well(it)


def test_a_group_that_was_sent_to_no_reward_yet_comes_again_when_any_dies(tmp_path: Path) -> None:
    it = desk(tmp_path, **ASYNC)
    lease = issued(it)[0].lease
    dies(it, "reward-0")
    payload = Payload("p", {}, None, "inproc://rollout-0")
    it.groups.sampled(Sampled(lease, 0, 5, payload, ""), sender("rollout-0"))
    assert it.book[0].state is State.SAMPLED, "its replica waits for a reward service"
    it.register("reward-0", "reward", life=2)
    dies(it, "reward-0")
    assert kept_at(issued(it)[0]) == "inproc://rollout-0"


def test_scored_before_it_was_heard_to_be_sampled_it_keeps_the_deadline_of_its_tokens(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=2, **(ASYNC | {"max_staleness": 3, "rollout_lead": 1}))
    lease = issued(it)[0].lease
    it.groups.reward_done(RewardDone(lease, "advantages-0.1"), sender("reward-0"))
    it.sampled(lease)
    dies(it, "advantages-0")
    assert it.gate.deadline(0) == 3
    is_well(it)


def test_a_group_loses_its_tokens_when_their_replica_dies_too(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=2, **ASYNC)
    lease = next(o.lease for o in issued(it).values() if it.book[o.lease.group].holder == "rollout-0")
    bring(it, lease, State.SAMPLED)
    dies(it, "reward-0")
    dies(it, "rollout-0")
    is_well(it)
    order = issued(it)[lease.group]
    assert order.parked is None and order.lease == Lease(lease.group, 0, 0, lease.fence + 1)
    is_well(it)


@pytest.mark.parametrize("dead", ["rollout-0", "rollout-1"])
def test_a_death_while_a_replica_pulls_what_another_keeps(tmp_path: Path, dead: str) -> None:
    it = desk(tmp_path, rollouts=2, **ASYNC)
    lease = next(o.lease for o in issued(it).values() if it.book[o.lease.group].holder == "rollout-0")
    bring(it, lease, State.SAMPLED)
    it.serves("rollout-0", 0, credit=1)  # full
    dies(it, "reward-0")
    order = issued(it)[lease.group]
    assert it.book[lease.group].holder == "rollout-1" and kept_at(order) == "inproc://rollout-0"
    dies(it, dead)
    is_well(it)
    if dead == "rollout-0":
        assert it.book[lease.group].state is State.ISSUED, "perhaps it has them already"
        it.groups.handed_back(HandedBack(order.lease, None, None), sender("rollout-1"))
        assert issued(it)[lease.group].parked is None, "it had not"
    else:
        it.serves("rollout-0", 0, credit=100)
        again = issued(it)[lease.group]
        assert kept_at(again) == "inproc://rollout-0" and again.lease.fence == order.lease.fence + 1
    is_well(it)


def test_a_replica_that_pulls_from_itself_and_dies_leaves_nothing_behind(tmp_path: Path) -> None:
    it = desk(tmp_path, **ASYNC)
    lease = issued(it)[0].lease
    bring(it, lease, State.SAMPLED)
    dies(it, "reward-0")
    order = issued(it)[0]
    dies(it, "rollout-0")
    is_well(it)
    it.register("rollout-0", "rollout", life=2)
    it.serves_again("rollout-0", 2)
    again = issued(it)[0]
    assert again.parked is None and again.lease.fence == order.lease.fence + 1
    is_well(it)


def test_a_partial_group_keeps_what_it_began_from_when_its_next_replica_dies(tmp_path: Path) -> None:
    tokens = Payload.inline({"response_tokens": np.arange(3, dtype=np.int32)})
    it = desk(tmp_path, rollouts=2, partial_rollout=True, **(ASYNC | {"max_staleness": 2}))
    lease = next(o.lease for o in issued(it).values() if it.book[o.lease.group].holder == "rollout-0")
    it.replicas.leaves(it.replicas.get("rollout-0"))
    it.groups.handed_back(HandedBack(lease, 0, tokens), sender("rollout-0"))
    assert issued(it)[lease.group].parked is tokens
    dies(it, "rollout-1")
    is_well(it)
    it.register("rollout-1", "rollout", life=2)
    it.serves_again("rollout-1", 2)
    assert issued(it)[lease.group].parked is tokens and it.gate.deadline(lease.group) == 2
    is_well(it)


def test_a_stage_that_cannot_get_at_the_tensors_does_not_cost_an_attempt(tmp_path: Path) -> None:
    it = desk(tmp_path, **ASYNC)
    lease = issued(it)[0].lease
    bring(it, lease, State.SAMPLED)
    it.groups.handed_back(HandedBack(lease, None, None), sender("reward-0"))
    order = issued(it)[0]
    assert order.lease == Lease(0, 0, 0, lease.fence + 1) and order.parked is None
    is_well(it)


def test_a_group_that_only_comes_again_is_no_straggler(tmp_path: Path) -> None:
    it = desk(tmp_path, straggler_timeout=0.0)
    leases = [order.lease for order in issued(it).values()]
    bring(it, leases[0], State.READY)
    bring(it, leases[1], State.SAMPLED)
    dies(it, "reward-0")
    it.turn()
    assert it.book[1].attempt == 0
    it.turn(after=1e3)
    assert it.book[1].attempt == 0


# --- batches ---------------------------------------------------------------------------------------------------------


def committed(it: Desk) -> Withdraw:
    for order in issued(it).values():
        bring(it, order.lease, State.READY)
    it.turn()
    (asked,) = it.batches.untrained()
    return asked


def test_a_batch_that_no_trainer_has_is_taken_back_and_committed_anew_under_another_number(tmp_path: Path) -> None:
    it = desk(tmp_path, **ASYNC)
    asked = committed(it)
    members = [lease.group for lease in it.committed()[0].leases]
    dies(it, "advantages-0")
    assert it.spawned == ["withdraw batch 0"]
    it.batches.withdrawn(asked, {"actor": False})
    is_well(it)
    assert it.gate.next_batch == 0
    it.register("advantages-0", "advantages", life=2)
    again = issued(it)
    assert set(members) <= set(again) and {kept_at(again[group]) for group in members} == {"inproc://rollout-0"}
    for group in sorted(again):
        it.sampled(again[group].lease)
        it.groups.ready(Ready(again[group].lease, 0, 5), sender("advantages-0", 2))
    it.turn()
    (assemble,) = it.committed()
    assert (assemble.batch, assemble.commit) == (0, asked.commit + 1)
    it.started(0)
    it.trained(0)
    assert it.book.conservation().holds and it.book.conservation().trained == 2
    it.batches.withdrawn(asked, {"actor": False})  # a late answer about the first commit
    is_well(it)


def test_a_batch_that_the_trainer_has_stands(tmp_path: Path) -> None:
    it = desk(tmp_path, **ASYNC)
    asked = committed(it)
    dies(it, "advantages-0")
    it.batches.withdrawn(asked, {"actor": True})
    it.started(0)
    it.trained(0)
    assert it.gate.version == 1 and it.book.conservation().trained == 2


def test_a_batch_that_one_of_two_trainers_lacks_ends_the_run(tmp_path: Path) -> None:
    it = desk(tmp_path, advantage_estimator="ppo")
    asked = committed(it)
    it.batches.withdrawn(asked, {"actor": True, "critic": True})
    with pytest.raises(ServiceError, match="batch 0, which the critic lacks"):
        it.batches.withdrawn(asked, {"actor": True, "critic": False})


def test_a_rollout_may_die_when_its_groups_are_in_a_batch(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=2, **ASYNC)
    committed(it)
    dies(it, "rollout-0")
    is_well(it)
    it.started(0)
    it.trained(0)
    assert it.book.conservation().trained == 2


# --- members ---------------------------------------------------------------------------------------------------------


def test_a_run_whose_last_replica_died_waits_for_its_next_life(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=2, **ASYNC)
    it.replicas.leaves(it.replicas.get("rollout-1"))
    assert not it.replicas.all_leave
    dies(it, "rollout-0")
    assert not it.replicas.all_leave
    it.register("rollout-0", "rollout", life=2)
    it.replicas.leaves(it.replicas.get("rollout-0"))
    assert it.replicas.all_leave


def test_a_replica_that_was_leaving_may_die(tmp_path: Path) -> None:
    it = desk(tmp_path, rollouts=2, **ASYNC)
    it.turn()
    it.replicas.leaves(it.replicas.get("rollout-0"))
    dies(it, "rollout-0")
    it.turn()
    is_well(it)
    assert "parting from rollout-0" not in it.spawned


def test_members_hear_of_a_death(tmp_path: Path) -> None:
    from relax.protocol.messages import Members

    it = desk(tmp_path, **ASYNC)
    dies(it, "reward-0")
    assert all("reward-0" not in {m.name for m in message.members} for _, message in it.take(Members))
    assert it.take(Release) == []


# --- a reward service that leaves ------------------------------------------------------------------------------------


def test_what_a_reward_service_that_leaves_has_is_scored_by_another_at_once(tmp_path: Path) -> None:
    it = desk(tmp_path, **ASYNC)
    it.register("reward-1", "reward")
    told: list[str] = []

    async def tell(endpoint: str, message: Shutdown, deadline: float) -> None:
        told.append(endpoint)

    it.mailbox = SimpleNamespace(tell=tell)  # type: ignore[assignment]
    lease = issued(it)[0].lease
    bring(it, lease, State.SAMPLED)
    it.member_leaves(Leaving("reward-0"), sender("reward-0"))
    assert it.spawned == ["parting from reward-0"]
    asyncio.run(it._part_from(it.registry.entries["reward-0"].member))
    is_well(it)
    order = issued(it)[0]
    assert kept_at(order) == "inproc://rollout-0" and order.lease == Lease(0, 0, 0, lease.fence + 1)
    assert [member.name for member in it.of_role("reward")] == ["reward-1"] and told == ["inproc://reward-0"]
    dies(it, "reward-1")
    assert it.registry.expects("reward"), "its next life"
    it.register("reward-1", "reward", life=2)
    with pytest.raises(ServiceError, match="every reward replica has left"):
        asyncio.run(it._part_from(it.registry.entries["reward-1"].member))
