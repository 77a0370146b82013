"""How a service that loads published weights gets them onto its node."""

import numpy as np

from relax.protocol.messages import Chunk, FetchChunk
from relax.services.service import Service
from relax.weights.agent import WeightAgent


def weight_agent(service: Service) -> WeightAgent:
    """The agent of the service's node, which fetches from the actor what the node's store lacks."""

    async def fetch(version: int, digest: str) -> np.ndarray | None:
        reply = await service.peers.ask_role("actor", FetchChunk(version, digest))
        assert isinstance(reply, Chunk)
        return reply.data if len(reply.data) else None

    return WeightAgent(service.run.shm_dir, fetch=fetch)
