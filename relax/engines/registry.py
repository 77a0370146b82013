"""Which engine a rollout replica runs, by the name that the topology gives it."""

from pkgutil import resolve_name
from typing import Any

from relax.engines.base import Engine

# Imported only by the process that runs it.
ENGINES = {
    "vllm": "relax.engines.vllm:VllmEngine",
    "simulated": "relax.engines.simulated:SimulatedEngine",
}


def engine(name: str, options: Any, replica: int) -> Engine:
    """The engine `name` for the options of a run, as replica number `replica`; not started yet."""
    built: Engine = resolve_name(ENGINES[name]).from_options(options, replica)
    return built
