"""Publication beside training, with a real model, staging and store; several ranks are in test_grid.py."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from relax.protocol.messages import Published
from relax.services.actor import Actor
from relax.services.models.base import Weights
from relax.services.models.megatron import MegatronPolicy
from relax.services.publishing import Publishing, Staged
from relax.services.service import Context, Service
from relax.weights.checkpoint import checkpoint_shapes
from relax.weights.manifest import Manifest
from relax.weights.publication import Publisher
from relax.weights.store import ChunkStore
from tests.megatron import tiny


class Still(Service):
    """A service whose ranks are kept by nobody: there is one."""

    role = "actor"

    def spawn(self, work: Any, name: str) -> Any:
        work.close()


class Trainer:
    """What the actor does about publication, in steps that a test takes one by one."""

    def __init__(self, folder: Path) -> None:
        tiny.save(folder / "model", "qwen3")
        self.options = tiny.options(
            hf_checkpoint=str(folder / "model"), num_steps_per_rollout=2, advantage_estimator="grpo"
        )
        self.store = ChunkStore(folder / "store", create=True)
        self.folder = folder
        self.publisher = self._publisher(self.store)
        self.published: list[Staged] = []
        self.manifests: dict[int, Manifest] = {}
        self.digests: dict[int, str] = {}  # of the weights that were offered
        self.begun = asyncio.Event()  # a version is being read
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.batches = 0

    def _publisher(self, store: ChunkStore) -> Publisher:
        return Publisher(
            store,
            run_id="test",
            lineage=0,
            manifests=self.folder / "weights",
            expected=checkpoint_shapes(self.options.hf_checkpoint),
        )

    @asynccontextmanager
    async def running(self):
        run: Any = SimpleNamespace(run_id="test")
        self.policy = MegatronPolicy(Still(Context("actor", self.options, run, "", "", None, self.options)))
        await self.policy.build(50)
        self.publishing = Publishing(self.policy.stage, self._publish, self._tell)
        lane = asyncio.create_task(self.publishing.run())
        try:
            yield
            assert not lane.done()
        finally:
            self.may_go_on.set()
            lane.cancel()
            await asyncio.gather(lane, return_exceptions=True)
            await self.policy.close(clean=True)

    async def _publish(self, staged: Staged) -> Manifest:
        loop = asyncio.get_running_loop()

        def slowly(weights: Weights) -> Weights:
            for number, pair in enumerate(weights):
                yield pair
                if number == 0:
                    loop.call_soon_threadsafe(self.begun.set)
                    assert self.may_go_on.wait(60)

        def publish(weights: Weights | None) -> Manifest:
            return self.publisher.publish(staged.version, staged.step, None if weights is None else slowly(weights))

        return await self.policy.read(staged.place, publish)

    async def _tell(self, staged: Staged, manifest: Manifest) -> None:
        self.published.append(staged)
        self.manifests[staged.version] = manifest

    async def train(self) -> None:
        await self.policy.ranks.run(self.policy.work.train, tiny.batch(self.batches))
        self.batches += 1

    async def offer(self, *, changed: bool = True) -> None:
        """Also publishes the same weights with nothing going on beside, to compare with."""
        aside = ChunkStore(self.folder / f"aside-{self.batches}", create=True)
        alone = self._publisher(aside).publish(self.batches, self.batches, self.policy.work.policy.state())
        self.digests[self.batches] = alone.tag.digest
        await self.publishing.offer(self.batches, 2 * self.batches, changed=changed)

    async def through(self) -> None:
        await self.publishing.published.wait(self.publishing.offered, 60)

    async def publish(self, *, changed: bool = True) -> None:
        await self.offer(changed=changed)
        await self.through()

    async def begin_to_publish(self) -> None:
        """Offers; the publication stops within, until it `may_go_on`."""
        self.begun.clear()
        self.may_go_on.clear()
        await self.offer()
        await asyncio.wait_for(self.begun.wait(), 60)

    @property
    def versions(self) -> list[int]:
        return [staged.version for staged in self.published]


def play(folder: Path, scenario: Callable[[Trainer], Awaitable[None]]) -> None:
    async def life() -> None:
        it = Trainer(folder)
        async with it.running():
            await scenario(it)

    asyncio.run(life())


def test_a_version_holds_the_weights_after_its_last_batch_though_training_has_moved_on(tmp_path: Path) -> None:
    async def scenario(it: Trainer) -> None:
        await it.publish()
        await it.train()
        await it.begin_to_publish()
        await it.train()
        await it.train()  # two batches while version 1 is read
        assert it.versions == [0]
        it.may_go_on.set()
        await it.through()
        assert it.versions == [0, 1]
        assert it.manifests[1].tag.digest == it.digests[1] != it.digests[0]
        assert it.manifests[1].tag.step == 2
        await it.publish()
        assert it.manifests[3].tag.digest == it.digests[3] != it.digests[1]
        with it.store.open(it.manifests[1]) as lease:  # every chunk hashes to what the manifest says
            assert dict(lease.items())

    play(tmp_path, scenario)


def test_a_version_that_is_overtaken_before_it_was_begun_is_skipped_and_the_newest_never(tmp_path: Path) -> None:
    async def scenario(it: Trainer) -> None:
        await it.begin_to_publish()
        for _ in range(4):  # 1, 2 and 3 are overtaken, each copied over the one before
            await it.train()
            await it.offer()
        it.may_go_on.set()
        await it.through()
        assert it.versions == [0, 4]
        assert [it.manifests[v].tag.digest for v in (0, 4)] == [it.digests[0], it.digests[4]]
        assert len({staged.place for staged in it.published}) == 2
        metrics = it.publishing.take()
        assert metrics["perf/publications_skipped"][1] == 3
        assert metrics["perf/publish_s"][2] == 2 and metrics["perf/publish_s"][1] > 0
        assert it.publishing.take() == {}
        # Nothing is under way any more: both places serve again.
        for _ in range(2):
            await it.train()
            await it.publish()
        assert it.versions == [0, 4, 5, 6]
        assert it.manifests[6].tag.digest == it.digests[6]

    play(tmp_path, scenario)


def test_unchanged_weights_are_published_as_a_tag_alone(tmp_path: Path) -> None:
    async def scenario(it: Trainer) -> None:
        await it.publish()
        it.batches = 1
        await it.publish(changed=False)
        assert [staged.place is None for staged in it.published] == [False, True]
        assert it.manifests[1].tag.digest == it.manifests[0].tag.digest
        assert it.manifests[1].tag.version == 1

    play(tmp_path, scenario)


def test_unchanged_weights_that_overtake_changed_ones_bring_them_along(tmp_path: Path) -> None:
    async def scenario(it: Trainer) -> None:
        await it.begin_to_publish()
        await it.train()
        await it.offer()
        it.batches = 2
        await it.offer(changed=False)
        it.may_go_on.set()
        await it.through()
        assert it.versions == [0, 2]
        assert it.manifests[2].tag.digest == it.digests[1] != it.digests[0]

    play(tmp_path, scenario)


def test_what_the_controller_has_not_heard_of_is_not_published() -> None:
    async def life() -> None:
        heard, told = asyncio.Event(), []

        async def stage(place: int) -> None:
            pass

        async def publish(staged: Staged) -> Any:
            return f"manifest {staged.version}"

        async def tell(staged: Staged, manifest: Any) -> None:
            told.append(manifest)
            await heard.wait()

        it = Publishing(stage, publish, tell)
        lane = asyncio.create_task(it.run())
        await it.offer(0, 0, changed=True)
        with pytest.raises(TimeoutError):
            await it.published.wait(0, 0.1)
        assert told == ["manifest 0"]
        heard.set()
        await it.published.wait(0, 10)
        lane.cancel()

    asyncio.run(life())


@pytest.mark.parametrize("broken", [True, False])
def test_a_publication_that_fails_ends_the_service_with_the_cause(tmp_path: Path, broken: bool) -> None:
    """The actor itself; its manifests cannot be written when a file is in the place of their directory."""

    async def life() -> tuple[list[Any], int | None]:
        tiny.save(tmp_path / "model", "qwen3")
        options = tiny.options(hf_checkpoint=str(tmp_path / "model"), num_rollout=3)
        if broken:
            (tmp_path / "weights").write_text("no directory")
        run: Any = SimpleNamespace(
            run_id="r",
            shm_dir=tmp_path / "store",
            weights_dir=tmp_path / "weights",
            checkpoint=None,
            checkpoints_dir=tmp_path / "checkpoints",
        )
        actor = Actor(Context("actor", options, run, "", "", None, options, engine="megatron"))
        actor._ended = asyncio.get_running_loop().create_future()
        actor.num_batches = 3
        told: list[Any] = []

        async def tell(endpoint: str, message: Any) -> None:
            told.append(message)

        actor.peers.tell = tell  # type: ignore[method-assign]
        await actor.prepare()
        await asyncio.wait(
            [actor._ended, asyncio.ensure_future(actor.publishing.published.wait(0, 60))],
            timeout=60,
            return_when=asyncio.FIRST_COMPLETED,
        )
        code = actor._ended.result() if actor._ended.done() else None
        for task in tuple(actor._tasks):
            task.cancel()
        await asyncio.gather(*actor._tasks, return_exceptions=True)
        await actor.release()
        return told, code

    with capture_logs() as logs:
        told, code = asyncio.run(life())
    failures = [record["error"] for record in logs if record["event"] == "service_failed"]
    if broken:
        assert code == 1 and told == []
        assert str(tmp_path / "weights") in failures[0]
    else:
        assert code is None and failures == []
        assert [message.version for message in told if isinstance(message, Published)] == [0]
