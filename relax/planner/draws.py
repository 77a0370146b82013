"""What is sampled, in which order, and how long it becomes: exactly what the run itself would draw."""

from collections import deque
from dataclasses import dataclass, replace

from relax.data.seeds import sample_seed
from relax.data.stream import epoch_order
from relax.simulation.lengths import LengthModel


class Lengths:
    """Response lengths of each draw, in tokens: a function of (seed, epoch, prompt id, sample index, attempt).

    One object serves every setting of a sweep, so they draw the same lengths and differ in nothing but the schedule.
    """

    def __init__(
        self, model: LengthModel, *, seed: int, prompts: int, samples: int, longest: int, epochs: int | None = None
    ) -> None:
        """`prompts` is the size of the dataset, `longest` the limit on a response."""
        self.total = None if epochs is None else prompts * epochs
        self._model, self._seed, self._prompts, self._samples, self._longest = model, seed, prompts, samples, longest
        self._orders: dict[int, list[int]] = {}
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}

    def prompt(self, place: int) -> tuple[int, int]:
        """(epoch, prompt id) at a place of the stream, which goes through the epochs one after the other."""
        epoch, index = divmod(place, self._prompts)
        order = self._orders.get(epoch)
        if order is None:
            order = self._orders[epoch] = epoch_order(self._seed, epoch, self._prompts).tolist()
        return epoch, order[index]

    def of(self, place: int, attempt: int = 0) -> tuple[int, ...]:
        """Tokens of each sample."""
        known = self._known.get((place, attempt))
        if known is None:
            epoch, prompt_id = self.prompt(place)
            draw, longest = self._model.draw, self._longest
            seeds = (sample_seed(self._seed, epoch, prompt_id, i, attempt) for i in range(self._samples))
            known = self._known[place, attempt] = tuple(min(draw(seed), longest) for seed in seeds)
        return known


@dataclass(slots=True)
class Draw:
    """A draw of the prompt at `place` of the stream, as group number `group`; not by the replica that it `avoids`."""

    group: int
    place: int
    attempt: int = 0
    avoids: str = ""


class Draws:
    """Which draw is issued next: those that must be done again, in group order, each where it can be, then prompts that
    came back, then the stream, of `total` prompts (None: endless)."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._again: dict[int, Draw] = {}
        self._returned: deque[Draw] = deque()
        self._place = self._group = 0

    @property
    def stream_ended(self) -> bool:
        return self._total is not None and self._place >= self._total

    @property
    def waiting(self) -> int:
        """Prompts that are not new and wait to be issued."""
        return len(self._again) + len(self._returned)

    def redrawn(self) -> list[Draw]:
        """The draws that must be done again, in group order."""
        return [self._again[group] for group in sorted(self._again)]

    def next(self) -> Draw | None:
        """The first of the other draws; it stays the first until it is `issued`."""
        if self._returned:
            return replace(self._returned[0], group=self._group)
        return None if self.stream_ended else Draw(self._group, self._place)

    def issued(self, draw: Draw) -> None:
        if self._again.pop(draw.group, None) is not None:
            return
        self._group += 1
        if self._returned:
            self._returned.popleft()
        else:
            self._place += 1

    def again(self, draw: Draw, holder: str) -> None:
        """The prompt, drawn by the replica `holder`, is drawn anew, as the same group."""
        self._again[draw.group] = Draw(draw.group, draw.place, draw.attempt + 1, holder)

    def give_back(self, draws: list[Draw]) -> None:
        """These prompts come back to the head of the queue; the same draw, as another group."""
        self._returned.extendleft(reversed(draws))
