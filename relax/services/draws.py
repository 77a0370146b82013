"""Which prompt is sampled next: draws that must be done again first, in group order, then the stream.

A group keeps its id and its prompt through every attempt. Pure bookkeeping: no clock, no message.
"""

import heapq
from dataclasses import dataclass

from relax.data import Prompt, PromptStream

# After this many rejected draws a prompt is set aside.
STRIKES = 3


@dataclass(slots=True)
class Draw:
    """An open group. `lost` means that it holds its slot in the gate and only its replica is gone."""

    group: int
    prompt: Prompt
    attempt: int = 0
    lost: bool = False


class Draws:
    """The open groups of a run and those of them that wait to be issued."""

    def __init__(self, stream: PromptStream) -> None:
        self._stream = stream
        self._open: dict[int, Draw] = {}
        self._again: list[int] = []
        self._fresh: list[Draw] = []  # taken from the stream, not issued yet
        self._next_group = 0

    def __getitem__(self, group: int) -> Draw:
        return self._open[group]

    @property
    def stream_ended(self) -> bool:
        return self._stream.ended and not self._fresh

    @property
    def rejected_waiting(self) -> int:
        """Draws that wait for another attempt and hold no slot meanwhile."""
        return sum(not self._open[group].lost for group in self._again)

    def available(self, count: int) -> bool:
        """Whether `count` draws can be issued now, or fewer because the stream has ended."""
        while len(self._again) + len(self._fresh) < count and (draw := self._take()) is not None:
            self._fresh.append(draw)
        return len(self._again) + len(self._fresh) >= count or self._stream.ended

    def next(self) -> Draw | None:
        """The draw that is to be issued next; None while no prompt is ready. It stays next until `issued`."""
        if self._again:
            return self._open[self._again[0]]
        return self._fresh[0] if self.available(1) and self._fresh else None

    def issued(self, draw: Draw) -> None:
        if self._again and self._again[0] == draw.group:
            heapq.heappop(self._again)
            draw.lost = False
        else:
            self._open[draw.group] = self._fresh.pop(0)

    def lost(self, group: int) -> None:
        """The holder of the group is gone; the same draw is issued again."""
        self._open[group].lost = True
        heapq.heappush(self._again, group)

    def rejected(self, group: int) -> bool:
        """This draw cannot be used. True: the prompt is drawn again. False: it had its attempts and is set aside."""
        draw = self._open[group]
        draw.attempt += 1
        if draw.attempt >= STRIKES:
            return False
        heapq.heappush(self._again, group)
        return True

    def ended(self, group: int) -> None:
        """The group was trained, filtered or set aside."""
        del self._open[group]

    def _take(self) -> Draw | None:
        prompt = self._stream.take()
        if prompt is None:
            return None
        self._next_group += 1
        return Draw(self._next_group - 1, prompt)
