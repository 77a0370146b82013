"""The rollout service: samples groups with one inference engine.

Receives `Generate` (what to sample) and `Announce` (which weights to serve). Sends `Score` with the payload to a
reward service, `Sampled` and `Serving` to the controller. Keeps the payload of its groups until they have ended.

Updating the weights: at an announcement admission closes, running samples finish, the weights load, admission opens.
So no sample holds two versions, and a replica under continuous load still gets to load.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from relax.data.seeds import sample_seed
from relax.engines.base import BadResult, Engine, Request, RequestRefused, Result
from relax.engines.vllm import VllmEngine
from relax.logs.setup import adopt
from relax.protocol.messages import (
    Announce,
    Generate,
    GroupOrder,
    Rejected,
    Release,
    Sampled,
    Score,
    Serving,
)
from relax.protocol.payload import PayloadStore
from relax.protocol.tensors import FINISH_LENGTH, FINISH_STOP, SampledGroup
from relax.services.chunks import weight_agent
from relax.services.service import Context, Service, ServiceError
from relax.weights.errors import NotStored
from relax.weights.manifest import Manifest


class Rollout(Service):
    role = "rollout"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.engine: Engine = VllmEngine.from_options(self.options)
        self.sampling = 0  # groups
        self.newest: Manifest | None = None  # announced
        self._payload_of: dict[int, tuple[int, str]] = {}  # group -> fence and id of the payload kept for it
        self._admission = asyncio.Event()  # set while samples may start
        self._drained = asyncio.Event()
        self._drained.set()
        self._announced = asyncio.Event()
        self._idle_since = time.monotonic()

    def handlers(self) -> dict[type, Any]:
        self.payloads = PayloadStore(self.mailbox)
        return {Generate: self.on_generate, Announce: self.on_announce, Release: self.on_release}

    async def prepare(self) -> None:
        self.activity = "starting the engine"
        await self.engine.start()
        adopt("transformers")  # imported by the engine, with a handler of its own
        self.agent = weight_agent(self)
        self.spawn(self._watch_engine(), "engine")
        self.spawn(self._follow_versions(), "weights")
        self.activity = "waiting for weights"

    async def release(self) -> None:
        await self.engine.shutdown()

    # --- groups ------------------------------------------------------------------------------------------------------

    async def on_generate(self, message: Generate, sender: Any) -> None:
        self.spawn(self._sample(message.orders, message.together), "sample")

    async def _sample(self, orders: Sequence[GroupOrder], together: bool) -> None:
        await self._admission.wait()
        self._enter(len(orders))
        requests = [self._requests(order) for order in orders]
        try:
            futures = await self.engine.submit([r for group in requests for r in group], together=together)
        except RequestRefused as error:
            for order in orders:
                self._leave()
                self.report(Rejected(order.lease, self.role, "refused", str(error)))
            return
        for order, group in zip(orders, requests, strict=True):
            drawn, futures = futures[: len(group)], futures[len(group) :]
            self.spawn(self._collect(order, drawn), f"group {order.lease.group}")

    def _requests(self, order: GroupOrder) -> list[Request]:
        o, lease = self.options, order.lease
        return [
            Request(
                id=f"{lease.group}.{lease.fence}.{i}",
                prompt=order.prompt_tokens,
                max_tokens=o.rollout_max_response_len,
                temperature=o.rollout_temperature,
                top_p=o.rollout_top_p,
                top_k=o.rollout_top_k,
                seed=sample_seed(o.seed, order.epoch, order.prompt_id, i, lease.attempt),
            )
            for i in range(o.n_samples_per_prompt)
        ]

    async def _collect(self, order: GroupOrder, drawn: list[asyncio.Future[Result]]) -> None:
        lease = order.lease
        results = await asyncio.gather(*drawn, return_exceptions=True)
        self._leave()
        if bad := next((r for r in results if isinstance(r, BadResult | RequestRefused)), None):
            self.report(Rejected(lease, self.role, "bad_result", str(bad)))
            return
        if error := next((r for r in results if isinstance(r, BaseException)), None):
            raise error
        group = _bundle([r for r in results if isinstance(r, Result)])
        tokens = int(group.response_lens.sum())
        self.counters["tokens"] += tokens
        self.counters["groups"] += 1
        payload_id = f"group {lease.group}.{lease.fence}"
        self._payload_of[lease.group] = (lease.fence, payload_id)
        payload = self.payloads.put(payload_id, group.arrays())
        self.report(Sampled(lease, group.oldest_version, tokens))
        reward = await self.member("reward", lease.group)
        self.send(reward.endpoint, Score(order, payload))

    async def on_release(self, message: Release, sender: Any) -> None:
        for lease in message.leases:
            fence, payload_id = self._payload_of.get(lease.group, (lease.fence + 1, ""))
            if fence <= lease.fence:
                del self._payload_of[lease.group]
                self.payloads.release(payload_id)

    def _enter(self, groups: int) -> None:
        if self.sampling == 0:
            self.counters["wait/groups"] += time.monotonic() - self._idle_since
            self._drained.clear()
            self.activity = "sampling"
        self.sampling += groups

    def _leave(self) -> None:
        self.sampling -= 1
        if self.sampling == 0:
            self._idle_since = time.monotonic()
            self._drained.set()
            self.activity = "waiting for groups"

    # --- weights -----------------------------------------------------------------------------------------------------

    async def on_announce(self, message: Announce, sender: Any) -> None:
        manifest = Manifest.from_json(message.manifest, str(sender))
        if self.newest is None or manifest.tag.version > self.newest.tag.version:
            self.newest = manifest
            self._admission.clear()
            self._announced.set()

    async def _follow_versions(self) -> None:
        while True:
            await self._announced.wait()
            await self._drained.wait()
            self._announced.clear()
            assert self.newest is not None
            # Whatever was announced while the replica drained, the newest is loaded and the others are skipped.
            loaded = await self._load(self.newest)
            if loaded and not self._announced.is_set():
                self._admission.set()

    async def _load(self, manifest: Manifest) -> bool:
        """Whether the engine serves `manifest` now."""
        tag, started = manifest.tag, time.monotonic()
        self.counters["wait/groups"] += started - self._idle_since
        self.activity = f"loading version {tag.version}"
        try:
            # Each chunk has the peer's deadline; all of them together take as long as they take.
            await self.agent.ensure(manifest, deadline=self.options.stall_timeout)
            await self.engine.load(manifest, self.run.shm_dir, deadline=self.options.peer_timeout)
        except NotStored:
            # The trainer or this node has moved past it; the announcement of the newer one is on its way.
            self.log.info("version_overtaken", version=tag.version)
            self._idle_since = time.monotonic()
            return False
        self._idle_since = time.monotonic()
        self.counters["wait/weights"] += self._idle_since - started
        self.activity = "waiting for groups"
        self.report(Serving(tag.version, self.options.rollout_credit, ()))
        self.log.info("weights_loaded", version=tag.version, seconds=round(self._idle_since - started, 3))
        return True

    async def _watch_engine(self) -> None:
        raise ServiceError(await self.engine.died)


def _bundle(results: list[Result]) -> SampledGroup:
    versions = [(i, version, n) for i, r in enumerate(results) for version, n in r.runs]
    return SampledGroup(
        response_tokens=np.concatenate([r.token_ids for r in results]),
        response_lens=np.array([len(r.token_ids) for r in results], np.int32),
        behaviour_logprobs=np.concatenate([r.logprobs for r in results]),
        finish=np.array([FINISH_LENGTH if r.finish_reason == "length" else FINISH_STOP for r in results], np.uint8),
        runs=np.array(versions, np.int64).reshape(-1, 3),
    )
