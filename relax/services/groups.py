"""How a stage takes over a group's tensors from the one that produced them."""

from relax.protocol.errors import PayloadGone, Refused
from relax.protocol.messages import Lease, Rejected
from relax.protocol.payload import Payload, PayloadStore
from relax.protocol.tensors import SampledGroup, TensorError
from relax.services.service import Service


async def take_group(service: Service, store: PayloadStore, lease: Lease, payload: Payload) -> SampledGroup | None:
    """The samples of a group; None, with the draw reported as rejected, when the producer does not hold them any more
    or they contradict themselves or their description.

    Raises what else `PayloadStore.fetch` raises.
    """
    try:
        arrays = await store.fetch(payload, deadline=service.options.peer_timeout)
        return SampledGroup.from_arrays(arrays, f"group {lease.group}")
    except PayloadGone as error:
        service.report(Rejected(lease, service.role, "payload_gone", str(error)))
    except (TensorError, Refused) as error:
        service.report(Rejected(lease, service.role, "bad_payload", str(error)))
    return None
