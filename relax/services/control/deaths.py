"""What a death means for the groups: which of them come again, and from where. A reward service that leaves the run
has the same to come again; a rollout that does has handed back or finished what it had.

    died          its groups that are                          come again
    rollout       being sampled; sampled or scored             anew, or with what they began from
    reward        sampled, and sent to it or to nobody yet     from the tensors that the rollout keeps
    advantages    scored and sent to it, ready                 from there
                  committed, and no trainer has the batch      from there, their commit taken back
    reference     none: what was asked of it is asked again

Groups that are ready or committed have left their rollout behind: advantages has their tensors. A report that was on
its way from a life that has ended is not heard; one about it (a group was sent to it) is, see `Groups`.
"""

import structlog

from relax.ledger.states import State
from relax.protocol.messages import Member
from relax.services.control.groups import Groups
from relax.services.control.state import PipelineState

log = structlog.get_logger()


class Deaths:
    def __init__(self, state: PipelineState, groups: Groups) -> None:
        self._book, self._draws, self._replicas, self._groups = state.book, state.draws, state.replicas, groups

    def died(self, member: Member) -> None:
        """`member` is in the registry no more."""
        again = self._without(member, f"{member.name} died")
        log.warning("member_died", member=member.name, incarnation=member.incarnation, groups_again=again)

    def left(self, member: Member) -> None:
        """It is there no more because it wanted to."""
        again = self._without(member, f"{member.name} left")
        log.info("member_left", member=member.name, groups_again=again)

    def _without(self, member: Member, why: str) -> int:
        """How many groups come again."""
        before = {draw.group: self._book[draw.group].state for draw in self._draws.open() if draw.group in self._book}
        if member.role == "rollout":
            self._rollout(member, why)
        elif member.role == "reward":
            for group in self._book.in_state(State.SAMPLED):
                if self._draws[group].stage in ("", member.incarnation):
                    self._groups.comes_again(group, why)
        elif member.role == "advantages":
            for group in self._book.in_state(State.SCORED, State.READY):
                if self._draws[group].stage == member.incarnation:
                    self._groups.comes_again(group, why)
        return sum(
            self._book[group].state is State.PENDING and state > State.PENDING for group, state in before.items()
        )

    def _rollout(self, member: Member, why: str) -> None:
        replica = self._replicas.died(member)
        if replica is None:
            return
        # A group may be in both: it keeps the tensors of an earlier lease and takes them from itself for this one.
        for group, fence in sorted(replica.keeps.items()):
            if group not in self._book:
                continue
            record = self._book[group]
            if fence != record.fence or record.state is State.PENDING:
                self._groups.source_died(group)
            else:
                self._left_alone(group, why)
        for group, fence in sorted(replica.samples.items()):
            if group in self._book and self._book[group].fence == fence:
                self._left_alone(group, why)

    def _left_alone(self, group: int, why: str) -> None:
        """The replica that produced the group, or was about to, is gone."""
        self._draws[group].payload = None
        if self._book[group].state in (State.ISSUED, State.SAMPLED, State.SCORED):
            self._groups.lost(group, why)
