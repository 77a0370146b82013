"""status.json of the run: gathered in the controller's loop, written by a thread, about once a second."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import structlog

from relax.gate.gate import Gate
from relax.services.control.state import PipelineState
from relax.status.snapshot import Seen, Snapshot

log = structlog.get_logger()

STATUS_SECONDS = 1.0
# Where many replicas make it long to gather, it is gathered less often: the loop gives at most this share of its time.
LARGEST_SHARE = 0.01


class StatusFile:
    """Who was seen when, and the file that says so. `me` is the controller itself.

    A file that cannot be written (a full disk) ends no run: it is said once in the log and tried again.
    """

    def __init__(self, path: Path, run_id: str, lineage: int, host: str, me: Seen, state: PipelineState) -> None:
        self._path, self._run_id, self._lineage, self._host, self._me = path, run_id, lineage, host, me
        self._gate, self._registry, self._replicas = state.gate, state.registry, state.replicas
        self._seen: dict[str, Seen] = {}
        self._failing = False
        self._writing = threading.Lock()
        self._newest = 0.0

    def gather(
        self,
        *,
        activity: str,
        code: int | None,
        moved: float,
        batches: int | None,
        rss_bytes: float | None,
    ) -> Snapshot:
        """The run as it is now; `moved` is in monotonic seconds. Takes microseconds a member and open group."""
        gate, registry, replicas = self._gate, self._registry, self._replicas
        wall, now = time.time(), time.monotonic()
        me = replace(self._me, heard=wall, activity=activity, rss_bytes=rss_bytes)
        for entry in registry.entries.values():
            member, before = entry.member, self._seen.get(entry.member.name)
            again = before is not None and before.incarnation != member.incarnation
            replica = replicas.get(member.name)
            self._seen[member.name] = Seen(
                name=member.name,
                role=member.role,
                node=entry.node,
                pid=entry.pid,
                incarnation=member.incarnation,
                local=member.endpoint.startswith("ipc://") or entry.node == me.node,
                joined=wall if before is None or again else before.joined,
                heard=wall - (now - entry.heard),
                activity=entry.activity,
                rss_bytes=entry.gauges.get("rss_bytes"),
                lives=1 if before is None else before.lives + again,
                version=None if replica is None or replica.version < 0 else replica.version,
                sampling=None if replica is None else len(replica.samples),
                keeps=None if replica is None else len(replica.keeps),
            )
        for name in self._seen.keys() - registry.entries.keys():
            self._seen[name] = replace(self._seen[name], gone=True)
        return Snapshot(
            run_id=self._run_id,
            lineage=self._lineage,
            host=self._host,
            time=wall,
            moved=wall - (now - moved),
            code=code,
            batches=batches,
            version=gate.version,
            published=gate.published_version,
            next_batch=gate.next_batch,
            waits=_waits(gate),
            missing=tuple(registry.vacant()),
            in_flight=gate.in_flight,
            ready=gate.ready_groups,
            slots=gate.slots,
            free_slots=gate.free_slots,
            services=(me, *(self._seen[name] for name in sorted(self._seen))),
        )

    def write(self, snapshot: Snapshot) -> None:
        """From any thread; a snapshot that is older than the one written last is left out."""
        with self._writing:
            if snapshot.time < self._newest:
                return
            try:
                snapshot.write(self._path)
                self._newest, self._failing = snapshot.time, False
            except OSError as error:
                if not self._failing:
                    log.warning("status_not_written", file=str(self._path), error=str(error))
                self._failing = True


def _waits(gate: Gate) -> str:
    if gate.can_commit():
        return f"batch {gate.next_batch} waits for the actor and advantages to join"
    return str(gate.blocked())
