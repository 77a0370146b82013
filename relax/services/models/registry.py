"""Which policy an actor has, by the name of the engine that the topology gives it."""

from importlib import import_module

from relax.services.models.base import PolicyModel
from relax.services.service import Service

# Imported only by the process that trains it.
POLICIES = {
    "megatron": "relax.services.models.megatron:MegatronPolicy",
    "simulated": "relax.services.models.simulated:SimulatedPolicy",
}


def policy(service: Service) -> PolicyModel:
    """The policy for the engine and the options of an actor; not built yet."""
    module, _, cls = POLICIES[service.context.engine].partition(":")
    chosen: PolicyModel = getattr(import_module(module), cls)(service)
    return chosen
