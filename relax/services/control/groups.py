"""The life of a group from its lease to the batch: sampled, scored, ready; or filtered, rejected, handed back, dropped.

Every report is told to the book, which says whether it counts, and then to the gate.
"""

from collections.abc import Callable
from typing import Any

import structlog

from relax.config.options import Options
from relax.gate.gate import Gate
from relax.gate.stragglers import Stragglers
from relax.ledger.book import GroupBook
from relax.ledger.records import GroupRecord
from relax.ledger.states import Accepted, Stale, StaleReason, State
from relax.protocol.messages import (
    Filtered,
    HandedBack,
    Lease,
    Member,
    Ready,
    Rejected,
    RewardDone,
    Sampled,
)
from relax.services.control.draws import Draws
from relax.services.control.outbox import Outbox
from relax.services.control.pace import Pace
from relax.services.control.replicas import Replicas
from relax.services.service import ServiceError

# So many batches' worth of groups may be filtered in a row without one that is not; a prompt set aside counts for as
# many groups, so that a batch's worth of those alone is the end as well.
FILTERED_BATCHES = 10
STRAGGLER = "straggler"
SURPLUS = "surplus"
SET_ASIDE = "set_aside"

log = structlog.get_logger()


class Groups:
    """`peers` gives the live members of a role. Methods that take a message and its sender are handlers."""

    def __init__(
        self,
        options: Options,
        gate: Gate,
        book: GroupBook,
        draws: Draws,
        replicas: Replicas,
        pace: Pace,
        outbox: Outbox,
        peers: Callable[[str], list[Member]],
    ) -> None:
        self._options, self._gate, self._book, self._draws = options, gate, book, draws
        self._replicas, self._pace, self._outbox, self._peers = replicas, pace, outbox, peers
        timeout = options.straggler_timeout
        self._stragglers = None if timeout is None else Stragglers(timeout)
        self._unusable_in_a_row = self._unusable_weight = 0

    # --- on its way --------------------------------------------------------------------------------------------------

    def sampled(self, message: Sampled, sender: Any) -> None:
        lease, oldest = message.lease, message.oldest_version
        outcome = self._book.advance(lease, State.SAMPLED, oldest=oldest, tokens=message.tokens)
        if isinstance(outcome, Accepted):
            self._gate.sampled(lease.group, oldest)
        if isinstance(outcome, Accepted) or outcome.reason is StaleReason.LATE:
            self._pace.generated(message.tokens)
        self._replicas.sampled(sender.name, lease)

    def reward_done(self, message: RewardDone, sender: Any) -> None:
        self._book.advance(message.lease, State.SCORED, location=sender.name)

    def ready(self, message: Ready, sender: Any) -> None:
        lease, oldest = message.lease, message.oldest_version
        outcome = self._book.advance(lease, State.READY, oldest=oldest, tokens=message.tokens, location=sender.name)
        if isinstance(outcome, Accepted):
            self._gate.ready(lease.group, oldest)
            self._unusable_in_a_row = self._unusable_weight = 0
        elif outcome.reason is not StaleReason.REPEATED:
            # The draw ended while the group was on its way to advantages, which holds its tensors now.
            for member in self._peers("advantages"):
                self._outbox.release(member.endpoint, lease)

    def handed_back(self, message: HandedBack, sender: Any) -> None:
        """A replica that leaves gives a group back: parked with its tokens, or lost."""
        lease, oldest = message.lease, message.oldest_version
        self._replicas.ended(sender.name, lease)
        if isinstance(self._book.check(lease), Stale):
            return
        keep = message.payload is not None and oldest is not None
        if keep:
            assert oldest is not None
            self._gate.sampled(lease.group, oldest)
            self._book.parked(lease.group, oldest, f"handed back by {sender.name}")
        else:
            self._book.lost(lease.group, f"handed back by {sender.name}")
        self._gate.unassign(lease.group, keep_tokens=keep)
        self._draws.lost(lease.group, message.payload if keep else None)

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
        coming = sum(self._book[group].state > State.ISSUED for group in blocked.groups)
        for group in late[: max(0, blocked.needed - coming)]:
            self._give_up(group, "controller", STRAGGLER, str(blocked))

    def _is_sampled_now(self, group: int) -> bool:
        """A parked group is; one that is to be issued anew has no draw that could be slow."""
        return self._book[group].state is State.ISSUED or self._draws[group].parked is not None

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
        again = self._draws.rejected(group)
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
        if record.state is State.PENDING or record.holder is None:
            return
        lease = Lease(record.group, record.attempt, self._book.lineage, record.fence)
        holder = self._replicas.get(record.holder)
        if holder is not None:
            self._replicas.ended(record.holder, lease)
            self._outbox.release(holder.member.endpoint, lease)
        for member in self._peers("advantages"):
            self._outbox.release(member.endpoint, lease)
