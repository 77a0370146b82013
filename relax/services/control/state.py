"""What the parts of the controller share: the state of the pipeline, and where they put what they have to say."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from relax.config.options import Options
from relax.gate.gate import Gate
from relax.ledger.book import GroupBook
from relax.protocol.messages import Member
from relax.services.control.draws import Draws
from relax.services.control.outbox import Outbox
from relax.services.control.pace import Pace
from relax.services.control.registry import Registry
from relax.services.control.replicas import Replicas


@dataclass(frozen=True, slots=True)
class PipelineState:
    """`peers` gives the live members of a role, by name."""

    options: Options
    gate: Gate
    book: GroupBook
    registry: Registry
    peers: Callable[[str], list[Member]]
    draws: Draws = field(default_factory=Draws)
    replicas: Replicas = field(default_factory=Replicas)
    outbox: Outbox = field(default_factory=Outbox)
    pace: Pace = field(default_factory=Pace)

    @classmethod
    def at(
        cls, cut: int, options: Options, lineage: int, registry: Registry, peers: Callable[[str], list[Member]]
    ) -> Self:
        """As `lineage` begins, whose first batch is `cut`."""
        o = options
        last = None if o.num_rollout is None else o.num_rollout - 1
        spare = 0 if o.over_sampling_batch_size is None else o.over_sampling_batch_size - o.rollout_batch_size
        gate = Gate(o.rollout_batch_size, o.max_staleness, o.rollout_lead, last, first_batch=cut, spare=spare)
        return cls(options, gate, GroupBook(lineage), registry, peers)
