"""What is planned: one setting of a run, as plain numbers."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. Times in seconds; a *hop* is the way of one message from service to service."""

    replicas: tuple[str, ...]  # names, as the topology gives them
    speeds: tuple[float, ...]  # tokens per second of one slot, a replica
    slots: int  # of one replica
    credit: int  # groups a replica takes at a time
    batch_size: int  # P, groups
    samples: int  # of a group
    max_staleness: int
    lead: int
    train_seconds: float
    batches: int | None = None  # None: until the prompts end
    publish_seconds: float = 0.0
    load_seconds: float = 0.0
    score_seconds: float = 0.0
    hop_seconds: float = 0.0
    interval: int = 1
    straggler_timeout: float | None = None
    partial_rollout: bool = False
    mask_offpolicy: bool = False
    over_sampling: int | None = None

    def __str__(self) -> str:
        return f"S = {self.max_staleness}, L = {self.lead}"

    @property
    def problem(self) -> str | None:
        """Why the run would be refused at this max-staleness and lead."""
        if min(self.max_staleness, self.lead) < self.interval - 1:
            return f"--update-weights-interval {self.interval} needs S and L of at least {self.interval - 1}"
        return None

    @property
    def slot_seconds(self) -> float:
        """Slots of all replicas: their seconds of work in a second."""
        return self.slots * len(self.replicas)

    @property
    def tokens_per_second(self) -> float:
        """Of all slots of all replicas, while all are busy."""
        return self.slots * sum(self.speeds)

    def at(self, max_staleness: int, lead: int) -> "Setting":
        """The same run with another bound, without the options that would be refused there: partial rollouts in
        lockstep, over-sampling anywhere else, a straggler timeout of 0 without a lead."""
        lockstep, lead = max_staleness == 0, min(lead, max_staleness)
        return replace(
            self,
            max_staleness=max_staleness,
            lead=lead,
            straggler_timeout=None if self.straggler_timeout == 0 and lead == 0 else self.straggler_timeout,
            partial_rollout=self.partial_rollout and not lockstep,
            mask_offpolicy=self.mask_offpolicy and not lockstep,
            over_sampling=self.over_sampling if lockstep else None,
        )
