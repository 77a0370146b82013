"""The rollout service: samples groups with one inference engine.

Receives `Generate` (what to sample), `Announce` (which weights to serve) and `Release` (which draws have ended). Sends
`Score` with the payload to a reward service, `Sampled`, `Serving`, `HandedBack` and `Leaving` to the controller. Keeps
the payload of its groups until they have ended.

Updating the weights: the new ones are fetched while the engine goes on, the engine is paused, they load, it resumes.
What `--partial-rollout` changes is the one step before the pause: without it, admission closes at the announcement and
the running samples end first, so that no sample holds two versions and a replica under continuous load still gets to
load; with it, they are paused with the engine and go on under the new weights, their tokens kept.

A group whose samples have all ended may come again, when the stage that had it died: its tensors are pulled from who
produced them, and it goes straight on to a reward service.
"""

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from relax.engines.base import BadResult, Request, RequestRefused, Result
from relax.engines.registry import engine as make_engine
from relax.logs.setup import adopt
from relax.protocol.errors import Refused
from relax.protocol.messages import (
    Announce,
    Generate,
    GroupOrder,
    HandedBack,
    Lease,
    Rejected,
    Release,
    Sampled,
    Score,
    Serving,
)
from relax.protocol.payload import Payload, PayloadStore
from relax.protocol.tensors import TensorError
from relax.services import sampling
from relax.services.chunks import weight_agent
from relax.services.groups import pull_group
from relax.services.held_draws import Draw, HeldDraws
from relax.services.service import Context, Service, ServiceError
from relax.services.token_count import TokenCount
from relax.services.versions import oldest_version
from relax.weights.errors import NotStored
from relax.weights.manifest import Manifest

# How often the tokens of running samples are counted.
COUNT_SECONDS = 1.0
# What the engine does with a draw.
SAMPLING = "sampling"


class Rollout(Service):
    role = "rollout"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.engine = make_engine(context.engine, self.options, context.index)
        self.newest: Manifest | None = None  # announced
        self.draws = HeldDraws()
        self.tokens = TokenCount()
        self._payload_of: dict[int, tuple[int, str]] = {}  # group -> fence and id of the payload kept for it
        self._admission = asyncio.Event()  # set while samples may start
        self._drained = asyncio.Event()  # set while nothing runs
        self._announced = asyncio.Event()
        self._loading = self._served = False
        self._idle_for, self._idle_since = "", 0.0

    def handlers(self) -> dict[type, Any]:
        self.payloads = PayloadStore(self.mailbox)
        return {Generate: self.on_generate, Announce: self.on_announce, Release: self.on_release}

    async def prepare(self) -> None:
        self.activity = "starting the engine"
        with self.watchdog.work(self.activity):
            await self.engine.start()
        adopt("transformers")  # imported by the engine, with a handler of its own
        self.agent = weight_agent(self)
        self.spawn(self._watch_engine(), "engine")
        self.spawn(self._count_tokens(), "tokens")
        self.spawn(self._follow_versions(), "weights")
        self._settle()

    def holds(self) -> Iterable[Lease]:
        return self.draws.leases()

    async def release(self) -> None:
        await self.engine.shutdown()

    async def _watch_engine(self) -> None:
        raise ServiceError(await self.engine.died)

    async def _count_tokens(self) -> None:
        """Every token is a sign that the engine gets on, to the watchdog and, with the counters, to the controller."""
        while True:
            if self.tokens.sees(self.engine.tokens()):
                self.watchdog.moved(SAMPLING)
            self.counters["tokens"] = self.tokens.total
            await asyncio.sleep(COUNT_SECONDS)

    def _sample_ended(self, request: Request, future: asyncio.Future[Result]) -> None:
        drew = not future.cancelled() and future.exception() is None
        self.tokens.ended(request.id, len(future.result().token_ids) if drew else 0)
        self.counters["tokens"] = self.tokens.total
        if not future.cancelled():  # what is taken away from an engine says nothing of it
            self.watchdog.moved(SAMPLING)

    # --- groups ------------------------------------------------------------------------------------------------------

    async def on_generate(self, message: Generate, sender: Any) -> None:
        for order in message.orders:
            self._cancel(order.lease.group, order.lease.fence)
        elsewhere = [order for order in message.orders if order.parked is not None and order.parked.arrays is None]
        for order in elsewhere:
            self.draws.pulling[order.lease.group] = order
            self.spawn(self._pull(order), f"pull group {order.lease.group}")
        self._take([order for order in message.orders if order not in elsewhere], message.together)

    def _take(self, orders: Iterable[GroupOrder], together: bool) -> None:
        """Their arrays are here."""
        begun = [draw for order in orders if (draw := self._begin(order)) is not None]
        draws = [draw for draw in begun if draw.requests]
        for draw in draws:
            self.draws.queued[draw.group] = draw
        for draw in begun:
            if not draw.requests:
                self.draws.running[draw.group] = draw
                self.spawn(self._pass_on(draw), f"group {draw.group}")
        if self.leaving:
            self._hand_back_queued()
        elif draws:
            self.spawn(self._sample(draws, together), "sample")

    async def _pull(self, order: GroupOrder) -> None:
        lease = order.lease
        assert order.parked is not None
        with self.working_on(lease):
            try:
                arrays = await pull_group(self, self.payloads, lease, order.parked)
            except Refused as error:
                self.report(Rejected(lease, self.role, "bad_parked_group", str(error)))
                arrays = None
            if self.draws.pulling.get(lease.group) is not order:  # released meanwhile
                return
            del self.draws.pulling[lease.group]
            if arrays is not None:
                self._take([dataclasses.replace(order, parked=Payload.inline(arrays))], together=False)

    async def _pass_on(self, draw: Draw) -> None:
        """All of it was sampled before."""
        if self.draws.runs(draw):
            self._done(draw)
            with self.working_on(draw.order.lease):
                await self._finish(draw.order, draw.samples)

    def _begin(self, order: GroupOrder) -> Draw | None:
        try:
            samples = sampling.begun(order, self.options)
        except TensorError as error:
            self.report(Rejected(order.lease, self.role, "bad_parked_group", str(error)))
            return None
        return Draw(order, samples, sampling.requests(order, samples, self.options))

    async def _sample(self, draws: Sequence[Draw], together: bool) -> None:
        await self._admission.wait()
        draws = self.draws.admitted(draws)
        self._settle()
        futures: Sequence[asyncio.Future[Result]] = ()
        while draws:
            try:
                futures = await self.engine.submit([r for draw in draws for r in draw.requests], together=together)
                break
            except RequestRefused as error:
                refused = next(draw for draw in draws if any(r.id == error.request for r in draw.requests))
                self._reject(refused, "refused", str(error))
                draws = [draw for draw in draws if self.draws.runs(draw)]
        for draw in draws:
            draw.futures, futures = futures[: len(draw.requests)], futures[len(draw.requests) :]
            for request, future in zip(draw.requests, draw.futures, strict=True):
                future.add_done_callback(partial(self._sample_ended, request))
            if self.draws.runs(draw):
                self.spawn(self._collect(draw), f"group {draw.group}")
            else:  # released while the engine took it
                draw.cancel()
        if self.leaving:
            await self._abort_running()

    async def _collect(self, draw: Draw) -> None:
        with self.watchdog.under_way(SAMPLING):
            results = await asyncio.gather(*draw.futures, return_exceptions=True)
        if not self.draws.runs(draw):
            return
        if bad := next((r for r in results if isinstance(r, BadResult | RequestRefused)), None):
            self._reject(draw, "bad_result", str(bad))
            return
        if error := next((r for r in results if isinstance(r, BaseException)), None):
            raise error
        drawn = [r for r in results if isinstance(r, Result)]
        samples = sampling.joined(draw.samples, drawn)
        # From here to the report nothing is awaited: a `Serving` that does not name the group comes after it.
        self._done(draw)
        if sampling.finished(samples):
            with self.working_on(draw.order.lease):
                await self._finish(draw.order, samples)
        else:
            self._hand_back(draw.order, samples)

    async def _finish(self, order: GroupOrder, samples: Sequence[Result]) -> None:
        lease, group = order.lease, sampling.bundle(samples)
        oldest = oldest_version(group, self.options)
        assert oldest is not None, "an engine's finished sample has a token"
        self.counters["groups"] += 1
        payload_id = f"group {lease.group}.{lease.fence}"
        if (older := self._payload_of.get(lease.group)) is not None:
            self.payloads.release(older[1])
        self._payload_of[lease.group] = (lease.fence, payload_id)
        kept = self.payloads.keep(payload_id, group.arrays())
        # What was parked is part of the payload now.
        score = Score(dataclasses.replace(order, parked=None), self.payloads.travelling(kept))
        live = self.of_role("reward")
        reward = live[lease.group % len(live)] if live else None
        named = "" if reward is None else reward.incarnation
        self.report(Sampled(lease, oldest, int(group.response_lens.sum()), kept, named))
        if reward is None:
            reward = await self.member("reward", lease.group)
        await self.tell(reward.endpoint, score)

    async def on_release(self, message: Release, sender: Any) -> None:
        for lease in message.leases:
            self._cancel(lease.group, lease.fence)
            fence, payload_id = self._payload_of.get(lease.group, (lease.fence + 1, ""))
            if fence <= lease.fence:
                del self._payload_of[lease.group]
                self.payloads.release(payload_id)

    def _cancel(self, group: int, fence: int) -> None:
        """End what this replica still draws of a group under this fence or an older one. Nobody waits for it."""
        self.draws.end(group, fence)
        self._settle()

    def _done(self, draw: Draw) -> None:
        del self.draws.running[draw.group]
        self._settle()

    def _reject(self, draw: Draw, reason: str, detail: str) -> None:
        if self.draws.runs(draw):
            self._done(draw)
            self.report(Rejected(draw.order.lease, self.role, reason, detail))

    # --- leaving -----------------------------------------------------------------------------------------------------

    def unfinished(self) -> int:
        return len(self.draws.leases())

    async def hand_back(self) -> None:
        """Hands back what is not finished, and serves what is."""
        self._settle()
        self._hand_back_queued()
        await self._abort_running()

    def _hand_back_queued(self) -> None:
        for draw in self.draws.queued.values():
            self._hand_back(draw.order, draw.samples)
        self.draws.queued.clear()

    async def _abort_running(self) -> None:
        """Their results come with what there is, and `_collect` hands them back."""
        await self.engine.abort([request.id for draw in self.draws.running.values() for request in draw.requests])

    def _hand_back(self, order: GroupOrder, samples: Sequence[Result]) -> None:
        """Without `--partial-rollout` a sample that loses its engine starts anew: no tokens, no mixed versions."""
        group = sampling.bundle(samples)
        oldest = oldest_version(group, self.options) if self.options.partial_rollout else None
        payload = None if oldest is None else Payload.inline(group.arrays(), f"parked group {order.lease.group}")
        self.report(HandedBack(order.lease, oldest, payload))

    # --- weights -----------------------------------------------------------------------------------------------------

    async def on_announce(self, message: Announce, sender: Any) -> None:
        manifest = Manifest.from_json(message.manifest, str(sender))
        if self.leaving or (self.newest is not None and manifest.tag.version <= self.newest.tag.version):
            return
        self.newest = manifest
        if not self.options.partial_rollout:
            self._admission.clear()
        self._announced.set()
        self._settle()

    async def _follow_versions(self) -> None:
        while True:
            await self._announced.wait()
            self._announced.clear()
            manifest = self.newest
            assert manifest is not None
            try:
                # Each chunk has the peer's deadline; all of them together take as long as they take.
                await self.agent.ensure(manifest, deadline=self.options.stall_timeout)
                if not self.options.partial_rollout:
                    await self._drained.wait()
                if self.newest is manifest:
                    await self._load(manifest)
            except NotStored:
                # The trainer or this node has moved past it; the announcement of the newer one is on its way.
                self.log.info("version_overtaken", version=manifest.tag.version)

    async def _load(self, manifest: Manifest) -> None:
        version, started = manifest.tag.version, time.monotonic()
        self._loading = True
        self._settle()
        with self.watchdog.work("loading weights"):
            await self.engine.pause()
            try:
                await self.engine.load(manifest, self.run.shm_dir, deadline=self.options.peer_timeout)
                self._served = True
            except NotStored:
                await self._go_on()
                raise
            await self._go_on()
        running = tuple(draw.order.lease for draw in self.draws.running.values())
        self.report(Serving(version, self.options.rollout_credit, running))
        if self.newest is manifest:
            self._admission.set()
        self._settle()
        seconds = round(time.monotonic() - started, 3)
        self.log.info("weights_loaded", version=version, seconds=seconds, running=len(running))

    async def _go_on(self) -> None:
        await self.engine.resume()
        self._loading = False
        self._settle()

    # --- what it does ------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """What the replica does now follows from what it holds; time without a running sample is counted by its cause.

        Start-up, before the first weights, is nobody's wait.
        """
        (self._drained.clear if self.draws.running else self._drained.set)()
        if self._idle_for:
            self.counters[f"wait/{self._idle_for}"] += time.monotonic() - self._idle_since
        idle_for = ""
        if self._loading:
            assert self.newest is not None
            self.activity, idle_for = f"loading version {self.newest.tag.version}", "weights"
        elif self.draws.running:
            self.activity = SAMPLING
        elif self.leaving:
            self.activity = "leaving"
        elif self._admission.is_set():
            self.activity, idle_for = "waiting for groups", "groups"
        else:
            self.activity, idle_for = "waiting for weights", "weights"
        self._idle_for, self._idle_since = idle_for if self._served else "", time.monotonic()
