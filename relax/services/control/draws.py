"""Which prompt is sampled next: draws that must be done again first, in group order, then the stream.

A group keeps its id and its prompt through every attempt. Pure bookkeeping: no clock, no message.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from relax.data import Position, Prompt, PromptReader
from relax.gate.stragglers import STRIKES
from relax.ledger.revived import Revived
from relax.protocol.messages import Lease
from relax.protocol.payload import Payload


class Stream(Protocol):
    """Prompts in their order; see relax.data.PromptStream."""

    @property
    def ended(self) -> bool: ...

    def take(self) -> Prompt | None: ...


@dataclass(slots=True)
class Draw:
    """An open group. `lost` means that it holds its slot in the gate and only its replica is gone; `parked` is what was
    sampled of it until then, to go with its next issue, and `begun` what went with its last. `avoids` is the replica of
    the draw before this attempt: what was wrong may have been its fault.

    Since it was sampled: `payload` says where its tensors are, `oldest` which version is the oldest of them, `stage` is
    the incarnation of the service that works on it or has it (empty while it is not known). `source` is the replica
    that keeps the tensors for the draw that goes on from them, and the lease under which it does: it may let go when
    another replica has them."""

    group: int
    prompt: Prompt
    attempt: int = 0
    lost: bool = False
    parked: Payload | None = None
    begun: Payload | None = None
    avoids: str = ""
    payload: Payload | None = None
    oldest: int | None = None
    stage: str = ""
    source: tuple[str, Lease] | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it was sampled before, so that only the stages behind have to see it again."""
        return self.source is not None

    def forget_result(self) -> None:
        self.begun = self.payload = self.oldest = None
        self.stage = ""


def revived_draws(revived: Revived, reader: PromptReader) -> list[Draw]:
    """The draws that a resume takes up again, with their prompts read and tokenized once more.

    Takes as long as tokenizing that many prompts. Raises DataError when the data is not what it was.
    """
    wanted = [(group.prompt_id, Position(group.epoch, group.position)) for group in revived.groups]
    prompts = reader.again(wanted)
    return [Draw(g.group, prompt, g.attempt) for g, prompt in zip(revived.groups, prompts, strict=True)]


class Draws:
    """The open groups of a run and those of them that wait to be issued."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._open: dict[int, Draw] = {}
        self._again: set[int] = set()
        self._fresh: deque[Prompt] = deque()  # taken from the stream, no groups yet
        self._next_group = 0

    def begin(self, stream: Stream, revived: Sequence[Draw] = (), next_group: int = 0) -> None:
        """The data is there. The draws that a resume revives wait first, in group order; new ones follow as
        `next_group` and on."""
        self._stream, self._next_group = stream, next_group
        for draw in revived:
            self._open[draw.group] = draw
            self._again.add(draw.group)

    def __getitem__(self, group: int) -> Draw:
        return self._open[group]

    def open(self) -> list[Draw]:
        """Every open group, in group order."""
        return [self._open[group] for group in sorted(self._open)]

    @property
    def stream_ended(self) -> bool:
        return self._stream is not None and self._stream.ended and not self._fresh

    @property
    def waiting(self) -> bool:
        """Whether an open group waits to be issued again."""
        return bool(self._again)

    @property
    def coming_back(self) -> int:
        """Draws that wait for another attempt and hold no slot meanwhile."""
        return sum(not self._open[group].lost for group in self._again)

    def available(self, count: int) -> bool:
        """Whether `count` draws can be issued now, or fewer because the stream has ended."""
        assert self._stream is not None
        while len(self._again) + len(self._fresh) < count and (prompt := self._stream.take()) is not None:
            self._fresh.append(prompt)
        return len(self._again) + len(self._fresh) >= count or self._stream.ended

    def again(self) -> list[Draw]:
        """The draws to be done again, in group order. One that finds no replica does not hold the others up."""
        return [self._open[group] for group in sorted(self._again)]

    def fresh(self) -> Iterator[Draw]:
        """New groups, as long as a prompt is ready and the group before was issued."""
        while self._fresh or (self.available(1) and self._fresh):
            group = self._next_group
            yield Draw(group, self._fresh[0])
            if group == self._next_group:
                return

    def issued(self, draw: Draw) -> None:
        if draw.group == self._next_group:
            self._next_group += 1
            self._open[draw.group] = draw
            self._fresh.popleft()
        self._again.discard(draw.group)
        draw.forget_result()
        draw.lost, draw.begun, draw.parked = False, draw.parked, None

    def lost(self, group: int, parked: Payload | None = None) -> None:
        """The holder of the group is gone; the same draw is issued again, and goes on from what is `parked`."""
        draw = self._open[group]
        draw.forget_result()
        draw.lost, draw.parked = True, parked
        self._again.add(group)

    def rejected(self, group: int, holder: str = "") -> bool:
        """This draw, of the replica `holder`, cannot be used. True: the prompt is drawn again. False: it had its
        attempts and is set aside."""
        draw = self._open[group]
        draw.attempt += 1
        draw.avoids = holder
        draw.forget_result()
        draw.lost, draw.parked = False, None
        if draw.attempt >= STRIKES:
            return False
        self._again.add(group)
        return True

    def surplus(self, group: int) -> Draw:
        """The group is not wanted, its prompt is: it comes back with its attempt, as a new group, before the stream."""
        old = self._open[group]
        self.ended(group)
        draw = self._open[self._next_group] = Draw(self._next_group, old.prompt, old.attempt)
        self._again.add(draw.group)
        self._next_group += 1
        return draw

    def ended(self, group: int) -> None:
        """The group was trained, filtered or set aside."""
        del self._open[group]
        self._again.discard(group)
