"""Issue: which draw goes to which replica, as far as the gate lets it."""

from collections.abc import Callable
from functools import partial

from relax.protocol.messages import GroupOrder
from relax.services.control.draws import Draw
from relax.services.control.replicas import Replica
from relax.services.control.state import PipelineState

# The replica that takes a draw now, of those whose version is allowed; None where there is none.
Where = Callable[[Draw, Callable[[int], bool]], Replica | None]


class Issue:
    """Draws to be done again go first, then the stream. One that finds no replica waits and holds no other up: a parked
    group of young tokens may wait for a replica at a newer version, while one of older tokens goes on where it is; one
    that was rejected waits for another replica than before, so that one that hangs or fails costs no prompt."""

    def __init__(self, state: PipelineState) -> None:
        self._lockstep, self._patience = state.options.max_staleness == 0, state.options.peer_timeout
        self._gate, self._book, self._draws, self._replicas = state.gate, state.book, state.draws, state.replicas
        self._pace, self._outbox = state.pace, state.outbox

    def turn(self, now: float) -> None:
        """Issues all that can be. `now` is in monotonic seconds."""
        gate, draws = self._gate, self._draws
        if gate.published_version is None or not (draws.waiting or gate.free_slots > 0):
            return
        # A lockstep batch is given out as a whole: its requests are all queued before the engine's first step.
        whole_batch = self._lockstep and gate.free_slots == gate.slots
        if whole_batch and not draws.available(gate.slots):
            return
        where: Where = self._anywhere
        if self._lockstep:
            team = self._replicas.lockstep_team(gate.version, now, self._patience)
            if not team:
                return
            where = partial(_at_its_seat, team)
        for draw in draws.again():
            self._place(draw, where, whole_batch)
        for draw in draws.fresh():
            if not self._place(draw, where, whole_batch):
                break

    def _anywhere(self, draw: Draw, allowed: Callable[[int], bool]) -> Replica | None:
        return self._replicas.choose(allowed, but=draw.avoids)

    def _place(self, draw: Draw, where: Where, together: bool) -> bool:
        held = draw.group if draw.lost else None
        replica = where(draw, lambda version: self._gate.can_issue(version, held))
        if replica is None:
            return False
        prompt, parked = draw.prompt, draw.parked
        if draw.group not in self._book:
            self._book.draw(draw.group, prompt.prompt_id, prompt.epoch, prompt.index)
        lease = self._book.issue(draw.group, replica.member.name, replica.version)
        self._gate.issue(draw.group, replica.version)
        self._draws.issued(draw)
        self._replicas.takes(replica, lease)
        self._pace.begin()
        order = GroupOrder(lease, prompt.prompt_id, prompt.epoch, prompt.token_ids, prompt.row, parked)
        self._outbox.order(replica.member.endpoint, order, together)
        return True


def _at_its_seat(team: list[Replica], draw: Draw, allowed: Callable[[int], bool]) -> Replica | None:
    """Each attempt is at the next one."""
    replica = team[(draw.group + draw.attempt) % len(team)]
    return replica if allowed(replica.version) else None
