"""relax-status beside runs that go on, have finished, have failed, or were killed as a whole."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded_runs import ENDLESS, Run, status

from relax.ledger.states import State
from relax.status.look import Looker, RunState, Status
from relax.status.show import blocks, plain

SERVICES = ["controller", "actor", "advantages", "reward-0", "rollout-0", "rollout-1", "rollout-2", "rollout-3"]
BATCHES = 3


def text(seen: Status) -> str:
    return plain(list(blocks(seen)))


def trained(seen: Status) -> int:
    return 0 if seen.ledger is None else seen.ledger.trained


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with Run(tmp_path_factory.mktemp("finished"), "--num-rollout", str(BATCHES)) as run:
        assert run.ends() == 0
        yield run.directory


def test_a_finished_run_has_all_its_groups_and_exits_with_0(finished: Path) -> None:
    done = status(finished)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": finished, exit code 0 after" in done.stdout
    assert "batches: 3 of 3 trained, 3 committed; published version 3" in done.stdout
    assert "issued 24 = trained 24 + dropped (none) + in flight (none)" in done.stdout
    assert "errors: none in the logs" in done.stdout and "problem" not in done.stdout


def test_json_holds_all_that_is_shown(finished: Path) -> None:
    found = json.loads(status(finished, "--json").stdout)
    assert found["state"] == "finished" and found["ended"]["code"] == 0 and found["problems"] == []
    assert [seen["name"] for seen in found["controller"]["services"]] == SERVICES
    assert set(found["alive"].values()) == {False}
    assert found["ledger"]["conservation"] == {
        "issued": 24, "trained": 24, "dropped": {}, "in_flight": {}, "holds": True,
    }  # fmt: skip
    assert [row["batch"] for row in found["metrics"]] == list(range(BATCHES))
    # So short a run may end before a replica that came late has said what it takes.
    measured = {key for key in found["metrics"][-1] if key.startswith("memory/")}
    assert "memory/controller/rss_mb" in measured <= {f"memory/{name}/rss_mb" for name in SERVICES}


def test_watching_ends_with_the_run(finished: Path) -> None:
    done = status(finished, "--watch", "0.1", "--json")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("ledger.sqlite", "ledger.sqlite cannot be read: file is not a database"),
        ("status.json", "status.json cannot be read"),
    ],
)
def test_a_damaged_part_is_named_and_the_rest_is_shown(finished: Path, tmp_path: Path, file: str, told: str) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / file).write_bytes(b"\xff damaged " * 1000)
    done = status(copy)
    assert done.returncode == 2 and told in done.stdout and "Traceback" not in done.stderr
    assert ": finished" in done.stdout and "staleness, last 3 batches" in done.stdout


def test_a_missing_ledger_is_named(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    for part in copy.glob("ledger.sqlite*"):
        part.unlink()
    (seen,) = [Looker(copy).look()]
    assert "does not exist" in seen.problems[0] and "problem: " in text(seen)


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    done = status(tmp_path)
    assert done.returncode == 2 and "is no run directory" in done.stderr
    (tmp_path / "runtime.json").write_text("{")
    done = status(tmp_path)
    assert done.returncode == 2 and "damaged run directory" in done.stderr and "Traceback" not in done.stderr


def test_a_run_is_seen_from_its_start_to_kill_9_of_everything(tmp_path: Path) -> None:
    with Run(tmp_path, *ENDLESS) as run:
        looker = run.looker()
        looks = run.look_until(looker, lambda seen: trained(seen) >= 12)
        assert [seen.problems for seen in looks if seen.problems] == [], "the ledger is being written all the while"
        assert all(seen.state in (RunState.STARTING, RunState.RUNNING) for seen in looks)
        assert looks[0].state is RunState.STARTING and looks[-1].state is RunState.RUNNING
        assert all(text(seen) for seen in looks)
        # The first rows know the memory, and the rates follow.
        seen = looks[-1]
        assert seen.ledger is not None and seen.ledger.trained_groups_per_s and seen.ledger.sampled_groups_per_s > 0
        (seen,) = run.look_until(
            looker,
            lambda seen: (
                bool(seen.ledger and seen.ledger.oldest)
                and len(seen.alive) == len(SERVICES)
                and seen.snapshot is not None
                and all(one.rss_bytes for one in seen.snapshot.services)  # who came last has been measured too
            ),
        )[-1:]
        assert seen.ledger is not None and seen.snapshot is not None
        assert sum(stage.groups for stage in seen.ledger.stages) >= len(seen.ledger.oldest) > 0
        oldest = seen.ledger.oldest[0]
        assert f"oldest open: group {oldest.group} (attempt 0), drawn " in text(seen)
        assert oldest.state == State.PENDING.word or oldest.holder
        assert list(seen.alive) == SERVICES and set(seen.alive.values()) == {True}
        assert all(one.lives == 1 for one in seen.snapshot.services)
        assert {one.pid for one in seen.snapshot.services} == {one.pid for one in looks[-1].snapshot.services}  # type: ignore[union-attr]
        assert "next: batch " in text(seen)
        for one in seen.snapshot.services:
            os.kill(one.pid, signal.SIGSTOP)  # so that none sees another die
        os.kill(run.process.pid, signal.SIGKILL)
        for one in seen.snapshot.services:
            os.kill(one.pid, signal.SIGKILL)
        run.ends()
        (seen,) = run.look_until(looker, lambda seen: not seen.state.goes_on)[-1:]
        assert seen.state is RunState.CRASHED and set(seen.alive.values()) == {False}
        done = status(run.directory)
        assert done.returncode == 1 and "is dead, and nothing says why" in done.stdout
        assert "oldest open: group" in done.stdout, "what was on its way is still in the ledger"


def test_a_failed_run_says_who_died_and_what_came_first(tmp_path: Path) -> None:
    with Run(tmp_path, *ENDLESS, "--restart-budget", "0/600") as run:
        looker = run.looker()
        seen = run.look_until(looker, lambda seen: trained(seen) >= 2 and set(seen.alive) == set(SERVICES))[-1]
        assert seen.snapshot is not None
        (reward,) = [one for one in seen.snapshot.services if one.role == "advantages"]
        os.kill(reward.pid, signal.SIGKILL)
        assert run.ends() == 1
        done = status(run.directory)
    assert done.returncode == 1 and ": failed, exit code 1 after" in done.stdout
    assert "launcher: advantages was killed by SIGKILL" in done.stdout
    assert "first error of the run: advantages at " in done.stdout
