"""What a run without a model may be asked for. `engine: simulated` is set for all replicas and the actor, or for none.

Pure, like checks.py, which takes these checks up.
"""

from collections.abc import Iterator

from relax.config.fields import flag
from relax.config.options import (
    AlgorithmOptions,
    CorrectionOptions,
    KlOptions,
    SimulationOptions,
    TrainOptions,
)
from relax.config.resolve import Resolved
from relax.config.topology import Topology
from relax.config.violation import Violation

SIMULATED = "simulated"
# Nothing is computed by a model, and what would be learned from an advantage is nobody's.
WITHOUT_A_MODEL = frozenset(
    {"rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_dtype", "rollout_kv_cache_mb"}
    | {"load", "no_load_optim", "no_load_rng"}
    | {
        name
        for section in (TrainOptions, AlgorithmOptions, CorrectionOptions, KlOptions)
        for name in section.__annotations__
    }
    | {"no_off_policy_correction"}
) - {"num_steps_per_rollout", "global_batch_size"}


def is_simulated(topology: Topology | None) -> bool:
    """Whether any engine of the run is simulated; all are, in a run that is not refused."""
    return topology is not None and any(service.engine == SIMULATED for service in topology.services)


def engines_agree(resolved: Resolved) -> Iterator[Violation]:
    topology = resolved.topology
    if topology is None or not is_simulated(topology):
        return
    why = {
        "rollout": "a simulated trainer has no model for it to load",
        "actor": "it would train on the made-up samples of a simulated rollout",
    }
    for service in topology.services:
        if service.role in why and service.engine != SIMULATED:
            fix = "Set `engine: simulated` for every rollout entry and for the actor, or for none of them."
            where = f"services.{service.role}.engine"
            yield Violation(where, service.engine, why[service.role], fix, service.source)
            return


def a_simulated_engine_has_no_model(resolved: Resolved) -> Iterator[Violation]:
    simulated = [s for s in resolved.topology.services if s.engine == SIMULATED] if resolved.topology else []
    for role, source in dict.fromkeys((service.role, service.source) for service in simulated):
        replicas = [service for service in simulated if (service.role, service.source) == (role, source)]
        devices = sorted({device for service in replicas for device in service.devices})
        for key, value in (("ranks", replicas[0].ranks), ("devices", devices or None)):
            if value is not None:
                problem = "cannot act: the engine is simulated, so there is no model"
                yield Violation(f"services.{role}.{key}", value, problem, "Leave it out.", source)


def options_act(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options

    def refuse(name: str, problem: str, fix: str) -> Violation:
        return Violation(flag(name), getattr(options, name), f"cannot act: {problem}", fix)

    if resolved.topology is None:
        return
    if not is_simulated(resolved.topology):
        for name in SimulationOptions.__annotations__:
            if options.is_set(name):
                fix = "Leave it out, or set `engine: simulated` for rollout and actor."
                yield refuse(name, "no engine of this topology is simulated", fix)
        return
    for name in sorted(WITHOUT_A_MODEL):
        if options.is_set(name):
            yield refuse(
                name, "the engines are simulated, so there is no model and nothing is learned", "Leave it out."
            )
    if options.is_set("sim_slots") and options.is_set("rollout_max_num_seqs"):
        yield refuse("rollout_max_num_seqs", f"--sim-slots {options.sim_slots} is set", "Keep one of the two.")
