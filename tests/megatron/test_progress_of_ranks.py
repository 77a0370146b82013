"""A model on ranks gets on with every micro-batch: a batch may take as long as it takes."""

import asyncio
from types import SimpleNamespace
from typing import Any

from relax.services.critic_work import CriticWork
from relax.services.models.value import ValueModel
from relax.services.watchdog import Watchdog
from tests.megatron import tiny
from tests.megatron.test_critic import value_batch

TIMEOUT, A_MICRO_BATCH = 3.0, 2.0


class SlowClock(Watchdog):
    """On a machine where a micro-batch takes most of the stall timeout."""

    def __init__(self) -> None:
        self.now, self.seen = 0.0, list[str | None]()
        super().__init__(TIMEOUT, lambda problem: None, clock=lambda: self.now)

    def moved(self, kind: str) -> None:
        self.now += A_MICRO_BATCH
        self.seen.append(self.look())
        super().moved(kind)


def test_a_batch_that_takes_longer_than_the_stall_timeout_is_no_stall_while_it_gets_on(tmp_path) -> None:
    tiny.save(tmp_path)
    options, batch = (
        tiny.options(hf_checkpoint=str(tmp_path), num_steps_per_rollout=2, micro_batch_size=1),
        value_batch(),
    )
    watchdog = SlowClock()

    async def life() -> Any:
        service: Any = SimpleNamespace(
            role="critic",
            context=SimpleNamespace(model_options=options),
            options=options,
            counters={},
            watchdog=watchdog,
            log=SimpleNamespace(info=lambda *args, **kwargs: None),
            spawn=lambda work, name: asyncio.ensure_future(work),
        )
        model = ValueModel(service)
        await model.build_work(CriticWork, None)
        await model.train(SimpleNamespace(tensors=SimpleNamespace(arrays=lambda: batch)))  # type: ignore[arg-type]
        await model.close(clean=True)
        return service.counters["micro_batches"]

    samples = len(batch["prompt_lens"])
    assert asyncio.run(life()) == samples, "what the controller hears of rises with each"
    assert len(watchdog.seen) >= samples and samples * A_MICRO_BATCH > TIMEOUT and not any(watchdog.seen)


def test_a_micro_batch_that_does_not_end_is_a_stall_with_a_name() -> None:
    watchdog = SlowClock()
    model = ValueModel(SimpleNamespace(role="critic", watchdog=watchdog))  # type: ignore[arg-type]
    with model.computing():
        assert watchdog.look() is None
        for _ in range(3):
            watchdog.now += A_MICRO_BATCH
            found = watchdog.look()
    assert found == "has not got on with computing for --stall-timeout 3 s"
