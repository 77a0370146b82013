"""Which weights the replicas serve: published versions, announcements, and what each replica says it serves."""

import time
from collections.abc import Callable
from typing import Any

from relax.ledger.states import State
from relax.protocol.messages import Announce, Published, Serving
from relax.services.control.replicas import Replica
from relax.services.control.state import PipelineState
from relax.weights.errors import WeightError
from relax.weights.manifest import Manifest


class Weights:
    """`newest` is the newest published version; None before the first."""

    def __init__(self, state: PipelineState, clock: Callable[[], float] = time.monotonic) -> None:
        self._gate, self._book, self._replicas, self._outbox = state.gate, state.book, state.replicas, state.outbox
        self._peers, self._clock = state.peers, clock
        self._refreshes_reference = state.options.ref_update_interval is not None
        self.newest: Published | None = None
        self._early: Published | None = None

    def published(self, message: Published, sender: Any) -> None:
        tag = Manifest.from_json(message.manifest, sender.name).tag
        if tag.version != message.version:
            raise WeightError(f"version {message.version} comes with the manifest of version {tag.version}")
        if message.version > self._gate.version:
            # The actor does not wait for the critic; a version counts as published once v has risen to it.
            self._early = message
        else:
            self._publish(message)

    def version_rose(self) -> None:
        """What the actor has published early counts now."""
        if self._early is not None:
            early, self._early = self._early, None
            self._publish(early)

    def _publish(self, message: Published) -> None:
        tag = Manifest.from_json(message.manifest).tag
        self.newest = message
        self._gate.published(message.version)
        self._book.published(tag.version, step=tag.step, digest=tag.digest, size=tag.bytes, created_at=tag.created_at)
        for replica in self._replicas:
            self.announce(replica)
        if self._refreshes_reference:
            for reference in self._peers("reference"):
                self._outbox.say(reference.endpoint, Announce(message.version, message.manifest))

    def announce(self, replica: Replica) -> None:
        """Tell a replica of the newest version, if there is one and it stays."""
        if self.newest is not None and not replica.leaving:
            replica.announced = self._clock()
            self._outbox.say(replica.member.endpoint, Announce(self.newest.version, self.newest.manifest))

    def serving(self, message: Serving, sender: Any) -> None:
        replica = self._replicas.get(sender.name)
        if replica is None or replica.member.incarnation != sender.incarnation:
            return
        if self.newest is None or message.version > self.newest.version:
            raise WeightError(f"version {message.version} was not announced to anybody")
        self._replicas.serves(replica, message.version, message.credit)
        # What went on through the update may have older tokens, whoever has not said so yet.
        may_have_tokens = {(lease.group, lease.fence) for lease in message.running}
        for group, fence in replica.samples.items():
            # A short sample's way through the stages may be faster than this report on a busy link: it is ready by now.
            sampling = self._book[group].state is State.ISSUED
            if sampling and (group, fence) not in may_have_tokens:
                self._gate.acknowledged(group, message.version)
