"""The one authority on where every group is: in memory, by compare-and-set; the ledger keeps what it decided."""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from relax.ledger.changes import Changes
from relax.ledger.records import BatchRecord, GroupRecord
from relax.ledger.revived import Revived
from relax.ledger.states import Accepted, Conservation, LedgerError, Stale, StaleReason, State
from relax.ledger.store import Ledger
from relax.protocol.messages import Lease

_REPORTED = (State.SAMPLED, State.SCORED, State.READY)


class GroupBook:
    """Open groups of one lineage and their leases.

    Stages act under a lease (group, attempt, lineage, fence): `advance` moves the group only if the lease is the one
    the book gave out last and the report is news, so duplicates and zombies change nothing; they are counted in
    `stale`. The owner (the controller) acts by group id: `draw`, `issue`, `lost`, `parked`, `drop`, `commit`,
    `take_back`, `trained`; an act that the life of a group does not have is its error and raises LedgerError.

    Groups that ended are forgotten once saved. `save` hands a turn's changes to the ledger; a group that changed more
    than once in a turn is one row. A resume is a new book of a higher lineage that begins with `revive`.
    """

    def __init__(self, lineage: int = 0, *, clock: Callable[[], float] = time.time) -> None:
        self.lineage = lineage
        self.stale: Counter[StaleReason] = Counter()
        self._clock = clock
        self._open: dict[int, GroupRecord] = {}
        self._batches: dict[int, BatchRecord] = {}
        self._last_drawn = -1
        self._issued = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._stale_saved = 0
        self._changed_groups: dict[tuple[int, int], GroupRecord] = {}
        self._changed_batches: dict[int, BatchRecord] = {}
        self._changes = Changes()

    # --- what it knows -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, group: int) -> bool:
        return group in self._open

    def __getitem__(self, group: int) -> GroupRecord:
        """The open draw of `group`, to be read only."""
        record = self._open.get(group)
        if record is None:
            raise LedgerError(f"group {group} is not open: trained, dropped or never drawn")
        return record

    def lease(self, group: int) -> Lease:
        """The lease of an open group that has one."""
        record = self[group]
        if record.state is State.PENDING:
            raise LedgerError(f"group {group} has no lease: it waits to be issued")
        return Lease(group, record.attempt, self.lineage, record.fence)

    def in_state(self, *states: State) -> list[int]:
        """Open groups in one of `states`, in group order."""
        return sorted(group for group, record in self._open.items() if record.state in states)

    def conservation(self) -> Conservation:
        """Counts that must add up; `in_flight` is counted afresh from the open groups, the others as they happened."""
        flying = Counter(record.state for record in self._open.values() if record.first_issued_at is not None)
        return Conservation(self._issued, self._trained, dict(self._dropped), dict(flying))

    # --- under a lease -----------------------------------------------------------------------------------------------

    def check(self, lease: Lease) -> Accepted | Stale:
        """Whether a report under `lease` would be heard; counts it if not."""
        found = self._match(lease)
        if isinstance(found, Stale):
            return self._count(found)
        return Accepted(found.state, found.state)

    def advance(
        self,
        lease: Lease,
        state: State,
        *,
        oldest: int | None = None,
        tokens: int | None = None,
        location: str | None = None,
    ) -> Accepted | Stale:
        """A stage reports that the group reached `state`: SAMPLED, SCORED or READY.

        `oldest` is the oldest version that sampled any of its tokens, `tokens` the response tokens of all its samples,
        `location` the service that has it now. Stages that were skipped may still report; they get their time noted and
        Stale(LATE).
        """
        if state not in _REPORTED:
            raise LedgerError(f"{state.word} is not reported under a lease")
        found = self._match(lease)
        if isinstance(found, Stale):
            return self._count(found)
        record = found
        if record.times[state] is not None:
            return self._count(Stale(StaleReason.REPEATED, f"group {record.group} was {state.word} before"))
        record.times[state] = self._clock()
        self._touch(record)
        previous = record.state
        if state < previous:
            detail = f"group {record.group} is {previous.word} already, {state.word} came late"
            return self._count(Stale(StaleReason.LATE, detail))
        record.state = state
        record.oldest = record.oldest if oldest is None else oldest
        record.tokens = record.tokens if tokens is None else tokens
        record.location = record.location if location is None else location
        return Accepted(previous, state)

    # --- by the owner ------------------------------------------------------------------------------------------------

    def draw(self, group: int, prompt_id: int, epoch: int, position: int = 0, *, attempt: int = 0) -> None:
        """A new group: the prompt at `position` of `epoch`. Group ids rise."""
        if group <= self._last_drawn:
            raise LedgerError(f"group {group} is drawn after group {self._last_drawn}: ids must rise")
        self._last_drawn = group
        self._begin(GroupRecord(group, attempt, prompt_id, epoch, position, self._clock()))

    def revive(self, revived: Revived) -> None:
        """The groups that a resume takes up again, drawn in group order with their attempts; fences begin anew, as
        leases of the lineages before are stale anyway. New groups get ids after the last that was ever drawn."""
        for group in revived.groups:
            self.draw(group.group, group.prompt_id, group.epoch, group.position, attempt=group.attempt)
        self._last_drawn = max(self._last_drawn, revived.last_group)

    def issue(self, group: int, holder: str, version: int) -> Lease:
        """Gives a pending group to `holder`, which serves `version`; every issue has a new fence."""
        record = self._expect(group, State.PENDING)
        now = self._clock()
        record.fence += 1
        record.state = State.ISSUED
        record.holder = record.location = holder
        record.version = version
        record.times[State.ISSUED] = now
        if record.first_issued_at is None:
            record.first_issued_at = now
            self._issued += 1
        self._touch(record)
        return Lease(group, record.attempt, self.lineage, record.fence)

    def lost(self, group: int, detail: str = "") -> None:
        """The lease of a group ends before its result counts; it waits to be issued again with the same attempt. One
        that waits already loses what was parked of it."""
        record = self._expect(group, State.PENDING, State.ISSUED, State.SAMPLED, State.SCORED, State.READY)
        self._event(record, "lost", detail)
        record.forget_result()
        self._touch(record)

    def parked(self, group: int, oldest: int | None, detail: str = "") -> None:
        """The lease of a group ends, and what was sampled of it stays, `oldest` the oldest version among its tokens; it
        waits to go on at any replica, with the same attempt. All of it may have been sampled: then a stage behind lost
        it."""
        record = self._expect(group, State.ISSUED, State.SAMPLED, State.SCORED, State.READY)
        self._event(record, "parked", detail)
        record.forget_result()
        record.oldest = oldest
        self._touch(record)

    def drop(self, group: int, reason: str, batch: int, *, again: bool = False) -> None:
        """The draw ends untrained; `batch` is the trainer's version now. With `again` the prompt is drawn once more."""
        record = self[group]
        if record.state is State.COMMITTED:
            raise LedgerError(f"group {group} is committed to batch {record.batch}: take the commit back first")
        record.reason = reason
        record.batch = batch
        self._end(record, State.DROPPED)
        if record.first_issued_at is not None:
            self._dropped[reason] += 1
        if again:
            self._begin(record.next_attempt(self._clock()))

    def commit(self, batch: int, groups: Iterable[int]) -> tuple[Lease, ...]:
        """READY groups become the members of `batch`; their leases, in the order given."""
        if batch in self._batches:
            raise LedgerError(f"batch {batch} is committed already")
        members = [self._expect(group, State.READY) for group in groups]
        now = self._clock()
        for record in members:
            record.state = State.COMMITTED
            record.batch = batch
            record.times[State.COMMITTED] = now
            self._touch(record)
        oldest = min((record.oldest for record in members if record.oldest is not None), default=None)
        entry = BatchRecord(batch, tuple(record.group for record in members), oldest, committed_at=now)
        self._batches[batch] = self._changed_batches[batch] = entry
        return tuple(Lease(r.group, r.attempt, self.lineage, r.fence) for r in members)

    def take_back(self, batch: int) -> None:
        """The commit of a batch that has not started is undone; its members are READY again."""
        entry = self._batch(batch)
        if entry.started_at is not None:
            raise LedgerError(f"batch {batch} has started: its commit cannot be taken back")
        for record in map(self.__getitem__, entry.groups):
            self._event(record, "taken_back", "")
            record.state = State.READY
            record.batch = record.times[State.COMMITTED] = None
            self._touch(record)
        del self._batches[batch]
        self._changed_batches[batch] = BatchRecord(batch)

    def started(self, batch: int) -> None:
        """The actor has begun `batch`."""
        entry = self._batch(batch)
        entry.started_at = self._clock()
        self._changed_batches[batch] = entry

    def has_started(self, batch: int) -> bool:
        return self._batch(batch).started_at is not None

    def trained(self, batch: int) -> tuple[Lease, ...]:
        """`batch` is trained: its members end. Returns their leases."""
        entry = self._batch(batch)
        entry.trained_at = self._clock()
        self._changed_batches[batch] = entry
        del self._batches[batch]
        leases = tuple(map(self.lease, entry.groups))
        for group in entry.groups:
            self._end(self._open[group], State.TRAINED)
        self._trained += len(entry.groups)
        return leases

    def published(self, version: int, *, step: int, digest: str, size: int, created_at: float) -> None:
        """Records a weight tag; `size` is the bytes of the whole set."""
        self._changes.versions.append((self.lineage, version, step, digest, size, created_at, self._clock()))

    # --- to the ledger -----------------------------------------------------------------------------------------------

    def save(self, ledger: Ledger) -> bool:
        """Hands all changes since the last save to the ledger as one transaction.

        If the writer is behind, they stay here and go with the next turn's: False. Raises LedgerError if the ledger
        failed or has been behind for too long.
        """
        if not ledger.has_room():
            return False
        changes = self._changes
        changes.groups = [record.row(self.lineage) for record in self._changed_groups.values()]
        changes.batches = [entry.row(self.lineage) for entry in self._changed_batches.values()]
        if self.stale.total() != self._stale_saved:
            self._stale_saved = self.stale.total()
            changes.counters = [(self.lineage, f"stale/{reason}", n) for reason, n in self.stale.items()]
        if not (changes.groups or changes.batches or changes.versions or changes.events or changes.counters):
            return True
        self._changes = Changes()
        self._changed_groups = {}
        self._changed_batches = {}
        ledger.write(changes)
        return True

    # --- within ------------------------------------------------------------------------------------------------------

    def _match(self, lease: Lease) -> GroupRecord | Stale:
        if lease.lineage != self.lineage:
            return Stale(StaleReason.LINEAGE, f"lease of lineage {lease.lineage}, this is {self.lineage}")
        record = self._open.get(lease.group)
        if record is None:
            return Stale(StaleReason.ENDED, f"group {lease.group} is not open")
        if lease.attempt != record.attempt:
            return Stale(StaleReason.ATTEMPT, f"group {lease.group} attempt {lease.attempt}, now {record.attempt}")
        if lease.fence != record.fence:
            return Stale(StaleReason.FENCE, f"group {lease.group} fence {lease.fence}, now {record.fence}")
        if record.state is State.PENDING:
            return Stale(StaleReason.LOST, f"group {lease.group} waits to be issued again")
        return record

    def _count(self, stale: Stale) -> Stale:
        self.stale[stale.reason] += 1
        return stale

    def _expect(self, group: int, *states: State) -> GroupRecord:
        record = self[group]
        if record.state not in states:
            raise LedgerError(f"group {group} is {record.state.word}, not {' or '.join(s.word for s in states)}")
        return record

    def _batch(self, batch: int) -> BatchRecord:
        entry = self._batches.get(batch)
        if entry is None:
            raise LedgerError(f"batch {batch} is not committed (committed now: {sorted(self._batches)})")
        return entry

    def _begin(self, record: GroupRecord) -> None:
        self._open[record.group] = record
        self._touch(record)

    def _end(self, record: GroupRecord, state: State) -> None:
        record.state = state
        record.times[state] = self._clock()
        self._touch(record)
        del self._open[record.group]

    def _touch(self, record: GroupRecord) -> None:
        self._changed_groups[record.group, record.attempt] = record

    def _event(self, record: GroupRecord, event: str, detail: str) -> None:
        self._changes.events.append(record.event_row(self.lineage, self._clock(), event, detail))
