"""Real processes around a simulated engine, killed one after the other, over a transport that loses, doubles and
delays: the run finishes, and ledger, services and the actor's log agree on what became of every group."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "end_to_end"))

import tiny_run
from inventory import Book, Observer, endpoint, records, trained_by_the_actor

from relax.ledger import queries
from relax.services.service import FAULTS

STALENESS, BATCH, SAMPLES = 2, 16, 1
SERVICES = ("controller", "rollout-0", "rollout-1", "rollout-2", "reward-0", "reward-1", "advantages", "actor")
# A third each of one message in a hundred.
TROUBLE = "drop=0.0033,duplicate=0.0033,delay=0.0034,delay_s=0.3"
PEER_TIMEOUT = 8.0
# Of each service's log, where a test fails.
LOG_LINES = 25
OPTIONS: dict[str, Any] = {
    "services": {
        "rollout": {"engine": "simulated", "replicas": 3},
        "reward": {"replicas": 2},
        "actor": {"engine": "simulated"},
    },
    "rm_type": None,
    "custom_rm_path": "relax.simulation.reward:coin",
    "lr": None,
    "max_staleness": STALENESS,
    "rollout_batch_size": BATCH,
    "n_samples_per_prompt": SAMPLES,
    "rollout_max_response_len": 500,
    "sim_length": "pareto:20,1.5",
    "sim_tokens_per_second": "1000,700,500",
    "sim_slots": 8,
    "sim_train_seconds": 1.0,
    "sim_publish_seconds": 0.02,
    "peer_timeout": PEER_TIMEOUT,
    "restart_budget": "99/600",
}


class Chaos:
    """A run in progress and what is done to it."""

    def __init__(self, folder: Path, batches: int, seed: int) -> None:
        topology, self.directory = tiny_run.write_topology(folder, num_rollout=batches, **OPTIONS), folder / "run"
        self.output, self.batches = folder / "output", batches
        command = [sys.executable, tiny_run.ROOT / "bin" / "relax-launch", topology, "--run-dir", self.directory]
        environment = os.environ | {FAULTS: f"seed={seed},{TROUBLE}"}
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=environment)
        self.kills = 0

    def trained(self) -> int:
        return len(trained_by_the_actor(self.directory)) // BATCH

    def wait(self, condition: Callable[[], Any], what: str, patience: float = 120.0) -> None:
        end = time.monotonic() + patience
        while not condition():
            assert self.process.poll() is None, f"the run ended while {what} was waited for"
            assert time.monotonic() < end, f"waited {patience} s for {what}"
            time.sleep(0.05)

    def story(self) -> str:
        """What can be told of the run when its directory is gone: its output, how it stands, the end of every log."""
        look = [sys.executable, tiny_run.ROOT / "bin" / "relax-status", self.directory]
        status = subprocess.run(look, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        parts = {"output": self.output.read_text(), "relax-status": status.stdout}
        for path in sorted(self.directory.glob("logs/*")):
            parts[path.name] = "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:])
        return "\n".join(f"--- {name}\n{text}" for name, text in parts.items())

    def wait_for_batches(self, count: int) -> None:
        self.wait(lambda: self.trained() >= count, f"{count} batches", 240.0)

    def lives(self, service: str) -> int:
        return sum(record["event"] == "service_ready" for record in records(self.directory, service))

    def all_are_there(self) -> bool:
        return all(endpoint(self.directory, name) and self.pid(name) for name in SERVICES)

    def pid(self, service: str) -> int | None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_text().split("\0")
                    named = words[words.index("--name") + 1] if "--name" in words else ""
                    if named == service and str(self.directory) in words:
                        return int(entry.name)
        return None

    def strike(self, service: str, kind: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a live service; its pid."""
        self.wait(lambda: self.pid(service) is not None, f"{service} to be there")
        pid = self.pid(service)
        assert pid is not None
        os.kill(pid, kind)
        self.kills += 1
        return pid

    def kill_and_see_it_again(self, service: str) -> None:
        lives = self.lives(service)
        self.strike(service)
        self.wait(lambda: self.lives(service) > lives, f"the next life of {service}")

    def stop_for_too_long(self, service: str) -> None:
        """Asleep past the deadline: another life takes its place, and the old one, should it wake up, is nobody."""
        lives = self.lives(service)
        pid = self.strike(service, signal.SIGSTOP)
        self.wait(lambda: self.lives(service) > lives, f"the next life of {service}", PEER_TIMEOUT + 90)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def look(self) -> None:
        """Ledger, services and the actor's log agree now."""

        async def check() -> None:
            async with Observer(self.directory, SERVICES) as observer:
                await observer.check()

        self.wait(self.all_are_there, "all services")
        asyncio.run(asyncio.wait_for(check(), 120.0))

    def end(self, patience: float) -> None:
        code = self.process.wait(patience)
        assert code == 0
        book, trained = Book.read(self.directory / "ledger.sqlite"), trained_by_the_actor(self.directory)
        assert book.balance.holds and book.balance.trained == self.batches * BATCH
        assert {group for group, _ in book.of("trained")} == set(trained)
        assert set(trained.values()) == {1}, "no group is trained twice"
        with closing(queries.read(self.directory / "ledger.sqlite")) as ledger:
            (stale,) = ledger.execute("SELECT max(batch - oldest) FROM groups WHERE state = 'trained'").fetchone()
            (attempts,) = ledger.execute("SELECT max(attempt) FROM groups").fetchone()
            lost = dict(ledger.execute("SELECT event, count(*) FROM events GROUP BY event").fetchall())
        assert stale <= STALENESS
        assert attempts == 0, "a death costs no attempt"
        assert lost.get("lost", 0) + lost.get("parked", 0) > 0, "something had to come again"
        rows = tiny_run.Run(self.directory, code, "").rows
        assert [row["batch"] for row in rows] == list(range(self.batches))
        assert rows[-1]["pipeline/restarts"] >= self.kills


@contextlib.contextmanager
def chaos(folder: Path, batches: int, seed: int) -> Iterator[Chaos]:
    it = Chaos(folder, batches, seed)
    try:
        yield it
    except BaseException as error:
        error.add_note(it.story())
        raise
    finally:
        if it.process.poll() is None:
            it.process.terminate()
        it.process.wait(60)


def test_replicas_die_one_after_the_other_and_the_run_goes_on(tmp_path: Path) -> None:
    with chaos(tmp_path, batches=40, seed=1) as it:
        it.wait_for_batches(2)
        it.kill_and_see_it_again("rollout-0")
        it.kill_and_see_it_again("reward-1")
        it.kill_and_see_it_again("advantages")
        it.look()
        it.stop_for_too_long("rollout-1")
        it.look()
        it.end(patience=200)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [1, 2])
def test_thirty_deaths_in_two_hundred_batches(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    victims = [name for name in SERVICES if name not in ("controller", "actor")]
    with chaos(tmp_path, batches=200, seed=seed) as it:
        it.wait_for_batches(2)
        while it.kills < 30:
            before = it.trained()
            if it.kills == 15:
                it.stop_for_too_long(dice.choice(victims))
            else:
                it.strike(dice.choice(victims))
            if it.kills % 10 == 0:
                it.wait_for_batches(before + 2)
                it.look()
            time.sleep(dice.uniform(1.0, 4.0))
        it.end(patience=600)
