"""The node's agent: one process fetches, others wait; nothing wrong gets in."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from relax.weights.agent import WeightAgent
from relax.weights.errors import DigestMismatch, NameMismatch, NotStored, StoreBusy, Superseded
from relax.weights.manifest import MAX_CHUNK, Manifest
from relax.weights.store import ChunkStore


def publish(store: ChunkStore, version: int, **changed: torch.Tensor) -> Manifest:
    values = {"a": torch.arange(6.0), "b": torch.zeros(MAX_CHUNK // 4 + 3), "c": torch.ones(2, 2)} | changed
    return store.publish(values.items(), run_id="r", lineage=0, version=version, step=version)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[ChunkStore]:
    made = ChunkStore(tmp_path / "trainer", create=True)
    yield made
    made.remove()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ChunkStore]:
    made = ChunkStore(tmp_path / "node", create=True)
    yield made
    made.remove()


def source(store: ChunkStore):
    async def fetch(version: int, digest: str) -> bytes | None:
        await asyncio.sleep(0)
        return store.read_chunk(digest)

    return fetch


def test_nothing_is_fetched_on_the_trainers_own_node(trainer: ChunkStore) -> None:
    manifest = publish(trainer, 0)
    agent = WeightAgent(ChunkStore(trainer.directory))
    asyncio.run(agent.ensure(manifest, deadline=5))
    assert agent.fetched_chunks == 0


def test_only_chunks_that_changed_are_fetched(trainer: ChunkStore, node: ChunkStore) -> None:
    agent = WeightAgent(node, source(trainer))
    first = publish(trainer, 0)
    asyncio.run(agent.ensure(first, deadline=5))
    assert agent.fetched_chunks == 4
    second = publish(trainer, 1, c=torch.zeros(2, 2))
    asyncio.run(agent.ensure(second, deadline=5))
    assert agent.fetched_chunks == 5
    with node.open(second) as lease, node.open(first) as before:
        assert lease.tensor("c").sum() == 0
        assert before.tensor("c").sum() == 4


def test_agents_of_one_node_fetch_once(trainer: ChunkStore, node: ChunkStore) -> None:
    manifest = publish(trainer, 0)
    agents = [WeightAgent(ChunkStore(node.directory), source(trainer)) for _ in range(4)]

    async def all_at_once() -> None:
        await asyncio.gather(*(agent.ensure(manifest, deadline=5) for agent in agents))

    asyncio.run(all_at_once())
    assert sorted(agent.fetched_chunks for agent in agents) == [0, 0, 0, 4]


def test_another_agent_takes_over_when_the_first_is_cancelled(trainer: ChunkStore, node: ChunkStore) -> None:
    manifest = publish(trainer, 0)

    async def never(version: int, digest: str) -> bytes:
        await asyncio.sleep(3600)
        raise AssertionError

    async def scenario() -> None:
        stuck = asyncio.create_task(WeightAgent(node, never).ensure(manifest, deadline=60))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(
            WeightAgent(ChunkStore(node.directory), source(trainer)).ensure(manifest, deadline=60)
        )
        await asyncio.sleep(0.05)
        assert not waiting.done()
        stuck.cancel()
        await waiting

    asyncio.run(scenario())
    assert node.holds(manifest)


def test_source_that_stays_silent_ends_at_the_deadline(trainer: ChunkStore, node: ChunkStore) -> None:
    async def never(version: int, digest: str) -> bytes:
        await asyncio.sleep(3600)
        raise AssertionError

    with pytest.raises(StoreBusy, match="rank 0 did not send"):
        asyncio.run(WeightAgent(node, never, "rank 0").ensure(publish(trainer, 0), deadline=0.1))
    assert node.manifests() == []


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: bytes([b[0] ^ 1]) + b[1:]])
def test_wrong_chunk_is_refused_with_its_source_named(trainer: ChunkStore, node: ChunkStore, change) -> None:
    async def fetch(version: int, digest: str) -> bytes:
        return change(trainer.read_chunk(digest))

    with pytest.raises(DigestMismatch, match=r"b, chunk \d from node two|[ac], chunk 0 from node two"):
        asyncio.run(WeightAgent(node, fetch, "node two").ensure(publish(trainer, 0), deadline=5))
    assert node.manifests() == []


def test_source_that_forgot_the_version_is_named(trainer: ChunkStore, node: ChunkStore) -> None:
    manifest = publish(trainer, 0)
    for version in (1, 2):
        publish(trainer, version, a=torch.full((6,), float(version)))
    with pytest.raises(NotStored, match=r"a, chunk 0 .* rank 0 does not hold it"):
        asyncio.run(WeightAgent(node, source(trainer), "rank 0").ensure(manifest, deadline=5))


def test_foreign_names_are_refused_before_anything_is_fetched(trainer: ChunkStore, node: ChunkStore) -> None:
    agent = WeightAgent(node, source(trainer))
    with pytest.raises(NameMismatch, match="unexpected: b, c"):
        asyncio.run(agent.ensure(publish(trainer, 0), expected={"a": (6,)}, deadline=5))
    assert agent.fetched_chunks == 0


def test_late_agent_does_not_overwrite_newer_versions(trainer: ChunkStore, node: ChunkStore) -> None:
    old = publish(trainer, 0)
    for version in (1, 2):
        publish(node, version, a=torch.full((6,), float(version)))
    with pytest.raises(Superseded):
        asyncio.run(WeightAgent(node, source(trainer)).ensure(old, deadline=5))
    assert [m.tag.version for m in node.manifests()] == [2, 1]
