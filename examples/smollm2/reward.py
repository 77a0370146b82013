"""A reward function of one's own: `--custom-rm-path examples.smollm2.reward:first_line`."""

from typing import Any


def first_line(prompt: str, response: str, label: Any, row: dict[str, Any]) -> float:
    """1 where the first line of the response is the answer and nothing else."""
    return float(response.split("\n", 1)[0].strip() == str(label))
