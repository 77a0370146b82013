"""What a turn of the controller has to say, gathered so that each peer hears it in as few messages as can be."""

from typing import Any

from relax.protocol.messages import Generate, GroupOrder, Lease, Release


class Outbox:
    """Messages by endpoint, until `empty` hands them out."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, Any]] = []
        self._releases: dict[str, list[Lease]] = {}
        self._orders: dict[tuple[str, bool], list[GroupOrder]] = {}

    def say(self, endpoint: str, message: Any) -> None:
        self._messages.append((endpoint, message))

    def release(self, endpoint: str, lease: Lease) -> None:
        self._releases.setdefault(endpoint, []).append(lease)

    def order(self, endpoint: str, order: GroupOrder, together: bool) -> None:
        """`together`: all orders of this turn are queued before the engine's first step."""
        self._orders.setdefault((endpoint, together), []).append(order)

    def empty(self) -> list[tuple[str, Any]]:
        """All that was gathered, endings before beginnings: a replica lets go of a draw before it gets the next one."""
        messages, self._messages = self._messages, []
        releases, self._releases = self._releases, {}
        orders, self._orders = self._orders, {}
        messages += [(endpoint, Release(tuple(leases))) for endpoint, leases in releases.items()]
        messages += [(to, Generate(tuple(share), together)) for (to, together), share in orders.items()]
        return messages
