"""All stages of a run but the controller, played in one process. They answer at once: the controller is the limit.

Real registration, heartbeats, mailboxes and messages; what they say of a group is what the real stages say of it.
"""

import asyncio
import logging
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import structlog
import uvloop
import yaml

from relax.config.flags import Parser
from relax.config.resolve import Resolved, load
from relax.protocol.messages import (
    Announce,
    Assemble,
    Assembled,
    Finish,
    Finished,
    Generate,
    Published,
    Ready,
    Release,
    RewardDone,
    Sampled,
    Serving,
    Started,
    Trained,
)
from relax.protocol.payload import Payload
from relax.services.join import join_run
from relax.services.service import Service
from relax.weights.manifest import Manifest, WeightTag, set_digest

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 50
PATIENCE = 300.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the groups of one run, from the first issue to the last trained batch: `cpu_seconds` is what the controller's
    process took (its loop, the ledger's writer, the reader of prompts)."""

    groups: int
    seconds: float
    cpu_seconds: float


class Played(Service):
    """What the played stages share: who they are by role, and the times."""

    stages: "Stages"

    async def nothing(self, message: Any, sender: Any) -> None:
        pass


class Rollout(Played):
    role = "rollout"

    def handlers(self) -> dict[type, Any]:
        return {Generate: self.generate, Announce: self.announce, Release: self.nothing}

    async def announce(self, message: Announce, sender: Any) -> None:
        self.version = message.version
        self.report(Serving(message.version, self.options.rollout_batch_size, ()))

    async def generate(self, message: Generate, sender: Any) -> None:
        self.stages.begin()
        for order in message.orders:
            reward, advantages = self.stages.reward, self.stages.advantages
            kept = Payload(f"group {order.lease.group}", {}, None, self.mailbox.endpoint)
            self.report(Sampled(order.lease, self.version, TOKENS, kept, reward.incarnation))
            reward.report(RewardDone(order.lease, advantages.incarnation))
            advantages.report(Ready(order.lease, self.version, TOKENS))


class Reward(Played):
    role = "reward"

    def handlers(self) -> dict[type, Any]:
        return {}


class Advantages(Played):
    role = "advantages"

    def handlers(self) -> dict[type, Any]:
        return {Assemble: self.assemble, Release: self.nothing}

    async def assemble(self, message: Assemble, sender: Any) -> None:
        self.report(Assembled(message.batch, {}))
        self.stages.actor.train(message)


class Actor(Played):
    role = "actor"

    def handlers(self) -> dict[type, Any]:
        return {Finish: self.finish}

    async def prepare(self) -> None:
        self.publish(0)

    def train(self, message: Assemble) -> None:
        batch = message.batch
        self.report(Started(batch, message.commit))
        self.report(Trained(batch, {}))
        self.version = batch + 1
        self.publish(batch + 1)

    def publish(self, version: int) -> None:
        tag = WeightTag(self.run.run_id, self.lineage, version, version, set_digest(()), 0, time.time())
        self.report(Published(version, Manifest(tag, ()).to_json()))

    async def finish(self, message: Finish, sender: Any) -> Finished:
        self.stages.end()
        return Finished(self.version, "")


class Stages:
    """The played stages of one run, and what its controller took meanwhile."""

    def __init__(self, resolved: Resolved, controller: psutil.Process) -> None:
        assert resolved.topology is not None
        self._controller = controller
        self._began = self._ended = (0.0, 0.0)
        self.all: list[Played] = []
        for kind in (Rollout, Reward, Advantages, Actor):
            for entry in resolved.topology.role(kind.role):
                played = kind(join_run(resolved, entry))
                played.stages = self
                self.all.append(played)
        self.reward, self.advantages, self.actor = self.all[-3:]

    def begin(self) -> None:
        if self._began == (0.0, 0.0):
            self._began = self._now()

    def end(self) -> None:
        self._ended = self._now()

    def _now(self) -> tuple[float, float]:
        taken = self._controller.cpu_times()
        return time.perf_counter(), taken.user + taken.system

    @property
    def cost(self) -> tuple[float, float]:
        """Seconds, and CPU seconds of the controller."""
        return self._ended[0] - self._began[0], self._ended[1] - self._began[1]


def controller_cost(directory: Path, batches: int, groups: int, replicas: int) -> Cost:
    """Runs a real controller to its end against played stages, in a new directory; RuntimeError when it fails."""
    directory.mkdir()
    topology, run = directory / "topology.yaml", directory / "run"
    options = {
        "hf_checkpoint": str(ROOT / "topologies" / "tiny"),
        "prompt_data": "reasoning_gym:spell_backward",
        "custom_rm_path": "relax.simulation.reward:coin",
        "num_rollout": batches,
        "rollout_batch_size": groups,
        "n_samples_per_prompt": 1,
        "rollout_max_prompt_len": 256,
        "rollout_max_response_len": 4096,
        "max_staleness": 2,
    }
    services = {
        "controller": {},
        "rollout": {"replicas": replicas, "engine": "simulated"},
        "reward": {},
        "advantages": {},
        "actor": {"engine": "simulated"},
    }
    topology.write_text(yaml.safe_dump({"services": services, "options": options}))
    service = ["-m", "relax.services.cli", "controller", "--topology", str(topology), "--run-dir", str(run)]
    output = directory / "output"
    with output.open("wb") as file:
        controller = subprocess.Popen([sys.executable, *service], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        command = [sys.executable, __file__, str(topology), str(run), str(controller.pid)]
        played = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
        code = controller.wait(60)
    finally:
        controller.kill()
        controller.wait()
    if code or played.returncode:
        told = output.read_text()[-2000:]
        raise RuntimeError(f"the controller ended with {code}, the stages with {played.returncode}: {told}")
    return Cost(batches * groups, *map(float, played.stdout.split()))


async def play(topology: Path, run: Path, controller: int) -> int:
    """The other process: every stage, until the controller sends them home."""
    resolved = load(Parser("stages", "Played stages.").parse(["--run-dir", str(run)]), topology)
    stages = Stages(resolved, psutil.Process(controller))
    codes = await asyncio.gather(*(played.main() for played in stages.all))
    print(*stages.cost, flush=True)
    return max(codes)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    sys.exit(uvloop.run(play(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
