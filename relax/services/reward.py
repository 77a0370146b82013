"""The reward service: scores the samples of a group in killable child processes.

Receives `Score` from rollout, decodes the responses, asks the pool, sends `Scored` to advantages and `RewardDone` to
the controller. A sample that could not be scored rejects its group, with the function and the sample named: it is
never 0.
"""

import asyncio
import json
from typing import Any

import numpy as np

from relax.data import PromptTokenizer
from relax.protocol.messages import GroupOrder, Rejected, RewardDone, Score, Scored
from relax.protocol.payload import PayloadStore
from relax.protocol.tensors import SampledGroup
from relax.rewards import Item, RewardPool, VerifierSpec
from relax.services.groups import take_group
from relax.services.service import Context, Service


class Reward(Service):
    role = "reward"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        o = self.options
        self.pool = RewardPool(
            VerifierSpec.from_options(o),
            workers=o.rm_workers,
            timeout=o.rm_timeout,
            startup_timeout=o.startup_timeout,
        )
        self._ready = asyncio.Event()

    def handlers(self) -> dict[type, Any]:
        self.payloads = PayloadStore(self.mailbox)
        return {Score: self.on_score}

    async def prepare(self) -> None:
        self.activity = "starting workers"
        self.tokenizer = await asyncio.to_thread(PromptTokenizer, self.options.hf_checkpoint)
        await self.pool.start()
        self.activity = "waiting for groups"
        self._ready.set()

    async def release(self) -> None:
        await self.pool.close()

    async def on_score(self, message: Score, sender: Any) -> None:
        self.spawn(self._score(message), f"score {message.order.lease.group}")

    async def _score(self, message: Score) -> None:
        with self.working_on(message.order.lease):
            await self._ready.wait()
            await self._pass_on(message)

    async def _pass_on(self, message: Score) -> None:
        lease = message.order.lease
        group = await take_group(self, self.payloads, lease, message.payload)
        if group is None:
            return
        with self.watchdog.work("scoring"):
            scores = await self.pool.score(self._items(message.order, group))
        self.counters["samples"] += len(scores)
        failure = next((s.failure for s in scores if s.failure is not None), None)
        if failure is not None:
            self.log.warning("reward_failed", group=lease.group, kind=failure.kind, detail=str(failure))
            self.report(Rejected(lease, self.role, f"reward_{failure.kind}", str(failure)))
            return
        rewards = np.array([np.nan if s.value is None else s.value for s in scores], np.float64)
        advantages = await self.member("advantages")
        self.report(RewardDone(lease, advantages.incarnation))
        await self.tell(advantages.endpoint, Scored(message.order, message.payload, rewards))

    def _items(self, order: GroupOrder, group: SampledGroup) -> list[Item]:
        row = json.loads(order.row)
        label = row.get(self.options.label_key) if self.options.label_key else None
        prompt = self.tokenizer.decode(order.prompt_tokens)
        return [
            Item(f"group {order.lease.group}, sample {i}", prompt, self.tokenizer.decode(response), label, row)
            for i, response in enumerate(group.responses())
        ]
