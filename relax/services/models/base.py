"""What a trainer service asks of its model, whatever that is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from relax.metrics import Metrics
from relax.protocol.messages import TrainBatch
from relax.protocol.tensors import TrainTensors
from relax.services.keeping import Copies
from relax.weights.manifest import Shapes

T = TypeVar("T")

Weights = Iterable[tuple[str, Any]]
"""(Hugging Face name, whole tensor or array), one after the other."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch that is here as a whole. `arrived`: monotonic seconds when the trainer heard of it; `fetch_s`: how long
    its tensors took from then."""

    message: TrainBatch
    tensors: TrainTensors
    arrived: float
    fetch_s: float

    def held_up(self, waited: float) -> float:
        """How much of the trainer's wait for this batch was for its tensors, in seconds."""
        return min(waited, self.fetch_s)


class TrainerModel(Protocol):
    """A model that learns. Whatever concerns the live model is done in the order in which it is asked for."""

    @property
    def copies(self) -> Copies:
        """There once it is built."""

    async def build(self, num_batches: int | None) -> None:
        """Bring it up as a new run begins with it. `num_batches` of the run; None while they are unknown."""

    async def load(self, part: Path) -> int:
        """Take over its part of a checkpoint; returns how many optimizer steps it has taken. Raises CheckpointError."""

    async def reserve(self) -> int:
        """Make room for the copies that checkpoints are written from; returns the bytes of a checkpoint."""

    async def train(self, taken: Taken) -> tuple[Metrics, float]:
        """All optimizer steps of a batch: what they measured, and how many seconds they took."""

    async def close(self, clean: bool) -> None:
        """Let go of it. `clean`: nothing has failed, so that others may be told."""


class PolicyModel(TrainerModel, Protocol):
    """The model of the actor. Its weights are staged, so that they can be read while it trains on."""

    shapes: Shapes | None
    """Of all weights, by name; None where nothing holds them to any. There once it is built."""

    async def stage(self, place: int) -> None:
        """Copy the present weights to `place`, 0 or 1, which nobody reads."""

    async def read(self, place: int | None, use: Callable[[Weights | None], T]) -> T:
        """What `use` makes, on a thread, of the weights at `place`; of None without a place."""

    async def export(self, path: Path) -> str:
        """Write a Hugging Face model directory; returns where it is, or nothing where there is none to write."""
