"""The simulated policy does what the actor asks of a real one: staged weights stay, checkpoints are taken up."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relax.checkpoints.parts import read_list
from relax.config.options import Options
from relax.services.errors import ServiceError
from relax.services.models.base import Weights
from relax.services.models.simulated import SimulatedPolicy


def policy(cut: int = 0) -> SimulatedPolicy:
    options = Options(sim_train_seconds=0.001, sim_publish_seconds=0.001, num_steps_per_rollout=2)
    service: Any = SimpleNamespace(options=options, context=SimpleNamespace(cut=cut))
    return SimulatedPolicy(service)


def taken(batch: int) -> Any:
    return SimpleNamespace(message=SimpleNamespace(batch=batch), arrived=0.0)


def versions(weights: Weights | None) -> set[float] | None:
    return None if weights is None else {float(value) for _, tensor in weights for value in np.unique(tensor)}


def test_what_was_staged_is_read_though_training_has_moved_on() -> None:
    async def life() -> None:
        it = policy()
        await it.build(None)
        await it.stage(0)
        metrics, seconds = await it.train(taken(0))
        assert metrics.wire() == {} and seconds == 0.001, "the time that it takes by plan, whatever the clock says"
        await it.stage(1)
        await it.train(taken(1))
        assert await it.read(0, versions) == {0.0}
        assert await it.read(1, versions) == {1.0}
        await it.stage(0)
        assert await it.read(0, versions) == {2.0}
        assert await it.read(None, versions) is None

    asyncio.run(life())


def test_a_resume_takes_up_the_checkpoint_of_its_cut_and_no_other(tmp_path: Path) -> None:
    part = tmp_path / "actor"

    async def save() -> int:
        it = policy()
        await it.build(None)
        await it.copies.take(3)
        assert await it.copies.write(part) == ""
        return await it.reserve()

    async def load(cut: int) -> tuple[int, set[float] | None]:
        it = policy(cut)
        await it.build(None)
        steps = await it.load(part)
        await it.stage(0)
        return steps, await it.read(0, versions)

    size = asyncio.run(save())
    assert read_list(part).keys() == {"version"} and size == (part / "version").stat().st_size
    assert asyncio.run(load(3)) == (6, {3.0})
    with pytest.raises(ServiceError, match=r"is of batch 3.*expected 4"):
        asyncio.run(load(4))
