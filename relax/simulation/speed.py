"""How fast the replicas of a simulated run are.

A replica has slots, and each of them runs one sample at a time: a sample of n tokens holds its slot for n / (tokens
per second) seconds. Slots do not slow one another down, and more samples than slots wait in the order they came.
"""

import math
from dataclasses import dataclass

from relax.simulation.lengths import ModelError


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Tokens per second of one slot, a replica: replica i takes number i, and they begin again after the last."""

    tokens_per_second: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "SpeedModel":
        """`1000` or, for replicas of unequal speed, `1000,800,400`. Raises ModelError."""
        speeds = []
        for part in text.split(","):
            try:
                speed = float(part)
            except ValueError:
                speed = math.nan
            if not 0 < speed < math.inf:
                fix = "Write tokens per second, above 0, or one such number a replica with commas between."
                raise ModelError(text, f"{part.strip()!r} is no speed", fix)
            speeds.append(speed)
        return cls(tuple(speeds))

    def of(self, replica: int) -> float:
        """Tokens per second of a slot of this replica, counted from 0."""
        return self.tokens_per_second[replica % len(self.tokens_per_second)]
