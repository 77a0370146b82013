"""The reference loop and three wrong ones beside it, on one engine: `python reference_mutants.py TOPOLOGY` prints the
rows of each by its name. Each mutant goes wrong in one batch alone, in a way that a pipeline could."""

import asyncio
import json
import sys
from typing import Any

import reference_loop
from reference_loop import Batch, Manifest, ReferenceLoop, Sample

WRONG = 10
"""The batch in which the mutants go wrong."""


class Mutant(ReferenceLoop):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_batches = WRONG + 4


class LosesAnUpdate(Mutant):
    """The batch is never trained."""

    def train(self, b: int, batch: Batch) -> dict[str, float]:
        return {} if b == WRONG else super().train(b, batch)


class SamplesOneVersionBehind(Mutant):
    """The batch is sampled with the weights of the one before."""

    async def serve(self, version: int) -> Manifest:
        load = self.engine.load
        if version == WRONG:
            self.engine.load = lambda *_, **__: asyncio.sleep(0)  # type: ignore[method-assign]
        try:
            return await super().serve(version)
        finally:
            self.engine.load = load  # type: ignore[method-assign]


class TrainsInAnotherOrder(Mutant):
    """The groups of the batch are joined in the reverse order."""

    async def sample(self, b: int) -> list[Sample]:
        samples = await super().sample(b)
        return sorted(samples, key=lambda s: -s.group) if b == WRONG else samples


if __name__ == "__main__":
    loops = (ReferenceLoop, LosesAnUpdate, SamplesOneVersionBehind, TrainsInAnotherOrder)
    print(json.dumps(asyncio.run(reference_loop.main(sys.argv[1], *loops))))
