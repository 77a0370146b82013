"""The life of a batch: committed, assembled, started, trained; and its row of metrics."""

from collections.abc import Callable, Mapping
from typing import Any

import structlog

from relax.gate.verdicts import Batch, GateError
from relax.ledger.states import LedgerError
from relax.metrics.rows import BatchRows
from relax.protocol.messages import Assemble, Assembled, Lease, Started, Trained, Withdraw
from relax.services.control.groups import Groups
from relax.services.control.state import PipelineState
from relax.services.control.weights import Weights
from relax.services.service import ServiceError

log = structlog.get_logger()


class Batches:
    """`trainers` are the roles that train every batch; v rises when all of them have reported it."""

    def __init__(
        self,
        state: PipelineState,
        groups: Groups,
        weights: Weights,
        rows: BatchRows,
        trainers: frozenset[str],
        resident_bytes: Callable[[], Mapping[str, float]],
    ) -> None:
        self._gate, self._book, self._draws, self._registry = state.gate, state.book, state.draws, state.registry
        self._pace, self._outbox, self._peers = state.pace, state.outbox, state.peers
        self._groups, self._weights, self._rows = groups, weights, rows
        self.trainers, self._resident_bytes = trainers, resident_bytes
        self._members: dict[int, tuple[Lease, ...]] = {}  # of the batches that are not trained yet
        self._commits: dict[int, int] = {}  # batch that is not trained yet -> number of its commit
        self._last_commit = -1
        self._reports: dict[int, set[str]] = {}  # batch -> roles that have reported it, until all have

    def commit(self) -> bool:
        """Names the members of the next batch, if the gate allows and there is somebody to train it."""
        if not self._gate.can_commit() or not self._peers("actor"):
            return False
        advantages = self._peers("advantages")
        if not advantages:
            return False
        batch = self._gate.commit()
        assert isinstance(batch, Batch)
        leases = self._members[batch.index] = self._book.commit(batch.index, batch.groups)
        self._last_commit += 1
        self._commits[batch.index] = self._last_commit
        self._groups.surplus(batch.surplus)
        self._outbox.say(advantages[0].endpoint, Assemble(batch.index, self._last_commit, leases))
        log.info(
            "batch_committed",
            batch=batch.index,
            groups=len(leases),
            surplus=len(batch.surplus),
            staleness=max(batch.staleness),
        )
        return True

    def assembled(self, message: Assembled, sender: Any) -> None:
        self._rows.report(message.batch, "advantages", message.metrics)

    def started(self, message: Started, sender: Any) -> None:
        if self._commits.get(message.batch) != message.commit:
            now = self._commits.get(message.batch, "none")
            raise LedgerError(f"batch {message.batch} started under commit {message.commit}, its present one is {now}")
        self._gate.started(message.batch)
        self._book.started(message.batch)

    # --- when advantages died ----------------------------------------------------------------------------------------

    def untrained(self) -> list[Withdraw]:
        """What the trainers have to be asked, each of them: do you have this batch as a whole?"""
        return [Withdraw(batch, commit) for batch, commit in sorted(self._commits.items())]

    def withdrawn(self, asked: Withdraw, held: Mapping[str, bool]) -> None:
        """What they answered, by role. A batch that none of them has was never handed over: its commit is taken back.

        Raises ServiceError when one of them has it and another has not: it cannot be assembled twice in the same way.
        """
        batch = asked.batch
        if all(held.values()) or self._commits.get(batch) != asked.commit:
            return
        if any(held.values()) or self._book.has_started(batch):
            lacking = " and ".join(sorted(role for role, has in held.items() if not has))
            raise ServiceError(
                f"advantages died while it handed over batch {batch}, which the {lacking} lacks and another trainer has"
            )
        del self._commits[batch]
        members = self._members.pop(batch)
        self._gate.take_back(batch)
        self._book.take_back(batch)
        log.warning("commit_taken_back", batch=batch, commit=asked.commit, groups=len(members))
        for lease in members:
            self._groups.comes_again(lease.group, f"batch {batch} was lost with advantages")

    def trained(self, message: Trained, sender: Any) -> None:
        b, role = message.batch, self._registry.role(sender.name)
        if role not in self.trainers:
            raise ServiceError(f"{sender.name} reports that it trained batch {b}, but it is no trainer of this run")
        if b not in self._members:
            raise GateError(f"batch {b} is trained already or was never committed")
        reports = self._reports.setdefault(b, set())
        reports.add(role)
        self._rows.report(b, role, message.metrics)
        if reports == self.trainers:
            del self._reports[b]
            self._version_rises(b)

    def _version_rises(self, batch: int) -> None:
        """Every trainer has finished the batch."""
        del self._commits[batch]
        for lease in self._members.pop(batch):
            record = self._book[lease.group]
            assert record.tokens is not None, "a group is ready with its tokens"
            self._pace.trained(record.tokens)
            self._groups.release(record)
            self._draws.ended(lease.group)
        self._book.trained(batch)
        self._gate.trained(batch)
        # By life: the counters of a new one begin at 0.
        rollouts = {entry.member.incarnation: entry.counters for entry in self._registry.of_role("rollout")}
        self._pace.counts.last("pipeline/restarts", self._registry.restarts.total())
        for name, times in self._registry.restarts.items():
            self._pace.counts.last(f"pipeline/restarts/{name}", times)
        self._pace.counts.last("pipeline/in_flight", self._gate.in_flight)
        self._pace.counts.last("pipeline/free_slots", self._gate.free_slots)
        for service, resident in self._resident_bytes().items():
            self._pace.counts.last(f"memory/{service}/rss_mb", resident / 1e6)
        self._rows.report(batch, "controller", self._pace.row(rollouts))
        self._weights.version_rose()
