"""What every rank of the reference does, in step: give log-probs of responses, take over a published version."""

from pathlib import Path

import numpy as np

from relax.config.options import Options
from relax.megatron.reference import Reference
from relax.protocol.tensors import Arrays
from relax.services.ranks import command
from relax.services.saved_work import SavedWork
from relax.weights.manifest import Manifest
from relax.weights.store import ChunkStore


class ReferenceWork(SavedWork):
    """The reference policy and what is done with it."""

    def __init__(self, options: Options) -> None:
        if options.ref_load is None:
            raise ValueError("--ref-load is not set; the reference service needs the checkpoint of its policy")
        self.reference = Reference(options, options.ref_load)
        self.saves(self.reference.network)

    @command
    def logprobs(self, batch: Arrays) -> np.ndarray:
        """float32 [response tokens]; the batch needs tokens and lengths alone (see relax.megatron.batches)."""
        return self.reference.logprobs(batch)

    @command
    def refresh(self, store: str, manifest: str) -> None:
        """Takes over the version of `manifest` (JSON) from the chunk store in the directory `store`, on this node.

        Each rank takes a lease of its own; rank 0 should hold one around the command, so that all find the same.
        Raises WeightError and CheckpointError with the weights unchanged.
        """
        published = Manifest.from_json(manifest)
        with ChunkStore(Path(store)).open(published) as lease:
            self.reference.load(lease.items(), str(published.tag))
