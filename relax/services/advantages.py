"""The advantages service: filters groups, turns rewards into advantages over the whole batch, assembles the TrainBatch.

Receives `Scored` from reward and reports `Ready` (or `Filtered`) to the controller. Receives `Assemble` with the
members the controller chose, sends `TrainBatch` to the actor and the batch's rollout metrics to the controller.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax.algorithms import registry, signal
from relax.data import PromptTokenizer
from relax.metrics import Metrics
from relax.metrics import rollout as rollout_metrics
from relax.protocol.errors import PayloadGone
from relax.protocol.messages import (
    Assemble,
    Assembled,
    Filtered,
    GroupOrder,
    Lease,
    Ready,
    Rejected,
    Release,
    Scored,
    TrainBatch,
)
from relax.protocol.payload import PayloadStore
from relax.protocol.tensors import FINISH_LENGTH, SampledGroup, TrainTensors
from relax.services.samples import write_samples
from relax.services.service import Context, Service, ServiceError


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group that waits here until its batch is assembled."""

    order: GroupOrder
    sampled: SampledGroup
    rewards: np.ndarray  # float64 [samples], NaN where the reward function abstained


class Advantages(Service):
    role = "advantages"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.spec = registry.get(self.options.advantage_estimator)
        self.groups: dict[int, ScoredGroup] = {}
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
        self.spawn(self._take(message), f"group {message.order.lease.group}")

    async def _take(self, message: Scored) -> None:
        lease = message.order.lease
        try:
            arrays = await self.payloads.fetch(message.payload, deadline=self.options.peer_timeout)
        except PayloadGone as error:
            self.report(Rejected(lease, self.role, "payload_gone", str(error)))
            return
        sampled = SampledGroup.from_arrays(arrays, f"group {lease.group}")
        held = self.groups.get(lease.group)
        if held is not None and held.order.lease.fence > lease.fence:
            return
        if reason := signal.unusable(self.spec, message.rewards):
            self.report(Filtered(lease, reason))
            return
        self.groups[lease.group] = ScoredGroup(message.order, sampled, message.rewards)
        self.report(Ready(lease, sampled.oldest_version, int(sampled.response_lens.sum())))

    async def on_release(self, message: Release, sender: Any) -> None:
        for group in message.groups:
            self.groups.pop(group, None)

    # --- batches -----------------------------------------------------------------------------------------------------

    async def on_assemble(self, message: Assemble, sender: Any) -> None:
        self.spawn(self._assemble(message), f"batch {message.batch}")

    async def _assemble(self, message: Assemble) -> None:
        await self._ready.wait()
        members = [self._member(message.batch, lease) for lease in message.leases]
        self.activity = f"assembling batch {message.batch}"
        metrics = Metrics()
        tensors = await asyncio.to_thread(self._tensors, message.batch, members, metrics)
        payload = self.payloads.put(f"batch {message.batch}", tensors.arrays())
        # The actor takes one batch ahead of the one it trains, so it has the one before the last by now.
        self.payloads.release(f"batch {message.batch - 2}")
        actor = await self.member("actor")
        self.send(actor.endpoint, TrainBatch(message.batch, message.leases, payload))
        self.report(Assembled(message.batch, metrics.wire()))
        self.activity = "waiting for groups"

    def _member(self, batch: int, lease: Lease) -> ScoredGroup:
        held = self.groups.get(lease.group)
        if held is None or held.order.lease != lease:
            seen = "nothing" if held is None else held.order.lease
            raise ServiceError(f"batch {batch} names {lease}, but advantages holds {seen} of that group")
        return held

    def _tensors(self, batch: int, members: list[ScoredGroup], metrics: Metrics) -> TrainTensors:
        members = sorted(members, key=lambda m: m.order.lease.group)
        counts = [len(m.rewards) for m in members]
        group_ids = np.repeat(np.array([m.order.lease.group for m in members], np.int64), counts)
        rewards = np.concatenate([m.rewards for m in members])
        response_lens = np.concatenate([m.sampled.response_lens for m in members])
        finish = np.concatenate([m.sampled.finish for m in members])
        runs = _join_runs([m.sampled.runs for m in members], counts)
        tokens = [
            part for m in members for response in m.sampled.responses() for part in (m.order.prompt_tokens, response)
        ]
        # An abstaining sample has no reward to learn from: it leaves the loss.
        loss_mask = np.repeat(np.isfinite(rewards).astype(np.uint8), response_lens)
        result = signal.batch_advantages(self.spec, self.options, rewards, group_ids, response_lens, loss_mask)
        rollout_metrics.rewards(metrics, rewards, group_ids)
        rollout_metrics.lengths(metrics, response_lens, finish == FINISH_LENGTH)
        rollout_metrics.staleness(metrics, batch, runs)
        for name, (total, count) in result.metrics.items():
            metrics.mean(name, total, count)
        tensors = TrainTensors(
            tokens=np.concatenate(tokens).astype(np.int32),
            prompt_lens=np.repeat(np.array([len(m.order.prompt_tokens) for m in members], np.int32), counts),
            response_lens=response_lens,
            loss_mask=loss_mask,
            behaviour_logprobs=np.concatenate([m.sampled.behaviour_logprobs for m in members]),
            advantages=result.advantages.astype(np.float32),
            rewards=rewards,
            group_ids=group_ids,
            runs=runs,
        )
        write_samples(self.run.samples_dir, batch, members, self.tokenizer)
        return tensors


def _join_runs(runs: list[np.ndarray], counts: list[int]) -> np.ndarray:
    """The runs of all groups with sample indices of the batch."""
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.concatenate([r + np.array([[o, 0, 0]]) for r, o in zip(runs, offsets, strict=True)])
