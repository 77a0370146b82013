"""The draws that a rollout replica has and has not finished."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from relax.engines.base import Request, Result
from relax.protocol.messages import GroupOrder, Lease


@dataclass(slots=True, eq=False)
class Draw:
    """A group that this replica has not finished: its samples as they came, and what the engine draws of them."""

    order: GroupOrder
    samples: list[Result]
    requests: list[Request]
    futures: Sequence[asyncio.Future[Result]] = ()

    @property
    def group(self) -> int:
        return self.order.lease.group

    def cancel(self) -> None:
        for future in self.futures:
            future.cancel()


class HeldDraws:
    """By group, of which there is one draw at a time:

        pulling -> queued -> running

    `pulling`: its order, until what is parked of it is here. `queued`: until admission opens. `running`: in the engine,
    or on its way to the next stage.
    """

    def __init__(self) -> None:
        self.pulling: dict[int, GroupOrder] = {}
        self.queued: dict[int, Draw] = {}
        self.running: dict[int, Draw] = {}

    def leases(self) -> list[Lease]:
        drawn = [draw.order.lease for held in (self.queued, self.running) for draw in held.values()]
        return [*drawn, *(order.lease for order in self.pulling.values())]

    def admitted(self, draws: Sequence[Draw]) -> list[Draw]:
        """Those of the draws that are queued still; they run now."""
        here = [draw for draw in draws if self.queued.get(draw.group) is draw]
        for draw in here:
            self.running[draw.group] = self.queued.pop(draw.group)
        return here

    def runs(self, draw: Draw) -> bool:
        return self.running.get(draw.group) is draw

    def end(self, group: int, fence: int) -> None:
        """Nobody waits any more for what is drawn of a group under this fence or an older one."""
        order = self.pulling.get(group)
        if order is not None and order.lease.fence <= fence:
            del self.pulling[group]
        for held in (self.queued, self.running):
            draw = held.get(group)
            if draw is not None and draw.order.lease.fence <= fence:
                del held[group]
                draw.cancel()
