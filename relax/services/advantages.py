"""The advantages service: filters groups, turns rewards into advantages over the whole batch, assembles the TrainBatch.

Receives `Scored` from reward, asks the reference where the run has a KL, reports `Ready` (or `Filtered`) to the
controller. Receives `Assemble` with the members the controller chose, asks the critic where there is one, sends
`TrainBatch` to those who train and the batch's rollout metrics to the controller.
"""

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from relax.algorithms import filters, registry, signal
from relax.algorithms.contracts import services_needed
from relax.algorithms.hooks import FILTER, HookError
from relax.data import PromptTokenizer
from relax.metrics import Metrics
from relax.protocol.messages import (
    Assemble,
    Assembled,
    Filtered,
    Lease,
    Ready,
    ReferenceLogprobs,
    ReferenceRequest,
    Rejected,
    Release,
    Scored,
    TrainBatch,
    Values,
    ValuesRequest,
)
from relax.protocol.payload import PayloadStore
from relax.protocol.tensors import FINISH_LENGTH, SampledGroup
from relax.services import assembly
from relax.services.assembly import RawBatch, ScoredGroup
from relax.services.groups import take_group
from relax.services.intervals import reference_version
from relax.services.samples import write_samples
from relax.services.service import Context, Service, ServiceError
from relax.services.versions import oldest_version

# Groups that the reference is asked about at once: hides the round trip; the rest waits here, its tensors unsent.
ASKED_AT_ONCE = 4


class Advantages(Service):
    role = "advantages"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.spec = registry.get(self.options.advantage_estimator)
        needed = services_needed(self.options)
        self.has_reference, self.has_critic = "reference" in needed, "critic" in needed
        self._coming: dict[int, Lease] = {}  # group -> its newest draw, while that is fetched and filtered
        self.groups: dict[int, ScoredGroup] = {}
        self._incomplete = 0  # groups with too few rewards, since the last batch
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._filtering = asyncio.Lock()
        self._ready = asyncio.Event()

    def handlers(self) -> dict[type, Any]:
        self.payloads = PayloadStore(self.mailbox)
        return {Scored: self.on_scored, Assemble: self.on_assemble, Release: self.on_release}

    async def prepare(self) -> None:
        self.tokenizer = await asyncio.to_thread(PromptTokenizer, self.options.hf_checkpoint)
        self._ready.set()
        self.activity = "waiting for groups"

    # --- groups ------------------------------------------------------------------------------------------------------

    async def on_scored(self, message: Scored, sender: Any) -> None:
        lease = message.order.lease
        held, coming = self.groups.get(lease.group), self._coming.get(lease.group, lease)
        if lease.fence >= max(coming.fence, -1 if held is None else held.order.lease.fence):
            self._coming[lease.group] = lease
            self.spawn(self._take(message), f"group {lease.group}")

    def holds(self) -> Iterable[Lease]:
        return [group.order.lease for group in self.groups.values()]

    async def _take(self, message: Scored) -> None:
        lease = message.order.lease
        with self.working_on(lease):
            await self._weigh(message)
        if self._is_coming(lease):
            del self._coming[lease.group]

    def _is_coming(self, lease: Lease) -> bool:
        """Whether the draw has neither ended nor been followed by another one while it was looked at here."""
        return self._coming.get(lease.group) == lease

    async def _weigh(self, message: Scored) -> None:
        lease = message.order.lease
        sampled = await take_group(self, self.payloads, lease, message.payload)
        if sampled is None or not self._is_coming(lease):
            return
        try:
            reason = await self._unwanted(message, sampled)
        except HookError as error:
            self.log.warning("filter_failed", group=lease.group, detail=str(error))
            self.report(Rejected(lease, self.role, "filter_failed", str(error)))
            return
        if not self._is_coming(lease):
            return
        if reason is not None:
            self._incomplete += reason == signal.TOO_FEW_REWARDS
            self.report(Filtered(lease, reason))
            return
        group = self.groups[lease.group] = ScoredGroup(message.order, sampled, message.rewards)
        if self.has_reference:
            # No batch below its newest version can still take the group, so no older reference will be wanted.
            await self._ask_reference(group, self._reference_of(int(sampled.runs[:, 1].max())))
            if self.groups.get(lease.group) is not group:
                return
        oldest = oldest_version(sampled, self.options)
        assert oldest is not None, "every finished sample has a version run"
        self.report(Ready(lease, oldest, int(sampled.response_lens.sum())))

    async def _unwanted(self, message: Scored, sampled: SampledGroup) -> str | None:
        """Why this group is not trained; None when it is. Raises HookError when the user's filter fails."""
        reason = signal.unusable(self.spec, message.rewards)
        if reason is not None or FILTER.path(self.options) is None:
            return reason
        # One at a time, so that a filter may keep count; in a thread, so that a slow one holds up no message.
        async with self._filtering:
            truncated, row = sampled.finish == FINISH_LENGTH, json.loads(message.order.row)
            with self.watchdog.work("filtering"):
                return await asyncio.to_thread(
                    filters.unwanted, self.options, message.rewards, sampled.response_lens, truncated, row
                )

    async def on_release(self, message: Release, sender: Any) -> None:
        for lease in message.leases:
            coming, held = self._coming.get(lease.group), self.groups.get(lease.group)
            if coming is not None and coming.fence <= lease.fence:
                del self._coming[lease.group]
            if held is not None and held.order.lease.fence <= lease.fence:
                del self.groups[lease.group]

    # --- reference and critic ----------------------------------------------------------------------------------------

    def _reference_of(self, batch: int) -> int:
        return reference_version(batch, self.options.ref_update_interval)

    async def _ask_reference(self, group: ScoredGroup, version: int) -> None:
        """Log-probs of the group by the reference at `version` or later."""
        lease = group.order.lease
        async with self._asking:
            payload = self.payloads.put(
                f"group {lease.group}.{lease.fence} for the reference", group.responses().arrays()
            )
            ask = ReferenceRequest(version, payload)
            reply = await self._ask("reference", ask, payload.id)
        assert isinstance(reply, ReferenceLogprobs)
        group.reference_logprobs = self._one_a_token(reply.logprobs, group.sampled.response_lens, payload.id)
        group.reference_version = reply.version

    async def _settle_reference(self, batch: int, members: Iterable[ScoredGroup], metrics: Metrics) -> None:
        """Every member is scored by the one reference version of the batch; those scored by an older one once more."""
        wanted = self._reference_of(batch)
        older = [m for m in members if m.reference_version < wanted]
        started = time.monotonic()
        await asyncio.gather(*(self._ask_reference(member, wanted) for member in older))
        metrics.sum("perf/assembly_wait_s/reference", time.monotonic() - started)
        metrics.last("pipeline/reference_version", wanted)
        metrics.sum("pipeline/reference_rescored", len(older))
        for member in members:
            if member.reference_version != wanted:
                raise ServiceError(
                    f"group {member.order.lease.group} of batch {batch} was scored by reference version "
                    f"{member.reference_version}; the batch takes version {wanted} alone"
                )

    async def _ask_values(self, batch: int, raw: RawBatch, metrics: Metrics) -> np.ndarray:
        started = time.monotonic()
        payload = self.payloads.put(f"batch {batch} for the critic", raw.responses.arrays())
        reply = await self._ask("critic", ValuesRequest(batch, payload), payload.id)
        assert isinstance(reply, Values)
        metrics.sum("perf/assembly_wait_s/critic", time.monotonic() - started)
        return self._one_a_token(reply.values, raw.responses.response_lens, payload.id)

    async def _ask(self, role: str, message: Any, payload_id: str) -> Any:
        """It may have to train a batch or load weights first; that it lives is known from its heartbeats, and that it
        gets on is its own watchdog's care."""
        try:
            return await self.ask_role(role, message)
        finally:
            self.payloads.release(payload_id)

    @staticmethod
    def _one_a_token(array: np.ndarray, response_lens: np.ndarray, what: str) -> np.ndarray:
        tokens = int(response_lens.sum())
        if array.dtype != np.float32 or array.shape != (tokens,):
            raise ServiceError(f"{what}: {array.dtype} {list(array.shape)} came back for {tokens} response tokens")
        if not np.isfinite(array).all():
            bad = int(np.flatnonzero(~np.isfinite(array))[0])
            raise ServiceError(f"{what}: {array[bad]} came back for response token {bad}")
        return array

    # --- batches -----------------------------------------------------------------------------------------------------

    async def on_assemble(self, message: Assemble, sender: Any) -> None:
        self.spawn(self._assemble(message), f"batch {message.batch}")

    async def _assemble(self, message: Assemble) -> None:
        await self._ready.wait()
        b = message.batch
        members = [self._member(b, lease) for lease in message.leases]
        incomplete, self._incomplete = self._incomplete, 0
        self.activity = f"assembling batch {b}"
        metrics = Metrics()
        if self.has_reference:
            await self._settle_reference(b, members, metrics)
        with self.watchdog.work("assembling"):
            raw = await asyncio.to_thread(assembly.join, members, self.options)
        assembly.measure(metrics, b, raw)
        values = await self._ask_values(b, raw, metrics) if self.has_critic else None
        with self.watchdog.work("assembling"):
            tensors = await asyncio.to_thread(
                assembly.train_tensors, self.spec, self.options, raw, values, incomplete, metrics
            )
        payload = self.payloads.put(f"batch {b}", tensors.arrays())
        # The actor takes one batch ahead of the one it trains, so it has the one before the last by now.
        self.payloads.release(f"batch {b - 2}")
        for role in ("actor", "critic") if self.has_critic else ("actor",):
            member = await self.member(role)
            self.send(member.endpoint, TrainBatch(b, message.commit, message.leases, payload))
        with self.watchdog.work("writing samples"):
            await asyncio.to_thread(write_samples, self.run.samples_dir, b, members, self.tokenizer)
        self.report(Assembled(b, metrics.wire()))
        self.activity = "waiting for groups"

    def _member(self, batch: int, lease: Lease) -> ScoredGroup:
        held = self.groups.get(lease.group)
        if held is None or held.order.lease != lease:
            seen = "nothing" if held is None else held.order.lease
            raise ServiceError(f"batch {batch} names {lease}, but advantages holds {seen} of that group")
        return held
