"""The staleness rule of Relax as one pure class: no clock, no I/O, no dependency.

The controller asks it before every issue and every commit and tells it what happened; the planner drives the same
class with discrete events. Lockstep is the same rule at a maximum staleness of 0.
"""

import heapq
import math
from collections.abc import Iterable

from relax.gate.open_groups import Group, OpenGroups, Place
from relax.gate.verdicts import Batch, Blocked, GateError, Refusal, Wait


class Gate:
    """Bounds the staleness of every trained sample by admission, never by throwing finished work away.

    Symbols: P = `batch_size` groups, S = `max_staleness`, L = `lead` (batches that may be ahead of the trainer),
    b = the next batch to commit. A sample's staleness is the index of its batch minus the oldest version that sampled
    any of its tokens, so a group whose oldest version is o must be in a batch of index <= S + o: its *deadline*.

    - Slots: (L + 1) P. A group holds one from issue until it is dropped or a version >= the one trained on it (its
      batch + 1) is published.
    - Deadline: S + oldest version among its tokens; without a token, S + the version that the replica holding it has
      acknowledged; with neither (lost, to be issued again) none.
    - n(w) = open groups (issued, not committed, not dropped) with deadline <= w.
    - cap(w) = max(0, min(w, last batch) - b + 1), the uncommitted batches that come in time for w.

        n(w) <= P cap(w)  for every w

    At w = infinity a group without a deadline counts too: the batches that are left have room for every open group.

    Only two acts can break this: `issue` (anew, again, or the resume of a parked group) and `commit`. Both are checked
    as if done. Every other event lowers n or raises a deadline. `commit` takes the P ready groups least by
    (deadline, id); with r(w) of the n(w) groups ready it is allowed when n(w) - r(w) <= P (cap(w) - 1) for every
    w >= b. Taking a commit back adds at most P groups, none due before b, and one batch: the inequality still holds.

    Example, P = 4, S = L = 1, v = 0: eight groups sampled by version 0 have deadline 1, n(1) = 8 = 4 * 2. The commit of
    batch 0 takes four of them: n(1) = 4 = 4 * 1. A group issued now, still at version 0, would make n(1) = 5: refused
    (the slots are full too), until version 1 is published and a replica serves it (deadline 2).

    Liveness: while nothing trains, b = v, and the newest published version u is at least v - (k - 1) for publication
    interval k, once the publications under way are through: one is skipped only for a newer one. With S, L >= k - 1 a
    replica at u may be given groups (S + u >= b) and P slots are free of trained groups. Either fewer than P open
    groups have a deadline, then another may be issued, or P have, and once they are ready the batch may be committed.

    Spare groups (`spare` = O - P, lockstep only) are outside slots and n(w): whichever they are, both limits rise by
    `spare`, to P + spare. A commit takes the P groups that were ready first and drops all others, ready or not: they
    are its *surplus*, which the next batch could only train too late. So after a commit nothing is open, and the
    inequality holds again without its spares. The prompts of the surplus come back as groups of another id.

    Group ids are integers in issue order; a group issued again keeps its id. Versions are those of one lineage;
    `first_batch` is where it begins (0, or the cut of a resume).
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        lead: int,
        last_batch: int | None = None,
        *,
        first_batch: int = 0,
        spare: int = 0,
    ) -> None:
        """`last_batch` is the index of the last batch when the run's length is known; see `end` for a stream's end."""
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}: a batch holds at least one group")
        if max_staleness < 0:
            raise ValueError(f"max_staleness = {max_staleness}: must be 0 (lockstep) or more")
        if not 0 <= lead <= max_staleness:
            raise ValueError(f"lead = {lead}: must be between 0 and max_staleness = {max_staleness}")
        if spare < 0 or (spare and max_staleness):
            raise ValueError(f"spare = {spare}: must be 0, or more where max_staleness is 0 (here {max_staleness})")
        if first_batch < 0:
            raise ValueError(f"first_batch = {first_batch}: batches are counted from 0")
        # One below: a resume whose batches are all trained, and which has the end of the run left to do.
        if last_batch is not None and last_batch < max(first_batch - 1, 0):
            raise ValueError(f"last_batch = {last_batch}: the first batch is {first_batch}")
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.lead = lead
        self.spare = spare
        self._last = last_batch
        self._first = first_batch
        self._next = first_batch
        self._started = first_batch
        self._trained = first_batch
        self._published: int | None = None
        self._open = OpenGroups()
        self._ready_ever = 0
        self._ahead: dict[int, Group] | None = None  # the members of the batch that is committed and not started
        self._unpublished: dict[int, int] = {}  # batch -> slots its members hold
        self._to_come: int | None = None  # groups still to be issued once the stream has ended

    # --- what it knows -------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The trainer's version v: the number of trained batches."""
        return self._trained

    @property
    def published_version(self) -> int | None:
        """The newest published version; None before the first."""
        return self._published

    @property
    def next_batch(self) -> int:
        """The index of the batch that the next commit makes."""
        return self._next

    @property
    def last_batch(self) -> int | None:
        """The index of the last batch; None while it is open. `next_batch - 1` once nothing is left to commit."""
        if self._to_come is None:
            return self._last
        end = self._next - 1 - -(len(self._open) + self._to_come) // self.batch_size
        return end if self._last is None else min(end, self._last)

    @property
    def finished(self) -> bool:
        """Whether every batch has been committed. One may still be in training, and one may be taken back."""
        return self._batches_left(self._next) == 0

    @property
    def in_flight(self) -> int:
        """Open groups: issued, not committed, not dropped."""
        return len(self._open)

    @property
    def ready_groups(self) -> int:
        """Open groups that are ready to be committed."""
        return self._open.ready

    @property
    def slots(self) -> int:
        """(L + 1) P, and room for the spare groups."""
        return (self.lead + 1) * self.batch_size + self.spare

    @property
    def free_slots(self) -> int:
        return self.slots - len(self._open) - sum(self._unpublished.values())

    def deadline(self, group: int) -> int | None:
        """The last batch that may train an open group; None for one that is to be issued again without tokens."""
        return self._open.find(group).deadline

    def outstanding(self) -> tuple[int, ...]:
        """Open groups that are not ready, least (deadline, id) first; those without a deadline come last."""
        return self._open.on_their_way()

    # --- issue ---------------------------------------------------------------------------------------------------

    def can_issue(self, version: int, group: int | None = None) -> bool:
        """Whether a replica that acknowledged `version` may be given a new group, or the lost or parked `group`."""
        return self.refusal(version, group) is None

    def refusal(self, version: int, group: int | None = None) -> Refusal | None:
        """Why `issue` would refuse; None where it would not. Raises GateError for a version nobody published."""
        if self._published is None or version > self._published:
            raise GateError(f"a replica says it serves version {version}; the newest published is {self._published}")
        if group is None:
            if self._to_come == 0 or self._room() <= 0:
                return Refusal.END
            if self.free_slots <= 0:
                return Refusal.SLOTS
            return self._refuse_move(None, version + self.max_staleness)
        record = self._open.find(group)
        if record.place is not Place.LOST:
            raise GateError(
                f"group {group} is not lost or parked: end its lease with unassign before it is issued again"
            )
        return self._refuse_move(record.deadline, self._deadline_at(record, version))

    def issue(self, group: int, version: int) -> None:
        """A replica that acknowledged `version` is given `group`: a new one, or one that was lost or parked.

        A lost group keeps its slot. A parked one keeps its tokens, and its deadline unless the replica is older.
        Raises GateError where `refusal` gives a reason.
        """
        record = self._open.get(group)
        if record is None and self._ahead is not None and group in self._ahead:
            raise GateError(f"group {group} is committed to batch {self._next - 1}")
        why = self.refusal(version, None if record is None else group)
        if why is not None:
            raise GateError(f"group {group} may not be issued at version {version}: {why.value}")
        if record is None:
            record = self._open.add(group)
            if self._to_come is not None:
                self._to_come -= 1
        record.place = Place.HELD
        self._open.move(record, self._deadline_at(record, version))

    def acknowledged(self, group: int, version: int) -> None:
        """The replica that holds `group` serves `version` now and had sampled no token of the group before.

        The deadline of a group without tokens follows; one with tokens keeps its own.
        """
        record = self._open.find(group)
        if record.place is not Place.HELD:
            raise GateError(f"group {group} is not held by a replica")
        if not record.has_tokens and record.deadline is not None:
            self._open.move(record, max(record.deadline, version + self.max_staleness))

    def unassign(self, group: int, *, keep_tokens: bool = False) -> None:
        """`group` is without a replica: lost, to be issued again; with `keep_tokens` parked, its deadline stands."""
        record = self._open.find(group)
        self._open.unready(record)
        record.place = Place.LOST
        if not (keep_tokens and record.has_tokens):
            record.has_tokens = False
            self._open.move(record, None)

    # --- the way to a batch --------------------------------------------------------------------------------------

    def sampled(self, group: int, oldest: int) -> None:
        """`group` has tokens; the oldest version that sampled any of them is `oldest`.

        To be reported with the first token and whenever `oldest` changes; a report at the end alone is safe, as the
        deadline until then is the earlier one. Raises GateError for a version older than the group was issued at: the
        holder broke its word, and the group can only be dropped.
        """
        record = self._open.find(group)
        if record.place is Place.LOST:
            raise GateError(f"group {group} is without a replica: a report about it is stale")
        if record.place is Place.READY:
            raise GateError(f"group {group} is ready: its tokens are complete")
        deadline = oldest + self.max_staleness
        if record.deadline is not None and deadline < record.deadline:
            issued_at = record.deadline - self.max_staleness
            raise GateError(f"group {group} has tokens of version {oldest}, but its replica was at {issued_at}")
        if self._published is None or oldest > self._published:
            raise GateError(f"group {group} has tokens of version {oldest}; the newest published is {self._published}")
        record.has_tokens = True
        self._open.move(record, deadline)

    def ready(self, group: int, oldest: int) -> None:
        """`group` can be trained; `oldest` is the oldest version among all its tokens. Errors as for `sampled`."""
        self.sampled(group, oldest)
        record = self._open.find(group)
        self._open.make_ready(record)
        if self.spare:
            self._ready_ever += 1
            record.rank = self._ready_ever

    def drop(self, group: int, *, again: bool = False) -> None:
        """`group` leaves and frees its slot; with `again` its prompt comes back as another attempt."""
        self._open.find(group)
        self._open.remove(group)
        if again and self._to_come is not None:
            self._to_come += 1

    def end(self, to_come: int = 0) -> None:
        """The stream has ended: only `to_come` more groups (prompts that wait for another attempt) will be issued.

        This fixes the last batch, which takes what remains, perhaps fewer than P groups. An earlier `last_batch` holds.
        """
        if self._to_come is not None:
            raise GateError("the stream has ended before; drop(again=...) keeps count of what is still to come")
        if to_come < 0:
            raise ValueError(f"to_come = {to_come}: must be 0 or more")
        self._to_come = to_come

    # --- batches -------------------------------------------------------------------------------------------------

    def can_commit(self) -> bool:
        """Whether `commit` would give a batch; cheap enough to be asked after every event."""
        return (
            self._ahead is None and not self.finished and self._missing() == 0 and self._first_unmet_deadline() is None
        )

    def commit(self) -> Batch | Blocked:
        """Names the members of the next batch, or what it waits for."""
        if not self.can_commit():
            return self.blocked()
        members = self._open.take(sorted(self._choose(self._next_size())))
        oldest = tuple((r.deadline or 0) - self.max_staleness for r in members.values())
        surplus = tuple(sorted(self._open)) if self.spare else ()
        for group in surplus:
            self.drop(group, again=True)
        batch = Batch(self._next, tuple(members), oldest, surplus)
        self._ahead = members
        self._unpublished[self._next] = len(members)
        self._next += 1
        return batch

    def _choose(self, size: int) -> list[int]:
        rows = (
            (record.deadline, record.rank, group)
            for group, record in self._open.items()
            if record.place is Place.READY and record.deadline is not None
        )
        return [group for *_, group in heapq.nsmallest(size, rows)]

    def take_back(self, batch: int, lost: Iterable[int] = ()) -> None:
        """The commit of `batch` is undone before its start: its members are ready again, the `lost` to be issued."""
        if self._ahead is None or batch != self._next - 1:
            raise GateError(f"batch {batch} is not committed and waiting to start: it cannot be taken back")
        lost = tuple(lost)
        strangers = [group for group in lost if group not in self._ahead]
        if strangers:
            raise GateError(f"groups {strangers} are not members of batch {batch}")
        self._next -= 1
        del self._unpublished[batch]
        self._open.put_back(self._ahead)
        self._ahead = None
        for group in lost:
            self.unassign(group)

    def started(self, batch: int) -> None:
        """The actor has started `batch`: the next one may be committed, this one can no longer be taken back."""
        if self._ahead is None or batch != self._next - 1:
            raise GateError(f"batch {batch} started, but it is not the one committed (next to commit: {self._next})")
        self._ahead = None
        self._started = batch + 1

    def trained(self, batch: int) -> None:
        """`batch` is finished (by the critic too, where there is one): v becomes `batch` + 1."""
        if batch != self._trained or batch >= self._started:
            raise GateError(f"batch {batch} trained, but the next to be trained is {self._trained} of {self._started}")
        self._trained = batch + 1

    def published(self, version: int) -> None:
        """`version` is stored and recorded; versions may be skipped. Frees the slots of what it was trained on.

        After a resume the version of the cut is the first: an older one would be of another lineage.
        """
        least = self._first if self._published is None else self._published
        if not least <= version <= self._started:
            raise GateError(
                f"version {version} published, but the newest was {self._published}, this lineage begins at "
                f"{self._first} and {self._started} batches started"
            )
        self._published = version
        self._unpublished = {batch: slots for batch, slots in self._unpublished.items() if batch + 1 > version}

    # --- the inequality ------------------------------------------------------------------------------------------

    def _batches_left(self, following: int) -> int | None:
        """The batches from `following` to the last; None while the last is open."""
        last = self.last_batch
        return None if last is None else max(0, last - following + 1)

    def _room(self) -> float:
        """How many more groups the batches that are left could take; spares are for a batch alone."""
        left = self._batches_left(self._next)
        if left is None:
            return math.inf
        return self.batch_size * left + (self.spare if left else 0) - len(self._open)

    def _capacity(self, deadline: int, following: int) -> int:
        """P cap(w) in groups at w = `deadline`, when `following` is the next batch to commit."""
        in_time = max(0, deadline - following + 1)
        left = self._batches_left(following)
        return self.batch_size * (in_time if left is None else min(in_time, left))

    def _deadline_at(self, record: Group, version: int) -> int:
        """The deadline of a group once a replica at `version` has it: that replica may sample with no older version."""
        deadline = version + self.max_staleness
        return min(deadline, record.deadline) if record.has_tokens and record.deadline is not None else deadline

    def _refuse_move(self, old: int | None, new: int) -> Refusal | None:
        """Checks the inequality as if one more group (one that had deadline `old`) had deadline `new`."""
        if old == new:
            return None
        if new < self._next:
            return Refusal.VERSION
        n = 0
        due = self._open.due
        for deadline in sorted({*due, new}):
            n += due.get(deadline, 0) + (deadline == new) - (deadline == old)
            if deadline >= new and n > self._capacity(deadline, self._next) + self.spare:
                return Refusal.STALENESS
        return None

    def _first_unmet_deadline(self) -> int | None:
        """The least w at which the inequality would fail if the next batch were committed now."""
        if self.spare:
            return None  # what the commit leaves over is dropped
        n = ready = 0
        due, due_ready = self._open.due, self._open.due_ready
        for deadline in sorted(due):
            n += due[deadline]
            ready += due_ready.get(deadline, 0)
            if n - ready > self._capacity(deadline, self._next + 1):
                return deadline
        return None

    def _next_size(self) -> int:
        if self._to_come is None:
            return self.batch_size
        return min(self.batch_size, len(self._open) + self._to_come)

    def _missing(self) -> int:
        return max(0, self._next_size() - self._open.ready)

    def blocked(self) -> Blocked:
        """What the next commit waits for; meaningful where `can_commit` is false."""
        if self._ahead is not None:
            return Blocked(self._next, Wait.UNSTARTED)
        if self.finished:
            return Blocked(self._next, Wait.END)
        missing, unmet = self._missing(), self._first_unmet_deadline()
        to_come = min(self.free_slots, self._room(), math.inf if self._to_come is None else self._to_come)
        outstanding = len(self._open) - self._open.ready
        if missing and outstanding + to_come <= missing:
            # Nothing else could fill the batch: every group on its way is waited for.
            return Blocked(self._next, Wait.READY, missing, outstanding, self.outstanding())
        if unmet is not None:
            due = self._open.on_their_way(unmet)
            return Blocked(self._next, Wait.DUE, missing, len(due) - self._capacity(unmet, self._next + 1), due)
        return Blocked(self._next, Wait.READY, missing)
