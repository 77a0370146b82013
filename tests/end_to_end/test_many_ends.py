"""However a run ends (by itself, whoever is first; by a signal, whenever it comes), it does so with the right code and
leaves no process, no socket and no shared memory.

Real processes around simulated engines. A launched run has a $XDG_RUNTIME_DIR of its own: what it started carries that
in its environment, and its sockets are there.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from inventory import records
from killing import Life

from relax.launch.rundir import RunDir
from relax.ledger import queries

# What the contract promises; the wait ends as soon as everything is gone.
GONE_SECONDS = 10.0
PATIENCE = 120.0
BATCH = 8
SIMULATED: dict[str, Any] = tiny_run.SIMULATED | {
    "services": {"rollout": {"engine": "simulated", "replicas": 2}, "actor": {"engine": "simulated"}},
    "max_staleness": 2,
    "rollout_batch_size": BATCH,
    "n_samples_per_prompt": 1,
    "rollout_max_response_len": 200,
    "sim_length": "pareto:20,1.5",
    "sim_tokens_per_second": "1000,500",
    "sim_slots": 4,
    "sim_train_seconds": 0.02,
    "sim_publish_seconds": 0.01,
}


class Ending(Life):
    """A launch whose remains can be told from those of all others."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.runtime = Path(tempfile.mkdtemp(prefix="r-", dir="/tmp"))  # sockets have short paths
        super().__init__(folder, *flags, environment=os.environ | {"XDG_RUNTIME_DIR": str(self.runtime)})

    def remains(self) -> list[str]:
        found = [str(path) for path in self.runtime.iterdir()]
        if (self.directory / "runtime.json").is_file():
            shm = RunDir.load(self.directory).shm_dir
            found += [str(shm)] if shm.exists() else []
        mark = f"XDG_RUNTIME_DIR={self.runtime}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def leaves_nothing(self) -> None:
        end = time.monotonic() + GONE_SECONDS
        while found := self.remains():
            assert time.monotonic() < end, f"{GONE_SECONDS} s after its end: {found}"
            time.sleep(0.05)
        shutil.rmtree(self.runtime)

    def event(self, service: str, event: str) -> bool:
        return any(record["event"] == event for record in records(self.directory, service))


def prompts(folder: Path, count: int) -> str:
    file = folder / f"{count}.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"What comes after {n}?"}) + "\n" for n in range(count)))
    return str(file)


def trained(directory: Path) -> Counter[tuple[int, int]]:
    """(prompt, epoch) of every trained group."""
    with closing(queries.read(directory / "ledger.sqlite")) as ledger:
        return Counter(ledger.execute("SELECT prompt_id, epoch FROM groups WHERE state = 'trained'").fetchall())


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# --- by itself -------------------------------------------------------------------------------------------------------

TRAINER_FIRST = {"sim_train_seconds": 0.0, "sim_tokens_per_second": "200,100"}
ROLLOUT_FIRST = {"sim_train_seconds": 0.3, "sim_tokens_per_second": "4000"}


def sizes(directory: Path) -> list[int]:
    """Groups of each batch."""
    with closing(queries.read(directory / "ledger.sqlite")) as ledger:
        return [size for (size,) in ledger.execute("SELECT size FROM batches ORDER BY batch")]


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(
    ("count", "end", "expected"),
    [
        (3, {"num_epoch": 1}, [3]),
        (3, {"num_rollout": 3}, [8, 8, 8]),
        (20, {"num_epoch": 1}, [8, 8, 4]),
        (8, {"num_epoch": 2}, [8, 8]),
        (20, {"num_epoch": 2, "num_rollout": 3}, [8, 8, 8]),
    ],
    ids=["one short batch", "less than a batch", "one epoch", "epochs of one batch", "the earlier end"],
)
@pytest.mark.parametrize("pace", [TRAINER_FIRST, ROLLOUT_FIRST], ids=["trainer first", "rollout first"])
def test_a_run_ends_when_its_data_or_its_batches_do(
    tmp_path: Path, pace: dict[str, Any], count: int, end: dict[str, int], expected: list[int], staleness: int
) -> None:
    options = {"num_rollout": None, "prompt_data": prompts(tmp_path, count), "max_staleness": staleness, **pace, **end}
    tiny_run.write_topology(tmp_path, **SIMULATED | options)
    life = Ending(tmp_path)
    assert life.end(PATIENCE) == 0, life.output
    life.leaves_nothing()
    assert sizes(life.directory) == expected
    stream = Counter((n % count, n // count) for n in range(sum(expected)))
    assert Counter(epoch for _, epoch in trained(life.directory).elements()) == Counter(
        epoch for _, epoch in stream.elements()
    )
    assert set(trained(life.directory).values()) == {1}


LOOPING = """
import os
import time
from pathlib import Path


def score(prompt, response, label, row):
    try:  # one sample of the run
        os.close(os.open(Path(__file__).with_name("looped"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return float(len(response) % 2)
    while True:
        time.sleep(0.01)
"""


def test_two_runs_on_one_host_end_one_by_one_whoever_is_first_and_whatever_a_reward_function_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With default settings, from one directory. In one the trainer is first and the queue empty, and the data are less
    than a batch; in the other rollout is first and the queue full, it is one epoch, and one sample is never scored."""
    (tmp_path / "looping.py").write_text(LOOPING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    looping = {"custom_rm_path": "looping:score", "rm_timeout": 1.0}
    few, many = prompts(tmp_path, 3), prompts(tmp_path, 36)
    wanted = {
        "few": TRAINER_FIRST | {"num_rollout": 3, "prompt_data": few},
        "many": ROLLOUT_FIRST | looping | {"num_rollout": None, "num_epoch": 1, "prompt_data": many},
    }
    launched = []
    for name, options in wanted.items():
        (tmp_path / name).mkdir()
        topology = tiny_run.write_topology(tmp_path / name, **SIMULATED | options)
        command = [sys.executable, tiny_run.ROOT / "bin" / "relax-launch", topology]
        output = (tmp_path / name / "output").open("wb")
        launched.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path))
    try:
        codes = [process.wait(PATIENCE) for process in launched]
    finally:
        for process in launched:
            process.terminate()
    told = {name: (tmp_path / name / "output").read_text() for name in wanted}
    assert codes == [0, 0], told
    runs = {name: RunDir.load(Path(text.split("run directory: ")[1].split("\n")[0])) for name, text in told.items()}
    assert {run.path.parent for run in runs.values()} == {tmp_path / "runs"}
    assert len({(run.path, run.run_id, run.runtime_dir, run.shm_dir) for run in runs.values()}) == 2
    assert not any(place.exists() for run in runs.values() for place in (run.runtime_dir, run.shm_dir))
    path = runs["few"].path
    assert sizes(path) == [8, 8, 8] and len(trained(path)) == 24
    assert sum(row["perf/trainer_wait_s/batch"] for row in rows(path)) > 0
    path = runs["many"].path
    assert sizes(path) == [8, 8, 8, 8, 4] and trained(path) == Counter((n, 0) for n in range(36))
    assert min(row["pipeline/free_slots"] for row in rows(path)) == 0, "the queue was full"
    dropped = [row.get("rollout/dropped/reward_timeout", 0) for row in rows(path)]
    assert sum(filter(None, dropped)) == 1, "one time limit, one draw"


# --- by a signal -----------------------------------------------------------------------------------------------------

# moment -> options that make it last, and how it is seen. Services write their logs line by line.
Moment = tuple[dict[str, Any], Callable[[Ending], object]]


def catches_signals(life: Ending) -> bool:
    """Before, it is a Python that starts."""
    status = Path(f"/proc/{life.process.pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught & 1 << (signal.SIGTERM - 1))


MOMENTS: dict[str, Moment] = {
    "the options are read": ({}, catches_signals),
    "the run is opened": ({}, lambda life: (life.directory / "runtime.json").is_file()),
    "services start": ({}, lambda life: (life.directory / "logs" / "controller.out").is_file()),
    "members join": ({}, lambda life: life.event("controller", "member_joined")),
    "the first publication": (
        {"sim_publish_seconds": 30.0},
        lambda life: life.trained() >= 1 and not (life.directory / "weights" / "0.1.json").exists(),
    ),
    "a checkpoint is written": ({"save_interval": 1}, lambda life: any(life.directory.glob("checkpoints/*.partial-*"))),
    "the last batch": ({"num_rollout": 2, "sim_train_seconds": 15.0}, lambda life: life.trained() == 1),
    "the last publication": ({"num_rollout": 2, "sim_publish_seconds": 30.0}, lambda life: life.trained() == 2),
    "services go home": ({"num_rollout": 2}, lambda life: life.event("controller", "run_finished")),
}
QUICK = {("the run is opened", signal.SIGTERM), ("members join", signal.SIGINT)}


def moments() -> Iterator[Any]:
    for name in MOMENTS:
        for kind in (signal.SIGINT, signal.SIGTERM):
            marks = [] if (name, kind) in QUICK else [pytest.mark.long]
            yield pytest.param(name, kind, marks=marks, id=f"{name}, {kind.name}")


@pytest.mark.parametrize(("name", "kind"), moments())
def test_a_run_is_interrupted(tmp_path: Path, name: str, kind: signal.Signals) -> None:
    options, moment = MOMENTS[name]
    tiny_run.write_topology(tmp_path, **SIMULATED | {"num_rollout": 100_000} | options)
    life = Ending(tmp_path)
    assert life.until(lambda: moment(life)), life.output
    life.process.send_signal(kind)
    code = life.end(30)
    life.leaves_nothing()
    # What was done when the signal came is done.
    assert code == 128 + kind or (code == 0 and life.event("controller", "run_finished")), life.output
    assert code == 0 or f"stopped by {kind.name}" in life.output
    assert "Traceback" not in life.output


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["the first publication", "the export"])
def test_a_run_of_real_models_is_interrupted(tmp_path: Path, name: str) -> None:
    tiny_run.write_topology(tmp_path, num_rollout=1)
    life = Ending(tmp_path)
    seen = {
        "the first publication": lambda: any((life.directory / "weights").glob("*")),
        "the export": lambda: any(life.directory.glob(".export.*")),
    }[name]
    assert life.until(seen, tiny_run.PATIENCE), life.output
    life.process.send_signal(signal.SIGTERM)
    code = life.end(30)
    life.leaves_nothing()
    done = life.event("controller", "run_finished")
    assert code == 143 or (code == 0 and done), life.output
    assert (life.directory / "export" / "config.json").is_file() or not done


# --- without a controller --------------------------------------------------------------------------------------------


def start(folder: Path, role: str, *flags: object) -> subprocess.Popen[str]:
    command = [sys.executable, tiny_run.ROOT / "bin" / "relax-service", role, "--topology", folder / "topology.yaml"]
    name = [] if role == "controller" else ["--name", f"{role}-0"]
    return subprocess.Popen(
        [*command, *name, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    )


def test_a_service_whose_controller_is_absent_gives_up_and_names_the_endpoint(tmp_path: Path) -> None:
    tiny_run.write_topology(tmp_path, **SIMULATED | {"startup_timeout": 2.0})
    on_host = start(tmp_path, "reward", "--run-dir", tmp_path / "run")
    over_tcp = start(tmp_path, "reward", "--controller", "tcp://127.0.0.1:9")
    told = {service: service.communicate(timeout=PATIENCE)[0] for service in (on_host, over_tcp)}
    run = RunDir.load(tmp_path / "run")
    for service, endpoint in ((on_host, run.endpoint("controller")), (over_tcp, "tcp://127.0.0.1:9")):
        assert service.returncode == 2, told[service]
        assert endpoint in told[service] and "within 2.0 s" in told[service], told[service]
    assert not run.runtime_dir.exists() and not run.shm_dir.exists()


@pytest.mark.long
def test_a_service_whose_controller_dies_gives_up_and_names_the_endpoint(tmp_path: Path) -> None:
    tiny_run.write_topology(tmp_path, **SIMULATED | {"peer_timeout": 3.0})
    run_dir = tmp_path / "run"
    controller, reward = (start(tmp_path, role, "--run-dir", run_dir) for role in ("controller", "reward"))
    end = time.monotonic() + PATIENCE
    while not any(record["event"] == "member_joined" for record in records(run_dir, "controller")):
        assert time.monotonic() < end and controller.poll() is reward.poll() is None
        time.sleep(0.05)
    run = RunDir.load(run_dir)
    controller.kill()
    told, _ = reward.communicate(timeout=PATIENCE)
    controller.communicate()
    assert reward.returncode == 1 and run.endpoint("controller") in told and "within 3.0 s" in told, told
    assert not run.runtime_dir.exists() and not run.shm_dir.exists()
