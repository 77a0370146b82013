"""relax-launch with real processes: how a run ends, what is said last, and that nothing is left behind."""

import asyncio
import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax.launch.rundir import RunDir
from relax.launch.sweep import processes_of, sweep
from relax.protocol.mailbox import Mailbox
from relax.protocol.messages import Hello, Welcome
from relax.protocol.security import Security

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Bounds a wait that ends early when all is well; generous, for machines that are busy.
PATIENCE = 60.0
ROLES = ("controller", "rollout", "reward", "advantages", "actor")


COUNT = itertools.count()


def all_done(*but: str) -> dict[str, str]:
    """Scripts of services that end by themselves."""
    return {
        name: "exit=0" for name in ("controller", "rollout_0", "reward_0", "advantages", "actor") if name not in but
    }


def commands() -> Iterator[tuple[int, list[str]]]:
    """(pid, command line) of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_text().rstrip("\0").split("\0")


class Launch:
    """One launcher process over a topology in a directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.services: dict[str, Any] = {role: {} for role in ROLES}
        self.top: dict[str, Any] = {}
        self.seconds = f"600.{next(COUNT):03d}{os.getpid()}"

    def start(self, *flags: str, **scripts: str) -> "Launch":
        topology = self.folder / "topology.yaml"
        options = {
            "hf_checkpoint": str(ROOT / "topologies" / "tiny"),
            "prompt_data": "reasoning_gym:spell_backward",
            "rm_type": "reasoning_gym",
            "num_rollout": 3,
            "rollout_batch_size": 4,
            "rollout_max_prompt_len": 256,
            "rollout_max_response_len": 16,
        }
        document = {"run": {"directory": str(self.folder / "runs"), "name": "t"}, "services": self.services, **self.top}
        topology.write_text(yaml.safe_dump({**document, "options": {**options, **self.top.get("options", {})}}))
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_launch.py"), str(topology), *flags],
            env={
                **os.environ,
                "FAKE_SECONDS": self.seconds,
                **{f"FAKE_{name.upper()}": script for name, script in scripts.items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self

    def end(self) -> tuple[int, str, str]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def send(self, kind: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(kind)

    @property
    def run(self) -> RunDir:
        return RunDir.load(self.folder / "runs" / "t-1")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
            time.sleep(0.05)

    def wait_until_all_run(self) -> None:
        logs = self.folder / "runs" / "t-1" / "logs"
        self.wait_for(lambda: len(list(logs.glob("*.jsonl"))) == len(ROLES), "all services")

    def log_of(self, service: str) -> str:
        path = self.folder / "runs" / "t-1" / "logs" / f"{service}.jsonl"
        return path.read_text() if path.exists() else ""

    def sleepers(self) -> list[int]:
        """The children that this run's services left behind, whatever became of their parents and environment."""
        return [pid for pid, command in commands() if command == ["sleep", self.seconds]]

    def nothing_is_left(self) -> bool:
        run = self.run
        return not (processes_of(run.run_id) or run.runtime_dir.exists() or run.shm_dir.exists() or self.sleepers())


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    made = Launch(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.communicate()
    for record in tmp_path.glob("runs/*/runtime.json"):
        sweep(json.loads(record.read_text())["run_id"])
        RunDir.load(record.parent).leave()


def test_a_run_ends_by_itself_and_says_where_everything_is(launch: Launch) -> None:
    code, out, err = launch.start(controller="join rows=3 sleep=0.5 exit=0", **all_done("controller")).end()
    assert code == 0, err
    run = launch.run
    assert f"run directory: {run.path}" in out and str(run.metrics) in out and "relax-logs" in out
    lines = [line for line in out.splitlines() if line.startswith("batch")]
    assert [line.split("  ")[0] for line in lines] == ["batch 1/3", "batch 2/3", "batch 3/3"]
    assert all(f"  {word}" in lines[-1] for word in ("reward 0.250", "length 7.5", "loss 0.1250", "staleness 1"))
    assert "tokens/s 1,234" in lines[-1] and "left" in lines[-1]
    assert launch.nothing_is_left()
    values = yaml.safe_load(run.config.read_text())
    assert values["rollout_batch_size"] == 4 and yaml.safe_load(run.topology.read_text())["run"]["name"] == "t"


def test_services_that_outlive_the_end_are_ended_without_blame(launch: Launch) -> None:
    code, _, err = launch.start(controller="exit=0", rollout_0="stubborn bare away sleep=600").end()
    assert code == 0 and err.count("warning") == len(err.splitlines())
    assert launch.nothing_is_left()


def test_a_service_that_dies_ends_the_run_and_its_error_is_printed_last(launch: Launch) -> None:
    code, _, err = launch.start(
        "--restart-budget",
        "0/600",
        rollout_0="log=engine_lost sleep=0.3 exit=3",
        controller="sleep=1 log=rollout_is_gone sleep=600",
    ).end()
    assert code == 1, err
    assert "failed: rollout-0 ended with exit code 3" in err
    last = err.rstrip().splitlines()[-1]
    assert last.startswith("first error of the run: rollout-0") and "engine_lost  batch=3" in last
    assert launch.nothing_is_left()


def test_the_earliest_error_is_printed_even_when_another_service_died_of_it(launch: Launch) -> None:
    code, _, err = launch.start(
        actor="log=disk_full sleep=600", reward_0="sleep=0.5 log=no_answer_from_actor exit=1"
    ).end()
    assert code == 1 and "failed: reward-0" in err
    last = err.rstrip().splitlines()[-1]
    assert last.startswith("first error of the run: actor") and "disk_full  batch=3" in last


def test_a_service_that_dies_without_a_log_is_known_by_its_output(launch: Launch) -> None:
    code, _, err = launch.start("--restart-budget", "1/600", advantages="say=no_module_named_x exit=1").end()
    assert code == 1 and "failed: advantages ended with exit code 1" in err
    *_, said, last = err.rstrip().splitlines()
    assert said.strip() == "no_module_named_x"
    assert last.startswith("first error of the run: advantages") and "ended with exit code 1" in last


def test_a_service_killed_by_a_signal_is_named_with_it(launch: Launch) -> None:
    launch.start("--restart-budget", "0/600")
    launch.wait_until_all_run()
    victim = next(p for p in processes_of(launch.run.run_id) if "reward-0" in p.command)
    os.kill(victim.pid, signal.SIGKILL)
    code, _, err = launch.end()
    assert code == 1 and "reward-0 was killed by SIGKILL" in err
    assert launch.nothing_is_left()


def pid_of(launch: Launch, name: str, but: int = 0) -> int:
    found = [p.pid for p in processes_of(launch.run.run_id) if f"--name {name} " in f"{p.command} " and p.pid != but]
    return found[0] if found else 0


def test_a_service_that_is_killed_is_started_again_and_nothing_of_it_is_left(launch: Launch) -> None:
    launch.start(reward_0="say=hello bare sleep=600", controller="sleep=600")
    launch.wait_until_all_run()
    launch.wait_for(lambda: len(launch.sleepers()) == 1, "its child")
    first, (orphan,) = pid_of(launch, "reward-0"), launch.sleepers()
    os.kill(first, signal.SIGKILL)
    launch.wait_for(lambda: bool(pid_of(launch, "reward-0", but=first)), "its next life")
    launch.wait_for(lambda: [s != orphan for s in launch.sleepers()] == [True], "the next life's child alone")
    launch.send(signal.SIGINT)
    code, _, err = launch.end()
    assert code == 130 and "reward-0 was killed by SIGKILL; it is started again" in err
    assert launch.run.out("reward-0").read_text().count("hello") == 2, "its output is one file"
    assert launch.nothing_is_left()


def test_when_the_budget_is_spent_the_first_of_its_errors_is_told(launch: Launch) -> None:
    code, _, err = launch.start("--restart-budget", "2/600", rollout_0="log=engine_lost exit=3").end()
    assert code == 1 and err.count("rollout-0 ended with exit code 3; it is started again") == 2
    assert "failed: rollout-0 ended with exit code 3" in err
    last = err.rstrip().splitlines()[-1]
    assert last.startswith("first error of the run: rollout-0") and "engine_lost" in last
    records = [json.loads(line) for line in launch.run.log("rollout-0").read_text().splitlines()]
    first = min(record["time"] for record in records if record["level"] == "error")
    assert f"at {first[11:19]} UTC" in last


def test_who_waits_to_be_started_again_for_longer_than_the_peer_timeout_has_not_ended(launch: Launch) -> None:
    code, _, err = launch.start("--peer-timeout", "0.3", "--restart-budget", "3/600", reward_0="exit=3").end()
    assert code == 1 and err.count("reward-0 ended with exit code 3; it is started again") == 3
    assert "failed: reward-0 ended with exit code 3" in err


def test_an_error_that_was_survived_is_not_the_first_of_the_run(launch: Launch) -> None:
    launch.start(
        "--restart-budget", "9/600", reward_0="once log=hiccup sleep=600", actor="sleep=4 log=disk_full exit=1"
    )
    launch.wait_for(lambda: launch.log_of("reward-0") != "", "the error")
    os.kill(pid_of(launch, "reward-0"), signal.SIGKILL)
    code, _, err = launch.end()
    assert code == 1 and "failed: actor ended with exit code 1" in err
    assert "reward-0 was killed by SIGKILL; it is started again" in err
    last = err.rstrip().splitlines()[-1]
    assert last.startswith("first error of the run: actor") and "disk_full" in last


def test_a_service_that_gives_no_sign_of_life_is_killed_and_started_again(launch: Launch) -> None:
    launch.start("--peer-timeout", "1", advantages="alive=600", controller="sleep=600")
    launch.wait_until_all_run()
    launch.wait_for(launch.run.sign_of_life("advantages").exists, "its sign of life")
    first = pid_of(launch, "advantages")
    os.kill(first, signal.SIGSTOP)
    launch.wait_for(lambda: bool(pid_of(launch, "advantages", but=first)), "its next life")
    launch.send(signal.SIGINT)
    code, _, err = launch.end()
    assert code == 130 and "advantages gave no sign of life for 1 s and was killed; it is started again" in err
    assert launch.nothing_is_left()


def test_an_actor_that_gives_no_sign_of_life_ends_the_run(launch: Launch) -> None:
    launch.start("--peer-timeout", "1", actor="alive=600", controller="sleep=600")
    launch.wait_until_all_run()
    launch.wait_for(launch.run.sign_of_life("actor").exists, "its sign of life")
    os.kill(pid_of(launch, "actor"), signal.SIGSTOP)
    code, _, err = launch.end()
    assert code == 1 and "failed: actor gave no sign of life for 1 s and was killed" in err
    assert launch.nothing_is_left()


def test_a_service_that_ends_early_ends_the_run_after_the_peer_timeout(launch: Launch) -> None:
    code, _, err = launch.start("--peer-timeout", "0.5", actor="exit=0").end()
    assert code == 1 and "actor ended 0.5 s ago" in err
    assert launch.nothing_is_left()


def test_a_rollout_replica_may_leave_the_run(launch: Launch) -> None:
    scripts = all_done("controller", "rollout_0", "reward_0", "advantages", "actor")
    busy = dict.fromkeys(("reward_0", "advantages", "actor"), "sleep=2.5 exit=0")
    code, _, err = launch.start(
        "--peer-timeout", "0.5", controller="sleep=2 exit=0", rollout_0="exit=0", **busy, **scripts
    ).end()
    assert code == 0, err


def test_a_failure_after_the_controllers_success_is_a_failure(launch: Launch) -> None:
    code, _, err = launch.start(controller="exit=0", actor="sleep=1 exit=4", **all_done("controller", "actor")).end()
    assert code == 1 and "actor ended with exit code 4" in err


@pytest.mark.parametrize(
    ("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda value: str(value)
)
def test_a_signal_stops_the_run_cleanly(launch: Launch, kind: signal.Signals, code: int) -> None:
    launch.start(reward_0="bare away sleep=600")
    launch.wait_until_all_run()
    launch.send(kind)
    assert launch.end()[0] == code
    assert launch.nothing_is_left()


def test_ctrl_c_ends_services_that_ignore_it(launch: Launch) -> None:
    launch.start(actor="stubborn bare away sleep=600")
    launch.wait_until_all_run()
    launch.send(signal.SIGINT)
    time.sleep(0.5)  # two that arrive together are one
    launch.send(signal.SIGINT)
    assert launch.end()[0] == 130
    assert launch.nothing_is_left()


def test_kill_9_of_the_launcher_leaves_nothing(launch: Launch) -> None:
    launch.start(actor="join stubborn bare away sleep=600", rollout_0="bare away sleep=600")
    launch.wait_until_all_run()
    launch.wait_for(lambda: len(launch.sleepers()) == 4, "the services' children")
    assert launch.run.shm_dir.is_dir()
    launch.send(signal.SIGKILL)
    launch.wait_for(launch.nothing_is_left, "the guard")


def test_services_get_their_mark_and_flags(launch: Launch) -> None:
    launch.start(
        "--seed",
        "7",
        "--no-rm-exact",
        reward_0="tell exit=0",
        controller="sleep=2 exit=0",
        **all_done("controller", "reward_0"),
    ).end()
    reward = json.loads((launch.run.path / "reward-0.told").read_text())
    assert reward["environment"]["RELAX_RUN_ID"] == launch.run.run_id
    assert reward["flags"] == ["--seed=7", "--no-rm-exact"] and reward["leads_session"]


def test_a_node_without_a_controller_ends_with_its_services(launch: Launch) -> None:
    nodes = {name: {"address": f"10.0.0.{n}"} for n, name in enumerate(("left", "right"))}
    launch.services = {role: {"node": "right" if role == "rollout" else "left"} for role in ROLES}
    launch.services["rollout"]["replicas"] = 2
    with controller_of("a1b2c3d4e5f6") as endpoint:
        # By this host's name, since a loopback address is refused where several hosts take part.
        named = f"tcp://{socket.gethostname()}:{endpoint.rpartition(':')[2]}"
        launch.top = {"nodes": nodes, "controller": named, "options": {"insecure": True}}
        here = str(launch.folder / "runs" / "t-1")
        flags = ("--node", "right", "--run-dir", here)
        code, out, err = launch.start(*flags, rollout_0="exit=0", rollout_1="sleep=0.3 exit=0").end()
    assert code == 0, err
    assert "services: rollout-0, rollout-1" in out and launch.nothing_is_left()
    assert launch.run.run_id == "a1b2c3d4e5f6"


def test_with_restart_a_run_is_resumed_as_often_as_the_budget_says(launch: Launch) -> None:
    code, out, err = launch.start("--restart", "--restart-budget", "1/600", actor="sleep=0.3 exit=3").end()
    assert code == 1 and launch.nothing_is_left()
    assert err.count("actor ended with exit code 3; the run is resumed") == 1
    assert "has no complete checkpoint: the run begins anew at batch 0 (lineage 1)" in err
    assert "failed: actor ended with exit code 3" in err and launch.run.lineage == 1
    code, out, err = launch.start("--restart", "--resume", str(launch.run.path), **all_done()).end()
    assert code == 0 and "resume: " in out and "(lineage 2)" in out, err


def test_a_resume_waits_for_a_service_that_was_started_by_hand(launch: Launch) -> None:
    here = launch.folder / "runs" / "t-1"
    member = f"""
import time
from pathlib import Path
from relax.launch.rundir import RunDir
here = Path({str(here)!r})
while not (here / "runtime.json").exists():
    time.sleep(0.02)
run = RunDir.create_or_join(here, config=(here / "config.yaml").read_text())
(here / "joined").touch()
while not (here / "actor.once").exists():
    time.sleep(0.02)
time.sleep(2.0)
"""
    by_hand = subprocess.Popen([sys.executable, "-c", member])
    actor, controller = f"until={here / 'joined'} once exit=3 exit=0", "once sleep=600 exit=0"
    code, _, err = launch.start("--restart", actor=actor, controller=controller).end()
    assert by_hand.wait(PATIENCE) == 0 and code == 0, err
    assert "waiting for services that were started by hand to end, at most 75 s" in err, err
    assert launch.run.lineage == 1 and launch.nothing_is_left(), err


def test_a_service_that_was_refused_is_not_started_again(launch: Launch) -> None:
    code, _, err = launch.start(rollout_0="exit=2").end()
    assert code == 1 and "failed: rollout-0 ended with exit code 2: it was refused, or told" in err, err
    assert "it is started again" not in err and launch.nothing_is_left()


def test_a_node_that_joins_brings_its_own_topology_and_only_once(launch: Launch) -> None:
    """On the controller's host, in its directory, which holds a ledger by then."""
    nodes = {name: {"address": f"10.0.0.{n}"} for n, name in enumerate(("left", "right"))}
    launch.services = {role: {"node": "right" if role == "rollout" else "left"} for role in ROLES}
    here = launch.folder / "runs" / "t-1"
    with controller_of("a1b2c3d4e5f6") as endpoint:
        named = f"tcp://{socket.gethostname()}:{endpoint.rpartition(':')[2]}"
        launch.top = {"nodes": nodes, "controller": named, "options": {"insecure": True}}
        run = RunDir.join(here, Welcome("a1b2c3d4e5f6", 0, 0), name="t", directory=launch.folder, topology="older")
        run.ledger.touch()
        flags = ("--node", "right", "--run-dir", str(here))
        launch.start(*flags)
        launch.wait_for(lambda: bool(service_commands(here)), "its service")
        other = Launch(launch.folder)
        other.services, other.top = launch.services, launch.top
        code, _, err = other.start(*flags).end()
        assert code == 2 and "--node = 'right'" in err and "its services run here already (pid " in err, err
        (words,) = service_commands(here)
        assert run.topology.read_text() == "older"
        given = here / "topology.right.yaml"
        assert str(given) in words and given.read_text() == (launch.folder / "topology.yaml").read_text()
        launch.send(signal.SIGTERM)
        assert launch.end()[0] == 143
    run.leave()
    assert launch.nothing_is_left()


def service_commands(directory: Path) -> list[list[str]]:
    """Command lines of the live services of the run there."""
    return [words for _, words in commands() if str(directory) in words and "--name" in words]


def test_a_signal_ends_the_wait_for_a_controller(launch: Launch) -> None:
    launch.services = {role: {"node": "right" if role == "rollout" else "left"} for role in ROLES}
    nodes = {name: {"address": f"10.0.0.{n}"} for n, name in enumerate(("left", "right"))}
    launch.top = {"nodes": nodes, "controller": f"tcp://{socket.gethostname()}:9", "options": {"insecure": True}}
    launch.start("--node", "right", "--run-dir", str(launch.folder / "runs" / "t-1"))
    assert launch.process is not None and launch.process.stdout is not None
    assert launch.process.stdout.readline().startswith("waiting for the controller at")
    launch.send(signal.SIGTERM)
    code, _, err = launch.end()
    assert code == 143 and "stopped by SIGTERM; nothing was started" in err and "Traceback" not in err
    assert not (launch.folder / "runs" / "t-1").exists()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--restart", "--no-save"), "--no-save leaves nothing to go on from"),
        (("--restart", "--restart-budget", "0/600"), "--restart-budget 0/600 allows no restart"),
        (("--no-load-optim",), "without --resume or --load no checkpoint is loaded"),
        (("--resume", "/elsewhere", "--run-dir", "here"), "is another directory than --run-dir here"),
        (("--resume", "/elsewhere"), "is no run directory"),
        (("--resume",), "names no run"),
    ],
)
def test_options_of_a_resume_that_cannot_act_are_refused(launch: Launch, flags: tuple[str, ...], problem: str) -> None:
    code, _, err = launch.start(*flags).end()
    assert code == 2 and problem in err and "Nothing was started." in err


@contextlib.contextmanager
def controller_of(run_id: str) -> Iterator[str]:
    """The endpoint of a mailbox that knows its run, as a controller on another host would be."""
    ready: queue.Queue[str] = queue.Queue(1)
    loop = asyncio.new_event_loop()

    async def welcome(message: Hello, sender: object) -> Welcome:
        return Welcome(run_id, 0, 0)

    async def serve() -> None:
        bind = f"tcp://{socket.gethostbyname(socket.gethostname())}:0"
        security = Security(insecure=True)
        async with Mailbox(
            "controller", run_id=run_id, lineage=0, incarnation="1", bind=bind, security=security
        ) as mailbox:
            mailbox.on(Hello, welcome, strangers=True)
            ready.put(mailbox.endpoint)
            await ended.wait()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield ready.get(timeout=10)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()


def test_two_runs_on_one_host_do_not_disturb_each_other(launch: Launch, tmp_path: Path) -> None:
    launch.start()
    launch.wait_until_all_run()
    other = Launch(tmp_path)
    assert other.start(controller="exit=0", **all_done("controller")).end()[0] == 0
    assert (tmp_path / "runs" / "t-2").is_dir()
    assert len(processes_of(launch.run.run_id)) == len(ROLES)
    launch.send(signal.SIGINT)
    assert launch.end()[0] == 130


def test_a_dry_run_shows_options_and_plan_and_starts_nothing(launch: Launch) -> None:
    code, out, _ = launch.start("--dry-run", "--seed", "7").end()
    assert code == 0 and not (launch.folder / "runs").exists()
    assert any(line.split() == ["--seed", "7", "flag"] for line in out.splitlines())
    assert "rollout-0" in out and "engine vllm" in out and "Nothing was started" in out


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_refused_run_starts_nothing_and_ends_with_2(launch: Launch, dry: list[str]) -> None:
    launch.services["rolloutt"] = {}
    code, out, err = launch.start(*dry, "--global-batch-sise", "3", "--max-staleness", "1", "--node", "x").end()
    assert code == 2 and out == "" and not (launch.folder / "runs").exists()
    assert "refused, for 4 reasons" in err
    for words in (
        "services.rolloutt",
        "--global-batch-sise",
        "Did you mean --global-batch-size?",
        "--use-tis",
        "--node",
    ):
        assert words in err


@pytest.mark.parametrize("remains", ["ledger.sqlite", "metrics.jsonl"])
def test_a_directory_of_an_earlier_run_is_refused(launch: Launch, tmp_path: Path, remains: str) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / remains).touch()
    for dry in (["--dry-run"], []):
        code, _, err = launch.start("--run-dir", str(tmp_path / "old"), *dry).end()
        assert code == 2 and f"it holds the {remains} of an earlier run" in err
    assert [entry.name for entry in (tmp_path / "old").iterdir()] == [remains]


def test_a_run_directory_that_cannot_be_made_is_refused(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("/proc/nope", str(tmp_path / "file"), str(tmp_path / ("x" * 300))):
        for dry in (["--dry-run"], []):
            code, out, err = launch.start("--run-dir", path, *dry).end()
            assert code == 2 and not out and f"--run-dir = '{path}' (from flag)" in err and "Traceback" not in err
    launch.top = {"run": {"name": "t", "directory": str(tmp_path / "file")}}
    code, out, err = launch.start("--dry-run").end()
    assert code == 2 and not out and f"run.directory = '{tmp_path / 'file'}'" in err and "is no directory" in err


def test_progress_counts_the_batches_that_the_prompts_are_enough_for(launch: Launch) -> None:
    launch.top = {"options": {"prompt_data": "reasoning_gym:spell_backward?size=12", "num_epoch": 1, "num_rollout": 10}}
    code, out, _ = launch.start(controller="join rows=3 sleep=0.5 exit=0", **all_done("controller")).end()
    assert code == 0 and "batch 3/3" in out
