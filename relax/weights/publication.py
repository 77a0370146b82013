"""Publication: how the trainer turns its weights into a version that engines can load."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from relax.weights.manifest import Manifest, Shapes
from relax.weights.store import ChunkStore


class Publisher:
    """Publishes versions of one run from the node of the trainer's rank 0.

    Version 0 goes the same way as every other. A version is complete when `publish` returns: its bytes are in `store`
    and its manifest is at `manifests / <lineage>.<version>.json`; nobody has been told yet and no engine is waited for.
    `expected` (name -> shape, from `checkpoint_shapes`) holds the trainer's conversion to the names of the checkpoint.
    """

    def __init__(
        self, store: ChunkStore, *, run_id: str, lineage: int, manifests: Path, expected: Shapes | None = None
    ) -> None:
        self.store = store
        self._run_id = run_id
        self._lineage = lineage
        self._manifests = manifests
        self._expected = expected

    def publish(
        self, version: int, step: int, tensors: Iterable[tuple[str, Any]] | None, *, wait: float = 60.0
    ) -> Manifest:
        """Store `tensors` (full, under Hugging Face names; None: the weights did not change) as `version`.

        `wait` bounds in seconds how long readers of the version before the last may hold its place; see
        `ChunkStore.publish` for the errors.
        """
        if tensors is None:
            manifest = self.store.retag(lineage=self._lineage, version=version, step=step, wait=wait)
        else:
            manifest = self.store.publish(
                tensors,
                run_id=self._run_id,
                lineage=self._lineage,
                version=version,
                step=step,
                expected=self._expected,
                wait=wait,
            )
        manifest.save(manifest_path(self._manifests, self._lineage, version))
        return manifest


def manifest_path(directory: Path, lineage: int, version: int) -> Path:
    """Where the run directory keeps the manifest of a version."""
    return directory / f"{lineage}.{version}.json"
