"""A replica's surroundings: one mailbox is controller and reward service at once and writes down what it is told."""

import asyncio
import dataclasses
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import numpy as np
import pytest
from conftest import Rig, prompt

from relax.config.options import Options
from relax.engines.base import Engine, Request, Result
from relax.protocol.mailbox import Mailbox
from relax.protocol.messages import (
    Announce,
    Generate,
    GroupOrder,
    HandedBack,
    Heartbeat,
    HeartbeatReceived,
    Lease,
    Leaving,
    Member,
    Members,
    Register,
    Registered,
    Rejected,
    Release,
    Sampled,
    Score,
    Serving,
    Shutdown,
)
from relax.protocol.payload import Payload, PayloadStore
from relax.protocol.tensors import SampledGroup
from relax.services import rollout, service
from relax.services.rollout import Rollout
from relax.services.service import Context
from relax.weights.manifest import Manifest

PATIENCE = 60.0


class Lent:
    """The rig's engine for the length of a replica's life: it is not started and not shut down. Notes every result."""

    def __init__(self, engine: Engine, stop_token_ids: tuple[int, ...]) -> None:
        self._engine = engine
        self._stop = stop_token_ids
        self.results: dict[str, Result] = {}
        self.requests: dict[str, Request] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        self.died = asyncio.get_running_loop().create_future()

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> list[asyncio.Future[Result]]:
        self.requests |= {r.id: r for r in requests}
        mine = [dataclasses.replace(r, stop_token_ids=self._stop) for r in requests]
        futures = await self._engine.submit(mine, together=together)
        for future in futures:
            future.add_done_callback(self._note)
        return futures

    def _note(self, future: asyncio.Future[Result]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.results[future.result().id] = future.result()

    async def shutdown(self) -> None:
        pass


class Stage:
    """Groups of `samples` samples of up to `tokens` tokens; they end at that length unless `stop_token_ids` says more.

    Options of the replicas are given beside.
    """

    def __init__(
        self,
        rig: Rig,
        monkeypatch: pytest.MonkeyPatch,
        *,
        samples: int = 4,
        tokens: int = 100,
        stop_token_ids: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        # A service ends its process where its end hangs; here that process is the tests'.
        monkeypatch.setattr(service, "STUCK_SECONDS", 1e6)
        self.rig, self.monkeypatch = rig, monkeypatch
        self.folder = Path(tempfile.mkdtemp(prefix="stage-"))
        self.stop_token_ids = stop_token_ids
        self.options = Options(
            hf_checkpoint=str(rig.store.directory.parent / "model"),
            n_samples_per_prompt=samples,
            rollout_max_prompt_len=40,
            rollout_max_response_len=tokens,
            max_staleness=4,
            peer_timeout=30,
            **options,
        )
        self.told: list[tuple[str, Any]] = []  # (sender, message)
        self._news = asyncio.Condition()
        self._lives: dict[str, tuple[Rollout, asyncio.Task[int]]] = {}
        self._joined: dict[str, asyncio.Event] = {}

    async def __aenter__(self) -> Self:
        self.mailbox = Mailbox("controller", run_id="r", lineage=0, incarnation="0", bind=self._endpoint("controller"))
        await self.mailbox.start()
        self.payloads = PayloadStore(self.mailbox)
        self.mailbox.on(Register, self._on_register)
        self.mailbox.on(Heartbeat, self._on_heartbeat)
        for kind in (Serving, Sampled, HandedBack, Leaving, Rejected, Score):
            self.mailbox.on(kind, self._on_told)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for replica, life in self._lives.values():
            replica.end(0)
            await life
        self.mailbox.abort()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
        shutil.rmtree(self.folder)

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"

    async def _on_register(self, message: Register, sender: Any) -> Registered:
        self._joined[message.member.name].set()
        members = Members((message.member, Member("reward-0", "reward", self.mailbox.endpoint, "0")))
        self.mailbox.tell_nowait(message.member.endpoint, members)
        return Registered(None)

    async def _on_heartbeat(self, message: Heartbeat, sender: Any) -> HeartbeatReceived:
        return HeartbeatReceived()

    async def _on_told(self, message: Any, sender: Any) -> None:
        async with self._news:
            self.told.append((sender.name, message))
            self._news.notify_all()

    # --- what a test does --------------------------------------------------------------------------------------------

    async def replica(self, name: str = "rollout-0") -> Rollout:
        """A replica that serves the rig's present weights."""
        run: Any = SimpleNamespace(
            run_id="r",
            endpoint=self._endpoint,
            leave=lambda: None,
            shm_dir=self.rig.store.directory,
            sign_of_life=lambda name: self.folder / f"{name}.life",
        )
        context = Context(name, self.options, run, "", self.mailbox.endpoint, None, self.options, engine="vllm")
        lent = Lent(self.rig.engine, self.stop_token_ids)
        self.monkeypatch.setattr(rollout, "make_engine", lambda *args: lent)
        replica = Rollout(context)
        self._joined[name] = asyncio.Event()
        self._lives[name] = (replica, asyncio.create_task(replica.main()))
        await asyncio.wait_for(self._joined[name].wait(), PATIENCE)
        newest = self.rig.store.newest()
        assert newest is not None
        await self.serve(replica, newest)
        return replica

    async def announce(self, replica: Rollout, manifest: Manifest) -> None:
        await self.mailbox.tell(replica.mailbox.endpoint, Announce(manifest.tag.version, manifest.to_json()))

    async def serve(self, replica: Rollout, manifest: Manifest) -> Serving:
        """Announce weights and wait for them to be served."""
        await self.announce(replica, manifest)
        serves = lambda m: isinstance(m, Serving) and m.version == manifest.tag.version  # noqa: E731
        return await self.until(replica.name, serves)

    async def generate(self, replica: Rollout, *orders: GroupOrder) -> None:
        await self.mailbox.tell(replica.mailbox.endpoint, Generate(orders, together=False))

    async def release(self, replica: Rollout, *leases: Lease) -> None:
        await self.mailbox.tell(replica.mailbox.endpoint, Release(leases))

    async def shutdown(self, replica: Rollout) -> int:
        """Send it home; its exit code."""
        await self.mailbox.tell(replica.mailbox.endpoint, Shutdown("the test is over", failed=False))
        return await self.ended(replica)

    async def ended(self, replica: Rollout) -> int:
        """The exit code of a replica that ends."""
        return await asyncio.wait_for(self._lives.pop(replica.name)[1], PATIENCE)

    async def until(self, name: str, condition: Callable[[Any], bool]) -> Any:
        """The first message of a replica, past or to come, of which `condition` holds."""

        def found() -> list[Any]:
            return [m for sender, m in self.told if sender == name and condition(m)]

        async with asyncio.timeout(PATIENCE), self._news:
            await self._news.wait_for(found)
        return found()[0]

    async def of_group(self, kind: type | tuple[type, ...], group: int, fence: int = 1) -> Any:
        def fits(m: Any) -> bool:
            lease = m.order.lease if isinstance(m, Score) else getattr(m, "lease", None)
            return isinstance(m, kind) and lease is not None and (lease.group, lease.fence) == (group, fence)

        senders = {name for name, m in self.told} | set(self._lives)
        waits = [asyncio.create_task(self.until(name, fits)) for name in senders]
        done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return done.pop().result()

    def about(self, group: int) -> list[Any]:
        """Everything that was told of a group's draws."""
        return [m for _, m in self.told if hasattr(m, "lease") and m.lease.group == group]

    async def sampled(self, group: int, fence: int = 1) -> SampledGroup:
        """The tensors of a finished group, fetched from the replica where they do not come along."""
        await self.of_group(Sampled, group, fence)
        score = await self.of_group(Score, group, fence)
        assert score.order.parked is None
        return SampledGroup.from_arrays(await self.payloads.fetch(score.payload, PATIENCE), f"group {group}")


def order(group: int, fence: int = 1, parked: Payload | None = None) -> GroupOrder:
    return GroupOrder(Lease(group, 0, 0, fence), group, 0, prompt(20, group), b"{}", parked)


def samples_of(group: SampledGroup) -> list[tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]]:
    """(tokens, log-probs, runs) of each sample."""
    cuts = np.cumsum(group.response_lens)[:-1]
    tokens, logprobs = np.split(group.response_tokens, cuts), np.split(group.behaviour_logprobs, cuts)
    runs = [[(v, n) for s, v, n in group.runs.tolist() if s == i] for i in range(len(group.response_lens))]
    return list(zip(tokens, logprobs, runs, strict=True))
