"""Invariant 1 seen from outside: the ledger on disk against what the services say and what the actor's log says.

A look has four parts, in this order: the ledger (before), the answers of all services in the order of the stages, the
actor's log, the ledger again (after). Messages are on their way at every moment, so a look is judged by what holds
whatever is on its way:

- a draw that is with the services in both ledgers, under one fence, is named by one of them: else it is lost;
- a draw that a service names is in the later ledger, and had not ended in the earlier one: else it is a leak;
- what was trained in the earlier ledger is in the actor's log, and what is in the log is not dropped in the later
  ledger nor unknown to it;
- in each ledger issued = trained + dropped + in flight.

Only two things can break these rules for a moment, an order or a release that is not there yet. So a look that finds
something is repeated for a few seconds; what is still found then is no message on its way.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax.ledger import queries
from relax.protocol.hello import ask_run
from relax.protocol.mailbox import Mailbox
from relax.protocol.messages import Holdings, Inventory
from relax.protocol.security import Security

STAGES = ("rollout", "reward", "advantages", "critic", "actor")
SERVED = ("issued", "sampled", "scored", "ready", "committed")
PATIENCE = 60.0

Draw = tuple[int, int]  # group and fence


@dataclass
class Book:
    """One reading of the ledger."""

    states: dict[Draw, str] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)  # group -> its last fence
    balance: Any = None

    @classmethod
    def read(cls, path: Path) -> "Book":
        book = cls()
        with closing(queries.read(path)) as ledger:
            ledger.execute("BEGIN")  # both questions see one moment
            rows = ledger.execute(
                "SELECT group_id, fence, state FROM groups WHERE first_issued_at IS NOT NULL"
            ).fetchall()
            book.balance = queries.conservation(ledger)
        for group, fence, state in rows:
            book.states[group, fence] = state
            book.newest[group] = max(fence, book.newest.get(group, fence))
        return book

    def of(self, *states: str) -> set[Draw]:
        return {draw for draw, state in self.states.items() if state in states}


@dataclass(frozen=True)
class Look:
    before: Book
    named: dict[str, set[Draw]]  # service -> draws
    trained: dict[int, int]  # group -> how often the actor's log has it
    after: Book

    def faults(self) -> Iterator[str]:
        named = set().union(*self.named.values())
        for draw in sorted(self.before.of(*SERVED) & self.after.of(*SERVED) - named):
            yield f"lost: {draw} is {self.before.states[draw]}, then {self.after.states[draw]}, and nobody works on it"
        for service, draws in self.named.items():
            for group, fence in sorted(draws):
                if fence > self.after.newest.get(group, -1):
                    yield f"unknown: {service} works on {group}.{fence}, which the ledger never issued"
                elif self.before.states.get((group, fence)) in ("trained", "dropped"):
                    yield f"leak: {service} works on {group}.{fence}, {self.before.states[group, fence]} already"
        known = {group: state for (group, _), state in self.after.states.items()}
        for group, times in self.trained.items():
            if times > 1:
                yield f"trained twice: group {group} is {times} times in the actor's log"
            if known.get(group, "unknown") in ("unknown", "dropped"):
                yield f"trained and {known.get(group, 'unknown')}: group {group}"
        for group, _ in sorted(self.before.of("trained")):
            if group not in self.trained:
                yield f"never trained: group {group} is trained by the ledger and not in the actor's log"
        for book in (self.before, self.after):
            if not book.balance.holds:
                yield f"unbalanced: {book.balance}"


class Observer:
    """Looks at a run from outside of it. `services` must be ready (`endpoint`); the controller is one of them."""

    def __init__(self, directory: Path, services: Sequence[str]) -> None:
        self.directory, self._services = directory, services

    async def __aenter__(self) -> "Observer":
        endpoints = {name: endpoint(self.directory, name) for name in self._services}
        life = await ask_run(endpoints.pop("controller"), 30.0, Security())
        # In the order of the stages, so that a draw that moves on while we ask is met by a later question.
        self._ask = sorted(endpoints.items(), key=lambda e: STAGES.index(e[0].split("-")[0]))
        token = secrets.token_hex(4)
        self._mailbox = Mailbox(
            f"observer-{token}",
            run_id=life.run_id,
            lineage=life.lineage,
            incarnation=token,
            bind=f"inproc://observer-{token}",
        )
        await self._mailbox.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._mailbox.abort()

    async def look(self) -> Look:
        ledger = self.directory / "ledger.sqlite"
        before = Book.read(ledger)
        await asyncio.sleep(0.1)
        named = {}
        for name, endpoint in self._ask:
            holdings = await self._mailbox.ask(endpoint, Inventory(), 10.0)
            assert isinstance(holdings, Holdings)
            named[name] = {(lease.group, lease.fence) for lease in holdings.leases}
        return Look(before, named, trained_by_the_actor(self.directory), Book.read(ledger))

    async def check(self) -> Look:
        """A look without a fault. Raises AssertionError with what is still wrong after `PATIENCE` seconds."""
        end = time.monotonic() + PATIENCE
        while True:
            look = await self.look()
            faults = list(look.faults())
            if not faults:
                return look
            assert time.monotonic() < end, "\n".join(faults[:20])


def endpoint(directory: Path, service: str) -> str:
    """Where the present life of a service listens; empty while none was ready."""
    ready = [r["endpoint"] for r in records(directory, service) if r["event"] == "service_ready"]
    return ready[-1] if ready else ""


def trained_by_the_actor(directory: Path) -> dict[int, int]:
    """Group -> how many of the actor's `batch_trained` records name it."""
    times: dict[int, int] = {}
    for record in records(directory, "actor"):
        if record["event"] == "batch_trained":
            for group in record["groups"]:
                times[group] = times.get(group, 0) + 1
    return times


def records(directory: Path, service: str) -> Iterator[dict[str, Any]]:
    """The log of a service, without a line that is being written."""
    path = directory / "logs" / f"{service}.jsonl"
    text = path.read_text() if path.exists() else ""
    return map(json.loads, text[: text.rfind("\n") + 1].splitlines())
