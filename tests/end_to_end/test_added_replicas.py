"""Replicas and nodes that are added to a run under way, and that leave it again."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from inventory import Book, endpoint, records, trained_by_the_actor
from killing import Life
from launched import Launched, secret
from namespaces import Host

from relax.ledger import queries

PATIENCE = 120.0
# Endless, and slow enough to leave the machine to those who join.
SIMULATED: dict[str, Any] = {
    "rm_type": None,
    "custom_rm_path": "relax.simulation.reward:coin",
    "lr": None,
    "max_staleness": 2,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 1,
    "rollout_max_response_len": 50,
    "num_rollout": 100_000,
    "sim_length": "constant:20",
    "sim_tokens_per_second": "100",
    "sim_slots": 4,
    "sim_train_seconds": 0.05,
    "sim_publish_seconds": 0.02,
}


def services(**more: Any) -> dict[str, Any]:
    return {"rollout": {"engine": "simulated"} | more, "actor": {"engine": "simulated"}}


def wait_for(moment: Callable[[], object], what: str, *processes: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not moment():
        assert all(process.poll() is None for process in processes), f"a process ended while {what} was waited for"
        assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
        time.sleep(0.05)


def served(directory: Path, replica: str) -> list[int]:
    """The versions that a replica has loaded, in order."""
    return [record["version"] for record in records(directory, replica) if record["event"] == "weights_loaded"]


def groups_of(directory: Path) -> Mapping[str, int]:
    """Replica -> groups that it sampled and that were trained."""
    with closing(queries.read(directory / "ledger.sqlite")) as ledger:
        sql = "SELECT holder, count(*) FROM groups WHERE state = 'trained' GROUP BY holder"
        return dict(ledger.execute(sql).fetchall())


def rows(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def has_left(directory: Path, member: str) -> bool:
    return any(r["event"] == "member_left" and r["member"] == member for r in records(directory, "controller"))


def nothing_is_lost(directory: Path) -> None:
    """After the end of the run."""
    book, trained = Book.read(directory / "ledger.sqlite"), trained_by_the_actor(directory)
    assert book.balance.holds
    assert {group for group, _ in book.of("trained")} <= set(trained) and set(trained.values()) == {1}
    with closing(queries.read(directory / "ledger.sqlite")) as ledger:
        (stale,) = ledger.execute("SELECT max(batch - oldest) FROM groups WHERE state = 'trained'").fetchone()
        (attempts,) = ledger.execute("SELECT max(attempt) FROM groups").fetchone()
    assert stale <= SIMULATED["max_staleness"] and attempts == 0


@contextmanager
def by_hand(folder: Path, topology: Path, name: str, *flags: object) -> Iterator[subprocess.Popen[bytes]]:
    role = name.split("-")[0]
    command = [sys.executable, tiny_run.ROOT / "bin" / "relax-service", role, "--topology", topology, "--name", name]
    with (folder / f"{name}.txt").open("wb") as out:
        process = subprocess.Popen([*command, *flags], stdout=out, stderr=subprocess.STDOUT, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """A run of one replica."""
    tiny_run.write_topology(tmp_path, services=services(), **SIMULATED)
    life = Life(tmp_path)
    yield life
    if life.process.poll() is None:
        life.kill()


def more_replicas(folder: Path, replicas: int, **options: Any) -> Path:
    """The run's topology with so many replicas, as another file."""
    (folder / "more").mkdir(exist_ok=True)
    return tiny_run.write_topology(folder / "more", services=services(replicas=replicas), **SIMULATED | options)


def test_a_replica_joins_a_run_under_way_takes_its_share_and_leaves(tmp_path: Path, life: Life) -> None:
    assert life.until(lambda: life.trained() >= 2), life.output
    directory, before = life.directory, life.trained()
    newest = len([*directory.glob("weights/*.json")]) - 1
    more = more_replicas(tmp_path, 2)
    with by_hand(tmp_path, more, "rollout-1", "--run-dir", directory) as added:
        wait_for(lambda: groups_of(directory).get("rollout-1", 0) >= 8, "its groups", life.process, added)
        wait_for(lambda: "memory/rollout-1/rss_mb" in rows(directory)[-1], "its memory", life.process, added)
        added.send_signal(signal.SIGTERM)
        assert added.wait(PATIENCE) == 0, (tmp_path / "rollout-1.txt").read_text()
    wait_for(lambda: has_left(directory, "rollout-1"), "its goodbye", life.process)
    after = life.trained()
    assert life.until(lambda: life.trained() >= after + 3), "the run goes on without it"
    life.process.send_signal(signal.SIGINT)
    assert life.end() == 130, life.output
    assert served(directory, "rollout-1")[0] >= newest, "it loads the newest version, and none before"
    assert "memory/rollout-1/rss_mb" not in rows(directory)[before - 1], "a row has who is a member then"
    assert rows(directory)[-1]["memory/rollout-0/rss_mb"] > 0
    assert {record["reason"] for record in records(directory, "rollout-1") if record["event"] == "shutdown"} == {
        "it leaves the run"
    }
    nothing_is_lost(directory)


# --- nodes -----------------------------------------------------------------------------------------------------------


def topology_of(folder: Path, name: str, hosts: tuple[Host, ...], rollout: list[dict[str, Any]]) -> Path:
    """All on the first of the hosts but rollouts, and a reward more on each of the others."""
    first = hosts[0]
    everything = {role: {"node": first.name} for role in ("controller", "advantages", "actor")}
    everything["actor"] |= {"engine": "simulated"}
    everything |= {"reward": [{"node": host.name} for host in hosts]}
    everything |= {"rollout": [entry | {"engine": "simulated"} for entry in rollout]}
    nodes = {host.name: {"address": host.address} for host in hosts}
    (folder / name).mkdir()
    top = {"controller": f"tcp://{first.address}:5755", "nodes": nodes, "run": {"name": "grown"}}
    return tiny_run.write_topology(folder / name, services=everything, top=top, **SIMULATED | {"peer_timeout": 20})


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_joins_a_run_under_way_leaves_and_joins_again(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    left, right = hosts
    keys = secret(tmp_path / "keys")
    alone = topology_of(tmp_path, "alone", (left,), [{"node": "left"}])
    both = [{"node": "left"}, {"node": "right", "replicas": 2}]
    grown = topology_of(tmp_path, "grown", hosts, both)
    wrong = topology_of(tmp_path, "wrong", hosts, both[::-1])
    trainer = Launched(left, alone, tmp_path, "trainer", "--keys", keys)
    wait_for(lambda: groups_of_or_none(trainer.directory), "the first batch", trainer.process)

    refused = Launched(right, wrong, tmp_path, "refused", "--keys", keys)
    code, told = refused.end()
    assert code == 1 and "rollout-0 is on node left in this run, and this one is on node right" in told, told
    assert "it is started again" not in told, told

    for life in ("engines", "engines-again"):
        known = groups_of(trainer.directory)
        engines = Launched(right, grown, tmp_path, life, "--keys", keys)
        for name in ("rollout-1", "rollout-2"):
            wait_for(
                lambda name=name, known=known: groups_of(trainer.directory).get(name, 0) >= known.get(name, 0) + 4,  # type: ignore[misc]
                f"groups of {name}",
                trainer.process,
                engines.process,
            )
        weighed = {f"memory/{name}/rss_mb" for name in ("rollout-1", "rollout-2", "reward-1")}
        wait_for(lambda weighed=weighed: weighed <= set(rows(trainer.directory)[-1]), "their memory", engines.process)  # type: ignore[misc]
        assert any(record["event"] == "weights_loaded" for record in records(engines.directory, "rollout-2"))
        if life == "engines":
            engines.process.send_signal(signal.SIGTERM)
            assert engines.end()[0] == 143
            rows_then = len(rows(trainer.directory))
            wait_for(lambda: len(rows(trainer.directory)) > rows_then + 5, "the run to go on", trainer.process)  # noqa: B023
    trainer.process.send_signal(signal.SIGINT)
    assert trainer.end()[0] == 130
    code, told = engines.end()
    assert code == 1 and "it was refused, or told that the run has failed" in told, told
    nothing_is_lost(trainer.directory)


def groups_of_or_none(directory: Path) -> Mapping[str, int]:
    return groups_of(directory) if endpoint(directory, "controller") else {}
