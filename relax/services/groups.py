"""How a stage takes over a group's tensors from the one that produced them."""

from relax.protocol.errors import PayloadGone, PeerForgotten, Refused
from relax.protocol.messages import HandedBack, Lease, Rejected
from relax.protocol.payload import Payload, PayloadStore
from relax.protocol.tensors import Arrays, SampledGroup, TensorError
from relax.services.service import Service


async def pull_group(service: Service, store: PayloadStore, lease: Lease, payload: Payload) -> Arrays | None:
    """The arrays of a group; None when they are gone with their producer, or by it. The draw is handed back then, which
    the controller may have thought of before: the same draw comes again, whoever samples it.

    Raises Refused when they are not as described, and what else `Service.fetch` raises.
    """
    try:
        return await service.peers.fetch(store, payload)
    except (PayloadGone, PeerForgotten) as gone:
        service.log.warning("payload_gone", group=lease.group, fence=lease.fence, problem=str(gone))
        service.report(HandedBack(lease, None, None))
        return None


async def take_group(service: Service, store: PayloadStore, lease: Lease, payload: Payload) -> SampledGroup | None:
    """The samples of a group; None, and the controller knows, when they are gone (see `pull_group`) or contradict
    themselves or their description, which rejects the draw.

    Raises what else `Service.fetch` raises.
    """
    try:
        arrays = await pull_group(service, store, lease, payload)
        return None if arrays is None else SampledGroup.from_arrays(arrays, f"group {lease.group}")
    except (TensorError, Refused) as error:
        service.report(Rejected(lease, service.role, "bad_payload", str(error)))
    return None
