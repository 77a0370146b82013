"""A reward for runs without a model: a fair coin that depends on the response alone.

    --custom-rm-path relax.simulation.reward:coin

Simulated responses are random text, which every real task would pay 0: all groups alike, with nothing for a filter of
groups to tell apart.
"""

from typing import Any

import xxhash


def coin(prompt: str, response: str, label: Any, row: dict[str, Any]) -> float:
    """1.0 for half of all responses, 0.0 for the others."""
    return float(xxhash.xxh3_64_intdigest(response.encode()) & 1)
