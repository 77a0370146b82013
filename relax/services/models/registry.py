"""Which policy an actor has, by the name of the engine that the topology gives it."""

from pkgutil import resolve_name

from relax.services.models.base import PolicyModel
from relax.services.service import Service

# Imported only by the process that trains it.
POLICIES = {
    "megatron": "relax.services.models.megatron:MegatronPolicy",
    "simulated": "relax.services.models.simulated:SimulatedPolicy",
}


def policy(service: Service) -> PolicyModel:
    """The policy for the engine and the options of an actor; not built yet."""
    chosen: PolicyModel = resolve_name(POLICIES[service.context.engine])(service)
    return chosen
