"""What can be wrong with the models of a simulation, found before a process of the run starts."""

from typing import Any

from relax.config.violation import Violation
from relax.simulation.lengths import LengthModel, ModelError
from relax.simulation.speed import SpeedModel


def check(options: Any, replicas: int) -> list[Violation]:
    """Every reason why `options` (relax.config.Options) describe no simulation of so many replicas. Reads the file of
    `file:PATH`."""
    found = []
    for flag, text, parse in (
        ("--sim-length", options.sim_length, LengthModel.parse),
        ("--sim-tokens-per-second", options.sim_tokens_per_second, SpeedModel.parse),
    ):
        try:
            model = parse(text)
        except ModelError as error:
            found.append(Violation(flag, text, error.problem, error.fix))
            continue
        if isinstance(model, SpeedModel) and (speeds := len(model.tokens_per_second)) > replicas:
            problem = f"names {speeds} speeds, and the last of them could not act: there are {replicas} replicas"
            found.append(Violation(flag, text, problem, f"Give at most {replicas}."))
    return found
