"""The life of a group from its lease to the batch: sampled, scored, ready; or filtered, rejected, handed back, dropped.

Every report is told to the book, which says whether it counts, and then to the gate.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import structlog

from relax.gate.stragglers import Stragglers
from relax.ledger.records import GroupRecord
from relax.ledger.states import Accepted, Stale, StaleReason, State
from relax.protocol.messages import (
    Filtered,
    HandedBack,
    Lease,
    Ready,
    Rejected,
    RewardDone,
    Sampled,
)
from relax.protocol.payload import Payload
from relax.services.control.state import PipelineState
from relax.services.service import ServiceError

# So many batches' worth of groups may be filtered in a row without one that is not; a prompt set aside counts for as
# many groups, so that a batch's worth of those alone is the end as well.
FILTERED_BATCHES = 10
STRAGGLER = "straggler"
SURPLUS = "surplus"
SET_ASIDE = "set_aside"

log = structlog.get_logger()


class Groups:
    """Methods that take a message and its sender are handlers."""

    def __init__(self, state: PipelineState) -> None:
        self._options, self._gate, self._book, self._draws = state.options, state.gate, state.book, state.draws
        self._replicas, self._pace, self._outbox = state.replicas, state.pace, state.outbox
        self._peers, self._lives, self._name_of = state.peers, state.registry.lives, state.registry.name_of
        timeout = state.options.straggler_timeout
        self._stragglers = None if timeout is None else Stragglers(timeout)
        self._unusable_in_a_row = self._unusable_weight = 0

    def whereabouts(self, groups: Iterable[int]) -> str:
        """Where open groups are, as they were heard of last."""
        places = Counter(map(self._whereabouts, groups))
        return ", ".join(f"{count} {place}" for place, count in places.most_common())

    def _whereabouts(self, group: int) -> str:
        record, stage = self._book[group], self._draws[group].stage
        if record.state is State.PENDING:
            return "to be issued again"
        if record.state is State.ISSUED:
            return f"issued to {record.location}"
        sent = f"sent to {self._name_of(stage)}" if stage else "sent to nobody yet"
        return f"{record.state.word} by {record.location} and {sent}"

    # --- on its way --------------------------------------------------------------------------------------------------

    def sampled(self, message: Sampled, sender: Any) -> None:
        lease, oldest = message.lease, message.oldest_version
        outcome = self._book.advance(lease, State.SAMPLED, oldest=oldest, tokens=message.tokens)
        self._replicas.sampled(sender.name, lease)
        if isinstance(outcome, Accepted):
            self._gate.sampled(lease.group, oldest)
        if isinstance(outcome, Accepted) or outcome.reason is StaleReason.LATE:
            draw = self._draws[lease.group]
            if not draw.complete:
                self._pace.generated(message.tokens)
            draw.payload, draw.oldest = message.payload, oldest
            self._release_source(lease.group)
        if isinstance(outcome, Accepted):
            self._is_with(lease.group, message.reward)

    def reward_done(self, message: RewardDone, sender: Any) -> None:
        if isinstance(self._book.advance(message.lease, State.SCORED, location=sender.name), Accepted):
            self._is_with(message.lease.group, message.advantages)

    def _is_with(self, group: int, incarnation: str) -> None:
        """The stage that works on the group now. One that took it and died before this was heard has lost it."""
        self._draws[group].stage = incarnation
        if incarnation and not self._lives(incarnation):
            self.comes_again(group, "sent to a service that died")

    def ready(self, message: Ready, sender: Any) -> None:
        lease, oldest = message.lease, message.oldest_version
        outcome = self._book.advance(lease, State.READY, oldest=oldest, tokens=message.tokens, location=sender.name)
        if isinstance(outcome, Accepted):
            self._gate.ready(lease.group, oldest)
            self._draws[lease.group].stage = sender.incarnation
            self._unusable_in_a_row = self._unusable_weight = 0
        elif outcome.reason is not StaleReason.REPEATED:
            # The draw ended while the group was on its way to advantages, which holds its tensors now.
            for member in self._peers("advantages"):
                self._outbox.release(member.endpoint, lease)

    def handed_back(self, message: HandedBack, sender: Any) -> None:
        """A replica that leaves gives a group back: parked with its tokens, or lost. A stage that could not get at the
        tokens gives it back without."""
        lease, oldest = message.lease, message.oldest_version
        self._replicas.ended(sender.name, lease)
        if isinstance(self._book.check(lease), Stale):
            return
        why = f"handed back by {sender.name}"
        if message.payload is not None and oldest is not None:
            self._gate.sampled(lease.group, oldest)
            self._again(lease.group, message.payload, oldest, why)
        else:
            self.lost(lease.group, why)

    # --- groups that come again --------------------------------------------------------------------------------------

    def comes_again(self, group: int, why: str) -> None:
        """The stage that had the group is gone. Its tensors are with the replica that produced them, if that lives and
        was heard to have them: then the draw goes on from there, at any replica. Otherwise as for `lost`."""
        draw, record = self._draws[group], self._book[group]
        if draw.payload is None or record.holder is None:
            self.lost(group, why)
            return
        assert draw.oldest is not None, "it came with the payload"
        if record.state is not State.READY:
            self._gate.sampled(group, draw.oldest)  # it may have been heard of after a later stage
        draw.source = record.holder, self._book.lease(group)
        for member in self._peers("advantages"):
            self._outbox.release(member.endpoint, self._book.lease(group))
        self._again(group, draw.payload, draw.oldest, why)

    def lost(self, group: int, why: str) -> None:
        """The lease of the group ends and with it what was sampled under it: it is issued anew, with what it began from
        if that is still there."""
        draw, record = self._draws[group], self._book[group]
        begun, source = draw.begun, draw.source
        held = begun is not None and (begun.arrays is not None or source is not None)
        # What the group began from is not released with the lease that ends.
        draw.source = None
        oldest = record.oldest
        in_hand = record.state is State.ISSUED
        self.release(record)
        draw.source = source
        if held and in_hand:
            self._again(group, begun, oldest, why)
            return
        self._release_source(group)
        self._book.lost(group, why)
        self._gate.unassign(group)
        self._draws.lost(group)

    def source_died(self, group: int) -> None:
        """The replica that kept the group's tensors is gone. What was not pulled from it must be sampled anew."""
        draw = self._draws[group]
        draw.source = draw.payload = None
        if draw.begun is not None and draw.begun.arrays is None:
            draw.begun = None
        if draw.parked is not None and draw.parked.arrays is None:
            self._book.lost(group, "its tokens died with their replica")
            self._gate.unassign(group)
            self._draws.lost(group)

    def _again(self, group: int, parked: Payload | None, oldest: int | None, why: str) -> None:
        self._book.parked(group, oldest, why)
        self._gate.unassign(group, keep_tokens=True)
        self._draws.lost(group, parked)

    def _release_source(self, group: int) -> None:
        """Nobody needs what another replica keeps of the group any more."""
        draw = self._draws[group]
        if draw.source is None:
            return
        (name, lease), draw.source = draw.source, None
        keeper = self._replicas.get(name)
        if keeper is not None:
            self._replicas.ended(name, lease)
            self._outbox.release(keeper.member.endpoint, lease)

    # --- draws that end untrained ------------------------------------------------------------------------------------

    def filtered(self, message: Filtered, sender: Any) -> None:
        group = message.lease.group
        if isinstance(self._book.check(message.lease), Accepted):
            self._gate.drop(group)
            self._drop(group, message.reason)
            self._draws.ended(group)
            self._unusable(1, f"dropped by advantages: {message.reason}")

    def rejected(self, message: Rejected, sender: Any) -> None:
        if isinstance(self._book.check(message.lease), Accepted):
            self._give_up(message.lease.group, message.stage, message.reason, message.detail)

    def drop_stragglers(self, now: float) -> None:
        """Drops as many of the groups that have blocked the commit for too long as it takes. `now` is in seconds.

        Only what is still to be sampled can be a straggler: a group that waits for its reward or a filter is as far as
        another draw of it would come.
        """
        if self._stragglers is None or self._gate.can_commit():
            return
        blocked = self._gate.blocked()
        late = [group for group in self._stragglers.overdue(blocked, now) if self._is_sampled_now(group)]
        coming = sum(self._book[group].state > State.ISSUED or self._draws[group].complete for group in blocked.groups)
        for group in late[: max(0, blocked.needed - coming)]:
            self._give_up(group, "controller", STRAGGLER, str(blocked))

    def _is_sampled_now(self, group: int) -> bool:
        """A parked group is; one that is to be issued anew has no draw that could be slow, nor has one that is
        sampled to its end and only comes again."""
        draw = self._draws[group]
        return not draw.complete and (self._book[group].state is State.ISSUED or draw.parked is not None)

    def surplus(self, groups: tuple[int, ...]) -> None:
        """The gate has dropped these with a commit; their prompts come back with their attempt as groups of new ids."""
        for group in groups:
            position = self._book[group].position
            self._drop(group, SURPLUS)
            again = self._draws.surplus(group)
            prompt = again.prompt
            self._book.draw(again.group, prompt.prompt_id, prompt.epoch, position, attempt=again.attempt)

    def _give_up(self, group: int, stage: str, reason: str, detail: str) -> None:
        """This draw ends; its prompt is drawn again, or leaves the run where that happened too often."""
        again = self._draws.rejected(group, self._book[group].holder or "")
        self._gate.drop(group, again=again)
        log.warning("draw_rejected", group=group, stage=stage, reason=reason, detail=detail, again=again)
        if again:
            self._drop(group, reason, again=True)
            return
        prompt = self._draws[group].prompt
        log.error(
            "prompt_set_aside",
            group=group,
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            stage=stage,
            reason=reason,
            error=detail,
        )
        self._pace.set_aside()
        self._drop(group, SET_ASIDE)
        self._draws.ended(group)
        self._unusable(FILTERED_BATCHES, f"{reason}: {detail}")

    def _drop(self, group: int, reason: str, *, again: bool = False) -> None:
        record = self._book[group]
        self._pace.dropped(reason, record.tokens)
        self.release(record)
        self._book.drop(group, reason, self._gate.version, again=again)

    def _unusable(self, weight: int, why: str) -> None:
        """Another group that will never be trained. Too many without a single good one between them are a fault of the
        run, which would go on for ever."""
        self._unusable_in_a_row += 1
        self._unusable_weight += weight
        if self._unusable_in_a_row == self._options.rollout_batch_size:
            log.warning("no_group_is_usable", groups=self._unusable_in_a_row, last=why)
        if self._unusable_weight >= FILTERED_BATCHES * self._options.rollout_batch_size:
            raise ServiceError(f"{self._unusable_in_a_row} groups in a row could not be used; the last one: {why}")

    # --- the end of every draw ---------------------------------------------------------------------------------------

    def release(self, record: GroupRecord) -> None:
        """Nobody needs this draw's tensors any more, and what is still sampled of it is cancelled."""
        self._release_source(record.group)
        if record.state is State.PENDING or record.holder is None:
            return
        lease = Lease(record.group, record.attempt, self._book.lineage, record.fence)
        holder = self._replicas.get(record.holder)
        if holder is not None:
            self._replicas.ended(record.holder, lease)
            self._outbox.release(holder.member.endpoint, lease)
        for member in self._peers("advantages"):
            self._outbox.release(member.endpoint, lease)
