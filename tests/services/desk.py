"""A controller without a process: real gate, book, ledger and turns; what it would send is kept in a list."""

import time
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from relax.config.options import Options
from relax.data import Prompt
from relax.ledger.store import Ledger
from relax.protocol.messages import (
    Announce,
    Assemble,
    Generate,
    GroupOrder,
    Lease,
    Member,
    Published,
    Ready,
    Register,
    Release,
    Sampled,
    Serving,
    Started,
    Trained,
)
from relax.protocol.payload import Payload
from relax.services.controller import Controller
from relax.services.service import Context, shared_options
from relax.weights.manifest import Manifest, WeightTag, set_digest


class Prompts:
    """A stream of `count` prompts."""

    def __init__(self, count: int) -> None:
        self._ready = deque(Prompt(i, 0, i, f"prompt {i}", np.array([i], np.int32), b"{}") for i in range(count))

    @property
    def ended(self) -> bool:
        return not self._ready

    def take(self) -> Prompt | None:
        return self._ready.popleft() if self._ready else None


class Desk(Controller):
    """`now` is the time of its turns, in seconds."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.sent: list[tuple[str, Any]] = []
        self.spawned: list[str] = []
        self.now = 0.0

    def send(self, endpoint: str, message: Any) -> None:
        self.sent.append((endpoint, message))

    def spawn(self, work: Any, name: str) -> Any:
        work.close()
        self.spawned.append(name)

    def _forget(self, endpoint: str) -> None:
        """There is no mailbox."""

    def turn(self, after: float = 0.0) -> None:
        self.now += after
        self._turn(self.now)

    def take(self, kind: type) -> list[tuple[str, Any]]:
        """What was sent of this kind since it was last asked for, as (endpoint, message)."""
        taken = [(to, m) for to, m in self.sent if isinstance(m, kind)]
        self.sent = [(to, m) for to, m in self.sent if not isinstance(m, kind)]
        return taken

    def orders(self) -> list[GroupOrder]:
        """What was issued since it was last asked for."""
        return [order for _, message in self.take(Generate) for order in message.orders]

    def released(self, role: str = "rollout") -> list[Lease]:
        """The leases whose tensors the rollout replicas (or the members of another role) were told to let go."""
        leases = [(to, lease) for to, message in self.take(Release) for lease in message.leases]
        return [lease for to, lease in leases if to.startswith(f"inproc://{role}")]

    # --- what others report ------------------------------------------------------------------------------------------

    def register(self, name: str, role: str, life: int = 1) -> Member:
        member = Member(name, role, f"inproc://{name}" if life == 1 else f"inproc://{name}.{life}", f"{name}.{life}")
        self.registry.register(Register(member, "", 1, shared_options(self.options)), time.monotonic())
        self.learn(self.registry.members())
        if role == "rollout":
            self.weights.announce(self.replicas.joined(member))
        return member

    def serves(self, name: str, version: int, credit: int = 100, running: tuple[Lease, ...] = ()) -> None:
        self.weights.serving(Serving(version, credit, running), sender(name))

    def serves_again(self, name: str, life: int, version: int = 0) -> None:
        self.weights.serving(Serving(version, 100, ()), sender(name, life))

    def published(self, version: int) -> None:
        tag = WeightTag("r", 0, version, version, set_digest(()), 0, 0.0)
        self.weights.published(Published(version, Manifest(tag, ()).to_json()), sender("actor-0"))

    def sampled(self, lease: Lease, oldest: int = 0, tokens: int = 5) -> None:
        holder = self.book[lease.group].holder
        kept = Payload(f"group {lease.group}.{lease.fence}", {}, None, f"inproc://{holder}")
        # Incarnations are those of `register`.
        reward = next((m.incarnation for m in self.of_role("reward")), "")
        self.groups.sampled(Sampled(lease, oldest, tokens, kept, reward), sender(holder or ""))

    def ready(self, lease: Lease, oldest: int = 0, tokens: int = 5) -> None:
        self.sampled(lease, oldest, tokens)
        self.groups.ready(Ready(lease, oldest, tokens), sender("advantages-0"))

    def started(self, batch: int) -> None:
        self.batches.started(Started(batch, self.batches._commits[batch]), sender("actor-0"))

    def trained(self, batch: int, name: str = "actor-0") -> None:
        self.batches.trained(Trained(batch, {}), sender(name))

    def committed(self) -> list[Assemble]:
        return [message for _, message in self.take(Assemble)]

    def announced(self) -> list[tuple[str, int]]:
        return [(to, message.version) for to, message in self.take(Announce)]


def sender(name: str, life: int = 1) -> Any:
    return SimpleNamespace(name=name, incarnation=f"{name}.{life}")


def desk(tmp_path: Path, *, prompts: int = 1000, rollouts: int = 1, **options: Any) -> Desk:
    """A controller with one member of every role that it needs; version 0 is published and served."""
    chosen = Options(**({"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 9} | options))
    files = {"metrics": "metrics.jsonl", "ledger": "ledger.sqlite", "status": "status.json"}
    run: Any = SimpleNamespace(run_id="r", **{name: tmp_path / file for name, file in files.items()})
    it = Desk(Context("controller", chosen, run, "", "", None, chosen))
    it.ledger = Ledger(run.ledger)
    weakref.finalize(it, it.ledger.close)
    it.draws.begin(Prompts(prompts))
    for role in it.registry._needed:
        for i in range(rollouts if role == "rollout" else 1):
            it.register(f"{role}-{i}", role)
    it.published(0)
    for replica in it.replicas:
        it.serves(replica.member.name, 0)
    return it
