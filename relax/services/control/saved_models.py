"""The services whose models are part of a checkpoint: asked to write them, and known by how much they will write."""

from collections.abc import Sequence
from pathlib import Path

from relax.protocol.messages import Save, Saved
from relax.services.control.registry import Registry
from relax.services.errors import ServiceError
from relax.services.peers import Peers

# Of a model's part of a checkpoint, besides its tensors.
SMALL_FILES = 100_000


class SavedModels:
    """One service of each of the `roles`."""

    def __init__(self, roles: Sequence[str], peers: Peers, registry: Registry) -> None:
        self.roles, self._peers, self._registry = tuple(roles), peers, registry

    async def save(self, role: str, message: Save) -> Saved:
        """However long it writes: the deadline is on its silence, and on its getting on, which it sees to itself."""
        try:
            member = await self._peers.member(role)
        except ServiceError as error:
            return Saved(message.batch, str(error))
        reply = await self._peers.ask(member.endpoint, message)
        assert isinstance(reply, Saved)
        return reply

    def room(self, ledger: Path) -> int | None:
        """Bytes of a whole checkpoint: what the models told of their size, room for the small files, and the copy of
        the ledger, which is as large as it. None while a model has not told."""
        told = [entry.gauges.get("checkpoint_bytes") for role in self.roles for entry in self._registry.of_role(role)]
        known = [size for size in told if size is not None]
        if not known or len(known) < len(told):
            return None
        return int(sum(known)) + SMALL_FILES * len(known) + ledger.stat().st_size
