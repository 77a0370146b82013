"""What can go wrong between two services, each with the peer, the message kind and the reason in its text."""

CLOSING = "closed while answering"


class ProtocolError(Exception):
    """Base of everything this package raises on purpose."""


class SchemaError(ProtocolError, TypeError):
    """A message class is declared in a way that cannot travel. Raised when the class is defined."""


class EncodeError(ProtocolError, ValueError):
    """A message could not be written: a field holds something its annotation does not allow, or a limit is passed."""

    def __init__(self, kind: str, field: str, problem: str) -> None:
        super().__init__(f"cannot send {kind}: {f'field {field}: ' if field else ''}{problem}")
        self.kind, self.field, self.problem = kind, field, problem


class Refused(ProtocolError, ValueError):
    """A received message broke the contract. `reason` is the name of the counter that it raised.

    `field` is the dotted path inside the message (`runs[3].version`), or the name of the envelope's field.
    """

    def __init__(self, reason: str, problem: str, *, field: str = "", kind: str = "?", sender: str = "?") -> None:
        super().__init__(reason, problem, field, kind, sender)
        self.reason, self.problem, self.field, self.kind, self.sender = reason, problem, field, kind, sender

    def __str__(self) -> str:
        where = f", field {self.field}" if self.field else ""
        return f"refused {self.kind} from {self.sender}{where}: {self.problem}"

    def within(self, name: str) -> "Refused":
        """The same refusal, seen from the message (or container) one level further out."""
        dot = "." if self.field and not self.field.startswith("[") else ""
        self.field = f"{name}{dot}{self.field}"[:200]
        return self


class BindFailed(ProtocolError, OSError):
    """The mailbox could not take its endpoint. There is no second choice: the service does not start."""

    def __init__(self, endpoint: str, problem: str) -> None:
        super().__init__(f"cannot bind {endpoint}: {problem}")
        self.endpoint = endpoint


class MailboxClosed(ProtocolError):
    """The mailbox was used before `start` or after `close` or `abort`."""


class PeerSilent(ProtocolError, TimeoutError):
    """A peer did not acknowledge, or did not reply, before the deadline.

    `waited` is in seconds. `heard` is how many seconds ago anything came from that peer, or None if nothing ever did:
    a peer that was just heard is alive and slow, one that never was is dead, misaddressed or not yet started.
    `no_connection` says why the last attempt to connect to it failed, where it did.
    """

    def __init__(
        self,
        peer: str,
        kind: str,
        waited: float,
        heard: float | None = None,
        problem: str = "",
        no_connection: str = "",
    ) -> None:
        seen = "nothing was ever heard from it" if heard is None else f"last heard {heard:.1f} s ago"
        if no_connection:
            seen += f"; the last attempt to connect failed: {no_connection}"
        super().__init__(f"{peer} did not {problem or 'acknowledge'} {kind} within {waited:.1f} s ({seen})")
        self.peer, self.kind, self.waited, self.heard = peer, kind, waited, heard


class PeerForgotten(ProtocolError):
    """What still waited for this peer was given up, because `forget` or `abort` said so."""

    def __init__(self, peer: str, kind: str) -> None:
        super().__init__(f"{kind} to {peer} was given up: the peer was forgotten or the mailbox aborted")
        self.peer, self.kind = peer, kind


class PeerRefused(ProtocolError):
    """The peer received the message and refused it: wrong run, lineage, schema, or it has no handler for this kind."""

    def __init__(self, peer: str, kind: str, problem: str) -> None:
        super().__init__(f"{peer} refused {kind}: {problem}")
        self.peer, self.kind, self.problem = peer, kind, problem


class PeerError(ProtocolError):
    """The peer's handler of an `ask` raised; `text` is its exception as text. The peer itself lives on, unless it was
    `closing`."""

    def __init__(self, peer: str, kind: str, text: str) -> None:
        super().__init__(f"{peer} failed to answer {kind}: {text}")
        self.peer, self.kind, self.text = peer, kind, text

    @property
    def closing(self) -> bool:
        """Whether the peer was at its end, so that its next life has to be asked."""
        return self.text.endswith(CLOSING)


class PayloadGone(ProtocolError, LookupError):
    """The producer no longer holds this payload: it was released, or the producer is a new incarnation."""

    def __init__(self, payload_id: str, producer: str) -> None:
        super().__init__(f"payload {payload_id} is not at its producer {producer} any more")
        self.payload_id, self.producer = payload_id, producer


class PayloadStoreFull(ProtocolError, MemoryError):
    """A producer would keep more bytes than its store may hold: payloads are not released, or the limit is too low."""

    def __init__(self, payload_id: str, size: int, held: int, limit: int) -> None:
        super().__init__(f"payload {payload_id} takes {size} bytes; {held} of at most {limit} are held already")
        self.payload_id, self.size, self.held, self.limit = payload_id, size, held, limit
