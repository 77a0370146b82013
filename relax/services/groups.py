"""How a stage takes over a group's tensors from the one that produced them."""

from relax.protocol.errors import PayloadGone
from relax.protocol.messages import Lease, Rejected
from relax.protocol.payload import Payload, PayloadStore
from relax.protocol.tensors import SampledGroup
from relax.services.service import Service


async def take_group(service: Service, store: PayloadStore, lease: Lease, payload: Payload) -> SampledGroup | None:
    """The samples of a group; None, with the draw reported as rejected, when the producer does not hold them any more.

    Raises TensorError for samples that contradict themselves, and what `PayloadStore.fetch` raises.
    """
    try:
        arrays = await store.fetch(payload, deadline=service.options.peer_timeout)
    except PayloadGone as error:
        service.report(Rejected(lease, service.role, "payload_gone", str(error)))
        return None
    return SampledGroup.from_arrays(arrays, f"group {lease.group}")
