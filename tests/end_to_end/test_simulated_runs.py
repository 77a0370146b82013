"""The real processes around a simulated engine and trainer: staleness and conservation at many moments of a run.

Four replicas of unequal speed and lengths with a heavy tail: what is to be held is hard to hold there.
"""

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from inventory import Book, Look, Observer, endpoint, trained_by_the_actor

MOMENTS = 20
SERVICES = ("controller", "rollout-0", "rollout-1", "rollout-2", "rollout-3", "reward-0", "advantages", "actor")
BATCH = 16
SIMULATED: dict[str, Any] = tiny_run.SIMULATED | {
    "services": {"rollout": {"engine": "simulated", "replicas": 4}, "actor": {"engine": "simulated"}},
    "rollout_batch_size": BATCH,
    "n_samples_per_prompt": 1,
    "rollout_max_response_len": 500,
    "sim_length": "pareto:20,1.5",
    "sim_tokens_per_second": "2000,1000,700,500",
    "sim_slots": 8,
    "sim_train_seconds": 0.05,
    "sim_publish_seconds": 0.02,
}


def launch(folder: Path, patience: float, **options: Any) -> tuple[subprocess.Popen[bytes], Path]:
    topology, directory = tiny_run.write_topology(folder, **(SIMULATED | options)), folder / "run"
    command = [sys.executable, tiny_run.ROOT / "bin" / "relax-launch", topology, "--run-dir", directory]
    output = (folder / "output").open("wb")
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder), directory


async def observe(directory: Path, process: subprocess.Popen[bytes], batches: int, seed: int) -> list[Look]:
    """Looks at the run when it has trained so many batches, at random counts of them."""
    # None so late that the run could end under the look.
    at = sorted(random.Random(seed).sample(range(1, 3 * batches // 4), MOMENTS))
    looks = []
    while not all(endpoint(directory, name) for name in SERVICES):
        assert process.poll() is None, (directory.parent / "output").read_text()
        await asyncio.sleep(0.1)
    async with Observer(directory, SERVICES) as observer:
        for count in at:
            while len(trained_by_the_actor(directory)) < count * BATCH:
                assert process.poll() is None, (directory.parent / "output").read_text()
                await asyncio.sleep(0.01)
            looks.append(await observer.check())
    return looks


def run(folder: Path, staleness: int, batches: int, patience: float) -> tuple[tiny_run.Run, list[Look]]:
    process, directory = launch(folder, patience, max_staleness=staleness, num_rollout=batches)
    try:
        looks = asyncio.run(asyncio.wait_for(observe(directory, process, batches, seed=staleness), patience))
        code = process.wait(patience)
    finally:
        process.terminate()
        process.wait(30)
    return tiny_run.Run(directory, code, (folder / "output").read_text()), looks


def check(result: tiny_run.Run, looks: list[Look], staleness: int, batches: int) -> None:
    assert result.code == 0, result.output
    stale = result.column("train/staleness/max")
    assert len(stale) == batches and max(stale) <= staleness
    assert max(stale) >= min(staleness, 2), "what the bound allows is used"
    assert len(looks) == MOMENTS
    # Not at every moment: in lockstep nothing is in flight between a publication and the next issue.
    assert sum(any(look.named.values()) for look in looks) > MOMENTS / 2, "services name what they work on"
    # The end: nothing is in flight, and the actor's log and the ledger name the same groups.
    book, trained = Book.read(result.directory / "ledger.sqlite"), trained_by_the_actor(result.directory)
    assert book.balance.holds and book.balance.trained == batches * BATCH
    assert {group for group, _ in book.of("trained")} == set(trained)
    assert set(trained.values()) == {1}


@pytest.mark.parametrize("staleness", [0, 2])
def test_staleness_and_conservation_hold_at_random_moments(tmp_path: Path, staleness: int) -> None:
    result, looks = run(tmp_path, staleness, 40, patience=120)
    check(result, looks, staleness, 40)


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1, 2, 8])
def test_staleness_and_conservation_hold_over_three_hundred_batches(tmp_path: Path, staleness: int) -> None:
    result, looks = run(tmp_path, staleness, 300, patience=900)
    check(result, looks, staleness, 300)


def book(**states: str) -> Book:
    """`book(g1f0="trained")`"""
    draws = {(int(name[1 : name.index("f")]), int(name[name.index("f") + 1 :])): s for name, s in states.items()}
    newest: dict[int, int] = {}
    for group, fence in draws:
        newest[group] = max(fence, newest.get(group, fence))
    return Book(draws, newest, type("Balance", (), {"holds": True}))


@pytest.mark.parametrize(
    ("look", "fault"),
    [
        (Look(book(g1f0="ready"), {"advantages": {(1, 0)}}, {}, book(g1f0="committed")), None),
        (Look(book(g1f0="ready"), {"advantages": set()}, {}, book(g1f0="ready")), "lost: (1, 0)"),
        (Look(book(g1f0="issued"), {"rollout-0": set()}, {}, book(g1f0="issued", g1f1="issued")), "lost: (1, 0)"),
        (Look(book(g1f0="issued"), {}, {1: 1}, book(g1f0="trained")), None),
        (Look(book(), {"rollout-0": {(1, 0)}}, {}, book(g1f0="issued")), None),
        (Look(book(), {"rollout-0": {(1, 1)}}, {}, book(g1f0="issued")), "unknown: rollout-0"),
        (Look(book(g1f0="trained"), {"advantages": {(1, 0)}}, {1: 1}, book(g1f0="trained")), "leak: advantages"),
        (Look(book(), {}, {1: 2}, book(g1f0="trained")), "trained twice"),
        (Look(book(), {}, {1: 1}, book(g1f0="dropped")), "trained and dropped"),
        (Look(book(), {}, {1: 1}, book()), "trained and unknown"),
        (Look(book(g1f0="trained"), {}, {}, book(g1f0="trained")), "never trained"),
    ],
)
def test_a_look_finds_each_fault_and_nothing_else(look: Look, fault: str | None) -> None:
    found = list(look.faults())
    assert [f for f in found if fault is None or not f.startswith(fault)] == []
    assert bool(found) == (fault is not None)
