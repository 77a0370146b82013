"""Whole runs in which replicas take new weights under load, or leave."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import tiny_run

from relax.ledger import queries

pytestmark = pytest.mark.long

# Long responses: samples are running when weights come.
LONG: dict[str, Any] = {
    "rollout_max_response_len": 96,
    "max_staleness": 2,
    "use_tis": True,
    "rollout_max_num_seqs": 32,
    "num_rollout": 8,
}


def samples(run: tiny_run.Run) -> list[dict[str, Any]]:
    return pq.read_table(run.directory / "samples").to_pylist()


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> tiny_run.Run:
    return tiny_run.launch(tmp_path_factory.mktemp("partial"), partial_rollout=True, **LONG)


def test_with_partial_rollout_samples_hold_several_versions_within_the_bound(partial: tiny_run.Run) -> None:
    assert partial.code == 0, partial.output
    rows = samples(partial)
    mixed = [row for row in rows if len(row["versions"]) > 1]
    assert mixed, "no sample ran while weights came: the run shows nothing"
    for row in rows:
        assert sum(n for _, n in row["versions"]) == row["response_len"]
        versions = [version for version, _ in row["versions"]]
        assert versions == sorted(set(versions)) and row["batch"] - versions[0] <= 2
    assert max(partial.column("train/staleness/max")) <= 2
    assert sum(partial.column("train/staleness/mixed_samples")) > 0
    with queries.read(partial.directory / "ledger.sqlite") as ledger:
        assert queries.conservation(ledger).holds
        oldest = dict(ledger.execute("SELECT group_id, oldest FROM groups WHERE state = 'trained'"))
    for group in {row["group"] for row in rows}:
        held = [row["versions"][0][0] for row in rows if row["group"] == group]
        assert oldest[group] == min(held), "the ledger counts from the oldest token"


def test_masked_tokens_count_for_no_deadline(tmp_path: Path) -> None:
    run = tiny_run.launch(tmp_path, partial_rollout=True, mask_offpolicy_in_partial_rollout=True, **LONG)
    assert run.code == 0, run.output
    rows = samples(run)
    assert any(len(row["versions"]) > 1 for row in rows)
    with queries.read(run.directory / "ledger.sqlite") as ledger:
        oldest = dict(ledger.execute("SELECT group_id, oldest FROM groups WHERE state = 'trained'"))
    for group in {row["group"] for row in rows}:
        newest = [row["versions"][-1][0] for row in rows if row["group"] == group]
        assert oldest[group] == min(newest)
    assert max(run.column("train/staleness/max")) <= 2


def test_of_a_thousand_trained_samples_none_holds_two_versions(tmp_path: Path) -> None:
    run = tiny_run.launch(tmp_path, **LONG | {"num_rollout": 32, "rollout_max_response_len": 32})
    assert run.code == 0, run.output
    rows = samples(run)
    assert len(rows) >= 1000
    assert [row for row in rows if len(row["versions"]) != 1] == []
    # It is no matter of luck: weights did come while it sampled, and were loaded.
    served = [event["version"] for event in run.events("rollout-0", "weights_loaded")]
    assert len(served) > 16 and len({row["versions"][0][0] for row in rows}) > 16


@pytest.mark.parametrize("partial", [True, False])
def test_a_replica_that_is_told_to_leave_hands_over_and_the_run_goes_on(tmp_path: Path, partial: bool) -> None:
    """One of two replicas gets SIGTERM while it samples."""
    topology = tiny_run.write_topology(
        tmp_path, services={"rollout": {"replicas": 2}}, partial_rollout=partial, **LONG | {"num_rollout": 12}
    )
    directory = tmp_path / "run"
    command = [sys.executable, tiny_run.ROOT / "bin" / "relax-launch", topology, "--run-dir", directory]
    with (tmp_path / "out.txt").open("w") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        metrics, end = directory / "metrics.jsonl", time.monotonic() + tiny_run.PATIENCE
        while not (metrics.is_file() and metrics.stat().st_size):
            assert launcher.poll() is None and time.monotonic() < end, (tmp_path / "out.txt").read_text()
            time.sleep(0.05)
        (pid,) = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if {"relax.services.cli", "rollout-1", str(directory / "topology.yaml")}
            <= set(process.info["cmdline"] or [])
        ]
        os.kill(pid, signal.SIGTERM)
        code = launcher.wait(tiny_run.PATIENCE)
    finally:
        launcher.kill()
    run = tiny_run.Run(directory, code, (tmp_path / "out.txt").read_text())
    assert code == 0, run.output
    assert len(run.rows) == 12
    (left,) = run.events("rollout-1", "leaving")
    assert run.events("rollout-1", "shutdown")[0]["reason"] == "it leaves the run", json.dumps(left)
    assert run.events("controller", "member_left")
    with queries.read(directory / "ledger.sqlite") as ledger:
        assert queries.conservation(ledger).holds
        moved = ledger.execute("SELECT holder, attempt FROM groups WHERE fence > 1").fetchall()
    assert len(moved) <= left["groups"] and set(moved) <= {("rollout-0", 0)}
    assert moved or not left["groups"], "what it had not finished was finished by the other"
    assert all(len(row["versions"]) == 1 for row in samples(run)) or partial
