"""A replica that lives and does not get on: its heart beats, its samples never end. Training goes on around it, and
what the run holds in memory stays bounded."""

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "end_to_end"))

import tiny_run
from inventory import Observer, records
from killing import Life

from relax.launch.rundir import RunDir
from relax.ledger import queries
from relax.services.service import STALLED

BATCH, STALENESS, STALL = 8, 2, 6.0
# A sample of rollout-1 takes five hours.
OPTIONS: dict[str, Any] = tiny_run.SIMULATED | {
    "services": {"rollout": {"engine": "simulated", "replicas": 2}, "actor": {"engine": "simulated"}},
    "max_staleness": STALENESS,
    "rollout_batch_size": BATCH,
    "n_samples_per_prompt": 1,
    "rollout_max_response_len": 200,
    "sim_length": "constant:20",
    "sim_tokens_per_second": "1000,0.001",
    "sim_slots": 4,
    "sim_train_seconds": 0.1,
    "sim_publish_seconds": 0.02,
    "stall_timeout": STALL,
    "restart_budget": "99/600",
}
WELL = ("controller", "rollout-0", "reward-0", "advantages", "actor")


@pytest.fixture
def life(tmp_path: Path) -> Iterator[list[Life]]:
    begun: list[Life] = []
    yield begun
    for it in begun:
        if it.process.poll() is None:
            it.kill()


def shared_memory(directory: Path) -> int:
    """Bytes of the run in /dev/shm."""
    files = [file for file in RunDir.load(directory).shm_dir.rglob("*") if file.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)


async def held(directory: Path) -> dict[str, int]:
    """Service that is well -> draws that it works on."""
    async with Observer(directory, WELL) as observer:
        return {name: len(draws) for name, draws in (await observer.look()).named.items()}


def outcomes(directory: Path) -> dict[str, int]:
    with closing(queries.read(directory / "ledger.sqlite")) as ledger:
        assert queries.conservation(ledger).holds
        ended = dict(ledger.execute("SELECT ifnull(reason, state), count(*) FROM groups GROUP BY 1").fetchall())
        ended["lost"] = ledger.execute("SELECT count(*) FROM events WHERE event = 'lost'").fetchone()[0]
        (ended["stalest"],) = ledger.execute(
            "SELECT max(batch - oldest) FROM groups WHERE state = 'trained'"
        ).fetchone()
        sql = "SELECT count(*) FROM groups WHERE state = 'trained' AND holder = 'rollout-1'"
        (ended["trained by the hung one"],) = ledger.execute(sql).fetchone()
    return ended


def stalls(life: Life) -> int:
    return life.output.count(f"rollout-1 ended with exit code {STALLED}; it is started again")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staleness", [STALENESS, 0], ids=["asynchronous", "lockstep"])
def test_with_a_straggler_timeout_training_goes_on_around_it(tmp_path: Path, life: list[Life], staleness: int) -> None:
    """What it is given is dropped and drawn by the other one; no prompt is given up for it. It is found out although
    nothing stays with it for longer than the timeout, and started again."""
    options = {"num_rollout": 60, "straggler_timeout": 0.5, "max_staleness": staleness}
    tiny_run.write_topology(tmp_path, **OPTIONS | options)
    it = Life(tmp_path)
    life.append(it)
    most, looks = 0, {20, 40}
    while (trained := it.trained()) < 58:
        assert it.until(lambda trained=trained: it.trained() > trained), it.output  # type: ignore[misc]
        most = max(most, shared_memory(it.directory))
        if looks and trained >= min(looks):
            looks.remove(min(looks))
            assert max(asyncio.run(asyncio.wait_for(held(it.directory), 60)).values()) <= (STALENESS + 1) * BATCH
    assert it.end() == 0, it.output
    assert stalls(it) > 0, it.output
    ended = outcomes(it.directory)
    assert ended["trained"] == 60 * BATCH and ended["stalest"] <= staleness
    assert ended["straggler"] > 0 and "set_aside" not in ended and ended["trained by the hung one"] == 0
    assert most <= 4 * os.sysconf("SC_PAGE_SIZE"), "two versions of one small tensor, a page each, and their manifests"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_without_one_training_waits_for_the_stall_timeout_and_goes_on(tmp_path: Path, life: list[Life]) -> None:
    """With default settings a hang is ended by the replica's own watchdog. Its groups come again, at no attempt."""
    tiny_run.write_topology(tmp_path, **OPTIONS | {"num_rollout": 6})
    it = Life(tmp_path)
    life.append(it)
    assert it.end(300) == 0, it.output
    assert stalls(it) > 0, it.output
    ended = outcomes(it.directory)
    assert ended["trained"] == 6 * BATCH and ended["lost"] > 0 and "straggler" not in ended
    (told, *_) = [r for r in records(it.directory, "rollout-1") if r["event"] == "service_stalled"]
    assert told["error"] == f"rollout-1 has not got on with sampling for --stall-timeout {STALL:g} s"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_reader_that_holds_on_to_a_version_holds_up_the_publication_and_not_the_run(
    tmp_path: Path, life: list[Life]
) -> None:
    """For longer than the peer timeout: so long a replica may hang in a load until it is ended."""
    peer_timeout = 6.0
    options = {"num_rollout": 40, "sim_tokens_per_second": "1000", "peer_timeout": peer_timeout, "stall_timeout": 60.0}
    tiny_run.write_topology(tmp_path, **OPTIONS | options)
    it = Life(tmp_path)
    life.append(it)
    assert it.until(lambda: it.trained() >= 3), it.output
    with ExitStack() as held:
        for place in RunDir.load(it.directory).shm_dir.glob("*.weights"):
            fcntl.flock(held.enter_context(place.open("rb")), fcntl.LOCK_SH)
        time.sleep(1.5 * peer_timeout)
        before = it.trained()
    assert it.until(lambda: it.trained() > before), it.output
    assert it.end() == 0, it.output
    assert before < 40 and outcomes(it.directory)["trained"] == 40 * BATCH
