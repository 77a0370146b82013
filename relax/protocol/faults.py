"""A transport that loses, doubles and delays messages on purpose, for tests of everything above it."""

import asyncio
import random
from collections.abc import Callable
from typing import Any


class Faults:
    """Decides the fate of each message that a mailbox sends, by a seeded draw. Probabilities; `delay_s` in seconds."""

    def __init__(
        self, seed: int, *, drop: float = 0.0, duplicate: float = 0.0, delay: float = 0.0, delay_s: float = 0.05
    ) -> None:
        self._random = random.Random(seed)
        self.drop, self.duplicate, self.delay, self.delay_s = drop, duplicate, delay, delay_s
        self.injected = 0

    @classmethod
    def parse(cls, text: str) -> "Faults":
        """`seed=3,drop=0.01,delay=0.01,delay_s=0.2`: the arguments by name."""
        given = dict(part.split("=", 1) for part in text.split(","))
        return cls(int(given.pop("seed")), **{name: float(value) for name, value in given.items()})

    def send(self, frames: list[Any], send: Callable[[list[Any]], bool]) -> bool:
        """Pass `frames` to `send` once, twice, later or never."""
        draw = self._random.random()
        if draw < self.drop:
            self.injected += 1
            return True
        if draw < self.drop + self.duplicate:
            self.injected += 1
            return send(frames) and send(frames)
        if draw < self.drop + self.duplicate + self.delay:
            self.injected += 1
            asyncio.get_running_loop().call_later(self.delay_s * self._random.random(), send, frames)
            return True
        return send(frames)
