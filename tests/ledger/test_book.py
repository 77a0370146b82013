"""The book: one life per group, and nobody but the holder of the newest lease may move it."""

import itertools
import random

import pytest

from relax.ledger import Accepted, GroupBook, LedgerError, Stale, StaleReason, State
from relax.protocol.messages import Lease


def drawn(groups: int, lineage: int = 0) -> GroupBook:
    ticks = itertools.count()
    book = GroupBook(lineage, clock=lambda: float(next(ticks)))
    for group in range(groups):
        book.draw(group, prompt_id=100 + group, epoch=0, position=group)
    return book


def make_ready(book: GroupBook, group: int, version: int = 0) -> Lease:
    lease = book.issue(group, "rollout-0", version)
    for state in (State.SAMPLED, State.SCORED, State.READY):
        assert isinstance(book.advance(lease, state, oldest=version, tokens=5), Accepted)
    return lease


def test_a_group_lives_from_draw_to_training() -> None:
    book = drawn(2)
    assert book.in_state(State.PENDING) == [0, 1]
    lease = book.issue(0, "rollout-0", 3)
    assert lease == Lease(0, 0, 0, 1)
    assert book.advance(lease, State.SAMPLED, oldest=3, tokens=7, location="reward-0") == Accepted(
        State.ISSUED, State.SAMPLED
    )
    assert book.advance(lease, State.SCORED) == Accepted(State.SAMPLED, State.SCORED)
    assert book.advance(lease, State.READY, location="advantages-0") == Accepted(State.SCORED, State.READY)
    record = book[0]
    assert (record.holder, record.location, record.version, record.oldest) == ("rollout-0", "advantages-0", 3, 3)
    assert (record.tokens, record.prompt_id) == (7, 100)
    assert book.commit(4, [0]) == (lease,)
    book.started(4)
    assert book.trained(4) == (lease,)
    assert 0 not in book
    assert len(book) == 1


def test_later_report_overtakes_an_earlier_one() -> None:
    book = drawn(1)
    lease = book.issue(0, "rollout-0", 0)
    assert book.advance(lease, State.READY, oldest=0, location="advantages-0") == Accepted(State.ISSUED, State.READY)
    late = book.advance(lease, State.SCORED, oldest=7, location="reward-0")
    assert isinstance(late, Stale)
    assert late.reason is StaleReason.LATE
    assert book[0].state is State.READY
    assert (book[0].oldest, book[0].location) == (0, "advantages-0")
    assert book[0].times[State.SCORED] is not None


def test_duplicate_report_changes_nothing_and_is_counted() -> None:
    book = drawn(1)
    lease = book.issue(0, "rollout-0", 0)
    book.advance(lease, State.SAMPLED, tokens=3)
    again = book.advance(lease, State.SAMPLED, tokens=99)
    assert isinstance(again, Stale)
    assert again.reason is StaleReason.REPEATED
    assert book[0].tokens == 3
    assert book.stale == {StaleReason.REPEATED: 1}


def test_lost_lease_is_stale_before_and_after_the_next_issue() -> None:
    book = drawn(1)
    zombie = book.issue(0, "rollout-0", 0)
    book.advance(zombie, State.SAMPLED, oldest=0, tokens=9)
    book.lost(0)
    assert book[0].tokens is None
    lost = book.check(zombie)
    assert isinstance(lost, Stale)
    assert lost.reason is StaleReason.LOST
    lease = book.issue(0, "rollout-1", 1)
    assert (lease.attempt, lease.fence) == (0, 2)
    fenced = book.advance(zombie, State.SCORED)
    assert isinstance(fenced, Stale)
    assert fenced.reason is StaleReason.FENCE
    assert book[0].state is State.ISSUED
    assert isinstance(book.advance(lease, State.SAMPLED), Accepted)


def test_dropped_draw_comes_again_as_the_next_attempt_of_the_same_group() -> None:
    book = drawn(1)
    old = book.issue(0, "rollout-0", 0)
    book.drop(0, "straggler", batch=0, again=True)
    stale = book.check(old)
    assert isinstance(stale, Stale)
    assert stale.reason is StaleReason.ATTEMPT
    lease = book.issue(0, "rollout-0", 1)
    assert (lease.attempt, lease.fence) == (1, 2)


@pytest.mark.parametrize(
    ("lease", "reason"),
    [
        (Lease(0, 0, 1, 1), StaleReason.LINEAGE),
        (Lease(0, 0, 3, 1), StaleReason.LINEAGE),
        (Lease(7, 0, 2, 1), StaleReason.ENDED),
        (Lease(0, 1, 2, 1), StaleReason.ATTEMPT),
        (Lease(0, 0, 2, 0), StaleReason.FENCE),
        (Lease(0, 0, 2, 2), StaleReason.FENCE),
    ],
)
def test_foreign_lease_is_stale(lease: Lease, reason: StaleReason) -> None:
    book = drawn(1, lineage=2)
    book.issue(0, "rollout-0", 0)
    stale = book.advance(lease, State.SAMPLED)
    assert isinstance(stale, Stale)
    assert stale.reason is reason
    assert book[0].state is State.ISSUED
    assert book.stale == {reason: 1}


def test_report_about_an_ended_group_is_stale() -> None:
    book = drawn(1)
    lease = make_ready(book, 0)
    book.commit(0, [0])
    book.trained(0)
    stale = book.advance(lease, State.READY)
    assert isinstance(stale, Stale)
    assert stale.reason is StaleReason.ENDED


def test_commit_taken_back_leaves_its_members_ready() -> None:
    book = drawn(2)
    leases = [make_ready(book, group) for group in range(2)]
    assert book.commit(0, [0, 1]) == tuple(leases)
    book.take_back(0)
    assert book.in_state(State.READY) == [0, 1]
    book.lost(1, "advantages-0 died")
    book.issue(1, "rollout-0", 0)
    assert book.commit(0, [0]) == (leases[0],)
    book.started(0)
    with pytest.raises(LedgerError, match="batch 0 has started"):
        book.take_back(0)


def test_a_parked_group_waits_with_its_oldest_version_and_goes_on_under_a_new_lease() -> None:
    book = drawn(1)
    lease = book.issue(0, "a", 3)
    book.parked(0, 3, "handed back by a")
    assert (book[0].state, book[0].oldest, book[0].holder) == (State.PENDING, 3, None)
    assert isinstance(book.advance(lease, State.SAMPLED, oldest=3, tokens=7), Stale)
    again = book.issue(0, "b", 4)
    assert (again.attempt, again.fence) == (0, lease.fence + 1)
    assert isinstance(book.advance(again, State.SAMPLED, oldest=3, tokens=7), Accepted)


def test_a_group_that_was_sampled_is_parked_whatever_stage_had_it_but_not_out_of_a_batch() -> None:
    book = drawn(2)
    for group in range(2):
        make_ready(book, group)
    book.parked(0, 0)
    assert (book[0].state, book[0].oldest) == (State.PENDING, 0)
    book.commit(0, [1])
    with pytest.raises(LedgerError, match="group 1 is committed"):
        book.parked(1, 0)


def test_a_parked_group_may_lose_what_was_parked_of_it() -> None:
    book = drawn(1)
    book.issue(0, "a", 3)
    book.parked(0, 3)
    book.lost(0, "a died")
    assert (book[0].state, book[0].oldest) == (State.PENDING, None)


def test_owner_is_told_of_steps_that_a_life_does_not_have() -> None:
    book = drawn(2)
    lease = book.issue(0, "rollout-0", 0)
    with pytest.raises(LedgerError, match="group 1 is drawn after group 1"):
        book.draw(1, 0, 0)
    with pytest.raises(LedgerError, match="group 0 is issued, not pending"):
        book.issue(0, "rollout-1", 0)
    with pytest.raises(LedgerError, match="group 0 is issued, not ready"):
        book.commit(0, [0])
    with pytest.raises(LedgerError, match="group 1 is pending, not issued or sampled or scored or ready"):
        book.parked(1, 0)
    with pytest.raises(LedgerError, match="committed is not reported under a lease"):
        book.advance(lease, State.COMMITTED)
    with pytest.raises(LedgerError, match="group 5 is not open"):
        book.drop(5, "x", batch=0)
    with pytest.raises(LedgerError, match="group 1 has no lease"):
        book.lease(1)
    with pytest.raises(LedgerError, match="batch 3 is not committed"):
        book.trained(3)
    book.advance(lease, State.READY)
    book.commit(0, [0])
    with pytest.raises(LedgerError, match="committed to batch 0: take the commit back first"):
        book.drop(0, "x", batch=0)
    with pytest.raises(LedgerError, match="batch 0 is committed already"):
        book.commit(0, [])


def test_a_failed_commit_changes_no_group() -> None:
    book = drawn(2)
    make_ready(book, 0)
    with pytest.raises(LedgerError, match="group 1 is pending"):
        book.commit(0, [0, 1])
    assert book[0].state is State.READY


def test_conservation_counts_draws() -> None:
    book = drawn(6)
    for group in range(5):
        make_ready(book, group)
    book.commit(0, [0, 1])
    book.trained(0)
    book.drop(2, "filtered", batch=1)
    book.drop(3, "straggler", batch=1, again=True)
    book.lost(4)
    counts = book.conservation()
    assert counts.holds
    assert (counts.issued, counts.trained, counts.dropped) == (5, 2, {"filtered": 1, "straggler": 1})
    assert counts.in_flight == {State.PENDING: 1}, "neither group 5 nor the new attempt of 3 was issued yet"
    assert str(counts) == ("issued 5 = trained 2 + dropped (filtered 1, straggler 1) + in flight (pending 1)")


@pytest.mark.parametrize("seed", range(20))
def test_conservation_holds_through_random_lives(seed: int) -> None:
    rng = random.Random(seed)
    book, leases, batch, drawn_groups = GroupBook(), {}, 0, 0
    committed: list[int] = []
    for _ in range(400):
        match rng.choice([0, 1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 7]):
            case 0 | 1:
                book.draw(drawn_groups, rng.randrange(50), 0)
                drawn_groups += 1
            case 2 if pending := book.in_state(State.PENDING):
                group = rng.choice(pending)
                leases[group] = book.issue(group, f"rollout-{rng.randrange(3)}", batch)
            case 3 | 4 if leases:
                recent = list(leases.values())[-8:]  # among them leases that were lost or whose draw ended
                book.advance(rng.choice(recent), rng.choice([State.SAMPLED, State.SCORED, State.READY, State.READY]))
            case 5 if lost := book.in_state(State.ISSUED, State.SAMPLED, State.SCORED, State.READY):
                book.lost(rng.choice(lost))
            case 6 if going := book.in_state(*(s for s in State if s is not State.COMMITTED)):
                book.drop(rng.choice(going), rng.choice(["filtered", "straggler"]), batch, again=rng.random() < 0.5)
            case 7 if committed:
                if rng.random() < 0.3:
                    book.take_back(batch)
                else:
                    book.trained(batch)
                    batch += 1
                committed = []
            case 7:
                committed = book.in_state(State.READY)[:3]
                if committed:
                    book.commit(batch, committed)
        assert book.conservation().holds
    assert batch > 3
    assert book.stale.total() > 0
