"""The critic service: PPO's value model. Gives values of responses and trains on the batches that the actor trains on.

Receives `ValuesRequest` and `TrainBatch` from advantages, sends `Trained` to the controller. Rank 0 holds the mailbox
and leads the other ranks; one thread touches the model.

Every value of batch b comes from one critic, the one that has trained on the batches below b: a request waits for it,
and as the batch is sent for training only after its values were given, it cannot be too late.
"""

from typing import Any

from relax.metrics import Metrics
from relax.protocol.messages import Values, ValuesRequest
from relax.protocol.tensors import Responses
from relax.services.models.base import Taken
from relax.services.models.value import ValueModel
from relax.services.service import Context, ServiceError
from relax.services.trainer import Trainer


class Critic(Trainer):
    role = "critic"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.model: ValueModel = ValueModel(self)

    def handlers(self) -> dict[type, Any]:
        return super().handlers() | {ValuesRequest: self.on_request}

    async def on_request(self, message: ValuesRequest, sender: Any) -> Values:
        arrays = await self.fetch(self.payloads, message.payload)
        responses = Responses.from_arrays(arrays, message.payload.id)
        b = message.batch
        await self.reached(self.version, b, f"was asked for values at version {b}")
        if self.version.value != b:
            raise ServiceError(f"{self.name} has trained batch {b} already and cannot give the values it began with")
        return Values(await self.model.values(responses))

    def account(self, metrics: Metrics, taken: Taken, waited: float, seconds: float) -> None:
        metrics.sum("perf/critic_wait_s", waited)
        metrics.sum("perf/critic_train_s", seconds)
