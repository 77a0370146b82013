"""A run to which things are done: services are killed and stopped, messages are lost, doubled and delayed; and what
must hold of it at any moment and at its end."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "end_to_end"))

import tiny_run
from inventory import Book, Observer, records, trained_by_the_actor
from killing import START, Life

from relax.ledger import queries
from relax.services.service import FAULTS

# A third each of one message in a hundred.
TROUBLE = "drop=0.0033,duplicate=0.0033,delay=0.0034,delay_s=0.3"
# Of each service's log, where a test fails.
LOG_LINES = 25
# So often is a run of many processes looked at.
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Setting:
    """What is run: options of the topology file, replicas of the roles that have them, the engine of rollout and actor
    where it is not the usual one."""

    options: dict[str, Any]
    rollouts: int = 1
    rewards: int = 1
    engine: str | None = None

    @property
    def services(self) -> list[str]:
        replicas = [f"rollout-{n}" for n in range(self.rollouts)] + [f"reward-{n}" for n in range(self.rewards)]
        return ["controller", *replicas, "advantages", "actor"]

    def write(self, folder: Path, batches: int) -> None:
        """Its topology file."""
        engine = {"engine": self.engine} if self.engine else {}
        services = {
            "rollout": {"replicas": self.rollouts, **engine},
            "reward": {"replicas": self.rewards},
            "actor": engine,
        }
        tiny_run.write_topology(folder, services=services, num_rollout=batches, **self.options)


class Chaos(Life):
    """A run in progress and what is done to it."""

    def __init__(self, folder: Path, setting: Setting, batches: int, seed: int) -> None:
        setting.write(folder, batches)
        super().__init__(folder, environment=os.environ | {FAULTS: f"seed={seed},{TROUBLE}"})
        self.setting, self.batches = setting, batches
        self.kills, self.seen_again = 0, 0

    def wait(self, condition: Callable[[], Any], what: str, patience: float = 120.0) -> None:
        assert self.until(condition, patience, LOOK_SECONDS), f"the run ended while {what} was waited for"

    def story(self) -> str:
        """What can be told of the run when its directory is gone: its output, how it stands, the end of every log."""
        look = [sys.executable, tiny_run.ROOT / "bin" / "relax-status", self.directory]
        status = subprocess.run(look, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        parts = {"output": self.output, "relax-status": status.stdout}
        for path in sorted(self.directory.glob("logs/*")):
            parts[path.name] = "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:])
        return "\n".join(f"--- {name}\n{text}" for name, text in parts.items())

    def wait_for_batches(self, count: int) -> None:
        self.wait(lambda: self.trained() >= count, f"{count} batches", 240.0)

    def lives(self, service: str) -> list[int]:
        """The pids of those that became ready, the newest last."""
        return [r["pid"] for r in records(self.directory, service) if r["event"] == "service_ready"]

    def all_are_there(self) -> bool:
        """The newest life that became ready is the one that is alive."""
        return all((lives := self.lives(name)) and lives[-1] == self.pid(name) for name in self.setting.services)

    def strike(self, service: str, kind: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a live service; its pid."""
        self.wait(lambda: self.pid(service) is not None, f"{service} to be there")
        pid = self.pid(service)
        assert pid is not None
        os.kill(pid, kind)
        self.kills += 1
        return pid

    def kill_and_see_it_again(self, service: str) -> None:
        known = len(self.lives(service))
        self.strike(service)
        self.wait(lambda: len(self.lives(service)) > known, f"the next life of {service}", START)
        self.seen_again += 1

    def stop_for_too_long(self, service: str) -> None:
        """Asleep past the deadline: another life takes its place, and the old one, should it wake up, is nobody."""
        known = len(self.lives(service))
        pid = self.strike(service, signal.SIGSTOP)
        self.wait(
            lambda: len(self.lives(service)) > known,
            f"the next life of {service}",
            self.setting.options["peer_timeout"] + 90,
        )
        self.seen_again += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def look(self) -> None:
        """Ledger, services and the actor's log agree now."""

        async def check() -> None:
            async with Observer(self.directory, self.setting.services) as observer:
                await observer.check()

        self.wait(self.all_are_there, "all services")
        asyncio.run(asyncio.wait_for(check(), 120.0))

    def finish(self, patience: float) -> None:
        assert self.process.wait(patience) == 0
        book, trained = Book.read(self.directory / "ledger.sqlite"), trained_by_the_actor(self.directory)
        assert book.balance.holds and book.balance.trained == self.batches * self.setting.options["rollout_batch_size"]
        assert {group for group, _ in book.of("trained")} == set(trained)
        assert set(trained.values()) == {1}, "no group is trained twice"
        with closing(queries.read(self.directory / "ledger.sqlite")) as ledger:
            (stale,) = ledger.execute("SELECT max(batch - oldest) FROM groups WHERE state = 'trained'").fetchone()
            (attempts,) = ledger.execute("SELECT max(attempt) FROM groups").fetchone()
            lost = dict(ledger.execute("SELECT event, count(*) FROM events GROUP BY event").fetchall())
        assert stale <= self.setting.options["max_staleness"]
        assert attempts == 0, "a death costs no attempt"
        assert lost.get("lost", 0) + lost.get("parked", 0) > 0, "something had to come again"
        rows = tiny_run.Run(self.directory, 0, "").rows
        assert [row["batch"] for row in rows] == list(range(self.batches))
        # A life that was killed before it had joined the run is no restart of it.
        assert rows[-1]["pipeline/restarts"] >= self.seen_again


@contextlib.contextmanager
def chaos(folder: Path, setting: Setting, batches: int, seed: int) -> Iterator[Chaos]:
    it = Chaos(folder, setting, batches, seed)
    try:
        yield it
    except BaseException as error:
        error.add_note(it.story())
        raise
    finally:
        if it.process.poll() is None:
            it.process.terminate()
        it.process.wait(60)
