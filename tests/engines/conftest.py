"""Real engines, started once: a start costs about ten seconds."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
import uvloop

from relax.engines.base import EngineError, Request, Result
from relax.engines.vllm import VllmEngine
from relax.weights.manifest import Manifest
from relax.weights.store import ChunkStore

pytest.register_assert_rewrite("by_version", "stage")


class ProbedEngine(VllmEngine):
    worker_extension = "probe_worker.ProbeWorker"


class Rig:
    """An engine, the model whose weights it serves, their store, and a loop to drive them from plain tests."""

    def __init__(self, directory: Path, architecture: str, tied: bool, loop: Callable, **engine: Any) -> None:
        self.model = models.make_model(directory / "model", architecture=architecture, tied=tied)
        self.store = ChunkStore(directory / "store", create=True)
        self.version = -1
        self._runner = asyncio.Runner(loop_factory=loop)
        self.engine = ProbedEngine(directory / "model", max_model_len=256, **engine)
        self.run(self.engine.start())
        with pytest.raises(EngineError) as refused:
            self.generate(request("early"))
        self.refused_before_load = str(refused.value)
        self.load(self.publish())

    def run(self, call: Coroutine) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(call, 120)

        return self._runner.run(bounded())

    def publish(self, seed: int | None = None) -> Manifest:
        """The next version: the model's weights, drawn anew from `seed` if one is given."""
        if seed is not None:
            models.change(self.model, seed)
        self.version += 1
        tensors = models.published(self.model)
        return self.store.publish(tensors, run_id="r", lineage=3, version=self.version, step=self.version)

    def load(self, manifest: Manifest) -> None:
        self.run(self.engine.load(manifest, self.store.directory, deadline=60))

    def generate(self, *requests: Request) -> list[Result]:
        async def all_of_them() -> list[Result]:
            return await asyncio.gather(*(self.engine.generate(r) for r in requests))

        return self.run(all_of_them())

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker inside the engine's process."""
        (answer,) = self.run(self.engine._llm.collective_rpc(method, args=args))
        return answer

    async def steps(self, more: int) -> None:
        """Return when the engine has taken at least so many more steps."""
        (now,) = await self.engine._llm.collective_rpc("steps_so_far")
        end = now + more
        while now < end:  # the engine answers between its steps
            (now,) = await self.engine._llm.collective_rpc("steps_so_far")

    def error(self, result: Result, prompt: np.ndarray, temperature: float = 1.0) -> float:
        """Largest difference of behaviour log-probs from transformers'."""
        expected = models.reference_logprobs(self.model, prompt, result.token_ids, temperature)
        return float((expected - torch.from_numpy(result.logprobs)).abs().max())

    def close(self) -> None:
        self.run(self.engine.shutdown())
        self._runner.close()
        self.store.remove()


def prompt(length: int = 20, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(6, models.VOCAB, length).astype(np.int32)


def request(name: str, **fields: Any) -> Request:
    """A request of 24 tokens that does not stop early, unless `fields` say otherwise."""
    defaults = {"prompt": prompt(), "max_tokens": 24, "seed": 7, "stop_token_ids": ()}
    return Request(id=name, **(defaults | fields))


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("tied"), "qwen3", True, asyncio.new_event_loop)
    yield rig
    rig.close()


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Room for 2048 tokens of KV: a full batch does not fit, so samples are preempted and computed again."""
    directory = tmp_path_factory.mktemp("untied")
    rig = Rig(directory, "llama", False, asyncio.new_event_loop, kv_cache_mb=1, max_num_seqs=16)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An engine that a test may kill; on uvloop, as in the services."""
    rig = Rig(tmp_path_factory.mktemp("doomed"), "qwen2", True, uvloop.new_event_loop)
    yield rig
    rig.close()
