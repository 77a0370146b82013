"""The other services of the run, as one of them sees them: who is a member, and talking to them until they are none.

The controller says who is a member (`Members`) and judges who is silent. So what is said or asked here waits for a
member however long it takes, names one that keeps it waiting, and ends when that is no member any more.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable
from typing import Any

import structlog

from relax.config.options import Options
from relax.protocol.errors import PeerError, PeerForgotten
from relax.protocol.mailbox import Mailbox
from relax.protocol.messages import Member, Members
from relax.protocol.payload import Arrays, Payload, PayloadStore
from relax.services.errors import ServiceError

# Lives that ended, by endpoint, which are remembered: none of them is asked again.
GONE = 1024

log = structlog.get_logger()


class Peers:
    """Those of the service `name`, whose `counters` are told of every wait for a silent one."""

    mailbox: Mailbox

    def __init__(self, name: str, controller: str, options: Options, counters: dict[str, float]) -> None:
        self.members: dict[str, Member] = {}
        self._name, self._controller, self._options, self._counters = name, controller, options, counters
        self._of_role: dict[str, list[Member]] = {}
        self._changed = asyncio.Event()
        self._gone: deque[str] = deque(maxlen=GONE)

    def open(self, mailbox: Mailbox) -> None:
        """From here on they can be heard and talked to."""
        self.mailbox = mailbox
        mailbox.on(Members, self._on_members)

    # --- who they are ------------------------------------------------------------------------------------------------

    async def _on_members(self, message: Members, sender: Any) -> None:
        self.learn(message.members)

    def learn(self, members: tuple[Member, ...]) -> None:
        """These are the members now."""
        here = {m.endpoint for m in members}
        for endpoint in {m.endpoint for m in self.members.values()} - here:
            self.forget(endpoint)
        for endpoint in here.intersection(self._gone):  # a new life may be given the port of an old one
            self._gone.remove(endpoint)
        self.members = {m.name: m for m in members}
        self._of_role = {}
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def forget(self, endpoint: str) -> None:
        """What lived there is no member any more, and nothing waits for it."""
        if endpoint not in self._gone:
            self._gone.append(endpoint)
        self.mailbox.forget(endpoint)

    async def known(self) -> None:
        """Returns when it is known who the members are."""
        while not self.members:
            await self._changed.wait()

    def of_role(self, role: str) -> list[Member]:
        """Live members of a role, by name."""
        if role not in self._of_role:
            self._of_role[role] = sorted((m for m in self.members.values() if m.role == role), key=lambda m: m.name)
        return self._of_role[role]

    async def member(self, role: str, key: int = 0) -> Member:
        """The member of a role that serves `key`; waits for the first one to join, at most the startup timeout.

        The log names the role at every peer timeout until then."""
        began, patience = time.monotonic(), self._options.startup_timeout
        while not (live := self.of_role(role)):
            waited = time.monotonic() - began
            if waited >= patience:
                raise ServiceError(f"{self._name} waited {patience:g} s for a {role} service; none joined")
            try:
                await asyncio.wait_for(self._changed.wait(), min(patience - waited, self._options.peer_timeout))
            except TimeoutError:
                log.warning("nobody_of_role", role=role, waited=round(time.monotonic() - began, 1))
        return live[key % len(live)]

    # --- talking to them ---------------------------------------------------------------------------------------------

    async def tell(self, endpoint: str, message: Any) -> None:
        """Returns when the peer has acknowledged it, or is no member any more."""
        if endpoint == self._controller:
            await self.mailbox.tell(endpoint, message, deadline=self._options.peer_timeout)
        elif endpoint not in self._gone:
            # What was on its way to a member that is gone is nobody's failure: the ledger knows what did not arrive.
            # Until it is gone, it is the controller that judges its silence.
            with contextlib.suppress(PeerForgotten):
                await self._patiently(self.mailbox.tell(endpoint, message, deadline=math.inf), endpoint, message)

    async def ask(self, endpoint: str, message: Any) -> Any:
        """The reply of a member, however long it takes. Raises PeerForgotten when it is no member any more, PeerError
        when its handler fails.

        For what has no state of its own at the peer: it may be asked again of its next life.
        """
        if endpoint in self._gone:
            raise PeerForgotten(endpoint, type(message).__name__)
        try:
            return await self._patiently(self.mailbox.ask(endpoint, message, deadline=math.inf), endpoint, message)
        except PeerError as error:
            if not error.closing:
                raise
            await self._until_gone(endpoint)
            raise PeerForgotten(endpoint, type(message).__name__) from None

    async def ask_role(self, role: str, message: Any) -> Any:
        """The reply of the service of this role, of its next life where the one that was asked dies."""
        while True:
            member = await self.member(role)
            try:
                return await self.ask(member.endpoint, message)
            except PeerForgotten:
                log.warning("asked_again", role=role, message_type=type(message).__name__)

    async def fetch(self, store: PayloadStore, payload: Payload) -> Arrays:
        """The arrays of a payload. Raises what `PayloadStore.fetch` does, PeerForgotten when its producer died."""
        return await store.fetch(payload, ask=self.ask)

    async def _patiently(self, work: Awaitable[Any], endpoint: str, message: Any) -> Any:
        """What `work` returns; a peer that keeps it waiting is named at every peer timeout. One that this service does
        not know as a member is given up then: it was one before this service came, or never."""
        loop, patience = asyncio.get_running_loop(), self._options.peer_timeout
        timer: asyncio.TimerHandle

        def silent() -> None:
            nonlocal timer
            timer = loop.call_later(patience, silent)
            self._counters["wait/silent_peer"] += patience
            name = self._name_of(endpoint)
            log.warning("peer_is_silent", peer=name or endpoint, message_type=type(message).__name__)
            if name is None:
                self.forget(endpoint)

        timer = loop.call_later(patience, silent)
        try:
            return await work
        finally:
            timer.cancel()

    async def _until_gone(self, endpoint: str) -> None:
        while self._name_of(endpoint) is not None:
            await self._changed.wait()

    def _name_of(self, endpoint: str) -> str | None:
        """Of the member that lives there."""
        return next((member.name for member in self.members.values() if member.endpoint == endpoint), None)
