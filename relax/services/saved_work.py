"""What works with a model have in common: it is saved while it goes on, and loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax.checkpoints.parts import File
from relax.megatron import snapshot
from relax.megatron.learner import Learner
from relax.megatron.network import Network
from relax.megatron.snapshot import Loaded, Snapshot
from relax.services.ranks import command, in_lane

CHECKPOINT = "checkpoint"
"""The lane in which snapshots are written."""


class SavedWork:
    """Its subclass says what is saved, on all ranks together: `saves`. One save is under way at a time."""

    def saves(self, network: Network, learner: Learner[Any] | None = None) -> None:
        self._network, self._learner = network, learner
        self._snapshot = Snapshot(network, learner)

    def tell(self, moved: Callable[[], None]) -> None:
        """`moved` is called at each micro-batch of this rank, by the thread that computes it."""
        self._network.moved = moved

    @property
    def num_parameters(self) -> int:
        return self._network.num_parameters

    @command
    def reserve_snapshot(self) -> int:
        """Allocates the host memory of a snapshot, so that the first one takes no longer than the others; returns the
        bytes of a checkpoint over all ranks. Its files are a little larger."""
        return self._snapshot.reserve()

    @command
    def take_snapshot(self, batch: int, version: int) -> int:
        """Copies the present state, for `save` to write while the model goes on; returns what `reserve_snapshot` does.

        It is the cut of batch index `batch`, with weights of `version`. Raises RuntimeError while the one before is not
        written.
        """
        return self._snapshot.take({"batch": batch, "version": version})

    @in_lane(CHECKPOINT)
    def save(self, path: str) -> dict[str, File]:
        """Writes the snapshot to a new or empty directory that all ranks share; returns its files, all synced.

        Raises SaveError with nothing left but the directory; the ranks go on.
        """
        return self._snapshot.write(Path(path))

    @in_lane(CHECKPOINT)
    def drop_snapshot(self) -> None:
        """Forgets the snapshot, which then is not saved."""
        self._snapshot.drop()

    @command
    def load(self, path: str, optimizer: bool = True, generators: bool = True, steps: bool = True) -> Loaded:
        """Takes over a checkpoint; see `relax.megatron.snapshot.load`. Raises CheckpointError, on all ranks alike, and
        nothing is changed then."""
        parts = {"optimizer": optimizer, "generators": generators, "steps": steps}
        return snapshot.load(Path(path), self._network, self._learner, **parts)
