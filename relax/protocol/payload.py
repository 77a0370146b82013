"""Arrays that belong to a message but need not travel with it.

A `Payload` holds small arrays itself; of large ones it holds a description and the producer's endpoint, and whoever
needs them pulls them from there. The producer keeps them until `release`, so a stage between may forget them, and a
consumer that died can be replaced by one that pulls again.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from relax.protocol.codec import message
from relax.protocol.envelope import Peer
from relax.protocol.errors import PayloadGone, PayloadStoreFull, Refused
from relax.protocol.mailbox import Mailbox

INLINE_LIMIT = 64 * 1024
STORE_LIMIT = 16 * 2**30

Arrays = dict[str, np.ndarray]
Ask = Callable[[str, object], Awaitable[Any]]


@message
class Payload:
    """Named arrays, or where to pull them. `specs` gives dtype and shape of each; `arrays` is None when `producer`, the
    endpoint of a mailbox, holds them under `id`."""

    id: str
    specs: dict[str, tuple[str, tuple[int, ...]]]
    arrays: dict[str, np.ndarray] | None = None
    producer: str = ""

    @classmethod
    def inline(cls, arrays: Mapping[str, np.ndarray], payload_id: str = "") -> "Payload":
        """A payload that carries its arrays, whatever their size."""
        return cls(payload_id, _specs(arrays), _read_only(arrays))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, wherever they are."""
        return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.specs.values())


# consumer -> producer, when the arrays of a payload are needed. Reply: PayloadArrays, or None when they were released.
@message
class FetchPayload:
    id: str


# producer -> consumer, reply to FetchPayload.
@message
class PayloadArrays:
    arrays: dict[str, np.ndarray]


class PayloadStore:
    """The payloads that one service produced, and its way to those of others.

    Arrays are kept, not copied: do not write to one after `put`. What `fetch` returns is read-only.
    """

    def __init__(self, mailbox: Mailbox, inline_limit: int = INLINE_LIMIT, store_limit: int = STORE_LIMIT) -> None:
        """Registers the handler of FetchPayload, so a mailbox has at most one store. Limits are in bytes."""
        self._mailbox, self._inline_limit, self._store_limit = mailbox, inline_limit, store_limit
        self._held: dict[str, Arrays] = {}
        self.nbytes = 0
        mailbox.on(FetchPayload, self._fetched)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, payload_id: str) -> bool:
        return payload_id in self._held

    def put(self, payload_id: str, arrays: Mapping[str, np.ndarray]) -> Payload:
        """A payload of these arrays: inline when they are small together, else kept here until `release`.

        Putting an id again replaces its arrays. Raises PayloadStoreFull when all that is kept would pass the limit.
        """
        if self._is_small(arrays):
            self.release(payload_id)
            return Payload.inline(arrays, payload_id)
        return self.keep(payload_id, arrays)

    def keep(self, payload_id: str, arrays: Mapping[str, np.ndarray]) -> Payload:
        """Like `put`, but kept here however small: who is given the payload has to pull it, now or later."""
        size = sum(a.nbytes for a in arrays.values())
        held = sum(a.nbytes for a in self._held.get(payload_id, {}).values())
        if self.nbytes - held + size > self._store_limit:
            raise PayloadStoreFull(payload_id, size, self.nbytes - held, self._store_limit)
        self.release(payload_id)
        self._held[payload_id] = _read_only(arrays)
        self.nbytes += size
        return Payload(payload_id, _specs(arrays), None, self._mailbox.endpoint)

    def travelling(self, kept: Payload) -> Payload:
        """A payload that is kept here as it is sent to who needs it at once: inline when it is small."""
        arrays = self._held[kept.id]
        return Payload.inline(arrays, kept.id) if self._is_small(arrays) else kept

    def _is_small(self, arrays: Mapping[str, np.ndarray]) -> bool:
        return sum(a.nbytes for a in arrays.values()) <= self._inline_limit

    def release(self, payload_id: str) -> bool:
        """Let the arrays go; whether there were any."""
        arrays = self._held.pop(payload_id, None)
        if arrays is None:
            return False
        self.nbytes -= sum(a.nbytes for a in arrays.values())
        return True

    async def fetch(self, payload: Payload, deadline: float = math.inf, ask: Ask | None = None) -> Arrays:
        """The arrays, pulled from their producer when they are not inline; `deadline` in seconds from now.

        `ask(endpoint, message)` is how the producer is asked, by default the mailbox within the deadline. Raises
        PayloadGone when the producer does not hold them (any more), Refused when they are not as described, and what
        the asking raises.
        """
        if payload.arrays is not None:
            return payload.arrays
        if payload.producer == self._mailbox.endpoint:
            held = self._held.get(payload.id)
            if held is None:
                raise PayloadGone(payload.id, payload.producer)
            return held
        wanted = FetchPayload(payload.id)
        if ask is not None:
            reply = await ask(payload.producer, wanted)
        else:
            reply = await self._mailbox.ask(payload.producer, wanted, deadline)
        if reply is None:
            raise PayloadGone(payload.id, payload.producer)
        arrays: Arrays = reply.arrays
        if _specs(arrays) != payload.specs:
            problem = f"payload {payload.id} was described as {payload.specs}, {_specs(arrays)} came"
            raise Refused("array", problem, field="arrays", kind="payload_arrays", sender=payload.producer)
        return arrays

    async def _fetched(self, message: FetchPayload, sender: Peer) -> PayloadArrays | None:
        arrays = self._held.get(message.id)
        return None if arrays is None else PayloadArrays(arrays)


def _specs(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (a.dtype.str, a.shape) for name, a in arrays.items()}


def _read_only(arrays: Mapping[str, np.ndarray]) -> Arrays:
    views = {name: a.view() for name, a in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views
