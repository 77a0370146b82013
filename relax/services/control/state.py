"""What the parts of the controller share: the state of the pipeline, and where they put what they have to say."""

from collections.abc import Callable
from dataclasses import dataclass, field

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
