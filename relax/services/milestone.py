"""A count that only rises, and those who wait for it."""

import asyncio


class Milestone:
    """How far something has got: -1 before anything. Belongs to one event loop."""

    def __init__(self) -> None:
        self.value = -1
        self._moved = asyncio.Event()

    def reach(self, value: int) -> None:
        """It is at `value` now."""
        if value <= self.value:
            raise ValueError(f"it is at {self.value} already and only rises: {value}")
        self.value = value
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def wait(self, value: int, deadline: float) -> None:
        """Return once it is at `value` or beyond. Raises TimeoutError after `deadline` seconds."""
        async with asyncio.timeout(deadline):
            while self.value < value:
                await self._moved.wait()
