"""The critic service: PPO's value model. Gives values of responses and trains on the batches that the actor trains on.

Receives `ValuesRequest` and `TrainBatch` from advantages, sends `Trained` to the controller. Rank 0 holds the mailbox
and leads the other ranks; one thread touches the model.

Every value of batch b comes from one critic, the one that has trained on the batches below b: a request waits for it,
and as the batch is sent for training only after its values were given, it cannot be too late.
"""

import time
from typing import Any

from relax.metrics import Metrics
from relax.protocol.messages import Values, ValuesRequest
from relax.protocol.tensors import Responses
from relax.services.critic_work import CriticWork
from relax.services.model_copies import ModelCopies, load_part
from relax.services.ranks import Ranks
from relax.services.service import Context, ServiceError
from relax.services.trainer import Taken, Trainer


class Critic(Trainer):
    role = "critic"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._ranks: Ranks[CriticWork] = Ranks(self.role)

    def handlers(self) -> dict[type, Any]:
        return super().handlers() | {ValuesRequest: self.on_request}

    async def prepare(self) -> None:
        self.activity = "building the model"
        total = None if self.num_batches is None else self.num_batches * self.options.num_steps_per_rollout
        self._work = await self._ranks.build(CriticWork, self.context.model_options, total)
        self.spawn(self._ranks.keep(), "keeping the ranks")
        self.log.info("model_built", parameters=self._work.critic.num_parameters)
        if (checkpoint := self.context.checkpoint) is not None:
            self.activity = "loading the checkpoint"
            await load_part(self._ranks, self._work, checkpoint / self.role, self.context)
        if self.options.save and self.options.save_interval is not None:
            self.gauges["checkpoint_bytes"] = await self._ranks.run(self._work.reserve_snapshot)
        self.begin(ModelCopies(self._ranks, self._work))

    async def release(self) -> None:
        await self._ranks.close(self.clean)

    async def on_request(self, message: ValuesRequest, sender: Any) -> Values:
        arrays = await self.fetch(self.payloads, message.payload)
        responses = Responses.from_arrays(arrays, message.payload.id)
        b, limit = message.batch, self.options.stall_timeout
        try:
            await self.version.wait(b, limit)
        except TimeoutError:
            raise ServiceError(
                f"{self.name} was asked for values of batch {b} and has trained {max(self.version.value, 0)} batches "
                f"for --stall-timeout {limit:g} s"
            ) from None
        if self.version.value != b:
            raise ServiceError(f"{self.name} has trained batch {b} already and cannot give the values it began with")
        return Values(await self._ranks.run(self._work.values, responses.arrays()))

    async def train(self, batch: int, taken: Taken, waited: float) -> None:
        started = time.monotonic()
        metrics = Metrics(await self._ranks.run(self._work.train, taken.tensors.arrays()))
        seconds = time.monotonic() - started
        await self.keeping.trained(batch + 1)
        self.version.reach(batch + 1)
        metrics.sum("perf/critic_wait_s", waited)
        metrics.sum("perf/critic_train_s", seconds)
        self.report_trained(batch, metrics)
        self.log.info("batch_trained", batch=batch, version=self.version.value, seconds=round(seconds, 3))
