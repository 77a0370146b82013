"""The gate rule by rule, in small worked cases."""

import subprocess
import sys

import pytest

from relax.gate import Batch, Blocked, Gate, GateError, Refusal, Wait


def opened(*args: int, **options: int) -> Gate:
    gate = Gate(*args, **options)
    gate.published(options.get("first_batch", 0))
    return gate


def make_ready(gate: Gate, groups: range | list[int], version: int) -> None:
    for group in groups:
        gate.issue(group, version)
        gate.ready(group, version)


def train(gate: Gate, publish: bool = True) -> Batch:
    batch = gate.commit()
    assert isinstance(batch, Batch), str(batch)
    gate.started(batch.index)
    gate.trained(batch.index)
    if publish:
        gate.published(batch.index + 1)
    return batch


def test_worked_example_of_the_docstring() -> None:
    gate = opened(4, 1, 1)
    make_ready(gate, range(8), 0)
    assert gate.refusal(0) is Refusal.SLOTS
    assert gate.commit() == Batch(0, (0, 1, 2, 3), (0, 0, 0, 0))
    assert gate.refusal(0) is Refusal.SLOTS
    gate.started(0)
    gate.trained(0)
    assert gate.refusal(0) is Refusal.SLOTS, "slots are held until the version is published"
    gate.published(1)
    assert gate.refusal(0) is Refusal.STALENESS, "a ninth group of version 0 would have no batch in time"
    assert gate.can_issue(1)


def test_commit_takes_the_most_urgent_groups_not_the_smallest_ids() -> None:
    gate = opened(2, 2, 2)
    make_ready(gate, [0, 1], 0)
    train(gate)
    make_ready(gate, [2, 3], 1)
    make_ready(gate, [4, 5], 0)
    batch = gate.commit()
    assert batch == Batch(1, (4, 5), (0, 0))
    assert batch.staleness == (1, 1)


def test_commit_waits_by_name_for_groups_that_are_due() -> None:
    gate = opened(2, 1, 1)
    gate.issue(0, 0)
    make_ready(gate, [1, 2], 0)
    train(gate)
    make_ready(gate, [3, 4], 1)
    blocked = gate.commit()
    assert blocked == Blocked(1, Wait.DUE, missing=0, needed=1, groups=(0,))
    assert str(blocked) == "batch 1 waits for 1 of the groups that are due: 0"
    assert not gate.can_commit()
    gate.drop(0)
    assert gate.commit() == Batch(1, (3, 4), (1, 1))


def test_commit_names_nobody_while_groups_not_yet_issued_could_fill_the_batch() -> None:
    gate = opened(2, 3, 1)
    gate.issue(0, 0)
    assert gate.commit() == Blocked(0, Wait.READY, missing=2)
    make_ready(gate, [1, 2], 0)
    assert isinstance(gate.commit(), Batch)


def test_commit_names_everybody_on_the_way_when_nothing_else_can_fill_the_batch() -> None:
    gate = opened(2, 3, 0)
    gate.issue(0, 0)
    make_ready(gate, [1], 0)
    assert gate.commit() == Blocked(0, Wait.READY, missing=1, needed=1, groups=(0,))


def test_one_batch_is_committed_ahead() -> None:
    gate = opened(1, 3, 3)
    make_ready(gate, range(4), 0)
    assert isinstance(gate.commit(), Batch)
    assert gate.commit() == Blocked(1, Wait.UNSTARTED)
    gate.started(0)
    assert isinstance(gate.commit(), Batch)
    assert str(gate.commit()) == "batch 2 waits for batch 1 to start"


def test_lockstep_issues_only_to_a_replica_at_the_trainers_version() -> None:
    gate = opened(2, 0, 0)
    make_ready(gate, [0, 1], 0)
    batch = gate.commit()
    assert isinstance(batch, Batch)
    gate.started(0)
    assert gate.refusal(0) is Refusal.SLOTS
    gate.trained(0)
    gate.published(1)
    assert gate.refusal(0) is Refusal.VERSION
    assert gate.can_issue(1)


@pytest.mark.parametrize("staleness", [0, 1, 2, 8])
def test_bound_is_reached_and_not_passed_when_rollout_runs_far_ahead(staleness: int) -> None:
    gate = opened(2, staleness, staleness, 19)
    group, seen = 0, []
    while not gate.finished:
        while gate.can_issue(gate.version):
            make_ready(gate, [group], gate.version)
            group += 1
        seen += train(gate).staleness
    assert max(seen) == staleness
    assert group == 40, "no more groups are issued than the batches need"


def test_a_group_issued_again_keeps_its_slot_and_gets_the_deadline_of_its_new_replica() -> None:
    gate = opened(2, 1, 1)
    gate.issue(0, 0)
    gate.sampled(0, 0)
    free = gate.free_slots
    gate.unassign(0)
    assert gate.deadline(0) is None
    assert gate.free_slots == free
    make_ready(gate, [1, 2], 0)
    train(gate)
    gate.issue(0, 1)
    assert gate.deadline(0) == 2


def test_deadline_of_a_group_without_tokens_follows_its_replica() -> None:
    gate = opened(2, 1, 1)
    make_ready(gate, [0, 1], 0)
    gate.issue(2, 0)
    gate.issue(3, 0)
    gate.sampled(3, 0)
    train(gate)
    gate.acknowledged(2, 1)
    gate.acknowledged(3, 1)
    assert (gate.deadline(2), gate.deadline(3)) == (2, 1)


def test_parked_group_keeps_its_deadline_and_is_counted() -> None:
    gate = opened(2, 1, 1)
    gate.issue(0, 0)
    gate.sampled(0, 0)
    gate.unassign(0, keep_tokens=True)
    make_ready(gate, [1, 2], 0)
    train(gate)
    assert gate.deadline(0) == 1
    make_ready(gate, [3, 4], 1)
    assert gate.commit() == Blocked(1, Wait.DUE, missing=0, needed=1, groups=(0,))
    gate.issue(0, 1)
    assert gate.deadline(0) == 1, "a newer replica does not make old tokens younger"


def test_parked_group_may_not_resume_at_a_replica_too_old_for_it() -> None:
    gate = opened(1, 1, 1)
    make_ready(gate, [0], 0)
    train(gate)
    gate.issue(1, 1)
    gate.sampled(1, 1)
    gate.unassign(1, keep_tokens=True)
    make_ready(gate, [2], 0)
    assert gate.refusal(0, 1) is Refusal.STALENESS
    assert gate.refusal(1, 1) is None


def test_commit_taken_back_makes_its_members_ready_and_the_lost_one_to_be_issued() -> None:
    gate = opened(2, 1, 1)
    make_ready(gate, range(3), 0)
    batch = gate.commit()
    assert isinstance(batch, Batch)
    gate.take_back(0, lost=[1])
    assert gate.next_batch == 0
    assert (gate.in_flight, gate.ready_groups, gate.free_slots) == (3, 2, 1)
    assert gate.outstanding() == (1,)
    assert gate.commit() == Batch(0, (0, 2), (0, 0))
    gate.started(0)
    with pytest.raises(GateError, match="cannot be taken back"):
        gate.take_back(0)


def test_publication_interval_holds_slots_until_a_version_covers_the_batch() -> None:
    gate = opened(2, 1, 1)
    make_ready(gate, range(4), 0)
    train(gate, publish=False)
    assert gate.free_slots == 0
    train(gate, publish=False)
    gate.published(2)
    assert gate.free_slots == 4


def test_last_batch_of_a_stream_takes_what_remains() -> None:
    gate = opened(2, 1, 1)
    make_ready(gate, range(3), 0)
    gate.end()
    assert gate.last_batch == 1
    assert gate.refusal(0) is Refusal.END
    train(gate)
    assert train(gate) == Batch(1, (2,), (0,))
    assert gate.finished
    assert gate.commit() == Blocked(2, Wait.END)


def test_last_batch_waits_for_prompts_that_come_again() -> None:
    gate = opened(2, 1, 1)
    gate.issue(0, 0)
    make_ready(gate, [1, 2], 0)
    gate.end()
    gate.drop(0, again=True)
    train(gate)
    assert gate.commit() == Blocked(1, Wait.READY, missing=1)
    make_ready(gate, [0], 1)
    assert train(gate) == Batch(1, (0,), (1,))
    assert gate.finished


def test_a_stream_that_ends_early_ends_the_run_before_its_last_batch() -> None:
    gate = opened(2, 1, 1, 9)
    make_ready(gate, range(2), 0)
    gate.end()
    assert gate.last_batch == 0
    train(gate)
    assert gate.finished


def test_a_stream_whose_rest_is_filtered_ends_the_run() -> None:
    gate = opened(2, 1, 1)
    make_ready(gate, range(3), 0)
    gate.end()
    gate.drop(2)
    train(gate)
    assert gate.finished
    assert gate.in_flight == 0


def test_known_last_batch_is_full_and_leaves_nothing_over() -> None:
    gate = opened(2, 2, 2, 0)
    gate.issue(0, 0)
    gate.ready(0, 0)
    assert gate.commit() == Blocked(0, Wait.READY, missing=1)
    gate.issue(1, 0)
    gate.unassign(1)
    assert gate.refusal(0) is Refusal.END, "the lost group will fill the batch: no third one is wanted"
    assert gate.can_issue(0, 1)


def test_a_resumed_run_begins_at_its_cut() -> None:
    gate = opened(2, 1, 1, 51, first_batch=50)
    make_ready(gate, range(4), 50)
    assert gate.refusal(50) is Refusal.END
    assert train(gate).index == 50
    assert train(gate).staleness == (1, 1)
    assert gate.finished


def test_spares_are_beyond_the_slots_and_the_first_ready_are_taken() -> None:
    gate = Gate(2, 0, 0, spare=2)
    gate.published(0)
    for group in range(4):
        gate.issue(group, 0)
    assert gate.refusal(0) is Refusal.SLOTS
    assert gate.commit() == Blocked(0, Wait.READY, missing=2)
    gate.ready(3, 0)
    gate.ready(1, 0)
    gate.ready(0, 0)
    assert train(gate) == Batch(0, (1, 3), (0, 0), surplus=(0, 2))
    assert (gate.in_flight, gate.free_slots) == (0, 4)


def test_spares_of_a_batch_taken_back_are_gone_and_others_may_be_issued() -> None:
    gate = Gate(2, 0, 0, spare=1)
    gate.published(0)
    make_ready(gate, range(3), 0)
    assert gate.commit() == Batch(0, (0, 1), (0, 0), surplus=(2,))
    gate.take_back(0, lost=[1])
    assert gate.can_issue(0, 1) and gate.can_issue(0)
    make_ready(gate, [7], 0)
    assert gate.commit() == Batch(0, (0, 7), (0, 0), surplus=(1,))


def test_the_rest_of_a_stream_is_trained_although_it_was_surplus_before() -> None:
    gate = Gate(2, 0, 0, spare=1)
    gate.published(0)
    make_ready(gate, range(3), 0)
    gate.end()
    assert train(gate).surplus == (2,)
    assert gate.last_batch == 1
    make_ready(gate, [3], 1)
    assert gate.refusal(1) is Refusal.END
    assert train(gate) == Batch(1, (3,), (1,))
    assert gate.finished


def test_tokens_older_than_the_replica_promised_are_refused() -> None:
    gate = opened(1, 2, 2)
    make_ready(gate, [0], 0)
    train(gate)
    gate.issue(1, 1)
    with pytest.raises(GateError, match="group 1 has tokens of version 0, but its replica was at 1"):
        gate.ready(1, 0)
    assert gate.ready_groups == 0


def test_contradicting_reports_are_refused_and_change_nothing() -> None:
    gate = Gate(1, 1, 1)
    with pytest.raises(GateError, match="newest published is None"):
        gate.can_issue(0)
    gate.published(0)
    with pytest.raises(GateError, match="newest published is 0"):
        gate.issue(0, 1)
    gate.issue(0, 0)
    with pytest.raises(GateError, match="not lost or parked"):
        gate.issue(0, 0)
    with pytest.raises(GateError, match="newest published is 0"):
        gate.sampled(0, 1)
    with pytest.raises(GateError, match="group 9 is not open"):
        gate.ready(9, 0)
    gate.ready(0, 0)
    with pytest.raises(GateError, match="tokens are complete"):
        gate.sampled(0, 0)
    batch = gate.commit()
    assert isinstance(batch, Batch)
    with pytest.raises(GateError, match="committed to batch 0"):
        gate.issue(0, 0)
    with pytest.raises(GateError, match=r"groups \[4\] are not members of batch 0"):
        gate.take_back(0, lost=[4])
    with pytest.raises(GateError, match="batch 1 started"):
        gate.started(1)
    with pytest.raises(GateError, match="batch 0 trained"):
        gate.trained(0)
    with pytest.raises(GateError, match="version 1 published"):
        gate.published(1)
    assert (gate.next_batch, gate.version, gate.in_flight, gate.published_version) == (1, 0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((0, 0, 0), "batch_size = 0"),
        ((1, -1, 0), "max_staleness = -1"),
        ((1, 1, 2), "lead = 2"),
        ((1, 1, 1, -1), "last_batch = -1"),
    ],
)
def test_impossible_settings_are_refused(arguments: tuple[int, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Gate(*arguments)


def test_no_spares_are_issued_after_the_last_batch() -> None:
    gate = Gate(1, 0, 0, last_batch=0, spare=2)
    gate.published(0)
    gate.issue(0, 0)
    gate.ready(0, 0)
    gate.commit()
    gate.started(0)
    gate.trained(0)
    gate.published(1)
    assert gate.finished and gate.refusal(1) is Refusal.END


@pytest.mark.parametrize(("max_staleness", "spare"), [(1, 1), (0, -1)])
def test_spares_exist_in_lockstep_only(max_staleness: int, spare: int) -> None:
    with pytest.raises(ValueError, match=f"spare = {spare}"):
        Gate(1, max_staleness, 0, spare=spare)


def test_the_gate_depends_on_nothing() -> None:
    heavy = "numpy", "torch", "pydantic", "asyncio"
    code = f"import sys, relax.gate; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_after_a_resume_the_version_of_the_cut_is_published_first_and_nothing_older() -> None:
    gate = Gate(2, 3, 2, 60, first_batch=50)
    for version in (0, 49, 51):
        with pytest.raises(GateError, match=f"version {version} published, .* this lineage begins at 50"):
            gate.published(version)
    with pytest.raises(GateError, match="the newest published is None"):
        gate.issue(7, 50)
    gate.published(50)
    assert gate.refusal(49) is None, "within the bound; which versions there are is the publisher's word"
    gate.issue(7, 50)
    assert gate.deadline(7) == 53
