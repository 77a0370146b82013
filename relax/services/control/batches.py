"""The life of a batch: committed, assembled, started, trained; and its row of metrics."""

from collections.abc import Callable, Mapping
from typing import Any

import structlog

from relax.gate.gate import Gate
from relax.gate.verdicts import Batch, GateError
from relax.ledger.book import GroupBook
from relax.metrics.rows import BatchRows
from relax.protocol.messages import Assemble, Assembled, Lease, Member, Started, Trained
from relax.services.control.draws import Draws
from relax.services.control.groups import Groups
from relax.services.control.outbox import Outbox
from relax.services.control.pace import Pace
from relax.services.control.registry import Registry
from relax.services.control.weights import Weights
from relax.services.service import ServiceError

log = structlog.get_logger()


class Batches:
    """`trainers` are the roles that train every batch; v rises when all of them have reported it."""

    def __init__(
        self,
        trainers: frozenset[str],
        gate: Gate,
        book: GroupBook,
        draws: Draws,
        groups: Groups,
        weights: Weights,
        registry: Registry,
        rows: BatchRows,
        pace: Pace,
        outbox: Outbox,
        peers: Callable[[str], list[Member]],
        resident_bytes: Callable[[], Mapping[str, float]],
    ) -> None:
        self._trainers, self._gate, self._book, self._draws = trainers, gate, book, draws
        self._groups, self._weights, self._registry = groups, weights, registry
        self._rows, self._pace, self._outbox, self._peers = rows, pace, outbox, peers
        self._resident_bytes = resident_bytes
        self._members: dict[int, tuple[Lease, ...]] = {}  # of the batches that are not trained yet
        self._reports: dict[int, dict[str, Trained]] = {}  # batch -> role -> its report, until all have reported

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
        self._groups.surplus(batch.surplus)
        self._outbox.say(advantages[0].endpoint, Assemble(batch.index, leases))
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
        self._gate.started(message.batch)
        self._book.started(message.batch)

    def trained(self, message: Trained, sender: Any) -> None:
        b, role = message.batch, self._registry.role(sender.name)
        if role not in self._trainers:
            raise ServiceError(f"{sender.name} reports that it trained batch {b}, but it is no trainer of this run")
        if b not in self._members:
            raise GateError(f"batch {b} is trained already or was never committed")
        reports = self._reports.setdefault(b, {})
        reports[role] = message
        self._rows.report(b, role, message.metrics)
        if reports.keys() == self._trainers:
            del self._reports[b]
            self._version_rises(b, reports["actor"])

    def _version_rises(self, batch: int, by_actor: Trained) -> None:
        """Every trainer has finished the batch."""
        for lease in self._members.pop(batch):
            record = self._book[lease.group]
            self._pace.trained(record.tokens)
            self._groups.release(record)
            self._draws.ended(lease.group)
        self._book.trained(batch)
        self._gate.trained(batch)
        rollouts = {entry.member.name: entry.counters for entry in self._registry.of_role("rollout")}
        self._pace.counts.last("pipeline/in_flight", self._gate.in_flight)
        self._pace.counts.last("pipeline/free_slots", self._gate.free_slots)
        for service, resident in self._resident_bytes().items():
            self._pace.counts.last(f"memory/{service}/rss_mb", resident / 1e6)
        row = self._pace.row(by_actor.metrics["perf/response_tokens"][1], rollouts)
        self._rows.report(batch, "controller", row)
        self._weights.version_rose()
