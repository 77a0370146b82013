"""What the book knows of a group and of a batch, and how the ledger's tables hold it."""

from dataclasses import dataclass, field

from relax.ledger.changes import Row
from relax.ledger.states import State


@dataclass(slots=True)
class GroupRecord:
    """One draw of a group. `times` holds when each state was entered since the draw was last lost, by state."""

    group: int
    attempt: int
    prompt_id: int
    epoch: int
    position: int
    drawn_at: float
    fence: int = 0
    state: State = State.PENDING
    holder: str | None = None
    location: str | None = None
    version: int | None = None
    oldest: int | None = None
    tokens: int | None = None
    batch: int | None = None
    reason: str | None = None
    first_issued_at: float | None = None
    times: list[float | None] = field(default_factory=lambda: [None] * len(State))

    def next_attempt(self, now: float) -> "GroupRecord":
        """The same prompt to be drawn again; fences go on rising, so that leases of the old draw stay stale."""
        return GroupRecord(
            self.group, self.attempt + 1, self.prompt_id, self.epoch, self.position, now, fence=self.fence
        )

    def forget_result(self) -> None:
        """The lease has ended; what it brought does not count."""
        self.state = State.PENDING
        self.holder = self.location = None
        self.version = self.oldest = self.tokens = None
        self.times = [None] * len(State)

    def row(self, lineage: int) -> Row:
        times = self.times
        # fmt: off
        return (
            lineage, self.group, self.attempt, self.state.word, self.prompt_id, self.epoch, self.position, self.fence,
            self.holder, self.location, self.version, self.oldest, self.tokens, self.batch, self.reason,
            self.drawn_at, self.first_issued_at, *times[State.ISSUED : State.TRAINED],
            times[State.TRAINED] or times[State.DROPPED],
        )
        # fmt: on

    def event_row(self, lineage: int, now: float, event: str, detail: str) -> Row:
        # fmt: off
        return (
            now, lineage, self.group, self.attempt, self.fence, event, self.state.word, self.holder, self.batch,
            detail or None,
        )
        # fmt: on


@dataclass(slots=True)
class BatchRecord:
    """A commit; without members and times once it was taken back."""

    index: int
    groups: tuple[int, ...] = ()
    oldest: int | None = None
    committed_at: float | None = None
    started_at: float | None = None
    trained_at: float | None = None

    def row(self, lineage: int) -> Row:
        times = self.committed_at, self.started_at, self.trained_at
        return (lineage, self.index, len(self.groups), self.oldest, *times)
