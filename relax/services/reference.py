"""The reference service: gives log-probs of responses under the reference policy, and does not train.

Receives `ReferenceRequest` from advantages and `Announce` from the controller. Rank 0 holds the mailbox and leads the
other ranks; one thread touches the model, so requests are answered one after the other.

**Which reference scores a batch.** Version 0 is --ref-load, or with --load the one of that checkpoint, where it has one
and this run refreshes it. With --ref-update-interval k the reference becomes version
c of the policy at every batch index c > 0 that k divides: batch b is scored by version floor(b / k) k and no other.
The reference takes such a version over as soon as it is announced, and that is exact, neither too early nor too late:

- Not too early. Version c is announced after batch c - 1 is trained, so after it was assembled: no batch below c is
  left that could still ask for an older reference. (Groups scored by the older one which end up in a batch of c or
  later are asked about again, at assembly.)
- Not too late. Batch c is not assembled before the reference is at c: the request names the version and waits for it.
- Not skipped. The actor skips a version only for a newer one, and there is none before batch c is trained.
- Not missed. A node's store keeps the two newest versions, so c is overwritten by the second publication after it.
  That one takes batch c + 1 to be trained, and batch c before it, which was assembled: the reference had c by then.

This needs every such version to be published: k is a multiple of --update-weights-interval.
"""

import asyncio
import time
from typing import Any

import numpy as np

from relax.protocol.messages import Announce, ReferenceLogprobs, ReferenceRequest, Save, Saved
from relax.protocol.payload import PayloadStore
from relax.protocol.tensors import Responses
from relax.services.chunks import weight_agent
from relax.services.intervals import reference_version
from relax.services.keeping import write_part
from relax.services.milestone import Milestone
from relax.services.models.ranked import RankedModel
from relax.services.ranks import Leader
from relax.services.reference_work import ReferenceWork
from relax.services.service import Context, Service
from relax.weights.manifest import Manifest


class Reference(Service):
    role = "reference"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.version = Milestone()
        self.model: RankedModel[ReferenceWork] = RankedModel(self)
        self._held = 0  # the version in the model; belongs to the model's thread
        self._refreshing = asyncio.Lock()

    def handlers(self) -> dict[type, Any]:
        self.payloads = PayloadStore(self.mailbox)
        return {ReferenceRequest: self.on_request, Announce: self.on_announce, Save: self.on_save}

    async def prepare(self) -> None:
        self.activity = "building the model"
        await self.model.build_work(ReferenceWork)
        self.agent = weight_agent(self)
        # One that is never refreshed is --ref-load for ever, and no checkpoint of its run has it.
        part = None if self.context.checkpoint is None else self.context.checkpoint / self.role
        if part is not None and self.options.ref_update_interval is not None and (self.context.cut or part.is_dir()):
            self.activity = "loading the checkpoint"
            loaded = await self.model.take_over(part)
            self._held = int(loaded.about["version"]) if self.context.cut else 0
        self.version.reach(self._held)
        self.activity = "waiting for groups"

    async def release(self) -> None:
        await self.model.close(self.clean)

    async def on_request(self, message: ReferenceRequest, sender: Any) -> ReferenceLogprobs:
        arrays = await self.peers.fetch(self.payloads, message.payload)
        responses = Responses.from_arrays(arrays, message.payload.id)
        await self.reached(self.version, message.version, f"was asked for reference version {message.version}")
        self.activity = f"scoring with version {self.version.value}"
        with self.model.computing():
            version, logprobs = await self.model.ranks.lead(lambda ranks: self._score(ranks, responses))
        self.counters["samples"] += len(responses.response_lens)
        self.activity = "waiting for groups"
        return ReferenceLogprobs(version, logprobs)

    def _score(self, ranks: Leader[ReferenceWork], responses: Responses) -> tuple[int, np.ndarray]:
        """On the model's thread, where the version cannot change in between."""
        return self._held, ranks.run(self.model.work.logprobs, responses.arrays())

    # --- refresh -----------------------------------------------------------------------------------------------------

    async def on_announce(self, message: Announce, sender: Any) -> None:
        version = message.version
        ends_the_run = self.num_batches is not None and version >= self.num_batches
        if version and version == reference_version(version, self.options.ref_update_interval) and not ends_the_run:
            self.spawn(self._refresh(message), f"refresh to version {version}")

    async def _refresh(self, message: Announce) -> None:
        manifest = Manifest.from_json(message.manifest, "the controller")
        await self.reached(self.version, 0, "is to be refreshed")
        async with self._refreshing:
            if message.version == self.version.value:
                return  # a resume loaded it already
            started = time.monotonic()
            self.activity = f"loading version {message.version}"
            await self.agent.ensure(manifest, deadline=self.options.stall_timeout)
            await self.model.ranks.lead(lambda ranks: self._load(ranks, manifest))
            self.version.reach(message.version)
            self.activity = "waiting for groups"
        self.log.info("reference_refreshed", version=message.version, seconds=round(time.monotonic() - started, 3))

    # --- checkpoints -------------------------------------------------------------------------------------------------

    async def on_save(self, message: Save, sender: Any) -> Saved:
        """A reference that is refreshed is part of a checkpoint: the one that scores the batch at the cut, or the one
        before it where the cut's own version is about to be announced, as it is again after a resume."""
        cut = message.batch
        if not message.directory:
            return Saved(cut, "")  # it copies when it is to write
        if not await self.model.ranks.lead(lambda ranks: self._copy(ranks, cut)):
            return Saved(cut, f"the reference is at version {self._held} already, which is none of batch {cut}")
        return await write_part(self.model.copies, self.run.checkpoints_dir, self.role, message, self.watchdog)

    def _copy(self, ranks: Leader[ReferenceWork], cut: int) -> bool:
        """On the model's thread."""
        if self._held > cut:
            return False
        ranks.run(self.model.work.take_snapshot, cut, self._held)
        return True

    def _load(self, ranks: Leader[ReferenceWork], manifest: Manifest) -> None:
        """On the model's thread. The lease keeps the set where it is until the last rank has found it."""
        with self.agent.store.open(manifest, verify=False):
            ranks.run(self.model.work.refresh, str(self.run.shm_dir), manifest.to_json().decode())
        self._held = manifest.tag.version
